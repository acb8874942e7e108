"""Data frames of pandas, polars, pyarrow and dicts: to NumPy columns and back.

``columns_of(X)`` takes one apart, ``make_frame(frame_kind(X), {"user": ids})`` makes one of X's
library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fisherfold.tables.ids import as_array, is_missing, objects

Array = npt.NDArray[Any]
FRAMES = ("pandas", "polars", "pyarrow", "dict")


def frame_kind(X: Any) -> str | None:
    """Tell which kind of data frame something is."""
    module = type(X).__module__.partition(".")[0]
    if type(X).__name__ == "LazyFrame":
        raise TypeError("X must be a data frame, got a LazyFrame; pass X.collect()")
    if hasattr(X, "columns") and hasattr(X, "dtypes"):
        return "polars" if module == "polars" else "pandas"
    if hasattr(X, "column_names") and hasattr(X, "to_pylist"):
        return "pyarrow"
    return "dict" if isinstance(X, dict) else None


def names_of(X: Any) -> list[Any]:
    """Give the names of the columns of a data frame."""
    kind = frame_kind(X)
    if kind is None:
        raise TypeError(
            f"a data frame of pandas, polars or pyarrow is expected, got {type(X).__name__}"
        )
    return list(X) if kind == "dict" else list(X.column_names if kind == "pyarrow" else X.columns)


def columns_of(X: Any) -> dict[Any, Array]:
    """Take a data frame apart."""
    names = names_of(X)
    if twice := [name for k, name in enumerate(names) if name in names[:k]]:
        raise ValueError(f"the column {twice[0]!r} occurs twice in the data frame")
    columns = {name: as_array(X[name]) for name in names}
    if (
        len(sizes := {name: len(column) for name, column in columns.items()})
        and len(set(sizes.values())) > 1
    ):
        raise ValueError(f"the columns must have one length, got {sizes}")
    return columns


def make_frame(kind: str | None, columns: Mapping[str, Any]) -> Any:
    """Make a data frame of a given kind."""
    plain = {
        name: values.tolist() if values.dtype == object else values
        for name, values in columns.items()
    }
    if kind == "pandas":
        import pandas

        return pandas.DataFrame(plain)
    if kind == "polars":
        import polars

        return polars.DataFrame(plain)
    if kind == "pyarrow":
        import pyarrow

        return pyarrow.table(plain)
    return dict(columns)


def numbers(values: Any, name: str) -> npt.NDArray[np.float64]:
    """Convert one column of real numbers; None, ``pandas.NA`` and masks become NaN."""
    if np.ma.isMaskedArray(values):
        values = np.ma.filled(values.astype(np.float64), np.nan)
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    try:
        array = as_array(values) if hasattr(values, "to_numpy") else np.asarray(values)
    except ValueError:  # of different lengths: what is no number is named below
        array = objects(list(values))
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if array.dtype.kind in "fiub":
        return array.astype(np.float64, copy=False)
    if array.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: {name} must be real numbers")
    if array.dtype.kind not in "OUS":
        raise ValueError(f"{name} must hold numbers, got dtype {array.dtype}")
    return np.array(
        [_number(value, position, name) for position, value in enumerate(array.tolist())],
        dtype=np.float64,
    )


def _number(value: Any, position: int, name: str) -> float:
    try:
        return np.nan if is_missing(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{name} must hold numbers, got {value!r} at position {position}"
        ) from None
