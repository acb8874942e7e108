import subprocess
import sys

import pytest
import torch

from fisherfold.manifolds import Euclidean, Grassmann, Sphere, Stiefel, from_geoopt, to_geoopt
from fisherfold.manifolds.adapter import GeooptManifold
from fisherfold.testing import check_manifold


def parameter(geoopt, manifold, *shape):
    return geoopt.ManifoldParameter(torch.zeros(shape), manifold=manifold)


def test_the_package_never_imports_geoopt():
    code = "import sys, fisherfold.manifolds, fisherfold.testing; assert 'geoopt' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_known_manifolds_become_ours(geoopt):
    assert from_geoopt(parameter(geoopt, geoopt.Sphere(), 4, 3)) == Sphere(3)
    assert from_geoopt(parameter(geoopt, geoopt.SphereExact(), 3)) == Sphere(3, retraction="exp")
    assert from_geoopt(parameter(geoopt, geoopt.EuclideanStiefel(), 2, 5, 3)) == Stiefel(5, 3)
    assert from_geoopt(geoopt.EuclideanStiefelExact(), shape=(5, 3)) == Stiefel(5, 3, retraction="exp")
    assert from_geoopt(geoopt.Euclidean(ndim=1), shape=(5, 3)) == Euclidean(5, 3)


def test_the_default_stiefel_is_refused_by_name(geoopt):
    weight = parameter(geoopt, geoopt.Stiefel(), 12, 3)
    with pytest.raises(ValueError, match="geoopt's CanonicalStiefel cannot carry") as caught:
        from_geoopt(weight)
    message = str(caught.value)
    assert "its projector is not idempotent (relative error" in message
    assert "its retraction does not have DR(0) = Id (relative error" in message
    assert "its inner product is not the ambient one (relative error" in message
    assert "use fisherfold.manifolds.Stiefel(12, 3) or geoopt's EuclideanStiefel" in message
    assert "or as_grassmann=True if the loss depends only on the span of the columns" in message


def test_stiefel_frames_may_be_read_as_subspaces(geoopt):
    assert from_geoopt(parameter(geoopt, geoopt.Stiefel(), 12, 3), as_grassmann=True) == Grassmann(12, 3)
    assert from_geoopt(geoopt.EuclideanStiefel(), shape=(4, 12, 3), as_grassmann=True) == Grassmann(12, 3)
    with pytest.raises(ValueError, match="as_grassmann reads Stiefel manifolds, got geoopt's Sphere"):
        from_geoopt(geoopt.Sphere(), shape=(3,), as_grassmann=True)
    with pytest.raises(ValueError, match="must be less than n=3, got 3"):
        from_geoopt(geoopt.Stiefel(), shape=(3, 3), as_grassmann=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # geoopt compiles at first use
@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("Lorentz", (4,), "its inner product is not the ambient one"),
        ("SymmetricPositiveDefinite", (4, 4), "its inner product is not the ambient one"),
        ("PoincareBall", (4,), "its inner product is not the ambient one"),
        ("BirkhoffPolytope", (4, 4), "its projector is not idempotent"),
    ],
)
def test_other_metrics_are_refused_by_name(geoopt, name, shape, reason):
    with pytest.raises(ValueError, match=f"geoopt's {name} cannot carry .*{reason}"):
        from_geoopt(getattr(geoopt, name)(), shape=shape)


def test_a_hidden_canonical_stiefel_is_found(geoopt):
    product = geoopt.ProductManifold((geoopt.Sphere(), 4), (geoopt.Stiefel(), (5, 2)))
    with pytest.raises(ValueError, match=r"geoopt's ProductManifold cannot carry .* not idempotent .* DR\(0\) = Id"):
        from_geoopt(product, shape=(14,))


def test_sound_manifolds_without_counterpart_are_wrapped_and_pass_the_kit(geoopt):
    generator = torch.Generator().manual_seed(0)
    plane = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    circle = from_geoopt(geoopt.Sphere(intersection=plane), shape=(5,))
    assert isinstance(circle, GeooptManifold)
    assert (circle.dim, circle.retraction_order) == (2, 2)
    assert all(check_manifold(circle, dtypes=(torch.float64,)))
    product = geoopt.ProductManifold((geoopt.Sphere(), 4), (geoopt.EuclideanStiefel(), (5, 2)))
    mixed = from_geoopt(product, shape=(14,))
    assert (mixed.dim, mixed.retraction_order) == (3 + 7, 1)  # its Stiefel retracts by QR
    assert all(check_manifold(mixed, dtypes=(torch.float64,)))
    assert repr(mixed) == "GeooptManifold(ProductManifold, (14,))"


def test_what_a_manifold_holds_itself_may_be_in_float32(geoopt):
    plane = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    circle = from_geoopt(geoopt.Sphere(intersection=plane), shape=(5,))
    assert (circle.dim, circle.retraction_order) == (2, 2)
    x = circle.random_point(generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    y = circle.retract(x, circle.random_tangent(x, generator=torch.Generator().manual_seed(2)))
    circle.check_point(y)
    assert float((torch.linalg.qr(plane, mode="complete").Q[:, 3:].mT @ y).abs().max()) < 1e-5


def test_wrong_arguments_are_named(geoopt):
    with pytest.raises(TypeError, match="source must be a geoopt manifold or ManifoldParameter, got Parameter"):
        from_geoopt(torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="shape is needed: geoopt's Sphere does not know that of its points"):
        from_geoopt(geoopt.Sphere())
    with pytest.raises(TypeError, match=r"manifold must be a Grassmann manifold, got Sphere\(3\)"):
        to_geoopt(Sphere(3))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.5, "stabilize": 100}])
def test_our_grassmann_runs_under_geoopt_and_finds_the_leading_subspace(geoopt, wide, options):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    matrix = matrix @ matrix.T
    ours = Grassmann(12, 3, wide=wide)
    foreign = to_geoopt(ours)
    start = ours.random_point(generator=generator)
    weight = geoopt.ManifoldParameter(start.clone(), manifold=foreign)
    optimizer = geoopt.optim.RiemannianSGD([weight], lr=1e-2, **options)
    for _ in range(600):
        optimizer.zero_grad()
        frame = weight.T if wide else weight
        loss = -(frame * (matrix @ frame)).sum()
        loss.backward()
        optimizer.step()
    best = -float(torch.linalg.eigvalsh(matrix)[-3:].sum())
    assert float(loss.detach()) == pytest.approx(best, rel=1e-12)
    assert foreign.check_point_on_manifold(weight.detach())
    assert from_geoopt(weight) == ours


def test_the_export_agrees_with_ours(geoopt):
    ours = Grassmann(7, 2)
    foreign = to_geoopt(ours)
    x = foreign.random(3, 7, 2, dtype=torch.float64)
    u = ours.random_tangent(x)
    y = foreign.expmap(x, u)
    torch.testing.assert_close(foreign.dist(x, y), torch.ones(3, dtype=torch.float64))
    assert foreign.dist(x, y, keepdim=True).shape == (3, 1, 1)
    torch.testing.assert_close(foreign.logmap(x, y), u)
    torch.testing.assert_close(foreign.inner(x, u), torch.ones(3, dtype=torch.float64))
    assert foreign.check_vector_on_tangent(x, u)
    assert not foreign.check_vector_on_tangent(x, x)
    assert not foreign.check_point_on_manifold(2 * x)
    torch.testing.assert_close(foreign.projx(x + 1e-3 * u), ours.retract(x, 1e-3 * u))
