"""The Euclidean half of a step: gradient descent with momentum, along natural gradients where curvature is known.

With the gradient of a layer's weight W and of its bias b side by side, one step of size η is

    [V v] = (A ⊗ G + λI)⁻¹ [∇W ∇b],     B ← μ B + V + κ W,     W ← W - η B,

with κ the weight decay. It is taken by the fused kernel of PyTorch, which reads parameters, directions and momentum as
flat memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fisherfold.optim.curvature import Curvature, LayerCurvature, gradient_matrix
from fisherfold.optim.streams import Branches


def directions(
    curvature: Curvature, weights: Iterable[nn.Parameter], branches: Branches, *, parallel: bool
) -> dict[int, Tensor]:
    """Preconditioned gradients of Euclidean weights and of the biases that are joined to them.

    Args:
        curvature: of the model.
        weights: those with a gradient.
        branches: the side streams of the optimizer.
        parallel: whether to use them, on CUDA.

    Returns:
        Directions by the ``id`` of the parameter; nothing for weights without an inverse.
    """
    known = ((weight, curvature.by_weight.get(id(weight))) for weight in weights)
    jobs = [(weight, layer) for weight, layer in known if layer is not None and layer.inverse is not None]
    joined = (p for weight, layer in jobs for p in (weight, layer.tracked.bias) if p is not None)
    found = {id(p): torch.empty_like(p) for p in joined}  # memory of the current stream, which is what reads it

    def fill(weight: nn.Parameter, layer: LayerCurvature) -> None:
        bias, matrix = layer.tracked.bias, gradient_matrix(weight)
        if bias is not None:
            column = torch.zeros_like(bias) if bias.grad is None else bias.grad
            matrix = torch.cat([matrix, column.to(matrix.dtype).unsqueeze(1)], dim=1)
        direction = layer.direction(matrix)
        if bias is not None:
            found[id(bias)].copy_(direction[:, -1])
            direction = direction[:, :-1]
        found[id(weight)].copy_(direction.reshape(weight.shape))

    branches.run(fill, jobs, parallel=parallel)
    return found


def step(group: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]], known: Mapping[int, Tensor]) -> None:
    """Move the Euclidean parameters of a group that have a gradient, and their momentum, in place.

    Args:
        group: of an optimizer.
        states: of its parameters, which begin with an empty one; each holds ``momentum_buffer`` from now on.
        known: directions by the ``id`` of the parameter; others go along their gradient.
    """
    moving = [p for p, s in zip(group["params"], group["spheres"], strict=True) if not s and p.grad is not None]
    if not moving:
        return
    # fused kernels take all of them for flat memory
    flat = [without_gaps(p) for p in moving]
    for parameter, memory in zip(moving, flat, strict=True):
        state = states[parameter]
        state["momentum_buffer"] = in_layout_of(memory, state.get("momentum_buffer", torch.zeros_like(memory)))
    fused = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in moving)
    sgd(
        flat,
        [in_layout_of(f, known.get(id(p), p.grad)) for p, f in zip(moving, flat, strict=True)],
        [states[p]["momentum_buffer"] for p in moving],
        foreach=False,
        fused=fused,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    for parameter, memory in zip(moving, flat, strict=True):
        if memory is not parameter:
            parameter.copy_(memory)


def in_layout_of(parameter: Tensor, value: Tensor) -> Tensor:
    """A value in the dtype and memory layout of a parameter; fused kernels read both as flat memory.

    Args:
        parameter: sets dtype and strides.
        value: of the same shape.

    Returns:
        The value itself where it already fits.
    """
    if value.dtype == parameter.dtype and value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, requires_grad=False).copy_(value)


def without_gaps(parameter: Tensor) -> Tensor:
    """A parameter, or a copy of it where its entries do not lie side by side, as those of a slice of columns.

    Args:
        parameter: any one.

    Returns:
        The parameter itself, unless there is memory between its entries that is not its own.
    """
    if parameter.is_contiguous() or parameter.stride() == torch.empty_like(parameter, device="meta").stride():
        return parameter
    return torch.empty_like(parameter, requires_grad=False).copy_(parameter)
