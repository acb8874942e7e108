"""One thread for small problems: a second one costs more in hand-overs than it brings, and changes the rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

from fisherfold.estimators.completion_fit import threads


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, in PyTorch and in the BLAS of NumPy and SciPy, while the block runs.

    Yields:
        Nothing.
    """
    with threads(1), threadpool_limits(limits=1):
        yield
