"""Damped solves against a dense float64 solve in an orthonormal basis of the tangent space."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherfold import Categorical, Gaussian, NLLProblem, Poisson
from fisherfold.fisher import DenseFisher, FisherOperator, KroneckerFisher, solve
from fisherfold.fisher import solve as solve_module_function
from fisherfold.fisher.solve import ROWS_UP_TO, choose, tangent_basis
from fisherfold.manifolds import Euclidean, Grassmann, Sphere, Stiefel
from fisherfold.manifolds.base import flatten, unflatten
from toy import generator

DAMPINGS = [1e-8, 1e-4, 1e-2, 1.0, 1e2]


def reference(case, g, damping, matrix=None):
    """(F + λ)⁻¹ g from the sample-by-sample matrix, by eigendecomposition in float64; F† g for λ = 0."""
    basis = tangent_basis(case.problem.manifold, case.theta)
    matrix = case.dense_fisher() if matrix is None else matrix
    values, vectors = torch.linalg.eigh(basis.T @ matrix @ basis)
    values = torch.where(values > 1e-12 * values.max(), values, 0.0) + damping
    inverse = torch.where(values > 0, 1 / torch.where(values > 0, values, 1.0), 0.0)
    return basis @ (vectors @ (inverse * (vectors.T @ (basis.T @ flatten(g)))))


def agree(found, expected, *, rtol):
    assert float((found - expected).norm()) <= rtol * float(expected.norm())


def test_the_tangent_basis_is_orthonormal_and_tangent(gaussian_case):
    manifold, x = gaussian_case.problem.manifold, gaussian_case.theta
    basis = tangent_basis(manifold, x)
    assert basis.shape[1] == manifold.dim
    agree(basis.T @ basis, torch.eye(manifold.dim, dtype=torch.float64), rtol=1e-13)
    for column in basis.T:
        manifold.check_tangent(x, unflatten(column, x), atol=1e-12)


@pytest.mark.parametrize("method", ["auto", "dense", "woodbury", "cg"])
@pytest.mark.parametrize("samples", [1, 8])
def test_every_method_solves_the_damped_system(manifold_name, method, samples, build):
    case = build(manifold_name, "poisson", samples=samples)
    operator, manifold = case.problem.fisher(case.theta), case.problem.manifold
    g = case.tangent(3)
    for damping in DAMPINGS:
        solution = operator.solution(g, damping, method=method, rtol=1e-13)
        expected = reference(case, g, damping)
        agree(flatten(solution.x), expected, rtol=1e-6 if damping == 1e-8 else 1e-9)
        manifold.check_tangent(case.theta, solution.x)
        # the fall of the quadratic model along -d
        product = operator.matvec(manifold.project(case.theta, solution.x))
        model = flatten(g) @ flatten(solution.x) - 0.5 * flatten(solution.x) @ (
            flatten(product) + damping * flatten(solution.x)
        )
        assert solution.decrease == pytest.approx(float(model), rel=1e-6)


@pytest.mark.parametrize("method", ["dense", "woodbury", "pinv", "cg"])
@pytest.mark.parametrize("samples", [1, 8])
def test_without_damping_it_is_moore_penrose_on_the_tangent_space(
    manifold_name, method, samples, build
):
    case = build(manifold_name, "categorical", samples=samples)
    operator = case.problem.fisher(case.theta)
    # F u lies in the range of F; CG needs that, the direct methods do not
    for g in (operator.matvec(case.tangent(4)), *([] if method == "cg" else [case.tangent(3)])):
        found = operator.solve(g, 0.0, method=method, rtol=1e-12)
        agree(flatten(found), reference(case, g, 0.0), rtol=1e-7)


def test_pinv_is_the_formula_of_the_paper(manifold_name, build):
    """F† = Jᵀ(JJᵀ)⁻¹ H_L⁻¹ (JJᵀ)⁻¹ J for a Jacobian of full row rank, J the stacked one and H_L the mean's Hessian."""
    case = build(manifold_name, "gaussian", samples=1, outputs=3)
    jacobian = case.jacobians()[0]
    gram = torch.linalg.inv(jacobian @ jacobian.T)
    hessian = torch.eye(3, dtype=torch.float64) / 0.3
    g = case.tangent(3)
    expected = jacobian.T @ gram @ torch.linalg.inv(hessian) @ gram @ jacobian @ flatten(g)
    found = case.problem.fisher(case.theta).solve(g, method="pinv")
    agree(flatten(found), expected, rtol=1e-9)


