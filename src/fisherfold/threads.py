"""How many threads compute: of PyTorch alone, or of the BLAS of NumPy and SciPy too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


@contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """Use a given number of threads of PyTorch while the block runs; None changes nothing, -1 takes all cores."""
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

    For small problems a second one costs more in hand-overs than it brings, and changes the rounding.
    """
    with threads(1), threadpool_limits(limits=1):
        yield
