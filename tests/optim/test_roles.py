"""What each parameter is: heads, embeddings, experts and adapters, from types and the data flow."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fisherfold.optim import SphereOptimizer


class Net(nn.Module):
    """A module from a forward function and named layers or parameters."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.rule = forward

    def forward(self, x):
        return self.rule(self, x)


def parameter(*shape):
    return nn.Parameter(0.3 * torch.randn(*shape))


def block(d=8):
    """A pre-norm residual branch."""
    return nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))


def head_first():
    return Net(lambda s, x: s.out(F.relu(s.body(x))), out=nn.Linear(8, 3), body=nn.Linear(6, 8))


def two_heads():
    def forward(s, x):
        h = F.relu(s.body(x))
        return {"a": s.first(h), "b": s.second(h), "features": h}

    return Net(forward, first=nn.Linear(8, 3), second=nn.Linear(8, 2), body=nn.Linear(6, 8))


def clip():
    """Two towers that end in raw projections; hidden states are returned beside the similarities."""

    def forward(s, x):
        a, b = s.stem_a(x), s.stem_b(x)
        a, b = a + s.a(a), b + s.b(b)
        images, texts = F.normalize(a @ s.image, dim=1), F.normalize(b @ s.text, dim=1)
        return {"similarity": 4 * images @ texts.T, "images": images, "hidden": a}

    return Net(
        forward,
        image=parameter(8, 4),
        text=parameter(8, 4),
        stem_a=nn.Linear(6, 8),
        stem_b=nn.Linear(6, 8),
        a=block(),
        b=block(),
    )


def mixtral():
    """Experts as tensors [experts, out, in], chosen by a router, and raw queries."""

    def forward(s, x):
        h = s.embed(x[:, 0].long().abs() % 5) + s.place
        gates = s.router(h).softmax(-1)
        up = F.gelu(torch.einsum("bd,efd->bef", h, s.up))
        mixed = torch.stack([F.linear(up[:, e], s.down[e]) for e in range(3)], 1)
        h = h + (gates[..., None] * mixed).sum(1)
        return s.lm_head(s.norm(h + s.mix(s.query)))

    return Net(
        forward,
        embed=nn.Embedding(5, 8),
        place=parameter(1, 8),
        query=parameter(1, 8),
        mix=nn.Linear(8, 8),
        router=nn.Linear(8, 3, bias=False),
        up=parameter(3, 16, 8),
        down=parameter(3, 8, 16),
        norm=nn.LayerNorm(8),
        lm_head=nn.Linear(8, 5),
    )


def tied():
    net = Net(
        lambda s, x: s.head(s.stem(s.embed(x[:, 0].long().abs() % 5))),
        embed=nn.Embedding(5, 8),
        stem=nn.Linear(8, 8),
        head=nn.Linear(8, 5, bias=False),
    )
    net.head.weight = net.embed.weight
    return net


def adapters():
    """LoRA: frozen weights, a branch that starts at zero."""

    def forward(s, x):
        h = s.stem(x)
        h = h + F.linear(F.linear(h, s.lora_a), s.lora_b) + s.base(h)
        return s.head(F.relu(h))

    net = Net(
        forward,
        stem=nn.Linear(6, 8),
        base=nn.Linear(8, 8),
        lora_a=parameter(2, 8),
        lora_b=nn.Parameter(torch.zeros(8, 2)),
        head=nn.Linear(8, 3),
    )
    for frozen in (net.stem, net.base, net.head):
        frozen.requires_grad_(False)
    return net


def recurrent():
    return Net(
        lambda s, x: s.head(s.lstm(x[:, None])[0][:, 0]),
        lstm=nn.LSTM(6, 8, batch_first=True),
        head=nn.Linear(8, 3),
    )


def headless():
    """A residual stream that ends in the output has no head."""
    return Net(lambda s, x: (h := s.stem(x)) + s.a(h), stem=nn.Linear(6, 8), a=block())


def checkpointed():
    def forward(s, x):
        return s.out(checkpoint(s.body, x, use_reentrant=False))

    return Net(forward, out=nn.Linear(8, 3), body=nn.Sequential(nn.Linear(6, 8), nn.ReLU()))


