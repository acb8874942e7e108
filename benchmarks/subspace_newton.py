"""Iterations and CPU time to ‖grad‖ ≤ 1e-9 on School, by the matrix that RNGD steps with, beside pymanopt.

    OMP_NUM_THREADS=1 python benchmarks/subspace_newton.py        (needs FISHERFOLD_DATA)

The penalised loss of ``SubspaceRegressor(inference="point")``, standardised features, targets of mean square 1, all
from the same start. The loss has several minima, and not all methods find the same. pymanopt's trust regions have our
Hessian, its conjugate gradients our cost and gradient.
"""

from __future__ import annotations

import time
import warnings

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fisherfold import datasets, minimize
from fisherfold.solvers import GradientNorm
from fisherfold.subspace.marginal import start
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.tasks import TaskStatistics

warnings.filterwarnings("ignore")
import pymanopt  # noqa: E402
from pymanopt.optimizers import ConjugateGradient, TrustRegions  # noqa: E402

torch.set_num_threads(1)
TOL, MOST = 1e-9, 1000


def school() -> TaskStatistics:
    data = datasets.load_tasks("school")
    x, y = (torch.as_tensor(np.asarray(part), dtype=torch.float64) for part in (data.X, data.y))
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-9)
    return TaskStatistics.from_rows(
        x, y - y.mean(), torch.as_tensor(data.task)
    ).with_unit_targets()[0]


def theirs(problem: SubspaceProblem, x0: torch.Tensor, optimizer: type) -> tuple[np.ndarray, int]:
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
    solver = optimizer(min_gradient_norm=TOL, max_iterations=MOST, min_step_size=0.0, verbosity=0)
    result = solver.run(task, initial_point=x0.numpy())
    return result.point, result.iterations


def main() -> None:
    statistics = school()
    ours = {
        "rngd, Kronecker (the paper's)": {"fisher": "kronecker"},
        "rngd, exact Fisher": {"fisher": "exact"},
        "rngd, Hessian": {"fisher": "observed"},
    }
    table = Table("rank", "ridge", "method", "iterations", "‖grad‖", "loss", "CPU s")
    for rank in (3, 6):
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
                given = {"sigma": 1e-3, **options} if "fisher" in options else options
                result = minimize(problem, x0, max_iter=MOST, stop=GradientNorm(TOL), **given)
                add(name, result.x, result.iterations, began)
            for name, optimizer in {
                "pymanopt CG": ConjugateGradient,
                "pymanopt TR": TrustRegions,
            }.items():
                began = time.process_time()
                point, iterations = theirs(problem, x0, optimizer)
                add(name, torch.from_numpy(np.ascontiguousarray(point)), iterations, began)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
