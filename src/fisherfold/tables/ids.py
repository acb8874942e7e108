"""Ids of rows, columns and tasks: integers or text outside, positions from 0 inside.

An id is its text: 7 and ``"7"`` are one id, 7 and ``"07"`` are two. Ids that are all integers are
kept as int64, all others as text. New ids get the next positions, so that factors stay where they
are when a model grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[Any]  # int64, or an object array of str
Codes = npt.NDArray[np.int64]

_TABLE_SLACK = 2**20
_NO_INTEGER = -(2**63)
_EXACT = 2**53  # below this, a float holds an integer exactly


def as_ids(values: Any, name: str = "row") -> Ids:
    """Convert a sequence, array or data-frame column of ids.

    Example:
        >>> as_ids([3.0, 1]).tolist(), as_ids([3, "b"]).tolist()
        ([3, 1], ['3', 'b'])
    """
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name} ids must be a sequence, got {values!r} ({type(values).__name__})")
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise ValueError(
            f"{name} id at position {int(np.flatnonzero(np.ma.getmaskarray(values))[0])} is missing"
        )
    array = as_array(values)
    if array.ndim != 1:
        raise ValueError(f"{name} ids must have one dimension, got shape {array.shape}")
    if array.dtype.kind in "ib" or (array.dtype.kind == "u" and array.max(initial=0) < 2**63):
        return array.astype(np.int64, copy=False)
    if array.dtype.kind == "f" and np.isfinite(array).all():
        whole = array.astype(np.int64)
        if np.array_equal(whole, array) and np.abs(array).max(initial=0) < _EXACT:
            return whole
    found = array.tolist() if array.dtype.kind in "OUuf" else list(array)
    kinds = set(map(type, found))
    if kinds <= {int, bool}:
        try:
            return np.array(found, dtype=np.int64)
        except OverflowError:
            return objects([str(int(value)) for value in found])
    if kinds == {str}:
        return objects(found)
    texts = [_text(value, k, name) for k, value in enumerate(found)]
    return (
        objects(texts)
        if any(issubclass(kind, str) for kind in kinds)
        else as_ids(list(map(int, texts)), name)
    )


def as_array(column: Any) -> npt.NDArray[Any]:
    """Convert a list or a column of a frame to an array, with its entries as they are."""
    if isinstance(column, (list, tuple)):
        return objects(list(column))
    if hasattr(column, "to_pylist"):  # pyarrow
        return objects(column.to_pylist()) if column.null_count else np.asarray(column)
    if hasattr(column, "to_numpy"):
        return np.asarray(column.to_numpy())
    return np.asarray(column) if hasattr(column, "__array__") else objects(list(column))


def objects(labels: list[Any]) -> Ids:
    """Make an object array of a list without looking into its entries."""
    array = np.empty(len(labels), dtype=object)
    array[:] = labels
    return array


def is_missing(value: Any) -> bool:
    """Tell whether a value stands for nothing: None, NaN, NaT or ``pandas.NA``."""
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError):
        return type(value).__name__ == "NAType"


def _text(value: Any, position: int, name: str) -> str:
    """An id of a mixed sequence as text."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, str):
        return value
    if is_missing(value):
        raise ValueError(f"{name} id at position {position} is missing (got {value!r})")
    if isinstance(value, int) or (
        isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    ):
        return str(int(value))
    raise TypeError(
        f"{name} ids must be integers or text, got {value!r} ({type(value).__name__}) at position "
        f"{position}; "
        "convert them to text"
    )


