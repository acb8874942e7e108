"""The multi-task regressor: the model it claims, the forms of input, continued learning, files, bad input."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import cloudpickle
import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from fisherfold import datasets
from fisherfold.reproduce.subspace import split_rows
from fisherfold.subspace.regressor import SubspaceRegressor
from toy import named_tasks

needs_data = pytest.mark.skipif(
    not os.environ.get("FISHERFOLD_DATA"), reason="FISHERFOLD_DATA is not set"
)


def expected_failures(estimator):
    if estimator.inference == "marginal" or estimator.ridge != "auto":
        return {}
    reason = "the ridge is chosen on held-out rows, and which rows those are depends on how often a row is listed"
    return {"check_sample_weight_equivalence_on_dense_data": reason}


@parametrize_with_checks(
    [SubspaceRegressor(), SubspaceRegressor(inference="point")],
    expected_failed_checks=expected_failures,
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_accepts_it(estimator, check):
    check(estimator)


def test_it_recovers_related_tasks_better_than_each_alone():
    X, y, task = named_tasks(per_task=48, noise=1.0)
    few = np.zeros(len(task), dtype=bool)
    for name in set(task):
        few[np.flatnonzero(task == name)[:8]] = True
    model = SubspaceRegressor(rank=2).fit(X[few], y[few], task=task[few])
    ours = np.mean((model.predict(X[~few], task=task[~few]) - y[~few]) ** 2)
    alone = []
    for name in sorted(set(task)):
        own, new = few & (task == name), ~few & (task == name)
        alone.append(np.mean((Ridge(alpha=1.0).fit(X[own], y[own]).predict(X[new]) - y[new]) ** 2))
    assert ours - 1 < 0.5 * (np.mean(alone) - 1)  # the noise alone has variance 1


@pytest.mark.parametrize("inference", ["marginal", "point"])
def test_coefficients_follow_the_units_and_shifts_of_the_features(inference):
    X, y, task = named_tasks(noise=0.5)
    first = SubspaceRegressor(rank=2, inference=inference, ridge=1.0).fit(X, y, task=task)
    numbers = np.array([list(first.task_ids_).index(t) for t in task])
    by_hand = (X * first.coef_[numbers]).sum(1) + first.intercept_[numbers]
    np.testing.assert_allclose(first.predict(X, task=task), by_hand, rtol=1e-9)
    other = X * [1, 10, 1e3, 1, 0.1] - 7
    moved = SubspaceRegressor(rank=2, inference=inference, ridge=1.0).fit(other, y + 100, task=task)
    np.testing.assert_allclose(
        moved.predict(other, task=task), first.predict(X, task=task) + 100, rtol=1e-4
    )


def as_frame(X, library):
    return library.DataFrame({name: X[:, i] for i, name in enumerate("abcde")})


@pytest.mark.parametrize("library", [pl, None])
def test_lists_of_tables_are_one_table(library):
    X, y, task = named_tasks()
    weight = np.random.default_rng(1).random(len(y))
    names = sorted(set(task))[::-1]
    Xs, ys, ws = ([part[task == name] for name in names] for part in (X, y, weight))
    order = np.concatenate([np.flatnonzero(task == name) for name in names])
    whole = SubspaceRegressor(rank=2).fit(
        X[order], y[order], task=task[order], sample_weight=weight[order]
    )
    tables = [as_frame(part, library) for part in Xs] if library else Xs
    model = SubspaceRegressor(rank=2).fit(tables, ys, task=names, sample_weight=ws)
    expected = whole.predict(X[order], task=task[order], return_std=True)
    for found, wanted in zip(
        model.predict(tables, task=names, return_std=True), expected, strict=True
    ):
        assert [len(part) for part in found] == [len(part) for part in Xs]
        np.testing.assert_allclose(np.concatenate(found), wanted, rtol=1e-9)
    assert model.score(tables, ys, task=names) == pytest.approx(whole.score(X, y, task=task))
    assert model.nmse(tables, ys, task=names) == pytest.approx(whole.nmse(X, y, task=task))
    numbered = SubspaceRegressor(rank=2).fit(tables[:3], ys[:3])
    assert numbered.score(tables[:3], ys[:3]) == numbered.score(tables[:3], ys[:3], task=[0, 1, 2])


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_the_task_may_be_a_column_of_the_data_frame(library, tmp_path):
    X, y, task = named_tasks()
    frame = as_frame(X, pd).assign(school=task)
    frame = frame if library == "pandas" else pl.from_pandas(frame)
    model = SubspaceRegressor(rank=2).fit(frame, pd.Series(y, name="score"), task="school")
    assert model.feature_names_in_.tolist() == list("abcde")
    assert (model.task_column_, model.target_name_) == ("school", "score")
    expected = SubspaceRegressor(rank=2).fit(as_frame(X, pd), y, task=task)
    by_hand = expected.predict(as_frame(X, pd), task=task)
    model.save(tmp_path / "model")
    for m in (model, SubspaceRegressor.load(tmp_path / "model"), pickle.loads(pickle.dumps(model))):
        np.testing.assert_allclose(m.predict(frame), by_hand, rtol=1e-9)
        np.testing.assert_allclose(m.predict(frame, task="school"), by_hand, rtol=1e-9)
        np.testing.assert_allclose(m.predict(as_frame(X, pd), task=task), by_hand, rtol=1e-9)
        assert m.score(frame, y) == pytest.approx(
            m.nmse(frame, y) * 0 + expected.score(as_frame(X, pd), y, task=task)
        )
        assert m.transform(frame).shape == (len(y), 2)
    model.partial_fit(frame, y)
    with pytest.raises(
        ValueError,
        match="task must be given: X has no column 'school', which held the tasks in fit",
    ):
        model.predict(as_frame(X, pl))
    with pytest.raises(
        ValueError, match="task='shool' is not a column of X: its columns are a, b, c, d, e"
    ):
        model.fit(as_frame(X, pd), y, task="shool")
    with pytest.raises(ValueError, match="task='school' is not a column of X: X is no data frame"):
        model.fit(X, y, task="school")


def test_cross_validation_needs_no_routing_of_metadata():
    X, y, task = named_tasks(per_task=30, noise=2.0)
    frame, folds = as_frame(X, pd).assign(school=task), KFold(3, shuffle=True, random_state=0)
    scores = cross_val_score(
        SubspaceRegressor(rank=2), frame, y, params={"task": "school"}, cv=folds
    )
    assert scores.min() > 0.9
    search = GridSearchCV(SubspaceRegressor(), {"rank": [1, 3]}, cv=folds).fit(
        frame, y, task="school"
    )
    assert search.best_params_ == {"rank": 3}


@pytest.mark.parametrize("options", [{}, {"inference": "point"}])
@pytest.mark.parametrize("way", ["save", "pickle", "cloudpickle", "joblib"])
def test_a_model_that_is_kept_predicts_the_same_and_learns_on(tmp_path, options, way):
    X, y, task = named_tasks(noise=0.5)
    task = np.array([int(t[1:]) * 7 for t in task]) if way == "save" else task
    model = SubspaceRegressor(rank=2, **options).fit(X, y, task=task)
    if way == "save":
        model.save(tmp_path / "model")
        kept = SubspaceRegressor.load(tmp_path / "model")
    elif way == "joblib":
        joblib.dump(model, tmp_path / "model")
        kept = joblib.load(tmp_path / "model")
    else:
        library = {"pickle": pickle, "cloudpickle": cloudpickle}[way]
        kept = library.loads(library.dumps(model))
    assert kept.get_params() == model.get_params()
    np.testing.assert_array_equal(kept.predict(X, task=task), model.predict(X, task=task))
    np.testing.assert_array_equal(kept.task_ids_, model.task_ids_)
    if not options:
        np.testing.assert_array_equal(
            *(m.predict(X, task=task, return_std=True)[1] for m in (kept, model))
        )
        assert kept.log_likelihood_ == model.log_likelihood_
    for m in (model, kept):
        m.partial_fit(X[:20] + 1, y[:20], task=task[:20])
    np.testing.assert_allclose(kept.predict(X, task=task), model.predict(X, task=task), rtol=1e-8)


def test_the_state_is_plain_arrays_and_values():
    """What skops, the default format of mlflow, takes for granted."""
    X, y, task = named_tasks()

    def leaves(value):
        if isinstance(value, dict):
            return [leaf for entry in value.values() for leaf in leaves(entry)]
        if isinstance(value, (list, tuple)):
            return [leaf for entry in value for leaf in leaves(entry)]
        return [value]

    for model in (SubspaceRegressor(rank=2), SubspaceRegressor(rank=2).fit(X, y, task=task)):
        allowed = (np.ndarray, str, int, float, bool, type(None))
        assert all(isinstance(leaf, allowed) for leaf in leaves(model.__getstate__()))


def test_a_model_without_statistics_predicts_but_does_not_learn(tmp_path):
    X, y, task = named_tasks()
    model = SubspaceRegressor(rank=2).fit(X, y, task=task)
    model.save(tmp_path / "small", with_statistics=False)
    loaded = SubspaceRegressor.load(tmp_path / "small")
    np.testing.assert_array_equal(loaded.predict(X, task=task), model.predict(X, task=task))
    with pytest.raises(ValueError, match="saved without its statistics"):
        loaded.partial_fit(X, y, task=task)


def test_a_model_of_many_text_ids_can_be_saved(tmp_path):
    tasks = 100_000
    g = np.random.default_rng(0)
    X, task = (
        g.normal(size=(tasks, 1)),
        np.array([f"customer {i:09d}" for i in range(tasks)], dtype=object),
    )
    model = SubspaceRegressor(rank=1, max_iter=1, inference="point", ridge=1.0).fit(
        X, X[:, 0], task=task
    )
    model.save(tmp_path / "model", with_statistics=False)
    loaded = SubspaceRegressor.load(tmp_path / "model")
    assert loaded.predict(X[-1:], task=task[-1:]) == model.predict(X[-1:], task=task[-1:])


def test_several_outputs_are_tasks_over_shared_rows():
    g = np.random.default_rng(1)
    X = g.normal(size=(60, 4))
    Y = X @ g.normal(size=(4, 1)) @ g.normal(size=(1, 5)) + 0.1 * g.normal(size=(60, 5))
    model = SubspaceRegressor(rank=2).fit(X, Y)
    stacked = SubspaceRegressor(rank=2).fit(
        np.tile(X, (5, 1)), Y.T.reshape(-1), task=np.repeat(np.arange(5), 60)
    )
    np.testing.assert_allclose(
        model.predict(X)[:, 3], stacked.predict(X, task=np.full(60, 3)), rtol=1e-6
    )
    values, deviations = model.predict(X, return_std=True)
    assert values.shape == deviations.shape == (60, 5)
    assert model.nmse(X, Y) < 0.2
    with pytest.raises(
        ValueError, match=r"y must have a column for each of the 5 outputs, got shape \(60, 3\)"
    ):
        model.partial_fit(X, Y[:, :3])
    assert model.partial_fit(X, Y).predict(X).shape == (60, 5)


def test_full_rank_is_ridge_regression_per_task():
    X, y, task = named_tasks(noise=0.5)
    for rank in (5, 6):
        assert SubspaceRegressor(rank=rank).fit(X, y, task=task).score(X, y, task=task) > 0.99
    point = SubspaceRegressor(rank=6, inference="point", ridge=0.5).fit(X, y, task=task)
    own = task == task[0]
    Z = np.c_[(X - X.mean(0)) / X.std(0), np.ones(len(X))][own]
    by_hand = Z @ np.linalg.solve(Z.T @ Z + 0.5 * np.eye(6), Z.T @ (y[own] - y.mean())) + y.mean()
    np.testing.assert_allclose(point.predict(X[own], task=task[own]), by_hand, rtol=1e-8)


def test_intervals_of_targets_and_of_coefficients_are_calibrated():
    g = np.random.default_rng(2)
    tasks, n = 300, 4
    weights = g.normal(size=n) + g.normal(size=(tasks, 2)) @ g.normal(size=(2, n))
    task = np.repeat(np.arange(tasks), 12)
    X = 2 + 3 * g.normal(size=(len(task), n))
    y = (X * weights[task]).sum(1) + 7 + g.normal(size=len(task))
    train = np.arange(len(task)) % 12 < 6
    model = SubspaceRegressor(rank=3).fit(X[train], y[train], task=task[train])
    values, deviations = model.predict(X[~train], task=task[~train], return_std=True)
    assert np.mean(np.abs(y[~train] - values) < 1.645 * deviations) == pytest.approx(0.9, abs=0.03)
    assert np.mean(np.abs(weights - model.coef_) < 1.645 * model.coef_std_) == pytest.approx(
        0.9, abs=0.04
    )
    assert np.mean(np.abs(7 - model.intercept_) < 1.645 * model.intercept_std_) > 0.85
    table = model.summary()
    assert table["feature"].to_list() == ["x0", "x1", "x2", "x3", "(intercept)"]
    np.testing.assert_allclose(
        table["mean"][:4], weights.mean(0), atol=4 * table["std_error"][:4].max()
    )
    np.testing.assert_allclose(table["between_tasks"][:4], weights.std(0), rtol=0.2)
    one = model.summary(task=17)
    np.testing.assert_allclose(one["coef"][:4], model.coef_[17])
    np.testing.assert_allclose(one["std_error"][:4], model.coef_std_[17], rtol=1e-9)


def test_unseen_tasks_are_an_error_or_the_mean_and_can_be_folded_in():
    X, y, task = named_tasks(noise=0.5)
    held = task == "t3"
    model = SubspaceRegressor(rank=2).fit(X[~held], y[~held], task=task[~held])
    with pytest.raises(
        ValueError, match=r"1 task\(s\) not seen in fit: 't3'; use fold_in .* unseen='mean'"
    ):
        model.predict(X, task=task)
    frame, before = model.components_.copy(), model.predict(X[~held], task=task[~held])
    blind, spread = model.predict(X[held], task=task[held], unseen="mean", return_std=True)
    model.fold_in(X[held][:8], y[held][:8], task=task[held][:8])
    np.testing.assert_array_equal(model.components_, frame)
    np.testing.assert_allclose(model.predict(X[~held], task=task[~held]), before, rtol=1e-9)
    after, narrow = model.predict(X[held], task=task[held], return_std=True)
    assert np.mean((after[8:] - y[held][8:]) ** 2) < 0.2 * np.mean((blind - y[held]) ** 2)
    assert narrow.max() < spread.min()


@pytest.mark.parametrize("options", [{}, {"noise": "shared"}, {"inference": "point", "ridge": 1.0}])
def test_rows_may_be_folded_in_at_once_or_one_by_one_in_any_order(options):
    X, y, task = named_tasks(noise=0.5)
    late = np.isin(task, ["t3", "t4"])
    louder = y[late] + 5 * np.random.default_rng(0).normal(
        size=late.sum()
    )  # a known task that gets louder
    more = X[late], louder, np.where(task[late] == "t3", "new", "t0")
    models = [
        SubspaceRegressor(rank=2, **options).fit(X[~late], y[~late], task=task[~late])
        for _ in range(2)
    ]
    models[0].fold_in(more[0], more[1], task=more[2])
    for part in np.array_split(np.random.default_rng(1).permutation(late.sum()), 7):
        models[1].fold_in(*(column[part] for column in more))
    for asked in (["new"] * len(X), ["t0"] * len(X)):
        values = [model.predict(X, task=asked) for model in models]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-7)
        if "inference" not in options:
            deviations = [model.predict(X, task=asked, return_std=True)[1] for model in models]
            np.testing.assert_allclose(deviations[1], deviations[0], rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"inference": "point", "ridge": 1.0}])
def test_learning_in_pieces_ends_where_learning_at_once_does(options):
    X, y, task = named_tasks(noise=0.5, tasks=10, per_task=30)
    scaled = (X - X.mean(0)) / X.std(0)
    options = options | {
        "rank": 2,
        "tol": 1e-10,
        "max_iter": 1000,
        "scale": False,
        "fit_intercept": False,
    }
    pieces = SubspaceRegressor(**options)
    early, half = np.isin(task, ["t0", "t1", "t2", "t3", "t4"]), np.arange(len(task)) % 2 == 0
    for part in (early & half, ~early, early & ~half):
        pieces.partial_fit(scaled[part], y[part] - y.mean(), task=task[part])
    whole = SubspaceRegressor(**options).fit(scaled, y - y.mean(), task=task)
    expected = whole.predict(scaled, task=task)
    np.testing.assert_allclose(pieces.predict(scaled, task=task), expected, atol=2e-3 * y.std())
    assert pieces.set_params(rank=1).partial_fit(scaled, y, task=task).components_.shape == (5, 2)


@pytest.mark.parametrize("noise", ["task", "shared"])
@pytest.mark.parametrize("value", [None, 5.0])
def test_the_first_rows_may_have_nothing_to_tell(noise, value):
    """Of one task no differences are seen, and targets that are all alike have no noise."""
    X, y, task = named_tasks(noise=0.5)
    first = task == "t0" if value is None else np.arange(len(task)) % 4 == 0
    y = y if value is None else np.where(first, value, y)
    model = SubspaceRegressor(rank=2, noise=noise).fit(X[first], y[first], task=task[first])
    model.partial_fit(X[~first], y[~first], task=task[~first])
    whole = SubspaceRegressor(rank=2, noise=noise).fit(X, y, task=task)
    assert model.score(X, y, task=task) == pytest.approx(whole.score(X, y, task=task), abs=5e-3)


def test_the_ridge_is_chosen_on_held_out_rows():
    X, y, task = named_tasks(noise=3.0, per_task=10)
    model = SubspaceRegressor(rank=3, inference="point", random_state=0).fit(X, y, task=task)
    assert model.ridge_ == min(model.ridge_errors_, key=model.ridge_errors_.get)


@pytest.mark.parametrize("options", [{}, {"inference": "point", "ridge": 1.0}])
def test_weights_count_rows_and_a_row_of_weight_zero_is_none(options):
    X, y, task = named_tasks(noise=1.0)
    weight = np.random.default_rng(0).integers(1, 4, len(y))
    weighted = SubspaceRegressor(rank=2, **options).fit(X, y, task=task, sample_weight=weight)
    repeated = SubspaceRegressor(rank=2, **options).fit(
        *(np.repeat(part, weight, 0) for part in (X, y, task))
    )
    np.testing.assert_allclose(
        weighted.predict(X, task=task), repeated.predict(X, task=task), rtol=1e-6
    )
    more = (
        np.r_[X, X[:2] + 5.0],
        np.r_[y, 1e6, -1e6],
        np.append(task, ["t0", "t99"]),
        np.append(weight, [0, 0]),
    )
    again = SubspaceRegressor(rank=2, **options).fit(*more)
    np.testing.assert_array_equal(again.coef_, weighted.coef_)
    assert again.task_ids_.tolist() == weighted.task_ids_.tolist()


def test_features_that_are_constant_carry_no_weight_and_a_constant_target_has_no_nmse():
    X, y, task = named_tasks(noise=0.3)
    wide = np.c_[X, np.zeros(len(X)), np.full(len(X), 0.1)]
    model = SubspaceRegressor(rank=2).fit(wide, y, task=task)
    np.testing.assert_allclose(model.coef_[:, 5:], 0.0, atol=1e-9)
    narrow = SubspaceRegressor(rank=2).fit(X, y, task=task)
    np.testing.assert_allclose(
        model.predict(wide, task=task), narrow.predict(X, task=task), rtol=1e-4
    )
    assert np.isfinite(narrow.nmse(X, np.where(task == "t0", 4.0, y), task=task))
    with pytest.raises(
        ValueError, match="NMSE is undefined: every task has a constant target or a single row"
    ):
        narrow.nmse(X[:3], np.full(3, 1.0), task=task[:3])
    everywhere = SubspaceRegressor(rank=2).fit(X, np.full(len(y), 2.5), task=task)
    np.testing.assert_allclose(everywhere.predict(X, task=task), 2.5, atol=1e-6)


def test_transform_gives_the_shared_features():
    X, y, task = named_tasks()
    frame = pd.DataFrame(X, columns=list("abcde"))
    model = SubspaceRegressor(rank=2).fit(frame, y, task=pd.Series(task))
    Z = np.c_[(X - X.mean(0)) / X.std(0), np.ones(len(X))]
    np.testing.assert_allclose(model.transform(frame), Z @ model.components_, rtol=1e-9)
    assert list(model.get_feature_names_out()) == ["subspaceregressor0", "subspaceregressor1"]


@pytest.mark.parametrize("inference", ["marginal", "point"])
def test_a_callback_sees_every_round_and_stops(inference, capsys):
    X, y, task = named_tasks(noise=1.0)
    seen = []
    model = SubspaceRegressor(rank=2, inference=inference, ridge=1.0, verbose=True)
    model.fit(X, y, task=task, callback=lambda row: seen.append(row) or row["round"] >= 2)
    assert [row["round"] for row in seen][-1] == 2
    assert f"round 2  loss {seen[-1]['loss']:.6g}" in capsys.readouterr().err
    assert not hasattr(clone(model), "coef_")


@pytest.mark.parametrize(("first", "then"), [("marginal", "point"), ("point", "marginal")])
def test_a_model_stays_what_it_was_fitted_as_until_it_is_fitted_again(
    first: str, then: str, tmp_path: Path
) -> None:
    X, y, task = named_tasks()
    model = SubspaceRegressor(2, inference=first, ridge=0.1).fit(X, y, task=task)
    before = model.predict(X, task=task)
    model.set_params(inference=then)
    with pytest.raises(ValueError, match=f"fitted with inference='{first}', call fit for '{then}'"):
        model.partial_fit(X, y, task=task)
    model.save(tmp_path / "between")
    assert np.array_equal(
        SubspaceRegressor.load(tmp_path / "between").predict(X, task=task), before
    )
    model.fit(X, y, task=task).save(tmp_path / "after")
    for other in (model, SubspaceRegressor.load(tmp_path / "after")):
        assert hasattr(other, "noise_variance_") == (then == "marginal")
        assert hasattr(other, "ridge_") == (then == "point")


X0, Y0, T0 = named_tasks()
FRAME = pd.DataFrame(X0, columns=list("abcde"))


def fitted() -> SubspaceRegressor:
    return SubspaceRegressor(rank=2, max_iter=3).fit(FRAME, Y0, task=T0)


def at(values, position, value):
    changed = np.array(values, dtype=object if isinstance(value, str) or value is None else None)
    changed[position] = value
    return changed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        # the ten usual mistakes
        (lambda m: m.predict(FRAME[list("edcba")], task=T0), "feature names should match"),
        (
            lambda m: m.predict(FRAME[list("abcd")], task=T0),
            "feature names should match|missing: e|5 features",
        ),
        (
            lambda m: m.fit(FRAME.assign(c=at(X0[:, 2], 4, "blue")), Y0, T0),
            "column 'c' must hold numbers: .* 'blue'",
        ),
        (lambda m: m.fit(at(X0, (3, 1), np.nan), Y0, T0), "Input X contains NaN"),
        (lambda m: m.fit(X0, at(Y0, 3, np.inf), T0), "Input y contains infinity"),
        (lambda m: m.fit(X0, at(Y0, 3, "many"), T0), "could not convert string to float: 'many'"),
        (lambda m: m.fit(X0[:0], Y0[:0], T0[:0]), r"0 sample\(s\)"),
        (
            lambda m: m.predict(FRAME[:3], task=["t0", "t1", "new"]),
            "1 task.* not seen in fit: 'new'; use fold_in",
        ),
        (
            lambda m: m.set_params(rank=7).fit(X0, Y0, T0),
            r"rank must be an integer from 1 to 6 \(the features plus",
        ),
        (lambda m: SubspaceRegressor().predict(X0), "not fitted yet"),
        # tasks
        (lambda m: m.predict(FRAME[:3]), "task must be given: the model has 12 tasks"),
        (
            lambda m: m.predict(FRAME[:3], task=["t0"]),
            r"task must have one id per row of X \(3\), got 1",
        ),
        (lambda m: m.fit(X0, Y0, task=at(T0, 1, None)), "task id at position 1 is missing"),
        (
            lambda m: m.predict(FRAME[:1], task=["t0"], unseen="zero"),
            "unseen must be 'error' or 'mean', got 'zero'",
        ),
        # lists
        (
            lambda m: m.fit([X0, X0], [Y0]),
            "lists of tasks must have the same length, got 2 in X, 2 in task, 1 in y",
        ),
        (lambda m: m.fit([X0, X0], [Y0, Y0[1:]]), "task 1: X has 240 rows and y has 239"),
        (lambda m: m.fit([X0, X0[:, :4]], [Y0, Y0]), "task 1 has 4 features, the first task 5"),
        (
            lambda m: m.fit([X0], [Y0], sample_weight=[Y0[1:]]),
            "sample_weight must be a list like X, with",
        ),
        # targets and weights
        (
            lambda m: m.fit(X0, np.c_[Y0, Y0], task=T0),
            "y must have one column when task is given, got 2",
        ),
        (
            lambda m: m.nmse(FRAME, Y0[:10], task=T0),
            r"y must have the shape \(240,\) of the predictions, got \(10,\)",
        ),
        (
            lambda m: m.fit(X0, Y0, T0, np.r_[1.0, np.zeros(239)]),
            "2 rows must have a positive weight, got 1",
        ),
        # options
        (
            lambda m: m.set_params(inference="bayes").fit(X0, Y0, T0),
            "inference must be one of marginal, point",
        ),
        (
            lambda m: m.set_params(rank=0).fit(X0, Y0, T0),
            "rank must be an? .* of at least 1, got 0",
        ),
        (
            lambda m: m.set_params(ridge="cv").fit(X0, Y0, T0),
            "ridge must be a finite number of at least 0, got 'cv'",
        ),
        (
            lambda m: m.set_params(ridge=-1.0).fit(X0, Y0, T0),
            r"ridge must be a finite number of at least 0, got -1.0",
        ),
        (
            lambda m: m.set_params(max_iter=0).fit(X0, Y0, T0),
            "max_iter must be an? .* of at least 1, got 0",
        ),
    ],
)
def test_mistakes_are_named_and_leave_the_model_as_it_was(call, message):
    model = fitted()
    before = model.predict(FRAME, task=T0)
    with pytest.raises((ValueError, AttributeError), match=message):
        call(model)
    np.testing.assert_array_equal(model.predict(FRAME, task=T0), before)


def test_files_that_are_no_models_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no model folder"):
        SubspaceRegressor.load(tmp_path / "none")
    fitted().save(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        SubspaceRegressor.load(tmp_path / "model")


@needs_data
def test_school_is_at_or_below_the_anchor():
    data = datasets.load_tasks("school")
    errors = []
    for seed in range(5):
        train, test = split_rows(data.task, seed)
        model = SubspaceRegressor(rank=6).fit(data.X[train], data.y[train], task=data.task[train])
        errors.append(model.nmse(data.X[test], data.y[test], task=data.task[test]))
    assert np.mean(errors) <= 0.762
