"""The settings of the paper, and the schedules they stand for."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch

from fisherfold.optim import MKFAC, SGDG
from fisherfold.training import PRESETS, settings
from fisherfold.training.build import BUILDERS, build_model, build_optimizer
from fisherfold.training.options import OPTIMIZERS


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


def test_sgdg_begins_as_the_limit_of_mkfac_for_large_damping_and_falls_with_its_rate_or_stays_the_limit() -> None:
    for dataset, model in itertools.product(("cifar10", "cifar100"), ("vgg16bn", "wrn16_4")):
        plain, limit, full = (settings(name, dataset, model) for name in ("sgdg", "sgdg-limit", "mkfac"))
        assert not plain.curved
        assert not limit.curved
        for epoch in (0, 30, 60, 90):  # rates and dampings both fall
            lr, manifold_lr = full.rates(epoch)
            assert plain.rates(epoch) == pytest.approx((lr, manifold_lr / full.damping))
            assert limit.rates(epoch) == pytest.approx((lr, manifold_lr / full.damping_at(epoch)))


def test_schedules_scale_with_the_number_of_epochs() -> None:
    short = settings("mkfac", "cifar10", "vgg16bn", epochs=10)
    assert [epoch for epoch in range(10) if short.refreshes_at(epoch)] == [0, 3, 6, 9]
    single = settings("mkfac", "cifar10", "vgg16bn", epochs=1)
    assert (single.rates(0), single.damping_at(0)) == ((0.05, 0.25), 2.0)  # 0.3 epochs round to none
    cosine = settings("sgd", "cifar10", "vgg16bn", schedule="cosine", epochs=4)
    expected = [0.05 * 0.5 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4)]
    assert [cosine.rates(epoch)[0] for epoch in range(4)] == expected


def test_curvature_may_be_renewed_at_a_cadence_and_rows_may_keep_turning() -> None:
    often = settings("mkfac", "cifar10", "vgg16bn", refresh_every=4, epochs=10)
    assert [epoch for epoch in range(10) if often.refreshes_at(epoch)] == [0, 4, 8]
    assert [often.damping_at(epoch) for epoch in (0, 4, 8)] == [2.0, 1.0, 0.5]
    assert not any(settings("sgdg", "cifar10", "vgg16bn", refresh_every=4).refreshes_at(epoch) for epoch in range(9))
    turning = settings("mkfac-tuned", "cifar10", "vgg16bn", manifold_lr=0.01, manifold_end=0.25, manifold_power=1.0)
    (first, start), (last, end) = turning.rates(0), turning.rates(99)
    assert (first, start) == (0.05, 0.01)
    assert last < 2e-5
    assert 0.0025 < end < 0.0026
    rate = settings("sgd-tuned", "cifar10", "vgg16bn", lr_end=0.1).rates(99)[0]
    assert 0.005 < rate < 0.0051
    # under weight decay rows turn by √(2ηω/(1+μ)), with the root of the rate
    rooted = settings("mkfac-tuned", "cifar10", "vgg16bn", manifold_lr=0.01, manifold_power=0.5)
    for lr, angle in map(rooted.rates, range(100)):
        assert angle == pytest.approx(0.01 * math.sqrt(lr / 0.05))


def test_the_optimizer_gets_what_the_settings_say() -> None:
    example = torch.randn(8, 3, 32, 32)
    chosen = settings("mkfac-tuned", "cifar10", "wrn10_1", max_angle=0.1, clip=0.3, basis_tolerance=0.2, damping=3.0)
    found = build_optimizer(chosen, build_model("wrn10_1", 10), example)
    assert isinstance(found, MKFAC)
    assert (found.max_angle, found.clip, found.balanced, found.curvature.options.tolerance) == (0.1, 0.3, True, 0.2)
    assert {group["damping"] for group in found.param_groups} == {3.0}
    free = build_optimizer(settings("sgdg", "cifar10", "wrn10_1"), build_model("wrn10_1", 10), example)
    assert isinstance(free, SGDG)
    assert (free.max_angle, free.clip, free.balanced) == (None, None, False)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
@pytest.mark.parametrize("model", ["wrn16_4", "vgg16bn"])
def test_every_preset_names_itself_on_every_task(preset: str, dataset: str, model: str) -> None:
    found = settings(preset, dataset, model)
    assert found.preset == preset
    assert found.epochs == 100
    assert found.batch == 128


def test_networks_have_the_sizes_of_the_paper() -> None:
    sizes = {name: sum(p.numel() for p in build_model(name, 10).parameters()) for name in ("wrn16_4", "vgg16bn")}
    assert round(sizes["wrn16_4"] / 1e6, 2) == 2.75
    assert round(sizes["vgg16bn"] / 1e6, 1) == 15.0


def test_dropout_is_where_the_networks_have_it_and_changes_no_weight() -> None:
    for name, count in (("wrn16_4", 6), ("vgg16bn", 5)):
        torch.manual_seed(0)
        plain = build_model(name, 10)
        torch.manual_seed(0)
        dropped = build_model(name, 10, dropout=0.3)
        assert [m.p for m in dropped.modules() if isinstance(m, torch.nn.Dropout)] == [0.3] * count
        assert not any(isinstance(m, torch.nn.Dropout) for m in plain.modules())
        pairs = zip(plain.parameters(), dropped.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(ValueError, match=r"dropout must be a probability below 1, got 1\.5"):
        build_model("vgg16bn", 10, dropout=1.5)


def test_unknown_names_say_what_is_known() -> None:
    with pytest.raises(ValueError, match=r"preset must be one of sgd, sgd-tuned, .*, got 'lion'"):
        settings("lion", "cifar10", "vgg16bn")
    with pytest.raises(ValueError, match="dataset must be cifar10 or cifar100, got 'mnist'"):
        settings("sgd", "mnist", "vgg16bn")
    with pytest.raises(ValueError, match="model must be vgg16bn or wrnD_K, such as wrn16_4, got 'resnet'"):
        settings("sgd", "cifar10", "resnet")
    with pytest.raises(ValueError, match="schedule must be 'step' or 'cosine', got 'linear'"):
        settings("sgd", "cifar10", "vgg16bn", schedule="linear")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1 and whole, got 0"),
        ({"batch": 12.5}, "batch must be at least 1 and whole, got 12.5"),
        ({"refresh_every": -1}, "refresh_every must be at least 0 and whole, got -1"),
        ({"lr": math.nan}, "lr must be a finite number, at least 0, got nan"),
        ({"weight_decay": -1e-4}, "weight_decay must be a finite number, at least 0, got -0.0001"),
        ({"damping": "2"}, "damping must be a finite number, at least 0, got '2'"),
        ({"momentum": 1.0}, "momentum must be below 1, got 1.0"),
        ({"dropout": 1.0}, "dropout must be below 1, got 1.0"),
        ({"noise": 1.5}, "noise must be below 1, got 1.5"),
        ({"noise": 0.1, "ahead": 0.1}, "at random (noise), further on (ahead) or up (ascent, ascent_scales), not two"),
        ({"ascent": 0.1, "ahead": 0.1}, "further on (ahead) or up (ascent, ascent_scales), not two of them"),
        ({"ascent_scales": 0.1, "noise": 0.1}, "further on (ahead) or up (ascent, ascent_scales), not two of them"),
        ({"ascent_scales": 1.0}, "ascent_scales must be below 1, got 1.0"),
        ({"ascent_start": 1.0}, "ascent_start must be below 1, got 1.0"),
        ({"ascent_parts": 3}, "ascent_parts must divide batch=128, got 3"),
        ({"smoothing": 1.0}, "smoothing must be below 1, got 1.0"),
        ({"mixup": -0.5}, "mixup must be a finite number, at least 0, got -0.5"),
        ({"cutmix": 1.5}, "cutmix must be at most 1, got 1.5"),
        ({"mixed_until": 1.5}, "mixed_until must be at most 1, got 1.5"),
        ({"cutmix": 0.5, "mixup": 0.2}, "images are mixed by weight (mixup) or by patches (cutmix), not both"),
        ({"euclidean": "adam"}, "euclidean must be 'sgd' or 'kfac', got 'adam'"),
        ({"average": -1}, "average must be at least 0 and whole, got -1"),
        ({"average": 2.5}, "average must be at least 0 and whole, got 2.5"),
        ({"teaching": 0.5}, "teaching needs averaged weights, got average=0"),
        ({"teaching": 1.0, "average": 5}, "teaching must be below 1, got 1.0"),
        ({"teaching": 0.5, "average": 5, "temperature": 0.0}, "temperature must be above 0, got 0.0"),
    ],
)
def test_settings_that_no_run_could_use_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        settings("sgd", "cifar10", "vgg16bn", **change)


def test_a_damping_that_falls_to_zero_is_refused_before_the_run_comes_to_it() -> None:
    with pytest.raises(ValueError, match="damping of mkfac must be above 0 at every refresh, got damping=2 and"):
        settings("mkfac", "cifar10", "vgg16bn", damping_decay=0.0)
    assert settings("sgd", "cifar10", "vgg16bn", damping_decay=0.0).damping_decay == 0


def test_every_optimizer_that_settings_may_name_can_be_built() -> None:
    assert tuple(BUILDERS) == OPTIMIZERS
