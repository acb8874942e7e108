"""The probe of scale invariance: right on every architecture, without side effects, at any values."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from architectures import SUITE, build
from torch import nn

from fisherfold.optim import find_scale_invariant


def kinds(findings):
    return {name: f.kind for name, f in findings.items() if f.kind != "none"}


@pytest.mark.parametrize("name", SUITE)
def test_every_architecture(name):
    net, example, expected = build(name)
    assert kinds(find_scale_invariant(net, example)) == expected


def test_the_verdict_is_about_the_architecture_not_the_start():
    """Zero biases, gains and last layers hide what training shows; so do a constant example and a single sample."""
    net = nn.Sequential(
        nn.Linear(5, 6),
        nn.LayerNorm(6),
        nn.ReLU(),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    )
    with torch.no_grad():
        for p in (net[0].bias, net[4].weight, net[5].weight, net[5].bias):
            p.zero_()
    for example in (torch.randn(8, 5), torch.zeros(8, 5), torch.randn(1, 5)):
        assert kinds(find_scale_invariant(net, example)) == {"3.weight": "row"}


def test_the_model_and_the_random_state_stay_as_they_are():
    net, example, _ = build("residual-post-activation")
    net.eval()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    state = torch.get_rng_state()
    find_scale_invariant(net, example)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not net.training
    assert all(p.grad is None for p in net.parameters())


def test_at_most_ten_passes_on_a_small_slice():
    class Counting(nn.Module):
        seen: ClassVar[set[tuple[int, ...]]] = set()
        count = 0

        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            )

        def forward(self, x):
            Counting.seen.add(tuple(x.shape))
            Counting.count += 1
            return self.net(x)

    find_scale_invariant(Counting(), torch.randn(64, 3, 224, 224))
    assert Counting.count <= 10
    assert Counting.seen == {(4, 3, 64, 64)}


def test_a_model_that_returns_its_loss():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

        def forward(self, x, y):
            return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    found = find_scale_invariant(Loss(), (torch.randn(8, 5), torch.arange(8) % 3))
    assert kinds(found) == {"net.0.weight": "row"}


def test_one_rescaling_tells_by_which_weights_the_outputs_change():
    """At the start the ε of a norm dominates in two of six layers: no more than six forward passes in all."""
    count = 0

    class Counting(nn.Sequential):
        def forward(self, x):
            nonlocal count
            count += 1
            return super().forward(x)

    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())]
    net = Counting(*layers, nn.Linear(6, 3))
    with torch.no_grad():
        for k in (3, 9):
            net[k].weight.mul_(3e-3)
    found = kinds(find_scale_invariant(net, torch.randn(16, 6)))
    assert found == {f"{k}.weight": "row" for k in (0, 6, 12, 15)}
    assert count <= 9


def test_an_epsilon_that_dominates_is_no_invariance():
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, eps=1e-3), nn.Linear(6, 3))
    assert kinds(find_scale_invariant(net, torch.randn(8, 5))) == {"0.weight": "row"}
    with torch.no_grad():
        net[0].weight.mul_(1e-3)
    found = find_scale_invariant(net, torch.randn(8, 5))["0.weight"]
    assert found.kind == "none"
    assert "ε of a norm dominates" in found.reason


@pytest.mark.parametrize(
    ("model", "example", "error", "message"),
    [
        (
            nn.Linear(5, 3),
            torch.randn(4, 7),
            ValueError,
            r"example_input \(shapes \[\(4, 7\)\]\) was rejected by Linear",
        ),
        (nn.ReLU(), torch.randn(4, 7), ValueError, "must have parameters, ReLU has none"),
        (
            [torch.zeros(3)],
            torch.randn(4, 7),
            TypeError,
            "must be a torch.nn.Module, not its parameters",
        ),
        (nn.Embedding(3, 4), torch.randn(2, 3), ValueError, "rejected by Embedding"),
    ],
)
def test_bad_input(model, example, error, message):
    with pytest.raises(error, match=message):
        find_scale_invariant(model, example)
