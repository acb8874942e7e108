"""Recommendations: ranked by the mean, by upper bounds, by draws; similar members; new rows; metrics and splits."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.metrics import ndcg_score

from fisherfold.completion import MatrixCompletion, recommend
from fisherfold.completion.metrics import calibration, interval_coverage, mae, ranking_metrics, rmse
from fisherfold.completion.splits import last_out_split, random_split, row_split, time_split
from fisherfold.tables.frames import columns_of, make_frame


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(0)
    truth = 3 + rng.normal(size=(50, 2)) @ rng.normal(size=(2, 30)) + rng.normal(size=30)
    seen = rng.random(truth.shape) < 0.4
    pairs = np.argwhere(seen)
    frame = pl.DataFrame(
        {"user": pairs[:, 0], "item": [f"i{j}" for j in pairs[:, 1]], "rating": truth[seen]}
    )
    return MatrixCompletion(rank=2, clip=False, dtype="float64").fit(frame), seen


@pytest.mark.parametrize("kind", ["pandas", "polars", "pyarrow", "dict"])
def test_outputs_are_of_the_library_of_the_frame_also_after_a_file(kind, tmp_path):
    columns = {"u": np.repeat(range(6), 3), "i": np.tile(range(9), 2), "stars": np.arange(18.0)}
    frame = make_frame(kind, columns)
    MatrixCompletion(1, max_iter=2).fit(frame, columns=("u", "i", "stars")).save(tmp_path / "m")
    model = MatrixCompletion.load(tmp_path / "m")
    found = model.recommend(3, 2), model.recommend_new({1: 2.0}, 2), model.similar(3, 2)
    assert [type(each) for each in found] == [type(frame)] * 3
    names = [["u", "i", "prediction"], ["i", "prediction"], ["i", "similar", "similarity"]]
    assert [[*columns_of(each)] for each in found] == names


def same(one, other):
    """The same lists; sums over blocks of other sizes round differently."""
    assert one.select("user", "item").equals(other.select("user", "item"))
    np.testing.assert_allclose(one["prediction"], other["prediction"], rtol=1e-12)


def test_the_best_columns_are_those_with_the_largest_predictions(fitted, monkeypatch):
    model, seen = fitted
    found = model.recommend(k=5)
    assert found.columns == ["user", "item", "prediction"]
    for user in (0, 7, 49):
        unseen = [f"i{j}" for j in np.flatnonzero(~seen[user])]
        expected = model.predict([(user, item) for item in unseen])
        mine = found.filter(pl.col("user") == user)
        order = np.argsort(-expected)[:5]
        assert mine["item"].to_list() == [unseen[k] for k in order]
        np.testing.assert_allclose(mine["prediction"], expected[order])
        same(model.recommend(user, 5), mine)
    monkeypatch.setattr(recommend, "_BLOCK", 100)  # three rows at once
    same(model.recommend(k=5), found)
    assert len(model.recommend(3, 1000)) == (~seen[3]).sum()
    assert len(model.recommend(3, 1000, exclude_seen=False)) == 30
    chosen = model.recommend(3, 2, candidates=["i1", "i2", "zzz"], exclude_seen=False)
    assert chosen["item"].sort().to_list() == ["i1", "i2"]
    assert model.recommend([12345, 3], 4).height == 8  # a stranger gets what an average row would


def test_bounds_and_draws_come_from_the_posterior(fitted):
    model, _ = fitted
    upper = model.recommend(4, 30, by="upper", exclude_seen=False)
    pairs = [(4, item) for item in upper["item"]]
    rows, columns = (
        model.model_.locate([4] * 30, "row", "prior"),
        model.model_.locate(upper["item"], "column", "prior"),
    )
    mean, std = model.predict(pairs, return_std=True)
    spread = model.model_.pairs(rows, columns).spread()
    assert (spread < std).all()
    np.testing.assert_allclose(upper["score"], mean + 1.645 * spread, rtol=1e-6)
    np.testing.assert_allclose(upper["prediction"], mean)
    draws = np.stack(
        [
            model.recommend(4, 30, by="sample", seed=k, exclude_seen=False).sort("item")["score"]
            for k in range(300)
        ]
    )
    order = np.argsort(upper["item"].to_numpy())
    np.testing.assert_allclose(draws.mean(0), mean[order], atol=5 * np.sqrt((std**2).max() / 300))
    np.testing.assert_allclose(draws.std(0), spread[order], rtol=0.3)
    assert model.recommend(4, by="sample", seed=1).equals(model.recommend(4, by="sample", seed=1))


def test_similar_columns_have_predictions_that_go_together(fitted):
    model, _ = fitted
    found = model.similar("i3", 29)
    predicted = model.predict([(u, f"i{j}") for u in range(50) for j in range(30)]).reshape(50, 30)
    free = predicted - model.row_offsets_[:, None]
    expected = np.corrcoef(free.T)[3]
    columns = [int(name[1:]) for name in found["similar"]]
    np.testing.assert_allclose(found["similarity"], expected[columns], atol=1e-6)
    assert (np.diff(found["similarity"]) <= 0).all()
    rows = model.similar([1, 2], 3, of="rows")
    assert rows.columns == ["user", "similar", "similarity"]
    assert rows["user"].to_list() == [1, 1, 1, 2, 2, 2]


def test_new_rows_are_recommended_to_like_known_ones(fitted):
    model, _ = fitted
    rated = {f"i{j}": 4.0 for j in range(5)}
    with pytest.warns(
        UserWarning, match="1 rated column id was not seen in fit and left out, of 6"
    ):
        alone = model.recommend_new(rated | {"no": 1.0}, 40)
    assert alone.columns == ["item", "prediction"]
    assert alone.height == 25
    np.testing.assert_allclose(
        alone["prediction"],
        model.predict_new(list(rated), list(rated.values()), alone["item"].to_list()),
    )
    frame = pl.DataFrame(
        {"user": ["a"] * 5 + ["b"], "item": [*list(rated)[:5], "i9"], "rating": [4.0] * 5 + [1.0]}
    )
    several = model.recommend_new(frame, 25)
    assert several.filter(pl.col("user") == "a")["item"].to_list() == alone["item"].to_list()
    assert "i9" not in several.filter(pl.col("user") == "b")["item"]
    assert model.recommend_new({}, 3).height == 3


def test_vectors_for_a_nearest_neighbour_index_give_the_same_lists(fitted):
    model, _ = fitted
    rows, columns = model.inner_product_vectors()
    assert rows.dtype == columns.dtype == np.float32
    best = np.argsort(-(rows @ columns.T), axis=1)[:, :4]
    expected = model.recommend(k=4, exclude_seen=False)["item"].to_numpy().reshape(50, 4)
    np.testing.assert_array_equal(model.column_ids_[best], expected)


@pytest.mark.parametrize("k", [1, 5, 15])
def test_metrics_are_those_of_scikit_learn_and_of_their_definitions(k):
    rng = np.random.default_rng(k)
    gains, scores = rng.integers(0, 4, size=(20, 15)).astype(float), rng.normal(size=(20, 15))
    order = np.argsort(-scores, axis=1)
    i, j = np.nonzero(gains)
    lists = np.repeat(np.arange(20), 15), order.reshape(-1)
    found = ranking_metrics(lists, (i, j, gains[i, j]), k, trained=(i, j))
    assert found["ndcg"] == pytest.approx(ndcg_score(gains, scores, k=k))
    hits = np.take_along_axis(gains, order, axis=1)[:, :k] > 0
    assert found["recall"] == pytest.approx(np.mean(hits.sum(1) / (gains > 0).sum(1)))
    assert found["precision"] == pytest.approx(hits.mean())
    assert found["hit_rate"] == hits.any(1).mean()
    ranks = np.where(hits.any(1), hits.argmax(1) + 1, np.inf)
    assert found["mrr"] == pytest.approx(np.mean(1 / ranks))
    average = [
        sum(row[: r + 1].mean() for r in range(k) if row[r]) / min(k, n)
        for row, n in zip(hits, (gains > 0).sum(1), strict=True)
    ]
    assert found["map"] == pytest.approx(np.mean(average))
    assert found["coverage"] == len(np.unique(order[:, :k])) / 15
    assert found["novelty"] == pytest.approx(-np.log2((gains > 0).mean(0))[order[:, :k]].mean())
    # relevant pairs that are given twice, as in a log of plays, and those of no gain change nothing
    twice, none = np.concatenate([i, i[::2], np.arange(20)]), np.zeros(20)
    more = (
        twice,
        np.concatenate([j, j[::2], 99 + np.arange(20)]),
        np.concatenate([gains[i, j], gains[i, j][::2], none]),
    )
    assert ranking_metrics(lists, more, k, trained=(i, j)) == found
    # nor do lists in another order of their rows, or of people without a relevant column
    mixed = np.concatenate([lists[0], [77]])[::-1], np.concatenate([lists[1], [3]])[::-1]
    backwards = np.lexsort((-np.arange(len(mixed[0])), mixed[0]))
    assert (
        ranking_metrics((mixed[0][backwards], mixed[1][backwards]), (i, j, gains[i, j]), k)["ndcg"]
        == found["ndcg"]
    )


def test_errors_and_calibration():
    y, p, s = [1.0, 2.0, 3.0], [1.0, 2.0, 5.0], [1.0, 1.0, 1.0]
    assert (rmse(y, p), mae(y, p)) == (pytest.approx((4 / 3) ** 0.5), pytest.approx(2 / 3))
    assert interval_coverage(y, p, s, 0.9) == pytest.approx(2 / 3)
    assert calibration(y, p, s, (0.5, 0.99)) == {0.5: pytest.approx(2 / 3), 0.99: 1.0}
    for relevant in (([], []), ([1], [1], [0.0])):
        with pytest.raises(ValueError, match="there are no relevant columns"):
            ranking_metrics(([1], [1]), relevant)
    with pytest.raises(ValueError, match="k must be a whole number of at least 1, got 0"):
        ranking_metrics(([1], [1]), ([1], [1]), 0)


def test_splits_hold_out_what_they_say():
    rng = np.random.default_rng(0)
    rows, times = rng.integers(0, 20, 300), rng.integers(0, 1000, 300)
    for train, test in (
        random_split(300, 0.2),
        time_split(times, 0.2),
        last_out_split(rows, times),
        row_split(rows, 0.2),
    ):
        assert sorted([*train, *test]) == list(range(300))
    train, test = time_split(pd.to_datetime(pd.Series(times), unit="D"), 0.2)
    assert times[train].max() < times[test].min()
    assert 40 <= len(test) <= 60
    train, test = last_out_split(rows, times, 2)
    assert np.bincount(rows[test]).tolist() == [2] * 20
    for row in range(20):
        assert times[train][rows[train] == row].max() <= times[test][rows[test] == row].min()
    train, test = row_split(rows, 0.2)
    assert len(np.unique(rows[test])) == 4
    assert not set(rows[train]) & set(rows[test])
    for call, message in (
        (lambda: random_split(10, 1.5), "test must be a share"),
        (lambda: time_split([1, 1, 1]), "nothing is later"),
        (lambda: time_split([1.0, np.nan]), "time must be finite, got 1 missing time"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("index", ["faiss", "NumPy"])
def test_the_example_of_a_nearest_neighbour_index_finds_the_exact_lists(index, monkeypatch, capsys):
    file = Path(__file__).parents[2] / "examples" / "serving" / "nearest_neighbours.py"
    if not file.exists():
        pytest.skip("the examples are not part of an installed package")
    if index == "faiss":
        pytest.importorskip("faiss")
    else:
        monkeypatch.setitem(sys.modules, "faiss", None)
    agree = runpy.run_path(str(file))["main"]()
    assert agree > (0.95 if index == "faiss" else 0.999)
    assert index in capsys.readouterr().out


def test_metrics_of_several_lengths_are_those_of_each():
    lists = pl.DataFrame({"user": [1] * 4 + [2] * 3, "item": [3, 1, 2, 5, 1, 2, 3]})
    relevant = pl.DataFrame({"user": [1, 1, 2], "item": [1, 5, 9]})
    found = ranking_metrics(lists, relevant, (1, 2, 4), trained=lists)
    assert len(found) == 3 * 8
    for k in (1, 2, 4):
        for name, value in ranking_metrics(lists, relevant, k, trained=lists).items():
            assert found[f"{name}@{k}"] == value
