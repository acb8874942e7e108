"""Runs from start to end: every preset learns, a run that was cut off ends with the same bits, bad input is refused."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fisherfold.datasets import Images, load_images
from fisherfold.optim import MKFAC, RowAscent, ScaleAscent
from fisherfold.training import PRESETS, ImagePool, Run, RunLog, checkpoint, read_logs, settings, train
from fisherfold.training.checkpoint import pack, unpack
from fisherfold.training.train import open_job, provenance, train_epoch, train_side_by_side

needs_data = pytest.mark.skipif(
    not (Path(os.environ.get("FISHERFOLD_DATA", "/nonexistent")) / "cifar10_train_0.npz").is_file(),
    reason="needs CIFAR-10: set FISHERFOLD_DATA to the folder of the data sets",
)


@pytest.fixture(scope="module")
def real() -> ImagePool:
    """Photographs, of which every second pixel of every second row will do: it is the convolutions that take time."""
    data = load_images("cifar10")
    small = [data.train_images[:160, ::2, ::2], data.train_labels[:160], data.test_images[:32, ::2, ::2]]
    return ImagePool.of(Images(*small, data.test_labels[:32]), "cifar10")


def random_pool(count: int = 64) -> ImagePool:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    labels = draw.integers(0, 10, count)
    return ImagePool.of(Images(pixels, labels, pixels[:20], labels[:20]), "cifar10")


def weights(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in run.network.parameters()])


@needs_data
@pytest.mark.parametrize("preset", PRESETS)
def test_200_steps_learn_and_a_resumed_run_is_the_same(preset: str, real: ImagePool, tmp_path: Path) -> None:
    chosen = settings(preset, "cifar10", "wrn10_1", batch=8, epochs=10, refresh_batches=5)
    whole = open_job(Run(chosen, "wrn10_1", real), tmp_path / "whole.jsonl")
    kept = tmp_path / "kept.safetensors"

    def keep(job: Any, entry: dict[str, Any]) -> None:
        if entry["epoch"] == 6:
            shutil.copy(job.checkpoint, kept)

    assert train_side_by_side([whole], checkpoint_every=6, tell=keep)
    losses = [entry["train_loss"] for entry in whole.log.epochs]
    assert len(losses) == 10
    assert losses[-1] < 0.95 * losses[0]
    assert not whole.checkpoint.exists()

    shutil.copy(kept, tmp_path / "again.safetensors")
    shutil.copy(whole.path, tmp_path / "again.jsonl")
    again = open_job(Run(chosen, "wrn10_1", real), tmp_path / "again.jsonl")
    assert again.run.done_epochs == 6
    assert train_side_by_side([again])
    assert torch.equal(weights(again.run), weights(whole.run))
    assert [e["train_loss"] for e in again.log.epochs] == losses


@pytest.mark.parametrize("preset", ["sgd", "sgdp", "adam", "adamp"])
def test_what_is_loaded_lies_in_memory_as_the_weights_do(preset: str, tmp_path: Path) -> None:
    """Fused kernels on a GPU refuse anything else."""
    chosen = settings(preset, "cifar10", "wrn10_1", batch=16, epochs=2)
    before, after = (Run(chosen, "wrn10_1", random_pool(32)) for _ in range(2))
    train_epoch([open_job(before, tmp_path / "before.jsonl")])
    before.save(str(tmp_path / "kept.safetensors"))
    after.load(str(tmp_path / "kept.safetensors"))
    states = [(p, state) for p, state in after.optimizer.state.items() if p.dim() == 4]
    assert states
    for weight, state in states:
        moments = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() == 4]
        assert moments
        assert all(moment.stride() == weight.stride() for moment in moments)


def test_runs_side_by_side_are_the_runs_alone(tmp_path: Path) -> None:
    pool = random_pool()
    chosen = settings("mkfac", "cifar10", "wrn10_1", batch=16, epochs=2, refresh_batches=2)
    alone = open_job(Run(chosen, "wrn10_1", pool, seed=1), tmp_path / "alone.jsonl")
    train_side_by_side([alone])
    jobs = [open_job(Run(chosen, "wrn10_1", pool, seed=s), tmp_path / f"{s}.jsonl") for s in (0, 1)]
    train_side_by_side(jobs)
    assert torch.equal(weights(jobs[1].run), weights(alone.run))
    assert not torch.equal(weights(jobs[0].run), weights(alone.run))
    assert [entry["side_by_side"] for entry in jobs[0].log.epochs] == [2, 2]


def test_the_limit_of_mkfac_is_mkfac_with_a_large_damping_to_the_end(tmp_path: Path) -> None:
    """After milestones too, where λ falls with the rate; momentum would carry steps of the λ before across them."""
    pool, large = random_pool(32), 1e6
    changes = {"batch": 16, "epochs": 3, "refresh_batches": 1, "momentum": 0.0}
    full = settings("mkfac", "cifar10", "vgg16bn", **changes)
    full = replace(full, damping=large * full.damping, manifold_lr=large * full.manifold_lr)
    limit = settings("sgdg-limit", "cifar10", "vgg16bn", **changes)
    jobs = [open_job(Run(s, "wrn10_1", pool), tmp_path / f"{s.preset}.jsonl") for s in (full, limit)]
    train_side_by_side(jobs)
    torch.testing.assert_close(weights(jobs[1].run), weights(jobs[0].run), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "drawn",
    [
        {"noise": 0.2},
        {"ahead": 0.2},
        {"mixup": 0.5},
        {"cutmix": 0.7},
        {"cutmix": 0.7, "mixed_until": 0.4},
        {"dropout": 0.3, "average": 2},
        {"ascent": 0.1, "ascent_start": 0.4, "ascent_parts": 2},
        {"ascent": 0.1, "ascent_scales": 0.1, "ascent_start": 0.4},
        {"teaching": 0.8, "temperature": 2.0, "average": 2},
    ],
)
def test_draws_are_the_same_beside_other_runs_and_after_a_checkpoint(tmp_path: Path, drawn: dict[str, Any]) -> None:
    pool, model = random_pool(16), "wrn10_1"
    chosen = settings("mkfac", "cifar10", model, batch=8, epochs=3, refresh_batches=1, **drawn)
    alone = open_job(Run(chosen, model, pool, seed=1), tmp_path / "alone.jsonl")
    train_side_by_side([alone])
    jobs = [open_job(Run(chosen, model, pool, seed=s), tmp_path / f"{s}.jsonl") for s in (0, 1)]

    def keep(job: Any, entry: dict[str, Any]) -> None:
        if entry["epoch"] == 2:
            shutil.copy(job.checkpoint, tmp_path / f"again{job.run.seed}.safetensors")

    train_side_by_side(jobs, checkpoint_every=2, tell=keep)
    assert torch.equal(weights(jobs[1].run), weights(alone.run))
    shutil.copy(jobs[1].path, tmp_path / "again1.jsonl")
    again = open_job(Run(chosen, model, pool, seed=1), tmp_path / "again1.jsonl")
    assert again.run.done_epochs == 2
    train_side_by_side([again])
    assert torch.equal(weights(again.run), weights(alone.run))
    assert [e["loss"] for e in again.log.epochs] == [e["loss"] for e in alone.log.epochs]
    gone = ("dropout", "noise", "ahead", "mixup", "cutmix", "ascent", "ascent_scales", "teaching")
    undrawn = replace(chosen, **dict.fromkeys(gone, 0.0))
    plain = open_job(Run(undrawn, model, pool, seed=1), tmp_path / "plain.jsonl")
    train_side_by_side([plain])
    assert not torch.equal(weights(plain.run), weights(alone.run))


def test_noise_is_seen_by_the_gradient_alone() -> None:
    """Without a step, no weight changes, and the loss is that of turned rows."""
    pool = random_pool(32)
    runs = [
        Run(settings("sgd", "cifar10", "wrn10_1", batch=16, epochs=1, lr=0.0, noise=noise), "wrn10_1", pool)
        for noise in (0.0, 0.5)
    ]
    before = weights(runs[0])
    for run in runs:
        run.begin_epoch()
        run.step(0)
    assert all(torch.equal(weights(run), before) for run in runs)
    assert runs[0].loss_sum != runs[1].loss_sum


@pytest.mark.parametrize("preset", ["sgd", "mkfac-tuned"])
def test_an_ascent_is_seen_by_the_step_from_its_start_on(preset: str) -> None:
    """Before, the weights are those without; then the loss that is told is still that of the weights themselves."""
    pool, told = random_pool(32), []
    changes = {"batch": 16, "epochs": 2, "refresh_batches": 1, "refresh_every": 9}
    for ascent in (0.0, 0.3):
        chosen = settings(preset, "cifar10", "wrn10_1", **changes, ascent=ascent, ascent_start=0.5)
        run = Run(chosen, "wrn10_1", pool)
        for _ in range(2):
            run.begin_epoch()
            run.step(0)
            first = run.loss_sum.item()
            run.step(1)
            told.append((first, run.loss_sum.item(), weights(run)))
            run.judge()
            run.end_epoch()
    (_, _, early), (first, second, late), (_, _, same), (first_too, other, led) = told
    assert torch.equal(early, same)
    assert not torch.equal(late, led)
    assert first == first_too
    assert second != other


@pytest.mark.parametrize(("parts", "angle", "change"), [(1, 0.2, 0.0), (2, 0.2, 0.1), (4, 0.2, 0.0), (1, 0.0, 0.1)])
def test_the_step_takes_the_mean_of_gradients_uphill_of_every_part(parts: int, angle: float, change: float) -> None:
    pool = random_pool(16)
    changes = {"batch": 16, "epochs": 1, "momentum": 0.0, "weight_decay": 0.0, "ascent_parts": parts}
    changes |= {"ascent": angle, "ascent_scales": change}
    run = Run(settings("sgd", "cifar10", "wrn10_1", **changes), "wrn10_1", pool)
    run.begin_epoch()
    images, labels = pool.normalised(run.images), run.labels
    expected = weights(run)
    for own in torch.arange(16).split(16 // parts):
        net = deepcopy(run.network)
        nn.functional.cross_entropy(net(images[own]), labels[own]).backward()
        with RowAscent(net.parameters(), angle), ScaleAscent(net.parameters(), change):
            net.zero_grad()
            nn.functional.cross_entropy(net(images[own]), labels[own]).backward()
        expected -= run.settings.rates(0)[0] / parts * torch.cat([p.grad.reshape(-1) for p in net.parameters()])
    run.step(0)
    torch.testing.assert_close(weights(run), expected, rtol=1e-5, atol=1e-6)


def test_a_run_that_goes_back_to_a_checkpoint_from_before_its_ascent_does_without(tmp_path: Path) -> None:
    pool, path, seen = random_pool(32), str(tmp_path / "run.safetensors"), []
    chosen = settings("sgd", "cifar10", "wrn10_1", batch=16, epochs=4, ascent=0.3, ascent_start=0.5)
    run = Run(chosen, "wrn10_1", pool)
    for epoch in (0, 1, 2, 1, 2):
        if run.done_epochs > epoch:
            run.load(path)
        run.begin_epoch()
        for index in range(run.steps_per_epoch):
            run.step(index)
        run.judge()
        run.end_epoch()
        seen.append(weights(run))
        if epoch == 0:
            run.save(path)
    assert torch.equal(seen[1], seen[3])
    assert torch.equal(seen[2], seen[4])


@pytest.mark.parametrize("mixed", [{"mixup": 0.4}, {"cutmix": 1.0}])
@pytest.mark.parametrize(("smoothing", "parts"), [(0.0, 1), (0.1, 1), (0.0, 2)])
def test_the_loss_of_mixed_images_is_that_of_both_targets(
    mixed: dict[str, float], smoothing: float, parts: int
) -> None:
    pool = random_pool(32)
    changes = {**mixed, "smoothing": smoothing, "ascent": 0.1 * (parts > 1), "ascent_parts": parts}
    run = Run(settings("sgd", "cifar10", "wrn10_1", batch=16, epochs=1, lr=0.0, **changes), "wrn10_1", pool)
    run.begin_epoch()
    images, labels, total = pool.normalised(run.images), run.labels, torch.zeros(())
    assert ((run.mixing.shares > 0) & (run.mixing.shares < 1)).all()
    assert run.mixing.shares[0] != run.mixing.shares[1]
    for index in range(2):
        for own in torch.arange(16 * index, 16 * index + 16).split(16 // parts):
            x, y, share = images[own], labels[own], run.mixing.shares[index]
            with torch.no_grad():
                spread = torch.log_softmax(run.network(run.mixing.mixed(x, torch.tensor(index))), dim=1)
            for weight, target in ((share, y), (1 - share, y.flip(0))):
                hard = torch.nn.functional.one_hot(target, 10)
                total -= weight / parts * (((1 - smoothing) * hard + smoothing / 10) * spread).sum(dim=1).mean()
        run.step(index)
    torch.testing.assert_close(run.loss_sum, total)


@pytest.mark.parametrize("mixup", [0.0, 0.4])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_averaged_network_teaches_more_with_every_epoch(mixup: float, temperature: float) -> None:
    changes = {"average": 2, "teaching": 0.9, "temperature": temperature, "mixup": mixup, "batch": 16, "epochs": 3}
    pool, plain = random_pool(32), nn.functional.cross_entropy
    run = Run(settings("sgd", "cifar10", "wrn10_1", **changes), "wrn10_1", pool)
    for epoch in range(3):
        run.begin_epoch()
        student, teacher = deepcopy(run.network), deepcopy(run.averaged.module).eval()
        norms = [m.running_mean.clone() for m in run.averaged.module.modules() if isinstance(m, nn.BatchNorm2d)]
        x, y, share = pool.normalised(run.images[:16]), run.labels[:16], run.mixing.shares[0]
        x = share * x + (1 - share) * x.flip(0)
        with torch.no_grad():
            mine, given = student(x), (teacher(x) / temperature).softmax(dim=1)
        logs = (mine / temperature).log_softmax(dim=1)
        from_labels = share * plain(mine, y) + (1 - share) * plain(mine, y.flip(0))
        from_teacher = temperature**2 * (given * (given.log() - logs)).sum(dim=1).mean()
        run.step(0)
        torch.testing.assert_close(run.loss_sum, from_labels + 0.3 * epoch * (from_teacher - from_labels))
        after = [m.running_mean for m in run.averaged.module.modules() if isinstance(m, nn.BatchNorm2d)]
        assert all(map(torch.equal, norms, after))
        run.step(1)
        run.judge()
        run.end_epoch()


@pytest.mark.parametrize("euclidean", ["sgd", "kfac"])
def test_matrices_beside_spheres_may_have_curvature_too(euclidean: str) -> None:
    chosen = settings("mkfac", "cifar10", "wrn10_1", batch=16, refresh_batches=1, euclidean=euclidean)
    run = Run(chosen, "wrn10_1", random_pool(32))
    run.begin_epoch()
    run.step(0)
    assert isinstance(run.optimizer, MKFAC)
    assert ("classifier.weight" in run.optimizer.diagnostics()) == (euclidean == "kfac")


@pytest.mark.parametrize("at_once", [1000, 31])
def test_the_judged_network_has_averaged_weights_and_its_own_norms(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its norms see all images alike, also those of a last part that is a small one."""
    monkeypatch.setattr("fisherfold.training.run.JUDGED_AT_ONCE", at_once)
    pool, average = random_pool(64), 4
    run = Run(settings("sgd", "cifar10", "wrn10_1", batch=16, epochs=3, average=average), "wrn10_1", pool)
    expected = torch.zeros(())
    for epoch in range(3):
        run.begin_epoch()
        for index in range(run.steps_per_epoch):
            run.step(index)
        run.judge()
        expected = weights(run) if epoch == 0 else torch.lerp(expected, weights(run), 1 / average)
        run.end_epoch()
    assert run.averaged is not None
    found = torch.cat([p.detach().flatten() for p in run.averaged.module.parameters()])
    torch.testing.assert_close(found, expected)
    first = next(m for m in run.averaged.module.modules() if isinstance(m, torch.nn.BatchNorm2d))
    inputs = run.averaged.module.conv(pool.normalised(run.images))
    torch.testing.assert_close(first.running_mean, inputs.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.running_var, inputs.var((0, 2, 3)), rtol=1e-2 if at_once < 64 else 1e-4, atol=1e-5)
    # what is trained has norms of its own
    assert not torch.equal(run.network.blocks[0].bn1.running_mean, first.running_mean)


