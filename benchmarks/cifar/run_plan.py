"""Work through a list of training runs, several processes at a time, until the time is up.

    python benchmarks/cifar/run_plan.py plan.txt --processes 8 --minutes 25

Each line of the plan holds the arguments of train.py. Finished runs are skipped, interrupted ones resume from their
checkpoints. Processes are forked from one that has read the images. On an NVIDIA GPU start the MPS control daemon
first: processes then share the device.
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # a process that asks for GPUs otherwise cannot fork

import argparse
import multiprocessing
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import data
import torch
import train


def work(runs: Sequence[Sequence[str]], processes: int, until: float) -> int:
    """Train with each list of arguments, and return how many are left at the time ``until``."""
    waiting = [
        given for given in map(train.options().parse_args, runs) if not train.ended(Path(given.out))
    ]
    for dataset in {given.dataset for given in waiting}:
        data.load_images(dataset)
    fork, active = multiprocessing.get_context("fork"), []
    while (waiting or active) and time.monotonic() < until:
        while waiting and len(active) < processes:
            active.append(fork.Process(target=_run, args=(waiting.pop(0), processes)))
            active[-1].start()
        active = [process for process in active if process.is_alive()]
        time.sleep(0.2)
    for process in active:
        process.terminate()
    return len(waiting) + len(active)


def _run(given: argparse.Namespace, processes: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    train.main(given)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=60)
    given = parser.parse_args()
    lines = given.plan.read_text().splitlines()
    runs = [shlex.split(line) for line in lines if line and not line.startswith("#")]
    print(f"{work(runs, given.processes, time.monotonic() + 60 * given.minutes)} runs are left")


if __name__ == "__main__":
    main()
