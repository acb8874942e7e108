"""The subspace problem against dense references: automatic differentiation through the solve for w."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fisherfold import minimize
from fisherfold.problems.base import Problem, Snapshot
from fisherfold.solvers import GradientNorm
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.tasks import TaskStatistics
from toy import task_rows

SIZES = (9, 4, 12, 7, 5)
KINDS = ("exact", "observed")


def make(rank: int = 2, ridge: float = 0.3, seed: int = 0, **options):
    X, y, task = task_rows(SIZES, 6, seed)
    problem = SubspaceProblem(
        TaskStatistics.from_rows(X, y, task), rank=rank, ridge=ridge, **options
    )
    U = problem.manifold.random_point(generator=torch.Generator().manual_seed(seed + 100))
    return problem, U, (X, y, task)


def residuals(U, rows, ridge, tasks):
    """X_t U w_t(U) - y_t and w_t(U) for each task, differentiable."""
    X, y, task = rows
    out = []
    for t in tasks:
        Xt, yt = X[task == t], y[task == t]
        Z = Xt @ U
        w = torch.linalg.solve(Z.T @ Z + ridge * torch.eye(U.shape[1], dtype=U.dtype), Z.T @ yt)
        out.append((Z @ w - yt, w))
    return out


def dense_loss(U, problem, rows, tasks):
    pairs = residuals(U, rows, problem.ridge, tasks)
    return torch.stack([(r @ r + problem.ridge * (w @ w)) / 2 for r, w in pairs]).mean()


RIDGES = [0.0, 0.3]


@pytest.mark.parametrize("ridge", RIDGES)
@pytest.mark.parametrize("batch", [None, [3, 1]])
def test_loss_and_exact_gradient_match_autodiff_through_the_solve(ridge, batch):
    problem, U, rows = make(ridge=ridge)
    tasks = list(range(5)) if batch is None else batch
    index = None if batch is None else torch.tensor(batch)
    expected = torch.func.grad(dense_loss)(U, problem, rows, tasks)
    loss, gradient = problem.loss_and_gradient(U, index)
    torch.testing.assert_close(loss, dense_loss(U, problem, rows, tasks), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradient, problem.manifold.project(U, expected), rtol=1e-10, atol=1e-11
    )
    torch.testing.assert_close(problem.gradient(U.clone(), index), gradient, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(problem.loss(U.clone(), index), loss, rtol=1e-13, atol=0)


def test_the_papers_objective_differs_by_the_penalty_and_has_the_gradient_of_the_penalised_one():
    (residual, U, _), (penalised, _, _) = make(objective="residual"), make()
    w = penalised.coefficients(U)
    torch.testing.assert_close(penalised.loss(U) - residual.loss(U), 0.15 * (w * w).sum(1).mean())
    torch.testing.assert_close(residual.gradient(U), penalised.gradient(U), rtol=0, atol=0)


def dense_fisher(U, problem, rows, tasks):
    """(1/|B|) Σ JᵀJ with J the derivative of X_t U w_t(U), and of √λ w_t(U), projected on both sides."""
    n, p = U.shape
    projector = torch.kron(torch.eye(n, dtype=U.dtype) - U @ U.T, torch.eye(p, dtype=U.dtype))
    total = torch.zeros(n * p, n * p, dtype=U.dtype)
    for i in range(len(tasks)):
        jacobian = torch.func.jacrev(lambda V, i=i: residuals(V, rows, problem.ridge, tasks)[i][0])(
            U
        )
        jacobian = jacobian.reshape(-1, n * p)
        total += jacobian.T @ jacobian / len(tasks)
        change = torch.func.jacrev(lambda V, i=i: residuals(V, rows, problem.ridge, tasks)[i][1])(U)
        change = change.reshape(-1, n * p)
        total += problem.ridge * change.T @ change / len(tasks)
    return projector @ total @ projector


@pytest.mark.parametrize("ridge", RIDGES)
@pytest.mark.parametrize("batch", [None, [3, 1, 2]])
def test_exact_fisher_matches_the_dense_jacobian(ridge, batch):
    problem, U, rows = make(ridge=ridge)
    tasks = list(range(5)) if batch is None else batch
    operator = problem.fisher(U, None if batch is None else torch.tensor(batch), kind="exact")
    torch.testing.assert_close(
        operator.dense(), dense_fisher(U, problem, rows, tasks), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("ridge", RIDGES)
@pytest.mark.parametrize("batch", [None, [3, 1, 2]])
def test_observed_information_is_the_hessian(ridge, batch):
    """P E[H] - H Uᵀ∇ with E the second derivative through the solve for w, ∇ the first."""
    problem, U, rows = make(ridge=ridge)
    tasks = list(range(5)) if batch is None else batch
    slope = torch.func.grad(dense_loss)(U, problem, rows, tasks)
    second = torch.func.jacrev(torch.func.grad(dense_loss))(U, problem, rows, tasks)
    operator = problem.fisher(U, None if batch is None else torch.tensor(batch), kind="observed")
    for seed in range(3):
        v = problem.manifold.random_tangent(U, generator=torch.Generator().manual_seed(seed))
        expected = torch.einsum("ijkl,kl->ij", second, v) - v @ (U.T @ slope)
        torch.testing.assert_close(
            operator @ v, problem.manifold.project(U, expected), rtol=1e-9, atol=1e-10
        )


def test_the_hessian_converges_quadratically_where_noise_stays():
    """After a few steps with the Fisher information, three with the Hessian take the gradient to rounding."""
    problem, U, _ = make()
    near = minimize(problem, U, "rcg", max_iter=500, stop=GradientNorm(1e-4))
    ends = {
        kind: minimize(problem, near.x, fisher=kind, max_iter=4, stop=GradientNorm(0.0))
        for kind in KINDS
    }
    assert min(ends["observed"].trace["gradient_norm"]) < 1e-12
    assert min(ends["exact"].trace["gradient_norm"]) > 1e-9


@pytest.mark.parametrize("kind", ["exact", "kronecker"])
def test_solve_on_the_tangent_space_matches_the_dense_solve(kind):
    problem, U, _ = make(factor_damping=0.1)
    g = problem.gradient(U)
    operator = problem.fisher(U, kind=kind)
    dense = operator.dense() + 0.7 * torch.eye(g.numel(), dtype=g.dtype)
    expected = torch.linalg.solve(dense, g.reshape(-1)).reshape(g.shape)
    found = operator.solve(g, 0.7, **({"rtol": 1e-13} if kind == "exact" else {}))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_kronecker_is_the_papers_formula_on_the_complement():
    problem, U, _ = make(factor_damping=0.25)
    A, w = problem.statistics.gram.mean(0), problem.coefficients(U)
    v = problem.manifold.random_tangent(U, generator=torch.Generator().manual_seed(5))
    P = torch.eye(6, dtype=U.dtype) - U @ U.T
    expected = P @ (A + 0.25 * torch.eye(6, dtype=U.dtype)) @ v @ (w.T @ w / 5)
    torch.testing.assert_close(
        problem.fisher(U, kind="kronecker") @ v, expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("kind", ["exact", "kronecker"])
def test_variance_reduced_estimates_are_unbiased_and_exact_at_the_anchor(kind):
    problem, U, _ = make()
    snapshot = problem.snapshot(U)
    v = problem.manifold.random_tangent(U, generator=torch.Generator().manual_seed(3))
    x = problem.manifold.retract(U, 0.2 * v)
    singles = [snapshot.gradient(x, torch.tensor([t])) for t in range(5)]
    torch.testing.assert_close(
        torch.stack(singles).mean(0), problem.gradient(x), rtol=1e-10, atol=1e-12
    )
    at_anchor = snapshot.gradient(U, torch.tensor([2]))
    torch.testing.assert_close(at_anchor, problem.gradient(U), rtol=1e-10, atol=1e-12)
    everything = snapshot.fisher(x, torch.arange(5), kind=kind)
    g = problem.manifold.random_tangent(x, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(
        everything @ g, problem.fisher(x, kind=kind) @ g, rtol=1e-10, atol=1e-11
    )


def test_kronecker_of_a_snapshot_swaps_only_the_batch():
    problem, U, _ = make()
    snapshot = problem.snapshot(U)
    x = problem.manifold.random_point(generator=torch.Generator().manual_seed(8))
    w0, w = problem.coefficients(U), problem.coefficients(x)
    mixed = w0.clone()
    mixed[3] = w[3]
    operator = snapshot.fisher(x, torch.tensor([3]), kind="kronecker")
    torch.testing.assert_close(operator.right, mixed.T @ mixed / 5, rtol=1e-11, atol=1e-12)


ORDER = [torch.tensor([t]) for t in (2, 4, 0, 2, 1)]


@pytest.mark.parametrize("kind", [None, "kronecker"])
def test_fused_epoch_takes_the_steps_of_the_operators(kind):
    problem, U, _ = make(factor_damping=0.05)
    snapshot = problem.snapshot(U)
    x = U
    for batch in ORDER:
        # plain projection instead of the aligned transport, as the fused form does
        anchor = problem.manifold.project(
            U, problem.ambient_gradient(snapshot.state.select(batch), batch)
        )
        d = problem.gradient(x, batch) + problem.manifold.project(
            x, snapshot.full_gradient - anchor
        )
        if kind is not None:
            d = snapshot.fisher(x, batch, kind=kind).solve(d, 0.0)
        x = problem.manifold.retract(x, -0.03 * d, method="polar")
    found = snapshot.epoch(U, ORDER, step=0.03, kind=kind)
    torch.testing.assert_close(found, x, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"kind": "exact", "damping": 0.3}, ORDER),
        ({"kind": "kronecker", "damping": 0.3}, ORDER),
        ({"kind": "kronecker"}, [torch.tensor([0, 3]), torch.tensor([1, 2])]),
    ],
)
def test_an_epoch_without_fused_form_makes_the_generic_steps(options, batches):
    problem, U, _ = make(factor_damping=0.05)
    snapshot = problem.snapshot(U)
    generic = Snapshot.epoch(snapshot, U, batches, step=0.1, **options)
    torch.testing.assert_close(
        snapshot.epoch(U, batches, step=0.1, **options), generic, rtol=0, atol=0
    )


def test_fused_descent_takes_the_generic_steps():
    problem, U, _ = make()
    generic = Problem.descend(problem, U, ORDER, step=lambda k: 0.02 / (1 + k))
    found = problem.descend(U, ORDER, step=lambda k: 0.02 / (1 + k))
    torch.testing.assert_close(found, generic, rtol=1e-10, atol=1e-11)
    assert float(problem.manifold.dist(U, found)) > 1e-3


def test_fused_and_generic_epochs_agree_to_second_order_in_the_step():
    problem, U, _ = make(factor_damping=0.05)
    snapshot = problem.snapshot(U)

    def gap(step):
        fused = snapshot.epoch(U, ORDER, step=step, kind="kronecker")
        generic = Snapshot.epoch(snapshot, U, ORDER, step=step, kind="kronecker")
        return float(problem.manifold.dist(fused, generic))

    assert gap(1e-2) < 1e-3
    assert gap(5e-3) < 0.3 * gap(1e-2)


def test_a_task_with_fewer_rows_than_the_rank_gets_the_shortest_coefficients():
    X, y, task = task_rows((1, 8), 6)
    problem = SubspaceProblem(TaskStatistics.from_rows(X, y, task), rank=3)
    U = problem.manifold.random_point(generator=torch.Generator().manual_seed(1))
    expected = torch.linalg.lstsq(X[:1] @ U, y[:1], driver="gelsd").solution
    torch.testing.assert_close(problem.coefficients(U)[0], expected, rtol=1e-8, atol=1e-10)
    assert float(problem.state(U).losses[0]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("ridge", [0.0, 1e-25])
@pytest.mark.parametrize("unit", [1e-4, 1.0, 1e4])
def test_no_rounding_of_singular_systems_reaches_coefficients_or_losses(unit, ridge):
    # one distinct row per task: UᵀA_tU has rank 1, and its other eigenvalues are what rounding leaves of A_t
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        rows, y = (torch.randn(4, k, generator=g, dtype=torch.float64) for k in (5, 1))
        rows, task = unit * rows, torch.arange(4).repeat(2)
        statistics = TaskStatistics.from_rows(rows.repeat(2, 1), y.repeat(2, 1).squeeze(1), task)
        problem = SubspaceProblem(statistics, rank=2, ridge=ridge)
        U = problem.manifold.random_point(generator=g)
        Z = rows @ U
        state, expected = problem.state(U), y * Z / (Z * Z).sum(1, keepdim=True)
        torch.testing.assert_close(state.weights, expected, rtol=1e-10, atol=0)
        assert 0 <= float(state.losses.min()) <= float(state.losses.max()) < 1e-12
        fused = np.stack([problem._task_gradient(U.numpy(), t)[1] for t in range(4)])
        torch.testing.assert_close(torch.from_numpy(fused), expected, rtol=1e-10, atol=0)


def test_the_kept_state_notices_a_change_in_place():
    problem, U, _ = make()
    before = float(problem.loss(U))
    U.copy_(problem.manifold.random_point(generator=torch.Generator().manual_seed(9)))
    assert float(problem.loss(U)) == pytest.approx(float(problem.loss(U.clone())), rel=1e-14)
    assert float(problem.loss(U)) != before


def test_metrics_are_the_plain_errors():
    X, y, task = task_rows(SIZES, 6, 1)
    X2, y2, task2 = task_rows(SIZES, 6, 2)
    held_out = TaskStatistics.from_rows(X2, y2, task2)
    problem = SubspaceProblem(
        TaskStatistics.from_rows(X, y, task), rank=2, ridge=0.3, held_out=held_out
    )
    U = problem.manifold.random_point(generator=torch.Generator().manual_seed(1))
    w = problem.coefficients(U)
    refit = SubspaceProblem(held_out, rank=2, ridge=0.3).coefficients(U)

    def nmse(X, y, w):
        ratios = [
            ((X @ U @ w[t] - y)[task == t] ** 2).mean() / y[task == t].var() for t in range(5)
        ]
        return float(torch.stack(ratios).mean())

    expected = {
        "train_nmse": nmse(X, y, w),
        "held_out_nmse": nmse(X2, y2, w),
        "refit_nmse": nmse(X2, y2, refit),
    }
    assert problem.metrics(U) == pytest.approx(expected, rel=1e-11)


def test_errors_name_the_argument():
    X, y, task = task_rows(SIZES, 6)
    statistics = TaskStatistics.from_rows(X, y, task)
    with pytest.raises(
        ValueError,
        match=r"rank must be between 1 and the number of features minus one \(5\), got 6",
    ):
        SubspaceProblem(statistics, rank=6)
    with pytest.raises(ValueError, match=r"ridge must be finite and not negative, got -1.0"):
        SubspaceProblem(statistics, rank=2, ridge=-1.0)
    with pytest.raises(ValueError, match="objective must be one of"):
        SubspaceProblem(statistics, rank=2, objective="loss")
    with pytest.raises(
        ValueError, match=r"factor_damping must be finite and not negative, got -1\.0"
    ):
        SubspaceProblem(statistics, rank=2, factor_damping=-1.0)
    problem, U, _ = make()
    with pytest.raises(
        ValueError, match=r"kind must be one of \('kronecker', 'exact', 'observed'\), got 'dense'"
    ):
        problem.fisher(U, kind="dense")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("step", [1e-3, 1.0, 1e6, 1e12])
def test_fused_steps_of_any_length_stay_on_the_manifold_and_go_where_plain_ones_do(step):
    problem, U, _ = make()
    snapshot, drawn = problem.snapshot(U), [torch.tensor([1])]
    for fused, plain in (
        (
            problem.descend(U, drawn, step=lambda _: step),
            Problem.descend(problem, U, drawn, step=lambda _: step),
        ),
        (snapshot.epoch(U, drawn, step=step), Snapshot.epoch(snapshot, U, drawn, step=step)),
    ):
        assert problem.manifold.violation(fused) < 1e-14
        # the direction of one task has rank 1: beyond that, the rest of the frame is lost in rounding
        assert step > 1e6 or float(problem.manifold.dist(fused, plain)) < 1e-8