@pytest.mark.parametrize("kind", ["monte-carlo", "empirical", "dense"])
def test_the_other_kinds_are_solved_alike(gaussian_case, kind):
    operator, g = (
        gaussian_case.problem.fisher(gaussian_case.theta, kind=kind),
        gaussian_case.tangent(3),
    )
    for method in ["dense", "cg"] if kind == "dense" else ["dense", "woodbury", "cg"]:
        found = operator.solve(g, 0.1, method=method, rtol=1e-13)
        agree(flatten(found), reference(gaussian_case, g, 0.1, operator.dense()), rtol=1e-9)


def stretched(scales, *, samples, dtype=torch.float64, dim=30, outputs=1):
    """A linear model whose Jacobian has the given singular values."""
    g = generator(1)
    left = torch.linalg.qr(
        torch.randn(samples * outputs, len(scales), generator=g, dtype=torch.float64)
    ).Q
    right = torch.linalg.qr(torch.randn(dim, len(scales), generator=g, dtype=torch.float64)).Q
    jacobian = (left * torch.tensor(scales, dtype=torch.float64)) @ right.T
    x = jacobian.reshape(samples, outputs, dim).to(dtype)
    problem = NLLProblem(
        Euclidean(dim),
        lambda x, t: x @ t,
        Gaussian(),
        x,
        torch.zeros(samples, outputs, dtype=dtype),
    )
    return problem, jacobian.T @ jacobian / samples


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", ["woodbury", "dense"])
@pytest.mark.parametrize("samples", [12, 60])
def test_direct_solves_of_badly_conditioned_operators(method, dtype, samples):
    """Eigenvalues over many decades, down to rounding, and dampings below and above them."""
    eps = torch.finfo(dtype).eps
    scales = [10.0 ** (-k / 2) for k in range(8 if dtype == torch.float32 else 12)]
    problem, matrix = stretched(scales, samples=samples, dtype=dtype)
    g = torch.randn(30, generator=generator(2), dtype=torch.float64)
    operator = problem.fisher(torch.zeros(30, dtype=dtype))
    eye = torch.eye(30, dtype=torch.float64)
    for damping in (1e-6, 1e-4, 1e-2, 1.0, 1e2):
        if damping < 3e3 * eps:
            continue
        expected = torch.linalg.solve(matrix + damping * eye, g)
        condition = float(matrix.norm()) / damping + 1
        found = operator.solve(g.to(dtype), damping, method=method)
        agree(found.double(), expected, rtol=50 * eps * condition)


@pytest.mark.parametrize("method", ["dense", "woodbury"])
def test_damping_below_the_rounding_of_the_operator_still_damps(method):
    """‖F‖ = 1e10 and λ = 1e-8: outside the range of F the answer is g/λ, not zero."""
    problem, matrix = stretched([1e6, 1e5], samples=2)
    g = torch.randn(30, generator=generator(2), dtype=torch.float64)
    found = problem.fisher(torch.zeros(30, dtype=torch.float64)).solve(g, 1e-8, method=method)
    _values, vectors = torch.linalg.eigh(matrix)
    null = vectors[:, :-2]
    agree(null.T @ found, null.T @ g / 1e-8, rtol=1e-3)


@pytest.mark.parametrize("method", ["dense", "woodbury"])
def test_a_gradient_in_the_range_is_not_blown_up_by_a_tiny_damping(method):
    """g = F u is in the range up to rounding; 1/λ must not turn that rounding into a direction."""
    problem, matrix = stretched([1.0, 0.5, 0.25], samples=3)
    u = torch.randn(30, generator=generator(2), dtype=torch.float64)
    g = matrix @ u
    expected = torch.linalg.pinv(matrix, hermitian=True, rtol=1e-10) @ g
    for damping in (1e-16, 1e-18, 0.0):
        found = problem.fisher(torch.zeros(30, dtype=torch.float64)).solve(
            g, damping, method=method
        )
        agree(found, expected, rtol=1e-6)


