"""Features, time, ordered categories and weights: against dense computations and quadrature, and what mistakes say."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import polars as pl
import pytest
import reference_completion as reference
import scipy.integrate
import scipy.sparse
import scipy.stats
import torch

from fisherfold import MatrixCompletion, MatrixCompletionCV
from fisherfold.completion.inference.features import as_times, encode_features, with_numbers
from fisherfold.completion.inference.gram import moments
from fisherfold.completion.inference.likelihoods import Ordinal, better_cuts, truncated
from fisherfold.completion.inference.prior_mean import FeatureEffects
from fisherfold.completion.inference.time_effects import periods_of
from fisherfold.completion.inference.variational import fit_variational, update_side
from fisherfold.completion.inference.working_ratings import WorkingRatings
from fisherfold.completion.ratings import Ratings
from toy import low_rank


def feature_table(n: int, groups: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.from_numpy(np.random.default_rng(seed).normal(size=(n, len(groups))))
    return table - table.mean(0), torch.tensor(groups)


def test_feature_effects_are_the_dense_gaussian_posterior():
    """W given Ū is a linear regression, and its part of the bound is the log marginal likelihood of Ū."""
    table, groups = feature_table(12, [0, 0, 1], 0)
    rng = np.random.default_rng(1)
    target, root = (
        torch.from_numpy(rng.normal(size=(12, 2))),
        torch.from_numpy(rng.normal(size=(2, 2))),
    )
    precision = root @ root.T + torch.eye(2)
    inverse_of_k = torch.linalg.inv(precision).contiguous()
    effects = FeatureEffects.start(table, groups, 2).improved(target, precision, 2)
    whole = torch.kron(torch.eye(12, dtype=torch.float64), inverse_of_k)
    prior = torch.kron(torch.diag(1 / effects.strength), inverse_of_k)
    design = torch.kron(table, torch.eye(2, dtype=torch.float64))
    marginal = design @ prior @ design.T + whole
    mean = prior @ design.T @ torch.linalg.solve(marginal, target.flatten())
    torch.testing.assert_close(effects.weights.flatten(), mean)
    covariance = prior - prior @ design.T @ torch.linalg.solve(marginal, design @ prior)
    torch.testing.assert_close(torch.kron(effects.inverse.contiguous(), inverse_of_k), covariance)
    off = target - effects.shift()
    bound = (
        6 * torch.logdet(precision) - 0.5 * (precision * (off.T @ off + effects.penalty())).sum()
    )
    bound += effects.log_volume() - 12 * math.log(2 * math.pi)
    expected = scipy.stats.multivariate_normal.logpdf(
        target.flatten().numpy(), cov=marginal.numpy()
    )
    assert float(bound) == pytest.approx(expected)


@pytest.mark.parametrize(
    "what", ["features", "more features than rows", "collinear", "weights", "time", "all"]
)
def test_bound_never_decreases(what):
    ratings, _ = low_rank(60, 40, 3, 0.3, 0.4, 3)
    rng, options = np.random.default_rng(0), {}
    if what in ("features", "all"):
        options["features"] = feature_table(60, [0, 0, 1], 1), feature_table(40, [0, 1], 2)
    if what == "more features than rows":
        options["features"] = feature_table(60, [0] * 90, 1), None
    if what == "collinear":
        table, _ = feature_table(60, [0, 0], 1)
        options["features"] = (
            (torch.cat([table, 2 * table], dim=1), torch.tensor([0, 0, 1, 1])),
            None,
        )
    if what in ("weights", "time", "all"):
        times = torch.from_numpy(rng.random(ratings.n_ratings)) if what != "weights" else None
        starts = torch.tensor([0.3, 0.6], dtype=torch.float64)
        weights = (
            torch.from_numpy(rng.integers(1, 4, ratings.n_ratings).astype(float))
            if what != "time"
            else None
        )
        if weights is not None:
            by_row = ratings.by_row
            entries = by_row.groups(), by_row.indices(), by_row.values()
            ratings = Ratings(*entries, ratings.shape, weights=weights)
        if times is not None:
            options["working"] = WorkingRatings(ratings, times=times, periods=(starts, starts))
    trace = fit_variational(ratings, 3, max_iter=40, tol=-np.inf, **options).trace
    assert len(trace) == 40
    assert (np.diff([record["bound"] for record in trace]) > -1e-9).all()


def test_a_rating_of_weight_two_counts_as_two():
    ratings, _ = low_rank(9, 7, 2, 0.6, 0.3, 0)
    weights = torch.from_numpy(
        np.random.default_rng(0).integers(1, 4, ratings.n_ratings).astype(float)
    )
    by_row = ratings.by_row
    entries = by_row.groups(), by_row.indices(), by_row.values()
    weighted = Ratings(*entries, ratings.shape, weights=weights)
    posterior = fit_variational(weighted, 2, max_iter=3, tol=0)
    tau, before, given = posterior.noise_precision, posterior.rows.copied(), posterior.columns
    table = moments(given.mean, given.covariance) * given.weight[:, None]
    update_side(posterior.rows, table, weighted.by_row, tau)
    offsets = ratings.by_row.offsets.tolist()
    for i in range(9):
        part = slice(offsets[i], offsets[i + 1])
        repeated = [
            (int(j), float(x))
            for j, x, w in zip(entries[1][part], entries[2][part], weights[part], strict=True)
            for _ in range(int(w))
        ]
        mean, _ = reference.posterior_of_row(before, given, i, repeated, tau)
        torch.testing.assert_close(posterior.rows.mean[i], mean)


@pytest.mark.parametrize(
    ("low", "high"), [(-1.0, 0.5), (0.7, np.inf), (-np.inf, -2.0), (6.0, 6.5), (-9.0, np.inf)]
)
def test_truncated_moments_are_those_of_quadrature(low, high):
    mass, mean, square = (
        scipy.integrate.quad(
            lambda z, k=k: z**k * scipy.stats.norm.pdf(z),
            max(low, -30),
            min(high, 30),
            points=[np.clip(0, low, high)],
        )[0]
        for k in range(3)
    )
    found = [
        float(part)
        for part in truncated(torch.tensor([low]).double(), torch.tensor([high]).double())
    ]
    assert found[0] == pytest.approx(mean / mass, rel=1e-5)
    assert 1 + found[1] == pytest.approx(square / mass, rel=1e-5)
    assert found[2] == pytest.approx(math.log(mass), rel=1e-5)


def test_cut_points_maximise_the_likelihood():
    rng = np.random.default_rng(0)
    mean, cuts = rng.normal(size=20000), np.array([-1.0, 0.2, 1.1])
    category = torch.from_numpy(np.searchsorted(cuts, mean + 0.7 * rng.normal(size=20000)))
    ordinal = Ordinal(torch.tensor([-0.5, 0.0, 0.5]).double(), torch.arange(4.0).double())
    root = torch.full((20000,), 1 / 0.7, dtype=torch.float64)
    for _ in range(8):
        ordinal = Ordinal(
            better_cuts(ordinal, category, torch.from_numpy(mean), root, None), ordinal.values
        )
    torch.testing.assert_close(ordinal.cuts, torch.from_numpy(cuts), atol=0.03, rtol=0)
    again = better_cuts(ordinal, category, torch.from_numpy(mean), root, None)
    torch.testing.assert_close(again, ordinal.cuts, atol=1e-5, rtol=0)


def test_ordered_posterior_is_that_of_quadrature():
    """With all else at its mean, q(offset) is close to the exact posterior."""
    rng = np.random.default_rng(3)
    entries = [(i, j) for i in range(40) for j in range(30)]
    offsets = rng.normal(size=40)
    latent = np.array([offsets[i] for i, _ in entries]) + rng.normal(size=len(entries))
    y = np.digitize(latent, [-1.0, 0.0, 1.0]) + 1.0
    model = MatrixCompletion(
        1,
        likelihood="ordered",
        offsets="rows",
        rated_sets=False,
        dtype="float64",
        tol=1e-7,
        max_iter=300,
    ).fit(entries, y)
    posterior = model.model_.posterior
    side, ordinal = posterior.rows, posterior.ordinal
    prior = float(side.precision[-1, -1])
    grid = np.linspace(-3, 3, 4001)
    for i in range(0, 40, 7):
        rated = np.array([k for k, (row, _) in enumerate(entries) if row == i])
        columns = torch.tensor([entries[k][1] for k in rated])
        fixed = posterior.columns.mean[columns, :-1] @ side.mean[i, :-1]
        root = (
            (posterior.noise_precision * side.weight[i] * posterior.columns.weight[columns])
            .sqrt()
            .numpy()
        )
        low, high = (
            edge[torch.from_numpy(y[rated] - 1).long()].numpy() for edge in ordinal.bounds()
        )
        eta = grid[:, None] + fixed.numpy()
        chance = scipy.stats.norm.cdf((high - eta) * root) - scipy.stats.norm.cdf(
            (low - eta) * root
        )
        log = np.log(chance).sum(1) - 0.5 * prior * (grid - float(side.prior_mean[0, -1])) ** 2
        density = np.exp(log - log.max())
        density /= density.sum()
        mean = float((grid * density).sum())
        std = math.sqrt(float(((grid - mean) ** 2 * density).sum()))
        assert float(side.mean[i, -1]) == pytest.approx(mean, abs=0.15 * std)
        assert math.sqrt(float(side.covariance[i, -1])) == pytest.approx(std, rel=0.1)


def simulated(seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Ratings whose column factors and offsets follow two features, and both tables of features."""
    rng = np.random.default_rng(seed)
    genre, year = rng.integers(0, 4, 120), rng.integers(1950, 2020, 120)
    by_genre = rng.normal(size=(4, 3))
    v = by_genre[genre] + 0.3 * rng.normal(size=(120, 3))
    c = 0.02 * (year - 1985) + 0.2 * rng.normal(size=120)
    u = rng.normal(size=(200, 3))
    i, j = np.nonzero(rng.random((200, 120)) < 0.2)
    x = 3 + (u[i] * v[j]).sum(1) / 2 + c[j] + 0.4 * rng.normal(size=len(i))
    frame = pd.DataFrame({"user": i, "item": j, "rating": x})
    items = pd.DataFrame({"item": np.arange(120), "genre": [f"g{k}" for k in genre], "year": year})
    users = pd.DataFrame({"user": np.arange(200), "odd": rng.normal(size=200)})
    return frame, users, items


