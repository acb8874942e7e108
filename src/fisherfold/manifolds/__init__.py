"""Geometry alone: points, tangent vectors, metrics, projections, retractions and transports."""

from fisherfold.manifolds.adapter import from_geoopt
from fisherfold.manifolds.base import Manifold
from fisherfold.manifolds.euclidean import Euclidean
from fisherfold.manifolds.grassmann import Grassmann
from fisherfold.manifolds.hyperbolic import Lorentz, PoincareBall
from fisherfold.manifolds.low_rank import FixedRank, LowRankPSD
from fisherfold.manifolds.product import Power, Product, SpecialEuclidean
from fisherfold.manifolds.rotations import Rotations, Unitary
from fisherfold.manifolds.simplex import PositiveOrthant, Simplex
from fisherfold.manifolds.spd import SPD
from fisherfold.manifolds.sphere import Oblique, Sphere
from fisherfold.manifolds.stiefel import Stiefel
from fisherfold.manifolds.verdict import Verdict, check_retraction

__all__ = [
    "SPD",
    "Euclidean",
    "FixedRank",
    "Grassmann",
    "Lorentz",
    "LowRankPSD",
    "Manifold",
    "Oblique",
    "PoincareBall",
    "PositiveOrthant",
    "Power",
    "Product",
    "Rotations",
    "Simplex",
    "SpecialEuclidean",
    "Sphere",
    "Stiefel",
    "Unitary",
    "Verdict",
    "check_retraction",
    "from_geoopt",
]
