"""Networks and optimizers from what names them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fisherfold.optim import KFAC, MKFAC, SGDG, SGDP, AdamP
from fisherfold.optim.euclidean import in_layout_of
from fisherfold.optim.models import vgg16_bn, wide_resnet
from fisherfold.training.options import Settings

LAID_OUT_ALIKE = ("sgd", "sgdp", "adam", "adamp")  # curvature is kept in rows, and momentum beside it


def build_model(name: str, classes: int, *, dropout: float = 0.0) -> nn.Module:
    """A freshly initialised network.

    Args:
        name: ``vgg16bn``, or ``wrnD_K`` for a wide residual network of depth D and width K.
        classes: the number of logits.
        dropout: the probability with which activations are dropped, where the network has its dropout.

    Returns:
        The network.

    Raises:
        ValueError: if there is no such network.

    Example:
        >>> sum(p.numel() for p in build_model("wrn10_1", 10).parameters())
        77850
    """
    if name == "vgg16bn":
        return vgg16_bn(classes=classes, dropout=dropout)
    found = re.fullmatch(r"wrn(\d+)_(\d+)", name)
    if found is None:
        raise ValueError(f"model must be vgg16bn or wrnD_K, such as wrn16_4, got {name!r}")
    return wide_resnet(int(found[1]), int(found[2]), classes=classes, dropout=dropout)


def build_optimizer(settings: Settings, model: nn.Module, example: Tensor) -> torch.optim.Optimizer:
    """The optimizer of a network.

    On a CUDA device its learning rates are tensors there, so that a captured step follows them. What SGD, SGDP, Adam
    and AdamP load is laid out in memory as the parameters are: files do not keep that, and fused kernels ask for it.

    Args:
        settings: which one, and how.
        model: on its device.
        example: a batch for the probe of scale invariance.

    Returns:
        The optimizer.
    """
    optimizer = BUILDERS[settings.optimizer](settings, model, example)
    if settings.optimizer in LAID_OUT_ALIKE:
        optimizer.register_load_state_dict_post_hook(_lay_out)
    return optimizer


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = in_layout_of(parameter, value)


def _rate(settings: Settings, model: nn.Module) -> Any:
    device = next(model.parameters()).device
    return torch.tensor(settings.lr, device=device) if device.type == "cuda" else settings.lr


def _sgd(s: Settings, model: nn.Module, _: Tensor) -> torch.optim.Optimizer:
    fused = next(model.parameters()).is_cuda
    return torch.optim.SGD(
        model.parameters(), lr=_rate(s, model), momentum=s.momentum, weight_decay=s.weight_decay, fused=fused
    )


def _sgdp(s: Settings, model: nn.Module, _: Tensor) -> torch.optim.Optimizer:
    rate, fuse = _rate(s, model), next(model.parameters()).is_cuda
    return SGDP(model.parameters(), lr=rate, momentum=s.momentum, weight_decay=s.weight_decay, fuse=fuse)


def _adam(s: Settings, model: nn.Module, _: Tensor) -> torch.optim.Optimizer:
    cuda = next(model.parameters()).is_cuda
    betas = (s.momentum, s.beta2)
    return torch.optim.Adam(
        model.parameters(), lr=_rate(s, model), betas=betas, weight_decay=s.weight_decay, fused=cuda, capturable=cuda
    )


def _adamp(s: Settings, model: nn.Module, _: Tensor) -> torch.optim.Optimizer:
    rate, betas, fuse = _rate(s, model), (s.momentum, s.beta2), next(model.parameters()).is_cuda
    return AdamP(model.parameters(), lr=rate, betas=betas, weight_decay=s.weight_decay, fuse=fuse)


def _shared(s: Settings, model: nn.Module) -> dict[str, Any]:
    cuda = next(model.parameters()).is_cuda
    return {"momentum": s.momentum, "weight_decay": s.weight_decay, "capturable": cuda}


def _on_spheres(s: Settings, model: nn.Module) -> dict[str, Any]:
    limits = {"max_angle": s.max_angle or None, "clip": s.clip or None}
    fuse = next(model.parameters()).is_cuda
    return {"balanced": s.balanced, "orthogonality": s.orthogonality, "fuse": fuse, **limits}


def _with_curvature(s: Settings) -> dict[str, Any]:
    return {"damping": s.damping, "fisher": s.fisher, "factor_decay": 0.0, "basis_tolerance": s.basis_tolerance}


def _kfac(s: Settings, model: nn.Module, _: Tensor) -> torch.optim.Optimizer:
    return KFAC(model, s.lr, **_with_curvature(s), **_shared(s, model))


def _mkfac(s: Settings, model: nn.Module, example: Tensor) -> torch.optim.Optimizer:
    options = {**_with_curvature(s), **_on_spheres(s, model), **_shared(s, model)}
    return MKFAC(model, s.lr, s.manifold_lr, example_input=example, euclidean=s.euclidean, **options)


def _sgdg(s: Settings, model: nn.Module, example: Tensor) -> torch.optim.Optimizer:
    return SGDG(model, s.lr, s.manifold_lr, example_input=example, **_on_spheres(s, model), **_shared(s, model))


BUILDERS: dict[str, Callable[[Settings, nn.Module, Tensor], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "sgdp": _sgdp,
    "adam": _adam,
    "adamp": _adamp,
    "kfac": _kfac,
    "mkfac": _mkfac,
    "sgdg": _sgdg,
}
