"""Completion on one GPU against all cores of the same machine.

Synthetic ratings with Zipf-like popularity, MovieLens-1M-sized and more, rank 10, float32. Per
size: whole default fits of the estimator with its predictions and recommendations; one loss and
gradient over all ratings, one exact Fisher product, one alternating step of the point model and one
pass of the variational model (medians), and how far the device's gradient is from the CPU's. On a
machine without a GPU the CPU stands in for the device.

Against: the CPU of the same machine
Takes: two minutes on an H200
Page: docs/benchmarks/scale.md
"""

from __future__ import annotations

import json
import os
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fisherfold.completion import MatrixCompletion
from fisherfold.completion.inference.start import start_posterior
from fisherfold.completion.inference.variational import fit_variational
from fisherfold.completion.point.fit import sweep
from fisherfold.completion.point.problem import CompletionProblem
from fisherfold.completion.ratings import Ratings
from fisherfold.completion.recommend import best_columns

SMOKE = "--sizes 1e4 --passes 2 --out {folder}/completion.json"
RANK = 10
# users, items and ratings
SIZES = {
    "1e4": (300, 200, 10**4),
    "1e5": (2000, 1000, 10**5),
    "1e6": (6040, 3706, 10**6),
    "1e7": (70_000, 10_700, 10**7),
    "1e8": (500_000, 20_000, 10**8),
}
Array = npt.NDArray[Any]


def synthetic(n: int, m: int, count: int, device: str, seed: int = 0) -> tuple[Array, Array, Array]:
    """Users with log-normal activity, items by a Zipf-like law, low-rank values in halves."""
    g = torch.Generator(device).manual_seed(seed)
    where = {"device": device}
    activity = torch.randn(n, generator=g, **where).mul(1.1).exp()
    users = torch.arange(n, **where).repeat_interleave(
        (count / activity.sum() * activity).round().long()
    )
    share = (torch.arange(m, dtype=torch.float64, **where) + 1 + 0.02 * m).pow(-1.1).cumsum(0)
    drawn = share[-1] * torch.rand(len(users), dtype=torch.float64, generator=g, **where)
    items = torch.randperm(m, generator=g, **where)[
        torch.searchsorted(share, drawn).clamp_(max=m - 1)
    ]
    pairs = torch.unique(users * m + items)
    users = pairs // m
    items = pairs % m
    left, right = (torch.randn(size, 4, generator=g, **where) for size in (n, m))
    values = 0.8 * torch.randn(len(pairs), generator=g, **where)
    for k in range(4):
        values += 0.5 * left[users, k] * right[items, k]
    values = ((2 * values).round() / 2).clamp(-3, 2)
    return users.cpu().numpy(), items.cpu().numpy(), (values - values.mean()).cpu().numpy()


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
    x = problem.manifold.random_point(
        dtype=torch.float32, generator=torch.Generator().manual_seed(0)
    )
    x = x.to(ratings.device)
    v = problem.manifold.project(x, torch.ones_like(x).cumsum(0).sin())
    exact = problem.fisher(x, kind="exact")

    start = start_posterior(ratings, RANK, weight_strength=0.0)
    posterior = fit_variational(ratings, RANK, max_iter=1, tol=0.0)

    def variational_pass() -> None:
        posterior.converged = False
        fit_variational(ratings, RANK, max_iter=len(posterior.trace) + 1, tol=-1e9, init=posterior)

    return {
        "loss and gradient": lambda: problem.loss_and_gradient(x.clone()),
        "exact Fisher product": lambda: exact._matvec(v),
        "alternating step": lambda: sweep(start, ratings),
        "variational pass": variational_pass,
    }, lambda: problem.gradient(x.clone())


def whole(
    users: Array, items: Array, values: Array, device: str, passes: int | None
) -> dict[str, Any]:
    """Fits, ids and sorting included, and requests, on all cores and the device."""
    pairs = np.stack([users, items], 1)
    held = np.arange(len(values)) % 50 == 0
    asked = np.random.default_rng(1).choice(np.unique(users), 10_000)
    settings = {} if passes is None else {"max_iter": passes, "tol": 0.0}
    rows = {}
    for where in dict.fromkeys(("cpu", device)):
        model = MatrixCompletion(RANK, device=where, **settings)
        if where == "cuda":  # start the device before the clock
            MatrixCompletion(RANK, device=where).fit(pairs[:10_000], values[:10_000])
        began = time.perf_counter()
        model.fit(pairs[~held], values[~held])
        fitted = time.perf_counter()
        rmse = float(np.sqrt(np.mean((model.predict(pairs[held]) - values[held]) ** 2)))
        predicted = time.perf_counter()
        rows_of = model.model_.row_ids.encode(asked)
        best_columns(model.model_, rows_of[:100], 10)
        warm = time.perf_counter()
        best_columns(model.model_, rows_of, 10)
        rate = len(asked) / (time.perf_counter() - warm)
        rows[where] = {
            "fit_s": fitted - began,
            "passes": model.n_iter_,
            "rmse": rmse,
            "ids_per_s": rate,
            "predict_s": predicted - fitted,
        }
        print(
            f"{where:5} fit {fitted - began:7.2f} s, {model.n_iter_} passes, RMSE {rmse:.4f};",
            f"predict {held.sum():,} pairs {predicted - fitted:.2f} s;",
            f"recommend {rate:,.0f} ids/s",
            flush=True,
        )
    return rows


def operations(ratings: Ratings, device: str) -> dict[str, Any]:
    """The single operations on all cores and on the device."""
    (slow, reference) = works(ratings)
    (fast, candidate) = works(ratings.to(device))
    rows: dict[str, Any] = {}
    print(f"{'milliseconds':24}{'CPU':>10}{'device':>10}{'CPU/device':>12}")
    for key in slow:
        cpu = timed(slow[key], "cpu", 3)
        gpu = timed(fast[key], device, 9)
        rows[key] = {"cpu_ms": 1e3 * cpu, "device_ms": 1e3 * gpu, "ratio": cpu / gpu}
        print(f"{key:24}{1e3 * cpu:10.2f}{1e3 * gpu:10.2f}{cpu / gpu:12.1f}", flush=True)
    rows["gradient_off"] = float((candidate().cpu() - reference()).norm() / reference().norm())
    print(f"relative difference of the gradients: {rows['gradient_off']:.1e}")
    return rows


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--sizes", default="1e6,1e7", help="of 1e4, 1e5, 1e6, 1e7 and 1e8")
    parser.add_argument("--passes", type=int, help="passes of a fit; it ends by itself otherwise")
    parser.add_argument("--fits", action="store_true", help="no single operations")
    parser.add_argument("--out", type=Path, default=Path("completion.json"))
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the CPU (all)")


def main(given: Namespace) -> None:
    torch.set_num_threads(given.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU (no GPU here)"
    print(f"torch {torch.__version__}, device: {name}, CPU: {given.threads} threads")
    print(f"rank {RANK}, float32")
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": name,
        "threads": torch.get_num_threads(),
    }
    for size in given.sizes.split(","):
        users, items, values = synthetic(*SIZES[size], device)
        print(f"\n{len(values):,} ratings of {SIZES[size][0]:,} x {SIZES[size][1]:,}", flush=True)
        report[size] = {
            "ratings": len(values),
            "fits": whole(users, items, values, device, given.passes),
        }
        if not given.fits:
            report[size]["operations"] = operations(
                Ratings(users, items, values, SIZES[size][:2]), device
            )
        if device == "cuda":
            report[size]["device_bytes"] = torch.cuda.max_memory_allocated()
            print(f"device memory at most {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
        given.out.write_text(json.dumps(report, indent=1))
