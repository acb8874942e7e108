"""Lengths, and derivatives where points meet and steps vanish."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fisherfold.manifolds import Euclidean, Grassmann, Oblique, Product, Sphere, Stiefel
from fisherfold.manifolds.algebra import safe_norm, safe_sqrt
from fisherfold.manifolds.base import leaves, tree_map

ROUND = [Sphere(4), Oblique(3, 4)]
PRODUCT = Product({"w": Sphere(4), "rows": Oblique(2, 3), "b": Euclidean(2)})


def draw(manifold, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = manifold.random_point(generator=generator, dtype=dtype)
    return x, manifold.random_tangent(x, generator=generator)


def test_ordinary_lengths_keep_their_bits():
    v = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(safe_norm(v), torch.linalg.vector_norm(v, dim=-1))


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning"
)  # from torch.func.jvp itself
@pytest.mark.parametrize("manifold", ROUND, ids=repr)
def test_logarithm_and_geodesic_can_be_differentiated_twice_where_points_meet(manifold):
    x, _ = draw(manifold)
    y = x.clone().requires_grad_()
    zero = torch.zeros_like(x, requires_grad=True)
    for function, argument in ((manifold.log, y), (manifold.exp, zero)):
        assert gradcheck(lambda a, f=function: f(x, a), argument)
        assert gradgradcheck(lambda a, f=function: f(x, a), argument)
        assert gradcheck(lambda a, b, f=function: f(a, b), (x.clone().requires_grad_(), argument))
    # the derivative of the logarithm in y is the projector there, and so is that of the exponential
    # map at 0
    step = manifold.project(x, torch.ones_like(x))
    for function, argument in ((manifold.log, x), (manifold.exp, torch.zeros_like(x))):
        moved = torch.func.jvp(lambda a, f=function: f(x, a), (argument,), (step,))[1]
        torch.testing.assert_close(moved, step, atol=1e-15, rtol=0)


@pytest.mark.parametrize("distance", [1e-12, 1e-3, 0.44, 0.46, 1.0, 3.0])
@pytest.mark.parametrize("manifold", ROUND, ids=repr)
def test_derivatives_of_logarithm_distance_and_geodesic_between_distinct_points(manifold, distance):
    x, v = draw(manifold)
    v = distance * v / v.norm(dim=-1, keepdim=True)
    y = manifold.exp(x, v).requires_grad_()
    assert gradcheck(lambda b: manifold.log(x, b), y)
    assert gradcheck(lambda s: manifold.exp(x, s), v.clone().requires_grad_())
    if distance > 1e-3:
        assert gradgradcheck(lambda b: manifold.log(x, b), y, atol=1e-4)
        assert gradgradcheck(lambda s: manifold.exp(x, s), v.clone().requires_grad_())
    # the gradient of half the squared distance is minus the logarithm back
    (slope,) = torch.autograd.grad(manifold.dist(x, y) ** 2 / 2, y)
    torch.testing.assert_close(
        manifold.project(y, slope), -manifold.log(y, x).detach(), atol=1e-14, rtol=1e-9
    )


@pytest.mark.parametrize("manifold", [*ROUND, PRODUCT], ids=repr)
def test_distances_have_derivative_zero_at_their_kinks(manifold):
    x, _ = draw(manifold)
    points = [x] if isinstance(manifold, Product) else [x, -x]
    for point in points:
        y = tree_map(lambda leaf: leaf.clone().requires_grad_(), point)
        for power in (1, 2):
            slopes = torch.autograd.grad(manifold.dist(x, y) ** power, leaves(y), create_graph=True)
            assert all(bool((slope == 0).all()) for slope in slopes)
            curved = sum(slope.sum() for slope in slopes)
            bends = torch.autograd.grad(curved, leaves(y), allow_unused=True)
            assert all(bend is None or bool(bend.isfinite().all()) for bend in bends)


def test_the_squared_length_of_the_logarithm_has_the_hessian_of_the_squared_distance():
    sphere = Sphere(4)
    x, _ = draw(sphere)
    hessian = torch.autograd.functional.hessian(lambda y: (sphere.log(x, y) ** 2).sum() / 2, x)
    torch.testing.assert_close(
        hessian, torch.eye(4, dtype=x.dtype) - torch.outer(x, x), atol=1e-15, rtol=0
    )


@pytest.mark.parametrize(
    "manifold", [*ROUND, Stiefel(5, 2), Grassmann(5, 2), Euclidean(3), PRODUCT], ids=repr
)
def test_the_length_of_a_zero_vector_has_derivative_zero(manifold):
    x, v = draw(manifold)
    zero = tree_map(lambda leaf: torch.zeros_like(leaf, requires_grad=True), v)
    slopes = torch.autograd.grad(manifold.norm(x, zero), leaves(zero))
    assert all(bool((slope == 0).all()) for slope in slopes)


def test_roots_and_lengths_keep_what_is_not_finite():
    values = torch.tensor([0.0, 4.0, math.inf, math.nan])
    torch.testing.assert_close(safe_sqrt(values), values.sqrt(), equal_nan=True)
    torch.testing.assert_close(
        safe_norm(values[:, None]), torch.tensor([0.0, 4.0, math.inf, math.nan]), equal_nan=True
    )
