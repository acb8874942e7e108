"""Filling holes of six tables: errors, coverage and calibrated categories under three mechanisms.

Values of iris, wine, breast_cancer, diabetes, digits and linnerud are hidden and filled in. The
class of the first three and of digits, and the sex of diabetes, is a column of categories. A share
of each column is hidden completely at random (mcar), more often where another column is large
(mar), or where the value itself is large (mnar; a category: the larger its number). Errors are root
mean squares in standard deviations of a column. Right is the share of right categories, ECE the
expected calibration error of their probabilities in ten bins, over all masks; coverage is that of
90 % intervals of the numbers where a method has them: from its standard deviations, or 20 draws.
IterativeImputer, KNNImputer and SoftImpute see categories as indicators; SoftImpute takes the
shrinkage that is best on held-out values. Ours has its default settings throughout. HyperImpute
0.1.17 needs pandas before 3 and chooses among those of its models that work with scikit-learn 1.7.

Against: scikit-learn's imputers (linear, forests, KNN), SoftImpute, miceforest, HyperImpute
Takes: half an hour; two minutes with --methods ours,iterative,knn
Page: docs/guides/imputation.md
"""

from __future__ import annotations

import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks._common import names, numbers, peer, show, table, timed

SMOKE = "--sets iris --methods ours,iterative,knn,soft --seeds 1 --shares 0.2"
SETS = ("iris", "wine", "breast_cancer", "diabetes", "digits", "linnerud")
MECHANISMS = ("mcar", "mar", "mnar")
DRAWS = 20
COVERAGE = 0.9
# the models that HyperImpute chooses from
HYPER = ["random_forest"]
HYPER_NUMBERS = ["linear_regression", "random_forest_regressor"]
# how steeply the odds of a hole rise with a standardised value
STEEP = 2.0


@dataclass
class Filled:
    """Standardised numbers, their intervals if any, and the probabilities of categories."""

    numbers: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    chances: np.ndarray | None = None


@dataclass
class Given:
    """Standardised numbers and the codes of one column of categories, NaN where hidden."""

    numbers: np.ndarray
    codes: np.ndarray | None
    kinds: int

    def with_indicators(self) -> np.ndarray:
        """Categories as columns of zeros and ones; the first has none, since the others tell it."""
        if self.codes is None:
            return self.numbers
        shown = (self.codes[:, None] == np.arange(1, self.kinds)).astype(float)
        shown[np.isnan(self.codes)] = np.nan
        return np.column_stack([self.numbers, shown])

    def with_codes(self) -> np.ndarray:
        """Categories as their numbers."""
        return self.numbers if self.codes is None else np.column_stack([self.numbers, self.codes])

    def taken_apart(self, filled: np.ndarray, **more: Any) -> Filled:
        """A filled table of numbers and indicators."""
        d = self.numbers.shape[1]
        chances = None
        if self.codes is not None:
            chances = indicated(filled[:, d:]).clip(1e-6, 1)
            chances = chances / chances.sum(axis=1, keepdims=True)
        return Filled(filled[:, :d], chances=chances, **more)

    def from_codes(self, tables: list[np.ndarray], *, intervals: bool) -> Filled:
        """Filled tables of numbers and codes: means, intervals and shares."""
        stack = np.stack(tables).astype(float)
        d = self.numbers.shape[1]
        found = Filled(stack[:, :, :d].mean(axis=0))
        if intervals:
            half = NormalDist().inv_cdf((1 + COVERAGE) / 2) * np.sqrt(1 + 1 / len(stack))
            half = half * stack[:, :, :d].std(axis=0, ddof=1)
            found.low, found.high = found.numbers - half, found.numbers + half
        if self.codes is not None:
            found.chances = (stack[:, :, d, None] == np.arange(self.kinds)).mean(axis=0)
        return found


def indicated(shown: np.ndarray) -> np.ndarray:
    """Indicators of all categories from those of all but the first."""
    return np.column_stack([1 - shown.sum(axis=1), shown])


