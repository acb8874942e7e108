"""Linear layers and convolutions as what they are.

Products of the rows of a weight with vectors cut out of the input.

With a_r the vector that output position r is made of (r runs over samples and positions; for a
convolution a patch of its padded input, one per group) and w_i the rows of the weight,

    s_ri = <w_i, a_r>,        ∇w_i = Σ_r (∂L/∂s_ri) a_r,

whatever the stride, dilation and padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

MATRIX_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def input_rows(
    layer: nn.Module, x: Tensor, *, max_rows: int | None = None, phase: int = 0
) -> tuple[Tensor, float]:
    """The vectors that a layer multiplies by the rows of its weight.

    Where there are more than ``max_rows`` of them (and more than their length), positions are
    thinned out on a regular grid, and samples where there are not enough positions; its origin
    moves with ``phase``, so that successive calls see all rows in turn.
    """
    if isinstance(layer, nn.Linear):
        rows = x.reshape(-1, x.shape[-1])
        (step,) = _grid(len(rows), rows.shape[1], max_rows, (len(rows),))
        kept = rows[phase % step :: step]
        return kept, len(rows) / max(len(kept), 1)
    patches = _patches(layer, x)
    spatial = patches.ndim // 2 - 1
    total = len(patches) * patches.shape[2 : 2 + spatial].numel()
    length = layer.weight[0].numel()  # type: ignore[index]
    *steps, step = _grid(total, length, max_rows, (*patches.shape[2 : 2 + spatial], len(patches)))
    for axis, spacing in enumerate(steps):
        patches = patches[(slice(None),) * (2 + axis) + (slice(phase % spacing, None, spacing),)]
        phase //= spacing
    patches = patches[phase % step :: step]
    groups = int(layer.groups)  # type: ignore[arg-type]
    kept_rows = len(patches) * patches.shape[2 : 2 + spatial].numel()
    rows = patches.movedim(1, 1 + spatial).reshape(kept_rows * groups, length)
    return rows, total / max(kept_rows, 1) / groups


def _grid(total: int, length: int, max_rows: int | None, sizes: Sequence[int]) -> list[int]:
    """Spacings, powers of two, that leave about max(max_rows, length) of the rows."""
    spacing = [1] * len(sizes)
    doublings = 0 if max_rows is None else round(math.log2(max(total / max(max_rows, length), 1.0)))
    last = len(sizes) - 1  # over samples: its turn comes when no other axis is left
    for _ in range(doublings):
        # beyond the size of an axis some grids would hold no row at all
        wide = [axis for axis, size in enumerate(sizes) if 2 * spacing[axis] <= size]
        if wide:
            spacing[min(wide, key=lambda axis: (axis == last, spacing[axis]))] *= 2
    return spacing


def _patches(layer: nn.Module, x: Tensor) -> Tensor:
    """A view (N, C, places…, kernel…) of a convolution's padded input."""
    spatial = len(layer.kernel_size)  # type: ignore[arg-type]
    x = x if x.ndim == spatial + 2 else x.unsqueeze(0)
    margins = [_margins(layer, axis) for axis in range(spatial)]
    if any(any(m) for m in margins):
        mode = "constant" if layer.padding_mode == "zeros" else str(layer.padding_mode)
        x = functional.pad(x, list(itertools.chain(*reversed(margins))), mode=mode)
    for axis in range(spatial):
        kernel, stride, dilation = (
            getattr(layer, n)[axis] for n in ("kernel_size", "stride", "dilation")
        )
        x = x.unfold(2 + axis, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
    return x


def _margins(layer: nn.Module, axis: int) -> tuple[int, int]:
    if layer.padding == "same":
        width = int(layer.dilation[axis] * (layer.kernel_size[axis] - 1))  # type: ignore[index]
        return width // 2, width - width // 2
    if layer.padding == "valid":
        return 0, 0
    return (layer.padding[axis],) * 2  # type: ignore[index,return-value]


def output_rows(layer: nn.Module, gradient: Tensor) -> Tensor:
    """The gradients with respect to a layer's outputs, one row per sample and position."""
    if isinstance(layer, nn.Linear):
        return gradient.reshape(-1, gradient.shape[-1])
    channels = gradient.ndim - 1 - len(layer.kernel_size)  # type: ignore[arg-type]
    return gradient.movedim(channels, -1).reshape(-1, gradient.shape[channels])


@torch.no_grad()
def is_product(layer: nn.Module, x: Tensor, output: Tensor) -> bool:
    """Whether a layer has multiplied its input by its weight.

    A class that is derived from a layer of PyTorch may do something else: standardise its weight
    before, pad its input. So may a function in the place of its ``forward``. The output tells,
    which is computed once more for such layers, and only for them.
    """
    kind = next(kind for kind in MATRIX_LAYERS if isinstance(layer, kind))
    own = type(layer)
    plain = own.forward is kind.forward and "forward" not in vars(layer)
    if plain and getattr(own, "_conv_forward", None) is getattr(kind, "_conv_forward", None):
        return True
    multiply = getattr(kind, "_conv_forward", lambda _, *given: functional.linear(*given))
    try:
        product = multiply(layer, x.to(layer.weight.dtype), layer.weight, layer.bias)  # type: ignore[arg-type]
    except RuntimeError:
        return False
    if product.shape != output.shape:
        return False
    # rounding to narrower numbers is no other function
    return bool((product - output).norm() <= 0.05 * product.norm())
