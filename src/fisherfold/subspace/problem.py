"""Many small regressions whose coefficients share a subspace.

    Ψ(U) = (1/N) Σ_t ψ_t(U),   ψ_t = ½‖X_t U w_t - y_t‖²,   w_t = argmin_w ½‖X_t U w - y_t‖² + ½ λ
    ‖w‖²

With A_t = X_tᵀX_t, b_t = X_tᵀy_t, G_t = UᵀA_tU + λ I and e_t = A_tUw_t - b_t the gradient of the
penalised loss ψ_t + ½ λ ‖w_t‖² is, by the envelope theorem,

    P (1/N) Σ_t e_t w_tᵀ,   P = I - U Uᵀ.

The paper takes it for the gradient of the loss without the penalty, leaving out the Jacobian of
w_t: ``objective="residual"`` reports that loss with this gradient. For λ = 0 the two are the same.

``fit_point`` is a fit without choices: starting point, steps and ridge come from the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from fisherfold.distributed import Axis
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds import Grassmann
from fisherfold.problems.base import Problem, Snapshot, check_batch
from fisherfold.problems.cache import LastPoint
from fisherfold.solvers import Result, minimize
from fisherfold.solvers.stopping import SmallGradient, Stagnation
from fisherfold.subspace.fisher_operators import SubspaceFisher, SubspaceHessian, TaskState
from fisherfold.subspace.inputs import Rows
from fisherfold.subspace.marginal import start
from fisherfold.subspace.tasks import TaskStatistics, zero_threshold
from fisherfold.subspace.variance_reduction import TaskGradient, fused_descent, fused_epoch

OBJECTIVES = ("penalised", "residual")
RIDGES = (0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class SubspaceProblem(Problem):
    """Multi-task least squares with shared features, from sufficient statistics.

    Fisher kinds: ``kronecker``, the paper's [(1/N) Σ w wᵀ] ⊗ [(1/N) Σ A_t + δ I] on the complement
    of U; ``exact``, (1/N) Σ J_tᵀJ_t with J_t the derivative of (X_t U w_t(U), √λ w_t(U));
    ``observed``, the Hessian of the penalised loss, for the last digits: positive definite near a
    minimum only.

    Examples:
        >>> g = torch.Generator().manual_seed(0)
        >>> X = torch.randn(60, 5, generator=g, dtype=torch.float64)
        >>> task = torch.arange(60) % 4
        >>> y = X[:, 0] * task
        >>> problem = SubspaceProblem(TaskStatistics.from_rows(X, y, task), rank=1)
        >>> float(problem.loss(torch.eye(5, 1, dtype=torch.float64))) < 1e-12
        True
    """

    fisher_kinds: ClassVar[tuple[str, ...]] = ("kronecker", "exact", "observed")
    manifold: Grassmann

    def __init__(
        self,
        statistics: TaskStatistics,
        *,
        rank: int,
        ridge: float = 0.0,
        objective: str = "penalised",
        factor_damping: float = 0.0,
        held_out: TaskStatistics | None = None,
    ) -> None:
        n_features = statistics.n_features
        samples = statistics.all_tasks
        if not 1 <= rank < n_features:
            raise ValueError(
                f"rank must be between 1 and the number of features minus one ({n_features - 1}), "
                f"got {rank}; "
                f"with rank = {n_features} there is no subspace to learn"
            )
        if objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {OBJECTIVES}, got {objective!r}")
        for name, value in (("ridge", ridge), ("factor_damping", factor_damping)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        self.statistics = statistics
        self.held_out = held_out
        self.manifold = Grassmann(n_features, rank)
        self.samples = samples
        self.n_samples = samples.size
        self.group = samples.group
        self.objective = objective
        self.factor_damping = factor_damping
        self.ridge = float(ridge)
        self.sizes = statistics.gram.diagonal(dim1=1, dim2=2).sqrt()
        # |u|ᵀ√diag(A) is at most √tr(A) for a unit vector u: with such a ridge G_t is regular in
        # every frame
        self.regular = self.ridge > rank * n_features * torch.finfo(self.sizes.dtype).eps * (
            self.sizes**2
        ).sum(-1)
        self._all_regular = bool(self.regular.all())
        # a product, not a sum: runs on School keep no digit of another rounding
        ones = torch.ones_like(statistics.power)
        self.mean_gram = (
            samples.total(torch.einsum("t,tij->ij", ones, statistics.gram)) / samples.size
        )
        self._kept: LastPoint[TaskState] = LastPoint()

    def state(self, x: Tensor, batch: Tensor | None = None) -> TaskState:
        """Coefficients, residuals and losses of some tasks; the last full one is kept."""
        if (kept := self._kept.get(x)) is not None:
            return kept if batch is None else kept.select(self._here(batch))
        if batch is not None:
            return self._state(x, batch)
        self._kept.clear()
        self.samples.check_same(x)
        return self._kept.put(x, self._state(x, None))

    def _state(self, x: Tensor, batch: Tensor | None) -> TaskState:
        data = self.statistics
        sizes = self.sizes
        x = x.detach()
        if batch is not None:
            check_batch(batch, self.n_samples)
            chosen = self._here(batch)
            data = data.select(chosen)
            sizes = sizes[chosen]
        floor = torch.zeros_like(data.power) if self._all_regular else zero_threshold(sizes, x)
        penalised = self.objective == "penalised"
        return TaskState.at(
            x, data, self.ridge, floor, regular=self._all_regular, penalised=penalised
        )

    def _here(self, batch: Tensor) -> Tensor:
        """The numbers here of those tasks of a batch that are here."""
        return self.samples.local(batch)[1]

    def _count(self, batch: Tensor | None) -> int:
        return self.n_samples if batch is None else len(batch)

    @cached_property
    def left_inverse(self) -> Tensor:
        """(Ā + δ I)⁻¹ for the mean Ā of the A_t; rounding errors of zero count as zero."""
        values, vectors = torch.linalg.eigh(self.mean_gram)
        floor = values[-1] * len(values) * torch.finfo(values.dtype).eps
        values = torch.where(values > floor, values, 0.0) + self.factor_damping
        return (vectors / values) @ vectors.mT

    def coefficients(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        """The coefficients w_t."""
        return self.state(x, batch).weights

    @override
    def loss_rounding(self, x: Tensor, loss: float) -> float:
        # a loss is a small difference of ½‖y_t‖² and what the fit explains
        return super().loss_rounding(x, max(abs(loss), self._power))

    @override
    def loss(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        return self._mean(self.state(x, batch).losses, batch)

    @override
    def loss_and_gradient(self, x: Tensor, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state = self.state(x, batch)
        return self._mean(state.losses, batch), self._tangent(
            x, self.ambient_gradient(state, batch)
        )

    @cached_property
    def _power(self) -> float:
        return self.samples.add(self.statistics.power) / (2 * self.n_samples)

    def _mean(self, losses: Tensor, batch: Tensor | None) -> Tensor:
        return (
            losses.mean()
            if not self.samples.is_shared
            else self.samples.total(losses.sum()) / self._count(batch)
        )

    def ambient_gradient(self, state: TaskState, batch: Tensor | None = None) -> Tensor:
        """The gradient before projection."""
        return self.samples.total(state.residual.mT @ state.weights) / self._count(batch)

    @override
    def fisher(
        self, x: Tensor, batch: Tensor | None = None, *, kind: str = "kronecker"
    ) -> FisherOperator:
        if kind not in self.fisher_kinds:
            raise ValueError(f"kind must be one of {self.fisher_kinds}, got {kind!r}")
        state = self.state(x, batch)
        gram = self.mean_gram
        grams = self.statistics.gram
        count = self._count(batch)
        if batch is not None:
            grams = grams[self._here(batch)]
            gram = self.samples.total(grams.sum(0)) / count
        second_moment = self.samples.second_moment(state.weights) / count
        kronecker = self._kronecker(x, gram, second_moment)
        if kind == "kronecker":
            return kronecker
        form = SubspaceFisher if kind == "exact" else SubspaceHessian
        return form(x, grams, state, count, preconditioner=kronecker, samples=self.samples)

    def _kronecker(self, x: Tensor, gram: Tensor, second_moment: Tensor) -> KroneckerFisher:
        if self.factor_damping:
            gram = gram + self.factor_damping * torch.eye(len(gram), dtype=gram.dtype)
        return KroneckerFisher(self.manifold, x, left=gram, right=second_moment)

    @override
    def snapshot(self, x: Tensor) -> SubspaceSnapshot:
        return SubspaceSnapshot(self, x)

    @override
    def descend(
        self, x: Tensor, batches: Iterable[Tensor], *, step: Callable[[int], float]
    ) -> Tensor:
        drawn = list(batches)
        if drawn and self._can_fuse(drawn):
            return fused_descent(self._task_gradient, x, torch.cat(drawn).tolist(), step)
        return super().descend(x, drawn, step=step)

    def _can_fuse(self, batches: list[Tensor]) -> bool:
        return not self.samples.is_shared and all(len(batch) == 1 for batch in batches)

    @cached_property
    def _task_gradient(self) -> TaskGradient:
        return TaskGradient(self.statistics, self.ridge, self.sizes, self.regular)

    @override
    def metrics(self, x: Tensor) -> dict[str, float]:
        frame_weights = self.state(x).weights
        found = {"train_nmse": float(self.statistics.nmse(frame_weights @ x.mT))}
        if self.held_out is not None:
            found["held_out_nmse"] = float(self.held_out.nmse(frame_weights @ x.mT))
            refit = SubspaceProblem(self.held_out, rank=self.manifold.p, ridge=self.ridge)
            found["refit_nmse"] = float(self.held_out.nmse(refit.coefficients(x) @ x.mT))
        return found


class SubspaceSnapshot(Snapshot):
    """Variance reduction with the anchor's coefficients and residuals kept per task.

    The left Kronecker factor does not depend on U; the right one is C = C₀ + (1/N) Σ_B (w wᵀ - w₀
    w₀ᵀ).
    """

    problem: SubspaceProblem

    def __init__(self, problem: SubspaceProblem, x: Tensor) -> None:
        self.state = problem.state(x)
        super().__init__(problem, x)
        self.second_moment = problem.samples.second_moment(self.state.weights) / problem.n_samples

    @override
    def gradient(self, x: Tensor, batch: Tensor) -> Tensor:
        manifold = self.problem.manifold
        anchor = self.problem.ambient_gradient(self.state.select(self.problem._here(batch)), batch)
        correction = self.full_gradient - manifold.project(self.x, anchor)
        return manifold.project(
            x, self.problem.gradient(x, batch) + manifold.transport(self.x, x, correction)
        )

    @override
    def fisher(self, x: Tensor, batch: Tensor, *, kind: str) -> FisherOperator:
        if kind != "kronecker":
            return super().fisher(x, batch, kind=kind)
        problem = self.problem
        drawn = torch.unique(batch)
        here = problem._here(drawn)
        new = problem.state(x, drawn).weights
        old = self.state.weights[here]
        change = problem.samples.total(new.mT @ new - old.mT @ old)
        second_moment = self.second_moment + change / problem.n_samples
        return problem._kronecker(x, problem.mean_gram, second_moment)

    @override
    def epoch(
        self,
        x: Tensor,
        batches: Iterable[Tensor],
        *,
        step: float,
        kind: str | None = None,
        damping: float = 0.0,
    ) -> Tensor:
        """The inner steps of one epoch, fused for batches of one task on the CPU.

        There is a fused form for plain gradient steps and for the Kronecker Fisher information with
        damping of its left factor alone (``factor_damping`` > 0, ``damping`` = 0). It carries
        directions from the anchor by plain projection; after polar retractions the frames stay
        aligned to second order, and it is what the paper's experiments did.
        """
        drawn = list(batches)
        problem = self.problem
        solvable = kind is None or (
            kind == "kronecker" and damping == 0 and problem.factor_damping > 0
        )
        if solvable and problem._can_fuse(drawn):
            corrections, moments = self._without_each_task()
            return fused_epoch(
                problem._task_gradient,
                x,
                torch.cat(drawn).tolist(),
                step=step,
                corrections=corrections,
                moments=moments,
                left_inverse=None if kind is None else problem.left_inverse,
            )
        return super().epoch(x, drawn, step=step, kind=kind, damping=damping)

    def _without_each_task(self) -> tuple[Tensor, Tensor]:
        """The full gradient and second moment at the anchor without each task's own."""
        state = self.state
        own = state.residual[:, :, None] * state.weights[:, None, :]
        own = own - self.x @ (self.x.mT @ own)
        outer = state.weights[:, :, None] * state.weights[:, None, :] / self.problem.n_samples
        return self.full_gradient - own, self.second_moment - outer


