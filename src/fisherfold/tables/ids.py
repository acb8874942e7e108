"""Names of rows and columns: any hashable ids outside, numbers from 0 inside.

Two ids are one if they are equal in Python: 1, 1.0, True and ``np.int64(1)`` are one id, 1 and "1" are two. An
``IdIndex`` numbers ids in the order in which they were first added and never renumbers, so that factors stay where they
are when new ids arrive. Whole numbers and floats are looked up in a sorted array, everything else in a dictionary.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[Any]

_TABLE_SLACK = 2**20
_EXACT = 2**53  # floats below this are as many as the whole numbers
_PLAIN = {int, bool, float, str, bytes}


def id_array(ids: Any, name: str) -> Ids:
    """One dimension of ids as an array of whole numbers, floats or objects, each id exactly as it was given.

    Args:
        ids: a sequence, array or column of a data frame.
        name: what the ids name, for messages.

    Returns:
        An array of dtype int64, uint64, float64 or object.

    Raises:
        ValueError: if an id is missing (None, NaN), infinite, or a float too large to tell whole numbers apart, or if
            there is more than one dimension.
        TypeError: if there is no sequence, or an id is not hashable.

    Example:
        >>> id_array([2**53, 2**53 + 1], "row").tolist()
        [9007199254740992, 9007199254740993]
        >>> id_array([1, "1", ("a", 1)], "row").tolist()
        [1, '1', ('a', 1)]
    """
    if isinstance(ids, (str, bytes, Mapping)) or not hasattr(ids, "__iter__"):
        raise TypeError(f"{name} ids must be a sequence, got {ids!r} ({type(ids).__name__})")
    if not (hasattr(ids, "to_numpy") or hasattr(ids, "__array__")):
        return _exact(list(ids), name)
    if np.ma.isMaskedArray(ids) and (masked := np.ma.getmaskarray(ids)).any():
        ids = np.ma.getdata(ids).astype(object)
        ids[masked] = None
    array = as_array(ids)
    if array.ndim != 1:
        raise ValueError(f"{name} ids must have one dimension, got shape {array.shape}")
    if array.dtype.kind in "iub":
        return array.astype(np.uint64 if array.dtype == np.uint64 else np.int64, copy=False)
    if array.dtype.kind == "f":
        return _float_ids(array, name)
    # elements of dates one by one: as a list, NumPy would make bare numbers of nanoseconds
    return _exact(list(array) if array.dtype.kind in "mM" else array.tolist(), name)


def as_array(column: Any) -> npt.NDArray[Any]:
    """A column of a data frame, of whatever library, as an array.

    Args:
        column: the column, or anything that NumPy knows.

    Returns:
        The array.
    """
    # an array of pyarrow refuses to_numpy where a copy is needed, for text and for truth values
    by_numpy = hasattr(column, "to_pylist") or not hasattr(column, "to_numpy")
    return np.asarray(column) if by_numpy else column.to_numpy()


def _exact(values: list[Any], name: str) -> Ids:
    """A list of ids that is not brought to one type, as NumPy would: 1 and "1" to text, large numbers to floats."""
    kinds = set(map(type, values))
    if not kinds <= _PLAIN:
        values = [plain(value) for value in values]
        kinds = set(map(type, values))
    if kinds <= {int, bool}:
        for dtype in (np.int64, np.uint64):
            with contextlib.suppress(OverflowError):
                return np.array(values, dtype=dtype)
    elif kinds <= {int, bool, float} and all(abs(value) < _EXACT for value in values):
        return _float_ids(np.array(values, dtype=np.float64), name)
    if not kinds <= {str, int, bool}:
        for position, value in enumerate(values):
            _check_id(value, position, name)
    return objects(values)


def objects(labels: list[Any]) -> Ids:
    """A list of ids as an array that does not look into them.

    Args:
        labels: the ids.

    Returns:
        An array of objects.
    """
    array = np.empty(len(labels), dtype=object)
    array[:] = labels
    return array


def _check_id(value: Any, position: int, name: str) -> None:
    here = f"{name} id at position {position} is"
    if is_missing(value):
        raise ValueError(f"{here} missing (got {value!r})")
    if isinstance(value, float) and np.isinf(value):
        raise ValueError(f"{here} infinite (got {value})")
    if isinstance(value, float) and abs(value) >= _EXACT:
        raise ValueError(
            f"{here} the float {value!r}: from 2**53 on several whole numbers become one float; "
            "hand ids over as whole numbers or text"
        )
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name} ids must be hashable, got {type(value).__name__} at position {position}") from None


def is_missing(value: Any) -> bool:
    """Whether this stands for nothing.

    Args:
        value: an id or a label.

    Returns:
        True for None, NaN, NaT and ``pandas.NA``, and for a tuple with one of them.

    Example:
        >>> is_missing(None), is_missing(float("nan")), is_missing("nan")
        (True, True, False)
    """
    if isinstance(value, tuple):
        return any(map(is_missing, value))
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError):  # pandas.NA is neither; arrays are for the next check
        return type(value).__name__ == "NAType"


def _float_ids(array: npt.NDArray[np.floating], name: str) -> Ids:
    bad = np.flatnonzero(~(np.abs(array) < _EXACT))
    if len(bad):
        _check_id(float(array[bad[0]]), int(bad[0]), name)
    whole = array.astype(np.int64)
    return whole if np.array_equal(whole, array) else array.astype(np.float64, copy=False)


class IdIndex:
    """A growing set of ids, numbered in the order of their arrival.

    Args:
        ids: the first ids, as made by ``id_array``; repeated ones count once.

    Example:
        >>> index = IdIndex(np.array(["ann", "bob", "ann"], dtype=object))
        >>> len(index), index.numbers(["bob", "eve"]).tolist()
        (2, [1, -1])
    """

    def __init__(self, ids: Ids) -> None:
        self.labels: Ids = ids[:0]
        self._order: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self._known: dict[Hashable, int] | None = None
        self.add(ids)

    @classmethod
    def restore(cls, labels: Ids) -> IdIndex:
        """The index that had these labels, with the same numbers.

        Args:
            labels: the labels in the order of their numbers.

        Returns:
            The index.

        Raises:
            ValueError: if a label occurs twice.
        """
        index = cls(labels)
        if len(index) != len(labels):
            raise ValueError(f"{len(labels) - len(index)} of {len(labels)} ids occur twice")
        if index._known is None:
            # ids that came later stand after the first ones, not in ascending order
            index.labels = labels
            index._order = np.argsort(labels, kind="stable")
        return index

    def __len__(self) -> int:
        return len(self.labels)

    def __copy__(self) -> IdIndex:
        index = IdIndex(self.labels[:0])
        vars(index).update(vars(self) | {"_known": None if self._known is None else dict(self._known)})
        return index

    @property
    def kind(self) -> str:
        """What the ids are: ``numbers`` or ``objects``."""
        return "numbers" if self._known is None else "objects"

    def add(self, ids: Ids) -> None:
        """Add the ids that are new.

        Args:
            ids: ids as made by ``id_array``.
        """
        if self._known is None and (ids.dtype == object or self._clashes(ids)):
            self._known = {label: number for number, label in enumerate(self.labels.tolist())}
            self.labels = self.labels.astype(object)
        if self._known is not None:
            known = self._known
            for value in ids.tolist():
                known.setdefault(value, len(known))
            self.labels = objects(list(known))
            return
        fresh = _unique(ids)
        fresh = fresh[self._lookup(fresh) < 0] if len(self.labels) else fresh
        self.labels = np.concatenate([self.labels, fresh]) if len(self.labels) else fresh
        self._order = np.argsort(self.labels, kind="stable")

    def _clashes(self, ids: Ids) -> bool:
        # no numeric dtype holds all of int64, uint64 and float64
        return len(ids) > 0 and len(self.labels) > 0 and ids.dtype != self.labels.dtype

    def numbers(self, ids: Any, name: str = "row or column") -> npt.NDArray[np.int64]:
        """The numbers of some ids.

        Args:
            ids: a sequence, array or column of ids.
            name: what the ids name, for messages.

        Returns:
            One number per id; -1 where the id is not known.
        """
        array = id_array(ids, name)
        if self._known is not None:
            known = self._known
            return np.fromiter((known.get(v, -1) for v in array.tolist()), dtype=np.int64, count=len(array))
        if array.dtype != self.labels.dtype and len(array):
            return _converted_numbers(array, self)
        return self._lookup(array)

    def meant(self, ids: Ids) -> Ids:
        """The ids that those of a file stand for: a file has text, and says of a number only what it looks like.

        Args:
            ids: ids as made by ``id_array``.

        Returns:
            The same, with a number in place of its text, or the text in place of a number, where that alone is known.

        Example:
            >>> IdIndex(id_array([7, "8", 2.5], "row")).meant(id_array(["7", 8, "2.5", "08"], "row")).tolist()
            [7, '8', 2.5, '08']
        """
        unknown = np.flatnonzero(self.numbers(ids) < 0)
        others = [other_form(value) for value in ids[unknown].tolist()]
        known = self.numbers(others) >= 0 if others else np.zeros(0, dtype=bool)
        if not known.any():
            return ids
        found = ids.astype(object)
        for place in np.flatnonzero(known):
            found[unknown[place]] = others[place]
        return found

    def _lookup(self, array: Ids) -> npt.NDArray[np.int64]:
        """Numbers of numeric ids: by a table if they lie close together, by bisection otherwise."""
        if len(self.labels) == 0 or len(array) == 0:
            return np.full(len(array), -1, dtype=np.int64)
        low, high = self.labels[self._order[0]], self.labels[self._order[-1]]
        close = self.labels.dtype.kind in "iu" and int(high) - int(low) < 4 * len(array) + _TABLE_SLACK
        if close and array.dtype == self.labels.dtype and array.min() >= low and array.max() <= high:
            table = np.full(int(high) - int(low) + 1, -1, dtype=np.int64)
            table[self.labels - low] = np.arange(len(self.labels))
            return table[array - low]
        place = np.searchsorted(self.labels, array, sorter=self._order)
        number = self._order[np.minimum(place, len(self._order) - 1)]
        return np.where(self.labels[number] == array, number, -1)


def other_form(value: Any) -> Any:
    """The text of a number, the number that a text is exactly, and anything else as it is.

    Args:
        value: an id.

    Returns:
        The other form of it.

    Example:
        >>> other_form("7"), other_form(7), other_form("07")
        (7, '7', '07')
    """
    if not isinstance(value, str):
        return str(value) if isinstance(value, (int, float)) else value
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(value)
            if repr(number) == value and (kind is int or abs(number) < _EXACT):
                return number
    return value


def _converted_numbers(array: Ids, index: IdIndex) -> npt.NDArray[np.int64]:
    """Numbers of ids of another dtype than the labels have: exactly, or not at all."""
    if array.dtype.kind in "iu" and index.labels.dtype.kind in "iu":
        same = array.astype(index.labels.dtype)
        return np.where((array < 0) == (same < 0), index._lookup(same), -1)
    known = {label: number for number, label in enumerate(index.labels.tolist())}
    return np.fromiter((known.get(v, -1) for v in array.tolist()), dtype=np.int64, count=len(array))


def _unique(ids: Ids) -> Ids:
    """The distinct numeric ids in ascending order; in linear time if they lie close together."""
    if ids.dtype.kind in "iu" and len(ids):
        low, high = int(ids.min()), int(ids.max())
        if high - low < 4 * len(ids) + _TABLE_SLACK:
            seen = np.zeros(high - low + 1, dtype=bool)
            seen[ids - ids.dtype.type(low)] = True
            return (np.flatnonzero(seen).astype(ids.dtype)) + ids.dtype.type(low)
    return np.unique(ids)


def plain(label: Any) -> Any:
    """An id as a plain Python object.

    Args:
        label: an id.

    Returns:
        The same without NumPy, pandas or torch; times that Python cannot hold, finer than a microsecond or in months,
        are those of NumPy.

    Example:
        >>> plain(np.int64(5)), plain((np.str_("a"), torch.tensor(2))), plain(np.datetime64("2020-02-01"))
        (5, ('a', 2), datetime.date(2020, 2, 1))
    """
    if isinstance(label, tuple) and type(label) is tuple:
        return tuple(map(plain, label))
    if isinstance(label, (np.datetime64, np.timedelta64)):
        return _plain_time(label)
    if isinstance(label, np.generic) or (isinstance(label, torch.Tensor) and label.ndim == 0):
        return label.item()
    if isinstance(label, datetime.datetime) and getattr(label, "nanosecond", None) == 0:
        return label.to_pydatetime()  # type: ignore[attr-defined]
    return _of_numpy(label) if isinstance(label, (datetime.datetime, datetime.timedelta)) else label


def _of_numpy(time: Any) -> Any:
    """A time of pandas, with nanoseconds, or a length of time, without pandas; all others as they are."""
    if is_missing(time) or getattr(time, "tzinfo", None) is not None:
        return time
    for convert in ("to_datetime64", "to_timedelta64"):
        if hasattr(time, convert):
            return _plain_time(getattr(time, convert)())
    return time


def _plain_time(label: np.datetime64 | np.timedelta64) -> Any:
    """A time of NumPy as Python has it, if it is the same."""
    found = None if np.isnat(label) else label.item()
    if isinstance(found, int):
        with contextlib.suppress(TypeError):  # months and years have no fixed length
            coarse = label.astype(f"{label.dtype.kind}8[us]")
            found = coarse.item() if coarse == label else found
    return label if isinstance(found, int) else found


def describe(ids: Iterable[Any]) -> str:
    """What some ids look like, for messages.

    Args:
        ids: the ids.

    Returns:
        The first of them and its type.
    """
    first = plain(next(iter(ids)))
    return f"{first!r} ({type(first).__name__})"
