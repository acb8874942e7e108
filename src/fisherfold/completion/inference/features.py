"""Features of rows and columns as a table of numbers: categories encoded, numbers standardised.

A data frame has ids in one column (that with the name of the ids in fit, also as index, or the first) and features in
the others:

- numbers and dates are standardised; missing ones are set to the mean, with a warning;
- text becomes one column of zeros and ones for each category that at least two members have; missing text has none;
- text with ``|`` in it holds several categories, as in ``Action|Comedy``; lists do too.

A pair ``(ids, matrix)`` of ids and a NumPy or scipy matrix is taken as it is, every column a feature of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
from sklearn.feature_extraction.text import CountVectorizer

from fisherfold.plain import counted
from fisherfold.tables.frames import columns_of, frame_kind, names_of
from fisherfold.tables.ids import as_array, is_missing
from fisherfold.warn import warn

Floats = npt.NDArray[np.float64]
SEPARATOR = "|"
_MOST_CATEGORIES, _MOST_COLUMNS, _MOST_ENTRIES = 1000, 4000, 2 * 10**8


@dataclass(frozen=True)
class FeatureColumns:
    """Encoded features."""

    ids: Any  # the id of each line
    table: Floats  # one line per id, centred
    groups: npt.NDArray[np.int64]  # which feature each column of the table comes from
    names: list[str]  # of the features

    def of(self, codes: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.float32]:
        """The table of all members, zero (the mean) for those without features."""
        found = np.zeros((n, self.table.shape[1]), dtype=np.float32)
        found[codes] = self.table
        return found


def encode_features(features: Any, side: str, id_name: str | None = None) -> FeatureColumns:
    """Encode the features of rows or of columns.

    Example:
        >>> frame = {"item": ["a", "b", "c"], "genre": ["Drama|War", "Drama", "War"], "year": [1990, 2000, 2010]}
        >>> found = encode_features(frame, "column", "item")
        >>> found.names, found.groups.tolist(), found.table.round(2).tolist()[0]
        (['genre', 'year'], [0, 0, 1], [0.33, 0.33, -1.22])
    """
    what, key = f"{side}_features", "ids"
    if frame_kind(features) is not None:
        if id_name and getattr(
            getattr(features, "index", None), "name", None
        ) == id_name not in names_of(features):
            features = features.reset_index()
        columns = {str(name): column for name, column in columns_of(features).items()}
        if not columns:
            raise ValueError(f"{what} has no columns")
        key = id_name if id_name in columns else next(iter(columns))
        ids = columns.pop(key)
        parts = {name: _encode(column, f"{what} {name!r}") for name, column in columns.items()}
    elif isinstance(features, tuple) and len(features) == 2:
        ids, matrix = features
        if not scipy.sparse.issparse(matrix):
            matrix = np.asarray(matrix)
        if matrix.ndim != 2 or matrix.shape[0] != len(ids):
            raise ValueError(
                f"{what} must be {len(ids)} ids and a matrix of as many lines, got shape {matrix.shape}"
            )
        if matrix.shape[0] * matrix.shape[1] > _MOST_ENTRIES or matrix.shape[1] > _MOST_COLUMNS:
            raise ValueError(
                f"{what} has {matrix.shape[0]} x {matrix.shape[1]} entries; at most {_MOST_COLUMNS} columns and "
                f"{_MOST_ENTRIES:,} entries can be used, reduce them first (for example with TruncatedSVD)"
            )
        dense = matrix.toarray() if scipy.sparse.issparse(matrix) else matrix
        if dense.dtype.kind not in "fiub":
            raise ValueError(
                f"the matrix of {what} must hold numbers, got dtype {dense.dtype}; use a data frame"
            )
        parts = {
            str(k): _standardised(dense[:, k].astype(np.float64), f"{what} {k}")
            for k in range(dense.shape[1])
        }
    else:
        raise TypeError(
            f"{what} must be a data frame with a column of ids, or a pair (ids, matrix), got {type(features).__name__}"
        )
    kept = {name: part for name, part in parts.items() if part.shape[1]}
    if dropped := [name for name in parts if name not in kept]:
        warn(
            f"{what}: {', '.join(dropped)} left out: the same for all, or no category that two members share"
        )
    if not kept:
        raise ValueError(f"{what} has no feature that differs between members")
    if (different := len(set(map(str, ids)))) < len(ids):
        raise ValueError(
            f"{what} must have one line for each id, {key!r} has {different} in {len(ids)} lines"
        )
    table = np.concatenate(list(kept.values()), axis=1)
    if table.shape[1] > _MOST_COLUMNS:
        raise ValueError(
            f"{what} has {table.shape[1]} encoded columns, more than {_MOST_COLUMNS}; leave some out"
        )
    groups = np.repeat(np.arange(len(kept)), [part.shape[1] for part in kept.values()])
    return FeatureColumns(ids, table, groups, list(kept))


def with_numbers(frame: Any, id_name: str) -> dict[str, Any]:
    """The columns of a table that was read as text, those of numbers and dates as numbers."""
    import polars as pl

    from fisherfold.tables.times import seconds

    key = id_name if id_name in frame.columns else frame.columns[0]
    found = {}
    for name in frame.columns:
        column = frame[name]
        if column.dtype == pl.String:
            column = column.set(column.str.strip_chars() == "", None)
            number = seconds(column)
            if name != key and number.null_count() == column.null_count() < len(column):
                column = number.fill_null(float("nan"))
        found[name] = (
            column.to_numpy()
            if column.dtype != pl.String
            else np.array(column.to_list(), dtype=object)
        )
    return found


def _encode(column: npt.NDArray[Any], what: str) -> Floats:
    if column.dtype.kind == "M":
        column = np.where(
            np.isnat(column), np.nan, column.astype("datetime64[s]").astype(np.float64)
        )
    if column.dtype.kind in "fiub":
        return _standardised(column.astype(np.float64), what)
    values = column.tolist()
    given = [value for value in values if not is_missing(value)]
    if given and all(isinstance(value, (int, float)) for value in given):
        return _standardised(
            np.array([np.nan if is_missing(v) else float(v) for v in values]), what
        )
    if given and all(
        isinstance(value, date) for value in given
    ):  # also with a time, and a time zone
        return _standardised(
            _dates([None if is_missing(value) else value for value in values]), what
        )
    return _categories([None if is_missing(value) else _joined(value) for value in values])


def _joined(value: Any) -> str:
    """One category, or several from a list."""
    return (
        SEPARATOR.join(map(str, value))
        if isinstance(value, (list, tuple, np.ndarray))
        else str(value)
    )


def _standardised(column: Floats, what: str) -> Floats:
    if np.isinf(column).any():
        raise ValueError(
            f"{what} must be finite, got {counted(int(np.isinf(column).sum()), 'infinite number')}"
        )
    missing = np.isnan(column)
    if missing.all():
        return np.zeros((len(column), 0))
    if missing.any():
        warn(f"{what}: {counted(int(missing.sum()), 'missing number')} set to the mean")
        column = np.where(missing, np.nanmean(column), column)
    off = column - column.mean()
    spread = off.std()
    return (
        (off / spread)[:, None]
        if spread > 1e-9 * max(1.0, float(np.abs(column).max()))
        else off[:, None][:, :0]
    )


def _categories(values: list[str | None]) -> Floats:
    several = any(SEPARATOR in value for value in values if value is not None)

    def words(value: str | None) -> list[str]:
        found = [] if value is None else value.split(SEPARATOR) if several else [value]
        return [word.strip() for word in found if word.strip()]

    if len(values) < 2 or not any(map(words, values)):
        return np.zeros((len(values), 0))
    # of categories that all have there is nothing to learn, nor of those that one member has
    counter = CountVectorizer(analyzer=words, binary=True, max_features=_MOST_CATEGORIES)
    table = counter.fit_transform(values).toarray().astype(np.float64)
    count = table.sum(0)
    return np.asarray((table - table.mean(0))[:, (count > 1) & (count < len(values))])


def as_times(values: Any, count: int) -> Floats:
    """Times as numbers: seconds for dates and ISO text, any unit for numbers."""
    array = np.asarray(values) if isinstance(values, (list, tuple)) else as_array(values)
    if array.dtype.kind == "O" and len(array):
        given = [None if is_missing(value) else value for value in array.tolist()]
        if all(isinstance(value, (int, float, type(None))) for value in given):
            array = np.array(given, dtype=np.float64)
        else:  # dates with a time zone, or text
            array = _dates(given)
    elif array.dtype.kind == "U":
        array = _dates(array.tolist())
    elif array.dtype.kind == "M":
        array = np.where(
            np.isnat(array), np.nan, array.astype("datetime64[us]").astype(np.float64) / 1e6
        )
    if array.dtype.kind not in "fiu":
        raise ValueError(
            f"time must hold numbers or dates, got dtype {array.dtype} (the first is {array[0]!r})"
        )
    if array.shape != (count,):
        raise ValueError(
            f"time must have one entry per rating, got shape {array.shape} for {count} ratings"
        )
    found = array.astype(np.float64)
    if not np.isfinite(found).all():
        raise ValueError(
            f"time must be finite, got {counted(int((~np.isfinite(found)).sum()), 'missing time')}"
        )
    return found


def _dates(values: list[Any]) -> Floats:
    import polars as pl

    from fisherfold.tables.times import seconds

    try:
        found = seconds(pl.Series(values)).to_list()
    except (TypeError, pl.exceptions.PolarsError):
        found = [None] * len(values)
    if unread := [
        value
        for value, number in zip(values, found, strict=True)
        if number is None and value is not None
    ]:
        raise ValueError(
            f"time must hold numbers, dates, or text as 2024-05-31 18:00, got {unread[0]!r}"
        )
    return np.array(found, dtype=np.float64)