def test_conjugate_gradients_reports_its_true_residual(gaussian_case):
    operator, g = gaussian_case.problem.fisher(gaussian_case.theta), gaussian_case.tangent(3)
    manifold = gaussian_case.problem.manifold
    for rtol in (1e-1, 1e-4, 1e-8):
        solution = operator.solution(g, 1e-3, method="cg", rtol=rtol)
        x = manifold.project(gaussian_case.theta, solution.x)
        left = flatten(operator.matvec(x)) + 1e-3 * flatten(x) - flatten(g)
        assert solution.residual == pytest.approx(float(left.norm() / flatten(g).norm()), abs=1e-12)
        assert solution.residual <= rtol
        assert solution.curvature == "positive"
        assert 1 <= solution.iterations <= manifold.dim + 2


def test_conjugate_gradients_stops_at_its_limit_and_its_model_only_falls():
    problem, matrix = stretched([10.0 ** (-k / 4) for k in range(12)], samples=60)
    operator = problem.fisher(torch.zeros(30, dtype=torch.float64))
    g = torch.randn(30, generator=generator(2), dtype=torch.float64)
    decreases = []
    for limit in range(8):
        solution = operator.solution(g, 1e-3, method="cg", rtol=1e-14, max_iter=limit)
        assert solution.iterations == limit
        x = solution.x
        assert solution.decrease == pytest.approx(
            float(g @ x - 0.5 * x @ (matrix @ x + 1e-3 * x)), abs=1e-10
        )
        decreases.append(solution.decrease)
    assert decreases[0] == 0
    assert all(later > earlier for earlier, later in itertools.pairwise(decreases))


def test_a_good_preconditioner_saves_products():
    scales = torch.logspace(-3, 3, 30, dtype=torch.float64)

    class Diagonal(FisherOperator):
        approximates = "diag"

        def _matvec(self, v):
            return scales * v

        def precondition(self, v, damping):
            return v / (scales + damping) if self.known else v

    operator = Diagonal(Euclidean(30), torch.zeros(30, dtype=torch.float64))
    g = torch.randn(30, generator=generator(2), dtype=torch.float64)
    counts = []
    for operator.known in (False, True):
        solution = operator.solution(g, 1e-2, rtol=1e-10)
        assert solution.method == "cg"
        agree(solution.x, g / (scales + 1e-2), rtol=1e-7)
        counts.append(solution.iterations)
    assert counts[1] <= 2 < 20 < counts[0]


def test_negative_curvature_is_reported_and_not_followed():
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0, -1.0], dtype=torch.float64))
    operator = DenseFisher(Euclidean(4), torch.zeros(4, dtype=torch.float64), matrix)
    g = torch.ones(4, dtype=torch.float64)
    solution = operator.solution(g, 0.0, method="cg")
    assert solution.curvature == "negative"
    assert bool(torch.isfinite(solution.x).all())
    assert solution.decrease > 0
    straight = operator.solution(torch.tensor([0.0, 0, 0, 1.0], dtype=torch.float64), method="cg")
    assert straight.curvature == "negative"
    assert float(straight.x.norm()) == straight.decrease == 0
    assert straight.residual == 1
    assert operator.solution(g, 2.0, method="cg").curvature == "positive"


