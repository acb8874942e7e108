"""Where the seconds before the second epoch of a CIFAR run go: one process, one run, one line per phase.

    PYTHONPATH=src python benchmarks/gpu/cifar_start.py --model vgg16bn --preset mkfac --eager

Random images of CIFAR's size, unless ``--data`` reads CIFAR-100. Each phase ends with a wait for the device; phases
further in are part of the line above them. Start it in a fresh process each time: the second run of a process is warm.
"""

from __future__ import annotations

import time

START = time.perf_counter()

import argparse  # noqa: E402
import functools  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import ExitStack, contextmanager  # noqa: E402
from typing import Any  # noqa: E402
from unittest.mock import patch  # noqa: E402

import torch  # noqa: E402
from cifar_speed import random_pool  # noqa: E402

import fisherfold.optim.curvature as curvature  # noqa: E402
import fisherfold.optim.groups as groups  # noqa: E402
import fisherfold.optim.on_spheres as on_spheres  # noqa: E402
import fisherfold.optim.statistics as statistics  # noqa: E402
import fisherfold.training.run as run_module  # noqa: E402
from fisherfold.training import ImagePool, Run, settings  # noqa: E402

WITHIN = (
    (run_module, "build_model"),
    (run_module, "build_optimizer"),
    (groups, "find_scale_invariant"),
    (on_spheres, "carry_over"),
    (statistics, "add_batches"),
    (curvature.Curvature, "fold"),
    (curvature.Curvature, "invert"),
    (run_module.Run, "_capture"),
)
depth = 0


def wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Print the seconds of a block, on the wall and on all cores, behind those of the phases within."""
    global depth
    wait()
    wall, cores = time.perf_counter(), time.process_time()
    depth += 1
    try:
        yield
    finally:
        depth -= 1
        wait()
        seconds = f"{time.perf_counter() - wall:9.2f} {time.process_time() - cores:9.2f}"
        print(f"{'  ' * depth + name:34} {seconds}", flush=True)


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with phase(name):
            return function(*arguments, **options)

    return call


def one_epoch(run: Run) -> None:
    with phase("augmentation, refresh"):
        run.begin_epoch()
    for index in range(min(5, run.steps_per_epoch)):
        with phase(f"step {index + 1}"):
            run.step(index)
    with phase("other steps"):
        for index in range(5, run.steps_per_epoch):
            run.step(index)
    with phase("judgement"):
        run.judge()
        run.end_epoch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wrn16_4")
    parser.add_argument("--preset", default="mkfac")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--batches", type=int, default=50, help="of a refresh")
    parser.add_argument("--data", action="store_true", help="read CIFAR-100 instead of drawing images")
    parser.add_argument("--eager", action="store_true", help="do not compile the network")
    parser.add_argument("--heuristics", action="store_true", help="let cuDNN choose its kernels without trying them")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = not given.heuristics
    print(f"{'phase':34} {'wall s':>9} {'CPU s':>9}\n{'imports':34} {time.perf_counter() - START:9.2f}")
    with phase("device"):
        torch.zeros(1, device=given.device)
    with phase("images"):
        if given.data:
            pool = ImagePool.load("cifar100", device=given.device, images=given.images)
        else:
            pool = random_pool(given.device, given.images)
    chosen = settings(given.preset, "cifar10", given.model, refresh_batches=given.batches)
    with ExitStack() as patches:
        for place, name in WITHIN:
            patches.enter_context(patch.object(place, name, timed(name.strip("_"), getattr(place, name))))
        with phase("building the run"):
            run = Run(chosen, given.model, pool, compiled=not given.eager)
        with phase("first epoch"):
            one_epoch(run)
    with phase("second epoch"):
        one_epoch(run)


if __name__ == "__main__":
    main()
