"""Runs of a figure in several processes: each makes its own plan, makes runs and records them as files.

The processes are spawned, not forked, because torch's threads do not survive a fork. Nothing but the place of a run
travels; the recorded files are the result, so that stopping at any time loses the runs under way and nothing else.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch

from fisherfold.reproduce.figures import Place, Runner, Spread
from fisherfold.reproduce.plans import FigurePlan

_runner: list[Runner | Exception] = []


@contextmanager
def workers(source: Callable[[], FigurePlan], folder: Path, *, jobs: int, fresh: bool = False) -> Iterator[Spread]:
    """Processes that make runs of a figure.

    Args:
        source: makes the plan; must be picklable, such as a function of a module or a partial of one.
        folder: the folder of the figure; runs are recorded in ``runs`` below it.
        jobs: how many processes.
        fresh: make recorded runs again.

    Yields:
        What ``run_figure`` takes as ``spread``.
    """
    with processes(jobs, _load, (source, folder / "runs", fresh, jobs)) as pool:
        yield lambda places: pool.imap_unordered(_make, places)


@contextmanager
def processes(jobs: int, start: Callable[..., None], arguments: tuple[Any, ...]) -> Iterator[Pool]:
    """Spawned processes that leave Ctrl-C to their parent and end with the block.

    Args:
        jobs: how many.
        start: what each does first.
        arguments: for ``start``.

    Yields:
        The pool.
    """
    context = multiprocessing.get_context("spawn")
    with _interrupts_ignored():
        pool = context.Pool(jobs, _begin, (start, arguments))
    # leaving the block ends the processes, at an interrupt too
    try:
        yield pool
    finally:
        _end(pool)


def _end(pool: Pool) -> None:
    """Terminate the processes, and insist: one that is about to wait for work sleeps through a single signal."""
    numbers = [worker.pid for worker in pool._pool]  # type: ignore[attr-defined]
    gone = threading.Event()

    def insist() -> None:
        while not gone.wait(1.0):
            for number in numbers:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGTERM)

    threading.Thread(target=insist, daemon=True).start()
    try:
        pool.terminate()
        pool.join()
    finally:
        gone.set()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started here ignore Ctrl-C from their first moment on: it is the parent's business."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    # one that leaves on its own must not be told so again amid its clean-up, which would end in a trace
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    start(*arguments)


def _leave(*_: Any) -> None:
    # the parent's SIGTERM must still run the clean-up of half-written files, which another one must not disturb
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def _load(source: Callable[[], FigurePlan], record: Path, fresh: bool, jobs: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    try:
        _runner[:] = [Runner(source(), record, fresh, lambda _: None)]
    except Exception as error:
        # a pool starts a worker that fails here again and again; the first run reports it instead
        _runner[:] = [error]


def _make(place: Place) -> Place:
    index, step, seed = place
    (runner,) = _runner
    if isinstance(runner, Exception):
        raise runner
    runner.run(runner.plan.methods[index], step, seed)
    return place
