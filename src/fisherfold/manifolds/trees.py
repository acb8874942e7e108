"""The linear algebra of points and tangent vectors that are tensors, or dictionaries of tensors (product manifolds).

A vector of a product is a tree: ``a u + b v`` and ``<u, v> = Σ <u_k, v_k>`` run over its leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

# A tensor; for a product manifold a dictionary of points of its factors.
Point: TypeAlias = Any
Tangent: TypeAlias = Any
# A tuple of sizes; for a product manifold a dictionary of the shapes of its factors.
Shape: TypeAlias = Any


def tree_map(function: Callable[..., Tensor], *trees: Point) -> Point:
    """Apply a function of tensors to the leaves of one or more equally shaped points.

    Args:
        function: takes one tensor per tree.
        *trees: tensors, or dictionaries of the same keys.

    Returns:
        A point of the same form.
    """
    first = trees[0]
    if isinstance(first, dict):
        return {key: tree_map(function, *(tree[key] for tree in trees)) for key in first}
    return function(*trees)


def arranged(tree: Point, like: Point | Shape) -> Point:
    """The same tensors with the keys in the order of another tree: dictionaries are equal in any order, lists are not.

    Args:
        tree: a tensor or a dictionary of tensors.
        like: a tree of the same keys, such as the ``point_shape`` of a manifold.

    Returns:
        The tree, for ``leaves`` beside those of ``like``.
    """
    return tree_map(lambda _, leaf: leaf, like, tree)


def leaves(tree: Point) -> list[Tensor]:
    """The tensors of a point, in order.

    Args:
        tree: a tensor or a dictionary of tensors.

    Returns:
        The list of its tensors.
    """
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in leaves(branch)]
    return [tree]


def combine(a: float | Tensor, u: Tangent, b: float | Tensor, v: Tangent) -> Tangent:
    """The linear combination ``a u + b v``.

    Args:
        a: the first factor.
        u: the first vector.
        b: the second factor.
        v: the second vector.

    Returns:
        A vector of the same form.
    """
    return tree_map(lambda s, t: a * s + b * t, u, v)


def scale(a: float | Tensor, u: Tangent) -> Tangent:
    """The multiple ``a u``.

    Args:
        a: the factor.
        u: the vector.

    Returns:
        A vector of the same form.
    """
    return tree_map(lambda s: a * s, u)


def dot(u: Tangent, v: Tangent) -> Tensor:
    """The ambient inner product of two unbatched vectors.

    Args:
        u: the first vector.
        v: the second vector.

    Returns:
        A tensor without dimensions.
    """
    if isinstance(u, Tensor):
        return torch.dot(u.reshape(-1), v.reshape(-1))
    return torch.stack([dot(s, t) for s, t in zip(leaves(u), leaves(arranged(v, u)), strict=True)]).sum()


def is_finite(u: Point) -> bool:
    """Whether every entry is finite.

    Args:
        u: a point or vector.

    Returns:
        False if there is an infinity or a NaN.
    """
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves(u))
