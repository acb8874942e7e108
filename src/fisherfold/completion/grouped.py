"""Ratings in one order: all those of a column (or a row) next to each other, and the sums over them.

    sums(k, table)[g] = Σ_{r in group g} value_r^k table[index_r]

The ratings of group g are the entries ``offsets[g]:offsets[g + 1]`` of two arrays, the other coordinate and the value.
Other layouts (``tiled``, ``crowded``) hold the same ratings in another way and form the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fisherfold.completion.segments import bag_sum
from fisherfold.distributed import Axis

# Sums are formed for this many ratings at a time: values that are decoded on the way exist for no more of them.
CHUNK = 2**20


@dataclass(frozen=True)
class Grouped:
    """The ratings in one order: those of group g are the entries ``offsets[g]:offsets[g + 1]``.

    Attributes:
        offsets: int32, one more than there are groups.
        stored_indices: int32, the other coordinate of each rating, ascending within a group.
        stored_values: the values, or int16 codes into ``codebook``.
        codebook: the distinct values, if codes are stored.
        across: the other side, if its members are shared out over processes: sums over a group are then partial.
    """

    offsets: Tensor
    stored_indices: Tensor
    stored_values: Tensor
    codebook: Tensor | None = None
    across: Axis | None = None

    @property
    def n_groups(self) -> int:
        """How many groups there are, empty ones included."""
        return len(self.offsets) - 1

    @property
    def n_ratings(self) -> int:
        """How many ratings there are."""
        return len(self.stored_indices)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.stored_values.dtype if self.codebook is None else self.codebook.dtype

    @property
    def n_others(self) -> int:
        """One more than the largest index: the fewest rows that a table to sum may have."""
        return int(self.indices().max()) + 1 if self.n_ratings else 0

    @property
    def counts(self) -> Tensor:
        """The number of ratings of each group, int32."""
        return self.offsets.diff()

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        return sum(t.nbytes for t in self._tensors())

    def _tensors(self) -> list[Tensor]:
        table = [] if self.codebook is None else [self.codebook]
        return [self.offsets, self.stored_indices, self.stored_values, *table]

    def indices(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The other coordinate of the ratings ``start:stop``.

        Args:
            start: the first rating.
            stop: one past the last rating; the end if not given.

        Returns:
            An int32 tensor.
        """
        return self.stored_indices[start:stop]

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The values of the ratings ``start:stop``.

        Args:
            start: the first rating.
            stop: one past the last rating; the end if not given.

        Returns:
            A floating tensor.
        """
        if self.codebook is None:
            return self.stored_values[start:stop]
        return self.codebook.index_select(0, self.stored_values[start:stop].int())

    def groups(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The group of each of the ratings ``start:stop``.

        Args:
            start: the first rating.
            stop: one past the last rating; the end if not given.

        Returns:
            An int32 tensor.
        """
        stop = self.n_ratings if stop is None else stop
        first = int(torch.searchsorted(self.offsets, start, right=True)) - 1
        last = max(first, int(torch.searchsorted(self.offsets, stop, right=False)))
        counts = self.offsets[first : last + 1].clamp(start, stop).diff()
        ids = torch.arange(first, last, dtype=torch.int32, device=self.offsets.device)
        return ids.repeat_interleave(counts, output_size=stop - start)

    def chunks(self, max_ratings: int, first: int = 0) -> Iterator[tuple[int, int, int, int]]:
        """Cut the groups into runs of at most ``max_ratings`` ratings; a larger group stands alone.

        Args:
            max_ratings: the bound that keeps the memory of a pass in check.
            first: the first group.

        Yields:
            The first group, one past the last, and the same for the ratings.
        """
        ends = self.offsets.cpu().numpy()
        group = first
        while group < self.n_groups:
            reach = int(np.searchsorted(ends, int(ends[group]) + max_ratings, side="right")) - 1
            stop = min(max(reach, group + 1), self.n_groups)
            yield group, stop, int(ends[group]), int(ends[stop])
            group = stop

    def sums(self, tables: Mapping[int, Tensor], first: int = 0, last: int | None = None) -> tuple[Tensor, ...]:
        """Σ value^k times table rows, over the ratings that are here of a run of groups.

        Args:
            tables: for each power k, a table with one row per member of the other side.
            first: the first group.
            last: one past the last group; all if not given, a bounded number of ratings at a time.

        Returns:
            For each table, a matrix with one row per group.
        """
        if last is not None or self.n_ratings <= CHUNK:
            return self._sums(tables, first, self.n_groups if last is None else last)
        out = tuple(table.new_empty(self.n_groups - first, table.shape[1]) for table in tables.values())
        for start, stop, _, _ in self.chunks(CHUNK, first):
            for whole, part in zip(out, self._sums(tables, start, stop), strict=True):
                whole[start - first : stop - first] = part
        return out

    def _sums(self, tables: Mapping[int, Tensor], first: int, last: int) -> tuple[Tensor, ...]:
        start, stop = int(self.offsets[first]), int(self.offsets[last])
        indices, offsets = self.indices(start, stop), self.offsets[first : last + 1] - start
        values = self.values(start, stop) if any(tables) else None
        return tuple(bag_sum(t, indices, offsets, power_of(values, k, t.dtype)) for k, t in tables.items())

    def select(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Where the ratings of some groups lie.

        Args:
            groups: group numbers; one that occurs twice is selected twice.

        Returns:
            The int64 positions of their ratings, group after group, and the int32 offsets of the selection.
        """
        groups = groups.to(device=self.offsets.device, dtype=torch.int64)
        starts = self.offsets[groups].long()
        counts = self.offsets[groups + 1].long() - starts
        ends = counts.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        shift = (starts - (ends - counts)).repeat_interleave(counts, output_size=total)
        positions = torch.arange(total, device=starts.device) + shift
        return positions, torch.cat([ends.new_zeros(1), ends]).int()

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The indices and values of chosen ratings.

        Args:
            positions: positions in this order.

        Returns:
            The int32 indices and the values.
        """
        values = self.stored_values[positions]
        if self.codebook is not None:
            values = self.codebook.index_select(0, values.int())
        return self.stored_indices[positions], values

    def total(self, sums: Tensor) -> Tensor:
        """Complete sums over the groups with what other processes hold of them.

        Args:
            sums: one row per group, over the ratings that are here.

        Returns:
            The sums over all ratings.
        """
        return sums if self.across is None else self.across.total(sums)

    def here(self) -> Grouped:
        """The same ratings with sums over what is here alone, to be completed by the caller after further algebra.

        Returns:
            This order without its other processes.
        """
        return self if self.across is None else replace(self, across=None)

    def take(self, groups: Tensor) -> Grouped:
        """Some of the groups, as ratings of their own.

        Args:
            groups: group numbers; one that occurs twice is taken twice.

        Returns:
            A copy with one group per number, values stored directly.
        """
        positions, offsets = self.select(groups)
        return Grouped(offsets, *self.at(positions), across=self.across)

    def to(self, device: torch.device | str) -> Grouped:
        """The same on another device.

        Args:
            device: the device.

        Returns:
            The copy.
        """
        table = None if self.codebook is None else self.codebook.to(device)
        parts = (self.offsets.to(device), self.stored_indices.to(device), self.stored_values.to(device))
        return Grouped(*parts, table, self.across)


@dataclass(frozen=True)
class GroupedByPosition(Grouped):
    """An order that refers to another one: ``stored_indices`` are positions there, and values are kept there alone.

    Slower to read (the index is found by bisection), but a float64 value is stored once.
    """

    other: Grouped | None = None

    @property
    def source(self) -> Grouped:
        """The order that holds the values."""
        assert self.other is not None
        return self.other

    @property
    def nbytes(self) -> int:
        """The memory in bytes, without what the other order holds."""
        return self.offsets.nbytes + self.stored_indices.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.source.dtype

    def indices(self, start: int = 0, stop: int | None = None) -> Tensor:  # noqa: D102
        return torch.bucketize(self.stored_indices[start:stop], self.source.offsets[1:], right=True).int()

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:  # noqa: D102
        return self.source.stored_values[self.stored_indices[start:stop]]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        there = self.stored_indices[positions]
        index = torch.bucketize(there, self.source.offsets[1:], right=True).int()
        return index, self.source.stored_values[there]

    def to(self, device: torch.device | str) -> Grouped:  # noqa: D102
        raise RuntimeError("an order by position moves together with its source: use Ratings.to")


def power_of(values: Tensor | None, power: int, dtype: torch.dtype) -> Tensor | None:
    """The weights value^power.

    Args:
        values: the values; None is allowed for the power 0.
        power: 0 or more.
        dtype: the dtype of the weights.

    Returns:
        One weight per value, or None for the power 0, which weighs nothing.
    """
    if values is None or power == 0:
        return None
    return values.to(dtype) if power == 1 else values.to(dtype) ** power