# the networks with the matrices that are on spheres
SUITE = {
    "head first": (head_first, {"body.weight"}),
    "two heads": (two_heads, {"body.weight"}),
    "clip": (
        clip,
        {f"{name}.weight" for name in ("stem_a", "stem_b", "a.1", "a.3", "b.1", "b.3")},
    ),
    "mixtral": (mixtral, {"router.weight", "mix.weight", "up", "down"}),
    "tied": (tied, {"stem.weight"}),
    "adapters": (adapters, {"lora_a"}),
    "recurrent": (recurrent, set()),
    "headless": (headless, {"stem.weight", "a.1.weight", "a.3.weight"}),
    "checkpointed": (checkpointed, {"body.0.weight"}),
}


def step(net, optimizer):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    optimizer.zero_grad()
    found = net(x)
    leaves = found.values() if isinstance(found, dict) else [found]
    sum(t.square().mean() for t in leaves).backward()
    optimizer.step()


def on_spheres(optimizer):
    return {
        name
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
        if group["rule"] == "spheres" and p.requires_grad
    }


@pytest.mark.parametrize("name", SUITE)
def test_the_data_flow_tells_what_is_hidden(name):
    """After the first step groups and the report say the same; every row on a sphere keeps its norm."""
    make, expected = SUITE[name]
    torch.manual_seed(0)
    net = make()
    overrides = {"lstm.weight_ih_l0": "adamw"} if name == "recurrent" else {}
    optimizer = SphereOptimizer(net, overrides=overrides)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    for _ in range(3):
        step(net, optimizer)
    assert on_spheres(optimizer) == expected
    lines = {line.split()[0]: line for line in optimizer.report().splitlines()}
    for n, p in net.named_parameters():
        assert ("spheres in" in lines[n]) == (n in expected), lines[n]
        assert ("frozen" in lines[n]) == (not p.requires_grad)
        if n in expected:
            torch.testing.assert_close(
                p.detach().reshape(-1, p.shape[-1]).norm(dim=1),
                before[n].reshape(-1, p.shape[-1]).norm(dim=1),
            )


def test_factors_that_are_applied_from_the_right_keep_the_norms_of_columns():
    """Rows are what makes an output, in whatever axis a raw parameter has them."""
    torch.manual_seed(0)
    net = Net(
        lambda s, x: s.head(torch.relu(torch.relu(x @ s.raw)[:, None] @ s.experts[1])[:, 0]),
        raw=parameter(6, 8),
        experts=parameter(3, 8, 4),
        head=nn.Linear(4, 3),
    )
    optimizer = SphereOptimizer(net)
    before = net.raw.detach().clone(), net.experts.detach().clone()
    step(net, optimizer)
    assert on_spheres(optimizer) == {"raw", "experts"}
    for old, new in zip(before, (net.raw.detach(), net.experts.detach()), strict=True):
        torch.testing.assert_close(new.norm(dim=-2), old.norm(dim=-2))
        assert not torch.equal(new, old)
    assert torch.equal(net.experts.detach()[0], before[1][0])


def test_schedules_and_states_survive_the_move():
    """Groups are there from the start; a state that is loaded before the first pass has its own."""
    torch.manual_seed(0)
    net = head_first()
    twin = copy.deepcopy(net)
    optimizer = SphereOptimizer(net)
    count = len(optimizer.param_groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(2):
        step(net, optimizer)
        schedule.step()
    assert len(optimizer.param_groups) == count
    twin.load_state_dict(net.state_dict())
    other = SphereOptimizer(twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(net, optimizer)
    step(twin, other)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_compiled_models_go_by_names():
    net = torch.compile(head_first(), backend="eager")
    net._orig_mod.head = net._orig_mod.out
    optimizer = SphereOptimizer(net)
    assert optimizer._flow is None


def test_layer_wise_rates():
    torch.manual_seed(0)
    net = nn.Sequential(block(6), block(6), nn.Linear(6, 3))
    optimizer = SphereOptimizer(net, 0.02, rest_lr=0.01, lr_scales={"0": 0.25, "0.3": 0.5})
    rates = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
    assert rates["0.1.weight"] == pytest.approx(0.005)
    assert rates["0.3.weight"] == pytest.approx(0.01)
    assert rates["0.0.weight"] == pytest.approx(0.0025)
    assert rates["1.1.weight"] == pytest.approx(0.02)
    assert rates["2.bias"] == pytest.approx(0.01)
    step(net, optimizer)
