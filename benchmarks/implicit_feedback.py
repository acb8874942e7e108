"""Lists from implicit feedback: our defaults against peers whose settings are searched.

A rating (of MovieLens-1M: of 4 stars and more) is an observed pair, its stars are not used. Gowalla
has the split of the LightGCN papers, MovieLens-1M a random fifth of every user as test part,
MovieLens-100K and latest-small the last fifth of every user by time. Our models run with their
defaults and see the training part only. Every peer gets settings drawn from its ranges, the best by
nDCG@20 on a fifth of the training part of every user, and is then fitted to the training part. CPU
seconds are those of the last fit, for our defaults with all that they learn.

Against: implicit's ALS and BPR, EASE^R, a graph filter (GF-CF), popularity
Takes: ten minutes; Gowalla twenty more
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
import scipy.sparse
from rich.console import Console

from benchmarks._common import names, peer, table
from fisherfold import ImplicitCompletion, datasets
from fisherfold.completion import ImplicitBlend, ItemToItem
from fisherfold.completion.ranking_base import RankingEstimator

SMOKE = "--data movielens100k,gowalla --settings 1"

Pairs = tuple[np.ndarray, np.ndarray]
Block = Callable[[np.ndarray], np.ndarray]
_ROWS = 512  # users that are ranked at once
LENGTH = 20


def load(name: str, seed: int = 0) -> tuple[Pairs, Pairs, np.ndarray, tuple[int, int]]:
    """Training and test pairs from 0, by what the training pairs are ordered, the shape."""
    rng = np.random.default_rng(seed)
    folder = Path(os.environ["FISHERFOLD_DATA"])
    if name == "gowalla":
        train, test = (
            scipy.sparse.load_npz(folder / f"gowalla_{part}.npz").tocoo()
            for part in ("train", "test")
        )
        parts = [(part.row.astype(np.int64), part.col.astype(np.int64)) for part in (train, test)]
        return parts[0], parts[1], rng.random(train.nnz), train.shape
    if name == "movielens_small":
        frame = pl.read_csv(folder / "movielens_small" / "ratings.csv")
        users, movies = frame["userId"].to_numpy(), frame["movieId"].to_numpy()
        order = frame["timestamp"].to_numpy()
    else:
        data = datasets.load_ratings(name)
        users, movies, order = data.rows, data.cols, data.timestamp
        if name == "movielens1m":
            liked = data.values >= 4
            users, movies = users[liked], movies[liked]
            order = rng.random(len(users))
    users, movies = (np.unique(ids, return_inverse=True)[1] for ids in (users, movies))
    held = last_fifth(users, order)
    train, test = ((users[part], movies[part]) for part in (~held, held))
    return train, test, order[~held], (int(users.max()) + 1, int(movies.max()) + 1)


def last_fifth(users: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Whether each pair is in the last fifth of its user."""
    by = np.lexsort((np.arange(len(order)), order, users))
    counts = np.bincount(users)
    place = np.empty(len(order), dtype=np.int64)
    place[by] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place >= (counts - np.round(0.2 * counts))[users]


def metrics(block: Block, train: Pairs, test: Pairs, shape: tuple[int, int]) -> dict[str, float]:
    """Metrics of the lists without the training pairs, means over the users with a test part."""
    seen, wanted = (
        scipy.sparse.csr_array((np.ones(len(pairs[0])), pairs), shape=shape)
        for pairs in (train, test)
    )
    discount = 1 / np.log2(np.arange(2, LENGTH + 2))
    users = np.flatnonzero(np.diff(wanted.indptr))
    sums = np.zeros(3)
    k = min(LENGTH, shape[1])
    for start in range(0, len(users), _ROWS):
        rows = users[start : start + _ROWS]
        scores = np.array(block(rows), dtype=np.float32)
        scores[seen[rows].nonzero()] = -np.inf
        top = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        order = np.argsort(-np.take_along_axis(scores, top, 1), axis=1, kind="stable")
        top = np.take_along_axis(top, order, 1)
        hits = np.take_along_axis(wanted[rows].toarray(), top, 1)
        counts = np.diff(wanted.indptr)[rows]
        for place, length in ((0, 10), (1, 20)):
            ideal = np.cumsum(discount)[np.minimum(counts, length) - 1]
            sums[place] += (hits[:, :length] @ discount[: min(length, k)] / ideal).sum()
        sums[2] += (hits.sum(1) / counts).sum()
    found = (sums / len(users)).tolist()
    return dict(zip(("nDCG@10", "nDCG@20", "recall@20"), found, strict=True))


def ours(model: Callable[[], RankingEstimator]) -> Callable[..., Block]:
    def fit(train: Pairs, shape: tuple[int, int], **options: Any) -> Block:
        fitted = model().fit(np.stack(train, axis=1))
        at = fitted.column_ids_.astype(np.int64)
        codes = np.full(shape[0], -1)
        codes[fitted.row_ids_.astype(np.int64)] = np.arange(len(fitted.row_ids_))

        def block(rows: np.ndarray) -> np.ndarray:
            found = np.full((len(rows), shape[1]), -1e9, np.float32)
            found[:, at] = fitted.model_.scorer.block(codes[rows]).numpy()
            return found

        block.model = fitted  # type: ignore[attr-defined]
        return block

    return fit


def of_implicit(kind: str) -> Callable[..., Block]:
    def fit(train: Pairs, shape: tuple[int, int], **options: Any) -> Block:
        peer("implicit")
        from implicit.als import AlternatingLeastSquares
        from implicit.bpr import BayesianPersonalizedRanking

        data = scipy.sparse.csr_matrix((np.ones(len(train[0]), np.float32), train), shape)
        make = AlternatingLeastSquares if kind == "ALS" else BayesianPersonalizedRanking
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        model = make(num_threads=threads, random_state=0, use_gpu=False, **options)
        model.fit(data, show_progress=False)
        return lambda rows: model.user_factors[rows] @ model.item_factors.T

    return fit


