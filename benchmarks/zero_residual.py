"""Zero-residual nonlinear regression: rngd with the exact RFIM converges quadratically, beside first-order methods.

python benchmarks/zero_residual.py
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from fisherfold import Gaussian, NLLProblem, minimize
from fisherfold.manifolds import Grassmann, Manifold, Sphere, Stiefel
from fisherfold.solvers import GradientNorm, Result

METHODS = {
    "rngd": {},
    "rcg": {},
    "rgd": {},
    "rsvrg": {"step": 1.0, "batch_size": 20},
    "rsgd": {"step": 1.0, "batch_size": 20},
}
PASSES = 200


def problem_on(manifold: Manifold, seed: int) -> tuple[NLLProblem, torch.Tensor]:
    """A model that the truth fits exactly, and a start some way off."""
    generator = torch.Generator().manual_seed(seed)
    truth = manifold.random_point(generator=generator)
    x = (
        torch.randn(400, truth.shape[0], generator=generator, dtype=torch.float64)
        / truth.shape[0] ** 0.5
    )

    def model(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        if isinstance(manifold, Grassmann):  # a function of the subspace alone
            projected = x @ theta @ theta.mT
            return torch.sin(2 * projected[:, :4]) + (x @ theta).square().sum(-1, keepdim=True)
        return torch.tanh(2 * (x @ theta))

    start = manifold.retract(truth, 0.5 * manifold.random_tangent(truth, generator=generator))
    return NLLProblem(manifold, model, Gaussian(), x, model(x, truth)), start


def order(result: Result) -> float:
    """The observed order q of ‖g_{k+1}‖ ≈ C ‖g_k‖^q: the slope over the last half of the steps above rounding."""
    norms = torch.tensor(
        [g for g in result.trace["gradient_norm"] if g > 1e-16], dtype=torch.float64
    ).log()
    norms = norms[-max(4, len(norms) // 2) :]
    before, after = norms[:-1] - norms[:-1].mean(), norms[1:] - norms[1:].mean()
    return float((before * after).sum() / before.square().sum())


def main() -> None:
    table = Table(
        title="Zero-residual regression: to a gradient norm of 1e-12 (median of three starts)"
    )
    figures = (
        "iterations",
        "sample gradients / N",
        "Fisher products / N",
        "‖grad‖ at the end",
        "observed order",
    )
    for column in ("manifold", "method", *figures):
        table.add_column(column, justify="left" if column in {"manifold", "method"} else "right")
    for manifold in (Sphere(50), Stiefel(50, 4), Grassmann(50, 4)):
        for name, options in METHODS.items():
            runs = []
            for seed in range(3):
                problem, start = problem_on(manifold, seed)
                runs.append(
                    minimize(
                        problem, start, name, max_iter=PASSES, stop=GradientNorm(1e-12), **options
                    )
                )
            run = sorted(runs, key=lambda r: (not r.success, r.trace["samples"][-1]))[1]
            table.add_row(
                str(manifold),
                name,
                f"{run.iterations}{'' if run.success else ' (not reached)'}",
                f"{run.trace['samples'][-1] / problem.n_samples:.0f}",
                f"{run.trace['products'][-1] / problem.n_samples:.0f}",
                f"{run.trace['gradient_norm'][-1]:.1e}",
                f"{order(run):.2f}",
            )
    Console(width=130).print(table)
    print(
        "order 2 is quadratic, 1 linear; rngd solves by Jacobian rows where they fit and by CG products where not"
    )


if __name__ == "__main__":
    main()
