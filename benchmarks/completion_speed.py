"""Time and accuracy of completion over ranks and on thin tables.

``ranks`` fits a random 90/10 split of MovieLens-1M; ``thin`` tables of many rows with few ratings
each (popularity of columns as in ``scale.py``, four factors, noise); both print CPU seconds of
``fit``, passes and the held-out RMSE. ``sums`` times the sums of second moments of one pass, in
slices of columns and whole, and their cost on paper. Peers keep their defaults but for the rank:
cmfrec λ = 10 and ten passes, cornac's MF 50 epochs, myFM 50 Gibbs sweeps (its authors take 100 and
more), at ranks up to 20: even these take a minute or two.

Against: cmfrec, cornac, myFM
Takes: five minutes
Page: docs/benchmarks/completion.md
"""

from __future__ import annotations

import math
import time
from argparse import ArgumentParser, Namespace

import numpy as np

from benchmarks._common import left_out

SMOKE = (
    "ranks --ranks 2 --tools fisherfold",
    "thin --tables 1e4x2000x200 --tools fisherfold",
    "sums",
)


def movielens(seed: int):
    """Training and test parts: rows, columns, values."""
    from fisherfold.datasets import load_ratings

    data = load_ratings("movielens1m")
    order = np.random.default_rng(seed).permutation(len(data.values))
    cut = len(order) // 10
    parts = [np.asarray(part) for part in (data.rows, data.cols, data.values)]
    return [tuple(part[chosen] for part in parts) for chosen in (order[cut:], order[:cut])]


def thin(count: int, rows: int, columns: int):
    """A table with few ratings per row; a tenth is the test part."""
    rng = np.random.default_rng(0)
    activity = rng.lognormal(0, 1.0, rows)
    share = np.cumsum((np.arange(1, columns + 1) + 0.02 * columns) ** -1.1)
    drawn = int(1.1 * count)
    i = np.searchsorted(np.cumsum(activity) / activity.sum(), rng.random(drawn)).clip(max=rows - 1)
    j = rng.permutation(columns)[
        np.searchsorted(share / share[-1], rng.random(drawn)).clip(max=columns - 1)
    ]
    pair = rng.permutation(np.unique(i * columns + j))[:count]
    i = pair // columns
    j = pair % columns
    u = rng.standard_normal((rows, 4), dtype=np.float32)
    v = rng.standard_normal((columns, 4), dtype=np.float32)
    x = 0.5 * np.einsum("ij,ij->i", u[i], v[j]) + 0.8 * rng.standard_normal(
        len(i), dtype=np.float32
    )
    cut = len(x) // 10
    return [(i[part], j[part], x[part]) for part in (slice(cut, None), slice(0, cut))]


def fit_fisherfold(train, rank, **options):
    from fisherfold import MatrixCompletion

    rows, columns, values = train
    pairs = np.stack([rows, columns], axis=1)
    began = time.process_time()
    model = MatrixCompletion(rank, n_jobs=1, **options).fit(pairs, values)
    return (
        time.process_time() - began,
        model.n_iter_,
        lambda i, j: model.predict(np.stack([i, j], axis=1)),
    )


def fit_cmfrec(train, rank):
    from cmfrec import CMF
    from scipy.sparse import coo_matrix

    rows, columns, values = train
    shape = int(rows.max()) + 1, int(columns.max()) + 1
    table = coo_matrix((values.astype(np.float32), (rows, columns)), shape)
    model = CMF(
        k=rank,
        lambda_=10.0,
        method="als",
        use_cg=False,
        niter=10,
        nthreads=1,
        use_float=True,
        verbose=False,
        precompute_for_predictions=False,
    )
    began = time.process_time()
    model.fit(table)
    seconds = time.process_time() - began
    return (
        seconds,
        10,
        lambda i, j: model.predict(np.minimum(i, shape[0] - 1), np.minimum(j, shape[1] - 1)),
    )


def fit_cornac(train, rank):
    from cornac.data import Dataset
    from cornac.models import MF

    rows, columns, values = train
    data = Dataset.from_uir(
        list(zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True)), seed=0
    )
    model = MF(
        k=rank, max_iter=50, use_bias=True, num_threads=1, verbose=False, seed=0, lambda_reg=0.05
    )
    began = time.process_time()
    model.fit(data)
    seconds = time.process_time() - began
    u, v = (
        np.array([m.get(k, -1) for k in range(n)])
        for m, n in ((data.uid_map, int(rows.max()) + 1), (data.iid_map, int(columns.max()) + 1))
    )

    def predict(i, j):
        a = u[np.minimum(i, len(u) - 1)]
        b = v[np.minimum(j, len(v) - 1)]
        biases = model.global_mean + model.u_biases[a] + model.i_biases[b]
        return biases + (model.u_factors[a] * model.i_factors[b]).sum(1)

    return seconds, 50, predict


