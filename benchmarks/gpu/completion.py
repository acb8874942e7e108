"""Completion on one GPU against the two-core CPU path, in one process.

    PYTHONPATH=src python benchmarks/gpu/completion.py [--quick]

Synthetic ratings with Zipf-like popularity: MovieLens-1M-sized (6040 × 3706, 10⁶) and 10⁷ (70 000 × 10 700), rank 10,
float32. Per size: one loss and gradient over all ratings, one exact Fisher product, one RNGD step with the row-block
Fisher, one alternating step of the point model and one pass of the variational model; on two CPU threads and on the
device, medians, their ratio, and how far the device's gradient is from the CPU's. A second table times the segment sums
that every pass is made of by each of their methods. Needs torch and NumPy alone. Writes completion.json into the folder
$OUT, or the current one. On a machine without a GPU the CPU stands in for the device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fisherfold.completion import grouped
from fisherfold.completion.inference.variational import fit_variational
from fisherfold.completion.point.als import Penalty, TwoSided, additive_model, grow
from fisherfold.completion.point.kernels import outer_table
from fisherfold.completion.point.problem import CompletionProblem
from fisherfold.completion.ratings import Ratings

RANK = 10
SIZES = {"10^6": (6040, 3706, 10**6), "10^7": (70_000, 10_700, 10**7)}


def synthetic(n: int, m: int, count: int, seed: int = 0) -> Ratings:
    """Users with log-normal activity, items with Zipf-like popularity, low-rank values in steps of a half."""
    rng = np.random.default_rng(seed)
    activity = rng.lognormal(0, 1.1, n)
    users = np.repeat(np.arange(n, dtype=np.int32), rng.multinomial(count, activity / activity.sum()))
    ranks = np.arange(1, m + 1, dtype=np.float64)
    share = np.cumsum((ranks + 0.02 * m) ** -1.1)
    items = np.searchsorted(share, rng.random(len(users)) * share[-1]).astype(np.int32).clip(max=m - 1)
    pair = np.unique(users.astype(np.int64) * m + rng.permutation(m)[items])
    users, items = (pair // m).astype(np.int32), (pair % m).astype(np.int32)
    left, right = rng.standard_normal((n, 4), dtype=np.float32), rng.standard_normal((m, 4), dtype=np.float32)
    values = 0.5 * (left[users] * right[items]).sum(1) + 0.8 * rng.standard_normal(len(users), dtype=np.float32)
    values = (np.round(2 * values) / 2).clip(-3, 2).astype(np.float32)
    return Ratings(users, items, values - values.mean(), (n, m))


def timed(work: Callable[[], Any], device: str, rounds: int) -> float:
    """The median seconds of a call, after one to warm up."""

    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(rounds + 1):
        finish()
        began = time.perf_counter()
        work()
        finish()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def works(ratings: Ratings) -> tuple[dict[str, Callable[[], Any]], Callable[[], torch.Tensor]]:
    """What is timed, and the gradient at the common point."""
    problem = CompletionProblem(ratings, RANK)
    x = problem.manifold.random_point(dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    x = x.to(ratings.device)
    v = problem.manifold.project(x, torch.ones_like(x).cumsum(0).sin())
    exact = problem.fisher(x, kind="exact")

    def natural_step() -> torch.Tensor:
        y = x.clone()
        _, gradient = problem.loss_and_gradient(y)
        direction = problem.fisher(y, kind="row-block").solve(gradient, 0.01, method="auto")
        return problem.manifold.retract(y, -direction)

    sides = TwoSided(ratings, Penalty(10.0, 3.0, 0.5))
    base = additive_model(ratings, Penalty(1.0, 3.0, 0.5), rows=True, columns=True, mean=True)
    at = grow(ratings, base, RANK, torch.Generator().manual_seed(0))
    posterior = fit_variational(ratings, RANK, max_iter=1, tol=0.0)

    def variational_pass() -> None:
        posterior.converged = False
        fit_variational(ratings, RANK, max_iter=len(posterior.trace) + 1, tol=-1e9, init=posterior)

    return {
        "loss and gradient": lambda: problem.loss_and_gradient(x.clone()),
        "exact Fisher product": lambda: exact._matvec(v),
        "RNGD step, row-block": natural_step,
        "alternating step": lambda: sides.row_step(sides.column_step(at)[0]),
        "variational pass": variational_pass,
    }, lambda: problem.gradient(x.clone())


def kernels(ratings: Ratings, device: str, rounds: int) -> dict[str, float]:
    """Milliseconds of a plain segment sum of packed outer products by column and by row, by method."""
    found = {}
    sides = ("by column", ratings.by_column, ratings.n_rows), ("by row", ratings.by_row, ratings.n_columns)
    for name, side, others in sides:
        table = outer_table(torch.randn(others, RANK, device=device))
        for method in (grouped._embedding_sum, grouped._sparse_sum, grouped._sum_in_pieces):
            if device == "cpu" and method is grouped._sum_in_pieces:
                continue
            work = partial(method, table, side.indices(), side.offsets, None)
            found[f"{name} {method.__name__.strip('_')}"] = 1e3 * timed(work, device, rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="10^5 ratings only")
    quick = parser.parse_args().quick
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(2)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU (no GPU here)"
    print(f"torch {torch.__version__}, device: {name}, CPU path: 2 threads; rank {RANK}, float32; milliseconds")
    report: dict[str, Any] = {"torch": torch.__version__, "device": name, "sizes": {}}
    for size, shape in ({"10^5": (2000, 1000, 10**5)} if quick else SIZES).items():
        began = time.perf_counter()
        ratings = synthetic(*shape)
        build = time.perf_counter() - began
        there = ratings.to(device)
        (slow, reference), (fast, candidate) = works(ratings), works(there)
        rows = {}
        print(f"\n{ratings.n_ratings:,} ratings of {ratings.n_rows:,} x {ratings.n_columns:,} (made in {build:.1f} s)")
        print(f"{'':24}{'CPU':>10}{'device':>10}{'CPU/device':>12}")
        for key in slow:
            cpu, gpu = timed(slow[key], "cpu", 3), timed(fast[key], device, 9)
            rows[key] = {"cpu_ms": 1e3 * cpu, "device_ms": 1e3 * gpu, "ratio": cpu / gpu}
            print(f"{key:24}{1e3 * cpu:10.2f}{1e3 * gpu:10.2f}{cpu / gpu:12.1f}", flush=True)
        off = float((candidate().cpu() - reference()).norm() / reference().norm())
        print(f"relative difference of the gradients: {off:.1e}")
        sums = kernels(there, device, 9)
        print("segment sums on the device, ms: " + ", ".join(f"{k} {v:.2f}" for k, v in sums.items()), flush=True)
        report["sizes"][size] = {"ratings": ratings.n_ratings, "rows": rows, "gradient_off": off, "kernels": sums}
        if device == "cuda":
            report["sizes"][size]["device_bytes"] = torch.cuda.max_memory_allocated()
            print(f"device memory at most {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
    (Path(os.environ.get("OUT", ".")) / "completion.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
