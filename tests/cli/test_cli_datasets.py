"""``fisherfold datasets`` and ``fisherfold info`` as a person types them."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fisherfold.cli import app

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch, tmp_path):
    monkeypatch.setenv("FISHERFOLD_CACHE", str(tmp_path))
    monkeypatch.delenv("FISHERFOLD_DATA", raising=False)


def test_list_names_every_set_and_its_state():
    listed = json.loads(run(app, ["datasets", "list", "--json"]).stdout)["datasets"]
    assert {row["name"] for row in listed} >= {"letter", "jester1", "movielens1m", "school"}
    assert all(row["found"] == "" for row in listed)
    assert "can be fetched" in run(app, ["datasets", "list"]).stdout


def test_info_shows_source_terms_and_checksums():
    facts = json.loads(run(app, ["datasets", "info", "movielens1m", "--json"]).stdout)
    assert "no redistribution" in facts["terms"]
    assert "sha256" in facts["arrays"]["rating"]
    assert facts["download"].startswith("https://files.grouplens.org/")


def test_the_terms_are_shown_before_a_download_and_no_means_no():
    answer = run(app, ["datasets", "fetch", "movielens1m"], input="n\n")
    assert answer.exit_code == 1
    assert "no redistribution" in answer.stderr


@pytest.mark.parametrize("given", ["n\n", ""])
def test_a_question_leaves_standard_output_to_the_result(given):
    words = [sys.executable, "-m", "fisherfold", "datasets", "fetch", "movielens1m"]
    found = subprocess.run(words, input=given, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, "")
    assert "under these terms? [y/N]: " in found.stderr


def test_verify_with_nothing_found_is_an_error_that_says_what_to_do():
    answer = run(app, ["datasets", "verify"])
    assert isinstance(answer.exception, FileNotFoundError)
    assert "FISHERFOLD_DATA" in str(answer.exception)


def test_verify_goes_through_all_sets_and_names_every_damaged_one(monkeypatch, tmp_path):
    checked = []

    def check(name):
        checked.append(name)
        if name != "mhc":
            raise ValueError(f"{name}.npz cannot be read")

    monkeypatch.setattr("fisherfold.datasets.verify", check)
    error = str(run(app, ["datasets", "verify", "letter", "mhc", "school"]).exception)
    assert checked == ["letter", "mhc", "school"]
    assert error.startswith(
        "2 of 3 data sets cannot be used, the others are as recorded: letter.npz cannot be read; "
    )
    assert error.endswith(
        "school.npz cannot be read; remove a file that is damaged, and fetch or copy it again"
    )
    assert str(run(app, ["datasets", "verify", "letter"]).exception).startswith(
        "letter.npz cannot be read; remove"
    )


def test_info_of_the_installation():
    facts = json.loads(run(app, ["info", "--json"]).stdout)
    assert {"fisherfold", "torch", "devices", "data found"} <= set(facts)
    assert facts["data found"] == "none"
