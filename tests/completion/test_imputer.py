"""LowRankImputer: filling, error bars, draws, Rubin's rules, more rows, files."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fisherfold.completion import LowRankImputer
from fisherfold.completion.imputer import pool_estimates


@pytest.fixture(scope="module")
def factored():
    rng = np.random.default_rng(1)
    scales = np.array([1.0, 100.0, 0.01, 5.0, 1.0, 1.0, 10.0, 1.0])
    X = (
        rng.normal(size=(200, 2)) @ rng.normal(size=(2, 8)) + 0.05 * rng.normal(size=(200, 8))
    ) * scales + 7
    return X, np.where(rng.random(X.shape) < 0.3, np.nan, X), scales


def test_it_recovers_a_low_rank_table_with_error_bars(factored):
    X, holes, scales = factored
    filled, std = LowRankImputer(rank=4).fit(holes).transform(holes, return_std=True)
    missing = np.isnan(holes)
    assert np.array_equal(filled[~missing], X[~missing])
    assert (std[~missing] == 0).all()
    error = ((filled - X) / scales)[missing]
    mean_fill = ((np.nanmean(holes, axis=0) - X) / scales)[missing]
    assert np.sqrt(np.mean(error**2)) < 0.25 * np.sqrt(np.mean(mean_fill**2))
    assert 0.83 < np.mean(np.abs((filled - X)[missing]) < 1.645 * std[missing]) < 0.97


def test_new_rows_are_filled_one_by_one_as_together(factored):
    X, holes, scales = factored
    imputer = LowRankImputer(rank=4).fit(holes[:150])
    filled = imputer.transform(holes[150:])
    assert np.sqrt(np.mean(((filled - X[150:]) / scales)[np.isnan(holes[150:])] ** 2)) < 0.5
    one_by_one = np.vstack([imputer.transform(holes[k : k + 1]) for k in range(150, 200)])
    np.testing.assert_allclose(filled, one_by_one)


def test_more_rows_improve_it(factored):
    X, holes, scales = factored

    def error(imputer):
        return np.sqrt(np.mean((((imputer.transform(holes) - X) / scales)[np.isnan(holes)]) ** 2))

    few = LowRankImputer(rank=2).fit(holes[:20])
    before = error(few)
    for start in range(20, 200, 60):
        few.partial_fit(holes[start : start + 60])
    assert error(few) < 0.8 * before


def test_draws_vary_as_the_error_bars_say(factored):
    _, holes, _ = factored
    imputer = LowRankImputer(rank=2).fit(holes)
    mean, std = imputer.transform(holes, return_std=True)
    draws = np.stack(list(imputer.sample(holes, 200)))
    missing = np.isnan(holes)
    assert (draws[:, ~missing] == holes[~missing]).all()
    off = (draws.mean(0) - mean)[missing] / std[missing]
    assert np.sqrt(np.mean(off**2)) < 0.5
    assert 0.7 < np.median(draws.std(0)[missing] / std[missing]) < 1.3
    first = next(imputer.sample(holes, 1, random_state=3))
    np.testing.assert_array_equal(first, next(imputer.sample(holes, 1, random_state=3)))


def test_ranks_keep_to_the_observed_values():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(400, 1)) + 0.4 * rng.normal(size=(400, 4))
    table = np.column_stack([np.exp(2 * z[:, 0]), z[:, 1] > 0, np.round(z[:, 2]), z[:, 3]]).astype(
        float
    )
    holes = np.where(rng.random(table.shape) < 0.2, np.nan, table)
    imputer = LowRankImputer(rank=2, marginals="ranks").fit(holes)
    for filled in (imputer.transform(holes), next(imputer.sample(holes, 1))):
        assert set(filled[:, 1]) == {0.0, 1.0}
        assert set(filled[:, 2]) <= set(np.round(z[:, 2]))
        assert filled[:, 0].min() >= np.nanmin(holes[:, 0])
    missing = np.isnan(holes[:, 0])
    plain = LowRankImputer(rank=2).fit_transform(holes)
    logs = [
        np.log(table[missing, 0].clip(1e-9)) - 2 * z[missing, 0]
        for table in (imputer.transform(holes), plain)
    ]
    assert np.abs(logs[0]).mean() < np.abs(logs[1]).mean()


def test_rubins_rules():
    rng = np.random.default_rng(0)
    q, u = rng.normal(size=(5, 3)), rng.random((5, 3))
    pooled = pool_estimates(q, u)
    np.testing.assert_allclose(pooled.estimate, q.mean(0))
    between = q.var(0, ddof=1)
    np.testing.assert_allclose(pooled.std_error**2, u.mean(0) + 1.2 * between)
    r = 1.2 * between / u.mean(0)
    np.testing.assert_allclose(pooled.df, 4 * (1 + 1 / r) ** 2)
    low, high = pooled.interval(0.95)
    np.testing.assert_allclose(high - low, 2 * stats.t.ppf(0.975, pooled.df) * pooled.std_error)
    assert (pool_estimates(q, u, df_complete=10).df < np.minimum(pooled.df, 10)).all()
    with pytest.raises(ValueError, match="at least 2 estimates with as many variances are needed"):
        pool_estimates([1.0], [1.0])


@pytest.mark.parametrize("marginals", ["gaussian", "ranks"])
def test_files_and_pickles(factored, tmp_path, marginals):
    _, holes, _ = factored
    frame = pd.DataFrame(holes, columns=list("abcdefgh"))
    imputer = LowRankImputer(rank=2, marginals=marginals).fit(frame)
    imputer.save(tmp_path / "m")
    for again in (LowRankImputer.load(tmp_path / "m"), pickle.loads(pickle.dumps(imputer))):
        np.testing.assert_array_equal(again.transform(frame), imputer.transform(frame))
        assert again.feature_names_in_.tolist() == list("abcdefgh")
        again.partial_fit(frame[:50])


def test_at_the_edges():
    X = np.array([[1.0, np.nan, 3.0], [2.0, np.nan, np.nan], [np.nan, np.nan, np.nan]])
    filled, std = LowRankImputer().fit(X).transform(X, return_std=True)
    assert np.isfinite(filled).all()
    assert np.isfinite(std).all()
    assert (filled[:, 1] == 0).all()
    strange = X.copy()
    strange[:, 1] = 5000.0  # nothing is known of this column
    np.testing.assert_array_equal(
        LowRankImputer().fit(X).transform(strange)[:, [0, 2]], filled[:, [0, 2]]
    )
    masked = np.ma.masked_invalid(X)
    np.testing.assert_array_equal(LowRankImputer().fit_transform(masked), filled)
    for table, message in (
        (np.full((2, 2), np.nan), "X must contain at least one observed value, got only NaN"),
        (
            np.array([[1.7e308, 1.0], [-1.6e308, 2.0]]),
            r"absolute value 1e\+300 at most, got 1.7e\+308",
        ),
        (
            pd.DataFrame({"a": [1.0, 2.0], "city": ["x", "y"]}),
            "column 'city' must hold numbers, got 'x'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            LowRankImputer().fit(table)
