"""How a weight falls into matrices.

A convolution [out, in, k, k] is a matrix [out, in·k·k] for each of its groups; fused queries, keys
and values are three matrices; a tensor of experts is one matrix for each. Some layers keep a weight
transposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

# Modules whose weight holds several matrices one above the other, by the last part of their name.
FUSED = {
    "qkv": 3,
    "in_proj": 3,
    "query_key_value": 3,
    "c_attn": 3,
    "Wqkv": 3,
    "qkv_proj": 3,
    "gate_up_proj": 2,
}


class Layout(NamedTuple):
    """The matrices of a weight.

    Attributes:
        matrices: their number.
        rows: of each.
        swap: 0, or 1 where the second axis holds the outputs, or 2 for the third; it is swapped
            with the one before.
    """

    matrices: int
    rows: int
    swap: int = 0

    def split(self, t: Tensor) -> Tensor:
        """A tensor in the shape of the weight as matrices [matrices, rows, columns].

        A view where that is possible.
        """
        t = t.transpose(self.swap - 1, self.swap) if self.swap else t
        if t.numel():
            return t.reshape(self.matrices, self.rows, -1)
        # a process may hold no row, or no expert
        return t.reshape(self.matrices, self.rows, t.shape[1 if self.matrices else 2 :].numel())

    def join(self, matrices: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of ``split``."""
        swapped = list(shape)
        if not self.swap:
            return matrices.reshape(swapped)
        i, j = self.swap - 1, self.swap
        swapped[i], swapped[j] = swapped[j], swapped[i]
        return matrices.reshape(swapped).transpose(i, j)


class Entry(NamedTuple):
    """A parameter with what its group says about it."""

    parameter: nn.Parameter
    name: str
    spheres: int
    layout: Layout


def entries_of(group: Mapping[str, Any]) -> list[Entry]:
    """The entries of a group."""
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
    layouts = [Layout(*layout) for layout in group["layouts"]]
    return [
        Entry(*each) for each in zip(group["params"], names, group["spheres"], layouts, strict=True)
    ]


def layout_of(parameter: Tensor, module: nn.Module | None, name: str) -> Layout:
    """The layout of a weight in its module."""
    if parameter.ndim < 2:
        return Layout(1, parameter.numel())
    rows = len(parameter)
    transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    if transposed or (module is not None and type(module).__name__ == "Conv1D"):
        outputs = parameter.shape[1]
        return Layout(_fused(name, outputs, rows), outputs // _fused(name, outputs, rows), 1)
    if isinstance(module, nn.modules.conv._ConvNd):
        return Layout(module.groups, rows // module.groups)
    if parameter.ndim == 3:
        return Layout(rows, parameter.shape[1])
    parts = _fused(name, rows, parameter.shape[-1])
    return Layout(parts, rows // parts)


def _fused(name: str, rows: int, columns: int) -> int:
    *_, module, key = ["", *name.split(".")]
    parts = FUSED.get(module, FUSED.get(key.removesuffix("_weight"), 1))
    whole = rows == 3 * columns if parts == 3 else rows % parts == 0
    return parts if whole else 1
