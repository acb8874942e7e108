"""A fit to c·y is c times the fit to y: no tolerance, floor or damping has a unit."""

import numpy as np
import pytest

from fisherfold import LowRankImputer, MatrixCompletion, MatrixCompletionCV, SubspaceRegressor

RNG = np.random.default_rng(0)
TABLE = 3 + RNG.normal(size=(30, 2)) @ RNG.normal(size=(2, 20)) + 0.1 * RNG.normal(size=(30, 20))
SEEN = RNG.random(TABLE.shape) < 0.6
PAIRS, ALL = np.argwhere(SEEN), np.argwhere(np.ones(TABLE.shape))
X, TASK = RNG.normal(size=(120, 4)), np.arange(120) % 6
SLOPES = RNG.normal(size=(6, 1)) * RNG.normal(size=4)
Y = 2 + (X * SLOPES[TASK]).sum(1) + 0.3 * RNG.normal(size=120)


def completed(c, **options):
    return MatrixCompletion(2, **options).fit(PAIRS, c * TABLE[SEEN]).predict(ALL)


def streamed(c, first):
    order, model = (
        np.random.default_rng(1).permutation(len(PAIRS)),
        MatrixCompletion(2, dtype="float64"),
    )
    for part in (order[:first], order[first:100], order[100:]):
        model.partial_fit(PAIRS[part], c * TABLE[SEEN][part])
    return model.predict(ALL)


def searched(c):
    return MatrixCompletionCV((1, 2), max_iter=10).fit(PAIRS, c * TABLE[SEEN]).predict(ALL)


def imputed(c):
    return LowRankImputer(2).fit_transform(np.where(SEEN, c * TABLE, np.nan))


def regressed(c, **options):
    return (
        SubspaceRegressor(2, random_state=0, **options)
        .fit(X, c * Y, task=TASK)
        .predict(X, task=TASK)
    )


def deviations(c):
    return SubspaceRegressor(2).fit(X, c * Y, task=TASK).predict(X, task=TASK, return_std=True)[1]


FITS = {
    "completion": completed,
    "completion, float64": lambda c: completed(c, dtype="float64"),
    "completion, fixed ridge": lambda c: completed(c, ridge=0.5),
    "completion, point": lambda c: completed(c, inference="point"),
    "completion, point, fixed ridge": lambda c: completed(
        c, inference="point", ridge=0.5, dtype="float64"
    ),
    "completion, point, no offsets": lambda c: completed(c, inference="point", offsets="none"),
    "stream from one value": lambda c: streamed(c, 1),
    "stream": lambda c: streamed(c, 50),
    "search": searched,
    "imputer": imputed,
    "regression": regressed,
    "regression, one noise": lambda c: regressed(c, noise="shared"),
    "regression, deviations": deviations,
    "regression, point": lambda c: regressed(c, inference="point"),
    "regression, point, no intercept": lambda c: regressed(
        c, inference="point", fit_intercept=False, ridge=1.0
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_fits_follow_the_unit_of_the_values(name):
    fit = FITS[name]
    base = fit(1.0)
    for c in (1e-12, 1e-8, 1e8, 1e12):
        np.testing.assert_allclose(fit(c) / c, base, rtol=1e-6, atol=1e-6 * np.abs(base).max())


def test_error_bars_of_constant_values_follow_their_unit():
    one, small = (
        MatrixCompletion(2).fit(PAIRS, np.full(len(PAIRS), c)).predict(ALL, return_std=True)[1] / c
        for c in (1.0, 1e-12)
    )
    np.testing.assert_allclose(small, one, rtol=0.01)


def test_the_trace_of_a_point_fit_is_in_the_units_of_the_targets():
    small, large = (
        SubspaceRegressor(2, inference="point", ridge=1.0).fit(X, c * Y, task=TASK)
        for c in (1.0, 1e3)
    )
    for name in ("loss", "gradient_norm"):
        found = [[row[name] for row in model.trace_] for model in (small, large)]
        np.testing.assert_allclose(
            found[1], np.array(found[0]) * 1e6, rtol=1e-6, atol=1e-12 * max(found[1])
        )
    residual = Y - small.predict(X, task=TASK)
    weights = small._weights.numpy()
    penalised = 0.5 * (residual @ residual + (weights**2).sum()) / 6
    np.testing.assert_allclose(small.trace_[-1]["loss"], penalised, rtol=1e-6)


@pytest.mark.parametrize("c", [1e-55, 1e-95, 1e95])
def test_deviations_follow_the_unit_of_the_targets(c):
    base, far = (SubspaceRegressor(2).fit(X, size * Y, task=TASK) for size in (1.0, c))
    for one, other in zip(
        *(m.predict(X, task=TASK, return_std=True) for m in (base, far)), strict=True
    ):
        np.testing.assert_allclose(other / c, one, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rank", [2, 4, 5])
@pytest.mark.parametrize(
    "options", [{}, {"inference": "point", "ridge": 0.0}], ids=["marginal", "point"]
)
def test_unscaled_features_of_very_different_sizes_all_count(options, rank):
    rng = np.random.default_rng(0)
    features, task = rng.normal(size=(600, 4)), np.repeat(np.arange(20), 30)
    weights = 1 + rng.normal(size=(20, 2)) @ rng.normal(size=(2, 4))
    y = (features * weights[task]).sum(1) + 0.1 * rng.normal(size=600)
    even = SubspaceRegressor(rank, **options).fit(features, y, task=task)
    uneven = features * [1e-4, 1.0, 1.0, 1e4]
    found = SubspaceRegressor(rank, scale=False, **options).fit(uneven, y, task=task)
    np.testing.assert_allclose(
        found.predict(uneven, task=task), even.predict(features, task=task), atol=1e-3
    )
    np.testing.assert_allclose(found.coef_ * [1e-4, 1.0, 1.0, 1e4], even.coef_, atol=1e-3)
