"""Trials that share their first epochs against whole runs with the same settings, to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fisherfold.datasets import Images
from fisherfold.training import ImagePool, RunLog, Settings, settings
from fisherfold.training.log import CHOICES
from fisherfold.training.plan import Entry
from fisherfold.training.queue import Queue
from fisherfold.training.run import Run
from fisherfold.training.train import open_job, train_side_by_side
from fisherfold.training.trunks import Start, arrange, first_difference, kept_checkpoint

MODEL = "wrn10_1"
TASK = {"dataset": "cifar10", "model": MODEL, "batch": 16, "epochs": 5, "average": 2, "cutmix": 1.0}
LATE: list[dict[str, Any]] = [
    {},
    {"mixed_until": 0.8},
    {"mixed_until": 0.4},
    {"mixed_until": 0.4, "ascent": 0.1, "ascent_start": 0.4},
]


def load(dataset: str, *, device: Any, split: str, images: int | None) -> ImagePool:
    draw = np.random.default_rng(0)
    pixels, labels = draw.integers(0, 256, (64, 8, 8, 3), dtype=np.uint8), draw.integers(0, 10, 64)
    return ImagePool.of(Images(pixels, labels, pixels[:16], labels[:16]), dataset, device=device, split=split)


def queue(folder: Path, minutes: float = 10.0, **options: Any) -> Queue:
    said = options.pop("say", lambda _: None)
    return Queue(folder, device=torch.device("cpu"), load=load, minutes=minutes, say=said, **{"width": 2, **options})


def search(preset: str, candidates: list[dict[str, Any]]) -> list[Entry]:
    curved = {"refresh_batches": 1} if preset == "mkfac" else {}
    return [Entry.of({**TASK, **curved, "preset": preset, "candidates": candidates, "rounds": [5]})]


def losses(log: RunLog) -> list[tuple[float, float]]:
    return [(entry["train_loss"], entry["loss"]) for entry in log.epochs]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the epochs that runs on the validation split are really trained for."""
    epochs: list[int] = []
    begin = Run.begin_epoch

    def counted(run: Run) -> None:
        if run.pool.split == "validation":
            epochs.append(run.done_epochs)
        begin(run)

    monkeypatch.setattr(Run, "begin_epoch", counted)
    return epochs


@pytest.mark.parametrize("preset", ["mkfac", "sgd"])
def test_late_candidates_share_their_first_epochs_and_are_the_whole_runs(
    tmp_path: Path, trained: list[int], preset: str
) -> None:
    assert queue(tmp_path).work(lambda: search(preset, LATE))
    # 5 of the leader, 1 and 3 of those that end unmixed, 3 with an ascent besides
    assert sorted(trained) == sorted([*range(5), 4, 2, 3, 4, 2, 3, 4])
    record = json.loads((tmp_path / "search" / CHOICES).read_text())
    assert [trial["candidate"] for trial in record["tried"]] == LATE
    logs = [RunLog.read(path) for path in (tmp_path / "search").glob("cifar*.jsonl")]
    assert len(logs) == 4
    pool = load("cifar10", device="cpu", split="validation", images=None)
    for log in logs:
        alone = open_job(Run(Settings(**log.header["settings"]), MODEL, pool), tmp_path / "alone.jsonl")
        train_side_by_side([alone], checkpoint_every=0)
        assert losses(log) == losses(alone.log)
        assert log.ended == "done"
    assert len({losses(log)[-1] for log in logs}) == 4
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_was_cut_off_goes_on_and_what_others_wait_for_comes(tmp_path: Path, trained: list[int]) -> None:
    plan = search("sgd", LATE)
    assert queue(tmp_path).work(lambda: plan if len(trained) < 4 else [])
    assert trained == [0, 1, 2, 3]  # the leader, while the others wait
    assert {path.suffixes[-2] for path in tmp_path.rglob("*after*.safetensors")} == {".after2", ".after4"}
    assert queue(tmp_path).work(lambda: plan)
    assert sorted(trained) == sorted([*range(5), 4, 2, 3, 4, 2, 3, 4])


