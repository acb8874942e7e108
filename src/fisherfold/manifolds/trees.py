"""The linear algebra of points and tangent vectors that are tensors, or dictionaries of tensors (product manifolds).

A vector of a product is a tree: ``a u + b v`` and ``<u, v> = Σ <u_k, v_k>`` run over its leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

# A tensor; for a product manifold a dictionary of points of its factors.
Point: TypeAlias = Any
Tangent: TypeAlias = Any
# A tuple of sizes; for a product manifold a dictionary of the shapes of its factors.
Shape: TypeAlias = Any


def tree_map(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply a function to the leaves of one or more points whose dictionaries have the same keys."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: tree_map(function, *(tree[key] for tree in trees)) for key in first}
    return function(*trees)


def arranged(tree: Point, like: Point | Shape) -> Point:
    """The same tensors with the keys in the order of another tree: dictionaries are equal in any order, lists not."""
    return tree_map(lambda _, leaf: leaf, like, tree)


def leaves(tree: Point) -> list[Tensor]:
    """The tensors of a point, in order."""
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in leaves(branch)]
    return [tree]


def rebuilt(parts: Iterable[Tensor], like: Point) -> Point:
    """The inverse of ``leaves``."""
    remaining = iter(parts)
    return tree_map(lambda _: next(remaining), like)


def flatten(v: Point, batch: int = 0) -> Tensor:
    """All entries as one vector, row by row and factor by factor, after the given number of batch dimensions."""
    return torch.cat([leaf.reshape(*leaf.shape[:batch], -1) for leaf in leaves(v)], dim=-1)


def unflatten(vector: Tensor, like: Point) -> Point:
    """The inverse of ``flatten``; the vector may have batch dimensions before it."""
    parts = rebuilt(
        torch.split(vector, [math.prod(leaf.shape) for leaf in leaves(like)], dim=-1), like
    )
    return tree_map(lambda part, leaf: part.reshape((*vector.shape[:-1], *leaf.shape)), parts, like)


def combine(a: float | Tensor, u: Tangent, b: float | Tensor, v: Tangent) -> Tangent:
    """The linear combination ``a u + b v``."""
    if a == 1.0 and isinstance(u, Tensor) and isinstance(b, float):
        return torch.add(u, v, alpha=b)
    return tree_map(lambda s, t: a * s + b * t, u, v)


def scale(a: float | Tensor, u: Tangent) -> Tangent:
    """The multiple ``a u``."""
    return tree_map(lambda s: a * s, u)


def dot(u: Tangent, v: Tangent) -> Tensor:
    """The ambient inner product of two unbatched vectors."""
    if isinstance(u, Tensor):
        return torch.dot(u.reshape(-1), v.reshape(-1))
    return torch.stack(
        [dot(s, t) for s, t in zip(leaves(u), leaves(arranged(v, u)), strict=True)]
    ).sum()


def is_finite(u: Point) -> bool:
    """Whether every entry is finite."""
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves(u))
