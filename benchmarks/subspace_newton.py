"""Iterations and time to the minimum of the point loss on School.

The penalised loss of ``SubspaceRegressor(inference="point")``, standardised features, targets of
mean square 1, all from the same start. The loss has several minima, and not all methods find the
same. pymanopt's trust regions have our Hessian, its conjugate gradients our cost and gradient.

Against: pymanopt's ConjugateGradient and TrustRegions
Takes: two minutes
Page: docs/benchmarks/subspace.md
"""

from __future__ import annotations

import time
import warnings
from argparse import ArgumentParser, Namespace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks._common import integers
from fisherfold import datasets, minimize
from fisherfold.solvers import GradientNorm
from fisherfold.subspace.marginal import start
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.tasks import TaskStatistics

warnings.filterwarnings("ignore")
import pymanopt  # noqa: E402
from pymanopt.optimizers import ConjugateGradient, TrustRegions  # noqa: E402

SMOKE = "--ranks 3 --most 10"

TOL = 1e-9


def school() -> TaskStatistics:
    data = datasets.load_tasks("school")
    x, y = (torch.as_tensor(np.asarray(part), dtype=torch.float64) for part in (data.X, data.y))
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-9)
    return TaskStatistics.from_rows(
        x, y - y.mean(), torch.as_tensor(data.task)
    ).with_unit_targets()[0]


def theirs(
    problem: SubspaceProblem, x0: torch.Tensor, optimizer: type, most: int
) -> tuple[np.ndarray, int]:
    n, p = x0.shape
    manifold = pymanopt.manifolds.Grassmann(n, p)

    @pymanopt.function.numpy(manifold)
    def cost(u: np.ndarray) -> float:
        return float(problem.loss(torch.from_numpy(np.ascontiguousarray(u))))

    @pymanopt.function.numpy(manifold)
    def gradient(u: np.ndarray) -> np.ndarray:
        return problem.gradient(torch.from_numpy(np.ascontiguousarray(u))).numpy()

    @pymanopt.function.numpy(manifold)
    def hessian(u: np.ndarray, h: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(np.ascontiguousarray(u))
        return (
            problem.fisher(x, kind="observed") @ problem.manifold.project(x, torch.from_numpy(h))
        ).numpy()

    task = pymanopt.Problem(
        manifold, cost, riemannian_gradient=gradient, riemannian_hessian=hessian
    )
    solver = optimizer(min_gradient_norm=TOL, max_iterations=most, min_step_size=0.0, verbosity=0)
    result = solver.run(task, initial_point=x0.numpy())
    return result.point, result.iterations


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=integers, default=[3, 6], help="(3,6)")
    parser.add_argument("--most", type=int, default=1000, help="iterations (1000)")


def main(given: Namespace) -> None:
    statistics = school()
    ours = {
        "rngd, Kronecker (the paper's)": {"fisher": "kronecker"},
        "rngd, exact Fisher": {"fisher": "exact"},
        "rngd, Hessian": {"fisher": "observed"},
    }
    table = Table("rank", "ridge", "method", "iterations", "‖grad‖", "loss", "CPU s")
    for rank in given.ranks:
        for ridge in (0.1, 3.0, 30.0):
            problem = SubspaceProblem(statistics, rank=rank, ridge=ridge)
            x0 = start(statistics, rank=rank).frame

            def add(
                name: str,
                x: torch.Tensor,
                iterations: int,
                began: float,
                problem=problem,
                key=(rank, ridge),
            ):
                spent = time.process_time() - began
                norm = float(problem.manifold.norm(x, problem.gradient(x)))
                row = (
                    *key,
                    name,
                    iterations,
                    f"{norm:.0e}",
                    f"{float(problem.loss(x)):.6f}",
                    f"{spent:.2f}",
                )
                table.add_row(*map(str, row))

            for name, options in (ours | {"rcg": {"method": "rcg"}}).items():
                began = time.process_time()
                settings = {"sigma": 1e-3, **options} if "fisher" in options else options
                result = minimize(
                    problem, x0, max_iter=given.most, stop=GradientNorm(TOL), **settings
                )
                add(name, result.x, result.iterations, began)
            for name, optimizer in {
                "pymanopt CG": ConjugateGradient,
                "pymanopt TR": TrustRegions,
            }.items():
                began = time.process_time()
                point, iterations = theirs(problem, x0, optimizer, given.most)
                add(name, torch.from_numpy(np.ascontiguousarray(point)), iterations, began)
    Console(width=110).print(table)
