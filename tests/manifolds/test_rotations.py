"""Rotations against closed forms, SciPy and pymanopt; reflections and half turns are named."""

import math

import pytest
import scipy.linalg
import torch
from scipy.spatial.transform import Rotation
from torch.autograd import gradcheck

from fisherfold import LossProblem, minimize
from fisherfold.manifolds import Euclidean, Power, Product, Rotations
from fisherfold.manifolds.base import scale

FLOAT = torch.float64


def axis_angle(angle, axis=(0.36, 0.48, 0.8)):
    return torch.from_numpy(Rotation.from_rotvec([angle * part for part in axis]).as_matrix())


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_scipy_agrees(n, same):
    rotations, generator = Rotations(n), torch.Generator().manual_seed(n)
    x = rotations.random_point(generator=generator)
    v = 1.5 * rotations.random_tangent(x, generator=generator)
    same(rotations.exp(x, v), x.numpy() @ scipy.linalg.expm(x.numpy().T @ v.numpy()))
    y = rotations.exp(x, v)
    same(rotations.log(x, y), v, atol=1e-12)
    same(
        rotations.log(x, y), x.numpy() @ scipy.linalg.logm(x.numpy().T @ y.numpy()).real, atol=1e-12
    )


@pytest.mark.parametrize("angle", [1e-12, 1e-8, 1e-3, 1.0, 2.0, 3.0, math.pi - 1e-3])
def test_distances_are_angles(angle):
    rotations, x = Rotations(3), axis_angle(0.7, (0.6, 0.0, -0.8))
    distance = float(rotations.dist(x, x @ axis_angle(angle)))
    assert distance == pytest.approx(math.sqrt(2) * angle, rel=1e-15 / angle + 1e-12)


def test_half_turns_have_no_logarithm():
    rotations = Rotations(3)
    x, y = torch.eye(3, dtype=FLOAT), torch.diag(torch.tensor([1.0, -1.0, -1.0], dtype=FLOAT))
    for call in (
        lambda: rotations.log(x, y),
        lambda: rotations.transport(x, y, x - x.T, method="parallel"),
    ):
        with pytest.raises(
            ValueError, match="y is half a turn away from x: there is no unique shortest geodesic"
        ):
            call()


def test_logarithm_and_squared_distance_can_be_differentiated_where_points_meet():
    rotations = Rotations(3)
    x = rotations.random_point(generator=torch.Generator().manual_seed(0))
    for y in (x, x @ axis_angle(0.5)):
        assert gradcheck(lambda b: rotations.log(x, b), y.clone().requires_grad_())
        y = y.clone().requires_grad_()
        (slope,) = torch.autograd.grad(rotations.dist(x, y) ** 2 / 2, y)
        back = -rotations.log(y.detach(), x)
        torch.testing.assert_close(
            rotations.project(y.detach(), slope), back, atol=1e-13, rtol=1e-9
        )


@pytest.mark.parametrize("method", sorted(Rotations.retractions))
def test_retractions_keep_the_determinant(method):
    rotations, generator = Rotations(3), torch.Generator().manual_seed(0)
    x = rotations.random_point(200, generator=generator)
    for length in (1e-3, 1.0, 1e3):
        y = rotations.retract(
            x, length * rotations.random_tangent(x, generator=generator), method=method
        )
        rotations.check_point(y)
    far = rotations.retract(
        x, 1e20 * rotations.random_tangent(x, generator=generator), method=method
    )
    finite = far.isfinite().all(dim=-1).all(dim=-1)
    rotations.check_point(far[finite])


def test_reflections_are_named():
    reflection = torch.diag(torch.tensor([1.0, 1.0, -1.0], dtype=FLOAT))
    message = r"x0 is not a point of Rotations\(3\): its determinant is -1, so it is a reflection"
    with pytest.raises(ValueError, match=message):
        minimize(LossProblem(Rotations(3), lambda r: r[0, 0]), reflection, "lbfgs")
    with pytest.raises(
        ValueError, match=r"x is not a point of Power\(Rotations\(3\), 2\): its determinant is -1"
    ):
        Power(Rotations(3), 2).check_point(torch.stack([torch.eye(3, dtype=FLOAT), reflection]))
    with pytest.raises(ValueError, match=r"n of Rotations must be at least 2, got 1"):
        Rotations(1)


def test_pymanopt_agrees(pair, same):
    manifolds = pytest.importorskip("pymanopt.manifolds")
    ours, theirs = Rotations(4), manifolds.SpecialOrthogonalGroup(4, retraction="polar")
    x, y, u, v, a = pair(ours)
    px, py, pu, pv, pa = (t.numpy() for t in (x, y, u, v, a))
    # its tangent vectors are the skew matrices of ours
    skew = {"u": px.T @ pu, "v": px.T @ pv}
    same(x.T @ ours.project(x, a), theirs.projection(px, pa))
    same(ours.retract(x, v, method="polar"), theirs.retraction(px, skew["v"]))
    same(ours.exp(x, v), theirs.exp(px, skew["v"]))
    same(x.T @ ours.log(x, y), theirs.log(px, py), atol=1e-12)
    same(ours.dist(x, y), theirs.dist(px, py), atol=1e-12)
    same(ours.inner(x, u, v), theirs.inner_product(px, skew["u"], skew["v"]))
    assert ours.dim == theirs.dim


def test_poses_are_a_product_and_many_of_them_a_power():
    pose = Product({"rotation": Rotations(3), "translation": Euclidean(3)})
    poses = Power(pose, 4)
    assert (pose.dim, poses.dim) == (6, 24)
    assert poses.point_shape == {"rotation": (4, 3, 3), "translation": (4, 3)}
    generator = torch.Generator().manual_seed(0)
    x = poses.random_point(generator=generator)
    v = poses.random_tangent(x, generator=generator)
    y = poses.exp(x, v)
    assert float(poses.dist(x, y)) == pytest.approx(1.0)
    one = {key: leaf[2] for key, leaf in x.items()}
    moved = pose.exp(one, {key: leaf[2] for key, leaf in v.items()})
    torch.testing.assert_close(moved["rotation"], y["rotation"][2])
    # a screw: the translation moves straight while the rotation turns
    half = pose.exp(one, scale(0.5, pose.log(one, moved)))
    torch.testing.assert_close(half["translation"], (one["translation"] + moved["translation"]) / 2)
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 4, 3, 3\) on Power\("):
        Power(Rotations(3), 4).check_point(x["rotation"][:3])
    with pytest.raises(ValueError, match=r"k of Power must be a positive integer, got 0"):
        Power(pose, 0)
    with pytest.raises(
        ValueError, match=r"manifold of Power must be a manifold such as Rotations\(3\), got 3"
    ):
        Power(3, 2)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_half_a_turn_has_a_length(n):
    """And no one logarithm; the angle next to it is continuous."""
    rotations = Rotations(n)
    x = rotations.random_point(generator=torch.Generator().manual_seed(n))
    signs = torch.ones(n, dtype=x.dtype)
    signs[:2] = -1
    half_turn = x * signs
    assert float(rotations.dist(x, half_turn)) == pytest.approx(2**0.5 * math.pi, abs=1e-14)
    batch = torch.stack([half_turn, x])
    torch.testing.assert_close(
        rotations.dist(x.expand_as(batch), batch),
        torch.tensor([2**0.5 * math.pi, 0.0], dtype=x.dtype),
        atol=1e-14,
        rtol=0,
    )
    with pytest.raises(ValueError, match="y is half a turn away from x"):
        rotations.log(x, half_turn)
