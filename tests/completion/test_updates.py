"""``partial_fit`` on whatever can be fitted: it ends where a fit does, and takes no entry twice."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fisherfold import MatrixCompletion, MatrixCompletionCV


def table(seed=0, n=120, m=60):
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 3, m)
    v = rng.normal(size=(3, 2))[group] + 0.4 * rng.normal(size=(m, 2))
    truth = rng.normal(size=(n, 2)) @ v.T + rng.normal(size=(n, 1))
    i, j = np.nonzero(rng.random((n, m)) < 0.4)
    order = rng.permutation(len(i))
    i, j = i[order], j[order]
    y = truth[i, j] + 0.5 * rng.normal(size=len(i))
    items = pd.DataFrame({"item": np.arange(m), "group": [f"g{k}" for k in group]})
    return np.c_[i, j], y, items


KINDS = {
    "gaussian": {},
    "ordered": {"likelihood": "ordered"},
    "binary": {"likelihood": "binary"},
    "weights": {},
    "time": {},
    "features": {},
    "replicates": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_ends_where_a_fit_would(kind, tmp_path):
    pairs, y, items = table()
    rng = np.random.default_rng(1)
    if kind in ("ordered", "binary"):
        y = np.digitize(y, [-1.0, 0.0, 1.0] if kind == "ordered" else [0.0]) + 1.0
    if kind == "replicates":
        pairs, y = (
            np.concatenate([pairs, pairs]),
            np.concatenate([y, y + 0.3 * rng.normal(size=len(y))]),
        )
    held = rng.random(len(y)) < 0.15
    extra = {
        "weights": {"sample_weight": rng.uniform(0.3, 1.5, len(y))},
        "time": {"time": rng.uniform(0, 40 * 86400.0, len(y))},
    }.get(kind, {})
    known = {"column_features": items} if kind == "features" else {}
    model = MatrixCompletion(2, **KINDS[kind])
    train = np.flatnonzero(~held)
    for k, part in enumerate(np.array_split(train, 10)):
        given = {name: value[part] for name, value in extra.items()}
        model.partial_fit(pairs[part], y[part], **given, **(known if k == 0 else {}))
        if k == 5:
            model.save(tmp_path)
            model = MatrixCompletion.load(tmp_path)
    given = {name: value[train] for name, value in extra.items()}
    whole = MatrixCompletion(2, **KINDS[kind]).fit(pairs[train], y[train], **given, **known)
    asked = {"time": extra["time"][held]} if kind == "time" else {}
    errors = [
        np.sqrt(np.mean((m.predict(pairs[held], **asked) - y[held]) ** 2)) for m in (model, whole)
    ]
    assert errors[0] < 1.03 * errors[1]
    low, high = model.predict_interval(pairs[held], **asked)
    assert np.mean((low <= y[held]) & (y[held] <= high)) > 0.86
    old, new = whole.model_.given(), model.model_.given()
    assert new.total_amount == pytest.approx(old.total_amount)


def test_evidence_counts_as_in_a_fit():
    """Ten measurements at once are ten; weights of the fit are not forgotten."""
    pairs, y, _ = table()
    fitted = MatrixCompletion(2, rated_sets=False).fit(pairs, y)
    new = [(999, int(j)) for j in range(8)]
    many = fitted.predict_new(*zip(*[(j, 1.0) for _, j in new], strict=True), [20])
    streamed = MatrixCompletion(2, rated_sets=False).fit(pairs, y).partial_fit(new, [1.0] * 8)
    np.testing.assert_allclose(streamed.predict([(999, 20)]), many, atol=0.05)
    ten, one = (
        MatrixCompletion(2, rated_sets=False).fit(pairs, y).partial_fit([(999, 3)] * n, [4.0] * n)
        for n in (10, 1)
    )
    spread = [m.predict([(999, 3)], return_std=True)[1][0] for m in (ten, one)]
    assert spread[0] < spread[1]
    assert abs(ten.predict([(999, 3)])[0] - 4) < abs(one.predict([(999, 3)])[0] - 4)


def test_new_ids_bring_their_features():
    pairs, y, items = table()
    old, late = pairs[:, 1] < 50, pairs[:, 1] >= 50
    model = MatrixCompletion(2, clip=False)
    model.fit(pairs[old], y[old], column_features=items[items["item"] < 50])
    first = np.flatnonzero(late)[:3]
    model.partial_fit(pairs[first], y[first], column_features=items[items["item"] >= 50])
    rest = np.flatnonzero(late)[3:]
    blind = MatrixCompletion(2, clip=False)
    blind.fit(pairs[old], y[old], column_features=items[items["item"] < 50])
    blind.partial_fit(pairs[first], y[first])
    with_features = np.sqrt(np.mean((model.predict(pairs[rest]) - y[rest]) ** 2))
    with pytest.warns(UserWarning, match="were not seen in fit"):
        without = np.sqrt(np.mean((blind.predict(pairs[rest]) - y[rest]) ** 2))
    assert with_features < 0.985 * without
    with pytest.raises(ValueError, match="fitted without row_features"):
        model.partial_fit(pairs[:2], y[:2], row_features=items)
    with pytest.raises(ValueError, match="must have the features of the fit, 'group' is missing"):
        model.partial_fit(pairs[:2], y[:2], column_features={"item": [1, 2], "other": ["a", "b"]})


@pytest.mark.parametrize("kind", ["integers", "text"])
def test_entries_that_are_delivered_again_change_nothing(kind, tmp_path):
    pairs, y, _ = table()
    keys = np.arange(len(y)) if kind == "integers" else [f"event {k}" for k in range(len(y))]
    keys = np.asarray(keys)
    model = MatrixCompletion(2).fit(pairs[:500], y[:500], ids=keys[:500])
    model.partial_fit(pairs[450:550], y[450:550], ids=keys[450:550])
    before = model.predict(pairs)
    assert len(model.model_.given()) == 550
    model.save(tmp_path)
    for again in (model, MatrixCompletion.load(tmp_path)):
        for _ in range(3):
            again.partial_fit(pairs[500:550], y[500:550], ids=keys[500:550])
        np.testing.assert_array_equal(again.predict(pairs), before)
    with pytest.raises(ValueError, match=r"had the value .* before and has 77 now"):
        model.partial_fit([pairs[3]], [77.0], ids=keys[3:4])
    np.testing.assert_array_equal(model.predict(pairs), before)
    twice = MatrixCompletion(2).fit(
        np.r_[pairs[:500], pairs[:500]], np.r_[y[:500], y[:500]], ids=np.r_[keys[:500], keys[:500]]
    )
    once = MatrixCompletion(2).fit(pairs[:500], y[:500])
    np.testing.assert_array_equal(twice.predict(pairs), once.predict(pairs))


def test_values_that_do_not_fit_are_reported():
    pairs, y, _ = table()
    stars = np.digitize(y, [-1.0, 0.0, 1.0]) + 1.0
    model = MatrixCompletion(2, likelihood="ordered", max_iter=3).fit(pairs, stars)
    before = model.predict(pairs)
    with pytest.raises(
        ValueError, match=r"1 value is no category of the fit, the first is 50; .* 1, 2, 3, 4"
    ):
        model.partial_fit([(0, 1), (0, 2)], [50.0, 3.0])
    with pytest.raises(ValueError, match="1 value is no category of the fit"):
        model.predict_new([1], [2.5], [3])
    np.testing.assert_array_equal(model.predict(pairs), before)
    measured = MatrixCompletion(2, max_iter=3).fit(pairs, stars)
    with pytest.warns(
        UserWarning, match="1 of 2 new values lie far outside .* 1 to 4; the first is 50"
    ):
        measured.partial_fit([(0, 1), (0, 2)], [50.0, 3.0])
    with pytest.raises(ValueError, match="was fitted without times"):
        measured.partial_fit([(0, 1)], [3.0], time=[5.0])
    search = MatrixCompletionCV((1, 2), cv=2, max_iter=3).fit(pairs, y)
    search.partial_fit([(0, 1)], [0.5], sample_weight=[0.5])
    assert search.best_estimator_.model_ is search.model_
