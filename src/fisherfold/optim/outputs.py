"""What a network returns: by how much it has changed, as one number, and the graph that it was computed by.

Infinite entries, such as masked logits, are the same ones before and after, and no part of the size of an output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def graph_nodes(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of the autograd graph behind some outputs.

    Args:
        outputs: of a forward pass.

    Yields:
        Each node once.
    """
    seen, ahead = set(), [t.grad_fn for t in outputs]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead += [following for following, _ in node.next_functions]


def unmasked(outputs: list[Tensor]) -> list[Tensor]:
    """Outputs with 0 in the place of infinite entries, unless there are no others.

    Args:
        outputs: what a network returned.

    Returns:
        Tensors of the same shapes.
    """
    if not any(bool(t.isfinite().any()) for t in outputs):
        return outputs
    return [t.masked_fill(t.isinf(), 0.0) for t in outputs]


def size_of(outputs: list[Tensor]) -> float:
    """The norm of all outputs together, without overflow in the squares.

    Args:
        outputs: what a network returned.

    Returns:
        A number, not finite where an entry is not.
    """
    largest = max((float(t.detach().abs().max()) for t in outputs if t.numel()), default=0.0)
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * sum(float((t.detach() / largest).square().sum()) for t in outputs) ** 0.5


def relative_change(before: list[Tensor], after: list[Tensor], smallest: float = 0.0) -> float:
    """The norm of the difference over that of the outputs before.

    Args:
        before: what a network returned.
        after: what it returns now, in the same shapes.
        smallest: the least size that outputs are taken to have.

    Returns:
        A number, not finite where an output is none.
    """
    difference = size_of([torch.where(s == t, 0.0, s - t) for s, t in zip(after, before, strict=True)])
    return difference / max(size_of(unmasked(before)), smallest, 1e-150)