@pytest.mark.parametrize("preset", ["kfac", "mkfac"])
def test_a_gradient_that_is_not_finite_is_the_end_of_one_run_and_not_of_those_beside_it(
    tmp_path: Path, preset: str
) -> None:
    common = {"batch": 16, "epochs": 3, "refresh_batches": 1}
    both = [(preset, {"lr": 1e12}), ("sgd", {})]
    chosen = [settings(name, "cifar10", "wrn10_1", **common, **rates) for name, rates in both]
    runs = [Run(each, "wrn10_1", random_pool()) for each in chosen]
    jobs = [open_job(run, tmp_path / f"{number}.jsonl") for number, run in enumerate(runs)]
    assert train_side_by_side(jobs)
    found = [RunLog.read(job.path) for job in jobs]
    assert [log.ended for log in found] == ["diverged", "done"]
    assert math.isnan(found[0].epochs[-1]["train_loss"])
    assert [len(log.epochs) < 3 for log in found] == [True, False]


def test_a_diverged_run_is_recorded_and_stops(tmp_path: Path) -> None:
    chosen = settings("sgd", "cifar10", "wrn10_1", batch=16, epochs=5, lr=1e12)
    job = open_job(Run(chosen, "wrn10_1", random_pool()), tmp_path / "run.jsonl")
    train_side_by_side([job])
    found = RunLog.read(tmp_path / "run.jsonl")
    assert found.ended == "diverged"
    assert len(found.epochs) < 5
    last = found.epochs[-1]
    assert math.isnan(last["train_loss"])
    assert math.isnan(last["loss"])
    text = (tmp_path / "run.jsonl").read_text()
    lines = [json.loads(line, parse_constant=lambda name: f"{name} is no JSON") for line in text.splitlines()]
    assert [lines[-2]["train_loss"], lines[-2]["loss"], lines[-1]] == [None, None, {"ended": "diverged"}]
    assert "null" not in text.splitlines()[0]


