"""How well the weights of tasks are known, with what all tasks share not taken for known.

Mean and subspace of ``inference.subspace`` are learnt from the rows too. The weights of a task are w_t = W ã_t for
W = [m, U] and ã_t = (1, a_t). Given the moments E[ã_t ã_tᵀ], log p(y | W) is quadratic in W, and with a Gaussian prior
W has the posterior precision

    Σ_t E[ã_t ã_tᵀ] ⊗ A_t/s_t² + Ψ⁻¹ ⊗ D,    Ψ = blockdiag(mᵀDm, UᵀDU)/n,    D = diag(Σ_t A_t)/rows,

half a step of mean-field variational inference from the maximum. The prior has the size of what was found, in the units
of the features; a direction in which no task differs has no moments, and leaves no doubt. With C_kl the blocks of the
inverse and V_t the covariance of a_t,

    Cov(w_t) = U V_t Uᵀ + Σ_kl E[ã_t ã_tᵀ]_kl C_kl,

and the noise of a task is the mean of what its squared errors e_t, its rows n_t and the common noise c leave for it,

    E[s_t² | c] = (e_t + ρc) / (n_t - p_t + ρ - 2),    p_t = tr(A_t Cov(w_t))/s_t²,

p_t the effective number of its parameters, ρ the rows that the common noise counts for. c itself comes from
``inference.subspace_noise``. Σ is the spread about a mean that is learnt from the same T tasks: that of a task that was
not seen is Σ (T + 1)/(T - 1), as for a fresh draw from any sample. Predictions stay those of the maximum, given
that noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fisherfold.distributed import Axis
from fisherfold.inference.subspace import (
    SubspacePrior,
    TaskPosterior,
    factor_above_one,
    noise_floor,
    posterior,
    symmetric_root,
)
from fisherfold.inference.subspace_fit import NOISE_ROWS
from fisherfold.problems.tasks import TaskStatistics

# The noise is found in a few rounds: the effective numbers of parameters hardly depend on it.
_ROUNDS, _SETTLED = 20, 1e-4
# That of tasks that are folded in must not depend on where the rounds began.
_FOLDED_ROUNDS, _FOLDED = 200, 1e-10

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
        # none of these is negative but by rounding, where the noise is next to nothing
        found = noise[task] + ((covariance[task] @ inside[..., None]).squeeze(-1) * inside).sum(-1).clamp(min=0)
        for number in torch.unique(task).tolist():
            rows = task == number
            doubt = torch.einsum("kl,kilj->ij", moments[number], self.shared)
            found[rows] += ((features[rows] @ doubt) * features[rows]).sum(-1).clamp(min=0)
        return found


def task_spread(statistics: TaskStatistics, prior: SubspacePrior, noise: str, *, common: float) -> TaskSpread:
    """What is not known once the prior has been learnt.

    Args:
        statistics: the rows that it was learnt from.
        prior: at its maximum, with the noise of the tasks that are here.
        noise: ``task`` or ``shared``.
        common: what the noise of all tasks is drawn towards, or, if it is shared, their noise.

    Returns:
        The spread of the tasks that are here.
    """
    statistics, tasks = statistics.keeping(), statistics.all_tasks
    errors, scale = _errors(statistics, prior), prior.noise
    for _ in range(_ROUNDS):
        here = replace(prior, noise=scale)
        found = posterior(statistics, here)
        shared = _shared(statistics, here, found)
        spent = _spent(statistics, here, shared, found)
        before, scale = scale, _noise(statistics, errors, spent, common, noise)
        if _settled(before, scale, tasks, _SETTLED):
            break
    found = posterior(statistics, replace(prior, noise=scale))
    count = float(tasks.total((statistics.counts > 0).sum()))
    unseen = prior.covariance * (count + 1) / max(count - 1, 1.0)
    moments = _moments(found, shared)
    return TaskSpread(shared, moments, found.covariance, unseen, scale, scale.new_tensor([common]))


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
    for _ in range(_FOLDED_ROUNDS if noise == "task" else 0):
        here = replace(prior, noise=scale[changed])
        spent = _spent(own, here, known.shared, posterior(own, here))
        before, scale[changed] = scale[changed], _noise(own, errors, spent, float(known.common), noise)
        if _settled(before, scale[changed], own.all_tasks, _FOLDED):
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
    """C, the covariance of W given the moments of the coefficients."""
    n, k = statistics.n_features, 1 + found.mean.shape[1]
    known = shared_prior(statistics, prior)
    if known is None:
        return found.mean.new_zeros((0, n, 0, n))
    moments = _extended(found.mean, found.second_moment(), k) / prior.noise[:, None, None]
    precision = statistics.all_tasks.total(moments.reshape(-1, k * k).mT @ statistics.gram.reshape(-1, n * n))
    return known.covariance(known.factor(precision.reshape(k, k, n, n).transpose(1, 2)))


@dataclass(frozen=True)
class SharedPrior:
    """The Gaussian prior Ψ ⊗ D⁻¹ of W = [m, U].

    Attributes:
        root: Ψ^½, shape (1 + rank, 1 + rank).
        units: the diagonal of D^-½, shape (features,).
    """

    root: Tensor
    units: Tensor

    def factor(self, precision: Tensor) -> Tensor:
        """The Cholesky factor of I + R P R, with R = Ψ^½ ⊗ D^-½ and P the precision that the likelihood gives to W.

        Args:
            precision: P, shape (1 + rank, features, 1 + rank, features).

        Returns:
            A lower triangular matrix.
        """
        size = len(self.root) * len(self.units)
        inner = self._between_roots(precision).reshape(size, size)
        inner.diagonal().add_(1.0)
        return factor_above_one(inner)

    def covariance(self, factor: Tensor) -> Tensor:
        """R (I + R P R)⁻¹ R, the covariance of W.

        Args:
            factor: from ``factor``.

        Returns:
            A tensor of shape (1 + rank, features, 1 + rank, features).
        """
        k, n = len(self.root), len(self.units)
        return self._between_roots(torch.cholesky_inverse(factor).reshape(k, n, k, n))

    def _between_roots(self, matrix: Tensor) -> Tensor:
        k, n = len(self.root), len(self.units)
        left = (self.root @ matrix.reshape(k, -1)).reshape(k * n, k, n)
        return (self.root @ left).reshape(k, n, k, n).mul_(self.units[:, None, None]).mul_(self.units)


def shared_prior(statistics: TaskStatistics, prior: SubspacePrior) -> SharedPrior | None:
    """The prior of what all tasks share, of the size of what was found.

    Args:
        statistics: the rows.
        prior: what was found.

    Returns:
        The prior, or None where W is too large and taken for known.
    """
    n, k = statistics.n_features, 1 + prior.frame.shape[1]
    if n * k > MOST_SHARED:
        return None
    tasks, squares = statistics.all_tasks, statistics.gram.diagonal(dim1=-2, dim2=-1)
    sizes = tasks.total(squares.sum(0)) / tasks.total(statistics.counts.sum())
    spread = sizes.new_zeros((k, k))
    spread[0, 0] = (prior.mean**2 * sizes).sum()
    spread[1:, 1:] = prior.frame.mT @ (prior.frame * sizes[:, None])
    spread = spread / (sizes > 0).sum().clamp(min=1)  # features that are zero in all rows are none
    return SharedPrior(symmetric_root(spread), torch.where(sizes > 0, sizes, 1.0).rsqrt())


def _spent(statistics: TaskStatistics, prior: SubspacePrior, shared: Tensor, found: TaskPosterior) -> Tensor:
    """tr(A_t Cov(w_t))/s_t², the effective number of parameters of each task."""
    n, k, tasks = statistics.n_features, len(shared), statistics.n_tasks
    blocks = shared.transpose(1, 2).reshape(k * k, n * n)
    doubts = (statistics.gram.reshape(tasks, n * n) @ blocks.mT) * _moments(found, shared).reshape(tasks, k * k)
    own = (prior.frame.mT @ statistics.gram @ prior.frame) * found.covariance
    return (doubts.sum(-1) + own.sum((-2, -1))) / prior.noise


def _settled(before: Tensor, after: Tensor, tasks: Axis, tolerance: float) -> bool:
    return not bool(tasks.total(((after / before - 1).abs() > tolerance).sum()))


def _noise(statistics: TaskStatistics, errors: Tensor, spent: Tensor, common: float, noise: str) -> Tensor:
    """The mean of the noise of every task, given the common one."""
    if noise == "shared":
        return torch.full_like(errors, common)
    # where parameters are as many as rows, one row is left, or half of what there is
    left = torch.maximum(statistics.counts - spent, (statistics.counts / 2).clamp(max=1.0))
    found = (errors + NOISE_ROWS * common) / (left + NOISE_ROWS - 2)
    return found.clamp(min=noise_floor(statistics))
