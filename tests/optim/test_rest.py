"""Weights that are not on spheres: torch's own AdamW and SGD, orthogonalised and Kronecker-factored steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fisherfold.optim import KFAC, SphereOptimizer
from fisherfold.optim.curvature.inverse import dense


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, *optimizers, steps=5):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x, y = torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def split(model):
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


OFF = {"0.weight": "adamw", "2.weight": "adamw", "4.weight": "adamw"}


@pytest.mark.parametrize("rest", ["adamw", "sgd"])
def test_adamw_and_sgd_are_those_of_torch(rest):
    net, twin = mlp(), mlp()
    betas, eps = (0.8, 0.95), 1e-5
    options = {"rest": rest, "rest_lr": 0.01, "weight_decay": 0.1, "betas": betas, "eps": eps}
    ours = SphereOptimizer(net, overrides=OFF, **options)
    if rest == "sgd":
        theirs = torch.optim.SGD(
            split(twin), lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1
        )
    else:
        theirs = torch.optim.AdamW(split(twin), lr=0.01, betas=betas, eps=eps, weight_decay=0.1)
    for mine, their in zip(train(net, ours), train(twin, theirs), strict=True):
        torch.testing.assert_close(mine, their)


def test_kfac_is_the_damped_solution_with_momentum():
    net = mlp().double()
    optimizer = KFAC(net, lr=0.1, damping=0.05, every=0)
    x, y = torch.randn(32, 6, dtype=torch.float64), torch.randint(3, (32,))
    optimizer.refresh([(x, y)], F.cross_entropy)
    before = [p.detach().clone() for p in net.parameters()]
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    for p, old in zip(net.parameters(), before, strict=True):
        state, direction = optimizer.state[p], p.grad
        if p.ndim > 1:
            direction = dense(state["A"], state["G"], 0.05).apply(p.grad)
        torch.testing.assert_close(p.detach(), old - 0.1 * direction)


@pytest.mark.parametrize("direction", ["spectral", "gradient", "natural"])
@pytest.mark.parametrize("rest", ["adamw", "sgd"])
def test_bfloat16_weights_do_not_stall(direction, rest):
    """Small steps add up in copies in float32: the loss falls as it does in float32."""

    def run(dtype):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(16, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.Tanh(),
            nn.Linear(32, 4),
        ).to(dtype)
        optimizer = SphereOptimizer(
            net,
            2e-3,
            direction=direction,
            rest=rest,
            rest_lr=3e-3 if rest == "sgd" else 3e-4,
            momentum=0.5,
        )
        x = torch.randn(256, 16)
        y = (x @ torch.randn(16, 4)).argmax(1)
        losses = []
        for _ in range(150):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x.to(dtype)).float(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses[0] - losses[-1]

    assert run(torch.bfloat16) > 0.9 * run(torch.float32)


def test_weights_in_bfloat16_that_somebody_else_changes_are_followed():
    net = mlp().bfloat16()
    optimizer = SphereOptimizer(net)

    def once():
        optimizer.zero_grad()
        net(torch.randn(4, 6, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()

    once()
    with torch.no_grad():
        net[4].weight.fill_(2.0)
    once()
    assert float((net[4].weight.detach().float() - 2).abs().max()) < 0.05
