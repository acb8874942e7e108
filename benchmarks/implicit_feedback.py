"""Recommendation from implicit feedback, every method equally tuned.

MovieLens-100K and MovieLens latest-small: that a user rated a movie is an observed pair, its stars
are not used. The last fifth of the movies of each user by time is the test part; of the rest, the
last fifth is the validation part. Every method gets the same number of settings, drawn at random
from its ranges; the one with the largest nDCG@10 on the validation part is fitted to the rest and
the validation part together, with three seeds. One thread; CPU seconds are those of this last fit.
Movies that the user had in the fit are left out of the lists.

Against: implicit's ALS and BPR, popularity
Takes: half an hour
Page: docs/benchmarks/implicit.md
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from benchmarks._common import names
from fisherfold import ImplicitCompletion, datasets

SMOKE = "--settings 1 --seeds 1"

Pairs = tuple[np.ndarray, np.ndarray]
Scores = np.ndarray


def load(name: str) -> tuple[Pairs, np.ndarray]:
    """Users and movies from 0, and times."""
    if name == "movielens100k":
        data = datasets.load_ratings(name)
        return (data.rows, data.cols), data.timestamp
    frame = pl.read_csv(Path(os.environ["FISHERFOLD_DATA"]) / "movielens_small" / "ratings.csv")
    users, movies = (
        np.unique(frame[c].to_numpy(), return_inverse=True)[1] for c in ("userId", "movieId")
    )
    return (users, movies), frame["timestamp"].to_numpy()


def last_fifth(pairs: Pairs, times: np.ndarray) -> np.ndarray:
    """Whether each pair is in the last fifth of its user by time; at least one of every user is."""
    order = np.lexsort((np.arange(len(times)), times, pairs[0]))
    counts = np.bincount(pairs[0])
    place = np.empty(len(times), dtype=np.int64)
    place[order] = np.arange(len(times)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place >= (counts - np.maximum(1, np.round(0.2 * counts)))[pairs[0]]


def metrics(scores: Scores, train: Pairs, test: Pairs) -> tuple[float, float]:
    """nDCG@10 and recall@20, means over the users with a test part."""
    scores = scores.copy()
    scores[train] = -np.inf
    wanted = np.zeros(scores.shape, dtype=bool)
    wanted[test] = True
    top = np.argpartition(-scores, 20, axis=1)[:, :20]
    top = np.take_along_axis(
        top, np.argsort(-np.take_along_axis(scores, top, 1), axis=1, kind="stable"), 1
    )
    hits = np.take_along_axis(wanted, top, 1)
    counts = wanted.sum(1)
    discount = 1 / np.log2(np.arange(2, 12))
    some = counts > 0
    ideal = np.cumsum(discount)[np.minimum(counts[some], 10) - 1]
    return float(np.mean(hits[some, :10] @ discount / ideal)), float(
        np.mean(hits[some].sum(1) / counts[some])
    )


def ours(train: Pairs, shape: tuple[int, int], seed: int, **options: Any) -> Scores:
    model = ImplicitCompletion(random_state=seed, n_jobs=1, **options).fit(np.stack(train, axis=1))
    scores = np.full(shape, -1e9)
    rows = model.row_ids_.astype(int)
    columns = model.column_ids_.astype(int)
    found = (
        model.row_factors_ @ model.column_factors_.T
        + model.row_offsets_[:, None]
        + model.column_offsets_
    )
    scores[np.ix_(rows, columns)] = found
    return scores


def peer(kind: str) -> Callable[..., Scores]:
    def fit(train: Pairs, shape: tuple[int, int], seed: int, **options: Any) -> Scores:
        from implicit.als import AlternatingLeastSquares
        from implicit.bpr import BayesianPersonalizedRanking
        from scipy.sparse import csr_matrix

        table = csr_matrix((np.ones(len(train[0]), np.float32), train), shape)
        if kind == "ALS":
            model = AlternatingLeastSquares(
                num_threads=1, random_state=seed, use_gpu=False, **options
            )
        else:
            model = BayesianPersonalizedRanking(
                num_threads=1, random_state=seed, use_gpu=False, **options
            )
        model.fit(table, show_progress=False)
        return model.user_factors @ model.item_factors.T

    return fit


def popularity(train: Pairs, shape: tuple[int, int], seed: int) -> Scores:
    return np.tile(np.bincount(train[1], minlength=shape[1]).astype(float), (shape[0], 1))


def spread(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def settings(name: str, rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Random settings of a method."""
    found = []
    for _ in range(count):
        rank = int(rng.choice([16, 32, 64]))
        if name == "ImplicitCompletion":
            found.append({"rank": rank, "unobserved_weight": spread(rng, 5, 200)})
        elif name == "implicit ALS":
            found.append(
                {
                    "factors": rank,
                    "regularization": spread(rng, 0.01, 100),
                    "alpha": spread(rng, 0.3, 30),
                }
            )
        else:
            iterations = int(rng.choice([50, 100, 200]))
            rate = spread(rng, 0.01, 0.2)
            ridge = spread(rng, 1e-4, 0.1)
            found.append(
                {
                    "factors": rank,
                    "learning_rate": rate,
                    "regularization": ridge,
                    "iterations": iterations,
                }
            )
    return found


