"""The contract of a manifold.

A manifold here is a submanifold of a space of matrices; a quotient such as the Grassmann manifold
is handled through horizontal vectors, which makes it look the same. Everything follows from the
orthogonal projector ``P_x`` onto the tangent space, a retraction ``R_x`` with ``R_x(0) = x`` and
``DR_x(0) = Id``, and a metric ``<u, v>_x``. The metric is the ambient (Frobenius) inner product
unless ``_inner`` says otherwise; the Riemannian gradient ``g`` of a Euclidean one ``e`` has ``<g,
v>_x = e · v`` for all tangent v, and is ``P_x e`` for the ambient metric.

Complex matrices are a real vector space with ``u · v = Re tr(uᴴ v)``, which is what PyTorch's
derivatives of a real loss in complex variables refer to; so every formula with ``ᴴ`` for ``ᵀ``
holds for both.

Manifolds hold no tensors: they are immutable descriptions, batched over leading dimensions; device
and dtype follow the tensors that are passed in. A point of a product manifold is a dictionary of
tensors, and so are its tangent vectors; the functions of ``algebra``, which this module passes on,
work on both forms.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fisherfold.manifolds.algebra import (
    Point,
    Shape,
    Tangent,
    as_real,
    combine,
    dot,
    flatten,
    is_finite,
    leaves,
    real_product,
    reorder_like,
    safe_sqrt,
    scale,
    tree_map,
    unflatten,
    unflatten_like,
)

__all__ = [
    "Manifold",
    "Point",
    "Shape",
    "Tangent",
    "as_real",
    "combine",
    "dot",
    "flatten",
    "is_finite",
    "leaves",
    "positive_integer",
    "real_product",
    "reorder_like",
    "require_manifold",
    "scale",
    "tolerance",
    "tree_map",
    "unflatten",
    "unflatten_like",
]


def tolerance(dtype: torch.dtype) -> float:
    """How far a point may lie off its manifold: √eps, 1.5e-8 in float64."""
    return float(torch.finfo(dtype).eps) ** 0.5


class Manifold(ABC):
    """An embedded manifold, or a quotient of one with horizontal tangent vectors.

    A subclass names its retractions with their orders in ``retractions`` and implements the hooks
    ``_project``, ``_retract``, ``_random``, ``_constraint_error``, ``dim`` and ``point_shape``, and
    ``_exp``, ``_log`` and ``_dist`` where they have a closed form; a metric of its own is
    ``_inner`` with ``_gradient`` and ``_hessian``. The public methods check their arguments and
    call the hooks. The order of a retraction is 2 when ``t -> R_x(t v)`` has no acceleration at 0
    in the manifold's own geometry, and 1 otherwise; the theory of RNGD asks for 2.
    ``fisherfold.testing.check_manifold`` verifies a subclass.

    In all methods x and y are points, u and v tangent vectors at x, all with any leading batch
    dimensions.

    Attributes:
        retraction: the retraction that ``retract`` uses unless told otherwise.
        transport_method: the transport that ``transport`` uses unless told otherwise.
        complex: whether points are complex; for a product a dictionary with an entry for every
            factor.
        constrained: whether points satisfy an equation, which ``violation`` measures.
    """

    retraction: str
    transport_method: str = "projection"
    complex: Any = False
    constrained: ClassVar[bool] = True

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

    @property
    def ambient_metric(self) -> bool:
        """Whether the metric is the ambient inner product."""
        return type(self)._inner is Manifold._inner

    @property
    def projector_structure(self) -> str:
        """The side on which the projector acts on a matrix V, for structured solves.

        ``none``: P V = V. ``left``: P V = Q V for a matrix Q. ``rows``: each row of V alone.
        ``both``: none of these.
        """
        return "both"

    @abstractmethod
    def _project(self, x: Any, v: Any) -> Any:
        """The ambient orthogonal projection of ``v`` onto the tangent space at ``x``."""

    @abstractmethod
    def _retract(self, x: Any, v: Any, method: str) -> Any:
        """One of ``retractions``."""

    @abstractmethod
    def _random(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Any:
        """A random point of the given shape, batch included."""

    @abstractmethod
    def _constraint_error(self, x: Any) -> Tensor:
        """The largest violation of the constraint, as a tensor without dimensions."""

    def _complaint(self, x: Any) -> str | None:
        """Why ``x`` is no point although it may satisfy the constraint, if so."""
        return None

    def _inner(self, x: Any, u: Any, v: Any) -> Tensor:
        """The metric."""
        axes = tuple(range(-len(self.point_shape), 0))
        products = real_product(u, v)
        return products.sum(dim=axes) if axes else products

    def _gradient(self, x: Any, e: Any) -> Any:
        """The Riemannian gradient of a Euclidean one."""
        # twice: near a minimum the rounding of the first projection is as long as what it has left
        return self._project(x, self._project(x, e))

    def _hessian(self, x: Any, e: Any, h: Any, v: Any) -> Any:
        """``P (h + (D_v P) e)``, with the Euclidean gradient e and Hessian product h."""
        jvp: Any = torch.autograd.functional.jvp
        bend = jvp(lambda y: self._project(y, e), x, v)[1]
        return self._project(x, h + bend)

    def _transport(self, x: Any, y: Any, v: Any, method: str) -> Any:
        """One of ``transports``."""
        return self._project(y, v)

    def _exp(self, x: Any, v: Any) -> Any:
        raise NotImplementedError(f"{self!r} has no closed-form exponential map; use retract")

    def _log(self, x: Any, y: Any) -> Any:
        raise NotImplementedError(f"{self!r} has no closed-form logarithm")

    def _dist(self, x: Any, y: Any) -> Tensor:
        raise NotImplementedError(f"{self!r} has no closed-form distance")

    def _embedding(self, x: Any) -> Tensor:
        """An isometric image of ``x`` in a Euclidean space, as a vector, where there is one."""
        if not self.ambient_metric:
            raise NotImplementedError(f"{self!r} has no embedding")
        return as_real(x).reshape(*x.shape[: x.ndim - len(self.point_shape)], -1)

    def _draw(
        self, shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Any:
        """A random point of a dtype that is given by that of its real parts."""
        if self.complex is True:
            dtype = dtype.to_complex()
        return self._random(shape, generator, dtype, device)

    def _symmetry(self, generator: torch.Generator) -> Callable[[Any], Any] | None:
        """A random change of representative of points and tangent vectors, on a quotient."""
        return None

    @property
    def retraction_order(self) -> int:
        """The order (1 or 2) of the retraction that ``retract`` uses unless told otherwise."""
        return self.retractions[self.retraction]

    def project(self, x: Point, v: Tangent) -> Tangent:
        """The ambient orthogonal projection of a vector onto the tangent space at ``x``."""
        self._check_vector(x, v, "v")
        return self._project(x, v)

    def riemannian_gradient(self, x: Point, egrad: Tangent) -> Tangent:
        """The Riemannian gradient of a function: ``<g, v>_x = egrad · v`` for all tangent v."""
        self._check_vector(x, egrad, "egrad")
        return self._gradient(x, egrad)

    def riemannian_hessian(self, x: Point, egrad: Tangent, ehess: Tangent, v: Tangent) -> Tangent:
        """The Riemannian Hessian of a function times ``v``, from its Euclidean derivatives."""
        for name, vector in (("egrad", egrad), ("ehess", ehess), ("v", v)):
            self._check_vector(x, vector, name)
        return self._hessian(x, egrad, ehess, v)

    def retract(self, x: Point, v: Tangent, *, method: str | None = None) -> Point:
        """Move from ``x`` along the tangent vector ``v``.

        ``method``: a key of ``retractions``; the manifold's own choice if not given. Returns a
        point; NaN where ``v`` is not finite, or a geodesic of frames is too long to be followed.
        """
        method = self._choice("retraction", method)
        self._check_vector(x, v, "v")
        return self._retract(x, v, method)

    def transport(self, x: Point, y: Point, v: Tangent, *, method: str | None = None) -> Tangent:
        """Carry the tangent vector ``v`` from ``x`` to ``y``.

        ``method``: a name of ``transports``; the manifold's own choice if not given.
        """
        method = self._choice("transport_method", method)
        self._check_vector(x, y, "y")
        self._check_vector(x, v, "v")
        return self._transport(x, y, v, method)

    def exp(self, x: Point, v: Tangent) -> Point:
        """The exponential map: the end of the geodesic that leaves ``x`` with velocity ``v``.

        Returns a point. Raises NotImplementedError if the manifold has no closed form.
        """
        self._check_vector(x, v, "v")
        return self._exp(x, v)

    def log(self, x: Point, y: Point) -> Tangent:
        """The inverse of ``exp``: the initial velocity of the shortest geodesic to ``y``."""
        self._check_vector(x, y, "y")
        return self._log(x, y)

    def dist(self, x: Point, y: Point) -> Tensor:
        """The geodesic distance, accurate near zero.

        Returns a tensor of the batch shape. Raises NotImplementedError if the manifold has no
        closed form.
        """
        self._check_vector(x, y, "y")
        return self._dist(x, y)

    def inner(self, x: Point, u: Tangent, v: Tangent) -> Tensor:
        """The metric: the inner product of two tangent vectors, one number per batch entry."""
        self._check_vector(x, u, "u")
        self._check_vector(x, v, "v")
        return self._inner(x, u, v)

    def norm(self, x: Point, v: Tangent) -> Tensor:
        """The length of a tangent vector; its derivatives at the zero vector are 0."""
        self._check_vector(x, v, "v")
        return safe_sqrt(self._inner(x, v, v))

    def random_point(
        self,
        *batch: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> Point:
        """A random point, uniform where the manifold is compact.

        ``dtype``: that of the real parts. ``device``: the device of the point; that of the
        generator if not given. Raises ValueError if the dtype is not a floating one.
        """
        _check_generator(generator)
        if self.complex and dtype.is_complex:
            dtype = dtype.to_real()
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating dtype, got {dtype}")
        if device is None and generator is not None:
            device = generator.device
        shape = tree_map(lambda size: (*batch, *size), self.point_shape)
        return self._draw(shape, generator, dtype, device)

    def random_tangent(self, x: Point, *, generator: torch.Generator | None = None) -> Tangent:
        """A random tangent vector of unit length; uniform in direction for the ambient metric."""
        _check_generator(generator)
        self._check_form(x, "x")

        def noise(leaf: Tensor) -> Tensor:
            return torch.randn(
                leaf.shape, generator=generator, dtype=leaf.dtype, device=leaf.device
            )

        v = self.project(x, tree_map(noise, x))
        length = self.norm(x, v)
        # in dimension 0 there is only the zero vector
        factor = torch.where(length > 0, 1 / length, 1.0)

        def stretch(leaf: Tensor) -> Tensor:
            return leaf * factor.reshape(factor.shape + (1,) * (leaf.ndim - factor.ndim)).to(
                leaf.dtype
            )

        # once more: the division by a short length has blown up the rounding of the first
        # projection
        return self.project(x, tree_map(stretch, v))

    def tangent_basis(self, x: Point) -> Tangent:
        """An orthonormal basis of the tangent space, for small manifolds: it forms P_x.

        Returns ``dim`` tangent vectors, orthonormal in the manifold's metric, stacked along a new
        first dimension. Raises ValueError if ``x`` has batch dimensions.
        """
        if batch := self._check_form(x, "x"):
            raise ValueError(f"x must be a single point, got one with the batch dimensions {batch}")
        x = reorder_like(x, self.point_shape)
        d, ambient = self.dim, flatten(x)
        eye = torch.eye(len(ambient), dtype=ambient.dtype, device=ambient.device)

        def repeated(count: int) -> Point:
            return tree_map(lambda leaf: leaf.expand(count, *leaf.shape), x)

        image = self.project(repeated(len(eye)), unflatten(eye, x))
        projector = flatten(reorder_like(image, x), batch=1)
        rows = torch.linalg.eigh((projector + projector.mT) / 2).eigenvectors[:, len(eye) - d :].mT
        if self.ambient_metric:
            return unflatten(rows, x)
        left = unflatten(rows.repeat_interleave(d, dim=0), x)
        right = unflatten(rows.repeat(d, 1), x)
        lower = torch.linalg.cholesky(self.inner(repeated(d * d), left, right).reshape(d, d))
        return unflatten(torch.linalg.solve_triangular(lower, rows, upper=False), x)

    def alignment(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The rotation of the representative y of a quotient's point against the one next to x.

        Returns the rotation that transports apply to frames; None where points have one
        representative.
        """
        return None

    def check_point(self, x: Point, *, name: str = "x", atol: float | None = None) -> None:
        """Raise unless ``x`` is a finite point of the manifold.

        ``atol``: the accepted violation of the constraint; ``tolerance(dtype)`` if not given.
        Raises ValueError if the shape, the dtype or the constraint is violated.
        """
        self._check_form(x, name)
        if not is_finite(x):
            raise ValueError(f"{name} must be finite, got NaN or infinite entries")
        if not leaves(x)[0].numel():
            return
        error = self.violation(x)
        atol = tolerance(leaves(x)[0].dtype) if atol is None else atol
        if not error <= atol:
            raise ValueError(
                f"{name} is not a point of {self!r}: its constraint is violated by {error:.2e}, "
                f"more than {atol:.0e}"
            )
        if complaint := self._complaint(tree_map(torch.detach, x)):
            raise ValueError(f"{name} is not a point of {self!r}: {complaint}")

    def check_tangent(
        self, x: Point, v: Tangent, *, name: str = "v", atol: float | None = None
    ) -> None:
        """Raise unless ``v`` is a finite tangent vector at ``x``.

        ``atol``: the accepted size of the normal part over the whole; ``tolerance(dtype)`` if not
        given. Raises ValueError if the shape, dtype or device does not fit ``x``, or the vector is
        not tangent.
        """
        self._check_vector(x, v, name)
        if not is_finite(v):
            raise ValueError(f"{name} must be finite, got NaN or infinite entries")
        if not leaves(v)[0].numel():
            return
        x, v = (tree_map(torch.detach, tree) for tree in (x, v))
        size, normal = _size(v), _size(combine(1.0, v, -1.0, self.project(x, v)))
        atol = tolerance(leaves(x)[0].dtype) if atol is None else atol
        if normal > atol * size:
            raise ValueError(
                f"{name} is not a tangent vector of {self!r}: its normal part is "
                f"{normal / size:.2e} of its length, more than {atol:.0e}; project it first"
            )

    def violation(self, x: Point) -> float:
        """How far ``x`` is off the manifold: the largest violation over the batch.

        ``x``: a point, up to rounding. Returns zero for an exact point; NaN if ``x`` is not finite.
        """
        self._check_form(x, "x")
        if not leaves(x)[0].numel():
            return 0.0
        return float(self._constraint_error(tree_map(torch.detach, x)))

    def _choice(self, kind: str, method: str | None) -> str:
        """The method asked for, or the manifold's own; raise if there is none of that name."""
        method = getattr(self, kind) if method is None else method
        known = self.retractions if kind == "retraction" else self.transports
        if method not in known:
            raise ValueError(
                f"{kind} of {type(self).__name__} must be one of {sorted(known)}, got {method!r}"
            )
        return method

    def _check_options(self, *names: str) -> None:
        """Validate the sizes, each as an ``int``, and the names of methods."""
        for name in names:
            size = positive_integer(getattr(self, name), f"{name} of {type(self).__name__}")
            object.__setattr__(self, name, size)
        if not isinstance(self.complex, bool):
            kind = type(self).__name__
            raise ValueError(f"complex of {kind} must be True or False, got {self.complex!r}")
        self._choice("retraction", None)
        self._choice("transport_method", None)

    def _check_form(self, x: Point, name: str) -> tuple[int, ...]:
        """Validate the form and dtype of ``x``; return its batch dimensions."""
        return _check_tree(x, (self.point_shape, self.complex), name, self)

    def _check_vector(self, x: Point, v: Tangent, name: str) -> None:
        """Raise unless ``v`` has the form, dtype and device of the point ``x``."""
        self._check_form(x, "x")
        self._check_form(v, name)
        if isinstance(x, Tensor) and x.dtype == v.dtype and x.device == v.device:
            return
        for like, leaf in zip(leaves(x), leaves(reorder_like(v, x)), strict=True):
            if leaf.dtype != like.dtype or leaf.device != like.device:
                raise ValueError(
                    f"{name} must be {like.dtype} on {like.device} like the point x, "
                    f"got {leaf.dtype} on {leaf.device}"
                )

    def __repr__(self) -> str:
        parts = []
        # a user's may be a plain class
        chosen: tuple[Field[Any], ...] = fields(self) if is_dataclass(self) else ()
        for field in chosen:
            value = getattr(self, field.name)
            if field.default is MISSING:
                parts.append(repr(value))
            elif value != field.default:
                parts.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


