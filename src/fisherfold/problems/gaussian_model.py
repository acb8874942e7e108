"""Gaussian models whose mean and covariance both depend on the parameter, from sufficient statistics.

    y_i ~ N(μ(θ), Σ(θ)),  i = 1..n,    Ψ(θ) = ½ [log det Σ + tr Σ⁻¹(S + (ȳ - μ)(ȳ - μ)ᵀ)],    S = Cov(y)

    <v, F v> = dμᵀΣ⁻¹dμ + ½ tr(Σ⁻¹dΣ Σ⁻¹dΣ)    along dμ, dΣ = Dμ[v], DΣ[v]

Factor analysis, probabilistic principal components, structural equations. The cost of a pass does not depend on n.
Units that have a mean and covariance of their own (mixed models, regressions) are samples of an ``NLLProblem`` with
``MultivariateGaussian``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from fisherfold.fisher.general_likelihoods import MultivariateGaussian
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds.base import Manifold, Point, Tangent
from fisherfold.problems.base import Problem, check_data
from fisherfold.problems.nll import NLLProblem


class GaussianModel(Problem):
    """Maximum likelihood for a mean and a covariance that are functions of one parameter.

    Args:
        manifold: where θ lives.
        moments: a torch function of θ that returns (μ, Σ), of shapes (d,) and (d, d).
        y: the observations, shape (n, d); only their number, mean and covariance are kept.

    Attributes:
        mean: ȳ.
        covariance: S, with divisor n.

    Examples:
        The mean and one variance:

        >>> import torch
        >>> from fisherfold import minimize
        >>> from fisherfold.manifolds import Euclidean, Product
        >>> y = torch.randn(200, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> space = Product({"mean": Euclidean(3), "log_variance": Euclidean(1)})
        >>> eye = torch.eye(3, dtype=torch.float64)
        >>> problem = GaussianModel(space, lambda t: (t["mean"], t["log_variance"].exp() * eye), y)
        >>> start = {"mean": torch.zeros(3, dtype=torch.float64), "log_variance": torch.ones(1, dtype=torch.float64)}
        >>> result = minimize(problem, start)
        >>> torch.allclose(result.x["mean"], y.mean(0)), result.status
        (True, 'converged')
    """

    fisher_kinds: ClassVar[tuple[str, ...]] = ("exact", "dense")

    def __init__(
        self, manifold: Manifold, moments: Callable[[Any], tuple[Tensor, Tensor]], y: Tensor
    ) -> None:
        if not isinstance(y, Tensor) or y.ndim != 2 or len(y) < 2:
            seen = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"y must be a tensor of shape (observations, d) with at least two rows, got {seen}")
        if not callable(moments):
            raise TypeError(f"moments must be a function of theta that returns (mean, covariance), got {moments!r}")
        check_data(y=y)
        self.manifold, self.moments, self.n_samples = manifold, moments, len(y)
        self.mean = y.mean(0)
        centred = y - self.mean
        self.covariance = centred.mT @ centred / len(y)
        self._problem = NLLProblem(
            manifold, lambda _, theta: MultivariateGaussian.pack(*self.moments(theta))[None],
            MultivariateGaussian(y.shape[1]), y.new_zeros(1, 1),
            MultivariateGaussian.pack(self.mean, self.covariance)[None],
        )  # fmt: skip

    def log_likelihood(self, x: Point) -> float:
        """The log-likelihood of all observations, with its constant.

        Returns -n (Ψ + ½ d log 2π).
        """
        constant = len(self.mean) * math.log(2 * math.pi) / 2
        return -self.n_samples * (float(self.loss(x)) + constant)

    @override
    def loss(self, x: Point, batch: Tensor | None = None) -> Tensor:
        return self._all(batch).loss(x)

    @override
    def loss_and_gradient(self, x: Point, batch: Tensor | None = None) -> tuple[Tensor, Tangent]:
        return self._all(batch).loss_and_gradient(x)

    @override
    def fisher(self, x: Point, batch: Tensor | None = None, *, kind: str = "exact") -> FisherOperator:
        if kind not in self.fisher_kinds:
            raise ValueError(f"kind must be one of {list(self.fisher_kinds)}, got {kind!r}")
        return self._all(batch).fisher(x, kind=kind)

    def kl(self, x: Point, other: Point) -> Tensor:
        """The divergence KL(N(μ(θ), Σ(θ)) ‖ N(μ(θ'), Σ(θ')))."""
        return self._problem.kl(x, other)

    def _all(self, batch: Tensor | None) -> NLLProblem:
        if batch is not None:
            raise ValueError("GaussianModel keeps the mean and covariance of its data; leave out batch_size")
        return self._problem
