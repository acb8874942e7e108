"""The derivative of a function of one number from its values, with a bound on its error.

Central differences with two steps of Richardson extrapolation,

    D(t) = (f(t) - f(-t)) / 2t = f'(0) + a t² + b t⁴ + O(t⁶),

over steps of many sizes. Large steps have truncation errors, small ones rounding errors σ/t; between them D is level.
Neither f''' nor σ is known, and σ is far above the precision of the numbers where f computes in a lower one inside. So
both are measured, by how far neighbouring D lie apart: a window of neighbours is as good as its own spread and as the σ
that all smaller windows have shown. The search goes from small steps to large ones and ends where a window contradicts
the smaller ones, so that what f looks like from afar is not taken for its derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

# no power of two: values of f that are rounded would be rounded alike at all steps, and agree on what is wrong
_RATIO = 0.43
_STEPS = 28
_WINDOW = 4
_POWERS = (2, 4)
_CONTRADICTION = 10.0
_SINGLE = 2.0**-23  # the precision that a loss may have inside, whatever numbers it returns


def derivative(f: Callable[[float], float], *, longest: float, rounding: float) -> tuple[float, float]:
    """Measure f'(0)."""
    steps = [longest * _RATIO**k for k in range(_STEPS)]
    return _level(steps, f(0.0), [f(t) for t in steps], [f(-t) for t in steps], rounding)


def _level(
    steps: Sequence[float], here: float, ahead: Sequence[float], behind: Sequence[float], rounding: float
) -> tuple[float, float]:
    """Where differences of the values ahead and behind are level, and how level they are there."""
    odd = [(a - b) / 2 for a, b in zip(ahead, behind, strict=True)]
    found = _extrapolated([o / t for o, t in zip(odd, steps, strict=True)])
    quantum = _quantum(here, [*ahead, *behind])
    value, error, blur = math.nan, math.inf, rounding
    for first in reversed(range(len(found) - _WINDOW + 1)):
        window = sorted(found[first : first + _WINDOW])
        used = slice(first, first + _WINDOW + len(_POWERS))
        if not all(map(math.isfinite, window)):
            break
        if 0.0 in odd[used]:  # the step may be too short for f to show it
            blur = max(blur, quantum)
        spread, shortest = window[-1] - window[0], steps[used][-1]
        size = spread + blur / shortest
        if abs(window[_WINDOW // 2] - value) > _CONTRADICTION * (error + size):
            break
        if size < error:
            value, error = window[_WINDOW // 2], size
        blur = max(blur, spread * shortest)
    return value, error


def _extrapolated(differences: list[float]) -> list[float]:
    for power in _POWERS:
        share = _RATIO**power
        differences = [(short - share * long) / (1 - share) for long, short in pairwise(differences)]
    return differences


def _quantum(here: float, values: list[float]) -> float:
    """The smallest change that f has shown."""
    return min((abs(v - here) for v in values if v != here and math.isfinite(v)), default=_SINGLE * abs(here))