def fit_myfm(train, rank):
    import myfm
    from scipy.sparse import csr_matrix

    rows, columns, values = train
    sizes = int(rows.max()) + 1, int(columns.max()) + 1

    def design(i, j):
        places = np.stack(
            [np.minimum(i, sizes[0] - 1), np.minimum(j, sizes[1] - 1) + sizes[0]], axis=1
        ).ravel()
        return csr_matrix(
            (np.ones(len(places)), places, np.arange(0, len(places) + 1, 2)), (len(i), sum(sizes))
        )

    model = myfm.MyFMRegressor(rank=rank, random_seed=0)
    began = time.process_time()
    model.fit(design(rows, columns), values, n_iter=50, grouping=[0] * sizes[0] + [1] * sizes[1])
    return time.process_time() - began, 50, lambda i, j: model.predict(design(i, j))


FITS = {"fisherfold": fit_fisherfold, "cmfrec": fit_cmfrec, "cornac": fit_cornac, "myfm": fit_myfm}


def report(name: str, tool: str, parts, rank: int, **options) -> None:
    train, (i, j, x) = parts
    try:
        seconds, passes, predict = FITS[tool](train, rank, **options)
    except ImportError as error:
        print(f"{name:28} {left_out(error)}")
        return
    error = np.clip(predict(i, j), train[2].min(), train[2].max()) - x
    note = "".join(f" {key} {value:g}" for key, value in options.items())
    print(
        f"{name:28} {tool + note:22} rmse {math.sqrt(np.nanmean(error**2)):.4f} passes {passes:3} "
        f"cpu {seconds:7.2f}",
        flush=True,
    )


def sums() -> None:
    import torch

    from fisherfold.completion.grouped import bag_sum
    from fisherfold.completion.inference.gram import Summands
    from fisherfold.completion.ratings import Ratings

    torch.set_num_threads(1)
    (rows, columns, values), _ = movielens(0)
    ratings = Ratings(rows, columns, values.astype(np.float32))
    for rank in (10, 20, 40, 64, 100):
        width = (rank + 1) * (rank + 2) // 2
        seconds = {"whole": 0.0, "slices": 0.0}
        for groups in (ratings.by_row, ratings.by_column):
            table = torch.rand(groups.n_others, width)
            summands = Summands(table)
            for name, run in (
                ("whole", lambda t=table, g=groups: bag_sum(t, g.indices(), g.offsets)),
                ("slices", lambda s=summands, g=groups: s.collect(g, 0, g.n_groups)),
            ):
                run()
                began = time.process_time()
                run()
                seconds[name] += time.process_time() - began
        flops = 2 * 2 * ratings.n_ratings * width
        print(
            f"rank {rank:3}: both sides whole {seconds['whole']:.3f} s, as used "
            f"{seconds['slices']:.3f} s; {flops / 1e9:.1f} GFlop, {2 * flops / 1e9:.1f} GB: "
            f"{2e-9 * flops / seconds['slices']:.0f} GB/s; inverses "
            f"{2e-9 * sum(ratings.shape) * (rank + 1) ** 3:.1f} GFlop",
            flush=True,
        )


def options(parser: ArgumentParser) -> None:
    parser.add_argument("what", choices=("ranks", "thin", "sums"))
    parser.add_argument("--ranks", default="10,20,40,64,100")
    parser.add_argument("--tools", default="fisherfold,cmfrec,cornac,myfm")
    parser.add_argument("--tables", default="2e6x200000x20000,5e6x300000x30000")
    parser.add_argument("--tols", default="3e-4", help="tolerances of fisherfold")
    parser.add_argument("--seeds", default="0")


def main(given: Namespace) -> None:
    tools = given.tools.split(",")
    tols = [float(tol) for tol in given.tols.split(",")]
    if given.what == "sums":
        sums()
    elif given.what == "ranks":
        for rank in map(int, given.ranks.split(",")):
            for seed in map(int, given.seeds.split(",")):
                for tool in [tool for tool in tools if tool != "myfm" or rank <= 20]:
                    for tol in tols if tool == "fisherfold" else [None]:
                        given = {} if tol is None else {"tol": tol}
                        report(
                            f"MovieLens-1M rank {rank} seed {seed}",
                            tool,
                            movielens(seed),
                            rank,
                            **given,
                        )
    else:
        for table in given.tables.split(","):
            parts = thin(*(int(float(size)) for size in table.split("x")))
            for tool in [tool for tool in tools if tool in ("fisherfold", "cmfrec")]:
                for tol in tols if tool == "fisherfold" else [None]:
                    report(table, tool, parts, 10, **({} if tol is None else {"tol": tol}))