def require_manifold(manifold: object) -> None:
    """Raise a TypeError unless an argument is a manifold of this library."""
    if isinstance(manifold, Manifold):
        return
    if is_of_geoopt(getattr(manifold, "manifold", manifold)):
        what = type(manifold).__name__
        raise TypeError(
            f"manifold must be one of fisherfold, got geoopt's {what}; pass from_geoopt(...) of it"
        )
    raise TypeError(f"manifold must be a manifold such as Sphere(3), got {manifold!r}")


def is_of_geoopt(manifold: object) -> bool:
    """Whether an object is a manifold of geoopt, which is not imported."""
    return any(
        c.__name__ == "Manifold" and c.__module__.startswith("geoopt.")
        for c in type(manifold).__mro__
    )


def positive_integer(value: Any, name: str) -> int:
    """A size as an ``int``; raises ValueError for anything but a positive integer."""
    try:
        whole = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = 0
    if whole < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return whole


def _size(v: Tangent) -> float:
    """The Frobenius norm over all leaves and the whole batch."""
    return sum(float(as_real(leaf).double().square().sum()) for leaf in leaves(v)) ** 0.5


def _check_tree(
    x: Point, form: tuple[Shape, Any], name: str, manifold: Manifold
) -> tuple[int, ...]:
    shape, is_complex = form
    if isinstance(shape, dict):
        return _check_dictionary(x, form, name, manifold)
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_complex() != is_complex:
        _raise_number(x, is_complex, name, manifold)
    if not (x.is_floating_point() or is_complex):
        raise ValueError(f"{name} must have a floating dtype, got {x.dtype}")
    batch = x.ndim - len(shape)
    if batch < 0 or tuple(x.shape[batch:]) != shape:
        expected = ", ".join(["...", *map(str, shape)])
        raise ValueError(
            f"{name} must have shape ({expected}) on {manifold!r}, got {tuple(x.shape)}"
        )
    return tuple(x.shape[:batch])