METHODS: dict[str, Callable[..., Scores]] = {
    "ImplicitCompletion": ours,
    "implicit ALS": peer("ALS"),
    "implicit BPR": peer("BPR"),
}


def shown(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in options.items()) or "defaults"


def options(parser: ArgumentParser) -> None:
    every = ["movielens100k", "movielens_small"]
    parser.add_argument("--data", type=names, default=every, help=",".join(every))
    parser.add_argument("--settings", type=int, default=24, help="tried of each method (24)")
    parser.add_argument("--seeds", type=int, default=3, help="of the last fit (3)")


def main(given: Namespace) -> None:
    for name in given.data:
        pairs, times = load(name)
        shape = int(pairs[0].max()) + 1, int(pairs[1].max()) + 1
        held = last_fifth(pairs, times)
        train, test = ((pairs[0][part], pairs[1][part]) for part in (~held, held))
        inner = last_fifth(train, times[~held])
        rest, validation = ((train[0][part], train[1][part]) for part in (~inner, inner))
        table = Table(
            "method",
            "setting",
            "nDCG@10",
            "recall@20",
            "CPU s",
            "CPU s of the search",
            title=f"{name}, last fifth of every user by time; mean ± standard deviation of seeds",
        )
        rows: list[tuple[str, Callable[..., Scores], dict[str, Any], float]] = [
            ("popularity", popularity, {}, 0.0)
        ]
        rows.append(("ImplicitCompletion", ours, {}, 0.0))
        for method, fit in METHODS.items():
            began = time.process_time()
            best = (-1.0, {})
            for options in settings(method, np.random.default_rng(0), given.settings):
                value = metrics(fit(rest, shape, 0, **options), rest, validation)[0]
                best = max(best, (value, options), key=lambda pair: pair[0])
            rows.append((method, fit, best[1], time.process_time() - began))
        for method, fit, options, search in rows:
            found = []
            seconds = []
            for seed in range(given.seeds):
                began = time.process_time()
                scores = fit(train, shape, seed, **options)
                seconds.append(time.process_time() - began)
                found.append(metrics(scores, train, test))
            mean = np.mean(found, axis=0)
            deviation = np.std(found, axis=0)
            values = [f"{a:.4f} ± {b:.4f}" for a, b in zip(mean, deviation, strict=True)]
            spent = f"{np.mean(seconds):.2f}", f"{search:.0f}" if search else "-"
            table.add_row(method, shown(options), *values, *spent)
        Console(width=160).print(table)
