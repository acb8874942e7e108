"""How well the weights of tasks are known, with what all tasks share not taken for known.

Mean and subspace of ``inference.subspace`` are learnt from the rows too. The weights of a task are w_t = W ã_t for
W = [m, U] and ã_t = (1, a_t). With the coefficients integrated out W has, by Laplace's method, the covariance

    K = (F + Ψ⁻¹ ⊗ D)⁻¹,    Ψ = blockdiag(mᵀDm, UᵀDU)/n,    D = diag(Σ_t A_t)/rows,

F its Fisher information (``inference.subspace_information``). The prior has the size of what was found, in the units of
the features; a direction in which no task differs has no moments, and leaves no doubt. When W moves by H, the rows of a
task move its coefficients against it, and its weights move by B_t H E[ã_t] but for what the residuals add. With V_t the
covariance of a_t and G_t = A_tU/s_t²,

    Cov(w_t) = U V_t Uᵀ + B_t (Σ_kl E[ã_t ã_tᵀ]_kl K_kl) B_tᵀ,    B_t = I - U V_t G_tᵀ,

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
from fisherfold.subspace.information import shared_doubt, shared_information, shared_prior
from fisherfold.subspace.marginal import SubspacePrior, TaskPosterior, noise_floor, posterior
from fisherfold.subspace.marginal_fit import NOISE_ROWS
from fisherfold.subspace.tasks import TaskStatistics

# The noise is found in a few rounds: the effective numbers of parameters hardly depend on it.
_ROUNDS, _SETTLED = 20, 1e-4
# That of tasks that are folded in must not depend on where the rounds began.
_FOLDED_ROUNDS, _FOLDED = 200, 1e-10


@dataclass(frozen=True)
class TaskSpread:
    """What is not known of the weights of each task, and its noise.

    Attributes:
        shared: K, the covariance of [m, U], shape (1 + rank, features, 1 + rank, features), or (0, features, 0,
            features) where what is shared is taken for known.
        moments: E[ã_t ã_tᵀ], shape (tasks, 1 + rank, 1 + rank), or (tasks, 0, 0).
        covariance: V_t of the coefficients, shape (tasks, rank, rank).
        reach: G_t V_t, shape (tasks, features, rank), or (tasks, features, 0) where what is shared is taken for known,
            and in models of earlier versions, whose K is that of W given the moments and whose B_t is I.
        unseen: the covariance of the coefficients of a task that was not seen, shape (rank, rank).
        noise: the variance of a fresh target around its mean, shape (tasks,).
        common: what the noise of all tasks is drawn towards, shape (1,).
    """

    shared: Tensor
    moments: Tensor
    covariance: Tensor
    reach: Tensor
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
        reach, known = covariance.new_zeros((tasks, n, 0)), (prior.covariance, prior.noise)
        return cls(*nothing, covariance, reach, *known, covariance.new_tensor([common]))

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
            doubt, moved = torch.einsum("kl,kilj->ij", moments[number], self.shared), features[rows]
            if number >= 0:
                reach = self.reach[number]
                moved = moved - inside[rows, : reach.shape[1]] @ reach.mT
            found[rows] += ((moved @ doubt) * moved).sum(-1).clamp(min=0)
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
    errors, secants = _errors(statistics, prior), _Secants()
    scale = torch.full_like(errors, common) if noise == "shared" else prior.noise
    for _ in range(_ROUNDS):
        here = replace(prior, noise=scale)
        found = posterior(statistics, here)
        shared = _shared(statistics, here, found)
        spent = _spent(statistics, here, shared, found, _reach(found, shared))
        wanted = _noise(statistics, errors, spent, common, noise)
        if _settled(scale, wanted, tasks, _SETTLED):
            break
        scale = secants.step(scale, wanted)
    found = posterior(statistics, replace(prior, noise=scale))
    count = float(tasks.total((statistics.counts > 0).sum()))
    unseen = prior.covariance * (count + 1) / max(count - 1, 1.0)
    per_task = _moments(found, shared), found.covariance, _reach(found, shared)
    return TaskSpread(shared, *per_task, unseen, scale, scale.new_tensor([common]))


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
    size, secants = known.reach.shape[-1], _Secants()
    for _ in range(_FOLDED_ROUNDS if noise == "task" else 0):
        here = replace(prior, noise=scale[changed])
        found = posterior(own, here)
        spent = _spent(own, here, known.shared, found, _reach(found, known.shared)[..., :size])
        wanted = _noise(own, errors, spent, float(known.common), noise)
        if _settled(scale[changed], wanted, own.all_tasks, _FOLDED):
            break
        scale[changed] = secants.step(scale[changed], wanted)
    found = posterior(statistics, replace(prior, noise=scale))
    moments, reach = _moments(found, known.shared), _reach(found, known.shared)[..., :size]
    return replace(known, moments=moments, covariance=found.covariance, reach=reach, noise=scale)


def _errors(statistics: TaskStatistics, prior: SubspacePrior) -> Tensor:
    """The squared errors of the predictions, summed over the rows of each task."""
    return statistics.residual_power(prior.mean + posterior(statistics, prior).mean @ prior.frame.mT)


def _moments(found: TaskPosterior, shared: Tensor) -> Tensor:
    """E[ã_t ã_tᵀ], or nothing of it where what is shared is taken for known."""
    return _extended(found.mean, found.second_moment(), len(shared))


def _reach(found: TaskPosterior, shared: Tensor) -> Tensor:
    """G_t V_t, or nothing of it where what is shared is taken for known."""
    return (found.scaled_gram_frame @ found.covariance)[..., : max(len(shared) - 1, 0)]


def _extended(mean: Tensor, second_moment: Tensor, size: int) -> Tensor:
    """The second moments of (1, a) from the moments of a; those of the first so many entries."""
    extended = torch.cat([torch.ones_like(mean[:, :1]), mean], 1)
    moments = extended[:, :, None] * extended[:, None, :]
    moments[:, 1:, 1:] = second_moment
    return moments[:, :size, :size]


def _shared(statistics: TaskStatistics, prior: SubspacePrior, found: TaskPosterior) -> Tensor:
    """K, the covariance of W with the coefficients integrated out."""
    known = shared_prior(statistics, prior)
    if known is None:
        n = statistics.n_features
        return found.mean.new_zeros((0, n, 0, n))
    return known.covariance(known.factor(statistics.all_tasks.total(shared_information(statistics, prior, found))))


def _spent(
    statistics: TaskStatistics, prior: SubspacePrior, shared: Tensor, found: TaskPosterior, reach: Tensor
) -> Tensor:
    """tr(A_t Cov(w_t))/s_t², the effective number of parameters of each task."""
    inner = prior.frame.mT @ found.scaled_gram_frame
    own = (inner * found.covariance).sum((-2, -1))
    return own + shared_doubt(statistics, prior, found, shared, _moments(found, shared), reach)


class _Secants:
    """Steps to where the noise of every task is what is found with it: secants in its logarithm, one per task.

    More noise leaves a task fewer parameters, hence more rows and less noise: plain repetition swings about the end.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None

    def step(self, scale: Tensor, wanted: Tensor) -> Tensor:
        miss, slope = (wanted / scale).log(), -torch.ones_like(scale)
        if self._last is not None:
            before, moved = self._last
            slope = torch.where(moved == 0, slope, (miss - before) / moved).clamp(-2.0, -0.5)
        self._last = miss, -miss / slope
        return scale * self._last[1].exp()


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
