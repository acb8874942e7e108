"""The reproduce commands: table, JSON, files and errors."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from fisherfold.cli import app
from fisherfold.cli.reproduce import _table, _under_way
from fisherfold.cli.voice import Voice
from fisherfold.reproduce import completion, figures
from fisherfold.reproduce.figures import FigureResult, Run
from fisherfold.reproduce.plans import FigurePlan
from fisherfold.reproduce.reproduce import Options


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with a school set of 8 small tasks."""
    g = np.random.default_rng(0)
    x = g.integers(0, 3, (96, 28)).astype(np.uint8)
    y = g.integers(1, 70, 96).astype(np.uint8)
    splits = {"train_idx": np.zeros((10, 2), np.uint16), "train_fold": np.ones((10, 2), np.uint8)}
    np.savez(tmp_path / "school.npz", x=x, y=y, task_start=np.arange(0, 96, 12, dtype=np.int32), **splits)
    monkeypatch.setenv("FISHERFOLD_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_picture(monkeypatch):
    """An empty one: nine panels take longer than the runs, and one test of the command that draws them will do."""
    monkeypatch.setattr(figures, "draw", lambda _: Figure(figsize=(1, 1)))


def test_json_is_the_summary_and_nothing_else(folder, tmp_path):
    output = tmp_path / "out"
    run = CliRunner().invoke(app, ["reproduce", "school", "--quick", "--json", "--output", str(output)])
    assert run.exit_code == 0, run.output
    summary = json.loads(run.stdout)
    assert [row["method"] for row in summary["methods"]] == ["RNGD", "RSGD", "RSVRG", "RCG"]
    assert summary["seeds"] == [0, 1]
    for kind in ("png", "csv", "json"):
        assert (output / "quick" / "school" / f"school.{kind}").is_file()
    assert len(summary["search"]["RSGD"]) > 3


@pytest.mark.usefixtures("folder", "no_picture")
def test_the_table_names_the_methods_and_says_who_is_lowest(tmp_path):
    run = CliRunner().invoke(app, ["reproduce", "school", "--quick", "--seeds", "1", "-o", str(tmp_path / "out")])
    assert run.exit_code == 0, run.output
    for word in ("RNGD", "RSGD", "RSVRG", "RCG"):
        assert word in run.stdout
    assert "is lowest in" in run.stdout
    assert "final figures of one seed" in " ".join(run.stdout.split())
    assert "±" not in run.stdout


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_of_a_figure_is_whole_in_every_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    steps = {"RNGD": 0.05, "RNGD row-block (ours)": None, "MatrixCompletion (our default)": None}
    last = {"held_out": 108.3599, "refit": 0.6163, "train": 0.6547, "loss": 1.0}
    last |= {"seconds": 1234.56, "paper_grads": 36.0, "true_grads": 157.0}
    runs = {name: [Run(name, step, seed, "max_iter", [last]) for seed in (0, 1)] for name, step in steps.items()}
    plan = FigurePlan("jester", "Jester-1, rank 5", None, (), 36, completion.METRICS)
    Voice().answer({}, _table(FigureResult(plan, (0, 1), {}, runs)))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    words = re.split(r"[\s│┃]+", shown)
    assert words.count("157") == words.count("36") == words.count("108.3599") == 3
    assert {"1234.56", "0.6163", "0.6547", "MatrixCompletion", "row-block", "#grad/N", "(true)"} <= set(words)


def test_missing_data_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("FISHERFOLD_DATA", str(tmp_path))
    run = CliRunner().invoke(app, ["reproduce", "sarcos", "--output", str(tmp_path / "out")])
    assert isinstance(run.exception, FileNotFoundError)
    assert "no file sarcos_7x2000.npz" in str(run.exception)


def test_theory_prints_findings_with_verdicts(tmp_path):
    options = ["reproduce", "theory", "--quick", "--seeds", "1", "--part", "invariance", "--output", str(tmp_path)]
    run = CliRunner().invoke(app, [*options, "--json"])
    assert run.exit_code == 0, run.output
    results = json.loads(run.stdout)["results"]
    assert {r["verdict"] for r in results} == {"holds", "fails"}
    assert (tmp_path / "quick" / "theory" / "invariance.png").is_file()
    run = CliRunner().invoke(app, options)
    assert run.exit_code == 0, run.output
    assert "RFIM = FIM" in run.stdout
    assert "only their sum is right" in " ".join(run.stdout.split())


def test_theory_refuses_an_unknown_part(tmp_path):
    run = CliRunner().invoke(app, ["reproduce", "theory", "--part", "proof", "--output", str(tmp_path)])
    assert isinstance(run.exception, ValueError)
    assert "part must be one of" in str(run.exception)


@pytest.mark.usefixtures("folder", "no_picture")
def test_all_marks_what_has_no_data_and_goes_on(tmp_path, monkeypatch):
    from fisherfold.reproduce import reproduce

    monkeypatch.setattr(reproduce, "NAMES", ("school", "sarcos"))
    output = tmp_path / "report"
    options = ["reproduce", "all", "--quick", "--seeds", "1", "--output", str(output)]
    run = CliRunner().invoke(app, [*options, "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert found["page"] == str(output / "index.html")
    assert found["verdicts"]["school"]["verdict"] in {"holds", "holds partly", "does not hold"}
    assert found["verdicts"]["sarcos"]["verdict"] == "data not found"
    assert "sarcos_7x2000.npz" in found["verdicts"]["sarcos"]["why"][0]
    assert found["verdicts"]["cifar"]["verdict"] == "not run"
    assert "RNGD ends at the point with the lowest error" in (output / "index.html").read_text(encoding="utf-8")
    again = CliRunner().invoke(app, options)
    assert again.exit_code == 0
    assert again.stdout.rstrip().endswith(f"report page: {output / 'index.html'}")


@pytest.mark.parametrize("name", ["all", "sarcos"])
def test_a_file_that_was_named_and_is_not_there_is_an_error(tmp_path, name):
    words = ["reproduce", name, "--quick", "--sarcos-file", str(tmp_path / "none.mat"), "-o", str(tmp_path / "out")]
    run = CliRunner().invoke(app, words)
    assert isinstance(run.exception, FileNotFoundError)
    assert str(run.exception).startswith("sarcos_file must be the file sarcos_inv.mat, there is no file")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fresh", [True, False])
def test_going_on_after_fresh_says_that_older_records_are_read(tmp_path, fresh):
    voice = Voice(quiet=True)
    with _under_way("school", Options(output=tmp_path, fresh=fresh), voice):
        pass
    assert ("read as it was recorded before" in voice.resume) == fresh
    assert voice.resume.endswith(f":\n  fisherfold reproduce school --output {tmp_path}")


def test_missing_data_is_said_on_the_page_too(tmp_path, monkeypatch):
    monkeypatch.setenv("FISHERFOLD_DATA", str(tmp_path))
    CliRunner().invoke(app, ["reproduce", "jester", "--output", str(tmp_path / "out")])
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "data not found" in page
    assert "jester1.npz" in page


def test_every_command_shows_an_example():
    for name in ("all", "school", "sarcos", "jester", "movielens", "theory"):
        run = CliRunner().invoke(app, ["reproduce", name, "--help"])
        assert f"fisherfold reproduce {name}" in " ".join(run.stdout.split())
