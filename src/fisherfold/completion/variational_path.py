"""From a fit of low rank to the start of one of higher rank, and the start of fits to few ratings.

The new factors are the leading singular vectors of what the old ones leave, P_Ω(X - g - b1ᵀ - 1cᵀ - U Vᵀ); everything
learnt so far stays. A path over ranks then costs little more than its last fit.

Where there are fewer than three ratings for each coefficient, such a path is the only good start: of many factors at
once, each is given so little of the variance that the prior switches some or all of them off before they have found
what the data show, and the fit ends in a local maximum of the bound without them. New factors are therefore few, half
as many as the old ones, and share what is left of the variance among themselves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inverse import pack
from fisherfold.completion.packed import unpack
from fisherfold.completion.ratings import Ratings
from fisherfold.completion.sides import Side
from fisherfold.completion.variational import CompletionPosterior, fit_variational, start_posterior
from fisherfold.completion.variational_start import FACTOR_SHARE, right_vectors

_CHUNK = 2**18
_RATINGS_EACH = 3  # for each coefficient of the first rank: with 2 a factor dies in every fifth table of 500 ids
_PASSES = 10  # at most, with each rank on the way


def gradual_start(ratings: Ratings, rank: int, *, set_effects: bool = True, **model: Any) -> CompletionPosterior:
    """Where a fit starts: ``start_posterior``, or a path over ranks where a coefficient has less than three ratings.

    Args:
        ratings: the ratings, centred and of about unit variance.
        rank: the number of factors.
        set_effects: as in ``fit_variational``.
        **model: further options of ``start_posterior``. With a ridge no factor is switched off, and none is held back.

    Returns:
        The posterior, without a trace.
    """
    first = rank if model.get("ridge") is not None else min(rank, largest_first(ratings))
    posterior = start_posterior(ratings, first, **model)
    while posterior.rank < rank:
        posterior = fit_variational(
            ratings, posterior.rank, max_iter=_PASSES, set_effects=set_effects, init=posterior, **model
        )
        larger = posterior.rank + max(1, posterior.rank // 2)
        posterior = raise_rank(posterior, ratings, min(larger, rank), seed=model.get("seed", 0))
    return posterior


def largest_first(ratings: Ratings) -> int:
    """The largest rank whose factors can be added at once, without some of them being switched off.

    Args:
        ratings: the ratings.

    Returns:
        At least 1.
    """
    return max(1, ratings.n_ratings // (_RATINGS_EACH * sum(ratings.shape)))


def raise_rank(posterior: CompletionPosterior, ratings: Ratings, rank: int, *, seed: int = 0) -> CompletionPosterior:
    """Add factors to a posterior.

    Args:
        posterior: a fitted posterior; it is left as it is.
        ratings: the ratings it was fitted to.
        rank: the new rank, larger than the old one.
        seed: of the random test matrix.

    Returns:
        The start of a fit with the new rank.

    Raises:
        ValueError: if the rank does not grow.
    """
    extra = rank - posterior.rank
    if extra < 1:
        raise ValueError(f"rank must be larger than {posterior.rank}, got {rank}")
    rows, columns = posterior.rows, posterior.columns
    by_row = _residuals(ratings.by_row, rows.mean, columns.mean)
    by_column = _residuals(ratings.by_column, columns.mean, rows.mean)
    variance = max(ratings.add(by_row.double().square()) / ratings.n_ratings, 1e-6)
    v = right_vectors(ratings, by_row, by_column, extra, torch.Generator().manual_seed(seed))
    v = v * math.sqrt(ratings.n_columns)
    return replace(
        posterior, trace=[], converged=False,
        rows=_widen(rows, torch.zeros_like(rows.mean[:, :1]).expand(-1, extra), FACTOR_SHARE * variance / extra),
        columns=_widen(columns, v, 1.0),
    )  # fmt: skip


def _residuals(groups: Grouped, own: Tensor, other: Tensor) -> Tensor:
    """Values less predictions, in the order of the groups, a bounded number at a time."""
    parts = []
    for start in range(0, max(groups.n_ratings, 1), _CHUNK):  # once for no ratings, of which a process may have none
        stop = min(start + _CHUNK, groups.n_ratings)
        u, v = own[groups.groups(start, stop).long()], other[groups.indices(start, stop).long()]
        fitted = (u[:, :-1] * v[:, :-1]).sum(1) + u[:, -1] + v[:, -1]
        parts.append(groups.values(start, stop) - fitted)
    return torch.cat(parts)


def _widen(side: Side, factors: Tensor, variance: float) -> Side:
    """Put new factors, known exactly, between the old ones and the offset."""
    extra, old = factors.shape[1], side.mean.shape[1]
    keep = [*range(old - 1), old - 1 + extra]
    size = old + extra
    square = side.mean.new_zeros(len(side.mean), size, size)
    square[:, torch.tensor(keep)[:, None], torch.tensor(keep)] = unpack(side.covariance)
    precision = torch.eye(size, dtype=torch.float64, device=side.mean.device) / variance
    precision[torch.tensor(keep)[:, None], torch.tensor(keep)] = side.precision
    fresh = torch.full((extra,), variance, dtype=torch.float64, device=side.mean.device)
    effects = side.set_effects
    if effects is not None:
        effects = replace(effects, effects=_insert(effects.effects, extra), sums=_insert(effects.sums, extra))
    return replace(
        side, mean=torch.cat([side.mean[:, :-1], factors, side.mean[:, -1:]], dim=1), covariance=pack(square),
        precision=precision, center=_insert(side.center[None], extra)[0], set_effects=effects,
        start_variance=torch.cat([side.start_variance[:-1], fresh, side.start_variance[-1:]]),
        log_det=side.log_det.clone(),
    )  # fmt: skip


def _insert(table: Tensor, extra: int) -> Tensor:
    return torch.cat([table[:, :-1], table.new_zeros(len(table), extra), table[:, -1:]], dim=1)
