"""Steps of weights in Euclidean space: AdamW and SGD as in torch, and orthogonalised steps for hidden matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

BETAS = (0.9, 0.99)
EPSILON = 1e-8
MATCH = 0.2  # the root mean square of AdamW's updates, which orthogonalised steps are scaled to


def adamw_step(
    weights: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    """AdamW, with torch's own implementation."""
    adam(
        weights,
        gradients,
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        [],
        [s["step"] for s in states],
        foreach=weights[0].is_cuda or not isinstance(group["lr"], Tensor),
        capturable=weights[0].is_cuda,
        decoupled_weight_decay=True,
        amsgrad=False,
        beta1=BETAS[0],
        beta2=BETAS[1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=EPSILON,
        maximize=False,
    )


def sgd_step(
    weights: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    """SGD with momentum, with torch's own implementation; the first step begins from a zero buffer."""
    sgd(
        weights,
        gradients,
        [s["momentum"] for s in states],
        foreach=True,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=group["nesterov"] and group["momentum"] > 0,
        maximize=False,
    )


def orthogonal_step(
    weights: list[Tensor],
    directions: list[Tensor],
    shapes: Sequence[tuple[int, int]],
    group: dict[str, Any],
) -> None:
    """W ← (1 - η wd) W - 0.2 η √max(m, n) O: with orthogonal O the step is as long as one of AdamW at rate η."""
    lr = group["lr"]
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
    for w, d, shape in zip(weights, directions, shapes, strict=True):
        w.sub_(d * (lr * MATCH * max(shape) ** 0.5))


def new_adam_state(weight: Tensor) -> dict[str, Tensor]:
    """What AdamW keeps for a weight."""
    step = torch.zeros((), dtype=torch.float32, device=weight.device if weight.is_cuda else "cpu")
    return {
        "step": step,
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": torch.zeros_like(weight),
    }
