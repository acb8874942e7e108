"""Algorithm 1 on batches: the acceptance test on the batch of the gradient itself, and on an independent one.

    python benchmarks/batch_acceptance.py

Logistic regression on Sphere(20), N = 2000, 150 iterations. σ₀ is chosen by the method; the loss is that over all
samples, in excess of its minimum, at the last iterate; its gain is that of the same seed with one batch for both over
it.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from fisherfold import Bernoulli, NLLProblem, Result, minimize
from fisherfold.manifolds import Sphere
from fisherfold.solvers import GradientNorm

torch.set_num_threads(1)


def make(seed: int) -> tuple[NLLProblem, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    manifold = Sphere(20)
    truth, start = (manifold.random_point(generator=generator) for _ in range(2))
    x = torch.randn(2000, 20, generator=generator, dtype=torch.float64)
    y = torch.bernoulli(torch.sigmoid(3 * x @ truth), generator=generator)
    return NLLProblem(manifold, lambda x, w: 3 * x @ w, Bernoulli(), x, y), start


def row(
    runs: list[Result], least: list[float], against: list[float]
) -> tuple[list[str], list[float]]:
    shares, raised, excess, first, sigmas, drift = [], [], [], [], [], []
    for run, best in zip(runs, least, strict=True):
        accepted, losses, sigma = (
            run.trace["accepted"][1:],
            run.trace["loss"],
            run.trace["sigma"][1:],
        )
        shares.append(sum(accepted) / len(accepted))
        taken = [
            after - before
            for before, after, a in zip(losses, losses[1:], accepted, strict=False)
            if a
        ]
        raised.append(sum(change > 0 for change in taken) / max(1, len(taken)))
        excess.append(losses[-1] - best)
        first.append(sigma[0])
        sigmas.append(sigma[-1])
        late = sigma[len(sigma) // 2 :]
        drift.append(max(late) / min(late))
    gains = [other / own for other, own in zip(against or excess, excess, strict=True)]
    cells = [
        f"{min(shares):.0%}–{max(shares):.0%}",
        f"{min(raised):.0%}–{max(raised):.0%}",
        f"{min(excess):.2g}–{max(excess):.2g}",
        f"{median(excess):.2g}",
        f"{median(first):.0e}; {min(sigmas):.0e}–{max(sigmas):.0e}",
        f"{min(gains):.2g}, {median(gains):.2g}",
        f"{min(drift):.0e}–{max(drift):.0e}",
    ]
    return cells, excess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=150)
    parsed = parser.parse_args()
    problems = [make(seed) for seed in range(parsed.seeds)]
    least = [minimize(problem, start).value for problem, start in problems]
    table = Table(title=f"rngd on batches, {parsed.iterations} iterations, {parsed.seeds} seeds")
    columns = (
        "accepted",
        "of these raise Ψ",
        "final excess loss",
        "median",
        "σ first; final",
        "gain: least, median",
        "σ max/min, 2nd half",
    )
    for name in ("batch", "ρ on", *columns):
        table.add_column(name, justify="right")
    for size in (30, 100, 400):
        against: list[float] = []
        for label, test in (("same batch", "same"), ("second batch", None)):
            runs = [
                minimize(
                    problem,
                    start,
                    batch_size=size,
                    test_batch=test,
                    max_iter=parsed.iterations,
                    seed=seed,
                    stop=GradientNorm(0.0),
                )
                for seed, (problem, start) in enumerate(problems)
            ]
            cells, against = row(runs, least, against)
            table.add_row(str(size), label, *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
