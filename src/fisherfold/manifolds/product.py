"""Products of named manifolds with dictionaries as points, powers, and the Euclidean group.

Everything is done factor by factor; metrics add up, ``dist² = Σ dist_k²``, and the retraction of a
product is of the lowest order among its factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fisherfold.manifolds.algebra import safe_norm
from fisherfold.manifolds.base import Manifold, Point, Shape, Tangent, positive_integer, tree_map
from fisherfold.manifolds.euclidean import Euclidean
from fisherfold.manifolds.rotations import Rotations


def _factorwise(hook: str) -> Callable[..., Any]:
    """The hook of every factor on its part of the arguments."""

    def combined(self: Product, *trees: Point) -> Point:
        return self._each(lambda factor, *parts: getattr(factor, hook)(*parts), *trees)

    return combined


def _of_copies(hook: str) -> Callable[..., Any]:
    """The hook of the manifold of which a power has copies."""

    def delegated(self: Power, *arguments: Any) -> Any:
        return getattr(self.manifold, hook)(*arguments)

    return delegated


def _attribute(name: str) -> Any:
    """An attribute of the manifold of which a power has copies."""
    return property(attrgetter(f"manifold.{name}"))


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
            raise ValueError(
                "factors must be a dictionary of at least one name and its manifold, "
                f"got {factors!r}"
            )
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

    @property
    def complex(self) -> Any:
        """Whether points are complex, for every factor."""
        return {key: factor.complex for key, factor in self.items}

    @property
    def ambient_metric(self) -> bool:
        """Whether the metrics of all factors are ambient."""
        return all(factor.ambient_metric for _, factor in self.items)

    def check_point(self, x: Point, *, name: str = "x", atol: float | None = None) -> None:
        """Raise unless ``x`` is a finite point of the manifold.

        ``atol``: the accepted violation of the constraint; ``tolerance(dtype)`` if not given.
        """
        self._check_form(x, name)
        for key, factor in self.items:
            factor.check_point(x[key], name=f"{name}[{key!r}]", atol=atol)

    def check_tangent(
        self, x: Point, v: Tangent, *, name: str = "v", atol: float | None = None
    ) -> None:
        """Raise unless ``v`` is a finite tangent vector at ``x``.

        ``atol``: the accepted size of the normal part over the whole; ``tolerance(dtype)`` if not
        given.
        """
        self._check_vector(x, v, name)
        for key, factor in self.items:
            factor.check_tangent(x[key], v[key], name=f"{name}[{key!r}]", atol=atol)

    def _each(self, operation: Callable[..., Any], *trees: Point) -> dict[str, Any]:
        """The operation of every factor on its part of the arguments."""
        return {
            key: operation(factor, *(tree[key] for tree in trees)) for key, factor in self.items
        }

    _project = _factorwise("_project")
    _gradient = _factorwise("_gradient")
    _hessian = _factorwise("_hessian")
    _exp = _factorwise("_exp")
    _log = _factorwise("_log")

    def _retract(self, x: Point, v: Tangent, method: str) -> Point:
        return self._each(lambda m, s, t: m._retract(s, t, m.retraction), x, v)

    def _transport(self, x: Point, y: Point, v: Tangent, method: str) -> Tangent:
        return self._each(lambda m, s, t, u: m._transport(s, t, u, m.transport_method), x, y, v)

    def _dist(self, x: Point, y: Point) -> Tensor:
        parts = self._each(lambda m, s, t: m._dist(s, t), x, y)
        return safe_norm(torch.stack(list(parts.values())), dim=0)

    def _inner(self, x: Point, u: Tangent, v: Tangent) -> Tensor:
        parts = self._each(lambda m, s, t, w: m._inner(s, t, w), x, u, v)
        return torch.stack(list(parts.values())).sum(dim=0)

    def _random(
        self, shape: Shape, generator: torch.Generator | None, dtype: torch.dtype, device: Any
    ) -> Point:
        return self._each(lambda m, s: m._draw(s, generator, dtype, device), shape)

    def _embedding(self, x: Point) -> Tensor:
        return torch.cat(list(self._each(lambda m, s: m._embedding(s), x).values()), dim=-1)

    def _constraint_error(self, x: Point) -> Tensor:
        return torch.stack(list(self._each(lambda m, s: m._constraint_error(s), x).values())).amax()

    def _complaint(self, x: Point) -> str | None:
        found = self._each(lambda m, s: m._complaint(s), x)
        return next(
            (f"[{key!r}]: {complaint}" for key, complaint in found.items() if complaint), None
        )

    def _symmetry(self, generator: torch.Generator) -> Callable[[Point], Point] | None:
        parts = {key: factor._symmetry(generator) for key, factor in self.items}
        if not any(parts.values()):
            return None
        return lambda tree: {
            key: part(tree[key]) if part else tree[key] for key, part in parts.items()
        }

    def __repr__(self) -> str:
        return f"Product({self.factors!r})"


@dataclass(frozen=True, init=False, repr=False)
class SpecialEuclidean(Product):
    """The rigid motions ``p ↦ R p + t`` of R^n, the group SE(n), with the product metric.

    A point is a dictionary of a ``rotation`` R and a ``translation`` t.

    Args:
        n: the dimension of the space that is moved, at least 2.
        retraction: the retraction of the rotations.

    Examples:
        >>> motions = SpecialEuclidean(3)
        >>> x = motions.random_point(generator=torch.Generator().manual_seed(0))
        >>> identity = motions.compose(x, motions.inverse(x))
        >>> torch.allclose(motions.matrix(identity), torch.eye(4, dtype=torch.float64))
        True
    """

    n: int

    def __init__(self, n: int, *, retraction: str = "cayley") -> None:
        rotations = Rotations(n, retraction=retraction)
        object.__setattr__(self, "n", rotations.n)
        super().__init__({"rotation": rotations, "translation": Euclidean(n)})

    def apply(self, x: Point, points: Tensor) -> Tensor:
        """The moved points, of shape (..., number, n)."""
        return points @ x["rotation"].mT + x["translation"].unsqueeze(-2)

    def compose(self, x: Point, y: Point) -> Point:
        """The motion x after y."""
        moved = (x["rotation"] @ y["translation"].unsqueeze(-1)).squeeze(-1)
        return {
            "rotation": x["rotation"] @ y["rotation"],
            "translation": moved + x["translation"],
        }

    def inverse(self, x: Point) -> Point:
        """The motion back."""
        back = x["rotation"].mT
        return {"rotation": back, "translation": -(back @ x["translation"].unsqueeze(-1))[..., 0]}

    def matrix(self, x: Point) -> Tensor:
        """The motion as a homogeneous matrix of n + 1 rows."""
        top = torch.cat([x["rotation"], x["translation"].unsqueeze(-1)], dim=-1)
        bottom = torch.zeros_like(top[..., :1, :])
        bottom[..., -1] = 1
        return torch.cat([top, bottom], dim=-2)

    def __repr__(self) -> str:
        rotations = self.factors["rotation"]
        options = (
            "" if rotations.retraction == "cayley" else f", retraction={rotations.retraction!r}"
        )
        return f"SpecialEuclidean({self.n}{options})"


@dataclass(frozen=True, repr=False)
class Power(Manifold):
    """k points of one manifold, as one tensor of shape (k, *point_shape).

    Points of a power of a product are dictionaries of such tensors.

    Args:
        manifold: the manifold of every copy; its retraction and transport are used.
        k: the number of copies.

    Examples:
        >>> from fisherfold.manifolds import Rotations
        >>> cameras = Power(Rotations(3), 10)
        >>> cameras.dim, cameras.point_shape
        (30, (10, 3, 3))
    """

    manifold: Manifold
    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.manifold, Manifold):
            raise ValueError(
                f"manifold of Power must be a manifold such as Rotations(3), got {self.manifold!r}"
            )
        object.__setattr__(self, "k", positive_integer(self.k, "k of Power"))

    retraction = _attribute("retraction")
    transport_method = _attribute("transport_method")
    retractions = _attribute("retractions")
    transports = _attribute("transports")
    ambient_metric = _attribute("ambient_metric")
    complex = _attribute("complex")

    @property
    def dim(self) -> int:
        """The dimension, k times that of the manifold."""
        return self.k * self.manifold.dim

    @property
    def point_shape(self) -> Shape:
        """The shape of the manifold's points after k."""
        return tree_map(lambda shape: (self.k, *shape), self.manifold.point_shape)

    # the hooks of the manifold take batches
    _project = _of_copies("_project")
    _gradient = _of_copies("_gradient")
    _hessian = _of_copies("_hessian")
    _retract = _of_copies("_retract")
    _transport = _of_copies("_transport")
    _exp = _of_copies("_exp")
    _log = _of_copies("_log")
    _random = _of_copies("_draw")
    _constraint_error = _of_copies("_constraint_error")
    _complaint = _of_copies("_complaint")
    _symmetry = _of_copies("_symmetry")

    def _embedding(self, x: Point) -> Tensor:
        return self.manifold._embedding(x).flatten(-2)

    def _dist(self, x: Point, y: Point) -> Tensor:
        return safe_norm(self.manifold._dist(x, y))

    def _inner(self, x: Point, u: Tangent, v: Tangent) -> Tensor:
        return self.manifold._inner(x, u, v).sum(dim=-1)