def fit_point(
    statistics: TaskStatistics,
    *,
    rank: int,
    ridge: float,
    max_iter: int,
    tol: float,
    fisher: str = "observed",
    frame: Tensor | None = None,
    callback: Callable[[dict[str, float]], object] | None = None,
) -> tuple[Tensor, Tensor, Result | None]:
    """Learn the subspace with a given ridge, by RNGD."""
    n = statistics.n_features
    if rank == n:
        frame = torch.eye(n, dtype=torch.float64)
        return frame, point_coefficients(statistics, frame, ridge), None
    scaled, unit = statistics.with_unit_targets()
    problem = SubspaceProblem(scaled, rank=rank, ridge=ridge)
    frame = start(scaled, rank=rank).frame if frame is None else frame
    result = solve(
        problem, frame, max_iter=max_iter, tol=tol, fisher=fisher, callback=callback, unit=unit**2
    )
    for row in result.trace.rows:
        row.update({name: row[name] * unit**2 for name in ("loss", "gradient_norm")})
    return result.x, unit * problem.coefficients(result.x), result


def solve(
    problem: Problem,
    frame: Tensor,
    *,
    max_iter: int,
    tol: float,
    fisher: str,
    callback: Callable[[dict[str, float]], object] | None,
    unit: float = 1.0,
) -> Result:
    """RNGD until what is left to gain is less than a fraction of the loss."""
    stop = SmallGradient(0.1 * tol, 0.1 * tol) | Stagnation(rtol=tol)
    return minimize(
        problem,
        frame,
        "rngd",
        max_iter=max_iter,
        stop=stop,
        fisher=fisher,
        sigma=1e-3,
        callback=callback
        and (lambda state: callback({"round": float(state.iteration), "loss": unit * state.loss})),
    )


