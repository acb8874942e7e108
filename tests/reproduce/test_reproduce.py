"""Running what is missing: recorded runs, several processes, interrupts, and what the page says of the rest."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer
from matplotlib.figure import Figure

from fisherfold.cli import reproduce as reproduce_commands
from fisherfold.reproduce import figures, reproduce
from fisherfold.reproduce.page import Section
from fisherfold.reproduce.reproduce import Options

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with a school set of 8 small tasks, and pictures that are empty."""
    g = np.random.default_rng(0)
    splits = {"train_idx": np.zeros((10, 2), np.uint16), "train_fold": np.ones((10, 2), np.uint8)}
    np.savez(
        tmp_path / "school.npz",
        x=g.integers(0, 3, (96, 28)).astype(np.uint8),
        y=g.integers(1, 70, 96).astype(np.uint8),
        task_start=np.arange(0, 96, 12, dtype=np.int32),
        **splits,
    )
    monkeypatch.setenv("FISHERFOLD_DATA", str(tmp_path))
    # nine panels take longer than the runs; they are looked at in test_figures.py
    monkeypatch.setattr(figures, "draw", lambda _: Figure(figsize=(1, 1)))
    return tmp_path


def curves(options: Options) -> list:
    """The runs of the School figure without their times."""
    runs = [
        json.loads(file.read_bytes())
        for file in sorted((options.folder / "school" / "runs").iterdir())
    ]
    for run in runs:
        for row in run["run"]["rows"]:
            del row["seconds"]
    return runs


def test_two_processes_give_what_one_gives(folder, tmp_path):
    one, two = (Options(quick=True, jobs=jobs, output=tmp_path / str(jobs)) for jobs in (1, 2))
    sections = [reproduce.reproduce_figure("school", options) for options in (one, two)]
    assert repr(curves(one)) == repr(curves(two))
    assert sections[0].why == sections[1].why


def test_an_interrupted_figure_goes_on_where_it_stopped(folder, tmp_path, monkeypatch):
    options = Options(quick=True, seeds=1, output=tmp_path / "out")
    real, made = figures.minimize, []

    def stops_at_the_fifth(*args, **given):
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(given)
        return real(*args, **given)

    monkeypatch.setattr(figures, "minimize", stops_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce_figure("school", options)
    kept = {file.name for file in (options.folder / "school" / "runs").iterdir()}
    assert len(kept) == 4
    assert not any(name.startswith(".") for name in kept), "no half-written file"
    assert reproduce.sections(options)[2].verdict == "not run"
    monkeypatch.setattr(figures, "minimize", lambda *a, **k: made.append(k) or real(*a, **k))
    reproduce.reproduce_figure("school", options)
    assert len(made) == len(list((options.folder / "school" / "runs").iterdir())), (
        "the first four were not made again"
    )


def test_sections_say_what_was_run_and_what_was_not(folder, tmp_path):
    options = Options(quick=True, seeds=1, output=tmp_path / "out")
    reproduce.mark_missing("sarcos", "there is no file <here>", options)
    reproduce.reproduce_figure("school", options)
    reproduce.mark_missing(
        "school", "gone", options
    )  # results are not forgotten when the data are gone
    found = {section.name: section for section in reproduce.sections(options)}
    assert list(found)[:5] == ["jester", "movielens", "school", "sarcos", "cifar"]
    assert found["school"].verdict in {"holds", "holds partly", "does not hold"}
    assert (found["sarcos"].verdict, found["sarcos"].why) == (
        "data not found",
        ["there is no file <here>"],
    )
    assert found["cifar"].verdict == found["theory-rates"].verdict == "not run"
    page = reproduce.refresh_page(options)
    assert "there is no file &lt;here&gt;" in page.read_text(encoding="utf-8")
    first = page.read_bytes()
    reproduce.reproduce_figure("school", options)
    assert reproduce.refresh_page(options).read_bytes() == first, (
        "the same when nothing is run again"
    )
    whole = Options(seeds=1, output=options.output)
    assert reproduce.sections(whole)[2].verdict == "not run", (
        "a sketch never takes the place of the whole experiment"
    )


def test_runs_of_other_data_are_not_read_for_these(folder, tmp_path):
    options, fresh = (
        Options(quick=True, seeds=1, output=tmp_path / name) for name in ("out", "fresh")
    )
    first = reproduce.reproduce_figure("school", options)
    arrays = dict(np.load(folder / "school.npz"))
    np.savez(folder / "school.npz", **arrays | {"y": arrays["y"][::-1]})
    other = reproduce.reproduce_figure("school", options)
    assert other.why == reproduce.reproduce_figure("school", fresh).why != first.why


def test_a_record_that_was_cut_short_is_made_again(folder, tmp_path):
    options = Options(quick=True, seeds=1, output=tmp_path / "out")
    whole = reproduce.reproduce_figure("school", options)
    before = curves(options)
    kept = sorted((options.folder / "school" / "runs").iterdir())
    kept[0].write_bytes(kept[0].read_bytes()[:100])
    kept[1].write_text("[]")
    assert reproduce.reproduce_figure("school", options).why == whole.why
    assert repr(curves(options)) == repr(before)


def test_the_theory_outside_of_a_clone_says_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "__file__", str(tmp_path / "a" / "b" / "c" / "reproduce.py"))
    monkeypatch.chdir(tmp_path)
    options = Options(quick=True, seeds=1, output=tmp_path)
    with pytest.raises(FileNotFoundError, match="run this command in a clone"):
        reproduce.run("theory", options)
    found = {section.name: section for section in reproduce.sections(options)}
    assert found["theory-rates"].verdict == "not run"
    assert "clone" in found["theory-rates"].why[0]


