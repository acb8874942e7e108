"""Output distributions p(y | z) and their Fisher matrices.

A likelihood has three parts, for outputs z of shape (samples, ...):

    nll(z, y) = -log p(y | z) up to a constant in y,
    F_L(z) = E[s sᵀ] with the score s = ∂ nll/∂z,    draws of y

It need not be an exponential family in z. For one that is, ``ExponentialFamily`` derives all from
its log-partition A,

    -log p(y | z) = A(z) - <T(y), z> + const(y),    F_L(z) = ∇²A(z),
    KL(z ‖ z') = A(z') - A(z) - <∇A(z), z' - z>,

by automatic differentiation. The constant is left out, so that a perfect Gaussian fit has loss 0.
The first dimension of z counts samples; all others belong to one sample, whose Fisher matrix F_L
acts on them together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Real
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

# Gauss-Legendre quadrature on (0, 1), exact to rounding for the divergence of neighbours
_NODES, _WEIGHTS = (0.5 * part for part in np.polynomial.legendre.leggauss(12))


class Likelihood(ABC):
    """The distribution of a target given the model's output z, of shape (samples, ...).

    A subclass has ``nll`` and ``sample``, and either ``fisher_weight``, where F_L is diagonal, or
    ``fisher_vp``. In all methods z holds outputs of the model and y targets, a row per sample.
    """

    @abstractmethod
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        """The negative log-likelihood of each sample, up to a constant in y."""

    @abstractmethod
    def sample(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw one y for every z."""

    def fisher_weight(self, z: Tensor) -> Tensor | None:
        """The diagonal of the output Fisher matrix, where there is nothing else."""
        return None

    def fisher_vp(self, z: Tensor, v: Tensor) -> Tensor:
        """The product F_L(z) v with the output Fisher matrix, sample by sample.

        Raises NotImplementedError if a subclass has neither this nor ``fisher_weight``.
        """
        weight = self.fisher_weight(z)
        if weight is None:
            raise NotImplementedError(f"{type(self).__name__} needs fisher_weight or fisher_vp")
        return weight * v

    def check_targets(self, y: Tensor, z: Tensor) -> None:
        """Raise unless the targets can have come from this distribution.

        Raises ValueError if the shapes do not fit or a target is complex or not finite.
        """
        _check_real(y, tuple(z.shape))

    def fisher_matrix(self, z: Tensor) -> Tensor:
        """The output Fisher matrix of every sample: the dense reference.

        Returns a tensor of shape (samples, q, q), q the number of outputs of one sample.
        """
        flat = z.reshape(len(z), -1)
        basis = torch.eye(flat.shape[1], dtype=z.dtype, device=z.device)
        columns = [
            self.fisher_vp(z, e.expand_as(flat).reshape(z.shape)).reshape(len(z), -1) for e in basis
        ]
        return torch.stack(columns, dim=2)

    def fisher_factor(self, z: Tensor) -> Tensor:
        """A factor S with F_L(z) = S Sᵀ for every sample.

        Returns a tensor of shape (samples, q, r), q the number of outputs of one sample.
        """
        if (weight := self.fisher_weight(z)) is not None:
            return torch.diag_embed(weight.reshape(len(z), -1).sqrt())
        values, vectors = torch.linalg.eigh(self.fisher_matrix(z))
        return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)

    def kl(self, z: Tensor, other: Tensor) -> Tensor:
        """The divergence KL(p(· | z) ‖ p(· | other)) of each sample.

        Raises NotImplementedError if there is no closed form.
        """
        raise NotImplementedError(f"{type(self).__name__} has no closed form of its divergence")

    def __repr__(self) -> str:
        given = ", ".join(
            f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")
        )
        return f"{type(self).__name__}({given})"


