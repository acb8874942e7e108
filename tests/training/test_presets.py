"""The settings of the paper, and the schedules they stand for."""

from __future__ import annotations

import math

import pytest

from fisherfold.training import PRESETS, settings
from fisherfold.training.presets import build_model


def test_mkfac_has_the_rates_and_dampings_of_the_paper() -> None:
    vgg = settings("mkfac", "cifar10", "vgg16bn")
    assert [vgg.rates(epoch) for epoch in (0, 29, 30, 60, 90)] == [
        (0.05, 0.25), (0.05, 0.25), (0.05 * 0.1, 0.25 * 0.2), (0.05 * 0.1**2, 0.25 * 0.2**2),
        (0.05 * 0.1**3, 0.25 * 0.2**3),
    ]  # fmt: skip
    assert [vgg.damping_at(epoch) for epoch in (0, 30, 60, 90)] == [2.0, 1.0, 0.5, 0.25]
    assert [epoch for epoch in range(100) if vgg.refreshes_at(epoch)] == [0, 30, 60, 90]
    wide = settings("mkfac", "cifar100", "wrn16_4")
    assert (wide.manifold_lr, wide.manifold_decay, wide.damping, wide.damping_decay) == (0.30, 0.15, 1.0, 0.8)


def test_sgdg_is_the_limit_of_mkfac_for_large_damping() -> None:
    for dataset, model in (("cifar10", "vgg16bn"), ("cifar100", "vgg16bn"), ("cifar10", "wrn16_4")):
        limit, full = settings("sgdg", dataset, model), settings("mkfac", dataset, model)
        assert limit.manifold_lr == full.manifold_lr / full.damping
        assert not limit.curved


def test_schedules_scale_with_the_number_of_epochs() -> None:
    short = settings("mkfac", "cifar10", "vgg16bn", epochs=10)
    assert [epoch for epoch in range(10) if short.refreshes_at(epoch)] == [0, 3, 6, 9]
    cosine = settings("sgd", "cifar10", "vgg16bn", schedule="cosine", epochs=4)
    expected = [0.05 * 0.5 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4)]
    assert [cosine.rates(epoch)[0] for epoch in range(4)] == expected


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("dataset", "model"), [(d, m) for d in ("cifar10", "cifar100") for m in ("wrn16_4", "vgg16bn")])
def test_every_preset_names_itself_on_every_task(preset: str, dataset: str, model: str) -> None:
    found = settings(preset, dataset, model)
    assert found.preset == preset
    assert found.epochs == 100 and found.batch == 128


def test_networks_have_the_sizes_of_the_paper() -> None:
    sizes = {name: sum(p.numel() for p in build_model(name, 10).parameters()) for name in ("wrn16_4", "vgg16bn")}
    assert round(sizes["wrn16_4"] / 1e6, 2) == 2.75
    assert round(sizes["vgg16bn"] / 1e6, 1) == 15.0


def test_unknown_names_say_what_is_known() -> None:
    with pytest.raises(ValueError, match="preset must be one of sgd, sgd-tuned, .*, got 'lion'"):
        settings("lion", "cifar10", "vgg16bn")
    with pytest.raises(ValueError, match="dataset must be cifar10 or cifar100, got 'mnist'"):
        settings("sgd", "mnist", "vgg16bn")
    with pytest.raises(ValueError, match="model must be vgg16bn or wrnD_K, such as wrn16_4, got 'resnet'"):
        settings("sgd", "cifar10", "resnet")
    with pytest.raises(ValueError, match="schedule must be 'step' or 'cosine', got 'linear'"):
        settings("sgd", "cifar10", "vgg16bn", schedule="linear")
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        settings("sgd", "cifar10", "vgg16bn", epochs=0)
