"""The estimator: likelihood, units, holes, scores, Heywood cases and messages."""

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pytest
import torch
from factor_models import LOADINGS, population
from scipy.stats import multivariate_normal
from sklearn.base import clone
from sklearn.decomposition import FactorAnalysis as Peer
from sklearn.utils.estimator_checks import parametrize_with_checks

from fisherfold import FactorAnalysis
from fisherfold.plots import plot_loadings

FEW = "a factor needs three variables"
EXPECTED_FAILURES = dict.fromkeys(
    (
        "check_estimators_overwrite_params",
        "check_estimators_fit_returns_self",
        "check_readonly_memmap_input",
        "check_fit_idempotent",
        "check_fit_check_is_fitted",
        "check_n_features_in",
    ),
    FEW,
)


@pytest.fixture(scope="module")
def rows():
    covariance, _ = population("oblimin")
    rng = np.random.default_rng(0)
    return rng.standard_normal((300, 12)) @ np.linalg.cholesky(covariance).T


@pytest.fixture(scope="module")
def holed(rows):
    x = rows.copy()
    x[np.random.default_rng(1).random(x.shape) < 0.15] = np.nan
    return x


@parametrize_with_checks([FactorAnalysis()], expected_failed_checks=lambda _: EXPECTED_FAILURES)
@pytest.mark.filterwarnings("ignore:the unique variance:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:the fit has not converged:RuntimeWarning")
def test_scikit_learn_conventions_hold(estimator, check):
    check(estimator)


def test_the_likelihood_is_that_of_scikit_learn(rows):
    ours = FactorAnalysis(3, None).fit(rows)
    peer = Peer(3, tol=1e-10, max_iter=20_000, svd_method="lapack").fit(rows)
    assert ours.score(rows) == pytest.approx(peer.score(rows), abs=1e-7)
    np.testing.assert_allclose(ours.get_covariance(), peer.get_covariance(), atol=1e-4)
    expected = ours.components_.T @ ours.components_ + np.diag(ours.noise_variance_)
    np.testing.assert_allclose(ours.get_covariance(), expected, atol=1e-10)
    np.testing.assert_allclose(np.diag(expected), rows.var(0), rtol=1e-6)


def test_the_likelihood_of_holes_is_that_of_the_observed_values(holed):
    model = FactorAnalysis(2).fit(holed)
    mean, covariance = model.mean_, model.get_covariance()
    expected = 0.0
    for row in holed:
        seen = ~np.isnan(row)
        expected += multivariate_normal.logpdf(
            row[seen], mean[seen], covariance[np.ix_(seen, seen)]
        )
    assert model.fit_statistics_.log_likelihood == pytest.approx(expected, rel=1e-12)
    assert model.score(holed) == pytest.approx(expected / len(holed), rel=1e-12)


def test_holes_widen_errors_and_do_not_bias(rows, holed):
    whole, part = (FactorAnalysis(3).fit(x) for x in (rows, holed))
    gap = np.abs(whole.loadings_ - part.loadings_) / part.loadings_std_error_
    assert gap.max() < 2.5
    assert part.loadings_std_error_.mean() > 1.03 * whole.loadings_std_error_.mean()
    assert part.n_samples_ == 300


@pytest.mark.parametrize("unit", [1e-12, 1e12])
@pytest.mark.parametrize("rotation", ["varimax", "oblimin"])
def test_units_do_not_matter(rows, unit, rotation):
    scales = unit * np.arange(1, 13)
    one, other = (FactorAnalysis(3, rotation).fit(x) for x in (rows, rows * scales + unit))
    for name in ("loadings_", "loadings_std_error_", "factor_correlations_", "uniquenesses_"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-6)
    for name in ("chi_square", "rmsea", "cfi", "srmr"):
        first, second = (getattr(m.fit_statistics_, name) for m in (one, other))
        assert first == pytest.approx(second, abs=1e-5)
    np.testing.assert_allclose(
        one.transform(rows), other.transform(rows * scales + unit), atol=1e-5
    )


def test_rows_and_their_covariance_give_the_same(rows):
    of_rows = FactorAnalysis(3, "promax").fit(rows)
    of_matrix = FactorAnalysis(3, "promax").fit_covariance(np.cov(rows.T, bias=True), len(rows))
    np.testing.assert_allclose(of_rows.loadings_, of_matrix.loadings_, atol=1e-6)
    np.testing.assert_allclose(
        of_rows.loadings_std_error_, of_matrix.loadings_std_error_, atol=1e-6
    )


def test_errors_of_one_factor_are_those_of_lawley_and_maxwell():
    """Of the unrotated loading of equal variables, by the delta method from the correlation."""
    p, n, load = 6, 1000, 0.7
    covariance = np.full((p, p), load**2) + (1 - load**2) * np.eye(p)
    model = FactorAnalysis(1).fit_covariance(covariance, n)
    np.testing.assert_allclose(model.loadings_, load, atol=1e-6)
    value, error = model.standard_errors(lambda loadings, _: loadings.mean().reshape(1))
    # the mean loading is the root of the common correlation, whose maximum-likelihood variance is
    # known
    rho = load**2
    variance = 2 * (1 - rho) ** 2 * (1 + (p - 1) * rho) ** 2 / (p * (p - 1) * n)
    assert value[0] == pytest.approx(load, abs=1e-6)
    assert error[0] == pytest.approx(variance**0.5 / (2 * load), rel=1e-4)


