"""The sphere half of a step: weights of which only the directions of rows count, put on their spheres and moved there.

A weight joins with its blocks scaled to unit length, and the network goes on as if they had always had it: a block w
becomes w/‖w‖, its gradient ‖w‖ ∇f(w), and running statistics behind it follow (``running``). Blocks that others give
another length r later keep it, and are moved along the direction at w/r (``rows``). Blocks without a length have no
direction and are moved as in Euclidean space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fisherfold.optim.curvature import Curvature, gradient_matrix
from fisherfold.optim.factors import accumulation_dtype
from fisherfold.optim.fuse import fused
from fisherfold.optim.groups import make_dense, names
from fisherfold.optim.rows import advance, directed, tangent, unit_factors, unit_rows, update_on_spheres
from fisherfold.optim.running import carry_over
from fisherfold.plain import counted
from fisherfold.warn import warn

if TYPE_CHECKING:
    from fisherfold.optim.mkfac import MKFAC


def constrain_freed(optimizer: MKFAC) -> None:
    """Put weights on their spheres that are trained and not there yet, because they are new or were frozen.

    Args:
        optimizer: whose weights are scaled in place, with the running statistics behind them.
    """
    make_dense(optimizer)
    curved = [(p, spheres) for p, _, spheres in optimizer._entries() if spheres]
    _constrain(optimizer, [(p, spheres) for p, spheres in curved if p.requires_grad and p not in optimizer.state])


def _constrain(optimizer: MKFAC, weights: list[tuple[nn.Parameter, int]]) -> None:
    """Scale weights to unit length, with the running statistics behind them, and start their momentum.

    Where the network would compute something else with weights of that length, they keep those that they have.
    """
    factors = {id(p): unit_factors(p.detach().reshape(spheres, -1)) for p, spheres in weights}
    model, example = optimizer.model, optimizer._example
    scales = model is None or carry_over(model, factors, example, optimizer.seed)
    for parameter, spheres in weights:
        _start(optimizer, parameter, spheres, scales=scales)
        if scales and parameter.grad is not None:  # at c·w it is 1/c of that at w
            blocks = parameter.grad.reshape(spheres, -1) / factors[id(parameter)].unsqueeze(1)
            parameter.grad.copy_(blocks.reshape(parameter.shape))


def _start(optimizer: MKFAC, parameter: nn.Parameter, spheres: int, *, scales: bool) -> None:
    alive = _scale_to_unit(parameter, spheres, names(optimizer)[id(parameter)], scales=scales)
    momentum = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    state = optimizer.state[parameter] = {"momentum_buffer": momentum}
    if alive is not None:
        state["alive"] = alive
    if optimizer.balanced:
        state["balance"] = torch.zeros(spheres, 2, dtype=accumulation_dtype(parameter), device=parameter.device)


@torch.no_grad()
def _scale_to_unit(parameter: nn.Parameter, spheres: int, name: str, *, scales: bool) -> Tensor | None:
    """Scale blocks to unit length, and return a column that is False at those that have no direction, if any."""
    scaled, alive = unit_rows(parameter.reshape(spheres, -1))
    if scales:
        parameter.copy_(scaled.view(parameter.shape))
    if alive is not None:
        _warn_of_zeros(name, ~alive)
    return alive


@torch.no_grad()
def _release(parameter: nn.Parameter, spheres: int, state: dict[str, Tensor], name: str) -> None:
    """Let blocks that have lost their direction, as by loading other weights, go on as blocks that never had one."""
    here = directed(parameter.reshape(spheres, -1))
    lost = ~here & state.get("alive", torch.ones_like(here))
    if not bool(lost.any()):
        return
    _warn_of_zeros(name, lost)
    if "alive" in state:
        state["alive"] &= here  # captured graphs read this tensor
    else:
        state["alive"] = here
    buffer = state["momentum_buffer"]
    buffer.copy_(torch.where(lost, 0.0, buffer.reshape(spheres, -1)).view(buffer.shape))


def _warn_of_zeros(name: str, lost: Tensor) -> None:
    count, rows = int(lost.sum()), counted(len(lost), "row")
    what = "is zero or tiny and stays" if count == 1 else "are zero or tiny and stay"
    warn(f"{name}: {count} of {rows} {what} Euclidean")


def step(optimizer: MKFAC, parameter: nn.Parameter, group: dict[str, Any], spheres: int) -> None:
    """Move a weight and its momentum, in place.

    Args:
        optimizer: inside ``torch.no_grad``.
        parameter: with a gradient.
        group: of the parameter.
        spheres: the number of its blocks.
    """
    if "momentum_buffer" not in optimizer.state[parameter]:  # unfrozen since the start
        _constrain(optimizer, [(parameter, spheres)])
    elif optimizer._lengths.changed(parameter):
        _release(parameter, spheres, optimizer.state[parameter], names(optimizer)[id(parameter)])
    lengths, v = lengths_and_direction(optimizer, parameter, spheres)
    state = optimizer.state[parameter]
    separable = spheres == len(parameter) <= v.shape[1] and parameter not in optimizer._grouped and "alive" not in state
    orthogonality = optimizer.orthogonality if separable else 0.0
    rules = (group["lr"], group["momentum"], optimizer.exponential, optimizer.max_angle, optimizer.clip, orthogonality)
    update_on_spheres(parameter, v, state, fused(advance) if optimizer.fuse else advance, rules, lengths)
    optimizer._lengths.moved(parameter, lengths)


def grouped_weights(model: nn.Module | None) -> set[nn.Parameter]:
    """The weights of grouped convolutions, whose rows see different inputs.

    Args:
        model: the module, if it is known.

    Returns:
        The parameters.
    """
    modules = () if model is None else model.modules()
    weights = [getattr(module, "weight", None) for module in modules if getattr(module, "groups", 1) != 1]
    return {weight for weight in weights if isinstance(weight, nn.Parameter)}


def lengths_and_direction(optimizer: MKFAC, parameter: nn.Parameter, spheres: int) -> tuple[Tensor | None, Tensor]:
    """The lengths of blocks of rows, if they are not 1, and where to go against if they were.

    Args:
        optimizer: which knows the curvature.
        parameter: with a gradient.
        spheres: the number of its blocks.

    Returns:
        A column or None, and one row per block.
    """
    lengths, gradient = _other_lengths(optimizer, parameter, spheres), gradient_matrix(parameter)
    if lengths is not None:
        gradient = (gradient.reshape(spheres, -1) * lengths).reshape(gradient.shape)
    return lengths, optimizer.curvature.direction(parameter, gradient).reshape(spheres, -1)


def lengths_of_rows(optimizer: MKFAC) -> dict[str, Tensor]:
    """The lengths of the rows of weights where they are not all 1.

    Args:
        optimizer: of the weights.

    Returns:
        One length per row, by the name of the weight.
    """
    known, found = names(optimizer), {}
    for parameter, _, spheres in optimizer._entries():
        if spheres and (lengths := _other_lengths(optimizer, parameter, spheres)) is not None:
            found[known[id(parameter)]] = lengths.flatten().repeat_interleave(len(parameter) // spheres)
    return found


@torch.no_grad()
def _other_lengths(optimizer: MKFAC, parameter: nn.Parameter, spheres: int) -> Tensor | None:
    return optimizer._lengths.other(parameter, spheres, optimizer.state.get(parameter, {}).get("alive"))


def tangent_natural_gradient(curvature: Curvature, parameter: nn.Parameter, spheres: int) -> Tensor:
    """The natural gradient for another optimizer, in the coordinates of rows as long as they were at the last refresh.

    Args:
        curvature: of the model.
        parameter: with a gradient.
        spheres: the number of its blocks.

    Returns:
        A tensor of the shape of the parameter, tangent to the spheres.
    """
    # another optimizer does not keep them at unit length
    w = normalize(parameter.reshape(spheres, -1).to(accumulation_dtype(parameter)))
    layer, matrix = curvature.by_weight.get(id(parameter)), gradient_matrix(parameter)
    if layer is None or layer.lengths is None:
        direction = curvature.direction(parameter, matrix)
    else:
        lengths = layer.lengths.to(matrix.dtype).unsqueeze(1)
        direction = layer.direction(lengths * matrix) * lengths
    return tangent(w, direction.reshape(spheres, -1)).view(parameter.shape)
