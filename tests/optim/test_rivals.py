"""SGDP and AdamP against an independent implementation of the published rule; KFAC and SGDG against their limits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fisherfold.optim import KFAC, SGDG, SGDP, AdamP
from fisherfold.optim.projection import drop_radial

peers = pytest.importorskip("pytorch_optimizer")


def net(width: int = 8, classes: int = 4) -> nn.Module:
    """A scale-invariant convolution, a layer-normed matrix, one that is not, and vectors."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, width, bias=False),
        nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, classes),
    ).double()  # fmt: skip


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(16, 2, 6, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(4, (16,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 1e-2}, {"weight_decay": 1e-2, "nesterov": True}, {"delta": 5.0, "weight_decay": 1e-2}],
)
def test_sgdp_is_the_published_rule(options: dict[str, Any]) -> None:
    ours, theirs = net(), net()
    mine = run(ours, SGDP(ours.parameters(), lr=0.1, momentum=0.9, **options))
    peer = run(theirs, peers.SGDP(theirs.parameters(), lr=0.1, momentum=0.9, weight_decouple=True, **options))
    for p, q in zip(mine, peer, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 1e-2}, {"weight_decay": 1e-2, "nesterov": True}, {"delta": 5.0, "weight_decay": 1e-2}],
)
def test_adamp_is_the_published_rule(options: dict[str, Any]) -> None:
    # the peer adds ε before the bias correction; the published code, as ours, after it: make it vanish
    ours, theirs = net(), net()
    mine = run(ours, AdamP(ours.parameters(), lr=1e-2, eps=1e-16, **options))
    peer = run(theirs, peers.AdamP(theirs.parameters(), lr=1e-2, eps=1e-16, weight_decouple=True, **options))
    for p, q in zip(mine, peer, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def radial_part_dropped(w: torch.Tensor, g: torch.Tensor, u: torch.Tensor, delta: float) -> tuple[torch.Tensor, float]:
    """The published rule in plain words: by rows if all of them look invariant, else as a whole, else not at all."""
    for rows in (len(w), 1):
        flat_w, flat_g, flat_u = (t.reshape(rows, -1) for t in (w, g, u))
        cosines = F.cosine_similarity(flat_w, flat_g, dim=1).abs()
        if float(cosines.max()) < delta / flat_w.shape[1] ** 0.5:
            unit = F.normalize(flat_w, dim=1)
            return (flat_u - (unit * flat_u).sum(dim=1, keepdim=True) * unit).reshape(w.shape), 1.0
    return u, 0.0


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("kind", "projected"), [("rows", 1.0), ("whole", 1.0), ("none", 0.0)])
def test_the_projection_is_by_rows_as_a_whole_or_not_at_all(
    kind: str, projected: float, layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    w, g, u = torch.randn(3, 5, 4, 3, 3, dtype=torch.float64)
    if kind != "none":
        g -= (w * g).sum(dim=(1, 2, 3), keepdim=True) / w.square().sum(dim=(1, 2, 3), keepdim=True) * w
    if kind == "whole":  # rows that lean to both sides, and cancel in the sum
        lean = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0], dtype=torch.float64)[:, None, None, None]
        g += lean * w / w.square().sum(dim=(1, 2, 3), keepdim=True)
    if kind == "none":
        g += w
    w, g, u = (t.contiguous(memory_format=layout) for t in (w, g, u))
    expected, flag = radial_part_dropped(w, g, u, 0.1)
    found, said = drop_radial(w, g, u, 0.1, 1e-8)
    assert float(said) == flag == projected
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
    by_rows = (w * found).sum(dim=(1, 2, 3)).abs()
    assert bool((by_rows < 1e-6).all()) == (kind == "rows")


def test_projection_acts_on_the_invariant_convolution_only() -> None:
    """With the same gradients, an update of the convolution has no radial part, one of the head has."""
    model = net()
    start = [p.detach().clone() for p in model.parameters()]
    moved = run(model, SGDP(model.parameters(), lr=0.1, momentum=0.0), steps=1)
    conv, head = 0, 6
    for index, invariant in ((conv, True), (head, False)):
        step = (moved[index] - start[index]).reshape(len(start[index]), -1)
        w = start[index].reshape(step.shape)
        cosine = (w * step).sum(dim=1).abs() / (w.norm(dim=1) * step.norm(dim=1))
        assert bool((cosine < 1e-6).all()) == invariant


@pytest.mark.parametrize("kind", [SGDP, AdamP])
def test_rivals_resume_to_the_bit(kind: type) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=1e-2)
    run(model, optimizer, 3)
    twin = net()
    twin.load_state_dict(model.state_dict())
    resumed = kind(twin.parameters(), lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(run(model, optimizer, 3), run(twin, resumed, 3), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", [SGDP, AdamP])
@pytest.mark.parametrize("options", [{"weight_decay": 1e-2}, {"weight_decay": 1e-2, "nesterov": True}])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # on importing the compiler
def test_compiled_updates_are_the_plain_ones(kind: type, options: dict[str, Any]) -> None:
    """In any layout of the memory, with the rate as a number or as a tensor."""
    results = []
    for fuse in (False, True):
        # every shape is compiled on its own: one of vectors will do
        model = net(width=6, classes=6).to(memory_format=torch.channels_last)
        optimizer = kind(model.parameters(), lr=torch.tensor(0.01) if fuse else 0.01, fuse=fuse, **options)
        results.append(run(model, optimizer))
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    for p, q in zip(*results, strict=True):  # the rate and AdamP's corrections are in single precision
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [SGDP, AdamP])
def test_states_from_before_updates_could_be_compiled_are_read(kind: type) -> None:
    model, twin = net(), net()
    optimizer, resumed = (kind(m.parameters(), lr=0.01, weight_decay=1e-2) for m in (model, twin))
    old = optimizer.state_dict()
    del old["param_groups"][0]["fuse"]
    resumed.load_state_dict(old)
    pickled = optimizer.__getstate__()
    del pickled["defaults"]["fuse"], pickled["param_groups"][0]["fuse"]
    optimizer.__setstate__(pickled)
    for p, q in zip(run(model, optimizer, 3), run(twin, resumed, 3), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", [SGDP, AdamP])
def test_sparse_gradients_are_like_dense_ones(kind: type) -> None:
    weights = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(6, 4, sparse=sparse)
        optimizer = kind(table.parameters(), lr=0.1)
        table(torch.tensor([1, 1, 3])).square().sum().backward()
        optimizer.step()
        weights.append(table.weight.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("kind", [SGDP, AdamP, KFAC, SGDG])
def test_closure_value_is_returned(kind: type) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = kind(model.parameters() if kind in (SGDP, AdamP) else model, lr=0.01)
    x = torch.randn(4, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0


def test_sgdg_has_no_curvature() -> None:
    optimizer = SGDG(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), example_input=torch.randn(5, 3))
    assert optimizer.curvature.layers == {}
    assert optimizer.diagnostics() == {}
    assert "spheres" in optimizer.report()
