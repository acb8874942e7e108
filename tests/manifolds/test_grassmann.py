import math

import numpy as np
import pytest
import torch

from fisherfold.manifolds import Grassmann, Sphere


def rotation(p, seed=5):
    return torch.linalg.qr(
        torch.randn(p, p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ).Q


def projector(x):
    return x @ x.mT


def exp_reference(x, v):
    """Through the thin singular value decomposition of v."""
    left, angles, right = torch.linalg.svd(v, full_matrices=False)
    return x @ right.mT * angles.cos() @ right + left * angles.sin() @ right


def log_reference(x, y):
    """By the tangents of the principal angles, the singular values of (I - xxᵀ) y (xᵀy)⁻¹."""
    tangents = torch.linalg.solve(x.mT @ y, y - x @ (x.mT @ y), left=False)
    left, t, right = torch.linalg.svd(tangents, full_matrices=False)
    return left * t.atan() @ right


def parallel_reference(x, v, w):
    """Edelman, Arias and Smith (1998), along the geodesic with velocity w, to its end."""
    left, angles, right = torch.linalg.svd(w, full_matrices=False)
    turned = -x @ right.mT * angles.sin() @ (left.mT @ v) + left * angles.cos() @ (left.mT @ v)
    return turned + v - left @ (left.mT @ v)


@pytest.mark.parametrize(("n", "p"), [(7, 3), (4, 3), (5, 1), (40, 6)])
def test_small_forms_equal_those_of_the_singular_values(pair, same, n, p):
    grassmann = Grassmann(n, p)
    x, y, u, v, _ = pair(grassmann)
    same(grassmann.exp(x, v), exp_reference(x, v))
    same(grassmann.log(x, y @ rotation(p)), log_reference(x, y))
    end = grassmann.exp(x, u)
    same(grassmann.transport(x, end, v, method="parallel"), parallel_reference(x, v, u))


def small_distance_reference(x, y):
    """Of the rounded points, in extended precision: |(I - x(xᵀx)⁻¹xᵀ) y|, good to d²."""
    x, y = x.numpy().astype(np.longdouble), y.numpy().astype(np.longdouble)
    correction = (
        2 * np.eye(x.shape[1], dtype=np.longdouble) - x.T @ x
    )  # (xᵀx)⁻¹ to the square of rounding
    return float(np.sqrt(((y - x @ (correction @ (x.T @ y))) ** 2).sum()))


@pytest.mark.skipif(
    np.finfo(np.longdouble).eps > 1e-18, reason="no extended precision on this platform"
)
@pytest.mark.parametrize(("n", "p"), [(6, 2), (5, 4), (300, 7)])
@pytest.mark.parametrize("distance", [1e-12, 1e-9, 1e-6])
def test_distances_keep_their_digits_near_zero_whatever_the_representative(pair, n, p, distance):
    grassmann = Grassmann(n, p)
    for seed in range(5):
        x, _, _, v, _ = pair(grassmann, seed=seed, length=1.0)
        y = grassmann.exp(x, distance * v)
        assert float(grassmann.dist(x, y)) == pytest.approx(
            small_distance_reference(x, y), rel=1e-10
        )
        turned = y @ rotation(p)
        error = float(grassmann.dist(x, turned)) - small_distance_reference(x, turned)
        assert abs(error) < 3e-16


def test_principal_angles_from_zero_to_a_right_angle(same):
    grassmann = Grassmann(8, 4)
    angles = torch.tensor([0.0, 1e-8, 0.3, math.pi / 2], dtype=torch.float64)
    eye = torch.eye(8, dtype=torch.float64)
    x, y = eye[:, :4], eye[:, :4] * angles.cos() + eye[:, 4:] * angles.sin()
    frame = rotation(8)
    x, y = frame @ x @ rotation(4, 1), frame @ y @ rotation(4, 2)
    assert float(grassmann.dist(x, y)) == pytest.approx(float(angles.norm()), rel=1e-14)
    w = grassmann.log(x, y)
    torch.testing.assert_close(torch.linalg.svdvals(w).flip(0), angles, atol=1e-14, rtol=0)
    same(projector(grassmann.exp(x, w)), projector(y))


def test_all_retractions_are_the_span_of_the_step_but_exp(pair, same):
    grassmann = Grassmann(7, 3)
    x, _, _, v, _ = pair(grassmann)
    polar = grassmann.retract(x, v)
    for method in ("qr", "cholesky"):
        same(projector(grassmann.retract(x, v, method=method)), projector(polar))
    assert float(grassmann.dist(grassmann.exp(x, v), polar)) > 1e-3


def test_polar_steps_need_no_alignment(pair, same):
    grassmann = Grassmann(7, 3)
    x, _, _, v, _ = pair(grassmann)
    y = grassmann.retract(x, v)
    same(grassmann.transport(x, y, v), grassmann.project(y, v))


@pytest.mark.parametrize("method", ["projection", "parallel"])
def test_transport_follows_the_representative_of_the_target(pair, same, method):
    grassmann = Grassmann(7, 3)
    x, y, _, v, _ = pair(grassmann)
    q = rotation(3)
    moved = grassmann.transport(x, y, v, method=method)
    same(grassmann.transport(x, y @ q, v, method=method), moved @ q)
    same(grassmann.transport(x @ q, y, v @ q, method=method), moved)


@pytest.mark.parametrize("method", ["projection", "parallel"])
def test_transports_there_and_back_are_adjoint(pair, same, method):
    grassmann = Grassmann(9, 3)
    x, y, _, v, a = pair(grassmann)
    y = y @ rotation(3)
    w = grassmann.project(y, a)
    there = grassmann.inner(y, grassmann.transport(x, y, v, method=method), w)
    back = grassmann.inner(x, v, grassmann.transport(y, x, w, method=method))
    same(there, back)


def test_lines_are_the_sphere_up_to_sign(pair, same):
    grassmann, sphere = Grassmann(5, 1), Sphere(5)
    x, y, _, v, _ = pair(grassmann)
    same(grassmann.exp(x, v), sphere.exp(x.T, v.T).T)
    same(grassmann.log(x, y), sphere.log(x.T, y.T).T)
    same(grassmann.log(x, -y), sphere.log(x.T, y.T).T)
    same(grassmann.dist(x, -y), sphere.dist(x.T, y.T)[0])
    moved = sphere.transport(x.T, y.T, v.T, method="parallel").T
    same(grassmann.transport(x, y, v, method="parallel"), moved)


def test_pymanopt_agrees(pair, same):
    manifolds = pytest.importorskip("pymanopt.manifolds")
    ours, theirs = Grassmann(9, 3), manifolds.Grassmann(9, 3)
    x, y, u, v, a = pair(ours)
    px, py, pu, pv, pa = (t.numpy() for t in (x, y, u, v, a))
    same(ours.project(x, a), theirs.projection(px, pa))
    same(ours.retract(x, v), theirs.retraction(px, pv))
    same(projector(ours.exp(x, v)), projector(torch.as_tensor(theirs.exp(px, pv))))
    same(ours.log(x, y), theirs.log(px, py), atol=1e-12)
    same(ours.dist(x, y), theirs.dist(px, py), atol=1e-12)
    same(ours.transport(x, y, v), theirs.transport(px, py, pv))
    same(ours.inner(x, u, v), theirs.inner_product(px, pu, pv))
    assert ours.dim == theirs.dim
