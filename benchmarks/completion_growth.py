"""Growth with the number of ratings: time of building, of a gradient pass and of a fit, and memory.

    python benchmarks/completion_growth.py [--quick]

Each size runs in a process of its own, so that its peak memory is its own: the growth of the resident set over that
after importing, less nothing. The table grows with the ratings: 100 ratings per row, 200 per column, rank 10, float32.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fisherfold.completion import CompletionProblem, Ratings
from fisherfold.completion.point_completion import fit_point

RANK = 10


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one(count: int) -> dict[str, float]:
    torch.set_num_threads(1)
    n, m = count // 100, count // 200
    rng = np.random.default_rng(0)
    # each row rates 100 distinct columns: a start and a stride, all in int32 from the outset
    start = rng.integers(0, m, n, dtype=np.int32)
    stride = rng.integers(1, max(2, m // 101), n, dtype=np.int32)
    rows = np.repeat(np.arange(n, dtype=np.int32), 100)
    columns = ((start[:, None] + stride[:, None] * np.arange(100, dtype=np.int32)) % m).astype(np.int32).ravel()
    left, right = rng.standard_normal((n, 3), dtype=np.float32), rng.standard_normal((m, 3), dtype=np.float32)
    values = np.empty(count, dtype=np.float32)
    for part in range(0, count, 10**6):
        s = slice(part, part + 10**6)
        values[s] = (left[rows[s]] * right[columns[s]]).sum(1)
    began = time.process_time()
    ratings = Ratings(rows, columns, values, (n, m))
    build = time.process_time() - began
    del rows, columns, values, left, right, start, stride
    problem = CompletionProblem(ratings, RANK)
    x = problem.manifold.random_point(dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    problem.loss_and_gradient(x)
    began = time.process_time()
    for _ in range(3):
        problem.loss_and_gradient(x.clone())
    gradient = (time.process_time() - began) / 3
    before = peak()
    began = time.process_time()
    fit_point(ratings, RANK, ridge=1.0, max_iter=5, tol=0.0)
    fit = time.process_time() - began
    factors = 4 * (n + m) * (RANK * (RANK + 1) // 2 + 3 * RANK)
    return {
        "ratings": count, "build": build, "gradient": gradient, "fit": fit, "bytes": ratings.nbytes / count,
        "tables": factors, "peak_fit": peak() - before, "peak": peak(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", type=int)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one)))
        return
    sizes = [10**5, 10**6] if arguments.quick else [10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7]
    table = Table(title="rank 10, float32, one thread; nanoseconds are CPU time per rating")
    names = (
        "ratings",
        "build ns",
        "gradient pass ns",
        "5 iterations of fit_point ns",
        "bytes per rating",
        "peak MB of the process",
    )
    for name in (*names, "packed tables and factors MB"):
        table.add_column(name, justify="right")
    for size in sizes:
        answer = subprocess.run(
            [sys.executable, __file__, "--one", str(size)], capture_output=True, text=True, check=True
        )
        r = json.loads(answer.stdout)
        ns = (f"{1e9 * r[name] / size:.1f}" for name in ("build", "gradient", "fit"))
        table.add_row(f"{size:.0e}", *ns, f"{r['bytes']:.2f}", f"{r['peak'] / 1e6:.0f}", f"{r['tables'] / 1e6:.1f}")
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
