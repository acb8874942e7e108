"""Speed of the subspace problem on School and Sarcos.

1. One full pass (loss, gradient, both Kronecker factors) against loops over tasks, from plain to
tuned. 2. The paper's whole RNGD run (batch 1, thousands of tiny steps) against a plain NumPy
version of the released loop. 3. pymanopt's conjugate gradients on the same cost, vectorised in
NumPy: time to the loss that it reaches.

Against: plain NumPy, pymanopt
Takes: five minutes
Page: docs/benchmarks/subspace.md
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from argparse import ArgumentParser, Namespace

import numpy as np
import torch

from fisherfold import datasets
from fisherfold.reproduce import subspace
from fisherfold.solvers import minimize
from fisherfold.solvers.stopping import LossBelow
from fisherfold.subspace.problem import SubspaceProblem

SMOKE = "--repeats 1 --budget 4"

warnings.filterwarnings("ignore")
RIDGE = subspace.RIDGE


def best_of(function, repeats):
    times = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return min(times)


def coefficients(X, y, U):
    Z = X @ U
    return np.linalg.solve(Z.T @ Z + RIDGE * np.eye(U.shape[1]), Z.T @ y)


def three_functions(rows, U):
    """What one writes first, and what the released code has.

    Loss, gradient and factors, each a loop over tasks.
    """
    loss = sum(((X @ U @ coefficients(X, y, U) - y) ** 2).sum() / 2 for X, y in rows)
    gradient = np.zeros_like(U)
    left = np.zeros((len(U), len(U)))
    right = np.zeros((U.shape[1],) * 2)
    for X, y in rows:
        w = coefficients(X, y, U)
        gradient += np.outer(X.T @ (X @ (U @ w) - y), w)
    for X, y in rows:
        w = coefficients(X, y, U)
        left += X.T @ X
        right += np.outer(w, w)
    gradient -= U @ (U.T @ gradient)
    return loss / len(rows), gradient / len(rows), left / len(rows), right / len(rows)


def row_pass(rows, U):
    """The same in one loop that shares the coefficients."""
    loss = 0.0
    gradient = np.zeros_like(U)
    left = np.zeros((len(U), len(U)))
    right = np.zeros((U.shape[1],) * 2)
    for X, y in rows:
        w = coefficients(X, y, U)
        r = X @ (U @ w) - y
        loss += r @ r / 2
        gradient += np.outer(X.T @ r, w)
        left += X.T @ X
        right += np.outer(w, w)
    gradient -= U @ (U.T @ gradient)
    return loss / len(rows), gradient / len(rows), left / len(rows), right / len(rows)


def loop_pass(A, b, c, U):
    """The same with sufficient statistics per task, still a loop over tasks."""
    n, p = U.shape
    loss = 0.0
    gradient = np.zeros((n, p))
    left = np.zeros((n, n))
    right = np.zeros((p, p))
    for t in range(len(A)):
        w = np.linalg.solve(U.T @ A[t] @ U + RIDGE * np.eye(p), U.T @ b[t])
        fitted = A[t] @ (U @ w)
        loss += (c[t] - 2 * (U @ w) @ b[t] + (U @ w) @ fitted) / 2
        gradient += np.outer(fitted - b[t], w)
        left += A[t]
        right += np.outer(w, w)
    gradient -= U @ (U.T @ gradient)
    return loss / len(A), gradient / len(A), left / len(A), right / len(A)


def full_pass(problem, x):
    fresh = x.clone()
    loss, gradient = problem.loss_and_gradient(fresh)
    operator = problem.fisher(fresh, kind="kronecker")
    return loss, gradient, operator.left, operator.right


def numpy_run(A, b, U, epochs, samples, step, damping):
    """The released loop: a full pass at the snapshot, then one solve per task drawn."""
    n, p = U.shape
    total = A.sum(0)
    eye_n = np.eye(n)
    eye_p = np.eye(p)
    for k in range(epochs):
        AU = A @ U
        w0 = np.linalg.solve(U.T @ AU + RIDGE * eye_p, (b @ U)[..., None])[..., 0]
        g0 = np.einsum("ti,tp->ip", np.einsum("tip,tp->ti", AU, w0) - b, w0) / len(A)
        g0 -= U @ (U.T @ g0)
        second = w0.T @ w0
        anchor = U
        for t in samples[k]:
            w = np.linalg.solve(U.T @ A[t] @ U + RIDGE * eye_p, U.T @ b[t])
            g = np.outer(A[t] @ (U @ w) - b[t], w)
            old = np.outer(A[t] @ (anchor @ w0[t]) - b[t], w0[t])
            old -= anchor @ (anchor.T @ old)
            g += g0 - old
            g -= U @ (U.T @ g)
            C = (second + np.outer(w, w) - np.outer(w0[t], w0[t])) / len(A)
            left = total - U @ (U.T @ total)
            left = left - (left @ U) @ U.T + damping * eye_n
            u, _, v = np.linalg.svd(
                U - step * np.linalg.solve(left, g @ np.linalg.pinv(C)), full_matrices=False
            )
            U = u @ v
    return U


def pymanopt_run(problem, x0, iterations):
    import pymanopt

    A, b, c = (
        part.numpy()
        for part in (problem.statistics.gram, problem.statistics.cross, problem.statistics.power)
    )
    n, p = x0.shape
    manifold = pymanopt.manifolds.Grassmann(n, p)

    def parts(U):
        AU = (A.reshape(-1, n) @ U).reshape(len(A), n, p)
        target = b @ U
        inner = U.T @ AU
        w = np.linalg.solve(inner + RIDGE * np.eye(p), target[..., None])[..., 0]
        return AU, target, inner, w

    @pymanopt.function.numpy(manifold)
    def cost(U):
        _, target, inner, w = parts(U)
        return float(
            (c - 2 * (w * target).sum(1) + np.einsum("tp,tpq,tq->t", w, inner, w)).sum()
            / 2
            / len(A)
        )

    @pymanopt.function.numpy(manifold)
    def gradient(U):
        AU, _, _, w = parts(U)
        return (np.einsum("tip,tp->ti", AU, w) - b).T @ w / len(A)

    peer = pymanopt.Problem(manifold, cost, euclidean_gradient=gradient)
    optimizer = pymanopt.optimizers.ConjugateGradient(verbosity=0, max_iterations=iterations)
    began = time.process_time()
    result = optimizer.run(peer, initial_point=x0.numpy())
    return result.cost, time.process_time() - began


def compare(name, data, plan, settings, repeats):
    step, damping = settings
    problem, x0 = plan.make(0)
    train, _ = subspace.split_rows(data.task, 0)
    rows = [
        (data.X[r], data.y[r])
        for r in (train[data.task[train] == t] for t in range(problem.n_samples))
    ]
    A, b, c = (
        v.numpy()
        for v in (problem.statistics.gram, problem.statistics.cross, problem.statistics.power)
    )
    reference = loop_pass(A, b, c, x0.numpy())
    found = full_pass(problem, x0)
    assert abs(float(found[0]) / reference[0] - 1) < 1e-9
    np.testing.assert_allclose(
        found[1].numpy(), reference[1], rtol=1e-6, atol=1e-7 * abs(reference[1]).max()
    )
    for function in (three_functions, row_pass):
        for got, expected in zip(function(rows, x0.numpy()), reference, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())
    ours = best_of(lambda: full_pass(problem, x0), 100 * repeats)
    U = x0.numpy()
    peer = best_of(lambda: three_functions(rows, U), 7 * repeats)
    row(f"{name}: one pass (loss, gradient, factors: three loops over tasks)", peer, ours)
    row(
        f"{name}: one pass (one loop over tasks, rows)",
        best_of(lambda: row_pass(rows, U), 7 * repeats),
        ours,
    )
    row(
        f"{name}: one pass (one loop over tasks, statistics)",
        best_of(lambda: loop_pass(A, b, c, U), 7 * repeats),
        ours,
    )

    epochs = plan.budget // 2
    n_tasks = len(A)
    samples = torch.randint(n_tasks, (epochs, n_tasks), generator=torch.Generator().manual_seed(0))
    options = {"max_iter": epochs, "step": step / n_tasks, "batch_size": 1, "stream": samples}
    settings = {
        "rank": 6,
        "ridge": RIDGE,
        "objective": "residual",
        "factor_damping": damping / n_tasks,
    }
    bare = Silent(problem.statistics, **settings)
    peer = best_of(
        lambda: numpy_run(A, b, x0.numpy(), epochs, samples.numpy(), step, damping), repeats
    )
    ours = best_of(lambda: minimize(bare, x0, "rngd-vr", **options), repeats)
    row(f"{name}: the paper's whole RNGD run, {epochs * n_tasks} steps (plain loop)", peer, ours)

    cost, seconds = pymanopt_run(problem, x0, plan.budget)
    tuned = {"step": step / n_tasks, "batch_size": 1, "sampling": "replacement"}
    methods = (("rcg", {}), ("rngd", {"fisher": "exact", "sigma": 1e-3}), ("rngd-vr", tuned))
    for method, extra in methods:
        began = time.process_time()
        result = minimize(bare, x0, method, max_iter=500, stop=LossBelow(cost), **extra)
        reached = "" if result.value <= cost else f" (not reached: {result.value:.6g})"
        row(
            f"{name}: to pymanopt RCG's loss {cost:.6g}, {method}{reached}",
            seconds,
            time.process_time() - began,
        )


class Silent(SubspaceProblem):
    """Without errors in the trace: the NumPy loop computes none either."""

    def metrics(self, x):
        return {}


def row(what, peer, ours):
    print(f"| {what} | {peer:.5f} | {ours:.5f} | {peer / ours:.2f} |", flush=True)


def options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--repeats", type=int, default=3, help="of runs, a hundred times as many of passes (3)"
    )
    parser.add_argument("--budget", type=int, help="passes of a run (as in the paper)")


def main(given: Namespace) -> None:
    school = subspace.school()
    sarcos = subspace.sarcos()
    if given.budget:
        school, sarcos = (dataclasses.replace(p, budget=given.budget) for p in (school, sarcos))
    print("| what | NumPy or pymanopt, CPU s | fisherfold, CPU s | ratio |\n|---|---|---|---|")
    compare("School", datasets.load_tasks("school"), school, (5.0, 1e-4), given.repeats)
    arm = datasets.load_tasks("sarcos_7x2000")
    arm = dataclasses.replace(arm, X=subspace.scaled_per_task(arm.X, arm.task))
    compare("Sarcos 7 x 2000", arm, sarcos, (1.0, 1e-6), given.repeats)
