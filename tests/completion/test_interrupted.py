"""A fit that fails or is interrupted leaves the estimator as it was."""

import numpy as np
import pytest

from fisherfold import LowRankImputer, SubspaceClassifier, SubspaceRegressor
from fisherfold.completion.imputation import imputer

RNG = np.random.default_rng(0)
X, TASK = RNG.normal(size=(80, 3)), np.arange(80) % 8
Y = (X * (1 + RNG.normal(size=(8, 3)))[TASK]).sum(1)


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


REGRESSIONS = {
    "fit": lambda model: model.fit(100 * X + 5, 50 * Y + 3, task=TASK),
    "partial_fit": lambda model: model.partial_fit(X[:40], Y[:40], task=["a"] * 20 + ["b"] * 20),
    "fold_in": lambda model: model.fold_in(X[:40], Y[:40], task=["a"] * 20 + ["b"] * 20),
}


@pytest.mark.parametrize("inference", ["marginal", "point"])
@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions(name, inference, monkeypatch):
    # what is compared is compared to the bit, after few passes as after many
    model = SubspaceRegressor(2, inference=inference, ridge=1.0, max_iter=10).fit(X, Y, task=TASK)
    before = model.predict(X, task=TASK), model.statistics_.counts.sum(), len(model.task_ids_)
    for step in (
        "SubspaceRegressor._set_marginal",
        "SubspaceRegressor._learn_point",
        "point_coefficients",
    ):
        monkeypatch.setattr(f"fisherfold.subspace.regressor.{step}", stop)
    with pytest.raises(KeyboardInterrupt):
        REGRESSIONS[name](model)
    monkeypatch.undo()
    assert np.array_equal(model.predict(X, task=TASK), before[0])
    assert (model.statistics_.counts.sum(), len(model.task_ids_)) == before[1:]
    # the same rows once more are taken in once
    fresh = SubspaceRegressor(2, inference=inference, ridge=1.0, max_iter=10).fit(X, Y, task=TASK)
    for each in (model, fresh):
        REGRESSIONS[name](each)
    assert np.array_equal(model.coef_, fresh.coef_)


def test_a_fit_that_is_refused_leaves_the_model():
    model = SubspaceRegressor(2).fit(X, Y, task=TASK)
    before = model.predict(X, task=TASK)
    with pytest.raises(ValueError, match="rank must be"):
        model.set_params(rank=9).fit(100 * X + 5, Y, task=TASK)
    assert np.array_equal(model.predict(X, task=TASK), before)


def test_classifications(monkeypatch):
    model = SubspaceClassifier(2, ridge=1.0).fit(X, Y > 0, task=TASK)
    before = model.decision_function(X, task=TASK)
    monkeypatch.setattr("fisherfold.subspace.classifier.newton_coefficients", stop)
    for call in (
        lambda: model.fit(100 * X + 5, Y > 1, task=TASK),
        lambda: model.fold_in(X[:9], Y[:9] > 0, task=["new"] * 9),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
        assert np.array_equal(model.decision_function(X, task=TASK), before)
        assert len(model.task_ids_) == 8


def test_imputers(monkeypatch):
    table = np.where(RNG.random((40, 5)) < 0.2, np.nan, RNG.normal(size=(40, 5)))
    model = LowRankImputer(2).fit(table)
    before = model.transform(table)
    monkeypatch.setattr(imputer, "fit_variational", stop)
    with pytest.raises(KeyboardInterrupt):
        model.fit(100 * table + 7)
    assert np.array_equal(model.transform(table), before)
