"""The subspace commands on files: fit, predict, evaluate, and errors that name file, column and line."""

from __future__ import annotations

import json
import re

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from fisherfold.cli import app
from fisherfold.completion.rating_model import MatrixCompletion
from fisherfold.subspace.regressor import SubspaceRegressor


def run(*arguments):
    return CliRunner().invoke(app, ["subspace", *map(str, arguments)])


def answer(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


@pytest.fixture
def table(tmp_path):
    g = np.random.default_rng(0)
    school = np.repeat([f"s{i}" for i in range(10)], 20)
    X = g.normal(size=(200, 3))
    slope = np.repeat(g.normal(size=10), 20)
    y = X[:, 0] * slope + X[:, 1] + 0.1 * g.normal(size=200)
    frame = pl.DataFrame(
        {"school": school, "age": X[:, 0], "size": X[:, 1], "noise": X[:, 2], "y": y}
    )
    order = g.permutation(200)
    train, test = frame[order[:150]], frame[order[150:]]
    train.write_csv(tmp_path / "train.csv")
    test.write_csv(tmp_path / "test.csv")
    return tmp_path, train, test


def test_the_index_of_a_data_frame_is_no_feature(table):
    folder, train, _ = table
    frame, columns = (
        train.to_pandas().sample(frac=0.9, random_state=0),
        ("--target", "y", "--task", "school"),
    )
    frame.to_csv(folder / "index.csv")
    frame.to_parquet(folder / "index.parquet")
    for name, column in (("index.csv", "column_1"), ("index.parquet", "__index_level_0__")):
        result = run("fit", folder / name, *columns, "-o", folder / "model")
        assert f"the column {column} is the index of a data frame" in str(result.exception)
        named = answer(
            "fit", folder / name, *columns, "--features", f"{column},age", "-o", folder / "model"
        )
        assert named["features"] == 2
    numbered = train.drop("school").rename({"age": "column_1", "size": "column_2"})
    numbered.write_csv(folder / "numbered.csv")
    assert (
        answer("fit", folder / "numbered.csv", "--target", "y", "-o", folder / "model")["features"]
        == 3
    )


def test_fit_predict_evaluate(table):
    folder, train, test = table
    columns = ("--target", "y", "--task", "school")
    facts = answer("fit", folder / "train.csv", *columns, "--rank", 2, "-o", folder / "model")
    assert facts["tasks"] == 10
    assert facts["features"] == 3
    assert facts["training R²"] > 0.95
    answer("predict", folder / "model", folder / "test.csv", "-o", folder / "out.csv", "--std")
    out = pl.read_csv(folder / "out.csv")
    assert out.columns == [*test.columns, "y_predicted", "y_std"]
    names = ["age", "size", "noise"]
    model = SubspaceRegressor(rank=2, random_state=0).fit(
        train[names], train["y"], task=train["school"].to_numpy()
    )
    values, deviations = model.predict(test[names], task=test["school"].to_numpy(), return_std=True)
    np.testing.assert_allclose(out["y_predicted"].to_numpy(), values, rtol=1e-9)
    np.testing.assert_allclose(out["y_std"].to_numpy(), deviations, rtol=1e-9)
    errors = answer("evaluate", folder / "model", folder / "test.csv")
    assert errors["rmse"] == pytest.approx(
        float(np.sqrt(np.mean((values - test["y"].to_numpy()) ** 2)))
    )
    nmse = model.nmse(test[names], test["y"].to_numpy(), task=test["school"].to_numpy())
    assert errors["nmse"] == pytest.approx(nmse)
    printed = run("predict", folder / "model", folder / "test.csv", "-o", "-", "--decimal", ".")
    np.testing.assert_allclose(
        pl.read_csv(printed.stdout_bytes)["y_predicted"].to_numpy(), values, rtol=1e-9
    )
    run(
        "predict",
        folder / "model",
        folder / "test.csv",
        "-o",
        folder / "out.parquet",
        "--decimal",
        ".",
    )
    np.testing.assert_allclose(
        pl.read_parquet(folder / "out.parquet")["y_predicted"].to_numpy(), values, rtol=1e-9
    )
    refused = run("predict", folder / "model", folder / "test.csv", "-o", folder / "out.xlsx")
    assert "--output is written as CSV or Parquet" in str(refused.exception)


def test_decimal_commas(table):
    folder, train, test = table
    for name, frame in (("train", train), ("test", test)):
        text = frame.with_columns(
            pl.exclude("school").cast(pl.String).str.replace(".", ",", literal=True)
        )
        text.write_csv(folder / f"{name}_commas.csv", separator=";")
    columns, found = ("--target", "y", "--task", "school"), []
    for kind, mark in (("", "."), ("_commas", ",")):
        options = ("--decimal", mark)
        answer(
            "fit",
            folder / f"train{kind}.csv",
            *columns,
            *options,
            "--rank",
            2,
            "-o",
            folder / "model",
        )
        found.append(answer("evaluate", folder / "model", folder / f"test{kind}.csv", *options))
        answer(
            "predict",
            folder / "model",
            folder / f"test{kind}.csv",
            *options,
            "-o",
            folder / f"out{kind}.csv",
        )
    assert found[0] == found[1]
    assert (
        ","
        in pl.read_csv(folder / "out_commas.csv", separator=";", infer_schema=False)["y_predicted"][
            0
        ]
    )
    mixed = run("evaluate", folder / "model", folder / "test_commas.csv")
    assert re.search(
        r"column 'age' is '-?\d,\d+', a number is expected in data line 1", str(mixed.exception)
    )


def test_tables_for_people(table):
    folder, _, _ = table
    fitted = run(
        "fit", folder / "train.csv", "--target", "y", "--task", "school", "-o", folder / "model"
    )
    assert fitted.exit_code == 0
    assert "tasks" in fitted.stdout
    shown = run("evaluate", folder / "model", folder / "test.csv")
    assert "nmse" in shown.stdout


def test_classes(table):
    folder, train, test = table
    for name, frame in (("ctrain.csv", train), ("ctest.csv", test)):
        label = (
            pl.when(pl.col("age") > 0)
            .then(pl.lit("tall"))
            .otherwise(pl.lit("short"))
            .alias("class")
        )
        frame.with_columns(label).drop("y").write_csv(folder / name)
    facts = answer(
        "fit",
        folder / "ctrain.csv",
        "--target",
        "class",
        "--task",
        "school",
        "--classify",
        "-o",
        folder / "model",
    )
    assert facts["training accuracy"] > 0.9
    assert answer("evaluate", folder / "model", folder / "ctest.csv")["accuracy"] > 0.85
    answer("predict", folder / "model", folder / "ctest.csv", "-o", folder / "out.csv")
    assert set(pl.read_csv(folder / "out.csv")["class_predicted"]) == {"tall", "short"}


def test_tasks_and_classes_are_known_by_their_text(table):
    """A column of 1, 2 and 3A is text; what is left of it in another file, 1 and 2, are numbers."""
    folder, train, _ = table
    named = pl.col("school").replace_strict(
        {f"s{i}": "3A" if i > 1 else str(i + 1) for i in range(10)}
    )
    label = pl.when(pl.col("age") > 0).then(pl.lit("1")).otherwise(pl.lit("none")).alias("class")
    train = train.with_columns(named, label)
    train.write_csv(folder / "all.csv")
    some = train.filter((pl.col("school") != "3A") & (pl.col("class") == "1"))
    some.write_csv(folder / "some.csv")
    columns = ("--task", "school", "--features", "age,size", "-o", folder / "model")
    answer("fit", folder / "all.csv", "--target", "y", *columns)
    answer(
        "predict",
        folder / "model",
        folder / "some.csv",
        "-o",
        folder / "out.csv",
        "--unseen",
        "mean",
    )
    model = SubspaceRegressor(random_state=0).fit(
        train[["age", "size"]], train["y"], task=train["school"].to_list()
    )
    expected = model.predict(some[["age", "size"]], task=some["school"].to_list())
    np.testing.assert_allclose(
        pl.read_csv(folder / "out.csv")["y_predicted"].to_numpy(), expected, rtol=1e-9
    )
    assert answer("evaluate", folder / "model", folder / "some.csv")["tasks"] == 2
    answer("fit", folder / "all.csv", "--target", "class", "--classify", *columns)
    assert answer("evaluate", folder / "model", folder / "some.csv")["accuracy"] > 0.8


def test_features_can_be_named_and_tasks_left_out(table):
    folder, train, _ = table
    facts = answer(
        "fit",
        folder / "train.csv",
        "--target",
        "y",
        "--features",
        "age, size",
        "-o",
        folder / "model",
    )
    assert facts["features"] == 2
    assert facts["tasks"] == 1
    assert answer("evaluate", folder / "model", folder / "train.csv")["rows"] == len(train)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--target", "z", "--task", "school"],
            "--target z: there is no such column; the columns are school, age",
        ),
        (["--target", "y", "--task", "town"], "--task town: there is no such column"),
        (
            ["--target", "y", "--features", "age,weight"],
            "--features weight: there is no such column",
        ),
        (
            ["--target", "y"],
            "column 'school' is 's.', a number is expected in data line 1; does it name the tasks",
        ),
        (
            ["--target", "school", "--task", "y"],
            "column 'school' is 's.', a number is .*fit with --classify",
        ),
        (
            ["--target", "y", "--task", "school", "--rank", "9"],
            "rank must be an integer from 1 to 4",
        ),
        (
            ["--target", "y", "--classify", "--inference", "point"],
            "--inference is for regressions, got 'point'",
        ),
        (["--target", "y", "--task", "y"], "--target and --task must be two columns, both are y"),
        (
            ["--target", "y", "--features", "age,y"],
            "name each column once, and not the target, got age, y",
        ),
        (
            ["--target", "y", "--features", "age,age"],
            "name each column once, and not the target, got age, age",
        ),
    ],
)
def test_bad_options_are_named(table, options, message):
    folder, _, _ = table
    result = run("fit", folder / "train.csv", "-o", folder / "model", *options)
    assert isinstance(result.exception, ValueError)
    assert re.search(message, str(result.exception)), result.exception


