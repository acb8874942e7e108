"""``fisherfold train`` and ``fisherfold reproduce cifar`` as typed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fisherfold.cli import app
from fisherfold.cli.train import NAMES
from fisherfold.training import PRESETS, RunLog, settings

needs_data = pytest.mark.skipif(
    not (Path(os.environ.get("FISHERFOLD_DATA", "/nonexistent")) / "cifar10_train_0.npz").is_file(),
    reason="needs CIFAR-10: set FISHERFOLD_DATA to the folder of the data sets",
)
TRIAL = ["train", "cifar10", "--model", "wrn10_1", "--optimizer", "sgd", "--images", "64", "--batch", "16"]


@needs_data
def test_training_prints_a_table_and_the_same_command_reads_it_back(tmp_path: Path) -> None:
    command = [*TRIAL, "--epochs", "2", "--device", "cpu", "--folder", str(tmp_path), "--seed", "3"]
    shown = CliRunner().invoke(app, [*command, "--quiet"])
    assert shown.exit_code == 0, shown.output
    assert "best test" in shown.output
    again = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [(run["seed"], run["ended"]) for run in again["runs"]] == [(3, "done")]
    assert again["settings"]["epochs"] == 2
    assert len(list(tmp_path.iterdir())) == 1


@needs_data
def test_any_setting_can_be_replaced(tmp_path: Path) -> None:
    command = [*TRIAL, "--epochs", "1", "--device", "cpu", "--folder", str(tmp_path)]
    shown = CliRunner().invoke(app, [*command, "--set", "momentum=0.5", "--set", "schedule=cosine", "--json"])
    assert shown.exit_code == 0, shown.output
    assert {key: json.loads(shown.stdout)["settings"][key] for key in ("momentum", "schedule")} == {
        "momentum": 0.5, "schedule": "cosine",
    }  # fmt: skip
    for text, message in (
        (
            "refresh=2",
            "'refresh' is no setting; there are ahead, ascent, ascent_parts, ascent_scales, ascent_start, average",
        ),
        ("refresh_every=two", "refresh_every must be of type int, got 'two'"),
        ("balanced=yes", "balanced must be of type bool, got 'yes'"),
        ("momentum=2", "momentum must be below 1, got 2.0"),
    ):
        wrong = CliRunner().invoke(app, [*command, "--set", text])
        assert message in str(wrong.exception)


@pytest.mark.parametrize("every", ["0", "10"])
def test_an_interrupt_promises_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: str) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fisherfold.training.train", stop)
    shown = CliRunner().invoke(app, [*TRIAL, "--folder", str(tmp_path), "--checkpoint-every", every])
    assert shown.exit_code == 130
    assert shown.stderr.endswith(f"from the last checkpoint in {tmp_path}, or starts again where there is none\n")


def test_the_help_names_every_preset() -> None:
    """A tuple of its own, because what trains takes a while to import."""
    assert tuple(PRESETS) == NAMES


def test_an_unknown_preset_or_a_missing_gpu_is_one_sentence(tmp_path: Path) -> None:
    wrong = CliRunner().invoke(app, ["train", "cifar10", "--optimizer", "lion", "--folder", str(tmp_path)])
    assert "preset must be one of sgd" in str(wrong.exception)
    no_data = CliRunner().invoke(app, ["reproduce", "cifar", "--results", str(tmp_path / "none")])
    assert "fisherfold train cifar10" in str(no_data.exception)


@pytest.mark.parametrize(("count", "said"), [(1, "The page has 1 more run by"), (2, "The page has 2 more runs by")])
def test_runs_that_are_in_no_cell_are_counted(tmp_path: Path, count: int, said: str) -> None:
    names = {"dataset": "cifar10", "model": "wrn10_1", "preset": "sgd", "split": "test", "images": 64, "date": "today"}
    made = {"device": "CPU", "commit": "unknown"}
    header = {**names, **made, "settings": settings("sgd", "cifar10", "wrn10_1").as_json()}
    for seed in range(count):
        entry = {"epoch": 1, "accuracy": 10.0, "train_loss": 1.0, "loss": 1.0, "seconds": 0.5}
        log = RunLog({**header, "seed": seed}, [entry], "done")
        log.write(tmp_path / f"{seed}.jsonl")
    folders = ["--results", str(tmp_path), "--output", str(tmp_path / "out")]
    assert said in CliRunner().invoke(app, ["reproduce", "cifar", *folders]).stdout


@needs_data
def test_a_cpu_is_told_what_a_trial_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fisherfold.training.train", lambda *_, **__: [])
    command = ["train", "cifar10", "--device", "cpu", "--folder", str(tmp_path)]
    assert "--images 1000 --epochs 3" in CliRunner().invoke(app, command).output
    assert "on cifar10, 1 epoch " in CliRunner().invoke(app, [*command, "--epochs", "1"]).output
    assert "--images 1000" not in CliRunner().invoke(app, [*command, "--images", "64"]).output
