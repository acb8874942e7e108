"""How many passes over the data each Fisher matrix needs to the plain optimum of completion, in both orientations.

    FISHERFOLD_DATA=... python benchmarks/completion_passes.py [--quick] [--only jester]

A pass is one loss-and-gradient over all ratings, or one exact Fisher product. For each kind: outer iterations and
passes until the training MSE lies within 1 % of the best that any kind found, and until ‖grad‖ ≤ 1e-10. ``kronecker``
takes the paper's fixed full-batch step 1; the others are Algorithm 1; all start from the zero-filled SVD.
``gauss-newton, observed`` makes three iterations with the Gauss-Newton matrix, then goes on with the Hessian. The last
table is the plain problem at growing rank with its held-out RMSE, clipped: without a ridge, more rank predicts worse.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fisherfold import datasets, minimize
from fisherfold.completion import CompletionProblem, Ratings
from fisherfold.solvers import GradientNorm

torch.set_num_threads(1)
TOLERANCE = 1e-10


def real(name: str) -> tuple[Ratings, Ratings, tuple[float, float]]:
    data = datasets.load_ratings(name)
    held = np.random.default_rng(0).random(len(data.values)) < 0.2
    parts = [Ratings(data.rows[p], data.cols[p], data.values[p], data.shape) for p in (~held, held)]
    return parts[0], parts[1], (float(data.values.min()), float(data.values.max()))


def synthetic(n: int, rank: int, per_row: int, noise: float) -> Ratings:
    """A low-rank n×n matrix with noise, ``per_row`` random entries in each row."""
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((n, rank)), rng.standard_normal((n, rank))
    flat = np.unique(np.repeat(np.arange(n), per_row) * n + rng.integers(0, n, n * per_row))
    rows, columns = flat // n, flat % n
    values = np.einsum("ij,ij->i", left[rows], right[columns]) + noise * rng.standard_normal(len(rows))
    return Ratings(rows, columns, values, (n, n))


def run(problem: CompletionProblem, kind: str, limit: int, seconds: float) -> dict:
    x = problem.spectral_start()
    began = time.process_time()
    options: dict = {"step": 1.0} if kind == "kronecker" else {"sigma": 1e-6, "sigma_min": 1e-16, "forcing": 0.1}

    def out_of_time(_: object) -> bool:
        return time.process_time() - began > seconds

    rows: list[dict[str, float]] = []
    stages = [("gauss-newton", 3), ("observed", limit)] if kind == "gauss-newton, observed" else [(kind, limit)]
    for stage, most in stages:
        if stage == "observed":
            # the Hessian may be indefinite yet: let the first damping follow its own curvature
            options.pop("sigma")
        result = minimize(
            problem,
            x,
            "rngd",
            fisher=stage,
            max_iter=most,
            stop=GradientNorm(TOLERANCE),
            callback=out_of_time,
            **options,
        )
        x, done = result.x, rows[-1] if rows else {"samples": 0.0, "products": 0.0}
        fresh = result.trace.rows[1:] if rows else result.trace.rows
        rows += [r | {c: r[c] + done[c] for c in ("samples", "products")} for r in fresh]
    work = [(r["samples"] + r["products"]) / problem.n_samples for r in rows]
    return {
        "train": [r["train"] for r in rows],
        "norm": [r["gradient_norm"] for r in rows],
        "passes": work,
        "seconds": time.process_time() - began,
    }


def reached(values: list[float], passes: list[float], bound: float) -> str:
    for k, value in enumerate(values):
        if value <= bound:
            return f"{k} / {passes[k]:.0f}"
    return f"> {len(values) - 1} / {passes[-1]:.0f}"


KINDS = (
    "kronecker", "kronecker-rows", "row-block", "exact", "gauss-newton", "efficient", "gauss-newton, observed",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="at most 60 iterations and 12 CPU seconds each")
    parser.add_argument("--only", choices=["jester", "synthetic", "movielens", "rank"])
    parser.add_argument("--noise", type=float, default=0.1, help="of the synthetic table (entries: variance 5)")
    arguments = parser.parse_args()
    limit, seconds = (60, 12.0) if arguments.quick else (400, 40.0)
    cases = {
        "jester": lambda: real("jester1")[0],
        "synthetic": lambda: synthetic(10_000, 5, 60, arguments.noise),
        "movielens": lambda: real("movielens1m")[0],
    }
    for name, make in cases.items():
        if arguments.only in {None, name}:
            ratings = make()
            for orientation in ("rows", "columns"):
                compare(name, ratings, orientation, limit, seconds)
    if arguments.only in {None, "rank"}:
        plain_rank()


def compare(name: str, ratings: Ratings, orientation: str, limit: int, seconds: float) -> None:
    """All kinds on one problem."""
    problem = CompletionProblem(ratings, 5, orientation=orientation)
    runs = {kind: run(problem, kind, limit, seconds) for kind in KINDS}
    best = min(min(r["train"]) for r in runs.values())
    table = Table(title=f"{name}, subspace over {orientation}: iterations / passes (one thread, float64)")
    for column in ("Fisher", "to 1 % of the best loss", f"to ‖grad‖ ≤ {TOLERANCE:g}", "least ‖grad‖", "CPU s"):
        table.add_column(column, justify="left" if column == "Fisher" else "right")
    for kind, r in runs.items():
        near = reached(r["train"], r["passes"], 1.01 * best)
        exact = reached(r["norm"], r["passes"], TOLERANCE)
        table.add_row(kind, near, exact, f"{min(r['norm']):.1e}", f"{r['seconds']:.1f}")
    Console(width=110).print(table)


def plain_rank() -> None:
    """What more rank does to the paper's plain problem."""
    table = Table(title="plain problem (no ridge, no offsets), row-block RNGD, 12 iterations: held-out RMSE, clipped")
    for name in ("data", "rank", "held-out RMSE", "refit RMSE", "train RMSE"):
        table.add_column(name, justify="right")
    for name in ("movielens1m", "jester1"):
        train, held, clip = real(name)
        for rank in (5, 10, 20):
            problem = CompletionProblem(train, rank, held_out=held, clip=clip)
            x0 = problem.manifold.random_point(generator=torch.Generator().manual_seed(0))
            result = minimize(problem, x0, "rngd", fisher="row-block", max_iter=12)
            metrics = problem.metrics(result.x)
            table.add_row(name, str(rank), *(f"{math.sqrt(metrics[c]):.4f}" for c in ("held_out", "refit", "train")))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