@pytest.mark.parametrize("kind", ["pandas", "polars", "pair"])
def test_columns_without_ratings_are_predicted_from_their_features(kind):
    frame, users, items = simulated()
    cold = frame["item"] % 6 == 0
    train, test = frame[~cold], frame[cold]
    given = {"pandas": items, "polars": pl.from_pandas(items)}.get(kind)
    if given is None:
        encoded = encode_features(items, "column", "item")
        given = (items["item"].to_numpy(), scipy.sparse.csr_matrix(encoded.table))
    model = MatrixCompletion(4, clip=False).fit(train, row_features=users, column_features=given)
    without = MatrixCompletion(4, clip=False).fit(train)
    pairs, y = test[["user", "item"]], test["rating"].to_numpy()
    with pytest.warns(UserWarning, match="were not seen in fit"):
        blind = np.sqrt(np.mean((without.predict(pairs) - y) ** 2))
    mean, std = model.predict(pairs, return_std=True)
    assert np.sqrt(np.mean((mean - y) ** 2)) < 0.7 * blind
    low, high = model.predict_interval(pairs, 0.9)
    assert abs(np.mean((low <= y) & (y <= high)) - 0.9) < 0.06
    assert (std > 0).all()


def test_drift_is_followed_and_a_time_without_ratings_is_the_level():
    rng = np.random.default_rng(0)
    day = rng.integers(0, 10, 20000)
    i, j = rng.integers(0, 200, 20000), rng.integers(0, 100, 20000)
    keep = np.unique(i * 100 + j, return_index=True)[1]
    i, j, day = i[keep], j[keep], day[keep]
    drift = rng.normal(size=(200, 10))
    y = drift[i, day] + 0.5 * rng.normal(size=len(i))
    when = pd.to_datetime("2020-01-01") + pd.to_timedelta(day, unit="D")
    frame = pd.DataFrame({"user": i, "item": j, "rating": y, "at": when})
    held = rng.random(len(frame)) < 0.1
    model = MatrixCompletion(1).fit(frame[~held], time="at", columns=("user", "item", "rating"))
    pairs = frame[held][["user", "item"]]
    errors = [
        np.sqrt(np.mean((model.predict(pairs, time=time) - y[held]) ** 2))
        for time in (frame[held]["at"], None)
    ]
    assert errors[0] < 0.75 < errors[1]
    later = pd.Series(pd.to_datetime(["2021-01-01"] * len(pairs)))
    np.testing.assert_allclose(model.predict(pairs, time=later), model.predict(pairs), atol=0.6)
    _, doubt = model.predict(pairs, return_std=True, time=frame[held]["at"])
    _, certain = model.predict(pairs, return_std=True)
    assert (doubt >= certain - 1e-6).all()


