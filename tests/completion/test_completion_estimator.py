"""MatrixCompletion: forms of input, scikit-learn habits, prediction, fold-in, files, Ctrl-C."""

from __future__ import annotations

import json
import pickle
import threading

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse as sp
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import fisherfold.completion.fit as engine
from fisherfold.completion import MatrixCompletion, MatrixCompletionCV


@pytest.fixture(scope="module")
def table():
    """A noisy rank-two table with holes: the table, and the pairs and values that were seen and held out."""
    rng = np.random.default_rng(0)
    truth = 3 + rng.normal(size=(60, 2)) @ rng.normal(size=(2, 40)) + 0.3 * rng.normal(size=(60, 1))
    noisy = truth + 0.1 * rng.normal(size=truth.shape)
    seen = rng.random(truth.shape) < 0.5
    holes = np.where(seen, noisy, np.nan)
    pairs, held = np.argwhere(seen), np.argwhere(~seen)
    return holes, pairs, noisy[seen], held, noisy[~seen]


def rmse(a, b):
    return float(np.sqrt(np.mean((np.asarray(a) - np.asarray(b)) ** 2)))


def test_every_form_of_input_gives_the_same_model(table):
    holes, pairs, values, held, _ = table
    expected = MatrixCompletion(rank=2).fit(pairs, values).predict(held)
    names = pairs.astype(str).astype(object)
    long = pl.DataFrame({"row": pairs[:, 0], "column": pairs[:, 1], "value": values})
    stored = sp.coo_array((values, (pairs[:, 0], pairs[:, 1])), shape=holes.shape)
    wide = pd.DataFrame(holes, index=[f"r{i}" for i in range(60)], columns=[f"c{j}" for j in range(40)])
    for fitted, wanted in (
        (MatrixCompletion(rank=2).fit(holes), held),
        (MatrixCompletion(rank=2).fit(stored), held),
        (MatrixCompletion(rank=2).fit(stored.tocsr()), held),
        (MatrixCompletion(rank=2).fit(long), held),
        (MatrixCompletion(rank=2).fit(long.select("row", "column"), long["value"]), held),
        (MatrixCompletion(rank=2).fit(long.to_pandas()), held),
        (MatrixCompletion(rank=2).fit(pairs.tolist(), values.tolist()), held),
        (MatrixCompletion(rank=2).fit(pairs.astype(float), values), held),
        (MatrixCompletion(rank=2).fit(wide), [(f"r{i}", f"c{j}") for i, j in held]),
        (MatrixCompletion(rank=2).fit(pl.from_pandas(wide)), [(i, f"c{j}") for i, j in held.tolist()]),
    ):
        np.testing.assert_allclose(fitted.predict(wanted), expected, atol=2e-3)
    by_name = MatrixCompletion(rank=2).fit(names, values)
    np.testing.assert_allclose(by_name.predict(held.astype(str)), expected, atol=0.05)


def test_it_predicts_what_was_held_out(table):
    _, pairs, values, held, truth = table
    model = MatrixCompletion(rank=2).fit(pairs, values)
    assert rmse(model.predict(held), truth) < 0.15
    assert model.score(held, truth) > 0.98
    assert model.converged_
    assert abs(model.noise_ - 0.1) < 0.05
    bounds = [record["bound"] for record in model.trace_]
    assert (np.diff(bounds) > -1e-5).all()


def test_error_bars(table):
    _, pairs, values, held, truth = table
    mean, std = MatrixCompletion(rank=2, clip=False, rated_sets=False).fit(pairs, values).predict(held, return_std=True)
    assert 0.85 < np.mean(np.abs(truth - mean) <= 1.645 * std) < 0.95


def test_clip_keeps_to_the_observed_range(table):
    _, pairs, values, held, _ = table
    clipped = MatrixCompletion(rank=2).fit(pairs, values).predict(held)
    free = MatrixCompletion(rank=2, clip=False).fit(pairs, values).predict(held)
    np.testing.assert_allclose(clipped, np.clip(free, values.min(), values.max()))


