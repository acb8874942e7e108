"""The reproduce commands: table, JSON, files and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from fisherfold.cli import app
from fisherfold.reproduce import figures

CLONE = (Path(__file__).parents[2] / "benchmarks").exists()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with a school set of 8 small tasks."""
    g = np.random.default_rng(0)
    x = g.integers(0, 3, (96, 28)).astype(np.uint8)
    y = g.integers(1, 70, 96).astype(np.uint8)
    splits = {"train_idx": np.zeros((10, 2), np.uint16), "train_fold": np.ones((10, 2), np.uint8)}
    np.savez(
        tmp_path / "school.npz", x=x, y=y, task_start=np.arange(0, 96, 12, dtype=np.int32), **splits
    )
    monkeypatch.setenv("FISHERFOLD_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_picture(monkeypatch):
    """An empty one: nine panels take longer than the runs, and one test of the command that draws them will do."""
    monkeypatch.setattr(figures, "draw", lambda _: Figure(figsize=(1, 1)))


def run(*words):
    return CliRunner().invoke(app, ["reproduce", *map(str, words)])


def test_json_is_the_section_and_nothing_else(folder, tmp_path):
    output = tmp_path / "out"
    done = run("school", "--quick", "--json", "--output", output)
    assert done.exit_code == 0, done.output
    (section,) = json.loads(done.stdout)["sections"]
    assert [row[0] for row in section["tables"][0]["rows"]] == ["RNGD", "RSGD", "RSVRG", "RCG"]
    assert section["settings"]["seeds"] == 2
    for kind in ("png", "csv"):
        assert (output / "quick" / "school" / f"school.{kind}").is_file()


@pytest.mark.usefixtures("folder", "no_picture")
def test_the_table_names_the_methods_and_the_verdict_follows(tmp_path):
    done = run("school", "--quick", "--seeds", "1", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert {"RNGD", "RSGD", "RSVRG", "RCG"} <= set(done.stdout.split())
    assert "final figures of one seed" in " ".join(done.stdout.split())
    assert "RNGD ends lowest on" in done.stdout
    assert "verdict: " in done.stdout


def test_missing_data_is_one_sentence_and_said_on_the_page_too(tmp_path, monkeypatch):
    monkeypatch.setenv("FISHERFOLD_DATA", str(tmp_path))
    done = run("sarcos", "--output", tmp_path / "out")
    assert isinstance(done.exception, FileNotFoundError)
    assert "no file sarcos_7x2000.npz" in str(done.exception)
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "data not found" in page
    assert "sarcos_7x2000.npz" in page


@pytest.mark.skipif(not CLONE, reason="the theory is not part of an installed package")
def test_theory_prints_findings_with_verdicts(tmp_path):
    done = run("theory", "--quick", "--seeds", "1", "--part", "invariance", "--output", tmp_path)
    assert done.exit_code == 0, done.output
    assert "RFIM = FIM" in done.stdout
    assert "only their sum is right" in " ".join(done.stdout.split())
    assert isinstance(run("theory", "--part", "proof", "--output", tmp_path).exception, ValueError)


def test_cifar_prints_both_tables(tmp_path):
    if not (results := Path(__file__).parents[2] / "results" / "cifar_runs.parquet").exists():
        pytest.skip("the results are not part of an installed package")
    done = run("cifar", "--results", results, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    assert "does not hold" in done.stdout
    assert "differences of medians" in " ".join(done.stdout.split())


@pytest.mark.usefixtures("folder", "no_picture")
def test_all_marks_what_has_no_data_and_goes_on(tmp_path, monkeypatch):
    from fisherfold.reproduce import reproduce

    monkeypatch.setattr(reproduce, "NAMES", ("school", "sarcos"))
    output = tmp_path / "report"
    options = ["all", "--quick", "--seeds", "1", "--output", output]
    done = run(*options, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    page = output / "quick" / "index.html"
    assert found["page"] == str(page)
    assert found["verdicts"]["school"]["verdict"] in {"holds", "holds partly", "does not hold"}
    assert found["verdicts"]["sarcos"]["verdict"] == "data not found"
    assert "sarcos_7x2000.npz" in found["verdicts"]["sarcos"]["why"][0]
    assert found["verdicts"]["cifar"]["verdict"] == "not run"
    assert "RNGD ends at the point with the lowest error" in page.read_text(encoding="utf-8")
    again = run(*options)
    assert again.exit_code == 0
    assert again.stdout.rstrip().endswith(f"report page: {page}")