class ExponentialFamily(Likelihood):
    """An exponential family in its natural parameter z: from A, T and a way to sample."""

    @abstractmethod
    def log_partition(self, z: Tensor) -> Tensor:
        """The log-partition function A, elementwise or over the last dimension.

        Returns a tensor whose sum over everything but the first dimension is A of each sample.
        """

    def statistic(self, y: Tensor, z: Tensor) -> Tensor:
        """The sufficient statistic T(y), in the shape of z."""
        return y.to(z.dtype)

    @override
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        return _per_sample(self.log_partition(z)) - _per_sample(self.statistic(y, z) * z)

    def mean(self, z: Tensor) -> Tensor:
        """The expectation E[T(y)] = ∇A(z)."""
        return cast("Tensor", torch.func.grad(lambda t: self.log_partition(t).sum())(z))

    @override
    def fisher_vp(self, z: Tensor, v: Tensor) -> Tensor:
        weight = self.fisher_weight(z)
        # ∇²A is symmetric
        return torch.func.vjp(self.mean, z)[1](v)[0] if weight is None else weight * v

    @override
    def kl(self, z: Tensor, other: Tensor) -> Tensor:
        d = other - z
        far = _per_sample(self.log_partition(other) - self.log_partition(z)) - _per_sample(
            self.mean(z) * d
        )
        # the difference cancels for neighbours, ∫ (1 - s) <d, ∇²A(z + s d) d> ds does not
        is_near = (d.reshape(len(d), -1).abs().amax(1) < 1) & (
            _per_sample(d * self.fisher_vp(z, d)) < 0.1
        )
        d = torch.where(is_near.reshape(-1, *(1 for _ in d.shape[1:])), d, 0.0)
        nodes = (
            (0.5 + s, w * (0.5 - s))
            for s, w in zip(_NODES.tolist(), _WEIGHTS.tolist(), strict=True)
        )
        near = sum(share * _per_sample(d * self.fisher_vp(z + s * d, d)) for s, share in nodes)
        return torch.where(is_near, near, far.clamp(min=0))


def _check_real(y: Tensor, shape: tuple[int, ...]) -> None:
    if y.shape != shape:
        raise ValueError(
            f"y must have the shape {shape} of the model's output, got {tuple(y.shape)}"
        )
    if y.is_complex():
        raise ValueError(f"y must be real, got {y.dtype}")
    if not bool(torch.isfinite(y).all()):
        raise ValueError("y must be finite, got NaN or infinite entries")


def _check_counts(y: Tensor, kind: str) -> None:
    if bool((y < 0).any()) or (y.is_floating_point() and bool((y != y.round()).any())):
        raise ValueError(
            f"y must hold counts (integers ≥ 0) for a {kind} likelihood, got values in {_range(y)}"
        )


def _normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _per_sample(values: Tensor) -> Tensor:
    return values.flatten(1).sum(dim=1) if values.ndim > 1 else values


