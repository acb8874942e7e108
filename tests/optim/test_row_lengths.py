"""Lengths of rows are looked at where something else than a step has changed the weight, and nowhere else."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from fisherfold import MKFAC
from fisherfold.optim import lengths as lengths_module


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of blocks whose lengths have been measured."""
    seen: list[int] = []
    measure = lengths_module.block_lengths

    def counted(parameter: torch.Tensor, spheres: int, alive: torch.Tensor | None) -> torch.Tensor:
        seen.append(spheres)
        return measure(parameter, spheres, alive)

    monkeypatch.setattr(lengths_module, "block_lengths", counted)
    return seen


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, eps=1e-14), nn.Linear(3, 2)).double()


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer.zero_grad()
    net(x).square().sum().backward()
    optimizer.step()


def test_steps_look_once_and_again_after_weights_are_loaded(looked: list[int]) -> None:
    net = network()
    optimizer = MKFAC(net, lr=0.01, manifold_lr=0.01)
    for _ in range(3):
        step(net, optimizer)
    assert looked == [3]
    net.load_state_dict(net.state_dict())  # the same weights: unit rows again
    for _ in range(3):
        step(net, optimizer)
    assert looked == [3, 3]
    with torch.no_grad():
        net[0].weight.mul_(5)
    for _ in range(3):  # rows of other lengths are looked at in every step, so that a run goes on to the bit
        step(net, optimizer)
    assert looked == [3] * 5
    torch.testing.assert_close(net[0].weight.detach().norm(dim=1), torch.full((3,), 5.0, dtype=torch.float64))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_look_for_themselves(looked: list[int], copied) -> None:
    net = network()
    optimizer = MKFAC(net, lr=0.01, manifold_lr=0.01)
    step(net, optimizer)
    net_too, optimizer_too = copied((net, optimizer))
    with torch.no_grad():
        net_too[0].weight.mul_(5)
    for pair in ((net, optimizer), (net_too, optimizer_too)):
        step(*pair)
    assert looked == [3, 3]
    torch.testing.assert_close(net_too[0].weight, 5 * net[0].weight)
