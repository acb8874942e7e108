"""Subspace learning over several processes: problems, the marginal fit and the estimator equal one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fisherfold import SubspaceRegressor
from fisherfold.distributed import ALONE, Axis, Group
from fisherfold.solvers import minimize
from fisherfold.subspace.marginal_fit import fit_marginal
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.tasks import TaskStatistics
from toy import slow

from ranks import compare, on_ranks, same_bits  # isort: skip

TASKS, FEATURES, RANK = 9, 5, 2


def rows() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    task = rng.integers(0, TASKS, 180)
    X = rng.normal(size=(180, FEATURES)) * [1, 2, 1, 0.5, 3] + 1
    slopes = rng.normal(size=(TASKS, RANK)) @ rng.normal(size=(RANK, FEATURES))
    return X, (X * slopes[task]).sum(1) + 0.3 * rng.normal(size=180), task


def statistics(group: Group) -> TaskStatistics:
    """Uneven runs of tasks; with three ranks and more one of them has none."""
    edges = {1: [0, 9], 2: [0, 7, 9], 3: [0, 4, 4, 9], 4: [0, 1, 6, 6, 9]}[group.size]
    X, y, task = rows()
    axis = Axis(TASKS, edges[group.rank], edges[group.rank + 1], group)
    mine = (task >= axis.start) & (task < axis.stop)
    found = TaskStatistics.empty(len(axis), FEATURES)
    if mine.any():
        found.add(*(torch.from_numpy(part) for part in (X[mine], y[mine], task[mine] - axis.start)))
    return TaskStatistics(*found.parts(), axis=axis)


def problems(group: Group) -> dict[str, Any]:
    data = statistics(group)
    found: dict[str, Any] = {}
    batch = torch.tensor([8, 0, 3, 3])
    for objective in ("residual", "penalised"):
        problem = SubspaceProblem(data, rank=RANK, ridge=0.3, objective=objective)
        x = problem.manifold.random_point(
            generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        v = problem.manifold.random_tangent(x, generator=torch.Generator().manual_seed(2))
        for name, chosen in (("all", None), ("batch", batch)):
            found[f"{objective} {name}"] = problem.loss_and_gradient(x, chosen)
            for kind in problem.fisher_kinds:
                found[f"{objective} {name} {kind}"] = problem.fisher(x, chosen, kind=kind).matvec(v)
        found[f"{objective} metrics"] = problem.metrics(x)
        for method, options in (
            ("rngd", {}),
            ("rngd-vr", {"step": 0.1, "batch_size": 2}),
            ("rsgd", {"step": 0.01}),
        ):
            result = minimize(problem, x, method, max_iter=3, seed=0, **options)
            found[f"{objective} {method}"] = [result.x, result.value]
    for noise in ("task", "shared"):
        fit = fit_marginal(data, rank=RANK, noise=noise, max_rounds=2, tol=0.0)
        shared = [
            fit.prior.mean,
            fit.prior.frame,
            fit.prior.covariance,
            data.all_tasks.gather(fit.prior.noise),
        ]
        found[f"marginal {noise}"] = [*shared, [row["loss"] for row in fit.trace]]
    return found


def described(model: SubspaceRegressor) -> dict[str, Any]:
    parts = [
        torch.from_numpy(np.asarray(part))
        for part in (model.coef_, model.intercept_, model.components_)
    ]
    labels = [str(t) for t in rows()[2][:6]]
    spread = model.predict(rows()[0][:6], task=labels, return_std=model.inference == "marginal")
    predicted = [
        torch.from_numpy(np.asarray(part))
        for part in (spread if isinstance(spread, tuple) else [spread])
    ]
    return {
        "parts": parts,
        "predicted": predicted,
        "tasks": [str(task) for task in model.task_ids_],
    }


ESTIMATORS = [{}, {"inference": "point"}, {"inference": "point", "ridge": 2.0}, {"noise": "shared"}]


def estimators(group: Group) -> list[Any]:
    X, y, task = rows()
    labels = np.array([str(t) for t in task], dtype=object)
    edges = (
        [0, len(y)] if group.size == 1 else [0, *range(120, 120 + group.size - 2), len(y), len(y)]
    )
    mine = slice(edges[group.rank], edges[group.rank + 1])
    found = []
    for options in ESTIMATORS:
        model = SubspaceRegressor(rank=2, max_iter=3, **options)
        if edges[group.rank] == edges[group.rank + 1]:
            model.fit_share()
        else:
            model.fit_share(X[mine], y[mine], labels[mine])
        found.append(described(model))
    return found


def everything() -> dict[str, Any]:
    return {"problems": problems(Group()), "estimators": estimators(Group())}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    X, y, task = rows()
    labels = [str(t) for t in task]
    fits = [
        SubspaceRegressor(rank=2, max_iter=3, **options).fit(X, y, task=labels)
        for options in ESTIMATORS
    ]
    return {"problems": problems(ALONE), "estimators": [described(model) for model in fits]}


@pytest.mark.parametrize("world", [2, *slow(3, 4)])
def test_ranks_equal_one_process(world: int, tmp_path: Path, alone: dict[str, Any]) -> None:
    ranks = on_ranks(world, tmp_path, everything)
    same_bits(ranks)
    compare(alone["problems"], ranks[0]["problems"], rtol=1e-7, atol=1e-8)
    compare(alone["estimators"], ranks[0]["estimators"], rtol=1e-6, atol=1e-7)
