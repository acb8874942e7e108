"""Norms on their running statistics, before which weights are not scale invariant.

In training mode a batch norm divides by what the weights before it have made of the batch, in evaluation mode by what
it has averaged: the lengths of their rows matter there, and keeping them at 1 is a restriction. Whether it is one for a
weight with rows w_i, its gradient G with rows g_i tells:

    t² = d Σ_i <w_i/‖w_i‖, g_i>² / ‖G‖²

is about 1 for rows of d entries that are not invariant, and next to 0 for those that are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fisherfold.optim.groups import names
from fisherfold.optim.structure import NORMS_PER_CHANNEL
from fisherfold.warn import warn

if TYPE_CHECKING:
    from fisherfold.optim.mkfac import MKFAC

NOT_INVARIANT = 0.5


def idle_norms(model: nn.Module) -> dict[Any, str]:
    """The batch and instance norms that divide by running statistics at the moment.

    Args:
        model: the module.

    Returns:
        Their names, by module.
    """
    norms = [m for m in model.modules() if isinstance(m, NORMS_PER_CHANNEL) and not m.training]
    if not norms:  # nearly always, and asked at every step
        return {}
    return {m: name for name, m in model.named_modules() if m in norms and m.running_mean is not None}


@contextmanager
def norms_in_training(model: nn.Module) -> Iterator[None]:
    """Refuse norms on their running statistics, before which weights are not scale invariant.

    One that is itself trained is refused at once, another where what comes in depends on something that is trained: a
    frozen part of a network, whose norms are not in training mode either, may lie before the rest.

    Args:
        model: the module.

    Yields:
        Nothing.
    """
    idle = idle_norms(model)

    def check(norm: Any, given: tuple[Any, ...]) -> None:
        if any(isinstance(t, Tensor) and t.requires_grad for t in given):
            raise ValueError(
                f"batch norm {idle[norm]!r} is in eval mode, where the weights before it are not scale invariant: call "
                "model.train() before statistics are taken (running statistics are left untouched by refresh)"
            )

    for norm in idle:
        check(norm, tuple(norm.parameters()))
    handles = [norm.register_forward_pre_hook(check) for norm in idle]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def warn_of_lengths_that_matter(optimizer: MKFAC) -> None:
    """Warn where norms are on their running statistics and the gradient of a weight on spheres has a radial part.

    It is looked for when other norms are so than at the last step, and not at every one.

    Args:
        optimizer: before a step.
    """
    idle = {} if optimizer.model is None else idle_norms(optimizer.model)
    last, optimizer._idle = optimizer._idle, frozenset(idle.values())
    if optimizer._idle <= last:
        return
    for parameter, _, spheres in optimizer._entries():
        if spheres and parameter.grad is not None and _radial(parameter, spheres) > NOT_INVARIANT:
            warn(
                f"{names(optimizer)[id(parameter)]} is kept at unit length, and its gradient shows that its length "
                f"matters: batch norm {min(optimizer._idle - last)!r} is in eval mode, where the weights before it "
                "are not scale invariant; call model.train(), or leave such weights out with invariant={...}",
            )
            return


def _radial(parameter: nn.Parameter, spheres: int) -> float:
    assert parameter.grad is not None
    w, g = (t.detach().reshape(spheres, -1).float() for t in (parameter, parameter.grad))
    along = (torch.nn.functional.normalize(w) * g).sum(dim=1)
    return float(w.shape[1] ** 0.5 * along.norm() / g.norm().clamp_min(torch.finfo(g.dtype).tiny))
