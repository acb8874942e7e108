"""Gaussian models whose mean and covariance both depend on the parameter, from sufficient statistics.

    y_i ~ N(μ(θ), Σ(θ)),  i = 1..n,    Ψ(θ) = ½ [log det Σ + tr Σ⁻¹(S + (ȳ - μ)(ȳ - μ)ᵀ)],
    S = Cov(y)

    <v, F v> = dμᵀΣ⁻¹dμ + ½ tr(Σ⁻¹dΣ Σ⁻¹dΣ)    along dμ, dΣ = Dμ[v], DΣ[v]

Factor analysis, probabilistic principal components, structural equations. The cost of a pass does
not depend on n. Units that have a mean and covariance of their own (mixed models, regressions) are
samples of an ``NLLProblem`` with ``MultivariateGaussian``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from fisherfold.fisher.general_likelihoods import MultivariateGaussian
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds.base import Manifold, Point
from fisherfold.problems.base import check_data
from fisherfold.problems.nll import NLLProblem


class GaussianModel(NLLProblem):
    """Maximum likelihood for a mean and a covariance that are functions of one parameter.

    Args:
        manifold: where θ lives.
        moments: a torch function of θ that returns (μ, Σ), of shapes (d,) and (d, d).
        y: the observations, shape (n, d); fits need their number, mean and covariance only, the
            sandwich all of them.

    Attributes:
        y: the observations.
        mean: ȳ.
        covariance: S, with divisor n.
    """

    fisher_kinds: ClassVar[tuple[str, ...]] = ("exact", "dense")
    random_kinds: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, manifold: Manifold, moments: Callable[[Any], tuple[Tensor, Tensor]], y: Tensor
    ) -> None:
        if not isinstance(y, Tensor) or y.ndim != 2 or len(y) < 2:
            seen = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"y must be a tensor of shape (observations, d) with at least two rows, got {seen}"
            )
        if not callable(moments):
            raise TypeError(
                "moments must be a function of theta that returns (mean, covariance), got "
                f"{moments!r}"
            )
        check_data(y=y)
        self.y = y
        self.moments = moments
        self.mean = y.mean(0)
        centred = y - self.mean
        self.covariance = centred.mT @ centred / len(y)
        # one sample: the statistics of all observations
        super().__init__(
            manifold,
            lambda _, theta: MultivariateGaussian.pack(*moments(theta))[None],
            MultivariateGaussian(y.shape[1]),
            y.new_zeros(1, 1),
            MultivariateGaussian.pack(self.mean, self.covariance)[None],
        )
        self.n_samples = len(y)

    def log_likelihood(self, x: Point) -> float:
        """The log-likelihood of all observations, with its constant: -n (Ψ + ½ d log 2π)."""
        constant = len(self.mean) * math.log(2 * math.pi) / 2
        return -self.n_samples * (float(self.loss(x)) + constant)

    @override
    def scores(self, x: Point, groups: Any = None) -> FisherOperator:
        single = NLLProblem(
            self.manifold,
            lambda y, theta: MultivariateGaussian.pack(*self.moments(theta)).expand(
                len(y), *y.shape[1:], y.shape[1] + 1
            ),
            self.likelihood,
            self.y,
            self.y,
        )
        return single.scores(x, groups)

    @override
    def _samples(self, batch: Tensor | None) -> Any:
        if batch is not None:
            raise ValueError(
                "GaussianModel keeps the mean and covariance of its data; leave out batch_size"
            )
        return super()._samples(None)
