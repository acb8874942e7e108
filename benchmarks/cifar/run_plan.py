"""Work through a list of training runs, several processes at a time, until the time is up.

Finished runs are skipped, interrupted ones resume from their checkpoints. Processes are forked from
one that has read the images. On an NVIDIA GPU they share the device by MPS, whose control daemon is
started where it is there.
"""

from __future__ import annotations

import os

# a process that asks for GPUs cannot fork otherwise
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import multiprocessing
import shutil
import subprocess
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.cifar import data, train

# seconds between calls of ``each``
PAUSE = 5.0


def share_device() -> None:
    """Start the control daemon of MPS, if this machine has one."""
    if shutil.which("nvidia-cuda-mps-control"):
        done = subprocess.run(["nvidia-cuda-mps-control", "-d"], capture_output=True, check=False)
        print("MPS:", (done.stdout + done.stderr).decode().strip() or "started", flush=True)


def work(
    runs: Sequence[Sequence[str]],
    processes: int,
    until: float,
    each: Callable[[], None] = lambda: None,
) -> int:
    """Train with each list of arguments, and return how many are left at the time ``until``.

    ``each`` is called every few seconds.
    """
    parser = ArgumentParser()
    train.options(parser)
    waiting = [given for given in map(parser.parse_args, runs) if not train.ended(Path(given.out))]
    for dataset, split in {(given.dataset, given.split) for given in waiting}:
        data.load_images(dataset, test=split == "test")
    fork = multiprocessing.get_context("fork")
    active = []
    called = time.monotonic()
    while (waiting or active) and time.monotonic() < until:
        while waiting and len(active) < processes:
            active.append(fork.Process(target=_run, args=(waiting.pop(0), processes)))
            active[-1].start()
        active = [process for process in active if process.is_alive()]
        if time.monotonic() > called + PAUSE:
            each()
            called = time.monotonic()
        time.sleep(0.2)
    for process in active:
        process.terminate()
    return len(waiting) + len(active)


def _run(given: Namespace, processes: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    train.main(given)
