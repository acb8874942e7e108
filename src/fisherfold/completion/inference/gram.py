"""Sums of second moments over the ratings of each member, the evidence of a variational update.

With a_j = (v_j, c_j, 1), the coefficients k_i = (u_i, 1, b_i) that multiply it, and the sums over the ratings of row i

    T_i = Σ_j β_j E[a_j a_jᵀ],     h_i = Σ_j β_j x_ij E[a_j],     s_i = Σ_j β_j x_ij²,

the posterior of (u_i, b_i) has the precision K + τ α_i T_i (its free rows and columns), and the expected weighted
squared residual is Σ_j β_j E[e_ij²] = s_i - 2 k̄_i·h_i + tr(E[k_i k_iᵀ] T_i). T_i is the sum of rows of a table of
packed second moments: one streaming pass over the ratings (``Grouped.sums``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inference.packed import order_of, outer_table, packed_positions, triangle

_WIDEST, _SLICE = (
    512,
    128,
)  # columns of a table that is summed as it is, and of the slices of a wider one
_BLOCK_ENTRIES = 2**25


def moments(mean: Tensor, covariance: Tensor) -> Tensor:
    """The table of packed second moments E[a aᵀ] of a = (u, b, 1)."""
    augmented = torch.cat([mean, mean.new_ones(len(mean), 1)], dim=1)
    table = outer_table(augmented)
    table[:, : covariance.shape[1]] += covariance
    return table


@dataclass(frozen=True)
class Evidence:
    """What the ratings of some members say about them."""

    gram: Tensor  # T_i, packed, one row for each member
    cross: Tensor  # h_i
    squares: Tensor  # s_i

    def part(self, members: slice) -> Evidence:
        """That of a run of members."""
        return Evidence(self.gram[members], self.cross[members], self.squares[members])

    def double(self) -> Evidence:
        """The same in float64."""
        return Evidence(self.gram.double(), self.cross.double(), self.squares.double())

    def normal_equations(self) -> tuple[Tensor, Tensor]:
        """The free blocks of T_i, and h_i less what the other side's offsets explain: (n, q, q) and (n, q)."""
        size = self.cross.shape[1] - 1
        free, fixed, _, _ = _layout(size, self.gram.device)
        pull = torch.cat(
            [self.cross[:, : size - 1], self.cross[:, size:]], dim=1
        ) - self.gram.index_select(1, fixed)
        return self.gram.index_select(1, free).view(-1, size, size), pull

    def residual(self, mean: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The packed E[a aᵀ] of a = (u, b, 1), and Σ_j β_j E[e_ij²], at a posterior."""
        _, _, twin, factor = _layout(mean.shape[1], self.gram.device)
        second = moments(mean, packed)
        coefficients = torch.cat([mean[:, :-1], mean.new_ones(len(mean), 1), mean[:, -1:]], dim=1)
        fitted = second.index_select(1, twin).mul_(self.gram) @ factor.to(self.gram)
        return second, (self.squares - 2 * (coefficients * self.cross).sum(1) + fitted).clamp_(
            min=0
        )


class Summands:
    """What is summed over the ratings of a member: β_j E[a_j a_jᵀ], β_j E[a_j] and β_j.

    A wide table is summed in slices of its columns, each of which stays in a cache: two to three times as fast from
    rank 30 on (benchmarks/completion_speed.py).

    Attributes:
        block: for how many members at once the sums should be formed, at least.
    """

    def __init__(self, weighted: Tensor) -> None:
        """Prepare a table."""
        size, width = order_of(weighted.shape[1]), weighted.shape[1]
        self.slices = [weighted]
        self.block = 1
        if width > _WIDEST and weighted.device.type == "cpu":
            self.slices = [part.contiguous() for part in torch.split(weighted, _SLICE, dim=1)]
            self.block = _BLOCK_ENTRIES // width
        self.first, self.one = weighted[:, -size:].contiguous(), weighted[:, -1:].contiguous()

    def collect(self, groups: Grouped, first: int, last: int) -> Evidence:
        """Sum the evidence for a run of groups."""
        parts = list(groups.sums({0: self.slices[0], 1: self.first, 2: self.one}, first, last))
        parts[1:1] = (groups.sums({0: table}, first, last)[0] for table in self.slices[1:])
        if groups.across is not None:
            widths = [part.shape[1] for part in parts]
            parts = list(torch.split(groups.total(torch.cat(parts, dim=1)), widths, dim=1))
        *gram, cross, squares = parts
        return Evidence(gram[0] if len(gram) == 1 else torch.cat(gram, dim=1), cross, squares[:, 0])


@lru_cache(maxsize=64)
def _layout(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions in the packed T_i: the free block, the fixed column, each entry's twin under b ↔ 1; multiplicities."""
    swap = [*range(size - 1), size, size - 1]
    where = packed_positions(size + 1, device)
    rows, columns = triangle(size + 1, device)
    swapped = torch.tensor(swap, device=device)
    free = swapped[:size]
    twice = torch.where(rows == columns, 1.0, 2.0)
    return (
        where[free][:, free].flatten(),
        where[free, size - 1],
        where[swapped[rows], swapped[columns]],
        twice,
    )
