"""Matrix completion with the coefficients of both sides integrated out.

    x_ij = g + b_i + c_j + ⟨u_i, v_j⟩ + e_ij,    e_ij ~ N(0, 1/(τ α_i β_j)),    α_i, β_j ~ Gamma(ν/2, ν/2)

Rows (u_i, b_i) and columns (v_j, c_j) have Gaussian priors that are learnt (``posterior``) and a mean-field posterior
q = Π q(u_i, b_i) Π q(v_j, c_j) Π q(α_i) Π q(β_j). One half-step (``update_side``) sets all rows to the optimum given
the columns, from sums over their ratings (``gram``), and gives the residuals S_i = Σ_j β_j E[e_ij²]; then
α_i = (ν + n_i)/(ν + τ S_i), τ = N/Σ_i α_i S_i. Each of these is the exact maximiser of the evidence lower bound in its
block, so the bound never decreases. It is also a step of length one along the natural gradient of the bound in the
geometry of the posterior.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inference.gram import Evidence, Summands, moments
from fisherfold.completion.inference.packed import solve_batch
from fisherfold.completion.inference.posterior import WEIGHT_STRENGTH, CompletionPosterior, Side
from fisherfold.completion.inference.start import FeatureTable, raise_rank, start_posterior
from fisherfold.completion.inference.working_ratings import WorkingRatings
from fisherfold.completion.ratings import Ratings
from fisherfold.completion.scoring import column_spread, row_spread

# The path over ranks: ratings for each coefficient of the first rank; the largest rank without a path, where a higher
# one starts, the growth of a rank; the tolerance and the most passes of a rank on the way.
_RATINGS_EACH, _AT_ONCE, _FIRST, _GROWTH, _ON_THE_WAY, _PASSES = 2, 48, 24, 3, 3e-4, 12
# Momentum of the rows where a pass moves predictions by more than half of what the last one did. A pass that lowers the
# bound is taken back and done without.
_MOMENTUM, _SLOW = 0.7, 0.5
# The last pass moves predictions by less than so many times the tolerance of the bound. Held-out errors settle with the
# predictions; at a high rank the bound goes on rising for long, by switching factors off.
_MOVE, _SAMPLE = 30.0, 2**14
_SPREAD_ROWS = 2**13  # members whose tables of variances are held at once
_NEWTON_STEPS = 3  # for the noise and the weights of one side
_CHUNK_ENTRIES = (
    2**18
)  # of the (n, q, q) working arrays: they stay in the cache, and memory stays bounded


def fit_variational(
    ratings: Ratings,
    rank: int,
    *,
    max_iter: int = 50,
    tol: float = 3e-4,
    ridge: float | None = None,
    row_offsets: bool = True,
    column_offsets: bool = True,
    set_effects: bool = True,
    weight_strength: float = WEIGHT_STRENGTH,
    seed: int = 0,
    callback: Callable[[CompletionPosterior], None] | None = None,
    init: CompletionPosterior | None = None,
    working: WorkingRatings | None = None,
    features: tuple[FeatureTable | None, FeatureTable | None] = (None, None),
) -> CompletionPosterior:
    """Fit the posterior by coordinate ascent on the evidence lower bound.

    Example:
        >>> r = Ratings([0, 0, 1, 1, 2], [0, 1, 0, 1, 0], [1.0, -1.0, 1.1, -0.9, 0.2], shape=(3, 2))
        >>> posterior = fit_variational(r, 1)
        >>> all(b["bound"] >= a["bound"] for a, b in zip(posterior.trace, posterior.trace[1:]))
        True
    """
    if init is None:
        init = start_posterior(
            ratings,
            rank,
            ridge=ridge,
            row_offsets=row_offsets,
            column_offsets=column_offsets,
            weight_strength=weight_strength,
            seed=seed,
            features=features,
        )
    posterior, began = init, time.perf_counter()
    before = posterior.trace[-1].get("seconds", 0.0) if posterior.trace else 0.0
    floor = noise_floor(ratings.dtype)
    rows, columns = posterior.rows, posterior.columns
    row_step = ratings.by_row, ratings.by_column, set_effects, floor, working, 0
    column_step = ratings.by_column, ratings.by_row, set_effects, floor, working, 1
    if working is not None:
        working.begin(posterior)
    table, ahead = moments(columns.mean, columns.covariance), None
    sample = _Sample(ratings)
    sample.moved(posterior)
    for iteration in range(len(posterior.trace) + 1, 1 if posterior.converged else max_iter + 1):
        last = posterior.trace[-1]["bound"] if posterior.trace else -math.inf
        moves = [record["moved"] for record in posterior.trace[-2:]]
        old = rows.mean.clone() if len(moves) == 2 and moves[1] > _SLOW * moves[0] else None
        table = _half_pass(posterior, rows, columns, table, *row_step)
        if old is None:
            table = _half_pass(posterior, columns, rows, table, *column_step)
            bound = posterior.bound()
        else:
            kept = [(part, vars(part).copy()) for part in (posterior, rows, columns)]
            plain, ahead = rows.mean, torch.lerp(old, rows.mean, 1 + _MOMENTUM)
            rows.mean = ahead
            table = _half_pass(
                posterior, columns, rows, moments(ahead, rows.covariance), *column_step
            )
            if (bound := posterior.bound()) < last:
                for (
                    part,
                    values,
                ) in kept:  # members of the columns were changed in place, and are set once more
                    vars(part).update(values)
                rows.mean = ahead = plain
                table = _half_pass(
                    posterior, columns, rows, moments(plain, rows.covariance), *column_step
                )
                bound = posterior.bound()
        record = {
            "iteration": iteration,
            "seconds": before + time.perf_counter() - began,
            "bound": bound,
        }
        moved = sample.moved(posterior)
        posterior.trace.append(record | {"noise": posterior.noise_precision**-0.5, "moved": moved})
        gain = record["bound"] - last
        if ratings.by_row.excess is not None:  # the noise is not that of the largest bound
            gain = abs(gain)
        posterior.converged = gain < tol or moved < _MOVE * tol
        if old is not None:
            rows.mean = plain  # the next momentum, of a resumed fit as well, is the difference of rows without any
        if callback is not None:
            callback(posterior)
        if posterior.converged:
            break
    if ahead is not None:
        rows.mean = ahead
    return posterior


class _Sample:
    """An even sample of the ratings: their predictions tell how far a pass moves the posterior."""

    def __init__(self, ratings: Ratings) -> None:
        groups = ratings.by_row
        every = max(1, ratings.n_ratings // _SAMPLE)
        places = torch.arange(0, groups.n_ratings, every, dtype=torch.int32, device=ratings.device)
        self.rows = torch.searchsorted(groups.offsets, places, right=True) - 1
        self.columns, self.add = groups.at(places)[0], ratings.add
        self.count, self.fitted = ratings.add(torch.ones_like(places)), torch.zeros(())

    def moved(self, posterior: CompletionPosterior) -> float:
        """The root mean square change of the predictions since the last call."""
        last, self.fitted = self.fitted, posterior.predict(self.rows, self.columns)[0]
        return math.sqrt(self.add((self.fitted - last.to(self.fitted)).square()) / self.count)


def _half_pass(
    posterior: CompletionPosterior,
    side: Side,
    given: Side,
    table: Tensor,
    groups: Grouped,
    others: Grouped,
    set_effects: bool,
    floor: float,
    working: WorkingRatings | None,
    order: int,
) -> Tensor:
    """Update one side given the other, then noise, prior mean and prior; this side's table of moments."""
    values = groups if working is None else working.refresh(posterior)[order]
    table, residual = update_side(
        side, table.mul_(given.weight[:, None]), values, posterior.noise_precision
    )
    if values.excess is not None:
        residual = (residual + _excess_variance(side, given, values)).clamp_(min=0)
    _update_noise(posterior, side, residual, floor)
    if set_effects:
        side.update_set_effects(groups, others)
    side.update_features()
    _update_prior(posterior, side)
    side.invalidate()
    return table