def _raise_number(x: Tensor, is_complex: bool, name: str, manifold: Manifold) -> None:
    if is_complex:
        raise ValueError(
            f"{name} must be complex on {manifold!r}, got {x.dtype}; use x.to(torch.complex128)"
        )
    options = getattr(manifold, "__dataclass_fields__", {})
    hint = "; use the manifold with complex=True" if "complex" in options else ""
    raise ValueError(f"{name} must be real on {manifold!r}, got {x.dtype}{hint}")


def _check_dictionary(
    x: Point, form: tuple[Shape, Any], name: str, manifold: Manifold
) -> tuple[int, ...]:
    shape, is_complex = form
    if not isinstance(x, dict):
        raise TypeError(
            f"{name} must be a dictionary of the factors {list(shape)}, got {type(x).__name__}"
        )
    if set(x) != set(shape):
        raise ValueError(
            f"{name} must have the keys {sorted(shape)} of {manifold!r}, got {sorted(map(str, x))}"
        )
    batches = {}
    for key, part in shape.items():
        kind = is_complex[key] if isinstance(is_complex, dict) else is_complex
        batches[key] = _check_tree(x[key], (part, kind), f"{name}[{key!r}]", manifold)
    if len(set(batches.values())) > 1:
        raise ValueError(
            f"{name} must have the same batch dimensions in all factors, got {batches}"
        )
    return next(iter(batches.values()))


def _check_generator(generator: object) -> None:
    if not isinstance(generator, (torch.Generator, type(None))):
        seed = (
            "; a seed goes into torch.Generator().manual_seed(seed)"
            if isinstance(generator, int)
            else ""
        )
        raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}{seed}")
