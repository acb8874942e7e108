r"""The two-layer network with batch normalisation on which the paper proves its local rates.

    f(x) = m^{-1/2} Σ_j a_j φ(τ_j(x)),    τ_j(x) = θ_jᵀ(x - E x) / s_j,    s_j = √(θ_jᵀ V θ_j)

with a_j = ±1 fixed, θ_j on the unit sphere and V the covariance of the inputs. Row j of the
gradient in θ is

    ∂f/∂θ_j = m^{-1/2} a_j φ'(τ_j) ((x - E x)/s_j - τ_j V θ_j/s_j²),

which is orthogonal to θ_j: the Euclidean Jacobian is the Riemannian one. Everything is done through
products with J and through the Gram matrix J Jᵀ of N×N, summed over blocks of units; no matrix has
the size of θ squared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from fisherfold.fisher.jacobian import score
from fisherfold.fisher.likelihoods import Gaussian, Likelihood
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds import Oblique
from fisherfold.manifolds.base import Point, Tangent
from fisherfold.problems.base import Problem

#: The activation φ and its derivative; at 0 the ReLU has the derivative 1, as in the paper.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (torch.relu, lambda t: (t >= 0).to(t.dtype)),
    "tanh": (torch.tanh, lambda t: 1 - torch.tanh(t).square()),
}
_BLOCK_ENTRIES = 2**22


class TwoLayer(Problem):
    """The first layer of the network as a point of ``Oblique(m, n)``, moved along great circles."""

    fisher_kinds: ClassVar[tuple[str, ...]] = ("exact",)

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        signs: Tensor,
        *,
        activation: str = "relu",
        likelihood: Likelihood | None = None,
    ) -> None:
        self.inputs = x - x.mean(dim=0)
        self.covariance = self.inputs.T @ self.inputs / len(x)
        self.targets = y
        self.signs = signs.to(x.dtype)
        self.likelihood = Gaussian() if likelihood is None else likelihood
        self.likelihood.check_targets(y, self.inputs[:, 0])
        self.activation, self.slope = ACTIVATIONS[activation]
        self.n_samples = len(x)
        self.width = len(signs)
        self.manifold = Oblique(self.width, x.shape[1], retraction="exp")

    @classmethod
    def draw(
        cls,
        x: Tensor,
        y: Tensor,
        width: int,
        *,
        generator: torch.Generator,
        activation: str = "relu",
        likelihood: Likelihood | None = None,
    ) -> tuple[TwoLayer, Tensor]:
        """Draw a network as the paper does: a_j uniform on ±1, θ_j uniform on the sphere."""
        signs = 2 * torch.randint(2, (width,), generator=generator).to(x.dtype) - 1
        problem = cls(x, y, signs, activation=activation, likelihood=likelihood)
        return problem, problem.manifold.random_point(generator=generator, dtype=x.dtype)

    def with_targets(self, y: Tensor) -> TwoLayer:
        """The same network with other targets."""
        other = copy.copy(self)
        other.targets = y
        return other

    def outputs(self, theta: Tensor) -> Tensor:
        """The outputs u of the network."""
        self.manifold.check_point(theta, name="theta")
        return self.activation(self._units(theta).tau) @ self.signs / math.sqrt(self.width)

    def residual(self, theta: Tensor) -> float:
        """The distance ‖u - y‖ of the outputs from the targets, as in the local theory."""
        return float(torch.linalg.vector_norm(self.outputs(theta) - self.targets))

    @override
    def loss(self, x: Point, batch: Tensor | None = None) -> Tensor:
        _check_whole(batch)
        return self.likelihood.nll(self.outputs(x), self.targets).mean()

    @override
    def loss_and_gradient(self, x: Point, batch: Tensor | None = None) -> tuple[Tensor, Tangent]:
        _check_whole(batch)
        u = self.outputs(x)
        scores = score(self.likelihood, u, self.targets)[:, 0]
        return self.likelihood.nll(u, self.targets).mean(), self.pull_back(x, scores / len(u))

    @override
    def fisher(
        self, x: Point, batch: Tensor | None = None, *, kind: str = "exact"
    ) -> TwoLayerFisher:
        _check_whole(batch)
        return TwoLayerFisher(self, x)

    def push_forward(self, theta: Tensor, v: Tensor) -> Tensor:
        """The product J v."""
        units = self._units(theta)
        along = (self.inputs @ v.T) / units.scale - units.tau * (units.normal * v).sum(
            dim=1
        ) / units.scale
        return (self._weights(units) * along).sum(dim=1)

    def pull_back(self, theta: Tensor, w: Tensor) -> Tensor:
        """The product Jᵀ w."""
        units = self._units(theta)
        weighted = self._weights(units) * w[:, None] / units.scale
        ambient = (
            weighted.T @ self.inputs - (weighted * units.tau).sum(dim=0)[:, None] * units.normal
        )
        return self.manifold.project(theta, ambient)

    def gram(self, theta: Tensor, other: Tensor | None = None) -> Tensor:
        """The Gram matrix J Jᵀ, or D Dᵀ of D = J(θ) - J(θ'), summed over blocks of units."""
        size = max(1, _BLOCK_ENTRIES // self.inputs.numel())
        total = self.inputs.new_zeros(self.n_samples, self.n_samples)
        for start in range(0, self.width, size):
            block = slice(start, start + size)
            rows = self.jacobian(theta, block)
            rows = (rows if other is None else rows - self.jacobian(other, block)).flatten(1)
            total += rows @ rows.T
        return total

    def jacobian(self, theta: Tensor, block: slice = slice(None)) -> Tensor:
        """The Jacobian of all outputs in the weights of a block of units."""
        units = self._units(theta[block])
        tangent = self.inputs[:, None, :] - units.tau[:, :, None] * units.normal
        return (self._weights(units, block) / units.scale)[:, :, None] * tangent

    def _units(self, theta: Tensor) -> _Units:
        pulled = theta @ self.covariance
        scale = (pulled * theta).sum(dim=1).sqrt()
        return _Units((self.inputs @ theta.T) / scale, scale, pulled / scale[:, None])

    def _weights(self, units: _Units, block: slice = slice(None)) -> Tensor:
        """m^{-1/2} a_j φ'(τ_ij)."""
        return self.slope(units.tau) * (self.signs[block] / math.sqrt(self.width))


class _Units(NamedTuple):
    """What the hidden units compute."""

    tau: Tensor  # τ, shape (N, m)
    scale: Tensor  # s, shape (m,)
    normal: Tensor  # V θ_j/s_j, shape (m, n)


def _check_whole(batch: Tensor | None) -> None:
    if batch is not None:
        raise ValueError("the theory is measured on all samples; leave out batch_size")


class TwoLayerFisher(FisherOperator):
    """F = (1/N) Jᵀ H J, H the diagonal output Fisher matrix, solved in the space of the N samples.

    With W = N^{-1/2} H^{1/2} J and K = W Wᵀ:  (F + λ I)⁻¹ Wᵀ c = Wᵀ (K + λ I)⁻¹ c, and a part of
    the right-hand side outside the range of Wᵀ is divided by λ. With λ = 0 it is the pseudo-inverse
    Jᵀ(JJᵀ)⁻¹ H⁻¹ (JJᵀ)⁻¹ J of the paper (times N, for the factor 1/N in F).
    """

    approximates = "nothing: F^R = (1/N) Jᵀ H_L J exactly, on the given samples"

    def __init__(self, problem: TwoLayer, theta: Tensor) -> None:
        super().__init__(problem.manifold, theta)
        self.problem = problem
        u = problem.outputs(theta)
        self.root = (problem.likelihood.fisher_vp(u, torch.ones_like(u)) / len(u)).sqrt()
        self.n_rows = len(u)

    @property
    @override
    def is_structured(self) -> bool:
        return True

    @override
    def _matvec(self, v: Tangent) -> Tangent:
        return self._pull_back(self._push_forward(v))

    def _push_forward(self, v: Tangent) -> Tensor:
        return self.root * self.problem.push_forward(self.point, v)

    def _pull_back(self, w: Tensor) -> Tangent:
        return self.problem.pull_back(self.point, self.root * w)

    @override
    def structured_solve(self, g: Tangent, damping: float) -> Tangent | None:
        kernel = self.root[:, None] * self.problem.gram(self.point) * self.root
        values, vectors = torch.linalg.eigh(kernel)
        keep = values > values.max().clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
        values = values[keep]
        vectors = vectors[:, keep]
        coordinates = (vectors.T @ self._push_forward(g)) / values
        inside = self._pull_back(vectors @ (coordinates / (values + damping)))
        if damping == 0:
            return inside
        outside = g - self._pull_back(vectors @ coordinates)
        # 1/λ would blow up a part outside the range of F that is nothing but rounding
        if float(outside.norm()) <= 1e4 * torch.finfo(g.dtype).eps * float(g.norm()):
            return inside
        return inside + outside / damping

    @override
    def rows(self) -> Tensor:
        return self.root[:, None] * self.problem.jacobian(self.point).flatten(1)


def balanced_inputs(n_samples: int, dim: int, *, generator: torch.Generator) -> Tensor:
    """Random inputs as the paper assumes them: unit length, mean zero, covariance of full rank."""
    x = torch.randn(n_samples, dim, generator=generator, dtype=torch.float64)
    # each turn moves the points to mean zero and back to the sphere; the mean falls by a constant
    # factor
    for _ in range(1000):
        x = functional.normalize(x - x.mean(dim=0), dim=1)
        if float(x.mean(dim=0).norm()) < 4 * torch.finfo(x.dtype).eps:
            break
    return x
