"""Generic values of parameters: the same at every visit, whatever was visited before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fisherfold.optim.generic import SPREADS, Points


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Embedding(11, 6, padding_idx=3), nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 4))
    net = nn.Sequential(*layers).double()
    with torch.no_grad():
        net[2].weight.neg_()
        net[3].weight.zero_()
        net[1].weight[0] = 0.0
    return net


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


PLACES = (("free", 0), ("free", 1), ("free", 1), ("gentle", 1), ("free", 0), ("gentle", 2), ("free", 2))


def test_a_place_does_not_depend_on_the_way_there() -> None:
    net = network()
    points, only = Points(net, 5), ["1.bias", "3.weight"]
    for chosen in (None, only, None):
        for manner, draw in PLACES:
            points.move(manner, draw, only=chosen)
            other = network()
            Points(other, 5).move(manner, draw, only=chosen)
            assert all(map(torch.equal, values(net), values(other)))
    points.restore()
    assert all(map(torch.equal, values(net), values(network())))


def test_biases_that_have_been_measured_move_elsewhere_and_nothing_else_does() -> None:
    net = network()
    points, tokens = Points(net, 5), torch.arange(11).reshape(1, 11)
    points.move("free", 0)
    before = copy.deepcopy(net)
    points.measure_biases(lambda: net(tokens))
    points.move("free", 0)
    changed = [
        n for (n, p), q in zip(net.named_parameters(), before.parameters(), strict=True) if not torch.equal(p, q)
    ]
    assert changed == ["1.bias", "3.bias"]


def test_a_parameter_that_its_module_has_changed_is_moved_again() -> None:
    net = network()
    points = Points(net, 5)
    points.move("free", 0)
    there = values(net)
    with torch.no_grad():
        net[1].weight.mul_(2)
    points.move("free", 0)
    assert all(map(torch.equal, values(net), there))


@pytest.mark.parametrize("manner", SPREADS)
def test_entries_have_their_size_and_tensors_of_one_sign_keep_it(manner: str) -> None:
    net = network()
    points = Points(net, 5)
    points.move(manner, 0)
    assert bool((net[2].weight < 0).all())  # gains were negative
    weight, own, spread = net[1].weight.detach(), points.own["1.weight"], SPREADS[manner]
    size = float(own.square().mean().sqrt())
    assert bool((weight.abs() >= (1 - spread) * 0.05 * size).all())  # zeros are filled
    assert bool((weight[0].abs() <= (1 + spread) * size).all())
    if manner == "gentle":
        large = own.abs() > 0.05 * size
        assert torch.equal(weight[large].sign(), own[large].sign())
    assert torch.equal(net[0].weight[3], points.own["0.weight"][3])  # padding
