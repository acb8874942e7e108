"""Do pooled 95 % intervals of a regression coefficient cover? LowRankImputer, IterativeImputer and complete cases.

python benchmarks/multiple_imputation.py --tables 200 --processes 2

Tables of n rows with d correlated features and a target; a share of all entries is missing completely at random. The
coefficient of the first feature (truth 1) is estimated by least squares in m imputed tables, and the estimates are
pooled by Rubin's rules.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"


def fitted(table: np.ndarray) -> tuple[float, float]:
    """The coefficient of the first column in a regression of the last one, and its squared standard error."""
    A, y = np.column_stack([np.ones(len(table)), table[:, :-1]]), table[:, -1]
    coef, *_ = np.linalg.lstsq(A, y, rcond=None)
    residual = float(((y - A @ coef) ** 2).sum())
    return float(coef[1]), residual / (len(A) - A.shape[1]) * float(np.linalg.inv(A.T @ A)[1, 1])


def pooled(tables: list[np.ndarray]) -> tuple[float, float, float]:
    from fisherfold.completion.imputer import pool_estimates

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


def of_table(
    a: argparse.Namespace, covariance: np.ndarray, slopes: np.ndarray, seed: int
) -> dict[str, Any]:
    """Estimate, whether the interval covers, its width and the seconds of each method on one table."""
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


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (
        ("tables", 100),
        ("rows", 300),
        ("features", 5),
        ("draws", 10),
        ("processes", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--missing", type=float, default=0.2)
    a = parser.parse_args()
    covariance = 0.5 * np.ones((a.features, a.features)) + 0.5 * np.eye(a.features)
    slopes = np.zeros(a.features)
    slopes[:2] = 1.0, 0.5
    with ProcessPoolExecutor(a.processes, mp_context=get_context("spawn")) as pool:
        tables = list(
            pool.map(partial(of_table, a, covariance, slopes), range(a.tables), chunksize=5)
        )
    found = {name: [table[name] for table in tables] for name in METHODS}
    print(
        f"{a.tables} tables of {a.rows} x {a.features + 1}, {a.missing:.0%} missing, {a.draws} draws"
    )
    print(
        "| | mean estimate (truth 1) | covered by 95 % intervals | width | CPU s a table |\n|---|---|---|---|---|"
    )
    for name, rows in found.items():
        estimate, covered, width, seconds = np.array(rows, dtype=float).mean(axis=0)
        print(f"| {name} | {estimate:.3f} | {covered:.3f} | {width:.3f} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
