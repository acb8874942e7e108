"""fisherfold complete: fit, predict, recommend, evaluate, through files."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shlex
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

import fisherfold
from fisherfold.cli import app, main
from fisherfold.completion import MatrixCompletion


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    """A CSV file of a rank-one table with a refused line."""
    folder = tmp_path_factory.mktemp("ratings")
    rng = np.random.default_rng(0)
    truth = 3 + np.outer(rng.normal(size=30), rng.normal(size=20))
    rows, columns = np.nonzero(rng.random(truth.shape) < 0.7)
    lines = [f"u{i},{j},{truth[i, j] + 0.1 * rng.normal():.4f}" for i, j in zip(rows, columns, strict=True)]
    path = folder / "ratings.csv"
    path.write_text("\n".join(["user,item,rating", *lines, "u0,1,bad"]) + "\n")
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


def test_fit_reports_what_was_read_and_refused(ratings, tmp_path):
    found = json.loads(call("fit", ratings, "--rank", 2, "-o", tmp_path / "m", "--json"))
    assert found["lines"] == found["ratings"] + 1
    assert found["refused"] == {"value is not a number": 1}
    assert (found["rows"], found["columns"], found["rank"]) == (30, 20, 2)
    table = call("fit", ratings, "--rank", 1, "-o", tmp_path / "m", "--columns", "1,2,3", "--quiet")
    assert "value is not a number: 1" in table


def test_fit_is_the_estimator(ratings, model):
    frame = pl.read_csv(ratings, infer_schema=False)[:-1]
    ids = frame.select("user", pl.col("item").cast(pl.Int64))
    direct = MatrixCompletion(rank=1, random_state=3).fit(ids, frame["rating"].cast(pl.Float64))
    again = MatrixCompletion.load(model)
    np.testing.assert_allclose(again.predict(ids), direct.predict(ids), atol=1e-6)


def test_rank_auto(ratings, tmp_path):
    found = json.loads(call("fit", ratings, "--rank", "auto", "-o", tmp_path / "m", "--json"))
    assert set(found["cv_rmse"]) == {"2", "5", "10", "20"}
    assert str(found["rank"]) == min(found["cv_rmse"], key=found["cv_rmse"].get)


def test_predict_appends_a_last_column(model, tmp_path):
    pairs, out = tmp_path / "pairs.csv", tmp_path / "out.csv"
    pairs.write_text("user,item,note\nu1,3,a\nu2,4,b\nnobody,4,c\n")
    found = json.loads(call("predict", model, pairs, "-o", out, "--json"))
    assert (found["pairs"], found["with ids not seen in the fit"]) == (3, 1)
    frame = pl.read_csv(out)
    assert frame.columns == ["user", "item", "note", "prediction"]
    expected = MatrixCompletion.load(model).predict([("u1", 3), ("u2", 4), ("nobody", 4)])
    np.testing.assert_allclose(frame["prediction"].to_numpy(), expected)
    call("predict", model, out, "-o", out, "--std")
    assert pl.read_csv(out).columns == ["user", "item", "note", "std", "prediction"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.csv", "pairs.csv"]


def test_decimal_commas(ratings, model, tmp_path):
    """A table from a European spreadsheet gives the same model and the same errors; predictions may have commas too."""
    path = tmp_path / "ratings.csv"
    path.write_text(ratings.read_text().replace(",", ";").replace(".", ","))
    found = json.loads(call("fit", path, "--rank", 1, "--seed", 3, "-o", tmp_path / "m", "--json"))
    assert (found["decimal mark"], found["refused"]) == (",", {"value is not a number": 1})
    errors = [json.loads(call("evaluate", file, "--rank", 1, "--folds", 3, "--json")) for file in (ratings, path)]
    assert errors[0]["rmse"] == errors[1]["rmse"]
    call("predict", model, ratings, "-o", tmp_path / "points.csv", "--std")
    call("predict", tmp_path / "m", path, "-o", tmp_path / "commas.csv", "--std", "--decimal", ",")
    points, commas = (pl.read_csv(tmp_path / name, infer_schema=False) for name in ("points.csv", "commas.csv"))
    assert commas.with_columns(pl.col("rating", "std", "prediction").str.replace(",", ".", literal=True)).equals(points)
    call("fit", path, "--rank", 1, "-o", tmp_path / "m", "--decimal", ".", code=1)
    call("evaluate", tmp_path / "commas.csv", "--columns", "user,item,prediction", "--rank", 1, "--folds", 2)


def test_recommend(model):
    lists = json.loads(call("recommend", model, "u1", "u2", "-k", 3, "--json"))
    estimator = MatrixCompletion.load(model)
    for row in ("u1", "u2"):
        ids, scores = estimator.recommend(row, 3)
        assert [item["column"] for item in lists[row]] == ids.tolist()
        np.testing.assert_allclose([item["prediction"] for item in lists[row]], scores)
    assert "Recommendations" in call("recommend", model, "u1")


@pytest.mark.parametrize(("unseen", "code"), [("prior", 0), ("nan", 0), ("error", 1)])
def test_predict_treats_strangers_as_the_model_says(tmp_path, unseen, code):
    fitted = MatrixCompletion(rank=1, unseen=unseen).fit([("ann", "up"), ("ann", "heat"), ("bob", "up")], [5, 1, 4])
    fitted.save(tmp_path / "model")
    (tmp_path / "pairs.csv").write_text("user,item\nann,up\nzoe,up\n")
    call("predict", tmp_path / "model", tmp_path / "pairs.csv", "-o", tmp_path / "out.csv", code=code)
    if code:
        assert not (tmp_path / "out.csv").exists()
        return
    found = pl.read_csv(tmp_path / "out.csv")["prediction"].cast(pl.Float64)
    np.testing.assert_allclose(found, fitted.predict([("ann", "up"), ("zoe", "up")]))


def test_ids_are_no_markup_and_predictions_have_any_size(tmp_path):
    lines = [f"u[bold]{i},[/b]{j},{(1 + i * j % 5) * 1e-9}" for i in range(6) for j in range(5) if (i + j) % 3]
    (tmp_path / "r[red].csv").write_text("\n".join(["user,item,rating", *lines]))
    assert "Completed r[red].csv" in call("fit", tmp_path / "r[red].csv", "-r", 1, "-o", tmp_path / "m")
    shown = call("recommend", tmp_path / "m", "u[bold]3", "-k", 1)
    assert re.search(r"u\[bold\]3 .* \[/b\]\d .* \S+e-09 ", shown)
    errors = call("evaluate", tmp_path / "r[red].csv", "-r", 1, "--folds", 2)
    assert re.search(r"rmse .* \S+e-\d\d ± \S+e-\d\d", errors)


def test_a_model_of_mixed_ids_is_asked_by_their_text(tmp_path):
    """Ids of a file are text or numbers by their column, those of a model each what it is."""
    pairs = [(i, j) for i in range(8) for j in range(6) if (i + j) % 3]
    fitted = MatrixCompletion(rank=1).fit(pairs, [float(i * j % 5) for i, j in pairs])
    fitted.partial_fit([("zoe", 3), (2.5, 3)], [4.0, 1.0]).save(tmp_path / "m")
    expected = fitted.predict([(7, 3), ("zoe", 3), (2.5, 3), ("07", 3)])
    for header, name in (("user,item\n", "user"), ("", "column_1")):
        (tmp_path / "p.csv").write_text(f"{header}7,3\nzoe,3\n2.5,3\n07,3\n")
        found = json.loads(call("predict", tmp_path / "m", tmp_path / "p.csv", "-o", tmp_path / "out.csv", "--json"))
        assert (found["pairs"], found["with ids not seen in the fit"]) == (4, 1)
        frame = pl.read_csv(tmp_path / "out.csv", infer_schema_length=None)
        assert frame.columns[0] == name
        np.testing.assert_allclose(frame["prediction"].to_numpy(), expected)
    lists = json.loads(call("recommend", tmp_path / "m", "7", "zoe", "2.5", "-k", 2, "--json"))
    for text, row in (("7", 7), ("zoe", "zoe"), ("2.5", 2.5)):
        assert [item["column"] for item in lists[text]] == fitted.recommend(row, 2)[0].tolist()


def test_a_model_of_float_ids_is_asked_by_their_text(tmp_path):
    pairs = [(i / 2, j) for i in range(8) for j in range(6) if (i + j) % 3]
    MatrixCompletion(rank=1).fit(pairs, [float(int(2 * i) * j % 5) for i, j in pairs]).save(tmp_path / "m")
    assert set(json.loads(call("recommend", tmp_path / "m", "3.5", "9.25", "--json"))) == {"3.5", "9.25"}
    refused = CliRunner().invoke(app, ["complete", "recommend", str(tmp_path / "m"), "x"])
    assert str(refused.exception) == "row ids of this model are numbers, got 'x'"


@pytest.mark.parametrize(
    ("table", "given", "message"),
    [
        ("numbers", "1", None),
        ("numbers", "1.0", None),
        ("numbers", "01", "row '01' was not in the fit, '1' was: ids are written as the table had them"),
        ("numbers", "+1", r"row '\+1' was not in the fit, '1' was"),
        ("numbers", "1_0", "whole numbers, got '1_0'|of another type: got '1_0' .str."),
        ("numbers", "099", "whole numbers, got '099'|of another type: got '099' .str."),
        ("padded", "01", None),
        ("padded", "1", "row '1' was not in the fit, '01' was: ids are written as the table had them"),
        ("padded", "001", "row '001' was not in the fit, '01' was"),
        ("both", "1", None),
        ("both", "01", None),
    ],
)
def test_ids_with_zeros_before_them_mean_the_same_in_words_and_in_files(tmp_path, table, given, message):
    form = {"numbers": "{}", "padded": "{:02d}", "both": "{}"}[table]
    lines = [f"{form.format(i)},{j},{i * j % 5}" for i in range(1, 12) for j in range(6) if (i + j) % 3]
    lines += ["01,2,4"] if table == "both" else []
    (tmp_path / "r.csv").write_text("\n".join(["user,item,rating", *lines]))
    call("fit", tmp_path / "r.csv", "--rank", 1, "-o", tmp_path / "m")
    (tmp_path / "p.csv").write_text(f"user,item\n{given},3\n")
    for words in (["recommend", given, "-k", 6, "--include-seen"], ["predict", tmp_path / "p.csv", "-o", "-"]):
        done = CliRunner().invoke(app, ["complete", words[0], str(tmp_path / "m"), *map(str, words[1:]), "-q"])
        assert (done.exit_code == 0) is (message is None)
        assert message is None or re.search(message, str(done.exception))
    if message is None:
        fitted, row = MatrixCompletion.load(tmp_path / "m"), float(given) if table == "numbers" else given
        listed = json.loads(call("recommend", tmp_path / "m", given, "-k", 6, "--include-seen", "--json"))[given]
        [expected] = fitted.predict([(row, 3)])
        assert [each["prediction"] for each in listed if each["column"] == 3] == [pytest.approx(expected)]
        assert pl.read_csv(done.stdout_bytes)["prediction"].to_list() == [pytest.approx(expected)]


def test_some_ids_that_lost_their_zeros_are_said_and_predicted_as_strangers(tmp_path):
    lines = [f"{i:02d},{j},{i * j % 5}" for i in range(1, 12) for j in range(6) if (i + j) % 3]
    (tmp_path / "r.csv").write_text("\n".join(["user,item,rating", *lines]))
    call("fit", tmp_path / "r.csv", "--rank", 1, "-o", tmp_path / "m")
    (tmp_path / "p.csv").write_text("user,item\n11,3\n1,3\n2,3\n99,3\n")
    done = CliRunner().invoke(app, ["complete", "predict", str(tmp_path / "m"), str(tmp_path / "p.csv"), "-o", "-"])
    assert "p.csv: 2 row ids may have lost zeros, for '1' was not in the fit, '01' was" in done.stderr
    assert "with ids not seen in the fit 3" in done.stderr


def test_a_column_std_of_the_table_stays_unless_it_is_asked_for(model, tmp_path):
    (tmp_path / "pairs.csv").write_text("user,item,std\nu1,3,a\n")
    call("predict", model, tmp_path / "pairs.csv", "-o", tmp_path / "out.csv")
    assert pl.read_csv(tmp_path / "out.csv")["std"].to_list() == ["a"]


def test_recommend_says_when_a_row_is_a_stranger(model):
    shown = CliRunner().invoke(app, ["complete", "recommend", str(model), "nobody", "u1"])
    assert shown.stderr.strip() == "row nobody was not in the fit: these are the columns that do best on average"


def test_fit_says_what_to_do_next(ratings, tmp_path):
    shown = CliRunner().invoke(app, ["complete", "fit", str(ratings), "--rank", "1", "-o", str(tmp_path / "a model")])
    assert shown.stderr.strip() == f"next: fisherfold complete recommend '{tmp_path / 'a model'}' u0"


def test_evaluate_has_error_bars(ratings):
    found = json.loads(call("evaluate", ratings, "--rank", 1, "--folds", 4, "--json"))
    assert (found["folds"], found["rank"]) == (4, 1)
    assert 0.05 < found["rmse"]["mean"] < 0.4
    assert found["rmse"]["standard error"] > 0
    assert 0.6 < found["covered by 90 % intervals"]["mean"] <= 1
    assert "±" in call("evaluate", ratings, "--rank", 1, "--folds", 2, "--unpack-limit", "inf")
    point = json.loads(call("evaluate", ratings, "--rank", 1, "--folds", 2, "--inference", "point", "--json"))
    assert set(point) >= {"rmse", "mae"}


def test_evaluate_says_which_rank_every_fold_has_chosen(ratings):
    found = json.loads(call("evaluate", ratings, "--rank", "auto", "--folds", 2, "--json"))
    assert len(found["rank"]) == 2
    assert set(found["rank"]) <= {2, 5, 10, 20}


def test_evaluate_holds_out_pairs_not_lines(ratings, tmp_path):
    # every value in two parts
    head, *lines = ratings.read_text().splitlines()[:-1]
    cut = [line.rsplit(",", 1) for line in lines]
    parts = [f"{pair},{float(value) * share!r}" for share in (0.25, 0.75) for pair, value in cut]
    (tmp_path / "parts.csv").write_text("\n".join([head, *parts]))
    (tmp_path / "whole.csv").write_text("\n".join([head, *lines]))
    whole = json.loads(call("evaluate", tmp_path / "whole.csv", "--rank", 1, "--folds", 4, "--json"))
    options = ("--rank", 1, "--folds", 4, "--json", "--duplicates")
    parted = json.loads(call("evaluate", tmp_path / "parts.csv", *options, "sum"))
    assert (whole["merged"], parted["merged"]) == (0, len(lines))
    assert abs(parted["rmse"]["mean"] / whole["rmse"]["mean"] - 1) < 0.1
    # pure noise, each line twice: nothing can be known of a pair that is held out
    noise = np.random.default_rng(0).normal(size=(20, 20))
    twice = [f"{i},{j},{value}" for (i, j), value in np.ndenumerate(noise)] * 2
    (tmp_path / "twice.csv").write_text("\n".join(["user,item,value", *twice]))
    again = json.loads(call("evaluate", tmp_path / "twice.csv", *options, "mean"))
    assert again["rmse"]["mean"] > 0.95 * noise.std()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fit", "nothing.csv", "-o", "m"], "there is no file nothing.csv"),
        (["fit", "{ratings}", "--rank", "ten", "-o", "m"], "--rank must be a whole number of at least 1 or auto"),
        (["fit", "{ratings}", "--rank", "²", "-o", "m"], "--rank must be a whole number of at least 1 or auto"),
        (["fit", "{ratings}", "--rank", "99", "-o", "m"], "rank must be between 1 and min"),
        (["fit", "{ratings}", "--rank", "1", "--ridge", "-2", "-o", "m"], "ridge must be None or a finite number"),
        (["fit", "{ratings}", "-o", "{ratings}"], "--output must be a folder"),
        (["predict", "nothing", "{ratings}", "-o", "x.csv"], "there is no model folder nothing"),
        (["evaluate", "{ratings}", "--folds", "99999"], "--folds must be at most the number of ratings"),
        (["recommend", "nothing", "1"], "there is no model folder"),
    ],
)
def test_errors_are_one_sentence(ratings, tmp_path, monkeypatch, capsys, args, message):
    words = [word.format(ratings=ratings) for word in args]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fisherfold", "complete", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_python_dash_m():
    home = str(Path(fisherfold.__file__).parents[1])
    command = [sys.executable, "-m", "fisherfold", "complete", "recommend", "no[thing]", "1"]
    environment = {**os.environ, "PYTHONPATH": home, "COLUMNS": "200"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    error, hint = result.stderr.splitlines()
    assert error == "error: there is no model folder no[thing]"
    assert hint == "hint: 'fisherfold complete recommend --help' shows examples; --debug shows the trace"


def test_help_has_examples():
    for command in ("fit", "predict", "recommend", "evaluate"):
        assert f"fisherfold complete {command}" in call(command, "--help")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_misplaced_columns_of_pairs_are_refused(tmp_path, kind):
    ratings, pairs = tmp_path / f"ratings.{kind}", tmp_path / "pairs.csv"
    lines = pl.DataFrame([(k % 9, k % 7, k % 5) for k in range(60)], ["user", "item", "stars"], orient="row")
    lines.write_csv(ratings) if kind == "csv" else lines.write_parquet(ratings)
    call("fit", ratings, "--rank", 2, "-o", tmp_path / "model")
    predict = ("predict", tmp_path / "model", pairs, "-o", tmp_path / "out.csv")

    def predicted(*options):
        call(*predict, *options)
        return pl.read_csv(tmp_path / "out.csv")["prediction"].to_list()

    pairs.write_text("item,user\n3,4\n")
    refused = CliRunner().invoke(app, ["complete", *map(str, predict)])
    assert "the first columns are item, user, those of the fit were user, item" in str(refused.exception)
    named = predicted("--columns", "user,item")
    pl.DataFrame({"day": [4], "user": [4], "item": [3]}).write_csv(pairs)
    refused = CliRunner().invoke(app, ["complete", *map(str, predict)])
    assert "the first columns are day, user, those of the fit were user, item; put" in str(refused.exception)
    assert predicted("--columns", "user,item") == named
    # other names say nothing about the order
    pairs.write_text("reader,book\n4,3\n")
    assert predicted() == named


def test_predictions_are_what_the_name_of_their_file_says(tmp_path):
    lines = pl.DataFrame([(k % 9, k % 7, k % 5) for k in range(60)], ["user", "item", "stars"], orient="row")
    lines.write_csv(tmp_path / "ratings.csv")
    call("fit", tmp_path / "ratings.csv", "--rank", 2, "-o", tmp_path / "model")
    for name in ("out.csv", "out.csv.gz", "out.PARQUET"):
        call("predict", tmp_path / "model", tmp_path / "ratings.csv", "-o", tmp_path / name, "--std")
    assert gzip.decompress((tmp_path / "out.csv.gz").read_bytes()) == (tmp_path / "out.csv").read_bytes()
    found, expected = pl.read_parquet(tmp_path / "out.PARQUET"), pl.read_csv(tmp_path / "out.csv")
    assert found.columns == ["user", "item", "stars", "std", "prediction"]
    for name in ("std", "prediction"):
        assert found[name].dtype.is_float()
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)
    words = ["predict", tmp_path / "model", tmp_path / "ratings.csv", "-o", tmp_path / "out.CSV.ZIP"]
    refused = CliRunner().invoke(app, ["complete", *map(str, words)])
    assert f"as x.csv, x.csv.gz or x.parquet, got {tmp_path / 'out.CSV.ZIP'}" in str(refused.exception)
    assert not (tmp_path / "out.CSV.ZIP").exists()


def test_a_column_that_csv_cannot_hold_is_named(tmp_path):
    lines = pl.DataFrame([(k % 9, k % 7, k % 5) for k in range(60)], ["user", "item", "stars"], orient="row")
    lines.write_csv(tmp_path / "ratings.csv")
    call("fit", tmp_path / "ratings.csv", "--rank", 2, "-o", tmp_path / "model")
    for kind, value in {"List": ["drama"], "Struct": {"year": 1}, "Binary": b"x", "Duration": timedelta(1)}.items():
        pl.DataFrame({"user": [4], "item": [3], "more": [value]}).write_parquet(tmp_path / "pairs.parquet")
        words = ["predict", tmp_path / "model", tmp_path / "pairs.parquet", "-o", tmp_path / "out.csv"]
        refused = CliRunner().invoke(app, ["complete", *map(str, words)])
        assert isinstance(refused.exception, ValueError)
        assert f"pairs.parquet: column 'more' holds {kind}" in str(refused.exception)
        assert not (tmp_path / "out.csv").exists()


def test_the_next_command_can_be_typed_with_ids_that_look_like_options(tmp_path, monkeypatch):
    (tmp_path / "ratings.csv").write_text("user,item,rating\n-5,1,3\n-5,2,4\n-7,1,2\n-7,3,5\n")
    monkeypatch.chdir(tmp_path)
    fitted = CliRunner().invoke(app, ["complete", "fit", "ratings.csv", "--rank", "1", "-o", "-model"])
    assert fitted.exit_code == 0
    words = shlex.split(re.search("next: fisherfold (.*)", fitted.stderr)[1])
    assert words == ["complete", "recommend", "--", "-model", "-7"]
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_names_of_files_need_not_be_text(ratings, tmp_path, kind):
    path = tmp_path / f"caf\udce9.{kind}"
    if kind == "csv":
        path.write_bytes(ratings.read_bytes())
    else:
        buffer = io.BytesIO()
        pl.read_csv(ratings, infer_schema=False)[:-1].with_columns(pl.col("rating").cast(float)).write_parquet(buffer)
        path.write_bytes(buffer.getvalue())
    assert json.loads(call("fit", path, "--rank", 1, "-o", tmp_path / "m", "--json"))["file"] == str(path)
    assert f"caf?.{kind}" in call("fit", path, "--rank", 1, "-o", tmp_path / "m")


@pytest.mark.skipif(os.name != "posix", reason="pipes with names")
def test_pipes_and_folders_are_called_what_they_are(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "device or a pipe"), (tmp_path, "folder")):
        result = CliRunner().invoke(app, ["complete", "fit", str(path), "-o", str(tmp_path / "m")])
        assert str(result.exception) == f"{path} is a {what}, a file is expected"


def test_predictions_go_to_standard_output_for_pipes(model, ratings, tmp_path):
    call("predict", model, ratings, "--std", "-o", tmp_path / "out.csv")
    words = ["complete", "predict", str(model), str(ratings), "--std", "-o", "-"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0
    assert found.stdout_bytes == (tmp_path / "out.csv").read_bytes()
    assert "predicted: " in found.stderr
    assert "with ids not seen in the fit 0" in found.stderr
    refused = CliRunner().invoke(app, [*words, "--json"])
    assert refused.exit_code != 0
    assert "--json and --output - both write to standard output: give a file" in str(refused.exception)
    assert not Path("-").exists()


def test_a_file_with_ids_in_its_index_is_fitted_and_predicted_as_its_columns_are(ratings, tmp_path):
    frame = pl.read_csv(ratings, null_values="bad").drop_nulls().to_pandas()
    frame.set_index(["user", "item"]).to_parquet(tmp_path / "a.parquet")
    frame.to_csv(tmp_path / "a.csv", index=False)
    for kind in ("parquet", "csv"):
        call("fit", tmp_path / f"a.{kind}", "--rank", 1, "-o", tmp_path / kind)
        call("predict", tmp_path / kind, tmp_path / f"a.{kind}", "-o", tmp_path / f"{kind}.out")
    indexed, plain = (MatrixCompletion.load(tmp_path / kind) for kind in ("parquet", "csv"))
    assert indexed.feature_names_in_.tolist() == ["user", "item"]
    assert indexed.model_.row_ids.labels.tolist() == plain.model_.row_ids.labels.tolist()
    found, expected = (pl.read_csv(tmp_path / f"{kind}.out")["prediction"] for kind in ("parquet", "csv"))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_columns_that_are_taken_are_said_where_there_are_more_than_entries_have(ratings, tmp_path):
    frame = pl.read_csv(ratings, ignore_errors=True).drop_nulls()
    frame = frame.with_columns(shop=pl.lit("north"), timestamp=pl.lit(7), price=pl.lit(2.5))
    frame.write_csv(tmp_path / "more.csv")
    said = "row ids are from column user, column ids from item, values from rating; 2 columns are left alone, from shop"
    for order in (["fit", tmp_path / "more.csv", "-o", tmp_path / "m"], ["evaluate", tmp_path / "more.csv"]):
        result = CliRunner().invoke(app, ["complete", *map(str, order), "--rank", "1", "--json"])
        assert said in result.stderr, result.output
        assert json.loads(result.stdout)["columns read"] == "user, item, rating"
        result = CliRunner().invoke(app, ["complete", *map(str, order), "-r", "1", "--columns", "user,item,rating"])
        assert (result.exit_code, "row ids are" in result.stderr) == (0, False)
    frame.select("user", "item", "rating", "timestamp").write_csv(tmp_path / "timed.csv")
    result = CliRunner().invoke(app, ["complete", "evaluate", str(tmp_path / "timed.csv"), "--rank", "1"])
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_matrix_is_refused_with_what_to_do(tmp_path, monkeypatch, capsys):
    values = np.random.default_rng(0).normal(size=(20, 60))
    pl.from_numpy(values).write_csv(tmp_path / "wide.csv")
    monkeypatch.setattr(
        sys, "argv", ["fisherfold", "complete", "fit", str(tmp_path / "wide.csv"), "-r", "1", "-o", str(tmp_path / "m")]
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "looks like a matrix" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
