"""What one request may ask: candidates per id, exclusions, a time; against predictions of all pairs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

from fisherfold.completion import ImplicitCompletion, ItemToItem, MatrixCompletion, recommend

DAY = 86400.0
NAMES = ("user", "item", "rating")


def frame_of(seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    truth = 3 + rng.normal(size=(40, 2)) @ rng.normal(size=(2, 25)) + rng.normal(size=25)
    pairs = np.argwhere(rng.random(truth.shape) < 0.4)
    value = np.clip(np.round(truth[pairs[:, 0], pairs[:, 1]]), 1, 5)
    day = rng.integers(0, 10, len(pairs))
    return pl.DataFrame(
        {
            "user": pairs[:, 0],
            "item": [f"i{j}" for j in pairs[:, 1]],
            "rating": value + (day > 5) * (pairs[:, 1] % 2),
            "at": day * DAY + 60.0,
        }
    )


@pytest.fixture(scope="module")
def frame():
    return frame_of()


@pytest.fixture(scope="module")
def model(frame):
    return MatrixCompletion(2, dtype="float64").fit(frame.drop("at"))


@pytest.fixture(scope="module")
def implicit(frame):
    return ImplicitCompletion(2).fit(frame.select("user", "item"))


def test_excluded_ids_are_in_no_list_and_unknown_ones_are_counted(model, implicit):
    for each in (model, implicit):
        whole = each.recommend(k=25)
        with pytest.warns(UserWarning, match="1 id of exclude, of 3, not seen in fit: ignored"):
            found = each.recommend(k=25, exclude=["i3", "i4", "no"])
        kept = whole.filter(~pl.col("item").is_in(["i3", "i4"]))
        assert found.equals(kept)
        new = each.recommend_new({"i1": 4.0, "i2": 1.0}, 25, exclude="i3")
        assert new["item"].sort().to_list() == sorted(
            {f"i{j}" for j in range(25)} - {"i1", "i2", "i3"}
        )
    drawn, fewer = (model.recommend(3, 25, by="sample", seed=1, exclude=x) for x in (None, ["i5"]))
    assert fewer.equals(drawn.filter(pl.col("item") != "i5"))  # the same draw


def test_each_id_may_have_candidates_of_its_own(model, implicit):
    own = {7: ["i1", "i2", "zzz"], 3: ["i9"], 5: ["zzz"]}
    for each in (model, implicit):
        found = each.recommend(candidates=own, exclude_seen=False)
        assert found["user"].to_list() == [7, 7, 3]
        assert set(found["item"][:2]) == {"i1", "i2"}
        one = each.recommend(7, candidates=own[7], exclude_seen=False)
        assert one.equals(found[:2])
        assert each.recommend(["3"], candidates=own, exclude_seen=False)["item"].to_list() == ["i9"]
        rated = pl.DataFrame({"user": ["a", "b"], "item": ["i1", "i2"], "rating": [1.0, 5.0]})
        new = each.recommend_new(rated, candidates={"b": ["i3"], "a": ["i4", "i2"]})
        assert new.filter(pl.col("user") == "b")["item"].to_list() == ["i3"]
        with pytest.raises(ValueError, match="none for 1 of 2, the first is 4; or give one list"):
            each.recommend([7, 4], candidates=own)
        with pytest.raises(ValueError, match="one list for one new row without an id"):
            each.recommend_new({"i1": 4.0}, candidates=own)


@pytest.mark.parametrize("likelihood", ["gaussian", "ordered"])
def test_lists_of_a_time_are_those_of_predictions_at_that_time(frame, likelihood):
    model = MatrixCompletion(1, max_iter=8, likelihood=likelihood, clip=False).fit(
        frame, time="at", columns=NAMES
    )
    items = model.column_ids_
    for when in (2 * DAY, 8 * DAY + 60):
        found = model.recommend(4, 25, exclude_seen=False, time=when)
        expected = model.predict([(4, item) for item in items], time=when)
        order = np.argsort(-expected)
        np.testing.assert_allclose(found["prediction"], expected[order], atol=1e-5)
        np.testing.assert_allclose(
            model.predict([(4, item) for item in found["item"]], time=when),
            found["prediction"],
            atol=1e-6,
        )
    upper = model.recommend(4, 25, by="upper", exclude_seen=False, time=2 * DAY)
    pairs = model.model_.pairs(
        np.full(25, model.model_.locate([4], "row", "prior")[0]),
        model.model_.locate(upper["item"], "column", "prior"),
        np.full(25, 2 * DAY),
    )
    np.testing.assert_allclose(upper["score"], pairs.scores() + 1.645 * pairs.spread(), rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"rated_sets": False}, {"offsets": "columns"}])
def test_shares_and_prior_part_sum_to_the_prediction(frame, options):
    model = MatrixCompletion(2, dtype="float64", clip=False, tol=1e-7, max_iter=300, **options)
    model.fit(frame.drop("at"))
    for row in (3, 17, {"i1": 5.0, "i2": 1.0, "i7": 2.0}):
        found = model.explain(row, "i9", k=None)
        whole = found["share"].sum() + found["prior"][0]
        if isinstance(row, dict):
            expected = model.predict_new(list(row), list(row.values()), ["i9"])[0]
        else:
            expected = model.predict([(row, "i9")])[0]
            mine = frame.filter(pl.col("user") == row)
            rated = dict(zip(mine["item"], mine["rating"], strict=True))
            assert dict(zip(found["item"], found["value"], strict=True)) == rated
        assert abs(whole - expected) < 1e-8
        assert abs(found["prediction"][0] - expected) < 1e-8
        size = found["share"].abs().to_list()
        assert size == sorted(size, reverse=True)
        assert model.explain(row, "i9", k=2).equals(found[:2])


def test_shares_are_the_terms_of_the_dense_posterior(frame):
    """With equal noise the mean is linear in the values, and the prior part is that of no values."""
    model = MatrixCompletion(2, dtype="float64", clip=False).fit(frame.drop("at"))
    inside = model.model_
    inside.posterior = replace(inside.posterior, weight_strength=0.0)
    for side in inside.sides:
        side.weight = torch.ones_like(side.weight)
    rated = {"i1": 5.0, "i2": 1.0, "i7": 2.0}
    whole = model.explain(rated, "i9")
    parts = dict(zip(whole["item"], whole["share"], strict=True))
    for item in rated:
        other = model.explain(rated | {item: 3.3}, "i9")
        shares = dict(zip(other["item"], other["share"], strict=True))
        assert other["prior"][0] == pytest.approx(whole["prior"][0], abs=1e-9)
        moved = other["prediction"][0] - whole["prediction"][0]
        assert shares[item] - parts[item] == pytest.approx(moved, abs=1e-9)
        assert all(shares[x] == pytest.approx(parts[x], abs=1e-9) for x in rated if x != item)
    # the prior part is the score of the prior mean: its set of ratings, none of their values
    codes = torch.from_numpy(inside.column_ids.encode(list(rated)))
    u = inside.posterior.rows.prior_mean_given(codes)
    v = inside.posterior.columns.mean[inside.column_ids.encode(["i9"])[0]]
    prior = (u[:-1] @ v[:-1] + u[-1] + v[-1]) * inside.scale + inside.center
    assert whole["prior"][0] == pytest.approx(float(prior), abs=1e-9)


def test_shares_of_a_converged_fit_leave_the_prior_mean(frame):
    model = MatrixCompletion(2, dtype="float64", tol=1e-9, max_iter=3000).fit(frame.drop("at"))
    inside = model.model_
    own = inside.given_by(3)
    u = inside.posterior.rows.prior_mean[3]
    v = inside.posterior.columns.mean[inside.column_ids.encode(["i9"])[0]]
    prior = (u[:-1] @ v[:-1] + u[-1] + v[-1]) * inside.scale + inside.center
    found = model.explain(3, "i9")
    assert found["prior"][0] == pytest.approx(float(prior), abs=1e-3)
    assert len(own) >= len(found)


def test_what_explain_says_of_mistakes(model, frame, implicit):
    with pytest.raises(ValueError, match="1 column id was not seen in fit"):
        model.explain(3, "zzz")
    with pytest.raises(ValueError, match="1 row id was not seen in fit"):
        model.explain(12345, "i1")
    ordered = MatrixCompletion(1, max_iter=2, likelihood="ordered").fit(frame.drop("at"))
    with pytest.raises(ValueError, match="explain needs likelihood='gaussian'"):
        ordered.explain(3, "i1")
    timed = MatrixCompletion(1, max_iter=3, clip=False).fit(frame, time="at", columns=NAMES)
    found = timed.explain(3, "i1", k=None)
    whole = found["share"].sum() + found["prior"][0]
    assert whole == pytest.approx(timed.predict([(3, "i1")])[0], abs=1e-6)


def test_boosts_are_added_to_scores(model, implicit):
    for each in (model, implicit):
        plain = each.recommend([3, 4], 25)
        with pytest.warns(UserWarning, match="1 id of boosts, of 3, not seen in fit: ignored"):
            found = each.recommend([3, 4], 25, boosts={"i3": 100.0, "i5": -100.0, "no": 1.0})
        for user in (3, 4):
            mine, old = (x.filter(pl.col("user") == user) for x in (found, plain))
            rest = [item for item in old["item"] if item not in {"i3", "i5"}]
            first, last = ([x] if x in old["item"] else [] for x in ("i3", "i5"))
            assert mine["item"].to_list() == [*first, *rest, *last]
            values = dict(zip(old["item"], old["prediction"], strict=True))
            np.testing.assert_allclose(mine["prediction"], [values[x] for x in mine["item"]])
        assert each.recommend_new({"i1": 4.0}, 1, boosts={"i3": 99.0})["item"].to_list() == ["i3"]
    with pytest.raises(ValueError, match="boosts must be finite; use exclude"):
        model.recommend(3, boosts={"i3": -np.inf})


def test_diverse_lists_are_those_of_maximal_marginal_relevance(model, implicit):
    for each, table in (
        (model, recommend.directions(model.model_, 1)),
        (implicit, implicit.model_.scorer.directions(1)),
    ):
        assert each.recommend(3, 5, diversity=0).equals(each.recommend(3, 5))
        alike = (table @ table.T).double().numpy()
        pool = each.recommend(3, 15)
        codes = each.model_.column_ids.encode(pool["item"])
        score = pool["prediction"].to_numpy()
        score = (score - score.min()) / (score.max() - score.min())
        for d in (0.3, 1.0):
            chosen = [0] if d < 1 else []
            while len(chosen) < 3:
                left = [k for k in range(len(codes)) if k not in chosen]
                worst = [max([-1.0, *(alike[codes[k], codes[c]] for c in chosen)]) for k in left]
                gain = (1 - d) * score[left] - d * np.array(worst)
                chosen.append(left[int(np.argmax(gain))])
            found = each.recommend(3, 3, diversity=d)
            assert found["item"].to_list() == [pool["item"][k] for k in chosen]
        new = each.recommend_new({"i1": 4.0, "i2": 1.0}, 4, diversity=0.5)
        assert new["item"].n_unique() == 4
        assert each.recommend(k=3, diversity=0.5).height == 40 * 3
    items = ItemToItem().fit(frame_of().select("user", "item"))
    with pytest.raises(ValueError, match="has no vectors"):
        items.recommend(3, diversity=0.5)
    with pytest.raises(ValueError, match="diversity must be a finite number"):
        model.recommend(3, diversity=2)


def test_a_time_needs_a_model_with_times(model, implicit):
    with pytest.raises(ValueError, match="was fitted without times"):
        model.recommend(3, time=0.0)
    with pytest.raises(ValueError, match="know no times"):
        implicit.recommend(3, time=0.0)
