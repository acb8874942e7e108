"""Loss, gradient and every Fisher matrix of completion against loops over columns and automatic differentiation."""

import numpy as np
import pytest
import torch

from fisherfold import minimize
from fisherfold.completion.inference.packed import outer_table, solve_positive, unpack
from fisherfold.completion.point.kernels import ColumnFit
from fisherfold.completion.point.problem import CompletionProblem
from fisherfold.completion.ratings import Ratings
from fisherfold.solvers import GradientNorm

N_ROWS, N_COLUMNS, RANK = 12, 9, 3


def table(seed=0, density=0.6, rows=N_ROWS, columns=N_COLUMNS):
    """A random mask in which every column has more ratings than the rank, and values."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, columns)) < density
    mask[: RANK + 2] = True
    values = np.where(mask, rng.standard_normal((rows, columns)), np.nan)
    seen = np.nonzero(mask)
    return Ratings(*seen, values[seen], shape=(rows, columns)), torch.from_numpy(values)


def residuals(frame, values, ridge):
    """The residuals of all columns with sqrt(ridge) a below them, as a differentiable loop."""
    parts = []
    for i, column in enumerate(values.T):
        seen = ~torch.isnan(column)
        rows = frame[seen]
        gram = rows.T @ rows + ridge[i] * torch.eye(frame.shape[1], dtype=frame.dtype)
        a = torch.linalg.solve(gram, rows.T @ column[seen])
        parts += [rows @ a - column[seen], ridge[i].sqrt() * a]
    return torch.cat(parts)


def ridges(values, ridge, weighting):
    counts = (~torch.isnan(values)).sum(0).double()
    return ridge * (counts if weighting == "count" else torch.ones_like(counts))


def frame_of(problem, seed=0):
    return problem.manifold.random_point(generator=torch.Generator().manual_seed(seed))


CASES = [(0.0, "column"), (0.3, "column"), (0.1, "count")]


@pytest.mark.parametrize(("ridge", "weighting"), CASES)
@pytest.mark.parametrize("orientation", ["rows", "columns"])
@pytest.mark.parametrize("batch", [None, [4, 0, 4]])
def test_loss_and_gradient_equal_the_loop(ridge, weighting, orientation, batch):
    ratings, values = table()
    problem = CompletionProblem(
        ratings, RANK, ridge=ridge, ridge_weighting=weighting, orientation=orientation
    )
    values = values.T if orientation == "columns" else values
    chosen = values if batch is None else values[:, batch]
    columns = None if batch is None else torch.tensor(batch)
    x = frame_of(problem).requires_grad_()
    r = residuals(x, chosen, ridges(chosen, ridge, weighting))
    expected = (r @ r) / (2 * chosen.shape[1])
    (euclidean,) = torch.autograd.grad(expected, x)
    x = x.detach()
    gradient = problem.manifold.project(x, euclidean)
    loss, ours = problem.loss_and_gradient(x, columns)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(problem.loss(x, columns), loss, rtol=0, atol=0)
    torch.testing.assert_close(ours, gradient, rtol=0, atol=1e-13)
    torch.testing.assert_close(problem.gradient(x, columns), ours, rtol=0, atol=0)


@pytest.mark.parametrize(("ridge", "weighting"), CASES)
@pytest.mark.parametrize("batch", [None, [4, 0]])
def test_exact_fisher_is_the_jacobian_form(ridge, weighting, batch):
    ratings, values = table()
    problem = CompletionProblem(
        ratings, RANK, ridge=ridge, ridge_weighting=weighting, orientation="rows"
    )
    chosen = values if batch is None else values[:, batch]
    x = frame_of(problem)
    jacobian = torch.func.jacrev(residuals)(x, chosen, ridges(chosen, ridge, weighting)).flatten(1)
    flat = torch.eye(x.numel(), dtype=x.dtype)
    projector = torch.stack([problem.manifold.project(x, e.view_as(x)).flatten() for e in flat])
    expected = projector @ jacobian.T @ jacobian @ projector / chosen.shape[1]
    operator = problem.fisher(x, None if batch is None else torch.tensor(batch), kind="exact")
    torch.testing.assert_close(operator.dense(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("ridge", "weighting"), CASES)
def test_observed_information_is_the_riemannian_hessian(ridge, weighting):
    """Against the second difference of the loss along geodesics, and symmetric."""
    ratings, _ = table()
    problem = CompletionProblem(
        ratings, RANK, ridge=ridge, ridge_weighting=weighting, orientation="rows"
    )
    manifold, x = problem.manifold, frame_of(problem)
    matrix = problem.fisher(x, kind="observed").dense()
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-12)
    for seed in range(3):
        h = manifold.random_tangent(x, generator=torch.Generator().manual_seed(seed))
        t = 1e-4
        ahead, behind = (problem.loss(manifold.exp(x, s * h)) for s in (t, -t))
        second = (ahead - 2 * problem.loss(x) + behind) / t**2
        curvature = (h.flatten() @ matrix @ h.flatten()).item()
        assert curvature == pytest.approx(float(second), abs=1e-5 * max(1.0, abs(curvature)))


def test_the_observed_information_converges_quadratically_on_noisy_data():
    ratings, _ = table(rows=40, columns=30, density=0.7)
    problem = CompletionProblem(ratings, RANK)
    near = minimize(
        problem,
        problem.spectral_start(),
        "rngd",
        fisher="row-block",
        max_iter=300,
        stop=GradientNorm(1e-3),
    )
    options = {"sigma": 1e-8, "sigma_min": 1e-14, "forcing": 1e-3}
    newton = minimize(
        problem, near.x, "rngd", fisher="observed", max_iter=8, stop=GradientNorm(1e-11), **options
    )
    assert newton.status == "converged"
    expected = minimize(
        problem, near.x, "rngd", fisher="exact", max_iter=8, stop=GradientNorm(1e-11), **options
    )
    assert expected.trace["gradient_norm"][-1] > 1e3 * newton.trace["gradient_norm"][-1]


def test_the_spectral_start_is_the_leading_subspace_of_the_zero_filled_matrix():
    ratings, values = table()
    problem = CompletionProblem(ratings, RANK, orientation="rows")
    filled = torch.nan_to_num(values)
    leading = torch.linalg.svd(filled).U[:, :RANK]
    assert float(problem.manifold.dist(problem.spectral_start(sweeps=400), leading)) < 1e-7


def test_gauss_newton_drops_the_residual_term():
    ratings, values = table()
    problem = CompletionProblem(ratings, RANK, orientation="rows")
    x = frame_of(problem)
    h = problem.manifold.random_tangent(x, generator=torch.Generator().manual_seed(1))
    expected, extra = torch.zeros_like(x), torch.zeros_like(x)
    for column in values.T:
        seen = ~torch.isnan(column)
        rows, inverse = x[seen], torch.linalg.inv(x[seen].T @ x[seen])
        a = inverse @ rows.T @ column[seen]
        r = rows @ a - column[seen]
        image = h[seen] @ a
        expected[seen] += torch.outer(image - rows @ inverse @ (rows.T @ image), a) / N_COLUMNS
        extra[seen] += torch.outer(r, r) @ h[seen] @ inverse / N_COLUMNS
    torch.testing.assert_close(
        problem.fisher(x, kind="gauss-newton") @ h, expected, rtol=0, atol=1e-13
    )
    torch.testing.assert_close(
        problem.fisher(x, kind="exact") @ h, expected + extra, rtol=0, atol=1e-13
    )


def test_the_efficient_form_is_the_expected_hessian():
    """Over draws of the noise the Hessian averages to (I - Π) ⊗ ααᵀ, as the efficient information does."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(20, 8, generator=generator) < 0.8
    seen = mask.nonzero().T
    frame = torch.linalg.qr(torch.randn(20, 2, generator=generator, dtype=torch.float64)).Q
    truth = torch.randn(8, 2, generator=generator, dtype=torch.float64)
    clean = (frame @ truth.T)[mask]
    kinds = ("exact", "gauss-newton", "efficient", "observed")
    draws = {kind: [] for kind in kinds}
    noise = 0.3 * torch.randn(600, len(clean), generator=generator, dtype=torch.float64)
    for each in noise:
        problem = CompletionProblem(
            Ratings(*seen, clean + each, shape=(20, 8)), 2, orientation="rows"
        )
        if not draws["exact"]:
            h = problem.manifold.random_tangent(frame, generator=generator)
            silent = CompletionProblem(Ratings(*seen, clean, shape=(20, 8)), 2, orientation="rows")
            expected = float((h * silent.fisher(frame, kind="gauss-newton")._matvec(h)).sum())
        for kind in kinds:
            draws[kind].append(float((h * problem.fisher(frame, kind=kind)._matvec(h)).sum()))
    means = {kind: torch.tensor(v, dtype=torch.float64).mean().item() for kind, v in draws.items()}
    errors = {
        kind: torch.tensor(v, dtype=torch.float64).std().item() / 600**0.5
        for kind, v in draws.items()
    }
    for kind in ("efficient", "observed"):
        assert abs(means[kind] - expected) < 4 * errors[kind]
    bias = means["gauss-newton"] - expected
    assert bias > 10 * errors["gauss-newton"]
    assert abs(means["exact"] - expected - 2 * bias) < 4 * (
        errors["exact"] + 2 * errors["gauss-newton"]
    )


