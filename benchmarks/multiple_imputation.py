"""Whether pooled 95 % intervals of a regression coefficient cover.

Tables of n rows with d correlated features and a target; a share of all entries is missing
completely at random. The coefficient of the first feature (truth 1) is estimated by least squares
in m imputed tables, and the estimates are pooled by Rubin's rules.

Against: scikit-learn's IterativeImputer, complete cases
Takes: ten minutes
Page: docs/guides/imputation.md
"""

from __future__ import annotations

import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

SMOKE = "--tables 2 --rows 80 --draws 2 --processes 1"


def fitted(table: np.ndarray) -> tuple[float, float]:
    """The first coefficient of a regression of the last column, and its squared error."""
    A = np.column_stack([np.ones(len(table)), table[:, :-1]])
    y = table[:, -1]
    coef, *_ = np.linalg.lstsq(A, y, rcond=None)
    residual = float(((y - A @ coef) ** 2).sum())
    return float(coef[1]), residual / (len(A) - A.shape[1]) * float(np.linalg.inv(A.T @ A)[1, 1])


def pooled(tables: list[np.ndarray]) -> tuple[float, float, float]:
    from fisherfold.completion import pool_estimates

    estimates, variances = zip(*map(fitted, tables), strict=True)
    found = pool_estimates(estimates, variances, df_complete=len(tables[0]) - tables[0].shape[1])
    low, high = found.interval(0.95)
    return float(found.estimate), float(low), float(high)


def ours(holes: np.ndarray, m: int, seed: int) -> tuple[float, float, float]:
    from fisherfold import LowRankImputer

    imputer = LowRankImputer(rank=holes.shape[1], random_state=seed, n_jobs=1).fit(holes)
    return pooled(list(imputer.sample(holes, m)))


def iterative(holes: np.ndarray, m: int, seed: int) -> tuple[float, float, float]:
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pooled(
            [
                IterativeImputer(sample_posterior=True, random_state=1000 * seed + k).fit_transform(
                    holes
                )
                for k in range(m)
            ]
        )


def complete_cases(holes: np.ndarray, m: int, seed: int) -> tuple[float, float, float]:
    from scipy.stats import t

    table = holes[~np.isnan(holes).any(axis=1)]
    coef, variance = fitted(table)
    half = t.ppf(0.975, len(table) - table.shape[1]) * variance**0.5
    return coef, coef - half, coef + half


METHODS: dict[str, Callable[[np.ndarray, int, int], tuple[float, float, float]]] = {
    "LowRankImputer.sample": ours,
    "IterativeImputer(sample_posterior=True)": iterative,
    "complete cases": complete_cases,
}


def of_table(a: Namespace, covariance: np.ndarray, slopes: np.ndarray, seed: int) -> dict[str, Any]:
    """What each method gives on one table: estimate, covered or not, width, seconds."""
    rng = np.random.default_rng(seed)
    X = rng.multivariate_normal(np.zeros(a.features), covariance, size=a.rows)
    table = np.column_stack([X, X @ slopes + rng.normal(size=a.rows)])
    holes = np.where(rng.random(table.shape) < a.missing, np.nan, table)
    found = {}
    for name, run in METHODS.items():
        began = time.process_time()
        estimate, low, high = run(holes, a.draws, seed)
        found[name] = estimate, low <= 1 <= high, high - low, time.process_time() - began
    return found


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--tables", type=int, default=100, help="that are drawn (100)")
    parser.add_argument("--rows", type=int, default=300, help="of a table (300)")
    parser.add_argument("--features", type=int, default=5, help="of a table (5)")
    parser.add_argument("--draws", type=int, default=10, help="imputations of a table (10)")
    parser.add_argument("--processes", type=int, default=2, help="at a time (2)")
    parser.add_argument("--missing", type=float, default=0.2, help="share of the entries (0.2)")


def main(given: Namespace) -> None:
    covariance = 0.5 * np.ones((given.features, given.features)) + 0.5 * np.eye(given.features)
    slopes = np.zeros(given.features)
    slopes[:2] = 1.0, 0.5
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        tables = list(
            pool.map(partial(of_table, given, covariance, slopes), range(given.tables), chunksize=5)
        )
    found = {name: [table[name] for table in tables] for name in METHODS}
    size = f"{given.tables} tables of {given.rows} x {given.features + 1}"
    print(f"{size}, {given.missing:.0%} missing, {given.draws} draws")
    print("| | mean estimate (truth 1) | covered by 95 % intervals | width | CPU s a table |")
    print("|---|---|---|---|---|")
    for name, rows in found.items():
        estimate, covered, width, seconds = np.array(rows, dtype=float).mean(axis=0)
        print(f"| {name} | {estimate:.3f} | {covered:.3f} | {width:.3f} | {seconds:.2f} |")
