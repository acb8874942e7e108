"""Names of rows and columns: any hashable ids outside, numbers from 0 inside.

An ``IdIndex`` numbers ids in the order in which they were first added and never renumbers, so that factors stay where
they are when new ids arrive. Whole numbers and floats are looked up in a sorted array, everything else in a dictionary.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[Any]

_TABLE_SLACK = 2**20


def id_array(ids: Any, name: str) -> Ids:
    """One dimension of ids as an array of whole numbers, floats or objects.

    Args:
        ids: a sequence, array or column of a data frame.
        name: what the ids name, for messages.

    Returns:
        An array of dtype int64, uint64, float64 or object.

    Raises:
        ValueError: if an id is missing (None, NaN) or infinite.
        TypeError: if an id is not hashable.
    """
    array = ids.to_numpy() if hasattr(ids, "to_numpy") else np.asarray(ids)
    if array.dtype.kind in "iub":
        return array.astype(np.uint64 if array.dtype == np.uint64 else np.int64, copy=False)
    if array.dtype.kind == "f":
        return _float_ids(array, name)
    if array.dtype.kind in "US":
        return np.array(array.tolist(), dtype=object)
    array = np.asarray(array, dtype=object)
    for position, value in enumerate(array):
        if value is None or value != value:
            raise ValueError(f"{name} id at position {position} is missing (got {value!r})")
    try:
        for value in array:
            hash(value)
    except TypeError:
        raise TypeError(f"{name} ids must be hashable, got {type(value).__name__}") from None
    return array


def _float_ids(array: npt.NDArray[np.floating], name: str) -> Ids:
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise ValueError(f"{name} id at position {bad[0]} is missing or infinite (got {array[bad[0]]})")
    whole = array.astype(np.int64) if len(array) and np.abs(array).max() < 2**53 else None
    if whole is not None and np.array_equal(whole, array):
        return whole
    return array.astype(np.float64, copy=False)


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

    @property
    def kind(self) -> str:
        """What the ids are: ``numbers`` or ``objects``."""
        return "numbers" if self._known is None else "objects"

    def add(self, ids: Ids) -> None:
        """Add the ids that are new.

        Args:
            ids: ids as made by ``id_array``.
        """
        if self._known is None and (ids.dtype == object or (len(self.labels) and _clash(self.labels, ids))):
            self._known = {label: number for number, label in enumerate(self.labels.tolist())}
            self.labels = self.labels.astype(object)
        if self._known is not None:
            known = self._known
            for value in ids.tolist():
                known.setdefault(value, len(known))
            labels = np.empty(len(known), dtype=object)
            labels[:] = list(known)
            self.labels = labels
            return
        fresh = _unique(ids)
        fresh = fresh[self._lookup(fresh) < 0] if len(self.labels) else fresh
        self.labels = np.concatenate([self.labels, fresh]) if len(self.labels) else fresh
        self._order = np.argsort(self.labels, kind="stable")

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
        if array.dtype == object:
            return _object_numbers(array, self)
        return self._lookup(array)

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


def _object_numbers(array: Ids, index: IdIndex) -> npt.NDArray[np.int64]:
    known = {label: number for number, label in enumerate(index.labels.tolist())}
    return np.fromiter((known.get(v, -1) for v in array.tolist()), dtype=np.int64, count=len(array))


def _clash(a: Ids, b: Ids) -> bool:
    """Whether two numeric dtypes have no common exact one (uint64 with a signed or floating dtype)."""
    return a.dtype != b.dtype and np.uint64 in (a.dtype, b.dtype)


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
        label: an element of ``labels``.

    Returns:
        The same without NumPy.
    """
    return label.item() if isinstance(label, np.generic) else label


def describe(ids: Iterable[Any]) -> str:
    """What some ids look like, for messages.

    Args:
        ids: the ids.

    Returns:
        The first of them and its type.
    """
    first = plain(next(iter(ids)))
    return f"{first!r} ({type(first).__name__})"
