"""Rates that fall inside, averages for evaluation, and the rates that are the defaults."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fisherfold.optim import SphereOptimizer
from fisherfold.optim.averaging import rate_factor
from fisherfold.optim.grouping import rest_rate


def net_with_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def batches(count=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 32, 6, generator=generator)
    return [(a, (a[:, :3] + a[:, 3:]).argmax(1)) for a in x]


def train(net, optimizer, parts):
    for x, y in parts:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def test_rates_rise_over_a_tenth_and_fall_to_zero():
    factors = [rate_factor(step, 100) for step in range(1, 102)]
    assert factors[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert factors[10] == pytest.approx(90 / 91)
    assert factors[99] == pytest.approx(1 / 91)
    assert factors[100] == 0.0
    assert rate_factor(7, None) == 1.0
    assert [rate_factor(1, 1), rate_factor(2, 1)] == [1.0, 0.0]


def test_total_steps_are_a_schedule_from_outside():
    net, twin = net_with_norm(), net_with_norm()
    ours = SphereOptimizer(net, 0.05, rest_lr=0.01, total_steps=8)
    theirs = SphereOptimizer(twin, 0.05, rest_lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(theirs, lambda k: rate_factor(k + 1, 8))
    for part in batches():
        train(net, ours, [part])
        train(twin, theirs, [part])
        schedule.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    before = [p.detach().clone() for p in net.parameters()]
    ours._seen = -1  # the look at the model comes every 50 steps
    with pytest.warns(UserWarning, match="total_steps=8 are over: rates are 0"):
        train(net, ours, batches(1))
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


def test_the_rate_of_the_rest_follows_lr_and_the_number_of_steps():
    assert rest_rate(0.02, "adamw", None) == pytest.approx(0.01)
    assert rest_rate(0.02, "adamw", 50) == pytest.approx(0.01)
    assert rest_rate(0.02, "adamw", 5000) == pytest.approx(0.002, rel=0.02)
    assert rest_rate(0.02, "adamw", 490) == pytest.approx(0.02 * 7 / 490**0.5)
    assert rest_rate(0.002, "adamw", None) == pytest.approx(0.001)
    assert rest_rate(0.02, "sgd", None) == 0.05


def test_averages_are_those_of_the_formula_at_the_norms_of_the_weights():
    net = net_with_norm()
    optimizer = SphereOptimizer(net, average=True)
    expected: list[torch.Tensor] = []
    for step, part in enumerate(batches(), start=1):
        train(net, optimizer, [part])
        weights = [p.detach().clone() for p in net.parameters()]
        expected = expected or weights
        expected = [m + 9 / (step + 8) * (w - m) for m, w in zip(expected, weights, strict=True)]
    own = [p.detach().clone() for p in net.parameters()]
    norm = own[0].norm(dim=1, keepdim=True)
    expected[0] = expected[0] * norm / expected[0].norm(dim=1, keepdim=True)
    with optimizer.averaged([x for x, _ in batches()]):
        for p, value in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(p.detach(), value)
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), own, strict=True))


def test_averages_have_batch_norm_statistics_of_their_own():
    """Those of the averaged weights over the batches; afterwards everything is as it was."""
    net = net_with_norm()
    optimizer = SphereOptimizer(net, 0.1, average=True)
    train(net, optimizer, batches())
    before = copy.deepcopy(net.state_dict())
    net.eval()
    x = torch.cat([x for x, _ in batches()])
    with optimizer.averaged([(x,)]), torch.no_grad():
        assert not net.training
        z = net[0](x)
        torch.testing.assert_close(net[1].running_mean, z.mean(0))
        torch.testing.assert_close(net[1].running_var, z.var(0))
    assert all(torch.equal(t, before[key]) for key, t in net.state_dict().items())
    assert not net.training
    assert net[1].momentum == 0.1


def test_averages_that_are_not_there():
    net = net_with_norm()
    with pytest.raises(ValueError, match="there is no average yet: pass average=True"):
        SphereOptimizer(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))).averaged().__enter__()
    optimizer = SphereOptimizer(net, average=True)
    train(net, optimizer, batches(1))
    with pytest.raises(ValueError, match="pass averaged"):
        optimizer.averaged().__enter__()


def test_a_constant_rate_with_an_average_is_ahead_of_one_without():
    """Noise of a large angle is averaged away."""
    losses = []
    for average in (False, True):
        net = net_with_norm()
        optimizer = SphereOptimizer(net, 0.2, average=average)
        parts = batches(150)
        train(net, optimizer, parts)
        net.eval()
        x, y = (torch.cat(t) for t in zip(*batches(300)[150:], strict=True))
        with torch.no_grad():
            if average:
                with optimizer.averaged([x for x, _ in parts]):
                    losses.append(F.cross_entropy(net(x), y).item())
            else:
                losses.append(F.cross_entropy(net(x), y).item())
    assert losses[1] < 0.8 * losses[0]


def test_fine_tuning_with_a_small_angle_keeps_what_is_known():
    """With the documented angle a trained network learns a related task and stays near its weights."""
    net = net_with_norm()
    train(net, SphereOptimizer(net, 0.05, total_steps=200), batches(200))
    start = copy.deepcopy(net)
    net[3] = nn.Linear(16, 2)
    optimizer = SphereOptimizer(net, lr=0.002, total_steps=60)
    related = [(x, (y > 0).long()) for x, y in batches(60)]
    train(net, optimizer, related)
    cosine = F.cosine_similarity(net[0].weight.detach(), start[0].weight.detach())
    assert float(cosine.min()) > 0.99
    net.eval()
    x, y = (torch.cat(t) for t in zip(*related, strict=True))
    with torch.no_grad():
        tuned = (net(x).argmax(1) == y).float().mean()
    # always the more frequent answer
    assert tuned > y.float().mean() + 0.1
