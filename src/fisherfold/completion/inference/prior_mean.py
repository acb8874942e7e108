"""The prior mean of a member: what its features and the mere set of its ratings tell about it.

    m_i = c + Wᵀ f_i + n_i^{-1/2} Σ_{j ∈ Ω_i} x_j,     w_k ~ N(0, (λ_k K)⁻¹),     x_j ~ N(0, (γK)⁻¹)

Given the ū_i, W has the posterior N(A⁻¹ Fᵀ(Ū - …), A⁻¹ ⊗ K⁻¹) with A = FᵀF + diag(λ), in which K cancels. It adds
½ q (Σ_k log λ_k - log|A|) - ½ tr(K Σ_k λ_k w_k w_kᵀ) to the bound, which is raised over λ: one strength for all columns
of the table of features that come from one feature, λ = q p / Σ_k (w_kᵀ K w_k + q (A⁻¹)_kk).

The effects x_j minimise Σ_i ‖ū_i - m_i‖²_K + γ Σ_j ‖x_j‖²_K, a ridge problem in which K cancels. A few conjugate
gradient steps after each update of the ū_i suffice, because each goes on from the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inference.packed import pack

# γ, chosen on a validation part of MovieLens-1M; raising the bound over it instead is slower and no more accurate.
SET_STRENGTH = 3.0


@dataclass(frozen=True)
class SetEffects:
    """What the set of rated entries tells: the effects x_j and what is needed to apply them."""

    effects: Tensor  # x_j, one row for each member of the other side
    sums: Tensor  # Σ_{j ∈ Ω_i} x_j for every member i of this side
    shares: Tensor  # d_j = Σ_{i ∈ Ω^j} 1/n_i

    @classmethod
    def of(cls, effects: Tensor, counts: Tensor, own: Grouped, other: Grouped) -> SetEffects:
        """Effects x_j with what is needed to apply them."""
        root = _inverse_root(counts)
        return cls(effects, own.set_sums(effects.contiguous()), other.set_sums(root * root)[:, 0])

    def shift(self, counts: Tensor) -> Tensor:
        """The term n_i^{-1/2} Σ_j x_j of the prior mean of each member."""
        return self.sums * _inverse_root(counts)

    def copied(self) -> SetEffects:
        """The same effects with tensors of their own."""
        return SetEffects(self.effects.clone(), self.sums.clone(), self.shares.clone())

    def improved(
        self, off: Tensor, counts: Tensor, own: Grouped, other: Grouped, *, steps: int = 2
    ) -> SetEffects:
        """Improve the effects by conjugate gradients."""
        root, x, sums = _inverse_root(counts), self.effects.clone(), self.sums.clone()
        tiny = torch.finfo(x.dtype).tiny
        scale = 1 / (self.shares[:, None] + SET_STRENGTH)
        residual = other.set_sums(off * root) - SET_STRENGTH * x
        direction = scale * residual
        progress = own.total((residual * direction).sum(0))
        for _ in range(steps):
            image_sums = own.set_sums(direction.contiguous())
            image = other.set_sums(image_sums * (root * root)).add_(direction, alpha=SET_STRENGTH)
            step = progress / own.total((direction * image).sum(0)).clamp(min=tiny)
            x.addcmul_(direction, step)
            sums.addcmul_(image_sums, step)
            residual.addcmul_(image, step, value=-1)
            fresh = scale * residual
            new_progress = own.total((residual * fresh).sum(0))
            direction = direction.mul_(new_progress / progress.clamp(min=tiny)).add_(fresh)
            progress = new_progress
        return SetEffects(x, sums, self.shares)


def _inverse_root(counts: Tensor) -> Tensor:
    return counts.clamp(min=1).rsqrt()[:, None]


@dataclass(frozen=True)
class FeatureEffects:
    """What features of the members tell."""

    table: Tensor  # F, one row per member, centred; zero for a member without features
    groups: Tensor  # which feature each column of F comes from
    weights: Tensor  # the posterior mean of W
    strength: Tensor  # λ of each column of F
    inverse: Tensor  # A⁻¹, in float64

    @classmethod
    def start(cls, table: Tensor, groups: Tensor, size: int) -> FeatureEffects:
        """Features of which nothing is known yet."""
        strength = torch.full((table.shape[1],), 10.0, dtype=torch.float64, device=table.device)
        return cls(
            table, groups, table.new_zeros(table.shape[1], size), strength, torch.diag(1 / strength)
        )

    def shift(self) -> Tensor:
        """The term Wᵀ f_i of the prior mean of each member."""
        return self.table @ self.weights

    def penalty(self) -> Tensor:
        """Σ_k λ_k w_k w_kᵀ in float64."""
        w = self.weights.double()
        return (w * self.strength[:, None]).T @ w

    def log_volume(self) -> float:
        """Σ_k log λ_k - log|A|."""
        return float(self.strength.log().sum() + torch.logdet(self.inverse))

    def improved(self, target: Tensor, precision: Tensor, n_free: int) -> FeatureEffects:
        """The optimum of λ, then of W."""
        table = self.table
        gram, pull = (table.T @ table).double(), (table.T @ target).double()
        strength = _strengths(self.weights.double(), self.inverse, precision, self.groups, n_free)
        inverse = _inverse_of(gram, strength)
        return replace(
            self, weights=(inverse @ pull).to(target), strength=strength, inverse=inverse
        )


@dataclass(frozen=True)
class ColdStartRegression:
    """What features tell of a member without ratings, whose rated set is not known: a regression of the others."""

    center: Tensor  # the mean of a member with average features
    weights: Tensor  # the effects of the features
    inverse: Tensor  # their posterior covariance is this times ``spread``
    spread: Tensor  # how members differ whose features are alike

    @classmethod
    def of(
        cls,
        features: FeatureEffects,
        means: Tensor,
        rated: Tensor,
        doubt: Tensor,
        n_free: int,
        weight: Tensor,
        *,
        steps: int = 20,
    ) -> ColdStartRegression:
        """Regress the posterior means of members with ratings on their features; strengths are learnt."""
        table, target, n = features.table[rated].double(), means[rated].double(), len(weight)
        level, center, root = weight @ table / n, weight @ target / n, weight.sqrt()[:, None]
        table, target = root * (table - level), root * (target - center)
        gram, pull = table.T @ table, table.T @ target
        strength, eye = (
            features.strength,
            torch.eye(len(doubt), dtype=torch.float64, device=doubt.device),
        )
        inverse = _inverse_of(gram, strength)
        weights = inverse @ pull
        for _ in range(steps):
            off = target - table @ weights
            spread = (off.T @ off + doubt) / (n + 1)
            strength = _strengths(
                weights, inverse, torch.linalg.inv(spread + 1e-12 * eye), features.groups, n_free
            )
            inverse = _inverse_of(gram, strength)
            weights = inverse @ pull
        return cls(center - level @ weights, weights, inverse, spread)

    def mean(self, features: Tensor) -> Tensor:
        """The means of some cold-start members."""
        return self.center + features.double() @ self.weights

    def covariance(self, features: Tensor) -> Tensor:
        """The packed covariances of some cold-start members."""
        f = features.double()
        return (1 + ((f @ self.inverse) * f).sum(1))[:, None] * pack(self.spread[None])


def _inverse_of(gram: Tensor, strength: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(gram + torch.diag(strength)))


def _strengths(
    weights: Tensor, inverse: Tensor, precision: Tensor, groups: Tensor, n_free: int
) -> Tensor:
    """λ_k = q p / Σ (w_kᵀ K w_k + q (A⁻¹)_kk) over the p columns of the table that belong to the feature of k."""
    size = ((weights @ precision) * weights).sum(1) + n_free * inverse.diagonal()
    count = int(groups.max()) + 1
    total, columns = (
        size.new_zeros(count).index_add_(0, groups, size),
        torch.bincount(groups, minlength=count),
    )
    return (n_free * columns / total).clamp(1e-3, 1e6)[groups]