def test_scores_are_expectations_given_a_row(rows, holed):
    model = FactorAnalysis(3).fit(rows)
    joint = model.loadings_ @ model.factor_correlations_
    z = (rows - model.mean_) / model.scale_
    correlation = model.get_covariance() / model.scale_ / model.scale_[:, None]
    scores, deviations = model.transform(rows, return_std=True)
    np.testing.assert_allclose(scores, z @ np.linalg.solve(correlation, joint), atol=1e-10)
    left = model.factor_correlations_ - joint.T @ np.linalg.solve(correlation, joint)
    np.testing.assert_allclose(deviations, np.sqrt(np.diag(left))[None].repeat(300, 0), atol=1e-10)
    fewer, wider = model.transform(holed, return_std=True)
    assert (wider >= deviations - 1e-12).all()
    assert np.corrcoef(fewer[:, 0], scores[:, 0])[0, 1] > 0.95


def test_a_heywood_case_is_reported():
    covariance = np.array([[1.0, 0.9, 0.9], [0.9, 1.0, 0.7], [0.9, 0.7, 1.0]])
    with pytest.warns(RuntimeWarning, match=r"unique variance of the variables \['a'\] .* Heywood"):
        model = FactorAnalysis(1).fit_covariance(covariance, 200, names=["a", "b", "c"])
    assert list(model.heywood_) == [0]
    assert model.uniquenesses_[0] == pytest.approx(0.005, abs=1e-3)
    assert np.isfinite(model.loadings_std_error_).all()
    assert "at its bound" in model.summary()


def test_names_of_frames_are_kept(rows):
    frame = pd.DataFrame(rows, columns=[f"item {i}" for i in range(12)])
    model = FactorAnalysis(3).fit(frame)
    assert "item 11" in model.summary()
    assert "RMSEA" in model.summary()
    assert list(model.get_feature_names_out()) == [f"factoranalysis{i}" for i in range(3)]
    assert plot_loadings(model).get_yticklabels()[11].get_text() == "item 11"
    low, high = model.interval(0.9)
    assert (low < model.loadings_).all()
    np.testing.assert_allclose((high - low) / 2, 1.6449 * model.loadings_std_error_, rtol=1e-4)


def test_the_fit_of_the_right_model_is_good_and_of_too_few_factors_not(rows):
    good, poor = (FactorAnalysis(k).fit(rows).fit_statistics_ for k in (3, 1))
    assert good.p_value > 0.01
    assert good.rmsea < 0.05
    assert good.cfi > 0.98
    assert poor.p_value < 1e-6
    assert poor.rmsea_interval[0] > 0.05
    assert poor.bic > good.bic
    assert good.df == 33
    assert LOADINGS.shape == (12, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_factors": 8}, "n_factors must be at most 7 for 12 variables, got 8"),
        ({"n_factors": 0}, "n_factors must be a positive integer, got 0"),
        ({"rotation": "quartimax"}, "rotation must be one of .*, got 'quartimax'"),
        ({"errors": "sandwich"}, "errors must be one of .*'robust'.*, got 'sandwich'"),
    ],
)
def test_bad_options_are_named(rows, change, message):
    with pytest.raises(ValueError, match=message):
        clone(FactorAnalysis(3)).set_params(**change).fit(rows)


def test_bad_data_are_named(rows):
    constant = rows.copy()
    constant[:, 3] = 1.0
    with pytest.raises(ValueError, match=r"X must have no constant variable, got \[.*3.*\]"):
        FactorAnalysis(3).fit(constant)
    empty = rows.copy()
    empty[:, 3] = np.nan
    with pytest.raises(ValueError, match="X must have values of every variable, got none of"):
        FactorAnalysis(3).fit(empty)
    with pytest.raises(ValueError, match="there must be more rows than the 12 variables"):
        FactorAnalysis(3).fit(rows[:12])
    with pytest.raises(ValueError, match="covariance must be symmetric and positive definite"):
        FactorAnalysis(1).fit_covariance(-np.eye(4), 100)
    with pytest.raises(ValueError, match="errors='robust' needs the rows"):
        FactorAnalysis(1, errors="robust").fit_covariance(np.eye(4), 100)
    with pytest.raises(ValueError, match="level must lie between 0 and 1, got 90"):
        FactorAnalysis(3).fit(rows).interval(90)


def test_robust_errors_are_those_of_the_model_where_it_is_right():
    covariance, _ = population("oblimin")
    rng = np.random.default_rng(3)
    x = rng.standard_normal((20_000, 12)) @ np.linalg.cholesky(covariance).T
    models = {
        kind: FactorAnalysis(3, errors=kind).fit(x) for kind in ("expected", "observed", "robust")
    }
    for kind in ("observed", "robust"):
        ratio = models[kind].loadings_std_error_ / models["expected"].loadings_std_error_
        np.testing.assert_allclose(ratio, 1, atol=0.06)
    assert torch.get_default_dtype() == torch.float32