def _excess_variance(side: Side, given: Side, groups: Grouped) -> Tensor:
    """Σ_j β_j w (w - 1) Var η_ij for every member.

    The residuals of a weighted fit to ratings of one noise, Σ w e², fall short of Σ w σ² by Σ w² Var η, which is what
    must be added to them; w equal ratings of weight 1 would fall short by Σ w Var η, which they contain already.
    """
    table = column_spread(given.mean, given.covariance) * given.weight[:, None]
    by_excess = replace(groups, weights=groups.excess, extra_squares=None)
    found = []
    for first in range(0, len(side.mean), _SPREAD_ROWS):
        last = min(first + _SPREAD_ROWS, len(side.mean))
        sums = groups.total(by_excess.sums({0: table}, first, last)[0])
        part = row_spread(side.mean[first:last], side.covariance[first:last])
        found.append((part * sums).sum(1))
    return torch.cat(found)


def gradual_start(
    ratings: Ratings, rank: int, *, set_effects: bool = True, **model: Any
) -> CompletionPosterior:
    """Where a fit starts: ``start_posterior``, or a path over ranks where the rank is high or ratings are few."""
    first = rank if model.get("ridge") is not None else first_rank(ratings, rank)
    posterior = start_posterior(ratings, first, **model)
    while posterior.rank < rank:
        posterior = fit_variational(
            ratings,
            posterior.rank,
            max_iter=_PASSES,
            tol=_ON_THE_WAY,
            set_effects=set_effects,
            init=posterior,
            **model,
        )
        posterior = raise_rank(
            posterior, ratings, _next_rank(posterior.rank, rank), seed=model.get("seed", 0)
        )
    return posterior


