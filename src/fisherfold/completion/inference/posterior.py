"""The posterior of a completed matrix: a Gaussian for every row and column, their learnt priors, and predictions.

    u_i | m_i, K ~ N(m_i, K⁻¹),     m_i = c + n_i^{-1/2} Σ_{j ∈ Ω_i} x_j,     q(u_i) = N(ū_i, V_i)

u_i holds the ``rank`` factors of row i and, last, its offset. K and c are learnt. The second term of the prior mean
says what the mere *set* of rated columns tells about a row; its effects x_j have the prior N(0, (γK)⁻¹). Under the
mean-field posterior of the x_j, whose covariances are K⁻¹/(γ + d_j) with d_j = Σ_{i ∈ Ω^j} 1/n_i, the bound depends on
K through

    ½ n log|K| - ½ tr K (Σ_i E[(u_i - m_i)(u_i - m_i)ᵀ] + γ Σ_j x_j x_jᵀ)

so that K⁻¹ = (the matrix in brackets)/n. Predictions have the moments

    E[x_ij] = b̄_i + c̄_j + ⟨ū_i, v̄_j⟩
    Var[x_ij] = k̄ᵀ A k̄ + āᵀ B ā + tr(A B) + E[1/α_i] E[1/β_j] / τ

with A, B the covariances of a_j = (v_j, c_j, 1) and k_i = (u_i, 1, b_i). A row or column that was never seen has the
number -1 and takes part as any of those that were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inference.likelihoods import Ordinal
from fisherfold.completion.inference.packed import pack, packed_positions, unpack
from fisherfold.completion.inference.prior_mean import (
    SET_STRENGTH,
    ColdStartRegression,
    FeatureEffects,
    SetEffects,
)
from fisherfold.completion.inference.time_effects import TimeEffects
from fisherfold.completion.scoring import Members, noise, score, variance
from fisherfold.distributed import Axis

WEIGHT_STRENGTH = (
    20.0  # ν, chosen on a validation part of MovieLens-1M; 10 and 40 do as well to 0.0005
)
# One imaginary row with the starting variance keeps K finite when a table has a handful of rows.
PRIOR_ROWS = 1.0
_CHUNK = 2**15  # pairs that are predicted at once
_RUN = 2**12
PER_MEMBER = ("mean", "covariance", "weight", "weighted_sse", "counts", "amounts", "log_det")


@dataclass
class Side:
    """Posterior, prior and noise weights of the rows, or of the columns."""

    mean: Tensor  # ū_i, a (n, q) table; the last column is the offset
    covariance: Tensor  # V_i, packed, a (n, q(q+1)/2) table
    weight: Tensor  # the expected noise weight α_i of each member; 1 is ordinary, less is noisier
    weighted_sse: Tensor  # τ Σ_j β_j E[e_ij²] of each member, for the Gamma posterior of α_i
    counts: Tensor  # the number of ratings n_i of each member
    amounts: Tensor  # Σ w over the ratings of each member, by which its noise weight is judged
    precision: Tensor  # K, the prior precision, q×q in float64
    center: Tensor  # c, the prior mean of a member about which nothing is known
    start_variance: Tensor  # the diagonal of the starting prior covariance
    has_offset: bool  # whether the offset is free; it is held at zero otherwise
    log_det: Tensor  # log|V_i|
    set_effects: SetEffects | None = None  # the rated-set part of the prior mean, if there is one
    # the part of the prior mean that features of the members explain, if there are any
    features: FeatureEffects | None = None
    axis: Axis | None = None  # which members are here; all of them if not given
    others: Axis | None = None  # the same for the other side
    _unknown: Side | None = field(default=None, init=False, repr=False)
    _cold_start: ColdStartRegression | None = field(default=None, init=False, repr=False)

    @classmethod
    def start(
        cls,
        mean: Tensor,
        counts: Tensor,
        variance: Tensor,
        *,
        has_offset: bool,
        amounts: Tensor | None = None,
        axis: Axis | None = None,
        others: Axis | None = None,
    ) -> Side:
        """A side known exactly, with a diagonal prior."""
        n, size = mean.shape
        if axis is not None and others is not None and not (axis.is_shared or others.is_shared):
            axis = others = None
        side = cls(
            mean=mean,
            covariance=mean.new_zeros(n, size * (size + 1) // 2),
            weight=mean.new_ones(n),
            weighted_sse=(counts if amounts is None else amounts).to(mean, copy=True),
            counts=counts.to(mean),
            amounts=(counts if amounts is None else amounts).to(mean, copy=True),
            precision=torch.diag(1 / variance.double()),
            center=mean.new_zeros(size),
            start_variance=variance.double(),
            has_offset=has_offset,
            log_det=mean.new_zeros(n),
            axis=axis,
            others=others,
        )
        side.set_precision(side.precision)
        return side

    def copied(self) -> Side:
        """This side with tensors of its own."""
        sets = self.set_effects
        own: dict[str, Any] = {
            name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        own["set_effects"] = sets and sets.copied()
        return replace(self, **own)

    @property
    def prior_mean(self) -> Tensor:
        """m_i as a (n, q) table, or (1, q) if it is the same for all."""
        mean = self.center[None]
        if self.set_effects is not None:
            mean = mean + self.set_effects.shift(self.counts)
        return mean if self.features is None else mean + self.features.shift()

    def prior_mean_given(self, rated: Tensor, features: Tensor | None = None) -> Tensor:
        """M of one member from the numbers of those of the other side that it has ratings with."""
        mean = self.center
        if self.set_effects is not None and len(rated):
            mean = mean + self.set_effects.effects[rated].sum(0) / len(rated) ** 0.5
        if self.features is not None and features is not None:
            mean = mean + features[0].to(mean) @ self.features.weights
        return mean

    def prior_mean_of(self, members: Tensor | slice) -> Tensor:
        """The prior means of some members, or that of all."""
        mean = self.prior_mean
        return mean if len(mean) == 1 else mean[members]

    @property
    def size(self) -> int:
        """The number of members, over all processes."""
        return len(self.mean) if self.axis is None else self.axis.size

    def total(self, sums: Tensor) -> Tensor:
        """Complete a sum over the members."""
        return sums if self.axis is None else self.axis.total(sums)

    def gathered(self) -> Side:
        """The side with all members, on every process."""
        if self.axis is None or self.others is None:
            return self
        keep: dict[str, Any] = {name: self.axis.gather(getattr(self, name)) for name in PER_MEMBER}
        effects = self.set_effects
        if effects is not None:
            effects = SetEffects(
                self.others.gather(effects.effects),
                self.axis.gather(effects.sums),
                self.others.gather(effects.shares),
            )
        return replace(self, **keep, set_effects=effects, axis=None, others=None)

    def shared_out(self, axis: Axis, others: Axis) -> Side:
        """The part of a side with all members that belongs to this process."""
        keep: dict[str, Any] = {name: axis.part(getattr(self, name)).clone() for name in PER_MEMBER}
        effects = self.set_effects
        if effects is not None:
            effects = SetEffects(
                others.part(effects.effects), axis.part(effects.sums), others.part(effects.shares)
            )
        return replace(self, **keep, set_effects=effects, axis=axis, others=others)

    @property
    def n_free(self) -> int:
        """The number of free coefficients of a member."""
        return self.mean.shape[1] - (not self.has_offset)

    def deviation(self) -> Tensor:
        """Σ_i E[(u_i - m_i)(u_i - m_i)ᵀ] + γ Σ_j x_j x_jᵀ in float64."""
        off = self.mean - self.prior_mean
        spread = _column_sums(self.covariance)
        second = self.total(
            (off.T @ off).double() + spread[packed_positions(off.shape[1], off.device)]
        )
        if self.set_effects is not None:
            x = self.set_effects.effects
            within = (x.T @ x).double()
            second += SET_STRENGTH * (within if self.others is None else self.others.total(within))
        if self.features is not None:
            second += self.features.penalty()
        return second

    def update_prior(self) -> None:
        """Set c and K to the values that maximise the bound."""
        if self.set_effects is None and self.features is None:
            self.center = self._mean(self.mean)
        else:
            self.center = self.center + self._mean(self.mean - self.prior_mean)
        if not self.has_offset:
            self.center[-1] = 0
        second = self.deviation() + PRIOR_ROWS * torch.diag(self.start_variance)
        precision = torch.linalg.inv(second / (self.size + PRIOR_ROWS))
        self.set_precision((precision + precision.T) / 2)

    def _mean(self, table: Tensor) -> Tensor:
        return table.mean(0) if self.axis is None else self.axis.mean(table)

    def update_set_effects(self, own: Grouped, other: Grouped) -> None:
        """Improve what the rated sets tell, from zero if nothing is known yet."""
        if self.set_effects is None:
            zero = self.mean.new_zeros(other.n_groups, self.mean.shape[1])
            self.set_effects = SetEffects.of(zero, self.counts, own, other)
        self.set_effects = self.set_effects.improved(
            self.mean - self.prior_mean, self.counts, own, other
        )

    def update_features(self) -> None:
        """Set the effects of the features, and how strongly they are held at zero, to their optimum."""
        if self.features is not None:
            off = self.mean - self.prior_mean + self.features.shift()
            self.features = self.features.improved(off, self.precision, self.n_free)

    def fix_prior(self, precision: float) -> None:
        """Use a given multiple of the identity as the prior precision."""
        size = self.mean.shape[1]
        self.set_precision(
            torch.eye(size, dtype=torch.float64, device=self.mean.device) * precision
        )

    def set_precision(self, precision: Tensor) -> None:
        """Use a given prior precision."""
        if (
            not self.has_offset
        ):  # an offset held at zero has no prior: unit precision keeps it out of |K|
            precision[-1], precision[:, -1] = 0, 0
            precision[-1, -1] = 1
        # one memory layout, whatever made it, so that a fit that is resumed from a file keeps its bits
        self.precision = precision.contiguous()

    def bound(self, weight_strength: float, *, learnt: bool = True) -> float:
        """This side's share of the bound: minus its divergences from the priors, plus ½ Σ n_i E log α_i."""
        n, k = self.size, self.precision
        extra = PRIOR_ROWS if learnt else 0.0
        prior = float((n + extra) * torch.logdet(k) - (k * self.deviation()).sum())
        prior -= extra * float(k.diagonal() @ self.start_variance)
        if self.features is not None:
            prior += self.n_free * self.features.log_volume()
        gauss = 0.5 * (
            prior + float(self.total(self.log_det.sum(dtype=torch.float64))) + n * self.n_free
        )
        return gauss + (self._weight_bound(weight_strength) if weight_strength else 0.0)

    def _weight_bound(self, strength: float) -> float:
        shape0 = strength / 2
        shape = shape0 + self.amounts.double() / 2
        rate = shape0 + self.weighted_sse.double() / 2
        log_mean = torch.digamma(shape) - torch.log(rate)
        divergence = (
            (shape - shape0) * torch.digamma(shape)
            - torch.lgamma(shape)
            + math.lgamma(shape0)
            + shape0 * (torch.log(rate) - math.log(shape0))
            + shape * (shape0 - rate) / rate
        )
        return float(self.total((0.5 * self.amounts.double() * log_mean - divergence).sum()))

    def prior_members(self, count: int = 1) -> Side:
        """A side with members about which nothing is known but the prior."""
        covariance = torch.linalg.inv(self.precision)
        if not self.has_offset:
            covariance[-1], covariance[:, -1] = 0, 0
        zero = self.weight.new_zeros(count)
        return replace(
            self,
            mean=self.center.repeat(count, 1),
            covariance=pack(covariance[None]).to(self.mean).repeat(count, 1),
            weight=zero + 1,
            weighted_sse=zero,
            counts=zero.clone(),
            amounts=zero.clone(),
            log_det=zero - float(torch.logdet(self.precision)),
            set_effects=None,
            features=None,
        )

    def unknown_member(self) -> Side:
        """A side with a single member of which not even the rated set is known: any of those that have ratings.

        K says how much members differ whose rated sets are alike; cold-start members differ as all members do. Mean and
        covariance are those over the members, with the imaginary one of ``update_prior``. Without rated sets the prior
        says the same.
        """
        if self._unknown is None:
            self._unknown = self._any_member()
        return self._unknown

    def invalidate(self) -> None:
        """Forget what was derived from the members, because they have changed."""
        self._unknown = self._cold_start = None

    def remember(self, unknown: Side, cold_start: ColdStartRegression | None) -> None:
        """Take over what was derived from the same members with ratings."""
        self._unknown, self._cold_start = unknown, cold_start

    def _any_member(self) -> Side:
        unknown, rated = self.prior_members(), self.counts > 0
        if (self.set_effects is None and self.features is None) or not bool(rated.any()):
            return unknown
        mean = self.mean[rated].double().mean(0)
        off = self.mean[rated].double() - mean
        spread = unpack(_column_sums(self.covariance[rated])[None])[0]
        covariance = (off.T @ off + spread + self._imaginary()) / (len(off) + PRIOR_ROWS)
        return replace(
            unknown, mean=mean[None].to(self.mean), covariance=pack(covariance[None]).to(self.mean)
        )

    def cold_start(self) -> ColdStartRegression:
        """What the features of a member without ratings tell: a regression of the members that have ratings."""
        if self._cold_start is None:
            assert self.features is not None
            rated = self.counts > 0
            rows, columns = torch.tril_indices(*self.precision.shape, device=self.mean.device)
            both = self.precision[rows, columns] * torch.where(rows == columns, 1.0, 2.0)
            covariance = self.covariance[rated].double()
            # each counts by how much its ratings told, 1 - tr(K V)/q, in all sums: V would else be counted twice
            weight = (1 - covariance @ both / self.n_free).clamp(0.01, 1)
            weight = weight * (len(weight) / weight.sum())
            spread = unpack((weight @ covariance)[None])[0]
            doubt = spread + self._imaginary()
            self._cold_start = ColdStartRegression.of(
                self.features, self.mean, rated, doubt, self.n_free, weight
            )
        return self._cold_start

    def described(self, features: Tensor) -> Members:
        """Members that were not in the fit, of which features are known."""
        known, side = self.cold_start(), self.prior_members(len(features))
        side.mean = known.mean(features).to(self.mean)
        side.covariance = known.covariance(features).to(self.mean)
        return Members(side, torch.arange(len(features), device=self.mean.device))

    def _imaginary(self) -> Tensor:
        """What the imaginary member adds to the second moment."""
        start = torch.diag(self.start_variance) * PRIOR_ROWS
        if not self.has_offset:
            start[-1, -1] = 0
        return start

    def members(self, codes: Tensor) -> Members:
        """Some members, by number; -1 is one of which nothing is known."""
        return Members(self, codes.long())

    def at(self, index: Tensor, name: str) -> Tensor:
        """Rows of one of the tables of ``PER_MEMBER``, for cold members what stands in for it."""
        place = index.clamp(min=0)
        unknown = index < 0
        if self.set_effects is not None:
            unknown = unknown | (self.counts[place] == 0)
        table = getattr(self, name)
        found = table[place] if len(table) else table.new_zeros(len(index), *table.shape[1:])
        if bool(unknown.any()):
            found[unknown] = getattr(self.unknown_member(), name)[0]
        if self.features is not None and name in ("mean", "covariance"):
            empty = (index >= 0) & (self.counts[place] == 0)
            if bool(empty.any()):
                found[empty] = getattr(self.cold_start(), name)(
                    self.features.table[place[empty]]
                ).to(found)
        return found


