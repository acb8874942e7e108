"""Where the time of a completion pass goes: bytes moved over the measured memory bandwidth, kernel by kernel.

    FISHERFOLD_DATA=... python benchmarks/completion_bandwidth.py [--threads 1]

``streamed`` counts what must come from memory once: indices, values, tables in and out. ``gathered`` adds the table
rows that every rating reads (from cache, mostly). The bandwidth is that of summing and scaling a vector of 256 MB.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from fisherfold import datasets
from fisherfold.completion import CompletionProblem, Ratings
from fisherfold.completion import kernels as kernels
from fisherfold.completion.packed import outer_table, solve_positive


def best(function: Callable[[], object], repeats: int = 25) -> float:
    # on one thread CPU time, which does not count what other programs take
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    function()
    times = []
    for _ in range(repeats):
        began = clock()
        function()
        times.append(clock() - began)
    return min(times)


def bandwidth() -> float:
    x, y = torch.ones(2**26), torch.empty(2**26)
    return 2 * x.nbytes / best(lambda: torch.mul(x, 1.5, out=y), 15)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    threadpool_limits(torch.get_num_threads())  # the BLAS of NumPy too: its idle threads count as CPU time
    speed = bandwidth()
    table = Table(title=f"{torch.get_num_threads()} thread(s), measured bandwidth {speed / 1e9:.1f} GB/s, float32")
    for name in (
        "data",
        "rank",
        "kernel",
        "ms",
        "streamed MB",
        "gathered MB",
        "time / streamed bound",
        "time / gathered bound",
    ):
        table.add_column(name, justify="left" if name in {"data", "kernel"} else "right")
    for name in ("movielens1m", "jester1"):
        data = datasets.load_ratings(name)
        ratings = Ratings(data.rows, data.cols, data.values, data.shape, dtype=torch.float32)
        for rank in (5, 10):
            for kernel, ms, streamed, gathered in measure(ratings, rank):
                bounds = (f"{ms / 1e3 / (b / speed):.1f}" for b in (streamed, gathered))
                table.add_row(
                    name, str(rank), kernel, f"{ms:.2f}", f"{streamed / 1e6:.1f}", f"{gathered / 1e6:.1f}", *bounds
                )
            table.add_section()
    Console(width=130).print(table)


def measure(ratings: Ratings, rank: int) -> list[tuple[str, float, float, float]]:
    problem = CompletionProblem(ratings, rank)
    ratings = problem.ratings
    n, m = ratings.shape
    count, q = ratings.n_ratings, rank * (rank + 1) // 2
    x = problem.manifold.random_point(generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    fit = problem.fit(x)
    a, by_column, by_row = fit.coefficients, ratings.by_column, ratings.by_row
    packed, packed_a = outer_table(x), outer_table(a)
    ridge = x.new_zeros(m, 1)

    def gradient() -> None:
        problem._last = None
        problem.loss_and_gradient(x)

    def sides(width_in: int, width_out: int, per: int) -> tuple[float, float]:
        streamed = per * count + 4 * (n * width_in + m * width_out)
        return streamed, per * count + 4 * count * width_in + 4 * m * width_out

    gram, right = sides(q, q, 4), sides(rank, rank, 8)
    row_gram, row_right = sides(q, q, 4), sides(rank, rank, 8)
    solve = 4.0 * m * (q + 2 * rank)
    total = [gram[k] + right[k] + row_gram[k] + row_right[k] + solve for k in (0, 1)]
    operator = problem.fisher(x, kind="exact")
    direction = problem.manifold.random_tangent(x)
    product = [2 * s + 2 * r for s, r in zip(sides(rank * rank, rank * rank, 4), right, strict=True)]
    return [
        ("column Grams", 1e3 * best(lambda: kernels.plain_sum(by_column, packed)), *gram),
        ("column right-hand sides", 1e3 * best(lambda: kernels.value_sum(by_column, x)), *right),
        ("small solves", 1e3 * best(lambda: solve_positive(fit.gram, fit.rhs, ridge)), solve, solve),
        ("row second moments", 1e3 * best(lambda: kernels.plain_sum(by_row, packed_a)), *row_gram),
        ("row right-hand sides", 1e3 * best(lambda: kernels.value_sum(by_row, a)), *row_right),
        ("loss and gradient, whole pass", 1e3 * best(gradient), *total),
        ("exact Fisher product", 1e3 * best(lambda: operator._matvec(direction)), *product),
    ]


if __name__ == "__main__":
    main()
