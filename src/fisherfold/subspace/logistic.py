"""Many small binary classifications whose coefficients share a subspace.

    Ψ(U) = (1/N) Σ_t min_w [ Σ_j s_j (log(1 + exp η_j) - y_j η_j) + ½ λ ‖w‖² ],
    η_j = o_j + x_jᵀ U w_t

The coefficients w_t have no closed form: damped Newton, all tasks at once, each with its own
backtracking. By the envelope theorem the gradient is P (1/N) Σ_t e_t w_tᵀ with e_t = X_tᵀ s(μ - y)
and μ the predicted probabilities. With D = s μ(1-μ) and A_t = X_tᵀDX_t the Fisher information and
the Hessian are those of ``fisher_operators``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from typing_extensions import override

from fisherfold.distributed import Axis
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds import Grassmann
from fisherfold.problems.base import Problem
from fisherfold.problems.cache import LastPoint
from fisherfold.subspace.fisher_operators import SubspaceFisher, SubspaceHessian, TaskState
from fisherfold.subspace.tasks import TaskStatistics, check_whole


@dataclass(frozen=True)
class LabelledRows:
    """Rows of several binary tasks."""

    X: Tensor  # features, float64
    y: Tensor  # targets, 0 or 1, float64
    task: Tensor  # the task of each row, integers from 0
    n_tasks: int  # how many tasks
    weight: Tensor  # s, a weight per row
    offset: Tensor  # o, a part of the logit that is given

    @classmethod
    def make(
        cls,
        X: Tensor,
        y: Tensor,
        task: Tensor,
        *,
        n_tasks: int | None = None,
        weight: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> LabelledRows:
        """Rows with weights 1 and offsets 0 unless given."""
        X = X.double()
        y = y.double()
        tasks = int(task.max()) + 1 if n_tasks is None else n_tasks
        ones = torch.ones_like(y) if weight is None else weight.double()
        return cls(
            X, y, task, tasks, ones, torch.zeros_like(y) if offset is None else offset.double()
        )

    def select(self, chosen: Tensor) -> LabelledRows:
        """Some of the rows."""
        X, y, task, weight, offset = (
            part[chosen] for part in (self.X, self.y, self.task, self.weight, self.offset)
        )
        return LabelledRows(X, y, task, self.n_tasks, weight, offset)

    def total(self, values: Tensor) -> Tensor:
        """Sums over the rows of each task."""
        out = torch.zeros(self.n_tasks, *values.shape[1:], dtype=values.dtype)
        return out.index_add_(0, self.task, values)


def newton_coefficients(
    rows: LabelledRows,
    features: Tensor,
    ridge: float,
    start: Tensor | None = None,
    *,
    max_iter: int = 100,
) -> tuple[Tensor, Tensor]:
    """Minimise the penalised logistic loss of every task over its coefficients.

    A task whose Newton step does not lower its loss halves it; the last step, too short for the
    loss to show, is taken whole.
    """
    p = features.shape[1]
    w = torch.zeros(rows.n_tasks, p, dtype=features.dtype) if start is None else start
    losses = _losses(rows, features, w, ridge)
    scale = rows.total(rows.weight[:, None] * features.abs()).sum(-1) + ridge
    for _ in range(max_iter):
        logits = _logits(rows, features, w)
        slope = rows.total(_slopes(rows, logits)[:, None] * features) + ridge * w
        if bool((slope.abs().amax(-1) <= 1e-13 * scale).all()):
            break
        factor = torch.linalg.cholesky(_curvature(rows, features, _spread(rows, logits), ridge))
        step = torch.cholesky_solve(slope[..., None], factor).squeeze(-1)
        fall = (step * slope).sum(-1)
        # below the rounding of the loss only the Newton step itself, which squares the error, can
        # give the last digits
        close = fall <= 1e-14 * losses.abs()
        length = torch.ones_like(losses)
        moved = w - step
        trial = _losses(rows, features, moved, ridge)
        for _ in range(30):
            short = ~close & (trial > losses - 0.25 * length * fall)
            if not bool(short.any()):
                break
            length = torch.where(short, length / 2, length)
            moved = w - length[:, None] * step
            trial = _losses(rows, features, moved, ridge)
        better = close | (trial <= losses)
        w = torch.where(better[:, None], moved, w)
        losses = torch.where(better, trial, losses)
        if bool((close | ~better).all()):
            break
    return w, losses


def _curvature(rows: LabelledRows, features: Tensor, spread: Tensor, ridge: float) -> Tensor:
    """G_t = UᵀX_tᵀDX_tU + λ I."""
    weighted = spread[:, None] * features
    eye = torch.eye(features.shape[1], dtype=features.dtype)
    return rows.total(weighted[:, :, None] * features[:, None, :]) + ridge * eye


def _logits(rows: LabelledRows, features: Tensor, w: Tensor) -> Tensor:
    return rows.offset + (features * w[rows.task]).sum(-1)


def _losses(rows: LabelledRows, features: Tensor, w: Tensor, ridge: float) -> Tensor:
    # of the logit of the class that is not the target: rows far on the right side keep their digits
    wrong = (1 - 2 * rows.y) * _logits(rows, features, w)
    return rows.total(rows.weight * -logsigmoid(-wrong)) + ridge * (w * w).sum(-1) / 2


def _slopes(rows: LabelledRows, logits: Tensor) -> Tensor:
    """The derivatives s (μ - y) in the logits."""
    sign = 1 - 2 * rows.y
    return rows.weight * sign * torch.sigmoid(sign * logits)


def _spread(rows: LabelledRows, logits: Tensor) -> Tensor:
    """The second derivatives D = s μ(1 - μ)."""
    return rows.weight * torch.sigmoid(logits) * torch.sigmoid(-logits)


class LogisticState(NamedTuple):
    """What follows from a frame for all tasks."""

    weights: Tensor  # w_t
    losses: Tensor  # penalised losses
    spread: Tensor  # D = s μ(1 - μ), row by row
    error: Tensor  # e_t = X_tᵀ s(μ - y), shape (tasks, features)


class LogisticSubspaceProblem(Problem):
    """Multi-task logistic regression with shared features, from rows.

    Fisher kinds: ``kronecker``, [(1/N) Σ w wᵀ] ⊗ [(1/N) Σ X_tᵀDX_t] on the complement of U;
    ``exact``; ``observed``, the Hessian, for the last digits: positive definite near a minimum
    only.
    """

    fisher_kinds: ClassVar[tuple[str, ...]] = ("kronecker", "exact", "observed")
    manifold: Grassmann

    def __init__(self, rows: LabelledRows, *, rank: int, ridge: float = 1.0) -> None:
        n = rows.X.shape[1]
        if not 1 <= rank < n:
            raise ValueError(
                f"rank must be between 1 and the number of features minus one ({n - 1}), got {rank}"
            )
        if not ridge > 0:
            raise ValueError(f"ridge must be positive, got {ridge}")
        self.rows = rows
        self.ridge = ridge
        self.n_samples = rows.n_tasks
        self.manifold = Grassmann(n, rank)
        self._kept: LastPoint[LogisticState] = LastPoint()

    def state(self, x: Tensor) -> LogisticState:
        """Coefficients, probabilities and losses of all tasks; the last one is kept."""
        if (kept := self._kept.get(x)) is not None:
            return kept
        rows = self.rows
        ridge = self.ridge
        features = rows.X @ x
        # from zero, not from the last coefficients: the loss is then a function of x to the last
        # bit
        weights, losses = newton_coefficients(rows, features, ridge)
        logits = _logits(rows, features, weights)
        error = rows.total(_slopes(rows, logits)[:, None] * rows.X)
        return self._kept.put(x, LogisticState(weights, losses, _spread(rows, logits), error))

    @override
    def loss(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        check_whole(batch)
        return self.state(x).losses.mean()

    @override
    def loss_and_gradient(self, x: Tensor, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_whole(batch)
        state = self.state(x)
        ambient = state.error.mT @ state.weights / len(state.weights)
        return state.losses.mean(), self._tangent(x, ambient)

    @override
    def fisher(
        self, x: Tensor, batch: Tensor | None = None, *, kind: str = "kronecker"
    ) -> FisherOperator:
        if kind not in self.fisher_kinds:
            raise ValueError(f"kind must be one of {self.fisher_kinds}, got {kind!r}")
        check_whole(batch)
        state = self.state(x)
        rows = self.rows
        tasks = self.n_samples
        left = rows.X.mT @ (state.spread[:, None] * rows.X) / tasks
        kronecker = KroneckerFisher(
            self.manifold, x, left=left, right=state.weights.mT @ state.weights / tasks
        )
        if kind == "kronecker":
            return kronecker
        grams = TaskStatistics.from_rows(
            rows.X, rows.y, rows.task, n_tasks=tasks, sample_weight=state.spread
        ).gram
        gram_frame = grams @ x
        nothing = torch.zeros_like(state.losses)
        moved = TaskState(
            gram_frame,
            x.mT @ gram_frame,
            self.ridge,
            nothing,
            state.weights,
            state.error,
            state.losses,
        )
        form = SubspaceFisher if kind == "exact" else SubspaceHessian
        return form(x, grams, moved, tasks, preconditioner=kronecker, samples=Axis.whole(tasks))
