r"""The likelihood of a factor model for natural-gradient steps: Σ = Λ Λᵀ + diag(ψ), ψ = c + exp(η).

Variables are in units of their standard deviations. The least unique variance c keeps a Heywood
case, in which the likelihood grows as a unique variance falls to 0, from running to infinity: it
ends at c. Rotations of Λ are directions without information, along which the gradient is 0, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.factors.moments import Moments
from fisherfold.fisher.operators import DenseFisher
from fisherfold.manifolds import Euclidean, Product
from fisherfold.manifolds.base import Point, Tangent
from fisherfold.problems import Problem
from fisherfold.solvers import GradientNorm, Result, minimize

# the least unique variance, as a share of the variance of a variable
LEAST_UNIQUENESS = 0.005


class FactorProblem(Problem):
    """Loadings, unique variances and means of a factor model, from the moments of patterns.

    Args:
        moments: of the data.
        n_factors: k.
    """

    def __init__(self, moments: Moments, n_factors: int) -> None:
        p = moments.masks.shape[1]
        self.moments = moments
        self.n_samples = moments.n
        self.manifold = Product(
            {"loadings": Euclidean(p, n_factors), "log_noise": Euclidean(p), "mean": Euclidean(p)}
        )

    def covariance(self, x: Point) -> Tensor:
        """Σ."""
        return x["loadings"] @ x["loadings"].mT + torch.diag(self.noise(x))

    def noise(self, x: Point) -> Tensor:
        """ψ."""
        return LEAST_UNIQUENESS + x["log_noise"].exp()

    @override
    def loss(self, x: Point, batch: Tensor | None = None) -> Tensor:
        return self.moments.loss(x["mean"], self.covariance(x))

    @override
    def loss_and_gradient(self, x: Point, batch: Tensor | None = None) -> tuple[Tensor, Tangent]:
        gradient, value = torch.func.grad_and_value(self.loss)(x)
        return value, gradient

    @override
    def fisher(self, x: Point, batch: Tensor | None = None, *, kind: str = "exact") -> DenseFisher:
        p, k = x["loadings"].shape
        eye = torch.eye(p, dtype=x["mean"].dtype)
        # dΣ of λ_ic is e_i λ_cᵀ + λ_c e_iᵀ
        half = torch.einsum("ia,bc->icab", eye, x["loadings"]).reshape(p * k, p, p)
        noise = torch.diag_embed(eye * x["log_noise"].exp())
        slopes = torch.cat([half + half.mT, noise, eye.new_zeros(p, p, p)])
        means = torch.cat([eye.new_zeros(p * k + p, p), eye])
        matrix = self.moments.information(self.covariance(x), means, slopes)
        return DenseFisher(self.manifold, x, 0.5 * (matrix + matrix.mT))

    def start(self) -> dict[str, Tensor]:
        """Jöreskog's (1967) start from the inverse covariance."""
        mean, covariance = self.moments.saturated(tol=1e-4)
        p, k = self.manifold.point_shape["loadings"]
        values, vectors = torch.linalg.eigh(covariance)
        inverse = (vectors / values.clamp(min=1e-3)) @ vectors.mT
        noise = (1 - k / (2 * p)) / inverse.diagonal()
        root = noise.clamp(min=4 * LEAST_UNIQUENESS).sqrt()
        values, vectors = torch.linalg.eigh(covariance / root[:, None] / root)
        loadings = root[:, None] * vectors[:, -k:] * (values[-k:] - 1).clamp(min=0.05).sqrt()
        return {
            "loadings": loadings.flip(-1),
            "log_noise": (root.square() - LEAST_UNIQUENESS).log(),
            "mean": mean,
        }


def fit(problem: FactorProblem, *, tol: float, max_iter: int) -> Result:
    """The maximum of the likelihood, by natural gradients."""
    options: dict[str, Any] = {"stop": GradientNorm(tol), "max_iter": max_iter}
    return minimize(problem, problem.start(), "rngd", **options)
