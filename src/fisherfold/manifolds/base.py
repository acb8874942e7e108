"""The contract of a manifold, and the linear algebra of its tangent vectors.

A manifold here is a submanifold of a space of matrices with the ambient (Frobenius) inner product; a quotient such as
the Grassmann manifold is handled through horizontal vectors, which makes it look the same. Everything follows from two
maps: the orthogonal projector ``P_x`` onto the tangent space and a retraction ``R_x`` with ``R_x(0) = x`` and
``DR_x(0) = Id``. The Riemannian gradient is ``P_x`` of the Euclidean one.

Manifolds hold no tensors: they are immutable descriptions, batched over leading dimensions; device and dtype follow
the tensors that are passed in. A point of a product manifold is a dictionary of tensors, and so are its tangent
vectors; the functions of ``trees``, which this module passes on, work on both forms.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fisherfold.manifolds.lengths import ordinary, range_factor, root
from fisherfold.manifolds.trees import Point, Shape, Tangent, arranged, combine, dot, is_finite, leaves, scale, tree_map

__all__ = [
    "Manifold",
    "Point",
    "Shape",
    "Tangent",
    "arranged",
    "combine",
    "dot",
    "is_finite",
    "leaves",
    "positive_integer",
    "scale",
    "tolerance",
    "tree_map",
]


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

    A subclass names its retractions with their orders in ``retractions`` and implements the hooks ``_project``,
    ``_retract``, ``_random``, ``_constraint_error``, ``dim`` and ``point_shape``, and ``_exp``, ``_log`` and ``_dist``
    where they have a closed form; the public methods check their arguments, compute half precision in float32, and
    call the hooks. The order of a retraction is 2 when the tangential acceleration of ``t -> R_x(t v)`` vanishes at 0,
    and 1 otherwise; the theory of RNGD asks for 2. ``fisherfold.testing.check_manifold`` verifies a subclass.

    Attributes:
        retraction: the retraction that ``retract`` uses unless told otherwise.
        transport_method: the transport that ``transport`` uses unless told otherwise.
    """

    retraction: str
    transport_method: str = "projection"

    @property
    @abstractmethod
    def retractions(self) -> Mapping[str, int]:
        """The name of each retraction and its order; the exponential map counts as order 2."""

    @property
    def transports(self) -> tuple[str, ...]:
        """The names of the vector transports."""
        return ("projection",)

    @property
    @abstractmethod
    def dim(self) -> int:
        """The dimension of the manifold."""

    @property
    @abstractmethod
    def point_shape(self) -> Shape:
        """The shape of one unbatched point."""

    @abstractmethod
    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        """The orthogonal projection of ``v`` onto the tangent space at ``x``."""

    @abstractmethod
    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        """One of ``retractions``."""

    @abstractmethod
    def _random(
        self, shape: tuple[int, ...], generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        """A random point of the given shape, batch included."""

    @abstractmethod
    def _constraint_error(self, x: Tensor) -> Tensor:
        """The largest violation of the constraint, as a tensor without dimensions."""

    def _transport(self, x: Tensor, y: Tensor, v: Tensor, method: str) -> Tensor:
        """One of ``transports``."""
        return self._project(y, v)

    def _exp(self, x: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError(f"{self!r} has no closed-form exponential map; use retract")

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError(f"{self!r} has no closed-form logarithm")

    def _dist(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError(f"{self!r} has no closed-form distance")

    @property
    def retraction_order(self) -> int:
        """The order (1 or 2) of the retraction that ``retract`` uses unless told otherwise."""
        return self.retractions[self.retraction]

    def project(self, x: Point, v: Tangent) -> Tangent:
        """The orthogonal projection of an ambient vector onto the tangent space at ``x``.

        Args:
            x: a point.
            v: an ambient vector.

        Returns:
            A tangent vector.
        """
        self._check_vector(x, v, "v")
        return self._project(*_widen(x, v)).to(x.dtype)

    def retract(self, x: Point, v: Tangent, *, method: str | None = None) -> Point:
        """Move from ``x`` along the tangent vector ``v``.

        Args:
            x: a point.
            v: a tangent vector.
            method: a key of ``retractions``; the manifold's own choice if not given.

        Returns:
            A point; NaN where ``v`` is not finite, or a geodesic of frames is too long to be followed.
        """
        method = self._choice("retraction", method)
        self._check_vector(x, v, "v")
        wide_x, wide_v = _widen(x, v)
        return self._retract(wide_x, wide_v, method).to(x.dtype)

    def transport(self, x: Point, y: Point, v: Tangent, *, method: str | None = None) -> Tangent:
        """Carry the tangent vector ``v`` from ``x`` to ``y``.

        Args:
            x: the point at which ``v`` is tangent.
            y: the point to carry it to.
            v: a tangent vector at ``x``.
            method: a name of ``transports``; the manifold's own choice if not given.

        Returns:
            A tangent vector at ``y``.
        """
        method = self._choice("transport_method", method)
        self._check_vector(x, y, "y")
        self._check_vector(x, v, "v")
        wide_x, wide_y, wide_v = _widen(x, y, v)
        return self._transport(wide_x, wide_y, wide_v, method).to(x.dtype)

    def exp(self, x: Point, v: Tangent) -> Point:
        """The exponential map: the end of the geodesic that leaves ``x`` with velocity ``v``.

        Args:
            x: a point.
            v: a tangent vector.

        Returns:
            A point. Raises NotImplementedError if the manifold has no closed form.
        """
        self._check_vector(x, v, "v")
        return self._exp(*_widen(x, v)).to(x.dtype)

    def log(self, x: Point, y: Point) -> Tangent:
        """The inverse of the exponential map: the initial velocity of the shortest geodesic from ``x`` to ``y``.

        Args:
            x: a point.
            y: a point.

        Returns:
            A tangent vector at ``x``. Raises NotImplementedError if the manifold has no closed form.
        """
        self._check_vector(x, y, "y")
        return self._log(*_widen(x, y)).to(x.dtype)

    def dist(self, x: Point, y: Point) -> Tensor:
        """The geodesic distance, accurate near zero.

        Args:
            x: a point.
            y: a point.

        Returns:
            A tensor of the batch shape. Raises NotImplementedError if the manifold has no closed form.
        """
        self._check_vector(x, y, "y")
        return self._dist(*_widen(x, y)).to(x.dtype)

    def inner(self, x: Point, u: Tangent, v: Tangent) -> Tensor:
        """The ambient inner product of two tangent vectors, one number per batch entry.

        Args:
            x: the point at which they are tangent.
            u: the first vector.
            v: the second vector.

        Returns:
            A tensor of the batch shape.
        """
        self._check_vector(x, u, "u")
        self._check_vector(x, v, "v")
        axes = tuple(range(-len(self.point_shape), 0))
        wide_u, wide_v = _widen(u, v)
        products = wide_u * wide_v
        return (products.sum(dim=axes) if axes else products).to(u.dtype)

    def norm(self, x: Point, v: Tangent) -> Tensor:
        """The length of a tangent vector of any finite size; its derivatives at the zero vector are 0.

        Args:
            x: the point at which it is tangent.
            v: the vector.

        Returns:
            A tensor of the batch shape.
        """
        plain = self.inner(x, v, v).sqrt()
        dtypes = [leaf.dtype for leaf in leaves(v)]
        if any(dtype in _HALF for dtype in dtypes):  # a square may leave the numbers that the length does not
            wide_x, wide_v = (tree_map(lambda leaf: _widen(leaf)[0], tree) for tree in (x, v))
            return self.norm(wide_x, wide_v).to(reduce(torch.promote_types, dtypes))
        if ordinary(plain):
            return plain
        factor = range_factor(self._largest(v))
        scaled = self._stretch(v, 1 / factor)
        return factor * root(self.inner(x, scaled, scaled))

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
            device: the device of the point; that of the generator if not given.

        Returns:
            A point of shape ``(*batch, *point_shape)``.

        Raises:
            ValueError: if the dtype is not a floating one, or a dimension is not a whole number ≥ 0.
        """
        sizes = _batch_sizes(batch)
        _check_generator(generator)
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating dtype, got {dtype}")
        if device is None and generator is not None:
            device = generator.device
        wide = torch.float32 if dtype in _HALF else dtype
        return self._random((*sizes, *self.point_shape), generator, wide, device).to(dtype)

    def random_tangent(self, x: Point, *, generator: torch.Generator | None = None) -> Tangent:
        """A random tangent vector of unit length, uniform in direction.

        Args:
            x: a point.
            generator: the source of randomness.

        Returns:
            A tangent vector at ``x``.
        """
        _check_generator(generator)
        v = self._gaussian_tangent(x, generator)
        length = self.norm(x, v)
        # A manifold of dimension 0 has only the zero vector. Projecting again removes the rounding that the division
        # by a short length has blown up.
        return self.project(x, self._stretch(v, torch.where(length > 0, 1 / length, 1.0)))

    def check_point(self, x: Point, *, name: str = "x", atol: float | None = None) -> None:
        """Raise unless ``x`` is a finite point of the manifold.

        Args:
            x: what should be a point.
            name: the argument's name for the message.
            atol: the accepted violation of the constraint; ``tolerance(dtype)`` if not given.

        Raises:
            ValueError: if the shape, the dtype or the constraint is violated.
        """
        self._check_form(x, name)
        if not is_finite(x):
            raise ValueError(f"{name} must be finite, got NaN or infinite entries")
        error = self.violation(x)
        atol = tolerance(x.dtype) if atol is None else atol
        if not error <= atol:
            raise ValueError(
                f"{name} is not a point of {self!r}: its constraint is violated by {error:.2e}, more than {atol:.0e}"
            )

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
        self._check_vector(x, v, name)
        if not is_finite(v):
            raise ValueError(f"{name} must be finite, got NaN or infinite entries")
        if not v.numel():
            return
        v = v.detach() / range_factor(v.abs().amax())
        size = float(v.norm())
        normal = float((v - self.project(x.detach(), v)).norm())
        atol = tolerance(x.dtype) if atol is None else atol
        if normal > atol * size:
            raise ValueError(
                f"{name} is not a tangent vector of {self!r}: its normal part is {normal / size:.2e} of its length, "
                f"more than {atol:.0e}; project it first"
            )

    def violation(self, x: Point) -> float:
        """How far ``x`` is off the manifold: the largest violation of its constraint over the batch.

        Args:
            x: a point, up to rounding.

        Returns:
            Zero for an exact point; NaN if ``x`` is not finite.
        """
        self._check_form(x, "x")
        return float(self._constraint_error(*_widen(x.detach()))) if x.numel() else 0.0

    def _gaussian_tangent(self, x: Point, generator: torch.Generator | None) -> Tangent:
        """A tangent vector of standard normal coordinates."""
        return self.project(x, torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device))

    def _largest(self, v: Tangent) -> Tensor:
        """The largest absolute entry, per batch entry."""
        axes = tuple(range(-len(self.point_shape), 0))
        return v.detach().abs().amax(dim=axes) if axes else v.detach().abs()

    def _stretch(self, v: Tangent, factor: Tensor) -> Tangent:
        """The vector times one factor per batch entry."""
        return v * factor.reshape(factor.shape + (1,) * len(self.point_shape)).to(v.dtype)

    def _choice(self, kind: str, method: str | None) -> str:
        """The method asked for, or the manifold's own; raise if there is none of that name."""
        method = getattr(self, kind) if method is None else method
        known = self.retractions if kind == "retraction" else self.transports
        if method not in known:
            raise ValueError(f"{kind} of {type(self).__name__} must be one of {sorted(known)}, got {method!r}")
        return method

    def _make_whole(self, *names: str) -> None:
        """Turn sizes into an ``int`` each; raise if one is no positive integer."""
        for name in names:
            size = positive_integer(getattr(self, name), f"{name} of {type(self).__name__}")
            object.__setattr__(self, name, size)

    def _check_form(self, x: Point, name: str) -> None:
        """Raise unless ``x`` is a floating tensor of the right shape."""
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must have a floating dtype, got {x.dtype}")
        shape = self.point_shape
        if x.ndim < len(shape) or tuple(x.shape[x.ndim - len(shape) :]) != shape:
            expected = ", ".join(["...", *map(str, shape)])
            raise ValueError(f"{name} must have shape ({expected}) on {self!r}, got {tuple(x.shape)}")

    def _check_vector(self, x: Point, v: Tangent, name: str) -> None:
        """Raise unless ``v`` has the form, dtype and device of the point ``x``."""
        self._check_form(x, "x")
        self._check_form(v, name)
        if v.dtype != x.dtype or v.device != x.device:
            raise ValueError(f"{name} must be {x.dtype} on {x.device} like the point x, got {v.dtype} on {v.device}")

    def __repr__(self) -> str:
        parts = []
        chosen: tuple[Field[Any], ...] = fields(self) if is_dataclass(self) else ()  # a user's may be a plain class
        for field in chosen:
            value = getattr(self, field.name)
            if field.default is MISSING:
                parts.append(repr(value))
            elif value != field.default:
                parts.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


_HALF = (torch.float16, torch.bfloat16)


def _widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Half precision as float32 (which torch.linalg needs); anything else unchanged."""
    return tuple(t.float() if t.dtype in _HALF else t for t in tensors)


def positive_integer(value: Any, name: str) -> int:
    """A size as an ``int``.

    Args:
        value: a positive integer of any type that can be an index; truth values are none.
        name: the argument's name for the message.

    Returns:
        The integer.

    Raises:
        ValueError: if it is anything else.
    """
    truth = str(getattr(value, "dtype", type(value).__name__)) in ("bool", "torch.bool")  # NumPy's may be indices
    try:
        whole = 0 if truth else operator.index(value)
    except TypeError:
        whole = 0
    if whole < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return whole


def _batch_sizes(batch: tuple[Any, ...]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, batch))
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        seen = ", ".join(map(repr, batch))
        raise ValueError(f"batch dimensions must be whole numbers ≥ 0, as in random_point(3, 2), got {seen}")
    return sizes


def _check_generator(generator: object) -> None:
    if not isinstance(generator, (torch.Generator, type(None))):
        seed = "; a seed goes into torch.Generator().manual_seed(seed)" if isinstance(generator, int) else ""
        raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}{seed}")
