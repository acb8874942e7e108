"""One value far from all others: said, and not allowed to take the digits of the others."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from fisherfold import MatrixCompletion, MatrixCompletionCV
from fisherfold.completion.extremes import resolving, sampled
from fisherfold.completion.shared_ratings import Share, share_out
from fisherfold.distributed import ALONE
from fisherfold.tables.inputs import observations


def ratings(far: float | None = None, seed: int = 0):
    """Entries of a table of rank two with little noise, one of them replaced, and its hidden entries."""
    draw = np.random.default_rng(seed)
    table = 3 + draw.normal(size=(60, 2)) @ draw.normal(size=(2, 40))
    seen = draw.random(table.shape) < 0.5
    pairs, values = np.argwhere(seen), table[seen] + 0.1 * draw.normal(size=seen.sum())
    if far is not None:
        values[0] = far
    others = ~seen
    others[pairs[0, 0]], others[:, pairs[0, 1]] = False, False
    return pairs, values, np.argwhere(others), table[others]


@pytest.mark.parametrize("inference", ["variational", "point"])
def test_a_value_far_from_all_others_is_named_and_takes_no_digits(inference):
    """In float32 the noise was 2.8, in float64 0.3; with ``point`` it ended in an error from inside."""
    pairs, values, hidden, _ = ratings(1e5)
    found = []
    for dtype in ("float32", "float64"):
        model = MatrixCompletion(rank=2, inference=inference, dtype=dtype)
        message = r"most values lie between 0\.76.* and 5\.2.*, but 100000 \(row 0, column 0\) is 7.*,... times their"
        with pytest.warns(UserWarning, match=message):
            model.fit(pairs, values)
        found.append((model.noise_, model.predict(hidden)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-9)


def test_the_search_and_later_batches_keep_the_digits():
    pairs, values, hidden, truth = ratings(-1e5)
    with pytest.warns(UserWarning, match="but -100000"):
        model = MatrixCompletionCV(ranks=(1, 2), cv=2).fit(pairs, values)
    assert model.model_.posterior.rows.mean.dtype == torch.float64
    model.partial_fit(hidden[:5], truth[:5])
    assert np.isfinite(model.predict(hidden)).all()


@pytest.mark.parametrize("far", [1e5, 1e11])
def test_a_stream_keeps_the_digits_when_a_value_comes_later(far):
    """It was silent, and at 1e11 the ratings before were off by several of their spreads."""
    pairs, values, hidden, _ = ratings(far)
    order = np.random.default_rng(0).permutation(len(values) - 1) + 1
    stream = MatrixCompletion(rank=2).fit(pairs[order[:300]], values[order[:300]])
    with pytest.warns(UserWarning, match="but 1.* times their spread away from them"):
        stream.partial_fit(np.append(pairs[order[300:]], pairs[:1], axis=0), np.append(values[order[300:]], far))
    assert stream.model_.posterior.rows.mean.dtype == torch.float64
    np.testing.assert_allclose(np.sort(stream.model_.given()), np.sort(values), rtol=1e-6, atol=1e-5 + 1e-15 * far)
    with pytest.warns(UserWarning, match="rules the scale"):
        whole = MatrixCompletion(rank=2, dtype="float64").fit(pairs, values)
    assert stream.noise_ == pytest.approx(whole.noise_, rel=0.05)
    assert np.isfinite(stream.predict(hidden)).all()


@pytest.mark.parametrize("duplicates", ["mean", "sum"])
def test_shares_of_a_table_are_looked_at_too(duplicates):
    pairs, values, *_ = ratings(1e5)
    share = Share.of(observations(pairs, values))
    with pytest.warns(UserWarning, match="but 100000 is"):
        ready = share_out(share, ALONE, dtype=torch.float32, duplicates=duplicates, centred=True)
    assert ready.ratings.dtype == torch.float64


@pytest.mark.parametrize(
    ("values", "centred"),
    [
        (np.random.default_rng(0).normal(size=5000), True),
        (np.random.default_rng(0).standard_t(3, size=3000), True),
        (np.random.default_rng(0).integers(1, 6, size=500), True),
        (np.repeat([0.0, 1.0], [990, 10]), True),
        (1e4 + np.random.default_rng(0).normal(size=500), False),
        (np.full(20, 3.0), True),
        (np.array([1e308, -1e308, 0.0]), True),
        (np.array([2.0]), True),
    ],
)
def test_ordinary_values_are_nothing_to_speak_of(values, centred):
    off = values - (values.mean() if centred else 0)
    scale = float(np.abs(off).max() * np.sqrt(np.mean((off / max(np.abs(off).max(), 1e-300)) ** 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolving(values, values.min(), values.max(), scale, torch.float32) == torch.float32


def test_a_sample_is_spread_over_all_values():
    found = sampled(np.arange(1000), 100)
    assert 100 <= len(found) < 200
    assert found.max() >= 900
