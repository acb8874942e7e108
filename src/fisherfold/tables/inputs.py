"""What users hand over, turned into three arrays: row ids, column ids and values.

Accepted are pairs of ids with values, sparse matrices (explicit zeros are data), arrays and data frames with NaN where
nothing was observed, and long data frames (row, column, value). Everything wrong with them is said here, at the door.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import torch

from fisherfold.plain import counted
from fisherfold.tables.ids import Ids, as_array, id_array, objects, plain

LARGEST = 1e300  # so that the sum of many is finite


@dataclass
class Observations:
    """Observed entries.

    Attributes:
        rows: the row id of each entry.
        columns: the column id of each entry.
        values: the values in float64.
        all_rows: every row id of the table, those without an entry included.
        all_columns: the same for columns.
        is_table: whether they were given as a matrix with holes, not as a list of entries.
    """

    rows: Ids
    columns: Ids
    values: npt.NDArray[np.float64]
    all_rows: Ids
    all_columns: Ids
    is_table: bool = False


def observations(X: Any, y: Any = None) -> Observations:
    """Read a table in any of the accepted forms.

    Args:
        X: pairs of ids with ``y``; or a sparse matrix or tensor, an array or a data frame with NaN; or a data frame of
            the three columns row, column, value without missing entries.
        y: the values of the pairs.

    Returns:
        The observed entries.

    Raises:
        ValueError: if pairs and values differ in number; other faults are named by the readers of each form.
    """
    X = _sparse_of_scipy(arrow_as_frame(X))
    if y is not None:
        rows, columns = pairs(X)
        values = numbers(y, "y")
        if len(values) != len(rows):
            given = f"{counted(len(rows), 'pair')} and {counted(len(values), 'value')}"
            raise ValueError(f"X and y must have one length, got {given}")
        return _checked(Observations(rows, columns, values, rows, columns))
    if scipy.sparse.issparse(X):
        return _from_sparse(X)
    if _is_frame(X):
        return _from_frame(X)
    return _from_array(X)


def _checked(found: Observations) -> Observations:
    if len(found.values) == 0:
        raise ValueError("there are no ratings: found 0 observed entries (0 sample(s)), at least 1 is needed")
    bad = np.flatnonzero(~np.isfinite(found.values))
    if len(bad):
        k = bad[0]
        raise ValueError(
            f"the values must be finite: {len(bad)} of {len(found.values)} contain NaN or infinity, "
            f"the first is {found.values[k]} at row {plain(found.rows[k])!r}, column {plain(found.columns[k])!r}"
        )
    largest = float(np.abs(found.values).max())
    if largest > LARGEST:
        raise ValueError(f"the values must be of absolute value {LARGEST:g} at most, got {largest:g}")
    return found


def pairs(X: Any) -> tuple[Ids, Ids]:
    """Row ids and column ids of an (n, 2) table.

    Args:
        X: an array, list, or data frame with two columns.

    Returns:
        Two arrays of ids.

    Raises:
        TypeError: if the table is a sparse matrix.
        ValueError: if it does not have two columns.
    """
    X = _sparse_of_scipy(arrow_as_frame(X))
    if scipy.sparse.issparse(X):
        raise TypeError("pairs of ids cannot be a sparse matrix; hand over fit(M) without y, or an (n, 2) array of ids")
    if _is_frame(X):
        names = list(X.columns)
        if len(names) != 2:
            raise ValueError(f"X must have 2 columns (row id, column id), got {len(names)}: {names}")
        return id_array(_column(X, 0), "row"), id_array(_column(X, 1), "column")
    if isinstance(X, (list, tuple)) and _are_pairs(X):
        rows, columns = zip(*X, strict=True)
        return id_array(rows, "row"), id_array(columns, "column")
    array = np.asanyarray(X)  # with the mask of a masked array
    if array.dtype.kind == "c":
        raise ValueError("Complex data not supported: ids must be whole numbers, text or other hashable objects")
    if array.ndim == 2 and array.shape[1] == 0:
        raise ValueError(f"0 feature(s) (shape={array.shape}) while a minimum of 2 is required: row id and column id")
    if array.ndim != 2 or array.shape[1] != 2:
        size = f" (n_samples={array.shape[0]}, n_features={array.shape[1]})" if array.ndim == 2 else ""
        raise ValueError(
            f"X must have shape (n, 2) with a row id and a column id in each line, got shape {array.shape}{size}. "
            "Reshape your data, or hand over a matrix with holes as fit(M) without y"
        )
    return id_array(array[:, 0], "row"), id_array(array[:, 1], "column")


def id_names(X: Any) -> list[str] | None:
    """The names of the two columns of ids, where there are names.

    Args:
        X: pairs of ids, or a data frame of row, column and value.

    Returns:
        The names of the first two columns of a data frame whose columns are all named by text, else None.
    """
    X = arrow_as_frame(X)
    if not _is_frame(X) or not all(isinstance(name, str) for name in X.columns):
        return None
    return list(X.columns)[:2]


def _are_pairs(lines: Sequence[Any]) -> bool:
    """Whether these are lists or tuples of two ids, which can be taken one by one, as they are."""
    if not lines or not all(issubclass(kind, (list, tuple)) for kind in set(map(type, lines))):
        return False
    lengths = list(map(len, lines))
    odd = next((k for k, length in enumerate(lengths) if length != lengths[0]), None)
    if odd is not None:
        entries = counted(lengths[odd], "entry", "entries")
        raise ValueError(
            f"X must have a row id and a column id in each line, got {entries} in line {odd}: {lines[odd]!r}"
        )
    return lengths[0] == 2


def numbers(y: Any, name: str) -> npt.NDArray[np.float64]:
    """A one-dimensional float64 array of values.

    Args:
        y: the values.
        name: the argument, for messages.

    Returns:
        The array.

    Raises:
        ValueError: if the values are not one column of real numbers.
    """
    y = unmasked(y)
    array = as_array(y) if hasattr(y, "to_numpy") else _as_array(y)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if array.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: {name} must be real numbers")
    if array.dtype.kind in "fiub":
        return array.astype(np.float64, copy=False)
    if array.dtype.kind in "mM":
        raise ValueError(f"{name} must hold numbers, got dtype {array.dtype}")
    bad = next(((k, v) for k, v in enumerate(array.tolist()) if not _is_number(v)), None)
    if bad is not None:
        raise ValueError(f"{name} must hold numbers, got {bad[1]!r} at position {bad[0]}")
    if array.dtype == object:
        return np.array([np.nan if _is_hole(value) else value for value in array.tolist()], dtype=np.float64)
    return array.astype(np.float64)


def unmasked(X: Any) -> Any:
    """Masked entries as NaN, and tensors as arrays.

    Args:
        X: numbers in any form.

    Returns:
        A plain array of floats for a masked array or a real tensor, anything else as it is.

    Raises:
        TypeError: if it is a sparse tensor.

    Example:
        >>> unmasked(np.ma.array([1, 2], mask=[False, True]))
        array([ 1., nan])
    """
    if np.ma.isMaskedArray(X):
        return np.ma.filled(X.astype(X.dtype if X.dtype in (np.float32, np.float64) else np.float64), np.nan)
    if isinstance(X, torch.Tensor) and X.layout != torch.strided:
        raise TypeError(f"dense numbers are needed here, got a tensor of layout {X.layout}")
    if isinstance(X, torch.Tensor) and not X.is_complex():
        return X.detach().cpu().double().numpy()
    return X


def _as_array(y: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(y)
    except ValueError:  # of different lengths: what is no number is named later
        return objects(y)


def _is_number(value: Any) -> bool:
    """Whether this is a real number, text of one, or a missing one."""
    if isinstance(value, (complex, np.complexfloating)):
        return False
    try:
        float(np.nan if _is_hole(value) else value)
    except (ValueError, TypeError, OverflowError):
        return False
    return True


def _is_hole(value: Any) -> bool:
    return value is None or type(value).__name__ == "NAType"  # pandas.NA


def arrow_as_frame(X: Any) -> Any:
    """A table of pyarrow as a data frame: NumPy would take it for a matrix, and its ``columns`` are no names.

    Args:
        X: anything.

    Returns:
        A data frame of polars for a table of pyarrow, anything else as it is.

    Raises:
        TypeError: if it is a table that has not been read yet.
    """
    if type(X).__name__ == "LazyFrame":
        raise TypeError("X must be a data frame, got a LazyFrame; pass X.collect()")
    if not (hasattr(X, "column_names") and hasattr(X, "to_pylist")):
        return X
    import polars as pl

    return pl.from_arrow(X)


def _is_frame(X: Any) -> bool:
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def _column(X: Any, place: int) -> Any:
    """A column of a pandas or polars data frame by its place: names may occur twice."""
    return X.iloc[:, place] if hasattr(X, "iloc") else X.to_series(place)


def _sparse_of_scipy(X: Any) -> Any:
    """A sparse tensor as SciPy's matrix of the same entries; anything else as it is."""
    if not isinstance(X, torch.Tensor) or X.layout == torch.strided:
        return X
    coo = X.detach().cpu().to_sparse(layout=torch.sparse_coo).coalesce()
    if coo.sparse_dim() != 2 or coo.dense_dim() != 0:
        raise ValueError(f"a sparse tensor must be a matrix of numbers, got shape {tuple(coo.shape)}")
    values = coo.values() if coo.is_complex() else coo.values().double()  # SciPy has no half precision
    return scipy.sparse.coo_array((values.numpy(), coo.indices().numpy()), shape=tuple(coo.shape))


