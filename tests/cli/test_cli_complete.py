"""fisherfold complete: fit, predict, recommend, similar, update, evaluate, through files."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from fisherfold.cli import app, main
from fisherfold.cli.complete.options import Model
from fisherfold.completion import ImplicitCompletion, MatrixCompletion


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    """A CSV file of a rank-one table, in the order of its times, with a line that cannot be used."""
    rng = np.random.default_rng(0)
    truth = 3 + np.outer(rng.normal(size=30), rng.normal(size=20))
    rows, columns = np.nonzero(rng.random(truth.shape) < 0.7)
    noisy = truth[rows, columns] + 0.1 * rng.normal(size=len(rows))
    order = rng.permutation(len(rows))
    lines = [f"u{rows[k]},{columns[k]},{noisy[k]:.4f},{t}" for t, k in enumerate(order)]
    path = tmp_path_factory.mktemp("ratings") / "ratings.csv"
    path.write_text("\n".join(["user,item,rating,time", *lines, "u0,1,bad,9"]) + "\n")
    return path


def call(*args, code=0):
    result = CliRunner().invoke(app, ["complete", *map(str, args)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


@pytest.fixture(scope="module")
def model(ratings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted") / "model"
    call("fit", ratings, "--rank", 1, "--seed", 3, "-o", folder)
    return folder


def test_fit_reports_what_was_read_and_learnt(ratings, tmp_path):
    done = CliRunner().invoke(
        app, ["complete", "fit", str(ratings), "-r", "1", "-o", str(tmp_path / "a model")]
    )
    assert "noise" in done.stdout
    assert f"next: fisherfold complete recommend '{tmp_path / 'a model'}' u" in done.stderr
    found = json.loads(call("fit", ratings, "--rank", 1, "-o", tmp_path / "m", "--json"))
    assert found["lines"] == found["ratings"] + 1
    assert found["rejected"] == {"value is not a number": 1}
    assert (found["rows (user)"], found["columns (item)"], found["rank"]) == (30, 20, 1)
    assert 0.05 < found["noise"] < 0.15


def test_fit_is_the_estimator(ratings, model):
    frame = pl.read_csv(ratings, infer_schema=False)[:-1].with_columns(
        pl.col("rating").cast(pl.Float64), pl.col("item").cast(pl.Int64)
    )
    direct, again = (
        MatrixCompletion(rank=1, random_state=3).fit(frame),
        MatrixCompletion.load(model),
    )
    np.testing.assert_allclose(again.predict(frame), direct.predict(frame), atol=1e-6)
    assert again.recommend("u3", 2).columns == ["user", "item", "prediction"]


def test_rank_auto(ratings, tmp_path):
    found = json.loads(
        call("fit", ratings, "--rank", "auto", "-o", tmp_path / "m", "--json", "--max-iter", 5)
    )
    assert set(found["cv_rmse"]) == {"2", "5", "10", "20"}
    assert str(found["rank"]) == min(found["cv_rmse"], key=found["cv_rmse"].get)


def test_what_is_not_given_is_the_default_of_the_estimator():
    for made, kind in (
        (Model().estimator(), MatrixCompletion),
        (Model(implicit=True).estimator(), ImplicitCompletion),
    ):
        assert type(made) is kind
        assert made.get_params() == kind().get_params()
    given = Model(rank="3", duplicates="last", max_iter=4, ridge=2.0).estimator().get_params()
    assert (given["rank"], given["ridge"], given["max_iter"]) == (3, 2.0, 4)


def test_predict_adds_columns_and_finds_its_own_by_name(model, tmp_path):
    pairs, out = tmp_path / "pairs.csv", tmp_path / "out.csv"
    pairs.write_text("note,item,user\na,3,u1\nb,4,u2\nc,4,nobody\n")
    found = json.loads(call("predict", model, pairs, "-o", out, "--std", "--json"))
    assert (found["pairs"], found["with ids not seen in the fit"]) == (3, 1)
    frame = pl.read_csv(out)
    assert frame.columns == ["note", "item", "user", "std", "prediction"]
    expected = MatrixCompletion.load(model).predict([("u1", 3), ("u2", 4), ("nobody", 4)])
    np.testing.assert_allclose(frame["prediction"].to_numpy(), expected)
    again = CliRunner().invoke(app, ["complete", "predict", str(model), str(out), "-o", str(out)])
    assert re.search(r"has a column 'prediction' already", str(again.exception))
    call("predict", model, out, "-o", out, "--name", "again")
    assert pl.read_csv(out).columns[-2:] == ["prediction", "again"]
    commas = call("predict", model, pairs, "--decimal", ",", "-q")
    assert pl.read_csv(io.StringIO(commas), separator=";", decimal_comma=True)[
        "prediction"
    ].to_list() == pytest.approx(expected.tolist())


@pytest.mark.slow
def test_predictions_go_through_pipes_whole(model, ratings):
    """60,000 pairs in and out, unbuffered; ``tables/test_writers.py`` has a slow reader."""
    lines = "".join(f"u{k % 30},{k % 20}\n" for k in range(60_000))
    words = [
        sys.executable,
        "-m",
        "fisherfold",
        "complete",
        "predict",
        str(model),
        "-",
        "--no-header",
        "-q",
    ]
    done = subprocess.run(
        words,
        input=lines.encode(),
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert done.stdout.count(b"\n") == 60_001


def test_recommend_for_some_for_all_and_for_new_rows(model, tmp_path):
    estimator = MatrixCompletion.load(model)
    found = json.loads(call("recommend", model, "u1", "u2", "-k", 3, "--json"))["recommendations"]
    assert found == estimator.recommend(["u1", "u2"], 3).to_dicts()
    call("recommend", model, "--all", "-k", 2, "-o", tmp_path / "lists.parquet")
    assert pl.read_parquet(tmp_path / "lists.parquet").equals(estimator.recommend(k=2))
    (tmp_path / "new.csv").write_text("user,item,rating\nzoe,1,4.5\nzoe,2,1.5\ntom,3,2\n")
    new = json.loads(call("recommend", model, "--rated", tmp_path / "new.csv", "-k", 4, "--json"))[
        "recommendations"
    ]
    assert [line["user"] for line in new] == ["zoe"] * 4 + ["tom"] * 4
    (tmp_path / "semicolons.csv").write_text("1;zoe;4,5\n2;zoe;1,5\n3;tom;2\n")
    words = (
        "--rated",
        tmp_path / "semicolons.csv",
        "--separator",
        ";",
        "--decimal",
        ",",
        "-c",
        "2,1,3",
        "--no-header",
    )
    assert json.loads(call("recommend", model, *words, "-k", 4, "--json"))["recommendations"] == new
    (tmp_path / "films.csv").write_text("title,item\nUp,3\nHer,4\n")
    few = call(
        "recommend",
        model,
        "u1",
        "--candidates",
        tmp_path / "films.csv",
        "--include-seen",
        "-o",
        "-",
        "-q",
    )
    assert sorted(pl.read_csv(io.StringIO(few))["item"]) == [3, 4]
    assert "Recommendations" in call("recommend", model, "u1", "--by", "upper")
    (tmp_path / "whole.csv").write_text("user,item,rating\n7,1,4\n7,2,3\n8,1,2\n")
    call("fit", tmp_path / "whole.csv", "-r", 1, "-o", tmp_path / "whole")
    found = json.loads(call("recommend", tmp_path / "whole", "8", "--json"))["recommendations"]
    assert [(line["user"], line["item"]) for line in found] == [(8, 2)]
    stranger = CliRunner().invoke(app, ["complete", "recommend", str(model), "nobody", "u1"])
    assert "nobody: not in the fit; this is what does best on average" in stranger.stderr
    for words in (["--all", "u1"], []):
        wrong = CliRunner().invoke(app, ["complete", "recommend", str(model), *words])
        assert "give row ids, or --all, or --rated FILE: one of the three" in str(wrong.exception)


def test_similar(model):
    found = json.loads(call("similar", model, "3", "-k", 2, "--json"))["similar"]
    assert found == MatrixCompletion.load(model).similar(["3"], 2).to_dicts()
    assert "similarity" in call("similar", model, "u1", "--rows", "-k", 2)


def test_features_of_ids_that_were_not_in_the_fit(ratings, tmp_path):
    people, more, pairs = (tmp_path / f"{name}.csv" for name in ("people", "more", "pairs"))
    people.write_text("user,age\n" + "".join(f"u{k},{k}\n" for k in range(30)))
    more.write_text("user,age\nnew,3\n")
    pairs.write_text("user,item\nnew,3\nnew,4\nu1,3\n")
    folder = tmp_path / "m"
    call("fit", ratings, "-r", 1, "--row-features", people, "-o", folder)
    found = pl.read_csv(io.StringIO(call("predict", folder, pairs, "--row-features", more)))
    model, given = MatrixCompletion.load(folder), pl.read_csv(more)
    expected = model.predict(pl.read_csv(pairs), row_features=given)
    np.testing.assert_allclose(found["prediction"], expected, atol=1e-6)
    out = ["--row-features", more, "--exclude", tmp_path / "no.csv", "--json"]
    (tmp_path / "no.csv").write_text("item\n3\n4\n")
    lists = json.loads(call("recommend", folder, "new", "-k", 3, *out))["recommendations"]
    best = model.recommend(["new"], 3, exclude=["3", "4"], row_features=given)
    assert [each["item"] for each in lists] == best["item"].to_list()
    (tmp_path / "rated.csv").write_text("user,item,rating\nnew,3,5\n")
    fresh = ["--rated", tmp_path / "rated.csv", "--row-features", more, "--json"]
    lists = json.loads(call("recommend", folder, "-k", 3, *fresh))["recommendations"]
    best = model.recommend_new({"3": 5.0}, 3, features={"age": 3})
    assert [each["item"] for each in lists] == best["item"].to_list()


def test_export(model, tmp_path):
    found = json.loads(call("export", model, "-o", tmp_path / "slim", "--json"))
    assert found["MB"] < found["MB before"]
    slim, whole = MatrixCompletion.load(tmp_path / "slim"), MatrixCompletion.load(model)
    pairs = [("u1", 3), ("u2", 4)]
    np.testing.assert_array_equal(slim.predict(pairs), whole.predict(pairs))


def test_explain(model):
    found = json.loads(call("explain", model, "u3", 7, "-k", 2, "--json"))["explanation"]
    assert found == MatrixCompletion.load(model).explain("u3", 7, 2).to_dicts()


def test_update_adds_ratings(model, tmp_path):
    (tmp_path / "new.csv").write_text("user,item,rating\nzoe,1,4.5\nu1,99,1.5\n")
    found = json.loads(call("update", model, tmp_path / "new.csv", "-o", tmp_path / "m", "--json"))
    assert (found["rows (user)"], found["columns (item)"]) == (31, 21)
    expected = MatrixCompletion.load(model).partial_fit([("zoe", 1), ("u1", 99)], [4.5, 1.5])
    asked = [("zoe", 3), ("u2", 99)]
    np.testing.assert_array_equal(
        MatrixCompletion.load(tmp_path / "m").predict(asked), expected.predict(asked)
    )


def test_evaluate_folds_and_parts(ratings, model, tmp_path):
    found = json.loads(call("evaluate", ratings, "--rank", 1, "--folds", 4, "--json"))
    assert (found["folds"], found["rank"]) == (4, 1)
    assert 0.05 < found["rmse"]["mean"] < 0.4
    assert found["rmse"]["standard error"] > 0
    assert 0.6 < found["covered by 90 % intervals"]["mean"] <= 1
    assert "±" in call("evaluate", ratings, "--rank", 1, "--folds", 2)
    words = "-r", 1, "--time-column", "time", "--json", "--split"
    late = json.loads(call("evaluate", ratings, *words, "time", "--top", 5))
    assert late["held out"] == 40
    assert {"rmse", "ndcg@5", "recall@5", "mrr@5", "coverage@5", "novelty@5"} <= set(late)
    last = json.loads(call("evaluate", ratings, *words, "last"))
    assert last["held out"] == 30
    lines = ratings.read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join(lines[:300]))
    (tmp_path / "test.csv").write_text("\n".join([lines[0], *lines[300:-1]]))
    one = json.loads(
        call("evaluate", tmp_path / "train.csv", "-r", 1, "--test", tmp_path / "test.csv", "--json")
    )
    call("fit", tmp_path / "train.csv", "-r", 1, "-o", tmp_path / "m")
    two = json.loads(call("evaluate", tmp_path / "test.csv", "--model", tmp_path / "m", "--json"))
    assert one["rmse"] == two["rmse"]
    assert "already in the fit" not in {*one, *two, *late, *last}
    known = json.loads(
        call("evaluate", tmp_path / "train.csv", "--model", tmp_path / "m", "--json")
    )
    assert known["already in the fit"] == 299


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """Stars with dates, for films whose genre says most about them, and a model of all of it."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("films")
    genre, at = rng.integers(0, 3, 40), rng.normal(size=(60, 3))
    lines = [
        f"2026-01-{1 + k % 28:02d},{i},f{j},{np.clip(round(3 + at[i, genre[j]] + 0.3 * rng.normal()), 1, 5)}"
        for k, (i, j) in enumerate(np.argwhere(rng.random((60, 40)) < 0.5))
    ]
    (folder / "stars.csv").write_text("\n".join(["date,user,film,stars", *lines]))
    (folder / "genres.csv").write_text(
        "\n".join(["film,genre", *(f"f{j},g{g}" for j, g in enumerate(genre))])
    )
    words = (
        "--likelihood",
        "ordered",
        "--column-features",
        folder / "genres.csv",
        "--time-column",
        "date",
        "-r",
        2,
    )
    call("fit", folder / "stars.csv", *words, "-o", folder / "model")
    return folder, words


