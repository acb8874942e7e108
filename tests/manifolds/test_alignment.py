"""Derivatives between two subspaces, also where they meet and where principal angles are equal."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fisherfold.manifolds import Grassmann, Product, Sphere
from fisherfold.manifolds.frames import angle_over_sine, rotation_between
from toy import normal

FLOAT = torch.float64
# from torch's forward mode itself
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def at_angles(n, p, angles):
    """A point and another one at given principal angles from it, both in general position."""
    eye, frame = torch.eye(n, dtype=FLOAT), torch.linalg.qr(normal(n, n)).Q
    angles = torch.tensor([*angles, *[0.0] * (p - len(angles))], dtype=FLOAT)
    y = eye[:, :p] * angles.cos() + eye[:, p : 2 * p] * angles.sin()
    turns = [torch.linalg.qr(normal(p, p, seed=s)).Q for s in (1, 2)]
    return frame @ eye[:, :p] @ turns[0], frame @ y @ turns[1]


@pytest.mark.parametrize("largest", [0.0, 1e-9, 0.3, 1.2, math.pi / 2])
def test_angle_over_sine_to_the_last_digit(largest):
    angles = torch.linspace(0, largest, 4, dtype=FLOAT)
    basis = torch.linalg.qr(normal(4, 4)).Q
    expected = torch.where(angles > 0, angles / torch.where(angles > 0, angles, 1.0).sin(), 1.0)
    found = angle_over_sine(basis * angles.cos() @ basis.mT)
    torch.testing.assert_close(found, basis * expected @ basis.mT, atol=1e-14, rtol=0)


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (0.9, 0.9, 0.2), (1.0, 0.5, 1e-3)])
def test_rotations_can_be_differentiated_at_repeated_singular_values(scales):
    left, right = (torch.linalg.qr(normal(3, 3, seed=s)).Q for s in (1, 2))
    matrix = (left * torch.tensor(scales, dtype=FLOAT) @ right).requires_grad_()
    torch.testing.assert_close(rotation_between(matrix).detach(), left @ right, atol=1e-13, rtol=0)
    assert gradcheck(rotation_between, matrix, check_forward_ad=True)
    if scales[-1] > 0.1:
        assert gradgradcheck(rotation_between, matrix)


@pytest.mark.parametrize(
    "angles", [(), (1e-12,), (1e-9, 1e-10), (0.5, 0.5), (0.7, 0.3), (1.4, 1e-5)]
)
def test_logarithms_can_be_differentiated_twice(angles):
    grassmann = Grassmann(5, 2)
    arguments = tuple(frame.requires_grad_() for frame in at_angles(5, 2, angles))
    assert gradcheck(grassmann.log, arguments)
    assert gradgradcheck(grassmann.log, arguments, atol=1e-4)


@pytest.mark.parametrize("angles", [(), (1e-12, 1e-12), (0.4, 0.4, 1e-10), (1.1, 0.2, 0.2)])
def test_the_gradient_of_half_the_squared_distance_is_minus_the_logarithm_back(angles):
    grassmann = Grassmann(7, 3)
    x, y = at_angles(7, 3, angles)
    (slope,) = torch.autograd.grad(grassmann.dist(x, y.requires_grad_()) ** 2 / 2, y)
    y = y.detach()
    torch.testing.assert_close(
        grassmann.project(y, slope), -grassmann.log(y, x), atol=1e-14, rtol=1e-9
    )
    # forward mode says the same
    step = grassmann.project(y, normal(7, 3, seed=4))
    _, forward = torch.func.jvp(lambda b: grassmann.dist(x, b) ** 2 / 2, (y,), (step,))
    torch.testing.assert_close(forward, (slope * step).sum(), atol=1e-14, rtol=1e-9)


@pytest.mark.parametrize("distance", [1e-12, 1e-9])
def test_the_gradient_of_a_small_distance_is_the_unit_direction(distance):
    grassmann = Grassmann(6, 2)
    x = torch.eye(6, 2, dtype=FLOAT)
    v = torch.zeros_like(x)
    v[3, 0], v[4, 1] = 0.6, 0.8
    y = (x + distance * v).requires_grad_()
    assert grassmann.dist(x, y).item() == pytest.approx(distance, rel=1e-12)
    (slope,) = torch.autograd.grad(grassmann.dist(x, y), y)
    torch.testing.assert_close(grassmann.project(x, slope), v, atol=1e-8, rtol=0)


def test_the_distance_of_a_point_to_itself_has_derivative_zero_and_its_square_a_hessian():
    grassmann = Grassmann(5, 2)
    x = torch.eye(5, 2, dtype=FLOAT)
    y = x.clone().requires_grad_()
    for power in (1, 2):
        (slope,) = torch.autograd.grad(grassmann.dist(x, y) ** power, y)
        assert torch.equal(slope, torch.zeros_like(x))
    hessian = torch.autograd.functional.hessian(lambda b: (grassmann.log(x, b) ** 2).sum() / 2, x)
    a = normal(5, 2)
    torch.testing.assert_close(
        (hessian.reshape(10, 10) @ a.flatten()).reshape(5, 2), grassmann.project(x, a)
    )
    product = Product({"u": grassmann, "w": Sphere(3)})
    point = {"u": y, "w": torch.eye(3, dtype=FLOAT)[0]}
    (slope,) = torch.autograd.grad(product.dist({**point, "u": x}, point), y)
    assert torch.equal(slope, torch.zeros_like(x))


@pytest.mark.parametrize("method", ["projection", "parallel"])
def test_transports_can_be_differentiated_where_points_meet(method):
    grassmann = Grassmann(5, 2)
    x, _ = at_angles(5, 2, ())
    v = grassmann.project(x, normal(5, 2, seed=3))
    target = x.clone().requires_grad_()
    assert gradcheck(lambda y: grassmann.transport(x, y, v, method=method), target)
    assert gradgradcheck(lambda y: grassmann.transport(x, y, v, method=method), target)


def test_a_batch_has_the_derivatives_of_its_members():
    grassmann = Grassmann(6, 2)
    pairs = [at_angles(6, 2, angles) for angles in ((), (0.3, 0.3), (1.0, 1e-9))]
    x, y = (torch.stack(side) for side in zip(*pairs, strict=True))
    weights = normal(3, 6, 2, seed=7)
    (whole,) = torch.autograd.grad((weights * grassmann.log(x, y.requires_grad_())).sum(), y)
    mapped = torch.func.vmap(torch.func.grad(lambda b, a, w: (w * grassmann.log(a, b)).sum()))(
        y.detach(), x, weights
    )
    torch.testing.assert_close(mapped, whole, atol=1e-12, rtol=0)
    for k in range(3):
        b = y[k].detach().requires_grad_()
        (alone,) = torch.autograd.grad((weights[k] * grassmann.log(x[k], b)).sum(), b)
        torch.testing.assert_close(whole[k], alone, atol=1e-12, rtol=0)


def test_right_angles_give_finite_derivatives():
    grassmann = Grassmann(5, 2)
    for angles in ((math.pi / 2,), (math.pi / 2, math.pi / 2)):
        x, y = at_angles(5, 2, angles)
        assert float(grassmann.dist(x, y)) == pytest.approx(math.hypot(*angles), rel=1e-14)
        (slope,) = torch.autograd.grad(grassmann.dist(x, y.requires_grad_()), y)
        assert bool(slope.isfinite().all())