def _from_sparse(X: Any) -> Observations:
    """The stored entries, zeros included."""
    coo = scipy.sparse.coo_array(X)
    if coo.ndim != 2:
        raise ValueError(f"a sparse matrix must have two dimensions, got shape {coo.shape}")
    all_rows, all_columns = (np.arange(n, dtype=np.int64) for n in coo.shape)
    rows, columns = (np.asarray(c, dtype=np.int64) for c in (coo.row, coo.col))
    return _checked(Observations(rows, columns, numbers(coo.data, "the matrix"), all_rows, all_columns, True))


def _from_array(X: Any) -> Observations:
    X = unmasked(X)
    array = _as_array(X) if isinstance(X, (list, tuple)) else np.asarray(X)
    if array.ndim != 2:
        raise ValueError(
            f"a matrix with holes must have two dimensions, got shape {array.shape}. Reshape your data, "
            "or hand over pairs of ids with their values as fit(X, y)"
        )
    if array.dtype == object:
        array = numbers(array.reshape(-1), "a matrix with holes").reshape(array.shape)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"a matrix with holes must hold numbers and NaN, got dtype {array.dtype}")
    rows, columns = np.nonzero(~np.isnan(array.astype(np.float64, copy=False)))
    all_rows, all_columns = (np.arange(n, dtype=np.int64) for n in array.shape)
    return _checked(Observations(rows, columns, array[rows, columns].astype(np.float64), all_rows, all_columns, True))


