"""Tables of numbers and categories as they come, as one array of numbers with NaN for holes.

Frames of pandas and polars and arrays are read; a category becomes its number among the sorted
categories of its column. What was given is kept, so that a filled table has its values, types and
kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fisherfold.plain import counted
from fisherfold.tables.frames import columns_of, frame_kind, make_frame, names_of, numbers
from fisherfold.tables.ids import is_missing, objects
from fisherfold.warn import warn

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Categories = Mapping[int, list[Any]]
_MOST_CATEGORIES = 100
_FRAMES = ("pandas", "polars")


@dataclass(frozen=True)
class TableGiven:
    """A table that was read.

    Attributes:
        numbers: the table, categories as their numbers, NaN for holes and for categories unknown to
            the fit.
        holes: where there was nothing.
        columns: the columns as given; None if the table is a plain array of numbers.
        source: what was given.
    """

    numbers: npt.NDArray[Any]
    holes: Mask
    columns: list[npt.NDArray[Any]] | None = None
    source: Any = None

    def with_filled(self, filled: npt.NDArray[Any], categories: Categories) -> Any:
        """The table with its holes filled from numbers, in the kind in which it was given."""
        if self.columns is None:
            return filled
        done = []
        for j, column in enumerate(self.columns):
            if j not in categories:
                done.append(filled[:, j])
                continue
            found = objects(column.tolist())
            where = np.flatnonzero(self.holes[:, j])
            found[where] = objects([categories[j][k] for k in filled[where, j].astype(int)])
            done.append(_narrowed(found))
        if (kind := frame_kind(self.source)) in _FRAMES:
            frame = make_frame(kind, dict(zip(names_of(self.source), done, strict=True)))
            return frame.set_index(self.source.index) if kind == "pandas" else frame
        return np.column_stack(done)


def _narrowed(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Objects that are all numbers as an array of numbers."""
    if len(column) and all(type(value) in (int, float) for value in column):
        return np.array(column.tolist())
    return column


def columns_given(X: Any) -> list[npt.NDArray[Any]]:
    """The columns of a frame or of an array."""
    if frame_kind(X) in _FRAMES:
        return list(columns_of(X).values())
    array = np.asarray(X)
    if array.ndim != 2:
        raise ValueError(f"Expected 2D array, got an array of shape {array.shape} instead")
    return list(array.T)


def missing_in(column: npt.NDArray[Any], missing: Any) -> Mask:
    """Where a column holds nothing, or the value that stands for nothing."""
    if column.dtype.kind in "fiub":
        found = np.isnan(column) if column.dtype.kind == "f" else np.zeros(len(column), dtype=bool)
        number = isinstance(missing, (int, float)) and not isinstance(missing, bool)
        return found | (column == missing) if number else found
    return np.array([_stands_for_nothing(value, missing) for value in column.tolist()], dtype=bool)


def _stands_for_nothing(value: Any, missing: Any) -> bool:
    return is_missing(value) or (type(value) is type(missing) and value == missing)


def nominal_columns(X: Any, missing: Any) -> list[int]:
    """The columns of text, of truth values and of the type ``category``."""
    if frame_kind(X) in _FRAMES:
        columns = list(columns_of(X).values())
        types = [str(kind).lower() for kind in X.dtypes]
    else:
        array = np.asarray(X)
        if array.ndim != 2 or array.dtype.kind not in "OUS":
            return []
        columns = list(array.T)
        types = ["object"] * len(columns)
    return [
        j
        for j, (column, kind) in enumerate(zip(columns, types, strict=True))
        if kind.startswith(("category", "categorical", "enum")) or _is_nominal(column, missing)
    ]


def _is_nominal(column: npt.NDArray[Any], missing: Any) -> bool:
    if column.dtype.kind in "bUS":
        return True
    if column.dtype.kind != "O":
        return False
    given = column[~missing_in(column, missing)]
    return any(isinstance(value, (str, bool, np.bool_)) for value in given)