def test_bad_cells_are_named(table):
    folder, train, _ = table
    lines = train.write_csv().splitlines()
    cells = lines[3].split(",")

    def refused(new, message):
        (folder / "bad.csv").write_text("\n".join([*lines[:3], ",".join(new), *lines[4:]]))
        result = run(
            "fit", folder / "bad.csv", "--target", "y", "--task", "school", "-o", folder / "model"
        )
        assert isinstance(result.exception, ValueError)
        assert message in str(result.exception)

    refused(
        [cells[0], "blue", *cells[2:]],
        "column 'age' is 'blue', a number is expected in data line 3",
    )
    refused([cells[0], "", *cells[2:]], "column 'age' is missing in data line 3")
    refused(["", *cells[1:]], "the id in column 'school' is missing in data line 3")
    refused([*cells[:4], "inf"], "column 'y' is 'inf', a number is expected in data line 3")


def test_unseen_tasks_and_folders_that_are_no_models(table):
    folder, _, test = table
    answer("fit", folder / "train.csv", "--target", "y", "--task", "school", "-o", folder / "model")
    test.with_columns(school=pl.lit("elsewhere")).write_csv(folder / "new.csv")
    result = run("predict", folder / "model", folder / "new.csv", "-o", folder / "out.csv")
    assert "1 task(s) not seen in fit: 'elsewhere'" in str(result.exception)
    answer(
        "predict",
        folder / "model",
        folder / "new.csv",
        "-o",
        folder / "out.csv",
        "--unseen",
        "mean",
    )
    test.drop("age").write_csv(folder / "narrow.csv")
    result = run("predict", folder / "model", folder / "narrow.csv", "-o", folder / "out.csv")
    assert "the columns age are missing" in str(result.exception)
    result = run("evaluate", folder / "none", folder / "test.csv")
    assert isinstance(result.exception, FileNotFoundError)
    (folder / "empty").mkdir()
    assert "there is no model in the folder" in str(
        run("evaluate", folder / "empty", folder / "test.csv").exception
    )
    SubspaceRegressor(1).fit([[0.0], [1.0], [2.0]], [0.0, 1.0, 2.5]).save(folder / "own")
    assert "does not name its columns" in str(
        run("evaluate", folder / "own", folder / "test.csv").exception
    )
    result = run("fit", folder / "none.csv", "--target", "y", "-o", folder / "model")
    assert "there is no file" in str(result.exception)


