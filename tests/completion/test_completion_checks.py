"""scikit-learn's own checks: the imputer passes all, the completion what applies."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from fisherfold.completion import LowRankImputer, MatrixCompletion

_WIDTH = "the check's X has another width than 2; ours is a table of (row id, column id)"
_PAIRS_ONLY = {
    "check_fit_score_takes_y": _WIDTH,
    "check_dont_overwrite_parameters": _WIDTH,
    "check_n_features_in_after_fitting": _WIDTH,
    "check_positive_only_tag_during_fit": _WIDTH,
    "check_estimators_dtypes": _WIDTH,
    "check_dtype_object": _WIDTH,
    "check_pipeline_consistency": _WIDTH,
    "check_estimators_pickle": _WIDTH + "; pickling is tested on pairs",
    "check_f_contiguous_array_estimator": _WIDTH,
    "check_regressors_train": _WIDTH,
    "check_regressor_data_not_an_array": _WIDTH,
    "check_regressors_no_decision_function": _WIDTH,
    "check_supervised_y_2d": _WIDTH,
    "check_regressors_int": _WIDTH,
    "check_non_transformer_estimators_n_iter": _WIDTH,
    "check_methods_sample_order_invariance": _WIDTH,
    "check_methods_subset_invariance": _WIDTH,
    "check_dict_unchanged": _WIDTH,
    "check_fit2d_predict1d": _WIDTH,
    "check_estimator_sparse_tag": "sparse matrices are accepted as fit(M), without y; the check passes y",
    "check_estimators_nan_inf": "allow_nan speaks of fit(M); an id that is NaN is refused",
}


@parametrize_with_checks(
    [LowRankImputer(), MatrixCompletion(rank=1)],
    expected_failed_checks=lambda e: _PAIRS_ONLY if isinstance(e, MatrixCompletion) else {},
)
def test_scikit_learn(estimator, check):
    check(estimator)


@pytest.fixture
def factored():
    rng = np.random.default_rng(1)
    scales = np.array([1.0, 100.0, 0.01, 5.0, 1.0, 1.0, 10.0, 1.0])
    X = (rng.normal(size=(200, 2)) @ rng.normal(size=(2, 8)) + 0.05 * rng.normal(size=(200, 8))) * scales + 7
    holes = np.where(rng.random(X.shape) < 0.3, np.nan, X)
    return X, holes, scales


def test_imputer_recovers_a_low_rank_table(factored):
    X, holes, scales = factored
    filled = LowRankImputer(rank=4).fit_transform(holes)
    missing = np.isnan(holes)
    error = np.where(missing, (filled - X) / scales, 0)
    mean_fill = np.where(missing, (np.nanmean(holes, axis=0) - X) / scales, 0)
    assert np.array_equal(filled[~missing], X[~missing])
    assert np.sqrt((error**2).sum() / missing.sum()) < 0.25 * np.sqrt((mean_fill**2).sum() / missing.sum())


def test_imputer_folds_in_new_rows(factored):
    X, holes, scales = factored
    imputer = LowRankImputer(rank=4).fit(holes[:150])
    filled = imputer.transform(holes[150:])
    missing = np.isnan(holes[150:])
    error = ((filled - X[150:]) / scales)[missing]
    assert np.sqrt(np.mean(error**2)) < 0.5
    one_by_one = np.vstack([imputer.transform(holes[k : k + 1]) for k in range(150, 200)])
    np.testing.assert_allclose(filled, one_by_one)


def test_imputer_takes_masked_entries_for_holes(factored):
    _, holes, _ = factored
    masked = np.ma.array(np.where(np.isnan(holes), 1e6, holes), mask=np.isnan(holes))
    imputer = LowRankImputer(rank=4)
    np.testing.assert_array_equal(imputer.fit_transform(masked), imputer.fit_transform(holes))


def test_what_the_imputer_cannot_judge_does_not_count(factored):
    table = np.array(factored[0], dtype=float)
    table[::3, 0] = np.nan
    without, strange = (np.column_stack([table, np.full(len(table), value)]) for value in (np.nan, 5000.0))
    model = LowRankImputer(rank=2).fit(without)
    filled = model.transform(strange)
    np.testing.assert_array_equal(filled[:, :-1], model.transform(without)[:, :-1])
    assert (filled[:, -1] == 5000).all()
    # a row with a value beyond all squares is as little believed as one with a large value
    model, holes = LowRankImputer(rank=2).fit(table[1:]), []
    for value in (1e30, 1e300):
        table[0, 1] = value
        filled = model.transform(table[:1])
        assert filled[0, 1] == value
        holes.append(filled[0, 0])
    assert holes[1] == pytest.approx(holes[0], rel=1e-6)


def test_imputer_at_the_edges():
    X = np.array([[1.0, np.nan, 3.0], [2.0, np.nan, np.nan], [np.nan, np.nan, np.nan]])
    filled = LowRankImputer().fit_transform(X)
    assert np.isfinite(filled).all()
    assert (filled[:, 1] == 0).all()
    with pytest.raises(ValueError, match="X must contain at least one observed value, got only NaN"):
        LowRankImputer().fit(np.full((2, 2), np.nan))
    with pytest.raises(ValueError, match=r"X must hold values of absolute value 1e\+300 at most, got 1.7e\+308"):
        LowRankImputer().fit(np.array([[1.7e308, 1.0], [-1.6e308, 2.0], [np.nan, 3.0]]))
    with pytest.raises(ValueError, match="rank must be a whole number of at least 1, got 0"):
        LowRankImputer(rank=0).fit(np.eye(3))


@pytest.mark.parametrize("how", ["fit", "stream", "impute"])
def test_the_default_rank_finds_what_is_in_small_tables(how):
    """With fewer values than coefficients all factors were switched off, and the rest was level."""
    errors = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        true = 3 + rng.normal(size=(60, 2)) @ rng.normal(size=(2, 30))
        holes = rng.random(true.shape) > 0.2
        given = np.where(holes, np.nan, true + 0.5 * rng.normal(size=true.shape))
        if how == "impute":
            found = LowRankImputer(rank=10).fit_transform(given)[holes]
        else:
            model, known = MatrixCompletion(), np.argwhere(~holes)
            for part in np.array_split(rng.permutation(len(known)), 1 if how == "fit" else 3):
                model.partial_fit(known[part], given[tuple(known[part].T)])
            found = model.predict(np.argwhere(holes))
        errors.append(np.sqrt(np.mean((found - true[holes]) ** 2)) / true.std())
    assert np.mean(errors) < 0.75, errors
