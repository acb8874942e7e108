"""Passes of matrix completion on one GPU against two CPU threads of the same machine.

    PYTHONPATH=src python benchmarks/gpu/completion.py

Synthetic ratings with a power law of popularity, float32, as many rows and columns as MovieLens-1M for 10⁶ ratings and
ten times as many for 10⁷. One line per operation: the loss with its gradient, the row-block Fisher matrix with a solve,
a product with the exact Fisher matrix, and a sweep of the variational fit. Only PyTorch and NumPy are needed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from fisherfold.inference.completion import fit_variational
from fisherfold.problems import CompletionProblem, Ratings


def synthetic(count: int, seed: int = 0) -> Ratings:
    scale = max(1, count // 10**6)
    n, m = 6040 * scale, 3706 * scale
    draw = np.random.default_rng(seed)
    rows = (n * draw.random(count + count // 8) ** 1.5).astype(np.int64)
    columns = (m * draw.random(len(rows)) ** 2.5).astype(np.int64)
    cells = draw.permutation(np.unique(rows * m + columns))[:count]
    rows, columns = cells // m, cells % m
    left, right = draw.standard_normal((n, 3), dtype=np.float32), draw.standard_normal((m, 3), dtype=np.float32)
    values = np.einsum("ij,ij->i", left[rows], right[columns]) + draw.standard_normal(len(rows), dtype=np.float32)
    return Ratings(rows, columns, values.astype(np.float32), (n, m))


def milliseconds(function: Callable[[], object], device: str, repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        synchronise(device)
        start = time.perf_counter()
        function()
        synchronise(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(ratings: Ratings, rank: int, device: str, repeats: int) -> dict[str, float]:
    placed = ratings.to(device)
    problem = CompletionProblem(placed, rank, ridge=0.1)
    generator = torch.Generator().manual_seed(0)
    x = problem.manifold.random_point(generator=generator, dtype=torch.float32).to(device)
    direction = problem.manifold.project(x, torch.randn(x.shape, generator=generator).to(device))

    def gradient() -> None:
        problem.loss_and_gradient(x.clone())

    def row_block() -> None:
        problem.fisher(x.clone(), kind="row-block").solve(direction, damping=0.1)

    exact = problem.fisher(x, kind="exact")

    def sweeps(count: int) -> Callable[[], object]:
        return lambda: fit_variational(placed, rank, max_iter=count, tol=0.0)

    return {
        "loss and gradient": milliseconds(gradient, device, repeats),
        "row-block Fisher and solve": milliseconds(row_block, device, repeats),
        "exact Fisher product": milliseconds(lambda: exact @ direction, device, repeats),
        "variational fit, 10 sweeps": milliseconds(sweeps(10), device, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[10**6, 10**7])
    parser.add_argument("--ranks", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else "no GPU"
    print(f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; CPU: 2 threads")
    print("ratings    rank  operation                      CPU ms    GPU ms   ratio")
    for count in arguments.counts:
        ratings = synthetic(count)
        for rank in arguments.ranks:
            slow = measure(ratings, rank, "cpu", arguments.repeats)
            fast = measure(ratings, rank, "cuda", arguments.repeats) if gpu else {}
            for operation, ms in slow.items():
                other = f"{fast[operation]:9.2f} {ms / fast[operation]:7.1f}" if gpu else "        -       -"
                print(f"{ratings.n_ratings:<10} {rank:4}  {operation:28} {ms:9.2f} {other}", flush=True)


if __name__ == "__main__":
    main()
