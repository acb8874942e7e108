"""The values of a matrix before a model sees them: what pairs given twice become, what is taken off and divided by."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def level_and_scale(values: npt.NDArray[np.float64], *, centred: bool) -> tuple[float, float]:
    """What to take off the values and what to divide by.

    Args:
        values: the values.
        centred: whether their mean is taken off.

    Returns:
        The mean, or zero, and the root mean square of what is left; of constant values, which have no spread, their
        size, or one.

    Example:
        >>> level_and_scale(np.array([1.0, 3.0]), centred=True), level_and_scale(np.array([4.0, 4.0]), centred=True)
        ((2.0, 1.0), (4.0, 4.0))
    """
    center = float(values.mean()) if centred else 0.0
    off = values - center
    largest = float(np.abs(off).max())
    if largest <= 1e-12 * abs(center):
        return center, abs(center) or 1.0
    # dividing first keeps the squares in range
    return center, largest * float(np.sqrt(np.mean((off / largest) ** 2)))


def joined(rows: Any, columns: Any, values: Any, rule: str) -> tuple[Any, Any, Any]:
    """Entries of which equal pairs are one, where that must be known before level and scale are taken.

    A sum is one value, not its parts, and what a later value has replaced is no value any more. All values of a mean
    were observed.

    Args:
        rows: row numbers.
        columns: column numbers.
        values: values.
        rule: the rule for pairs that occur twice.

    Returns:
        The same three, for ``sum`` and ``last`` with each pair once.

    Example:
        >>> entries = np.array([0, 1, 0]), np.array([2, 2, 2]), np.array([1.0, 5.0, 2.0])
        >>> [[part.tolist() for part in joined(*entries, rule)[::2]] for rule in ("sum", "last")]
        [[[0, 1], [3.0, 5.0]], [[0, 1], [2.0, 5.0]]]
    """
    if rule not in ("sum", "last"):
        return rows, columns, values
    order = np.lexsort((columns, rows))
    rows, columns, values = (np.asarray(part)[order] for part in (rows, columns, values))
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(rows) != 0) | (np.diff(columns) != 0)]))
    ends = np.append(starts[1:], len(values)) - 1
    return rows[starts], columns[starts], values[ends] if rule == "last" else np.add.reduceat(values, starts)