def test_a_model_of_another_kind_is_not_replaced(table, monkeypatch):
    folder = table[0]
    columns = ("--target", "y", "--task", "school")
    (folder / "ratings.csv").write_text("a,x,1\na,y,2\nb,x,3\nb,y,5\n")
    answer("fit", folder / "train.csv", *columns, "-o", folder / "tasks")
    answer("fit", folder / "train.csv", *columns, "-o", folder / "tasks")  # its own kind is
    MatrixCompletion(1).fit(np.eye(3), matrix=True).save(folder / "ratings")
    before = {path: path.read_bytes() for path in folder.rglob("model.*")}
    own, other = SubspaceRegressor.load(folder / "tasks"), MatrixCompletion.load(folder / "ratings")
    monkeypatch.setattr(SubspaceRegressor, "fit", None)
    monkeypatch.setattr(MatrixCompletion, "fit", None)
    for held, model in (("tasks", other), ("ratings", own)):
        command = "subspace" if model is own else "complete"
        options = (
            (folder / "train.csv", *columns) if command == "subspace" else (folder / "ratings.csv",)
        )
        result = CliRunner().invoke(
            app, [command, "fit", *map(str, options), "-o", str(folder / held)]
        )
        kinds = {"tasks": "subspace", "ratings": "completion"}
        assert f"it holds a {kinds[held]} model" in str(result.exception)
        with pytest.raises(FileExistsError, match=f"holds a {kinds[held]} model"):
            model.save(folder / held)
    assert {path: path.read_bytes() for path in folder.rglob("model.*")} == before