def test_the_kronecker_and_row_block_forms():
    ratings, values = table(density=0.9)
    problem = CompletionProblem(ratings, RANK, orientation="rows")
    x = frame_of(problem)
    h = problem.manifold.random_tangent(x, generator=torch.Generator().manual_seed(1))
    a = problem.fit(x).coefficients
    seen = (~torch.isnan(values)).double()
    factor = a.T @ a / N_COLUMNS
    share = seen.sum(1) / N_COLUMNS
    blocks = torch.einsum("ji,ip,iq->jpq", seen, a, a) / N_COLUMNS
    forms = {
        "kronecker": h @ factor,
        "kronecker-rows": share[:, None] * (h @ factor),
        "row-block": torch.einsum("jpq,jq->jp", blocks, h),
    }
    for kind, expected in forms.items():
        operator = problem.fisher(x, kind=kind)
        torch.testing.assert_close(
            operator @ h, problem.manifold.project(x, expected), rtol=0, atol=1e-13
        )
        solution = operator.solve(operator @ h)
        torch.testing.assert_close(solution, h, rtol=0, atol=1e-9)


def test_all_kinds_agree_when_everything_is_observed_without_noise():
    """With full observation Π_i = U Uᵀ; with residual zero too, every kind is H ↦ H C."""
    generator = torch.Generator().manual_seed(3)
    frame = torch.linalg.qr(torch.randn(8, 2, generator=generator, dtype=torch.float64)).Q
    matrix = frame @ torch.randn(2, 7, generator=generator, dtype=torch.float64)
    rows, columns = torch.arange(56) // 7, torch.arange(56) % 7
    problem = CompletionProblem(Ratings(rows, columns, matrix.flatten()), 2, orientation="rows")
    h = problem.manifold.random_tangent(frame, generator=generator)
    products = [problem.fisher(frame, kind=kind) @ h for kind in problem.fisher_kinds]
    for product in products[1:]:
        torch.testing.assert_close(product, products[0], rtol=0, atol=1e-12)


