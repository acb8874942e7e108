"""Requests to a large fitted model: predict, recommend, similar.

The model is a random posterior with as many ratings as asked for: what a request costs does not
depend on how it was fitted. Times are medians of wall time.

Against: implicit and faiss on the same factors
Takes: two minutes
Page: docs/benchmarks/ranking.md
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import numpy as np
import torch

from benchmarks._common import left_out

SMOKE = "--rows 300 --columns 200 --ratings 3000 --threads 1"


def median(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def made(rows: int, columns: int, rank: int, ratings: int):
    """A model of this size with random factors, and the ratings that it has seen."""
    from fisherfold.completion import MatrixCompletion
    from fisherfold.completion.inference.packed import pack
    from fisherfold.completion.inference.posterior import CompletionPosterior, Side
    from fisherfold.completion.model import CompletionModel
    from fisherfold.completion.ratings import TrainingRatings
    from fisherfold.tables.ids import IdIndex

    rng = np.random.default_rng(0)
    q = rank + 1
    users = np.sort(rng.integers(0, rows, ratings))
    items = (columns * rng.random(ratings) ** 2).astype(np.int64)
    keep = np.unique(users * columns + items)
    users = keep // columns
    items = keep % columns
    offsets = np.concatenate([[0], np.cumsum(np.bincount(users, minlength=rows))]).astype(np.int64)
    sides = []
    for n, codes in ((rows, users), (columns, items)):
        mean = torch.from_numpy(rng.normal(size=(n, q)).astype(np.float32)) / 3
        counts = torch.from_numpy(np.bincount(codes, minlength=n))
        side = Side.start(mean, counts, torch.ones(q), has_offset=True)
        side.covariance = pack(0.05 * torch.eye(q)[None]).repeat(n, 1)
        sides.append(side)
    posterior = CompletionPosterior(sides[0], sides[1], 2.0, 20.0, len(keep), float(len(keep)))
    seen = TrainingRatings(offsets, items.astype(np.int32), np.zeros(len(keep), dtype=np.float32))
    ids = IdIndex(np.arange(rows)), IdIndex(np.arange(columns))
    model = CompletionModel(*ids, posterior, 3.5, 1.0, 1.0, 5.0, seen, "variational", 0, len(keep))
    # of a fit only the model counts here, which is put in its place
    estimator = MatrixCompletion(rank, max_iter=1).fit([(0, 0), (0, 1), (1, 0)], [1.0, 2.0, 3.0])
    estimator._adopt(model)
    return estimator, users, items


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=300_000, help="of the model (300,000)")
    parser.add_argument("--columns", type=int, default=30_000, help="of the model (30,000)")
    parser.add_argument("--rank", type=int, default=10, help="of the model (10)")
    parser.add_argument("--ratings", type=int, default=5_000_000, help="seen (5,000,000)")
    parser.add_argument("--threads", type=int, default=2, help="of every library (2)")


def main(given: Namespace) -> None:
    torch.set_num_threads(given.threads)
    model, users, items = made(given.rows, given.columns, given.rank, given.ratings)
    rng = np.random.default_rng(1)
    pairs = np.stack(
        [rng.integers(0, given.rows, 100_000), rng.integers(0, given.columns, 100_000)], axis=1
    )
    many = rng.choice(given.rows, min(10_000, given.rows), replace=False)
    lines = [
        ("predict 1 pair", 1, lambda: model.predict([(17, 23)])),
        ("predict 1 pair, std", 1, lambda: model.predict([(17, 23)], return_std=True)),
        ("predict 100,000 pairs", 1, lambda: model.predict(pairs)),
        ("predict 100,000 pairs, std", 1, lambda: model.predict(pairs, return_std=True)),
        ("recommend 1 id", 1, lambda: model.recommend(17)),
        ("recommend 1 id, by upper", 1, lambda: model.recommend(17, by="upper")),
        (
            "recommend_new, 5 ratings",
            1,
            lambda: model.recommend_new({1: 5.0, 2: 4.0, 3: 1.0, 4: 2.0, 5: 5.0}),
        ),
        ("similar 1 id", 1, lambda: model.similar(17)),
        ("recommend 10,000 ids", 10_000, lambda: model.recommend(many)),
    ]
    size = f"{given.rows} x {given.columns}, rank {given.rank}, {len(users)} ratings"
    print(f"{size}, {given.threads} threads")
    for name, count, call in lines:
        seconds = median(call, 3 if count > 1 or "100,000" in name else 20)
        rate = f"{count / seconds:10.0f} ids/s" if count > 1 else ""
        print(f"{name:32s} {1e3 * seconds:10.2f} ms {rate}")
    vectors = model.inner_product_vectors()
    try:
        import implicit
        import scipy.sparse as sp
    except ImportError as error:
        print(left_out(error), file=sys.stderr)
    else:
        peer = implicit.als.AlternatingLeastSquares(
            factors=given.rank + 2, num_threads=given.threads
        )
        peer.user_factors, peer.item_factors = vectors
        rated = sp.csr_matrix(
            (np.ones(len(users), dtype=np.float32), (users, items)),
            shape=(given.rows, given.columns),
        )
        one = median(lambda: peer.recommend(17, rated[17], 10), 20)
        print(f"{'implicit: recommend 1 id':32s} {1e3 * one:10.2f} ms")
        seconds = median(lambda: peer.recommend(many, rated[many], 10), 3)
        print(
            f"{'implicit: recommend 10,000 ids':32s} {1e3 * seconds:10.2f} ms "
            f"{10_000 / seconds:10.0f} ids/s"
        )
        print(
            f"{'implicit: similar 1 id':32s} "
            f"{1e3 * median(lambda: peer.similar_items(17, 10), 20):10.2f} ms"
        )
        same = peer.recommend(many[:100], rated[many[:100]], 10)[0]
        ours = model.recommend(many[:100])["column"].to_numpy().reshape(100, 10)
        print(
            "lists that agree: "
            f"{np.mean([set(x) == set(y) for x, y in zip(same, ours, strict=True)]):.2f}"
        )
    try:
        import faiss
    except ImportError as error:
        print(left_out(error), file=sys.stderr)
    else:
        faiss.omp_set_num_threads(given.threads)
        index = faiss.IndexFlatIP(given.rank + 2)
        index.add(vectors[1])
        seconds = median(lambda: index.search(vectors[0][many], 10), 3)
        print(
            f"{'faiss flat: 10,000 ids, all':32s} {1e3 * seconds:10.2f} ms "
            f"{10_000 / seconds:10.0f} ids/s"
        )
