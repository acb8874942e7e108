"""School from the split, start and samples of the paper's released code, run under GNU Octave.

The recorded figures are per epoch. Those of the start are compared with the files to 1e-10. The inner steps are
compared with the released formula worked out in extended precision: written in double precision, as released, its
solve with P A P + δ I is singular along U up to δ and loses the tenth digit of the cost in the first step.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fisherfold import datasets
from fisherfold.reproduce.subspace import scaled_per_task
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.tasks import TaskStatistics

ANCHORS = Path(os.environ.get("FISHERFOLD_DATA", "")).parent / "anchors" / "authors_octave"
pytestmark = pytest.mark.skipif(
    not (os.environ.get("FISHERFOLD_DATA") and ANCHORS.is_dir()),
    reason="FISHERFOLD_DATA is not set or has no recorded runs (anchors/authors_octave) beside it",
)
RIDGE, DAMPING, STEP = 1e-4, 1e-4, 5.0


def statistics(data, stored, part):
    rows = stored[f"{part}_rows"].astype(np.int64)
    task = np.repeat(np.arange(len(stored[f"{part}_ptr"]) - 1), np.diff(stored[f"{part}_ptr"]))
    assert np.array_equal(data.task[rows], task)
    return TaskStatistics.from_rows(
        torch.tensor(data.X[rows]), torch.tensor(data.y[rows]), torch.tensor(task)
    )


@pytest.fixture(scope="module")
def school():
    with np.load(ANCHORS / "school_split_init.npz") as stored:
        data = datasets.load_tasks("school")
        problem = SubspaceProblem(
            statistics(data, stored, "train"),
            rank=6,
            ridge=RIDGE,
            objective="residual",
            factor_damping=DAMPING / 139,
            held_out=statistics(data, stored, "test"),
        )
        return problem, torch.tensor(stored["U0"]), stored["samples_rngd"].astype(np.int64)


def recorded(solver, name="school"):
    return json.loads((ANCHORS / f"{name}_{solver}.json").read_text())


def test_the_start_has_the_recorded_figures(school):
    problem, U, _ = school
    run = recorded("rngd")
    metrics = problem.metrics(U)
    assert float(problem.loss(U)) == pytest.approx(run["train_cost"][0], rel=1e-10)
    assert float(problem.gradient(U).norm()) == pytest.approx(run["gradnorm"][0], rel=1e-10)
    assert metrics["train_nmse"] == pytest.approx(run["train_nmse"][0], rel=1e-10)
    assert metrics["refit_nmse"] == pytest.approx(run["test_nmse"][0], rel=1e-10)
    # coefficients of the smallest tasks are ill conditioned, and held-out rows see all of that
    assert metrics["held_out_nmse"] == pytest.approx(run["test_nmse_trainfit"][0], rel=1e-9)


def test_the_start_on_sarcos_has_the_recorded_figures():
    data = datasets.load_tasks("sarcos_7x2000")
    scaled = dataclasses.replace(data, X=scaled_per_task(data.X, data.task))
    with np.load(ANCHORS / "sarcos_7x2000_split_init.npz") as stored:
        train, test = (statistics(scaled, stored, part) for part in ("train", "test"))
        problem = SubspaceProblem(train, rank=6, ridge=RIDGE, objective="residual", held_out=test)
        U = torch.tensor(stored["U0"])
    run = recorded("rngd", "sarcos_7x2000")
    assert float(problem.loss(U)) == pytest.approx(run["train_cost"][0], rel=1e-10)
    assert problem.metrics(U)["refit_nmse"] == pytest.approx(run["test_nmse"][0], rel=1e-10)


def solve_extended(matrix, right):
    """Gauss elimination with pivoting; numpy.linalg has no extended precision."""
    m = np.concatenate([matrix, right.reshape(len(matrix), -1)], axis=1)
    n = len(matrix)
    for k in range(n):
        pivot = k + int(np.argmax(np.abs(m[k:, k])))
        m[[k, pivot]] = m[[pivot, k]]
        m[k + 1 :] -= np.outer(m[k + 1 :, k] / m[k, k], m[k])
    for k in reversed(range(n)):
        m[k] /= m[k, k]
        m[:k] -= np.outer(m[:k, k], m[k])
    return m[:, n:].reshape(right.shape)


def polar_extended(y):
    """Y (YᵀY)^{-1/2} by Newton's iteration for the inverse square root."""
    gram = y.T @ y
    z = np.eye(len(gram), dtype=np.longdouble) / np.sqrt(np.trace(gram))
    for _ in range(60):
        z = z @ (3 * np.eye(len(gram), dtype=np.longdouble) - z @ gram @ z) / 2
    return y @ z


def released_steps(problem, U, samples):
    """The released update, line by line, in extended precision."""
    A = problem.statistics.gram.numpy().astype(np.longdouble)
    b = problem.statistics.cross.numpy().astype(np.longdouble)
    n_tasks, eye_n, eye_p = len(A), np.eye(28, dtype=np.longdouble), np.eye(6, dtype=np.longdouble)

    def task_gradient(U, t):
        w = solve_extended(U.T @ A[t] @ U + np.longdouble(RIDGE) * eye_p, U.T @ b[t])
        g = np.outer(A[t] @ (U @ w) - b[t], w)
        return g - U @ (U.T @ g), w

    anchor = U.numpy().astype(np.longdouble)
    parts = [task_gradient(anchor, t) for t in range(n_tasks)]
    full = sum(g for g, _ in parts) / n_tasks
    second_moment = sum(np.outer(w, w) for _, w in parts)
    total, x = A.sum(0), anchor.copy()
    for t in samples:
        g, w = task_gradient(x, t)
        correction = full - parts[t][0]
        g = g + correction - x @ (x.T @ correction)
        C = (second_moment + np.outer(w, w) - np.outer(parts[t][1], parts[t][1])) / n_tasks
        left = total - x @ (x.T @ total)
        left = left - (left @ x) @ x.T + np.longdouble(DAMPING) * eye_n
        x = polar_extended(x - np.longdouble(STEP) * solve_extended(left, solve_extended(C, g.T).T))
    return torch.tensor(x.astype(np.float64))


@pytest.mark.skipif(
    np.finfo(np.longdouble).eps > 1e-18, reason="numpy has no extended precision on this machine"
)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_first_inner_steps_agree_with_the_released_formula(school, steps):
    problem, U, samples = school
    expected = problem.loss(released_steps(problem, U, samples[0, :steps]))
    batches = torch.tensor(samples[0, :steps]).split(1)
    # the released left factor is the sum over tasks, ours the mean: the step shrinks by the number of tasks
    found = problem.snapshot(U).epoch(U, batches, step=STEP / 139, kind="kronecker")
    assert float(problem.loss(found)) == pytest.approx(float(expected), rel=1e-10)


def test_whole_epochs_stay_close_to_the_recorded_run(school):
    problem, x, samples = school
    run = recorded("rngd")
    for epoch, order in enumerate(samples[:10]):
        x = problem.snapshot(x).epoch(
            x, torch.tensor(order).split(1), step=STEP / 139, kind="kronecker"
        )
        # rounding grows chaotically within an epoch (the record says half a percent), so costs agree, paths do not
        assert float(problem.loss(x)) == pytest.approx(run["train_cost"][epoch + 1], rel=1e-2)
