"""The paper's multi-task figures: School and Sarcos, four methods, rank 6.

The paper's settings: batch 1 drawn with replacement, ridge 1e-4, raw features, 80 % of each task's
rows for training, the left Kronecker factor a sum over tasks with damping on it alone. Here the
factor is a mean, so RNGD's step and damping are the paper's divided by the number of tasks. The
gradient is the paper's, without the Jacobian of w.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fisherfold import datasets
from fisherfold.manifolds.base import Point
from fisherfold.problems.base import Problem
from fisherfold.reproduce.figures import FigurePlan, checksum, four_methods, grid_125
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.tasks import TaskStatistics

RANK = 6
RIDGE = 1e-4
METRICS = {
    "held_out_nmse": "held-out NMSE",
    "refit_nmse": "test NMSE after a refit",
    "train_nmse": "training NMSE",
}
STAND_IN = (
    "Not the paper's data: its training file sarcos_inv.mat (44,484 rows) is not at hand, 7 tasks "
    "of 2,000 rows drawn from SARCOS stand in."
)


def school() -> FigurePlan:
    """The School figure: 139 schools, 28 features, 72 #grad/N.

    RNGD steps 5 (the released script) and 4 (the text).
    """
    data = datasets.load_tasks("school")
    return _plan(
        "school",
        "School, 139 tasks",
        data.X,
        data.y,
        data.task,
        budget=72,
        steps=(5.0, 4.0),
        damping=1e-4,
    )


def sarcos() -> FigurePlan:
    """The Sarcos figure: 7 torques, 21 features, 90 #grad/N.

    From sarcos_inv.mat if it is in the data folder.
    """
    original = Path(os.environ.get("FISHERFOLD_DATA", ".")) / "sarcos_inv.mat"
    if original.is_file():
        X, y, task = datasets.stack_outputs(datasets.load_sarcos_file(original))
        note = ""
    else:
        data = datasets.load_tasks("sarcos_7x2000")
        X = scaled_per_task(data.X, data.task)
        y = data.y
        task = data.task
        note = STAND_IN
    title = f"Sarcos, 7 tasks of {len(y) // 7:,} rows"
    return _plan("sarcos", title, X, y, task, budget=90, steps=(1.0,), damping=1e-6, note=note)


def scaled_per_task(X: NDArray[Any], task: NDArray[Any]) -> NDArray[Any]:
    """Inputs between 0 and 1 within each task, the form in which Sarcos was published."""
    scaled = np.empty_like(X)
    for t in np.unique(task):
        rows = X[task == t]
        low = rows.min(0)
        high = rows.max(0)
        scaled[task == t] = (rows - low) / np.where(high > low, high - low, 1.0)
    return scaled


def split_rows(task: NDArray[Any], seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """A random split of the rows of every task, four fifths for training."""
    generator = np.random.default_rng(seed)
    train = []
    test = []
    for t in np.unique(task):
        rows = generator.permutation(np.flatnonzero(task == t))
        cut = int(np.floor(0.8 * len(rows)))
        train.append(rows[:cut])
        test.append(rows[cut:])
    return np.concatenate(train), np.concatenate(test)


def _plan(
    name: str,
    title: str,
    X: NDArray[Any],
    y: NDArray[Any],
    task: NDArray[Any],
    *,
    budget: int,
    steps: tuple[float, ...],
    damping: float,
    note: str = "",
) -> FigurePlan:
    n_tasks = int(task.max()) + 1
    tensors = torch.as_tensor(X), torch.as_tensor(y), torch.as_tensor(task, dtype=torch.int64)

    def statistics(rows: NDArray[Any]) -> TaskStatistics:
        index = torch.as_tensor(rows)
        return TaskStatistics.from_rows(*(part[index] for part in tensors), n_tasks=n_tasks)

    def make(seed: int) -> tuple[Problem, Point]:
        train, test = split_rows(task, seed)
        problem = SubspaceProblem(
            statistics(train),
            rank=RANK,
            ridge=RIDGE,
            objective="residual",
            factor_damping=damping / n_tasks,
            held_out=statistics(test),
        )
        return problem, problem.manifold.random_point(generator=torch.Generator().manual_seed(seed))

    methods = four_methods(tuple(t / n_tasks for t in steps), grid_125(2.0, 1e-9), 1)
    settings = {
        "rank": RANK,
        "ridge": RIDGE,
        "damping": damping,
        "paper_steps": list(steps),
        "tasks": n_tasks,
        "rows": len(y),
        "data": checksum(X, y, task),
    }
    return FigurePlan(name, title, make, methods, budget, METRICS, settings, note, one_thread=True)
