"""The multi-task regressor: the model it claims, the forms of input, learning on, files, bad input."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.utils.estimator_checks import parametrize_with_checks

from fisherfold import datasets
from fisherfold.completion.imputer import LowRankImputer
from fisherfold.distributed import ALONE
from fisherfold.files import MODEL, read_tensors, write_tensors
from fisherfold.reproduce.subspace import split_rows
from fisherfold.subspace.marginal import posterior
from fisherfold.subspace.regressor import SubspaceRegressor

needs_data = pytest.mark.skipif(not os.environ.get("FISHERFOLD_DATA"), reason="FISHERFOLD_DATA is not set")


def rows(seed=0, tasks=12, per_task=20, n=5, noise=0.1):
    g = np.random.default_rng(seed)
    task = np.repeat([f"t{i}" for i in range(tasks)], per_task)
    X = 3 + 2 * g.normal(size=(len(task), n))
    frame, mean = g.normal(size=(n, 2)), g.normal(size=n)
    weights = mean + g.normal(size=(tasks, 2)) @ frame.T
    y = (X * weights[np.repeat(np.arange(tasks), per_task)]).sum(1) + 5 + noise * g.normal(size=len(task))
    order = g.permutation(len(task))
    return X[order], y[order], task[order]


SPLIT = "the ridge is chosen on held-out rows, and which rows those are depends on how often a row is listed"


def expected_failures(estimator):
    if estimator.inference == "marginal" or estimator.ridge != "auto":
        return {}
    return {"check_sample_weight_equivalence_on_dense_data": SPLIT}


@parametrize_with_checks(
    [SubspaceRegressor(), SubspaceRegressor(inference="point"), SubspaceRegressor(inference="point", ridge=1.0)],
    expected_failed_checks=expected_failures,
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_accepts_it(estimator, check):
    check(estimator)


def test_it_recovers_related_tasks_better_than_each_alone():
    X, y, task = rows(per_task=48, noise=1.0)
    few = np.zeros(len(task), dtype=bool)
    for name in set(task):
        few[np.flatnonzero(task == name)[:8]] = True
    model = SubspaceRegressor(rank=2).fit(X[few], y[few], task=task[few])
    ours = np.mean((model.predict(X[~few], task=task[~few]) - y[~few]) ** 2)
    alone = []
    for name in sorted(set(task)):
        own, new = few & (task == name), ~few & (task == name)
        alone.append(np.mean((Ridge(alpha=1.0).fit(X[own], y[own]).predict(X[new]) - y[new]) ** 2))
    # the noise alone has variance 1
    assert ours - 1 < 0.5 * (np.mean(alone) - 1)


def test_coefficients_are_in_the_units_of_the_features():
    X, y, task = rows()
    model = SubspaceRegressor(rank=2).fit(X, y, task=task)
    numbers = np.array([list(model.task_ids_).index(t) for t in task])
    by_hand = (X * model.coef_[numbers]).sum(1) + model.intercept_[numbers]
    np.testing.assert_allclose(model.predict(X, task=task), by_hand, rtol=1e-9)
    assert model.score(X, y, task=task) > 0.99


@pytest.mark.parametrize("inference", ["marginal", "point"])
def test_units_and_shifts_of_the_features_do_not_matter(inference):
    X, y, task = rows(noise=0.5)
    first = SubspaceRegressor(rank=2, inference=inference, ridge=1.0).fit(X, y, task=task)
    other_units = X * [1, 10, 1e3, 1, 0.1] - 7
    moved = SubspaceRegressor(rank=2, inference=inference, ridge=1.0).fit(other_units, y + 100, task=task)
    expected = first.predict(X, task=task) + 100
    np.testing.assert_allclose(moved.predict(other_units, task=task), expected, rtol=1e-4)


def test_lists_of_tables_are_the_same_as_one_table():
    X, y, task = rows()
    names = sorted(set(task))
    lists = [X[task == name] for name in names], [y[task == name] for name in names]
    table = SubspaceRegressor(rank=2).fit(X, y, task=task)
    named = SubspaceRegressor(rank=2).fit(*lists, task=names)
    numbered = SubspaceRegressor(rank=2).fit(*lists)
    expected = table.predict(X, task=task)
    np.testing.assert_allclose(named.predict(X, task=task), expected, rtol=1e-6)
    numbers = np.array([names.index(name) for name in task])
    np.testing.assert_allclose(numbered.predict(X, task=numbers), expected, rtol=1e-6)


def test_predictions_and_scores_take_the_lists_that_fit_takes():
    X, y, task = rows()
    names = sorted(set(task))[::-1]
    Xs, ys = ([part[task == name] for name in names] for part in (X, y))
    Xs[3], ys[3] = Xs[3][:0], ys[3][:0]
    order = np.concatenate([np.flatnonzero(task == name)[: len(part)] for name, part in zip(names, Xs, strict=True)])
    model = SubspaceRegressor(rank=2).fit(X, y, task=task)
    expected = model.predict(X[order], task=task[order], return_std=True)
    values, deviations = model.predict(Xs, task=names, return_std=True)
    np.testing.assert_equal(model.predict(Xs, task=names), values)
    for found, whole in ((values, expected[0]), (deviations, expected[1])):
        assert [len(part) for part in found] == [len(part) for part in Xs]
        np.testing.assert_array_equal(np.concatenate(found), whole)
    assert model.score(Xs, ys, task=names) == model.score(X[order], y[order], task=task[order])
    assert model.nmse(Xs, ys, task=names) == model.nmse(X[order], y[order], task=task[order])
    assert len(model.predict(Xs, task=[*names[:-1], "stranger"], unseen="mean")) == len(names)
    numbered = SubspaceRegressor(rank=2).fit(Xs[:3], ys[:3])
    assert numbered.score(Xs[:3], ys[:3]) == numbered.score(Xs[:3], ys[:3], task=[0, 1, 2])
    with pytest.raises(ValueError, match="same length, got 12 tables in X and 2 ids in task"):
        model.predict(Xs, task=names[:2])
    with pytest.raises(ValueError, match="same length, got 12 tables in X, 11 in y and 12 ids in task"):
        model.score(Xs, ys[1:], task=names)
    with pytest.raises(ValueError, match="task 't9': X has 20 rows and y has 19"):
        model.score(Xs[:1], [ys[0][1:]], task=names[:1])
    with pytest.raises(ValueError, match="task 't8' has 4 features, the first task 5"):
        model.predict([Xs[0], Xs[1][:, :4]], task=names[:2])
    with pytest.raises(ValueError, match="12 tasks were not seen in fit: 0, 1, 2"):
        model.predict([part[:1] for part in X.reshape(12, 20, 5)])
    with pytest.raises(ValueError, match="X must have no missing values, 1 entry is masked"):
        model.predict([np.ma.masked_equal(Xs[0], Xs[0][0, 0])], task=names[:1])


@pytest.mark.parametrize("library", [pd, pl])
def test_lists_of_data_frames_keep_their_names(library):
    X, y, task = rows()
    names = sorted(set(task))
    Xs, ys = ([part[task == name] for name in names] for part in (X, y))
    frames = [library.DataFrame({name: part[:, i] for i, name in enumerate("abcde")}) for part in Xs]
    model = SubspaceRegressor(rank=2).fit(frames, ys, task=names)
    assert model.feature_names_in_.tolist() == list("abcde")
    expected = SubspaceRegressor(rank=2).fit(Xs, ys, task=names)
    assert model.score(frames, ys, task=names) == expected.score(Xs, ys, task=names)
    exchanged = [frames[0], *(frame[["b", "a", "c", "d", "e"]] for frame in frames[1:])]
    with pytest.raises(ValueError, match=r"task 't1' has the columns \['b', 'a', .*\], the first task \['a', 'b'"):
        model.fit(exchanged, ys, task=names)
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(exchanged[1:], task=names[1:])


def test_tables_and_arrays_of_arrow_are_what_data_frames_and_arrays_are():
    X, y, ids = rows()
    names = [f"x{k}" for k in range(X.shape[1])]
    frame, arrow = pd.DataFrame(X, columns=names), pa.table(dict(zip(names, X.T, strict=True)))
    expected = SubspaceRegressor(rank=2).fit(frame, y, task=ids).predict(frame, task=ids)
    model = SubspaceRegressor(rank=2).fit(arrow, pa.array(y), task=pa.array(ids))
    np.testing.assert_allclose(model.predict(arrow, task=pa.array(ids)), expected, rtol=1e-9)
    assert model.feature_names_in_.tolist() == names
    with pytest.raises(ValueError, match="column 'x1' must hold numbers, got the text 'green'"):
        model.predict(arrow.set_column(1, "x1", pa.array(["green"] * len(y))), task=ids)
    lists = SubspaceRegressor(rank=2).fit([arrow, arrow], [y, -y])
    with pytest.raises(ValueError, match="feature names should match"):
        lists.predict([arrow.select(names[::-1])] * 2)
    holes = np.where(np.arange(X.size).reshape(X.shape) % 7 == 3, np.nan, X)
    filled = LowRankImputer(rank=2).fit_transform(pa.table(dict(zip(names, holes.T, strict=True))))
    np.testing.assert_allclose(filled, LowRankImputer(rank=2).fit_transform(holes), rtol=1e-9)


def test_several_outputs_are_tasks_over_shared_rows():
    g = np.random.default_rng(1)
    X = g.normal(size=(60, 4))
    Y = X @ g.normal(size=(4, 1)) @ g.normal(size=(1, 5)) + 0.1 * g.normal(size=(60, 5))
    model = SubspaceRegressor(rank=2).fit(X, Y)
    stacked = SubspaceRegressor(rank=2).fit(np.tile(X, (5, 1)), Y.T.reshape(-1), task=np.repeat(np.arange(5), 60))
    assert model.predict(X).shape == (60, 5)
    np.testing.assert_allclose(model.predict(X)[:, 3], stacked.predict(X, task=np.full(60, 3)), rtol=1e-6)
    values, deviations = model.predict(X, return_std=True)
    assert values.shape == deviations.shape == (60, 5)
    assert model.nmse(X, Y) < 0.2


def test_further_targets_come_in_the_form_of_the_fit():
    X, y, _ = rows()
    outputs = SubspaceRegressor(rank=2).fit(X, np.stack([y, 2 * y], axis=1))
    for learn in (outputs.partial_fit, outputs.fold_in):
        for given, seen in (
            ((y, None), r"got shape \(240,\)"), ((np.ones((240, 3)), None), r"got shape \(240, 3\)"),
            ((y, ["new"] * 240), "got a task for each row"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"fitted to 2 outputs: y must have one column for each, {seen}"):
                learn(X, given[0], task=given[1])
    assert outputs.task_ids_.tolist() == [0, 1]
    single = SubspaceRegressor(rank=2).fit(X, y)
    with pytest.raises(ValueError, match=r"y must have one dimension, as in fit, got shape \(240, 2\)"):
        single.partial_fit(X, np.stack([y, y], axis=1))
    assert single.partial_fit(X, y[:, None]).predict(X).shape == (240,)


@pytest.mark.parametrize("inference", ["marginal", "point"])
def test_learning_on_keeps_the_rank(inference):
    X, y, task = rows()
    model = SubspaceRegressor(rank=1, inference=inference, max_iter=5).fit(X, y, task=task).set_params(rank=3)
    assert model.partial_fit(X, y, task=task).components_.shape == (6, 1)


def test_the_nmse_takes_targets_as_fit_does():
    X, y, task = rows()
    model = SubspaceRegressor(rank=2).fit(X, y, task=task)
    expected = model.nmse(X, y, task=task)
    assert model.nmse(X, y[:, None], task=task) == model.nmse(X, pd.DataFrame({"y": y}), task=task) == expected
    with pytest.raises(ValueError, match=r"y must have the shape \(240,\) of the predictions, got \(10,\)"):
        model.nmse(X, y[:10], task=task)


def test_full_rank_and_a_subspace_of_all_but_one_direction():
    X, y, task = rows(noise=0.5)
    for rank in (5, 6):
        assert SubspaceRegressor(rank=rank).fit(X, y, task=task).score(X, y, task=task) > 0.99
    point = SubspaceRegressor(rank=6, inference="point", ridge=0.5).fit(X, y, task=task)
    own = task == task[0]
    Z = np.c_[(X - X.mean(0)) / X.std(0), np.ones(len(X))][own]
    by_hand = Z @ np.linalg.solve(Z.T @ Z + 0.5 * np.eye(6), Z.T @ (y[own] - y.mean())) + y.mean()
    np.testing.assert_allclose(point.predict(X[own], task=task[own]), by_hand, rtol=1e-8)


def test_standard_deviations_are_calibrated():
    g = np.random.default_rng(2)
    tasks, n = 300, 4
    frame = g.normal(size=(n, 2))
    weights = g.normal(size=(tasks, 2)) @ frame.T
    task = np.repeat(np.arange(tasks), 12)
    X = g.normal(size=(len(task), n))
    y = (X * weights[task]).sum(1) + g.normal(size=len(task))
    train = np.arange(len(task)) % 12 < 6
    model = SubspaceRegressor(rank=2, noise="shared").fit(X[train], y[train], task=task[train])
    values, deviations = model.predict(X[~train], task=task[~train], return_std=True)
    z = (y[~train] - values) / deviations
    assert np.std(z) == pytest.approx(1.0, abs=0.06)
    assert np.mean(np.abs(z) < 1.645) == pytest.approx(0.9, abs=0.03)


def test_an_unseen_task_is_an_error_or_the_mean_as_asked():
    X, y, task = rows()
    model = SubspaceRegressor(rank=2).fit(X, y, task=task)
    with pytest.raises(ValueError, match=r"2 tasks were not seen in fit: 'new', 'other'; use fold_in .* unseen='mean'"):
        model.predict(X[:3], task=["new", "t0", "other"])
    values, deviations = model.predict(X[:1], task=["new"], return_std=True, unseen="mean")
    known, known_deviations = model.predict(X[:1], task=["t0"], return_std=True)
    assert deviations[0] > 2 * known_deviations[0]
    assert np.isfinite(values[0])
    assert values[0] != known[0]
    with pytest.raises(ValueError, match="unseen must be 'error' or 'mean', got 'zero'"):
        model.predict(X[:1], task=["t0"], unseen="zero")


def test_folding_in_a_task_keeps_what_is_shared_and_helps_that_task():
    X, y, task = rows(noise=0.5)
    held = task == "t3"
    model = SubspaceRegressor(rank=2).fit(X[~held], y[~held], task=task[~held])
    frame, before = model.components_.copy(), model.predict(X[~held], task=task[~held])
    blind = np.mean((model.predict(X[held], task=task[held], unseen="mean") - y[held]) ** 2)
    model.fold_in(X[held][:8], y[held][:8], task=task[held][:8])
    np.testing.assert_array_equal(model.components_, frame)
    np.testing.assert_allclose(model.predict(X[~held], task=task[~held]), before, rtol=1e-9)
    after = np.mean((model.predict(X[held][8:], task=task[held][8:]) - y[held][8:]) ** 2)
    assert after < 0.2 * blind
    # mean, intercept and two directions
    point = SubspaceRegressor(rank=4, inference="point", ridge=0.1).fit(X[~held], y[~held], task=task[~held])
    frame = point.components_.copy()
    point.fold_in(X[held], y[held], task=task[held])
    np.testing.assert_array_equal(point.components_, frame)
    assert point.score(X[held], y[held], task=task[held]) > 0.9


@pytest.mark.parametrize("options", [{}, {"noise": "shared"}, {"inference": "point", "ridge": 1.0}])
def test_rows_may_be_folded_in_at_once_or_one_by_one_in_any_order(options, tmp_path):
    X, y, task = rows(noise=0.5)
    late = np.isin(task, ["t3", "t4"])
    # one new task, and a known one that gets louder
    louder = y[late] + 5 * np.random.default_rng(0).normal(size=late.sum())
    more = X[late], louder, np.where(task[late] == "t3", "new", "t0")
    models = [SubspaceRegressor(rank=2, **options).fit(X[~late], y[~late], task=task[~late]) for _ in range(2)]
    models[0].fold_in(more[0], more[1], task=more[2])
    for i in np.random.default_rng(1).permutation(late.sum()):
        models[1].fold_in(more[0][i : i + 1], more[1][i : i + 1], task=more[2][i : i + 1])
    models[1].save(tmp_path / "model")
    models.append(SubspaceRegressor.load(tmp_path / "model").fold_in(X[:1], y[:1], task=["last"]))
    for asked in (["new"] * len(X), ["t0"] * len(X)):
        values = [model.predict(X, task=asked) for model in models]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-7)
        np.testing.assert_allclose(values[2], values[0], rtol=1e-7)
    if "inference" not in options:
        noise = dict(zip(models[0].task_ids_.tolist(), models[0].noise_variance_, strict=True))
        assert options or noise["t0"] > 5 * noise["t1"]


@pytest.mark.parametrize("options", [{}, {"inference": "point", "ridge": 1.0}])
def test_learning_in_pieces_ends_where_learning_at_once_does(options):
    X, y, task = rows(noise=0.5, tasks=10, per_task=30)
    scaled = (X - X.mean(0)) / X.std(0)
    options = options | {"rank": 2, "tol": 1e-10, "max_iter": 1000, "scale": False, "fit_intercept": False}
    pieces = SubspaceRegressor(**options)
    # new tasks in the second call, more rows of known ones in the third
    early = np.isin(task, ["t0", "t1", "t2", "t3", "t4"])
    half = np.arange(len(task)) % 2 == 0
    for part in (early & half, ~early, early & ~half):
        pieces.partial_fit(scaled[part], y[part] - y.mean(), task=task[part])
    whole = SubspaceRegressor(**options).fit(scaled, y - y.mean(), task=task)
    np.testing.assert_allclose(
        pieces.predict(scaled, task=task), whole.predict(scaled, task=task), atol=2e-3 * y.std()
    )


@pytest.mark.parametrize("noise", ["task", "shared"])
@pytest.mark.parametrize("first", [1, 2])
def test_tasks_that_differ_may_come_after_one_that_could_not(first, noise):
    X, y, task = rows(noise=0.5)
    early = np.isin(task, [f"t{i}" for i in range(first)])
    # of one task there is nothing to tell differences from: the prior has no directions left
    model = SubspaceRegressor(rank=2, noise=noise).fit(X[early], y[early], task=task[early])
    model.partial_fit(X[~early], y[~early], task=task[~early])
    whole = SubspaceRegressor(rank=2, noise=noise).fit(X, y, task=task)
    assert model.score(X, y, task=task) == pytest.approx(whole.score(X, y, task=task), abs=1e-3)


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_the_first_targets_may_all_be_alike(value):
    """A noise of 1e-100 was left to tasks without new rows, and the next call ended in an error from inside."""
    X, y, task = rows(noise=0.5, tasks=30, per_task=8)
    first, half = np.arange(len(task)) % 4 == 0, np.isin(task, [f"t{i}" for i in range(15)])
    y[first] = value
    model = SubspaceRegressor(rank=2).fit(X[first], y[first], task=task[first])
    for part in (~first & half, ~first & ~half):
        model.partial_fit(X[part], y[part], task=task[part])
    whole = SubspaceRegressor(rank=2).fit(X, y, task=task)
    assert model.score(X, y, task=task) == pytest.approx(whole.score(X, y, task=task), abs=5e-3)


@pytest.mark.parametrize("solver", ["rngd", "rngd-vr", "rsgd", "rsvrg", "rcg"])
def test_every_solver_works_without_tuning(solver):
    X, y, task = rows(noise=0.5)
    base = SubspaceRegressor(rank=2, inference="point", ridge=1.0).fit(X, y, task=task)
    other = SubspaceRegressor(rank=2, inference="point", ridge=1.0, solver=solver, max_iter=100, random_state=0)
    other.fit(X, y, task=task)
    assert other.score(X, y, task=task) > base.score(X, y, task=task) - 0.02
    assert len(other.trace_) > 1


def test_the_ridge_is_chosen_on_held_out_rows_or_given_per_task():
    X, y, task = rows(noise=3.0, per_task=10)
    model = SubspaceRegressor(rank=3, inference="point", random_state=0).fit(X, y, task=task)
    assert model.ridge_ == min(model.ridge_errors_, key=model.ridge_errors_.get)
    ridge = np.linspace(0.1, 10, 12)
    each = SubspaceRegressor(rank=3, inference="point", ridge=ridge).fit(X, y, task=task)
    np.testing.assert_array_equal(each.ridge_, ridge)
    with pytest.raises(ValueError, match=r"ridge must be one number or one per task \(12\), got shape \(3,\)"):
        SubspaceRegressor(rank=3, inference="point", ridge=[1.0, 2.0, 3.0]).fit(X, y, task=task)


def test_weights_count_rows():
    X, y, task = rows(noise=1.0)
    weight = np.random.default_rng(0).integers(1, 4, len(y))
    weighted = SubspaceRegressor(rank=2).fit(X, y, task=task, sample_weight=weight)
    listed = (np.repeat(part, weight, 0) for part in (X, y, task))
    repeated = SubspaceRegressor(rank=2).fit(*listed)
    np.testing.assert_allclose(weighted.predict(X, task=task), repeated.predict(X, task=task), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"inference": "point", "random_state": 0}])
def test_a_row_of_weight_zero_is_no_row(options):
    X, y, task = rows(noise=1.0)
    X[:, 2] = 0.1
    without = SubspaceRegressor(rank=2, **options).fit(X, y, task=task)
    # one that alone tells a constant feature from others, and one of a task of its own
    more = np.r_[X, X[:2] + 5.0], np.r_[y, 1e6, -1e6], np.append(task, ["t0", "t99"])
    weight = np.r_[np.ones(len(y)), 0.0, 0.0]
    model = SubspaceRegressor(rank=2, **options).fit(more[0], more[1], task=more[2], sample_weight=weight)
    np.testing.assert_array_equal(model.coef_, without.coef_)
    assert model.task_ids_.tolist() == without.task_ids_.tolist()
    with pytest.raises(ValueError, match="at least 2 rows must have a positive weight, got 1"):
        SubspaceRegressor().fit(X[:3], y[:3], sample_weight=[0.0, 0.0, 2.0])


@pytest.mark.parametrize("inference", ["marginal", "point"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_targets_of_few_digits_are_not_rounded_again(inference, dtype):
    X, y, task = rows()
    short = (y + 1000).astype(dtype)
    fits = [
        SubspaceRegressor(rank=2, inference=inference, ridge=1.0).fit(X, given, task=task)
        for given in (short, short.astype(np.float64))
    ]
    np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)
    np.testing.assert_array_equal(fits[0].intercept_, fits[1].intercept_)


def test_a_row_is_predicted_the_same_alone_and_among_others(tmp_path):
    X, y, task = rows()
    X[:, 0] = 1e12 + 10 * X[:, 0]
    X = np.c_[X, np.full(len(X), 0.1)]
    model = SubspaceRegressor(rank=2).fit(X, y, task=task)
    model.save(tmp_path / "model")
    for fitted in (model, SubspaceRegressor.load(tmp_path / "model")):
        alone = [float(fitted.predict(X[i : i + 1], task=task[i : i + 1])[0]) for i in range(len(X))]
        np.testing.assert_array_equal(alone, model.predict(X, task=task))


def test_transform_gives_the_shared_features():
    X, y, task = rows()
    frame = pd.DataFrame(X, columns=list("abcde"))
    model = SubspaceRegressor(rank=2).fit(frame, y, task=pd.Series(task))
    Z = np.c_[(X - X.mean(0)) / X.std(0), np.ones(len(X))]
    np.testing.assert_allclose(model.transform(frame), Z @ model.components_, rtol=1e-9)
    assert list(model.get_feature_names_out()) == ["subspaceregressor0", "subspaceregressor1"]


@pytest.mark.parametrize("options", [{}, {"inference": "point"}, {"inference": "point", "rank": 6, "ridge": 1.0}])
@pytest.mark.parametrize("ids", ["text", "numbers"])
def test_a_saved_model_predicts_the_same_and_learns_on(tmp_path, options, ids):
    X, y, task = rows(noise=0.5)
    task = task if ids == "text" else np.array([int(t[1:]) * 7 for t in task])
    model = SubspaceRegressor(**({"rank": 2} | options)).fit(X, y, task=task)
    model.save(tmp_path / "model")
    loaded = SubspaceRegressor.load(tmp_path / "model")
    assert loaded.get_params() == model.get_params()
    np.testing.assert_array_equal(loaded.predict(X, task=task), model.predict(X, task=task))
    np.testing.assert_array_equal(loaded.task_ids_, model.task_ids_)
    if not options:
        for a, b in zip(*(m.predict(X, task=task, return_std=True) for m in (model, loaded)), strict=True):
            np.testing.assert_array_equal(a, b)
    for m in (model, loaded):
        m.partial_fit(X[:20] + 1, y[:20], task=task[:20])
    np.testing.assert_allclose(loaded.predict(X, task=task), model.predict(X, task=task), rtol=1e-8)
    assert json.loads((tmp_path / "model" / "model.json").read_text())["estimator"] == "SubspaceRegressor"


def test_a_file_from_before_doubts_about_what_is_shared_takes_it_for_known(tmp_path):
    X, y, task = rows(noise=0.5)
    model = SubspaceRegressor(rank=2).fit(X, y, task=task)
    model.save(tmp_path / "model")
    file = tmp_path / "model" / MODEL
    tensors, header = read_tensors(file, kind="subspace", version=1)
    old = {name: tensor for name, tensor in tensors.items() if not name.startswith("spread.")}
    assert len(tensors) - len(old) == 6
    write_tensors(file, old, kind="subspace", version=1, header=header)
    loaded = SubspaceRegressor.load(tmp_path / "model")
    values, deviations = loaded.predict(X, task=task, return_std=True)
    np.testing.assert_array_equal(values, model.predict(X, task=task))
    inside = loaded.transform(X)
    numbers = np.array([loaded.task_ids_.tolist().index(t) for t in task])
    spread, noise = old["spread"].numpy()[numbers], old["prior.noise"].numpy()[numbers]
    np.testing.assert_allclose(deviations**2, noise + np.einsum("ri,rij,rj->r", inside, spread, inside), rtol=1e-9)
    assert np.isfinite(loaded.fold_in(X[:3], y[:3], ["new"] * 3).predict(X[:3], ["new"] * 3, return_std=True)[1]).all()
    broken = {**tensors, "spread.shared": tensors["spread.shared"][:2]}
    write_tensors(file, broken, kind="subspace", version=1, header=header)
    with pytest.raises(ValueError, match="what is not known of the shared parts has the size 2, not 3"):
        SubspaceRegressor.load(tmp_path / "model")


def test_a_file_from_before_rows_narrowed_the_doubts_about_what_is_shared_means_what_it_did(tmp_path):
    X, y, task = rows(noise=0.5)
    model = SubspaceRegressor(rank=2).fit(X, y, task=task)
    model.save(tmp_path / "model")
    file = tmp_path / "model" / MODEL
    tensors, header = read_tensors(file, kind="subspace", version=1)
    write_tensors(
        file, {k: v for k, v in tensors.items() if k != "spread.reach"}, kind="subspace", version=1, header=header
    )
    loaded = SubspaceRegressor.load(tmp_path / "model")
    old = model._spread
    number = torch.tensor([loaded.task_ids_.tolist().index(t) for t in task])
    Z = loaded.scaling_(X)
    inside = Z @ loaded._frame
    expected = old.noise[number] + torch.einsum("ri,rij,rj->r", inside, old.covariance[number], inside)
    expected += torch.einsum("rkl,kilj,ri,rj->r", old.moments[number], old.shared, Z, Z)
    np.testing.assert_allclose(loaded.predict(X, task=task, return_std=True)[1] ** 2, expected.numpy(), rtol=1e-9)
    known = loaded.fold_in(X[:5], y[:5], ["new"] * 5)._spread
    assert known.reach.shape == (len(loaded.task_ids_), Z.shape[1], 0)
    # the noise of the new task stays where its squared errors, rows and parameters of that kind put it
    weights = loaded._prior.mean + posterior(loaded.statistics_, loaded._prior).mean @ loaded._frame.mT
    errors = loaded.statistics_.residual_power(weights)[-1]
    gram = loaded.statistics_.gram[-1] / known.noise[-1]
    doubt = torch.einsum("kl,kilj->ij", known.moments[-1], known.shared)
    spent = ((doubt + loaded._frame @ known.covariance[-1] @ loaded._frame.mT) * gram).sum()
    found = (errors + 10 * known.common[0]) / (5 - spent + 10 - 2)
    np.testing.assert_allclose(float(known.noise[-1]), float(found), rtol=1e-6)
    broken = {**tensors, "spread.reach": tensors["spread.reach"][:, :, :1]}
    write_tensors(file, broken, kind="subspace", version=1, header=header)
    with pytest.raises(ValueError, match="the reach of its rows has 1 columns, not 2"):
        SubspaceRegressor.load(tmp_path / "model")


def test_deviations_of_rows_that_are_folded_in_do_not_depend_on_the_calls():
    X, y, task = rows(noise=0.5)
    late = np.isin(task, ["t3", "t7"])
    models = [SubspaceRegressor(rank=2).fit(X[~late], y[~late], task=task[~late]) for _ in range(2)]
    models[0].fold_in(X[late], y[late], task[late])
    for part in np.array_split(np.flatnonzero(late)[::-1], 5):
        models[1].fold_in(X[part], y[part], task[part])
    at_once, in_parts = (model.predict(X, task=task, return_std=True)[1] for model in models)
    np.testing.assert_allclose(in_parts, at_once, rtol=1e-6)
    # with all of their rows, their noise is about that of a fit with them
    whole = SubspaceRegressor(rank=2).fit(X, y, task=task).predict(X[late], task=task[late], return_std=True)[1]
    np.testing.assert_allclose(at_once[late], whole, rtol=0.15)


def test_a_model_without_statistics_predicts_but_does_not_learn(tmp_path):
    X, y, task = rows()
    model = SubspaceRegressor(rank=2).fit(X, y, task=task)
    model.save(tmp_path / "small", with_statistics=False)
    loaded = SubspaceRegressor.load(tmp_path / "small")
    np.testing.assert_array_equal(loaded.predict(X, task=task), model.predict(X, task=task))
    with pytest.raises(ValueError, match="saved without its statistics"):
        loaded.partial_fit(X, y, task=task)


def test_files_that_are_no_models_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no model folder"):
        SubspaceRegressor.load(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    X, y, task = rows()
    model = SubspaceRegressor(rank=2).fit(X, y, task=task)
    with pytest.raises(ValueError, match="it is a file, a folder is expected"):
        model.save(tmp_path / "file")
    model.save(tmp_path / "model")
    content = bytearray((tmp_path / "model" / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(content))
    with pytest.raises(ValueError, match="checksum"):
        SubspaceRegressor.load(tmp_path / "model")


def test_a_task_with_one_row_leans_on_the_others():
    X, y, task = rows(noise=0.3)
    keep = (task != "t1") | (np.cumsum(task == "t1") == 1)
    model = SubspaceRegressor(rank=2).fit(X[keep], y[keep], task=task[keep])
    one, many = model.predict(X[:2], task=["t1", "t2"], return_std=True)[1]
    assert one > many
    assert np.isfinite(model.coef_).all()


def test_a_constant_target_is_learnt_and_has_no_nmse():
    X, y, task = rows()
    y = np.where(task == "t0", 4.0, y)
    model = SubspaceRegressor(rank=2).fit(X, y, task=task)
    assert np.isfinite(model.nmse(X, y, task=task))
    with pytest.raises(ValueError, match="NMSE is undefined: every task has a constant target or a single row"):
        model.nmse(X[task == "t0"], y[task == "t0"], task=task[task == "t0"])
    everywhere = SubspaceRegressor(rank=2).fit(X, np.full(len(y), 2.5), task=task)
    np.testing.assert_allclose(everywhere.predict(X, task=task), 2.5, atol=1e-6)


def test_features_that_are_zero_or_constant_carry_no_weight():
    X, y, task = rows(noise=0.3)
    wide = np.c_[X, np.zeros(len(X)), np.full(len(X), 0.1)]
    model = SubspaceRegressor(rank=2).fit(wide, y, task=task)
    np.testing.assert_allclose(model.coef_[:, 5:], 0.0, atol=1e-9)
    np.testing.assert_allclose(
        model.predict(wide, task=task), SubspaceRegressor(rank=2).fit(X, y, task=task).predict(X, task=task), rtol=1e-4
    )
    for inference in ("marginal", "point"):
        nothing = SubspaceRegressor(inference=inference, ridge=1.0).fit(np.zeros((len(X), 3)), y, task=task)
        assert np.isfinite(nothing.predict(np.zeros((1, 3)), task=["t0"])).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": None}, "task must be given: the model has 12 tasks"),
        ({"task": ["t0"]}, r"task must have one id per row of X \(3\), got shape \(1,\)"),
        ({"task": ["t0", None, "t1"]}, r"task id at position 1 is missing \(got None\)"),
        ({"task": np.array([1.0, np.nan, 2.0])}, "task id at position 1 is missing"),
    ],
)
def test_bad_tasks_at_prediction_are_named(change, message):
    X, y, task = rows()
    model = SubspaceRegressor(rank=2).fit(X, y, task=task)
    with pytest.raises(ValueError, match=message):
        model.predict(X[:3], **change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 7}, r"rank must be a whole number between 1 and 6 \(the number of features plus one .*\), got 7"),
        ({"rank": 6, "fit_intercept": False}, r"rank must be a whole number between 1 and 5 \(of features\), got 6"),
        ({"rank": 0}, "rank must be a whole number"),
        ({"rank": 1.5}, "rank must be a whole number"),
        ({"inference": "bayes"}, "inference must be one of marginal, point, got 'bayes'"),
        ({"noise": "none"}, "noise must be one of"),
        ({"solver": "adam"}, "solver must be one of"),
        ({"ridge": "cv"}, "ridge must be finite and not negative, one number or one per task, or 'auto', got 'cv'"),
        ({"inference": "point", "ridge": -1.0}, "ridge must be finite and not negative"),
        ({"max_iter": 0}, "max_iter must be a whole number of at least 1, got 0"),
        ({"tol": -1.0}, "tol must be a finite number of at least 0, got -1.0"),
        ({"scale": "yes"}, "scale must be True or False, got 'yes'"),
    ],
)
def test_bad_options_are_named(options, message):
    X, y, task = rows()
    with pytest.raises(ValueError, match=message):
        SubspaceRegressor(**options).fit(X, y, task=task)


def test_bad_rows_are_named():
    X, y, task = rows()
    model = SubspaceRegressor(rank=2)
    with pytest.raises(ValueError, match="contains NaN"):
        model.fit(np.where(np.arange(X.size).reshape(X.shape) == 3, np.nan, X), y, task=task)
    with pytest.raises(ValueError, match="infinity"):
        model.fit(X, np.where(np.arange(len(y)) == 3, np.inf, y), task=task)
    frame = pd.DataFrame(X, columns=list("abcde")).astype(object)
    frame.loc[4, "c"] = "blue"
    with pytest.raises(ValueError, match="column 'c' must hold numbers, got the text 'blue' in row 4"):
        model.fit(frame, y, task=task)
    with pytest.raises(ValueError, match="y must have one column when task is given, got 2"):
        model.fit(X, np.c_[y, y], task=task)
    with pytest.raises(ValueError, match="same length, got 2 tables in X, 1 in y and 2 ids in task"):
        model.fit([X, X], [y])
    with pytest.raises(ValueError, match=r"task 1: X has 240 rows and y has 239"):
        model.fit([X, X], [y, y[1:]])
    with pytest.raises(ValueError, match=r"task 1 has 4 features, the first task 5"):
        model.fit([X, X[:, :4]], [y, y])
    with pytest.raises(ValueError, match="return_std needs inference='marginal'"):
        SubspaceRegressor(rank=2, inference="point", ridge=1.0).fit(X, y, task=task).predict(
            X, task=task, return_std=True
        )
    with pytest.raises(ValueError, match=r"at least one non-zero number|2 rows must have a positive weight"):
        model.fit(X, y, task=task, sample_weight=np.zeros(len(y)))


def test_the_point_model_takes_fixed_steps():
    X, y, task = rows()
    settings = {"rank": 2, "inference": "point", "ridge": 1e-6}
    steps = {"step": 1.0, "fisher": "exact"}
    stepped, found = (
        SubspaceRegressor(**settings, solver_options=options).fit(X, y, task=task).score(X, y, task=task)
        for options in (steps, {"step": None})
    )
    assert stepped == pytest.approx(found, abs=1e-4)
    with pytest.raises(ValueError, match=r"solver_options of 'rngd': sigma is for Algorithm 1, .* got sigma=0.1"):
        SubspaceRegressor(**settings, solver_options={"step": 1.0, "sigma": 0.1}).fit(X, y, task=task)


def test_a_clone_is_not_fitted_and_parameters_stay_as_given():
    model = SubspaceRegressor(rank=2, solver_options={"step": 0.1})
    assert clone(model).get_params() == model.get_params()
    assert not hasattr(clone(model), "coef_")


@needs_data
def test_school_is_at_or_below_the_anchor():
    data = datasets.load_tasks("school")
    errors = []
    for seed in range(5):
        train, test = split_rows(data.task, seed)
        model = SubspaceRegressor(rank=6).fit(data.X[train], data.y[train], task=data.task[train])
        errors.append(model.nmse(data.X[test], data.y[test], task=data.task[test]))
    assert np.mean(errors) <= 0.762
    assert torch.tensor(errors).std() < 0.05


@pytest.mark.parametrize(("first", "then"), [("marginal", "point"), ("point", "marginal")])
def test_a_model_stays_what_it_was_fitted_as_until_it_is_fitted_again(first: str, then: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X, task = rng.normal(size=(120, 6)), np.arange(120) % 8
    y = (X * (rng.normal(size=(8, 2)) @ rng.normal(size=(2, 6)))[task]).sum(1)
    model = SubspaceRegressor(2, inference=first, ridge=0.1, random_state=0).fit(X, y, task=task)
    before = model.predict(X, task=task)
    model.set_params(inference=then)
    assert np.array_equal(model.predict(X, task=task), before)
    assert np.array_equal(model.predict(X, task=task, unseen="mean"), before)
    with pytest.raises(ValueError, match=f"fitted with inference='{first}', call fit for '{then}'"):
        model.partial_fit(X, y, task=task)
    model.save(tmp_path / "between")
    between = SubspaceRegressor.load(tmp_path / "between")
    assert between.inference == then
    assert np.array_equal(between.predict(X, task=task), before)
    # nothing of the first fit is left in the second, nor in its file
    model.fit(X, y, task=task).save(tmp_path / "model.safetensors")
    fresh = SubspaceRegressor(2, inference=then, ridge=0.1, random_state=0).fit(X, y, task=task)
    loaded = SubspaceRegressor.load(tmp_path / "model.safetensors")
    for other in (model, loaded):
        assert np.array_equal(other.predict(X, task=task), fresh.predict(X, task=task))
        assert hasattr(other, "noise_variance_") == (then == "marginal")
        assert hasattr(other, "ridge_") == (then == "point")


def test_a_shared_fit_leaves_nothing_of_an_earlier_one_of_the_other_kind(monkeypatch):
    monkeypatch.setattr("fisherfold.subspace.shared.current_group", lambda _: ALONE)
    X, y, task = rows()
    model = SubspaceRegressor(2, ridge=1.0).fit(X, y, task=task)
    model.set_params(inference="point").fit_share(X, y, task=task)
    fresh = SubspaceRegressor(2, inference="point", ridge=1.0).fit_share(X, y, task=task)
    assert not hasattr(model, "noise_variance_")
    found = (each.predict(X, task=[9] * len(X), unseen="mean") for each in (model, fresh))
    assert np.array_equal(*found)


def test_masked_entries_are_missing_and_tensors_may_need_gradients():
    X, y, task = rows()
    model, holes = SubspaceRegressor(2).fit(X, y, task=task), np.arange(len(y)) < 7
    masked = np.ma.array(X, mask=np.repeat(holes[:, None], X.shape[1], axis=1))
    for name, call in {
        "X must have no missing values, 35": lambda: model.fit(masked, y, task=task),
        "y must have no missing values, 7": lambda: model.fit(X, np.ma.array(y, mask=holes), task=task),
        "sample_weight must have no missing": lambda: model.fit(X, y, task, np.ma.array(y * y, mask=holes)),
        "X must have no missing values": lambda: model.predict(masked, task=task),
        "X must have no": lambda: model.fit([masked, X], [y, y]),
    }.items():
        with pytest.raises(ValueError, match=name):
            call()
    live = SubspaceRegressor(2).fit(*(torch.tensor(part, requires_grad=True) for part in (X, y)), task=task)
    assert np.array_equal(live.predict(torch.tensor(X, requires_grad=True), task=task), model.predict(X, task=task))


def test_weights_come_in_the_lists_of_the_tables():
    X, y, task = rows()
    weight = np.random.default_rng(1).random(len(y))
    names = sorted(set(task))
    tables, targets, weights = ([part[task == name] for name in names] for part in (X, y, weight))
    model = SubspaceRegressor(rank=2).fit(tables, targets, task=names, sample_weight=weights)
    order = np.argsort(task, kind="stable")
    same = SubspaceRegressor(rank=2).fit(X[order], y[order], task=task[order], sample_weight=weight[order])
    assert np.array_equal(model.coef_, same.coef_)
    score = model.score(tables, targets, task=names, sample_weight=weights)
    assert score == same.score(X[order], y[order], task=task[order], sample_weight=weight[order])
    with pytest.raises(ValueError, match="sample_weight must be a list like X, with"):
        model.fit(tables, targets, task=names, sample_weight=weights[::-1][1:])


def test_the_common_noise_does_not_fall_with_the_sum_of_the_weights():
    X, y, task = rows()
    fits = [SubspaceRegressor(rank=2, noise="shared").fit(X, y, task, np.full(len(y), w)) for w in (1e-2, 1e-4)]
    assert fits[1].noise_variance_[0] >= 0.99 * fits[0].noise_variance_[0]


@pytest.mark.parametrize("estimator", [SubspaceRegressor(rank=1), LowRankImputer(1)], ids=lambda e: type(e).__name__)
def test_dates_are_no_features(estimator):
    day = np.arange("2020-01-01", "2020-01-11", dtype="datetime64[D]")
    number = np.arange(10.0)
    frames = [
        pd.DataFrame({"x": number, "day": pd.Series(day)}), pd.DataFrame({"day": pd.Series(day).dt.tz_localize("UTC")}),
        pd.DataFrame({"x": number, "day": day.astype(object)}), pl.DataFrame({"x": number, "day": day}),
        pl.DataFrame({"day": (day - day[0]).astype("timedelta64[us]")}),
    ]  # fmt: skip
    for frame in frames:
        with pytest.raises(ValueError, match="column 'day' must hold numbers, got"):
            estimator.fit(frame, number)
    with pytest.raises(ValueError, match="X must hold numbers, got dtype datetime64"):
        estimator.fit(day[:, None], number)
