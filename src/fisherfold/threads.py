"""How many threads compute.

Of PyTorch alone, or of the BLAS of NumPy and SciPy too; and what a fork leaves of them.

The threads of a process do not survive ``os.fork``, and whoever waits for one in the child waits
forever. So a child computes on one thread, and reads and writes no tables if polars had started its
threads in the parent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits


@contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """Use a given number of threads of PyTorch while the block runs.

    None changes nothing, -1 takes all cores.
    """
    if n_jobs is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1 if n_jobs == -1 else n_jobs)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, in PyTorch and in the BLAS of NumPy and SciPy, while the block runs.

    For small problems a second one costs more in hand-overs than it brings, and changes the
    rounding.
    """
    with threads(1), threadpool_limits(limits=1):
        yield


_POLARS = ("polars-0", "tokio-rt", "async-exec")  # how the names of its threads start
_polars_started = False  # in this process before it forked, or in one above it
_polars_lost = False  # whether this process was forked from one in which it had


def check_polars() -> None:
    """Raise an error where polars would wait for threads that were lost in a fork."""
    if _polars_lost:
        raise RuntimeError(
            "tables cannot be read or written in a process that was forked after polars had "
            "started its threads: do it before the fork, or start processes with spawn or "
            "forkserver"
        )


def _before_fork() -> None:
    global _polars_started
    with suppress(OSError):  # not on Linux, or a thread has just ended
        names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
        _polars_started = any(name.startswith(_POLARS) for name in names)


def _after_fork() -> None:
    global _polars_lost
    _polars_lost = _polars_lost or _polars_started
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
