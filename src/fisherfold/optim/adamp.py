"""AdamP: Adam with decoupled weight decay whose update loses its radial part on weights that look scale invariant.

With the usual bias-corrected moments m̂, v̂:  d = Π(m̂/(√v̂ + ε)),  w ← (1 - η ω ρ) w - η d, where Π is the projection of
``projection.py`` and ρ = ``wd_ratio`` where it acted, else 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from typing_extensions import override

from fisherfold.optim.fuse import fused
from fisherfold.optim.options import check_number
from fisherfold.optim.projection import ProjectedOptimizer, Projection, move


class AdamP(ProjectedOptimizer):
    """Adam with the projection of Heo et al. (2021), equal to their code, without its host synchronisation.

    Args:
        params: parameters or groups.
        lr: η.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment, and guards the norms.
        weight_decay: ω.
        delta: the threshold of the invariance test.
        wd_ratio: the factor on weight decay where the update was projected.
        nesterov: Nesterov momentum.
        fuse: compile the update of a parameter with ``torch.compile``; on a GPU updates run side by side.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.eye(3))
        >>> opt = AdamP([w], lr=0.01, weight_decay=1e-2)
        >>> (w * torch.randn(3, 3)).sum().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        fuse: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        rule = {"delta": delta, "wd_ratio": wd_ratio}
        super().__init__(params, {**defaults, **rule, "nesterov": nesterov, "fuse": fuse})

    @override
    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, got {betas!r}")
        for beta in betas:
            check_number("betas", beta, 0.0, 1.0, below=True)

    @override
    def _update(self, w: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[w]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=w.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(w), torch.zeros_like(w)
        moments = (state["exp_avg"], state["exp_avg_sq"], state["step"])
        rules = (*group["betas"], group["weight_decay"], group["nesterov"], Projection.of(group))
        step = fused(advance) if group["fuse"] else advance
        step(w, gradient, *moments, group["lr"], *rules)


def advance(
    w: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    count: torch.Tensor,
    lr: float | torch.Tensor,
    beta1: float | torch.Tensor,
    beta2: float,
    weight_decay: float | torch.Tensor,
    nesterov: bool,
    rule: Projection,
) -> None:
    """Move a parameter and its moments, all in place.

    Args:
        w: the parameter.
        gradient: of the loss.
        mean: the first moment.
        square: the second moment.
        count: of steps, on the device: the powers of β are computed there, without a host synchronisation.
        lr: η.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        weight_decay: ω.
        nesterov: Nesterov momentum.
        rule: of the projection; its ε is also added to the root of the second moment.
    """
    count += 1
    if isinstance(beta1, torch.Tensor):
        mean.add_((1 - beta1) * (gradient - mean))
    else:
        mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (square.sqrt() / _correction(beta2, count).sqrt()).add_(rule.eps)
    update = (beta1 * mean + (1 - beta1) * gradient if nesterov else mean) / denominator
    move(w, gradient, update, lr / _correction(beta1, count), lr * weight_decay, rule)


def _correction(beta: float | torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """1 - β^t, accurate in float32 for β near 1."""
    power = torch.log(beta) if isinstance(beta, torch.Tensor) else math.log(beta) if beta else -math.inf
    return -torch.expm1(step * power)
