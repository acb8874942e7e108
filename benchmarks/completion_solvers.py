"""Which solver of the point estimate is first at a given held-out error: ``solver="auto"`` against the paper's methods.

    FISHERFOLD_DATA=... python benchmarks/completion_solvers.py [--data movielens1m] [--rank 10]

CPU seconds of ``fit_point`` from sorted ratings, one thread, float32, random 80/20 split. Every point is a fit of its
own with so many iterations. ``auto`` chooses its ridge inside (counted); the methods of ``minimize`` solve the paper's
problem with a ridge on the coefficients and offsets removed first, and get the best ridge of a grid on the *held-out*
ratings, whose search is not counted: what they show here is the most they can. Methods that need a step size are left
out.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fisherfold import datasets
from fisherfold.completion import Ratings
from fisherfold.completion.point_completion import fit_point

ITERATIONS = (1, 2, 3, 5, 8, 12, 20, 40)


def curve(train: Ratings, held: tuple, clip: tuple[float, float], rank: int, **options) -> list[tuple[float, float]]:
    """CPU seconds and clipped held-out RMSE after more and more iterations."""
    points = []
    rows, columns, values = (torch.from_numpy(part) for part in held)
    for count in ITERATIONS:
        began = time.process_time()
        model = fit_point(train, rank, max_iter=count, **options)
        seconds = time.process_time() - began
        found = model.predict(rows.long(), columns.long()).clamp(*clip)
        points.append((seconds, float((found - values).square().mean().sqrt())))
        if model.status == "converged":
            break
    return points


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="movielens1m")
    parser.add_argument("--rank", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = datasets.load_ratings(arguments.data)
    part = np.random.default_rng(0).random(len(data.values)) < 0.2
    values = data.values.astype(np.float32)
    train = Ratings(data.rows[~part], data.cols[~part], values[~part], data.shape)
    held = (data.rows[part], data.cols[part], values[part])
    clip = (float(values.min()), float(values.max()))
    known = fit_point(train, arguments.rank).ridge
    runs = {
        "auto": curve(train, held, clip, arguments.rank),
        "auto, its ridge given": curve(train, held, clip, arguments.rank, ridge=known),
        "auto, rank continuation": curve(train, held, clip, arguments.rank, continuation=True),
        "auto, its ridge given, early stopping": curve(train, held, clip, arguments.rank, ridge=known, validation=0.1),
    }
    # in units of ratings: a row of the orthonormal frame has the mean square 1/n
    grid = [count / min(data.shape) for count in (5, 20, 60, 150)]
    for solver in ("rngd", "rcg", "rgd"):
        tried = [curve(train, held, clip, arguments.rank, solver=solver, ridge=r) for r in grid]
        runs[solver] = min(tried, key=lambda points: min(error for _, error in points))
    ends = sorted(min(error for _, error in points) for points in runs.values())
    levels = [1.01 * ends[-1], 1.003 * ends[1], 1.001 * ends[0]]
    table = Table(title=f"{arguments.data}, rank {arguments.rank}: CPU s to a held-out RMSE, one thread")
    for name in ("solver", *(f"≤ {level:.4f}" for level in levels), "lowest RMSE", "in CPU s"):
        table.add_column(name, justify="left" if name == "solver" else "right")
    for solver, points in runs.items():
        hits = (next((f"{seconds:.2f}" for seconds, error in points if error <= level), "never") for level in levels)
        best = min(points, key=lambda point: point[1])
        table.add_row(solver, *hits, f"{best[1]:.4f}", f"{best[0]:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
