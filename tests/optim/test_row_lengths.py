"""Lengths of rows are looked at where something else than a step has changed the weight, and nowhere else."""

from __future__ import annotations

import copy
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from fisherfold import MKFAC
from fisherfold.optim import lengths as lengths_module
from fisherfold.optim import on_spheres


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


ZEROS = "0.weight: 1 of 3 rows is zero or tiny and stays Euclidean"


def with_zero_row(net: nn.Module) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in net.state_dict().items()}
    state["0.weight"][1] = 0.0
    return state


@pytest.mark.parametrize("options", [{}, {"balanced": True}, {"orthogonality": 0.1}, {"retraction": "normalize"}])
def test_a_zero_row_that_is_loaded_later_goes_on_like_one_of_the_start(options: dict[str, Any]) -> None:
    net, early = network(), network()
    optimizer = MKFAC(net, lr=0.01, manifold_lr=0.01, momentum=0.0, **options)
    step(net, optimizer)
    early.load_state_dict(with_zero_row(net))
    with pytest.warns(UserWarning, match=ZEROS):
        optimizer_early = MKFAC(early, lr=0.01, manifold_lr=0.01, momentum=0.0, **options)
    net.load_state_dict(with_zero_row(net))
    if options.get("balanced"):
        optimizer.state[net[0].weight]["balance"].zero_()
    with pytest.warns(UserWarning, match=ZEROS) as caught:
        step(net, optimizer)
    assert [w.filename for w in caught] == [__file__]
    step(early, optimizer_early)
    for _ in range(2):
        torch.testing.assert_close(net.state_dict(), early.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once
            step(net, optimizer)
            step(early, optimizer_early)


def test_what_a_zero_row_remembers_of_its_past_does_not_move_it() -> None:
    net = network()
    optimizer = MKFAC(net, lr=0.01, manifold_lr=0.01, balanced=True)
    for _ in range(3):
        step(net, optimizer)
    carried = optimizer.state[net[0].weight]["momentum_buffer"].clone()
    net.load_state_dict(with_zero_row(net))
    optimizer.zero_grad()
    net[0].weight.grad = torch.ones_like(net[0].weight)
    with pytest.warns(UserWarning, match=ZEROS):
        optimizer.step()
    weight, state = net[0].weight.detach(), optimizer.state[net[0].weight]
    torch.testing.assert_close(weight[1], torch.full_like(weight[1], -0.01))
    torch.testing.assert_close(weight[::2].norm(dim=1), torch.ones(2, dtype=torch.float64))
    assert carried[1].norm() > 0.1
    assert state["alive"].flatten().tolist() == [True, False, True]
    # a second one joins the first, in the tensor that captured graphs read
    alive = state["alive"]
    with torch.no_grad():
        net[0].weight[2] = 0.0
    with pytest.warns(UserWarning, match=ZEROS):
        optimizer.step()
    assert state["alive"] is alive
    assert alive.flatten().tolist() == [True, False, False]


def test_rows_of_zero_are_looked_for_where_something_else_has_changed_the_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    look = on_spheres.directed

    def counted(blocks: torch.Tensor) -> torch.Tensor:
        seen.append(len(blocks))
        return look(blocks)

    monkeypatch.setattr(on_spheres, "directed", counted)
    net = network()
    optimizer = MKFAC(net, lr=0.01, manifold_lr=0.01)
    for scale in (1.0, 5.0):
        with torch.no_grad():
            net[0].weight.mul_(scale)
        for _ in range(3):
            step(net, optimizer)
    assert seen == [3, 3]


def test_weights_whose_memory_is_replaced_are_looked_at(looked: list[int]) -> None:
    """PyTorch counts no change there; pruning ends that way, and so does every cast of a network."""
    net, reference = network(), network()
    for each, changed in ((net, False), (reference, True)):
        optimizer = MKFAC(each, lr=0.01, manifold_lr=0.01)
        step(each, optimizer)
        weight = each[0].weight.detach() * torch.tensor([[1.0], [0.0], [5.0]])
        if changed:
            with torch.no_grad():
                each[0].weight.copy_(weight)
        else:
            each[0].weight.data = weight.clone()
        with pytest.warns(UserWarning, match=ZEROS):
            step(each, optimizer)
        step(each, optimizer)
    torch.testing.assert_close(net.state_dict(), reference.state_dict(), rtol=0.0, atol=0.0)
    torch.testing.assert_close(float(net[0].weight[2].detach().norm()), 5.0)
    assert len(looked) == 6


def test_a_pruned_network_goes_on() -> None:
    net = network()
    optimizer = MKFAC(net, lr=0.01, manifold_lr=0.01, momentum=0.0)
    step(net, optimizer)
    prune.ln_structured(net[0], "weight", amount=1, n=2, dim=0)
    step(net, optimizer)
    prune.remove(net[0], "weight")
    with pytest.warns(UserWarning, match=ZEROS):
        step(net, optimizer)
    assert bool(torch.isfinite(net[0].weight).all())


def test_zero_rows_that_nobody_can_see_do_not_become_nan() -> None:
    net = network()
    optimizer = MKFAC(net, lr=0.01, manifold_lr=0.01, momentum=0.0)
    step(net, optimizer)
    net[0].weight.data[1] = 0.0
    net[0].weight.grad = torch.zeros_like(net[0].weight)
    optimizer.step()
    torch.testing.assert_close(net[0].weight.detach().norm(dim=1), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))


def test_a_captured_step_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look waits for the device, which ends a capture."""
    captured: Any = SimpleNamespace(is_cuda=True, _version=3, data_ptr=lambda: 64)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        assert lengths_module.Lengths().changed(captured) is not capturing