class IdIndex:
    """The positions of a growing set of ids.

    Attributes:
        labels: the id at each position, int64 or text.

    Example:
        >>> index, codes = IdIndex.fit(["ann", "bob", "ann"])
        >>> len(index), codes.tolist(), index.encode(["bob", "eve"]).tolist()
        (2, [0, 1, 0], [1, -1])
        >>> index.extend(["eve"]).tolist(), index.decode([2, 0]).tolist()
        ([2], ['eve', 'ann'])
    """

    def __init__(self, values: Any = (), name: str = "row") -> None:
        self.labels: Ids = np.zeros(0, dtype=np.int64)
        self._order: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self._known: dict[str, int] | None = None  # of text
        self._add(as_ids(values, name))

    @classmethod
    def fit(cls, values: Any, name: str = "row") -> tuple[IdIndex, Codes]:
        """Number the distinct ids of a column."""
        ids = as_ids(values, name)
        index = cls(ids)
        return index, index.encode(ids)

    def __len__(self) -> int:
        return len(self.labels)

    def __copy__(self) -> IdIndex:
        index = IdIndex()
        vars(index).update(
            vars(self) | {"_known": None if self._known is None else dict(self._known)}
        )
        return index

    @property
    def is_text(self) -> bool:
        """Whether the ids are text."""
        return self._known is not None

    def encode(self, values: Any, name: str = "row") -> Codes:
        """Look up ids."""
        ids = as_ids(values, name)
        if self._known is not None:
            known = self._known
            texts = ids.tolist() if ids.dtype == object else map(str, ids.tolist())
            return np.fromiter(
                (known.get(text, -1) for text in texts), dtype=np.int64, count=len(ids)
            )
        if ids.dtype == object:
            numbers = np.array([_integer(text) for text in ids.tolist()], dtype=np.int64)
            return np.where(numbers == _NO_INTEGER, -1, self._lookup(numbers))
        return self._lookup(ids)

    def decode(self, codes: Any) -> Ids:
        """Give the ids at some positions."""
        return self.labels[np.asarray(codes)]

    def extend(self, values: Any, name: str = "row") -> Codes:
        """Add the ids that are new."""
        ids = as_ids(values, name)
        self._add(ids)
        return self.encode(ids)

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Give the ids as plain arrays, for model files and pickles."""
        if self._known is None:
            return {"integers": self.labels}
        blocks = [label.encode("utf-8", "surrogatepass") for label in self.labels.tolist()]
        ends = np.cumsum([len(block) for block in blocks], dtype=np.int64)
        return {"text": np.frombuffer(b"".join(blocks), dtype=np.uint8), "ends": ends}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> IdIndex:
        """Make the index again that ``to_arrays`` was called on."""
        found = {name: np.asarray(values) for name, values in arrays.items()}
        if (
            set(found) == {"integers"}
            and found["integers"].dtype == np.int64
            and found["integers"].ndim == 1
        ):
            return cls.restore(found["integers"])
        if (
            set(found) != {"text", "ends"}
            or found["text"].dtype != np.uint8
            or found["ends"].dtype != np.int64
        ):
            raise ValueError(
                "ids must be the int64 array integers, or text and ends, got "
                f"{', '.join(sorted(found))}"
            )
        block = found["text"].tobytes()
        ends = found["ends"].reshape(-1)
        sizes = np.diff(ends, prepend=0)
        if (sizes < 0).any() or (int(ends[-1]) if len(ends) else 0) != len(block):
            raise ValueError("the ends of its ids do not fit their text")
        starts = (ends - sizes).tolist()
        texts = [
            block[a:b].decode("utf-8", "surrogatepass")
            for a, b in zip(starts, ends.tolist(), strict=True)
        ]
        return cls.restore(objects(texts))

    @classmethod
    def restore(cls, labels: Ids) -> IdIndex:
        """Make the index that has these labels at these positions."""
        index = cls()
        index.labels = labels
        if labels.dtype == object:
            index._known = {label: code for code, label in enumerate(labels.tolist())}
            distinct = len(index._known)
        else:
            index._order = np.argsort(labels, kind="stable")
            distinct = len(labels) - int((np.diff(labels[index._order]) == 0).sum())
        if distinct < len(labels):
            raise ValueError(f"{len(labels) - distinct} of {len(labels)} ids occur twice")
        return index

    def _add(self, ids: Ids) -> None:
        if len(ids) == 0:
            return
        if self._known is None and ids.dtype == object:  # from here on all of them are text
            self._known = {str(label): code for code, label in enumerate(self.labels.tolist())}
        if self._known is not None:
            known = self._known
            for text in ids.tolist() if ids.dtype == object else map(str, ids.tolist()):
                known.setdefault(text, len(known))
            self.labels = objects(list(known))
            return
        fresh = _distinct(ids)
        fresh = fresh[self._lookup(fresh) < 0] if len(self.labels) else fresh
        self.labels = np.concatenate([self.labels, fresh])
        self._order = np.argsort(self.labels, kind="stable")

    def _lookup(self, ids: Codes) -> Codes:
        """Positions of integers: by a table if they lie close together, by bisection otherwise."""
        if len(self.labels) == 0 or len(ids) == 0:
            return np.full(len(ids), -1, dtype=np.int64)
        low = int(self.labels[self._order[0]])
        high = int(self.labels[self._order[-1]])
        if high - low < 4 * len(ids) + _TABLE_SLACK and ids.min() >= low and ids.max() <= high:
            table = np.full(high - low + 1, -1, dtype=np.int64)
            table[self.labels - low] = np.arange(len(self.labels))
            return table[ids - low]
        place = np.searchsorted(self.labels, ids, sorter=self._order)
        code = self._order[np.minimum(place, len(self._order) - 1)]
        return np.where(self.labels[code] == ids, code, -1)


def integer_of(text: str) -> int | None:
    """The integer that a text is, if it is one that int64 holds."""
    number = _integer(text)
    return None if number == _NO_INTEGER else number


def _integer(text: str) -> int:
    """The integer that a text is, written as Python writes it."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        return _NO_INTEGER
    number = int(text)
    return number if str(number) == text and abs(number) < 2**63 else _NO_INTEGER


def _distinct(ids: Codes) -> Codes:
    """The distinct integers in ascending order; in linear time if they lie close together."""
    low = int(ids.min())
    high = int(ids.max())
    if high - low < 4 * len(ids) + _TABLE_SLACK:
        seen = np.zeros(high - low + 1, dtype=bool)
        seen[ids - low] = True
        return np.flatnonzero(seen) + low
    return np.unique(ids)
