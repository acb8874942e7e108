"""One fitted model in many hands: threads, processes, copies, and scikit-learn's searches with two workers."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor

import joblib
import numpy as np
import pytest
import sklearn
from fitted import FITS, HOLES, NAMES, TASK, VALUES, X, Y, answers
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline

from fisherfold.completion import LowRankImputer, MatrixCompletion, MatrixCompletionCV
from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor
from toy import slow

KINDS = [
    "completion",
    "completion, point",
    "completion, cv",
    "imputer",
    "regression",
    "regression, point",
    "classification",
]


@pytest.fixture(scope="module")
def models():
    return {name: FITS[name]() for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_threads_predict_what_one_predicts(models, name):
    serial = answers(models[name])
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: answers(models[name]), range(40)):
            assert found == serial
    assert answers(models[name]) == serial


@pytest.mark.parametrize("name", KINDS)
def test_copies_are_whole(models, name, tmp_path):
    serial = answers(models[name])
    joblib.dump(models[name], tmp_path / "m.joblib")
    for other in (
        pickle.loads(pickle.dumps(models[name])),
        copy.deepcopy(models[name]),
        joblib.load(tmp_path / "m.joblib"),
    ):
        assert answers(other) == serial


def test_a_copy_learns_on_its_own(models):
    serial = answers(models["completion"])
    other = copy.deepcopy(models["completion"])
    other.partial_fit(np.array([("u0", "i0"), ("new", "i1")], dtype=object), [3.0, 4.0])
    assert answers(models["completion"]) == serial
    assert "new" in other.model_.row_ids.labels


@pytest.mark.parametrize("method", ["fork", *slow("spawn")])
def test_processes(models, method):
    """Forked and spawned workers answer like the parent; one pool for all models, since a spawned one starts slowly."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"there is no {method} here")
    with multiprocessing.get_context(method).Pool(2) as pool:
        found = pool.map_async(answers, [models[name] for name in KINDS]).get(timeout=300)
    assert found == [answers(models[name]) for name in KINDS]


def fit_again(name):
    return answers(FITS[name]())


def test_fits_in_forked_workers(models):
    """A worker that was forked after the parent has fitted can fit itself, to the same bits."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("there is no fork here")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map_async(fit_again, ["completion", "regression"]).get(timeout=300)
    assert found == [answers(models["completion"]), answers(models["regression"])]


@pytest.mark.slow
def test_grid_search_with_two_workers():
    """Every estimator in GridSearchCV(n_jobs=2): the same choice and scores as in one process."""
    filled = np.where(np.isnan(HOLES), 0, HOLES).sum(axis=1)
    searches = [
        (MatrixCompletion(max_iter=5), {"rank": [1, 2]}, NAMES, VALUES),
        (
            MatrixCompletionCV((1, 2), max_iter=4, cv=2),
            {"ridges": [(None,), (1.0,)]},
            NAMES,
            VALUES,
        ),
        (
            make_pipeline(LowRankImputer(max_iter=5), Ridge()),
            {"lowrankimputer__rank": [1, 2]},
            HOLES,
            filled,
        ),
        (SubspaceRegressor(max_iter=5), {"rank": [1, 2]}, X, Y),
        (SubspaceClassifier(max_iter=5, ridge=1.0), {"rank": [1, 2]}, X, Y > 0),
    ]
    folds = KFold(2, shuffle=True, random_state=0)
    for estimator, grid, table, target in searches:
        serial, parallel = (
            GridSearchCV(estimator, grid, cv=folds, n_jobs=jobs, error_score="raise").fit(
                table, target
            )
            for jobs in (1, 2)
        )
        assert serial.best_params_ == parallel.best_params_
        np.testing.assert_allclose(
            serial.cv_results_["mean_test_score"],
            parallel.cv_results_["mean_test_score"],
            rtol=1e-4,
        )


def test_tasks_are_routed_through_searches():
    with sklearn.config_context(enable_metadata_routing=True):
        model = (
            SubspaceRegressor(2, max_iter=5).set_fit_request(task=True).set_score_request(task=True)
        )
        scores = cross_val_score(model, X, Y, params={"task": TASK}, cv=3, error_score="raise")
        search = GridSearchCV(model, {"rank": [1, 2]}, cv=2, error_score="raise").fit(
            X, Y, task=TASK
        )
    assert scores.min() > 0.5
    assert search.best_params_ == {"rank": 2}
