import math

import pytest
import torch

from fisherfold.manifolds import Oblique, Sphere


@pytest.mark.parametrize("distance", [1e-12, 1e-9, 1e-3, 1.0, math.pi - 1e-3, math.pi - 1e-9])
def test_distance_keeps_its_digits_everywhere(distance):
    sphere = Sphere(3)
    x = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    y = torch.tensor([math.cos(distance), math.sin(distance), 0.0], dtype=torch.float64)
    assert float(sphere.dist(x, y)) == pytest.approx(distance, rel=1e-15 if distance < 1 else 3e-16)


def test_distance_from_a_random_point_at_1e_9(pair):
    sphere = Sphere(6)
    x, _, _, v, _ = pair(sphere, length=1.0)
    near = float(sphere.dist(x, sphere.exp(x, 1e-9 * v)))
    assert abs(near / 1e-9 - 1) < 1e-7
    # the arc cosine sees nothing of it
    assert abs(float(torch.acos((x * sphere.exp(x, 1e-9 * v)).sum().clamp(max=1))) / 1e-9 - 1) > 0.5


@pytest.mark.parametrize("distance", [1e-9, 1e-4, 1.0, 3.0, math.pi - 1e-6])
def test_log_inverts_exp_up_to_the_antipode(pair, distance):
    sphere = Sphere(5)
    x, _, _, v, _ = pair(sphere, length=1.0)
    w = distance * v
    back = sphere.log(x, sphere.exp(x, w))
    # the direction is known only to eps/sin: the sphere's own condition near the antipode
    assert float((back - w).norm()) < 1e-15 * (1 + distance / math.sin(distance))


@pytest.mark.parametrize("manifold", [Sphere(4), Oblique(3, 4)], ids=repr)
@pytest.mark.parametrize(
    ("dtype", "gap"), [(torch.float64, 1e-5), (torch.float64, 1e-8), (torch.float32, 1e-4)]
)
def test_next_to_the_antipode_logarithms_are_tangent_and_parallel_transport_keeps_lengths(
    manifold, dtype, gap
):
    generator = torch.Generator().manual_seed(0)
    x = manifold.random_point(generator=generator, dtype=dtype)
    v, w = (manifold.random_tangent(x, generator=generator) for _ in range(2))
    y = manifold.exp(x, (math.pi - gap) * v / v.norm(dim=-1, keepdim=True))
    manifold.check_tangent(x, manifold.log(x, y))
    carried = manifold.transport(x, y, w, method="parallel")
    manifold.check_tangent(y, carried)
    torch.testing.assert_close(
        carried.norm(dim=-1), w.norm(dim=-1), rtol=1e2 * torch.finfo(dtype).eps, atol=0
    )


@pytest.mark.parametrize("manifold", [Sphere(4), Oblique(3, 4)], ids=repr)
def test_antipodes_have_no_logarithm_and_no_parallel_transport(pair, manifold):
    x, _, _, v, _ = pair(manifold)
    with pytest.raises(
        ValueError, match="y is antipodal to x: there is no unique shortest geodesic between them"
    ):
        manifold.log(x, -x)
    with pytest.raises(ValueError, match="antipodal"):
        manifold.transport(x, -x, v, method="parallel")
    expected = math.pi * (1 if isinstance(manifold, Sphere) else math.sqrt(3))
    assert float(manifold.dist(x, -x)) == pytest.approx(expected, rel=1e-15)


def test_log_of_a_point_to_itself_is_zero(pair):
    sphere = Sphere(4)
    x, *_ = pair(sphere)
    assert torch.equal(sphere.log(x, x), torch.zeros_like(x))