def test_a_file_for_a_folder_and_a_table_without_rows_are_told_at_once(table, monkeypatch):
    folder = table[0]
    columns = ("--target", "y", "--task", "school")
    (folder / "file").write_text("here")
    (folder / "empty.csv").write_text("school,age,size,noise,y\n")
    answer("fit", folder / "train.csv", *columns, "-o", folder / "model")
    monkeypatch.setattr(SubspaceRegressor, "fit", None)
    refused = run("fit", folder / "train.csv", *columns, "-o", folder / "file")
    assert "--output must be a folder" in str(refused.exception)
    for arguments in (
        ("fit", folder / "empty.csv", *columns, "-o", folder / "other"),
        ("predict", folder / "model", folder / "empty.csv", "-o", folder / "out.csv"),
    ):
        assert "has no lines" in str(run(*arguments).exception)


def test_new_tasks_are_evaluated_if_asked_for(table):
    folder, _, test = table
    answer("fit", folder / "train.csv", "--target", "y", "--task", "school", "-o", folder / "model")
    moved = pl.concat([test, test.with_columns(pl.col("school") + "x")])
    moved.write_csv(folder / "moved.csv")
    refused = run("evaluate", folder / "model", folder / "moved.csv")
    assert "--unseen mean" in str(refused.exception)
    errors = answer("evaluate", folder / "model", folder / "moved.csv", "--unseen", "mean")
    known = answer("evaluate", folder / "model", folder / "test.csv")
    new = test.with_columns(pl.col("school") + "x")
    new.write_csv(folder / "new.csv")
    alone = answer("evaluate", folder / "model", folder / "new.csv", "--unseen", "mean")
    # every task counts for itself, seen or not
    assert errors["nmse"] == pytest.approx((known["nmse"] + alone["nmse"]) / 2)
    assert errors["rmse"] ** 2 == pytest.approx((known["rmse"] ** 2 + alone["rmse"] ** 2) / 2)


def test_classes_of_another_table_are_named(table):
    folder, train, test = table
    for name, frame, high in (("train", train, "yes"), ("test", test, "perhaps")):
        label = pl.when(pl.col("y") > 0).then(pl.lit(high)).otherwise(pl.lit("no"))
        frame.with_columns(label.alias("y")).write_csv(folder / f"{name}.csv")
    answer(
        "fit",
        folder / "train.csv",
        "--target",
        "y",
        "--task",
        "school",
        "--classify",
        "-o",
        folder / "model",
    )
    refused = run("evaluate", folder / "model", folder / "test.csv")
    assert "column 'y' holds perhaps; the classes are no, yes" in str(refused.exception)


def test_under_torchrun_the_command_says_what_it_read_and_learnt(table, monkeypatch):
    folder, train, _ = table
    text = (folder / "train.csv").read_text()
    (folder / "long.csv").write_text(text + "s1,1,2,3,4,5,6\n" * 2)
    given = ["fit", folder / "long.csv", "--target", "y", "--task", "school", "--skip-bad-lines"]
    alone = answer(*given, "-o", folder / "alone")
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    shared = answer(*given, "-o", folder / "shared")
    assert shared.pop("processes") == 1
    assert alone["lines"] == len(train) + 2
    assert sum(alone["rejected"].values()) == 2
    assert set(alone) - set(shared) == {"training R²"}
    for name in ("lines", "rejected", "rows", "tasks", "features", "rank"):
        assert shared[name] == alone[name]
