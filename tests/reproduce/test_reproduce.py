"""Running what is missing: recorded runs, several processes, interrupts, and what the page says of the rest."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import typer
from matplotlib.figure import Figure

from fisherfold.cli import reproduce as reproduce_commands
from fisherfold.reproduce import figures, reproduce
from fisherfold.reproduce.page import Section
from fisherfold.reproduce.reproduce import Options
from fisherfold.reproduce.theory import PARTS, Finding, Part, records


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with a school set of 8 small tasks, and pictures that are empty."""
    g = np.random.default_rng(0)
    splits = {"train_idx": np.zeros((10, 2), np.uint16), "train_fold": np.ones((10, 2), np.uint8)}
    np.savez(
        tmp_path / "school.npz", x=g.integers(0, 3, (96, 28)).astype(np.uint8),
        y=g.integers(1, 70, 96).astype(np.uint8), task_start=np.arange(0, 96, 12, dtype=np.int32), **splits,
    )  # fmt: skip
    monkeypatch.setenv("FISHERFOLD_DATA", str(tmp_path))
    # nine panels take longer than the runs; they are looked at in test_figures.py
    monkeypatch.setattr(figures, "draw", lambda _: Figure(figsize=(1, 1)))
    return tmp_path


def without_times(result) -> list:
    return [
        (label, run.step, run.seed, [{k: v for k, v in row.items() if k != "seconds"} for row in run.rows])
        for label, runs in result.runs.items()
        for run in runs
    ]


def test_two_processes_give_what_one_gives(folder, tmp_path):
    one, *_ = reproduce.reproduce_figure("school", Options(quick=True, output=tmp_path / "one"))
    two, *_ = reproduce.reproduce_figure("school", Options(quick=True, jobs=2, output=tmp_path / "two"))
    assert repr(without_times(one)) == repr(without_times(two))
    kept = [tmp_path / each / "quick" / "school" / "runs" for each in ("one", "two")]
    first, second = (sorted(file.name for file in folder.iterdir()) for folder in kept)
    assert first == second


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
    kept = {file.name for file in (options.folder("school") / "runs").iterdir()}
    assert len(kept) == 4
    assert not any(name.startswith(".") for name in kept), "no half-written file"
    assert reproduce.sections(options.output)[2].verdict == "not run"
    ticks = []
    monkeypatch.setattr(figures, "minimize", lambda *a, **k: made.append(k) or real(*a, **k))
    going_on = Options(quick=True, seeds=1, output=options.output, tick=lambda *seen: ticks.append(seen))
    result, *_ = reproduce.reproduce_figure("school", going_on)
    runs = sum(len(r) for r in result.searched.values())
    assert len(made) == len(list((options.folder("school") / "runs").iterdir()))
    assert len(made) <= runs + 4, "the first four were not made again"
    assert ticks[0][0] >= 4
    assert ticks[-1][0] == ticks[-1][1]
    assert all(a[0] <= b[0] for a, b in pairwise(ticks))


def test_the_page_is_the_same_when_nothing_is_run_again(folder, tmp_path):
    options = Options(quick=True, seeds=1, output=tmp_path / "out")
    reproduce.reproduce_figure("school", options)
    first = reproduce.refresh_page(options.output).read_bytes()
    reproduce.reproduce_figure("school", options)
    assert reproduce.refresh_page(options.output).read_bytes() == first


def test_sections_say_what_was_run_and_what_was_not(folder, tmp_path):
    options = Options(quick=True, seeds=1, output=tmp_path / "out")
    reproduce.mark_missing("sarcos", "there is no file <here>", options)
    reproduce.reproduce_figure("school", options)
    found = {section.name: section for section in reproduce.sections(options.output)}
    assert list(found)[:5] == ["jester", "movielens", "school", "sarcos", "cifar"]
    assert found["school"].verdict in {"holds", "holds partly", "does not hold"}
    assert found["school"].command == f"fisherfold reproduce school --quick --seeds 1 --output {options.output}"
    assert found["sarcos"].verdict == "data not found"
    assert found["sarcos"].why == ["there is no file <here>"]
    assert found["cifar"].verdict == found["theory-rates"].verdict == "not run"
    assert found["theory-rates"].command == f"fisherfold reproduce theory --output {options.output} --part rates"
    page = reproduce.refresh_page(options.output).read_text(encoding="utf-8")
    assert "there is no file &lt;here&gt;" in page


