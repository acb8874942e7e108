"""Points and tangent vectors as flat vectors, for dense linear algebra.

Tensors are flattened row by row and the factors of a product follow each other in their order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fisherfold.manifolds.base import Point, leaves, tree_map


def flatten(v: Point) -> Tensor:
    """All entries as one vector.

    Args:
        v: a point or vector.

    Returns:
        A tensor of one dimension.
    """
    return torch.cat([leaf.reshape(-1) for leaf in leaves(v)])


def unflatten(vector: Tensor, like: Point) -> Point:
    """The inverse of ``flatten``.

    Args:
        vector: a tensor whose last dimension holds the entries; further leading dimensions are kept.
        like: a point of the wanted form.

    Returns:
        A point of that form.
    """
    position = 0

    def take(leaf: Tensor) -> Tensor:
        nonlocal position
        size = math.prod(leaf.shape)
        piece = vector[..., position : position + size].reshape((*vector.shape[:-1], *leaf.shape))
        position += size
        return piece

    return tree_map(take, like)
