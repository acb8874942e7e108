"""The plans of the Jester and MovieLens figures."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fisherfold import datasets
from fisherfold.reproduce import completion

needs_data = pytest.mark.skipif(
    not os.environ.get("FISHERFOLD_DATA"), reason="FISHERFOLD_DATA is not set"
)


def test_so_many_entries_of_every_row_are_held_out():
    rows = np.random.default_rng(0).permutation(np.repeat(np.arange(50), np.arange(1, 51)))
    held = completion.hold_out(rows, 10, seed=3)
    expected = np.minimum(10, np.bincount(rows) - 1)
    assert np.bincount(rows[held], minlength=50).tolist() == expected.tolist()
    assert not np.array_equal(held, completion.hold_out(rows, 10, seed=4))


@needs_data
@pytest.mark.parametrize(
    ("plan", "n", "samples"), [(completion.jester, 24983, 100), (completion.movielens, 6040, 3952)]
)
def test_the_plans_are_the_papers(plan, n, samples):
    figure = plan()
    problem, x0 = figure.make(0)
    assert (problem.manifold.n, problem.manifold.p, problem.n_samples) == (n, 5, samples)
    assert x0.shape == (n, 5)
    assert [m.label for m in figure.methods[:4]] == ["RNGD", "RSGD", "RSVRG", "RCG"]
    assert next(iter(figure.metrics)) == "held_out"
    per_user = {100: 2, 3952: 10}[samples]
    assert problem.held_out.n_ratings == per_user * n
    assert "predicts nothing" in figure.note
    assert "Without a ridge" in figure.note


@needs_data
def test_a_split_keeps_every_rating_once():
    data = datasets.load_ratings("movielens100k")
    train, test = completion.split(data, 5, seed=1)
    assert train.n_ratings + test.n_ratings == len(data.values)
    assert set(test.row_counts.tolist()) == {5}
    total = float(train.by_row.values().sum() + test.by_row.values().sum())
    assert total == pytest.approx(float(data.values.sum()), rel=1e-12)


@needs_data
def test_the_curve_of_the_default_falls_from_the_mean_to_convergence():
    data = datasets.load_ratings("movielens100k")
    rows = completion.default_curve(data, 5, seed=0)
    held = completion.hold_out(data.rows, 5, seed=0)
    assert rows[0]["train"] == pytest.approx(float(data.values[~held].var()))
    assert [row["paper_grads"] for row in rows] == list(range(len(rows)))
    errors = [row["held_out"] for row in rows]
    assert errors[-1] < 0.8 * errors[0]
    assert errors[-1] == pytest.approx(min(errors), rel=0.01)
    assert rows[-1]["loss"] == pytest.approx(
        rows[-1]["train"] * (~held).sum() / (2 * data.shape[1])
    )
    assert all("refit" not in row for row in rows)