def test_fit_takes_features_times_and_categories_and_predict_their_intervals(films):
    folder, _ = films
    model, frame = MatrixCompletion.load(folder / "model"), pl.read_csv(folder / "stars.csv")
    assert model.categories_.tolist() == [1, 2, 3, 4, 5]
    asked = "--interval", 0.8, "--std", "--time-column", "date"
    found = pl.read_csv(
        io.StringIO(call("predict", folder / "model", folder / "stars.csv", *asked, "-q"))
    )
    mean, std = model.predict(frame, return_std=True, time="date")
    low, high = model.predict_interval(frame, 0.8, time="date")
    for name, expected in {"prediction": mean, "std": std, "low": low, "high": high}.items():
        np.testing.assert_allclose(found[name].to_numpy(), expected, atol=1e-6)


def test_features_are_read_in_the_encoding_that_is_named_and_bad_lines_are_counted(films, tmp_path):
    stars, genres = (films[0] / name for name in ("stars.csv", "genres.csv"))
    other = tmp_path / "genres.dat"
    other.write_text(
        genres.read_text().replace("film,genre\n", "").replace(",g", "::gén"), encoding="latin-1"
    )
    command = "fit", stars, "-r", 1, "-o", tmp_path / "m", "--column-features", other
    call(*command, "--encoding", "latin-1")
    assert MatrixCompletion.load(tmp_path / "m").model_.posterior.columns.features.table.shape == (
        40,
        3,
    )
    other.write_text(genres.read_text().replace("f0,", "f0,a,"))
    result = CliRunner().invoke(app, ["complete", *map(str, command)])
    assert "1 of 40 lines (2.5%) cannot be used: 1 too many fields" in str(result.exception)
    call(*command, "--skip-bad-lines")


