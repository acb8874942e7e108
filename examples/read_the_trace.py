"""Reading a trace: what the columns of a run say, and how to see that a derivative is wrong.

    python examples/read_the_trace.py read_the_trace.png

Algorithm 1 damps its step by σ‖grad Ψ‖ and compares the decrease that its model promised with the
one it got, ρ. Near 1 the model is trusted and σ falls; below η₁ the trial is rejected and σ grows.
Here labels are noisy and features weak, so half of the trials are rejected.
"""

from __future__ import annotations

import sys

import torch
from matplotlib.figure import Figure

from fisherfold import Categorical, NLLProblem, check_gradient, minimize
from fisherfold.manifolds import Stiefel
from fisherfold.solvers import GradientNorm


def main() -> Figure:
    """Minimise, print the trace, draw it, and doubt a wrong gradient."""
    generator = torch.Generator().manual_seed(0)
    frames = Stiefel(20, 3)
    x = 3 * torch.randn(500, 20, generator=generator, dtype=torch.float64)
    x = x * torch.logspace(0, -1.5, 20, dtype=torch.float64)
    truth = frames.random_point(generator=generator)
    y = torch.multinomial(torch.softmax(x @ truth, -1), 1, generator=generator)[:, 0]
    problem = NLLProblem(frames, lambda x, w: x @ w, Categorical(), x, y)
    start = frames.random_point(generator=generator)
    result = minimize(problem, start, "rngd", stop=GradientNorm(1e-7))
    print(result)
    table = result.trace.to_polars().select(
        "iteration", "loss", "gradient_norm", "rho", "sigma", "accepted"
    )
    print(table.head(6), table.tail(4), sep="\n")

    class Wrong(NLLProblem):
        def loss_and_gradient(self, x, batch=None):
            loss, gradient = super().loss_and_gradient(x, batch)
            return loss, 1.01 * gradient

    wrong = Wrong(frames, problem.model, problem.likelihood, problem.inputs, problem.targets)
    print("ours:             ", check_gradient(problem))
    print("one per cent off: ", check_gradient(wrong))

    trace = result.trace
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for panel, column, label in zip(
        figure.subplots(1, 3),
        ("gradient_norm", "rho", "sigma"),
        ("‖grad Ψ‖", "ρ", "σ"),
        strict=True,
    ):
        panel.plot(trace["iteration"], trace[column], ".-", color="#0072b2")
        refused = [row for row in trace if row.get("accepted") == 0]
        where = [row["iteration"] for row in refused]
        panel.plot(where, [row[column] for row in refused], "x", color="#d55e00", label="refused")
        panel.set(xlabel="iteration", ylabel=label, yscale="linear" if column == "rho" else "log")
        panel.grid(alpha=0.3)
        if column == "rho":
            panel.set_ylim(-2, 3)
            panel.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "read_the_trace.png", dpi=100)
