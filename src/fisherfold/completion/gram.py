"""Sums of second moments over the ratings of each member, the evidence of a variational update.

With a_j = (v_j, c_j, 1), the coefficients k_i = (u_i, 1, b_i) that multiply it, and the sums over the ratings of row i

    T_i = Σ_j β_j E[a_j a_jᵀ],     h_i = Σ_j β_j x_ij E[a_j],     s_i = Σ_j β_j x_ij²,

the posterior of (u_i, b_i) has the precision K + τ α_i T_i (its free rows and columns), and the expected weighted
squared residual is Σ_j β_j E[e_ij²] = s_i - 2 k̄_i·h_i + tr(E[k_i k_iᵀ] T_i). T_i is the sum of rows of a table of
packed second moments: one streaming pass over the ratings (``Grouped.sums``). All sums are *batch-last*: each entry of
a matrix is one vector over the members.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.packed import order_of, packed_positions, triangle


def moments(mean: Tensor, covariance: Tensor) -> Tensor:
    """The table of packed second moments E[a aᵀ] of a = (u, b, 1).

    Args:
        mean: the (n, q) posterior means.
        covariance: the packed posterior covariances.

    Returns:
        A (n, (q+1)(q+2)/2) table; its last column is 1, and the last q + 1 columns are E[a].
    """
    augmented = torch.cat([mean, mean.new_ones(len(mean), 1)], dim=1)
    rows, columns = triangle(augmented.shape[1], mean.device)
    table = augmented[:, rows] * augmented[:, columns]
    table[:, : covariance.shape[1]] += covariance
    return table


@dataclass(frozen=True)
class Evidence:
    """What the ratings of some members say about them.

    Attributes:
        gram: T_i, packed and batch-last.
        cross: h_i, batch-last.
        squares: s_i.
    """

    gram: Tensor
    cross: Tensor
    squares: Tensor

    def double(self) -> Evidence:
        """The same in float64."""
        return Evidence(self.gram.double(), self.cross.double(), self.squares.double())

    def normal_equations(self) -> tuple[Tensor, Tensor]:
        """The free block of T_i, and h_i less what the other side's offsets explain: (q, q, n) and (q, n)."""
        size = len(self.cross) - 1
        free, fixed, _, _ = _layout(size, self.gram.device)
        pull = torch.cat([self.cross[: size - 1], self.cross[size:]]) - self.gram.index_select(0, fixed)
        return self.gram.index_select(0, free).view(size, size, -1), pull

    def residual(self, mean: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_j β_j E[e_ij²] at a posterior.

        Args:
            mean: the (q, n) posterior means.
            packed: the packed posterior covariances, batch-last.

        Returns:
            The second moments of (u_i, b_i, 1), packed and batch-last, and the expected weighted squared residuals.
        """
        size = len(mean)
        _, _, twin, factor = _layout(size, self.gram.device)
        rows, columns = triangle(size + 1, self.gram.device)
        augmented = torch.cat([mean, mean.new_ones(1, mean.shape[1])])
        second = augmented.index_select(0, rows).mul_(augmented.index_select(0, columns))
        second[: len(packed)] += packed
        coefficients = torch.cat([mean[:-1], augmented[-1:], mean[-1:]])
        fitted = second.index_select(0, twin).mul_(self.gram).mul_(factor.to(self.gram)[:, None]).sum(0)
        return second, (self.squares - 2 * (coefficients * self.cross).sum(0) + fitted).clamp_(min=0)


def collect(weighted: Tensor, groups: Grouped, first: int, last: int) -> Evidence:
    """Sum the evidence for a run of groups.

    Args:
        weighted: the other side's table of moments, each row times that member's noise weight β_j.
        groups: the ratings grouped by the members of this side.
        first: the first group.
        last: one past the last group.

    Returns:
        The evidence, complete over all processes.
    """
    size = order_of(weighted.shape[1])
    tables = {0: weighted, 1: weighted[:, -size:].contiguous(), 2: weighted[:, -1:].contiguous()}
    gram, cross, squares = groups.sums(tables, first, last)
    if groups.across is not None:
        length = gram.shape[1]
        joint = groups.total(torch.cat([gram, cross, squares], dim=1))
        gram, cross, squares = joint[:, :length], joint[:, length:-1], joint[:, -1:]
    return Evidence(gram.T.contiguous(), cross.T.contiguous(), squares[:, 0])


def second_moment_of_products(left: Tensor, right: Tensor) -> Tensor:
    """E[(k_i · a_j)²] = ⟨E[k kᵀ], E[a aᵀ]⟩ of pairs.

    Args:
        left: a table of moments, one row per pair.
        right: the same for the other side.

    Returns:
        One number per pair.
    """
    _, _, twin, factor = _layout(order_of(left.shape[1]) - 1, left.device)
    return (right * left[:, twin]) @ factor.to(left)


@lru_cache(maxsize=64)
def _layout(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions in the packed T_i: the free block, the fixed column, each entry's twin under b ↔ 1; multiplicities."""
    swap = [*range(size - 1), size, size - 1]
    where = packed_positions(size + 1, device)
    rows, columns = triangle(size + 1, device)
    swapped = torch.tensor(swap, device=device)
    free = swapped[:size]
    twice = torch.where(rows == columns, 1.0, 2.0)
    return where[free][:, free].flatten(), where[free, size - 1], where[swapped[rows], swapped[columns]], twice