def test_evaluate_takes_what_fit_takes(films):
    folder, words = films
    found = json.loads(
        call("evaluate", folder / "stars.csv", *words, "--split", "random", "--json")
    )
    plain = json.loads(
        call("evaluate", folder / "stars.csv", "-r", 2, "--split", "random", "--json")
    )
    assert found["rmse"] < plain["rmse"]
    assert found["covered by 90 % intervals"] >= 0.85
    saved = "--model", folder / "model", "--time-column", "date"
    kept = json.loads(call("evaluate", folder / "stars.csv", *saved, "--json"))
    model, frame = MatrixCompletion.load(folder / "model"), pl.read_csv(folder / "stars.csv")
    low, high = model.predict_interval(frame, 0.9, time="date")
    stars = frame["stars"].to_numpy()
    assert kept["covered by 90 % intervals"] == pytest.approx(
        np.mean((low <= stars) & (stars <= high))
    )


def test_implicit_pairs_are_fitted_evaluated_and_recommended_from(films, tmp_path):
    plays = pl.read_csv(films[0] / "stars.csv").filter(pl.col("stars") > 3).select("film", "user")
    plays.write_csv(tmp_path / "plays.csv")
    fitted = json.loads(
        call("fit", tmp_path / "plays.csv", "--implicit", "-r", 4, "-o", tmp_path / "m", "--json")
    )
    assert (fitted["ratings"], fitted["columns read"]) == (len(plays), "user, film")
    metrics = {"ndcg@10", "recall@10", "coverage@10", "novelty@10"}
    how = "--implicit", "-r", 4, "--split", "random"
    for words in (how, ("--model", tmp_path / "m")):
        found = json.loads(call("evaluate", tmp_path / "plays.csv", *words, "--json"))
        assert metrics <= set(found)
        assert not {"rmse", "covered by 90 % intervals"} & set(found)
    (tmp_path / "new.csv").write_text("film,user\nf1,zoe\nf2,zoe\n")
    found = json.loads(
        call("recommend", tmp_path / "m", "--rated", tmp_path / "new.csv", "-k", 3, "--json")
    )
    assert [line["user"] for line in found["recommendations"]] == ["zoe"] * 3


