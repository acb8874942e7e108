"""Where a fit starts, and how it comes to a high rank.

    c_j = Σ_i (x_ij - b_i)/(n_j + λ),   b_i = Σ_j (x_ij - c_j)/(n_i + λ),   R = P_Ω(X - b1ᵀ - 1cᵀ) ≈ U S Vᵀ

Damped offsets come first, then the leading singular vectors of the zero-filled residuals, rows and columns damped by
1/(100 + n): three steps of subspace iteration cost six sparse products and save passes of the fit. Without
the damping the directions are those of the most active members, and on thin tables all others start from nothing.

A higher rank is reached from a fit of lower rank (``raise_rank``): the new factors are the leading singular vectors of
what the old ones leave, and everything learnt so far stays. Passes of the lower rank are cheaper, and on thin tables of
many factors at once each is given so little of the variance that the prior switches some of them off.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped, bag_sum
from fisherfold.completion.inference.packed import pack, unpack
from fisherfold.completion.inference.posterior import WEIGHT_STRENGTH, CompletionPosterior, Side
from fisherfold.completion.inference.prior_mean import FeatureEffects
from fisherfold.completion.ratings import Ratings
from fisherfold.distributed import Axis

_DAMPING, _EVEN = (
    10.0,
    100.0,
)  # pseudo-ratings of value zero in each offset, and in the steps of the iteration
_STEPS = 3
_OVERSAMPLING = 4
_LEAST_SHARE = 0.01  # of the residual variance, given to all new factors together at least
_CHUNK = 2**18
FeatureTable = tuple[Tensor, Tensor]


def start_posterior(
    ratings: Ratings,
    rank: int,
    *,
    ridge: float | None = None,
    row_offsets: bool = True,
    column_offsets: bool = True,
    weight_strength: float = WEIGHT_STRENGTH,
    seed: int = 0,
    features: tuple[FeatureTable | None, FeatureTable | None] = (None, None),
) -> CompletionPosterior:
    """Where a fit starts: offsets and the singular vectors of the residuals."""
    ones = torch.ones(rank, dtype=ratings.dtype, device=ratings.device)
    b, c = _offsets(ratings, row_offsets, column_offsets)
    by_row = _residuals(ratings.by_row, b[:, None], c[:, None])
    by_column = _residuals(ratings.by_column, c[:, None], b[:, None])
    variance = _variance_left(ratings, by_row)
    v, sizes = _right_vectors(
        ratings, by_row, by_column, rank, variance, torch.Generator().manual_seed(seed)
    )
    variances = [
        torch.cat([factors, _variance(offsets, axis).clamp(min=0.01)[None].to(v)])
        for factors, offsets, axis in ((sizes, b, ratings.row_axis), (ones, c, ratings.column_axis))
    ]
    axes = ratings.row_axis, ratings.column_axis
    rows = Side.start(
        torch.cat([v.new_zeros(len(b), rank), b[:, None]], dim=1),
        ratings.row_counts,
        variances[0],
        amounts=ratings.row_amounts,
        has_offset=row_offsets,
        axis=axes[0],
        others=axes[1],
    )
    columns = Side.start(
        torch.cat([v, c[:, None]], dim=1),
        ratings.column_counts,
        variances[1],
        amounts=ratings.column_amounts,
        has_offset=column_offsets,
        axis=axes[1],
        others=axes[0],
    )
    for side, given in zip((rows, columns), features, strict=True):
        if given is not None:
            side.features = FeatureEffects.start(*given, rank + 1)
    return CompletionPosterior(
        rows,
        columns,
        1.2 / variance,
        weight_strength,
        ratings.n_ratings,
        ratings.amount,
        fixed_ridge=ridge,
    )


def raise_rank(
    posterior: CompletionPosterior, ratings: Ratings, rank: int, *, seed: int = 0
) -> CompletionPosterior:
    """Add factors to a posterior."""
    extra = rank - posterior.rank
    if extra < 1:
        raise ValueError(f"rank must be larger than {posterior.rank}, got {rank}")
    rows, columns = posterior.rows, posterior.columns
    by_row = _residuals(ratings.by_row, rows.mean, columns.mean)
    by_column = _residuals(ratings.by_column, columns.mean, rows.mean)
    variance = _variance_left(ratings, by_row)
    v, sizes = _right_vectors(
        ratings,
        by_row,
        by_column,
        extra,
        variance,
        torch.Generator().manual_seed(seed),
        damped=False,
    )
    empty = torch.zeros_like(rows.mean[:, :1]).expand(-1, extra)
    return replace(
        posterior,
        trace=[],
        converged=False,
        rows=_widen(rows, empty, sizes),
        columns=_widen(columns, v, torch.ones_like(sizes)),
    )


def _variance_left(ratings: Ratings, residuals: Tensor) -> float:
    """The weighted mean square of residuals in row order."""
    squares, groups = residuals.double().square(), ratings.by_row
    if groups.weights is not None:
        squares = squares * groups.weights
    if groups.extra_squares is not None:
        squares = squares + groups.extra_squares
    return max(ratings.add(squares) / ratings.amount, 1e-6)


def _residuals(groups: Grouped, own: Tensor, other: Tensor) -> Tensor:
    """Values less predictions, in the order of the groups, a bounded number at a time."""
    parts = []
    for start in range(
        0, max(groups.n_ratings, 1), _CHUNK
    ):  # once for no ratings, of which a process may have none
        stop = min(start + _CHUNK, groups.n_ratings)
        u, v = own[groups.groups(start, stop).long()], other[groups.indices(start, stop).long()]
        fitted = (u[:, :-1] * v[:, :-1]).sum(1) + u[:, -1] + v[:, -1]
        parts.append(groups.values(start, stop) - fitted)
    return torch.cat(parts)


def _widen(side: Side, factors: Tensor, variance: Tensor) -> Side:
    """Put new factors, known exactly, between the old ones and the offset."""
    extra, old = factors.shape[1], side.mean.shape[1]
    keep = [*range(old - 1), old - 1 + extra]
    size = old + extra
    square = side.mean.new_zeros(len(side.mean), size, size)
    square[:, torch.tensor(keep)[:, None], torch.tensor(keep)] = unpack(side.covariance)
    fresh = variance.double()
    precision = torch.eye(size, dtype=torch.float64, device=side.mean.device)
    precision.diagonal()[old - 1 : old - 1 + extra] = 1 / fresh
    precision[torch.tensor(keep)[:, None], torch.tensor(keep)] = side.precision
    effects, features = side.set_effects, side.features
    if effects is not None:
        effects = replace(
            effects, effects=_insert(effects.effects, extra), sums=_insert(effects.sums, extra)
        )
    if features is not None:
        features = replace(features, weights=_insert(features.weights, extra))
    return replace(
        side,
        features=features,
        mean=torch.cat([side.mean[:, :-1], factors, side.mean[:, -1:]], dim=1),
        covariance=pack(square),
        precision=precision,
        center=_insert(side.center[None], extra)[0],
        set_effects=effects,
        start_variance=torch.cat([side.start_variance[:-1], fresh, side.start_variance[-1:]]),
        log_det=side.log_det.clone(),
    )


def _insert(table: Tensor, extra: int) -> Tensor:
    return torch.cat([table[:, :-1], table.new_zeros(len(table), extra), table[:, -1:]], dim=1)


def _variance(x: Tensor, axis: Axis) -> Tensor:
    return axis.mean((x - axis.mean(x)).square())


def _offsets(ratings: Ratings, row_offsets: bool, column_offsets: bool) -> tuple[Tensor, Tensor]:
    """Two sweeps of damped means; zero where there is no offset."""
    sides, axes = (ratings.by_row, ratings.by_column), (ratings.column_axis, ratings.row_axis)
    ones = [torch.ones(len(axis), dtype=ratings.dtype, device=ratings.device) for axis in axes]
    values = [_sums(side, one, 1) for side, one in zip(sides, ones, strict=True)]
    counts = [n.to(v) + _DAMPING for n, v in zip(_weight_sums(ratings), values, strict=True)]
    b, c = (torch.zeros_like(v) for v in values)
    for _ in range(2):
        if column_offsets:
            c = (values[1] - _sums(ratings.by_column, b, 0)) / counts[1]
        if row_offsets:
            b = (values[0] - _sums(ratings.by_row, c, 0)) / counts[0]
    return b, c


def _weight_sums(ratings: Ratings) -> tuple[Tensor, Tensor]:
    """The weights of the ratings of each row and of each column."""
    if not ratings.is_weighted:
        return ratings.row_counts, ratings.column_counts
    one = torch.ones(1, dtype=ratings.dtype, device=ratings.device)
    row, column = (
        _sums(groups, one.expand(groups.n_others), 0)
        for groups in (ratings.by_row, ratings.by_column)
    )
    return row, column


def _sums(groups: Grouped, vector: Tensor, power: int) -> Tensor:
    """Per group, the sum of value^power times the entries of a vector that it refers to."""
    return groups.total(groups.sums({power: vector[:, None].contiguous()})[0][:, 0])


def _right_vectors(
    ratings: Ratings,
    by_row: Tensor,
    by_column: Tensor,
    rank: int,
    variance: float,
    generator: torch.Generator,
    *,
    damped: bool = True,
) -> tuple[Tensor, Tensor]:
    """The leading right singular vectors of residuals by subspace iteration, then small noise; and their sizes."""
    # Σ_j r_ij v_j = u_i d_i + noise of variance d_i E[e²] with d_i = Σ_{j ∈ Ω_i} v_j², and its squares tell E[u_i²].
    width = min(rank + _OVERSAMPLING, ratings.n_columns)
    axis = ratings.column_axis
    v = axis.randn(width, generator).to(by_row)
    rows, columns = ratings.by_row, ratings.by_column
    of_rows, of_columns = rows.indices(), columns.indices()
    even = [1 / (_EVEN + n.to(v)[:, None]) if damped else 1.0 for n in _weight_sums(ratings)]
    if rows.weights is not None and columns.weights is not None:
        by_row, by_column = by_row * rows.weights, by_column * columns.weights
    for _ in range(_STEPS):
        u = rows.total(bag_sum(v, of_rows, rows.offsets, by_row)) * even[0]
        v = axis.orthonormal(
            columns.total(bag_sum(u, of_columns, columns.offsets, by_column)) * even[1]
        )
    u = rows.total(bag_sum(v, of_rows, rows.offsets, by_row))
    directions = torch.linalg.eigh(ratings.row_axis.second_moment(u))[1].flip(1)
    v, u = v @ directions[:, :rank], u @ directions[:, :rank]
    shares = rows.total(bag_sum(v * v, of_rows, rows.offsets, rows.weights))
    sums = torch.stack([table.double().sum(0) for table in (u * u, shares, shares * shares)])
    squares, noise, norm = ratings.row_axis.total(sums)
    least = _LEAST_SHARE * variance / rank
    sizes = v.new_full((rank,), least)
    sizes[: v.shape[1]] = (
        ((squares - variance * noise) / (ratings.n_columns * norm)).clamp(min=least).to(v)
    )
    if (
        v.shape[1] < rank
    ):  # more factors than columns: the surplus starts as noise and is switched off by the prior
        spare = axis.randn(rank - v.shape[1], generator).to(v)
        v = torch.cat([v, spare / math.sqrt(ratings.n_columns)], dim=1)
    return v * math.sqrt(ratings.n_columns), sizes
