"""Products of manifolds with named factors: points and tangent vectors are dictionaries, metrics add up.

Everything is done factor by factor; ``dist² = Σ dist_k²``, and the retraction is of the lowest order among its factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fisherfold.manifolds.base import Manifold, Point, Shape, Tangent
from fisherfold.manifolds.lengths import length


@dataclass(frozen=True, init=False, repr=False)
class Product(Manifold):
    """The product of named manifolds; factors may be products themselves.

    Args:
        factors: the manifold of each name.

    Examples:
        >>> from fisherfold.manifolds import Euclidean, Grassmann
        >>> product = Product({"subspace": Grassmann(5, 2), "shift": Euclidean(5)})
        >>> product.dim
        11
        >>> x = product.random_point(generator=torch.Generator().manual_seed(0))
        >>> sorted(x)
        ['shift', 'subspace']
    """

    items: tuple[tuple[str, Manifold], ...]

    retraction = "factors"
    transport_method = "factors"

    def __init__(self, factors: Mapping[str, Manifold]) -> None:
        if not isinstance(factors, Mapping) or not factors:
            raise ValueError(f"factors must be a dictionary of at least one name and its manifold, got {factors!r}")
        for key, factor in factors.items():
            if not isinstance(key, str) or not isinstance(factor, Manifold):
                raise ValueError(f"factors must map names to manifolds, got {key!r}: {factor!r}")
        object.__setattr__(self, "items", tuple(factors.items()))

    @property
    def factors(self) -> dict[str, Manifold]:
        """The manifold of each name."""
        return dict(self.items)

    @property
    def retractions(self) -> Mapping[str, int]:
        """Only ``"factors"``: each factor's own, of the lowest order among them."""
        return {"factors": min(factor.retraction_order for _, factor in self.items)}

    @property
    def transports(self) -> tuple[str, ...]:
        """Only ``"factors"``: each factor's own."""
        return ("factors",)

    @property
    def dim(self) -> int:
        """The sum of the dimensions."""
        return sum(factor.dim for _, factor in self.items)

    @property
    def point_shape(self) -> Shape:
        """The shape of every factor's points, by name."""
        return {key: factor.point_shape for key, factor in self.items}

    def project(self, x: Point, v: Tangent) -> Tangent:
        """The orthogonal projection, factor by factor.

        Args:
            x: a point.
            v: an ambient vector.

        Returns:
            A tangent vector.
        """
        return self._each(lambda m, s, t: m.project(s, t), x=x, v=v)

    def retract(self, x: Point, v: Tangent, *, method: str | None = None) -> Point:
        """Move along a tangent vector, every factor by its own retraction.

        Args:
            x: a point.
            v: a tangent vector.
            method: ``"factors"`` or nothing.

        Returns:
            A point.
        """
        self._choice("retraction", method)
        return self._each(lambda m, s, t: m.retract(s, t), x=x, v=v)

    def transport(self, x: Point, y: Point, v: Tangent, *, method: str | None = None) -> Tangent:
        """Carry a tangent vector, every factor by its own transport.

        Args:
            x: the point at which ``v`` is tangent.
            y: the point to carry it to.
            v: a tangent vector at ``x``.
            method: ``"factors"`` or nothing.

        Returns:
            A tangent vector at ``y``.
        """
        self._choice("transport_method", method)
        return self._each(lambda m, s, t, u: m.transport(s, t, u), x=x, y=y, v=v)

    def exp(self, x: Point, v: Tangent) -> Point:
        """The exponential map, factor by factor.

        Args:
            x: a point.
            v: a tangent vector.

        Returns:
            A point. Raises NotImplementedError if a factor has no closed form.
        """
        return self._each(lambda m, s, t: m.exp(s, t), x=x, v=v)

    def log(self, x: Point, y: Point) -> Tangent:
        """The logarithm, factor by factor.

        Args:
            x: a point.
            y: a point.

        Returns:
            A tangent vector at ``x``. Raises NotImplementedError if a factor has no closed form.
        """
        return self._each(lambda m, s, t: m.log(s, t), x=x, y=y)

    def dist(self, x: Point, y: Point) -> Tensor:
        """The geodesic distance ``√Σ dist_k²``.

        Args:
            x: a point.
            y: a point.

        Returns:
            A tensor of the batch shape. Raises NotImplementedError if a factor has no closed form.
        """
        parts = self._each(lambda m, s, t: m.dist(s, t), x=x, y=y)
        return length(torch.stack(list(parts.values())), dim=0)

    def inner(self, x: Point, u: Tangent, v: Tangent) -> Tensor:
        """The sum of the inner products of the factors.

        Args:
            x: the point at which they are tangent.
            u: the first vector.
            v: the second vector.

        Returns:
            A tensor of the batch shape.
        """
        parts = self._each(lambda m, s, t, w: m.inner(s, t, w), x=x, u=u, v=v)
        return torch.stack(list(parts.values())).sum(dim=0)

    def random_point(
        self,
        *batch: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> Point:
        """A random point of every factor.

        Args:
            *batch: leading dimensions.
            generator: the source of randomness.
            dtype: the dtype of the point.
            device: the device of the point; that of the generator if not given.

        Returns:
            A dictionary of points.
        """
        options: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        return {key: factor.random_point(*batch, **options) for key, factor in self.items}

    def violation(self, x: Point) -> float:
        """The largest violation among the factors.

        Args:
            x: a point, up to rounding.

        Returns:
            Zero for an exact point; NaN if ``x`` is not finite.
        """
        parts = self._each(lambda m, s: m.violation(s), x=x)
        return math.nan if any(map(math.isnan, parts.values())) else max(parts.values())

    def check_point(self, x: Point, *, name: str = "x", atol: float | None = None) -> None:
        """Raise unless ``x`` is a finite point of the manifold.

        Args:
            x: what should be a point.
            name: the argument's name for the message.
            atol: the accepted violation of the constraint; ``tolerance(dtype)`` if not given.
        """
        self._check_form(x, name)
        for key, factor in self.items:
            factor.check_point(x[key], name=f"{name}[{key!r}]", atol=atol)

    def check_tangent(self, x: Point, v: Tangent, *, name: str = "v", atol: float | None = None) -> None:
        """Raise unless ``v`` is a finite tangent vector at ``x``.

        Args:
            x: a point.
            v: what should be a tangent vector.
            name: the argument's name for the message.
            atol: the accepted size of the normal part over the whole; ``tolerance(dtype)`` if not given.
        """
        self._check_form(x, "x")
        self._check_form(v, name)
        for key, factor in self.items:
            factor.check_tangent(x[key], v[key], name=f"{name}[{key!r}]", atol=atol)

    def _each(self, operation: Callable[..., Any], **arguments: Point) -> dict[str, Any]:
        """The operation of every factor on its part of the arguments, which are named for the messages."""
        for name, argument in arguments.items():
            self._check_form(argument, name)
        return {key: operation(factor, *(tree[key] for tree in arguments.values())) for key, factor in self.items}

    def _gaussian_tangent(self, x: Point, generator: torch.Generator | None) -> Tangent:
        return self._each(lambda m, s: m._gaussian_tangent(s, generator), x=x)

    def _largest(self, v: Tangent) -> Tensor:
        return torch.stack([factor._largest(v[key]) for key, factor in self.items]).amax(dim=0)

    def _stretch(self, v: Tangent, factor: Tensor) -> Tangent:
        return {key: manifold._stretch(v[key], factor) for key, manifold in self.items}

    def _check_form(self, x: Point, name: str) -> None:
        if not isinstance(x, dict):
            raise TypeError(f"{name} must be a dictionary of the factors {list(self.factors)}, got {type(x).__name__}")
        if set(x) != set(self.factors):
            raise ValueError(f"{name} must have the keys {sorted(self.factors)} of {self!r}, got {sorted(map(str, x))}")
        for key, factor in self.items:
            factor._check_form(x[key], f"{name}[{key!r}]")
        batches = {key: _batch(x[key], factor.point_shape) for key, factor in self.items}
        if len(set(batches.values())) > 1:
            raise ValueError(f"{name} must have the same batch dimensions in all factors, got {batches}")

    # The hooks of the base class speak of one tensor; a product has none, and every public method above goes around
    # them.
    def _no_tensor(self, name: str) -> TypeError:
        return TypeError(f"{self!r} has no single tensor for {name}: its points are dictionaries")

    def _project(self, x: Tensor, v: Tensor) -> Tensor:
        raise self._no_tensor("_project")

    def _retract(self, x: Tensor, v: Tensor, method: str) -> Tensor:
        raise self._no_tensor("_retract")

    def _random(
        self, shape: tuple[int, ...], generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Tensor:
        raise self._no_tensor("_random")

    def _constraint_error(self, x: Tensor) -> Tensor:
        raise self._no_tensor("_constraint_error")

    def __repr__(self) -> str:
        return f"Product({self.factors!r})"


def _batch(x: Point, shape: Shape) -> tuple[int, ...]:
    """The leading dimensions of a point whose form is right."""
    while isinstance(shape, dict):
        key = next(iter(shape))
        x, shape = x[key], shape[key]
    return tuple(x.shape[: x.ndim - len(shape)])