@pytest.mark.parametrize("likelihood", ["ordered", "binary"])
def test_category_probabilities_are_calibrated(likelihood, tmp_path):
    rng = np.random.default_rng(0)
    u, v = rng.normal(size=(300, 2)), rng.normal(size=(120, 2))
    i, j = np.nonzero(rng.random((300, 120)) < 0.3)
    z = (u[i] * v[j]).sum(1) + 0.7 * rng.normal(size=len(i))
    y = (
        np.digitize(z, [-1.0, 0.0, 0.3, 1.5]) + 1.0
        if likelihood == "ordered"
        else np.where(z > 0.4, 7.0, -2.0)
    )
    held, pairs = rng.random(len(y)) < 0.2, np.stack([i, j], axis=1)
    model = MatrixCompletion(3, likelihood=likelihood).fit(pairs[~held], y[~held])
    chance = model.predict_proba(pairs[held])
    assert model.categories_.tolist() == np.unique(y).tolist()
    np.testing.assert_allclose(chance.sum(1), 1)
    seen = y[held][:, None] == model.categories_
    np.testing.assert_allclose(chance.mean(0), seen.mean(0), atol=0.02)
    sure = chance > 0.7
    assert abs(seen[sure].mean() - chance[sure].mean()) < 0.04
    mean, _ = model.predict(pairs[held], return_std=True)
    np.testing.assert_allclose(mean, chance @ model.categories_)
    low, high = model.predict_interval(pairs[held], 0.8)
    assert np.mean((low <= y[held]) & (y[held] <= high)) > 0.78
    assert set(np.unique(np.r_[low, high])) <= set(model.categories_.tolist())
    model.save(tmp_path / "model")
    again = MatrixCompletion.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(pairs[held]), chance)


