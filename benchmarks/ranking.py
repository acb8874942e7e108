"""Ranked lists from ratings by time.

The last fifth of each person's ratings by time is held out; of these, ratings of 4 and more are
relevant. Lists leave out what was rated before. Every model gets its rank and one regularisation
from six settings, by nDCG@10 on the last fifth of the training part.

Against: implicit, LensKit, popularity
Takes: half an hour
Page: docs/benchmarks/ranking.md
"""

from __future__ import annotations

import itertools
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import scipy.sparse as sp

from benchmarks._common import left_out
from benchmarks.implicit_feedback import last_fifth
from fisherfold import MatrixCompletion, datasets
from fisherfold.completion.metrics import ranking_metrics

SMOKE = ("movielens_small --settings 1", "movielens100k --settings 1 --only popularity")

GOOD = 4.0


def load(name: str) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]:
    """Pairs of users and films numbered from 0, times and ratings."""
    if name == "movielens100k":
        data = datasets.load_ratings(name)
        return (data.rows, data.cols), data.timestamp, data.values
    frame = pl.read_csv(Path(os.environ["FISHERFOLD_DATA"]) / "movielens_small" / "ratings.csv")
    users, films = (
        np.unique(frame[name].to_numpy(), return_inverse=True)[1] for name in ("userId", "movieId")
    )
    return (users, films), frame["timestamp"].to_numpy(), frame["rating"].to_numpy()


Lists = tuple[np.ndarray, np.ndarray]


def lists_of(frame: Any) -> Lists:
    return frame["row"].to_numpy(), frame["column"].to_numpy()


def explicit(by: str) -> Callable[..., Lists]:
    def run(rows: Any, columns: Any, values: Any, users: Any, rank: int, strength: float) -> Lists:
        model = MatrixCompletion(rank, clip=False, ridge=strength or None, n_jobs=1)
        model.fit(np.stack([rows, columns], axis=1), values)
        return lists_of(model.recommend(users, 20, by=by, seed=0))

    return run


def ours_implicit(
    rows: Any, columns: Any, values: Any, users: Any, rank: int, strength: float
) -> Lists:
    from fisherfold import ImplicitCompletion

    good = values >= GOOD
    model = ImplicitCompletion(
        rank, n_jobs=1, **({"unobserved_weight": strength} if strength else {})
    )
    model.fit(np.stack([rows[good], columns[good]], axis=1))
    return without_seen(lambda u: lists_of(model.recommend(u, 200)), rows, columns, users)


def without_seen(recommend: Callable[[Any], Lists], rows: Any, columns: Any, users: Any) -> Lists:
    """The first twenty that were not rated at all.

    A model of good ratings does not know the bad ones.
    """
    found_rows, found = recommend(users)
    width = int(max(rows.max(), found_rows.max(initial=0))) + 1
    fresh = ~np.isin(found * width + found_rows, columns * width + rows)
    return found_rows[fresh], found[fresh]


def peer_implicit(kind: str) -> Callable[..., Lists]:
    def run(rows: Any, columns: Any, values: Any, users: Any, rank: int, strength: float) -> Lists:
        import implicit

        good = values >= GOOD
        shape = rows.max() + 1, columns.max() + 1
        liked = sp.csr_matrix(
            (np.ones(good.sum(), np.float32), (rows[good], columns[good])), shape=shape
        )
        options = {
            "factors": rank,
            "num_threads": 1,
            "random_state": 0,
            "iterations": 15 if kind == "als" else 100,
        }
        if kind == "als":
            model = implicit.als.AlternatingLeastSquares(
                regularization=strength, alpha=10.0, **options
            )
        else:
            model = implicit.bpr.BayesianPersonalizedRanking(regularization=strength, **options)
        model.fit(liked, show_progress=False)
        rated = sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=shape)
        items, scores = model.recommend(users, rated[users], N=20)
        keep = scores.reshape(-1) > -1e30
        return np.repeat(users, items.shape[1])[keep], items.reshape(-1)[keep]

    return run


def peer_lenskit(
    rows: Any, columns: Any, values: Any, users: Any, rank: int, strength: float
) -> Lists:
    import pandas as pd
    from lenskit.als import ImplicitMFScorer
    from lenskit.batch import recommend
    from lenskit.data import from_interactions_df
    from lenskit.pipeline import topn_pipeline

    good = values >= GOOD
    liked = pd.DataFrame({"user_id": rows[good], "item_id": columns[good]})
    pipe = topn_pipeline(
        ImplicitMFScorer(embedding_size=rank, regularization=strength, epochs=15), n=200
    )
    pipe.train(from_interactions_df(liked))
    known = np.intersect1d(users, rows[good])
    found = recommend(pipe, known.tolist(), n=200, n_jobs=1).to_df()
    pairs = found["user_id"].to_numpy(), found["item_id"].to_numpy()
    return without_seen(lambda _: pairs, rows, columns, users)


def popularity(
    rows: Any, columns: Any, values: Any, users: Any, rank: int, strength: float
) -> Lists:
    order = np.argsort(
        -np.bincount(columns[values >= GOOD], minlength=columns.max() + 1), kind="stable"
    )[:500]
    pairs = np.repeat(users, len(order)), np.tile(order, len(users))
    return without_seen(lambda _: pairs, rows, columns, users)


MODELS: dict[str, tuple[Callable[..., Lists], tuple[float, ...]]] = {
    "MatrixCompletion, by mean": (explicit("mean"), (0.0, 3.0, 30.0)),
    "MatrixCompletion, by upper": (explicit("upper"), (0.0, 3.0, 30.0)),
    "ImplicitCompletion": (ours_implicit, (0.0, 10.0, 100.0)),
    "implicit ALS": (peer_implicit("als"), (0.01, 1.0, 10.0)),
    "implicit BPR": (peer_implicit("bpr"), (0.01, 0.03, 0.1)),
    "LensKit ImplicitMF": (peer_lenskit, (0.01, 0.1, 1.0)),
    "popularity": (popularity, (0.0,)),
}


