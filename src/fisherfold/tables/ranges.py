"""Numbers whose squares leave the range of float64, or whose digits are gone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fisherfold.warn import warn

SMALLEST = 1e-100  # of the largest number of a column that is not zero: its square has digits
LARGEST = 1e100  # of any number: sums of squares are finite
_ENOUGH = 4  # digits of differences; with fewer there is a warning


def check_range(columns: npt.NDArray[Any], what: str) -> None:
    """Raise an error for a column of a table whose squares are zero or infinite."""
    if not columns.size:  # the share of a process may be empty
        return
    sizes = np.abs(columns.reshape(len(columns), -1)).max(axis=0, initial=0.0)
    outside = np.flatnonzero((sizes > LARGEST) | ((sizes > 0) & (sizes < SMALLEST)))
    if len(outside):
        column = int(outside[0])
        where = f" in column {column}" if columns.ndim > 1 else ""
        raise ValueError(
            f"{what} must be at most {LARGEST:g} in size, and some at least {SMALLEST:g}, "
            f"got {sizes[column]:g} as the largest{where}; choose another unit"
        )


def kept_digits(columns: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Count the digits of the differences in each column; infinite for a constant.

    Example:
        >>> kept_digits(np.array([[1e15, 1.0], [1e15 + 4, 2.0]])).round().tolist()
        [2.0, 15.0]
    """
    table = columns.reshape(len(columns), -1)
    size = np.abs(table).max(axis=0, initial=0.0)
    spread = np.ptp(table, axis=0) if len(table) else np.zeros(table.shape[1])
    step = np.spacing(np.maximum(size, SMALLEST))
    return np.where(spread > 0, np.log10(np.maximum(spread / step, 1.0)), math.inf)


def warn_of_lost_digits(columns: npt.NDArray[Any], what: str) -> None:
    """Warn of columns that lie so far from zero that their differences have lost most digits."""
    digits = kept_digits(columns) if columns.size else np.full(1, math.inf)
    if (digits < _ENOUGH).any():
        column = int(np.argmin(digits))
        where = f" in column {column}" if columns.ndim > 1 else ""
        left = round(digits[column])
        which = "digit" if left < 2 else f"{left} digits"
        warn(
            f"{what}{where} differ in their last {which} only, and what is learnt is as inexact: "
            "subtract a constant from them before they become floating-point numbers"
        )
