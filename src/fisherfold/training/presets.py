"""The settings of every optimizer on every task, by name: those of the paper, and those we chose on validation data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fisherfold.training.options import Settings

MODELS = ("wrn16_4", "vgg16bn")

# η_g, its decay, λ and its decay, as the paper gives them
PAPER_MKFAC = {
    ("cifar10", "wrn"): (0.25, 0.2, 1.0, 0.8),
    ("cifar10", "vgg"): (0.25, 0.2, 2.0, 0.5),
    ("cifar100", "wrn"): (0.30, 0.15, 1.0, 0.8),
    ("cifar100", "vgg"): (0.15, 0.2, 0.5, 0.5),
}


def _paper_mkfac(task: tuple[str, str]) -> Settings:
    rate, decay, damping, damping_decay = PAPER_MKFAC[task]
    return Settings(
        "mkfac", "mkfac", 0.05, manifold_lr=rate, manifold_decay=decay, damping=damping, damping_decay=damping_decay
    )


def _paper_sgdg(task: tuple[str, str]) -> Settings:
    # λ → ∞ with η_g/λ held fixed at the start; from there on the rate falls as η_g does
    full = _paper_mkfac(task)
    return replace(full, preset="sgdg", optimizer="sgdg", manifold_lr=full.manifold_lr / full.damping)


def _limit_of_mkfac(task: tuple[str, str]) -> Settings:
    # the same at every stage: λ falls too, so that η_g/λ falls by the quotient of the decays
    full = _paper_mkfac(task)
    return replace(_paper_sgdg(task), preset="sgdg-limit", manifold_decay=full.manifold_decay / full.damping_decay)


# rates of the paper's set that are ahead of the usual ones by more than noise on validation images
GRID_RATES = {("adam", "cifar100", "vgg"): 5e-4, ("adamp", "cifar100", "vgg"): 5e-4}


def _paper_baseline(optimizer: str, task: tuple[str, str], usual: float, **others: Any) -> Settings:
    return Settings(optimizer, optimizer, GRID_RATES.get((optimizer, *task), usual), **others)


def _usual_rate(task: tuple[str, str]) -> float:
    return 0.1 if task[1] == "wrn" else 0.05


def _tuned_sgd(task: tuple[str, str]) -> Settings:
    # of two decays, or of two and dropout, on the validation split of CIFAR-100 (results/cifar/search); for VGG on
    # CIFAR-10 the one that led there when it was trained
    decay = 2e-3 if task == ("cifar10", "vgg") else 1e-3
    return Settings("sgd-tuned", "sgd", _usual_rate(task), weight_decay=decay, schedule="cosine")


def _averaged_sgd(task: tuple[str, str]) -> Settings:
    # rows turn with the root of the rate: a tenth of it leaves them the steps of MKFAC's averaged runs; targets are
    # smoothed where those of MKFAC are
    smoothing = _averaged_mkfac(task).smoothing
    return replace(_tuned_sgd(task), preset="sgd-averaged", lr_end=0.1, average=10, smoothing=smoothing)


def _balanced(optimizer: str, task: tuple[str, str]) -> Settings:
    # rows turn as weight decay lets them, with the root of the rate; the rest was chosen on the validation split
    common = Settings(
        f"{optimizer}-tuned", optimizer, _usual_rate(task), manifold_lr=0.01, manifold_power=0.5, balanced=True,
        schedule="cosine", weight_decay=1e-3, damping=0.5,
    )  # fmt: skip
    return replace(common, dropout=0.2, orthogonality=0.03) if task == ("cifar100", "vgg") else common


def _averaged_mkfac(task: tuple[str, str]) -> Settings:
    # chosen on the validation split of CIFAR-100 with VGG; the angle and the smoothing are kept for that task
    common = replace(_balanced("mkfac", task), preset="mkfac-averaged", manifold_end=0.3, average=10, dropout=0.0)
    return replace(common, manifold_lr=0.007, smoothing=0.1) if task == ("cifar100", "vgg") else common


def _sharpness_aware_sgd(task: tuple[str, str]) -> Settings:
    # two or three angles, and smoothing on CIFAR-10, on the validation split with VGG; kept for WRN
    ascent, smoothing = 0.006 if task[0] == "cifar100" else 0.003, 0.1 if task[1] == "vgg" else 0.0
    common = replace(_averaged_sgd(task), preset="sgd-sam", smoothing=smoothing)
    return replace(common, ascent=ascent, ascent_start=0.5)


def _sharpness_aware_mkfac(task: tuple[str, str]) -> Settings:
    # likewise, with angles of the turning on CIFAR-100
    common = replace(_averaged_mkfac(task), preset="mkfac-sam", ascent=0.003, ascent_start=0.5)
    return replace(common, manifold_lr=0.007) if task[1] == "vgg" else common


def _mixed_sgd(task: tuple[str, str]) -> Settings:
    # of three trials on the validation split of CIFAR-100 with VGG; none on the other tasks
    common = replace(_averaged_sgd(task), preset="sgd-cutmix", smoothing=0.0, cutmix=0.5)
    return replace(common, lr=0.025, cutmix=0.75) if task == ("cifar100", "vgg") else common


def _mixed_mkfac(task: tuple[str, str]) -> Settings:
    # of eleven trials there and two on CIFAR-10; what SGD has, with the angle that its rate and its decay come to
    common = replace(_averaged_mkfac(task), preset="mkfac-cutmix", manifold_lr=0.007, smoothing=0.0, cutmix=0.5)
    if task != ("cifar100", "vgg"):
        return common
    return replace(common, lr=0.025, lr_end=0.1, manifold_lr=0.005, cutmix=0.75, orthogonality=0.0)


# What the paper does not give: the rate of KFAC was chosen for VGG16-BN on CIFAR-100, those of SGD, SGDP, Adam and
# AdamP are usual ones; all of them went through the paper's grids (docs/cifar-settings.md).
PRESETS: dict[str, Callable[[tuple[str, str]], Settings]] = {
    "sgd": lambda task: _paper_baseline("sgd", task, _usual_rate(task)),
    "sgd-tuned": _tuned_sgd,
    "sgd-averaged": _averaged_sgd,
    "sgd-sam": _sharpness_aware_sgd,
    "sgd-cutmix": _mixed_sgd,
    "sgdp": lambda task: _paper_baseline("sgdp", task, _usual_rate(task)),
    "adam": lambda task: _paper_baseline("adam", task, 1e-3),
    "adamp": lambda task: _paper_baseline("adamp", task, 1e-3),
    "kfac": lambda task: _paper_baseline("kfac", task, 0.1, damping=2.0),
    "mkfac": _paper_mkfac,
    "mkfac-tuned": lambda task: _balanced("mkfac", task),
    "mkfac-averaged": _averaged_mkfac,
    "mkfac-sam": _sharpness_aware_mkfac,
    "mkfac-cutmix": _mixed_mkfac,
    "sgdg": _paper_sgdg,
    "sgdg-limit": _limit_of_mkfac,
    "sgdg-tuned": lambda task: _balanced("sgdg", task),
}


def settings(preset: str, dataset: str, model: str, **changes: Any) -> Settings:
    """The settings of a preset on a task.

    Args:
        preset: a name of ``PRESETS``.
        dataset: cifar10 or cifar100.
        model: vgg16bn, or a wide residual network such as wrn16_4.
        **changes: fields of ``Settings`` to replace.

    Returns:
        The settings.

    Raises:
        ValueError: if a name is not known.

    Example:
        >>> settings("mkfac", "cifar10", "vgg16bn").damping
        2.0
        >>> settings("mkfac", "cifar10", "vgg16bn", epochs=10).rates(9)[0] == 0.05 * 0.1**3
        True
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if dataset not in {"cifar10", "cifar100"}:
        raise ValueError(f"dataset must be cifar10 or cifar100, got {dataset!r}")
    if model != "vgg16bn" and not re.fullmatch(r"wrn\d+_\d+", model):
        raise ValueError(f"model must be vgg16bn or wrnD_K, such as wrn16_4, got {model!r}")
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in changes.items()}
    return replace(PRESETS[preset]((dataset, model[:3])), **plain)


def preset_of(chosen: Settings, dataset: str, model: str) -> str:
    """The preset that settings are those of, whatever they were called when they were tried.

    Args:
        chosen: the settings.
        dataset: cifar10 or cifar100.
        model: the network.

    Returns:
        Their own preset if they are its, or another one that has them; where none has, their own.

    Example:
        >>> preset_of(settings("sgd", "cifar10", "vgg16bn", lr=0.2), "cifar10", "vgg16bn")
        'sgd'
    """
    names = sorted(PRESETS, key=lambda name: name != chosen.preset)
    same = (name for name in names if replace(settings(name, dataset, model), preset=chosen.preset) == chosen)
    return next(same, chosen.preset)
