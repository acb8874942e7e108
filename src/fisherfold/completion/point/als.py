r"""Completion with a ridge on both factors and offsets inside: alternating least squares, a natural gradient method.

    min  ½ Σ_{(j,i) ∈ Ω} (x_ji - μ - β_j - γ_i - l_jᵀr_i)² + ½ Σ_j w_j (λ‖l_j‖² + λ₀β_j²) + ½ Σ_i v_i (λ‖r_i‖² + λ₀γ_i²)

With w = v = 1 and L = U T, R = A T⁻ᵀ (U a frame), the penalty is λ (tr S + tr AᵀA S⁻¹)/2 with S = T Tᵀ, and its least
value over S is λ ‖A‖_* at S = (AᵀA)^{1/2}. So this is Ψ(U) = min_A ½ ‖P_Ω(UAᵀ - X)‖² + λ ‖A‖_* on Gr(n, p): a prior
covariance S of the coefficients is carried along with the frame. A half-step in L is one natural-gradient step of
length 1 with the row-block Fisher Σ_i a_i a_iᵀ damped by λ S: u_j ← (Σ_i a_i a_iᵀ + λ w_j S)⁻¹ Σ_i x_ji a_i. A plain
ridge λ ‖A‖² on the Grassmann manifold shrinks all directions alike instead, and predicts worse. Weights
w_j = (n_j/n̄)^α give the weighted nuclear norm, which spares the seldom rated; α = 1 is a ridge per rating.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inference.packed import solve_positive
from fisherfold.completion.point.kernels import moments, square_sum, value_sum
from fisherfold.completion.ratings import Ratings

_PAIRS = 2**20  # predicted at a time


@dataclass(frozen=True)
class Penalty:
    """λ, λ_0 and the exponent α of the weights (n_j/n̄)^α."""

    ridge: float  # λ > 0
    offset_ridge: float  # λ_0 > 0
    power: float = 0.5  # α, between 0 and 1

    def weights(self, counts: Tensor, mean: float) -> Tensor:
        """The weights of rows or columns with so many ratings, n̄ on average."""
        return (counts.clamp(min=1) / mean) ** self.power


@dataclass(frozen=True)
class Factors:
    """A point: μ, offsets β and γ, factors L and R; over several processes the members of each."""

    mean: float  # μ
    rows: Tensor  # L
    columns: Tensor  # R
    row_offset: Tensor  # β; zero if the model has none
    column_offset: Tensor  # γ; zero if the model has none
    with_row_offset: bool  # whether β is fitted
    with_column_offset: bool  # whether γ is fitted

    def predict(self, rows: Tensor, columns: Tensor) -> Tensor:
        """μ + β_j + γ_i + l_jᵀ r_i for pairs (j, i)."""
        values = self.rows.new_empty(len(rows))
        for start in range(0, len(rows), _PAIRS):
            part = slice(start, start + _PAIRS)
            j, i = rows[part], columns[part]
            inner = (self.rows.index_select(0, j) * self.columns.index_select(0, i)).sum(1)
            values[part] = inner + self.row_offset[j] + self.column_offset[i] + self.mean
        return values

    def mean_square_error(self, ratings: Ratings) -> float:
        """Σ (x_ji - prediction)² over the number of ratings."""
        rows, columns, values = ratings.entries()
        return ratings.add((self.predict(rows, columns) - values).double().square()) / ratings.n_ratings

    @property
    def T(self) -> Factors:
        """The same for the transposed matrix."""
        return Factors(
            self.mean, self.columns, self.rows, self.column_offset, self.row_offset, self.with_column_offset,
            self.with_row_offset,
        )  # fmt: skip


class TwoSided:
    """The problem: ratings with a penalty, and the exact steps in one side."""

    def __init__(self, ratings: Ratings, penalty: Penalty) -> None:
        self.ratings, self.penalty = ratings, penalty
        self.row_weights = penalty.weights(ratings.row_counts.to(ratings.dtype), ratings.n_ratings / ratings.n_rows)
        self.column_weights = penalty.weights(
            ratings.column_counts.to(ratings.dtype), ratings.n_ratings / ratings.n_columns
        )
        self._row_sums, self._column_sums = _value_sums(ratings.by_row), _value_sums(ratings.by_column)
        self._squares = ratings.add(square_sum(ratings.by_column.here(), torch.float64))

    @property
    def T(self) -> TwoSided:
        """The problem of the transposed matrix; nothing is computed again."""
        new = TwoSided.__new__(TwoSided)
        new.ratings, new.penalty, new._squares = self.ratings.T, self.penalty, self._squares
        new.row_weights, new.column_weights = self.column_weights, self.row_weights
        new._row_sums, new._column_sums = self._column_sums, self._row_sums
        return new

    def column_step(self, at: Factors) -> tuple[Factors, float]:
        """The exact minimum over R and γ for fixed L and β."""
        rank, side = at.rows.shape[1], self.ratings.by_column
        table = at.rows
        if at.with_column_offset:
            table = torch.cat([at.rows, at.rows.new_ones(len(at.rows), 1)], dim=1)
        known = at.row_offset + at.mean
        size = table.shape[1]
        length = size * (size + 1) // 2
        sums, weighted = (side.total(part) for part in moments(side, table, known[:, None] * table))
        rhs = weighted - sums[:, length:]
        levels = table.new_full((1, size), self.penalty.ridge)
        levels[0, rank:] = self.penalty.offset_ridge
        solution, _ = solve_positive(sums[:, :length], rhs, self.column_weights[:, None] * levels)
        new = replace(at, columns=solution[:, :rank].contiguous())
        if at.with_column_offset:
            new = replace(new, column_offset=solution[:, rank].contiguous())
        # At this minimum, squares + penalty of the columns = squares of what is left of the values - solution·rhs.
        explained = self.ratings.column_axis.add(solution * rhs)
        return new, (self._left(known) - explained + self._row_penalty(at)) / (2 * self.ratings.n_ratings)

    def row_step(self, at: Factors) -> tuple[Factors, float]:
        """The exact minimum over L and β for fixed R and γ."""
        new, objective = self.T.column_step(at.T)
        return new.T, objective

    def sweep(self, at: Factors) -> tuple[Factors, float]:
        """A step in each side from the balanced point."""
        return self.column_step(self.balance(self.row_step(at)[0]))

    def _left(self, known: Tensor) -> float:
        # Σ (x - known_j)² from the sums of each row, without touching the ratings again.
        known, counts = known.double(), self.ratings.row_counts.double()
        return self._squares + self.ratings.row_axis.add(known * (known * counts - 2 * self._row_sums))

    def _row_penalty(self, at: Factors) -> float:
        lengths = self.penalty.ridge * at.rows.square().sum(1) + self.penalty.offset_ridge * at.row_offset.square()
        return self.ratings.row_axis.add(self.row_weights * lengths)

    def balance(self, at: Factors) -> Factors:
        """The best S for the product L Rᵀ: coordinates in which LᵀWL and RᵀVR are equal and diagonal."""
        left = at.rows * self.row_weights.sqrt()[:, None]
        right = at.columns * self.column_weights.sqrt()[:, None]
        left_gram = self.ratings.row_axis.second_moment(left).double()
        right_gram = self.ratings.column_axis.second_moment(right).double()
        if float(left_gram.trace() * right_gram.trace()) ** 0.5 <= torch.finfo(left.dtype).tiny ** 0.25:
            return at  # nothing left to balance
        values, vectors = torch.linalg.eigh(left_gram)
        values = values.clamp(min=float(values.max()) * 1e-14 + 1e-300).sqrt()
        root, inverse = (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT
        strength, turn = torch.linalg.eigh(root @ right_gram @ root)
        strength, turn = strength.flip(0), turn.flip(1)
        scale = strength.clamp(min=float(strength.max()) * 1e-28 + 1e-300) ** 0.25
        rows = at.rows @ (inverse @ turn * scale).to(left)
        return replace(at, rows=rows, columns=at.columns @ (root @ turn / scale).to(left))


def _value_sums(side: Grouped) -> Tensor:
    one = torch.ones(side.n_others, 1, dtype=side.dtype, device=side.offsets.device)
    return value_sum(side, one).squeeze(1).double()


def additive_model(ratings: Ratings, penalty: Penalty, *, rows: bool, columns: bool, mean: bool) -> Factors:
    """Offsets alone, fitted by two alternating passes."""
    dtype, device = ratings.dtype, ratings.device

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    at = Factors(
        ratings.mean if mean else 0.0, zeros(len(ratings.row_axis), 0), zeros(len(ratings.column_axis), 0),
        zeros(len(ratings.row_axis)), zeros(len(ratings.column_axis)), rows, columns,
    )  # fmt: skip
    problem = TwoSided(ratings, penalty)
    for _ in range(2 if rows and columns else 1):
        if columns:
            at, _ = problem.column_step(at)
        if rows:
            at, _ = problem.row_step(at)
    return at


def residual_product(ratings: Ratings, at: Factors, table: Tensor) -> Tensor:
    """The matrix of residuals, zero at holes, times a table with one row per column."""
    rank, width = at.rows.shape[1], table.shape[1]
    known = (at.column_offset + at.mean)[:, None] * table
    mixed = (at.columns.unsqueeze(2) * table.unsqueeze(1)).flatten(1)
    side = ratings.by_row
    sums, weighted = side.sums({0: torch.cat([table, known, mixed], dim=1), 1: table})
    sums = side.total(sums)
    product = side.total(weighted) - at.row_offset[:, None] * sums[:, :width] - sums[:, width : 2 * width]
    if rank:
        inner = sums[:, 2 * width :].view(-1, rank, width)
        product = product - (at.rows.unsqueeze(1) @ inner).squeeze(1)
    return product


def grow(ratings: Ratings, at: Factors, rank: int, generator: torch.Generator, *, sweeps: int = 3) -> Factors:
    """Raise the rank by the leading singular vectors of the residuals, holes read as zero."""
    more = rank - at.rows.shape[1]
    if more <= 0:
        return at
    right = ratings.column_axis.randn(more, generator).to(at.rows)
    for _ in range(sweeps):
        left = ratings.row_axis.orthonormal(residual_product(ratings, at, right))
        right = residual_product(ratings.T, at.T, left)
    lengths = ratings.column_axis.total(right.square().sum(0)).sqrt()
    scale = lengths.clamp(min=torch.finfo(right.dtype).tiny).sqrt()
    rows, columns = torch.cat([at.rows, left * scale], dim=1), torch.cat([at.columns, right / scale], dim=1)
    return replace(at, rows=rows, columns=columns)
