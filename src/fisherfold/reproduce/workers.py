"""Several processes: each call of a function in one of them, results as they are done.

Processes are spawned, since torch's threads do not survive a fork. A worker that is killed ends the
whole run with an error; what was recorded until then is read again by the next one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """A pool of processes that starts with the first call."""

    def __init__(self, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            jobs, mp_context=context, initializer=_begin, initargs=(jobs,)
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Call a picklable function on every item; yields results as they are done."""
        try:
            for call in as_completed([self._pool.submit(function, item) for item in items]):
                yield call.result()
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process was killed (out of memory?); run again to continue"
            ) from None


def _begin(jobs: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
