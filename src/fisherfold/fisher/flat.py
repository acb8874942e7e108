"""Points and tangent vectors as flat vectors, and sums of their outer products, for dense linear algebra.

Tensors are flattened row by row and the factors of a product follow each other in their order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fisherfold.manifolds.base import Point, leaves, tree_map

# rows that are summed at once, in their own precision
_BLOCK_ROWS = 256
# rounding units that sums leave of the eigenvalue 0, with a margin; matrices of more rows have as many as rows
_UNITS = 32


def flatten(v: Point) -> Tensor:
    """All entries as one vector."""
    return torch.cat([leaf.reshape(-1) for leaf in leaves(v)])


def unflatten(vector: Tensor, like: Point) -> Point:
    """The inverse of ``flatten``."""
    position = 0

    def take(leaf: Tensor) -> Tensor:
        nonlocal position
        size = math.prod(leaf.shape)
        piece = vector[..., position : position + size].reshape((*vector.shape[:-1], *leaf.shape))
        position += size
        return piece

    return tree_map(take, like)


def gram(rows: Tensor) -> Tensor:
    """The matrix WᵀW, summed in float64 over blocks of rows, so that rounding does not grow with their number."""
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    for block in torch.split(rows, _BLOCK_ROWS):
        total += block.T @ block
    return total.to(rows.dtype)


def rounding_share(size: int, dtype: torch.dtype) -> float:
    """The share of the largest eigenvalue of a matrix of sums at or below which another one is 0."""
    return max(size, _UNITS) * torch.finfo(dtype).eps
