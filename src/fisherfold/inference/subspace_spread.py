"""How well the weights of tasks are known, with what all tasks share not taken for known.

Mean and subspace of ``inference.subspace`` are learnt from the rows too. The weights of a task are w_t = W ã_t for
W = [m, U] and ã_t = (1, a_t). Given the moments E[ã_t ã_tᵀ], log p(y | W) is quadratic in W, and with a Gaussian prior
W has the posterior precision

    Σ_t E[ã_t ã_tᵀ] ⊗ A_t/s_t² + Ψ⁻¹ ⊗ D,    Ψ = blockdiag(mᵀDm, UᵀDU)/n,    D = diag(Σ_t A_t)/rows,

half a step of mean-field variational inference from the maximum. The prior has the size of what was found, in the units
of the features; a direction in which no task differs has no moments, and leaves no doubt. With C_kl the blocks of the
inverse and V_t the covariance of a_t,

    Cov(w_t) = U V_t Uᵀ + Σ_kl E[ã_t ã_tᵀ]_kl C_kl,

and the noise is the sum of squared errors over the rows that are left when the effective number of parameters,
tr(A_t Cov(w_t))/s_t², has been taken off. Σ is the spread about a mean that is learnt from the same T tasks: that of a
task that was not seen is Σ (T + 1)/(T - 1), as for a fresh draw from any sample. Predictions stay those of the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fisherfold.distributed import Axis
from fisherfold.inference.subspace import SubspacePrior, TaskPosterior, noise_floor, posterior, symmetric_root
from fisherfold.inference.subspace_fit import NOISE_ROWS, common_noise
from fisherfold.problems.tasks import TaskStatistics

# The noise is found in a few rounds: the effective numbers of parameters hardly depend on it.
_ROUNDS, _SETTLED = 20, 1e-4

# So many numbers in W at most: its covariance has their square. What is shared is taken for known beyond.
MOST_SHARED = 2048


@dataclass(frozen=True)
class TaskSpread:
    """What is not known of the weights of each task, and its noise.

    Attributes:
        shared: C, the covariance of [m, U], shape (1 + rank, features, 1 + rank, features), or (0, features, 0,
            features) where what is shared is taken for known.
        moments: E[ã_t ã_tᵀ], shape (tasks, 1 + rank, 1 + rank), or (tasks, 0, 0).
        covariance: V_t of the coefficients, shape (tasks, rank, rank).
        unseen: the covariance of the coefficients of a task that was not seen, shape (rank, rank).
        noise: the variance of a fresh target around its mean, shape (tasks,).
        common: what the noise of all tasks is drawn towards, shape (1,).
    """

    shared: Tensor
    moments: Tensor
    covariance: Tensor
    unseen: Tensor
    noise: Tensor
    common: Tensor

    @classmethod
    def of_known(cls, prior: SubspacePrior, covariance: Tensor, common: float) -> TaskSpread:
        """What is not known of tasks if all that they share is.

        Args:
            prior: what they share.
            covariance: of their coefficients.
            common: what the noise of all tasks is drawn towards.

        Returns:
            The spread.
        """
        n, tasks = len(prior.mean), len(covariance)
        nothing = covariance.new_zeros((0, n, 0, n)), covariance.new_zeros((tasks, 0, 0))
        return cls(*nothing, covariance, prior.covariance, prior.noise, covariance.new_tensor([common]))

    def variance(self, features: Tensor, task: Tensor, frame: Tensor) -> Tensor:
        """The variance of fresh targets.

        Args:
            features: one row per target.
            task: the number of its task; -1 for a task that was not seen.
            frame: U.

        Returns:
            One number per row.
        """
        fresh = _extended(frame.new_zeros((1, frame.shape[1])), self.unseen, len(self.shared))
        moments = torch.cat([self.moments, fresh])
        covariance = torch.cat([self.covariance, self.unseen[None]])
        noise = torch.cat([self.noise, self.noise.mean()[None]])
        inside = features @ frame
        found = noise[task] + ((covariance[task] @ inside[..., None]).squeeze(-1) * inside).sum(-1)
        for number in torch.unique(task).tolist():
            rows = task == number
            doubt = torch.einsum("kl,kilj->ij", moments[number], self.shared)
            found[rows] += ((features[rows] @ doubt) * features[rows]).sum(-1)
        return found


def task_spread(statistics: TaskStatistics, prior: SubspacePrior, noise: str) -> TaskSpread:
    """What is not known once the prior has been learnt.

    Args:
        statistics: the rows that it was learnt from.
        prior: at its maximum, with the noise of the tasks that are here.
        noise: ``task`` or ``shared``.

    Returns:
        The spread of the tasks that are here.
    """
    tasks = statistics.all_tasks
    errors, scale = _errors(statistics, prior), prior.noise
    for _ in range(_ROUNDS):
        here = replace(prior, noise=scale)
        found = posterior(statistics, here)
        shared = _shared(statistics, here, found)
        spent = _spent(statistics, here, shared, found)
        before, scale = scale, _drawn_together(statistics, errors, spent, scale, noise)
        if _settled(before, scale, tasks):
            break
    found = posterior(statistics, replace(prior, noise=scale))
    common = scale.new_tensor([common_noise(scale, noise, tasks)])
    count = float(tasks.total((statistics.counts > 0).sum()))
    unseen = prior.covariance * (count + 1) / max(count - 1, 1.0)
    return TaskSpread(shared, _moments(found, shared), found.covariance, unseen, scale, common)


def grown_spread(
    statistics: TaskStatistics, prior: SubspacePrior, known: TaskSpread, noise: str, changed: Tensor
) -> TaskSpread:
    """What is not known of tasks that have new rows, with the doubts about what all share as they were.

    Args:
        statistics: the rows; its first tasks are those of ``known``.
        prior: with one noise variance per task of ``statistics``.
        known: of the tasks before.
        noise: ``task`` or ``shared``.
        changed: the tasks that have new rows, all those among them that are new.

    Returns:
        The spread of all tasks; those without new rows keep theirs.
    """
    added = statistics.n_tasks - len(known.noise)
    scale = torch.cat([known.noise, known.common.expand(added)])
    own, errors = statistics.select(changed), _errors(statistics, prior)[changed]
    for _ in range(_ROUNDS if noise == "task" else 0):
        here = replace(prior, noise=scale[changed])
        spent = _spent(own, here, known.shared, posterior(own, here))
        before, scale[changed] = scale[changed], _noise(own, errors, spent, float(known.common), noise)
        if _settled(before, scale[changed], own.all_tasks):
            break
    found = posterior(statistics, replace(prior, noise=scale))
    return replace(known, moments=_moments(found, known.shared), covariance=found.covariance, noise=scale)


def _errors(statistics: TaskStatistics, prior: SubspacePrior) -> Tensor:
    """The squared errors of the predictions, summed over the rows of each task."""
    return statistics.residual_power(prior.mean + posterior(statistics, prior).mean @ prior.frame.mT)


def _moments(found: TaskPosterior, shared: Tensor) -> Tensor:
    """E[ã_t ã_tᵀ], or nothing of it where what is shared is taken for known."""
    return _extended(found.mean, found.second_moment(), len(shared))


def _extended(mean: Tensor, second_moment: Tensor, size: int) -> Tensor:
    """The second moments of (1, a) from the moments of a; those of the first so many entries."""
    extended = torch.cat([torch.ones_like(mean[:, :1]), mean], 1)
    moments = extended[:, :, None] * extended[:, None, :]
    moments[:, 1:, 1:] = second_moment
    return moments[:, :size, :size]


def _shared(statistics: TaskStatistics, prior: SubspacePrior, found: TaskPosterior) -> Tensor:
    """C, from R (I + R P R)⁻¹ R with P the precision of the likelihood and R² the covariance of the prior of W."""
    n, k = statistics.n_features, 1 + found.mean.shape[1]
    if n * k > MOST_SHARED:
        return found.mean.new_zeros((0, n, 0, n))
    moments = _extended(found.mean, found.second_moment(), k)
    scaled = statistics.gram / prior.noise[:, None, None]
    precision = statistics.all_tasks.total(moments.reshape(-1, k * k).mT @ scaled.reshape(-1, n * n))
    precision = precision.reshape(k, k, n, n).transpose(1, 2)
    pooled = statistics.pooled()
    sizes = pooled.gram[0].diagonal() / pooled.counts
    spread = moments.new_zeros((k, k))
    spread[0, 0] = (prior.mean**2 * sizes).sum() / n
    spread[1:, 1:] = prior.frame.mT @ (prior.frame * sizes[:, None]) / n
    root, units = symmetric_root(spread), torch.where(sizes > 0, sizes, 1.0).rsqrt()

    def between_roots(matrix: Tensor) -> Tensor:
        scaled = matrix * units[:, None, None] * units
        return torch.einsum("kl,lims,mr->kirs", root, scaled, root)

    inner = between_roots(precision).reshape(k * n, k * n)
    inner.diagonal().add_(1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(inner))
    return between_roots(inverse.reshape(k, n, k, n))


def _spent(statistics: TaskStatistics, prior: SubspacePrior, shared: Tensor, found: TaskPosterior) -> Tensor:
    """tr(A_t Cov(w_t))/s_t², the effective number of parameters of each task."""
    n, k, tasks = statistics.n_features, len(shared), statistics.n_tasks
    blocks = shared.transpose(1, 2).reshape(k * k, n * n)
    doubts = (statistics.gram.reshape(tasks, n * n) @ blocks.mT) * _moments(found, shared).reshape(tasks, k * k)
    own = (prior.frame.mT @ statistics.gram @ prior.frame) * found.covariance
    return (doubts.sum(-1) + own.sum((-2, -1))) / prior.noise


def _settled(before: Tensor, after: Tensor, tasks: Axis) -> bool:
    return not bool(tasks.total(((after / before - 1).abs() > _SETTLED).sum()))


def _drawn_together(statistics: TaskStatistics, errors: Tensor, spent: Tensor, scale: Tensor, noise: str) -> Tensor:
    """The noise variances with a common one that is theirs."""
    tasks = statistics.all_tasks
    for _ in range(200):
        before, scale = scale, _noise(statistics, errors, spent, common_noise(scale, noise, tasks), noise)
        if noise == "shared" or _settled(before, scale, tasks):
            break
    return scale


def _noise(statistics: TaskStatistics, errors: Tensor, spent: Tensor, common: float, noise: str) -> Tensor:
    """Squared errors over the rows that are left, drawn together as in ``fit_marginal``."""
    counts = statistics.counts
    if noise == "shared":
        errors, counts, spent = statistics.all_tasks.total(torch.stack([errors.sum(), counts.sum(), spent.sum()]))
    # where parameters are as many as rows, one row is left, or half of what there is
    left = torch.maximum(counts - spent, (counts / 2).clamp(max=1.0))
    drawn = NOISE_ROWS if noise == "task" else 0.0
    found = (errors + drawn * common) / (left + drawn).clamp(min=1e-300)
    return found.clamp(min=noise_floor(statistics)).expand(statistics.n_tasks)
