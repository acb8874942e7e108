"""The plain subspace model as a fit without choices: start, step sizes and ridge come from the data.

The problem:

    min over U of (1/N) Σ_t min_w ½‖Z_t U w - y_t‖² + ½ λ‖w‖²
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherfold.completion.ratings import places
from fisherfold.distributed import Axis
from fisherfold.solvers import Result, minimize
from fisherfold.solvers.loop import METHODS
from fisherfold.solvers.stopping import Criterion, SmallGradient, Stagnation
from fisherfold.subspace.marginal import start
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.task_rows import Rows
from fisherfold.subspace.tasks import TaskStatistics
from fisherfold.tables.checkpoint import FitCheckpoint, in_solver

SOLVERS = ("rngd", "rngd-vr", "rsgd", "rsvrg", "rcg")
RIDGES = (0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


def fit_point(
    statistics: TaskStatistics,
    *,
    rank: int,
    ridge: float | Tensor,
    solver: str,
    options: Mapping[str, Any],
    max_iter: int,
    tol: float,
    seed: int,
    frame: Tensor | None = None,
    callback: Callable[[int, float], object] | None = None,
    saved: FitCheckpoint | None = None,
) -> tuple[Tensor, Tensor, Result | None]:
    """Learn the subspace with a given ridge.

    Args:
        statistics: the training rows.
        rank: the dimension of the subspace; the number of features for none, that is, ridge per task.
        ridge: λ, one number or one per task.
        solver: one of ``SOLVERS``.
        options: for the solver, over its defaults.
        max_iter: the most iterations (epochs).
        tol: as for ``near_enough``.
        seed: for the stochastic solvers.
        frame: where to start; the leading directions of per-task ridge solutions if not given.
        callback: called with the number of each iteration and the loss after it; a true value stops the fit.
        saved: keeps where the solver stands; it goes on from there if the file exists.

    Returns:
        The frame U, the coefficients w and the solver's result (None without a subspace).
    """
    n = statistics.n_features
    if rank == n:
        return torch.eye(n, dtype=torch.float64), _ridge_solutions(statistics, ridge), None
    scaled, unit = in_units_of_the_targets(statistics)
    problem = SubspaceProblem(scaled, rank=rank, ridge=ridge, objective="penalised")
    x0 = start(scaled, rank=rank).frame if frame is None else frame
    chosen = _defaults(problem, x0, solver, options) | dict(options)
    stop = near_enough(tol)
    _check_options(problem, solver, chosen)
    result = minimize(
        problem, x0, solver, max_iter=max_iter, seed=seed, stop=stop,
        callback=None if callback is None else lambda state: callback(state.iteration, unit**2 * state.loss),
        **in_solver(saved), **chosen,
    )  # fmt: skip
    for row in result.trace.rows:
        row.update({name: row[name] * unit**2 for name in ("loss", "gradient_norm")})
    return result.x, unit * problem.coefficients(result.x), result


def near_enough(tol: float) -> Criterion:
    """When a subspace is learnt: what is left to gain is less than a fraction of the loss.

    Args:
        tol: stop when the loss falls by less than this fraction over five iterations, or when the gradient is a tenth
            of it over the loss: Newton's method would spend most of its products on digits that nobody sees.

    Returns:
        The criterion, for losses in units of the targets.
    """
    return SmallGradient(0.1 * tol, 0.1 * tol) | Stagnation(rtol=tol)


def _ridge_solutions(statistics: TaskStatistics, ridge: float | Tensor) -> Tensor:
    """(A_t + λ I)⁻¹ b_t; the pseudo-inverse is that of an even diagonal, so that it drops no feature for its unit."""
    ridges = torch.as_tensor(ridge, dtype=torch.float64).expand(statistics.n_tasks)
    squares = statistics.pooled().gram[0].diagonal() / statistics.all_tasks.size + ridges[:, None]
    sizes = torch.where(squares > 0, squares, 1.0).sqrt()
    lifted = (statistics.gram + torch.diag_embed(ridges[:, None].expand_as(sizes))) / sizes[:, None] / sizes[..., None]
    return (torch.linalg.pinv(lifted, hermitian=True) @ (statistics.cross / sizes)[..., None]).squeeze(-1) / sizes


def in_units_of_the_targets(statistics: TaskStatistics) -> tuple[TaskStatistics, float]:
    """The same rows with targets of mean square 1, so that no tolerance or damping depends on their unit.

    Args:
        statistics: of centred targets.

    Returns:
        The statistics, and what the targets were divided by.
    """
    power, count = statistics.all_tasks.total(torch.stack([statistics.power.sum(), statistics.counts.sum()])).tolist()
    unit = math.sqrt(power / count) if power > 0 else 1.0
    scaled = replace(
        statistics, cross=statistics.cross / unit, power=statistics.power / unit**2, sums=statistics.sums / unit
    )
    return scaled, unit


def _check_options(problem: SubspaceProblem, solver: str, options: Mapping[str, Any]) -> None:
    try:
        METHODS[solver](problem, **options)
    except (TypeError, ValueError) as error:
        reason = str(error).split("__init__() ")[-1]
        raise type(error)(f"solver_options of {solver!r}: {reason}, got {dict(options)}") from None


def _defaults(problem: SubspaceProblem, x0: Tensor, solver: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that need no tuning: steps follow from the curvature at the start."""
    if solver in {"rngd", "rcg"}:
        # residuals stay, and with them a Fisher matrix is a poor model: hundreds of steps where the Hessian takes tens
        first = {} if options.get("step") is not None else {"sigma": 1e-3}
        return first | {"fisher": "observed"} if solver == "rngd" else {}
    batch = {"batch_size": 1, "sampling": "replacement"}
    if solver == "rngd-vr":
        return batch | {"step": 0.05, "damping": 1e-6 * _curvature(problem, x0)}
    return batch | {"step": (0.2 if solver == "rsgd" else 0.05) / _curvature(problem, x0)}


