"""Steps of any finite size, and derivatives where points meet and steps vanish."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fisherfold.manifolds import Euclidean, Grassmann, Oblique, Product, Sphere, Stiefel
from fisherfold.manifolds.base import leaves, scale, tree_map
from fisherfold.manifolds.lengths import length, range_factor, root

ROUND = [Sphere(4), Oblique(3, 4)]
PRODUCT = Product({"w": Sphere(4), "rows": Oblique(2, 3), "b": Euclidean(2)})
SIZES = [
    (torch.float64, [1e-300, 1e-200, 1e160, 1e200, 1e308]),
    (torch.float32, [1e-38, 1e-30, 1e20, 1e25, 3e38]),
]
CASES = [(dtype, size) for dtype, sizes in SIZES for size in sizes]


def draw(manifold, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = manifold.random_point(generator=generator, dtype=dtype)
    return x, manifold.random_tangent(x, generator=generator)


@pytest.mark.parametrize(("dtype", "size"), CASES)
@pytest.mark.parametrize("manifold", [*ROUND, Stiefel(5, 2), Grassmann(5, 2), Euclidean(3), PRODUCT], ids=repr)
def test_lengths_of_huge_and_tiny_vectors(manifold, dtype, size):
    x, v = draw(manifold, dtype=dtype)
    eps = torch.finfo(dtype).eps
    assert float(manifold.norm(x, scale(size, v))) == pytest.approx(size, rel=20 * eps)


def test_ordinary_lengths_keep_their_bits():
    v = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(length(v), torch.linalg.vector_norm(v, dim=-1))
    assert torch.equal(range_factor(v.abs()), torch.ones_like(v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_range_factors_are_powers_of_two_that_make_squares_safe(dtype):
    info = torch.finfo(dtype)
    sizes = torch.tensor([info.max, info.max**0.5, 1.0, info.tiny**0.5, info.tiny], dtype=dtype)
    factors = range_factor(sizes)
    squares = (sizes / factors).double() ** 2
    assert bool((torch.frexp(factors.double()).mantissa == 0.5).all())
    assert float(squares.max()) < info.max
    assert float(squares.min()) > info.tiny


@pytest.mark.parametrize(("dtype", "size"), [case for case in CASES if case[1] > 1])
@pytest.mark.parametrize("manifold", ROUND, ids=repr)
def test_huge_steps_end_on_the_sphere_in_their_direction(manifold, dtype, size):
    x, v = draw(manifold, dtype=dtype)
    eps = torch.finfo(dtype).eps
    step = size * v
    end = manifold.retract(x, step, method="normalize")
    torch.testing.assert_close(end, v / v.norm(dim=-1, keepdim=True), atol=10 * eps, rtol=0)
    # along the geodesic the point is cos φ x + sin φ v/|v| with the step's own angle φ
    end = manifold.exp(x, step)
    direction = v / v.norm(dim=-1, keepdim=True)
    angle = length(step, keepdim=True)
    expected = angle.cos() * x + angle.sin() * direction
    torch.testing.assert_close(end, expected, atol=20 * eps, rtol=0)
    assert manifold.violation(end) < 4 * eps


def test_a_step_whose_length_itself_overflows_stays_on_its_great_circle():
    largest = torch.finfo(torch.float64).max
    x, v = torch.eye(4, dtype=torch.float64)[0], largest * torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    for method in Sphere.retractions:
        y = Sphere(4).retract(x, v, method=method)
        assert Sphere(4).violation(y) < 1e-15
        assert bool((y[1:] == y[1]).all())
    assert bool(Sphere(4).retract(x, torch.full_like(v, torch.inf), method="exp").isnan().any())


def test_products_pass_huge_steps_on_to_their_factors():
    x, v = draw(PRODUCT)
    y = PRODUCT.retract(x, scale(1e200, v))
    assert PRODUCT.violation(y) < 1e-15
    torch.testing.assert_close(y["w"], v["w"] / v["w"].norm(), atol=1e-15, rtol=0)


@pytest.mark.parametrize(("dtype", "size"), [case for case in CASES if case[1] < 1])
def test_tiny_steps_are_not_lost(dtype, size):
    sphere, axes = Sphere(3), torch.eye(3, dtype=dtype)
    for method in sphere.retractions:
        y = sphere.retract(axes[0], size * axes[1], method=method)
        assert float(y[1]) == pytest.approx(size, rel=1e-6)
        assert float(sphere.dist(axes[0], y)) == pytest.approx(size, rel=1e-6)
        torch.testing.assert_close(sphere.log(axes[0], y) / size, axes[1])


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_vectors_that_are_not_tangent_are_refused_at_every_size(size):
    sphere = Sphere(4)
    x, v = draw(sphere)
    sphere.check_tangent(x, size * v)
    with pytest.raises(ValueError, match="v is not a tangent vector"):
        sphere.check_tangent(x, size * (v + x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # from torch.func.jvp itself
@pytest.mark.parametrize("manifold", ROUND, ids=repr)
def test_logarithm_and_geodesic_can_be_differentiated_twice_where_points_meet(manifold):
    x, _ = draw(manifold)
    y = x.clone().requires_grad_()
    zero = torch.zeros_like(x, requires_grad=True)
    for function, argument in ((manifold.log, y), (manifold.exp, zero)):
        assert gradcheck(lambda a, f=function: f(x, a), argument)
        assert gradgradcheck(lambda a, f=function: f(x, a), argument)
        assert gradcheck(lambda a, b, f=function: f(a, b), (x.clone().requires_grad_(), argument))
    # the derivative of the logarithm in y is the projector there, and so is that of the exponential map at 0
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
    torch.testing.assert_close(manifold.project(y, slope), -manifold.log(y, x).detach(), atol=1e-14, rtol=1e-9)


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
    torch.testing.assert_close(hessian, torch.eye(4, dtype=x.dtype) - torch.outer(x, x), atol=1e-15, rtol=0)


@pytest.mark.parametrize("manifold", [*ROUND, Stiefel(5, 2), Grassmann(5, 2), Euclidean(3), PRODUCT], ids=repr)
def test_the_length_of_a_zero_vector_has_derivative_zero(manifold):
    x, v = draw(manifold)
    zero = tree_map(lambda leaf: torch.zeros_like(leaf, requires_grad=True), v)
    slopes = torch.autograd.grad(manifold.norm(x, zero), leaves(zero))
    assert all(bool((slope == 0).all()) for slope in slopes)


def test_roots_and_lengths_keep_what_is_not_finite():
    values = torch.tensor([0.0, 4.0, math.inf, math.nan])
    torch.testing.assert_close(root(values), values.sqrt(), equal_nan=True)
    torch.testing.assert_close(length(values[:, None]), torch.tensor([0.0, 4.0, math.inf, math.nan]), equal_nan=True)