def test_scikit_learn_tools_work(table):
    _, pairs, values, _, _ = table
    folds = KFold(3, shuffle=True, random_state=0)
    scores = cross_val_score(MatrixCompletion(rank=2), pairs, values, cv=folds, scoring="neg_root_mean_squared_error")
    assert (scores > -0.35).all()
    search = GridSearchCV(MatrixCompletion(max_iter=10), {"rank": [1, 2], "ridge": [None, 1.0]}, cv=folds)
    search.fit(pairs, values)
    assert search.best_params_["rank"] == 2
    as_text = FunctionTransformer(lambda ids: ids.astype(str).astype(object))
    model = make_pipeline(as_text, MatrixCompletion(rank=2)).fit(pairs, values)
    assert model.score(pairs, values) > 0.9
    original = MatrixCompletion(rank=7, ridge=0.5, offsets="rows")
    assert clone(original).get_params() == original.get_params()


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state")
def test_sparse_tensors_are_sparse_matrices(table):
    _, pairs, values, _, _ = table
    matrix = sp.coo_array((values, (pairs[:, 0], pairs[:, 1])), shape=(60, 40))
    expected = MatrixCompletion(rank=2).fit(matrix).predict(pairs)
    indices = torch.from_numpy(pairs.T.copy())
    tensor = torch.sparse_coo_tensor(indices, torch.from_numpy(values), (60, 40), check_invariants=True)
    for form in (tensor, tensor.to_sparse_csr(), tensor.to_sparse_csc(), tensor.clone().requires_grad_()):
        np.testing.assert_array_equal(MatrixCompletion(rank=2).fit(form).predict(pairs), expected)
    half = MatrixCompletion(rank=2).fit(tensor.bfloat16())
    np.testing.assert_allclose(half.predict(pairs), expected, atol=0.05 * np.std(values))
    with pytest.raises(ValueError, match=r"a sparse tensor must be a matrix of numbers, got shape \(60, 40, 1\)"):
        MatrixCompletion(rank=2).fit(tensor.to_dense()[..., None].to_sparse())
    with pytest.raises(TypeError, match="pairs of ids cannot be a sparse matrix"):
        MatrixCompletion(rank=2).fit(torch.from_numpy(pairs).to_sparse(), values)
    with pytest.raises(TypeError, match=r"dense numbers are needed here, got a tensor of layout torch.sparse_coo"):
        MatrixCompletion(rank=2).fit(pairs, torch.from_numpy(values).to_sparse())


def test_recommend_leaves_out_what_was_seen(table):
    holes, pairs, values, _, _ = table
    model = MatrixCompletion(rank=2, clip=False).fit(pairs, values)
    ids, scores = model.recommend(3, k=5)
    unseen = np.flatnonzero(np.isnan(holes[3]))
    expected = model.predict([(3, j) for j in unseen])
    assert ids.tolist() == unseen[np.argsort(-expected, kind="stable")][:5].tolist()
    np.testing.assert_allclose(scores, np.sort(expected)[::-1][:5])
    assert len(model.recommend(3, k=1000)[0]) == len(unseen)
    assert len(model.recommend(3, k=1000, exclude_seen=False)[0]) == 40
    assert len(model.recommend(12345, k=4)[0]) == 4


@pytest.mark.parametrize("rated_sets", [True, False])
def test_a_stranger_is_an_average_member(table, rated_sets):
    _, pairs, values, _, _ = table
    model = MatrixCompletion(rank=2, clip=False, rated_sets=rated_sets, tol=1e-7, dtype="float64").fit(pairs, values)
    rows, columns = np.arange(60), np.arange(40)
    everything = model.predict([(i, j) for i in rows for j in columns]).reshape(60, 40)
    # without rated sets to convergence: the prior has learnt the average
    close = {"rtol": 0, "atol": 1e-9 if rated_sets else 1e-3}
    np.testing.assert_allclose(model.predict([(999, j) for j in columns]), everything.mean(0), **close)
    np.testing.assert_allclose(model.predict([(i, 999) for i in rows]), everything.mean(1), **close)
    np.testing.assert_allclose(model.predict([(999, 999)]), everything.mean(), **close)
    # a row without a value is no less a stranger, whichever way it comes
    table = sp.coo_array((values, (pairs[:, 0], pairs[:, 1])), shape=(61, 40))
    grown = model.partial_fit(sp.coo_array(([3.0], ([0], [0])), shape=(61, 40)))
    for each in (grown, clone(model).fit(table)):
        expected = each.predict([(999, j) for j in columns], return_std=True)
        np.testing.assert_allclose(each.predict([(60, j) for j in columns], return_std=True), expected, **close)
        np.testing.assert_allclose(each.predict_new([], [], columns, return_std=True), expected, **close)


def test_error_bars_of_strangers_know_that_rated_sets_differ():
    """Good columns are rated more often: the rated sets tell much of a column, and of a stranger they are not known."""
    rng = np.random.default_rng(0)
    level = rng.normal(size=300)
    noisy = level + 0.5 * rng.normal(size=(200, 1)) + 0.5 * rng.normal(size=(200, 300))
    seen = rng.random(noisy.shape) < 0.05 + 0.3 / (1 + np.exp(-2 * level))
    known = np.arange(300) < 200
    pairs = np.argwhere(seen & known)
    model = MatrixCompletion(rank=2, clip=False).fit(pairs, noisy[tuple(pairs.T)])
    mean, std = model.predict([(i, 999) for i in range(200)], return_std=True)
    off = (noisy[:, ~known] - mean[:, None]) / std[:, None]
    assert 0.85 < np.sqrt(np.mean(off**2)) < 1.2  # 1.7 with the spread of K alone


