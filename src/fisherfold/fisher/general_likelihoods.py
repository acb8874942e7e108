"""Likelihoods that are not, or not conveniently, exponential families in the model's output.

Heavy tails, counts with overdispersion, directions, a variance that the model predicts, and ordered
categories. Each has its score's second moment F_L = E[s sᵀ] in closed form
(tests/fisher/test_general_likelihoods.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from fisherfold.fisher.likelihoods import (
    ExponentialFamily,
    Likelihood,
    _check_counts,
    _check_real,
    _normal,
    _per_sample,
)

_NODES = (
    120  # of the quadrature for directions, over 16 standard deviations to both sides of its peak
)
_FAR = 1e4  # stands for an infinite threshold, where derivatives would be NaN


class StudentT(Likelihood):
    """A t distribution with location z.

    Nll = ½(ν + 1) log(1 + (y - z)²/(ν s²)), F_L = (ν + 1)/((ν + 3) s²).

    Args:
        df: the degrees of freedom ν; small ones are robust to outliers.
        scale: s.
    """

    def __init__(self, df: float, scale: float = 1.0) -> None:
        self.df, self.scale = _positive("df", df), _positive("scale", scale)

    @override
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        return _per_sample(
            (self.df + 1) / 2 * torch.log1p(((y - z) / self.scale).square() / self.df)
        )

    @override
    def fisher_weight(self, z: Tensor) -> Tensor:
        return torch.full_like(z, (self.df + 1) / ((self.df + 3) * self.scale**2))

    @override
    def sample(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        chi2 = 2 * _gamma(torch.full_like(z, self.df / 2), generator)
        return z + self.scale * _normal(z, generator) / (chi2 / self.df).sqrt()


class NegativeBinomial(Likelihood):
    """Counts with mean μ = exp z and variance μ + μ²/r: F_L = μ/(1 + μ/r).

    Args:
        r: the size; Poisson is the limit of large r.
    """

    def __init__(self, r: float) -> None:
        self.r = _positive("r", r)

    @override
    def check_targets(self, y: Tensor, z: Tensor) -> None:
        super().check_targets(y, z)
        _check_counts(y, "negative binomial")

    @override
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        y, shifted = y.to(z.dtype), z - math.log(self.r)
        return _per_sample((y + self.r) * -functional.logsigmoid(-shifted) - y * shifted)

    @override
    def fisher_weight(self, z: Tensor) -> Tensor:
        return self.r * torch.sigmoid(z - math.log(self.r))

    @override
    def sample(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        rate = _gamma(torch.full_like(z, self.r), generator) * (z.exp() / self.r)
        return torch.poisson(rate, generator=generator)


class HeteroscedasticGaussian(Likelihood):
    """A normal distribution whose mean and log variance the model gives.

    Z = (μ, η) in the last dimension.

    nll = ½ (η + (y - μ)² exp(-η)), F_L = diag(exp(-η), ½). Targets have the shape of z without its
    last dimension.
    """

    @override
    def check_targets(self, y: Tensor, z: Tensor) -> None:
        if z.ndim < 2 or z.shape[-1] != 2:
            raise ValueError(
                "the model must return (mean, log variance) in its last dimension, got "
                f"{tuple(z.shape)}"
            )
        _check_real(y, tuple(z.shape[:-1]))

    @override
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = z.unbind(-1)
        return _per_sample(log_variance + (y - mean).square() * (-log_variance).exp()) / 2

    @override
    def fisher_weight(self, z: Tensor) -> Tensor:
        precision = (-z[..., 1]).exp()
        return torch.stack([precision, torch.full_like(precision, 0.5)], -1)

    @override
    def kl(self, z: Tensor, other: Tensor) -> Tensor:
        mean, change = other[..., 0] - z[..., 0], other[..., 1] - z[..., 1]
        return (
            _per_sample(change + torch.expm1(-change) + mean.square() * (-other[..., 1]).exp()) / 2
        )

    @override
    def sample(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        mean, log_variance = z.unbind(-1)
        return mean + (log_variance / 2).exp() * _normal(mean, generator)


class OrderedProbit(Likelihood):
    """Ordered categories 0..K of a latent normal.

    P(y = k) = Φ(c_{k+1} - z) - Φ(c_k - z), c_0 = -∞, c_{K+1} = ∞.

    F_L = Σ_k p_k'²/p_k.

    Args:
        thresholds: c_1 < ... < c_K.
    """

    def __init__(self, thresholds: Sequence[float] | Tensor) -> None:
        inner = torch.as_tensor(thresholds, dtype=torch.float64, device="cpu")
        if (
            inner.ndim != 1
            or not len(inner)
            or not bool((inner.diff() > 0).all() and torch.isfinite(inner).all())
        ):
            raise ValueError(
                f"thresholds must be finite numbers in increasing order, got {thresholds}"
            )
        self.thresholds = inner

    def _bounds(self, z: Tensor) -> Tensor:
        far = torch.tensor([_FAR], dtype=torch.float64)
        return torch.cat([-far, self.thresholds, far]).to(z)

    def _log_probability(self, lower: Tensor, upper: Tensor) -> Tensor:
        """log(Φ(upper) - Φ(lower)), from the tail that keeps its digits."""
        flip = lower > 0
        low, high = torch.where(flip, -upper, lower), torch.where(flip, -lower, upper)
        top = torch.special.log_ndtr(high)
        return top + torch.log(-torch.expm1(torch.special.log_ndtr(low) - top))

    @override
    def check_targets(self, y: Tensor, z: Tensor) -> None:
        super().check_targets(y, z)
        _check_counts(y, "ordered probit")
        if y.numel() and int(y.max()) > len(self.thresholds):
            raise ValueError(
                f"y must lie in 0..{len(self.thresholds)}, got a category {int(y.max())}"
            )

    @override
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        bounds, k = self._bounds(z), y.long()
        return -_per_sample(self._log_probability(bounds[k] - z, bounds[k + 1] - z))

    @override
    def fisher_weight(self, z: Tensor) -> Tensor:
        places = self._bounds(z) - z.unsqueeze(-1)
        log_p = self._log_probability(places[..., :-1], places[..., 1:])
        density = (-places.square() / 2).exp() / math.sqrt(2 * math.pi)
        return (density.diff(dim=-1).square() * (-log_p).clamp(max=600).exp()).sum(-1)

    @override
    def kl(self, z: Tensor, other: Tensor) -> Tensor:
        places, others = (self._bounds(z) - t.unsqueeze(-1) for t in (z, other))
        log_p, log_q = (self._log_probability(t[..., :-1], t[..., 1:]) for t in (places, others))
        return _per_sample((log_p.exp() * (log_p - log_q)).sum(-1))

    @override
    def sample(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.bucketize((z + _normal(z, generator)).contiguous(), self.thresholds.to(z))


class VonMisesFisher(ExponentialFamily):
    """A direction y on the unit sphere of R^d around z/‖z‖ with concentration ‖z‖.

    P(y | z) ∝ exp <z, y>.

    With t = <y, z>/‖z‖ the Fisher matrix is Var(t) along z and E[1 - t²]/(d - 1) across. The model
    returns z itself, such as a concentration times a direction; targets are unit vectors.

    Args:
        d: the dimension of the ambient space; 2 for angles.
    """

    def __init__(self, d: int) -> None:
        if isinstance(d, bool) or int(d) != d or d < 2:
            raise ValueError(f"d must be a whole number ≥ 2, got {d!r}")
        self.d = int(d)
        x, w = np.polynomial.legendre.leggauss(_NODES)
        self._nodes, self._log_weights = torch.from_numpy(1 + x), torch.from_numpy(np.log(w))
        self._log_area = math.lgamma((d - 1) / 2) + math.lgamma(0.5) - math.lgamma(d / 2)

    def _tilted(self, kappa: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Nodes as 1 - t and 1 - t², and the logarithms of their weights times exp(κ (t - 1))."""
        # with t = cos θ the density is that of sin(θ)^(d-2) exp(κ cos θ); the nodes go with its
        # peak
        k, power, tiny = kappa.detach(), self.d - 2, torch.finfo(kappa.dtype).tiny
        root = (power + (power**2 + 4 * k.square()).sqrt()).clamp(min=tiny)
        peak = torch.atan2((2 * power / root).sqrt(), 2 * k / root)
        width = 16 * (2 * k.square() / root + root / 2).clamp(min=tiny).rsqrt()
        low, high = (peak - width).clamp(min=0), (peak + width).clamp(max=math.pi)
        half = (high - low) / 2
        theta = low + half * self._nodes.to(kappa)
        short, sine = 2 * (theta / 2).sin().square(), theta.sin()
        logs = half.log() + self._log_weights.to(kappa) + power * sine.log() - self._log_area
        return short, sine.square(), logs - kappa * short

    def _moments(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """z/‖z‖, E[t], Var(t) and E[1 - t²]/(d - 1)."""
        kappa = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        short, square, logs = self._tilted(kappa)
        p = torch.softmax(logs, -1)
        first = (p * short).sum(-1, keepdim=True)
        spread = (p * (short - first).square()).sum(-1, keepdim=True)
        across = (p * square).sum(-1, keepdim=True) / (self.d - 1)
        return (
            torch.where(kappa > 0, z / torch.where(kappa > 0, kappa, 1.0), 0.0),
            1 - first,
            spread,
            across,
        )

    @override
    def log_partition(self, z: Tensor) -> Tensor:
        square = z.square().sum(-1, keepdim=True)
        kappa = torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)
        return torch.logsumexp(self._tilted(kappa)[2], -1) + kappa.squeeze(-1)

    @override
    def mean(self, z: Tensor) -> Tensor:
        direction, first, _, _ = self._moments(z)
        return first * direction

    @override
    def fisher_vp(self, z: Tensor, v: Tensor) -> Tensor:
        direction, _, spread, across = self._moments(z)
        along = (direction * v).sum(-1, keepdim=True) * direction
        return spread * along + across * (v - along)

    @override
    def check_targets(self, y: Tensor, z: Tensor) -> None:
        if z.ndim < 2 or z.shape[-1] != self.d:
            raise ValueError(f"the model must return vectors of R^{self.d}, got {tuple(z.shape)}")
        super().check_targets(y, z)
        off = float((y.square().sum(-1) - 1).abs().max())
        if off > 1e-3:
            raise ValueError(
                "y must hold unit vectors for a von Mises-Fisher likelihood, got |y|² off by "
                f"{off:.1e}"
            )

    @override
    def sample(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        flat = z.reshape(-1, self.d)
        kappa, d = torch.linalg.vector_norm(flat, dim=-1), self.d

        # Wood's rejection sampler for t, as 1 - t, then a uniform direction across
        b = (d - 1) / (2 * kappa + (4 * kappa.square() + (d - 1) ** 2).sqrt())
        short0 = 2 * b / (1 + b)
        short, waiting = torch.zeros_like(kappa), torch.ones_like(kappa, dtype=torch.bool)
        half = torch.full_like(kappa, (d - 1) / 2)
        while bool(waiting.any()):
            one, two = _gamma(half, generator), _gamma(half, generator)
            share = one / (one + two)
            trial = 2 * b * share / (1 - (1 - b) * share)
            u = torch.rand(kappa.shape, generator=generator, dtype=z.dtype, device=z.device)
            ratio = (short0 + (1 - short0) * trial) / (short0 * (2 - short0))
            good = waiting & (kappa * (short0 - trial) + (d - 1) * ratio.log() >= u.log())
            short, waiting = torch.where(good, trial, short), waiting & ~good
        axis = torch.where(
            kappa[:, None] > 0, flat / torch.where(kappa > 0, kappa, 1.0)[:, None], 0.0
        )
        axis = torch.where(
            kappa[:, None] > 0, axis, functional.normalize(_normal(flat, generator), dim=-1)
        )
        across = _normal(flat, generator)
        across = functional.normalize(across - (across * axis).sum(-1, keepdim=True) * axis, dim=-1)
        across = (short * (2 - short)).clamp(min=0).sqrt()[:, None] * across
        return ((1 - short)[:, None] * axis + across).reshape(z.shape)


class MultivariateGaussian(Likelihood):
    """A normal vector with mean and covariance from the model.

    Z = (μ, Σ), of shape (samples, d, 1 + d).

    nll = ½ [log det Σ + tr Σ⁻¹(S + (m - μ)(m - μ)ᵀ)] for a target (m, S) in the same form, the mean
    and covariance of repeated observations; for single ones S = 0, and they may be given as vectors
    of shape (samples, d).

    <v, F_L v> = dμᵀΣ⁻¹dμ + ½ tr(Σ⁻¹dΣ Σ⁻¹dΣ),  v = (dμ, dΣ)

    Args:
        d: the length of the vector.
    """

    def __init__(self, d: int) -> None:
        self.d = int(d)

    @staticmethod
    def pack(mean: Tensor, covariance: Tensor) -> Tensor:
        """(μ, Σ) as one tensor.

        Returns a tensor of shape (..., d, 1 + d).
        """
        batch = torch.broadcast_shapes(mean.shape[:-1], covariance.shape[:-2])  # type: ignore[no-untyped-call]
        columns = (mean.expand(*batch, -1).unsqueeze(-1), covariance.expand(*batch, -1, -1))
        return torch.cat(columns, dim=-1)

    @override
    def check_targets(self, y: Tensor, z: Tensor) -> None:
        if tuple(z.shape[1:]) != (self.d, self.d + 1):
            raise ValueError(
                "the model must return MultivariateGaussian.pack(mean, covariance), of shape "
                f"(samples, {self.d}, {self.d + 1}), got {tuple(z.shape)}"
            )
        _check_real(y, tuple(z.shape) if y.ndim == 3 else tuple(z.shape[:-1]))

    @override
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        mean, factor = z[..., 0], _root(z[..., 1:])
        miss = (y[..., 0] if y.ndim == z.ndim else y) - mean
        spread = miss.unsqueeze(-1) * miss.unsqueeze(-2)
        if y.ndim == z.ndim:
            spread = spread + y[..., 1:]
        whitened = torch.cholesky_solve(spread, factor).diagonal(dim1=-2, dim2=-1).sum(-1)
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return (log_det + whitened) / 2

    @override
    def fisher_vp(self, z: Tensor, v: Tensor) -> Tensor:
        factor = _root(z[..., 1:])
        left = torch.cholesky_solve(v, factor)
        # symmetric: what lies across is no change of a covariance
        right = torch.cholesky_solve(left[..., 1:].mT, factor)
        return torch.cat([left[..., :1], (right + right.mT) / 4], dim=-1)

    @override
    def fisher_factor(self, z: Tensor) -> Tensor:
        # with Σ = L Lᵀ: L⁻ᵀ for the mean, L⁻ᵀ ⊗ L⁻ᵀ/√2 restricted to symmetric matrices for the
        # covariance
        d, n = self.d, len(z)
        eye = torch.eye(d, dtype=z.dtype, device=z.device)
        root = torch.linalg.solve_triangular(_root(z[..., 1:]), eye.expand(n, d, d), upper=False).mT
        product = torch.einsum("nij,nkl->nikjl", root, root)
        product = (product + product.transpose(1, 2)).reshape(n, d, d, d * d) / math.sqrt(8)
        top = torch.cat([root, z.new_zeros(n, d, d * d)], -1)[:, :, None]
        bottom = torch.cat([z.new_zeros(n, d, d, d), product], -1)
        return torch.cat([top, bottom], 2).reshape(n, d * (d + 1), d + d * d)

    @override
    def kl(self, z: Tensor, other: Tensor) -> Tensor:
        factor, second = (_root(t[..., 1:]) for t in (z, other))
        miss = (z[..., 0] - other[..., 0]).unsqueeze(-1)
        solved = torch.linalg.solve_triangular(second, torch.cat([factor, miss], -1), upper=False)
        logs = (second.diagonal(dim1=-2, dim2=-1) / factor.diagonal(dim1=-2, dim2=-1)).log().sum(-1)
        return logs + (solved.square().sum((-2, -1)) - self.d) / 2

    @override
    def sample(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        noise = _normal(z[..., :1], generator)
        return z[..., 0] + (torch.linalg.cholesky(z[..., 1:]) @ noise).squeeze(-1)


def _root(covariance: Tensor) -> Tensor:
    """The Cholesky factor; NaN where the matrix is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(covariance)
    return torch.where((info == 0)[..., None, None], factor, torch.nan)


def _gamma(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch._standard_gamma(shape, generator=generator)


def _positive(name: str, value: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return float(value)
