"""Multi-task regression with the task coefficients integrated out.

    y_t = X_t (m + U a_t) + ε,   a_t ~ N(0, Σ),  ε ~ N(0, s_t² I)   ⇒   y_t ~ N(X_t m, s_t² I + X_t
    U Σ Uᵀ X_tᵀ)

The subspace U lies on the Grassmann manifold and is moved by RNGD on the marginal likelihood; the
mean m is its exact maximiser given the rest (generalised least squares), prior covariance Σ and
noise s² are re-estimated from the posterior moments of a_t (closed form, EM). So there is no ridge
to tune: a task with few rows leans on the others as far as they are alike. With V_t the posterior
covariance of a_t,

    S_t = X_tᵀ(s_t² I + X_tUΣUᵀX_tᵀ)⁻¹X_t = A_t/s_t² - (A_tU/s_t²) V_t (A_tU/s_t²)ᵀ

is all that the gradient and the Fisher information of U need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.distributed import Axis
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds import Grassmann
from fisherfold.problems.base import Problem
from fisherfold.problems.cache import LastPoint
from fisherfold.subspace.tasks import TaskStatistics, check_whole


@dataclass(frozen=True)
class SubspacePrior:
    """What all tasks share, and the noise of each."""

    mean: Tensor  # m, shape (features,)
    frame: Tensor  # U, orthonormal columns, shape (features, rank)
    covariance: Tensor  # Σ of the coefficients in that frame, shape (rank, rank)
    noise: Tensor  # s_t², shape (tasks,)


@dataclass(frozen=True)
class TaskPosterior:
    """The posterior of each task's coefficients, and its marginal likelihood."""

    mean: Tensor  # E[a_t], shape (tasks, rank)
    covariance: Tensor  # V_t, shape (tasks, rank, rank)
    scaled_gram_frame: Tensor  # A_tU/s_t², shape (tasks, features, rank)
    scaled_residual: Tensor  # X_tᵀ(y_t - X_t m)/s_t², shape (tasks, features)
    losses: Tensor  # -log p(y_t), shape (tasks,)

    def second_moment(self) -> Tensor:
        """E[a_t a_tᵀ]."""
        return self.covariance + self.mean[:, :, None] * self.mean[:, None, :]

    def score(self) -> Tensor:
        """X_tᵀ Cov(y_t)⁻¹ (y_t - X_t m), the derivative of log p(y_t) in the mean."""
        return self.scaled_residual - (self.scaled_gram_frame @ self.mean[..., None]).squeeze(-1)


def posterior(statistics: TaskStatistics, prior: SubspacePrior) -> TaskPosterior:
    """The posterior of every task, also of tasks that were not in the fit."""
    frame = prior.frame
    noise = prior.noise
    tasks = statistics.n_tasks
    n, p = frame.shape
    gram_frame = statistics.times(frame) / noise[:, None, None]
    inner = (gram_frame.mT.reshape(tasks * p, n) @ frame).reshape(tasks, p, p)
    root = symmetric_root(prior.covariance)
    # B = I + Σ^½ UᵀA_tU Σ^½ / s² is well conditioned whatever Σ is
    factor = factor_above_one(torch.eye(p, dtype=frame.dtype) + root @ inner @ root)
    half = torch.linalg.solve_triangular(factor, root.expand(tasks, p, p), upper=False)
    covariance = half.mT @ half
    shifted_cross = statistics.times(prior.mean)
    residual = (statistics.cross - shifted_cross) / noise[:, None]
    power = statistics.power - ((2 * statistics.cross - shifted_cross) * prior.mean).sum(-1)
    target = residual @ frame
    mean = (covariance @ target[..., None]).squeeze(-1)
    log_determinant = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    constant = statistics.counts * (math.log(2 * math.pi) + noise.log())
    losses = (constant + log_determinant + power / noise - (target * mean).sum(-1)) / 2
    return TaskPosterior(mean, covariance, gram_frame, residual, losses)