def load(name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Standardised numbers and the codes of the column of categories."""
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    X, codes = np.asarray(data.data, dtype=float), None
    if name == "diabetes":
        codes, X = X[:, 1] > 0, np.delete(X, 1, axis=1)
    elif name == "linnerud":
        X = np.column_stack([X, data.target])
    else:
        codes = data.target
    X = X[:, X.std(axis=0) > 0]
    return (X - X.mean(axis=0)) / X.std(axis=0), None if codes is None else codes.astype(float)


def holes(full: np.ndarray, share: float, mechanism: str, rng: np.random.Generator) -> np.ndarray:
    """Which entries of a table are hidden."""
    z = (full - full.mean(axis=0)) / full.std(axis=0)
    if mechanism == "mcar":
        return rng.random(z.shape) < share
    if mechanism == "mar":
        # the columns that decide for others keep all their values
        keep = rng.permutation(z.shape[1])[: max(1, z.shape[1] // 3)]
        hidden = _more_where_large(z[:, rng.choice(keep, z.shape[1])], share, rng)
        hidden[:, keep] = False
        return hidden
    return _more_where_large(z, share, rng)


def _more_where_large(z: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Holes with odds that rise with a value, a given share of each column."""
    keys = rng.logistic(size=z.shape) + STEEP * z
    return keys > np.quantile(keys, 1 - share, axis=0)


def ours(given: Given, seed: int) -> Filled:
    from fisherfold import LowRankImputer

    X = given.with_codes()
    categorical = None if given.codes is None else [-1]
    model = LowRankImputer(categorical=categorical, random_state=seed, n_jobs=1).fit(X)
    filled, std = model.transform(X, return_std=True)
    d = given.numbers.shape[1]
    half = NormalDist().inv_cdf((1 + COVERAGE) / 2) * std[:, :d]
    chances = None if given.codes is None else model.category_probabilities(X)[d]
    return Filled(filled[:, :d], filled[:, :d] - half, filled[:, :d] + half, chances)


def ours_drawn(given: Given, seed: int) -> Filled:
    from fisherfold import LowRankImputer

    X = given.with_codes()
    categorical = None if given.codes is None else [-1]
    model = LowRankImputer(categorical=categorical, random_state=seed, n_jobs=1).fit(X)
    return given.from_codes(list(model.sample(X, DRAWS)), intervals=True)


def iterative(given: Given, seed: int) -> Filled:
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer

    model = IterativeImputer(random_state=seed, keep_empty_features=True)
    return given.taken_apart(model.fit_transform(given.with_indicators()))


def iterative_drawn(given: Given, seed: int) -> Filled:
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer

    d = given.numbers.shape[1]
    tables = []
    for draw in range(DRAWS):
        model = IterativeImputer(
            sample_posterior=True, random_state=100 * seed + draw, keep_empty_features=True
        )
        filled = model.fit_transform(given.with_indicators())
        if given.codes is not None:
            filled = np.column_stack([filled[:, :d], indicated(filled[:, d:]).argmax(axis=1)])
        tables.append(filled)
    return given.from_codes(tables, intervals=True)


def iterative_forest(given: Given, seed: int) -> Filled:
    from sklearn.ensemble import ExtraTreesRegressor
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer

    trees = ExtraTreesRegressor(n_estimators=20, random_state=seed, n_jobs=1)
    model = IterativeImputer(trees, max_iter=5, random_state=seed, keep_empty_features=True)
    return given.taken_apart(model.fit_transform(given.with_indicators()))


def knn(given: Given, seed: int) -> Filled:
    from sklearn.impute import KNNImputer

    del seed
    return given.taken_apart(
        KNNImputer(keep_empty_features=True).fit_transform(given.with_indicators())
    )


def soft(given: Given, seed: int) -> Filled:
    """SoftImpute (Mazumder, Hastie, Tibshirani 2010), X ← S_λ(P_Ω(X) + P_Ω⊥(Z))."""
    X = given.with_indicators()
    mean, scale = np.nanmean(X, axis=0), np.nanstd(X, axis=0)
    scale[scale == 0] = 1
    z = (X - mean) / scale
    seen = ~np.isnan(z)
    held = seen & (np.random.default_rng(1000 + seed).random(z.shape) < 0.1)
    top = np.linalg.norm(np.where(seen, z, 0), 2)
    errors, start = {}, np.zeros_like(z)
    for factor in np.geomspace(0.7, 0.005, 12):
        start = soft_impute(z, seen & ~held, factor * top, start)
        errors[factor] = np.mean((start - z)[held] ** 2)
    best, start = min(errors, key=errors.__getitem__), np.zeros_like(z)
    for factor in np.geomspace(0.7, 0.005, 12):
        if factor >= best:
            start = soft_impute(z, seen, factor * top, start)
    return given.taken_apart(np.where(seen, X, start * scale + mean))


def soft_impute(z: np.ndarray, seen: np.ndarray, shrinkage: float, start: np.ndarray) -> np.ndarray:
    """Singular values lowered by a constant, until the table stays."""
    filled = start
    for _ in range(200):
        u, s, v = np.linalg.svd(np.where(seen, z, filled), full_matrices=False)
        new = u * np.maximum(s - shrinkage, 0) @ v
        change = np.sum((new - filled) ** 2) / max(np.sum(filled**2), 1e-12)
        filled = new
        if change < 1e-6:
            break
    return filled


def mice_forest(given: Given, seed: int) -> Filled:
    """Chained LightGBM models with predictive mean matching, five tables."""
    import pandas as pd

    miceforest = peer("miceforest")
    frame = _framed(given, pd)
    kernel = miceforest.ImputationKernel(frame, num_datasets=5, random_state=seed)
    kernel.mice(3, num_threads=1, verbose=False, verbosity=-1)
    tables = [kernel.complete_data(k).to_numpy(dtype=float) for k in range(5)]
    return given.from_codes(tables, intervals=False)


def _framed(given: Given, pd: Any) -> Any:
    frame = pd.DataFrame(given.numbers, columns=[f"x{j}" for j in range(given.numbers.shape[1])])
    if given.codes is not None:
        frame["kind"] = pd.Categorical(given.codes, categories=range(given.kinds))
    return frame


def hyper_impute(given: Given, seed: int) -> Filled:
    """HyperImpute (Jarrett et al. 2022): chained models, one chosen for each column."""
    import pandas as pd

    plugins = peer("hyperimpute.plugins.imputers").Imputers()
    model = plugins.get(
        "hyperimpute", random_state=seed, classifier_seed=HYPER, regression_seed=HYPER_NUMBERS
    )
    filled = model.fit_transform(_framed(given, pd).astype(float)).to_numpy(dtype=float)
    return given.from_codes([filled], intervals=False)


def means(given: Given, seed: int) -> Filled:
    del seed
    X = given.with_indicators()
    return given.taken_apart(np.where(np.isnan(X), np.nanmean(X, axis=0), X))


METHODS: dict[str, tuple[str, Callable[[Given, int], Filled]]] = {
    "ours": ("LowRankImputer", ours),
    "ours_drawn": (f"LowRankImputer.sample, {DRAWS} draws", ours_drawn),
    "iterative": ("IterativeImputer", iterative),
    "iterative_drawn": (f"IterativeImputer, {DRAWS} draws", iterative_drawn),
    "forest": ("IterativeImputer, extra trees", iterative_forest),
    "knn": ("KNNImputer", knn),
    "soft": ("SoftImpute", soft),
    "miceforest": ("miceforest, 5 tables", mice_forest),
    "hyperimpute": ("HyperImpute", hyper_impute),
    "means": ("means and frequencies", means),
}


def measured(name: str, share: float, mechanism: str, method: str, seeds: int) -> dict[str, float]:
    """What one method reaches on one set."""
    full, codes = load(name)
    whole = full if codes is None else np.column_stack([full, codes])
    kinds = 0 if codes is None else int(codes.max()) + 1
    found: dict[str, list[float]] = {key: [] for key in ("rmse", "covered", "right", "cpu")}
    chances, truth = [], []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        hidden = holes(whole, share, mechanism, rng)
        shown = np.where(hidden, np.nan, whole)
        d = full.shape[1]
        given = Given(shown[:, :d], None if codes is None else shown[:, d], kinds)
        filled, seconds = timed(lambda given=given, seed=seed: METHODS[method][1](given, seed))
        missed = hidden[:, :d]
        off = (filled.numbers - full)[missed]
        found["rmse"].append(float(np.sqrt(np.mean(off**2))))
        found["cpu"].append(seconds)
        if filled.low is not None and filled.high is not None:
            inside = (filled.low <= full) & (full <= filled.high)
            found["covered"].append(float(inside[missed].mean()))
        if codes is not None and filled.chances is not None and hidden[:, d].any():
            p, y = filled.chances[hidden[:, d]], codes[hidden[:, d]]
            found["right"].append(float(np.mean(p.argmax(axis=1) == y)))
            chances.append(p)
            truth.append(y)
    result = {key: float(np.mean(values)) for key, values in found.items() if values}
    if chances:
        result["ece"] = calibration_error(np.concatenate(chances), np.concatenate(truth))
    return result


def calibration_error(chances: np.ndarray, truth: np.ndarray) -> float:
    """Expected calibration error over the probabilities of all categories, in ten bins."""
    hit = truth[:, None] == np.arange(chances.shape[1])
    place = np.minimum((chances * 10).astype(int), 9)
    gaps = np.bincount(place.ravel(), (chances - hit).ravel(), minlength=10)
    return float(np.abs(gaps).sum() / chances.size)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--sets", type=names, default=list(SETS), help="names with commas")
    parser.add_argument("--methods", type=names, default=list(METHODS), help="names with commas")
    parser.add_argument("--mechanisms", type=names, default=list(MECHANISMS))
    parser.add_argument("--shares", type=numbers, default=[0.2], help="hidden of each column")
    parser.add_argument("--seeds", type=int, default=3, help="how many masks")


def main(given: Namespace) -> None:
    warnings.simplefilter("ignore")
    for mechanism in given.mechanisms:
        for share in given.shares:
            _report(given, mechanism, share)


def _report(given: Namespace, mechanism: str, share: float) -> None:
    heads = [*given.sets, "mean", "coverage", "right", "ECE", "CPU s"]
    made = table(f"{mechanism}, {share:.0%} of each column, {given.seeds} masks", ["RMSE", *heads])
    for method in given.methods:
        runs = [measured(name, share, mechanism, method, given.seeds) for name in given.sets]
        rmse = [run["rmse"] for run in runs]
        cells = [f"{value:.3f}" for value in [*rmse, float(np.mean(rmse))]]
        for key, form in (("covered", ".3f"), ("right", ".3f"), ("ece", ".3f")):
            values = [run[key] for run in runs if key in run]
            cells.append(f"{np.mean(values):{form}}" if values else "")
        cells.append(f"{sum(run['cpu'] for run in runs):.1f}")
        made.add_row(METHODS[method][0], *cells)
        print(" | ".join([METHODS[method][0], *cells]), flush=True)
    show(made)
