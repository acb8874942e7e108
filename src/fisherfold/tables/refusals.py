"""Features and targets that cannot be used, refused by name before a conversion fails without one or hides them."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherfold.plain import counted
from fisherfold.tables.ids import is_missing
from fisherfold.tables.inputs import arrow_as_frame

Array = NDArray[Any]


def reject_masked(values: Any, name: str) -> None:
    """Refuse masked entries, which a conversion would take for data.

    Args:
        values: an array, a list of arrays or anything else.
        name: what they are.

    Raises:
        ValueError: if an entry is masked.
    """
    for part in values if isinstance(values, (list, tuple)) else (values,):
        if np.ma.is_masked(part):
            count = int(np.ma.getmaskarray(part).sum())
            raise ValueError(f"{name} must have no missing values, {counted(count, 'entry is', 'entries are')} masked")


def reject_text(X: Any) -> None:
    """Name the column that holds text or dates, before a conversion fails without a name or makes numbers of them.

    Args:
        X: a data frame, an array or anything else.

    Raises:
        ValueError: if a column holds text that is no number, or dates.
    """
    X = arrow_as_frame(X)
    if isinstance(X, np.ndarray) or not hasattr(X, "columns"):
        if getattr(getattr(X, "dtype", None), "kind", "O") in "mM":
            raise ValueError(f"X must hold numbers, got dtype {X.dtype}")
        return
    for name in X.columns:
        column = np.asarray(X[name])
        if column.dtype.kind in "mM":
            raise ValueError(f"column {name!r} must hold numbers, got dtype {column.dtype}")
        if column.dtype.kind not in "OUS":
            continue
        for row, value in enumerate(column.tolist()):
            if isinstance(value, str) and not _is_number(value):
                raise ValueError(f"column {name!r} must hold numbers, got the text {value!r} in row {row}")
            if isinstance(value, (datetime.date, datetime.time, datetime.timedelta)):
                raise ValueError(f"column {name!r} must hold numbers, got {value!r} in row {row}")


def reject_missing_labels(y: Any) -> None:
    """Name the label that is missing, before labels are compared with it.

    Args:
        y: labels, a sequence or a column.

    Raises:
        ValueError: if one is None, NaN or ``pandas.NA``.
    """
    # a list with NaN between words would become words
    array = np.array(y, dtype=object) if isinstance(y, (list, tuple)) else np.asarray(y)
    if array.dtype != object:
        return
    for position, value in enumerate(array.reshape(-1).tolist()):
        if is_missing(value):
            raise ValueError(f"y must have no missing labels, got {value!r} at position {position}")


def reject_text_targets(y: Any) -> None:
    """Name the target that is no number, before a conversion fails without a name.

    Args:
        y: targets, one or several columns.

    Raises:
        ValueError: if one is text, or anything else that is no number.
    """
    array = np.asarray(y)
    if array.dtype.kind in "mM":
        raise ValueError(f"y must hold numbers, got dtype {array.dtype}")
    if array.dtype.kind in "OUS":
        for position, value in enumerate(array.reshape(-1).tolist()):
            if isinstance(value, (str, bytes)) or not _is_number(value):
                raise ValueError(f"y must hold numbers, got {value!r} at position {position}")


def reject_overflow(values: Array, name: str) -> None:
    """Refuse numbers whose squares are infinite.

    Args:
        values: finite numbers.
        name: what they are.

    Raises:
        ValueError: if one is too large.
    """
    largest = float(np.abs(values).max(initial=0.0))
    if largest > 1e150:
        raise ValueError(f"{name} must be of absolute value 1e150 at most, so that squares are finite, got {largest:g}")


def reject_vanishing(largest: float) -> None:
    """Refuse targets whose squares vanish, all of them.

    Args:
        largest: the absolute value of the largest target.

    Raises:
        ValueError: if it is too small, and not zero.
    """
    if 0 < largest < 1e-140:
        raise ValueError(f"y must hold values of 1e-140 at least, or zeros, so that squares are seen, got {largest:g}")


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except (ValueError, TypeError):
        return False
    return True
