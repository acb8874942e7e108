"""The contract of a manifold, and the linear algebra of its tangent vectors.

A manifold here is a submanifold of a space of matrices with the ambient (Frobenius) inner product; a quotient such as
the Grassmann manifold is handled through horizontal vectors, which makes it look the same. Everything follows from two
maps: the orthogonal projector ``P_x`` onto the tangent space and a retraction ``R_x`` with ``R_x(0) = x`` and
``DR_x(0) = Id``. The Riemannian gradient is ``P_x`` of the Euclidean one.

Manifolds hold no tensors: they are immutable descriptions, batched over leading dimensions; device and dtype follow
the tensors that are passed in. A point of a product manifold is a dictionary of tensors, and so are its tangent
vectors; the functions ``combine``, ``scale``, ``dot`` and ``tree_map`` work on both forms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

# A tensor; for a product manifold a dictionary of points of its factors.
Point: TypeAlias = Any
Tangent: TypeAlias = Any


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
    return torch.stack([(s * t).sum() for s, t in zip(leaves(u), leaves(v), strict=True)]).sum()


def is_finite(u: Point) -> bool:
    """Whether every entry is finite.

    Args:
        u: a point or vector.

    Returns:
        False if there is an infinity or a NaN.
    """
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves(u))


def tolerance(dtype: torch.dtype) -> float:
    """How far a point may lie off its manifold and still be accepted: the square root of the rounding unit.

    Args:
        dtype: a floating dtype.

    Returns:
        1.5e-8 in float64, 3.5e-4 in float32.
    """
    return float(torch.finfo(dtype).eps) ** 0.5


class Manifold(ABC):
    """An embedded manifold, or a quotient of one with horizontal tangent vectors.

    A subclass names its retractions with their orders in ``retractions`` and implements ``project``, ``_retract``,
    ``_constraint_error``, ``dim``, ``point_shape`` and ``random_point``; the rest follows from these. The order of a
    retraction is 2 when the tangential acceleration of ``t -> R_x(t v)`` vanishes at 0, and 1 otherwise; the theory of
    RNGD asks for 2.

    Attributes:
        retractions: the name of each retraction and its order; the exponential map counts as order 2.
        transports: the names of the vector transports.
        retraction: the retraction that ``retract`` uses unless told otherwise.
        transport_method: the transport that ``transport`` uses unless told otherwise.
    """

    retractions: ClassVar[Mapping[str, int]]
    transports: ClassVar[tuple[str, ...]] = ("projection",)
    retraction: str
    transport_method: str = "projection"

    @property
    @abstractmethod
    def dim(self) -> int:
        """The dimension of the manifold."""

    @property
    @abstractmethod
    def point_shape(self) -> tuple[int, ...]:
        """The shape of one unbatched point."""

    @property
    def retraction_order(self) -> int:
        """The order (1 or 2) of the retraction that ``retract`` uses unless told otherwise."""
        return self.retractions[self.retraction]

    @abstractmethod
    def project(self, x: Point, v: Tangent) -> Tangent:
        """The orthogonal projection of an ambient vector onto the tangent space at ``x``.

        Args:
            x: a point.
            v: an ambient vector.

        Returns:
            A tangent vector.
        """

    @abstractmethod
    def random_point(
        self,
        *batch: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> Point:
        """A random point, uniform where the manifold is compact.

        Args:
            *batch: leading dimensions.
            generator: the source of randomness.
            dtype: the dtype of the point.
            device: the device of the point.

        Returns:
            A point of shape ``(*batch, *point_shape)``.
        """

    @abstractmethod
    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        """One of ``retractions``, with arguments already checked."""

    @abstractmethod
    def _constraint_error(self, x: Tensor) -> Tensor:
        """The largest violation of the constraint, as a tensor without dimensions."""

    def retract(self, x: Point, v: Tangent, *, method: str | None = None) -> Point:
        """Move from ``x`` along the tangent vector ``v``.

        Args:
            x: a point.
            v: a tangent vector.
            method: a key of ``retractions``; the manifold's own choice if not given.

        Returns:
            A point.

        Raises:
            ValueError: if there is no such retraction, or a shape is wrong.
        """
        method = self.retraction if method is None else method
        if method not in self.retractions:
            raise ValueError(f"{self!r} has the retractions {sorted(self.retractions)}, got {method!r}")
        self._check_shape(x, "x")
        self._check_shape(v, "v")
        return self._retract(x, v, method)

    def transport(self, x: Point, y: Point, v: Tangent, *, method: str | None = None) -> Tangent:
        """Carry the tangent vector ``v`` from ``x`` to ``y``.

        Args:
            x: the point at which ``v`` is tangent.
            y: the point to carry it to.
            v: a tangent vector at ``x``.
            method: a name of ``transports``; the manifold's own choice if not given.

        Returns:
            A tangent vector at ``y``.

        Raises:
            ValueError: if there is no such transport.
        """
        method = self.transport_method if method is None else method
        if method not in self.transports:
            raise ValueError(f"{self!r} has the transports {list(self.transports)}, got {method!r}")
        return self._transport(x, y, v, method)

    def _transport(self, x: Point, y: Point, v: Tangent, method: str) -> Tangent:
        return self.project(y, v)

    def inner(self, x: Point, u: Tangent, v: Tangent) -> Tensor:
        """The ambient inner product of two tangent vectors, one number per batch entry.

        Args:
            x: the point at which they are tangent.
            u: the first vector.
            v: the second vector.

        Returns:
            A tensor of the batch shape.
        """
        axes = tuple(range(-len(self.point_shape), 0))
        return (u * v).sum(dim=axes) if axes else u * v

    def norm(self, x: Point, v: Tangent) -> Tensor:
        """The length of a tangent vector.

        Args:
            x: the point at which it is tangent.
            v: the vector.

        Returns:
            A tensor of the batch shape.
        """
        return self.inner(x, v, v).sqrt()

    def exp(self, x: Point, v: Tangent) -> Point:
        """The exponential map: the end of the geodesic that leaves ``x`` with velocity ``v``.

        Args:
            x: a point.
            v: a tangent vector.

        Returns:
            A point.

        Raises:
            NotImplementedError: if it has no closed form on this manifold.
        """
        raise NotImplementedError(f"{self!r} has no closed-form exponential map; use retract")

    def log(self, x: Point, y: Point) -> Tangent:
        """The inverse of the exponential map: the initial velocity of the shortest geodesic from ``x`` to ``y``.

        Args:
            x: a point.
            y: a point.

        Returns:
            A tangent vector at ``x``.

        Raises:
            NotImplementedError: if it has no closed form on this manifold.
        """
        raise NotImplementedError(f"{self!r} has no closed-form logarithm")

    def dist(self, x: Point, y: Point) -> Tensor:
        """The geodesic distance, accurate near zero.

        Args:
            x: a point.
            y: a point.

        Returns:
            A tensor of the batch shape.

        Raises:
            NotImplementedError: if it has no closed form on this manifold.
        """
        raise NotImplementedError(f"{self!r} has no closed-form distance")

    def random_tangent(self, x: Point, *, generator: torch.Generator | None = None) -> Tangent:
        """A random tangent vector of unit length, uniform in direction.

        Args:
            x: a point.
            generator: the source of randomness.

        Returns:
            A tangent vector at ``x``.
        """
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        v = self.project(x, noise)
        axes = len(self.point_shape)
        return v / self.norm(x, v).reshape(v.shape[: v.ndim - axes] + (1,) * axes)

    def check_point(self, x: Point, *, name: str = "x", atol: float | None = None) -> None:
        """Raise unless ``x`` is a finite point of the manifold.

        Args:
            x: what should be a point.
            name: the argument's name for the message.
            atol: the accepted violation of the constraint; ``tolerance(dtype)`` if not given.

        Raises:
            ValueError: if the shape, the dtype or the constraint is violated.
        """
        self._check_shape(x, name)
        if not bool(torch.isfinite(x).all()):
            raise ValueError(f"{name} must be finite, got NaN or infinite entries")
        error = float(self._constraint_error(x))
        atol = tolerance(x.dtype) if atol is None else atol
        if not error <= atol:
            raise ValueError(f"{name} is not a point of {self!r}: its constraint is violated by {error:.2e} > {atol:.0e}")

    def check_tangent(self, x: Point, v: Tangent, *, name: str = "v", atol: float | None = None) -> None:
        """Raise unless ``v`` is a finite tangent vector at ``x``.

        Args:
            x: a point.
            v: what should be a tangent vector.
            name: the argument's name for the message.
            atol: the accepted size of the normal part over the whole; ``tolerance(dtype)`` if not given.

        Raises:
            ValueError: if the shape, dtype or device does not fit ``x``, or the vector is not tangent.
        """
        self._check_shape(v, name)
        if v.dtype != x.dtype or v.device != x.device:
            raise ValueError(f"{name} must be {x.dtype} on {x.device} like the point, got {v.dtype} on {v.device}")
        if not bool(torch.isfinite(v).all()):
            raise ValueError(f"{name} must be finite, got NaN or infinite entries")
        size = float(v.norm())
        normal = float((v - self.project(x, v)).norm())
        atol = tolerance(x.dtype) if atol is None else atol
        if normal > atol * size:
            raise ValueError(
                f"{name} is not a tangent vector of {self!r}: its normal part is {normal / size:.2e} of its length, "
                f"more than {atol:.0e}; project it first"
            )

    def _check_shape(self, x: Tensor, name: str) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must have a floating dtype, got {x.dtype}")
        shape = self.point_shape
        if tuple(x.shape[x.ndim - len(shape) :]) != shape or x.ndim < len(shape):
            raise ValueError(f"{name} must have shape (..., {', '.join(map(str, shape))}) on {self!r}, got {tuple(x.shape)}")