def test_direct_solves_refuse_negative_curvature_that_is_not_damped_away():
    """Left out as if it were rounding, it gave the solution of another system, with a residual of 0."""
    values = torch.tensor([3.0, 2.0, 0.0, -1.0], dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=generator(), dtype=torch.float64)).Q
    matrix = turn @ torch.diag(values) @ turn.T
    operator = DenseFisher(
        Euclidean(4), torch.zeros(4, dtype=torch.float64), (matrix + matrix.T) / 2
    )
    g = torch.ones(4, dtype=torch.float64)
    for damping, method in ((0.5, "dense"), (0.0, "dense"), (0.0, "pinv")):
        with pytest.raises(
            torch.linalg.LinAlgError,
            match=r"not positive definite: F has the eigenvalue -1.00e\+00",
        ):
            operator.solve(g, damping, method=method)
    agree(
        turn.T @ operator.solve(g, 1.5, method="dense"), (turn.T @ g) / (values + 1.5), rtol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_zero_curvature_is_reported_and_not_divided_by(dtype):
    """A singular F, no damping, and a g that sticks out of its range: the model has no minimum, and CG says so."""
    problem, matrix = stretched([2.0, 1.0, 0.5, 0.25], samples=60, dtype=dtype)
    operator = problem.fisher(torch.zeros(30, dtype=dtype))
    g = torch.randn(30, generator=generator(2), dtype=torch.float64)
    solution = operator.solution(g.to(dtype), 0.0, method="cg", rtol=1e-10)
    assert solution.curvature == "zero"
    x = solution.x.double()
    assert solution.residual == pytest.approx(float((g - matrix @ x).norm() / g.norm()), rel=1e-2)
    assert solution.decrease == pytest.approx(float(g @ x - 0.5 * x @ matrix @ x), rel=1e-2)
    # the model has only fallen, and nothing was divided by rounding
    assert solution.decrease > 0
    assert float(x.norm()) < 1e6 * float(g.norm())
    # who asks for the direction alone is told so
    with pytest.warns(
        RuntimeWarning,
        match=r"cg ended before a direction of zero curvature .* use more damping, or",
    ):
        assert torch.equal(operator.solve(g.to(dtype), method="cg", rtol=1e-10), solution.x)


def test_what_one_hot_levels_and_an_intercept_leave_open_is_not_solved_for_without_a_word():
    """150 levels and an intercept, a null space of one dimension: a variance of 2e8 was that of the intercept."""
    drawn, levels = generator(1), 150
    level = torch.randint(levels, (2000,), generator=drawn)
    y = torch.poisson(torch.full((2000,), 3.0, dtype=torch.float64), generator=drawn)
    problem = NLLProblem(Euclidean(levels + 1), lambda x, b: b[0] + b[1:][x], Poisson(), level, y)
    operator = problem.fisher(torch.ones(levels + 1, dtype=torch.float64))
    units = torch.eye(levels + 1, dtype=torch.float64)
    inverse = torch.linalg.pinv(operator.dense(), rtol=1e-12, hermitian=True)
    contrast, intercept = units[1] - units[2], units[0]
    agree(operator.solve(contrast), inverse @ contrast, rtol=1e-8)
    with pytest.warns(
        RuntimeWarning, match=r"relative residual of \d.*: F \+ λ I with λ = 0 is singular"
    ):
        operator.solve(intercept)
    agree(operator.solve(intercept, method="pinv"), inverse @ intercept, rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("samples", "features"), [(20, 3), (300, 6), (5000, 2), (5000, 20)])
def test_a_column_that_is_a_sum_of_others_is_left_out(dtype, samples, features):
    """In half of such designs a pivot of Cholesky, or an eigenvalue, is far above the rounding of a few sums."""
    for seed in range(20):
        drawn = generator(seed)
        x, mean = (
            torch.randn(n, features, generator=drawn, dtype=torch.float64) for n in (samples, 1)
        )
        x = x + 2 * mean
        x[:, -1] = x[:, :-1] @ torch.randn(features - 1, generator=drawn, dtype=torch.float64)
        x = x.to(dtype)
        problem = NLLProblem(Euclidean(features), lambda x, w: x @ w, Gaussian(), x, x[:, 0])
        operator = problem.fisher(torch.zeros(features, dtype=dtype))
        u = Euclidean(features).random_tangent(operator.point, generator=drawn)
        _, values, vectors = torch.linalg.svd(x.double() / samples**0.5, full_matrices=False)
        values, vectors = values[:-1], vectors[:-1]
        expected = vectors.T @ ((vectors @ u.double()) / values.square())
        agree(operator.solve(u).double(), expected, rtol=1e-8 if dtype == torch.float64 else 1e-2)


def test_logits_that_all_move_together_are_left_out_in_any_units():
    """Features that are not centred, saturated logits: the solves of every twentieth fit were off by 1e5 and more."""
    for seed in range(60):
        drawn = generator(seed)
        x = torch.randn(200, 3, generator=drawn, dtype=torch.float64) * torch.tensor([1.0, 50, 200])
        x = torch.cat(
            [torch.ones(200, 1, dtype=torch.float64), x + torch.tensor([0.0, 50, 1000])], dim=1
        )
        frame = Euclidean(4, 3)
        problem = NLLProblem(
            frame, lambda x, w: x @ w / 300, Categorical(), x, torch.arange(200) % 3
        )
        operator = problem.fisher(frame.random_point(generator=drawn))
        u = frame.random_tangent(operator.point, generator=drawn)
        together = u.mean(dim=1, keepdim=True).expand(4, 3)
        # 4 of the 12 directions move all logits, and they alone are flat
        d = operator.solve(u)
        assert float(d.mean(dim=1).norm()) <= 1e-6 * float(d.norm())
        agree(operator.matvec(d), u - together, rtol=1e-4)


def test_a_zero_gradient_needs_no_product():
    operator = stretched([1.0], samples=40)[0].fisher(torch.zeros(30, dtype=torch.float64))
    for method in ("cg", "dense", "woodbury", "pinv"):
        damping = 0.1 if method != "pinv" else 0.0
        solution = operator.solution(torch.zeros(30, dtype=torch.float64), damping, method=method)
        assert (
            float(solution.x.norm())
            == solution.decrease
            == solution.residual
            == solution.iterations
            == 0
        )


def test_the_zero_operator_is_only_damping():
    operator = DenseFisher(
        Grassmann(4, 2),
        Grassmann(4, 2).random_point(generator=generator()),
        torch.zeros(8, 8).double(),
    )
    g = Grassmann(4, 2).random_tangent(operator.point, generator=generator(1))
    for method in ("cg", "dense"):
        agree(operator.solve(g, 0.5, method=method), 2 * g, rtol=1e-14)
        assert float(operator.solve(g, 0.0, method=method).norm()) == 0


@pytest.mark.parametrize("method", ["auto", "dense", "woodbury", "cg", "pinv"])
def test_a_manifold_of_dimension_zero_has_only_the_direction_zero(method):
    x = torch.arange(3.0, dtype=torch.float64)
    problem = NLLProblem(Stiefel(1, 1), lambda x, t: x * t[0, 0], Gaussian(), x, x)
    theta, g = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    exact, matrix = (
        problem.fisher(theta),
        DenseFisher(Stiefel(1, 1), theta, torch.ones(1, 1, dtype=torch.float64)),
    )
    for operator in (exact, *([matrix] if method != "woodbury" else [])):
        for damping in (0.0, *([0.1] if method != "pinv" else [])):
            found = operator.solution(g, damping, method=method)
            assert float(found.x) == found.decrease == found.residual == 0


@pytest.mark.parametrize(
    ("dim", "samples", "rtol", "expected"),
    [
        (100, 2000, 1e-10, "dense"),
        (100, 2000, 0.3, "cg"),
        (5000, 50, 1e-10, "woodbury"),
        (5000, 50, 0.3, "cg"),
        (5000, ROWS_UP_TO + 1, 1e-10, "cg"),
    ],
)
def test_the_cheapest_method_is_taken(dim, samples, rtol, expected):
    """Few products where few digits are asked for, a matrix where many are."""
    x = torch.zeros(samples, 1)
    problem = NLLProblem(Euclidean(dim), lambda x, t: x * t[:1], Gaussian(), x, x)
    assert choose(problem.fisher(torch.zeros(dim)), rtol) == expected


def test_the_work_of_a_model_is_counted():
    """A product with n x d inputs and p columns has 2 n d p operations."""
    x = torch.zeros(300, 7)
    problem = NLLProblem(Stiefel(7, 2), lambda x, t: x @ t, Gaussian(), x, x[:, :2])
    operator = problem.fisher(Stiefel(7, 2).random_point(dtype=torch.float32))
    assert operator.work == 2 * 300 * 7 * 2


def test_structure_comes_first_and_no_factor_means_conjugate_gradients():
    x = Grassmann(5, 2).random_point(generator=generator())
    assert (
        choose(KroneckerFisher(Grassmann(5, 2), x, left=None, right=torch.eye(2, dtype=x.dtype)))
        == "structured"
    )
    operator = DenseFisher(Grassmann(5, 2), x, torch.eye(10, dtype=x.dtype))
    assert choose(operator) == "cg"
    assert (
        operator.solution(Grassmann(5, 2).random_tangent(x, generator=generator(1))).method == "cg"
    )


def test_bad_arguments_are_named(build):
    case = build("sphere", "gaussian")
    operator, g = case.problem.fisher(case.theta), case.tangent()
    for damping in (-1e-9, float("nan"), float("inf"), None, "large", 1j):
        with pytest.raises(ValueError, match=f"damping must be a number ≥ 0, got {damping}"):
            operator.solve(g, damping)
    with pytest.raises(
        ValueError, match=r"damping must be a number ≥ 0, got tensor\(\[0.1000, 0.2000\]\)"
    ):
        operator.solve(g, torch.tensor([0.1, 0.2]))
    with pytest.raises(
        ValueError, match=r"method must be 'auto' or one of \['structured', .*\], got 'lu'"
    ):
        operator.solve(g, 0.1, method="lu")
    with pytest.raises(ValueError, match=r"g is not a tangent vector of Sphere\(5\)"):
        operator.solve(case.theta, 0.1)
    with pytest.raises(
        ValueError, match=r"g must be torch.float64 on cpu like the point x, got torch.float32"
    ):
        operator.solve(g.float(), 0.1)
    with pytest.raises(
        ValueError, match=r"ExactFisher on Sphere\(5\) has no structured solve; use method='cg'"
    ):
        operator.solve(g, 0.1, method="structured")
    with pytest.raises(
        ValueError, match="DenseFisher has no factor in sample space; use method='cg' or 'dense'"
    ):
        case.problem.fisher(case.theta, kind="dense").solve(g, 0.1, method="woodbury")
    with pytest.raises(
        ValueError, match=r"pinv has no damping, got damping=0.1; use method='dense'"
    ):
        operator.solve(g, 0.1, method="pinv")
    with pytest.raises(ValueError, match="rtol must be a number ≥ 0, got -1"):
        operator.solve(g, 0.1, method="cg", rtol=-1)
    with pytest.raises(ValueError, match="max_iter must be at least 0, got -1"):
        operator.solve(g, 0.1, method="cg", max_iter=-1)
    assert solve is solve_module_function


@given(
    seed=st.integers(0, 1000),
    damping=st.floats(1e-6, 1e2),
    samples=st.integers(1, 9),
    n=st.integers(2, 7),
)
@settings(max_examples=40, deadline=None)
def test_all_methods_agree_on_any_shape(seed, damping, samples, n):
    g = generator(seed)
    x, theta = torch.randn(samples, n, generator=g).double(), Sphere(n).random_point(generator=g)
    problem = NLLProblem(
        Sphere(n), lambda x, t: torch.tanh(x @ t), Gaussian(), x, torch.zeros(samples).double()
    )
    operator, v = problem.fisher(theta), Sphere(n).random_tangent(theta, generator=g)
    dense = operator.solve(v, damping, method="dense")
    for method in ("woodbury", "cg", "auto"):
        agree(operator.solve(v, damping, method=method, rtol=1e-13), dense, rtol=1e-8)


@pytest.mark.parametrize("units", [1e-25, 1.0, 1e25])
def test_cg_solves_for_gradients_whose_squares_leave_the_numbers(units):
    """In float32 1e25 squared is infinite and 1e-25 squared is 0: the direction scales with g, its decrease with g²."""
    matrix = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    operator = DenseFisher(Euclidean(3), torch.zeros(3), matrix)
    g = torch.tensor([1.0, -1.0, 2.0])
    found = operator.solution(units * g, 0.5, method="cg", rtol=1e-6)
    expected = g.double() / (matrix.diagonal().double() + 0.5)
    torch.testing.assert_close(found.x.double() / units, expected, rtol=1e-5, atol=0)
    assert found.decrease / units / units == pytest.approx(
        0.5 * float(g.double() @ expected), rel=1e-5
    )
    assert found.residual < 1e-6


def test_cg_ends_where_its_preconditioner_is_singular():
    """A Kronecker product of zeros on Stiefel, not damped: nothing to divide by, and nothing to divide."""
    manifold, g = Stiefel(5, 2), torch.Generator().manual_seed(0)
    x = manifold.random_point(generator=g)
    operator = KroneckerFisher(
        manifold, x, left=torch.zeros(5, 5, dtype=x.dtype), right=torch.eye(2, dtype=x.dtype)
    )
    found = operator.solution(manifold.random_tangent(x, generator=g))
    assert (found.curvature, float(found.x.norm()), found.residual) == ("zero", 0.0, 1.0)


def test_cg_ends_where_its_preconditioner_has_nothing_left_to_say():
    """A user's singular preconditioner: what rounding leaves along its range is no residual to divide by."""

    class AlongOne(DenseFisher):
        def precondition(self, v, damping):
            return self.unit * (self.unit @ v)

    for seed in range(40):
        draw = torch.randn(3, 3, generator=generator(seed), dtype=torch.float64)
        operator = AlongOne(
            Euclidean(3), torch.zeros(3, dtype=torch.float64), draw @ draw.T + torch.eye(3).double()
        )
        operator.unit = draw[0] / draw[0].norm()
        found = operator.solution(draw[1], method="cg")
        assert found.curvature == "zero"
        best = operator.unit * (operator.unit @ draw[1]) / operator.quadratic(operator.unit)
        torch.testing.assert_close(found.x, best)
