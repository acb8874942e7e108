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
from fisherfold.tables.frames import columns_of, frame_kind
from fisherfold.tables.ids import as_array, is_missing
from fisherfold.tables.roles import role_of
from fisherfold.warn import warn

Floats = npt.NDArray[np.float64]
SEPARATOR = "|"
_MOST_CATEGORIES, _MOST_COLUMNS, _MOST_ENTRIES = 1000, 4000, 2 * 10**8


@dataclass(frozen=True)
class FeatureColumns:
    """Encoded features.

    Attributes:
        ids: the id of each line.
        table: one line per id, centred.
        encoder: how they were encoded.
    """

    ids: Any
    table: Floats
    encoder: FeatureEncoder

    @property
    def names(self) -> list[str]:
        """The names of the features."""
        return [each.name for each in self.encoder.parts]

    @property
    def groups(self) -> npt.NDArray[np.int64]:
        """Which feature each column of the table comes from."""
        return np.repeat(np.arange(len(self.names)), [each.width for each in self.encoder.parts])

    def of(self, codes: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.float32]:
        """The table of all members, zero (the mean) for those without features."""
        found = np.zeros((n, self.table.shape[1]), dtype=np.float32)
        found[codes] = self.table
        return found


@dataclass(frozen=True)
class Encoding:
    """How one feature becomes columns of numbers.

    Attributes:
        name: of the feature.
        words: its categories, one column each; empty for numbers.
        center: what is subtracted from each column.
        spread: what numbers are divided by.
        several: whether a text may hold several categories.
    """

    name: str
    words: tuple[str, ...]
    center: tuple[float, ...]
    spread: float = 1.0
    several: bool = False

    @property
    def width(self) -> int:
        """The number of columns."""
        return len(self.center)

    def encode(self, column: npt.NDArray[Any], what: str) -> Floats:
        """The columns of some members."""
        if not self.words:
            numbers = _as_numbers(column, what)
            if numbers is None:
                raise ValueError(f"{what} must hold numbers or dates, as in the fit")
            missing = np.isnan(numbers)
            if missing.any():
                warn(f"{what}: {counted(int(missing.sum()), 'missing number')} set to the mean")
            return np.where(missing, 0.0, (numbers - self.center[0]) / self.spread)[:, None]
        place = {word: k for k, word in enumerate(self.words)}
        found = np.zeros((len(column), len(self.words)))
        for line, value in enumerate(_as_texts(column)):
            known = [place[word] for word in _words(value, self.several) if word in place]
            found[line, known] = 1.0
        return found - np.array(self.center)


@dataclass(frozen=True)
class FeatureEncoder:
    """How a table of features is encoded, learnt from that of the fit."""

    parts: tuple[Encoding, ...]
    is_matrix: bool = False  # whether it was a pair (ids, matrix)

    @property
    def width(self) -> int:
        """The number of columns."""
        return sum(each.width for each in self.parts)

    def encode(self, features: Any, side: str, id_name: str | None = None) -> FeatureColumns:
        """Encode other members as those of the fit were."""
        what = f"{side}_features"
        ids, columns = read_features(features, side, id_name)
        if missing := [each.name for each in self.parts if each.name not in columns]:
            raise ValueError(f"{what} must have the features of the fit, {missing[0]!r} is missing")
        tables = [each.encode(columns[each.name], f"{what} {each.name!r}") for each in self.parts]
        return FeatureColumns(ids, np.concatenate(tables, axis=1), self)

    def to_json(self) -> dict[str, Any]:
        """What a model file keeps."""
        return {"parts": [vars(each) for each in self.parts], "is_matrix": self.is_matrix}

    @classmethod
    def from_json(cls, given: Any) -> FeatureEncoder:
        """Take back what ``to_json`` gave."""
        try:
            parts = tuple(
                Encoding(
                    str(each["name"]),
                    tuple(map(str, each["words"])),
                    tuple(map(float, each["center"])),
                    float(each["spread"]),
                    bool(each["several"]),
                )
                for each in given["parts"]
            )
        except (LookupError, TypeError) as error:
            raise ValueError(f"its encoders are not a table of features ({error})") from None
        if any(each.words and len(each.words) != each.width for each in parts):
            raise ValueError("its encoders have other numbers of words than of columns")
        return cls(parts, bool(given.get("is_matrix")))


def encode_features(features: Any, side: str, id_name: str | None = None) -> FeatureColumns:
    """Encode the features of rows or of columns.

    Example:
        >>> frame = {"item": ["a", "b", "c"], "genre": ["Drama|War", "Drama", "War"], "year": [1990, 2000, 2010]}
        >>> found = encode_features(frame, "column", "item")
        >>> found.names, found.groups.tolist(), found.table.round(2).tolist()[0]
        (['genre', 'year'], [0, 0, 1], [0.33, 0.33, -1.22])
    """
    what = f"{side}_features"
    ids, columns = read_features(features, side, id_name)
    if (different := len(set(map(str, ids)))) < len(ids):
        raise ValueError(
            f"{what} must have one line for each id, there are {different} ids in {len(ids)} lines"
        )
    learnt = {name: _learn(name, column, f"{what} {name!r}") for name, column in columns.items()}
    parts = tuple(each for each in learnt.values() if each is not None)
    if dropped := [name for name, each in learnt.items() if each is None]:
        warn(
            f"{what}: {', '.join(dropped)} left out: the same for all, or no category that two members share"
        )
    if not parts:
        raise ValueError(f"{what} has no feature that differs between members")
    encoder = FeatureEncoder(parts, isinstance(features, tuple))
    if encoder.width > _MOST_COLUMNS:
        raise ValueError(
            f"{what} has {encoder.width} encoded columns, more than {_MOST_COLUMNS}; leave some out"
        )
    tables = [each.encode(columns[each.name], f"{what} {each.name!r}") for each in parts]
    return FeatureColumns(ids, np.concatenate(tables, axis=1), encoder)