class Gaussian(ExponentialFamily):
    """A normal distribution with mean z and known variance.

    Nll = ‖y - z‖² / (2 variance), F_L = I / variance.

    Args:
        variance: the variance of every output.
    """

    def __init__(self, variance: float = 1.0) -> None:
        single = (
            variance.numel() == 1 if isinstance(variance, Tensor) else isinstance(variance, Real)
        )
        if not single or not 0 < variance < float("inf"):
            raise ValueError(f"variance must be a positive number, got {variance}")
        # a number without dimensions, which changes neither dtypes nor shapes
        self.variance = variance.reshape(()) if isinstance(variance, Tensor) else variance

    @override
    def log_partition(self, z: Tensor) -> Tensor:
        return z.square() / (2 * self.variance)

    @override
    def statistic(self, y: Tensor, z: Tensor) -> Tensor:
        return y.to(z.dtype) / self.variance

    @override
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        y = y.to(z.dtype) if y.dtype == torch.bool else y
        return _per_sample((z - y).square()) / (2 * self.variance)

    @override
    def fisher_weight(self, z: Tensor) -> Tensor:
        return torch.ones_like(z) / self.variance

    @override
    def kl(self, z: Tensor, other: Tensor) -> Tensor:
        return self.nll(z, other)

    @override
    def sample(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return z + self.variance**0.5 * _normal(z, generator)


class Categorical(ExponentialFamily):
    """A class label from logits z of shape (samples, classes).

    F_L = diag(p) - p pᵀ, p = softmax(z).

    Examples:
        >>> round(Categorical().nll(torch.zeros(1, 4), torch.tensor([2])).item(), 4)
        1.3863
    """

    @override
    def log_partition(self, z: Tensor) -> Tensor:
        return torch.logsumexp(z, dim=-1)

    @override
    def statistic(self, y: Tensor, z: Tensor) -> Tensor:
        return functional.one_hot(y.long(), z.shape[-1]).to(z.dtype)

    @override
    def check_targets(self, y: Tensor, z: Tensor) -> None:
        if z.ndim < 2:
            raise ValueError(f"logits must have shape (samples, classes), got {tuple(z.shape)}")
        whole = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
        if not whole or y.shape != z.shape[:-1]:
            raise ValueError(
                f"y must hold class indices (integers) of shape {tuple(z.shape[:-1])}, got "
                f"{y.dtype} {tuple(y.shape)}"
            )
        if y.numel() and not (int(y.min()) >= 0 and int(y.max()) < z.shape[-1]):
            raise ValueError(
                f"y must lie in 0..{z.shape[-1] - 1}, got {int(y.min())}..{int(y.max())}"
            )

    @override
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        return _per_sample(
            -torch.log_softmax(z, dim=-1).gather(-1, y.long().unsqueeze(-1)).squeeze(-1)
        )

    @override
    def mean(self, z: Tensor) -> Tensor:
        return torch.softmax(z, dim=-1)

    @override
    def fisher_vp(self, z: Tensor, v: Tensor) -> Tensor:
        p = self.mean(z)
        # seen from the likeliest class, whose 1 - p has lost its digits where p is near 1:
        # constants give exactly 0
        v = v - v.gather(-1, p.argmax(dim=-1, keepdim=True))
        return p * (v - (p * v).sum(dim=-1, keepdim=True))

    @override
    def fisher_factor(self, z: Tensor) -> Tensor:
        # diag(√p) - p √pᵀ; the root of an eigenvalue 0 that rounding has made 1e-17 would be 3e-9
        p = self.mean(z).reshape(len(z), -1, z.shape[-1])
        root = p.sqrt()
        factors = torch.diag_embed(root) - p.unsqueeze(-1) * root.unsqueeze(-2)
        spread = torch.diag_embed(factors.permute(0, 2, 3, 1)).permute(0, 3, 1, 4, 2)
        return spread.reshape(len(z), p[0].numel(), p[0].numel())

    @override
    def sample(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        probabilities = self.mean(z).reshape(-1, z.shape[-1])
        return torch.multinomial(probabilities, 1, generator=generator).reshape(z.shape[:-1])


class Bernoulli(ExponentialFamily):
    """Independent yes/no outcomes from logits z.

    F_L = diag(p (1 - p)), p = sigmoid(z). Targets are 0 or 1.

    Examples:
        >>> round(Bernoulli().nll(torch.zeros(1, 1), torch.ones(1, 1)).item(), 4)
        0.6931
    """

    @override
    def log_partition(self, z: Tensor) -> Tensor:
        # functional.softplus is linear from 20 on, which is wrong in the tenth digit
        return -functional.logsigmoid(-z)

    @override
    def check_targets(self, y: Tensor, z: Tensor) -> None:
        super().check_targets(y, z)
        if bool(((y != 0) & (y != 1)).any()):
            raise ValueError(
                f"y must be 0 or 1 for a Bernoulli likelihood, got values in {_range(y)}"
            )

    @override
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        return _per_sample(-functional.logsigmoid((2 * y.to(z.dtype) - 1) * z))

    @override
    def mean(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    @override
    def fisher_weight(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z) * torch.sigmoid(-z)

    @override
    def sample(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(torch.sigmoid(z), generator=generator)


class Poisson(ExponentialFamily):
    """Independent counts from log rates z: F_L = diag(exp z).

    Examples:
        >>> Poisson().fisher_vp(torch.zeros(1, 1), torch.ones(1, 1)).item()
        1.0
    """

    @override
    def log_partition(self, z: Tensor) -> Tensor:
        return z.exp()

    @override
    def check_targets(self, y: Tensor, z: Tensor) -> None:
        super().check_targets(y, z)
        _check_counts(y, "Poisson")

    @override
    def mean(self, z: Tensor) -> Tensor:
        return z.exp()

    @override
    def fisher_weight(self, z: Tensor) -> Tensor:
        return z.exp()

    @override
    def sample(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(z.exp(), generator=generator)


def _range(y: Tensor) -> str:
    return f"[{float(y.min()):g}, {float(y.max()):g}]"