def chosen_columns(chosen: Any, X: Any, missing: Any, count: int) -> list[int]:
    """The numbers of the columns that hold categories: found by type, or named."""
    if chosen is None:
        return []
    if isinstance(chosen, str):
        return nominal_columns(X, missing)
    names = names_of(X) if frame_kind(X) in _FRAMES else []
    found = set()
    for one in chosen:
        if isinstance(one, str):
            if one not in names:
                raise ValueError(f"categorical names column {one!r}, which the table does not have")
            found.add(names.index(one))
        elif not -count <= one < count:
            raise ValueError(f"categorical names column {one}, the table has {count} columns")
        else:
            found.add(int(one) % count)
    return sorted(found)


def read_mixed(
    X: Any, columns: Sequence[int], known: Categories, missing: Any
) -> tuple[TableGiven, dict[int, list[Any]]]:
    """Read a table of which some columns hold categories, known ones or new ones."""
    given = columns_given(X)
    names = names_of(X) if frame_kind(X) in _FRAMES else list(range(len(given)))
    holes = np.column_stack([missing_in(column, missing) for column in given])
    table = np.full(holes.shape, np.nan)
    categories = dict(known)
    for j, column in enumerate(given):
        here = ~holes[:, j]
        what = f"column {names[j]!r}"
        if j not in columns:
            table[here, j] = numbers(column[here], what)
            if np.isinf(table[:, j]).any():
                raise ValueError(f"{what} must be finite, got infinity")
            continue
        values = [_plain(value) for value in column[here].tolist()]
        if j not in known:
            categories[j] = _sorted_categories(values, what)
        table[here, j] = _numbered(values, categories[j], what)
    return TableGiven(table, holes, given, X), categories


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sorted_categories(values: list[Any], what: str) -> list[Any]:
    different = set(values)
    if not different:
        raise ValueError(f"{what} of categories holds no value; leave it out")
    if len(different) > _MOST_CATEGORIES:
        raise ValueError(
            f"{what} has {len(different)} categories, at most {_MOST_CATEGORIES} can be used; "
            "merge the rare ones, or leave it out"
        )
    try:
        return sorted(different)
    except TypeError:
        raise ValueError(f"{what} of categories mixes text and numbers; make it one kind") from None


def _numbered(values: list[Any], categories: list[Any], what: str) -> Floats:
    place = {value: float(k) for k, value in enumerate(categories)}
    found = np.array([place.get(value, np.nan) for value in values])
    if (unknown := int(np.isnan(found).sum())) > 0:
        first = next(value for value in values if value not in place)
        warn(
            f"{what}: {counted(unknown, 'value')} not seen in fit, the first is {first!r}; "
            "they are kept and tell nothing about the other columns"
        )
    return found


def checked_weights(weights: Any, shape: tuple[int, ...]) -> Floats:
    """Weights of rows or of entries as a table of them."""
    found = np.asarray(weights)
    if found.dtype.kind not in "fiub" or found.shape not in (shape[:1], shape):
        raise ValueError(
            f"sample_weight must hold one number for each of {shape[0]} rows, or for each entry of "
            f"the {shape[0]} x {shape[1]} table, got shape {found.shape} of {found.dtype}"
        )
    found = found.astype(np.float64)
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise ValueError("sample_weight must hold finite numbers of at least 0")
    if not found.any():
        raise ValueError("every weight of sample_weight is zero, some must be positive")
    return np.array(np.broadcast_to(found.reshape(shape[0], -1), shape))


def extend_frame(frame: Any, columns: Mapping[str, npt.NDArray[Any]]) -> Any:
    """A frame with more columns, of its own kind."""
    if frame_kind(frame) == "pandas":
        return frame.assign(**columns)
    import polars

    return frame.with_columns(**{name: polars.Series(x) for name, x in columns.items()})


def check_categories(stored: Any, sizes: npt.NDArray[np.int64]) -> dict[int, list[Any]]:
    """The categories of a file, if they fit the sizes of its columns."""
    good = isinstance(stored, dict) and all(
        isinstance(values, list) and all(type(v) in (str, int, float, bool) for v in values)
        for values in stored.values()
    )
    found = {int(j): list(values) for j, values in stored.items()} if good else {}
    counts = {int(j): int(sizes[j]) for j in np.flatnonzero(sizes)}
    if not good or {j: len(values) for j, values in found.items()} != counts:
        raise ValueError("categories are not one list for each column of categories")
    return found