def _from_frame(X: Any) -> Observations:
    """A wide data frame, or a long one: three columns and nothing missing, or ids that are no numbers."""
    names = list(X.columns)
    parts = [_column(X, place) for place in range(len(names))]
    for name, part in zip(names, parts, strict=True):
        _reject_filled(name, part)
    holes = list(map(_has_missing, parts)) if len(names) == 3 else []
    if holes == [False, False, True] and all(map(_is_whole, parts[:2])):
        # entries of which a value is missing, or a matrix: as a matrix, ids would be taken for values
        raise ValueError(
            f"column {names[2]!r} has missing values beside two columns of whole numbers: leave such lines out if "
            "these are entries (row, column, value), hand over X.to_numpy() if this is a matrix with holes"
        )
    if holes and (not any(holes) or any(map(_is_text, parts[:2]))):
        rows, columns = id_array(parts[0], "row"), id_array(parts[1], "column")
        return _checked(Observations(rows, columns, numbers(parts[2], f"column {names[2]!r}"), rows, columns))
    values = np.empty((len(X), len(names)))
    for place, name in enumerate(names):
        values[:, place] = numbers(parts[place], f"column {name!r}")
    index = getattr(X, "index", None)
    all_rows = np.arange(len(values), dtype=np.int64) if index is None else id_array(index, "row")
    all_columns = id_array(names, "column")
    rows, columns = np.nonzero(~np.isnan(values))
    seen = all_rows[rows], all_columns[columns], values[rows, columns]
    return _checked(Observations(*seen, all_rows, all_columns, is_table=True))


def _reject_filled(name: Any, column: Any) -> None:
    """Refuse a sparse column of pandas whose holes have a value: SciPy's holes, which it was made of, have none."""
    fill = plain(getattr(column.dtype, "fill_value", None))
    if not hasattr(column.dtype, "subtype") or _is_hole(fill) or fill != fill:  # NaN differs from itself
        return
    raise ValueError(
        f"column {name!r} is sparse with the fill value {fill!r}, which would be read as the value of all that is not "
        "stored: hand over X.sparse.to_coo() if only what is stored was observed, X.sparse.to_dense() if all was"
    )


def _is_whole(column: Any) -> bool:
    if hasattr(column, "isna"):
        return column.dtype.kind in "iu"
    return bool(column.dtype.is_integer())


def _is_text(column: Any) -> bool:
    return any(isinstance(value, str) for value in column.to_list())


def _has_missing(column: Any) -> bool:
    if hasattr(column, "isna"):
        return bool(column.isna().any())
    return column.null_count() > 0 or (column.dtype.is_float() and bool(column.is_nan().any()))