def test_ids_that_were_not_seen(table):
    _, pairs, values, _, _ = table
    model = MatrixCompletion(rank=2).fit(pairs, values)
    assert np.isnan(model.set_params(unseen="nan").predict([(999, 0), (0, 0)])).tolist() == [True, False]
    with pytest.raises(ValueError, match=r"1 row id was not seen in fit, the first is 999 \(int\)"):
        model.set_params(unseen="error").predict([(999, 0), (0, 0)])
    with pytest.raises(ValueError, match=r"none of the row ids was seen .* got 'a' \(str\), fitted with 0 \(int\)"):
        model.set_params(unseen="prior").predict([("a", 0), ("b", 1)])


def test_fold_in_of_a_new_row(table):
    holes, pairs, values, _, _ = table
    without = pairs[:, 0] != 59
    model = MatrixCompletion(rank=2, rated_sets=False).fit(pairs[without], values[without])
    before = model.predict(pairs)
    rated = np.flatnonzero(~np.isnan(holes[59]))
    half = len(rated) // 2
    folded = model.predict_new(rated[:half], holes[59, rated[:half]], rated[half:])
    assert rmse(folded, holes[59, rated[half:]]) < 0.4
    _, std = model.predict_new(rated[:half], holes[59, rated[:half]], rated[half:], return_std=True)
    _, vague = model.predict_new(rated[:1], holes[59, rated[:1]], rated[half:], return_std=True)
    assert (std < vague).all()
    np.testing.assert_array_equal(model.predict(pairs), before)
    # the columns do not move, nor what is known of their noise
    once, twice = model.model_.of_new_rows(1, [0], [0], np.ones(1)), model.model_.of_new_rows(1, [0], [1], np.ones(1))
    assert torch.equal(once.posterior.columns.counts, twice.posterior.columns.counts)
    assert np.isfinite(model.predict_new([12345], [1.0], [0, 1])).all()
    with pytest.raises(ValueError, match="rated and values must have one length and finite values"):
        model.predict_new([0, 1], [1.0, np.nan], [2])


def test_partial_fit_adds_rows_columns_and_ratings(table):
    holes, pairs, values, held, truth = table
    old = (pairs[:, 0] < 50) & (pairs[:, 1] < 35)
    model = MatrixCompletion(rank=2).partial_fit(pairs[old], values[old])
    for part in np.array_split(np.flatnonzero(~old), 3):
        model.partial_fit(pairs[part], values[part])
    assert (len(model.model_.row_ids), len(model.model_.column_ids)) == holes.shape
    assert model.model_.posterior.n_ratings == len(values)
    whole = MatrixCompletion(rank=2).fit(pairs, values)
    assert rmse(model.predict(held), truth) < 1.6 * rmse(whole.predict(held), truth)
    row = pairs[~old][0, 0]
    seen = np.flatnonzero(~np.isnan(holes[row]))
    assert not set(model.recommend(row, k=40)[0].tolist()) & set(seen.tolist())


def test_a_stream_ends_where_a_fit_would(table):
    """Ten small batches, of which the first cannot support the factors, against one fit on everything."""
    _, pairs, values, held, truth = table
    order = np.random.default_rng(0).permutation(len(values))
    model = MatrixCompletion(rank=2)
    for part in np.array_split(order, 10):
        model.partial_fit(pairs[part], values[part])
    whole = MatrixCompletion(rank=2).fit(pairs, values)
    assert rmse(model.predict(held), truth) < 1.05 * rmse(whole.predict(held), truth)
    assert model.n_iter_ == len(model.trace_)


@pytest.mark.parametrize("options", [{}, {"ridge": 0.5}, {"solver": "rcg", "ridge": 0.01}])
def test_a_stream_of_a_point_estimate_starts_anew(table, tmp_path, options):
    """Its first batch has hardly more ratings than the model has numbers: the factors found in it are worth nothing."""
    _, pairs, values, held, truth = table
    order = np.random.default_rng(0).permutation(len(values))
    model = MatrixCompletion(rank=2, inference="point", **options)
    for part in np.array_split(order, 10):
        model.partial_fit(pairs[part], values[part])
    whole = MatrixCompletion(rank=2, inference="point", **options).fit(pairs, values)
    assert rmse(model.predict(held), truth) < 1.2 * rmse(whole.predict(held), truth)
    model.save(tmp_path)
    again = MatrixCompletion.load(tmp_path)
    assert np.array_equal(again.predict(held), model.predict(held))
    for stream in (model, again):
        stream.partial_fit(pairs, values)
    assert np.array_equal(again.predict(held), model.predict(held))


