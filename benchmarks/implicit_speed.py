"""A pass and a fit of implicit factors against implicit's ALS at equal rank.

Random pairs, popular columns more often. A pass is one solution of all rows and columns: ours is
exact, that of implicit takes three steps of conjugate gradients.

Against: implicit's ALS
Takes: two minutes
Page: docs/benchmarks/implicit.md
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

import numpy as np
import scipy.sparse
import torch

from benchmarks._common import integers, peer, show, table, timed
from fisherfold import ImplicitCompletion
from fisherfold.completion import Ratings
from fisherfold.completion.inference.implicit import ImplicitFit, Loss

SMOKE = "--shape 200,300 --pairs 2000 --ranks 8"


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", type=integers, default=[20_000, 500_000])
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=integers, default=[16])


def main(given: Namespace) -> None:
    peer("implicit")
    from implicit.als import AlternatingLeastSquares

    rng = np.random.default_rng(0)
    n, m = given.shape
    i = rng.integers(0, n, given.pairs)
    j = np.minimum((m * rng.random(given.pairs) ** 2).astype(np.int64), m - 1)
    data = scipy.sparse.csr_matrix((np.ones(len(i), np.float32), (i, j)), (n, m))
    data.data[:] = 1
    pairs = data.tocoo()
    ratings = Ratings(pairs.row, pairs.col, pairs.data, (n, m))
    workers = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(workers)
    heads = ["rank", "a pass, CPU s", "ALS, a pass", "a fit, CPU s", "ALS, a fit (15 passes)"]
    found = table(f"{given.pairs} pairs of {n} x {m}, {workers} threads, CPU seconds", heads)
    for rank in given.ranks:
        fit = ImplicitFit(ratings, Loss(30.0, 1.0, 0.25), rank)
        fit.run(1)
        own = timed(lambda fit=fit: fit.run(3))[1] / 3
        als = AlternatingLeastSquares(
            rank, iterations=1, num_threads=workers, use_gpu=False, random_state=0
        )
        als.fit(data, show_progress=False)
        als.iterations = 3
        other = timed(lambda als=als: als.fit(data, show_progress=False))[1] / 3
        model = ImplicitCompletion(rank, validation=0, n_jobs=workers)
        ids = np.stack([pairs.row, pairs.col], axis=1)
        whole = timed(lambda model=model, ids=ids: model.fit(ids))[1]
        als = AlternatingLeastSquares(rank, num_threads=workers, use_gpu=False, random_state=0)
        theirs = timed(lambda als=als: als.fit(data, show_progress=False))[1]
        numbers = [f"{value:.2f}" for value in (own, other, whole, theirs)]
        found.add_row(str(rank), *numbers)
    show(found)