@pytest.mark.parametrize("kind", ["datetime64", "time zone", "dates", "polars", "text of a file"])
def test_dates_are_numbers(kind):
    days = pd.date_range("2020-01-01", periods=5, freq="D")
    column = {
        "datetime64": days,
        "time zone": pd.Series(days.tz_localize("UTC")),
        "dates": [day.date() for day in days],
        "polars": pl.Series(days.date),
        "text of a file": days.astype(str),
    }[kind]
    frame = {"item": list("abcde"), "out": column}
    if kind == "text of a file":
        frame = with_numbers(
            pl.DataFrame({name: list(values) for name, values in frame.items()}), "item"
        )
    found = encode_features(frame, "column", "item").table[:, 0]
    np.testing.assert_allclose(found, np.arange(-2, 3) / 2**0.5)


@pytest.mark.parametrize("likelihood", ["ordered", "binary"])
def test_categories_given_twice_count_as_two(likelihood):
    rng = np.random.default_rng(0)
    pairs = np.argwhere(rng.random((40, 20)) < 0.5)
    y = rng.integers(1, 6 if likelihood == "ordered" else 3, len(pairs))
    options = {"likelihood": likelihood, "max_iter": 3, "rated_sets": False, "dtype": "float64"}
    twice = np.concatenate([pairs, pairs[:80]])
    model = MatrixCompletion(1, **options).fit(twice, np.concatenate([y, y[:80]]))
    weights = np.where(np.arange(len(y)) < 80, 2.0, 1.0)
    weighted = MatrixCompletion(1, **options).fit(pairs, y, sample_weight=weights)
    assert (model.n_duplicates_, weighted.n_duplicates_) == (80, 0)
    np.testing.assert_allclose(model.predict_proba(pairs), weighted.predict_proba(pairs), atol=0.02)
    other = np.where(y[:80] == 1, 2, 1)  # two categories of one pair: both were seen
    model.fit(twice, np.concatenate([y, other]))
    assert model.n_duplicates_ == 80
    search = MatrixCompletionCV((1,), cv=2, likelihood=likelihood, max_iter=2)
    search.fit(twice, np.concatenate([y, other]))
    assert search.categories_.tolist() == np.unique(y).tolist()


