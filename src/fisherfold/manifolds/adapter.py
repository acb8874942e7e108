r"""Manifolds from geoopt, which this package never imports.

geoopt's default Stiefel manifold has no counterpart: its projection is the gradient formula of the
canonical metric, ``u - x uᵀ x``, which doubles rotations within the frame, and its retraction does
not have ``DR_x(0) = Id``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fisherfold.manifolds.base import Manifold, is_of_geoopt
from fisherfold.manifolds.euclidean import Euclidean
from fisherfold.manifolds.grassmann import Grassmann
from fisherfold.manifolds.hyperbolic import Lorentz, PoincareBall
from fisherfold.manifolds.spd import SPD
from fisherfold.manifolds.sphere import Sphere
from fisherfold.manifolds.stiefel import Stiefel


def from_geoopt(
    source: Any, *, shape: Sequence[int] | None = None, as_grassmann: bool = False
) -> Manifold:
    """The manifold of a geoopt ``ManifoldParameter``, or of a geoopt manifold and a shape.

    Args:
        source: a ``geoopt.ManifoldParameter``, or a geoopt manifold: a sphere, a Euclidean space, a
            Stiefel manifold of the Euclidean metric, symmetric positive definite matrices with the
            affine-invariant metric, or hyperbolic space of curvature -1.
        shape: the shape of the points; taken from the parameter if one is given. Leading dimensions
            are a batch.
        as_grassmann: read a Stiefel manifold, of any metric, as the Grassmann manifold of the spans
            of its frames, for losses that depend on the subspace only.

    Returns:
        A manifold.

    Raises:
        TypeError: if the source is not of geoopt.
        ValueError: if there is no such manifold here; the message says what to use instead.
    """
    foreign = getattr(source, "manifold", source)
    if not is_of_geoopt(foreign):
        raise TypeError(
            f"source must be a geoopt manifold or ManifoldParameter, got {type(source).__name__}"
        )
    name = type(foreign).__name__
    if shape is None and not isinstance(source, Tensor):
        raise ValueError(f"shape is needed: geoopt's {name} does not know that of its points")
    sizes = tuple(source.shape) if isinstance(source, Tensor) else tuple(shape or ())
    if as_grassmann:
        if "Stiefel" not in name:
            raise ValueError(f"as_grassmann reads Stiefel manifolds, got geoopt's {name}")
        return Grassmann(*sizes[-2:])
    if name in {"Sphere", "SphereExact"} and foreign.projector is None:
        return Sphere(sizes[-1], retraction="exp" if name == "SphereExact" else "normalize")
    if name == "Euclidean":
        return Euclidean(*sizes)
    if name in {"EuclideanStiefel", "EuclideanStiefelExact"}:
        return Stiefel(
            *sizes[-2:], retraction="exp" if name == "EuclideanStiefelExact" else "polar"
        )
    if name == "SymmetricPositiveDefinite" and foreign.default_metric.value == "AIM":
        return SPD(sizes[-1])
    if name in {"PoincareBall", "PoincareBallExact"} and float(foreign.c) == 1:
        return PoincareBall(sizes[-1])
    if name == "Lorentz" and float(foreign.k) == 1:
        return Lorentz(sizes[-1] - 1)
    message = f"geoopt's {name} has no counterpart here"
    if name in {"PoincareBall", "PoincareBallExact", "Lorentz"}:
        message += " unless its curvature is -1"
    if "Stiefel" in name:
        message += (
            ": its projection and metric are not those of the frames; use "
            f"fisherfold.manifolds.Stiefel({sizes[-2]}, {sizes[-1]}), or as_grassmann=True if the "
            "loss depends only on the span of the columns"
        )
    raise ValueError(message)