def point_coefficients(statistics: TaskStatistics, frame: Tensor, ridge: float) -> Tensor:
    """w_t in a given frame; without a subspace to learn (A_t + λ I)⁻¹ b_t."""
    n, p = frame.shape
    if p < n:
        return SubspaceProblem(statistics, rank=p, ridge=ridge).coefficients(frame)
    # the pseudo-inverse is that of an even diagonal, so that it drops no feature for its unit
    squares = statistics.pooled().gram[0].diagonal() / statistics.all_tasks.size + ridge
    sizes = torch.where(squares > 0, squares, 1.0).sqrt()
    lifted = (statistics.gram + ridge * torch.eye(n, dtype=sizes.dtype)) / sizes / sizes[:, None]
    return (
        torch.linalg.pinv(lifted, hermitian=True) @ (statistics.cross / sizes)[..., None]
    ).squeeze(-1) / sizes


def choose_ridge(
    rows: Rows, tasks: Axis, *, rank: int, seed: int
) -> tuple[float, dict[float, float]]:
    """The ridge with the lowest squared error on a fifth of every task's rows."""
    held = held_out_rows(rows.task.numpy(), seed, rows.keys, tasks)
    train, rest = (
        rows.select(torch.from_numpy(np.flatnonzero(part))).statistics(tasks)
        for part in (~held, held)
    )
    errors: dict[float, float] = {}
    frame: Tensor | None = None
    for ridge in RIDGES:  # ranked by a few cheap steps each, from the frame of the one before
        frame, w, _ = fit_point(
            train, rank=rank, ridge=ridge, fisher="kronecker", max_iter=30, tol=1e-5, frame=frame
        )
        errors[ridge] = tasks.add(rest.residual_power(w @ frame.mT)) / tasks.add(rest.counts)
    return min(errors, key=errors.__getitem__), errors


def held_out_rows(
    task: NDArray[Any], seed: int, keys: NDArray[Any] | None = None, tasks: Axis | None = None
) -> NDArray[np.bool_]:
    """A fifth of the rows of every task with at least five rows, at random."""
    keys = np.random.default_rng(seed).random(len(task)) if keys is None else keys
    counts = np.bincount(task)
    order = np.lexsort((keys, task))
    position = np.empty(len(task), dtype=np.int64)
    position[order] = np.arange(len(task)) - np.repeat(np.cumsum(counts) - counts, counts)
    held = position < np.floor(0.2 * counts)[task]
    chosen = int(held.sum()) if tasks is None else int(tasks.total(torch.tensor(int(held.sum()))))
    return np.asarray(held if chosen else position == 0)
