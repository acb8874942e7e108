"""Several processes against one: real gloo ranks under DDP and FSDP2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fisherfold.optim import MKFAC, SphereOptimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from ranks import on_ranks  # isort: skip

N = 16
# where the data flow is not seen, names tell
HEAD = {"10.weight": "adamw"}


def layer_norm_net():
    """No coupling between samples: ranks and the joint batch must agree."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (2, 3)),
        nn.Conv1d(2, 10, 2, padding=1, bias=False),
        nn.InstanceNorm1d(10),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(40, 7, bias=False),
        nn.LayerNorm(7),
        nn.Tanh(),
        nn.Linear(7, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).double()


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 6, generator=generator, dtype=torch.float64), torch.randint(
        3, (N,), generator=generator
    )


def make(model, kind):
    example = data()[0]
    if kind == "mkfac":
        return MKFAC(model, damping=0.05, every=1, rest="kfac", example_input=example)
    return SphereOptimizer(model, direction=kind, every=2, overrides=HEAD)


def whole(model):
    return [
        p.full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for p in model.parameters()
    ]


def steps(model, forward, optimizer, part, count=5, scale=1.0):
    x, y = data()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
    if isinstance(optimizer, MKFAC):
        optimizer.curvature.scaler = scaler
    for _ in range(count):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(forward(x[part]), y[part])).backward()
        scaler.step(optimizer)
        scaler.update()


def mine():
    rank, world = distributed.get_rank(), distributed.get_world_size()
    return slice(rank * N // world, (rank + 1) * N // world)


def under_ddp(kind):
    model = layer_norm_net()
    wrapped = DistributedDataParallel(model)
    steps(model, wrapped, make(wrapped, kind), mine(), scale=2.0**10 if kind == "mkfac" else 1.0)
    return whole(model)


def under_fsdp(kind, when):
    model = layer_norm_net()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    if when == "by columns":
        even = {p for p in model.parameters() if p.ndim > 1 and p.shape[1] % 2 == 0}
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p in even else None)
        optimizer = SphereOptimizer(model, direction=kind, overrides=HEAD)
    elif when == "before":  # as Accelerate does: parameters are swapped behind the optimizer's back
        optimizer = make(model, kind)
        names = [
            [name for name, p in model.named_parameters() if any(p is q for q in g["params"])]
            for g in optimizer.param_groups
        ]
        fully_shard(model, mesh=mesh)
        for group, own in zip(
            optimizer.param_groups, [g["param_names"] for g in optimizer.param_groups], strict=True
        ):
            group["params"] = [model.get_parameter(name) for name in own]
        assert names
    else:
        fully_shard(model, mesh=mesh)
        optimizer = SphereOptimizer(model, direction=kind, overrides=HEAD)
    steps(model, model, optimizer, mine(), count=3)
    saved = dcp.get_optimizer_state_dict(model, optimizer)
    dcp.set_optimizer_state_dict(model, optimizer, saved)
    steps(model, model, optimizer, mine(), count=2)
    return whole(model)


class Blocks(nn.Module):
    """Blocks that are sharded each on its own, with fused queries, experts and odd sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(2))
        self.qkv = nn.Linear(9, 27, bias=False)
        self.experts = nn.Parameter(0.3 * torch.randn(4, 5, 9))
        self.head = nn.Linear(5, 3)
        self.double()

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        q, k, v = self.qkv(x).chunk(3, 1)
        x = v * torch.sigmoid((q * k).sum(1, keepdim=True))
        return self.head(torch.tanh(torch.einsum("bi,eoi->beo", x, self.experts)).mean(1))


def sharded_blocks(mesh):
    model = Blocks()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def mesh_of(dimensions):
    world = distributed.get_world_size()
    if dimensions == 1:
        return init_device_mesh("cpu", (world,))
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


def nested_under_fsdp(dimensions, folder):
    """Three steps, a checkpoint through files into a new model, two more steps."""
    model = sharded_blocks(mesh_of(dimensions))
    optimizer = SphereOptimizer(model)
    steps(model, model, optimizer, mine(), count=3)
    saved = dict(zip(("model", "optimizer"), dcp.get_state_dict(model, optimizer), strict=True))
    checkpoint.save(saved, checkpoint_id=folder)
    again = sharded_blocks(mesh_of(dimensions))
    other = SphereOptimizer(again)
    loaded = dict(zip(("model", "optimizer"), dcp.get_state_dict(again, other), strict=True))
    checkpoint.load(loaded, checkpoint_id=folder)
    dcp.set_state_dict(
        again,
        other,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    steps(again, again, other, mine(), count=2)
    return whole(again)


def nested_alone():
    model = Blocks()
    steps(model, model, SphereOptimizer(model), slice(None))
    return whole(model)


def each_mesh(folder):
    return {n: nested_under_fsdp(n, f"{folder}/{n}") for n in (1, 2)}


def natural_under_fsdp():
    model = layer_norm_net()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    try:
        SphereOptimizer(model, direction="natural", every=1)
    except NotImplementedError as error:
        return str(error)
    return "no error"


def alone(kind):
    model = layer_norm_net()
    steps(model, model, make(model, kind), slice(None))
    return whole(model)


DDP = ["spectral", "natural", "mkfac"]
FSDP = [
    ("spectral", "before"),
    ("spectral", "after"),
    ("gradient", "after"),
    ("gradient", "by columns"),
]


def bad_gradient_in_one_shard():
    """One rank has a gradient that is not finite: both stop, and say where."""
    model = layer_norm_net()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = SphereOptimizer(model)
    model(data()[0][mine()]).square().mean().backward()
    if distributed.get_rank() == 1:
        next(model.parameters()).grad.to_local().fill_(float("nan"))
    try:
        optimizer.step()
    except FloatingPointError as error:
        return str(error)
    return "no error"


def every_case():
    found = {kind: under_ddp(kind) for kind in DDP}
    found |= {case: under_fsdp(*case) for case in FSDP}
    return found | {"natural under FSDP2": natural_under_fsdp(), "bad": bad_gradient_in_one_shard()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(2, tmp_path_factory.mktemp("ranks"), every_case)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_blocks_that_are_sharded_one_by_one_equal_one_process(world, tmp_path):
    """On a line and on a grid of processes, with a checkpoint in between."""
    found = on_ranks(world, tmp_path, each_mesh, str(tmp_path / "saved"))
    expected = nested_alone()
    for rank in found:
        for parameters in rank.values():
            for a, b in zip(parameters, expected, strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", DDP)
def test_two_processes_under_ddp_equal_one(kind, ranks):
    for a, b, expected in zip(ranks[0][kind], ranks[1][kind], alone(kind), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, expected)


@pytest.mark.parametrize("case", FSDP)
def test_two_processes_under_fsdp_equal_one(case, ranks):
    for a, expected in zip(ranks[0][case], alone(case[0]), strict=True):
        torch.testing.assert_close(a, expected)


def test_the_natural_direction_does_not_work_with_sharded_weights(ranks):
    for found in ranks:
        assert "use direction='spectral'" in found["natural under FSDP2"]


def test_a_gradient_that_is_not_finite_in_one_shard_stops_all_processes(ranks):
    assert "a shard of another process is not finite" in ranks[0]["bad"]
    assert "1.weight is not finite" in ranks[1]["bad"]
