"""Weights, precisions and replicates: what the likelihood says they are, and intervals that hold."""

from __future__ import annotations

import numpy as np
import pytest

from fisherfold import MatrixCompletion, MatrixCompletionCV

OPTIONS = {"clip": False, "rated_sets": False}


def table(seed=0, n=300, m=120, density=0.5, noise=1.0):
    """Noisy values of a rank-two table: pairs, values, and fresh values of pairs that were not seen."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(n, 2)) @ rng.normal(size=(2, m)) + rng.normal(size=(n, 1))
    seen = rng.random(truth.shape) < density
    pairs, held = np.argwhere(seen), np.argwhere(~seen)[::5]
    y = truth[seen] + noise * rng.normal(size=len(pairs))
    fresh = truth[tuple(held.T)] + noise * rng.normal(size=len(held))
    return pairs, y, held, fresh


def covered(model, pairs, fresh):
    low, high = model.predict_interval(pairs, 0.9)
    return np.mean((low <= fresh) & (fresh <= high))


def of_kind(kind, count, rng):
    age = rng.exponential(size=count)
    return {
        "halves at 0.01": np.where(rng.random(count) < 0.5, 0.01, 1.0),
        "halves at 0.1": np.where(rng.random(count) < 0.5, 0.1, 1.0),
        "all at 0.6": np.full(count, 0.6),
        "log-normal": np.exp(0.5 * rng.normal(size=count)),
        "exponential decay": np.exp(-age),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["halves at 0.01", "halves at 0.1", "all at 0.6", "log-normal", "exponential decay"],
)
def test_intervals_of_ordinary_ratings_hold_under_weights(kind):
    """The weights say nothing of the noise here: a new rating has that of any other."""
    pairs, y, held, fresh = table()
    weights = of_kind(kind, len(y), np.random.default_rng(1))
    model = MatrixCompletion(2, **OPTIONS).fit(pairs, y, sample_weight=weights)
    assert 0.88 <= covered(model, held, fresh) <= 0.92
    assert model.noise_ == pytest.approx(1.0, rel=0.06)


def test_ratings_of_almost_no_weight_are_almost_left_out():
    pairs, y, held, fresh = table()
    rng = np.random.default_rng(1)
    bad = rng.random(len(y)) < 0.5
    spoilt = np.where(bad, rng.permutation(y), y)
    model = MatrixCompletion(2, **OPTIONS)
    model.fit(pairs, spoilt, sample_weight=np.where(bad, 1e-6, 1.0))
    left = MatrixCompletion(2, **OPTIONS).fit(pairs[~bad], y[~bad])
    without = MatrixCompletion(2, **OPTIONS)
    without.fit(pairs, spoilt, sample_weight=np.where(bad, 0.0, 1.0))
    np.testing.assert_array_equal(without.predict(held), left.predict(held))
    np.testing.assert_allclose(model.predict(held), left.predict(held), atol=0.1)
    assert 0.88 <= covered(model, held, fresh) <= 0.92


@pytest.mark.parametrize("likelihood", ["ordered", "binary"])
def test_a_weight_of_two_is_a_second_rating_of_the_same_value(likelihood):
    """For Gaussian values see ``test_a_rating_of_weight_two_counts_as_two``: their noise tells the two apart."""
    pairs, y, held, _ = table(n=60, m=40)
    y = np.digitize(y, [-1.0, 0.5] if likelihood == "ordered" else [0.0]) + 1.0
    twice = np.random.default_rng(2).random(len(y)) < 0.4
    options = OPTIONS | {"likelihood": likelihood, "dtype": "float64"}
    one = MatrixCompletion(2, **options).fit(pairs, y, sample_weight=np.where(twice, 2.0, 1.0))
    two = MatrixCompletion(2, **options)
    two.fit(np.concatenate([pairs, pairs[twice]]), np.concatenate([y, y[twice]]))
    for a, b in zip(
        one.predict(held, return_std=True), two.predict(held, return_std=True), strict=True
    ):
        # the noise of the Gaussian fit that gives the scale differs
        np.testing.assert_allclose(a, b, atol=0.05)


def test_weights_are_never_rescaled():
    """Half of the evidence: the same noise, wider posteriors."""
    pairs, y, held, _ = table()
    whole = MatrixCompletion(2, **OPTIONS).fit(pairs, y)
    tenth = MatrixCompletion(2, **OPTIONS).fit(pairs, y, sample_weight=np.full(len(y), 0.3))
    assert tenth.noise_ == pytest.approx(whole.noise_, rel=0.05)
    spread = [m.model_.pairs(*m._located(*held.T)).spread().mean() for m in (whole, tenth)]
    assert spread[1] > 1.5 * spread[0]


def test_measurements_of_known_precision():
    """A noise scale of 3 is three times the noise; intervals are those of an ordinary measurement."""
    rng = np.random.default_rng(3)
    pairs, y, held, fresh = table(noise=0.0)
    scale = np.where(rng.random(len(y)) < 0.5, 3.0, 1.0)
    y = y + 0.4 * scale * rng.normal(size=len(y))
    fresh = fresh + 0.4 * rng.normal(size=len(fresh))
    known = MatrixCompletion(2, **OPTIONS).fit(pairs, y, noise_scale=scale)
    blind = MatrixCompletion(2, **OPTIONS).fit(pairs, y)
    assert known.noise_ == pytest.approx(0.4, rel=0.08)
    assert 0.88 <= covered(known, held, fresh) <= 0.92
    errors = [np.sqrt(np.mean((m.predict(held) - fresh) ** 2)) for m in (known, blind)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("n_each", [2, 10])
def test_replicates_tell_as_much_as_they_are(n_each):
    """Several measurements of a pair: the noise is that of one, and the intervals of new ones hold."""
    rng = np.random.default_rng(4)
    truth = rng.normal(size=(60, 2)) @ rng.normal(size=(2, 40))
    pairs = np.argwhere(rng.random(truth.shape) < 0.4)
    many = np.repeat(pairs, n_each, axis=0)
    y = truth[tuple(many.T)] + rng.normal(size=len(many))
    order = rng.permutation(len(many))
    model = MatrixCompletion(2, **OPTIONS).fit(many[order], y[order])
    assert model.noise_ == pytest.approx(1.0, rel=0.05)
    assert model.n_duplicates_ == len(many) - len(pairs)
    again = truth[tuple(pairs.T)] + rng.normal(size=len(pairs))
    assert 0.88 <= covered(model, pairs, again) <= 0.92
    held = np.argwhere(np.ones(truth.shape))[::3]
    fresh = truth[tuple(held.T)] + rng.normal(size=len(held))
    assert 0.87 <= covered(model, held, fresh) <= 0.93
    ends = model.predict_interval(pairs, 0.9)
    clipped = MatrixCompletion(2, rated_sets=False).fit(many, y).predict_interval(pairs, 0.9)
    inside = (ends[0] > y.min()) & (ends[1] < y.max())  # the range is that of single measurements
    np.testing.assert_allclose(clipped[0][inside], ends[0][inside], atol=1e-4)
    assert inside.mean() > 0.9


def test_weights_of_folds_are_those_of_the_fit():
    pairs, y, _, _ = table(n=60, m=40)
    weights = np.random.default_rng(0).uniform(0.2, 2.0, len(y))
    found = MatrixCompletionCV((1, 2), cv=2).fit(pairs, y, sample_weight=weights)
    assert found.best_rank_ == 2
    alone = MatrixCompletion(2).fit(pairs, y, sample_weight=weights)
    np.testing.assert_array_equal(found.predict(pairs), alone.predict(pairs))


def test_units_of_replicates_and_weights():
    pairs, y, held, _ = table(n=40, m=30)
    many, twice = np.concatenate([pairs, pairs]), np.concatenate([y, y[::-1]])
    weights = np.random.default_rng(0).uniform(0.2, 2.0, len(twice))
    base = MatrixCompletion(2, **OPTIONS).fit(many, twice, sample_weight=weights).predict(held)
    for unit in (1e-290, 1e-12, 1e12, 1e290):
        found = MatrixCompletion(2, **OPTIONS).fit(many, unit * twice, sample_weight=weights)
        np.testing.assert_allclose(found.predict(held) / unit, base, rtol=1e-5, atol=1e-6)