def test_row_block_step_one_is_a_half_step_of_alternating_least_squares():
    """The unprojected block solve reaches the rows that least squares gives for fixed coefficients."""
    ratings, values = table(density=0.9)
    problem = CompletionProblem(ratings, RANK, orientation="rows")
    x = frame_of(problem)
    a = problem.fit(x).coefficients
    operator = problem.fisher(x, kind="row-block")
    step = torch.linalg.solve(operator.blocks, problem.gradient(x).unsqueeze(-1)).squeeze(-1)
    for j, row in enumerate(values):
        seen = ~torch.isnan(row)
        least_squares = torch.linalg.lstsq(a[seen], row[seen][:, None]).solution[:, 0]
        torch.testing.assert_close(x[j] - step[j], least_squares, rtol=0, atol=1e-11)


def test_columns_with_too_few_ratings_get_the_solution_of_least_norm():
    rows = [0, 1, 2, 3, 4, 5, 6, 2, 5, 3]
    columns = [0, 0, 0, 0, 0, 0, 0, 1, 1, 3]
    values = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ratings = Ratings(rows, columns, values, shape=(7, 4))
    problem = CompletionProblem(ratings, 3, orientation="rows")
    x = frame_of(problem)
    fit = problem.fit(x)
    assert fit.fallback.tolist() == [1, 2, 3]
    torch.testing.assert_close(
        fit.coefficients[1], torch.linalg.pinv(x[[2, 5]]) @ values[7:9], rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        fit.coefficients[3], torch.linalg.pinv(x[[3]]) @ values[9:], rtol=0, atol=1e-12
    )
    assert fit.coefficients[2].tolist() == [0.0, 0.0, 0.0]
    expected = torch.linalg.pinv(x[[2, 5]].T @ x[[2, 5]], hermitian=True, rtol=1e-10)
    torch.testing.assert_close(fit.inverse()[1], expected, rtol=1e-9, atol=0)
    r = x[[0, 1, 2, 3, 4, 5, 6]] @ fit.coefficients[0] - values[:7]
    torch.testing.assert_close(problem.loss(x), r @ r / 8, rtol=1e-12, atol=0)
    assert bool(torch.isfinite(problem.fisher(x, kind="exact") @ problem.gradient(x)).all())


