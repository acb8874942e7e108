"""How often 90 % intervals of rotated factor loadings hold the truth.

Twelve variables and three factors; the truth is the rotated solution of the population. Samples are
normal, have values that are missing at random (later variables, where the first is large), or come
from a multivariate t distribution, for which the model is right and the likelihood is not.

Against: the nominal level; no Python peer has standard errors of rotated loadings
Takes: twelve minutes
Page: docs/guides/factor-analysis.md
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import linear_sum_assignment

from fisherfold import FactorAnalysis

SMOKE = "--replicates 2 --rows 200"

LOADINGS = np.kron(np.eye(3), [[0.8], [0.7], [0.6], [0.7]])
# what loads on a second factor
LOADINGS[[0, 1, 3, 5, 6, 9, 10], [2, 1, 1, 0, 2, 0, 1]] = [0.1, 0.1, 0.3, 0.1, 0.2, 0.2, 0.1]
CORRELATIONS = np.array([[1.0, 0.4, 0.3], [0.4, 1.0, 0.2], [0.3, 0.2, 1.0]])

Draw = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]


def normal(rng: np.random.Generator, root: np.ndarray, n: int) -> np.ndarray:
    return rng.standard_normal((n, len(root))) @ root.T


def missing(rng: np.random.Generator, root: np.ndarray, n: int) -> np.ndarray:
    rows = normal(rng, root, n)
    holes = rng.random((n, len(root) - 4)) < 0.4 * (rows[:, :1] > 0)
    rows[:, 4:][holes] = np.nan
    return rows


def heavy_tailed(rng: np.random.Generator, root: np.ndarray, n: int) -> np.ndarray:
    return normal(rng, root, n) / np.sqrt(rng.chisquare(6, size=(n, 1)) / 4)


CASES: list[tuple[str, Draw, str, str]] = [
    ("normal", normal, "varimax", "expected"),
    ("normal", normal, "promax", "expected"),
    ("normal", normal, "oblimin", "expected"),
    ("normal", normal, "geomin", "expected"),
    ("a fifth of later values missing", missing, "oblimin", "observed"),
    ("heavy tails (t, 6 df)", heavy_tailed, "oblimin", "expected"),
    ("heavy tails (t, 6 df)", heavy_tailed, "oblimin", "robust"),
]


def covered(draw: Draw, rotation: str, errors: str, given: Namespace) -> tuple[float, float]:
    """The share of intervals of loadings that hold, and the least of a single loading."""
    phi = np.eye(3) if rotation == "varimax" else CORRELATIONS
    common = LOADINGS @ phi @ LOADINGS.T
    covariance = common + np.diag(1 - np.diag(common))
    truth = FactorAnalysis(3, rotation).fit_covariance(covariance, 10**6).loadings_
    root = np.linalg.cholesky(covariance)
    rng = np.random.default_rng(given.seed)
    held = []
    for _ in range(given.replicates):
        rows = draw(rng, root, given.rows)
        model = FactorAnalysis(3, rotation, errors=errors, rotation_starts=1).fit(rows)
        products = truth.T @ model.loadings_
        order = linear_sum_assignment(-np.abs(products))[1]
        signs = np.sign(products[np.arange(3), order])
        off = np.abs(model.loadings_[:, order] * signs - truth)
        held.append(off < 1.6449 * model.loadings_std_error_[:, order])
    return float(np.mean(held)), float(np.mean(held, axis=0).min())


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--replicates", type=int, default=300)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)


def main(given: Namespace) -> None:
    table = Table(title=f"90 % intervals in {given.replicates} samples of {given.rows} rows hold")
    for name in ("samples", "rotation", "errors", "loadings, %", "the worst loading, %"):
        table.add_column(name)
    for name, draw, rotation, errors in CASES:
        mean, worst = covered(draw, rotation, errors, given)
        table.add_row(name, rotation, errors, f"{100 * mean:.1f}", f"{100 * worst:.0f}")
        print(f"{name}, {rotation}, {errors}: {100 * mean:.1f} %", flush=True)
    Console(width=110).print(table)