def test_commands_repeat_what_was_run_and_can_be_typed(tmp_path):
    options = Options(quick=True, seeds=2, output=tmp_path / "my report")
    for name in ("all", "school", "cifar", "theory-rates"):
        words = shlex.split(options.command(name))
        kind = name.partition("-")[0]
        assert words[:3] == ["fisherfold", "reproduce", kind]
        command = typer.main.get_command(reproduce_commands.app).commands[kind]
        given = command.make_context(name, words[3:]).params
        assert given["output"] == options.output
        assert (given.get("seeds", 2), given.get("quick", True)) == (2, True)
        assert given.get("part") == (["rates"] if kind == "theory" else None)


def test_the_names_of_parts_are_those_of_the_command():
    parts = [name.removeprefix("theory-") for name in reproduce.CLAIMS if "theory-" in name]
    assert tuple(parts) == reproduce_commands.PARTS
    assert set(reproduce.FIGURES) == set(reproduce_commands.FIGURES)


def test_a_damaged_section_does_not_keep_the_page_from_showing_the_others(tmp_path):
    options = Options(output=tmp_path)
    for name in ("jester", "movielens"):
        reproduce.mark_missing(name, "no data", options)
    options.section_file("jester").write_text('{"name": "jes')
    assert [s.verdict for s in reproduce.sections(options)[:2]] == ["not run", "data not found"]
    assert Section.load(options.section_file("jester")) is None


# the command as a person at a terminal starts it, also where the tests themselves run with interrupts ignored
TAKES_INTERRUPTS = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[0] = "fisherfold"
from fisherfold.cli import main
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_an_interrupt_leaves_no_half_written_file_and_says_how_to_go_on(folder, tmp_path):
    output = tmp_path / "out"
    words = ["reproduce", "school", "--seeds", "400", "--jobs", "2", "--output", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-c", TAKES_INTERRUPTS, *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    runs = output / "school" / "runs"
    try:
        while process.poll() is None and not (runs.is_dir() and any(runs.glob("[!.]*.json"))):
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    said = " ".join(errors.split())
    assert f"what was finished is recorded in {output}; the same command goes on" in said
    assert "Traceback" not in errors
    assert not list(output.rglob(".*"))
    for file in runs.iterdir():
        json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.hours
def test_the_documented_command_runs(folder, tmp_path):
    """With two processes, from a clone; 0.2.0 ended with an error about a lambda."""
    page = (ROOT / "docs" / "reproduction" / "index.md").read_text()
    (line,) = re.findall(r"^\$ (fisherfold reproduce all --quick[^#\n]*)", page, re.MULTILINE)
    words = [sys.executable, "-m", *shlex.split(line), "--seeds", "1", "--output", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = {
        name: Section.load(tmp_path / "quick" / "sections" / f"{name}.json")
        for name in reproduce.CLAIMS
    }
    run = [
        name
        for name, section in found.items()
        if section and section.verdict not in ("data not found", "not run")
    ]
    assert {
        "school",
        "cifar",
        *(name for name in reproduce.CLAIMS if name.startswith("theory")),
    } <= set(run)
