"""Rates that fall inside of the optimizer, and averages of weights that stand in for a schedule.

With ``total_steps`` rates rise linearly over the first tenth and fall linearly to zero. The average
is

    w̄ ← w̄ + (1 + η)/(t + η) (w - w̄),        η = 8,

a mean over about the last ninth of all steps so far, so that it needs no horizon. Rows on spheres
have the norms of the weights again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fisherfold.optim.distributed import local
from fisherfold.optim.layout import Entry
from fisherfold.optim.spheres import norms

WARM_UP = 0.1
ETA = 8.0
BatchNorms = nn.modules.batchnorm._BatchNorm


def rate_factor(step: int, total_steps: int | None) -> float:
    """What rates are multiplied by in a step, counted from 1."""
    if total_steps is None:
        return 1.0
    warm = max(round(WARM_UP * total_steps), 1)
    if step <= warm:
        return step / warm
    return max(total_steps + 1 - step, 0) / (total_steps + 1 - warm)


def take_up(states: list[dict[str, Tensor]], weights: list[Tensor], step: int) -> None:
    """Take weights up into their averages."""
    for state, weight in zip(states, weights, strict=True):
        if "average" not in state:
            state["average"] = weight.detach().clone()
        state["average"].lerp_(weight, (1 + ETA) / (step + ETA))


@contextmanager
def averaged(
    model: nn.Module | None,
    entries: list[Entry],
    states: Mapping[Any, dict[str, Tensor]],
    batches: Iterable[Any] | None,
) -> Iterator[None]:
    """Put averages in the place of weights.

    Statistics of batch norms are renewed from batches of inputs.
    """
    normed = [m for m in model.modules() if isinstance(m, BatchNorms)] if model else []
    normed = [m for m in normed if m.track_running_stats]
    if normed and batches is None:
        raise ValueError(
            "averaged weights have other batch-norm statistics: pass averaged(batches), some "
            "batches of inputs"
        )
    found = [e for e in entries if "average" in states[e.parameter]]
    if not found:
        raise ValueError("there is no average yet: pass average=True and take a step")
    saved = [local(e.parameter.detach()).clone() for e in found]
    buffers = [(b, b.clone()) for m in normed for b in m.buffers(recurse=False)]
    modes = [(m, m.training) for m in model.modules()] if model else []
    try:
        with torch.no_grad():
            for entry, old in zip(found, saved, strict=True):
                value = local(states[entry.parameter]["average"]).to(old.dtype)
                local(entry.parameter.detach()).copy_(_at_norm(entry, value, old))
            if normed and model is not None:
                _renew(model, normed, batches or [])
        yield
    finally:
        with torch.no_grad():
            for entry, old in zip(found, saved, strict=True):
                local(entry.parameter.detach()).copy_(old)
            for buffer, old in buffers:
                buffer.copy_(old)
        for module, training in modes:
            module.training = training


def _at_norm(entry: Entry, value: Tensor, like: Tensor) -> Tensor:
    """An average of rows on spheres, at the norms that the weight has."""
    layout = entry.layout
    if entry.spheres != layout.matrices * layout.rows or value.shape != entry.parameter.shape:
        return value
    rows, own = (layout.split(t).flatten(0, 1) for t in (value, like))
    rows = rows * (norms(own) / norms(rows).clamp_min(torch.finfo(rows.dtype).tiny))
    return layout.join(rows.view(layout.matrices, layout.rows, -1), value.shape)


def _renew(model: nn.Module, normed: list[Any], batches: Iterable[Any]) -> None:
    """Plain means of the statistics over batches."""
    own = [(m, m.momentum) for m in normed]
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    for m in normed:
        m.reset_running_stats()
        m.momentum = None
        m.train()
    try:
        for batch in batches:
            inputs = batch[0] if isinstance(batch, list | tuple) else batch
            _ = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    finally:
        for m, momentum in own:
            m.momentum = momentum
        for module, training in modes:
            module.training = training
