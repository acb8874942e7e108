"""Natural gradient against gradient, on one picture.

The same problem, the same start, iterations counted.

    python examples/natural_gradient.py natural_gradient.png

Poisson regression whose direction lies on a sphere, with features whose scales differ by a factor
of thirty. The Fisher information knows the scales, the gradient does not.
"""

from __future__ import annotations

import sys

import torch
from matplotlib.figure import Figure

from fisherfold import NLLProblem, Poisson, minimize
from fisherfold.manifolds import Sphere
from fisherfold.solvers import GradientNorm


def main() -> Figure:
    """Minimise with four methods and draw how far each is from the lowest loss."""
    generator = torch.Generator().manual_seed(0)
    sphere = Sphere(20)
    scales = torch.logspace(0, -1.5, 20, dtype=torch.float64)
    x = 2 * torch.randn(500, 20, generator=generator, dtype=torch.float64) * scales
    y = torch.poisson(
        torch.exp(3 + x @ sphere.random_point(generator=generator)), generator=generator
    )
    problem = NLLProblem(sphere, lambda x, w: 3 + x @ w, Poisson(), x, y)
    start = sphere.random_point(generator=generator)

    runs = {
        "natural gradient (rngd)": minimize(problem, start, "rngd", stop=GradientNorm(1e-8)),
        "conjugate gradient (rcg)": minimize(
            problem, start, "rcg", max_iter=150, stop=GradientNorm(1e-8)
        ),
        "gradient, line search (rgd)": minimize(
            problem, start, "rgd", max_iter=150, stop=GradientNorm(1e-8)
        ),
        "stochastic gradient (rsgd)": minimize(
            problem, start, "rsgd", max_iter=150, step=1e-3, batch_size=50
        ),
    }
    lowest = min(result.value for result in runs.values())
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    panel = figure.subplots()
    for (name, result), style in zip(runs.items(), ("-", "--", "-.", ":"), strict=True):
        print(
            f"{name:30} {result.iterations:4d} iterations, {result.value - lowest:.1e} above the "
            "lowest loss"
        )
        loss = torch.tensor(result.trace["loss"], dtype=torch.float64)
        panel.semilogy(
            result.trace["iteration"], (loss - lowest).clamp(min=1e-16), style, label=name
        )
    panel.set(xlabel="iteration", ylabel="loss above the lowest found")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "natural_gradient.png", dpi=100)
