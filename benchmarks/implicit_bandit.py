"""Who learns faster from its own recommendations: the mean, upper bounds or posterior draws.

A replayed bandit on MovieLens latest-small. Each user starts with three rated movies. In each round
every user is recommended one of the other movies that the user rated, by what the model knows so
far; 4 stars and more are taken up (an observed pair), less is a known dislike. The model is fitted
anew after every round, with fixed settings. The figures are shares of recommendations taken up.

Against: recommendation by the mean, at random
Takes: a minute
Page: docs/benchmarks/implicit.md
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks._common import mean_and_spread, show, table
from fisherfold import ImplicitCompletion

SMOKE = "--rounds 2 --seeds 1"
_BY = ("random", "mean", "upper", "sample")
_MOST = 2**40  # of a score that must not be chosen


def load() -> tuple[np.ndarray, np.ndarray]:
    """Whether a user rated a movie, and whether with 4 stars or more; users with 20 ratings."""
    path = Path(os.environ["FISHERFOLD_DATA"]) / "movielens_small" / "ratings.csv"
    frame = pl.read_csv(path)
    users, movies = (
        np.unique(frame[name].to_numpy(), return_inverse=True)[1] for name in ("userId", "movieId")
    )
    rated = np.zeros((users.max() + 1, movies.max() + 1), dtype=bool)
    liked = np.zeros_like(rated)
    rated[users, movies] = True
    liked[users, movies] = frame["rating"].to_numpy() >= 4
    kept = rated.sum(1) >= 20
    return rated[kept], liked[kept]


def scores(model: ImplicitCompletion, by: str, seed: int, n: int) -> np.ndarray:
    scorer = model.model_.scorer
    rows = model.model_.locate(np.arange(n), "row", "prior")
    if by == "sample":
        return np.asarray(scorer.sampled(rows, seed))
    found = scorer.block(rows)
    return np.asarray(found + 1.645 * scorer.deviations(rows) if by == "upper" else found)


def play(by: str, seed: int, rounds: int, rank: int) -> np.ndarray:
    """The share of recommendations taken up in each round."""
    rated, liked = load()
    rng = np.random.default_rng(seed)
    noise = rng.random(rated.shape)
    open_pairs = rated.copy()
    first = np.argsort(np.where(rated, noise, 2), axis=1)[:, :3]
    users = np.repeat(np.arange(len(rated)), 3)
    log = [(users, first.ravel())]
    open_pairs[log[0]] = False
    everyone = np.arange(len(rated))
    found = []
    for number in range(rounds):
        ranked = rng.random(rated.shape)
        if by != "random":
            i, j = (np.concatenate(parts) for parts in zip(*log, strict=True))
            model = ImplicitCompletion(rank, validation=0, max_iter=5)
            model.fit(np.stack([i, j], axis=1), np.where(liked[i, j], 1.0, -1.0))
            known = np.full(rated.shape, -1.0)  # movies that nobody was shown come last
            known[:, model.column_ids_.astype(int)] = scores(model, by, number, len(rated))
            ranked = known + 1e-9 * ranked
        ranked[~open_pairs] = -_MOST
        chosen = ranked.argmax(1)
        left = open_pairs[everyone, chosen]
        log.append((everyone[left], chosen[left]))
        open_pairs[log[-1]] = False
        found.append(liked[log[-1]].mean())
    return np.array(found)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8)


def main(given: Namespace) -> None:
    found = table(
        f"share taken up, {given.rounds} rounds, rank {given.rank}",
        ["recommended by", "all rounds", "first half", "second half"],
    )
    half = given.rounds // 2
    for by in _BY:
        runs = [play(by, seed, given.rounds, given.rank) for seed in range(given.seeds)]
        parts = [[run.mean(), run[:half].mean(), run[half:].mean()] for run in runs]
        found.add_row(
            by, *(mean_and_spread(list(column), 4) for column in zip(*parts, strict=True))
        )
    show(found)
