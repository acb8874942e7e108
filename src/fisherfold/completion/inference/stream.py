"""New ratings without a new fit: the natural-gradient step of variational inference on a stream.

A Gaussian q(u_i) has the natural parameters (Λ_i ū_i, Λ_i), Λ_i = V_i⁻¹. In these the natural gradient of the bound is
the difference between its maximiser and the current value, so a step of length one on the bound of new ratings, with
the posterior so far in the place of the prior, adds their evidence:

    Λ_i ← Λ_i + τ α_i Σ_{j new} β_j E[a_j a_jᵀ],      Λ_i ū_i ← Λ_i ū_i + τ α_i Σ_{j new} β_j x_ij E[a_j]

(free rows and columns, offsets of the other side subtracted; see ``gram``). Rows first, then columns,
repeated a few times for the same batch.

Old evidence was gathered with what was known of the other side then, and keeps that: on a stream that brings most of
its ratings later it trails a fit by far. ``refine`` passes over all ratings again from where the posterior stands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inference.gram import Summands, moments
from fisherfold.completion.inference.packed import unpack
from fisherfold.completion.inference.posterior import PER_MEMBER, CompletionPosterior, Side
from fisherfold.completion.inference.prior_mean import SET_STRENGTH, SetEffects
from fisherfold.completion.inference.variational import fit_variational, noise_floor, optimum
from fisherfold.completion.inference.working_ratings import WorkingRatings
from fisherfold.completion.ratings import Ratings


def append_members(side: Side, other: Side, n_new: int, features: Tensor | None = None) -> None:
    """Add members about which nothing is known, or only features: their posterior is the prior."""
    if n_new == 0:
        return
    unknown = side.prior_members(n_new)
    for name in PER_MEMBER:
        setattr(side, name, torch.cat([getattr(side, name), getattr(unknown, name)]))
    if side.set_effects is not None:
        s = side.set_effects
        side.set_effects = replace(s, sums=_pad(s.sums, n_new))
    if other.set_effects is not None:
        s = other.set_effects
        other.set_effects = SetEffects(_pad(s.effects, n_new), s.sums, _pad(s.shares, n_new))
    if side.features is not None:
        table = side.features.table
        own = table.new_zeros(n_new, table.shape[1]) if features is None else features
        side.features = replace(side.features, table=torch.cat([table, own.to(table)]))
    side.invalidate()


def _pad(tensor: Tensor, n_new: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(n_new, *tensor.shape[1:])])


@dataclass
class _Before:
    """What is known about some members from earlier ratings, in natural parameters and float64."""

    ids: Tensor
    prior: Tensor
    precision: Tensor
    pull: Tensor
    weight: Tensor
    weighted_sse: Tensor


def _before(side: Side, ids: Tensor) -> _Before:
    """The evidence alone, without the prior."""
    covariance = unpack(side.covariance[ids]).double()
    if not side.has_offset:
        covariance[:, -1, -1] = 1
    precision, prior = torch.linalg.inv(covariance), side.precision
    pull = (precision @ side.mean[ids].double()[:, :, None])[:, :, 0] - side.prior_mean_of(
        ids
    ).double() @ prior
    return _Before(
        ids, prior, precision - prior, pull, side.weight[ids].double(), side.weighted_sse[ids]
    )


@dataclass
class Batch:
    """New ratings of some members.

    Attributes:
        ratings: the ratings, of members numbered from 0.
        rows: which rows of the posterior these are.
        columns: which columns.
        working: what turns the ratings into working values, for categories and times.
    """

    ratings: Ratings
    rows: Tensor
    columns: Tensor
    working: WorkingRatings | None = None

    def groups(self, posterior: CompletionPosterior, k: int) -> Grouped:
        """What the updates of rows (0) or columns (1) take."""
        if self.working is not None:
            return self.working.refresh(posterior, learn=False)[k]
        return (self.ratings.by_row, self.ratings.by_column)[k]


def update_batch(
    posterior: CompletionPosterior,
    batch: Batch,
    *,
    passes: int = 3,
    move: tuple[bool, bool] = (True, True),
    new_rows: bool = False,
) -> None:
    """Add the evidence of new ratings."""
    ratings, members = batch.ratings, (batch.rows, batch.columns)
    sides = (posterior.rows, posterior.columns)
    orders = (ratings.by_row, ratings.by_column)
    before = [_before(side, ids) for side, ids in zip(sides, members, strict=True)]
    amounts = ratings.row_amounts, ratings.column_amounts
    for k in (0, 1):
        if move[k]:
            _count(sides[k], members[k], orders[k], members[1 - k], amounts[k])
    if new_rows:
        width = _width(posterior.rows, ratings.by_row, batch.columns)
        before[0].prior = posterior.rows.precision / width[:, None, None]
    residual = torch.zeros(0)
    for _ in range(passes):
        for k in (0, 1):
            if move[k]:
                given = sides[1 - k], members[1 - k]
                groups = batch.groups(posterior, k)
                residual = _natural_step(posterior, sides[k], before[k], given, groups)
    posterior.n_ratings += ratings.n_ratings
    posterior.amount += ratings.amount
    last = 1 if move[1] else 0
    weighted = sides[last].weight[members[last]] * residual
    posterior.weighted_sse += float(weighted.sum())
    # a given ridge is in units of τ: it stays as it was fitted; of categories the cut points carry the scale
    if posterior.fixed_ridge is None and posterior.ordinal is None:
        smallest = noise_floor(posterior.rows.mean.dtype) * posterior.amount
        posterior.noise_precision = posterior.amount / max(posterior.weighted_sse, smallest)


def _width(side: Side, groups: Grouped, other_ids: Tensor) -> Tensor:
    """1 + n_i⁻¹ Σ_{j ∈ Ω_i} 1/(γ + d_j), by how much the prior covariance of new members is wider than K⁻¹."""
    if side.set_effects is None:
        return side.precision.new_ones(groups.n_groups)
    doubt = 1 / (
        SET_STRENGTH + side.set_effects.shares.double()[other_ids[groups.indices().long()]]
    )
    sums = doubt.new_zeros(groups.n_groups).index_add_(0, groups.groups().long(), doubt)
    return 1 + sums / groups.counts.clamp(min=1)


def _count(side: Side, ids: Tensor, groups: Grouped, other_ids: Tensor, amounts: Tensor) -> None:
    """Enter the new ratings into the counts and the rated sets."""
    fresh = groups.counts.to(side.counts)
    side.counts = side.counts.index_add(0, ids, fresh)
    side.amounts = side.amounts.index_add(0, ids, amounts.to(side.amounts))
    if side.set_effects is not None:
        x = side.set_effects.effects[other_ids[groups.indices().long()]]
        new = torch.zeros_like(side.set_effects.sums[ids]).index_add_(0, groups.groups().long(), x)
        side.set_effects = replace(
            side.set_effects, sums=side.set_effects.sums.index_add(0, ids, new)
        )


def _natural_step(
    posterior: CompletionPosterior,
    side: Side,
    before: _Before,
    given: tuple[Side, Tensor],
    groups: Grouped,
) -> Tensor:
    """Set the posterior of the batch's members to old evidence + prior + new evidence; the new residuals."""
    ids, tau = before.ids, posterior.noise_precision
    other, others = given
    weighted = moments(other.mean[others], other.covariance[others]) * other.weight[others, None]
    evidence = Summands(weighted).collect(groups, 0, groups.n_groups).double()
    gram, pull = evidence.normal_equations()
    weight = side.weight[ids].double()
    rescale, scale = (weight / before.weight)[:, None], (weight * tau)[:, None]
    precision = before.prior + rescale[:, :, None] * before.precision + scale[:, :, None] * gram
    expected = (before.prior @ side.prior_mean_of(ids).double()[:, :, None])[:, :, 0]
    mean, packed, log_det = optimum(
        side, precision, expected + rescale * before.pull + scale * pull
    )
    _, residual = evidence.residual(mean, packed)
    side.mean[ids], side.covariance[ids], side.log_det[ids] = (
        x.to(side.mean) for x in (mean, packed, log_det)
    )
    if posterior.weight_strength:
        side.weighted_sse[ids] = before.weighted_sse + (tau * residual).to(side.mean)
        strength = posterior.weight_strength
        side.weight[ids] = (strength + side.amounts[ids]) / (strength + side.weighted_sse[ids])
    side.invalidate()
    return residual.to(side.mean)


def refine(
    posterior: CompletionPosterior,
    ratings: Ratings,
    *,
    working: WorkingRatings | None = None,
    passes: int = 2,
) -> None:
    """Passes of coordinate ascent over all ratings so far, with their priors, from where the posterior stands."""
    posterior.n_ratings, posterior.amount = ratings.n_ratings, ratings.amount
    posterior.converged = False
    orders = ratings.by_row, ratings.by_column
    amounts = ratings.row_amounts, ratings.column_amounts
    for k, side in enumerate((posterior.rows, posterior.columns)):
        own, other = orders[k], orders[1 - k]
        side.counts = own.counts.to(side.counts)
        side.amounts = amounts[k].to(side.counts, copy=True)
        if side.set_effects is not None:
            side.set_effects = SetEffects.of(side.set_effects.effects, side.counts, own, other)
    fit_variational(
        ratings,
        posterior.rank,
        max_iter=len(posterior.trace) + passes,
        tol=-torch.inf,
        init=posterior,
        set_effects=posterior.rows.set_effects is not None,
        working=working,
    )