def test_a_model_that_keeps_no_ratings_recommends_with_include_seen(model, tmp_path):
    bare = MatrixCompletion.load(model)
    bare.model_.seen = None
    bare.save(tmp_path / "m")
    wrong = CliRunner().invoke(app, ["complete", "recommend", str(tmp_path / "m"), "u1"])
    assert "add --include-seen" in str(wrong.exception)
    assert "u1" in call("recommend", tmp_path / "m", "u1", "--include-seen")


@pytest.mark.parametrize("name", ["fit", "update", "evaluate", "recommend"])
def test_ids_and_values_come_from_columns_with_usual_names(ratings, model, tmp_path, name):
    """An index and times before the ids, as pandas and exports write them, are neither ids nor values."""
    frame = (
        pl.read_csv(ratings, infer_schema=False)
        .select("time", pl.exclude("time"))
        .with_row_index("")
    )
    frame.write_csv(tmp_path / "r.csv")
    words = {
        "fit": ["fit", tmp_path / "r.csv", "-r", 1, "-o", tmp_path / "m"],
        "update": ["update", model, tmp_path / "r.csv", "-o", tmp_path / "m"],
        "evaluate": ["evaluate", tmp_path / "r.csv", "--model", model],
        "recommend": ["recommend", model, "--rated", tmp_path / "r.csv", "--include-seen"],
    }[name]
    found = json.loads(call(*words, "--json"))
    if name == "recommend":
        assert found["recommendations"][0]["user"].startswith("u")
    else:
        assert found["columns read"] == "user, item, rating"
    frame.rename({"user": "a", "item": "b"}).write_csv(tmp_path / "r.csv")
    wrong = CliRunner().invoke(app, ["complete", *map(str, words)])
    message = r"cannot tell which of the columns \['time', 'a', 'b', 'rating'\] are row id and column id; name them"
    assert re.search(message, str(wrong.exception))


