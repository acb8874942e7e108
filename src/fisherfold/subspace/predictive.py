"""Predictive variances of task regressions, with what all tasks share not taken for known.

The weights of a task are w_t = W ã_t for W = [m, U] and ã_t = (1, a_t). With K the covariance of W
(``noise``), V_t that of a_t and G_t = A_tU/s_t²: when W moves by H, the rows of a task move its
coefficients against it, and

    Cov(w_t) = U V_t Uᵀ + B_t (Σ_kl E[ã_t ã_tᵀ]_kl K_kl) B_tᵀ,    B_t = I - U V_t G_tᵀ.

The noise of a task is the mean of what its squared errors e_t, its rows n_t and the common noise c
leave for it,

    E[s_t² | c] = (e_t + ρc) / (n_t - p_t + ρ - 2),    p_t = tr(A_t Cov(w_t))/s_t²,

p_t the effective number of its parameters, ρ the rows that c counts for. Σ is the spread about a
mean that is learnt from the same T tasks: that of an unseen task is Σ (T + 1)/(T - 1), as for a
fresh draw from any sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fisherfold.distributed import Axis
from fisherfold.subspace.marginal import SubspacePrior, TaskPosterior, noise_floor, posterior
from fisherfold.subspace.marginal_fit import NOISE_ROWS
from fisherfold.subspace.noise import SharedPrior, shared_information, task_chunks
from fisherfold.subspace.tasks import TaskStatistics

_ROUNDS = 20  # at most, for the noise of the tasks of a fit
_SETTLED = 1e-4  # the change of log noise that ends them
_FOLDED_ROUNDS = 200  # for tasks that are folded in: their noise must not depend on its start
_FOLDED = 1e-10  # the change of log noise that ends those
_CHUNK_ENTRIES = 2**22  # numbers of a block of tasks


@dataclass(frozen=True)
class TaskSpread:
    """The uncertainty of the weights of each task, and its noise."""

    # K, the covariance of [m, U], shape (1 + rank, features, 1 + rank, features), or (0, features,
    # 0, features) where W is taken for known
    shared: Tensor
    moments: Tensor  # E[ã_t ã_tᵀ], shape (tasks, 1 + rank, 1 + rank), or (tasks, 0, 0)
    covariance: Tensor  # V_t of the coefficients, shape (tasks, rank, rank)
    reach: Tensor  # G_t V_t, shape (tasks, features, rank), or (tasks, features, 0)
    unseen: Tensor  # the covariance of the coefficients of an unseen task, shape (rank, rank)
    noise: Tensor  # the variance of a fresh target around its mean, shape (tasks,)
    common: Tensor  # what the noise of all tasks is drawn towards, shape (1,)

    def of_weights(self, features: Tensor, task: Tensor, frame: Tensor) -> Tensor:
        """The variance of zᵀw_t, without the noise."""
        n, p = frame.shape
        fresh = _extended(frame.new_zeros((1, p)), self.unseen, len(self.shared))
        moments = torch.cat([self.moments, fresh]).flatten(1)
        covariance = torch.cat([self.covariance, self.unseen[None]])
        reach = torch.cat([self.reach, torch.zeros_like(self.reach[:1])])
        inside = features @ frame
        blocks = _pairs(self.shared)
        found = torch.empty_like(inside[:, 0])
        # rows of one task share the n×n matrix Σ_kl E[ãã]_kl K_kl: chunks of rows sorted by task
        for rows in torch.split(
            torch.argsort(task, stable=True), max(1, _CHUNK_ENTRIES // (n * n))
        ):
            present, place = torch.unique(task[rows], return_inverse=True)
            z = features[rows]
            part = inside[rows]
            own = _quadratic(part, covariance[present][place])
            if len(blocks):
                moved = z - (reach[present][place] @ part[:, : reach.shape[-1], None]).squeeze(-1)
                own += _quadratic(moved, (moments[present] @ blocks).reshape(-1, n, n)[place])
            found[rows] = own
        return found

    def variance(self, features: Tensor, task: Tensor, frame: Tensor) -> Tensor:
        """The variance of fresh targets."""
        return torch.cat([self.noise, self.noise.mean()[None]])[task] + self.of_weights(
            features, task, frame
        )


def _quadratic(vectors: Tensor, matrices: Tensor) -> Tensor:
    """vᵀMv row by row; negative values are rounding."""
    return ((matrices @ vectors[..., None]).squeeze(-1) * vectors).sum(-1).clamp(min=0)


def _pairs(shared: Tensor) -> Tensor:
    """The blocks K_kl as rows, shape ((1 + rank)², features²)."""
    return shared.permute(0, 2, 1, 3).reshape(len(shared) ** 2, shared.shape[1] ** 2)


def task_spread(
    statistics: TaskStatistics, prior: SubspacePrior, noise: str, *, common: float
) -> TaskSpread:
    """The uncertainty of all tasks once the prior has been learnt."""
    tasks = statistics.all_tasks
    statistics = statistics.cached()
    shared = prior.frame
    errors = _errors(statistics, prior)

    def wanted(scale: Tensor) -> Tensor:
        nonlocal shared
        here = replace(prior, noise=scale)
        found = posterior(statistics, here)
        shared = _shared(statistics, here, found)
        return _noise(statistics, errors, _spent(statistics, here, shared, found), common, noise)

    scale = torch.full_like(errors, common) if noise == "shared" else prior.noise
    scale = _fixed_point(wanted, scale, tasks, _ROUNDS, _SETTLED)
    found = posterior(statistics, replace(prior, noise=scale))
    count = tasks.add(statistics.counts > 0)
    unseen = prior.covariance * (count + 1) / max(count - 1, 1.0)
    per_task = _moments(found, shared), found.covariance, _reach(found, shared)
    return TaskSpread(shared, *per_task, unseen, scale, scale.new_tensor([common]))


def extend_spread(
    statistics: TaskStatistics, prior: SubspacePrior, known: TaskSpread, noise: str, changed: Tensor
) -> TaskSpread:
    """The uncertainty of tasks that have new rows, with that of W as it was."""
    scale = torch.cat([known.noise, known.common.expand(statistics.n_tasks - len(known.noise))])
    own = statistics.select(changed)
    errors = _errors(statistics, prior)[changed]

    def wanted(scale: Tensor) -> Tensor:
        here = replace(prior, noise=scale)
        return _noise(
            own,
            errors,
            _spent(own, here, known.shared, posterior(own, here)),
            float(known.common),
            noise,
        )

    scale[changed] = _fixed_point(wanted, scale[changed], own.all_tasks, _FOLDED_ROUNDS, _FOLDED)
    found = posterior(statistics, replace(prior, noise=scale))
    moments = _moments(found, known.shared)
    reach = _reach(found, known.shared)
    return replace(known, moments=moments, covariance=found.covariance, reach=reach, noise=scale)


def _fixed_point(
    wanted: Callable[[Tensor], Tensor], scale: Tensor, tasks: Axis, rounds: int, tolerance: float
) -> Tensor:
    """Find the fixed point of every task's noise by secants in its logarithm.

    More noise leaves a task fewer parameters, hence more rows and less noise: plain repetition
    oscillates.
    """
    before = moved = None
    for _ in range(rounds):
        ratio = wanted(scale) / scale
        if tasks.add((ratio - 1).abs() > tolerance) == 0:
            break
        miss = ratio.log()
        slope = -torch.ones_like(scale)
        if before is not None and moved is not None:
            slope = torch.where(moved == 0, slope, (miss - before) / moved).clamp(-2.0, -0.5)
        before = miss
        moved = -miss / slope
        scale = scale * moved.exp()
    return scale


def _errors(statistics: TaskStatistics, prior: SubspacePrior) -> Tensor:
    """The squared errors of the predictions, summed over the rows of each task."""
    return statistics.residual_power(
        prior.mean + posterior(statistics, prior).mean @ prior.frame.mT
    )


def _moments(found: TaskPosterior, shared: Tensor) -> Tensor:
    return _extended(found.mean, found.second_moment(), len(shared))


def _reach(found: TaskPosterior, shared: Tensor) -> Tensor:
    return (found.scaled_gram_frame @ found.covariance)[..., : max(len(shared) - 1, 0)]


def _extended(mean: Tensor, second_moment: Tensor, size: int) -> Tensor:
    """The second moments of (1, a) from the moments of a; those of the first ``size`` entries."""
    extended = torch.cat([torch.ones_like(mean[:, :1]), mean], 1)
    moments = extended[:, :, None] * extended[:, None, :]
    moments[:, 1:, 1:] = second_moment
    return moments[:, :size, :size]


def _shared(statistics: TaskStatistics, prior: SubspacePrior, found: TaskPosterior) -> Tensor:
    """K, the covariance of W with the coefficients integrated out."""
    known = SharedPrior.of(statistics, prior)
    n = statistics.n_features
    if known is None:
        return found.mean.new_zeros((0, n, 0, n))
    return known.covariance(known.factor(shared_information(statistics, prior, found)))


def _spent(
    statistics: TaskStatistics, prior: SubspacePrior, shared: Tensor, found: TaskPosterior
) -> Tensor:
    """p_t = tr(A_t Cov(w_t))/s_t².

    B_tᵀA_tB_t/s_t² = A_t/s_t² - G_t V_t (2 - UᵀG_t V_t) G_tᵀ.
    """
    gram_frame = found.scaled_gram_frame
    spent = ((prior.frame.mT @ gram_frame) * found.covariance).sum((-2, -1))
    if len(shared) == 0:
        return spent
    reach = _reach(found, shared)
    moments = _moments(found, shared).flatten(1)
    blocks = _pairs(shared).mT
    less = 2 * reach - reach @ (prior.frame.mT @ reach)
    for tasks in task_chunks(*reach.shape[:2]):
        matrix = (
            statistics.gram[tasks] / prior.noise[tasks, None, None]
            - less[tasks] @ gram_frame[tasks].mT
        )
        spent[tasks] += ((matrix.flatten(1) @ blocks) * moments[tasks]).sum(-1)
    return spent


def _noise(
    statistics: TaskStatistics, errors: Tensor, spent: Tensor, common: float, noise: str
) -> Tensor:
    """The mean of the noise of every task, given the common one."""
    if noise == "shared":
        return torch.full_like(errors, common)
    # where parameters are as many as rows, one row is left, or half of what there is
    left = torch.maximum(statistics.counts - spent, (statistics.counts / 2).clamp(max=1.0))
    found = (errors + NOISE_ROWS * common) / (left + NOISE_ROWS - 2)
    return found.clamp(min=noise_floor(statistics))