def read_features(
    features: Any, side: str, id_name: str | None = None
) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    """The ids of a table of features, and its columns by name."""
    what = f"{side}_features"
    if frame_kind(features) is not None:
        columns = {str(name): column for name, column in columns_of(features).items()}
        if not columns:
            raise ValueError(f"{what} has no columns")
        key = _id_column(columns, side, id_name)
        index = getattr(features, "index", None)
        plain = type(index).__name__ == "RangeIndex" and getattr(index, "name", None) is None
        if key is None and index is not None and not plain:
            return as_array(index), columns
        key = next(iter(columns)) if key is None else key
        return columns.pop(key), columns
    if not (isinstance(features, tuple) and len(features) == 2):
        raise TypeError(
            f"{what} must be a data frame with a column of ids, or a pair (ids, matrix), got {type(features).__name__}"
        )
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
    return ids, {str(k): dense[:, k] for k in range(dense.shape[1])}


def _id_column(columns: dict[str, Any], side: str, id_name: str | None) -> str | None:
    """The column of ids: that of the fit, or the only one with a usual name."""
    if id_name in columns:
        return id_name
    usual = [name for name in columns if role_of(name) == side]
    return usual[0] if len(usual) == 1 else None


def with_numbers(frame: Any, id_name: str, side: str = "column") -> dict[str, Any]:
    """The columns of a table that was read as text: ids as those of ratings, numbers and dates as numbers."""
    import polars as pl

    from fisherfold.tables.readers import ids
    from fisherfold.tables.times import seconds

    key = _id_column(dict.fromkeys(frame.columns), side, id_name) or frame.columns[0]
    found = {key: ids(frame[key])}
    for name in frame.columns:
        column = frame[name]
        if name != key and column.dtype == pl.String:
            column = column.set(column.str.strip_chars() == "", None)
            number = seconds(column)
            if number.null_count() == column.null_count() < len(column):
                column = number.fill_null(float("nan"))
        if name != key:
            found[name] = (
                column.to_numpy()
                if column.dtype != pl.String
                else np.array(column.to_list(), dtype=object)
            )
    return found


def _learn(name: str, column: npt.NDArray[Any], what: str) -> Encoding | None:
    """How a feature is encoded; None if it says nothing."""
    numbers = _as_numbers(column, what)
    if numbers is not None:
        if np.isinf(numbers).any():
            infinite = counted(int(np.isinf(numbers).sum()), "infinite number")
            raise ValueError(f"{what} must be finite, got {infinite}")
        if np.isnan(numbers).all():
            return None
        size = float(np.nanmax(np.abs(numbers))) or 1.0  # squares stay in range
        center, spread = float(np.nanmean(numbers / size)), float(np.nanstd(numbers / size))
        # a missing number is set to the mean, and counts in the spread
        spread *= float(np.sqrt(1 - np.isnan(numbers).mean()))
        if spread <= 1e-9:
            return None
        return Encoding(name, (), (size * center,), size * spread)
    values = _as_texts(column)
    several = any(SEPARATOR in value for value in values if value is not None)

    def words(value: str | None) -> list[str]:
        return _words(value, several)

    if len(values) < 2 or not any(map(words, values)):
        return None
    # of categories that all have there is nothing to learn, nor of those that one member has
    counter = CountVectorizer(analyzer=words, binary=True, max_features=_MOST_CATEGORIES)
    table = counter.fit_transform(values)
    count = np.asarray(table.sum(0)).ravel()
    kept = np.flatnonzero((count > 1) & (count < len(values)))
    if not len(kept):
        return None
    names = counter.get_feature_names_out()[kept]
    shares = tuple((count[kept] / len(values)).tolist())
    return Encoding(name, tuple(map(str, names)), shares, 1.0, several)


def _words(value: str | None, several: bool) -> list[str]:
    found = [] if value is None else value.split(SEPARATOR) if several else [value]
    return [word.strip() for word in found if word.strip()]


def _as_numbers(column: npt.NDArray[Any], what: str) -> Floats | None:
    """A column of numbers or dates in float64, NaN where one is missing; None for text."""
    if column.dtype.kind == "M":
        seconds = column.astype("datetime64[s]").astype(np.float64)
        return np.where(np.isnat(column), np.nan, seconds)
    if column.dtype.kind in "fiub":
        return column.astype(np.float64)
    values = [None if is_missing(value) else value for value in column.tolist()]
    given = [value for value in values if value is not None]
    if given and all(isinstance(value, (int, float)) for value in given):
        return np.array([np.nan if v is None else float(v) for v in values])
    if given and all(isinstance(value, date) for value in given):  # also with a time zone
        return _dates(values)
    return None


def _as_texts(column: npt.NDArray[Any]) -> list[str | None]:
    """One category, or several from a list."""
    found: list[str | None] = []
    for value in column.tolist():
        if is_missing(value):
            found.append(None)
        elif isinstance(value, (list, tuple, np.ndarray)):
            found.append(SEPARATOR.join(map(str, value)))
        else:
            found.append(str(value))
    return found


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