def test_a_leader_that_fails_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, said = Run.begin_epoch, []

    def fails(run: Run) -> None:
        if run.settings.mixed_until == 1 and run.done_epochs == 3:
            raise RuntimeError("no memory")
        begin(run)

    monkeypatch.setattr(Run, "begin_epoch", fails)
    queue(tmp_path, say=said.append).work(lambda: search("sgd", LATE[:3]))
    assert any("failed and is left out: RuntimeError: no memory" in line for line in said)
    tried = json.loads((tmp_path / "search" / CHOICES).read_text())["tried"]
    assert [bool(trial["accuracy"]) for trial in tried] == [False, True, True]


def test_a_damaged_log_of_a_leader_holds_up_nobody(tmp_path: Path, trained: list[int]) -> None:
    plan = search("sgd", LATE[:3])
    assert queue(tmp_path).work(lambda: plan if len(trained) < 4 else [])
    (leader,) = (tmp_path / "search").glob("cifar*.jsonl")
    leader.write_text("{")
    assert queue(tmp_path).work(lambda: plan)
    tried = json.loads((tmp_path / "search" / CHOICES).read_text())["tried"]
    assert [bool(trial["accuracy"]) for trial in tried] == [False, True, True]
    for path in (leader, leader.with_suffix(".safetensors")):  # as the message asks
        path.unlink()
    assert queue(tmp_path).work(lambda: plan)
    tried = json.loads((tmp_path / "search" / CHOICES).read_text().splitlines()[-1])["tried"]
    assert all(trial["accuracy"] for trial in tried)
    assert not list(tmp_path.rglob("*after*.safetensors"))


def test_candidates_that_act_early_wait_for_nobody(tmp_path: Path, trained: list[int]) -> None:
    assert queue(tmp_path).work(lambda: search("sgd", [{"lr": 0.1}, {"lr": 0.05}]))
    assert sorted(trained) == sorted([*range(5)] * 2)


def test_where_settings_part() -> None:
    one = settings("mkfac", "cifar10", MODEL, cutmix=0.5)
    assert first_difference(one, one) == 100
    assert first_difference(one, replace(one, mixed_until=0.85)) == 85
    assert first_difference(replace(one, cutmix=0.0), replace(one, cutmix=0.0, mixed_until=0.85)) == 100
    late = replace(one, ascent=0.1, ascent_start=0.7)
    assert first_difference(one, late) == 70
    assert first_difference(late, replace(late, ascent=0.2)) == 70
    assert first_difference(one, replace(one, ascent_parts=2)) == 100
    assert first_difference(one, replace(one, lr=0.3)) == 0


def some_log(path: Path, epochs: int) -> Path:
    RunLog({}, [{"epoch": n + 1, "accuracy": 1.0} for n in range(epochs)]).write(path)
    return path


def test_who_leads_who_waits_and_who_goes_on(tmp_path: Path) -> None:
    one = settings("mkfac", "cifar10", MODEL, cutmix=0.5)
    shares = {"early": 0.2, "late": 0.9, "middle": 0.5}
    trials = {tmp_path / f"{name}.jsonl": replace(one, mixed_until=share) for name, share in shares.items()}
    early, late, middle = trials
    assert arrange(trials, trials) == {late: Start(keep=frozenset({20, 50}))}
    assert arrange(trials, [early, late]) == {early: Start(keep=frozenset({20}))}  # they share as much
    some_log(late, 30)
    assert arrange(trials, trials) == {
        # it is past where this one parts, and has kept nothing
        early: Start(keep=frozenset({20})),
        late: Start(keep=frozenset({20, 50})),
    }
    kept_checkpoint(late, 20).touch()
    assert arrange(trials, trials)[early] == Start(20, late, trials[late])
    some_log(late, 10)  # it has gone back, and is not there yet
    assert arrange(trials, trials) == {late: Start(keep=frozenset({20, 50}))}
    some_log(late, 100)
    kept_checkpoint(late, 50).touch()
    assert arrange(trials, [early, middle]) == {
        early: Start(20, late, trials[late]),
        middle: Start(50, late, trials[late]),
    }