def test_results_are_not_forgotten_when_the_data_are_gone(folder, tmp_path):
    options = Options(quick=True, seeds=1, output=tmp_path / "out")
    reproduce.reproduce_figure("school", options)
    reproduce.mark_missing("school", "gone", options)
    assert not (options.output / "sections" / "school.json").exists()
    assert reproduce.sections(options.output)[2].verdict != "data not found"


def test_a_sketch_never_takes_the_place_of_the_whole_experiment(folder, tmp_path, monkeypatch):
    whole, sketch = (Options(quick=quick, seeds=1, output=tmp_path / "out") for quick in (False, True))
    plan = reproduce.make_plan("school", quick=True)
    for first, second in ((sketch, whole), (whole, sketch)):
        for options in (first, second):
            # the whole figure with the size of a sketch, so that the test is quick
            made = plan if options.quick else replace(plan, title="School, 139 tasks", name="school")
            monkeypatch.setattr(reproduce, "make_plan", lambda *_, made=made: made)
            reproduce.reproduce_figure("school", options)
            shown = reproduce.sections(options.output)[2]
            assert shown.title == ("School, 139 tasks" if whole in (first, options) else plan.title)
        assert (whole.folder("school") / "school.csv").is_file()
        assert (sketch.folder("school") / "school.csv").is_file()
    assert "quick" not in reproduce.sections(whole.output)[2].command


def test_runs_of_other_data_are_not_read_for_these(folder, tmp_path):
    options = Options(quick=True, seeds=1, output=tmp_path / "out")
    first, *_, section = reproduce.reproduce_figure("school", options)
    assert section.title == "School, 139 tasks (other data) (quick sketch)"
    assert any("Not the data that are known as school" in note for note in section.notes)
    again, *_ = reproduce.reproduce_figure("school", options)
    assert without_times(again) == without_times(first)
    arrays = dict(np.load(folder / "school.npz"))
    np.savez(folder / "school.npz", **arrays | {"y": arrays["y"][::-1]})
    other, *_ = reproduce.reproduce_figure("school", options)
    assert other.plan.settings["data"] != first.plan.settings["data"]
    fresh, *_ = reproduce.reproduce_figure("school", replace(options, output=tmp_path / "fresh"))
    assert without_times(other) == without_times(fresh) != without_times(first)


def test_a_record_that_was_cut_short_is_made_again(folder, tmp_path):
    options = Options(quick=True, seeds=1, output=tmp_path / "out", parts=("invariance",))
    whole, *_ = reproduce.reproduce_figure("school", options)
    (part,), _ = reproduce.reproduce_theory(options)
    kept = sorted((options.folder("school") / "runs").iterdir())
    kept[0].write_bytes(kept[0].read_bytes()[:100])
    kept[1].write_text("[]")
    record = options.folder("theory") / "theory.json"
    record.write_bytes(record.read_bytes()[:100])
    again, *_ = reproduce.reproduce_figure("school", options)
    assert repr(without_times(again)) == repr(without_times(whole))
    assert reproduce.reproduce_theory(options)[0][0].findings == part.findings
    for file in (*kept, record):
        json.loads(file.read_text())


def test_commands_repeat_what_was_run_and_can_be_typed(tmp_path):
    output, original = tmp_path / "my report", tmp_path / "original files" / "sarcos_inv.mat"
    original.parent.mkdir()
    original.touch()
    options = Options(
        quick=True, seeds=2, jobs=2, output=output, device="cuda", parts=("rates", "metric"), sarcos_file=original
    )
    for name in ("all", "school", "sarcos", "cifar", "theory"):
        words = shlex.split(options.command(name))
        assert words[:3] == ["fisherfold", "reproduce", name]
        command = typer.main.get_command(reproduce_commands.app).commands[name]
        given = command.make_context(name, words[3:]).params
        assert Path(given["output"]) == output
        assert ("seeds" in given) == (name != "cifar")
        assert all(given.get(key, value) == value for key, value in (("seeds", 2), ("jobs", 2), ("quick", True)))
        assert Path(given.get("sarcos_file", original)) == original
        assert given.get("device", "cuda") == "cuda"
        assert list(given.get("part", ["rates", "metric"])) == ["rates", "metric"]


