"""The posterior of one side of a completed matrix: a Gaussian for every row (or every column) and its learnt prior.

    u_i | m_i, K ~ N(m_i, K⁻¹),     m_i = c + n_i^{-1/2} Σ_{j ∈ Ω_i} x_j,     q(u_i) = N(ū_i, V_i)

u_i holds the ``rank`` factors of row i and, last, its offset. K and c are learnt. The second term of the prior mean
says what the mere *set* of rated columns tells about a row; its effects x_j have the prior N(0, (γK)⁻¹). Under the
mean-field posterior of the x_j, whose covariances are K⁻¹/(γ + d_j) with d_j = Σ_{i ∈ Ω^j} 1/n_i, the bound depends on
K through

    ½ n log|K| - ½ tr K (Σ_i E[(u_i - m_i)(u_i - m_i)ᵀ] + γ Σ_j x_j x_jᵀ)

so that K⁻¹ = (the matrix in brackets)/n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.kernels import plain_sum
from fisherfold.completion.packed import packed_positions
from fisherfold.distributed import Axis

# One imaginary row with the starting variance keeps K finite when a table has a handful of rows.
PRIOR_ROWS = 1.0
# γ, chosen on a validation part of MovieLens-1M; raising the bound over it instead is slower and no more accurate.
SET_STRENGTH = 3.0
_PER_MEMBER = ("mean", "covariance", "weight", "shortfall", "counts", "log_det")


@dataclass
class SetEffects:
    """What the set of rated entries tells: the effects x_j and what is needed to apply them.

    Attributes:
        effects: x_j, one row for each member of the other side.
        sums: Σ_{j ∈ Ω_i} x_j for every member i of this side.
        shares: d_j = Σ_{i ∈ Ω^j} 1/n_i.
    """

    effects: Tensor
    sums: Tensor
    shares: Tensor


@dataclass
class Side:
    """Posterior, prior and noise weights of the rows, or of the columns.

    Attributes:
        mean: ū_i, a (n, q) table; the last column is the offset.
        covariance: V_i, packed, a (n, q(q+1)/2) table.
        weight: the expected noise weight α_i of each member; 1 is ordinary, less is noisier.
        shortfall: τ Σ_j β_j E[e_ij²], the weighted squared residuals of each member; the Gamma posterior needs it.
        counts: the number of ratings n_i of each member.
        precision: K, the prior precision, q×q in float64.
        center: c, the prior mean of a member about which nothing is known.
        start_variance: the diagonal of the starting prior covariance.
        has_offset: whether the offset is free; it is held at zero otherwise.
        set_effects: the rated-set part of the prior mean, if there is one.
        log_det: log|V_i|.
        axis: which members are here; all of them if not given.
        others: the same for the other side.
    """

    mean: Tensor
    covariance: Tensor
    weight: Tensor
    shortfall: Tensor
    counts: Tensor
    precision: Tensor
    center: Tensor
    start_variance: Tensor
    has_offset: bool
    log_det: Tensor
    set_effects: SetEffects | None = None
    axis: Axis | None = None
    others: Axis | None = None

    @classmethod
    def start(
        cls, mean: Tensor, counts: Tensor, variance: Tensor, *, has_offset: bool, axis: Axis | None = None,
        others: Axis | None = None,
    ) -> Side:  # fmt: skip
        """A side known exactly, with a diagonal prior.

        Args:
            mean: the (n, q) starting point.
            counts: the number of ratings of each member.
            variance: the prior variance of each of the q coefficients.
            has_offset: whether the offset is free.
            axis: which members are here; all of them if not given.
            others: the same for the other side.

        Returns:
            The side.
        """
        n, size = mean.shape
        if axis is not None and others is not None and not (axis.is_shared or others.is_shared):
            axis = others = None
        side = cls(
            mean=mean, covariance=mean.new_zeros(n, size * (size + 1) // 2), weight=mean.new_ones(n),
            shortfall=counts.to(mean), counts=counts.to(mean), precision=torch.diag(1 / variance.double()),
            center=mean.new_zeros(size), start_variance=variance.double(), has_offset=has_offset,
            log_det=mean.new_zeros(n), axis=axis, others=others,
        )  # fmt: skip
        side._set_precision(side.precision)
        return side

    def copied(self) -> Side:
        """This side with tensors of its own.

        Returns:
            A copy.
        """
        sets = self.set_effects
        own: dict[str, Any] = {name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor)}
        own["set_effects"] = sets and SetEffects(*(part.clone() for part in vars(sets).values()))
        return replace(self, **own)

    @property
    def prior_mean(self) -> Tensor:
        """m_i as a (n, q) table, or (1, q) if it is the same for all."""
        if self.set_effects is None:
            return self.center[None]
        return torch.addcmul(self.center[None], self.set_effects.sums, _inverse_root(self.counts)[:, None])

    @property
    def size(self) -> int:
        """The number of members, over all processes."""
        return len(self.mean) if self.axis is None else self.axis.size

    def total(self, sums: Tensor) -> Tensor:
        """Complete a sum over the members.

        Args:
            sums: over the members that are here.

        Returns:
            The sum over all of them.
        """
        return sums if self.axis is None else self.axis.total(sums)

    def gathered(self) -> Side:
        """The side with all members, on every process.

        Returns:
            A copy, or this side if all are here already.
        """
        if self.axis is None or self.others is None:
            return self
        keep: dict[str, Any] = {name: self.axis.gather(getattr(self, name)) for name in _PER_MEMBER}
        effects = self.set_effects
        if effects is not None:
            effects = SetEffects(
                self.others.gather(effects.effects), self.axis.gather(effects.sums), self.others.gather(effects.shares)
            )
        return replace(self, **keep, set_effects=effects, axis=None, others=None)

    def shared_out(self, axis: Axis, others: Axis) -> Side:
        """The part of a side with all members that belongs to this process.

        Args:
            axis: which members are to stay here.
            others: the same for the other side.

        Returns:
            A copy.
        """
        keep: dict[str, Any] = {name: axis.part(getattr(self, name)).clone() for name in _PER_MEMBER}
        effects = self.set_effects
        if effects is not None:
            effects = SetEffects(others.part(effects.effects), axis.part(effects.sums), others.part(effects.shares))
        return replace(self, **keep, set_effects=effects, axis=axis, others=others)

    @property
    def n_free(self) -> int:
        """The number of free coefficients of a member."""
        return self.mean.shape[1] - (not self.has_offset)

    def deviation(self) -> Tensor:
        """Σ_i E[(u_i - m_i)(u_i - m_i)ᵀ] + γ Σ_j x_j x_jᵀ in float64."""
        off = self.mean - self.prior_mean
        spread = self.covariance.sum(0, dtype=torch.float64)
        second = self.total((off.T @ off).double() + spread[packed_positions(off.shape[1], off.device)])
        if self.set_effects is not None:
            x = self.set_effects.effects
            within = (x.T @ x).double()
            second += SET_STRENGTH * (within if self.others is None else self.others.total(within))
        return second

    def update_prior(self) -> None:
        """Set c and K to the values that maximise the bound."""
        if self.set_effects is None:
            self.center = self._mean(self.mean)
        else:
            self.center = self.center + self._mean(self.mean - self.prior_mean)
        if not self.has_offset:
            self.center[-1] = 0
        second = self.deviation() + PRIOR_ROWS * torch.diag(self.start_variance)
        precision = torch.linalg.inv(second / (self.size + PRIOR_ROWS))
        self._set_precision((precision + precision.T) / 2)

    def _mean(self, table: Tensor) -> Tensor:
        return table.mean(0) if self.axis is None else self.axis.mean(table)

    def fix_prior(self, precision: float) -> None:
        """Use a given multiple of the identity as the prior precision.

        Args:
            precision: the multiple.
        """
        size = self.mean.shape[1]
        self._set_precision(torch.eye(size, dtype=torch.float64, device=self.mean.device) * precision)

    def _set_precision(self, precision: Tensor) -> None:
        if not self.has_offset:  # an offset held at zero has no prior: unit precision keeps it out of |K|
            precision[-1], precision[:, -1] = 0, 0
            precision[-1, -1] = 1
        # one memory layout, whatever made it, so that a fit that is resumed from a file keeps its bits
        self.precision = precision.contiguous()

    def bound(self, weight_strength: float, *, learnt: bool = True) -> float:
        """This side's share of the evidence lower bound: minus its divergences from the priors, plus ½ Σ n_i E log α_i.

        Args:
            weight_strength: ν of the Gamma(ν/2, ν/2) prior of the noise weights; 0 if they are fixed at 1.
            learnt: whether K is learnt; its own weak prior counts then.

        Returns:
            The share, up to a constant that depends on nothing learnt.
        """
        n, k = self.size, self.precision
        extra = PRIOR_ROWS if learnt else 0.0
        prior = float((n + extra) * torch.logdet(k) - (k * self.deviation()).sum())
        prior -= extra * float(k.diagonal() @ self.start_variance)
        gauss = 0.5 * (prior + float(self.total(self.log_det.sum(dtype=torch.float64))) + n * self.n_free)
        return gauss + (self._weight_bound(weight_strength) if weight_strength else 0.0)

    def _weight_bound(self, strength: float) -> float:
        shape0 = strength / 2
        shape = shape0 + self.counts.double() / 2
        rate = shape0 + self.shortfall.double() / 2
        log_mean = torch.digamma(shape) - torch.log(rate)
        divergence = (
            (shape - shape0) * torch.digamma(shape) - torch.lgamma(shape) + math.lgamma(shape0)
            + shape0 * (torch.log(rate) - math.log(shape0)) + shape * (shape0 - rate) / rate
        )  # fmt: skip
        return float(self.total((0.5 * self.counts.double() * log_mean - divergence).sum()))


def _inverse_root(counts: Tensor) -> Tensor:
    return counts.clamp(min=1).rsqrt()


def update_set_effects(side: Side, own: Grouped, other: Grouped, *, steps: int = 2) -> None:
    """Improve the effects x_j by conjugate gradients on their ridge problem.

    Minimises Σ_i ‖ū_i - c - n_i^{-1/2} Σ_{j ∈ Ω_i} x_j‖²_K + γ Σ_j ‖x_j‖²_K, in which K cancels. Each call goes on from
    the last one, so that a few steps suffice.

    Args:
        side: the side whose prior mean is learnt; changed in place.
        own: the ratings grouped by the members of this side.
        other: the ratings grouped by the members of the other side.
        steps: the number of conjugate gradient steps.
    """
    root = _inverse_root(side.counts)[:, None]
    if side.set_effects is None:
        side.set_effects = set_effects_of(side, side.mean.new_zeros(other.n_groups, side.mean.shape[1]), own, other)
    state = side.set_effects
    scale = 1 / (state.shares[:, None] + SET_STRENGTH)
    x, sums = state.effects, state.sums
    residual = _gather((side.mean - side.prior_mean) * root, other) - SET_STRENGTH * x
    direction = scale * residual
    progress = own.total((residual * direction).sum(0))
    for _ in range(steps):
        image_sums = _gather(direction, own)
        image = _gather(image_sums * (root * root), other) + SET_STRENGTH * direction
        step = progress / own.total((direction * image).sum(0)).clamp(min=torch.finfo(x.dtype).tiny)
        x, sums = x + step * direction, sums + step * image_sums
        residual = residual - step * image
        fresh = scale * residual
        new_progress = own.total((residual * fresh).sum(0))
        direction = fresh + new_progress / progress.clamp(min=torch.finfo(x.dtype).tiny) * direction
        progress = new_progress
    side.set_effects = SetEffects(x, sums, state.shares)


def set_effects_of(side: Side, effects: Tensor, own: Grouped, other: Grouped) -> SetEffects:
    """Effects x_j with what is needed to apply them.

    Args:
        side: the side whose prior mean they shift.
        effects: x_j.
        own: the ratings grouped by the members of this side.
        other: the ratings grouped by the members of the other side.

    Returns:
        The effects, their sums over each rated set, and the shares.
    """
    root = _inverse_root(side.counts)[:, None]
    return SetEffects(effects, _gather(effects, own), _gather(root * root, other)[:, 0])


def _gather(table: Tensor, groups: Grouped) -> Tensor:
    return plain_sum(groups, table.contiguous())
