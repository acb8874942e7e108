"""Counting sort of ratings that arrive in pieces, in the memory of the result and a bounded chunk.

    place:      next free place of its column, for every entry as it comes    (column order, rows as they came)
    arrange:    rows ascending within each column, a run of columns at a time
    transpose:  the same placing by row, walking the columns upwards           (row order, columns ascending)

Every step is stable, so that entries that repeat a pair stay in the order of their arrival. Nothing but the final
arrays is as long as the ratings: 8 bytes per rating and order for float32, and 16 bytes in all for every other form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fisherfold.completion.grouped import Grouped, GroupedByPosition
from fisherfold.plain import counted

Array = npt.NDArray[Any]
Int32 = npt.NDArray[np.int32]

MAX_CODES = 2**15
CHUNK = 2**18


class RepeatedPairs(ValueError):
    """Entries that repeat a pair where none may.

    Args:
        count: how many.
        row: the row of the first of them.
        column: its column.
    """

    def __init__(self, count: int, row: Any, column: Any) -> None:
        super().__init__(count, row, column)  # what a pickle keeps
        self.count, self.row, self.column = count, row, column

    def __str__(self) -> str:
        repeated = counted(self.count, "entry repeats", "entries repeat")
        return (
            f"{repeated} a pair that was given before, the first is row {self.row!r}, column "
            f"{self.column!r}; choose duplicates='mean', 'last' or 'sum' to merge them"
        )


class ColumnOrder:
    """Entries by column while they come in.

    Args:
        counts: how many entries each column will have; or a table of them, one line for each source of entries, whose
            entries then count as coming one source after the other.
        dtype: float32 or float64.

    Attributes:
        offsets: where each column starts, and the end.
        rows: the row of each entry.
        values: the values, or codes after ``compress``.
        codebook: the distinct values if there are codes.
    """

    def __init__(self, counts: Array, dtype: type[np.floating]) -> None:
        counts = np.atleast_2d(np.asarray(counts, dtype=np.int64))
        self.offsets = np.concatenate([[0], np.cumsum(counts.sum(0))])
        total = int(self.offsets[-1])
        self.rows: Array = np.empty(total, dtype=np.int32)
        self.values: Array = np.empty(total, dtype=dtype)
        self.codebook: Array | None = None
        self._next = self.offsets[:-1] + np.cumsum(counts, axis=0) - counts

    def place(self, rows: Int32, columns: Int32, values: Array, source: int = 0) -> None:
        """Take in some entries.

        Args:
            rows: their rows.
            columns: their columns.
            values: their values.
            source: where they come from.
        """
        scatter(columns, (rows, values), self._next[source], (self.rows, self.values))

    def arrange(self) -> None:
        """Sort the rows of every column."""
        for first, last, start, stop in runs(self.offsets):
            rows = self.rows[start:stop]
            groups = np.repeat(np.arange(last - first, dtype=np.int32), np.diff(self.offsets[first : last + 1]))
            if not bool(((rows[1:] < rows[:-1]) & (groups[1:] == groups[:-1])).any()):
                continue
            order = radix_argsort(rows)
            order = order[radix_argsort(groups[order])]
            self.rows[start:stop], self.values[start:stop] = rows[order], self.values[start:stop][order]

    def merge(self, rule: str) -> int:
        """Apply the rule for pairs given twice, which are neighbours after ``arrange``.

        Args:
            rule: ``error``, ``mean``, ``last`` or ``sum``.

        Returns:
            How many entries were merged into another one.

        Raises:
            RepeatedPairs: if pairs repeat and the rule is ``error``.
        """
        fresh_counts = np.diff(self.offsets)
        repeated, first_pair = 0, None
        for first, last, start, stop in runs(self.offsets):
            again = ~self._fresh(first, last, start, stop)
            if again.any():
                where = np.flatnonzero(again)
                columns = np.searchsorted(self.offsets, start + where, side="right") - 1
                first_pair = first_pair or (int(self.rows[start + where[0]]), int(columns[0]))
                fresh_counts -= np.bincount(columns, minlength=len(fresh_counts))
                repeated += len(where)
        if repeated and rule == "error" and first_pair is not None:
            raise RepeatedPairs(repeated, *first_pair)
        if repeated:
            self._compact(fresh_counts, rule)
        return repeated

    def _fresh(self, first: int, last: int, start: int, stop: int) -> npt.NDArray[np.bool_]:
        rows = self.rows[start:stop]
        fresh = np.ones(len(rows), dtype=bool)
        np.not_equal(rows[1:], rows[:-1], out=fresh[1:])
        starts = self.offsets[first:last] - start
        fresh[starts[starts < len(rows)]] = True
        return fresh

    def _compact(self, counts: Array, rule: str) -> None:
        written = 0
        for first, last, start, stop in runs(self.offsets):
            heads = np.flatnonzero(self._fresh(first, last, start, stop))
            if not len(heads):
                continue
            values, sizes = self.values[start:stop], np.diff(np.append(heads, stop - start))
            if rule == "last":
                merged = values[heads + sizes - 1]
            else:
                merged = np.add.reduceat(values.astype(np.float64), heads)
                merged = merged / sizes if rule == "mean" else merged
            rows = self.rows[start:stop][heads]
            self.rows[written : written + len(heads)] = rows
            self.values[written : written + len(heads)] = merged
            written += len(heads)
        self.rows, self.values = self.rows[:written].copy(), self.values[:written].copy()
        self.offsets = np.concatenate([[0], np.cumsum(counts)])

    def compress(self) -> None:
        """Replace float64 values by int16 codes if they are few enough."""
        if self.values.dtype != np.float64 or (codebook := distinct(self.values)) is None:
            return
        codes = np.empty(len(self.values), dtype=np.int16)
        for start in range(0, len(codes), CHUNK):
            codes[start : start + CHUNK] = np.searchsorted(codebook, self.values[start : start + CHUNK])
        self.values, self.codebook = codes, codebook

    def both(self, n_rows: int) -> tuple[Grouped, Grouped]:
        """The column order and the row order.

        Args:
            n_rows: how many rows there are.

        Returns:
            Both, sharing a table of distinct values if there is one.
        """
        counts = np.zeros(n_rows, dtype=np.int64)
        for start in range(0, len(self.rows), CHUNK):
            counts += np.bincount(self.rows[start : start + CHUNK], minlength=n_rows)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        by_position = self.codebook is None and self.values.dtype == np.float64
        columns = np.empty(0 if by_position else len(self.rows), dtype=np.int32)
        payload: Array = np.empty(len(self.rows), dtype=np.int32 if by_position else self.values.dtype)
        cursor = offsets[:-1].copy()
        for first, last, start, stop in runs(self.offsets):
            if by_position:
                scatter(self.rows[start:stop], (np.arange(start, stop, dtype=np.int32),), cursor, (payload,))
                continue
            groups = np.repeat(np.arange(first, last, dtype=np.int32), np.diff(self.offsets[first : last + 1]))
            scatter(self.rows[start:stop], (groups, self.values[start:stop]), cursor, (columns, payload))
        table = None if self.codebook is None else torch.from_numpy(self.codebook)
        by_column = Grouped(_offsets(self.offsets), torch.from_numpy(self.rows), torch.from_numpy(self.values), table)
        if by_position:
            there = torch.from_numpy(payload)
            return by_column, GroupedByPosition(_offsets(offsets), there, there, other=by_column)
        return by_column, Grouped(_offsets(offsets), torch.from_numpy(columns), torch.from_numpy(payload), table)


def _offsets(offsets: Array) -> torch.Tensor:
    return torch.from_numpy(offsets.astype(np.int32))


def runs(offsets: Array, limit: int = CHUNK) -> Iterator[tuple[int, int, int, int]]:
    """Cut groups into runs of at most ``limit`` entries; a larger group stands alone.

    Args:
        offsets: where each group starts, and the end.
        limit: the bound that keeps the memory of a pass in check.

    Yields:
        The first group, one past the last, and the same for the entries.
    """
    group, groups = 0, len(offsets) - 1
    while group < groups:
        reach = int(np.searchsorted(offsets, int(offsets[group]) + limit, side="right")) - 1
        stop = min(max(reach, group + 1), groups)
        yield group, stop, int(offsets[group]), int(offsets[stop])
        group = stop


def scatter(keys: Int32, sources: tuple[Array, ...], cursor: Array, targets: tuple[Array, ...]) -> None:
    """Write each entry at the next free place of its key, in the given order, and move the places on.

    Args:
        keys: whole numbers from 0.
        sources: what belongs to each entry.
        cursor: the next free place of each key; changed in place.
        targets: where it is written.
    """
    for start in range(0, len(keys), CHUNK):
        part = keys[start : start + CHUNK]
        order = radix_argsort(part)
        ordered = part[order]
        heads = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        sizes = np.diff(np.append(heads, len(ordered)))
        present = ordered[heads]
        places = np.repeat(cursor[present] - heads, sizes)
        places += np.arange(len(ordered))
        for source, target in zip(sources, targets, strict=True):
            target[places] = source[start : start + CHUNK][order]
        cursor[present] += sizes


def radix_argsort(keys: Int32) -> npt.NDArray[np.intp]:
    """A stable argsort of keys from 0 in linear time: NumPy sorts 16-bit digits by counting.

    Args:
        keys: whole numbers from 0.

    Returns:
        The order.
    """
    if not len(keys) or bool((keys[1:] >= keys[:-1]).all()):
        return np.arange(len(keys))
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    if int(keys.max()) >= 2**16:
        order = order[np.argsort((keys[order] >> 16).astype(np.uint16), kind="stable")]
    return order


def places(groups: Array, keys: Array) -> Array:
    """The place of each entry among those of its group, in the order of some keys.

    Args:
        groups: the number of each entry's group, from 0.
        keys: what entries of one group are ordered by.

    Returns:
        Places from 0.

    Examples:
        >>> places(np.array([1, 0, 1, 1]), np.array([0.3, 0.1, 0.2, 0.4])).tolist()
        [1, 0, 0, 2]
    """
    order, counts = np.lexsort((keys, groups)), np.bincount(groups)
    found = np.empty(len(groups), dtype=np.int64)
    found[order] = np.arange(len(groups)) - (np.cumsum(counts) - counts)[groups[order]]
    return found


def distinct(values: Array) -> Array | None:
    """The distinct values in ascending order.

    Args:
        values: some values.

    Returns:
        All of them, or None if there are too many for int16 codes.
    """
    found = np.unique(values[:: max(1, len(values) // (4 * MAX_CODES))])
    for start in range(0, len(values), CHUNK):
        if len(found) > MAX_CODES:
            break
        found = np.union1d(found, values[start : start + CHUNK])
    return found if len(found) <= MAX_CODES else None
