"""The multi-task classifier: the model it claims, folding in, files, bad input."""

from __future__ import annotations

import os

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

from fisherfold import datasets
from fisherfold.subspace.classifier import SubspaceClassifier
from fisherfold.subspace.regressor import SubspaceRegressor
from toy import labelled_tasks, slow

needs_data = pytest.mark.skipif(
    not os.environ.get("FISHERFOLD_DATA"), reason="FISHERFOLD_DATA is not set"
)


SPLIT = "the ridge is chosen on held-out rows, and which rows those are depends on how often a row is listed"
NOT_DETERMINED = "one task determines one direction of the subspace; rounding moves the others and the seventh digit"


@parametrize_with_checks(
    [SubspaceClassifier(ridge=1.0)],
    expected_failed_checks=lambda e: {
        "check_sample_weight_equivalence_on_dense_data": SPLIT
        if e.ridge == "auto"
        else NOT_DETERMINED
    },
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_accepts_it(estimator, check):
    check(estimator)


def test_predictions_and_scores_take_the_lists_that_fit_takes():
    X, y, task = labelled_tasks(tasks=4)
    names = sorted(set(task))
    Xs, ys = ([part[task == name] for name in names] for part in (X, y))
    model = SubspaceClassifier(rank=2, ridge=1.0).fit(Xs, ys, task=names)
    for ask in (model.predict, model.predict_proba, model.decision_function):
        found = ask(Xs, task=names)
        assert [len(part) for part in found] == [40] * 4
        np.testing.assert_array_equal(np.concatenate(found), ask(X, task=task))
    assert model.score(Xs, ys, task=names) == model.score(X, y, task=task)
    with pytest.raises(ValueError, match="same length, got 4 in X, 4 in task, 3 in y"):
        model.score(Xs, ys[1:], task=names)


def test_related_tasks_help_each_other():
    X, y, task = labelled_tasks(per_task=120)
    few = np.zeros(len(task), dtype=bool)
    for name in set(task):
        few[np.flatnonzero(task == name)[:20]] = True
    model = SubspaceClassifier(rank=2, fit_intercept=False, random_state=0).fit(
        X[few], y[few], task=task[few]
    )
    ours = model.score(X[~few], y[~few], task=task[~few])
    alone = []
    for name in sorted(set(task)):
        own, new = few & (task == name), ~few & (task == name)
        alone.append(LogisticRegression(C=1.0).fit(X[own], y[own]).score(X[new], y[new]))
    assert ours > np.mean(alone) + 0.02


def test_full_rank_is_ridge_logistic_regression_per_task():
    X, y, task = labelled_tasks()
    model = SubspaceClassifier(rank=8, ridge=2.0, fit_intercept=False, scale=False).fit(
        X, y, task=task
    )
    for name in ("t0", "t7"):
        peer = LogisticRegression(C=0.5, fit_intercept=False, tol=1e-12, solver="newton-cholesky")
        peer.fit(X[task == name], y[task == name])
        number = list(model.task_ids_).index(name)
        np.testing.assert_allclose(model.coef_[number], peer.coef_[0], rtol=1e-6, atol=1e-7)
        expected = peer.predict_proba(X[:5])
        np.testing.assert_allclose(
            model.predict_proba(X[:5], task=[name] * 5), expected, rtol=1e-6, atol=1e-8
        )


def unbalanced(tasks=12, per_task=10):
    rng = np.random.default_rng(0)
    X, task = rng.normal(size=(tasks * per_task, 3)), np.repeat(np.arange(tasks), per_task)
    return X, (rng.random(len(X)) < 0.1).astype(int), task


def test_a_ridge_draws_tasks_to_the_share_of_the_class():
    X, y, task = unbalanced()
    expected = (y.sum() + 0.5) / (len(y) + 1)
    for rank in (2, 4):
        model = SubspaceClassifier(rank=rank, ridge=1e6).fit(X, y, task=task)
        np.testing.assert_allclose(model.predict_proba(X, task=task)[:, 1], expected, rtol=1e-3)
        model.fold_in(X[:3], y[:3], task=["new"] * 3)
        np.testing.assert_allclose(
            model.predict_proba(X[:5], task=["new"] * 5)[:, 1], expected, rtol=1e-3
        )
    plain = SubspaceClassifier(rank=2, ridge=1e6, fit_intercept=False).fit(X, y, task=task)
    np.testing.assert_allclose(plain.predict_proba(X, task=task), 0.5, atol=1e-3)


def test_the_common_log_odds_are_given_in_all_rows(tmp_path):
    X, y, task = unbalanced()
    weight = np.random.default_rng(1).integers(1, 3, size=len(y))
    model = SubspaceClassifier(rank=4, ridge=0.7, scale=False).fit(
        X, y, task=task, sample_weight=weight
    )
    odds = np.log(weight[y == 1].sum() + 0.5) - np.log(weight[y == 0].sum() + 0.5)
    centre = np.average(X, axis=0, weights=weight)
    chosen = task == 3
    Z = np.column_stack([X[chosen] - centre, np.ones(chosen.sum())])
    w = np.append(model.coef_[3], model.intercept_[3] + model.coef_[3] @ centre - odds)
    gradient = Z.T @ (weight[chosen] * (1 / (1 + np.exp(-odds - Z @ w)) - y[chosen])) + 0.7 * w
    np.testing.assert_allclose(gradient, 0, atol=1e-9)
    straight = model.intercept_[task] + (X * model.coef_[task]).sum(1)
    np.testing.assert_allclose(model.decision_function(X, task=task), straight, atol=1e-12)
    repeated = [np.repeat(part, weight, axis=0) for part in (X, y, task)]
    same = SubspaceClassifier(rank=4, ridge=0.7, scale=False).fit(*repeated[:2], task=repeated[2])
    np.testing.assert_allclose(same.intercept_, model.intercept_, rtol=1e-9)
    model.save(tmp_path / "model")
    loaded = SubspaceClassifier.load(tmp_path / "model")
    np.testing.assert_array_equal(
        loaded.predict_proba(X, task=task), model.predict_proba(X, task=task)
    )


@pytest.mark.parametrize("fisher", ["kronecker", "exact"])
def test_both_fisher_kinds_lower_the_loss_to_the_same_place(fisher):
    X, y, task = labelled_tasks()
    model = SubspaceClassifier(rank=2, ridge=1.0, fisher=fisher, max_iter=300, tol=1e-12).fit(
        X, y, task=task
    )
    losses = [row["loss"] for row in model.trace_]
    reference = SubspaceClassifier(rank=2, ridge=1.0, fisher="exact", max_iter=300, tol=1e-12).fit(
        X, y, task=task
    )
    assert losses[-1] < losses[0]
    assert losses[-1] == pytest.approx(reference.trace_[-1]["loss"], rel=1e-3)


def test_folding_in_and_unseen_tasks():
    X, y, task = labelled_tasks()
    held = task == "t3"
    model = SubspaceClassifier(rank=2, ridge=1.0).fit(X[~held], y[~held], task=task[~held])
    with pytest.raises(ValueError, match=r"1 task.* not seen in fit: 't3'; use fold_in"):
        model.predict(X[held], task=task[held])
    assert set(model.predict(X[held], task=task[held], unseen="mean")) <= {"yes", "no"}
    before = model.decision_function(X[~held], task=task[~held])
    model.fold_in(X[held][:30], y[held][:30], task=task[held][:30])
    np.testing.assert_array_equal(model.decision_function(X[~held], task=task[~held]), before)
    assert model.score(X[held][30:], y[held][30:], task=task[held][30:]) > 0.6
    with pytest.raises(
        ValueError, match=r"y must hold the classes \['no', 'yes'\], got also \['maybe'\]"
    ):
        model.fold_in(X[:1], ["maybe"], task=["t9"])


def test_a_saved_model_predicts_the_same(tmp_path):
    X, y, task = labelled_tasks()
    model = SubspaceClassifier(rank=2).fit(X, y, task=task)
    model.save(tmp_path / "model")
    loaded = SubspaceClassifier.load(tmp_path / "model")
    np.testing.assert_array_equal(
        loaded.predict_proba(X, task=task), model.predict_proba(X, task=task)
    )
    np.testing.assert_array_equal(loaded.predict(X, task=task), model.predict(X, task=task))
    assert loaded.ridge_errors_ == model.ridge_errors_
    with pytest.raises(ValueError, match="holds a SubspaceClassifier, not a SubspaceRegressor"):
        SubspaceRegressor.load(tmp_path / "model")


def test_the_score_takes_labels_as_fit_does():
    X, y, task = labelled_tasks()
    model = SubspaceClassifier(rank=2, ridge=0.1).fit(X, y, task=task)
    share = np.mean(model.predict(X, task=task) == y)
    for labels in (y, y.tolist(), y[:, None], pd.DataFrame({"y": y})):
        assert model.score(X, labels, task=task) == pytest.approx(share)
    with pytest.raises(ValueError, match=r"inconsistent numbers of samples: \[10, 600\]"):
        model.score(X, y[:10], task=task)


def test_a_task_of_one_class_and_one_of_one_row():
    X, y, task = labelled_tasks()
    y = np.where(task == "t0", "yes", y)
    keep = (task != "t1") | (np.cumsum(task == "t1") == 1)
    model = SubspaceClassifier(rank=4, ridge=0.1).fit(X[keep], y[keep], task=task[keep])
    assert np.isfinite(model.coef_).all()
    assert (model.predict(X[task == "t0"], task=task[task == "t0"]) == "yes").mean() > 0.8


def test_bad_input_is_named():
    X, y, task = labelled_tasks()
    with pytest.raises(ValueError, match="ridge must be a finite number above 0, got 0"):
        SubspaceClassifier(ridge=0).fit(X, y, task=task)
    with pytest.raises(ValueError, match="ridge must be a finite number above 0, got 'cv'"):
        SubspaceClassifier(ridge="cv").fit(X, y, task=task)
    with pytest.raises(ValueError, match="fisher must be one of"):
        SubspaceClassifier(fisher="dense").fit(X, y, task=task)
    with pytest.raises(ValueError, match="rank must be an integer from 1 to 9"):
        SubspaceClassifier(rank=10).fit(X, y, task=task)
    with pytest.raises(ValueError, match=r"y must hold two classes, got one class: \['yes'\]"):
        SubspaceClassifier().fit(X, np.full(len(y), "yes"), task=task)
    with pytest.raises(ValueError, match=r"Only binary classification is supported"):
        SubspaceClassifier().fit(X, np.arange(len(y)) % 3, task=task)


@needs_data
@pytest.mark.parametrize("name", ["mhc", *slow("letter")])
def test_real_sets_are_no_worse_than_a_classifier_per_task(name):
    data = datasets.load_tasks(name)
    ours, alone = [], []
    for split in data.train_idx[:1]:
        test = np.setdiff1d(np.arange(len(data.y)), split)
        model = SubspaceClassifier(rank=4 if name == "mhc" else 6, random_state=0, scale=False)
        model.fit(data.X[split], data.y[split], task=data.task[split])
        ours.append(1 - model.score(data.X[test], data.y[test], task=data.task[test]))
        for t in np.unique(data.task):
            own, new = split[data.task[split] == t], test[data.task[test] == t]
            peer = LogisticRegression(C=1.0, max_iter=500).fit(data.X[own], data.y[own])
            alone.append((len(new), 1 - peer.score(data.X[new], data.y[new])))
    sizes, errors = np.array(alone).T
    assert np.mean(ours) < np.average(errors, weights=sizes) + 0.01


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA], ids=str)
@pytest.mark.parametrize(
    "form",
    [list, pd.Series, lambda y: pd.Series(y, dtype="string"), lambda y: np.array(y, dtype=object)],
)
def test_a_missing_label_is_named(missing, form):
    X, y, task = labelled_tasks(tasks=3)
    model = SubspaceClassifier(rank=1, ridge=1.0).fit(X, y, task=task)
    holes = form([*y[:7], missing, *y[8:]])
    for call in (model.fit, model.fold_in):
        with pytest.raises(
            ValueError, match="y must have no missing labels, the first is at position 7"
        ):
            call(X, holes, task=task)