def _curvature(problem: SubspaceProblem, x0: Tensor) -> float:
    w = problem.coefficients(x0)
    second_moment = torch.linalg.matrix_norm(problem.samples.second_moment(w) / problem.n_samples, ord=2)
    return max(float(second_moment * torch.linalg.matrix_norm(problem.mean_gram, ord=2)), 1e-300)


def choose_ridge(rows: Rows, tasks: Axis, *, rank: int, seed: int) -> tuple[float, dict[float, float]]:
    """The ridge with the lowest squared error on a fifth of every task's rows.

    Args:
        rows: rows in the model's features.
        tasks: the tasks, and which of them are here.
        rank: the dimension of the subspace.
        seed: fixes the split.

    Returns:
        The ridge and the error of every ridge tried.
    """
    held = held_out_rows(rows.task.numpy(), seed, rows.keys, tasks)
    split = [torch.from_numpy(np.flatnonzero(chosen)) for chosen in (~held, held)]
    train, rest = (rows.statistics(len(tasks), tasks, chosen) for chosen in split)
    errors: dict[float, float] = {}
    frame: Tensor | None = None
    for ridge in RIDGES:  # ranked by a few cheap steps each, from the frame of the one before
        frame, w, _ = fit_point(
            train, rank=rank, ridge=ridge, solver="rngd", options={"fisher": "kronecker"}, max_iter=30, tol=1e-5,
            seed=seed, frame=frame,
        )  # fmt: skip
        found = tasks.total(torch.stack([rest.residual_power(w @ frame.mT).sum(), rest.counts.sum()]))
        errors[ridge] = float(found[0] / found[1])
    return min(errors, key=lambda key: errors[key]), errors


def held_out_rows(
    task: NDArray[Any], seed: int, keys: NDArray[Any] | None = None, tasks: Axis | None = None
) -> NDArray[np.bool_]:
    """A fifth of the rows of every task with at least five rows, at random.

    Args:
        task: the task of each row, from 0.
        seed: fixes the draw.
        keys: a random number per row; drawn from the seed if not given.
        tasks: the tasks, if they are shared out over processes.

    Returns:
        Whether each row is held out.
    """
    keys = np.random.default_rng(seed).random(len(task)) if keys is None else keys
    position = places(task, keys)
    held = position < np.floor(0.2 * np.bincount(task))[task]
    chosen = torch.tensor(int(held.sum()))
    if int(chosen if tasks is None else tasks.total(chosen)) == 0:
        held = position == 0
    return np.asarray(held)
