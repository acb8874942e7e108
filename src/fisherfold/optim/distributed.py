"""Several processes: one reduction for all factors, and weights that are sharded along their rows.

Data-parallel gradients are averaged by the wrapper of the model; factors are summed here. Under FSDP2 parameters,
gradients and the state of the optimizer are DTensors with rows shared out: row spheres are local, whatever needs
whole matrices gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # a build of torch without distributed
    DTensor = None  # type: ignore[assignment,misc]


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return DTensor is not None and isinstance(t, DTensor)


def shares_rows(t: Tensor) -> bool:
    """Whether every row is in one process as a whole."""
    return not is_sharded(t) or all(p.is_replicate() or p.is_shard(0) for p in t.placements)  # type: ignore[attr-defined]


def local(t: Tensor) -> Tensor:
    """The part of a tensor that this process holds, in the same memory."""
    return t.to_local() if is_sharded(t) else t  # type: ignore[attr-defined]


def whole(t: Tensor, like: Tensor) -> Tensor:
    """The whole of what this process holds a part of, gathered as a parameter is shared out."""
    if not is_sharded(like):
        return t
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    sharded = DTensor.from_local(
        t, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return sharded.full_tensor()


def part(t: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that is whole, shared out as a parameter is."""
    if not is_sharded(like):
        return t
    shared = distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
    return shared.to_local()


def in_several(group: Any) -> bool:
    """Whether statistics have to be shared with other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def sum_over_processes(tensors: Sequence[Tensor], group: Any) -> None:
    """Sum tensors over processes in place: one reduction per dtype and device."""
    if not in_several(group):
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in tensors:
        kinds.setdefault((t.dtype, t.device), []).append(t)
    for members in kinds.values():
        bucket = torch.cat([t.reshape(-1) for t in members])
        dist.all_reduce(bucket, group=group)
        for t, summed in zip(
            members, torch.split(bucket, [t.numel() for t in members]), strict=True
        ):
            t.copy_(summed.view_as(t))


def any_process(flag: bool, group: Any) -> bool:
    """Whether a flag is set in any process."""
    if not in_several(group):
        return flag
    backend = dist.get_backend(group)
    seen = torch.tensor(float(flag), device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
    return bool(seen)
