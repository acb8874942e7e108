"""Steps of weights in Euclidean space: AdamW and SGD as in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

Rate = float | Tensor


def adamw_step(
    weights: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[dict[str, Tensor]],
    group: dict[str, Any],
    rate: Rate,
) -> None:
    """AdamW, with torch's own implementation."""
    adam(
        weights,
        gradients,
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        [],
        [s["step"] for s in states],
        foreach=weights[0].is_cuda or not isinstance(rate, Tensor),
        capturable=weights[0].is_cuda,
        decoupled_weight_decay=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=rate,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def sgd_step(
    weights: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[dict[str, Tensor]],
    group: dict[str, Any],
    rate: Rate,
) -> None:
    """SGD with momentum, with torch's own implementation.

    The first step begins from a zero buffer.
    """
    sgd(
        weights,
        gradients,
        [s["momentum"] for s in states],
        foreach=True,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=rate,  # type: ignore[arg-type]
        dampening=0.0,
        nesterov=group["nesterov"] and group["momentum"] > 0,
        maximize=False,
    )


def new_adam_state(weight: Tensor) -> dict[str, Tensor]:
    """What AdamW keeps for a weight."""
    step = torch.zeros((), dtype=torch.float32, device=weight.device if weight.is_cuda else "cpu")
    return {
        "step": step,
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": torch.zeros_like(weight),
    }
