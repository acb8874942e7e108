"""A stream of ratings through `partial_fit` against a refit of all of them.

A fifth of the ratings is held out; the rest comes in random order, in batches of one size. After
each batch: the error of the model that has only ever seen ``partial_fit``, and that of a fresh fit
on all ratings so far.

Against: the refit
Takes: a minute
Page: docs/benchmarks/completion.md
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fisherfold import MatrixCompletion, datasets

SMOKE = "--batches 3 --rank 2"


def rmse(model: MatrixCompletion, pairs: np.ndarray, values: np.ndarray) -> float:
    return float(np.sqrt(np.mean((model.predict(pairs) - values) ** 2)))


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--rank", type=int, default=10)
    parser.add_argument("--data", default="movielens1m")
    parser.add_argument("--seed", type=int, default=0)


def main(given: Namespace) -> None:
    torch.set_num_threads(1)
    data = datasets.load_ratings(given.data)
    order = np.random.default_rng(given.seed).permutation(len(data.values))
    pairs = np.stack([data.rows, data.cols], axis=1)[order]
    values = data.values[order]
    cut = len(values) // 5
    test = pairs[:cut]
    test_values = values[:cut]
    pairs = pairs[cut:]
    values = values[cut:]
    title = f"{given.data}, rank {given.rank}, {given.batches} batches, one thread"
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
    stream = MatrixCompletion(given.rank, n_jobs=1)
    spent = 0.0
    ends = np.linspace(0, len(values), given.batches + 1).astype(int)
    for k in range(given.batches):
        part = slice(ends[k], ends[k + 1])
        began = time.process_time()
        stream.partial_fit(pairs[part], values[part])
        last = time.process_time() - began
        spent += last
        if k + 1 not in {1, 2, 5, 10, 15, given.batches}:
            continue
        began = time.process_time()
        refit = MatrixCompletion(given.rank, n_jobs=1).fit(
            pairs[: ends[k + 1]], values[: ends[k + 1]]
        )
        refitting = time.process_time() - began
        ours = rmse(stream, test, test_values)
        theirs = rmse(refit, test, test_values)
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