def test_parts_measured_side_by_side_are_those_measured_alone(tmp_path):
    parts = ("stability", "invariance")
    beside, _ = reproduce.reproduce_theory(Options(quick=True, seeds=1, parts=parts, output=tmp_path / "two", jobs=2))
    assert [part.name for part in beside] == list(parts)
    (alone,), _ = reproduce.reproduce_theory(Options(quick=True, seeds=1, parts=parts[1:], output=tmp_path / "one"))
    assert beside[1].findings == alone.findings


def test_a_part_of_the_theory_is_read_and_not_measured_again(tmp_path, monkeypatch):
    options = Options(quick=True, seeds=1, output=tmp_path, parts=("invariance",))
    (first,), files = reproduce.reproduce_theory(options)
    written = (options.folder("theory") / "invariance.png").read_bytes()

    def refuse(*_args, **_given):
        raise AssertionError("measured again")

    monkeypatch.setattr(records, "run_theory", refuse)
    (again,), files_again = reproduce.reproduce_theory(options)
    assert again.findings == first.findings
    assert files_again == files
    assert (options.folder("theory") / "invariance.png").read_bytes() == written
    for changed in ({"seeds": 2}, {"fresh": True}):
        with pytest.raises(AssertionError, match="measured again"):
            reproduce.reproduce_theory(Options(**{"quick": True, "seeds": 1, "output": tmp_path,
                                                  "parts": ("invariance",), **changed}))  # fmt: skip


def test_a_part_that_is_run_alone_leaves_the_findings_of_the_others(tmp_path, monkeypatch):
    def part(settings, only):
        (name,) = only
        finding = Finding(f"statement of {name}", 1.0, 1.0, "holds", f"{settings.seeds} seeds")
        return [Part(name, name, f"{name}.", [finding], [{"x": 1}], Figure(figsize=(1, 1)))]

    monkeypatch.setattr(records, "run_theory", part)
    options = Options(quick=True, seeds=1, output=tmp_path)
    reproduce.reproduce_theory(options)
    (alone,), files = reproduce.reproduce_theory(replace(options, seeds=2, parts=("rates",)))
    assert sorted(files) == ["rates.csv", "rates.png", "theory.json"]
    content = json.loads((options.folder("theory") / "theory.json").read_text())
    assert [row["part"] for row in content["results"]] == list(PARTS)
    assert [row["note"] for row in content["results"]] == ["2 seeds" if p == "rates" else "1 seeds" for p in PARTS]
    assert {name: run["seeds"] for name, run in content["settings"].items()} == dict.fromkeys(PARTS, 1) | {"rates": 2}
    assert alone.name == "rates"


@pytest.mark.parametrize("content", [b'{"name": "jest', b"\xff\xfe\x00", b"[]", b"{}"])
def test_a_damaged_section_costs_its_own_place_on_the_page_and_no_other(folder, tmp_path, content):
    output = tmp_path / "out"
    damaged = output / "sections" / "quick" / "jester.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(content)
    reproduce.reproduce_figure("school", Options(quick=True, seeds=1, output=output))
    reproduce.mark_missing("movielens", "fetch it", Options(output=output))
    reproduce.refresh_page(output)
    jester, movielens, school, *_ = reproduce.sections(output)
    assert (jester.verdict, jester.why) == ("not run", [f"{damaged} cannot be read: run it again."])
    assert movielens.verdict == "data not found"
    assert school.verdict in {"holds", "holds partly", "does not hold"}
    with pytest.raises(ValueError, match=r"jester\.json is not a section of a report"):
        Section.load(damaged)


def test_options_are_checked(tmp_path):
    for jobs in (0, 100_000):
        with pytest.raises(ValueError, match=f"jobs must be from 1 to 256, got {jobs}"):
            Options(jobs=jobs)
    with pytest.raises(ValueError, match="seeds must be at least 1, got 0"):
        Options(seeds=0)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="output must be a folder"):
        Options(output=tmp_path / "file")


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


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_leaves_no_half_written_file_and_says_how_to_go_on(folder, tmp_path, jobs):
    output = tmp_path / "out"
    words = ["reproduce", "school", "--seeds", "400", "--jobs", str(jobs), "--output", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-c", TAKES_INTERRUPTS, *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
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
    jobs_word = "--jobs 2 " if jobs == 2 else ""
    assert f"fisherfold reproduce school --seeds 400 {jobs_word}--output {output}" in said
    assert "Traceback" not in errors
    assert not list(output.rglob(".*"))
    for file in runs.iterdir():
        json.loads(file.read_text())
