import pytest
import torch

from fisherfold.manifolds import (
    SPD,
    Euclidean,
    Grassmann,
    Lorentz,
    PoincareBall,
    Sphere,
    Stiefel,
    from_geoopt,
)


@pytest.mark.parametrize(
    ("build", "shape", "expected"),
    [
        (lambda g: g.Sphere(), (3, 5), Sphere(5)),
        (lambda g: g.SphereExact(), (5,), Sphere(5, retraction="exp")),
        (lambda g: g.Euclidean(ndim=1), (4,), Euclidean(4)),
        (lambda g: g.Stiefel(canonical=False), (2, 6, 3), Stiefel(6, 3)),
        (lambda g: g.EuclideanStiefelExact(), (6, 3), Stiefel(6, 3, retraction="exp")),
        (lambda g: g.SymmetricPositiveDefinite(), (4, 4), SPD(4)),
        (lambda g: g.PoincareBall(), (5, 3), PoincareBall(3)),
        (lambda g: g.Lorentz(), (5, 3), Lorentz(2)),
    ],
)
def test_manifolds_with_the_same_geometry_are_found(geoopt, build, shape, expected):
    assert from_geoopt(build(geoopt), shape=shape) == expected
    parameter = geoopt.ManifoldParameter(torch.zeros(shape), manifold=build(geoopt))
    assert from_geoopt(parameter) == expected


def test_others_are_named_with_a_way_out(geoopt):
    with pytest.raises(
        ValueError,
        match=r"no counterpart here: its projection .* use .*Stiefel\(6, 3\), or as_grass",
    ):
        from_geoopt(geoopt.Stiefel(), shape=(6, 3))
    assert from_geoopt(geoopt.Stiefel(), shape=(6, 3), as_grassmann=True) == Grassmann(6, 3)
    with pytest.raises(ValueError, match=r"PoincareBall .* unless its curvature is -1"):
        from_geoopt(geoopt.PoincareBall(c=2.0), shape=(3,))
    with pytest.raises(ValueError, match=r"BirkhoffPolytope has no counterpart here$"):
        from_geoopt(geoopt.BirkhoffPolytope(), shape=(3, 3))
    with pytest.raises(ValueError, match="shape is needed: geoopt's Sphere does not know"):
        from_geoopt(geoopt.Sphere())
    with pytest.raises(
        ValueError, match="as_grassmann reads Stiefel manifolds, got geoopt's Sphere"
    ):
        from_geoopt(geoopt.Sphere(), shape=(3,), as_grassmann=True)
    with pytest.raises(
        TypeError, match="source must be a geoopt manifold or ManifoldParameter, got Tensor"
    ):
        from_geoopt(torch.zeros(3))
