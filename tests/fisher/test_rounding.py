"""Conjugate gradients in float32, with hundreds of steps on ill-conditioned operators: tangent, and honest about it."""

import pytest
import torch

from fisherfold.fisher import DenseFisher, conjugate
from fisherfold.fisher.conjugate import conjugate_gradients
from fisherfold.manifolds import Euclidean, Grassmann, Oblique, Product, Sphere, Stiefel
from fisherfold.manifolds.base import combine, flatten, tree_map, unflatten

MANIFOLDS = [
    Sphere(60),
    Oblique(10, 12),
    Stiefel(30, 4),
    Grassmann(30, 4),
    Product({"u": Grassmann(20, 3), "w": Sphere(20)}),
]


def ill_conditioned(manifold, condition, *, dtype=torch.float32, kind=DenseFisher):
    """An operator with eigenvalues spread evenly, by their logarithms, over 1 to 1/condition, and a tangent vector."""
    generator = torch.Generator().manual_seed(0)
    x = manifold.random_point(generator=generator, dtype=dtype)
    size = flatten(x).numel()
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    values = condition ** -torch.linspace(0, 1, size, dtype=torch.float64)
    g = manifold.random_tangent(x, generator=generator)
    return kind(manifold, x, (basis * values @ basis.T).to(dtype)), g


def double(tree):
    return tree_map(torch.Tensor.double, tree)


def true_residual(operator, g, d, damping):
    """‖(F + λ) d - g‖ / ‖g‖ in float64, of the operator as it is in float32."""
    exact = DenseFisher(operator.manifold, double(operator.point), operator.matrix.double())
    product = exact._matvec(exact.manifold.project(exact.point, double(d)))
    missing = combine(1.0, combine(1.0, product, damping, double(d)), -1.0, double(g))
    return float(flatten(missing).norm() / flatten(double(g)).norm())


def normal_part(operator, d):
    """‖d - P d‖ / ‖d‖ in float64."""
    wide = double(d)
    tangent = operator.manifold.project(double(operator.point), wide)
    return float((flatten(wide) - flatten(tangent)).norm() / flatten(wide).norm())


@pytest.mark.parametrize(("condition", "damping"), [(1e2, 1e-3), (1e4, 1e-6), (1e6, 1e-9)])
@pytest.mark.parametrize("manifold", MANIFOLDS, ids=repr)
def test_directions_are_tangent_and_residuals_true(manifold, condition, damping):
    operator, g = ill_conditioned(manifold, condition)
    solution = conjugate_gradients(operator, g, damping, rtol=1e-6, max_iter=400)
    assert solution.iterations <= 400
    assert normal_part(operator, solution.x) <= 3 * torch.finfo(torch.float32).eps
    assert solution.residual == pytest.approx(
        true_residual(operator, g, solution.x, damping), rel=0.8
    )


@pytest.mark.parametrize("manifold", [Sphere(60), Stiefel(30, 4), Grassmann(30, 4)], ids=repr)
def test_cg_stops_where_float32_cannot_do_better(manifold):
    operator, g = ill_conditioned(manifold, 1e4)
    short = conjugate_gradients(operator, g, 1e-6, rtol=0.0, max_iter=1000)
    assert short.iterations < 1000
    # about eps times the condition number is what can be had
    assert true_residual(operator, g, short.x, 1e-6) < 3e-4


def test_well_conditioned_solves_spend_no_product_on_checks():
    operator, g = ill_conditioned(Grassmann(30, 4), 10, dtype=torch.float64)
    calls = []
    product = operator._matvec
    operator._matvec = lambda v: calls.append(1) or product(v)
    solution = conjugate_gradients(operator, g, 1e-3, rtol=1e-8, max_iter=100)
    assert len(calls) == solution.iterations
    # the plain recursion takes as many
    matrix, point = operator.matrix, operator.point
    x, r, p, steps = torch.zeros_like(g), g, g, 0
    while r.norm() > 1e-8 * g.norm():
        q = operator.manifold.project(point, unflatten(matrix @ flatten(p), point)) + 1e-3 * p
        alpha = (r * r).sum() / (p * q).sum()
        x, new = x + alpha * p, r - alpha * q
        p, r, steps = new + (new * new).sum() / (r * r).sum() * p, new, steps + 1
    assert solution.iterations == steps


class AmbientDiagonal(DenseFisher):
    """Preconditioned by the diagonal of the matrix, which leads out of the tangent space."""

    def precondition(self, v, damping):
        return unflatten(flatten(v) / (self.matrix.diagonal() + damping), v)


