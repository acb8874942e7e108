"""Endings of one trunk against whole runs with the same settings, to the bit."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fisherfold.datasets import Images
from fisherfold.training import ImagePool, Run, RunLog, Settings, settings
from fisherfold.training.endings import first_difference, train_endings
from fisherfold.training.train import new_job, train_side_by_side

MODEL = "wrn10_1"


def pool(count: int = 32) -> ImagePool:
    draw = np.random.default_rng(0)
    pixels, labels = draw.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8), draw.integers(0, 10, count)
    return ImagePool.of(Images(pixels, labels, pixels[:16], labels[:16]), "cifar10")


def chosen(preset: str = "mkfac", **changes: Any) -> Settings:
    given = {"batch": 16, "epochs": 5, "refresh_batches": 1, "average": 2, "cutmix": 1.0, **changes}
    return settings(preset, "cifar10", MODEL, **given)


def losses(log: RunLog) -> list[tuple[float, float]]:
    return [(entry["train_loss"], entry["loss"]) for entry in log.epochs]


@pytest.mark.parametrize("preset", ["mkfac", "sgd"])
def test_an_ending_is_the_whole_run_with_its_settings(tmp_path: Path, preset: str) -> None:
    images, common = pool(), chosen(preset)
    endings = [
        {"mixed_until": 0.8},
        {"mixed_until": 0.4},
        {"mixed_until": 0.4, "ascent": 0.1, "ascent_start": 0.4},
    ]
    said: list[str] = []
    logs = train_endings(Run(common, MODEL, images, seed=1), endings, tmp_path / "ends", say=said.append)
    assert [log.header["settings"]["mixed_until"] for log in logs] == [0.4, 0.4, 0.8, 1.0]
    assert len(said) == 4
    for log in logs:
        alone = new_job(Run(Settings(**log.header["settings"]), MODEL, images, seed=1), tmp_path / "alone.jsonl")
        train_side_by_side([alone], checkpoint_every=0)
        assert losses(log) == losses(alone.log)
        assert log.ended == "done"
    assert len({losses(log)[-1] for log in logs}) == 4
    assert {len(RunLog.read(path).epochs) for path in (tmp_path / "ends").glob("*.jsonl")} == {5}


def test_where_settings_part() -> None:
    one = chosen(epochs=100)
    assert first_difference(one, one) == 100
    assert first_difference(one, replace(one, mixed_until=0.85)) == 85
    assert first_difference(replace(one, cutmix=0.0), replace(one, cutmix=0.0, mixed_until=0.85)) == 100
    late = replace(one, ascent=0.1, ascent_start=0.7)
    assert first_difference(one, late) == 70
    assert first_difference(late, replace(late, ascent=0.2)) == 70
    assert first_difference(one, replace(one, ascent_parts=2)) == 100
    with pytest.raises(ValueError, match=r"an ending may change .*mixed_until; lr acts from the start"):
        first_difference(one, replace(one, lr=0.3))


def test_time_that_is_up_leaves_logs_without_an_end(tmp_path: Path) -> None:
    run = Run(chosen(), MODEL, pool())
    assert [log.ended for log in train_endings(run, [{"mixed_until": 0.4}], tmp_path, until=time.monotonic())] == [""]


def test_a_branch_leaves_the_trunk_alone() -> None:
    images = pool()
    trunk, undisturbed = (Run(chosen(), MODEL, images, seed=2) for _ in range(2))
    for run in (trunk, undisturbed):
        for epoch in range(3):
            if run is trunk and epoch == 2:
                branch = run.branch(replace(run.settings, mixed_until=0.4))
                branch.begin_epoch()
                branch.step(0)
            run.begin_epoch()
            for index in range(run.steps_per_epoch):
                run.step(index)
            run.judge()
            run.end_epoch()
    for mine, other in zip(trunk.network.parameters(), undisturbed.network.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("changes", "endings", "message"),
    [
        ({}, [{"mixed_until": 1.0}], r"ending {'mixed_until': 1.0} trains no epoch differently from the run itself"),
        ({"cutmix": 0.0}, [{"mixed_until": 0.4}], "trains no epoch differently"),
        ({}, [{"mixed_until": 0.4}, {"mixed_until": 0.4}], r"ending {'mixed_until': 0.4} is given twice"),
    ],
)
def test_endings_that_would_be_no_runs_of_their_own_are_refused(
    tmp_path: Path, changes: dict[str, Any], endings: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train_endings(Run(chosen("sgd", **changes), MODEL, pool()), endings, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_branches_off_a_trunk_that_has_diverged_or_begun(tmp_path: Path) -> None:
    """It diverges in the first epoch, at whose end the branch would begin."""
    trunk = Run(chosen("sgd", lr=1e12), MODEL, pool())
    logs = train_endings(trunk, [{"mixed_until": 0.2}], tmp_path, say=lambda _: None)
    assert [(len(log.epochs), log.ended) for log in logs] == [(1, "diverged")]
    with pytest.raises(ValueError, match="the trunk must be fresh, it has 1 epoch behind it"):
        train_endings(trunk, [{"mixed_until": 0.4}], tmp_path)


def test_a_branch_of_other_settings_is_refused() -> None:
    """The state of its optimizer would bring the momentum and the weight decay of the trunk along."""
    run = Run(chosen("sgd"), MODEL, pool())
    with pytest.raises(ValueError, match=r"may change .*; momentum acts from the start"):
        run.branch(replace(run.settings, momentum=0.5))
    run.done_epochs = 3
    with pytest.raises(ValueError, match="must have led here: they train epoch 3 differently, and 3 epochs are behind"):
        run.branch(replace(run.settings, mixed_until=0.4))
    assert run.branch(replace(run.settings, mixed_until=0.6)).done_epochs == 3
