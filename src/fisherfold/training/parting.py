"""Where two ways of training part: settings that act late leave the epochs before as they are.

Images may be left unmixed from some epoch on, and weights moved towards growing loss from another; up to the first
epoch that two settings train differently, one run is both.
"""

from __future__ import annotations

from typing import Any

from fisherfold.training.options import Settings

LATE = frozenset({"mixed_until", "ascent", "ascent_scales", "ascent_start", "ascent_parts"})


def first_difference(one: Settings, other: Settings) -> int:
    """The first epoch that two settings train differently.

    Args:
        one: settings.
        other: the same, apart from those that may act late.

    Returns:
        Its number, counted from 0; the number of all epochs where there is none.

    Raises:
        ValueError: if they differ in anything that acts from the start.
    """
    named = other.as_json()
    early = [name for name, value in one.as_json().items() if value != named[name] and name not in LATE | {"preset"}]
    if early:
        raise ValueError(f"an ending may change {', '.join(sorted(LATE))}; {early[0]} acts from the start")
    epochs = range(one.epochs)
    return next((epoch for epoch in epochs if _manner(one, epoch) != _manner(other, epoch)), one.epochs)


def _manner(settings: Settings, epoch: int) -> tuple[Any, ...]:
    uphill = (settings.ascent, settings.ascent_scales, settings.ascent_parts)
    return settings.mixes_at(epoch), uphill if settings.ascends_at(epoch) else None
