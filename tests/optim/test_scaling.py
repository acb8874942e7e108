"""Gains and biases scaled towards growing loss, and back to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fisherfold.optim import RowAscent, ScaleAscent
from fisherfold.optim.scaling import changes_uphill


def problem() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)).double()
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([0.3, -1.2, 0.0, 2.0, 0.7]))
        net[1].bias.copy_(torch.randn(5))
    return net, torch.randn(16, 2, 4, 4, dtype=torch.float64), torch.randint(3, (16,))


def vectors(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach() for p in net.parameters() if p.ndim == 1])


def test_no_other_change_of_the_same_size_makes_the_loss_grow_faster() -> None:
    """The logarithms have the given root mean square, and the growth is the norm of the slopes times the radius."""
    net, x, y = problem()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    before, rho = vectors(net), 1e-4
    matrices = [p.detach().clone() for p in net.parameters() if p.ndim > 1]
    with ScaleAscent(net.parameters(), rho):
        inside = vectors(net)
        grown = nn.functional.cross_entropy(net(x), y)
        others = (p for p in net.parameters() if p.ndim > 1)
        assert all(torch.equal(a, b) for a, b in zip(matrices, others, strict=True))
    assert torch.equal(vectors(net), before)
    assert inside[before == 0].abs().sum() == 0
    logarithms = torch.where(before == 0, 0.0, torch.log(inside / before))
    torch.testing.assert_close(logarithms.square().mean().sqrt().item(), rho)
    slopes = []  # of the loss in the logarithm of each factor, by differences
    for p in (p for p in net.parameters() if p.ndim == 1):
        for index, value in enumerate(p.detach().clone()):
            sides = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    p[index] = value * math.exp(step)
                    sides.append(nn.functional.cross_entropy(net(x), y))
            with torch.no_grad():
                p[index] = value
            slopes.append((sides[0] - sides[1]) / 2e-5)
    dense = torch.stack(slopes)
    direction = dense / dense.norm()
    torch.testing.assert_close(logarithms, rho * math.sqrt(len(dense)) * direction, rtol=1e-4, atol=1e-10)
    expected = rho * math.sqrt(len(dense)) * dense.norm()
    torch.testing.assert_close((grown - loss).detach(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_changes_do_not_depend_on_units(dtype: torch.dtype, unit: float) -> None:
    torch.manual_seed(0)
    gain = nn.Parameter((unit * (torch.rand(40) + 0.5)).to(dtype))
    before = gain.detach().double().clone()
    gain.grad = torch.randn(40).to(dtype) * (1e-3 if dtype == torch.float16 else 1e-30)
    with ScaleAscent([gain], 0.1):
        logarithms = (gain.detach().double() / before).log()
    rounding = float(torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps)
    assert logarithms.square().mean().sqrt().item() == pytest.approx(0.1, abs=rounding)


def test_what_leads_nowhere_stays_and_no_factor_is_beyond_e() -> None:
    torch.manual_seed(0)
    lone, led, none = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.empty(0))
    before, ascent = led.detach().clone(), ScaleAscent([lone, led, none], 0.2)
    for gradient in (None, torch.zeros(5), torch.full((5,), math.nan), torch.full((5,), math.inf)):
        led.grad = gradient
        with ascent:
            assert torch.equal(led.detach(), before)
    entries, slope = torch.ones(400, dtype=torch.float64), torch.zeros(400, dtype=torch.float64)
    slope[7] = -1.0
    assert changes_uphill(entries, slope, 0.5).abs().sum() == 1.0


def test_it_stands_beside_turned_rows() -> None:
    """Both from the same gradient, and steps inside are an error that names what to do."""
    net, x, y = problem()
    nn.functional.cross_entropy(net(x), y).backward()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    rows, scales = RowAscent(net.parameters(), 0.1), ScaleAscent(net.parameters(), 0.1)
    apart = []
    for block in (rows, scales):
        with block:
            apart.append([p.detach().clone() for p in net.parameters()])
    with rows, scales:
        for turned, scaled, p in zip(*apart, net.parameters(), strict=True):
            assert torch.equal(p, scaled if p.ndim == 1 else turned)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="take the step of the optimizer after the block"), scales:
        optimizer.step()
    with pytest.raises(RuntimeError, match="one block of a ScaleAscent cannot be inside another"), scales, scales:
        pass
    assert torch.equal(net[1].weight, state["1.weight"])


@pytest.mark.parametrize("change", [-0.1, 1.0, math.nan])
def test_changes_that_are_none_are_refused(change: float) -> None:
    with pytest.raises(ValueError, match="change must be in"):
        ScaleAscent([nn.Parameter(torch.ones(2))], change)
    with pytest.raises(TypeError, match="params must be parameters, got a str"):
        ScaleAscent("ab", 0.1)