def test_an_inverse_at_the_edge_of_single_precision_is_finite():
    """Large tables have columns whose pivots are positive in one order of rounding and not in another."""
    gram = torch.tensor([[1.0, 1.0, 1 - 1e-7], [4.0, 0.0, 2.0]])
    none = torch.zeros(0, dtype=torch.int64)
    fit = ColumnFit(
        torch.zeros(2, 2), gram, torch.zeros(2, 2), torch.zeros(2), none, torch.zeros(0, 2, 2)
    )
    found = fit.inverse()
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found[1], torch.tensor([[0.25, 0.0], [0.0, 0.5]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearly_dependent_rows_are_solved_from_the_rows(dtype):
    """The normal equations square the condition number; the fallback does not."""
    generator = torch.Generator().manual_seed(0)
    frame = torch.linalg.qr(torch.randn(30, 2, generator=generator, dtype=torch.float64)).Q
    frame[:10, 1] = 2 * frame[:10, 0] + (1e-4 if dtype == torch.float32 else 1e-6) * frame[10:20, 0]
    frame = frame.to(dtype)
    values = frame[:10] @ torch.tensor([1.0, -1.0], dtype=dtype)
    problem = CompletionProblem(
        Ratings(range(10), [0] * 10, values, shape=(30, 2), dtype=dtype), 2, orientation="rows"
    )
    fit = problem.fit(frame)
    assert fit.fallback.tolist() == [0, 1]
    exact = torch.linalg.lstsq(
        frame[:10].double(), values.double()[:, None], driver="gelsd"
    ).solution[:, 0]
    torch.testing.assert_close(fit.coefficients[0].double(), exact, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("count", "size"), [(5, 4), (500, 4), (500, 1), (401, 30)])
def test_many_small_systems(count, size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3 * size, size, generator=generator, dtype=torch.float64)
    square = (x.mT @ x + (x.mT @ x).mT) / 2
    below = torch.tril_indices(size, size)
    packed = square[:, below[0], below[1]]
    torch.testing.assert_close(unpack(packed), square, rtol=0, atol=0)
    rhs = torch.randn(count, size, generator=generator, dtype=torch.float64)
    diagonal = torch.rand(count, 1, generator=generator, dtype=torch.float64)
    solution, share = solve_positive(packed, rhs, diagonal)
    full = square + diagonal[:, :, None] * torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(solution, torch.linalg.solve(full, rhs), rtol=1e-10, atol=1e-12)
    factor = torch.linalg.cholesky(full)
    pivots = factor.diagonal(dim1=1, dim2=2) ** 2 / full.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(share, pivots.amin(1), rtol=1e-10, atol=0)
    torch.testing.assert_close(
        unpack(outer_table(rhs)), rhs[:, :, None] * rhs[:, None], rtol=0, atol=0
    )


def test_snapshot_is_unbiased_and_exact_at_its_anchor():
    ratings, _ = table()
    problem = CompletionProblem(ratings, RANK, orientation="rows")
    x0 = frame_of(problem)
    x = problem.manifold.retract(x0, 0.1 * problem.manifold.random_tangent(x0))
    snapshot = problem.snapshot(x0)
    batches = [torch.tensor([i]) for i in range(N_COLUMNS)]
    mean = sum(snapshot.gradient(x, b) for b in batches) / N_COLUMNS
    torch.testing.assert_close(mean, problem.gradient(x), rtol=0, atol=1e-13)
    torch.testing.assert_close(
        snapshot.gradient(x0, batches[3]), problem.gradient(x0), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("rule", ["persistent", "batch"])
def test_the_table_of_coefficients_follows_its_rule(rule):
    ratings, _ = table()
    problem = CompletionProblem(ratings, RANK, orientation="rows", table=rule)
    manifold = problem.manifold
    x0 = frame_of(problem)
    x1 = manifold.retract(
        x0, 0.1 * manifold.random_tangent(x0, generator=torch.Generator().manual_seed(1))
    )
    x2 = manifold.retract(
        x1, 0.1 * manifold.random_tangent(x1, generator=torch.Generator().manual_seed(2))
    )
    first, second = torch.tensor([1, 5]), torch.tensor([5, 7, 5])
    snapshot = problem.snapshot(x0)
    snapshot.fisher(x1, first, kind="kronecker")
    ours = snapshot.fisher(x2, second, kind="kronecker").right
    a0, a1, a2 = (problem.fit(x).coefficients for x in (x0, x1, x2))
    if rule == "persistent":
        fresh = a0.clone()
        fresh[1], fresh[5], fresh[7] = a1[1], a2[5], a2[7]
        expected = fresh.T @ fresh / N_COLUMNS
    else:
        moved = a2[second].T @ a2[second] - a0[second].T @ a0[second]
        expected = (a0.T @ a0 + moved) / N_COLUMNS
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    h = manifold.random_tangent(x2)
    general = super(type(snapshot), snapshot).fisher(x2, first, kind="row-block") @ h
    torch.testing.assert_close(
        snapshot.fisher(x2, first, kind="row-block") @ h, general, rtol=0, atol=0
    )


def test_metrics_put_the_honest_error_first_and_name_the_refit():
    ratings, values = table()
    held = Ratings([0, 1, 2, 3], [0, 0, 0, 0], [1.0, 2.0, -1.0, 9.0], shape=ratings.shape)
    problem = CompletionProblem(ratings, RANK, orientation="rows", held_out=held, clip=(-2.0, 2.0))
    x = frame_of(problem)
    metrics = problem.metrics(x)
    assert list(metrics) == ["held_out", "refit", "train"]
    target = torch.tensor([1.0, 2.0, -1.0, 9.0], dtype=torch.float64)
    predicted = (x[:4] @ problem.fit(x).coefficients[0]).clamp(-2, 2)
    assert metrics["held_out"] == pytest.approx(
        float(((predicted - target) ** 2).mean()), rel=1e-12
    )
    again = x[:4] @ torch.linalg.lstsq(x[:4], target[:, None]).solution[:, 0]
    assert metrics["refit"] == pytest.approx(float(((again - target) ** 2).mean()), rel=1e-10)
    r = residuals(x, values, torch.zeros(N_COLUMNS, dtype=torch.float64))
    assert metrics["train"] == pytest.approx(float(r @ r) / ratings.n_ratings, rel=1e-12)
    assert list(
        CompletionProblem(ratings, RANK).metrics(frame_of(CompletionProblem(ratings, RANK)))
    ) == ["train"]


def test_auto_takes_the_smaller_side_as_rows():
    ratings, _ = table()
    assert CompletionProblem(ratings, RANK).manifold.n == N_COLUMNS
    assert CompletionProblem(ratings, RANK, orientation="rows").manifold.n == N_ROWS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rank": 0},
            r"rank must be a whole number between 1 and min\(n_rows, n_columns\)=9, got 0",
        ),
        ({"rank": 10}, r"min\(n_rows, n_columns\)=9, got 10"),
        ({"rank": 9}, "rank must be less than the 9 rows of the subspace, got 9"),
        ({"ridge": -1.0}, r"ridge must be a finite number ≥ 0, got -1\.0"),
        ({"ridge": float("nan")}, "ridge must be a finite number ≥ 0, got nan"),
        ({"ridge_weighting": "row"}, "ridge_weighting must be 'column' or 'count', got 'row'"),
        ({"orientation": "users"}, "orientation must be 'auto', 'rows' or 'columns', got 'users'"),
        (
            {"held_out": Ratings([0], [0], [1.0])},
            r"held_out must have the shape \(12, 9\) of ratings, got \(1, 1\)",
        ),
    ],
)
def test_bad_options_are_refused(options, message):
    ratings, _ = table()
    with pytest.raises(ValueError, match=message):
        CompletionProblem(ratings, **{"rank": RANK, **options})


