"""Learn mean, subspace, prior and noise of related regressions by marginal likelihood.

One round: m by generalised least squares; posterior moments of the coefficients; Σ and s² from them
in closed form (parameter-expanded EM); then RNGD steps for U on the Grassmann manifold with the
Fisher information of the marginal likelihood. No update raises -Σ_t log p(y_t) (plus, for a noise
variance per task, the prior that ties them together), so the trace is monotone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fisherfold.distributed import Axis
from fisherfold.solvers import GradientNorm, minimize
from fisherfold.subspace.marginal import (
    MarginalSubspaceProblem,
    SubspacePrior,
    TaskPosterior,
    information,
    noise_floor,
    posterior,
    start,
)
from fisherfold.subspace.tasks import EPS, TaskStatistics

NOISES = ("task", "shared")

# One noise variance per task is drawn towards the common one as if by this many rows.
NOISE_ROWS = 10.0
# Where rounding hides what a round gains, the fit has converged after so many rounds without a
# lower loss.
_PATIENCE = 5
# Exact Fisher products touch every Gram matrix; beyond this many numbers the Kronecker form is
# used.
_EXACT_ENTRIES = 2**25
_STATIONARY = 1e-8
# The most entries of U for an EM step, which solves a dense system of that size.
_MOST_COMPLETE = 2048
# The p² × p² system of the expansion is worth its tasks × p⁴ products up to here.
_EXPANSION_COST = 5e9


@dataclass(frozen=True)
class MarginalFit:
    """The outcome of ``fit_marginal``."""

    prior: SubspacePrior  # mean, frame, covariance and noise
    posterior: TaskPosterior  # of the coefficients of every task
    # one row per round: ``round``, ``loss`` (mean over tasks of -log p(y_t), with the prior of the
    # noise), ``gradient_norm`` of U
    trace: list[dict[str, float]] = field(repr=False)
    converged: bool  # whether the loss had settled before the rounds ran out
    # whether all steps for U were rejected in the last round, although there is a gradient
    stalled: bool


def fit_marginal(
    statistics: TaskStatistics,
    *,
    rank: int,
    noise: str = "task",
    max_rounds: int = 300,
    tol: float = 1e-7,
    prior: SubspacePrior | None = None,
    callback: Callable[[dict[str, float]], object] | None = None,
    first: int = 0,
    expected: bool = False,
) -> MarginalFit:
    """Learn what the tasks share."""
    prior = start(statistics, rank=rank) if prior is None else prior
    tasks = statistics.all_tasks
    statistics = statistics.cached()
    floor = noise_floor(statistics)
    limit = tol * max(statistics.n_rows, 1.0) / tasks.size
    trace: list[dict[str, float]] = []
    converged = stalled = False
    for number in range(first, first + max_rounds):
        prior = _update_moments(statistics, update_mean(statistics, prior), noise, floor)
        moved, gradient_norm = update_frame(statistics, prior)
        stalled = gradient_norm > _STATIONARY and torch.equal(moved.frame, prior.frame)
        prior = _expected_step(statistics, prior) if stalled and expected else moved
        loss = tasks.add(posterior(statistics, prior).losses) + noise_penalty(
            prior.noise, noise, tasks
        )
        trace.append(
            {"round": float(number + 1), "loss": loss / tasks.size, "gradient_norm": gradient_norm}
        )
        converged = _settled([row["loss"] for row in trace], limit)
        if (callback is not None and callback(trace[-1])) or converged:
            break
    return MarginalFit(prior, posterior(statistics, prior), trace, converged, stalled)


def _expected_step(statistics: TaskStatistics, prior: SubspacePrior) -> SubspacePrior:
    """One step of EM for U, for rounds in which all steps of RNGD were rejected.

    The Fisher information of a direction that is weak compared with the noise falls with the square
    of its variance, the gradient only with the variance itself: natural gradients are then far too
    long. The information of the complete data, H ↦ Σ_t A_t H E[a_t a_tᵀ]/s_t², falls as the
    gradient does, and its Newton step cannot raise the loss.
    """
    n, p = prior.frame.shape
    if n * p > _MOST_COMPLETE:
        return prior
    found = posterior(statistics, prior)
    tasks = statistics.all_tasks
    moments = found.second_moment()
    system = torch.einsum("tkl,tij->ikjl", moments / prior.noise[:, None, None], statistics.gram)
    slope = (
        torch.einsum("tip,tpq->iq", found.scaled_gram_frame, moments)
        - found.scaled_residual.mT @ found.mean
    )
    system = tasks.total(system).reshape(n * p, n * p)
    slope = tasks.total(slope)
    system.diagonal().add_(1e-10 * system.diagonal().mean())
    frame, change = torch.linalg.qr(
        prior.frame - torch.linalg.solve(system, slope.reshape(-1)).reshape(n, p)
    )
    return replace(
        prior, frame=frame.contiguous(), covariance=change @ prior.covariance @ change.mT
    )


def _settled(losses: list[float], limit: float) -> bool:
    """Whether the last round changed little, or the last few found no lower loss."""
    if len(losses) > 1 and abs(losses[-2] - losses[-1]) <= limit:
        return True
    return len(losses) > _PATIENCE and min(losses[-_PATIENCE:]) >= min(losses[:-_PATIENCE]) - limit


def update_mean(statistics: TaskStatistics, prior: SubspacePrior) -> SubspacePrior:
    """Generalised least squares: the likelihood is quadratic in m with curvature Σ S_t."""
    found = posterior(statistics, prior)
    tasks = statistics.all_tasks
    values, vectors = torch.linalg.eigh(tasks.total(information(statistics, prior.noise, found)))
    kept = values > values[-1] * len(values) * EPS * 10  # directions that no row has stay
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0)
    return replace(
        prior,
        mean=prior.mean + vectors @ (inverse * (vectors.mT @ tasks.total(found.score().sum(0)))),
    )


def _update_moments(
    statistics: TaskStatistics, prior: SubspacePrior, noise: str, floor: float = 0.0
) -> SubspacePrior:
    """Σ and s² from the posterior moments."""
    covariance, errors = expected_moments(statistics, prior)
    variances = _noise_from(errors, statistics.counts, prior.noise, noise, statistics.all_tasks)
    return replace(prior, covariance=covariance, noise=variances.clamp(min=floor))


def update_frame(statistics: TaskStatistics, prior: SubspacePrior) -> tuple[SubspacePrior, float]:
    """Two steps of RNGD for U on the Grassmann manifold."""
    n, p = prior.frame.shape
    if p == n:
        return prior, 0.0
    problem = MarginalSubspaceProblem(statistics, prior)
    kind = "exact" if problem.n_samples * n * n <= _EXACT_ENTRIES else "kronecker"
    result = minimize(
        problem,
        prior.frame,
        "rngd",
        max_iter=2,
        stop=GradientNorm(_STATIONARY),
        fisher=kind,
        sigma=1e-3,
        sigma_min=1e-8,
    )
    return replace(prior, frame=result.x.contiguous()), result.trace["gradient_norm"][-1]


def expected_moments(statistics: TaskStatistics, prior: SubspacePrior) -> tuple[Tensor, Tensor]:
    """Posterior moments after the scale of the coefficients was freed (parameter-expanded EM)."""
    found = posterior(statistics, prior)
    frame = prior.frame
    tasks = statistics.all_tasks
    moments = found.second_moment()
    inner = frame.mT @ found.scaled_gram_frame
    target = found.scaled_residual @ frame
    expansion = _expansion(inner, moments, tasks.second_moment(target, found.mean), tasks)
    mean = found.mean @ expansion.mT
    moments = expansion @ moments @ expansion.mT
    offset = statistics.residual_power(prior.mean) / prior.noise
    errors = prior.noise * (offset - 2 * (target * mean).sum(-1) + (inner * moments).sum((-2, -1)))
    return tasks.mean(moments), errors.clamp(min=0)


def _expansion(inner: Tensor, moments: Tensor, target: Tensor, tasks: Axis) -> Tensor:
    """The matrix α with Σ_t G_t α E[a_t a_tᵀ] = Σ_t h_t E[a_t]ᵀ."""
    p = inner.shape[1]
    eye = torch.eye(p, dtype=inner.dtype)
    if tasks.size * p**4 > _EXPANSION_COST:
        return eye
    system = tasks.total(torch.einsum("tij,tkl->ikjl", inner, moments)).reshape(p * p, p * p)
    lift = (1e-10 * system.diagonal().mean()).clamp(
        min=1e-300
    )  # without information α is the identity
    missing = target.reshape(-1) - system @ eye.reshape(-1)
    system.diagonal().add_(lift)
    return eye + torch.linalg.solve(system, missing).reshape(p, p)


def _noise_from(errors: Tensor, counts: Tensor, before: Tensor, noise: str, tasks: Axis) -> Tensor:
    """Noise variances from expected squared errors."""
    if noise == "shared":
        pooled = tasks.total(torch.stack([errors.sum(), counts.sum()]))
        return (pooled[0] / pooled[1].clamp(min=1e-300)).expand_as(errors)
    return (errors + NOISE_ROWS * _harmonic_mean(before, tasks)) / (counts + NOISE_ROWS)


def _harmonic_mean(noise_variance: Tensor, tasks: Axis) -> Tensor:
    """The scale of an inverse-gamma prior that makes these variances most likely."""
    return 1 / tasks.mean(1 / noise_variance)


def noise_penalty(noise_variance: Tensor, noise: str, tasks: Axis) -> float:
    """The inverse-gamma prior of the noise variances at its best common value."""
    if noise == "shared":
        return 0.0
    common = _harmonic_mean(noise_variance, tasks)
    return NOISE_ROWS / 2 * tasks.add(noise_variance.log() + common / noise_variance - common.log())


def common_noise(noise_variance: Tensor, noise: str, tasks: Axis) -> float:
    """What the noise variances of tasks are drawn towards."""
    return float(
        tasks.mean(noise_variance) if noise == "shared" else _harmonic_mean(noise_variance, tasks)
    )


def extend_noise(
    statistics: TaskStatistics, prior: SubspacePrior, noise: str, *, common: float, changed: Tensor
) -> Tensor:
    """Noise variances for statistics that have grown; tasks without new rows keep theirs."""
    added = statistics.n_tasks - len(prior.noise)
    grown = torch.cat([prior.noise, torch.full((added,), common, dtype=prior.noise.dtype)])
    if noise == "shared":
        return grown
    own = statistics.select(changed)
    for _ in range(200):
        before = grown[changed]
        found = posterior(own, replace(prior, noise=before))
        weights = prior.mean + found.mean @ prior.frame.mT
        inner = prior.frame.mT @ found.scaled_gram_frame
        errors = own.residual_power(weights) + before * (inner * found.covariance).sum((-2, -1))
        grown[changed] = (errors + NOISE_ROWS * common) / (own.counts + NOISE_ROWS)
        if bool(((grown[changed] - before).abs() <= 1e-12 * before).all()):
            break
    return grown