def scored(
    run: Callable[..., Lists], train: tuple[Any, Any, Any], test: tuple[Any, Any, Any], **how: Any
) -> Any:
    known = np.isin(test[0], train[0]) & np.isin(test[1], train[1]) & (test[2] >= GOOD)
    wanted = test[0][known], test[1][known]
    began = time.process_time()
    lists = run(*train, np.unique(wanted[0]), **how)
    seconds = time.process_time() - began
    ten, twenty = (ranking_metrics(lists, wanted, k, trained=train[:2]) for k in (10, 20))
    return ten["ndcg"], twenty["recall"], ten["coverage"], seconds


def agreement() -> None:
    """Metrics of the same lists by fisherfold, LensKit and cornac.

    The largest difference in any list.
    """
    from cornac.metrics import MAP, MRR, NDCG, HitRatio, Precision, Recall
    from lenskit import metrics as lk
    from lenskit.data import ItemList

    rng = np.random.default_rng(0)
    n_items = 40
    k = 10
    apart: dict[tuple[str, str], float] = {}
    # LensKit's default discount counts the first two places alike, and its recall divides by min(k,
    # relevant)
    discount = lk.LogRankWeight(offset=1)
    graded_ndcg = lk.NDCG(k, gain="rating", weight=discount)
    print("| metric | library | largest difference in any of 300 lists |\n|---|---|---|")
    for _ in range(300):
        order = rng.permutation(n_items)
        wanted = rng.choice(n_items, rng.integers(1, 20), replace=False)
        gains = rng.integers(1, 6, len(wanted)).astype(float)
        lists = np.zeros(n_items, int), order
        ones = ranking_metrics(lists, (np.zeros(len(wanted), int), wanted), k)
        graded = ranking_metrics(lists, (np.zeros(len(wanted), int), wanted, gains), k)
        whole = ranking_metrics(lists, (np.zeros(len(wanted), int), wanted), n_items)
        listed = ItemList(item_ids=order, ordered=True)
        truth = ItemList(item_ids=wanted, rating=gains)
        found = {
            ("ndcg, graded", "LensKit"): (graded["ndcg"], graded_ndcg.measure_list(listed, truth)),
            ("ndcg", "LensKit"): (
                ones["ndcg"],
                lk.NDCG(k, weight=discount).measure_list(listed, truth),
            ),
            ("recall, capped", "LensKit"): (
                ones["recall"] * len(wanted) / min(k, len(wanted)),
                lk.Recall(k).measure_list(listed, truth),
            ),
            ("precision", "LensKit"): (
                ones["precision"],
                lk.Precision(k).measure_list(listed, truth),
            ),
            ("mrr", "LensKit"): (ones["mrr"], lk.RecipRank(k).measure_list(listed, truth)),
            ("hit_rate", "LensKit"): (ones["hit_rate"], lk.Hit(k).measure_list(listed, truth)),
            ("ndcg", "cornac"): (ones["ndcg"], NDCG(k).compute(wanted, order)),
            ("recall", "cornac"): (ones["recall"], Recall(k).compute(wanted, order)),
            ("precision", "cornac"): (ones["precision"], Precision(k).compute(wanted, order)),
            ("hit_rate", "cornac"): (ones["hit_rate"], HitRatio(k).compute(wanted, order)),
            ("mrr, all places", "cornac"): (whole["mrr"], MRR().compute(wanted, order)),
            ("map, all places", "cornac"): (
                whole["map"],
                MAP().compute(order, -np.arange(n_items), wanted),
            ),
        }
        for what, (mine, theirs) in found.items():
            apart[what] = max(apart.get(what, 0.0), abs(mine - float(theirs)))
    for (metric, library), most in apart.items():
        print(f"| {metric} | {library} | {most:.1e} |")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("data", choices=("movielens100k", "movielens_small", "agreement"))
    parser.add_argument("--only", default="", help="models with this in their names")
    parser.add_argument("--settings", type=int, default=6, help="tried of each model (6)")


def main(given: Namespace) -> None:
    if given.data == "agreement":
        agreement()
        return
    (rows, columns), times, values = load(given.data)
    held = last_fifth(rows, times)
    parts = rows.astype(np.int64), columns.astype(np.int64), values
    train, test = (tuple(part[where] for part in parts) for where in (~held, held))
    inside = last_fifth(train[0], times[~held])
    inner, valid = (tuple(part[where] for part in train) for where in (~inside, inside))
    print(f"{given.data}: {len(train[0])} ratings, {len(test[0])} held out")
    print("| | nDCG@10 | recall@20 | coverage@10 | CPU s | chosen |\n|---|---|---|---|---|---|")
    for name, (run, strengths) in MODELS.items():
        if given.only not in name:
            continue
        grid = list(itertools.product((8, 32) if name != "popularity" else (1,), strengths))[
            : given.settings
        ]
        try:
            tried = [
                scored(run, inner, valid, rank=rank, strength=strength)[0]
                for rank, strength in grid
            ]
        except ImportError as error:
            print(f"| {name} | {left_out(error)} |")
            continue
        rank, strength = grid[int(np.argmax(tried))]
        ndcg, recall, coverage, seconds = scored(run, train, test, rank=rank, strength=strength)
        figures = (
            f"{ndcg:.4f} | {recall:.4f} | {coverage:.3f} | {seconds:.2f} | {rank}, {strength:g}"
        )
        print(f"| {name} | {figures} |", flush=True)
