"""Learning mean, subspace, prior and noise of related regressions by marginal likelihood.

One round: m by generalised least squares; posterior moments of the coefficients; Σ and s² from them in closed form;
then RNGD steps for U on the Grassmann manifold with the Fisher information of the marginal likelihood. Every update can
only lower -Σ_t log p(y_t) (plus, for one noise variance per task, the prior that ties them together), so the trace is
monotone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fisherfold.distributed import Axis
from fisherfold.solvers import GradientNorm, minimize
from fisherfold.subspace.em import expected_step
from fisherfold.subspace.marginal import (
    MarginalSubspaceProblem,
    SubspacePrior,
    TaskPosterior,
    information,
    noise_floor,
    posterior,
    start,
    symmetric_root,
)
from fisherfold.subspace.tasks import TaskStatistics

NOISES = ("task", "shared")

# One noise variance per task is drawn towards the common one as if by this many rows, so that a task of a few rows
# cannot explain itself with no noise at all.
NOISE_ROWS = 10.0

# Below this part of the noise a direction is dead: rounds that grow it gain less than any tolerance.
_DEAD = 1e-4

# Where rounding hides what a round gains, the loss has settled when so many in a row have found no lower one.
_PATIENCE = 5

# Exact Fisher products touch every Gram matrix; beyond this many numbers the Kronecker form is used.
_EXACT_ENTRIES = 2**25

# Where the gradient of U is no larger, no step is tried.
STATIONARY = 1e-8

# The p² × p² system of the expansion is worth its tasks × p⁴ products up to here; beyond it, EM goes without.
_EXPANSION_COST = 5e9


@dataclass(frozen=True)
class MarginalFit:
    """The outcome of ``fit_marginal``.

    Attributes:
        prior: mean, frame, covariance and noise.
        posterior: of the coefficients of every task.
        trace: one row per round: ``round``, ``loss`` (mean over tasks of -log p(y_t), with the prior of the noise),
            ``gradient_norm`` of U.
        converged: whether the loss had settled before the rounds ran out.
    """

    prior: SubspacePrior
    posterior: TaskPosterior
    trace: list[dict[str, float]] = field(repr=False)
    converged: bool

    @property
    def weights(self) -> Tensor:
        """The coefficients of every task in the features, m + U E[a_t], shape (tasks, features)."""
        return self.prior.mean + self.posterior.mean @ self.prior.frame.mT


def fit_marginal(
    statistics: TaskStatistics,
    *,
    rank: int,
    noise: str = "task",
    max_rounds: int = 300,
    tol: float = 1e-7,
    prior: SubspacePrior | None = None,
    trace: list[dict[str, float]] | None = None,
    callback: Callable[[dict[str, float]], object] | None = None,
    save: Callable[[SubspacePrior, list[dict[str, float]]], None] | None = None,
    expected: bool = False,
) -> MarginalFit:
    """Learn what the tasks share.

    Args:
        statistics: the training rows.
        rank: the dimension of the subspace; the number of features for a full prior covariance without a subspace.
        noise: ``task`` for one noise variance per task, drawn towards the common one, or ``shared``.
        max_rounds: the most rounds.
        tol: stop when a round lowers the loss per row by less than this.
        prior: where to start; ``start(statistics)`` if not given.
        trace: the rounds that have led there, to go on with a fit that was ended.
        callback: called with every row of the trace; a true value stops.
        save: called after every round with where the fit stands.
        expected: take a step of EM for U in rounds whose steps of RNGD are all rejected.

    Returns:
        The fit.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> g = torch.Generator().manual_seed(0)
        >>> X = torch.randn(300, 4, generator=g, dtype=torch.float64)
        >>> task = torch.arange(300) % 20
        >>> slope = torch.randn(20, generator=g, dtype=torch.float64)
        >>> y = X[:, 1] + X[:, 0] * slope[task] + 0.1 * torch.randn(300, generator=g, dtype=torch.float64)
        >>> fit = fit_marginal(TaskStatistics.from_rows(X, y, task), rank=1)
        >>> bool(fit.prior.frame[0, 0].abs() > 0.99), bool((fit.prior.mean[1] - 1).abs() < 0.1)
        (True, True)
    """
    if noise not in NOISES:
        raise ValueError(f"noise must be one of {NOISES}, got {noise!r}")
    if not 1 <= rank <= statistics.n_features:
        raise ValueError(f"rank must be between 1 and the number of features ({statistics.n_features}), got {rank}")
    prior = start(statistics, rank=rank) if prior is None else prior
    statistics = statistics.keeping()
    floor = noise_floor(statistics)
    tasks = statistics.all_tasks
    rows = max(float(tasks.total(statistics.counts.sum())), 1.0)
    trace = list(trace or [])
    limit = tol * rows / tasks.size
    converged = _settled(trace, limit)
    for number in range(len(trace), 0 if converged else max_rounds):
        prior = update_mean(statistics, prior)
        prior = _update_moments(statistics, prior, noise, floor)
        moved, gradient_norm = update_frame(statistics, prior)
        stuck = expected and refused(prior, moved, gradient_norm)
        prior = expected_step(statistics, prior) if stuck else moved
        # one memory layout, whatever made it, so that a fit that is resumed from a file keeps its bits
        prior = SubspacePrior(*(part.contiguous() for part in (prior.mean, prior.frame, prior.covariance, prior.noise)))
        loss = float(tasks.total(posterior(statistics, prior).losses.sum()))
        loss += noise_penalty(prior.noise, noise, tasks)
        row = {"round": float(number + 1), "loss": loss / tasks.size, "gradient_norm": gradient_norm}
        trace.append(row)
        converged = _settled(trace, limit)
        if save is not None:
            save(prior, trace)
        if (callback is not None and callback(row)) or converged:
            break
    return MarginalFit(prior, posterior(statistics, prior), trace, converged)


def _settled(trace: list[dict[str, float]], limit: float) -> bool:
    """Whether the last round changed the loss by no more than the limit, or the last few have found no lower one."""
    # no update raises the loss: where it rises, as with next to no noise, that is the rounding of squared targets over
    # the noise, and a single round that still gains is not to be told from it
    losses = [row["loss"] for row in trace]
    if len(losses) > 1 and abs(losses[-2] - losses[-1]) <= limit:
        return True
    return len(losses) > _PATIENCE and min(losses[-_PATIENCE:]) >= min(losses[:-_PATIENCE]) - limit


def new_noise(
    statistics: TaskStatistics, prior: SubspacePrior, noise: str, *, common: float, changed: Tensor
) -> Tensor:
    """Noise variances for statistics that have grown, in however many pieces: tasks without new rows keep theirs.

    Args:
        statistics: the rows; its first tasks are those of the prior.
        prior: what is known.
        noise: ``task`` or ``shared``.
        common: what the variances of all tasks are drawn towards, from ``common_noise`` of the fit.
        changed: the tasks that have new rows, all those among them that are new.

    Returns:
        One variance per task of ``statistics``.
    """
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


def common_noise(noise_variance: Tensor, noise: str, tasks: Axis) -> float:
    """What the noise variances of tasks are drawn towards.

    Args:
        noise_variance: those of a fit.
        noise: ``task`` or ``shared``.
        tasks: the tasks, and which of them are here.

    Returns:
        The common variance.
    """
    return float(tasks.mean(noise_variance) if noise == "shared" else _common(noise_variance, tasks))


def revived(statistics: TaskStatistics, prior: SubspacePrior) -> SubspacePrior:
    """A prior to go on from with statistics that have grown: directions that have died out are started anew.

    Tasks that were few or alike leave Σ singular, and from there no round brings a direction back, whatever differences
    the tasks that came later have. A direction u is dead where its part of the signal, Σ_u uᵀA_tu/s_t², is next to
    nothing in the mean over tasks.

    Args:
        statistics: the rows.
        prior: with one noise variance per task of ``statistics``.

    Returns:
        The prior, with the leading directions of a fresh start in place of dead ones.
    """
    values, turn = torch.linalg.eigh(prior.covariance)
    frame = prior.frame @ turn
    tasks = statistics.all_tasks
    weighted = tasks.total(statistics.scaled_gram(prior.noise)) / tasks.size
    alive = values * ((weighted @ frame) * frame).sum(0) > _DEAD
    if bool(alive.all()):
        return prior
    fresh = start(statistics, rank=len(values))
    kept, spread = frame[:, alive], values[alive]
    # what the fresh start has beside the directions that are kept
    root = fresh.frame @ symmetric_root(fresh.covariance)
    left, sizes, _ = torch.linalg.svd(root - kept @ (kept.mT @ root))
    more = len(values) - kept.shape[1]
    covariance = torch.diag(torch.cat([spread, sizes[:more] ** 2]))
    return replace(prior, frame=torch.linalg.qr(torch.cat([kept, left[:, :more]], 1))[0], covariance=covariance)


def update_mean(statistics: TaskStatistics, prior: SubspacePrior) -> SubspacePrior:
    """Generalised least squares: the likelihood is quadratic in m with curvature Σ S_t.

    Args:
        statistics: the rows.
        prior: the rest.

    Returns:
        The prior with the most likely mean.
    """
    found = posterior(statistics, prior)
    tasks = statistics.all_tasks
    values, vectors = torch.linalg.eigh(tasks.total(information(statistics, prior.noise, found)))
    # directions that no row has stay where they are
    kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps * 10
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0)
    return replace(prior, mean=prior.mean + vectors @ (inverse * (vectors.mT @ tasks.total(found.score().sum(0)))))


def _update_moments(
    statistics: TaskStatistics, prior: SubspacePrior, noise: str, floor: float = 0.0
) -> SubspacePrior:
    """Σ and s² from the posterior moments."""
    covariance, errors = expected_moments(statistics, prior)
    updated = _noise(errors, statistics.counts, prior.noise, noise, statistics.all_tasks).clamp(min=floor)
    return replace(prior, covariance=covariance, noise=updated)


def expected_moments(statistics: TaskStatistics, prior: SubspacePrior) -> tuple[Tensor, Tensor]:
    """Posterior moments after the scale of the coefficients was freed (parameter-expanded EM).

    Args:
        statistics: the rows.
        prior: what they are judged by.

    Returns:
        The mean of E[a_t a_tᵀ] over the tasks, and the expected squared errors of the rows of each, summed.
    """
    found = posterior(statistics, prior)
    frame, scale = prior.frame, prior.noise
    moments = found.second_moment()
    inner = frame.mT @ found.scaled_gram_frame
    target = found.scaled_residual @ frame
    tasks = statistics.all_tasks
    expansion = _expansion(inner, moments, tasks.second_moment(target, found.mean), tasks)
    mean, moments = found.mean @ expansion.mT, expansion @ moments @ expansion.mT
    offset = statistics.residual_power(prior.mean) / scale
    errors = scale * (offset - 2 * (target * mean).sum(-1) + (inner * moments).sum((-2, -1)))
    return tasks.mean(moments), errors.clamp(min=0)


def _expansion(inner: Tensor, moments: Tensor, target: Tensor, tasks: Axis) -> Tensor:
    """The matrix α with Σ_t G_t α E[a_t a_tᵀ] = Σ_t h_t E[a_t]ᵀ: how much larger the coefficients would rather be."""
    p = inner.shape[1]
    if tasks.size * p**4 > _EXPANSION_COST:
        return torch.eye(p, dtype=inner.dtype, device=inner.device)
    system = tasks.total(torch.einsum("tij,tkl->ikjl", inner, moments)).reshape(p * p, p * p)
    eye = torch.eye(p, dtype=inner.dtype, device=inner.device)
    # where nothing is known, as when all coefficients have shrunk to zero, α stays the identity
    lift = (1e-10 * system.diagonal().mean()).clamp(min=1e-300)
    missing = target.reshape(-1) - system @ eye.reshape(-1)
    system.diagonal().add_(lift)
    return eye + torch.linalg.solve(system, missing).reshape(p, p)


def _noise(errors: Tensor, counts: Tensor, before: Tensor, noise: str, tasks: Axis) -> Tensor:
    """Noise variances from expected squared errors."""
    if noise == "shared":
        pooled = tasks.total(torch.stack([errors.sum(), counts.sum()]))
        return (pooled[0] / pooled[1].clamp(min=1e-300)).expand_as(errors)
    return (errors + NOISE_ROWS * _common(before, tasks)) / (counts + NOISE_ROWS)


def _common(noise_variance: Tensor, tasks: Axis) -> Tensor:
    """The scale of an inverse-gamma prior that makes these variances most likely: their harmonic mean."""
    return 1 / tasks.mean(1 / noise_variance)


def noise_penalty(noise_variance: Tensor, noise: str, tasks: Axis) -> float:
    """The inverse-gamma prior of the noise variances at its best common value, up to a constant.

    Args:
        noise_variance: s_t² of the tasks that are here.
        noise: ``task`` or ``shared``.
        tasks: the tasks, and which of them are here.

    Returns:
        What it adds to the loss of all tasks.
    """
    if noise == "shared":
        return 0.0
    common = _common(noise_variance, tasks)
    return NOISE_ROWS / 2 * tasks.add(noise_variance.log() + common / noise_variance - common.log())


def refused(before: SubspacePrior, after: SubspacePrior, gradient_norm: float) -> bool:
    """Whether all steps of ``update_frame`` were rejected, although there is a gradient.

    Args:
        before: what it was given.
        after: what it returned.
        gradient_norm: likewise.

    Returns:
        True if the subspace is where it was.
    """
    return gradient_norm > STATIONARY and torch.equal(after.frame, before.frame)


def update_frame(statistics: TaskStatistics, prior: SubspacePrior, steps: int = 2) -> tuple[SubspacePrior, float]:
    """Steps of RNGD for U on the Grassmann manifold.

    Args:
        statistics: the rows.
        prior: its frame is where they start.
        steps: how many.

    Returns:
        The prior with the new frame, and the norm of the gradient.
    """
    n, p = prior.frame.shape
    if p == n:
        return prior, 0.0
    problem = MarginalSubspaceProblem(statistics, prior)
    kind = "exact" if problem.n_samples * n * n <= _EXACT_ENTRIES else "kronecker"
    result = minimize(
        problem, prior.frame, "rngd", max_iter=steps, stop=GradientNorm(STATIONARY), fisher=kind, sigma=1e-3,
        sigma_min=1e-8,
    )  # fmt: skip
    return replace(prior, frame=result.x), result.trace["gradient_norm"][-1]
