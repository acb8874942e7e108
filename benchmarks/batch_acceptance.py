"""Algorithm 1 on batches: the acceptance test on the gradient's own batch and on a second one.

Logistic regression on Sphere(20), N = 2000. σ₀ is chosen by the method; the loss is that over all
samples, in excess of its minimum, at the last iterate; its gain is that of the same seed with one
batch for both over it.

Against: the same method with one batch for both
Takes: half a minute
Page: docs/benchmarks/core.md
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from statistics import median

import torch

from benchmarks._common import show, table
from fisherfold import Bernoulli, NLLProblem, Result, minimize
from fisherfold.manifolds import Sphere
from fisherfold.solvers import GradientNorm

SMOKE = "--seeds 2 --iterations 10"
BATCH_SIZES = (30, 100, 400)
COLUMNS = (
    "batch",
    "ρ on",
    "accepted",
    "of these raise Ψ",
    "final excess loss",
    "median",
    "σ first; final",
    "gain: least, median",
    "σ max/min, 2nd half",
)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5, help="draws of the data (5)")
    parser.add_argument("--iterations", type=int, default=150, help="of every run (150)")


def main(given: Namespace) -> None:
    problems = [make(seed) for seed in range(given.seeds)]
    least = [minimize(problem, start).value for problem, start in problems]
    shown = table(
        f"rngd on batches, {given.iterations} iterations, {given.seeds} seeds", COLUMNS, left=0
    )
    for size in BATCH_SIZES:
        against: list[float] = []
        for label, test in (("same batch", "same"), ("second batch", None)):
            runs = [
                minimize(
                    problem,
                    start,
                    batch_size=size,
                    test_batch=test,
                    max_iter=given.iterations,
                    seed=seed,
                    stop=GradientNorm(0.0),
                )
                for seed, (problem, start) in enumerate(problems)
            ]
            cells, against = row(runs, least, against)
            shown.add_row(str(size), label, *cells)
    show(shown)


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
    """The cells of one setting over its seeds, and the excess losses."""
    shares = [sum(run.trace["accepted"][1:]) / (len(run.trace["accepted"]) - 1) for run in runs]
    raised = [share_of_rises(run) for run in runs]
    excess = [run.trace["loss"][-1] - best for run, best in zip(runs, least, strict=True)]
    first = [run.trace["sigma"][1] for run in runs]
    last = [run.trace["sigma"][-1] for run in runs]
    drift = [drift_of_damping(run.trace["sigma"][1:]) for run in runs]
    gains = [other / own for other, own in zip(against or excess, excess, strict=True)]
    cells = [
        f"{min(shares):.0%}–{max(shares):.0%}",
        f"{min(raised):.0%}–{max(raised):.0%}",
        f"{min(excess):.2g}–{max(excess):.2g}",
        f"{median(excess):.2g}",
        f"{median(first):.0e}; {min(last):.0e}–{max(last):.0e}",
        f"{min(gains):.2g}, {median(gains):.2g}",
        f"{min(drift):.0e}–{max(drift):.0e}",
    ]
    return cells, excess


def share_of_rises(run: Result) -> float:
    """The share of accepted steps after which the loss over all samples is higher."""
    losses = run.trace["loss"]
    accepted = run.trace["accepted"][1:]
    changes = [
        after - before
        for before, after, taken in zip(losses, losses[1:], accepted, strict=False)
        if taken
    ]
    return sum(change > 0 for change in changes) / max(1, len(changes))


def drift_of_damping(sigma: list[float]) -> float:
    """The largest σ over the least one in the second half of a run."""
    late = sigma[len(sigma) // 2 :]
    return max(late) / min(late)
