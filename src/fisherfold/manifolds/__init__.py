"""Geometry and nothing else: points, tangent vectors, projections, retractions and transports."""

from fisherfold.manifolds.base import Manifold
from fisherfold.manifolds.euclidean import Euclidean
from fisherfold.manifolds.grassmann import Grassmann
from fisherfold.manifolds.oblique import Oblique
from fisherfold.manifolds.product import Product
from fisherfold.manifolds.sphere import Sphere
from fisherfold.manifolds.stiefel import Stiefel

__all__ = ["Euclidean", "Grassmann", "Manifold", "Oblique", "Product", "Sphere", "Stiefel"]
