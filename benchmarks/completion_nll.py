"""Low-rank completion as a plain NLLProblem, differentiated automatically.

The cost is (1/2N) Σ ‖P_i(U a_i(U) - x_i)‖² on Gr(n, p), the coefficients a_i by ridge-free least
squares inside the model; gradients by automatic differentiation on both sides; one thread; times
are the best of three runs in turn. A pass is one forward or one backward sweep over the data: a
loss 1, a gradient 2, a Fisher product 2 and an operator 1 (the graph of its transpose); pymanopt's
Hessian products count as gradients, which flatters TrustRegions.

Against: pymanopt's ConjugateGradient and TrustRegions on the same cost
Takes: five minutes
Page: docs/benchmarks/core.md
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

import numpy as np
import pymanopt
import torch
from pymanopt.manifolds import Grassmann as PymanoptGrassmann
from pymanopt.optimizers import ConjugateGradient, TrustRegions
from rich.console import Console
from rich.table import Table

from fisherfold import Gaussian, NLLProblem, minimize
from fisherfold.manifolds import Grassmann
from fisherfold.solvers import GradientNorm

SMOKE = "--small --rounds 1 --columns 50"


class Completion:
    """Residuals of all columns for a basis U, counting the sweeps over the data."""

    def __init__(
        self, n: int, p: int, columns: int, observed: float, noise: float, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.manifold = Grassmann(n, p)
        truth = self.manifold.random_point(generator=generator)
        full = torch.randn(columns, p, generator=generator, dtype=torch.float64) @ truth.mT * n**0.5
        full += noise * torch.randn(columns, n, generator=generator, dtype=torch.float64)
        mask = (torch.rand(columns, n, generator=generator) < observed).double()
        self.inputs = torch.stack([mask, mask * full], dim=1)
        self.start = self.manifold.random_point(generator=generator)
        self.passes = 0

    def model(self, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        self.passes += 2 if u.requires_grad else 1
        mask = x[:, 0]
        values = x[:, 1]
        p = u.shape[1]
        gram = (mask @ (u.unsqueeze(2) * u.unsqueeze(1)).reshape(-1, p * p)).reshape(-1, p, p)
        coefficients = torch.linalg.solve(gram, (values @ u).unsqueeze(-1)).squeeze(-1)
        return mask * (coefficients @ u.mT) - values

    def problem(self) -> NLLProblem:
        return NLLProblem(
            self.manifold, self.model, Gaussian(), self.inputs, torch.zeros_like(self.inputs[:, 0])
        )


def ours(case: Completion, method: str) -> tuple[np.ndarray, float]:
    problem = case.problem()
    problem.loss(case.start)
    case.passes = 0  # the first evaluation looks at a few samples alone, which is no pass
    result = minimize(problem, case.start, method, max_iter=500, stop=GradientNorm(1e-9))
    # the model counted the gradients; an operator takes over the graph of the gradient at the same
    # point and adds that of its transpose, and its products sweep both
    products = result.trace["products"][-1] // len(case.inputs)
    case.passes += 2 * products + (result.iterations if products else 0)
    return result.x.numpy(), result.trace["gradient_norm"][-1]


def theirs(case: Completion, optimizer: type) -> tuple[np.ndarray, float]:
    manifold = PymanoptGrassmann(*case.start.shape)

    @pymanopt.function.pytorch(manifold)
    def cost(u: torch.Tensor) -> torch.Tensor:
        return case.model(case.inputs, u).square().sum() / (2 * len(case.inputs))

    problem = pymanopt.Problem(manifold, cost)
    options = {"verbosity": 0, "max_iterations": 500, "min_gradient_norm": 1e-9, "max_time": 120}
    result = optimizer(**options).run(problem, initial_point=case.start.numpy())
    return result.point, float(np.linalg.norm(problem.riemannian_gradient(result.point)))


# n, p, the share that is observed, and the noise
PROBLEMS = ((100, 5, 0.35, 0.1), (1000, 10, 0.15, 0.1))
RUNS = {
    "fisherfold rngd": lambda case: ours(case, "rngd"),
    "fisherfold rcg": lambda case: ours(case, "rcg"),
    "pymanopt ConjugateGradient": lambda case: theirs(case, ConjugateGradient),
    "pymanopt TrustRegions": lambda case: theirs(case, TrustRegions),
}


def options(parser: ArgumentParser) -> None:
    about = "only the small problem, Gr(100, 5)"
    parser.add_argument("--small", action="store_true", help=about)
    parser.add_argument("--columns", type=int, default=1000, help="N (1000)")
    parser.add_argument("--rounds", type=int, default=3, help="of all methods in turn (3)")


def main(given: Namespace) -> None:
    table = Table(title="Completion on the Grassmann manifold, to a gradient norm of 1e-9")
    figures = (
        "passes",
        "loss above the lowest",
        "‖grad‖",
        "CPU seconds",
        "over pymanopt CG",
        "over pymanopt TR",
    )
    for name in ("problem", "solver", *figures):
        table.add_column(name, justify="left" if name in {"problem", "solver"} else "right")
    columns = given.columns
    for n, p, observed, noise in PROBLEMS[:1] if given.small else PROBLEMS:
        seconds: dict[str, list[float]] = {name: [] for name in RUNS}
        points = {}
        counts = {}
        for _ in range(given.rounds):
            for name, run in RUNS.items():
                case = Completion(n, p, columns, observed, noise)
                began = time.process_time()
                points[name] = run(case)
                seconds[name].append(time.process_time() - began)
                counts[name] = case.passes
        case = Completion(n, p, columns, observed, noise)
        losses = {
            name: float(case.problem().loss(torch.tensor(point)))
            for name, (point, _) in points.items()
        }
        lowest = min(losses.values())
        best = {name: min(times) for name, times in seconds.items()}
        for name in RUNS:
            table.add_row(
                f"Gr({n}, {p}), N = {columns}, noise {noise}",
                name,
                str(counts[name]),
                f"{losses[name] - lowest:.1e}",
                f"{points[name][1]:.1e}",
                f"{best[name]:.2f}",
                f"{best[name] / best['pymanopt ConjugateGradient']:.2f}",
                f"{best[name] / best['pymanopt TrustRegions']:.2f}",
            )
    Console(width=130).print(table)