def test_a_model_with_features_and_times_is_saved(tmp_path):
    frame, users, items = simulated()
    when = np.arange(len(frame)) * 600.0
    model = MatrixCompletion(2).fit(frame, column_features=items, row_features=users, time=when)
    pairs, times = frame[["user", "item"]][:50], np.arange(50) * 600.0
    model.save(tmp_path / "model")
    again = MatrixCompletion.load(tmp_path / "model")
    np.testing.assert_array_equal(
        again.predict(pairs, time=times), model.predict(pairs, time=times)
    )
    with pytest.raises(ValueError, match="was fitted with times: new ratings need time= as well"):
        model.partial_fit(frame[:3])


@pytest.mark.parametrize(
    "what", ["row_features", "column_features", "time", "sample_weight", "ordered"]
)
def test_the_search_over_ranks_takes_what_fit_takes(what):
    """Held-out errors are those of fits to the folds with the same options."""
    frame, users, items = simulated()
    frame = frame[frame["item"] != 7]
    rng = np.random.default_rng(0)
    extra = {
        "time": np.arange(len(frame)) * 600.0,
        "sample_weight": rng.integers(1, 4, len(frame)).astype(float),
    }
    given = (
        {what: {"row_features": users, "column_features": items, **extra}[what]}
        if what != "ordered"
        else {}
    )
    options = {"max_iter": 4} | ({"likelihood": "ordered"} if what == "ordered" else {})
    if what == "ordered":
        frame["rating"] = np.digitize(frame["rating"], [2.0, 3.0, 4.0])
    search = MatrixCompletionCV((1, 3), cv=2, **options).fit(frame, **given)
    fold = np.random.default_rng(0).permutation(len(frame)) % 2
    for k in range(2):
        inside = {
            name: value[fold != k] if name in extra else value for name, value in given.items()
        }
        outside = {name: value[fold == k] for name, value in given.items() if name in extra}
        model = MatrixCompletion(1, **options).fit(frame[fold != k], **inside)
        held = frame[fold == k]
        asked = {"time": outside["time"]} if "time" in outside else {}
        off = (model.predict(held[["user", "item"]], **asked) - held["rating"]) ** 2
        error = np.sqrt(np.average(off, weights=outside.get("sample_weight")))
        assert search.cv_results_[f"split{k}_rmse"][0] == pytest.approx(error, rel=1e-3)
    whole = MatrixCompletion(search.best_rank_, **options).fit(frame, **given)
    pairs = [(0, 7), (3, 4)]
    np.testing.assert_array_equal(search.predict(pairs), whole.predict(pairs))