class MarginalSubspaceProblem(Problem):
    """The negative log marginal likelihood in the frame, with mean, Σ and noise fixed.

    Gradient (Fisher's identity): P (1/N) Σ_t [A_tU E[a_t a_tᵀ] - X_tᵀ(y_t - X_t m) E[a_t]ᵀ] / s_t².
    Fisher kinds: ``exact``, H ↦ P (1/N) Σ_t [S_t H R_t + S_tUΣ Hᵀ S_tUΣ] with R_t = Σ UᵀS_tU Σ, and
    ``kronecker``, the product of the means of S_t and R_t.
    """

    fisher_kinds: ClassVar[tuple[str, ...]] = ("exact", "kronecker")
    manifold: Grassmann

    def __init__(self, statistics: TaskStatistics, prior: SubspacePrior) -> None:
        self.statistics = statistics
        self.prior = prior
        self.manifold = Grassmann(*prior.frame.shape)
        self.samples = statistics.all_tasks
        self.n_samples = self.samples.size
        self.group = self.samples.group
        self._last: LastPoint[TaskPosterior] = LastPoint()

    def posterior(self, x: Tensor) -> TaskPosterior:
        """The posterior of all tasks; the last one is kept."""
        self.samples.check_same(x)
        known = self._last.get(x)
        return known or self._last.put(x, posterior(self.statistics, replace(self.prior, frame=x)))

    @override
    def loss(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        check_whole(batch)
        return self.samples.mean(self.posterior(x).losses)

    @override
    def loss_rounding(self, x: Tensor, loss: float) -> float:
        # ‖y_t‖²/s_t² cancels in a loss
        power = self.samples.add(self.statistics.power / self.prior.noise) / (2 * self.n_samples)
        return super().loss_rounding(x, max(abs(loss), power))

    @override
    def loss_and_gradient(self, x: Tensor, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_whole(batch)
        found = self.posterior(x)
        spread = torch.einsum("tip,tpq->iq", found.scaled_gram_frame, found.second_moment())
        ambient = (
            self.samples.total(spread - found.scaled_residual.mT @ found.mean) / self.n_samples
        )
        return self.samples.mean(found.losses), self._tangent(x, ambient)

    @override
    def fisher(
        self, x: Tensor, batch: Tensor | None = None, *, kind: str = "exact"
    ) -> FisherOperator:
        if kind not in self.fisher_kinds:
            raise ValueError(f"kind must be one of {self.fisher_kinds}, got {kind!r}")
        check_whole(batch)
        found = self.posterior(x)
        noise = self.prior.noise
        right = self.prior.covariance - found.covariance
        left = self.samples.total(information(self.statistics, noise, found)) / self.n_samples
        kronecker = KroneckerFisher(self.manifold, x, left=left, right=self.samples.mean(right))
        if kind == "kronecker":
            return kronecker
        return MarginalFisher(
            self.manifold,
            x,
            self.statistics.gram,
            noise=noise,
            found=found,
            right=right,
            preconditioner=kronecker,
            samples=self.samples,
        )


class MarginalFisher(FisherOperator):
    """H ↦ P (1/N) Σ_t [S_t H R_t + S_tUΣ Hᵀ S_tUΣ], from ½ tr(C⁻¹ dC C⁻¹ dC).

    R_t = Σ UᵀS_tU Σ = Σ - V_t and S_tUΣ = (A_tU/s_t²) V_t.
    """

    approximates = "nothing: the Fisher information of the marginal likelihood of y_t in U"

    def __init__(
        self,
        manifold: Grassmann,
        point: Tensor,
        grams: Tensor,
        *,
        noise: Tensor,
        found: TaskPosterior,
        right: Tensor,
        preconditioner: KroneckerFisher,
        samples: Axis,
    ) -> None:
        super().__init__(manifold, point)
        self.samples = samples
        self.grams = grams
        self.noise = noise
        self.right = right
        self.preconditioner = preconditioner
        self.gram_frame = found.scaled_gram_frame
        self.covariance = found.covariance
        self.reach = found.scaled_gram_frame @ found.covariance

    @override
    def _matvec(self, v: Tensor) -> Tensor:
        tasks, n, p = self.gram_frame.shape
        moved = (self.grams.reshape(tasks * n, n) @ v).reshape(tasks, n, p) / self.noise[
            :, None, None
        ]
        moved = moved - self.reach @ (self.gram_frame.mT @ v)
        product = torch.einsum("tip,tpq->iq", moved, self.right)
        product = product + torch.einsum("tip,tpq->iq", self.reach, v.mT @ self.reach)
        return self.manifold.project(self.point, self.samples.total(product) / self.samples.size)


def information(statistics: TaskStatistics, noise: Tensor, found: TaskPosterior) -> Tensor:
    """Σ_t S_t, the Fisher information of the mean m, over the tasks that are here."""
    explained = found.scaled_gram_frame @ found.covariance
    tasks, n, p = explained.shape
    wide = explained.mT.reshape(tasks * p, n)
    other = found.scaled_gram_frame.mT.reshape(tasks * p, n)
    total = statistics.scaled_gram(noise) - wide.mT @ other
    return (total + total.mT) / 2


def start(statistics: TaskStatistics, *, rank: int) -> SubspacePrior:
    """Start from pooled ridge and the leading directions of the tasks' own ridge."""
    n = statistics.n_features
    pooled = statistics.pooled()
    eye = torch.eye(n, dtype=torch.float64)
    # features of about unit size for the ridge; powers of two keep all digits
    squares = pooled.gram[0].diagonal() / pooled.counts.clamp(min=1)
    sizes = torch.where(squares > 0, torch.exp2((squares.log2() / 2).round()), 1.0)
    even = replace(
        statistics, gram=statistics.gram / sizes / sizes[:, None], cross=statistics.cross / sizes
    )
    pooled = even.pooled()
    scale = (
        pooled.gram.diagonal(dim1=-2, dim2=-1).sum() / (n * pooled.counts.sum()).clamp(min=1)
    ).clamp(min=1e-300)
    mean = torch.linalg.solve(pooled.gram[0] + scale * eye, pooled.cross[0])
    tasks = statistics.all_tasks
    noise = tasks.total(even.residual_power(mean).sum()) / pooled.counts.sum()
    noise = noise.clamp(min=noise_floor(statistics))
    residual = even.cross - even.gram @ mean
    own = torch.linalg.solve(even.gram + 10 * scale * eye, residual)
    frame, values = start_frame(tasks.second_moment(own) / tasks.size, pooled.gram[0], rank)
    # a floor keeps every direction alive: EM can only shrink Σ
    covariance = torch.diag(values[:rank] + values.mean() / 10 + 1e-8 * noise / scale)
    frame, change = torch.linalg.qr(frame / sizes[:, None])
    signs = change.diagonal().sign()
    frame = frame * signs
    change = change * signs[:, None]
    covariance = change @ covariance @ change.mT
    return SubspacePrior(mean / sizes, frame, covariance, noise.expand(statistics.n_tasks).clone())


def noise_floor(statistics: TaskStatistics) -> float:
    """The least noise variance, so that exact fits do not divide by zero."""
    power, counts = statistics.all_tasks.total(
        torch.stack([statistics.power.sum(), statistics.counts.sum()])
    )
    return float(1e-12 * power / counts.clamp(min=1)) or 1e-100


def start_frame(moment: Tensor, gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The leading directions of the tasks' own coefficients."""
    tie_breaker = 1e-6 * moment.trace() / gram.trace().clamp(min=1e-300) * gram
    values, vectors = torch.linalg.eigh(moment + tie_breaker)
    frame = vectors[:, -rank:].flip(1)
    frame = frame * frame.gather(0, frame.abs().argmax(0, keepdim=True)).sign()
    return frame.contiguous(), values.flip(0).clamp(min=0)


def symmetric_root(matrix: Tensor) -> Tensor:
    """The symmetric square root of a positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.mT


def factor_above_one(matrix: Tensor) -> Tensor:
    """The Cholesky factor of symmetric matrices I + M with M positive semi-definite.

    Where M is so large that rounding leaves none, as with next to no noise, eigenvalues below one
    are set to it.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not bool(failed.any()):
        return factor
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    upper = torch.linalg.qr((vectors * values.clamp(min=1.0).sqrt()[..., None, :]).mT)[1]
    return (upper * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None]).mT