def test_parallel_transport_turns_only_in_the_plane_of_the_geodesic(same):
    sphere = Sphere(3)
    x, y, z = torch.eye(3, dtype=torch.float64)
    same(sphere.transport(x, y, y, method="parallel"), -x)
    same(sphere.transport(x, y, z, method="parallel"), z)
    # a loop around an octant turns vectors by its area, π/2
    around = sphere.transport(x, y, y, method="parallel")
    around = sphere.transport(
        z, x, sphere.transport(y, z, around, method="parallel"), method="parallel"
    )
    same(around, z)


def test_pymanopt_agrees(pair, same):
    manifolds = pytest.importorskip("pymanopt.manifolds")
    ours, theirs = Sphere(7), manifolds.Sphere(7)
    x, y, u, v, a = pair(ours)
    px, py, pu, pv, pa = (t.numpy() for t in (x, y, u, v, a))
    same(ours.project(x, a), theirs.projection(px, pa))
    same(ours.retract(x, v), theirs.retraction(px, pv))
    same(ours.exp(x, v), theirs.exp(px, pv))
    same(ours.log(x, y), theirs.log(px, py))
    same(ours.dist(x, y), theirs.dist(px, py), atol=1e-12)
    same(ours.transport(x, y, v), theirs.transport(px, py, pv))
    same(ours.inner(x, u, v), theirs.inner_product(px, pu, pv))
    assert ours.dim == theirs.dim


def test_pymanopt_agrees_on_oblique_matrices(pair, same):
    manifolds = pytest.importorskip("pymanopt.manifolds")
    ours, theirs = Oblique(3, 5), manifolds.Oblique(5, 3)  # its unit vectors are the columns
    x, y, u, v, a = pair(ours)
    px, py, pu, pv, pa = (t.numpy().T for t in (x, y, u, v, a))
    same(ours.project(x, a), theirs.projection(px, pa).T)
    same(ours.retract(x, v), theirs.retraction(px, pv).T)
    same(ours.exp(x, v), theirs.exp(px, pv).T)
    same(ours.log(x, y), theirs.log(px, py).T, atol=1e-12)
    same(ours.dist(x, y), theirs.dist(px, py), atol=1e-12)
    same(ours.inner(x, u, v), theirs.inner_product(px, pu, pv))
    assert ours.dim == theirs.dim


def test_geoopt_agrees(same, geoopt):
    ours, theirs = Sphere(5), geoopt.SphereExact()
    generator = torch.Generator().manual_seed(0)
    x = ours.random_point(3, generator=generator)
    v = ours.random_tangent(x, generator=generator)
    a = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    y = ours.retract(x, v)
    same(ours.project(x, a), theirs.proju(x, a))
    same(y, geoopt.Sphere().retr(x, v))
    same(ours.exp(x, v), theirs.expmap(x, v))
    same(ours.transport(x, y, v), theirs.transp(x, y, v))
    same(ours.inner(x, v, ours.project(x, a)), theirs.inner(x, v, theirs.proju(x, a)))


def test_oblique_is_the_product_of_its_rows(pair, same):
    oblique, sphere = Oblique(3, 4), Sphere(4)
    x, y, u, v, a = pair(oblique)
    same(oblique.project(x, a), sphere.project(x, a))
    same(oblique.exp(x, v), sphere.exp(x, v))
    same(
        oblique.transport(x, y, v, method="parallel"), sphere.transport(x, y, v, method="parallel")
    )
    same(oblique.dist(x, y) ** 2, (sphere.dist(x, y) ** 2).sum())
    same(oblique.inner(x, u, v), sphere.inner(x, u, v).sum())
    assert oblique.dim == 3 * sphere.dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_whose_squares_overflow_end_on_the_sphere(dtype):
    sphere = Sphere(3)
    x = torch.tensor([1.0, 0.0, 0.0], dtype=dtype)
    v = torch.tensor([0.0, 3.0, 4.0], dtype=dtype) * (1e20 if dtype == torch.float32 else 1e200)
    expected = torch.tensor([0.0, 0.6, 0.8], dtype=dtype)
    torch.testing.assert_close(sphere.retract(x, v), expected)
