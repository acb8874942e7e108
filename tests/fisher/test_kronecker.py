"""Kronecker and row-block operators: exact where the structure holds, and their solves exact on the tangent space."""

import pytest
import torch

from fisherfold.fisher import DenseFisher, KroneckerFisher, RowBlockFisher, VarianceReducedFisher
from fisherfold.manifolds import Euclidean, Grassmann, Oblique, Product, Sphere, Stiefel
from fisherfold.manifolds.base import flatten
from toy import generator

SHAPES = {
    "euclidean": Euclidean(5, 3),
    "grassmann": Grassmann(5, 3),
    "stiefel": Stiefel(5, 3),
    "oblique": Oblique(5, 3),
}
DAMPINGS = [1e-8, 1e-3, 1.0, 1e2]


def positive(size, seed, *, rank=None, dtype=torch.float64):
    root = torch.randn(size, rank or 2 * size, generator=generator(seed), dtype=dtype)
    return root @ root.T / size


def dense_solve(operator, g, damping):
    """(F + λ)⁻¹ g in an orthonormal tangent basis from a plain eigendecomposition of the projector, in float64."""
    manifold, x = operator.manifold, operator.point
    size = x.numel()
    eye = torch.eye(size, dtype=torch.float64)
    projector = torch.stack(
        [manifold.project(x, e.reshape(x.shape).to(x.dtype)).double().reshape(-1) for e in eye]
    )
    values, vectors = torch.linalg.eigh((projector + projector.T) / 2)
    basis = vectors[:, values > 0.5]
    assert basis.shape[1] == manifold.dim
    matrix = basis.T @ operator.dense().double() @ basis
    matrix = (matrix + matrix.T) / 2
    if damping == 0:
        small = torch.linalg.pinv(matrix, hermitian=True, rtol=1e-10)
        return (basis @ small @ basis.T @ g.double().reshape(-1)).reshape(g.shape)
    eye = torch.eye(manifold.dim, dtype=torch.float64)
    return (
        basis @ torch.linalg.solve(matrix + damping * eye, basis.T @ g.double().reshape(-1))
    ).reshape(g.shape)


def agree(found, expected, *, rtol=1e-9):
    assert float((found - expected).norm()) <= rtol * float(expected.norm())


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize("sides", ["both", "left", "right"])
def test_product_is_the_projected_kronecker_matrix(name, sides):
    manifold = SHAPES[name]
    x = manifold.random_point(generator=generator())
    m, n = x.shape
    left = positive(m, 1) if sides != "right" else None
    right = positive(n, 2) if sides != "left" else None
    operator = KroneckerFisher(manifold, x, left=left, right=right)
    big_left = torch.eye(m, dtype=x.dtype) if left is None else left
    big_right = torch.eye(n, dtype=x.dtype) if right is None else right
    # rows are flattened one after the other here, so vec(L v R) = (L ⊗ R) vec(v)
    reference = DenseFisher(manifold, x, torch.kron(big_left, big_right))
    agree(operator.dense(), reference.dense(), rtol=1e-13)
    v = manifold.random_tangent(x, generator=generator(3))
    agree(operator.matvec(v), reference.matvec(v), rtol=1e-13)


def test_on_grassmann_the_projection_stays_on_one_side():
    """P (R ⊗ L) P = R ⊗ (I - UUᵀ) L (I - UUᵀ): the long factor carries the projector, the short one is untouched."""
    manifold = SHAPES["grassmann"]
    x = manifold.random_point(generator=generator())
    m, n = x.shape
    left, right = positive(m, 1), positive(n, 2)
    operator = KroneckerFisher(manifold, x, left=left, right=right)
    outside = torch.eye(5, dtype=x.dtype) - x @ x.T
    agree(operator.left, outside @ left @ outside, rtol=1e-13)
    assert torch.equal(operator.right, right)
    agree(operator.dense(), torch.kron(operator.left, operator.right), rtol=1e-13)


@pytest.mark.parametrize("name", ["euclidean", "grassmann"])
def test_exact_when_the_gradients_are_matrix_normal(name):
    """Gradients a_i s_k bᵀ-like on a full grid have E[vec M vec Mᵀ] = R ⊗ L, and nothing is approximated."""
    manifold = SHAPES[name]
    x = manifold.random_point(generator=generator())
    m, n = x.shape
    lefts = torch.randn(6, m, generator=generator(1), dtype=x.dtype)
    rights = torch.randn(4, n, generator=generator(2), dtype=x.dtype)
    every = torch.einsum("am,bn->abmn", lefts, rights).reshape(-1, m, n)
    gradients = manifold.project(x.expand(len(every), m, n), every)
    flat = gradients.reshape(len(gradients), -1)
    operator = KroneckerFisher.from_gradients(manifold, x, gradients)
    agree(operator.dense(), flat.T @ flat / len(flat), rtol=1e-12)


