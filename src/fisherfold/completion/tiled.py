"""Ratings in one order, laid out in tiles of the other side: sums then read from a part of a table that fits a cache.

    out[g] = Σ_tiles Σ_{k in group g and tile} w_k table[index_k]

A sum over the ratings of an item gathers rows of a table with one row per user; with half a million users that table
(a packed outer product each) is a hundred megabytes, and every gather leaves the cache. Laid out tile by tile of 2¹³
users, all items of a tile are summed from 2 MB of the table before the next tile is touched, at the price of one offset
per group and tile. Within a group the indices stay ascending over its tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fisherfold.completion.building import scatter
from fisherfold.completion.grouped import Grouped, GroupedByPosition, power_of
from fisherfold.completion.segments import bag_sum

WIDTH = 2**13
_ENOUGH_RATINGS = 2**22
_SHORTEST_RUN = 16
_GROUP_RUN = 2**18


@dataclass(frozen=True)
class TiledGrouped(Grouped):
    """Ratings by group whose arrays are laid out tile by tile.

    Attributes:
        tile_offsets: int32, (tiles, groups + 1): where the ratings of each group start within each tile.
    """

    tile_offsets: Tensor | None = None

    @property
    def tiles(self) -> Tensor:
        """``tile_offsets``, which are there."""
        assert self.tile_offsets is not None
        return self.tile_offsets

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        return super().nbytes + self.tiles.nbytes

    @property
    def n_others(self) -> int:
        """One more than the largest index."""
        return int(self.stored_indices.max()) + 1 if self.n_ratings else 0

    def sums(  # noqa: D102
        self, tables: Mapping[int, Tensor], first: int = 0, last: int | None = None
    ) -> tuple[Tensor, ...]:
        last = self.n_groups if last is None else last
        out = tuple(table.new_zeros(last - first, table.shape[1]) for table in tables.values())
        for ends in self.tiles[:, first : last + 1]:
            start, stop = int(ends[0]), int(ends[-1])
            if start == stop:
                continue
            values = self._stored(start, stop) if any(tables) else None
            for total, (power, table) in zip(out, tables.items(), strict=True):
                weights = power_of(values, power, table.dtype)
                total += bag_sum(table, self.stored_indices[start:stop], ends - start, weights)
        return out

    def _stored(self, start: int, stop: int) -> Tensor:
        values = self.stored_values[start:stop]
        return values if self.codebook is None else self.codebook.index_select(0, values.int())

    def select(self, groups: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        groups = groups.to(device=self.offsets.device, dtype=torch.int64)
        starts = self.tiles[:, groups].T.long()
        counts = self.tiles[:, groups + 1].T.long() - starts
        ends = counts.flatten().cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        shift = (starts.flatten() - (ends - counts.flatten())).repeat_interleave(counts.flatten(), output_size=total)
        positions = torch.arange(total, device=starts.device) + shift
        return positions, torch.cat([ends.new_zeros(1), counts.sum(1).cumsum(0)]).int()

    def _in_order(self, start: int, stop: int | None, stored: Tensor) -> Tensor:
        """Entries ``start:stop`` of the order by group, some groups at a time."""
        stop = self.n_ratings if stop is None else stop
        out = stored.new_empty(stop - start)
        for first, last, begin, end in self.chunks(_GROUP_RUN):
            low, high = max(begin, start), min(end, stop)
            if low < high:
                positions, _ = self.select(torch.arange(first, last))
                out[low - start : high - start] = stored[positions[low - begin : high - begin]]
        return out

    def indices(self, start: int = 0, stop: int | None = None) -> Tensor:  # noqa: D102
        return self._in_order(start, stop, self.stored_indices)

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:  # noqa: D102
        values = self._in_order(start, stop, self.stored_values)
        return values if self.codebook is None else self.codebook.index_select(0, values.int())

    def to(self, device: torch.device | str) -> Grouped:
        """The same ratings on another device, where they lie group by group: tiles are for the caches of CPUs.

        Args:
            device: the device.

        Returns:
            The copy.
        """
        stored = self._in_order(0, None, self.stored_values)
        return Grouped(self.offsets, self.indices(), stored, self.codebook, self.across).to(device)


def tiled(target: Grouped, source: Grouped, width: int | None = None) -> Grouped:
    """Lay the ratings of one order out in tiles, in place, if that is worth it.

    Args:
        target: the order to lay out; its arrays are written over.
        source: the same ratings in the other order.
        width: members of the other side in a tile; a fitting one if not given, for large tables alone.

    Returns:
        The tiled order, or the target as it was.
    """
    if isinstance(target, GroupedByPosition) or isinstance(source, GroupedByPosition):
        return target
    count = -(-source.n_groups // (width or WIDTH))
    short = target.n_ratings < max(_ENOUGH_RATINGS, _SHORTEST_RUN * count * target.n_groups)
    if width is None and (count < 4 or short):
        return target
    width = width or WIDTH
    groups, stored = target.n_groups, (target.stored_indices.numpy(), target.stored_values.numpy())
    there, given = source.stored_indices.numpy(), source.stored_values.numpy()
    edges = source.offsets[torch.arange(0, source.n_groups + width, width).clamp(max=source.n_groups)].tolist()
    offsets = np.empty((count, groups + 1), dtype=np.int32)
    for t, (start, stop) in enumerate(itertools.pairwise(edges)):
        offsets[t, 0] = start
        np.cumsum(np.bincount(there[start:stop], minlength=groups), out=offsets[t, 1:])
        offsets[t, 1:] += start
        members = source.groups(start, stop).numpy()
        scatter(there[start:stop], (members, given[start:stop]), offsets[t, :-1].astype(np.int64), stored)
    parts = target.offsets, target.stored_indices, target.stored_values, target.codebook, target.across
    return TiledGrouped(*parts, tile_offsets=torch.from_numpy(offsets))
