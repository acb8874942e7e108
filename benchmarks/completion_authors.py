"""CPU time per epoch on Jester-1, from the released code's split and samples.

The figures of the released code were recorded under GNU Octave 7.3 on another machine of the same
class (2.8 GHz, one thread); Octave is not run here. The peer of the same run is the same algorithm
written column by column in NumPy. All do 18 outer epochs: a full pass, then 100 inner steps of one
column each. Row-block RNGD is our default for this problem: one full pass per iteration, no inner
steps; its lines give CPU time per pass and the loss after 18 of them.

Against: the paper's released code (recorded under Octave), and the same in NumPy
Takes: a minute
Page: docs/benchmarks/completion.md
"""

from __future__ import annotations

import itertools
import json
import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks._common import Missing
from fisherfold import datasets, minimize
from fisherfold.completion import CompletionProblem, Ratings

SMOKE = ""
RECORDED = ("jester_split_init.npz", "jester_rngd.json")
EPOCHS = 18
STEP = 0.05
RANK = 5


def load(recorded: Path) -> tuple[Ratings, np.ndarray, np.ndarray]:
    with np.load(recorded / RECORDED[0]) as stored:
        data = datasets.load_ratings("jester1")
        held = np.zeros(data.shape, dtype=bool)
        held[stored["test_user"], stored["test_item"]] = True
        train = ~held[data.rows, data.cols]
        ratings = Ratings(data.rows[train], data.cols[train], data.values[train], data.shape)
        return ratings, stored["U0"], stored["samples_rngd"].astype(np.int64)


def by_columns(
    ratings: Ratings, u: np.ndarray, samples: np.ndarray, epochs: int
) -> tuple[float, float]:
    """The released algorithm in NumPy, one least-squares problem per column."""
    side = ratings.by_column
    ends = side.offsets.numpy()
    columns = [
        (side.indices(a, b).numpy(), side.values(a, b).numpy()) for a, b in itertools.pairwise(ends)
    ]

    def column(u: np.ndarray, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, values = columns[i]
        a = np.linalg.lstsq(u[rows], values, rcond=None)[0]
        return rows, a, u[rows] @ a - values

    def full(u: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        gradient = np.zeros_like(u)
        table = np.zeros((len(columns), RANK))
        squares = 0.0
        for i in range(len(columns)):
            rows, table[i], r = column(u, i)
            gradient[rows] += np.outer(r, table[i])
            squares += r @ r
        return gradient / len(columns), table, squares / ratings.n_ratings

    began = time.process_time()
    gradient, table, mse = full(u)
    for epoch in range(epochs):
        anchor = u
        factor = table.T @ table / len(columns)
        for i in samples[epoch]:
            rows, a, r = column(u, i)
            known = table[i]
            correction = gradient.copy()
            correction[rows] -= np.outer(anchor[rows] @ known - columns[i][1], known)
            g = correction - u @ (u.T @ correction)
            g[rows] += np.outer(r, a)
            c = factor + (np.outer(a, a) - np.outer(known, known)) / len(columns)
            left, _, right = np.linalg.svd(u - STEP * g @ np.linalg.pinv(c), full_matrices=False)
            u = left @ right
        gradient, table, mse = full(u)
    return (time.process_time() - began) / epochs, mse


def ours(
    ratings: Ratings, u: np.ndarray, samples: np.ndarray, dtype: torch.dtype, method: str
) -> tuple[float, float]:
    single = Ratings(*ratings.entries(), ratings.shape, dtype=dtype)
    problem = CompletionProblem(single, RANK, orientation="rows", table="batch")
    start = torch.from_numpy(u).to(dtype)
    options: dict = {"fisher": "row-block"}
    if method == "rngd-vr":
        options = {
            "fisher": "kronecker",
            "step": STEP,
            "batch_size": 1,
            "stream": torch.from_numpy(samples),
        }
    clock: list[float] = []
    result = minimize(
        problem,
        start,
        method,
        max_iter=EPOCHS,
        callback=lambda _: clock.append(time.process_time()) and None,
        **options,
    )
    # from the end of the first epoch to that of the last, metrics included
    return (clock[-1] - clock[0]) / (len(clock) - 1), result.trace["train"][-1]


def options(parser: ArgumentParser) -> None:
    beside = Path(os.environ.get("FISHERFOLD_DATA", "data")).parent / "anchors" / "authors_octave"
    about = f"with {RECORDED[0]} and {RECORDED[1]} of a run of the released code ({beside})"
    parser.add_argument("--recorded", type=Path, default=beside, help=about)


def main(given: Namespace) -> None:
    lacking = [name for name in RECORDED if not (given.recorded / name).exists()]
    if lacking:
        raise Missing(f"{given.recorded} has no {lacking[0]}; --recorded names another folder")
    ratings, u, samples = load(given.recorded)
    recorded = json.loads((given.recorded / RECORDED[1]).read_text())
    octave = (recorded["cpu_s"][-1] - recorded["cpu_s"][0]) / EPOCHS
    rows = [("released code, Octave (recorded elsewhere)", octave, recorded["train_mse"][-1])]
    loop, mse = by_columns(ratings, u, samples, 3)
    rows.append(("the same, NumPy column by column (3 epochs)", loop, mse))
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        rows.append(
            (
                f"fisherfold rngd-vr, same steps, {name}",
                *ours(ratings, u, samples, dtype, "rngd-vr"),
            )
        )
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        rows.append(
            (f"fisherfold rngd row-block, {name}", *ours(ratings, u, samples, dtype, "rngd"))
        )
    table = Table(
        title="Jester-1, rank 5, one thread: CPU time per epoch and training MSE after 18"
    )
    for name in (
        "",
        "CPU ms per epoch",
        "training MSE",
        "times less than Octave",
        "times less than NumPy",
    ):
        table.add_column(name, justify="left" if not name else "right")
    for name, seconds, mse in rows:
        table.add_row(
            name,
            f"{1e3 * seconds:.1f}",
            f"{mse:.6f}",
            f"{octave / seconds:.1f}",
            f"{loop / seconds:.1f}",
        )
    Console(width=130).print(table)
