"""Mixed fits in one process for a given time, with the memory sampled.

A round fits, saves, loads, streams and predicts with every estimator on tables of changing size,
and takes some steps with MKFAC on a new network. Sizes are drawn from a few, since the libraries
below keep some bytes for every new size (4,000 fits of tables of any size level off at 0.7 MiB),
which is no leak but would take hours to level off. Printed are the resident memory over time, its
slope (least squares over everything after the first quarter), open files and threads, and a
verdict: the memory is flat if the slope means less than 1 % an hour or lies within twice its
standard error.

Against: itself a quarter of the time earlier
Takes: as long as `--minutes` says
Page: docs/reliability.md
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fisherfold
from fisherfold import Gaussian, NLLProblem, minimize
from fisherfold.completion import LowRankImputer, MatrixCompletion, MatrixCompletionCV
from fisherfold.manifolds import Sphere
from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor
from fisherfold.tables.readers import read_ratings

SMOKE = "--minutes 0.05"

MIB = 2**20


def ratings_of(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shape = rng.choice([40, 100, 200, 400], size=2)
    rows, columns = np.nonzero(rng.random(shape) < 0.2)
    truth = rng.normal(size=(shape[0], 3)) @ rng.normal(size=(3, shape[1]))
    return np.column_stack([rows, columns]), truth[rows, columns] + 0.3 * rng.normal(size=len(rows))


def completion(rng: np.random.Generator, folder: Path) -> None:
    X, y = ratings_of(rng)
    for inference in ("variational", "point"):
        model = MatrixCompletion(rank=4, inference=inference).fit(X, y)
        model.predict(X, return_std=inference == "variational")
        model.save(folder / "model")
        again = MatrixCompletion.load(folder / "model")
        again.partial_fit(X[:20] + 10_000, y[:20])
        again.recommend(int(X[0, 0]), 5)
        again.predict_new(X[:5, 1], y[:5], X[:9, 1])
    MatrixCompletionCV(ranks=(1, 3), cv=2, max_iter=10).fit(X, y)


def files(rng: np.random.Generator, folder: Path) -> None:
    X, y = ratings_of(rng)
    lines = [f"u{i},{j},{v:.4f}" for (i, j), v in zip(X, y, strict=True)]
    (folder / "r.csv").write_text("user,item,rating\n" + "\n".join([*lines, "u1,,3", "u1,2,bad"]))
    table = read_ratings(folder / "r.csv", skip_bad_lines=True)
    MatrixCompletion(rank=2).fit(
        np.column_stack([table.rows, table.columns.astype(object)]), table.values
    )


def imputation(rng: np.random.Generator, folder: Path) -> None:
    table = rng.normal(size=(rng.choice([50, 200, 500]), 2)) @ rng.normal(size=(2, 12))
    table[rng.random(table.shape) < 0.3] = np.nan
    LowRankImputer(rank=2).fit(table).transform(table)


def subspace(rng: np.random.Generator, folder: Path) -> None:
    n = int(rng.choice([500, 1500, 3000]))
    tasks = 40
    X = rng.normal(size=(n, 10))
    task = rng.integers(tasks, size=n)
    y = (X * (rng.normal(size=(tasks, 2)) @ rng.normal(size=(2, 10)))[task]).sum(
        1
    ) + 0.3 * rng.normal(size=n)
    for model in (
        SubspaceRegressor(2, max_iter=30),
        SubspaceRegressor(2, inference="point", ridge=1.0, max_iter=30),
    ):
        model.fit(X, y, task=task)
        model.fold_in(X[:9], y[:9], task=[1000] * 9)
        model.save(folder / "tasks")
        SubspaceRegressor.load(folder / "tasks").predict(X, task=task)
    SubspaceClassifier(2, ridge=1.0, max_iter=20).fit(X, y > 0, task=task).predict_proba(
        X, task=task
    )


def solvers(rng: np.random.Generator, folder: Path) -> None:
    g = torch.Generator().manual_seed(int(rng.integers(2**31)))
    x = torch.randn(200, 6, generator=g, dtype=torch.float64)
    w = Sphere(6).random_point(generator=g)
    problem = NLLProblem(
        Sphere(6), lambda x, w: torch.tanh(x @ w), Gaussian(), x, torch.tanh(x @ w)
    )
    start = Sphere(6).random_point(generator=g)
    for method, options in (
        ("rngd", {}),
        ("rcg", {}),
        ("rsgd", {"step": 0.1}),
        ("rsvrg", {"step": 0.1}),
    ):
        minimize(problem, start, method, max_iter=5, checkpoint=folder / "s", **options)


def training(rng: np.random.Generator, folder: Path) -> None:
    width = int(rng.choice([16, 48, 96]))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )
    x = torch.randn(64, 3, 8, 8)
    y = torch.randint(10, (64,))
    opt = fisherfold.MKFAC(
        model, lr=0.05, manifold_lr=0.1, damping=0.1, every=2, example_input=x[:8]
    )
    for _ in range(8):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    opt.load_state_dict(opt.state_dict())


PARTS = (completion, files, imputation, subspace, solvers, training)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(samples: list[tuple[float, int]]) -> tuple[float, float]:
    """Bytes per second and the standard error, from means over twelve blocks.

    Neighbours are not independent.
    """
    times, sizes = np.array(samples, dtype=np.float64).T
    blocks = np.array_split(np.arange(len(times)), min(12, len(times)))
    t, m = (np.array([v[b].mean() for b in blocks]) for v in (times, sizes))
    off = t - t.mean()
    rate = float(off @ m / (off @ off))
    left = m - m.mean() - rate * off
    return rate, float(np.sqrt(left @ left / max(1, len(t) - 2) / (off @ off)))


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)


def main(given: Namespace) -> None:
    torch.manual_seed(given.seed)
    warnings.simplefilter("ignore")
    began = time.monotonic()
    samples = []
    rounds = 0
    every = max(10.0, given.minutes * 60 / 20)
    due = every
    print(" minutes   rounds   resident MiB   open files   threads", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        while (passed := time.monotonic() - began) < given.minutes * 60:
            rng = np.random.default_rng((given.seed, rounds))
            for part in PARTS:
                part(rng, Path(folder))
            rounds += 1
            gc.collect()
            samples.append((time.monotonic() - began, resident()))
            if passed >= due or rounds in (1, 10):
                due += every if passed >= due else 0
                fds, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
                print(
                    f"{passed / 60:8.1f} {rounds:8d} {samples[-1][1] / MIB:14.1f} {fds:12d} "
                    f"{threads:9d}",
                    flush=True,
                )
    late = [s for s in samples if s[0] > samples[-1][0] / 4]
    rate, error = slope(late)
    level = np.mean([s[1] for s in late])
    flat = rate * 3600 < 0.01 * level or rate < 2 * error
    per_hour = rate * 3600 / MIB
    spread = error * 3600 / MIB
    print(
        f"\n{rounds} rounds in {samples[-1][0] / 60:.1f} minutes; after the first quarter the "
        f"memory is {level / MIB:.1f} MiB on average, between {min(s[1] for s in late) / MIB:.1f} "
        f"and {max(s[1] for s in late) / MIB:.1f}; slope {per_hour:+.2f} ± {spread:.2f} MiB an "
        f"hour: {'flat' if flat else 'GROWING'}"
    )
    if not flat and given.minutes >= 1:  # a shorter run says nothing of the memory
        raise SystemExit(1)
