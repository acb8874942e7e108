"""SGDP: SGD with momentum whose update loses its radial part on weights that look scale invariant.

With buffer b ← μ b + (1-τ) g and d = Π(b) (or Π(g + μ b) with Nesterov):  w ← (1 - η ω ρ/(1-μ)) w - η d, where Π is the
projection of ``projection.py`` and ρ = ``wd_ratio`` where it acted, else 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from typing_extensions import override

from fisherfold.optim.fuse import fused
from fisherfold.optim.options import check_number
from fisherfold.optim.projection import ProjectedOptimizer, Projection, move


class SGDP(ProjectedOptimizer):
    """SGD with the projection of Heo et al. (2021), equal to their code, without its host synchronisation.

    Args:
        params: parameters or groups.
        lr: η.
        momentum: μ.
        dampening: τ.
        weight_decay: ω.
        nesterov: Nesterov momentum.
        eps: guards the norms.
        delta: the threshold of the invariance test.
        wd_ratio: the factor on weight decay where the update was projected.
        fuse: compile the update of a parameter with ``torch.compile``; on a GPU updates run side by side.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.eye(3))
        >>> opt = SGDP([w], lr=0.1, momentum=0.9)
        >>> (w * torch.randn(3, 3)).sum().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        eps: float = 1e-8,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        fuse: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        rule = {"eps": eps, "delta": delta, "wd_ratio": wd_ratio}
        super().__init__(params, {**defaults, **rule, "nesterov": nesterov, "fuse": fuse})

    @override
    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        check_number("momentum", group["momentum"], 0.0, 1.0, below=True)
        check_number("dampening", group["dampening"], 0.0, 1.0)

    @override
    def _update(self, w: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[w]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(w)
        rules = (group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"], Projection.of(group))
        step = fused(advance) if group["fuse"] else advance
        step(w, gradient, state["momentum_buffer"], group["lr"], *rules)


def advance(
    w: torch.Tensor,
    gradient: torch.Tensor,
    buffer: torch.Tensor,
    lr: float | torch.Tensor,
    momentum: float | torch.Tensor,
    dampening: float,
    weight_decay: float | torch.Tensor,
    nesterov: bool,
    rule: Projection,
) -> None:
    """Move a parameter and its momentum, both in place.

    Args:
        w: the parameter.
        gradient: of the loss.
        buffer: the momentum.
        lr: η.
        momentum: μ.
        dampening: τ.
        weight_decay: ω.
        nesterov: Nesterov momentum.
        rule: of the projection.
    """
    buffer.mul_(momentum).add_(gradient, alpha=1 - dampening)
    update = gradient + momentum * buffer if nesterov else buffer
    move(w, gradient, update, lr, lr * weight_decay / (1 - momentum), rule)
