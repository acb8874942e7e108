"""MatrixCompletion: prediction, error bars, new rows, new ratings, scikit-learn's tools, files."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score

import fisherfold.completion.training as engine
from fisherfold.completion import MatrixCompletion, MatrixCompletionCV
from toy import rated_table


@pytest.fixture(scope="module")
def table():
    return rated_table()


def rmse(a, b):
    return float(np.sqrt(np.mean((np.asarray(a) - np.asarray(b)) ** 2)))


def test_it_predicts_what_was_held_out_with_error_bars(table):
    _, pairs, values, held, truth = table
    model = MatrixCompletion(rank=2, rated_sets=False).fit(pairs, values)
    mean, std = model.predict(held, return_std=True)
    assert rmse(mean, truth) < 0.15
    assert model.score(held, truth) > 0.98
    assert 0.85 < np.mean(np.abs(truth - mean) <= 1.645 * std) < 0.95
    assert model.converged_
    assert abs(model.noise_ - 0.1) < 0.05
    assert (np.diff([record["bound"] for record in model.trace_]) > -1e-5).all()
    free = clone(model).set_params(clip=False).fit(pairs, values)
    np.testing.assert_allclose(mean, np.clip(free.predict(held), values.min(), values.max()))


def test_the_arrays_are_the_predictions(table):
    _, pairs, values, _, _ = table
    model = MatrixCompletion(rank=2, clip=False, dtype="float64").fit(pairs, values)
    everything = np.argwhere(np.ones((60, 40)))
    mean, std = model.predict(everything, return_std=True)
    made = model.offset_ + model.row_offsets_[:, None] + model.column_offsets_
    made = made + model.row_factors_ @ model.column_factors_.T
    np.testing.assert_allclose(mean, made.reshape(-1), rtol=1e-10)
    rows, columns = model.inner_product_vectors()
    np.testing.assert_allclose((rows @ columns.T).reshape(-1), mean, atol=1e-5)
    # what is not known about the coefficients, from draws of them
    rng, (i, j) = np.random.default_rng(0), (3, 5)
    x = rng.multivariate_normal(
        [*model.row_factors_[i], model.row_offsets_[i]], model.row_covariances_[i], 40_000
    )
    y = rng.multivariate_normal(
        [*model.column_factors_[j], model.column_offsets_[j]], model.column_covariances_[j], 40_000
    )
    drawn = (x[:, :2] * y[:, :2]).sum(1) + x[:, 2] + y[:, 2]
    assert drawn.std() < std.reshape(60, 40)[i, j]
    assert model.row_ids_.tolist() == list(range(60))


@pytest.mark.parametrize("rated_sets", [True, False])
def test_a_stranger_is_an_average_member(table, rated_sets):
    _, pairs, values, _, _ = table
    model = MatrixCompletion(
        rank=2, clip=False, rated_sets=rated_sets, tol=1e-7, dtype="float64"
    ).fit(pairs, values)
    rows, columns = np.arange(60), np.arange(40)
    everything = model.predict([(i, j) for i in rows for j in columns]).reshape(60, 40)
    # without rated sets to convergence: the prior has learnt the average
    close = {"rtol": 0, "atol": 1e-9 if rated_sets else 1e-3}
    with pytest.warns(UserWarning, match="were not seen in fit"):
        np.testing.assert_allclose(
            model.predict([(999, j) for j in columns]), everything.mean(0), **close
        )
    with pytest.warns(UserWarning, match="the column ids of 60 of 60"):
        np.testing.assert_allclose(
            model.predict([(i, 999) for i in rows]), everything.mean(1), **close
        )
    np.testing.assert_allclose(model.predict([(999, 999)]), everything.mean(), **close)
    expected = model.predict([(999, 3)], return_std=True)
    np.testing.assert_allclose(model.predict_new([], [], [3], return_std=True), expected, **close)


def test_a_new_row_is_folded_in(table):
    holes, pairs, values, _, _ = table
    without = pairs[:, 0] != 59
    model = MatrixCompletion(rank=2, rated_sets=False).fit(pairs[without], values[without])
    before = model.predict(pairs[without])
    rated = np.flatnonzero(~np.isnan(holes[59]))
    half = len(rated) // 2
    folded, std = model.predict_new(
        rated[:half], holes[59, rated[:half]], rated[half:], return_std=True
    )
    assert rmse(folded, holes[59, rated[half:]]) < 0.4
    _, vague = model.predict_new(rated[:1], holes[59, rated[:1]], rated[half:], return_std=True)
    assert (std < vague).all()
    np.testing.assert_array_equal(model.predict(pairs[without]), before)
    with pytest.raises(
        ValueError, match="none of the rated column ids was seen in fit, the first is 12345"
    ):
        model.predict_new([12345], [1.0], [0, 1])


@pytest.mark.parametrize("rule", ["last", "sum"])
def test_values_given_twice_follow_the_rule_in_new_rows_and_batches_too(table, rule):
    _, pairs, values, _, _ = table
    model = MatrixCompletion(2, duplicates=rule).fit(pairs, values)
    wanted, merged = np.arange(5, 15), {"last": 3.0, "sum": 4.0}[rule]
    twice = model.predict_new([1, 2, 1], [1.0, 2.5, 3.0], wanted)
    np.testing.assert_allclose(twice, model.predict_new([1, 2], [merged, 2.5], wanted), rtol=1e-6)
    new = [(77, j) for j in range(10)]
    both = clone(model).fit(pairs, values).partial_fit(new + new, [1.0] * 10 + [2.0] * 10)
    once = clone(model).fit(pairs, values).partial_fit(new, [{"last": 2.0, "sum": 3.0}[rule]] * 10)
    np.testing.assert_allclose(both.predict(new), once.predict(new), rtol=1e-6)


def test_sums_are_taken_before_the_centre(table):
    _, pairs, values, held, _ = table
    once = MatrixCompletion(rank=2, duplicates="sum", dtype="float64").fit(pairs, values)
    twice = MatrixCompletion(rank=2, duplicates="sum", dtype="float64")
    twice.fit(np.concatenate([pairs, pairs]), np.concatenate([values / 4, 3 * values / 4]))
    np.testing.assert_allclose(twice.predict(held), once.predict(held), atol=1e-8)
    assert (once.n_duplicates_, twice.n_duplicates_) == (0, len(values))


def test_a_value_that_was_corrected_leaves_no_trace(table):
    _, pairs, values, held, _ = table
    again, slips = np.concatenate([pairs[:3], pairs]), np.concatenate([[1e3, -50.0, 300.0], values])
    right = MatrixCompletion(2, duplicates="last").fit(again, slips)
    expected = MatrixCompletion(2).fit(pairs, values).predict(held)
    np.testing.assert_allclose(right.predict(held), expected, rtol=1e-5)
    assert right.n_duplicates_ == 3
    stream = (
        MatrixCompletion(2, duplicates="last")
        .partial_fit(pairs[:3], slips[:3])
        .partial_fit(pairs, values)
    )
    np.testing.assert_allclose(stream.predict(held), expected, atol=1e-3)


@pytest.mark.parametrize(
    "options", [{}, {"inference": "point", "ridge": 0.5}, {"inference": "point", "solver": "rcg"}]
)
def test_a_stream_ends_where_a_fit_would(table, tmp_path, options):
    """Ten small batches, of which the first cannot support the factors, against one fit on everything."""
    _, pairs, values, held, truth = table
    order = np.random.default_rng(0).permutation(len(values))
    model = MatrixCompletion(rank=2, **options)
    for k, part in enumerate(np.array_split(order, 10)):
        names = np.column_stack(
            [pairs[part, 0].astype(str), pairs[part, 1]]
        )  # 7 and "7" are one id
        model.partial_fit(names if k == 5 else pairs[part], values[part])
    whole = MatrixCompletion(rank=2, **options).fit(pairs, values)
    assert rmse(model.predict(held), truth) < (1.2 if options else 1.05) * rmse(
        whole.predict(held), truth
    )
    assert (len(model.row_ids_), len(model.column_ids_)) == (60, 40)
    given = model.model_.given()
    expected = values[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    i, j = model.row_ids_.astype(int)[given.rows], model.column_ids_.astype(int)[given.columns]
    np.testing.assert_array_equal(given.values[np.lexsort((j, i))], expected)
    assert not set(model.recommend(3, 40)["column"]) & set(pairs[pairs[:, 0] == 3, 1])
    model.save(tmp_path)
    again = MatrixCompletion.load(tmp_path)
    for stream in (model, again):
        stream.partial_fit([(3, 1), ("new", 2)], [2.0, 3.0])
    np.testing.assert_array_equal(again.predict(held), model.predict(held))


@pytest.mark.parametrize(
    ("first", "level", "unit"), [(0.0, 0.0, 1e20), (5e-17, 0.0, 1.0), (7.0, 7.0, 1e-5)]
)
def test_the_first_value_of_a_stream_says_nothing_of_the_unit_of_the_others(
    table, first, level, unit
):
    _, pairs, values, held, truth = table
    model = MatrixCompletion(rank=2).partial_fit(pairs[:1], [first])
    model.partial_fit(pairs[1:], level + unit * values[1:])
    whole = MatrixCompletion(rank=2).fit(pairs[1:], values[1:])
    assert rmse((model.predict(held) - level) / unit, truth) < 1.2 * rmse(
        whole.predict(held), truth
    )


def test_a_table_that_is_rated_over_and_over_is_that_of_the_last_values(table):
    _, pairs, values, held, _ = table
    model = MatrixCompletion(rank=2, duplicates="last", dtype="float64").fit(
        pairs, values[::-1].copy()
    )
    for part in np.array_split(np.random.default_rng(0).permutation(len(values)), 8):
        model.partial_fit(pairs[part], values[part])
    assert len(model.model_.given()) < 1.1 * len(pairs)
    expected = MatrixCompletion(rank=2, dtype="float64").fit(pairs, values).predict(held)
    assert rmse(model.predict(held), expected) < 0.1


@pytest.mark.parametrize("step", ["fit_variational", "refine", "update_batch"])
def test_an_interrupted_update_leaves_the_model(table, monkeypatch, step):
    import fisherfold.completion.updating as inside

    _, pairs, values, held, _ = table
    model = MatrixCompletion(2).fit(pairs, values)
    before = model.predict(held)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine if step == "fit_variational" else inside, step, stop)
    new = pairs[
        : {"fit_variational": len(pairs), "refine": 200, "update_batch": 3}[step]
    ] + np.array([100, 0])
    with pytest.raises(KeyboardInterrupt):
        model.partial_fit(new, values[: len(new)])
    monkeypatch.undo()
    np.testing.assert_array_equal(model.predict(held), before)
    assert len(model.row_ids_) == 60


def test_scikit_learn_tools_work(table):
    holes, pairs, values, _, _ = table
    folds = KFold(3, shuffle=True, random_state=0)
    scores = cross_val_score(
        MatrixCompletion(rank=2), pairs, values, cv=folds, scoring="neg_root_mean_squared_error"
    )
    assert (scores > -0.35).all()
    search = GridSearchCV(MatrixCompletion(max_iter=10), {"rank": [1, 2]}, cv=folds).fit(
        pairs, values
    )
    assert search.best_params_ == {"rank": 2}
    for X in (
        holes,
        sp.csr_array(np.nan_to_num(holes)),
        pd.DataFrame(holes),
    ):  # rows are held out, and folded in
        said = {"matrix": True} if isinstance(X, pd.DataFrame) else {}
        search = GridSearchCV(MatrixCompletion(), {"rank": [1, 2]}, cv=3).fit(X, **said)
        assert search.best_params_ == {"rank": 2}
        assert search.best_score_ > 0.9
    original = MatrixCompletion(rank=7, ridge=0.5, offsets="rows")
    assert clone(original).get_params() == original.get_params()


def test_the_score_of_a_matrix_is_that_of_predict_new_row_by_row(table):
    holes, _, _, _, _ = table
    model = MatrixCompletion(2, dtype="float64").fit(holes[:40])
    new, parts = holes[40:44], 5
    rows, columns = np.nonzero(~np.isnan(new))
    values, found = new[rows, columns], np.empty(len(rows))
    order = np.lexsort((np.random.default_rng(0).random(len(rows)), rows))
    place = np.empty(len(rows), dtype=int)
    place[order] = np.concatenate([np.arange(n) for n in np.bincount(rows)])
    for k, (row, column) in enumerate(zip(rows, columns, strict=True)):
        rest = (rows == row) & (place % parts != place[k] % parts)
        found[k] = model.predict_new(columns[rest], values[rest], [column])[0]
    assert model.score(new) == pytest.approx(r2_score(values, found), abs=1e-8)
    with pytest.raises(ValueError, match="R² needs at least 2 values, got 1"):
        model.score(np.where(np.arange(40) == 3, 1.0, np.nan)[None])


def test_frames_are_scored_and_predicted_by_their_names(table):
    _, pairs, values, _, _ = table
    frame = pd.DataFrame({"user": pairs[:, 0], "item": pairs[:, 1], "stars": values, "seconds": 1})
    model = MatrixCompletion(2).fit(frame)
    assert model.feature_names_in_.tolist() == ["user", "item"]
    expected = r2_score(values, model.predict(pairs))
    assert model.score(frame) == model.score(pl.from_pandas(frame)) == pytest.approx(expected)
    swapped = frame[["stars", "item", "user"]]
    np.testing.assert_array_equal(model.predict(swapped), model.predict(pairs))
    assert model.score(swapped[["item", "user"]], values) == pytest.approx(expected)
    assert not hasattr(clone(model).fit(pairs, values), "feature_names_in_")


def test_files_and_pickles_keep_everything(table, tmp_path):
    _, pairs, values, held, _ = table
    frame = pl.DataFrame(
        {
            "user": [f"u{i}" for i in pairs[:, 0]],
            "item": [f"é{j}" for j in pairs[:, 1]],
            "y": values,
        }
    )
    wanted = [(f"u{i}", f"é{j}") for i, j in held]
    model = MatrixCompletionCV(ranks=(1, 2), ridges=(None, 5.0), max_iter=5, random_state=3).fit(
        frame
    )
    model.save(tmp_path / "model")
    state = model.__getstate__()
    plain = (str, int, float, bool, type(None), np.ndarray, list, tuple, dict)
    assert all(isinstance(value, plain) for value in state.values())
    for again in (MatrixCompletionCV.load(tmp_path / "model"), pickle.loads(pickle.dumps(model))):
        for a, b in zip(
            model.predict(wanted, return_std=True),
            again.predict(wanted, return_std=True),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
        again.set_params(ranks=tuple(again.ranks), ridges=tuple(again.ridges))
        assert again.get_params() == model.get_params()
        np.testing.assert_equal(again.cv_results_, model.cv_results_)
        assert (again.best_rank_, again.best_rmse_) == (model.best_rank_, model.best_rmse_)
        assert again.recommend("u3", 3).equals(model.recommend("u3", 3))
    again = MatrixCompletion.load(tmp_path / "model")  # the class is that of the file
    assert type(again) is MatrixCompletionCV
    assert type(again.best_estimator_) is MatrixCompletion
    assert again.best_estimator_.rank == 2
    np.testing.assert_array_equal(again.best_estimator_.predict(wanted), model.predict(wanted))
    assert json.loads((tmp_path / "model" / "model.json").read_text())["names"] == [
        "user",
        "item",
        "y",
    ]
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "model.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scale", 0.0, "scale is"),
        ("noise_precision", 2.0**200, "noise_precision is"),
        ("trace", 7, "its trace is not"),
        ("inference", "both", "inference is 'both'"),
        ("n_ratings", -1, "n_ratings is"),
        ("has_offset", None, "has_offset"),
        ("names", [1], "three names are expected"),
        ("params", {"rank": -4}, "rank must be"),
    ],
)
def test_a_damaged_field_is_named_with_its_file(table, tmp_path, name, value, message):
    from fisherfold.files import read_tensors, write_tensors

    _, pairs, values, _, _ = table
    MatrixCompletion(2, max_iter=2, n_jobs=1).fit(pairs, values).save(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors, header = read_tensors(file, kind="completion", version=2)
    assert not {"n_jobs", "device", "verbose"} & set(header["params"])
    write_tensors(file, tensors, kind="completion", version=2, header=header | {name: value})
    with pytest.raises(ValueError, match=rf"model.safetensors.*{message}"):
        MatrixCompletion.load(tmp_path / "m")


@pytest.mark.parametrize(("density", "ridge"), [(0.2, None), (0.3, None), (0.3, 0.3)])
def test_the_search_finds_the_error_of_the_fit_that_is_made_in_the_end(density, ridge):
    """A jump from rank 2 to 5 lost factors where ratings are few: 0.08 too much, and rank 2 was chosen for 5."""
    draw = np.random.default_rng(0)
    true = 3 + draw.normal(size=(150, 5)) @ draw.normal(size=(5, 80)) / 5**0.5
    seen = draw.random(true.shape) < density
    pairs, values = np.argwhere(seen), true[seen] + 0.3 * draw.normal(size=seen.sum())
    path = (
        MatrixCompletionCV(ranks=(2, 5, 10), ridges=(ridge,))
        .fit(pairs, values)
        .cv_results_["mean_rmse"]
    )
    alone = [
        MatrixCompletionCV((rank,), ridges=(ridge,)).fit(pairs, values).best_rmse_
        for rank in (2, 5, 10)
    ]
    np.testing.assert_allclose(path, alone, rtol=1e-6)


def test_the_search_finds_the_rank(table):
    _, pairs, values, held, _ = table
    model = MatrixCompletionCV(ranks=(1, 2, 100), ridges=(None, 5.0)).fit(pairs, values)
    assert (model.best_rank_, model.best_ridge_) == (2, None)
    assert model.best_rmse_ == min(model.cv_results_["mean_rmse"])
    assert len(model.cv_results_["mean_rmse"]) == 4
    np.testing.assert_array_equal(
        model.predict(held), MatrixCompletion(rank=2).fit(pairs, values).predict(held)
    )
    chosen = MatrixCompletionCV(ranks=(1, 2), inference="point", ridges=(0.5,)).fit(pairs, values)
    assert chosen.best_rank_ == 2


def test_verbose_prints_a_line_per_pass(table, capsys):
    _, pairs, values, _, _ = table
    MatrixCompletion(rank=1, max_iter=2, verbose=True).fit(pairs, values)
    assert capsys.readouterr().err.count("bound") == 2


@pytest.mark.parametrize("value", [0.0, 4.0, -1e30, 1e-300])
def test_constant_values_and_a_single_one_are_predicted(value):
    pairs = [(i, j) for i in range(3) for j in range(3) if (i + j) % 3]
    model = MatrixCompletion(rank=2).fit(pairs, np.full(6, value))
    np.testing.assert_allclose(model.predict([(0, 2), (9, 9)]), value)
    with pytest.warns(UserWarning, match="rank=2 is more"):
        single = MatrixCompletion(rank=2).fit([("a", "b")], [value])
    np.testing.assert_allclose(single.predict([("a", "b"), ("c", "d")]), value)
    assert np.isfinite(single.predict([("a", "d")], return_std=True)[1]).all()
