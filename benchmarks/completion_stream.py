"""A stream against a refit: MovieLens-1M in 20 batches through ``partial_fit``, held-out RMSE and CPU time.

    FISHERFOLD_DATA=... python benchmarks/completion_stream.py [--batches 20] [--rank 10] [--data movielens1m]

A fifth of the ratings is held out; the rest comes in random order, in batches of one size. After each batch: the error
of the model that has only ever seen ``partial_fit``, and that of a fresh fit on all ratings so far.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fisherfold import MatrixCompletion, datasets


def rmse(model: MatrixCompletion, pairs: np.ndarray, values: np.ndarray) -> float:
    return float(np.sqrt(np.mean((model.predict(pairs) - values) ** 2)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--rank", type=int, default=10)
    parser.add_argument("--data", default="movielens1m")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = datasets.load_ratings(arguments.data)
    order = np.random.default_rng(arguments.seed).permutation(len(data.values))
    pairs, values = np.stack([data.rows, data.cols], axis=1)[order], data.values[order]
    cut = len(values) // 5
    test, test_values, pairs, values = pairs[:cut], values[:cut], pairs[cut:], values[cut:]
    title = f"{arguments.data}, rank {arguments.rank}, {arguments.batches} batches, one thread"
    table = Table(title=title)
    for name in (
        "batches",
        "ratings",
        "stream RMSE",
        "refit RMSE",
        "difference",
        "CPU s",
        "so far",
        "refit CPU s",
    ):
        table.add_column(name, justify="right")
    stream, spent = MatrixCompletion(arguments.rank, n_jobs=1), 0.0
    ends = np.linspace(0, len(values), arguments.batches + 1).astype(int)
    for k in range(arguments.batches):
        part = slice(ends[k], ends[k + 1])
        began = time.process_time()
        stream.partial_fit(pairs[part], values[part])
        last = time.process_time() - began
        spent += last
        if k + 1 not in {1, 2, 5, 10, 15, arguments.batches}:
            continue
        began = time.process_time()
        refit = MatrixCompletion(arguments.rank, n_jobs=1).fit(
            pairs[: ends[k + 1]], values[: ends[k + 1]]
        )
        refitting = time.process_time() - began
        ours, theirs = rmse(stream, test, test_values), rmse(refit, test, test_values)
        table.add_row(
            str(k + 1),
            str(ends[k + 1]),
            f"{ours:.4f}",
            f"{theirs:.4f}",
            f"{ours - theirs:+.4f}",
            f"{last:.2f}",
            f"{spent:.2f}",
            f"{refitting:.2f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
