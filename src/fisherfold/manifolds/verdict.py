"""What a check returns: a number, what it should have been, and a sentence; and how slopes are measured.

An error that behaves like ``C tᵏ`` is a straight line of slope k in log-log axes, but only between two ends: large
steps are not yet asymptotic, small ones drown in rounding. ``slope`` finds the straight piece by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check. It is true when the check passed.

    Attributes:
        name: the property that was checked.
        measured: the number found.
        expected: the number it was compared with.
        passed: whether the comparison holds.
        message: what was compared, in a sentence.

    Examples:
        >>> verdict = Verdict("slope", 2.99, 3.0, True, "the error falls like t^2.99, expected t^3")
        >>> bool(verdict)
        True
        >>> print(verdict)
        passed: slope: the error falls like t^2.99, expected t^3
    """

    name: str
    measured: float
    expected: float
    passed: bool
    message: str

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return f"{'passed' if self.passed else 'FAILED'}: {self.name}: {self.message}"


def at_most(name: str, measured: float, bound: float) -> Verdict:
    """The verdict that a number does not exceed a bound."""
    return Verdict(name, measured, bound, measured <= bound, f"measured {measured:.2e}, expected at most {bound:.2e}")


def slope_at_least(name: str, measured: float, expected: float, *, slack: float = 0.2) -> Verdict:
    """The verdict that an error falls at least as fast as a power of the step."""
    found = "is only rounding" if math.isinf(measured) else f"falls like t^{measured:.2f}"
    passed = measured >= expected - slack
    return Verdict(name, measured, expected, passed, f"the error {found}, expected t^{expected:g} or faster")


def slope(steps: Sequence[float], errors: Sequence[float], noise: float, *, bend: float = 0.05) -> float:
    """The slope of ``log error`` over ``log step`` on the longest straight piece above the rounding noise.

    Examples:
        >>> steps = [10.0**-k for k in range(1, 9)]
        >>> round(slope(steps, [t**3 + 1e-16 for t in steps], 1e-15), 3)
        3.0
        >>> slope(steps, [1e-17] * 8, 1e-15)
        inf
    """
    if not all(map(math.isfinite, errors)):
        return math.nan
    points = [(math.log(t), math.log(e)) for t, e in zip(steps, errors, strict=True) if e > 10 * noise]
    if len(points) < 3:
        return math.inf
    local = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    best = local[:1]
    for start in range(len(local)):
        stop = start + 1
        while stop < len(local) and max(local[start : stop + 1]) - min(local[start : stop + 1]) <= bend:
            stop += 1
        # Among equally long pieces the one at smaller steps is nearer to the limit.
        if stop - start >= len(best):
            best = local[start:stop]
    return sum(best) / len(best)
