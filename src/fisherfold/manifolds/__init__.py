"""Geometry and nothing else: points, tangent vectors, metrics, projections, retractions and transports."""

from fisherfold.manifolds.adapter import from_geoopt
from fisherfold.manifolds.base import Manifold
from fisherfold.manifolds.euclidean import Euclidean
from fisherfold.manifolds.grassmann import Grassmann
from fisherfold.manifolds.product import Power, Product
from fisherfold.manifolds.rotations import Rotations
from fisherfold.manifolds.spd import SPD
from fisherfold.manifolds.sphere import Oblique, Sphere
from fisherfold.manifolds.stiefel import Stiefel
from fisherfold.manifolds.verdict import Verdict, check_retraction

__all__ = [
    "SPD",
    "Euclidean",
    "Grassmann",
    "Manifold",
    "Oblique",
    "Power",
    "Product",
    "Rotations",
    "Sphere",
    "Stiefel",
    "Verdict",
    "check_retraction",
    "from_geoopt",
]
