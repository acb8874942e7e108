"""Several processes against one: real gloo ranks, their factors, inverses and parameters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fisherfold.optim import MKFAC
from fisherfold.optim.distributed import share_out

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from ranks import on_ranks  # isort: skip

N = 16


def layer_norm_net() -> nn.Module:
    """No coupling between samples: ranks and the joint batch must agree."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 80, bias=False), nn.LayerNorm(80), nn.ReLU(),
        nn.Linear(80, 5, bias=False), nn.LayerNorm(5), nn.ReLU(),
        nn.Linear(5, 3),
    ).double()  # fmt: skip


def batch_norm_net() -> nn.Module:
    """Statistics of each rank's own samples: the reference is one process that walks over the same shards."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)
    ).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 6, generator=generator, dtype=torch.float64), torch.randint(3, (N,), generator=generator)


def make(model: nn.Module) -> MKFAC:
    return MKFAC(model, lr=0.1, manifold_lr=0.1, damping=0.05, example_input=data()[0], euclidean="kfac", basis="full")


def train_rank(kind: str) -> dict[str, Any]:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model = layer_norm_net() if kind == "layer" else batch_norm_net()
    wrapped = DistributedDataParallel(model)
    optimizer = make(wrapped)
    x, y = data()
    mine = slice(rank * N // world, (rank + 1) * N // world)
    for step in range(4):
        if step == 0:
            optimizer.refresh([(x[mine], y[mine])], nn.CrossEntropyLoss())
        with optimizer.statistics(enabled=step == 2):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x[mine]), y[mine]).backward()
        optimizer.step()
    return {"model": model.state_dict(), "curvature": optimizer.state_dict()["curvature"]}


def train_alone(kind: str, shards: int) -> tuple[nn.Module, MKFAC]:
    model = layer_norm_net() if kind == "layer" else batch_norm_net()
    optimizer = make(model)
    x, y = data()
    parts = [slice(i * N // shards, (i + 1) * N // shards) for i in range(shards)]
    for step in range(4):
        if step == 0:
            optimizer.refresh([(x[p], y[p]) for p in parts], nn.CrossEntropyLoss())
        with optimizer.statistics(enabled=step == 2, accumulation=shards):
            optimizer.zero_grad()
            for p in parts:
                (F.cross_entropy(model(x[p]), y[p]) / shards).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("world", "kind"),
    [(2, "layer"), (4, "layer"), (2, "batch"), pytest.param(4, "batch", marks=pytest.mark.slow)],
)
def test_ranks_equal_one_process(world: int, kind: str, tmp_path: Path) -> None:
    ranks = on_ranks(world, tmp_path, train_rank, kind)
    # without coupling between samples one process may take the joint batch whole
    model, optimizer = train_alone(kind, 1 if kind == "layer" else world)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        assert all(torch.equal(other["model"][name], ranks[0]["model"][name]) for other in ranks)
        torch.testing.assert_close(ranks[0]["model"][name], parameter.detach(), rtol=1e-8, atol=1e-10)
    for name, layer in optimizer.curvature.layers.items():
        torch.testing.assert_close(ranks[0]["curvature"][name]["a"], layer.a)
        torch.testing.assert_close(ranks[0]["curvature"][name]["g"], layer.g)
        assert all(
            torch.equal(r["curvature"][name]["inverse"]["left"], ranks[0]["curvature"][name]["inverse"]["left"])
            for r in ranks
        )


def test_work_is_shared_out_by_cost() -> None:
    costs = {f"w{i}": float(c) for i, c in enumerate((64, 27, 27, 8, 8, 8, 8))}
    owner = share_out(costs, 3)
    loads = [sum(costs[name] for name, r in owner.items() if r == rank) for rank in range(3)]
    assert max(loads) == 64
    assert set(owner.values()) == {0, 1, 2}
    assert share_out(costs, 1) == dict.fromkeys(costs, 0)