def test_weights_of_a_pair_given_twice_are_joined():
    pairs, y = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)], [1.0, 2.0, 3.0, 4.0, 1.5]
    plain = MatrixCompletion(1).fit(pairs, y)
    ones = MatrixCompletion(1).fit(pairs, y, sample_weight=[1, 1, 1, 1, 1])
    assert plain.n_duplicates_ == ones.n_duplicates_ == 1
    np.testing.assert_allclose(ones.predict(pairs), plain.predict(pairs), rtol=1e-6)
    kept = ones.model_.given()
    assert kept.amounts.tolist() == [2.0, 1.0, 1.0, 1.0]
    np.testing.assert_allclose(kept.values, [1.25, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(kept.spread, [0.125**0.5, 0, 0, 0])


def test_missing_numbers_and_constant_features_are_named():
    items = {
        "item": [1, 2, 3, 4],
        "year": [1.0, None, 2.0, 3.0],
        "same": ["a"] * 4,
        "genre": ["x|y", "y", None, "x"],
    }
    with pytest.warns(UserWarning, match=r"'year': 1 missing number set to the mean"):
        found = encode_features(pd.DataFrame(items).drop(columns="same"), "column", "item")
    assert found.names == ["year", "genre"]
    assert found.table[1, 0] == 0
    with pytest.warns(UserWarning, match="column_features: same left out: the same for all"):
        encode_features(
            {"item": items["item"], "same": items["same"], "genre": items["genre"]},
            "column",
            "item",
        )
    with (
        pytest.raises(
            ValueError, match="column_features has no feature that differs between members"
        ),
        pytest.warns(),
    ):
        encode_features({"item": [1, 2], "same": ["a", "a"]}, "column", "item")


LISTED = {"item": [1, 2, 3, 4], "genres": [["x", "y"], ["y"], [], ["x"]]}


@pytest.mark.parametrize("kind", [dict, pd.DataFrame, pl.DataFrame])
def test_lists_are_several_categories_and_ids_may_be_the_index(kind):
    joined = pd.DataFrame(
        {"genres": ["x|y", "y", None, "x"]}, index=pd.Index([1, 2, 3, 4], name="item")
    )
    found, expected = (encode_features(frame, "column", "item") for frame in (kind(LISTED), joined))
    assert (
        (found.names, list(found.ids))
        == (expected.names, list(expected.ids))
        == (["genres"], [1, 2, 3, 4])
    )
    np.testing.assert_array_equal(found.table, expected.table)


def test_new_rows_may_have_rated_columns_that_have_features_alone():
    frame, _, items = simulated()
    train = frame[frame["item"] % 6 != 0]
    model = MatrixCompletion(4, clip=False).fit(train, column_features=items)
    one = frame[frame["user"] == 5]
    cold = one["item"].to_numpy() % 6 == 0
    own, wanted = one[cold], one["item"].to_numpy()[~cold]
    mean, std = model.predict_new(own["item"].to_numpy(), own["rating"], wanted, return_std=True)
    level, before = model.predict_new([], [], wanted, return_std=True)
    assert (std < before).mean() > 0.8
    assert not np.allclose(mean, level, atol=0.01)
    found = model.recommend_new(own[["user", "item", "rating"]], 3, candidates=[0, 6, 12, 18, 24])
    assert set(found["item"]) <= {0, 6, 12, 18, 24} - set(own["item"])


DAYS = ["1970-01-02", "1970-01-03 12:00"]


@pytest.mark.parametrize(
    "form",
    [
        [86400, 216000],
        pd.to_datetime(DAYS, format="mixed"),
        pd.to_datetime(DAYS, format="mixed").to_pydatetime(),
        pd.Series(pd.to_datetime(DAYS, format="mixed").tz_localize("UTC").tz_convert("Asia/Tokyo")),
        DAYS,
        np.array(DAYS),
        list(pd.to_datetime(DAYS, format="mixed").to_numpy()),
        pd.Series(DAYS),
        pl.Series(["1970-01-02T00:00:00Z", "1970-01-03T13:00:00+01:00"]),
        pl.Series(DAYS).str.to_datetime(time_zone="UTC", strict=False),
    ],
)
def test_times_are_numbers_or_dates_of_any_library_or_text(form):
    assert as_times(form, 2).tolist() == [86400.0, 216000.0]


def test_one_time_may_be_asked_for_all_pairs():
    frame, _, _ = simulated()
    when = pd.Timestamp("2026-01-01") + pd.to_timedelta(np.arange(len(frame)) % 90, "D")
    model = MatrixCompletion(1, max_iter=3).fit(frame, time=when)
    pairs = frame[["user", "item"]][:9]
    number = 1769904000.0
    for one in ("2026-02-01", pd.Timestamp("2026-02-01"), np.datetime64("2026-02-01"), int(number)):
        assert np.array_equal(
            model.predict(pairs, time=one), model.predict(pairs, time=[number] * 9)
        )
        assert np.array_equal(
            model.predict(pairs, time=number), model.predict(pairs, time=[number] * 9)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"row_features": {"user": [8, 9], "age": [1.0, 2.0]}},
            "none of the ids of row_features has ratings",
        ),
        (
            {"row_features": {"user": [0, 1], "age": [1.0, np.inf]}},
            "'age' must be finite, got 1 infinite number",
        ),
        (
            {"row_features": {"user": [0, 0], "age": [1.0, 2.0]}},
            "one line for each id, there are 1 ids in 2 lines",
        ),
        ({"row_features": np.eye(2)}, "must be a data frame with a column of ids, or a pair"),
        (
            {"row_features": ([0, 1], np.eye(3))},
            r"must be 2 ids and a matrix of as many lines, got shape \(3, 3\)",
        ),
        (
            {"row_features": ([0, 1], np.array([["a"], ["b"]]))},
            "must hold numbers, got dtype <U1; use a data frame",
        ),
        (
            {"time": ["monday"] * 4},
            "time must hold numbers, dates, or text as 2024-05-31 18:00, got 'monday'",
        ),
        ({"time": [1.0, 2.0]}, "time must have one entry per rating"),
        ({"time": [1.0, 2.0, np.nan, 3.0]}, "time must be finite, got 1 missing time"),
        ({"time": "when"}, "time='when' must name a column of the data frame X"),
        ({"sample_weight": [1, 1, -1, 1]}, "sample_weight must be 0 or between .* got -1 at posi"),
        ({"sample_weight": [1, 1, np.nan, 1]}, "sample_weight must be 0 or between .* got nan"),
        ({"sample_weight": [1, 1, np.inf, 1]}, "sample_weight must be 0 or between .* got inf"),
        ({"sample_weight": [0, 0, 0, 0]}, "sample_weight must not be zero for all entries"),
        ({"sample_weight": [1, 1]}, "sample_weight must hold one number per entry, got 2 for 4"),
        ({"noise_scale": [1, 1, 0, 1]}, "noise_scale must be between .* got 0 at position 2"),
    ],
)
def test_mistakes_are_explained(options, message):
    pairs, y = [(0, 0), (0, 1), (1, 0), (1, 1)], [1.0, 2.0, 3.0, 5.0]
    with pytest.raises((ValueError, TypeError), match=message):
        MatrixCompletion(1).fit(pairs, y, **options)