def _column_sums(table: Tensor) -> Tensor:
    """Sums over the rows of a tall table in float64, run by run in its own dtype: several times quicker."""
    total = torch.zeros(table.shape[1], dtype=torch.float64, device=table.device)
    for run in torch.split(table, _RUN):
        total += run.new_ones(len(run)) @ run
    return total


@dataclass
class CompletionPosterior:
    """What is known after the fit, for ratings that were centred and scaled."""

    rows: Side  # the posterior of the rows
    columns: Side  # the posterior of the columns
    noise_precision: float  # τ, the precision of an ordinary rating
    weight_strength: float  # ν, 0 if all ratings weigh the same
    n_ratings: int  # the number of ratings seen
    amount: float  # as how many ratings they count, the sum of their weights
    fixed_ridge: float | None = (
        None  # the prior precision over τ if it was given, None if it is learnt
    )
    weighted_sse: float = 0.0  # Σ_ij α_i β_j E[e_ij²]
    # one record per pass: iteration, seconds, bound per rating, noise level
    trace: list[dict[str, float]] = field(default_factory=list)
    converged: bool = False  # whether the bound has settled
    ordinal: Ordinal | None = (
        None  # the categories and their cut points, if values are ordered categories
    )
    # the effects of rows and of columns in periods of time
    time_effects: tuple[TimeEffects | None, TimeEffects | None] = (None, None)
    extra_bound: float = 0.0  # what latent values and effects of time add to the bound

    @property
    def rank(self) -> int:
        """The number of factors."""
        return self.rows.mean.shape[1] - 1

    def copied(self) -> CompletionPosterior:
        """A posterior that can be changed in place while this one stays as it is."""
        return replace(
            self, rows=self.rows.copied(), columns=self.columns.copied(), trace=list(self.trace)
        )

    def gathered(self) -> CompletionPosterior:
        """The posterior with all rows and columns, on every process."""
        if self.rows.axis is None:
            return self
        return replace(self, rows=self.rows.gathered(), columns=self.columns.gathered())

    def shared_out(self, rows: Axis, columns: Axis) -> CompletionPosterior:
        """The part of a whole posterior that belongs to this process."""
        if not (rows.is_shared or columns.is_shared):
            return self
        return replace(
            self,
            rows=self.rows.shared_out(rows, columns),
            columns=self.columns.shared_out(columns, rows),
        )

    def bound(self) -> float:
        """The evidence lower bound per rating, up to a constant that depends on nothing learnt."""
        tau = self.noise_precision
        data = 0.5 * self.amount * math.log(tau / (2 * math.pi)) - 0.5 * tau * self.weighted_sse
        learnt = self.fixed_ridge is None
        sides = sum(
            side.bound(self.weight_strength, learnt=learnt) for side in (self.rows, self.columns)
        )
        return (data + sides + self.extra_bound) / self.amount

    def predict(
        self, rows: Tensor, columns: Tensor, *, with_std: bool = False, times: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The predictive mean, and if wanted the standard deviation, of pairs by number."""
        # written in place: small results kept between the large tables of the chunks would hold on to their memory
        mean = self.rows.mean.new_empty(len(rows))
        std = torch.empty_like(mean, dtype=torch.float64) if with_std else None
        for start in range(0, len(rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            i, j = self.rows.members(rows[part]), self.columns.members(columns[part])
            when = None if times is None else times[part]
            mean[part] = score(self, i, j, times=when)
            if std is not None:
                std[part] = (variance(self, i, j, times=when) + noise(self, i, j)).sqrt()
        return mean, std
