"""A step for the subspace that cannot raise the loss: EM, with the coefficients of the tasks as what is missing.

With E[a_t] and E[a_t a_tᵀ] of the posterior at U, -Σ_t log p(y_t) at L = U + H, Σ held, is no more than at U wherever

    Q(H) = Σ_t [½ tr(Hᵀ A_t H E[a_t a_tᵀ]) + tr(Hᵀ (A_t U E[a_t a_tᵀ] - X_tᵀ(y_t - X_t m) E[a_t]ᵀ))] / s_t²  ≤  0,

and conjugate gradients from H = 0 lower Q however soon they end. L = QR is the frame Q with the covariance R Σ Rᵀ.

The Fisher information of a direction that is weak beside the noise falls with the square of its variance, the gradient
only with the variance itself: steps of RNGD are then far too long, and all of a round's may be rejected. The
information of the complete data, H ↦ P (1/N) Σ_t A_t H E[a_t a_tᵀ]/s_t², falls as the gradient does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.operators import FisherOperator
from fisherfold.fisher.solve import solve
from fisherfold.subspace.marginal import MarginalSubspaceProblem, SubspacePrior
from fisherfold.subspace.tasks import TaskStatistics

# What conjugate gradients leave of the gradient, and the most products: Q has fallen after the first.
_ACCURACY, _PRODUCTS = 0.1, 50

# The damping, in mean eigenvalues: directions that have died out have no information of their own.
_DAMPING = 1e-10


class CompleteInformation(FisherOperator):
    """H ↦ P (1/N) Σ_t A_t H E[a_t a_tᵀ]/s_t², the information in U if the coefficients were seen.

    Args:
        problem: the marginal likelihood.
        point: the frame U.

    Attributes:
        mean_eigenvalue: about that, from the traces of the mean factors.
    """

    approximates: ClassVar[str] = "the Hessian in U from above: what the coefficients hide is taken for seen"

    def __init__(self, problem: MarginalSubspaceProblem, point: Tensor) -> None:
        super().__init__(problem.manifold, point)
        self.samples, self.statistics, self.noise = problem.samples, problem.statistics, problem.prior.noise
        self.moments = problem.posterior(point).second_moment()
        left = self.samples.total(self.statistics.scaled_gram(self.noise)) / self.samples.size
        right = self.samples.mean(self.moments)
        self.means = KroneckerFisher(problem.manifold, point, left=left, right=right)
        self.mean_eigenvalue = float(left.diagonal().mean() * right.diagonal().mean())

    @override
    def _matvec(self, v: Tensor) -> Tensor:
        moved = self.statistics.times(v) / self.noise[:, None, None]
        product = self.samples.total(torch.einsum("tip,tpq->iq", moved, self.moments)) / self.samples.size
        return self.manifold.project(self.point, product)

    @override
    def precondition(self, v: Tensor, damping: float) -> Tensor:
        return self.means.precondition(v, damping)


def expected_step(statistics: TaskStatistics, prior: SubspacePrior) -> SubspacePrior:
    """One step of EM for the subspace.

    Args:
        statistics: the rows.
        prior: where it starts.

    Returns:
        The prior with another frame and the covariance in it; its loss is no higher.
    """
    problem = MarginalSubspaceProblem(statistics, prior)
    operator = CompleteInformation(problem, prior.frame)
    damping = _DAMPING * operator.mean_eigenvalue
    gradient = problem.gradient(prior.frame)
    move = solve(operator, gradient, damping, method="cg", rtol=_ACCURACY, max_iter=_PRODUCTS).x
    frame, change = torch.linalg.qr(prior.frame - move)
    return replace(prior, frame=frame, covariance=change @ prior.covariance @ change.mT)