def test_logs_of_earlier_releases_have_nan_in_them(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    RunLog({"seed": 0}, [{"epoch": 1, "train_loss": math.nan, "accuracy": 10.0}], "diverged").write(path)
    new = path.read_text()
    path.write_text(new.replace("null", "NaN"))
    old = RunLog.read(path)
    assert math.isnan(old.epochs[0]["train_loss"])
    assert (old.best, old.ended) == (10.0, "diverged")
    old.write(path)
    assert path.read_text() == new
    path.write_text("\n" + new + "\n\n")  # an editor may leave blank lines
    assert RunLog.read(path).best == 10.0
    path.write_text("\n")
    with pytest.raises(ValueError, match="no log of a training run: it is empty; move it away"):
        RunLog.read(path)
    path.write_text(new.splitlines()[0] + '\n["epoch"]\n')
    with pytest.raises(ValueError, match="no log of a training run"):
        RunLog.read(path)


def test_time_that_is_up_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    pool, path = random_pool(), tmp_path / "run.jsonl"
    chosen = settings("sgdg-tuned", "cifar10", "wrn10_1", batch=16, epochs=3)
    job = open_job(Run(chosen, "wrn10_1", pool), path)
    over: list[float] = []
    stopped = train_side_by_side([job], until=time.monotonic() + 1e-9, tell=lambda _j, _e: over.append(1.0))
    assert not stopped
    assert not over
    assert job.checkpoint.is_file()
    again = open_job(Run(chosen, "wrn10_1", pool), path)
    assert train_side_by_side([again])
    assert [entry["epoch"] for entry in RunLog.read(path).epochs] == [1, 2, 3]


def test_a_run_that_dies_while_it_writes_has_every_epoch_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = random_pool()
    chosen = settings("sgd", "cifar10", "wrn10_1", batch=32, epochs=4)
    for kind, method in ((RunLog, "write"), (Run, "save")):
        path, whole = tmp_path / f"{method}.jsonl", getattr(kind, method)

        def full(self: Any, target: Any, done: Any = whole) -> None:
            if len(getattr(self, "epochs", [])) == 3 or getattr(self, "done_epochs", 0) == 3:
                raise OSError("no space left on device")
            done(self, target)

        monkeypatch.setattr(kind, method, full)
        with pytest.raises(OSError, match="no space left"):
            train_side_by_side([open_job(Run(chosen, "wrn10_1", pool), path)], checkpoint_every=1)
        monkeypatch.undo()
        again = open_job(Run(chosen, "wrn10_1", pool), path)
        assert again.run.done_epochs == 2
        train_side_by_side([again])
        assert [entry["epoch"] for entry in RunLog.read(path).epochs] == [1, 2, 3, 4]


def test_a_checkpoint_whose_log_is_not_whole_is_not_gone_on_from(tmp_path: Path) -> None:
    pool, path = random_pool(32), tmp_path / "run.jsonl"
    chosen = settings("sgd", "cifar10", "wrn10_1", batch=16, epochs=4)

    def stop(_job: Any, entry: dict[str, Any]) -> None:
        if entry["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_side_by_side([open_job(Run(chosen, "wrn10_1", pool), path)], checkpoint_every=1, tell=stop)
    lines = path.read_text().splitlines(keepends=True)
    for kept in (lines[:2], [lines[0], lines[2]], []):
        path.write_text("".join(kept)) if kept else path.unlink()
        with pytest.raises(ValueError, match=r"has 2 epochs behind it, which are not all in run\.jsonl: put that log"):
            open_job(Run(chosen, "wrn10_1", pool), path)
    path.write_text("".join(lines))
    assert train_side_by_side([open_job(Run(chosen, "wrn10_1", pool), path)])
    assert [entry["epoch"] for entry in RunLog.read(path).epochs] == [1, 2, 3, 4]


def test_a_run_that_another_process_trains_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would write one log and one checkpoint, of which the later could be behind the earlier."""
    pool = random_pool(32)
    monkeypatch.setattr(ImagePool, "load", lambda *_, **__: pool)
    changes = {"batch": 16, "epochs": 2, "folder": tmp_path, "device": "cpu"}

    def meanwhile(job: Any, _entry: dict[str, Any]) -> None:
        if not job.log.ended:
            with pytest.raises(ValueError, match=r"another process is training cifar10-wrn10_1-sgd-epochs=2-batch=16"):
                train("cifar10", "wrn10_1", "sgd", seeds=[1, 0], **changes)

    train("cifar10", "wrn10_1", "sgd", tell=meanwhile, **changes)
    assert len(train("cifar10", "wrn10_1", "sgd", seeds=[1, 0], **changes)) == 2
    assert len(list(tmp_path.iterdir())) == 2  # no claims are left


def test_seeds_given_twice_are_trained_once_and_those_beyond_reach_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = random_pool(32)
    monkeypatch.setattr(ImagePool, "load", lambda *_, **__: pool)
    changes = {"batch": 16, "epochs": 1, "folder": tmp_path, "device": "cpu"}
    logs = train("cifar10", "wrn10_1", "sgd", seeds=[3, 10**12, 3], **changes)
    assert [log.header["seed"] for log in logs] == [3, 10**12]
    assert logs[0].epochs[0]["side_by_side"] == 2
    with pytest.raises(ValueError, match=r"seed must be between -1000000000000 and 1000000000000, got 20261116"):
        train("cifar10", "wrn10_1", "sgd", seeds=[20261116041600], **changes)


def test_numbers_of_numpy_and_devices_are_taken_and_what_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = random_pool(32)
    monkeypatch.setattr(ImagePool, "load", lambda *_, **__: pool)
    changes: dict[str, Any] = {"batch": 16, "epochs": 1, "folder": tmp_path, "device": torch.device("cpu")}
    plain = train("cifar10", "wrn10_1", "sgd", seeds=[1], lr=0.5, **changes)
    numbers = {"lr": np.float32(0.5), **changes, "epochs": np.int64(1)}
    logs = train("cifar10", "wrn10_1", "sgd", seeds=np.arange(2), **numbers)
    assert [log.header["seed"] for log in logs] == [0, 1]
    assert logs[1:] == plain  # it was read, not trained again
    assert Run(settings("sgd", "cifar10", "wrn10_1", batch=16), "wrn10_1", pool, seed=np.int64(1)).header["seed"] == 1
    for seeds in (3, "01", [1.5], [None]):
        with pytest.raises(TypeError, match="seeds must be a list of whole numbers, got "):
            train("cifar10", "wrn10_1", "sgd", seeds=seeds, **changes)
    for every in (-1, 1.5):
        with pytest.raises(ValueError, match=f"checkpoint_every must be a whole number, at least 0, got {every}"):
            train("cifar10", "wrn10_1", "sgd", checkpoint_every=every, **changes)
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu' or 'cuda', got 'cpu:1'"):
        train("cifar10", "wrn10_1", "sgd", **{**changes, "device": "cpu:1"})


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    pool, path = random_pool(), tmp_path / "run.jsonl"
    first = Run(settings("sgd", "cifar10", "wrn10_1", batch=16), "wrn10_1", pool)
    first.save(str(tmp_path / "run.safetensors"))
    other = Run(settings("sgd", "cifar10", "wrn10_1", batch=16), "wrn10_1", pool, seed=3)
    with pytest.raises(ValueError, match="is of another run: its seed is 0, this one's is 3"):
        open_job(other, path)
    faster = Run(settings("sgd", "cifar10", "wrn10_1", batch=16, lr=0.5), "wrn10_1", pool)
    with pytest.raises(ValueError, match=r"is of another run: its lr is 0\.1, this one's is 0\.5"):
        open_job(faster, path)


def test_a_log_does_not_say_where_things_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a=b" / "runs"
    words = [str(place), f"--folder={place}", f"-o{place}", "--set", "lr=0.1", "a/b"]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "fisherfold"), *words])
    said = provenance(torch.device("cpu"))["command"]
    assert said == "fisherfold runs --folder=runs -oruns --set lr=0.1 a/b"


@needs_data
def test_a_finished_log_of_another_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """A release whose preset had another rate has left a log of the same name."""
    options = {"folder": tmp_path, "device": "cpu", "images": 64, "batch": 32, "epochs": 1}
    (log,) = train("cifar10", "wrn10_1", "sgd", **options)
    (path,) = tmp_path.glob("*.jsonl")
    log.header["settings"]["lr"] = 0.3
    log.write(path)
    with pytest.raises(ValueError, match=r"seed0\.jsonl is of another run: its lr is 0\.3, this one's is 0\.1"):
        train("cifar10", "wrn10_1", "sgd", **options)


def test_a_run_goes_on_under_another_name_of_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files have the name of the preset that has its settings, whatever it was called when it began."""
    pool = random_pool(128)
    monkeypatch.setattr(ImagePool, "load", lambda *_, **__: pool)
    options: dict[str, Any] = {"folder": tmp_path, "device": "cpu", "checkpoint_every": 1}

    def stop(_job: Any, _entry: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    own, other = (settings(name, "cifar10", "wrn10_1").as_json() for name in ("sgd-sam", "sgd-averaged"))
    changes = {key: value for key, value in own.items() if key != "preset" and other[key] != value}
    for count, (name, changed) in enumerate((("sgd-averaged", changes), ("sgd-sam", {})), start=1):
        with pytest.raises(KeyboardInterrupt):
            train("cifar10", "wrn10_1", name, tell=stop, **options, **changed)
        (log,) = read_logs(tmp_path)
        assert [entry["epoch"] for entry in log.epochs] == list(range(1, count + 1))


def test_a_checkpoint_from_before_a_setting_is_of_a_run_with_its_default(tmp_path: Path) -> None:
    pool, path = random_pool(), tmp_path / "run.safetensors"
    runs = [Run(settings("sgd", "cifar10", "wrn10_1", batch=16, noise=x), "wrn10_1", pool) for x in (0.0, 0.1)]
    runs[0].done_epochs = 2
    header = {**runs[0].header, "settings": {**runs[0].header["settings"]}}
    ascent = ("ascent", "ascent_scales", "ascent_start", "ascent_parts")
    mixing = ("mixup", "cutmix", "smoothing", "teaching", "temperature")
    newest = ("noise", "ahead", *ascent, "average", *mixing, "euclidean")
    for newer in newest:
        del header["settings"][newer]
    state = {"network": runs[0].network.state_dict(), "optimizer": runs[0].optimizer.state_dict(), "epochs": 2}
    checkpoint.save(path, state, header)
    runs[0].load(str(path))
    with pytest.raises(ValueError, match=r"its noise is 0\.0, this one's is 0\.1"):
        runs[1].load(str(path))


def train_in(folder: Path, killed_in: int | None = None) -> None:
    """Train to the end, or be killed when the log has that epoch and its checkpoint is still to be written."""
    torch.set_num_threads(1)
    chosen = settings("mkfac-tuned", "cifar10", "wrn10_1", batch=8, epochs=8, refresh_batches=2)
    job = open_job(Run(chosen, "wrn10_1", random_pool()), folder / "run.jsonl")
    save = job.run.save

    def save_or_die(path: str) -> None:
        if job.run.done_epochs == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        save(path)

    job.run.save = save_or_die  # type: ignore[method-assign]
    train_side_by_side([job], checkpoint_every=1)


def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    process = multiprocessing.get_context("forkserver").Process(target=train_in, args=(tmp_path / "killed", 4))
    process.start()
    train_in(tmp_path / "whole")
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [len(log.epochs) for log in read_logs(tmp_path / "killed")] == [4]
    train_in(tmp_path / "killed")
    whole, killed = (read_logs(tmp_path / name)[0] for name in ("whole", "killed"))
    assert killed.ended == whole.ended == "done"
    without_times = [[{**entry, "seconds": 0} for entry in log.epochs] for log in (whole, killed)]
    assert without_times[0] == without_times[1]


@needs_data
def test_finished_runs_are_only_read(tmp_path: Path) -> None:
    options: dict[str, Any] = {"images": 32, "batch": 16, "epochs": 1, "device": "cpu"}
    first = train("cifar10", "wrn10_1", "sgd", folder=tmp_path, **options)
    stamp = next(tmp_path.glob("*.jsonl")).stat().st_mtime_ns
    assert train("cifar10", "wrn10_1", "sgd", folder=tmp_path, **options)[0].epochs == first[0].epochs
    assert next(tmp_path.glob("*.jsonl")).stat().st_mtime_ns == stamp
    header = first[0].header
    assert header["settings"]["lr"] == 0.1
    assert header["commit"]
    assert header["device"].startswith("CPU")


def test_a_commit_is_named_by_its_whole_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine without git it is told; a hash cut short may be one that never was."""
    monkeypatch.setenv("FISHERFOLD_COMMIT", 5 * "0123abcd")
    assert provenance(torch.device("cpu"))["commit"] == 5 * "0123abcd"
    monkeypatch.setenv("FISHERFOLD_COMMIT", "1d870b3f")
    with pytest.raises(ValueError, match="must be a whole hash, as 'git rev-parse HEAD' prints it, got '1d870b3f'"):
        provenance(torch.device("cpu"))


def test_a_state_survives_packing() -> None:
    tree = {"a": [torch.ones(2), None, True], 3: {"b": (1.5, "x")}, "t": torch.zeros((), dtype=torch.int64)}
    tensors: dict[str, torch.Tensor] = {}
    found = unpack(json.loads(json.dumps(pack(tree, tensors))), tensors)
    assert found[3] == {"b": [1.5, "x"]}
    assert found["a"][1:] == [None, True]
    assert torch.equal(found["a"][0], torch.ones(2))
    assert found["t"].dtype == torch.int64
    with pytest.raises(TypeError, match="a checkpoint holds tensors and plain values, got set"):
        pack({"a": {1}}, {})
    shared: dict[str, torch.Tensor] = {}
    pack({"curvature": tree["t"], "state": {3: (tree["t"],)}, "other": torch.zeros((), dtype=torch.int64)}, shared)
    assert len(shared) == 2  # one file holds a tensor once, wherever it is


def test_a_log_of_another_version_or_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"format": "fisherfold.train", "version": 2}\n')
    with pytest.raises(ValueError, match=r"has version 2 of the fisherfold.train format, this release reads version 1"):
        RunLog.read(path)
    path.write_text('{"loss": 1.0}\n')
    with pytest.raises(ValueError, match="is no log of a training run"):
        RunLog.read(path)
    path.write_text("epoch,loss\n")
    with pytest.raises(ValueError, match="is no log of a training run"):
        RunLog.read(path)


def test_missing_devices_and_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="PyTorch sees no CUDA device here: use --device cpu or auto"):
            train("cifar10", folder=tmp_path, device="cuda")
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu' or 'cuda', got 'tpu'"):
        train("cifar10", folder=tmp_path, device="tpu")
    with pytest.raises(FileNotFoundError, match="cifar10"):
        train("cifar10", folder=tmp_path / "runs", device="cpu", data=tmp_path)
    with pytest.raises(ValueError, match="a batch of 128 needs as many images, the pool has 64"):
        Run(settings("sgd", "cifar10", "wrn10_1"), "wrn10_1", random_pool())


@needs_data
def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    source = Path(os.environ["FISHERFOLD_DATA"])
    for file in source.glob("cifar10_*.npz"):
        shutil.copy(file, tmp_path)
    shard = tmp_path / "cifar10_train_0.npz"
    with np.load(shard) as stored:
        arrays = dict(stored)
    arrays["labels"] = arrays["labels"][::-1].copy()
    shard.chmod(0o644)
    np.savez(shard, **arrays)
    with pytest.raises(ValueError, match=r"cifar10.*train_labels"):
        ImagePool.load("cifar10", folder=tmp_path)


@pytest.mark.parametrize("deterministic", [False, True])
def test_cudnn_tries_its_algorithms_in_an_epoch_unless_it_must_be_deterministic(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, deterministic: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", deterministic)
    job, seen = open_job(Run(settings("sgd", "cifar10", "wrn10_1", batch=32), "wrn10_1", random_pool()), tmp_path), []
    monkeypatch.setattr(job.run, "step", lambda _: seen.append(torch.backends.cudnn.benchmark))
    train_epoch([job])
    assert seen == [not deterministic] * 2
    assert not torch.backends.cudnn.benchmark
