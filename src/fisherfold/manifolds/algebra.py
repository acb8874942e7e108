"""The linear algebra of points and tangent vectors: tensors, or dictionaries of tensors (products).

A vector of a product is a tree: ``a u + b v`` and ``<u, v> = Σ <u_k, v_k>`` run over its leaves.
Complex tensors are real vectors of twice the size, with the inner product ``Re <u, v>``.

The norms have derivatives of every order where they are defined; at the kink of a norm at zero the
derivatives are given as 0, not as NaN.
"""

from __future__ import annotations

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
    """Apply a function to the leaves of points whose dictionaries have the same keys."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: tree_map(function, *(tree[key] for tree in trees)) for key in first}
    return function(*trees)


def reorder_like(tree: Point, like: Point | Shape) -> Point:
    """The same tensors with the keys in the order of another tree."""
    return tree_map(lambda _, leaf: leaf, like, tree)


def leaves(tree: Point) -> list[Tensor]:
    """The tensors of a point, in order."""
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in leaves(branch)]
    return [tree]


def unflatten_like(parts: Iterable[Tensor], like: Point) -> Point:
    """The inverse of ``leaves``."""
    remaining = iter(parts)
    return tree_map(lambda _: next(remaining), like)


def as_real(leaf: Tensor) -> Tensor:
    """Real and imaginary parts in one more dimension; a real tensor as it is."""
    return torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf


def real_product(u: Tensor, v: Tensor) -> Tensor:
    """The products of entries that an inner product sums: ``Re(ū v)``."""
    return (u.conj() * v).real if u.is_complex() else u * v


def row_product(u: Tensor, v: Tensor) -> Tensor:
    """The inner products of rows, in a last dimension of size 1."""
    return real_product(u, v).sum(dim=-1, keepdim=True)


def flatten(v: Point, batch: int = 0) -> Tensor:
    """All entries as one real vector, factor by factor, after the batch dimensions."""
    parts = [as_real(leaf).reshape(*leaf.shape[:batch], -1) for leaf in leaves(v)]
    return torch.cat(parts, dim=-1)


def unflatten(vector: Tensor, like: Point) -> Point:
    """The inverse of ``flatten``; the vector may have batch dimensions before it."""
    sizes = [leaf.numel() * (2 if leaf.is_complex() else 1) for leaf in leaves(like)]
    parts = unflatten_like(torch.split(vector, sizes, dim=-1), like)

    def shaped(part: Tensor, leaf: Tensor) -> Tensor:
        shape = (*part.shape[:-1], *leaf.shape)
        if not leaf.is_complex():
            return part.reshape(shape)
        return torch.view_as_complex(part.reshape(*shape, 2).contiguous())

    return tree_map(shaped, parts, like)


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
        if u.is_complex():
            return torch.vdot(u.reshape(-1), v.reshape(-1)).real
        return torch.dot(u.reshape(-1), v.reshape(-1))
    pairs = zip(leaves(u), leaves(reorder_like(v, u)), strict=True)
    return torch.stack([dot(s, t) for s, t in pairs]).sum()


def is_finite(u: Point) -> bool:
    """Whether every entry is finite."""
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves(u))


def static_all(condition: Tensor) -> bool | None:
    """Whether a condition is met everywhere; None under ``vmap``, where no value can be read."""
    try:
        return bool(condition.all())
    except RuntimeError:
        return None


def safe_sqrt(square: Tensor) -> Tensor:
    """The square root, with derivatives 0 instead of infinite at 0."""
    zero = square == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())


def safe_norm(v: Tensor, *, dim: int | tuple[int, ...] = -1, keepdim: bool = False) -> Tensor:
    """The Euclidean length of vectors."""
    zero = (v.detach() == 0).all(dim=dim, keepdim=True)
    # a constant in place of zero vectors, so that nothing is differentiated at the kink
    found = torch.linalg.vector_norm(torch.where(zero, 1.0, v), dim=dim, keepdim=True)
    found = torch.where(zero, 0.0, found)
    return found if keepdim else found.squeeze(dim)


def series(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    """The polynomial ``Σ a_k t^k``."""
    value = torch.full_like(t, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * t + coefficient
    return value