def test_unknown_names_are_refused():
    ratings, _ = table()
    problem = CompletionProblem(ratings, RANK)
    with pytest.raises(ValueError, match=r"kind must be one of \['row-block'.*got 'dense'"):
        problem.fisher(frame_of(problem), kind="dense")
    with pytest.raises(ValueError, match="table must be 'persistent' or 'batch', got 'old'"):
        CompletionProblem(ratings, RANK, table="old").snapshot(frame_of(problem))


@pytest.mark.parametrize("kind", [None, "kronecker"])
@pytest.mark.parametrize("rule", ["persistent", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_epochs_make_the_steps_one_by_one(kind, rule, dtype):
    rng = np.random.default_rng(5)
    seen = np.nonzero(rng.random((30, N_COLUMNS)) < 0.8)
    ratings = Ratings(*seen, rng.standard_normal(len(seen[0])), shape=(30, N_COLUMNS), dtype=dtype)
    problem = CompletionProblem(ratings, RANK, orientation="rows", table=rule)
    x = frame_of(problem).to(dtype)
    steps = [torch.tensor([i]) for i in (1, 3, 1, 8)]
    slow = super(type(problem.snapshot(x)), problem.snapshot(x)).epoch(
        x, steps, step=0.2, kind=kind, damping=1e-3
    )
    fused = problem.snapshot(x).epoch(x, steps, step=0.2, kind=kind, damping=1e-3)
    torch.testing.assert_close(fused, slow, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


def test_a_fused_epoch_solves_columns_with_too_few_ratings_from_their_rows():
    rng = np.random.default_rng(0)
    mask = rng.random((10, 6)) < 0.9
    mask[:, 2] = False
    mask[[1, 4], 2] = True
    seen = np.nonzero(mask)
    ratings = Ratings(*seen, rng.standard_normal(len(seen[0])), shape=(10, 6))
    problem = CompletionProblem(ratings, RANK, orientation="rows")
    x = frame_of(problem)
    steps = [torch.tensor([2]), torch.tensor([0]), torch.tensor([2])]
    slow = super(type(problem.snapshot(x)), problem.snapshot(x)).epoch(
        x, steps, step=0.1, kind="kronecker"
    )
    fused = problem.snapshot(x).epoch(x, steps, step=0.1, kind="kronecker")
    torch.testing.assert_close(fused, slow, rtol=0, atol=1e-11)


def test_fused_descent_makes_the_steps_one_by_one():
    ratings, _ = table(density=0.8, rows=30)
    problem = CompletionProblem(ratings, RANK, orientation="rows")
    x = frame_of(problem)
    steps = [torch.tensor([k]) for k in (3, 1, 3)]
    slow = super(CompletionProblem, problem).descend(x, steps, step=lambda k: 0.3 / (1 + k))
    fused = problem.descend(x, steps, step=lambda k: 0.3 / (1 + k))
    torch.testing.assert_close(fused, slow, rtol=0, atol=1e-12)


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_a_step_that_is_far_too_long_gives_a_point_that_is_not_finite(share):
    """The solver takes it back and goes on with a smaller one, in crowded and in sparse tables."""
    problem = CompletionProblem(table(density=share, rows=40)[0], RANK, orientation="rows")
    x = frame_of(problem)
    assert not bool(
        torch.isfinite(problem.snapshot(x).epoch(x, [torch.tensor([2])] * 3, step=1e300)).all()
    )
    result = minimize(problem, x, "rsvrg", step=1e300, batch_size=1, max_iter=3)
    assert bool(torch.isfinite(result.x).all())


def test_the_rounding_of_a_loss_is_that_of_the_values():
    """Without noise the loss falls to the rounding of Σ x²/2N, far below which nothing it says can be trusted."""
    rng = np.random.default_rng(0)
    truth = 100 * rng.normal(size=(N_ROWS, RANK)) @ rng.normal(size=(RANK, N_COLUMNS))
    problem = CompletionProblem(
        Ratings(*np.nonzero(truth), truth.ravel(), truth.shape), RANK, orientation="rows"
    )
    x, _ = torch.linalg.qr(torch.from_numpy(truth[:, :RANK]))
    loss = float(problem.loss(x))
    assert loss < problem.loss_rounding(x, loss) < 1e-10 * float((truth**2).sum())
    assert problem.loss_rounding(x, 1e9) > problem.loss_rounding(x, loss)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.tensor([], dtype=torch.int64), "batch must hold at least one sample, got none"),
        (torch.tensor([0, -1]), r"batch must lie in 0..11, got -1..0"),
        (torch.tensor([12]), r"batch must lie in 0..11, got 12..12"),
        (torch.tensor([0.5]), "batch must be a vector of int64 or int32 indices"),
    ],
)
def test_batches_that_are_no_column_numbers_are_refused(batch, message):
    problem = CompletionProblem(table()[0], np.int64(RANK))
    for ask in (problem.loss, problem.gradient, problem.fisher):
        with pytest.raises(ValueError, match=message):
            ask(frame_of(problem), batch)


def test_trust_regions_take_the_hessian():
    """Newton's method with the coefficients eliminated: a gradient at rounding after a few steps."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(40, RANK)) @ rng.normal(size=(RANK, 30)) + 0.3 * rng.normal(
        size=(40, 30)
    )
    seen = np.nonzero(rng.random(truth.shape) < 0.6)
    problem = CompletionProblem(
        Ratings(*seen, truth[seen], truth.shape), RANK, ridge=0.1, orientation="rows"
    )
    result = minimize(problem, problem.spectral_start(), "trust-region", max_iter=25)
    assert result.status == "converged"
    assert float(problem.gradient(result.x).norm()) < 1e-7
