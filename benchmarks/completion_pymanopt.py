"""CPU seconds to the minimum of the plain completion cost within 1e-8.

pymanopt gets *our* kernels for cost, gradient and Hessian, so that only the methods differ; it
works on NumPy arrays, which share memory with the tensors. Same start (the zero-filled SVD), one
thread, CPU time until the loss lies within 1e-8 of the best that anyone reached, relative.
Jester-1, and a synthetic table of 4000 × 3000 at 2 % with noise.

Against: pymanopt's ConjugateGradient and TrustRegions on our kernels
Takes: four minutes
Page: docs/benchmarks/completion.md
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

import numpy as np
import pymanopt
import torch
from pymanopt.manifolds import Grassmann
from pymanopt.optimizers import ConjugateGradient, TrustRegions
from rich.console import Console
from rich.table import Table

from fisherfold import datasets, minimize
from fisherfold.completion import CompletionProblem, Ratings
from fisherfold.solvers import GradientNorm

SMOKE = "--shape 60x40 --iterations 4"


def cases(rows: int, columns: int) -> dict[str, CompletionProblem]:
    data = datasets.load_ratings("jester1")
    real = Ratings(data.rows, data.cols, data.values, data.shape)
    rng = np.random.default_rng(0)
    seen = np.nonzero(rng.random((rows, columns)) < max(0.02, 12 / columns))
    left = rng.standard_normal((rows, 5))
    right = rng.standard_normal((columns, 5))
    values = (left[seen[0]] * right[seen[1]]).sum(1) + 0.3 * rng.standard_normal(len(seen[0]))
    return {
        "Jester-1, rank 3": CompletionProblem(real, 3),
        "synthetic, rank 5": CompletionProblem(Ratings(*seen, values, (rows, columns)), 5),
    }


class Recorder:
    """CPU seconds and loss at every evaluation of the cost."""

    def __init__(self, problem: CompletionProblem) -> None:
        self.problem = problem
        self.began = time.process_time()
        self.curve = []

    def cost(self, u: np.ndarray) -> float:
        value = float(self.problem.loss(torch.from_numpy(u)))
        self.curve.append((time.process_time() - self.began, value))
        return value


def with_pymanopt(
    problem: CompletionProblem, start: torch.Tensor, optimizer: object
) -> list[tuple[float, float]]:
    manifold = Grassmann(*start.shape)
    recorder = Recorder(problem)
    cache: dict = {}

    def point(u: np.ndarray) -> torch.Tensor:
        if cache.get("u") is not u:
            cache.update(u=u, x=torch.from_numpy(u), operator=None)
        return cache["x"]

    @pymanopt.function.numpy(manifold)
    def cost(u: np.ndarray) -> float:
        return recorder.cost(u)

    @pymanopt.function.numpy(manifold)
    def gradient(u: np.ndarray) -> np.ndarray:
        return problem.gradient(point(u)).numpy()

    @pymanopt.function.numpy(manifold)
    def hessian(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        x = point(u)
        if cache["operator"] is None:
            cache["operator"] = problem.fisher(x, kind="observed")
        return cache["operator"]._matvec(torch.from_numpy(v)).numpy()

    cost_problem = pymanopt.Problem(
        manifold, cost, riemannian_gradient=gradient, riemannian_hessian=hessian
    )
    optimizer.run(cost_problem, initial_point=start.numpy().copy())
    return recorder.curve


def with_ours(
    problem: CompletionProblem, start: torch.Tensor, stages: list[tuple[str, int]]
) -> list[tuple[float, float]]:
    began = time.process_time()
    curve = []
    x = start
    for kind, most in stages:
        result = minimize(
            problem,
            x,
            "rngd",
            fisher=kind,
            max_iter=most,
            stop=GradientNorm(1e-7),
            sigma=1e-6,
            sigma_min=1e-16,
            callback=lambda state: curve.append((time.process_time() - began, state.loss)) and None,
        )
        x = result.x
    return curve


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", default="4000x3000", help="of the synthetic table (4000x3000)")
    parser.add_argument("--iterations", type=int, default=400, help="of every method (400)")


def main(given: Namespace) -> None:
    table = Table(title="CPU seconds to the least loss within 1e-8, one thread, float64")
    for name in ("data", "method", "CPU s", "least loss - best"):
        table.add_column(name, justify="left" if name in {"data", "method"} else "right")
    most = given.iterations
    for name, problem in cases(*map(int, given.shape.split("x"))).items():
        start = problem.spectral_start()
        limits = {"max_iterations": most, "max_time": 60, "min_gradient_norm": 1e-7, "verbosity": 0}
        runs = {
            "pymanopt ConjugateGradient": with_pymanopt(
                problem, start, ConjugateGradient(**limits)
            ),
            "pymanopt TrustRegions (our Hessian)": with_pymanopt(
                problem, start, TrustRegions(**limits)
            ),
            "fisherfold rngd, row-block": with_ours(problem, start, [("row-block", most)]),
            "fisherfold rngd, exact": with_ours(problem, start, [("exact", min(most, 200))]),
            "fisherfold rngd, row-block then observed": with_ours(
                problem, start, [("row-block", 15), ("observed", min(most, 60))]
            ),
        }
        best = min(loss for curve in runs.values() for _, loss in curve)
        for label, curve in runs.items():
            least = min(loss for _, loss in curve)
            hit = next(
                (f"{seconds:.2f}" for seconds, loss in curve if loss <= best * (1 + 1e-8)),
                "not reached",
            )
            table.add_row(name, label, hit, f"{least - best:.1e}")
        table.add_section()
    Console(width=110).print(table)