@pytest.mark.parametrize("manifold", MANIFOLDS[:4], ids=repr)
def test_a_preconditioner_that_leaves_the_tangent_space_is_brought_back(manifold):
    operator, g = ill_conditioned(manifold, 1e3, dtype=torch.float64, kind=AmbientDiagonal)
    plain, _ = ill_conditioned(manifold, 1e3, dtype=torch.float64)
    solution = conjugate_gradients(operator, g, 1e-4, rtol=1e-11, max_iter=1000)
    expected = conjugate_gradients(plain, g, 1e-4, rtol=1e-11, max_iter=1000)
    assert solution.residual <= 1e-11
    assert normal_part(operator, solution.x) <= 1e-15
    torch.testing.assert_close(solution.x, expected.x, atol=0, rtol=1e-6)


def test_a_gradient_with_a_normal_part_does_not_lead_away():
    # along the normal the damped operator is only λ, so that CG would divide that part by it
    operator, g = ill_conditioned(Sphere(60), 1e2)
    spoilt = g + 1e-6 * operator.point
    clean = conjugate_gradients(operator, g, 1e-9, rtol=1e-5, max_iter=300)
    found = conjugate_gradients(operator, spoilt, 1e-9, rtol=1e-5, max_iter=300)
    assert normal_part(operator, found.x) <= 3 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.x, clean.x, atol=0, rtol=1e-2)


def exact_solution(operator, g, damping):
    """(F + λ I)⁻¹ g in float64, of the operator as it is."""
    exact = DenseFisher(operator.manifold, double(operator.point), operator.matrix.double())
    return exact.solve(exact.manifold.project(exact.point, double(g)), damping, method="dense")


@pytest.mark.parametrize("kind", [DenseFisher, AmbientDiagonal], ids=["plain", "preconditioned"])
@pytest.mark.parametrize("manifold", MANIFOLDS, ids=repr)
def test_cg_solves_in_as_many_products_as_there_are_dimensions(manifold, kind):
    operator, g = ill_conditioned(manifold, 1e6, dtype=torch.float64, kind=kind)
    solution = conjugate_gradients(operator, g, 1e-9, rtol=1e-7, max_iter=1000)
    # short recursions took up to nine times as many
    assert solution.iterations <= manifold.dim + 3
    assert true_residual(operator, g, solution.x, 1e-9) <= 1.5e-7
    expected = flatten(exact_solution(operator, g, 1e-9))
    assert float((flatten(solution.x) - expected).norm()) <= 1e-6 * float(expected.norm())


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=repr)
def test_float32_reaches_what_it_can_hold_at_a_condition_of_a_million(manifold):
    operator, g = ill_conditioned(manifold, 1e6)
    solution = conjugate_gradients(operator, g, 1e-7, rtol=1e-6, max_iter=1000)
    expected = flatten(exact_solution(operator, g, 1e-7))
    # a rounded product F x is off by eps ‖F‖ ‖x‖ itself, and ‖F‖ is 1
    attainable = torch.finfo(torch.float32).eps * float(
        expected.norm() / flatten(g).double().norm()
    )
    assert true_residual(operator, g, solution.x, 1e-7) <= 3 * attainable
    assert float((flatten(double(solution.x)) - expected).norm()) <= 0.02 * float(expected.norm())
    assert solution.iterations <= 4 * manifold.dim


@pytest.mark.parametrize("seed", range(6))
def test_a_lone_flat_direction_does_not_end_cg_before_float32_must(seed):
    # one eigenvalue of 1e-6 below others of 0.02 to 1: x is almost all along its eigenvector, and what rounding leaves
    # of the others there is as large as g itself
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64)).Q
    values = torch.linspace(1, 1e-6, 40, dtype=torch.float64)
    operator = DenseFisher(Euclidean(40), torch.zeros(40), (basis * values @ basis.T).float())
    g = torch.randn(40, generator=generator)
    solution = conjugate_gradients(operator, g, 0.0, rtol=1e-5, max_iter=400)
    expected = torch.linalg.solve(operator.matrix.double(), g.double())
    attainable = torch.finfo(torch.float32).eps * float(expected.norm() / g.double().norm())
    assert true_residual(operator, g, solution.x, 0.0) <= 3 * attainable
    assert solution.iterations <= 100


@pytest.mark.parametrize("room", [0, 1, 9, 40])
def test_without_room_for_all_residuals_cg_takes_longer_and_ends_at_the_same_point(
    monkeypatch, room
):
    operator, g = ill_conditioned(Sphere(60), 1e4, dtype=torch.float64)
    full = conjugate_gradients(operator, g, 1e-6, rtol=1e-10, max_iter=1000)
    monkeypatch.setattr(conjugate, "KEPT_ENTRIES_UP_TO", 60 * room)
    found = conjugate_gradients(operator, g, 1e-6, rtol=1e-10, max_iter=1000)
    assert full.iterations <= 62 < found.iterations
    assert found.residual <= 1e-10
    torch.testing.assert_close(found.x, full.x, atol=0, rtol=1e-5)
