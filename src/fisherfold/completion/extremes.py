"""Values so far from all others that they rule the scale of a fit.

Values are divided by their standard deviation s, and in float32 nothing below s/1000 can be told from noise. One value
of 100,000 among ratings makes s a thousand ratings wide: what the others differ by is lost. Such fits are made in
float64, and said, because the value itself is most often a mistake and draws its row and column along in any precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fisherfold.warn import warn

# So many values are enough to know where most of them lie.
SAMPLE = 2**17

# Most values: all but a twentieth at either end, and of a Gaussian so many standard deviations wide.
_MOST, _WIDTH = (0.05, 0.95), 3.29

# The spread of most values is this part of the scale, or less, where others rule it.
_RULED = 1 / 30


def sampled(values: NDArray[Any], size: int = SAMPLE) -> NDArray[Any]:
    """Some values, spread over all of them.

    Args:
        values: the values.
        size: about how many; at most twice as many are returned.

    Returns:
        A view of them.
    """
    return values[:: max(1, len(values) // size)]


def furthest(sample: NDArray[Any], low: float, high: float) -> tuple[float, float, float, float]:
    """The value that lies furthest from most others.

    Args:
        sample: some of the values, at least one.
        low: the least of all.
        high: the largest of all.

    Returns:
        Between which two most values lie, that value, and how many of their spreads it is away from them; 0 if they
        have none.

    Example:
        >>> furthest(np.append(np.arange(100.0), 1000.0), 0.0, 1000.0)[:3]
        (5.0, 95.0, 1000.0)
    """
    first, last = (float(value) for value in np.quantile(sample, _MOST))
    spread = last / _WIDTH - first / _WIDTH
    far = high if high / 2 - last / 2 > first / 2 - low / 2 else low
    return first, last, far, abs(far / spread - (last if far == high else first) / spread) if spread > 0 else 0.0


def resolving(
    sample: NDArray[Any], low: float, high: float, scale: float, dtype: torch.dtype,
    where: Callable[[float], str] = lambda _: "",
) -> torch.dtype:  # fmt: skip
    """The dtype in which most values can be told from each other; a warning names one that is too far from them.

    Args:
        sample: some of the values.
        low: the least of all.
        high: the largest of all.
        scale: what they will be divided by.
        dtype: what was asked for.
        where: says of a value where it stands, for the warning.

    Returns:
        ``dtype``, or float64 where it is too coarse.

    Example:
        >>> values = np.append(np.arange(100.0) % 5, 3.0)
        >>> resolving(values, values.min(), values.max(), values.std(), torch.float32)
        torch.float32
    """
    if not len(sample):
        return dtype
    first, last, far, times = furthest(sample, low, high)
    spread = last / _WIDTH - first / _WIDTH
    if not spread < _RULED * scale or times * _RULED < 1:
        return dtype
    warn(
        f"most values lie between {first:.6g} and {last:.6g}, but {far:.6g}{where(far)} is {times:,.0f} times their "
        "spread away from them: it rules the scale of the fit, which is made in float64; take it out if it is a "
        "mistake, or fit logarithms",
    )
    return torch.float64