def popularity(train: Pairs, shape: tuple[int, int]) -> Block:
    counts = np.bincount(train[1], minlength=shape[1]).astype(np.float32)
    return lambda rows: np.tile(counts, (len(rows), 1))


def graph_filter(train: Pairs, shape: tuple[int, int], rank: int = 256, low: float = 0.3) -> Block:
    """GF-CF (Shen et al. 2021): the Gram matrix without degrees, and an ideal low-pass filter."""
    from sklearn.utils.extmath import randomized_svd

    data = scipy.sparse.csr_array((np.ones(len(train[0]), np.float32), train), shape)
    rows, columns = (np.maximum(data.sum(axis), 1) ** -0.5 for axis in (1, 0))
    scaled = (data.multiply(rows[:, None]).multiply(columns)).tocsr().astype(np.float32)
    gram = (scaled.T @ scaled).tocsr()
    right = randomized_svd(scaled, min(rank, *(n - 1 for n in shape)), random_state=0)[2].T
    before = data.multiply(columns).tocsr()

    def block(asked: np.ndarray) -> np.ndarray:
        neighbours = (data[asked] @ gram).toarray()
        smooth = (before[asked] @ right) @ (right / columns[:, None]).T
        return np.asarray(neighbours + low * smooth)

    return block


def spread(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def settings(name: str, rng: np.random.Generator, large: bool) -> dict[str, Any]:
    """Random settings of a method."""
    factors = int(rng.choice([256, 512] if large else [16, 32, 64, 128]))
    if name == "implicit ALS":
        ridge = spread(rng, 0.003, 3 if large else 100)
        return {"factors": factors, "regularization": ridge, "alpha": spread(rng, 1, 40)}
    if name == "implicit BPR":
        return {
            "factors": factors,
            "learning_rate": spread(rng, 0.01, 0.2),
            "regularization": spread(rng, 1e-4, 0.1),
            "iterations": int(rng.choice([50, 100, 200])),
        }
    return {"rank": int(rng.choice([64, 256])), "low": spread(rng, 0.03, 1)}


OURS: dict[str, Callable[[], RankingEstimator]] = {
    "ImplicitCompletion": ImplicitCompletion,
    "ItemToItem": ItemToItem,
    "EASE^R (ItemToItem('dense'))": lambda: ItemToItem("dense"),
    "ImplicitBlend": ImplicitBlend,
    "ImplicitBlend(item_weight=0.4)": lambda: ImplicitBlend(item_weight=0.4),
}
PEERS: dict[str, Callable[..., Block]] = {
    "implicit ALS": of_implicit("ALS"),
    "implicit BPR": of_implicit("BPR"),
    "graph filter": graph_filter,
}
_LEARNT = ("rank_", "unobserved_weight_", "ridge_", "popularity_", "degrees_", "item_weight_")


def learnt(block: Block) -> dict[str, Any]:
    """What a model of ours found by itself."""
    model = block.model  # type: ignore[attr-defined]
    found = {name[:-1]: getattr(model, name, None) for name in _LEARNT}
    return {name: value for name, value in found.items() if value is not None}


def shown(options: dict[str, Any]) -> str:
    parts = (f"{k} {v:.3g}" if np.ndim(v) == 0 else f"{k} {v}" for k, v in options.items())
    return ", ".join(parts) or "-"


def search(
    method: str, train: Pairs, order: np.ndarray, shape: tuple[int, int], count: int
) -> dict[str, Any]:
    """The best of some random settings on the last fifth of the training part."""
    held = last_fifth(train[0], order)
    rest, validation = ((train[0][part], train[1][part]) for part in (~held, held))
    rng = np.random.default_rng(0)
    best: tuple[float, dict[str, Any]] = (-1.0, {})
    for _ in range(count):
        options = settings(method, rng, shape[1] > 20_000)
        block = PEERS[method](rest, shape, **options)
        found = metrics(block, rest, validation, shape)["nDCG@20"], options
        best = max(best, found, key=lambda each: each[0])
    return best[1]


def options(parser: ArgumentParser) -> None:
    every = ["movielens100k", "movielens_small", "movielens1m"]
    methods = ["popularity", *OURS, *PEERS]
    parser.add_argument("--data", type=names, default=every, help=",".join([*every, "gowalla"]))
    parser.add_argument("--settings", type=int, default=16, help="tried of each peer (16)")
    parser.add_argument("--methods", type=names, default=methods, help=",".join(methods))


def main(given: Namespace) -> None:
    for name in given.data:
        train, test, order, shape = load(name)
        heads = ["method", "setting", "nDCG@10", "nDCG@20", "recall@20", "CPU s", "search, CPU s"]
        found = table(f"{name}, {shape[0]} x {shape[1]}, {len(train[0])} pairs", heads, left=2)
        for method in given.methods:
            if "dense" in method and shape[1] > 20_000:
                continue
            began = time.process_time()
            chosen: dict[str, Any] = {}
            if method in PEERS and given.settings:
                chosen = search(method, train, order, shape, given.settings)
            searched = time.process_time()
            fit = PEERS.get(method, popularity)
            fit = ours(OURS[method]) if method in OURS else fit
            block = fit(train, shape, **chosen)
            spent = time.process_time() - searched
            values = metrics(block, train, test, shape)
            text = shown(learnt(block) if method in OURS else chosen)
            numbers = [f"{value:.4f}" for value in values.values()]
            found.add_row(method, text, *numbers, f"{spent:.1f}", f"{searched - began:.0f}")
        Console(width=170).print(found)
