"""Ratings in one order, all those of a column (or a row) next to each other, and the sums over them.

    sums({k: table})[g] = Σ_{r in group g} w_r value_r^k table[index_r]

Every pass over the ratings, of every method, is made of these sums: no gathered row and no residual is ever stored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fisherfold.distributed import Axis

_PIECE = 256


@dataclass(frozen=True)
class Grouped:
    """The ratings in one order: those of group g are the entries ``offsets[g]:offsets[g + 1]``."""

    offsets: Tensor  # int32, one more than there are groups
    stored_indices: Tensor  # int32, the other coordinate of each rating, ascending within a group
    stored_values: Tensor  # the value of each rating
    n_others: int  # how many members the other side has
    # the other side, if its members are divided among processes: sums over a group are then partial
    across: Axis | None = None
    weights: Tensor | None = None  # w of each rating, None if all are 1
    extra_squares: Tensor | None = None  # what is added to w x² of each rating, None if nothing is
    excess: Tensor | None = None  # w (w - 1) of each rating, None if all are 0

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
        return self.stored_values.dtype

    @property
    def counts(self) -> Tensor:
        """The number of ratings of each group, int32."""
        return self.offsets.diff()

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        return self.offsets.nbytes + self.stored_indices.nbytes + self.stored_values.nbytes

    def indices(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The other coordinate of the ratings ``start:stop``, int32."""
        return self.stored_indices[start:stop]

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The values of the ratings ``start:stop``."""
        return self.stored_values[start:stop]

    def groups(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The group of each of the ratings ``start:stop``, int32."""
        stop = self.n_ratings if stop is None else stop
        first = int(torch.searchsorted(self.offsets, start, right=True)) - 1
        last = max(first, int(torch.searchsorted(self.offsets, stop, right=False)))
        counts = self.offsets[first : last + 1].clamp(start, stop).diff()
        ids = torch.arange(first, last, dtype=torch.int32, device=self.offsets.device)
        return ids.repeat_interleave(counts, output_size=stop - start)

    def sums(
        self, tables: Mapping[int, Tensor], first: int = 0, last: int | None = None
    ) -> tuple[Tensor, ...]:
        """Σ value^k times table rows, over the ratings in this process of a run of groups."""
        last = self.n_groups if last is None else last
        start, stop = int(self.offsets[first]), int(self.offsets[last])
        indices, offsets = self.stored_indices[start:stop], self.offsets[first : last + 1] - start
        part = slice(start, stop)
        return tuple(
            bag_sum(t, indices, offsets, self._power(k, part, t.dtype)) for k, t in tables.items()
        )

    def set_sums(self, table: Tensor) -> Tensor:
        """The sums of table rows over the mere set of ratings of every group, complete over all processes."""
        return self.total(bag_sum(table, self.stored_indices, self.offsets))

    def _power(self, power: int, part: slice, dtype: torch.dtype) -> Tensor | None:
        """W value^power of some ratings, with what is added to squares; None for ones."""
        weights = None if self.weights is None else self.weights[part].to(dtype)
        if power == 0:
            return weights
        values = self.stored_values[part].to(dtype)
        found = values if power == 1 else values**power
        found = found if weights is None else found * weights
        if power == 2 and self.extra_squares is not None:
            found = found + self.extra_squares[part].to(dtype)
        return found

    def total(self, sums: Tensor) -> Tensor:
        """Complete sums over the groups with what other processes hold of them."""
        return sums if self.across is None else self.across.total(sums)

    def here(self) -> Grouped:
        """The same ratings, for partial sums that the caller completes after further algebra."""
        return self if self.across is None else replace(self, across=None)

    def select(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Where the ratings of some groups lie."""
        groups = groups.to(device=self.offsets.device, dtype=torch.int64)
        starts = self.offsets[groups].long()
        counts = self.offsets[groups + 1].long() - starts
        ends = counts.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        shift = (starts - (ends - counts)).repeat_interleave(counts, output_size=total)
        positions = torch.arange(total, device=starts.device) + shift
        return positions, torch.cat([ends.new_zeros(1), ends]).int()

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The indices and values of the ratings at some positions."""
        return self.stored_indices[positions], self.stored_values[positions]

    def take(self, groups: Tensor) -> Grouped:
        """A copy of some of the groups; one that occurs twice is taken twice."""
        positions, offsets = self.select(groups)
        return self._with(offsets, lambda part: part[positions])

    def _with(self, offsets: Tensor, change: Callable[[Tensor], Tensor]) -> Grouped:
        """Other offsets, and every table of ratings changed."""
        weights, extra, excess = self.weights, self.extra_squares, self.excess
        return replace(
            self,
            offsets=offsets,
            stored_indices=change(self.stored_indices),
            stored_values=change(self.stored_values),
            weights=None if weights is None else change(weights),
            extra_squares=None if extra is None else change(extra),
            excess=None if excess is None else change(excess),
        )

    def to(self, device: torch.device | str) -> Grouped:
        """The same on another device."""
        return self._with(self.offsets.to(device), lambda part: part.to(device))


def bag_sum(
    table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Sum the rows of a table over groups of indices, out[g] = Σ_{k in group g} w_k table[index_k].

    ``embedding_bag`` is the fastest way in float32. In float64 on a CPU it has no fast path, so a sparse product takes
    its place; on a GPU one thread would walk through the whole of a popular group, so long groups are cut.

    Example:
        >>> table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> bag_sum(table, torch.tensor([0, 2, 1]), torch.tensor([0, 2, 2, 3]))
        tensor([[6., 8.],
                [0., 0.],
                [3., 4.]])
    """
    if len(indices) == 0 or table.shape[1] == 0:
        return table.new_zeros(len(offsets) - 1, table.shape[1])
    if table.device.type != "cpu":
        return _sum_in_pieces(table, indices, offsets, weights)
    if table.dtype == torch.float64:
        return _sparse_sum(table, indices, offsets, weights)
    return _embedding_sum(table, indices, offsets, weights)


def _embedding_sum(
    table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    return F.embedding_bag(
        indices, table, offsets, mode="sum", include_last_offset=True, per_sample_weights=weights
    )


def _sparse_sum(table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    values = table.new_ones(len(indices)) if weights is None else weights
    size = (len(offsets) - 1, len(table))
    with warnings.catch_warnings():
        # PyTorch announces sparse CSR products as beta on first use.
        warnings.simplefilter("ignore", UserWarning)
        return (
            torch.sparse_csr_tensor(offsets, indices, values, size=size, check_invariants=False)
            @ table
        )


def _sum_in_pieces(
    table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    # Groups are cut into pieces of bounded length, which are summed in parallel, and the pieces are added up.
    pieces = (offsets.diff() + (_PIECE - 1)) // _PIECE
    ends = pieces.cumsum(0, dtype=offsets.dtype)
    order = torch.arange(int(ends[-1]), dtype=offsets.dtype, device=table.device)
    group = torch.arange(len(pieces), device=table.device).repeat_interleave(
        pieces, output_size=len(order)
    )
    cuts = torch.cat([offsets[group] + _PIECE * (order - (ends - pieces)[group]), offsets[-1:]])
    sums = _embedding_sum(table, indices, cuts, weights)
    return _embedding_sum(sums, order, torch.cat([ends.new_zeros(1), ends]), None)