@pytest.mark.parametrize("offsets", ["both", "global", "none"])
@pytest.mark.parametrize("searched", [False, True])
def test_a_point_estimate_of_twice_the_ratings_is_that_of_a_fit(table, searched, offsets):
    _, pairs, values, held, _ = table
    order = np.random.default_rng(1).permutation(len(values))
    options = {"inference": "point", "dtype": "float64", "offsets": offsets, "clip": False}

    def made():
        if searched:
            return MatrixCompletionCV(ranks=(2,), ridges=(0.5,), **options)
        return MatrixCompletion(rank=2, ridge=0.5, **options)

    half = order[: len(order) // 2]
    stream = made().partial_fit(pairs[half], values[half])
    rest = np.setdiff1d(order, half)
    stream.partial_fit(pairs[rest], values[rest])
    assert stream.model_.n_at_start == len(values)
    np.testing.assert_allclose(stream.predict(held), made().fit(pairs, values).predict(held), rtol=1e-9)
    given = MatrixCompletion(rank=2, inference="point").fit(pairs, values).model_.given()
    np.testing.assert_allclose(np.sort(stream.model_.given()), np.sort(given), atol=1e-6)


@pytest.mark.parametrize(("first", "level", "unit"), [(0.0, 0.0, 1e20), (5e-17, 0.0, 1.0), (7.0, 7.0, 1e-5)])
def test_the_first_value_of_a_stream_says_nothing_of_the_unit_of_the_others(table, first, level, unit):
    _, pairs, values, held, truth = table
    model = MatrixCompletion(rank=2).partial_fit(pairs[:1], [first])
    model.partial_fit(pairs[1:], level + unit * values[1:])
    whole = MatrixCompletion(rank=2).fit(pairs[1:], values[1:])
    found = (model.predict(held) - level) / unit
    assert rmse(found, truth) < 1.2 * rmse(whole.predict(held), truth)


@pytest.mark.parametrize("value", [1e13, 1e30, 1e250])
def test_a_value_far_beyond_the_others_keeps_the_model_whole_or_is_refused(table, tmp_path, value):
    _, pairs, values, held, _ = table
    model = MatrixCompletion(rank=2).fit(pairs, values)
    with pytest.raises(ValueError, match=r"must lie within .* of .*, which is 1e\+12 times the spread .*, got 1e\+"):
        model.predict_new([0, 1], [value, 2.0], [2], return_std=True)
    before = model.predict(held)
    with pytest.raises(ValueError, match=r"must lie within .*, got 1e\+"):
        model.partial_fit([(0, 1)], [value])
    assert np.array_equal(model.predict(held), before)
    few = MatrixCompletion(rank=1).fit(pairs[:1], values[:1]).partial_fit([(0, 1)], [value])  # nothing to lose yet
    few.save(tmp_path)
    assert np.array_equal(MatrixCompletion.load(tmp_path).predict(held), few.predict(held))
    assert np.isfinite(few.predict(held, return_std=True)).all()
    point = MatrixCompletion(rank=2, inference="point").fit(pairs, values)
    before = point.predict(held)
    with pytest.raises(ValueError, match=r"which is 1e\+06 times the spread of the values so far"):
        point.partial_fit([("new", 1)], [value])
    assert np.array_equal(point.predict(held), before)
    assert "new" not in point.model_.row_ids.labels.tolist()


def test_what_is_remembered_of_a_stream(table):
    """Values stay with their pairs and rows; a few new ratings take a step and no look back."""
    _, pairs, values, _, _ = table
    model = MatrixCompletion(rank=2).fit(pairs[:-3], values[:-3])
    looked = model.model_.n_at_look
    model.partial_fit(np.append(pairs[-3:], [[999, 0]], axis=0), np.append(values[-3:], 1.5))
    kept = model.model_
    assert kept.n_at_look == looked
    assert kept.posterior.n_ratings == len(values) + 1
    rows = np.repeat(np.arange(len(kept.row_ids)), kept.seen_offsets.diff().numpy())
    found = {
        (kept.row_ids.labels[i], kept.column_ids.labels[j]): v * kept.scale + kept.center
        for i, j, v in zip(rows, kept.seen_columns.tolist(), kept.seen_values.tolist(), strict=True)
    }
    given = dict(zip(map(tuple, pairs.tolist()), values.tolist(), strict=True)) | {(999, 0): 1.5}
    assert found == pytest.approx(given, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("rule", "value"), [("mean", 2.0), ("last", 3.0), ("sum", 4.0), ("error", 2.0)])
def test_a_pair_that_is_rated_again_follows_the_rule_at_the_next_look_back(rule, value):
    pairs = [(i, j) for i in range(6) for j in range(5)]
    model = MatrixCompletion(rank=1, duplicates=rule, dtype="float64").fit(pairs, np.ones(30))
    again = model.partial_fit(pairs, 3 * np.ones(30))
    np.testing.assert_allclose(again.predict(pairs), value, atol=0.02)


@pytest.mark.parametrize("inference", ["variational", "point"])
def test_a_table_that_is_rated_over_and_over_is_that_of_the_last_values(inference):
    """All that was replaced was kept: looks back became rarer and rarer, and the error four times that of a fit."""
    draw = np.random.default_rng(0)
    rows, columns = draw.normal(size=(40, 2)), draw.normal(size=(2, 20))
    seen = draw.random((40, 20)) < 0.6
    pairs, hidden = np.argwhere(seen), np.argwhere(~seen)
    model = MatrixCompletion(rank=2, inference=inference, duplicates="last")
    for _ in range(12):
        rows = 0.7 * rows + 0.7 * draw.normal(size=rows.shape)
        true = 3 + rows @ columns
        values = true[seen] + 0.1 * draw.normal(size=len(pairs))
        for part in np.array_split(draw.permutation(len(pairs)), 5):
            model.partial_fit(pairs[part], values[part])
    assert len(model.model_.seen_values) < (2 if inference == "point" else 1.06) * len(pairs)
    last = {tuple(pair): value for pair, value in zip(pairs.tolist(), values, strict=True)}
    kept = model.model_
    rows_of = np.repeat(kept.row_ids.labels, kept.seen_offsets.diff().numpy())
    newest = dict(zip(zip(rows_of.tolist(), kept.seen_columns.tolist(), strict=True), kept.given(), strict=True))
    assert newest == pytest.approx(last, abs=1e-5)
    whole = MatrixCompletion(rank=2, inference=inference).fit(pairs, values)
    allowed = 5 if inference == "point" else 1.2  # a point estimate trails a fit between two starts
    assert rmse(model.predict(hidden), true[~seen]) < allowed * rmse(whole.predict(hidden), true[~seen])


def test_a_sum_that_grows_over_many_looks_back_is_that_of_a_fit():
    pairs = [(i, j) for i in range(12) for j in range(8)]
    parts = np.random.default_rng(0).normal(size=(30, len(pairs)))
    model = MatrixCompletion(rank=2, duplicates="sum", dtype="float64")
    for part in parts:
        model.partial_fit(pairs, part)
    assert len(model.model_.seen_values) == len(pairs)
    np.testing.assert_allclose(model.model_.given(), parts.sum(axis=0), atol=1e-9)
    whole = MatrixCompletion(rank=2, dtype="float64").fit(pairs, parts.sum(axis=0))
    np.testing.assert_allclose(model.predict(pairs), whole.predict(pairs), atol=0.2 * parts.sum(axis=0).std())


@pytest.mark.parametrize("rule", ["mean", "last", "sum"])
def test_a_pair_given_twice_in_a_batch_follows_the_rule_at_once(table, rule):
    _, pairs, values, _, _ = table
    new = [("new", j) for j in range(10)]
    twice = MatrixCompletion(2, duplicates=rule).fit(pairs, values)
    twice.partial_fit(new + new, [1.0] * 10 + [2.0] * 10)
    once = MatrixCompletion(2, duplicates=rule).fit(pairs, values)
    once.partial_fit(new, [{"mean": 1.5, "last": 2.0, "sum": 3.0}[rule]] * 10)
    np.testing.assert_allclose(twice.predict(new), once.predict(new), rtol=1e-6)
    with pytest.raises(ValueError, match="10 entries repeat a pair"):
        MatrixCompletion(2, duplicates="error").fit(pairs, values).partial_fit(new + new, [1.0] * 20)


@pytest.mark.parametrize("options", [{}, {"inference": "point", "ridge": 1.0}], ids=["variational", "point"])
def test_a_value_that_was_put_right_leaves_no_trace(table, options):
    _, pairs, values, held, _ = table
    clean = MatrixCompletion(2, **options).fit(pairs, values)
    again, slips = np.concatenate([pairs[:3], pairs]), np.concatenate([[1e3, -50.0, 1e6], values])
    right = MatrixCompletion(2, duplicates="last", **options).fit(again, slips)
    np.testing.assert_allclose(right.predict(held), clean.predict(held), rtol=1e-5)
    assert (right.model_.low, right.model_.high, right.n_duplicates_) == (values.min(), values.max(), 3)


def test_a_value_that_was_put_right_leaves_no_trace_in_a_stream(table):
    _, pairs, values, held, _ = table
    stream = MatrixCompletion(2, duplicates="last", clip=False).partial_fit(pairs[:3], [1e3, -50.0, 300.0])
    expected = MatrixCompletion(2, clip=False).fit(pairs, values).predict(held)
    np.testing.assert_allclose(stream.partial_fit(pairs, values).predict(held), expected, atol=1e-3)


@pytest.mark.parametrize("rule", ["mean", "last", "sum"])
def test_values_given_twice_follow_the_rule_in_new_rows_too(table, rule):
    holes, pairs, values, _, _ = table
    model = MatrixCompletion(2, duplicates=rule).fit(pairs, values)
    wanted, merged = np.arange(5, 15), {"mean": 2.0, "last": 3.0, "sum": 4.0}[rule]
    twice = model.predict_new([1, 2, 1], [1.0, 2.5, 3.0], wanted)
    np.testing.assert_allclose(twice, model.predict_new([1, 2], [merged, 2.5], wanted), rtol=1e-6)
    with pytest.raises(ValueError, match=r"1 entry repeats a pair .* row 'new', column 1; choose"):
        model.set_params(duplicates="error").predict_new([1, 2, 1], [1.0, 2.5, 3.0], wanted)
    # a matrix that holds an entry twice is scored as the one that holds it once
    j, i = np.nonzero(~np.isnan(holes).T)
    first, second = {"mean": (0.5, 1.5), "last": (7.0, 1.0), "sum": (0.25, 0.75)}[rule]
    parts = np.concatenate([holes[i, j] * first, holes[i, j] * second])
    split = sp.coo_array((parts, (np.tile(i, 2), np.tile(j, 2))), shape=holes.shape)
    once = sp.coo_array((holes[i, j], (i, j)), shape=holes.shape)
    assert model.set_params(duplicates=rule).score(split) == pytest.approx(model.score(once), abs=1e-6)


def test_a_stream_keeps_to_max_iter_and_tol(table):
    _, pairs, values, _, _ = table
    for options in ({"max_iter": 2, "dtype": "float64"}, {"max_iter": 500, "tol": 1e-8, "dtype": "float64"}):
        whole = MatrixCompletion(2, **options).fit(pairs, values)
        stream = MatrixCompletion(2, **options).partial_fit(pairs[::3], values[::3])
        rest = np.arange(len(pairs)) % 3 > 0
        stream.partial_fit(pairs[rest], values[rest])
        assert (stream.n_iter_, stream.converged_) == (whole.n_iter_, whole.converged_)


def test_sums_are_taken_before_the_centre(table):
    _, pairs, values, held, _ = table
    once = MatrixCompletion(rank=2, duplicates="sum", dtype="float64").fit(pairs, values)
    twice = MatrixCompletion(rank=2, duplicates="sum", dtype="float64")
    twice.fit(np.concatenate([pairs, pairs]), np.concatenate([values / 4, 3 * values / 4]))
    np.testing.assert_allclose(twice.predict(held), once.predict(held), atol=1e-8)
    assert (once.n_duplicates_, twice.n_duplicates_) == (0, len(values))


def test_files_keep_everything(table, tmp_path):
    _, pairs, values, held, _ = table
    names = np.array([[f"u{i}", f"é{j}"] for i, j in pairs], dtype=object)
    wanted = np.array([[f"u{i}", f"é{j}"] for i, j in held], dtype=object)
    model = MatrixCompletion(rank=2, offsets="rows", random_state=3).fit(names, values)
    model.save(tmp_path / "model")
    again = MatrixCompletion.load(tmp_path / "model")
    for a, b in zip(model.predict(wanted, return_std=True), again.predict(wanted, return_std=True), strict=True):
        np.testing.assert_array_equal(a, b)
    assert again.get_params() == model.get_params()
    assert again.recommend("u3", 3)[0].tolist() == model.recommend("u3", 3)[0].tolist()
    assert json.loads((tmp_path / "model" / "model.json").read_text())["rows"]["count"] == 60
    again.partial_fit([("new", "é1")], [2.0])
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["model.json", "model.safetensors"]


def test_errors_along_a_path_of_ranks_are_those_of_fits_by_themselves():
    rng = np.random.default_rng(1)
    people, films, levels = rng.normal(size=(150, 3)), rng.normal(size=(60, 3)), rng.normal(size=(150, 1))
    truth = 3 + 0.5 * levels + 0.4 * people @ films.T
    table = np.where(rng.random(truth.shape) < 0.25, truth + 0.3 * rng.normal(size=truth.shape), np.nan)
    path = MatrixCompletionCV(ranks=(2, 5, 10)).fit(table).cv_results_["mean_rmse"]
    alone = [MatrixCompletionCV(ranks=(rank,)).fit(table).best_rmse_ for rank in (2, 5, 10)]
    np.testing.assert_allclose(path, alone, rtol=0.01)
    assert path[1] < 0.9 * path[0]  # the third factor is found


@pytest.mark.parametrize(("density", "ridge"), [(0.2, None), (0.3, None), (0.3, 0.3)])
def test_the_search_finds_the_error_of_the_fit_that_is_made_in_the_end(density, ridge):
    """A jump from rank 2 to 5 lost factors where ratings are few: 0.08 too much, and rank 2 was chosen for 5."""
    draw = np.random.default_rng(0)
    true = 3 + draw.normal(size=(150, 5)) @ draw.normal(size=(5, 80)) / 5**0.5
    seen = draw.random(true.shape) < density
    pairs, values = np.argwhere(seen), true[seen] + 0.3 * draw.normal(size=seen.sum())
    path = MatrixCompletionCV(ranks=(2, 5, 10), ridges=(ridge,)).fit(pairs, values).cv_results_["mean_rmse"]
    alone = [MatrixCompletionCV((rank,), ridges=(ridge,)).fit(pairs, values).best_rmse_ for rank in (2, 5, 10)]
    np.testing.assert_allclose(path, alone, rtol=1e-6)


def test_files_keep_the_search(table, tmp_path):
    _, pairs, values, held, _ = table
    model = MatrixCompletionCV(ranks=(1, 2), ridges=(None, 5.0), max_iter=5).fit(pairs, values)
    model.save(tmp_path)
    again = MatrixCompletionCV.load(tmp_path)
    np.testing.assert_equal(again.cv_results_, model.cv_results_)
    for name in ("best_rank_", "best_ridge_", "best_rmse_"):
        assert getattr(again, name) == getattr(model, name)
    MatrixCompletion.load(tmp_path).save(tmp_path / "alone")
    MatrixCompletionCV.load(tmp_path / "alone").save(tmp_path / "alone")
    np.testing.assert_array_equal(MatrixCompletion.load(tmp_path / "alone").predict(held), model.predict(held))


def test_tables_of_arrow_and_tensors_are_what_data_frames_and_arrays_are(table):
    holes, pairs, values, held, _ = table
    expected = MatrixCompletion(rank=2, max_iter=5).fit(pairs, values).predict(held)
    long = pa.table({"row": pairs[:, 0], "column": pairs[:, 1], "value": values})
    target = torch.tensor(values, requires_grad=True)
    missing = pd.DataFrame(holes).astype(object).where(~np.isnan(holes), pd.NA)
    for data in ((long,), (long.select(["row", "column"]), values), (pairs, target), (missing,)):
        found = MatrixCompletion(rank=2, max_iter=5).fit(*data)
        np.testing.assert_allclose(found.predict(pa.table({"row": held[:, 0], "column": held[:, 1]})), expected)
    half = MatrixCompletion(rank=2, max_iter=5).fit(torch.from_numpy(holes).bfloat16())
    assert half.model_.posterior.n_ratings == len(values)


def test_files_that_are_not_models_are_refused(table, tmp_path):
    _, pairs, values, _, _ = table
    with pytest.raises(FileNotFoundError, match="there is no model folder"):
        MatrixCompletion.load(tmp_path / "nothing")
    model = MatrixCompletion(rank=2).fit(pairs, values)
    model.save(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-20] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="damaged: its checksum does not match"):
        MatrixCompletion.load(tmp_path / "model")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="it is a file, a folder is expected"):
        model.save(tmp_path / "file")
    odd = MatrixCompletion(rank=1).fit([(1j, "a"), (2j, "b")], [1.0, 2.0])
    with pytest.raises(TypeError, match=r"can be saved if .* UUIDs or periods of pandas, got 1j \(complex\)"):
        odd.save(tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


def test_a_save_that_fails_leaves_the_old_model(table, tmp_path, monkeypatch):
    _, pairs, values, _, _ = table
    model = MatrixCompletion(rank=2).fit(pairs, values)
    model.save(tmp_path / "model")
    before = {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()}

    def broken(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(KeyboardInterrupt):
        MatrixCompletion(rank=1).fit(pairs, values).save(tmp_path / "model")
    assert {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()} == before


def test_pickle_and_threads(table, tmp_path):
    _, pairs, values, held, _ = table
    model = MatrixCompletion(rank=2).fit(pairs, values)
    expected = model.predict(held)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(held), expected)
    joblib.dump(model, tmp_path / "model.joblib")
    np.testing.assert_array_equal(joblib.load(tmp_path / "model.joblib").predict(held), expected)
    results = [None] * 8

    def work(k):
        results[k] = model.predict(held, return_std=True)[0]

    workers = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_interrupt_returns_a_usable_model_when_asked(table, monkeypatch):
    _, pairs, values, held, truth = table
    show = engine._Show.__call__

    def stop_after_two(self, record):
        show(self, record)
        if record["iteration"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine._Show, "__call__", stop_after_two)
    model = MatrixCompletion(rank=2, on_interrupt="return").fit(pairs, values)
    assert model.interrupted_
    assert model.n_iter_ == 2
    assert rmse(model.predict(held), truth) < 0.5
    with pytest.raises(KeyboardInterrupt):
        MatrixCompletion(rank=2).fit(pairs, values)


def test_ctrl_c_in_a_search_ends_it(table, monkeypatch, tmp_path):
    _, pairs, values, _, _ = table
    file, real, fits = tmp_path / "fit", engine.fit_variational, []

    def stopped(*args, **options):
        fits.append(args[1])
        if len(fits) == stop_at:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(engine, "fit_variational", stopped)
    model = MatrixCompletionCV((1, 2), cv=2, on_interrupt="return", checkpoint=file, random_state=0)
    stop_at = 4  # the last fit of the search
    with pytest.raises(KeyboardInterrupt):
        model.fit(pairs, values)
    assert len(fits) == 4
    stop_at = 7  # the first fold is known, the second is searched again, and the fit to all values is stopped
    assert model.fit(pairs, values).interrupted_
    assert fits[4:] == [1, 2, 2]
    expected = MatrixCompletionCV((1, 2), cv=2, random_state=0).fit(pairs, values).cv_results_["mean_rmse"]
    assert np.array_equal(model.cv_results_["mean_rmse"], expected)
    # what was searched is kept as long as the fit is not done
    fits.clear()
    stop_at = 0
    assert not model.fit(pairs, values).interrupted_
    assert fits == [2]
    assert list(tmp_path.iterdir()) == []


def test_folds_are_counted_in_pairs():
    with pytest.raises(ValueError, match="cv=3 folds need as many ratings, got 2"):
        MatrixCompletionCV((1,), cv=3).fit([(0, 0), (0, 0), (0, 0), (1, 1)], [1.0, 2.0, 3.0, 4.0])


def test_point_estimate(table):
    _, pairs, values, held, truth = table
    model = MatrixCompletion(rank=2, inference="point").fit(pairs, values)
    assert rmse(model.predict(held), truth) < 0.3
    assert model.n_iter_ == len(model.trace_) > 1
    new = pairs[:, 0] >= 50
    fresh = MatrixCompletion(rank=2, inference="point", ridge=0.5).fit(pairs[~new], values[~new])
    fresh.partial_fit(pairs[new], values[new])
    late = held[:, 0] >= 50
    assert rmse(fresh.predict(held[late]), truth[late]) < 0.5
    assert len(fresh.recommend(55, 3)[0]) == 3
    for offsets in ("rows", "columns", "global", "none"):
        with_some = MatrixCompletion(rank=4, inference="point", offsets=offsets, ridge=0.5).fit(pairs, values)
        assert rmse(with_some.predict(held), truth) < 0.6
    chosen = MatrixCompletionCV(ranks=(1, 2), inference="point", ridges=(0.5,)).fit(pairs, values)
    assert chosen.best_rank_ == 2


def test_same_seed_same_model(table):
    _, pairs, values, held, _ = table
    a, b = (MatrixCompletion(rank=3, random_state=5).fit(pairs, values).predict(held) for _ in range(2))
    np.testing.assert_array_equal(a, b)


def test_cv_finds_the_rank(table, tmp_path):
    _, pairs, values, held, truth = table
    model = MatrixCompletionCV(ranks=(1, 2, 100), ridges=(None, 5.0)).fit(pairs, values)
    assert (model.best_rank_, model.best_ridge_) == (2, None)
    assert len(model.cv_results_["mean_rmse"]) == 4
    assert model.best_rmse_ == min(model.cv_results_["mean_rmse"])
    np.testing.assert_array_equal(model.predict(held), MatrixCompletion(rank=2).fit(pairs, values).predict(held))
    assert clone(model).get_params() == model.get_params()
    assert rmse(model.predict(held), truth) < 0.15
    model.save(tmp_path / "model")
    again = MatrixCompletion.load(tmp_path / "model")
    assert again.rank == 2
    np.testing.assert_array_equal(again.predict(held), model.predict(held))


def test_verbose_shows_a_bar(table, capsys):
    _, pairs, values, _, _ = table
    MatrixCompletion(rank=1, max_iter=2, verbose=True).fit(pairs, values)
    assert "completing" in capsys.readouterr().err