@pytest.mark.parametrize("kind", [KroneckerFisher, RowBlockFisher])
def test_from_gradients_keeps_the_trace(kind):
    manifold = Grassmann(5, 3)
    x = manifold.random_point(generator=generator())
    gradients = manifold.project(
        x.expand(7, 5, 3), torch.randn(7, 5, 3, generator=generator(1), dtype=x.dtype)
    )
    expected = gradients.square().sum(dim=(1, 2)).mean()
    operator = kind.from_gradients(manifold, x, gradients)
    if kind is KroneckerFisher:
        agree(operator.dense().trace(), expected, rtol=1e-12)
    else:
        agree(operator.blocks.diagonal(dim1=1, dim2=2).sum(), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [KroneckerFisher, RowBlockFisher])
def test_gradients_that_all_vanish_give_the_zero_operator(kind, dtype):
    manifold = Grassmann(5, 3)
    x = manifold.random_point(generator=generator(), dtype=dtype)
    operator = kind.from_gradients(manifold, x, torch.zeros(7, 5, 3, dtype=dtype))
    v = manifold.random_tangent(x, generator=generator(1))
    assert float(operator.matvec(v).abs().max()) == 0
    agree(operator.solve(v, 0.5), 2 * v, rtol=1e-6)
    assert float(operator.solve(v, 0.0).abs().max()) == 0


@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("name", ["euclidean", "grassmann"])
@pytest.mark.parametrize("sides", ["both", "left", "right"])
def test_structured_kronecker_solve_is_exact(name, sides, damping):
    manifold = SHAPES[name]
    x = manifold.random_point(generator=generator())
    left = positive(x.shape[0], 1, rank=3) if sides != "right" else None
    right = positive(x.shape[1], 2) if sides != "left" else None
    operator = KroneckerFisher(manifold, x, left=left, right=right)
    g = manifold.random_tangent(x, generator=generator(3))
    solution = operator.solution(g, damping)
    assert solution.method == "structured"
    agree(solution.x, dense_solve(operator, g, damping), rtol=1e-7 if damping == 1e-8 else 1e-10)


@pytest.mark.parametrize("name", ["euclidean", "grassmann"])
def test_structured_kronecker_solve_without_damping_is_the_pseudo_inverse(name):
    manifold = SHAPES[name]
    x = manifold.random_point(generator=generator())
    operator = KroneckerFisher(
        manifold, x, left=positive(x.shape[0], 1, rank=2), right=positive(x.shape[1], 2, rank=2)
    )
    g = manifold.random_tangent(x, generator=generator(3))
    agree(operator.solve(g), dense_solve(operator, g, 0), rtol=1e-9)


def test_a_structured_solve_needs_the_structure():
    manifold = Stiefel(5, 3)
    x = manifold.random_point(generator=generator())
    operator = KroneckerFisher(manifold, x, left=positive(5, 1), right=positive(3, 2))
    g = manifold.random_tangent(x, generator=generator(3))
    with pytest.raises(
        ValueError, match=r"Fisher on Stiefel\(5, 3\) has no structured solve; use method='cg'"
    ):
        operator.solve(g, 0.1, method="structured")


@pytest.mark.parametrize("damping", [1e-3, 1.0])
@pytest.mark.parametrize("name", ["stiefel", "oblique"])
def test_elsewhere_the_factors_precondition_conjugate_gradients(name, damping):
    manifold = SHAPES[name]
    x = manifold.random_point(generator=generator())
    operator = KroneckerFisher(manifold, x, left=positive(5, 1), right=positive(3, 2))
    g = manifold.random_tangent(x, generator=generator(3))
    solution = operator.solution(g, damping)
    assert solution.method == "cg"
    agree(solution.x, dense_solve(operator, g, damping), rtol=1e-7)