def test_evaluate_holds_out_pairs_not_lines(tmp_path):
    """Pure noise, each line twice: nothing can be known of a pair that is held out."""
    noise = np.random.default_rng(0).normal(size=(20, 20))
    twice = [f"{i},{j},{value}" for (i, j), value in np.ndenumerate(noise)] * 2
    (tmp_path / "twice.csv").write_text("\n".join(["user,item,value", *twice]))
    found = json.loads(
        call("evaluate", tmp_path / "twice.csv", "--rank", 1, "--folds", 4, "--json")
    )
    assert found["merged"] == 400
    assert found["rmse"]["mean"] > 0.95 * noise.std()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["fit", "{r}", "--rank", "many", "-o", "m"],
            "--rank must be a whole number of at least 1 or auto",
        ),
        (["fit", "{r}", "-o", "{r}"], "--output must be a folder"),
        (
            ["fit", "{r}", "-c", "user,item,stars", "-o", "m"],
            "has no column 'stars'; its columns are",
        ),
        (
            ["fit", "{r}", "--checkpoint", "c", "-o", "m"],
            "--checkpoint is for fits over several processes",
        ),
        (["fit", "absent.csv", "-o", "m"], "absent.csv"),
        (
            ["fit", "{r}", "--implicit", "--time-column", "time", "-o", "m"],
            "has no meaning for a fit with --implicit",
        ),
        (
            ["fit", "{r}", "--implicit", "--likelihood", "binary", "-o", "m"],
            "--likelihood is for ratings and has no",
        ),
        (["predict", "{m}", "{r}", "--time-column", "time"], "this model was fitted without times"),
        (
            ["predict", "{m}", "{r}", "--interval", "90"],
            "--interval must lie between 0 and 1, got 90.0",
        ),
        (
            ["evaluate", "{r}", "--model", "{m}", "--rank", "3"],
            "options of fits and splits have no meaning",
        ),
        (["predict", "absent", "{r}", "-o", "o.csv"], "there is no model folder absent"),
        (["predict", "{m}", "{r}", "-o", "o.xlsx"], "is written as CSV or Parquet"),
        (
            ["predict", "{m}", "{r}", "-o", "-", "--json"],
            "--json and --output - both write to standard output",
        ),
        (
            ["recommend", "{m}", "u1", "--by", "luck"],
            "'luck' is not one of 'mean', 'upper', 'sample'",
        ),
        (["similar", "{m}", "999"], "1 column id was not seen in fit, the first is '999'"),
        (["evaluate", "{r}", "--split", "time"], "--split time needs --time-column"),
        (
            ["evaluate", "{r}", "--split", "odd"],
            "'odd' is not one of 'folds', 'time', 'last', 'random'",
        ),
        (["evaluate", "{r}", "--folds", "1000"], "--folds must be at most the number of ratings"),
    ],
)
def test_errors_are_one_sentence(ratings, model, tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["fisherfold", "complete", *(a.format(r=ratings, m=model) for a in args)]
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code != 0
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []


def test_ids_are_no_markup_and_predictions_have_any_size(tmp_path):
    lines = [
        f"u[bold]{i},[/b]{j},{(1 + i * j % 5) * 1e-9}"
        for i in range(6)
        for j in range(5)
        if (i + j) % 3
    ]
    (tmp_path / "r[red].csv").write_text("\n".join(["user,item,rating", *lines]))
    assert "Completed r[red].csv" in call(
        "fit", tmp_path / "r[red].csv", "-r", 1, "-o", tmp_path / "m"
    )
    shown = call("recommend", tmp_path / "m", "u[bold]3", "-k", 1)
    assert re.search(r"u\[bold\]3 .* \[/b\]\d .* \S+e-09 ", shown)


def test_weights_and_keys_of_a_file(tmp_path):
    rng = np.random.default_rng(0)
    pairs = np.argwhere(rng.random((30, 20)) < 0.5)
    values, weights = rng.normal(size=len(pairs)), rng.choice([0.0, 0.5, 2.0], len(pairs))
    frame = pl.DataFrame(
        {
            "user": pairs[:, 0],
            "item": pairs[:, 1],
            "rating": values,
            "trust": weights,
            "event": [f"e{k}" for k in range(len(pairs))],
        }
    )
    frame[:200].write_csv(tmp_path / "first.csv")
    frame[150:].write_csv(tmp_path / "more.csv")
    columns = ["--weight-column", "trust", "--key-column", "event"]
    options = ["--rank", 2, *columns, "-o", tmp_path / "m"]
    call("fit", tmp_path / "first.csv", *options)
    expected = MatrixCompletion(2).fit(frame[:200], sample_weight="trust", ids="event")
    found = MatrixCompletion.load(tmp_path / "m")
    np.testing.assert_allclose(found.predict(pairs), expected.predict(pairs), rtol=1e-6)
    for _ in range(2):  # the second time everything was delivered before
        call("update", tmp_path / "m", tmp_path / "more.csv", *columns)
    expected.partial_fit(frame[150:], sample_weight="trust", ids="event")
    found = MatrixCompletion.load(tmp_path / "m")
    np.testing.assert_allclose(found.predict(pairs), expected.predict(pairs), rtol=1e-6)


def test_implicit_fits_have_the_defaults_of_the_estimator_and_keep_what_is_asked(tmp_path):
    from fisherfold import ImplicitCompletion

    lines = [f"{i},{j},{1 + (i + j) % 3}" for i in range(30) for j in range(20) if (i * j) % 3]
    (tmp_path / "plays.csv").write_text("\n".join(["user,item,plays", *lines]))
    call("fit", tmp_path / "plays.csv", "--implicit", "-o", tmp_path / "m")
    found = MatrixCompletion.load(tmp_path / "m")
    assert found.get_params() == ImplicitCompletion().get_params()
    asked = ["--implicit", "--duplicates", "mean", "--max-iter", 3]
    call("fit", tmp_path / "plays.csv", *asked, "-o", tmp_path / "m")
    found = MatrixCompletion.load(tmp_path / "m")
    assert (found.duplicates, found.max_iter) == ("mean", 3)
