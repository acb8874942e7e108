"""One half-step of completion: all members of one side at the optimum given the other.

With a_j = (v_j, c_j, 1), the coefficients k_i = (u_i, 1, b_i) that multiply it, and the sums over the ratings of row i

    T_i = Σ_j β_j E[a_j a_jᵀ],     h_i = Σ_j β_j x_ij E[a_j],

the posterior of (u_i, b_i) has the precision K + τ α_i T_i (its free rows and columns) and the residual is
S_i = Σ_j β_j x_ij² - 2 k̄_i·h_i + tr(E[k_i k_iᵀ] T_i).

T_i is the sum of rows of a table of packed second moments: one streaming pass over the ratings (``Grouped.sums``).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inverse import invert_batch_last
from fisherfold.completion.packed import order_of, packed_positions, triangle
from fisherfold.completion.sides import Side

_CHUNK_ENTRIES = 2**20  # of the (q, q, n) working arrays: they stay in the cache, and memory stays bounded


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


@lru_cache(maxsize=64)
def layout(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How the packed T_i is read.

    Args:
        size: q, the number of coefficients of a member.
        device: where the indices are used.

    Returns:
        The positions of its free block, of its fixed column, of each entry's twin under b ↔ 1, and how often each
        packed entry occurs in the square matrix.
    """
    swap = [*range(size - 1), size, size - 1]
    where = packed_positions(size + 1, device)
    rows, columns = triangle(size + 1, device)
    swapped = torch.tensor(swap, device=device)
    free = swapped[:size]
    twice = torch.where(rows == columns, 1.0, 2.0)
    return (
        where[free][:, free].flatten(), where[free, size - 1], where[swapped[rows], swapped[columns]], twice
    )  # fmt: skip


def half_step(side: Side, weighted: Tensor, groups: Grouped, noise_precision: float) -> tuple[Tensor, Tensor]:
    """Set the posterior of one side to its optimum given the moments of the other.

    Args:
        side: the side; its mean, covariance and log-determinants are replaced.
        weighted: the other side's table of moments, each row times that member's noise weight.
        groups: the ratings grouped by the members of this side.
        noise_precision: τ.

    Returns:
        This side's new table of moments (unweighted), and Σ_j β_j E[e_ij²] for each member i.
    """
    n, size = side.mean.shape
    prior_mean = side.prior_mean
    chunk = max(256, _CHUNK_ENTRIES // size**2)
    table = weighted.new_empty(n, weighted.shape[1])
    residual = weighted.new_empty(n)
    for first in range(0, n, chunk):
        part = slice(first, min(first + chunk, n))
        sums, cross, squares = evidence(weighted, groups, part.start, part.stop)
        prior = prior_mean if len(prior_mean) == 1 else prior_mean[part]
        _solve_chunk(side, part, sums, cross, squares, prior, noise_precision, table, residual)
    return table, residual


def evidence(weighted: Tensor, groups: Grouped, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """T_i, h_i and Σ_j β_j x_ij² for a run of groups.

    Args:
        weighted: the other side's table of moments, each row times that member's noise weight.
        groups: the ratings grouped by the members of this side.
        first: the first group.
        last: one past the last group.

    Returns:
        T_i packed and batch-last, h_i batch-last, and the weighted squares.
    """
    size = order_of(weighted.shape[1])
    tables = {0: weighted, 1: weighted[:, -size:].contiguous(), 2: weighted[:, -1:].contiguous()}
    sums, cross, squares = groups.sums(tables, first, last)
    if groups.across is not None:
        length = sums.shape[1]
        joint = groups.total(torch.cat([sums, cross, squares], dim=1))
        sums, cross, squares = joint[:, :length], joint[:, length:-1], joint[:, -1:]
    return sums.T.contiguous(), cross.T.contiguous(), squares[:, 0]


def _solve_chunk(
    side: Side, part: slice, sums: Tensor, cross: Tensor, squares: Tensor, prior_mean: Tensor, noise_precision: float,
    table: Tensor, residual: Tensor,
) -> None:  # fmt: skip
    """Invert the precisions of a run of members and write everything that follows from them."""
    size = side.mean.shape[1]
    gram, pull = normal_equations(sums, cross)
    scale = side.weight[part] * noise_precision
    prior = side.precision.to(sums.dtype)
    precision = gram.mul_(scale).add_(prior[:, :, None])
    pull = pull.mul_(scale).add_(prior @ prior_mean.T)
    if not side.has_offset:
        precision[-1], precision[:, -1], pull[-1] = 0, 0, 0
        precision[-1, -1] = 1
    covariance, log_det = invert_batch_last(precision)
    mean = (covariance * pull).sum(1)
    if not side.has_offset:
        covariance[-1, -1] = 0
    packed = covariance.view(size * size, -1).index_select(0, _square_positions(size, sums.device))
    second, residual[part] = expected_residual(sums, cross, squares, mean, packed)
    side.mean[part], side.covariance[part], side.log_det[part] = mean.T, packed.T, -log_det
    table[part] = second.T


def normal_equations(sums: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
    """The free block of T_i, and h_i less what the other side's offsets explain.

    Args:
        sums: T_i, packed and batch-last.
        cross: h_i, batch-last.

    Returns:
        A (q, q, n) and a (q, n) tensor.
    """
    size = len(cross) - 1
    free, fixed, _, _ = layout(size, sums.device)
    pull = torch.cat([cross[: size - 1], cross[size:]]) - sums.index_select(0, fixed)
    return sums.index_select(0, free).view(size, size, -1), pull


def expected_residual(
    sums: Tensor, cross: Tensor, squares: Tensor, mean: Tensor, packed: Tensor
) -> tuple[Tensor, Tensor]:
    """S_i = Σ_j β_j x_ij² - 2 k̄_i·h_i + tr(E[k_i k_iᵀ] T_i).

    Args:
        sums: T_i, packed and batch-last.
        cross: h_i, batch-last.
        squares: Σ_j β_j x_ij².
        mean: the (q, n) posterior means.
        packed: the packed posterior covariances, batch-last.

    Returns:
        The second moments of (u_i, b_i, 1), packed and batch-last, and S_i.
    """
    size = len(mean)
    _, _, twin, factor = layout(size, sums.device)
    rows, columns = triangle(size + 1, sums.device)
    augmented = torch.cat([mean, mean.new_ones(1, mean.shape[1])])
    second = augmented.index_select(0, rows).mul_(augmented.index_select(0, columns))
    second[: len(packed)] += packed
    coefficients = torch.cat([mean[:-1], augmented[-1:], mean[-1:]])
    fitted = second.index_select(0, twin).mul_(sums).mul_(factor.to(sums)[:, None]).sum(0)
    return second, (squares - 2 * (coefficients * cross).sum(0) + fitted).clamp_(min=0)


@lru_cache(maxsize=64)
def _square_positions(size: int, device: torch.device) -> Tensor:
    rows, columns = triangle(size, device)
    return rows * size + columns
