"""Curvature over several processes: sums are reduced, inverses are shared out by cost and broadcast.

Every rank sees its own samples and forms Σ a aᵀ and Σ (D ∂L/∂s)(D ∂L/∂s)ᵀ with its own D; the sums over ranks, divided
by the summed counts, are the factors of the joint batch. Each inverse is computed by one rank and sent to all, so that
parameters stay identical to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from fisherfold.optim.factors import FactorSums, TrackedWeight
from fisherfold.optim.precondition import Preconditioner


def world_size(group: Any = None) -> int:
    """The number of processes that share the work.

    Args:
        group: a process group; the default one if not given.

    Returns:
        1 where torch.distributed is not in use.
    """
    return distributed.get_world_size(group) if distributed.is_available() and distributed.is_initialized() else 1


def rank(group: Any = None) -> int:
    """This process's number.

    Args:
        group: a process group; the default one if not given.

    Returns:
        0 where torch.distributed is not in use.
    """
    return distributed.get_rank(group) if world_size(group) > 1 else 0


def refuse_sharded(parameters: Sequence[nn.Parameter]) -> None:
    """Raise if a parameter is sharded by FSDP: its rows, and with them its curvature, lie on several ranks.

    Args:
        parameters: what is to be optimised.

    Raises:
        ValueError: if there is a flattened or distributed parameter.
    """
    for parameter in parameters:
        kind = type(parameter).__name__
        local = type(getattr(parameter, "data", parameter)).__name__
        if "FlatParameter" in kind or "DTensor" in kind or "DTensor" in local:
            raise ValueError(
                f"parameters sharded by FSDP are not supported (got a {kind} of shape {tuple(parameter.shape)}): "
                "use DistributedDataParallel, which keeps whole weights on every rank"
            )


def refuse_sharded_parts(model: nn.Module) -> None:
    """Raise if FSDP has sharded a module or a part of it, before anybody tries to copy it.

    Args:
        model: whose parameters may look like ordinary ones (``use_orig_params=True``) and be pieces of them.

    Raises:
        ValueError: if there is a part that FSDP wraps.
    """
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                f"parameters sharded by FSDP are not supported (it wraps {name or 'the model'}): "
                "use DistributedDataParallel, which keeps whole weights on every rank"
            )
    refuse_sharded(list(model.parameters()))


def reduce_sums(
    sums: dict[str, FactorSums], weights: Sequence[TrackedWeight], group: Any = None
) -> dict[str, FactorSums]:
    """Add up the statistics of all ranks.

    Args:
        sums: this rank's sums; a weight that it did not use may be missing.
        weights: all tracked weights, in the same order on every rank.
        group: a process group; the default one if not given.

    Returns:
        The joint sums of every weight that some rank used.
    """
    if world_size(group) == 1:
        return sums
    joint = {}
    for tracked in weights:
        mine = sums.get(tracked.name) or tracked.new_sums()
        paired = torch.tensor([float(mine.paired)], device=mine.a.device)
        a, g, counts = mine.tensors()
        for tensor in (a, g, counts, paired):
            distributed.all_reduce(tensor, group=group)
        samples, rows = (float(c) for c in counts)
        if samples > 0:
            joint[tracked.name] = FactorSums(a, g, samples, rows, paired=bool(paired > 0))
    return joint


def share_out(costs: dict[str, float], ranks: int) -> dict[str, int]:
    """Give each task to the least loaded rank, the dearest tasks first.

    Args:
        costs: what each task costs.
        ranks: how many ranks there are.

    Returns:
        The rank of each task.

    Example:
        >>> share_out({"a": 5.0, "b": 3.0, "c": 3.0}, 2)
        {'a': 0, 'b': 1, 'c': 1}
    """
    load = [0.0] * ranks
    owner = {}
    for name in sorted(costs, key=lambda key: (-costs[key], key)):
        least = min(range(ranks), key=lambda r: load[r])
        owner[name] = least
        load[least] += costs[name]
    return owner


def exchange(
    mine: dict[str, Preconditioner | str], owner: dict[str, int], like: dict[str, Tensor], group: Any = None
) -> dict[str, Preconditioner | str]:
    """Send every inverse from its owner to all ranks.

    Args:
        mine: what this rank computed: an inverse, or the message of its failure.
        owner: the rank of each weight.
        like: for each weight a tensor of the device and dtype of its inverse.
        group: a process group; the default one if not given.

    Returns:
        The inverses (or messages) of all weights, the same on every rank.
    """
    if world_size(group) == 1:
        return mine
    described: list[Any] = [None] * world_size(group)
    distributed.all_gather_object(described, {name: _describe(value) for name, value in mine.items()}, group=group)
    everything: dict[str, Preconditioner | str] = {}
    for name in sorted(owner):
        description = described[owner[name]][name]
        if isinstance(description, str):
            everything[name] = description
            continue
        shapes, top, error = description
        own = mine.get(name)
        source = own.tensors() if isinstance(own, Preconditioner) else {}
        tensors = {}
        for key, shape in shapes.items():
            tensor = source[key].contiguous() if key in source else like[name].new_empty(shape)
            root = owner[name] if group is None else distributed.get_global_rank(group, owner[name])
            distributed.broadcast(tensor, src=root, group=group)
            tensors[key] = tensor
        everything[name] = Preconditioner(
            tensors["left"], tensors["right"], tensors.get("coefficients"), tensors.get("base"), top, error
        )
    return everything


def _describe(value: Preconditioner | str) -> Any:
    if isinstance(value, str):
        return value
    return {key: tuple(t.shape) for key, t in value.tensors().items()}, value.top, value.error
