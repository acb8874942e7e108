"""Several processes: one reduction for all factors, and weights that are sharded.

Data-parallel gradients are averaged by the wrapper of the model; factors are summed here. Under
FSDP2 parameters, gradients and the state of the optimizer are DTensors. Where rows are shared out,
momentum and rotation are local, and the processes share the matrix signs out among them: each gets
whole matrices, as many as the others. What is sharded in another way is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

try:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
except ImportError:  # a build of torch without distributed
    DTensor = None  # type: ignore[assignment,misc]


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return DTensor is not None and isinstance(t, DTensor)


def row_group(t: Tensor) -> Any:
    """The process group over which the rows of a DTensor are shared out.

    If nothing else is; else None.
    """
    axes = [i for i, p in enumerate(t.placements) if not p.is_replicate()]  # type: ignore[attr-defined]
    # exactly Shard(0): strided shards of FSDP over tensor parallelism are in another order
    if len(axes) == 1 and t.placements[axes[0]] == Shard(0):  # type: ignore[attr-defined]
        return t.device_mesh.get_group(axes[0])  # type: ignore[attr-defined]
    return None


def local(t: Tensor) -> Tensor:
    """The part of a tensor that this process holds, in the same memory."""
    return t.to_local() if is_sharded(t) else t  # type: ignore[attr-defined]


def whole(t: Tensor) -> Tensor:
    """A tensor as a whole."""
    return t.full_tensor() if is_sharded(t) else t  # type: ignore[attr-defined]


def part(t: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that is whole, shared out as another is."""
    shared = distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
    return shared.to_local()


def share_out(
    parts: Sequence[Tensor],
    lengths: Sequence[int],
    group: Any,
    work: Callable[[int, Tensor], Tensor],
) -> list[Tensor]:
    """Apply a function to whole matrices of which every process holds some rows.

    And return the own rows.

    Args:
        parts: the rows of each matrix that this process holds, in the chunks of ``torch.chunk``.
        lengths: the numbers of rows of the whole matrices.
        group: the processes.
        work: of the index of a matrix and the matrix; every process does it for its own ones.

    Returns:
        The same rows of the results.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    widths = [p.shape[-1] for p in parts]
    chunks = [_chunks(length, world) for length in lengths]
    owned = [[i for i in range(len(parts)) if i % world == owner] for owner in range(world)]
    sent = torch.cat([parts[i].reshape(-1) for mine in owned for i in mine])
    out_sizes = [sum(parts[i].numel() for i in mine) for mine in owned]
    in_sizes = [sum(chunks[i][r] * widths[i] for i in owned[rank]) for r in range(world)]
    received = sent.new_empty(sum(in_sizes))
    dist.all_to_all_single(received, sent, in_sizes, out_sizes, group=group)
    pieces: dict[int, list[Tensor]] = {i: [] for i in owned[rank]}
    for r, block in enumerate(torch.split(received, in_sizes)):
        sizes = [chunks[i][r] * widths[i] for i in owned[rank]]
        for i, piece in zip(owned[rank], torch.split(block, sizes), strict=True):
            pieces[i].append(piece.view(-1, widths[i]))
    done = {i: torch.split(work(i, torch.cat(pieces[i])), chunks[i]) for i in owned[rank]}
    back = [done[i][r].reshape(-1) for r in range(world) for i in owned[rank]]
    answer = torch.empty_like(sent)
    dist.all_to_all_single(
        answer, torch.cat([received[:0], *back]), out_sizes, in_sizes, group=group
    )
    order = [i for mine in owned for i in mine]
    sizes = [parts[i].numel() for i in order]
    found = dict(zip(order, torch.split(answer, sizes), strict=True))
    return [found[i].view_as(p) for i, p in enumerate(parts)]


def _chunks(length: int, world: int) -> list[int]:
    """How ``torch.chunk`` shares rows out, with zeros for processes that get none."""
    each = -(-length // world)
    return [max(0, min(each, length - r * each)) for r in range(world)]


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
