"""Checkpoints resume to the bit; copies, schedulers and averages work as with any optimizer."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from fisherfold.optim import KFAC, MKFAC, SGDG, SphereOptimizer

ROWS = {"0.weight": "row"}
MAKERS = {
    "spectral": lambda net: SphereOptimizer(net),
    "gradient": lambda net: SphereOptimizer(net, direction="gradient", rest="sgd"),
    "natural": lambda net: SphereOptimizer(net, direction="natural", every=2),
    "mkfac": lambda net: MKFAC(net, damping=0.1, every=2, rest="kfac", invariant=ROWS),
    "kfac": lambda net: KFAC(net, damping=0.1, every=2),
    "sgdg": lambda net: SGDG(net, invariant=ROWS),
}


def bn_net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    ).to(dtype)


def train(net, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    dtype = net[0].weight.dtype
    for _ in range(steps):
        x, y = (
            torch.randn(32, 6, generator=generator).to(dtype),
            torch.randint(3, (32,), generator=generator),
        )
        optimizer.zero_grad()
        F.cross_entropy(net(x).float(), y).backward()
        optimizer.step()


def same(net, twin):
    return all(
        torch.equal(p, q)
        for p, q in zip(net.state_dict().values(), twin.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_resuming_is_exact_to_the_bit(name, dtype):
    net = bn_net(dtype)
    optimizer = MAKERS[name](net)
    train(net, optimizer, 7, 1)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(net, optimizer, 6, 2)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = bn_net(dtype)
    other = MAKERS[name](twin)
    twin.load_state_dict(saved["net"])
    other.load_state_dict(saved["optimizer"])
    train(twin, other, 6, 2)
    assert same(net, twin)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_as_the_original(name, how):
    net = bn_net()
    optimizer = MAKERS[name](net)
    train(net, optimizer, 7, 1)
    pair = (net, optimizer)
    twin, other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    train(twin, other, 6, 2)
    train(net, optimizer, 6, 2)
    assert same(net, twin)


def test_a_copy_of_the_model_before_the_first_step():
    """As trainers make for an average: what watches the data flow stays with the original."""
    net = bn_net()
    optimizer = SphereOptimizer(net)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        twin(torch.randn(8, 6)).sum().backward()
    assert not optimizer._flow.outputs
    train(net, optimizer, 1, 1)
    assert "by the data flow" in optimizer.report()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_copy_of_the_model_alone_does_not_collect():
    net = bn_net()
    optimizer = MAKERS["natural"](net)
    train(net, optimizer, 1, 1)
    averaged = AveragedModel(net)
    assert optimizer.curvature.collector.attached
    averaged.module(torch.randn(8, 6)).sum().backward()
    assert not optimizer.curvature.collector.sums
    train(net, optimizer, 3, 2)
    averaged.update_parameters(net)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: LambdaLR(o, lambda t: 1 / (1 + t)),
        lambda o: CosineAnnealingLR(o, 10),
        lambda o: OneCycleLR(
            o, max_lr=[g["lr"] for g in o.param_groups], total_steps=10, cycle_momentum=False
        ),
    ],
)
def test_schedulers_change_the_angle(make):
    net = bn_net()
    optimizer = SphereOptimizer(net, 0.05)
    scheduler = make(optimizer)
    for _ in range(4):
        before = net[0].weight.detach().clone()
        train(net, optimizer, 1, 1)
        angles = torch.arccos(F.cosine_similarity(before.double(), net[0].weight.detach().double()))
        expected = torch.full_like(angles, optimizer.param_groups[0]["lr"])
        torch.testing.assert_close(angles, expected, rtol=1e-2, atol=1e-4)
        scheduler.step()
    ReduceLROnPlateau(optimizer).step(1.0)


def test_closures_and_rates_as_tensors():
    net, twin = bn_net(), bn_net()
    optimizer, other = SphereOptimizer(net), SphereOptimizer(twin)
    for group in other.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    x, y = torch.randn(32, 6), torch.randint(3, (32,))

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    F.cross_entropy(twin(x), y).backward()
    other.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_groups_can_be_added():
    net, more = bn_net(), nn.Linear(3, 3)
    optimizer = SphereOptimizer(net)
    optimizer.add_param_group(
        {"params": [("more.weight", more.weight)], "rule": "spheres", "lr": 0.1}
    )
    before = more.weight.detach().clone()
    optimizer.zero_grad()
    more(net(torch.randn(8, 6))).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(more.weight.norm(dim=1), before.norm(dim=1))
    assert not torch.equal(more.weight, before)
    with pytest.raises(ValueError, match="rule must be one of"):
        optimizer.add_param_group({"params": [("bias", more.bias)], "rule": "lion"})


@pytest.mark.parametrize("name", ["spectral", "natural"])
def test_distributed_checkpoint_of_one_process(name):
    net = bn_net()
    optimizer = MAKERS[name](net)
    train(net, optimizer, 7, 1)
    model_state, optimizer_state = copy.deepcopy(dcp.get_state_dict(net, optimizer))
    train(net, optimizer, 6, 2)
    twin = bn_net()
    other = MAKERS[name](twin)
    dcp.set_state_dict(twin, other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train(twin, other, 6, 2)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
