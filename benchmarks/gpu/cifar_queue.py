"""Train the cells of the CIFAR table one group after the other until the time is up; started again, it goes on.

    PYTHONPATH=src python benchmarks/gpu/cifar_queue.py --minutes 25 --folder results/cifar --side-by-side 3
    nvidia-cuda-mps-control -d && PYTHONPATH=src python benchmarks/gpu/cifar_queue.py --minutes 25 --processes 4

Without ``--plan`` the order is that of importance: SGD, MKFAC, SGDG and KFAC on both networks for CIFAR-10, then
CIFAR-100, then the other presets; one seed of everything before the next seed of anything. With ``--search`` the rates
of the paper's baselines are searched in the paper's sets instead. A plan is a file of JSON lines
(``fisherfold.training.plan``) that may be changed while the queue is at work: a run that is taken out of it is left at
the end of its epoch.
Neighbours in the order that share a data set, a split and a network are trained side by side in one process; with
``--processes``, several processes each train runs of their own, which needs NVIDIA's MPS for their kernels to overlap;
each of them takes its share of the CPU cores. Where machines come and go, a folder named by ``TORCHINDUCTOR_CACHE_DIR``
that is carried from one to the next saves compiling again. Nothing but PyTorch, NumPy, safetensors and Pillow is
needed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path

import torch

from fisherfold.training.plan import default_plan, grid_plan, read_plan
from fisherfold.training.queue import Queue, Tally
from fisherfold.training.train import pick_device


def share_of_cores(processes: int) -> int:
    """Threads of each process: with more of them than cores, those that spin keep the others from their work."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def work(given: argparse.Namespace, number: int, tally: Tally) -> None:
    torch.set_num_threads(min(torch.get_num_threads(), share_of_cores(given.processes)))
    mark = f"[{number}] " if given.processes > 1 else ""
    queue = Queue(
        given.folder, device=pick_device(given.device), minutes=given.minutes, width=given.side_by_side,
        tally=tally, images=given.images, compiled=not given.eager,
        checkpoint_every=given.checkpoint_every, say=lambda line: print(mark + line, flush=True),
    )  # fmt: skip
    table = grid_plan if given.search else partial(default_plan, given.seeds)
    queue.work(table if given.plan is None else partial(read_plan, given.plan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--folder", type=Path, default=Path("results/cifar"))
    parser.add_argument("--side-by-side", type=int, help="runs per process; 3, or 1 with several processes")
    parser.add_argument("--processes", type=int, default=1, help="that share the device and the plan")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--search", action="store_true", help="search the paper's sets of rates, train nothing else")
    parser.add_argument("--plan", type=Path, help="a file of JSON lines instead of the default order")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="epochs; 0 only when the time is up")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--images", type=int, help="only so many training images, for a trial")
    parser.add_argument("--eager", action="store_true", help="do not compile the networks")
    given = parser.parse_args()
    if given.side_by_side is None:
        given.side_by_side = 3 if given.processes == 1 else 1
    if given.processes == 1:
        work(given, 0, Tally())
        return
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(share_of_cores(given.processes)))
    tally = Tally()
    workers = [
        multiprocessing.get_context("spawn").Process(target=work, args=(given, number, tally))
        for number in range(given.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit("a worker ended with an error, see above; the same command goes on")


if __name__ == "__main__":
    main()
