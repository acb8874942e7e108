import pytest
import torch

from fisherfold.manifolds import Rotations, Sphere, Stiefel


def cayley_reference(x, v):
    """The textbook form, with the n×n matrix."""
    n = x.shape[0]
    turned = (torch.eye(n, dtype=x.dtype) - 0.5 * x @ x.T) @ v
    w = turned @ x.T - x @ turned.T
    eye = torch.eye(n, dtype=x.dtype)
    return torch.linalg.solve(eye - w / 2, (eye + w / 2) @ x)


def exp_reference(x, v):
    """Edelman, Arias and Smith (1998), in the basis [x v]."""
    p = x.shape[1]
    a, s = x.T @ v, v.T @ v
    block = torch.cat([torch.cat([a, -s], 1), torch.cat([torch.eye(p, dtype=x.dtype), a], 1)], 0)
    both = torch.matrix_exp(torch.stack([block, block]))[
        0
    ]  # a batch: alone it is off by 1e-10 in torch 2.13
    return torch.cat([x, v], 1) @ both[:, :p] @ torch.matrix_exp(torch.stack([-a, -a]))[0]


@pytest.mark.parametrize(("n", "p"), [(7, 3), (4, 3), (3, 3), (5, 1)])
def test_small_forms_equal_the_textbook_ones(pair, same, n, p):
    stiefel = Stiefel(n, p)
    x, _, _, v, _ = pair(stiefel)
    same(stiefel.retract(x, v, method="cayley"), cayley_reference(x, v))
    same(stiefel.exp(x, v), exp_reference(x, v))


def test_polar_is_the_nearest_frame(pair):
    stiefel = Stiefel(6, 2)
    x, _, _, v, _ = pair(stiefel)
    nearest = stiefel.retract(x, v)
    generator = torch.Generator().manual_seed(1)
    gap = float((x + v - nearest).norm())
    for other in stiefel.random_point(200, generator=generator):
        assert float((x + v - other).norm()) > gap
    around = stiefel.retract(nearest, 1e-3 * stiefel.random_tangent(nearest, generator=generator))
    assert float((x + v - around).norm()) > gap


def test_geodesics_keep_their_speed_far_out(pair):
    stiefel = Stiefel(6, 3)
    x, _, _, v, _ = pair(stiefel, length=1.0)
    for t in (1.0, 10.0, 100.0):
        h = 1e-4
        velocity = (stiefel.exp(x, (t + h) * v) - stiefel.exp(x, (t - h) * v)) / (2 * h)
        assert float(velocity.norm()) == pytest.approx(1.0, abs=1e-6)
        assert stiefel.violation(stiefel.exp(x, t * v)) < 1e-14


def test_one_column_is_the_sphere(pair, same):
    stiefel, sphere = Stiefel(5, 1), Sphere(5)
    x, y, _, v, a = pair(stiefel)
    same(stiefel.project(x, a), sphere.project(x.T, a.T).T)
    same(stiefel.exp(x, v), sphere.exp(x.T, v.T).T)
    for method in ("polar", "qr"):
        same(stiefel.retract(x, v, method=method), sphere.retract(x.T, v.T).T)
    same(stiefel.transport(x, y, v), sphere.transport(x.T, y.T, v.T).T)


def test_pymanopt_agrees(pair, same):
    manifolds = pytest.importorskip("pymanopt.manifolds")
    ours = Stiefel(7, 3)
    x, y, u, v, a = pair(ours)
    px, py, pu, pv, pa = (t.numpy() for t in (x, y, u, v, a))
    for method in ("polar", "qr"):
        theirs = manifolds.Stiefel(7, 3, retraction=method)
        same(ours.retract(x, v, method=method), theirs.retraction(px, pv))
    same(ours.project(x, a), theirs.projection(px, pa))
    same(ours.exp(x, v), theirs.exp(px, pv))
    same(ours.transport(x, y, v), theirs.transport(px, py, pv))
    same(ours.inner(x, u, v), theirs.inner_product(px, pu, pv))
    assert ours.dim == theirs.dim


def test_geoopt_agrees_where_its_metric_is_the_euclidean_one(same, geoopt):
    ours, theirs, exact = (
        Stiefel(7, 3),
        geoopt.Stiefel(canonical=False),
        geoopt.EuclideanStiefelExact(),
    )
    generator = torch.Generator().manual_seed(0)
    x = ours.random_point(2, generator=generator)
    v = ours.random_tangent(x, generator=generator)
    a = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    same(ours.project(x, a), theirs.proju(x, a))
    same(ours.retract(x, v, method="qr"), theirs.retr(x, v))
    same(ours.exp(x, v), exact.expmap(x, v))
    same(ours.inner(x, v, v), theirs.inner(x, v, v))


def test_steps_that_are_far_too_long_for_cayley_come_back_as_points_to_reject():
    """Beyond 1/eps rounding makes its matrix singular now and then: no exception."""
    stiefel, generator = Stiefel(3, 3, retraction="cayley"), torch.Generator().manual_seed(0)
    x = stiefel.random_point(2000, generator=generator)
    y = stiefel.retract(x, 1e20 * stiefel.random_tangent(x, generator=generator))
    finite = y.isfinite().all(dim=-1).all(dim=-1)
    assert stiefel.violation(y[finite]) < 1e-14


@pytest.mark.parametrize("is_complex", [False, True])
def test_the_logarithm_leads_to_the_other_frame(is_complex):
    """Up to 0.91 π, within which geodesics of the Euclidean metric are the shortest."""
    stiefel, generator = Stiefel(7, 3, complex=is_complex), torch.Generator().manual_seed(0)
    x = stiefel.random_point(50, generator=generator)
    for length in (0.01, 1.0, 2.0, 2.7):
        v = length * stiefel.random_tangent(x, generator=generator)
        found = stiefel.log(x, stiefel.exp(x, v))
        torch.testing.assert_close(found, v, atol=1e-12, rtol=0)


def test_the_distance_of_squares_is_that_of_the_group(same):
    stiefel, generator = Stiefel(3, 3), torch.Generator().manual_seed(0)
    x = stiefel.random_point(generator=generator)
    y = stiefel.exp(x, 2.0 * stiefel.random_tangent(x, generator=generator))
    same(stiefel.dist(x, y), Rotations(3).dist(torch.eye(3, dtype=x.dtype), x.T @ y), atol=1e-12)


def test_frames_without_a_geodesic_are_named():
    x = torch.eye(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="y is too far from x: no geodesic was found"):
        Stiefel(3, 3).log(x, x * torch.tensor([-1.0, 1.0, 1.0], dtype=x.dtype))
