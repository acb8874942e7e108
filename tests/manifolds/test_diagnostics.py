import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import pytest
import torch

from fisherfold.manifolds import Euclidean, Grassmann, Product, Sphere, Stiefel, check_retraction


@pytest.mark.parametrize(
    ("method", "slope"), [("polar", 3.0), ("exp", 3.0), ("qr", 2.0), ("cayley", 2.0)]
)
def test_orders_on_stiefel_are_as_declared(method, slope):
    verdict = check_retraction(Stiefel(12, 3), method=method)
    assert verdict
    assert verdict.measured == pytest.approx(slope, abs=0.03)
    assert verdict.expected == slope


@pytest.mark.parametrize("method", ["polar", "qr", "cholesky"])
def test_grassmann_retractions_meet_the_geodesic_to_third_order(method):
    verdict = check_retraction(Grassmann(9, 3), method=method, against="exp")
    assert verdict
    assert verdict.measured == pytest.approx(3, abs=0.03)


def test_the_exponential_map_against_itself_is_only_rounding():
    assert check_retraction(Sphere(4), method="exp", against="exp").measured == math.inf
    assert check_retraction(Euclidean(3)).measured == math.inf


@dataclass(frozen=True, repr=False)
class Boastful(Stiefel):
    retractions: ClassVar = MappingProxyType({"qr": 2, "polar": 2})


def test_an_order_one_retraction_declared_as_two_fails():
    verdict = check_retraction(Boastful(6, 3, retraction="qr"))
    assert not verdict
    assert verdict.name == "retraction 'qr' is of order 2"
    assert verdict.measured == pytest.approx(2, abs=0.05)


def test_points_and_vectors_may_be_given_and_batched():
    manifold = Product({"u": Grassmann(5, 2), "w": Sphere(3)})
    generator = torch.Generator().manual_seed(1)
    x = manifold.random_point(4, generator=generator)
    v = manifold.random_tangent(x, generator=generator)
    assert check_retraction(manifold, x, v)
    assert check_retraction(manifold, x, v, against="exp")


def test_unknown_comparisons_are_named():
    with pytest.raises(
        ValueError, match="against must be 'acceleration', 'exp' or 'embedding', got 'log'"
    ):
        check_retraction(Sphere(3), against="log")
