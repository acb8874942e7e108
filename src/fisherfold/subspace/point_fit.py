"""The plain subspace model as a fit without choices: starting point, steps and ridge come from the data.

min over U of (1/N) Σ_t min_w ½‖Z_t U w - y_t‖² + ½ λ‖w‖²
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherfold.distributed import Axis
from fisherfold.problems.base import Problem
from fisherfold.solvers import Result, minimize
from fisherfold.solvers.stopping import SmallGradient, Stagnation
from fisherfold.subspace.inputs import Rows
from fisherfold.subspace.marginal import start
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.tasks import TaskStatistics

RIDGES = (0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


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
    result = solve(problem, frame, max_iter=max_iter, tol=tol, fisher=fisher, callback=callback, unit=unit**2)
    for row in result.trace.rows:
        row.update({name: row[name] * unit**2 for name in ("loss", "gradient_norm")})
    return result.x, unit * problem.coefficients(result.x), result


def solve(
    problem: Problem, frame: Tensor, *, max_iter: int, tol: float, fisher: str,
    callback: Callable[[dict[str, float]], object] | None, unit: float = 1.0,
) -> Result:  # fmt: skip
    """RNGD until what is left to gain is less than a fraction of the loss; the callback hears of rounds and losses."""
    stop = SmallGradient(0.1 * tol, 0.1 * tol) | Stagnation(rtol=tol)
    return minimize(
        problem, frame, "rngd", max_iter=max_iter, stop=stop, fisher=fisher, sigma=1e-3,
        callback=callback and (lambda state: callback({"round": float(state.iteration), "loss": unit * state.loss})),
    )  # fmt: skip


def point_coefficients(statistics: TaskStatistics, frame: Tensor, ridge: float) -> Tensor:
    """w_t in a given frame; without a subspace to learn (A_t + λ I)⁻¹ b_t."""
    n, p = frame.shape
    if p < n:
        return SubspaceProblem(statistics, rank=p, ridge=ridge).coefficients(frame)
    # the pseudo-inverse is that of an even diagonal, so that it drops no feature for its unit
    squares = statistics.pooled().gram[0].diagonal() / statistics.all_tasks.size + ridge
    sizes = torch.where(squares > 0, squares, 1.0).sqrt()
    lifted = (statistics.gram + ridge * torch.eye(n, dtype=sizes.dtype)) / sizes / sizes[:, None]
    return (torch.linalg.pinv(lifted, hermitian=True) @ (statistics.cross / sizes)[..., None]).squeeze(-1) / sizes


def choose_ridge(rows: Rows, tasks: Axis, *, rank: int, seed: int) -> tuple[float, dict[float, float]]:
    """The ridge with the lowest squared error on a fifth of every task's rows."""
    held = held_out_rows(rows.task.numpy(), seed, rows.keys, tasks)
    train, rest = (rows.select(torch.from_numpy(np.flatnonzero(part))).statistics(tasks) for part in (~held, held))
    errors: dict[float, float] = {}
    frame: Tensor | None = None
    for ridge in RIDGES:  # ranked by a few cheap steps each, from the frame of the one before
        frame, w, _ = fit_point(train, rank=rank, ridge=ridge, fisher="kronecker", max_iter=30, tol=1e-5, frame=frame)
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
