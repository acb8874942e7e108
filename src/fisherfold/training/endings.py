"""Several endings of one run: settings that act late are tried from where they begin to, not from the start.

A trunk is trained once; where an ending first differs from it, a branch goes on with the ending's settings, and the
trunk without them. Each has the log of a whole run, the epochs of the trunk included, and their comparison is one of
pairs: all that came before is the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fisherfold.files import make_folder
from fisherfold.plain import counted
from fisherfold.training.log import RunLog
from fisherfold.training.parting import first_difference
from fisherfold.training.run import Run
from fisherfold.training.train import Job, log_name, new_job, record, train_epoch


def train_endings(
    trunk: Run,
    endings: Sequence[dict[str, Any]],
    folder: Path,
    *,
    until: float = math.inf,
    beside: Callable[[], int] = lambda: 0,
    say: Callable[[str], None] = print,
) -> list[RunLog]:
    """Train a run, and from where they begin, its endings. Nothing is resumed: what was cut off is trained again.

    Args:
        trunk: fresh.
        endings: settings to replace, one branch each, as ``first_difference`` allows.
        folder: of the logs; made if it is not there.
        until: stop after the epoch in which ``time.monotonic()`` passes this.
        beside: how many runs other processes have on the device at the moment.
        say: called with a line for each run that has ended.

    Returns:
        The logs of the branches, in the order of their beginnings, and last that of the trunk; those cut off have no
        end, and those not begun are left out, as all are that would begin where the trunk has diverged.

    Raises:
        ValueError: if the trunk is not fresh, or an ending trains no epoch differently from it or is given twice.
    """
    if trunk.done_epochs:
        raise ValueError(f"the trunk must be fresh, it has {counted(trunk.done_epochs, 'epoch')} behind it")
    chosen = [replace(trunk.settings, **ending) for ending in endings]
    starts = [first_difference(trunk.settings, settings) for settings in chosen]
    for ending, settings, start in zip(endings, chosen, starts, strict=True):
        if start == trunk.settings.epochs:
            raise ValueError(f"the ending {ending} trains no epoch differently from the run itself")
        if chosen.count(settings) > 1:
            raise ValueError(f"the ending {ending} is given twice")
    stem = new_job(trunk, _path(trunk, make_folder(folder)))
    jobs: list[Job] = []
    for start in sorted({*starts, trunk.settings.epochs}):
        _advance(stem, start, until, beside)
        if stem.log.ended or trunk.done_epochs < start:
            break
        for settings in (s for s, begins in zip(chosen, starts, strict=True) if begins == start):
            branch = trunk.branch(settings)
            job = new_job(branch, _path(branch, folder))
            job.log.epochs = list(stem.log.epochs)
            _advance(job, settings.epochs, until, beside)
            say(_account(job))
            jobs.append(job)
    say(_account(stem))
    return [job.log for job in [*jobs, stem]]


def _advance(job: Job, epoch: int, until: float, beside: Callable[[], int]) -> None:
    """Train a run up to an epoch, to its end or until the time is up."""
    while job.run.done_epochs < epoch and not job.log.ended and time.monotonic() < until:
        record(job, train_epoch([job], beside)[0])


def _path(run: Run, folder: Path) -> Path:
    return folder / log_name(run.pool.dataset, run.model_name, run.settings, run.seed, run.pool.split, None)


def _account(job: Job) -> str:
    return f"{job.path.stem}: {job.log.ended or 'cut off'}, best {job.log.best:.2f}, last {job.log.last:.2f}"
