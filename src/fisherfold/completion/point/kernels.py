"""The passes over the ratings: coefficients, loss, gradient and Fisher products, without a loop over columns.

    a_i = argmin ‖U_i a - x_i‖² + λ_i ‖a‖²,    M_i = U_iᵀU_i + λ_i I,  b_i = U_iᵀx_i,  a_i = M_i⁻¹ b_i
    ∇_j = Σ_{i ∈ Ω^j} (u_jᵀa_i - x_ji) a_i = (Σ_i a_i a_iᵀ) u_j - Σ_i x_ji a_i

Both sums over Ω are segment sums of a small table (packed outer products, or the rows themselves weighted with the
values), so no residual is ever stored. The exact Fisher product uses two more
tables, of p² columns each.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inference.packed import (
    outer_table,
    packed_positions,
    solve_positive,
    unpack,
)
from fisherfold.fisher.blocks import apply_blocks, inverse_blocks

# Gathered rows exist for this many ratings at a time.
CHUNK = 2**20
_ROWS = 2**12


def plain_sum(side: Grouped, table: Tensor) -> Tensor:
    """Σ of the table rows (one per member of the other side) over every group."""
    return side.total(side.sums({0: table})[0])


def value_sum(side: Grouped, table: Tensor) -> Tensor:
    """Σ of the table rows over every group, weighted with the values."""
    return side.total(side.sums({1: table})[0])


def square_sum(side: Grouped, dtype: torch.dtype) -> Tensor:
    """Σ x² over every group."""
    # some groups at a time: the squares in another dtype take more memory than the ratings
    one = torch.ones(side.n_others, 1, dtype=dtype, device=side.offsets.device)
    marks = torch.arange(0, side.n_ratings, CHUNK, dtype=torch.int32, device=side.offsets.device)
    edges = [0, *sorted(set(torch.searchsorted(side.offsets, marks[1:]).tolist())), side.n_groups]
    parts = [side.sums({2: one}, first, last)[0] for first, last in itertools.pairwise(edges)]
    return side.total(torch.cat(parts)).squeeze(1)


@dataclass(frozen=True)
class ColumnFit:
    """The coefficients of some columns at a frame, with the normal equations that gave them."""

    coefficients: Tensor  # a_i, one row per column
    gram: Tensor  # U_iᵀU_i, packed, without the ridge
    rhs: Tensor  # b_i
    ridge: Tensor  # λ_i, one per column
    fallback: Tensor  # the columns that were solved again from their rows, because M_i is singular to working precision
    fallback_inverse: Tensor  # the pseudo-inverses of their M_i

    def penalised_squares(self, squares: Tensor) -> Tensor:
        """‖U_i a_i - x_i‖² + λ_i ‖a_i‖² of every column, from the ‖x_i‖²."""
        a = self.coefficients
        product = matvec(self.gram, a) + self.ridge[:, None] * a
        return (squares + (a * (product - 2 * self.rhs)).sum(1)).clamp(min=0)

    def residual_squares(self, squares: Tensor) -> Tensor:
        """‖U_i a_i - x_i‖² of every column, from the ‖x_i‖²."""
        return (
            self.penalised_squares(squares) - self.ridge * self.coefficients.square().sum(1)
        ).clamp(min=0)

    def inverse(self) -> Tensor:
        """M_i⁻¹ of every column, the pseudo-inverse where M_i is singular."""
        square = unpack(self.gram)
        square.diagonal(dim1=1, dim2=2).add_(self.ridge[:, None])
        square[self.fallback] = torch.eye(square.shape[1], dtype=square.dtype, device=square.device)
        inverse = inverse_blocks(square)
        if inverse is None:
            factor, failed = torch.linalg.cholesky_ex(square)
            inverse = torch.cholesky_inverse(factor)
            if bool((bad := failed > 0).any()):  # at the edge of the working precision
                inverse[bad] = torch.linalg.pinv(square[bad].double(), hermitian=True).to(
                    square.dtype
                )
        inverse[self.fallback] = self.fallback_inverse
        return inverse


def fit_columns(side: Grouped, frame: Tensor, ridge: Tensor) -> ColumnFit:
    """Fit the coefficients of every column of ``side``.

    A column whose normal equations are singular to working precision (fewer ratings than the rank, or rows of the
    frame that are nearly dependent) is solved again in float64 from its rows: the solution of least norm.
    """
    gram, rhs = (side.total(sums) for sums in moments(side, frame))
    coefficients, share = solve_positive(gram, rhs, ridge[:, None])
    fallback = (~(share > torch.finfo(frame.dtype).eps ** 0.5)).nonzero().squeeze(1)
    # A frame that has left the finite numbers keeps its NaN coefficients.
    fallback = fallback[torch.isfinite(gram[fallback]).all(dim=1)]
    inverse = frame.new_zeros(len(fallback), frame.shape[1], frame.shape[1])
    if len(fallback):
        solution, inverse = _least_norm(side, frame, ridge, fallback)
        coefficients[fallback] = solution
    return ColumnFit(coefficients, gram, rhs, ridge, fallback, inverse)


def _least_norm(
    side: Grouped, frame: Tensor, ridge: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    # Columns of similar size share a padded block, and a block holds a bounded number of entries.
    counts = side.counts[columns]
    classes = torch.log2(counts.clamp(min=1).double()).ceil().long()
    solution = frame.new_zeros(len(columns), frame.shape[1])
    inverse = frame.new_zeros(len(columns), frame.shape[1], frame.shape[1])
    for height in sorted(set(classes.tolist())):
        members = (classes == height).nonzero().squeeze(1)
        for block in members.split(max(1, CHUNK >> height)):
            solution[block], inverse[block] = _least_norm_block(side, frame, ridge, columns[block])
    return solution, inverse


def _least_norm_block(
    side: Grouped, frame: Tensor, ridge: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    # SVD of the padded rows with sqrt(λ) I below them: rows of zeros change neither the solution nor its norm.
    positions, offsets = side.select(columns)
    indices, values = side.at(positions)
    counts = offsets.diff().long()
    group = torch.arange(len(columns), device=frame.device).repeat_interleave(counts)
    place = torch.arange(len(positions), device=frame.device) - offsets[:-1].long()[group]
    size, tall = frame.shape[1], int(counts.max())
    rows = frame.new_zeros(len(columns), tall + size, size, dtype=torch.float64)
    right = frame.new_zeros(len(columns), tall + size, dtype=torch.float64)
    rows[group, place] = frame[indices].double()
    right[group, place] = values.double()
    rows[:, tall:].diagonal(dim1=1, dim2=2).copy_(
        ridge[columns].double().sqrt()[:, None].expand(-1, size)
    )
    left, values_, basis = torch.linalg.svd(rows, full_matrices=False)
    cutoff = values_[:, :1] * (tall + size) * torch.finfo(torch.float64).eps
    keep = values_ > cutoff
    reciprocal = torch.where(keep, 1 / torch.where(keep, values_, 1.0), 0.0)
    inner = reciprocal * (left.mT @ right.unsqueeze(-1)).squeeze(-1)
    solution = (basis.mT @ inner.unsqueeze(-1)).squeeze(-1)
    inverse = (basis.mT * reciprocal.square().unsqueeze(1)) @ basis
    return solution.to(frame.dtype), inverse.to(frame.dtype)


def moments(side: Grouped, frame: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
    """Packed Σ u uᵀ, with the sums of further tables to the right, and Σ x u over the ratings in this process."""
    second, weighted = side.sums({0: outer_table(frame, *more), 1: frame})
    return second, weighted


def matvec(packed: Tensor, x: Tensor) -> Tensor:
    """The products of packed symmetric matrices, a (n, p(p+1)/2) table, with the rows of a (n, p) table."""
    # Entry by entry, each a vector over a run of rows that stays in the cache: no (n, p, p) tensor is formed.
    size = x.shape[1]
    positions = packed_positions(size, x.device).flatten()
    out = torch.empty_like(x)
    for start in range(0, len(x), _ROWS):
        part = slice(start, start + _ROWS)
        square = packed[part].T.contiguous().index_select(0, positions).view(size, size, -1)
        out[part] = square.mul_(x[part].T.contiguous()).sum(dim=1).T
    return out


def fisher_product(
    by_column: Grouped,
    by_row: Grouped,
    frame: Tensor,
    fit: ColumnFit,
    inverse: Tensor,
    row_gram: Tensor,
    direction: Tensor,
    *,
    residual_terms: str,
    weights: Tensor | None = None,
) -> Tensor:
    r"""N times the exact Fisher product, Σ_i P_iᵀ[(I - Π_i) H_i a_i a_iᵀ + r_i r_iᵀ H_i M_i⁻¹].

    With K_i = Σ_{j ∈ Ω_i} h_j u_jᵀ (a segment sum of p² columns) all column quantities are p×p algebra:
    w_i = M_i⁻¹ K_iᵀ a_i,  q_i = H_iᵀ r_i = K_i a_i - Σ_j x_ji h_j,  m_i = M_i⁻¹ q_i,  and row j of the product is

        (Σ_i a_i a_iᵀ) h_j + (Σ_i m_i a_iᵀ - a_i w_iᵀ) u_j - Σ_i x_ji m_i.
    """
    a, size = fit.coefficients, frame.shape[1]
    cross = plain_sum(by_column, _products(direction, frame)).view(-1, size, size)
    product = matvec(row_gram, direction)
    w = apply_blocks(inverse, apply_blocks(cross.mT, a))
    if weights is not None:
        mixed = -(weights @ cross @ inverse).flatten(1)
    elif residual_terms == "none":
        mixed = -_products(a, w)
    else:
        q = apply_blocks(cross, a) - value_sum(by_column, direction)
        m = apply_blocks(inverse, q)
        if residual_terms == "expected":
            mixed = _products(m, a) - _products(a, w)
            product = product - value_sum(by_row, m)
        else:
            mixed = -_products(a, w + m) - _products(w + m, a)
            product = product + value_sum(by_row, w + m)
    back = plain_sum(by_row, mixed).view(-1, size, size)
    return product + apply_blocks(back, frame)


def _products(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(2) * y.unsqueeze(1)).flatten(1)
