"""Ids that were not in the fit, known by their features: as ids of the fit that have features and no ratings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

from fisherfold.completion import ImplicitCompletion, MatrixCompletion, MatrixCompletionCV

N, M, COLD = 60, 30, 4  # the last few rows and columns have no ratings


def tables(seed: int = 0):
    rng = np.random.default_rng(seed)
    row, column = rng.normal(size=(N, 2)), rng.normal(size=(M, 2))
    truth = row @ column.T + column[:, :1].T + 0.1 * rng.normal(size=(N, M))
    pairs = np.argwhere(rng.random((N - COLD, M - COLD)) < 0.5)
    value = np.clip(np.round(3 + truth[tuple(pairs.T)]), 1, 5)
    ratings = pl.DataFrame({"user": pairs[:, 0], "item": pairs[:, 1], "rating": value})
    users = pl.DataFrame({"user": range(N), "a": row[:, 0], "b": np.where(row[:, 1] > 0, "x", "y")})
    items = pl.DataFrame({"item": range(M), "c": column[:, 0], "d": column[:, 1]})
    return ratings, users, items


def renamed(table: pl.DataFrame, name: str, n: int) -> pl.DataFrame:
    """The lines of the cold ids under ids that no fit has seen."""
    return table[-COLD:].with_columns(pl.col(name) + (1000 - n + COLD))


NEW = [1000 + k for k in range(COLD)]


@pytest.fixture(scope="module", params=["gaussian", "ordered", "no sets", "cv"])
def fitted(request):
    ratings, users, items = tables()
    given = {"row_features": users, "column_features": items}
    options = {"dtype": "float64", "max_iter": 15}
    if request.param == "cv":
        model = MatrixCompletionCV(ranks=(2,), cv=2, **options).fit(ratings, **given)
    else:
        options |= {"rated_sets": request.param != "no sets"}
        options |= {"likelihood": "ordered" if request.param == "ordered" else "gaussian"}
        model = MatrixCompletion(2, **options).fit(ratings, **given)
    described = {
        "row_features": renamed(users, "user", N),
        "column_features": renamed(items, "item", M),
    }
    return model, described


def pairs_of(rows, columns):
    return np.array([(i, j) for i in rows for j in columns])


def test_described_ids_are_those_of_the_fit_with_features_and_no_ratings(fitted):
    model, described = fitted
    cold = [*range(N - COLD, N)], [*range(M - COLD, M)]
    same = pairs_of([0, 5, *cold[0]], [3, 4, *cold[1]])
    asked = pairs_of([0, 5, *NEW], [3, 4, *NEW])
    for name in ("predict", "predict_interval"):
        method = getattr(model, name)
        expected, found = method(same), method(asked, **described)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    expected, found = (
        model.predict(same, return_std=True),
        model.predict(asked, return_std=True, **described),
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)
    for by in ("mean", "upper"):
        expected = model.recommend(cold[0], 9, by=by, candidates=[3, 4, *cold[1]])
        found = model.recommend(NEW, 9, by=by, candidates=[3, 4, *NEW], **described)
        np.testing.assert_allclose(found["prediction"], expected["prediction"], atol=1e-6)
        alias = dict(zip(NEW, cold[1], strict=True))
        assert [alias.get(j, j) for j in found["item"]] == expected["item"].to_list()
    # known ids keep what was learnt from their ratings, and the model does not change
    assert model.recommend([0], 4).equals(
        model.recommend([0], 4, row_features=described["row_features"])
    )
    assert len(model.row_ids_) == N


def test_a_new_row_may_have_features_and_ratings(fitted):
    model, described = fitted
    line = {"a": 0.3, "b": "x"}
    table = pl.DataFrame({"user": [77, 78], "a": [0.3, -1.0], "b": ["x", "y"]})
    wanted = [3, 4, 29]
    nothing = model.predict_new([], [], wanted, features=line)
    expected = model.predict([(77, j) for j in wanted], row_features=table)
    np.testing.assert_allclose(nothing, expected, atol=1e-6)
    some = model.predict_new([0, 1], [5, 1], wanted, features=line)
    assert np.abs(some - nothing).max() > 1e-3
    average = {"a": float(tables()[1]["a"].mean()), "b": None}
    assert np.abs(model.predict_new([0, 1], [5, 1], wanted, features=average) - some).max() > 1e-3
    both = pl.DataFrame({"user": [78, 77, 77], "item": [0, 0, 1], "rating": [1.0, 5.0, 1.0]})
    lists = model.recommend_new(both, 30, exclude_seen=False, features=table)
    one = model.recommend_new({0: 5.0, 1: 1.0}, 30, exclude_seen=False, features=line)
    mine = lists.filter(pl.col("user") == 77)
    assert mine["item"].to_list() == one["item"].to_list()
    np.testing.assert_allclose(mine["prediction"], one["prediction"], atol=1e-9)
    more = model.recommend_new({0: 5.0}, 50, column_features=described["column_features"])
    assert set(NEW) <= set(more["item"])


def test_the_mean_of_a_new_row_is_the_dense_posterior_with_its_features():
    ratings, users, items = tables()
    model = MatrixCompletion(2, dtype="float64", clip=False, rated_sets=False)
    model.fit(ratings, row_features=users, column_features=items)
    inside = model.model_
    inside.posterior = replace(inside.posterior, weight_strength=0.0)
    for each in inside.sides:  # with equal noise the mean is linear in the values
        each.weight = torch.ones_like(each.weight)
    line, rated = {"a": 1.2, "b": "y"}, {0: 5.0, 1: 1.0, 7: 3.0}
    found = model.explain(rated, 4, k=None, features=line)
    whole = found["share"].sum() + found["prior"][0]
    values = [*rated.values()]
    assert whole == pytest.approx(
        model.predict_new([*rated], values, [4], features=line)[0], abs=1e-8
    )
    # the prior part is the score of the prior mean: center, and the effects of the features
    side, column = inside.sides[0], inside.sides[1].mean[4]
    table = inside.encoders[0].encode(pl.DataFrame({"user": [0], "a": [1.2], "b": ["y"]}), "row")
    u = side.center.numpy() + table.table[0] @ side.features.weights.numpy()
    prior = inside.scale * float(u[:-1] @ column[:-1].numpy() + u[-1] + column[-1]) + inside.center
    assert found["prior"][0] == pytest.approx(prior, abs=1e-8)


def test_what_is_said_of_features_that_cannot_be_used(fitted):
    model, _ = fitted
    ratings, users, _ = tables()
    plain = MatrixCompletion(1, max_iter=2).fit(ratings)
    with pytest.raises(ValueError, match="this model was fitted without row_features"):
        plain.predict([(0, 1)], row_features=users)
    with pytest.raises(ValueError, match="this model was fitted without row_features"):
        plain.recommend_new({0: 1.0}, features={"a": 1.0})
    with pytest.raises(ValueError, match="features of the fit, 'b' is missing"):
        model.recommend_new({0: 1.0}, features={"a": 1.0})
    with pytest.raises(ValueError, match="must be a data frame with their ids"):
        model.recommend_new(ratings[:3], features={"a": 1.0, "b": "x"})
    observed = ImplicitCompletion(1).fit(ratings.select("user", "item"))
    with pytest.raises(ValueError, match="models of observed pairs take row_features in fit"):
        observed.recommend(3, row_features=users)