def first_rank(ratings: Ratings, rank: int) -> int:
    """The rank at which a fit starts: with more factors at once some would be switched off, or passes cost too much."""
    allowed = max(1, ratings.n_ratings // (_RATINGS_EACH * sum(ratings.shape)))
    return min(allowed, rank if rank <= _AT_ONCE else _FIRST)


def _next_rank(rank: int, last: int) -> int:
    return last if _GROWTH * rank > 0.7 * last else _GROWTH * rank


def update_side(
    side: Side, weighted: Tensor, groups: Grouped, noise_precision: float, *, known: bool = False
) -> tuple[Tensor, Tensor]:
    """Set one side to its optimum given the moments of the other; its moments, with ``known`` those of the mean."""
    n, size = side.mean.shape
    prior_mean = side.prior_mean
    chunk = max(64, _CHUNK_ENTRIES // size**2)
    table = weighted.new_empty(n, weighted.shape[1])
    residual = weighted.new_empty(n)
    summands = Summands(weighted)
    block = chunk * max(1, summands.block // chunk)
    for begin in range(0, n, block):
        evidence = summands.collect(groups, begin, min(begin + block, n))
        for first in range(begin, min(begin + block, n), chunk):
            part = slice(first, min(first + chunk, n))
            prior = prior_mean if len(prior_mean) == 1 else prior_mean[part]
            own = evidence.part(slice(first - begin, part.stop - begin))
            table[part], residual[part] = update_members(
                side, part, own, prior, noise_precision, known
            )
    return table, residual


def update_members(
    side: Side,
    part: slice,
    evidence: Evidence,
    prior_mean: Tensor,
    noise_precision: float,
    known: bool = False,
) -> tuple[Tensor, Tensor]:
    """Set a run of members to precision K + τ α_i T_i; their second moments and expected squared residuals."""
    gram, pull = evidence.normal_equations()
    scale = side.weight[part, None] * noise_precision
    prior = side.precision.to(gram.dtype)
    precision = gram.mul_(scale[:, :, None]).add_(prior)
    pull = pull.mul_(scale).add_(prior_mean @ prior)
    mean, packed, log_det = optimum(side, precision, pull)
    second, residual = evidence.residual(mean, packed[:, :0] if known else packed)
    side.mean[part], side.covariance[part], side.log_det[part] = mean, packed, log_det
    return second, residual


def optimum(side: Side, precision: Tensor, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means, packed covariances and their log-determinants of members, offsets that are not free being zero."""
    if not side.has_offset:
        precision[:, -1], precision[:, :, -1], pull[:, -1] = 0, 0, 0
        precision[:, -1, -1] = 1
    mean, packed, log_det = solve_batch(precision, pull)
    if not side.has_offset:
        packed[:, -1] = 0
    return mean, packed, -log_det


def _update_noise(
    posterior: CompletionPosterior, side: Side, residual: Tensor, floor: float
) -> None:
    """Set the noise weights of one side, and τ, to the values that maximise the bound."""
    strength = posterior.weight_strength
    if strength and posterior.fixed_ridge is None and posterior.ordinal is None:
        posterior.noise_precision = _joint_precision(posterior, side, residual)
    if strength:
        side.weighted_sse = residual * posterior.noise_precision
        side.weight = (strength + side.amounts) / (strength + side.weighted_sse)
    posterior.weighted_sse = float(side.total((side.weight * residual).sum(dtype=torch.float64)))
    amount, total = posterior.amount, posterior.weighted_sse
    if posterior.fixed_ridge is not None:
        for each in (posterior.rows, posterior.columns):
            amount += each.size * each.n_free
            total += posterior.fixed_ridge * float(each.deviation().trace())
    if posterior.ordinal is None:
        posterior.noise_precision = amount / max(total, floor * amount)


def _joint_precision(posterior: CompletionPosterior, side: Side, residual: Tensor) -> float:
    """τ where it and the noise weights of one side are at their joint optimum.

    Σ_i (ν + n_i) τ S_i / (ν + τ S_i) = N: by turns, τ and the weights would move each other by a share ν/(ν + n_i).
    """
    strength, tau = posterior.weight_strength, posterior.noise_precision
    squares, amounts = residual.double(), side.amounts.double()
    for _ in range(_NEWTON_STEPS):
        share = tau * squares / (strength + tau * squares)
        told = (strength + amounts) * share
        sums = torch.stack([told.sum(), (told * (1 - share)).sum()])
        total, slope = side.total(sums).tolist()
        step = (posterior.amount - total) / max(slope, 1e-3 * posterior.amount)
        tau *= math.exp(min(max(step, -1.0), 1.0))
    return tau


def _update_prior(posterior: CompletionPosterior, side: Side) -> None:
    """Set the prior of one side: learnt, or the given ridge."""
    if posterior.fixed_ridge is None:
        side.update_prior()
        return
    for each in (posterior.rows, posterior.columns):
        each.fix_prior(posterior.fixed_ridge * posterior.noise_precision)


def noise_floor(dtype: torch.dtype) -> float:
    """The smallest noise variance, relative to that of the ratings, that the sums of a dtype can resolve."""
    return 1e-6 if dtype == torch.float32 else 1e-12
