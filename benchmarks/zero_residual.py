"""Zero-residual regression: rngd with the exact RFIM converges quadratically.

Runs to a gradient norm of 1e-12, the median of three starts. Order 2 is quadratic, 1 linear; rngd
solves by Jacobian rows where they fit and by CG products where not.

Against: our Riemannian CG, gradient descent, RSVRG and RSGD
Takes: half a minute
Page: docs/benchmarks/core.md
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import torch

from benchmarks._common import show, table
from fisherfold import Gaussian, NLLProblem, minimize
from fisherfold.manifolds import Grassmann, Manifold, Sphere, Stiefel
from fisherfold.solvers import GradientNorm, Result

SMOKE = "--starts 1 --iterations 5"
METHODS = {
    "rngd": {},
    "rcg": {},
    "rgd": {},
    "rsvrg": {"step": 1.0, "batch_size": 20},
    "rsgd": {"step": 1.0, "batch_size": 20},
}
MANIFOLDS = (Sphere(50), Stiefel(50, 4), Grassmann(50, 4))
# below this a gradient is rounding
ROUNDING = 1e-16
COLUMNS = (
    "manifold",
    "method",
    "iterations",
    "sample gradients / N",
    "Fisher products / N",
    "‖grad‖ at the end",
    "observed order",
)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--starts", type=int, default=3, help="of every method (3)")
    parser.add_argument("--iterations", type=int, default=200, help="at most (200)")


def main(given: Namespace) -> None:
    title = f"To a gradient norm of 1e-12 (median of {given.starts} starts)"
    shown = table(title, COLUMNS, left=2)
    for manifold in MANIFOLDS:
        for name, settings in METHODS.items():
            runs = []
            for seed in range(given.starts):
                problem, start = problem_on(manifold, seed)
                stop = GradientNorm(1e-12)
                runs.append(
                    minimize(problem, start, name, max_iter=given.iterations, stop=stop, **settings)
                )
            runs.sort(key=lambda result: (not result.success, result.trace["samples"][-1]))
            run = runs[len(runs) // 2]
            shown.add_row(
                str(manifold),
                name,
                f"{run.iterations}{'' if run.success else ' (not reached)'}",
                f"{run.trace['samples'][-1] / problem.n_samples:.0f}",
                f"{run.trace['products'][-1] / problem.n_samples:.0f}",
                f"{run.trace['gradient_norm'][-1]:.1e}",
                f"{order(run):.2f}",
            )
    show(shown)


def problem_on(manifold: Manifold, seed: int) -> tuple[NLLProblem, torch.Tensor]:
    """A model that the truth fits exactly, and a start some way off."""
    generator = torch.Generator().manual_seed(seed)
    truth = manifold.random_point(generator=generator)
    x = torch.randn(400, truth.shape[0], generator=generator, dtype=torch.float64)
    x /= truth.shape[0] ** 0.5

    def model(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        if isinstance(manifold, Grassmann):  # a function of the subspace alone
            projected = x @ theta @ theta.mT
            return torch.sin(2 * projected[:, :4]) + (x @ theta).square().sum(-1, keepdim=True)
        return torch.tanh(2 * (x @ theta))

    start = manifold.retract(truth, 0.5 * manifold.random_tangent(truth, generator=generator))
    return NLLProblem(manifold, model, Gaussian(), x, model(x, truth)), start


def order(result: Result) -> float:
    """The order q of ‖g_{k+1}‖ ≈ C ‖g_k‖^q: the slope over the last half of the steps."""
    above = [norm for norm in result.trace["gradient_norm"] if norm > ROUNDING]
    norms = torch.tensor(above, dtype=torch.float64).log()
    norms = norms[-max(4, len(norms) // 2) :]
    before = norms[:-1] - norms[:-1].mean()
    after = norms[1:] - norms[1:].mean()
    return float((before * after).sum() / before.square().sum())
