"""Compiled updates: a schedule changes their numbers, which neither compiles them step by step nor is lost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from fisherfold.optim import SGDG, SGDP, AdamP
from fisherfold.optim.fuse import fused


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled as far as the guards and the graph, which is quick, and not into kernels."""
    torch._dynamo.reset()
    fused.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()
    fused.cache_clear()


def scheduled(kind: Any, fuse: bool) -> list[torch.Tensor]:
    """Six steps in which everything changes that a scheduler may change."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    x, y = torch.randn(16, 5).double(), torch.randint(3, (16,))
    optimizer = kind(net, balanced=True, fuse=fuse) if kind is SGDG else kind(net.parameters(), fuse=fuse)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    for step in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        if kind is not SGDG:
            optimizer.param_groups[0]["weight_decay"] = 0.01 * step
        optimizer.step()
        schedule.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("kind", "graphs"), [(SGDP, 4), (AdamP, 4), (SGDG, 1)])
def test_a_schedule_does_not_compile_updates_again(kind: type, graphs: int) -> None:
    torch._dynamo.utils.counters.clear()
    mine = scheduled(kind, fuse=True)
    # a shape each, and once more when momentum and weight decay have been seen to change
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * graphs
    for p, q in zip(mine, scheduled(kind, fuse=False), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("kind", [SGDP, AdamP])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_and_empty_parameters_are_updated_too(kind: Any, dtype: torch.dtype) -> None:
    found = []
    for fuse in (False, True):
        number, empty = nn.Parameter(torch.tensor(2.0, dtype=dtype)), nn.Parameter(torch.ones(0, 3, dtype=dtype))
        optimizer = kind([number, empty], lr=0.1, weight_decay=0.1, fuse=fuse)
        (number**2 + empty.sum()).backward()
        optimizer.step()
        found.append(number.detach())
    assert float(found[0]) < 2
    torch.testing.assert_close(*found)
