"""One model, one answer: lists, arrays and similar members agree with ``predict`` for every kind of id."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pytest

from fisherfold import MatrixCompletion, MatrixCompletionCV


def table(likelihood="gaussian", seed=0):
    """Ratings whose columns follow two features; columns 0, 6, 12, ... have features and no ratings."""
    rng = np.random.default_rng(seed)
    genre, year = rng.integers(0, 4, 60), rng.normal(size=60)
    v = rng.normal(size=(4, 2))[genre] + 0.3 * rng.normal(size=(60, 2))
    u = rng.normal(size=(80, 2))
    i, j = np.nonzero(rng.random((80, 60)) < 0.3)
    x = 3 + (u[i] * v[j]).sum(1) + 0.5 * year[j] + 0.3 * rng.normal(size=len(i))
    if likelihood != "gaussian":
        x = np.digitize(x, [2.0, 3.0, 4.0] if likelihood == "ordered" else [3.0]) + 1.0
    frame = pd.DataFrame({"user": i, "item": j, "rating": x})
    items = pd.DataFrame({"item": np.arange(60), "genre": [f"g{k}" for k in genre], "year": year})
    return frame[frame["item"] % 6 > 0], items


@pytest.fixture(scope="module", params=["gaussian", "ordered", "binary"])
def model(request):
    frame, items = table(request.param)
    made = MatrixCompletion(2, likelihood=request.param, dtype="float64", max_iter=15)
    return made.fit(frame, column_features=items)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("user", [3, "nobody"])
@pytest.mark.filterwarnings("ignore:the row ids of:UserWarning")
def test_lists_say_what_predict_says(model, user):
    found = model.recommend(user, k=60, exclude_seen=False)
    assert len(found) == 60
    expected = model.predict([(user, item) for item in found["item"]])
    close(found["prediction"], expected)
    # without clipping they are in order
    model.set_params(clip=False)
    try:
        assert (np.diff(model.recommend(user, k=60, exclude_seen=False)["prediction"]) < 1e-9).all()
    finally:
        model.set_params(clip=True)
    chosen = [0, 1, 5, 6, 12]
    some = model.recommend(user, k=9, exclude_seen=False, candidates=chosen)
    close(some["prediction"], model.predict([(user, item) for item in some["item"]]))
    assert list(some["item"]) == [item for item in found["item"] if item in chosen]


def test_new_rows_are_ranked_as_they_are_predicted(model):
    top = float(model.model_.high)
    rated = {7: top, 8: model.model_.low, 13: top}
    found = model.recommend_new(rated, k=60, exclude_seen=False)
    close(found["prediction"], model.predict_new(list(rated), list(rated.values()), found["item"]))


def test_arrays_are_the_scores(model):
    pairs = [(i, j) for i in model.row_ids_ for j in model.column_ids_]
    made = model.offset_ + model.row_offsets_[:, None] + model.column_offsets_
    made = made + model.row_factors_ @ model.column_factors_.T
    close(made.reshape(-1), model.decision_function(pairs))
    rows, columns = model.inner_product_vectors()
    np.testing.assert_allclose((rows @ columns.T).reshape(-1), made.reshape(-1), atol=1e-4)
    if model.likelihood == "gaussian":
        free = model.decision_function(pairs)
        close(np.clip(free, model.model_.low, model.model_.high), model.predict(pairs))
    else:
        chances = model.predict_proba(pairs)
        close(chances @ model.categories_, model.predict(pairs))


def test_similar_members_are_those_of_the_scores(model):
    pairs = [(i, j) for i in model.row_ids_ for j in model.column_ids_]
    scores = model.decision_function(pairs).reshape(len(model.row_ids_), -1)
    expected = np.corrcoef((scores - model.row_offsets_[:, None]).T)
    place = {item: k for k, item in enumerate(model.column_ids_.tolist())}
    found = model.similar(6, k=59)  # without a rating
    close(found["similarity"], [expected[place[6], place[item]] for item in found["similar"]])


def test_cold_columns_are_predicted_from_their_features_everywhere(model):
    codes = np.flatnonzero(np.isin(model.column_ids_, np.arange(0, 60, 6)))
    assert len(codes) == 10
    plain = model.model_.posterior.columns.mean[codes, :-1].numpy() * model.model_.scale**0.5
    assert np.abs(model.column_factors_[codes] - plain).max() > 1e-3
    side = model.model_.posterior.columns
    described = side.described(side.features.table[codes])
    close(described.mean, model.model_.members(1, codes).mean)
    close(described.covariance, model.model_.members(1, codes).covariance)


def test_unseen_ids_are_nan_in_every_answer(model):
    pairs = [("nobody", 1), (3, 1)]
    model.set_params(unseen="nan")
    try:
        answers = [model.predict(pairs), *model.predict(pairs, return_std=True)]
        answers += [*model.predict_interval(pairs), model.decision_function(pairs)]
        if model.likelihood != "gaussian":
            answers.append(model.predict_proba(pairs))
        for answer in answers:
            assert np.isnan(answer[0]).all()
            assert np.isfinite(answer[1]).all()
    finally:
        model.set_params(unseen="prior")


@pytest.mark.parametrize("values", [[1e-4, 1e6], [-3.0, 1 / 3], [1e-300, 2e-300], [0.1, 1e300]])
def test_categories_are_exactly_those_given(values):
    rng = np.random.default_rng(0)
    pairs = np.argwhere(rng.random((20, 10)) < 0.7)
    y = np.array(values)[rng.integers(0, 2, len(pairs))]
    model = MatrixCompletion(1, likelihood="binary", max_iter=3).fit(pairs, y)
    assert model.categories_.tolist() == values
    mean, std = model.predict(pairs, return_std=True)
    assert np.isfinite(mean).all()
    assert np.isfinite(std).all()
    assert (mean >= values[0]).all()
    assert (mean <= values[1]).all()


@pytest.mark.parametrize(
    "make", [lambda: MatrixCompletion(1), lambda: MatrixCompletionCV((1,)), lambda: "ordered"]
)
def test_attributes_can_be_asked_for_before_and_after_the_fit(make):
    made = make()
    ordered = made == "ordered"
    model = MatrixCompletion(1, likelihood="ordered") if ordered else made
    assert not hasattr(model, "categories_")
    assert "predict" in dir(model)
    assert "<" in model._repr_html_()
    frame, _ = table("ordered")
    model.set_params(max_iter=2).fit(frame)
    assert hasattr(model, "categories_") == ordered
    assert all(isinstance(name, str) for name in dir(model))
    [getattr(model, name, None) for name in dir(model)]
    assert "<" in model._repr_html_()


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.DataFrame])
def test_names_bind(kind):
    frame, _ = table()
    model = MatrixCompletion(1, max_iter=3).fit(frame)
    ids = {"item": [1, 2], "user": [3, 3]}
    expected = model.predict([(3, 1), (3, 2)])
    np.testing.assert_array_equal(model.predict(kind(ids)), expected)
    by_place = kind({"a": [3, 3], "b": [1, 2]})
    np.testing.assert_array_equal(model.predict(by_place), expected)
    for half in ({"item": [1, 2], "usr": [3, 3]}, {"usr": [3, 3], "item": [1, 2]}):
        for call in (model.predict, model.predict_interval, model.decision_function):
            with pytest.raises(ValueError, match=r"have 'item' as .* but no 'user': rename"):
                call(kind(half))
        with pytest.raises(ValueError, match=r"have 'item' as .* but no 'user': rename"):
            model.partial_fit(kind(half | {"rating": [1.0, 2.0]}))


def test_features_never_change_the_type_of_ids():
    frame, items = table()
    text = items.assign(item=items["item"].astype(str))
    model = MatrixCompletion(1, max_iter=2).fit(frame, column_features=text)
    assert model.column_ids_.dtype == np.int64
    assert len(model.column_ids_) == 60
    with pytest.raises(ValueError, match="must be integers as those of the ratings are, got 'x'"):
        MatrixCompletion(1).fit(frame, column_features=text.replace({"item": {"0": "x"}}))
    indexed = items.sample(frac=1.0, random_state=0).set_index("item")
    for named in (items.set_index("item"), indexed, indexed.rename_axis(None)):
        again = MatrixCompletion(1, max_iter=2)
        again.fit(frame[["user", "item"]].to_numpy(), frame["rating"], column_features=named)
        np.testing.assert_allclose(again.predict([(3, 0)]), model.predict([(3, 0)]), rtol=1e-4)
