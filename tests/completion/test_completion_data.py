"""MovieLens-100K, first official split: held-out error and calibration."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fisherfold.completion import MatrixCompletion

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not os.environ.get("FISHERFOLD_DATA"), reason="FISHERFOLD_DATA does not name a data folder"
    ),
]


@pytest.fixture(scope="module")
def split():
    from fisherfold.datasets import load_ratings

    data = load_ratings("movielens100k")
    pairs, test = np.stack([data.rows, data.cols], axis=1), data.test_fold == 1
    return pairs[~test], data.values[~test], pairs[test], data.values[test]


def test_error_and_calibration(split):
    train, values, test, truth = split
    model = MatrixCompletion(rank=10).fit(train, values)
    mean, std = model.predict(test, return_std=True)
    error = mean - truth
    assert np.sqrt(np.mean(error**2)) < 0.895
    assert 0.86 < np.mean(np.abs(error) <= 1.6449 * std) < 0.94
    sure = std < np.quantile(std, 0.2)
    assert np.sqrt(np.mean(error[sure] ** 2)) < 0.85 * np.sqrt(np.mean(error**2))


def test_point_is_close_behind(split):
    train, values, test, truth = split
    point = MatrixCompletion(rank=10, inference="point").fit(train, values)
    assert np.sqrt(np.mean((point.predict(test) - truth) ** 2)) < 0.925


def test_stream_on_real_ratings(split):
    train, values, test, truth = split
    order = np.random.default_rng(0).permutation(len(values))
    first, *rest = np.array_split(order, 4)
    model = MatrixCompletion(rank=5).fit(train[first], values[first])
    errors = [np.sqrt(np.mean((model.predict(test) - truth) ** 2))]
    for part in rest:
        model.partial_fit(train[part], values[part])
        errors.append(np.sqrt(np.mean((model.predict(test) - truth) ** 2)))
    whole = np.sqrt(
        np.mean((MatrixCompletion(rank=5).fit(train, values).predict(test) - truth) ** 2)
    )
    assert errors[-1] < errors[0] - 0.04
    assert errors[-1] < whole + 0.03
