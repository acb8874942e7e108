"""Geometry and nothing else: points, tangent vectors, projections, retractions and transports."""

from fisherfold.manifolds.adapter import from_geoopt, to_geoopt
from fisherfold.manifolds.base import Manifold
from fisherfold.manifolds.diagnostics import check_retraction
from fisherfold.manifolds.euclidean import Euclidean
from fisherfold.manifolds.grassmann import Grassmann
from fisherfold.manifolds.oblique import Oblique
from fisherfold.manifolds.product import Product
from fisherfold.manifolds.sphere import Sphere
from fisherfold.manifolds.stiefel import Stiefel
from fisherfold.manifolds.verdict import Verdict

__all__ = [
    "Euclidean",
    "Grassmann",
    "Manifold",
    "Oblique",
    "Product",
    "Sphere",
    "Stiefel",
    "Verdict",
    "check_retraction",
    "from_geoopt",
    "to_geoopt",
]