def test_likelihoods_that_do_not_fit_the_values_are_named():
    pairs, rng = [(i, j) for i in range(20) for j in range(10)], np.random.default_rng(0)
    with pytest.raises(ValueError, match="likelihood='binary' needs two different values, got 200"):
        MatrixCompletion(1, likelihood="binary").fit(pairs, rng.normal(size=200))
    with pytest.raises(
        ValueError, match="likelihood='ordered' needs 2 to 100 different values, got 200"
    ):
        MatrixCompletion(1, likelihood="ordered").fit(pairs, rng.normal(size=200))
    with pytest.raises(ValueError, match="need inference='variational'"):
        MatrixCompletion(1, likelihood="binary", inference="point").fit(
            pairs, rng.integers(0, 2, 200)
        )
    with pytest.raises(ValueError, match="predict_proba needs likelihood='ordered' or 'binary'"):
        MatrixCompletion(1).fit(pairs, rng.normal(size=200)).predict_proba(pairs)


def test_periods_are_days_or_runs_of_as_many_ratings():
    assert periods_of(np.array([0.0, 5.0, 86400.0, 3 * 86400.0]), 86400.0, 10).tolist() == [
        86400.0,
        259200.0,
        345600.0,
    ]
    assert periods_of(np.arange(100.0), None, 4).tolist() == [24.75, 49.5, 74.25]


def test_the_command_line_reads_features(tmp_path):
    from typer.testing import CliRunner

    from fisherfold.cli import app

    frame, _, items = simulated()
    frame[frame["item"] > 0].to_csv(tmp_path / "ratings.csv", index=False)
    items.to_csv(tmp_path / "items.csv", index=False)
    pl.DataFrame({"user": [1], "item": [0]}).write_csv(tmp_path / "pairs.csv")
    run = CliRunner()
    command = [
        "complete",
        "fit",
        f"{tmp_path}/ratings.csv",
        "--column-features",
        f"{tmp_path}/items.csv",
        "-o",
    ]
    found = run.invoke(app, [*command, f"{tmp_path}/model"])
    assert found.exit_code == 0, found.output
    model = MatrixCompletion.load(tmp_path / "model")
    assert model.model_.posterior.columns.features.groups.tolist() == [0, 0, 0, 0, 1]
    wanted = model.predict([(1, 0)])
    result = run.invoke(app, ["complete", "predict", f"{tmp_path}/model", f"{tmp_path}/pairs.csv"])
    assert f"{wanted[0]:.3f}"[:4] in result.output
