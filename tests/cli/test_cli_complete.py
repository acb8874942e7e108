"""fisherfold complete: fit, predict, recommend, similar, update, evaluate, through files."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from fisherfold.cli import app, main
from fisherfold.completion import MatrixCompletion


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


def test_fit_reports_what_was_read_and_how_it_fits(ratings, tmp_path):
    done = CliRunner().invoke(app, ["complete", "fit", str(ratings), "-r", "1", "-o", str(tmp_path / "a model")])
    assert "covered by 90 % intervals" in done.stdout
    assert "'evaluate' tells held-out ones" in done.stderr
    assert f"next: fisherfold complete recommend '{tmp_path / 'a model'}' u" in done.stderr
    found = json.loads(call("fit", ratings, "--rank", 1, "-o", tmp_path / "m", "--json"))
    assert found["lines"] == found["ratings"] + 1
    assert found["rejected"] == {"value is not a number": 1}
    assert (found["users"], found["items"], found["rank"]) == (30, 20, 1)
    assert 0.05 < found["fit error (RMSE)"] < 0.15
    assert 0.85 < found["covered by 90 % intervals"] <= 1


def test_fit_is_the_estimator(ratings, model):
    frame = pl.read_csv(ratings, infer_schema=False)[:-1].with_columns(
        pl.col("rating").cast(pl.Float64), pl.col("item").cast(pl.Int64)
    )
    direct, again = MatrixCompletion(rank=1, random_state=3).fit(frame), MatrixCompletion.load(model)
    np.testing.assert_allclose(again.predict(frame), direct.predict(frame), atol=1e-6)
    assert again.recommend("u3", 2).columns == ["user", "item", "prediction"]


def test_rank_auto(ratings, tmp_path):
    found = json.loads(call("fit", ratings, "--rank", "auto", "-o", tmp_path / "m", "--json", "--max-iter", 5))
    assert set(found["cv_rmse"]) == {"2", "5", "10", "20"}
    assert str(found["rank"]) == min(found["cv_rmse"], key=found["cv_rmse"].get)


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
    assert pl.read_csv(io.StringIO(commas), separator=";", decimal_comma=True)["prediction"].to_list() == pytest.approx(
        expected.tolist()
    )


def test_predictions_go_through_pipes_whole(model, ratings):
    """Under PYTHONUNBUFFERED a slow reader took a part, and the rest was lost."""
    lines = "".join(f"u{k % 30},{k % 20}\n" for k in range(60_000))
    words = [sys.executable, "-m", "fisherfold", "complete", "predict", str(model), "-", "--no-header", "-q"]
    done = subprocess.run(
        words, input=lines.encode(), capture_output=True, check=True, timeout=300, env=None,
    )  # fmt: skip
    assert done.stdout.count(b"\n") == 60_001


def test_recommend_for_some_for_all_and_for_new_rows(model, tmp_path):
    estimator = MatrixCompletion.load(model)
    found = json.loads(call("recommend", model, "u1", "u2", "-k", 3, "--json"))["recommendations"]
    assert found == estimator.recommend(["u1", "u2"], 3).to_dicts()
    call("recommend", model, "--all", "-k", 2, "-o", tmp_path / "lists.parquet")
    assert pl.read_parquet(tmp_path / "lists.parquet").equals(estimator.recommend(k=2))
    (tmp_path / "new.csv").write_text("user,item,rating\nzoe,1,4.5\nzoe,2,1.5\ntom,3,2\n")
    new = json.loads(call("recommend", model, "--rated", tmp_path / "new.csv", "-k", 4, "--json"))["recommendations"]
    assert [line["user"] for line in new] == ["zoe"] * 4 + ["tom"] * 4
    (tmp_path / "films.csv").write_text("item\n3\n4\n")
    few = call("recommend", model, "u1", "--candidates", tmp_path / "films.csv", "--include-seen", "-o", "-", "-q")
    assert sorted(pl.read_csv(io.StringIO(few))["item"]) == [3, 4]
    assert "Recommendations" in call("recommend", model, "u1", "--by", "upper")
    stranger = CliRunner().invoke(app, ["complete", "recommend", str(model), "nobody", "u1"])
    assert "nobody: not in the fit; this is what does best on average" in stranger.stderr
    for words in (["--all", "u1"], []):
        wrong = CliRunner().invoke(app, ["complete", "recommend", str(model), *words])
        assert "give row ids, or --all, or --rated FILE: one of the three" in str(wrong.exception)


def test_similar(model):
    found = json.loads(call("similar", model, "3", "-k", 2, "--json"))["similar"]
    assert found == MatrixCompletion.load(model).similar(["3"], 2).to_dicts()
    assert "similarity" in call("similar", model, "u1", "--rows", "-k", 2)


def test_update_adds_ratings(model, tmp_path):
    (tmp_path / "new.csv").write_text("user,item,rating\nzoe,1,4.5\nu1,99,1.5\n")
    found = json.loads(call("update", model, tmp_path / "new.csv", "-o", tmp_path / "m", "--json"))
    assert (found["users"], found["items"]) == (31, 21)
    expected = MatrixCompletion.load(model).partial_fit([("zoe", 1), ("u1", 99)], [4.5, 1.5])
    asked = [("zoe", 3), ("u2", 99)]
    np.testing.assert_array_equal(MatrixCompletion.load(tmp_path / "m").predict(asked), expected.predict(asked))


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
    assert {"rmse", "ndcg@5", "recall@5", "mrr@5"} <= set(late)
    last = json.loads(call("evaluate", ratings, *words, "last"))
    assert last["held out"] == 30
    lines = ratings.read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join(lines[:300]))
    (tmp_path / "test.csv").write_text("\n".join([lines[0], *lines[300:-1]]))
    one = json.loads(call("evaluate", tmp_path / "train.csv", "-r", 1, "--test", tmp_path / "test.csv", "--json"))
    call("fit", tmp_path / "train.csv", "-r", 1, "-o", tmp_path / "m")
    two = json.loads(call("evaluate", tmp_path / "test.csv", "--model", tmp_path / "m", "--json"))
    assert one["rmse"] == two["rmse"]


def test_evaluate_holds_out_pairs_not_lines(tmp_path):
    """Pure noise, each line twice: nothing can be known of a pair that is held out."""
    noise = np.random.default_rng(0).normal(size=(20, 20))
    twice = [f"{i},{j},{value}" for (i, j), value in np.ndenumerate(noise)] * 2
    (tmp_path / "twice.csv").write_text("\n".join(["user,item,value", *twice]))
    found = json.loads(call("evaluate", tmp_path / "twice.csv", "--rank", 1, "--folds", 4, "--json"))
    assert found["merged"] == 400
    assert found["rmse"]["mean"] > 0.95 * noise.std()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fit", "{r}", "--rank", "many", "-o", "m"], "--rank must be a whole number of at least 1 or auto"),
        (["fit", "{r}", "-o", "{r}"], "--output must be a folder"),
        (["fit", "{r}", "-c", "user,item,stars", "-o", "m"], "has no column 'stars'; its columns are"),
        (["fit", "{r}", "--checkpoint", "c", "-o", "m"], "--checkpoint is for fits over several processes"),
        (["fit", "absent.csv", "-o", "m"], "absent.csv"),
        (["predict", "absent", "{r}", "-o", "o.csv"], "there is no model folder absent"),
        (["predict", "{m}", "{r}", "-o", "o.xlsx"], "is written as CSV or Parquet"),
        (["predict", "{m}", "{r}", "-o", "-", "--json"], "--json and --output - both write to standard output"),
        (["recommend", "{m}", "u1", "--by", "luck"], "'luck' is not one of 'mean', 'upper', 'sample'"),
        (["similar", "{m}", "999"], "1 column id was not seen in fit, the first is '999'"),
        (["evaluate", "{r}", "--split", "time"], "--split time needs --time-column"),
        (["evaluate", "{r}", "--split", "odd"], "'odd' is not one of 'folds', 'time', 'last', 'random'"),
        (["evaluate", "{r}", "--folds", "1000"], "--folds must be at most the number of ratings"),
    ],
)
def test_errors_are_one_sentence(ratings, model, tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fisherfold", "complete", *(a.format(r=ratings, m=model) for a in args)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code != 0
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []


def test_ids_are_no_markup_and_predictions_have_any_size(tmp_path):
    lines = [f"u[bold]{i},[/b]{j},{(1 + i * j % 5) * 1e-9}" for i in range(6) for j in range(5) if (i + j) % 3]
    (tmp_path / "r[red].csv").write_text("\n".join(["user,item,rating", *lines]))
    assert "Completed r[red].csv" in call("fit", tmp_path / "r[red].csv", "-r", 1, "-o", tmp_path / "m")
    shown = call("recommend", tmp_path / "m", "u[bold]3", "-k", 1)
    assert re.search(r"u\[bold\]3 .* \[/b\]\d .* \S+e-09 ", shown)
