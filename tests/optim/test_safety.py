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
        ({"lr": 0.0}, "lr must be above 0, got 0.0"),
        ({"lr": -1.0}, "lr must be above 0, got -1.0"),
        ({"lr": float("nan")}, "lr must be above 0, got nan"),
        ({"lr": True}, "lr must be above 0, got True"),
        ({"rest_lr": 0}, "rest_lr must be above 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"weight_decay": -1e-4}, "weight_decay must be at least 0"),
        ({"damping": 0.0}, "damping must be above 0"),
        ({"every": -1}, "every must be at least 0"),
        (
            {"direction": "adam"},
            "direction must be one of 'spectral', 'gradient', 'natural', got 'adam'",
        ),
        ({"rest": "lion"}, "rest must be one of"),
        ({"invariant": "guess"}, "invariant must be 'probe', 'modules', 'none' or a mapping"),
        ({"invariant": "probe"}, "needs example_input"),
        ({"invariant": {"5.weight": "row"}}, "names no parameters of the model: 5.weight"),
        ({"invariant": {"0.weight": 3}}, "divides the rows"),
        ({"invariant": {"0.bias": "row"}}, "two or more dimensions"),
        (
            {"example_input": torch.zeros(4, 7)},
            r"example_input \(shapes \[\(4, 7\)\]\) was rejected by Sequential",
        ),
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
    optimizer = kind(net)
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


@pytest.mark.parametrize("kind", [SphereOptimizer, MKFAC, SGDG])
@pytest.mark.parametrize("example", [X, None])
def test_a_model_without_normalisation(kind, example):
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.warns(
        UserWarning, match="no weight of Sequential was found to be scale invariant"
    ) as caught:
        optimizer = kind(net, example_input=example)
    assert len(caught) == 1
    step(net, optimizer)
    assert ("give example_input" in str(caught[0].message)) == (example is None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(net, invariant="none")


def test_a_model_that_has_changed():
    net = bn_net()
    optimizer = SphereOptimizer(net)
    net[3] = nn.Linear(8, 3)
    with pytest.warns(UserWarning, match="the model has changed since .* does not move 3.weight"):
        step(net, optimizer)


def test_batch_norms_in_evaluation_mode():
    net = bn_net()
    optimizer = SphereOptimizer(net)
    net[1].eval()
    with pytest.warns(
        UserWarning, match=r"batch norms are in evaluation mode while training \(1\)"
    ):
        step(net, optimizer)
    for _ in range(120):  # an error if it warned again
        step(net, optimizer)


def test_weight_decay_on_spheres_is_ignored_with_one_warning():
    net = bn_net()
    with pytest.warns(
        UserWarning, match="weight decay has no meaning for weights on spheres"
    ) as caught:
        optimizer = SphereOptimizer(
            [{"params": [net[0].weight], "rule": "spheres", "weight_decay": 0.1}], 0.02
        )
    assert len(caught) == 1
    assert optimizer.param_groups[0]["weight_decay"] == 0.0


def test_rows_of_zero_are_not_put_on_spheres():
    net = bn_net()
    with torch.no_grad():
        net[0].weight[2] = 0.0
        net[1].bias.fill_(0.5)
    with pytest.warns(UserWarning, match="0.weight has rows of zero"):
        optimizer = SphereOptimizer(net)
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
    with pytest.raises(
        ValueError, match=r"another optimizer: rule='spheres' where 'muon' is expected"
    ):
        SphereOptimizer(net, invariant="none").load_state_dict(optimizer.state_dict())
    with pytest.raises(
        ValueError, match=r"another optimizer: direction='spectral' where 'gradient' is expected"
    ):
        SphereOptimizer(net, direction="gradient").load_state_dict(optimizer.state_dict())
    assert all(torch.equal(v, before[k]) for k, v in optimizer.state[net[0].weight].items())


def test_names_in_a_mapping_override_what_is_found():
    net = bn_net()
    optimizer = SphereOptimizer(net, invariant={"3.weight": "none"})
    assert optimizer.findings["0.weight"].kind == "row"
    with pytest.warns(UserWarning, match="nothing is on spheres"):
        SphereOptimizer(nn.Sequential(nn.Linear(6, 3)), invariant="modules")
    assert SphereOptimizer(net, invariant={"0.weight": "none"}).findings["0.weight"].kind == "none"


def test_a_model_that_cannot_be_traced():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, x):
            h = self.norm(self.map(x))
            return self.head(h if h.sum() > 0 else -h)

    with pytest.warns(UserWarning, match="give example_input"):
        SphereOptimizer(Net())
    net = Net()
    step(net, SphereOptimizer(net, example_input=X))


def test_parameters_without_gradients_and_frozen_ones_stay():
    net = bn_net()
    net[0].weight.requires_grad_(False)
    optimizer = SphereOptimizer(net, example_input=X)
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
    optimizer = SphereOptimizer(net, invariant="none")
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
