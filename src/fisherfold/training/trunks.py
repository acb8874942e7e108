"""Trials that share their first epochs: settings that act late are tried from where they begin to, not from the start.

Images may be left unmixed from some epoch on, and weights moved towards growing loss from another; up to the first
epoch that two settings train differently, one run is both. Of the trials of a search that differ in nothing else, one
leads: it is trained from the start and keeps a checkpoint wherever another parts from it, and the others wait for that
and go on from there. Each has the log of a whole run, and the runs compared have all in common that came before.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fisherfold.training.log import RunLog
from fisherfold.training.options import Settings

LATE = frozenset({"mixed_until", "ascent", "ascent_scales", "ascent_start", "ascent_parts"})


@dataclass(frozen=True)
class Start:
    """How a trial begins.

    Attributes:
        epoch: how many epochs it takes from another.
        source: the log of the other; None for a trial that begins by itself, or goes on.
        settings: of the other.
        keep: the epochs after which others part from it.
    """

    epoch: int = 0
    source: Path | None = None
    settings: Settings | None = None
    keep: frozenset[int] = frozenset()


def first_difference(one: Settings, other: Settings) -> int:
    """The first epoch that two settings train differently.

    Args:
        one: settings.
        other: settings.

    Returns:
        Its number, counted from 0, which is that of the epochs they share; all epochs where there is none.

    Example:
        >>> from fisherfold.training import settings
        >>> mixed = settings("mkfac-cutmix", "cifar100", "vgg16bn")
        >>> first_difference(mixed, settings("mkfac-cutmix", "cifar100", "vgg16bn", mixed_until=0.9))
        90
    """
    if _early(one) != _early(other):
        return 0
    epochs = range(one.epochs)
    return next((epoch for epoch in epochs if _manner(one, epoch) != _manner(other, epoch)), one.epochs)


def _early(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in settings.as_json().items() if name not in LATE | {"preset"}}


def _manner(settings: Settings, epoch: int) -> tuple[Any, ...]:
    uphill = (settings.ascent, settings.ascent_scales, settings.ascent_parts)
    return settings.mixes_at(epoch), uphill if settings.ascends_at(epoch) else None


def kept_checkpoint(log: Path, epoch: int) -> Path:
    """Where a run keeps a checkpoint for others.

    Args:
        log: of the run.
        epoch: after which it is kept.

    Returns:
        A path beside the log.
    """
    return log.with_name(f"{log.stem}.after{epoch}.safetensors")


def forget_checkpoints(log: Path) -> None:
    """Remove what a run has kept for others.

    Args:
        log: of the run.
    """
    for epoch in _checkpoints(log):
        kept_checkpoint(log, epoch).unlink(missing_ok=True)


def arrange(trials: Mapping[Path, Settings], missing: Collection[Path]) -> dict[Path, Start]:
    """How the missing ones among some trials begin.

    Args:
        trials: settings by the paths of their logs, all of one task and one seed.
        missing: those that have neither ended nor failed.

    Returns:
        The start of each that may begin or go on; the others wait for a checkpoint.
    """
    alive = [path for path in trials if path in missing]
    shared = {(a, b): first_difference(trials[a], trials[b]) for a in trials for b in alive if a != b}
    starts = {}
    for path in alive:
        parting = {shared[path, other] for other in alive if other != path and not _behind(other)}
        keep = frozenset(parting - {0, trials[path].epochs})
        if _behind(path):
            starts[path] = Start(keep=keep)
            continue
        found = [(e, other) for other in trials if other != path for e in _kept(other) if e <= shared[other, path]]
        if found:
            epoch, source = max(found, key=lambda pair: pair[0])
            starts[path] = Start(epoch, source, trials[source], frozenset(e for e in keep if e > epoch))
        elif _leader(path, alive, shared) == path:
            starts[path] = Start(keep=keep)
    return starts


def _leader(path: Path, alive: list[Path], shared: Mapping[tuple[Path, Path], int]) -> Path:
    """Whom a trial waits for: of those that it will part from, one begun already, and one that shares most."""
    family = [other for other in alive if other == path or shared[other, path] >= max(_behind(other), 1)]

    def rank(one: Path) -> tuple[bool, int]:
        return _behind(one) > 0, sum(shared[one, other] for other in family if other != one)

    return max(family, key=rank)


def _behind(log: Path) -> int:
    return len(RunLog.read(log).epochs) if log.is_file() else 0


def _kept(log: Path) -> list[int]:
    """After which of the epochs in its log a run has kept checkpoints; it may have gone back behind others."""
    return [epoch for epoch in _checkpoints(log) if epoch <= _behind(log)]


def _checkpoints(log: Path) -> list[int]:
    name = re.compile(re.escape(log.stem) + r"\.after(\d+)\.safetensors")
    return [int(found[1]) for path in log.parent.iterdir() if (found := name.fullmatch(path.name))]