@pytest.mark.parametrize(
    "manifold", [Stiefel(4, 4), Stiefel(6, 1), Oblique(6, 4), Oblique(1, 4)], ids=str
)
def test_singular_factors_precondition_nothing(manifold):
    """Where nothing damps them: solved for a g in the range of F, and for any other the end is said, with no crash."""
    for seed in range(12):
        x = manifold.random_point(generator=generator(seed))
        ranks = [max(1, size // 2) for size in x.shape]
        left, right = (positive(x.shape[k], 10 * k + seed, rank=ranks[k]) for k in (0, 1))
        operator = KroneckerFisher(manifold, x, left=left, right=right)
        any_g = manifold.random_tangent(x, generator=generator(3))
        g = operator.matvec(any_g)
        agree(operator.matvec(operator.solve(g)), g, rtol=1e-8)
        if float((operator.matvec(dense_solve(operator, any_g, 0)) - any_g).norm()) > 1e-3:
            assert operator.solution(any_g).curvature == "zero"


@pytest.mark.parametrize("manifold", [Euclidean(6, 4), Grassmann(6, 4)], ids=str)
@pytest.mark.parametrize("unit", [1e-100, 1.0, 1e100])
def test_a_gradient_in_the_range_of_the_factors_is_not_blown_up_by_a_tiny_damping(manifold, unit):
    """g = F u is in the range up to rounding, which neither 1/λ nor 1/eps may turn into a direction; else it is g/λ."""
    for seed in range(6):
        x = manifold.random_point(generator=generator(seed))
        left, right = (positive(size, 10 * k + seed, rank=2) for k, size in enumerate(x.shape))
        operator = KroneckerFisher(manifold, x, left=left, right=right)
        u = unit * manifold.random_tangent(x, generator=generator(3))
        g = operator.matvec(u)
        expected = operator.solve(g)
        for damping in (1e-14, 1e-18, 1e-30):
            agree(operator.solve(g, damping) / unit, expected / unit, rtol=1e-8)
        free = u - operator.solve(operator.matvec(u))
        agree(operator.solve(u, 1e-18) * (1e-18 / unit), free / unit, rtol=1e-8)


@pytest.mark.parametrize("manifold", [Stiefel(4, 4), Stiefel(6, 2), Oblique(6, 4)], ids=str)
@pytest.mark.parametrize("damping", [1e-18, 1e-30])
def test_factors_that_are_singular_beside_their_damping_precondition_nothing(manifold, damping):
    for seed in range(6):
        x = manifold.random_point(generator=generator(seed))
        left, right = (
            positive(size, 10 * k + seed, rank=max(1, size // 2)) for k, size in enumerate(x.shape)
        )
        operator = KroneckerFisher(manifold, x, left=left, right=right)
        g = operator.matvec(manifold.random_tangent(x, generator=generator(3)))
        agree(operator.matvec(manifold.project(x, operator.solve(g, damping))), g, rtol=1e-8)


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize("damping", DAMPINGS)
def test_row_block_solve_is_exact(name, damping):
    manifold = SHAPES[name]
    x = manifold.random_point(generator=generator())
    rows, columns = x.shape
    blocks = torch.stack([positive(columns, seed, rank=1 + seed % 3) for seed in range(rows)])
    operator = RowBlockFisher(manifold, x, blocks)
    g = manifold.random_tangent(x, generator=generator(3))
    solution = operator.solution(g, damping)
    assert solution.method == (
        "structured" if name in {"euclidean", "oblique", "grassmann"} else "cg"
    )
    reference = DenseFisher(manifold, x, torch.block_diag(*blocks))
    agree(operator.dense(), reference.dense(), rtol=1e-13)
    agree(solution.x, dense_solve(reference, g, damping), rtol=1e-6 if damping == 1e-8 else 1e-8)


@pytest.mark.parametrize(
    ("dtype", "dampings", "rtol"),
    [
        (torch.float64, (1e-6, 1e-10, 1e-14), 1e-7),
        (torch.float32, (1e-4, 1e-6, 1e-10, 1e-14), 1e-2),
    ],
)
def test_row_blocks_that_are_hardly_damped_are_solved_as_well_as_their_operator_is(
    dtype, dampings, rtol
):
    """Singular blocks and rows without data, whose inverse is 1/λ: on the tangent space F is well conditioned."""
    for seed in range(5):
        manifold = Grassmann(6, 4)
        x = manifold.random_point(generator=generator(seed), dtype=dtype)
        blocks = torch.stack([positive(4, 10 * seed + j, rank=2) for j in range(6)])
        blocks[seed] = 0
        operator = RowBlockFisher(manifold, x, blocks.to(dtype))
        reference = RowBlockFisher(manifold, x.double(), blocks.to(dtype).double())
        g = manifold.random_tangent(x, generator=generator(3))
        for damping in dampings:
            agree(operator.solve(g, damping), dense_solve(reference, g, damping), rtol=rtol)


@pytest.mark.parametrize("manifold", [Grassmann(6, 1), Stiefel(6, 2)], ids=str)
def test_blocks_that_are_singular_beside_their_damping_precondition_nothing(manifold):
    """In float32 1/λ = 1e10 along flat directions of a block is rounding and no curvature."""
    for seed in range(5):
        x = manifold.random_point(generator=generator(seed), dtype=torch.float32)
        rows, columns = x.shape
        blocks = torch.stack(
            [positive(columns, 10 * seed + j, rank=max(1, columns // 2)) for j in range(rows)]
        )
        blocks[0] = 0
        operator = RowBlockFisher(manifold, x, blocks.float())
        g = operator.matvec(manifold.random_tangent(x, generator=generator(3)))
        for damping in (1e-10, 1e-14):
            d = operator.solve(g, damping)
            agree(operator.matvec(manifold.project(x, d)) + damping * d, g, rtol=1e-3)


@pytest.mark.parametrize("name", ["euclidean", "oblique", "grassmann"])
@pytest.mark.parametrize("samples", [2, 40])
def test_row_block_solve_without_damping_is_the_pseudo_inverse(name, samples):
    """On the oblique manifold every block is singular along its row: tangent gradients never point there."""
    manifold = SHAPES[name]
    x = manifold.random_point(generator=generator())
    ambient = torch.randn(samples, 5, 3, generator=generator(1), dtype=x.dtype)
    operator = RowBlockFisher.from_gradients(
        manifold, x, manifold.project(x.expand(samples, 5, 3), ambient)
    )
    # F d = g has a solution for a g in the range of F
    g = operator.matvec(manifold.random_tangent(x, generator=generator(3)))
    agree(operator.solve(g), dense_solve(operator, g, 0), rtol=1e-7)


@pytest.mark.parametrize("kind", [KroneckerFisher, RowBlockFisher])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows", [3, 500])
def test_columns_that_depend_on_each_other_are_left_out(kind, dtype, rows):
    """A singular block of sums over samples may have pivots that are well above rounding: its inverse was 1e14."""
    for seed in range(30 if rows == 3 else 8):
        drawn, manifold = generator(seed), Euclidean(rows, 2)
        gradients = torch.randn(300, rows, 2, generator=drawn, dtype=torch.float64) + 1
        weight = torch.randn(
            rows if kind is RowBlockFisher else 1, generator=drawn, dtype=torch.float64
        )
        gradients[..., 1] = weight * gradients[..., 0]
        x = torch.zeros(rows, 2, dtype=dtype)
        operator = kind.from_gradients(manifold, x, gradients.to(dtype))
        d = operator.solve(manifold.random_tangent(x, generator=drawn))
        along = d[:, 0] + weight * d[:, 1]  # and nothing at right angles to it
        across = d[:, 1] - weight * d[:, 0]
        assert float(across.norm()) <= (1e-6 if dtype == torch.float64 else 1e-2) * float(
            along.norm()
        )


def test_moving_a_batch_adds_up_the_factors():
    manifold = Euclidean(5, 3)
    gradients = torch.randn(10, 5, 3, generator=generator(1), dtype=torch.float64)
    later = torch.randn(10, 5, 3, generator=generator(2), dtype=torch.float64)
    batch = torch.tensor([2, 7, 9])
    rest = torch.tensor([0, 1, 3, 4, 5, 6, 8])
    x0, x = (manifold.random_point(generator=generator(seed)) for seed in (3, 4))
    mixture = torch.cat([gradients[rest], later[batch]])
    for kind in (KroneckerFisher, RowBlockFisher):
        full, at_anchor = (
            kind.from_gradients(manifold, x0, gradients),
            kind.from_gradients(manifold, x0, gradients[batch]),
        )
        moved = full.variance_reduced(
            at_anchor, kind.from_gradients(manifold, x, later[batch]), batch, 0.3
        )
        assert isinstance(moved, kind)
        agree(moved.dense(), kind.from_gradients(manifold, x, mixture).dense(), rtol=1e-12)


@pytest.mark.parametrize("kind", [KroneckerFisher, RowBlockFisher])
def test_moving_follows_the_representative(kind):
    """x and xQ are the same point: what stays at the anchor turns with the frame, as tangent vectors do."""
    manifold = SHAPES["grassmann"]
    x0 = manifold.random_point(generator=generator())
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator(5), dtype=x0.dtype)).Q
    x = x0 @ turn
    ambient = torch.randn(10, *x0.shape, generator=generator(1), dtype=x0.dtype)
    gradients = manifold.project(x0.expand_as(ambient), ambient)
    batch = torch.tensor([2, 7])
    full, at_anchor = (
        kind.from_gradients(manifold, x0, part) for part in (gradients, gradients[batch])
    )
    turned = gradients[batch] @ turn
    moved = full.variance_reduced(at_anchor, kind.from_gradients(manifold, x, turned), batch, 0.2)
    v = manifold.random_tangent(x, generator=generator(6))
    expected = manifold.transport(x0, x, full.matvec(manifold.transport(x, x0, v)))
    agree(moved.matvec(v), expected, rtol=1e-12)


def test_moving_between_different_kinds_falls_back_to_the_general_formula():
    manifold = Euclidean(5, 3)
    gradients = torch.randn(10, 5, 3, generator=generator(1), dtype=torch.float64)
    x = manifold.random_point(generator=generator())
    rows, factors = (
        kind.from_gradients(manifold, x, gradients) for kind in (RowBlockFisher, KroneckerFisher)
    )
    for full, other in ((rows, factors), (factors, rows)):
        moved = full.variance_reduced(other, other, torch.arange(2), 0.2)
        assert isinstance(moved, VarianceReducedFisher)
        agree(moved.dense(), full.dense(), rtol=1e-12)


def test_shapes_are_checked():
    x = Euclidean(5, 3).random_point(generator=generator())
    with pytest.raises(ValueError, match=r"left must have shape \(5, 5\), got \(3, 3\)"):
        KroneckerFisher(Euclidean(5, 3), x, left=torch.eye(3), right=None)
    with pytest.raises(ValueError, match=r"right must have shape \(3, 3\), got \(5, 5\)"):
        KroneckerFisher(Euclidean(5, 3), x, left=None, right=torch.eye(5))
    with pytest.raises(ValueError, match=r"blocks must have shape \(5, 3, 3\), got \(3, 5, 5\)"):
        RowBlockFisher(Euclidean(5, 3), x, torch.zeros(3, 5, 5))
    w = Sphere(4).random_point(generator=generator())
    with pytest.raises(
        ValueError, match=r"a Kronecker Fisher needs a matrix as its point, got shape \(4,\)"
    ):
        KroneckerFisher(Sphere(4), w, left=None, right=None)
    with pytest.raises(
        ValueError, match=r"a row-block Fisher needs a matrix as its point, got shape \(4,\)"
    ):
        RowBlockFisher(Sphere(4), w, torch.zeros(4, 1, 1))


@pytest.mark.parametrize("kind", ["kronecker", "row-block"])
def test_the_problem_builds_them_from_its_gradients(kind, build):
    case = build("grassmann", "categorical", samples=9)
    gradients = case.gradients().reshape(9, 5, 2)
    builder = KroneckerFisher if kind == "kronecker" else RowBlockFisher
    expected = builder.from_gradients(case.problem.manifold, case.theta, gradients)
    agree(
        case.problem.fisher(case.theta, kind=f"empirical-{kind}").dense(),
        expected.dense(),
        rtol=1e-12,
    )
    for other in ("sphere", "product"):
        wrong = build(other, "gaussian")
        assert isinstance(wrong.problem.manifold, (Sphere, Product))
        with pytest.raises(
            ValueError,
            match=f"kind='{kind}' needs a matrix as its parameter; use 'exact' or 'empirical'",
        ):
            wrong.problem.fisher(wrong.theta, kind=kind)
    assert flatten(case.theta).numel() == 10


def test_row_blocks_that_are_exactly_singular_along_their_rows():
    """Rows on coordinate axes: the blocks of tangent gradients have a row of exact zeros."""
    manifold = Oblique(3, 3)
    x = torch.eye(3, dtype=torch.float64)
    ambient = torch.randn(20, 3, 3, generator=generator(1), dtype=x.dtype)
    operator = RowBlockFisher.from_gradients(
        manifold, x, manifold.project(x.expand(20, 3, 3), ambient)
    )
    g = manifold.random_tangent(x, generator=generator(3))
    for damping in (0.0, 1e-3):
        agree(operator.solve(g, damping), dense_solve(operator, g, damping))
