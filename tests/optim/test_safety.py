"""Mistakes that users make: one clear message each, and parameters stay as they are."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fisherfold.optim import KFAC, MKFAC, SGDG, SphereOptimizer

X, Y = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def bn_net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def step(net, optimizer, x=X):
    optimizer.zero_grad()
    F.cross_entropy(net(x), Y).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"lr": float("nan")}, "lr must be at least 0, got nan"),
        ({"lr": True}, "lr must be at least 0, got True"),
        ({"rest_lr": -1}, "rest_lr must be at least 0"),
        ({"betas": (0.9, 1.0)}, "betas must be at least 0 and below 1, got 1.0"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"ns_steps": 0}, "ns_steps must be a whole number above 0"),
        ({"total_steps": 0}, "total_steps must be above 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"weight_decay": -1e-4}, "weight_decay must be at least 0"),
        ({"damping": 0.0}, "damping must be above 0"),
        ({"every": -1}, "every must be at least 0"),
        (
            {"direction": "adam"},
            "direction must be one of 'spectral', 'gradient', 'natural', got 'adam'",
        ),
        ({"rest": "lion"}, "rest must be one of"),
        ({"overrides": {"5.weight": "row"}}, "no parameters of the model: 5.weight"),
        ({"overrides": {"0.weight": 3}}, "divides the rows"),
        ({"overrides": {"0.bias": "row"}}, "two or more dimensions"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        SphereOptimizer(bn_net(), **options)


@pytest.mark.parametrize("kind", [SphereOptimizer, MKFAC, KFAC, SGDG])
def test_bare_parameters(kind):
    net = bn_net()
    for bare in (
        net.parameters(),
        list(net.parameters()),
        [{"params": net.parameters()}],
        net[0].weight,
    ):
        with pytest.raises(TypeError, match=r"pass the module: \w+\(model, ...\)"):
            kind(bare)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [SphereOptimizer, MKFAC, KFAC, SGDG])
def test_gradients_that_are_not_finite(kind, value):
    net = bn_net()
    options = {} if kind in (SphereOptimizer, KFAC) else {"example_input": X}
    optimizer = kind(net, **options)
    step(net, optimizer)
    before = [p.detach().clone() for p in net.parameters()]
    F.cross_entropy(net(X), Y).backward()
    net[3].weight.grad[1, 2] = value
    with pytest.raises(
        FloatingPointError,
        match=r"the gradient of 3.weight is not finite; parameters are unchanged",
    ):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    step(net, optimizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs example_input"),
        ({"invariant": {"9.weight": "row"}}, "no parameters of the model: 9.weight"),
        (
            {"example_input": torch.zeros(4, 7)},
            r"example_input \(shapes \[\(4, 7\)\]\) was rejected by Sequential",
        ),
    ],
)
@pytest.mark.parametrize("kind", [MKFAC, SGDG])
def test_presets_need_an_example_or_names(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(bn_net(), **options)


@pytest.mark.parametrize("kind", [MKFAC, SGDG])
def test_presets_for_a_model_without_normalisation(kind):
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.warns(UserWarning, match="no weight of Sequential .* scale invariant") as caught:
        optimizer = kind(net, example_input=X)
    assert len(caught) == 1
    step(net, optimizer)
    kind(net, invariant="none")


def test_a_model_without_hidden_matrices():
    with pytest.warns(UserWarning, match="Linear has no hidden matrix: all of it gets adamw"):
        optimizer = SphereOptimizer(nn.Linear(6, 3))
    assert {g["rule"] for g in optimizer.param_groups if g["params"]} == {"adamw"}
    with pytest.raises(ValueError, match="must have parameters"):
        SphereOptimizer(nn.ReLU())


def test_a_head_that_is_exchanged_is_adopted():
    net = bn_net()
    optimizer = SphereOptimizer(net)
    for _ in range(3):
        step(net, optimizer)
    net[3] = nn.Linear(8, 5)
    before = net[3].weight.detach().clone()
    with pytest.warns(UserWarning, match="3.weight, 3.bias of the model is a new parameter"):
        step(net, optimizer)
    assert not torch.equal(net[3].weight, before)
    step(net, optimizer)
    assert optimizer.state[net[3].weight]["step"] == 2
    assert any(p is net[3].bias for g in optimizer.param_groups for p in g["params"])


def test_parameters_that_are_new_are_reported():
    net = bn_net()
    optimizer = SphereOptimizer(net)
    step(net, optimizer)
    net.append(nn.Linear(3, 3))
    net[0].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"does not move: 4\.weight, 4\.bias; use add_param_group"):
        step(net, optimizer)
    optimizer.add_param_group({"params": net[4].parameters()})
    before = net[4].weight.detach().clone()
    step(net, optimizer)
    assert not torch.equal(net[4].weight, before)
    assert optimizer.param_groups[-1]["param_names"] == ["4.weight", "4.bias"]
    assert optimizer.param_groups[-1]["lr"] == pytest.approx(0.01)


def test_one_rate_for_all_groups_is_reported():
    net = bn_net()
    optimizer = SphereOptimizer(net)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False
    )
    with pytest.warns(UserWarning, match=r"pass a list, as in OneCycleLR"):
        step(net, optimizer)
    schedule.step()
    step(net, optimizer)  # an error if it warned again


@pytest.mark.parametrize("lr", [0.0])
def test_a_rate_of_zero_moves_nothing(lr):
    net = bn_net()
    optimizer = SphereOptimizer(net, lr)
    before = [p.detach().clone() for p in net.parameters()]
    step(net, optimizer)
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


def test_weight_decay_on_spheres_is_ignored_with_one_warning():
    net = bn_net()
    with pytest.warns(UserWarning, match="weights on spheres keep their norms") as caught:
        optimizer = SphereOptimizer(
            [{"params": [net[0].weight], "rule": "spheres", "weight_decay": 0.1}], 0.02
        )
    assert len(caught) == 1
    assert optimizer.param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize("kind", ["row", "all"])
def test_rows_of_zero_get_adamw(kind):
    """A weight that starts at zero, as those of residual branches and adapters do, has no direction."""
    net = bn_net()
    with torch.no_grad():
        net[0].weight[2 if kind == "row" else slice(None)] = 0.0
        net[1].bias.fill_(0.5)
    optimizer = SphereOptimizer(net, overrides={"3.weight": "row"})
    assert "0.weight   8×6    adamw" in optimizer.report()
    step(net, optimizer)
    assert float(net[0].weight[2].detach().norm()) > 0


def test_states_of_other_models():
    net = bn_net()
    optimizer = SphereOptimizer(net)
    step(net, optimizer)
    other = bn_net(9)
    theirs = SphereOptimizer(other)
    step(other, theirs)
    before = {k: v.clone() for k, v in optimizer.state[net[0].weight].items()}
    with pytest.raises(
        ValueError, match=r"another model: 0.weight has shape \(9, 6\), expected \(8, 6\)"
    ):
        optimizer.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="another model"):
        optimizer.load_state_dict(torch.optim.SGD(net[0].parameters(), lr=0.1).state_dict())
    damaged = copy.deepcopy(optimizer.state_dict())
    damaged["state"][0]["momentum"][0, 0] = math.nan
    with pytest.raises(ValueError, match=r"momentum of 0\.weight is not finite"):
        optimizer.load_state_dict(damaged)
    with pytest.raises(ValueError, match=r"another optimizer: rule='adamw' where 'sgd' is expec"):
        SphereOptimizer(net, rest="sgd").load_state_dict(optimizer.state_dict())
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        del group["format"]
        group["splits"] = group.pop("layouts")
    with pytest.raises(
        ValueError, match=r"was written by fisherfold 0\.2.*start the optimizer anew"
    ):
        optimizer.load_state_dict(old)
    with pytest.raises(
        ValueError, match=r"another optimizer: direction='spectral' where 'gradient' is expected"
    ):
        SphereOptimizer(net, direction="gradient").load_state_dict(optimizer.state_dict())
    assert all(torch.equal(v, before[k]) for k, v in optimizer.state[net[0].weight].items())


def test_parameters_without_gradients_and_frozen_ones_stay():
    net = bn_net()
    net[0].weight.requires_grad_(False)
    optimizer = SphereOptimizer(net)
    frozen = net[0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(net, optimizer)
    assert torch.equal(net[0].weight, frozen)
    net[0].weight.requires_grad_(True)
    step(net, optimizer)
    assert not torch.equal(net[0].weight, frozen)


def test_sparse_gradients():
    net = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    optimizer = SphereOptimizer(net, overrides={"2.weight": "adamw"})
    net(torch.zeros(2, 2, dtype=torch.int64)).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("direction", ["spectral", "gradient", "natural"])
def test_zero_gradients_and_lr_zero_move_nothing(direction):
    """``torch.distributed.checkpoint`` fills the state by such a step."""
    net = bn_net()
    optimizer = SphereOptimizer(net, direction=direction, every=1)
    before = [p.detach().clone() for p in net.parameters()]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    step(net, optimizer)
    assert all(bool(p.isfinite().all()) for p in net.parameters())
