"""The two-sided ridge: exact half-steps, the objective they report, and what it is on the Grassmann manifold."""

import numpy as np
import pytest
import torch

from fisherfold.completion.inference.packed import pack, solve_positive
from fisherfold.completion.point.als import Factors, Penalty, TwoSided, additive_model, grow, residual_product
from fisherfold.completion.ratings import Ratings

N, M, RANK = 9, 7, 2


def problem(power=0.5, seed=0):
    rng = np.random.default_rng(seed)
    seen = np.nonzero(rng.random((N, M)) < 0.7)
    values = rng.standard_normal(len(seen[0]))
    ratings = Ratings(*seen, values, shape=(N, M))
    return TwoSided(ratings, Penalty(0.4, 0.3, power)), torch.from_numpy(np.stack(seen)), torch.from_numpy(values)


def point(seed=0, rows=True, columns=True):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    beta = draw(N) if rows else torch.zeros(N, dtype=torch.float64)
    gamma = draw(M) if columns else torch.zeros(M, dtype=torch.float64)
    return Factors(0.3, draw(N, RANK), draw(M, RANK), beta, gamma, rows, columns)


def objective(two_sided, at, pairs, values):
    """The formula of the module, term by term."""
    p, w, v = two_sided.penalty, two_sided.row_weights, two_sided.column_weights
    fit = (
        at.mean
        + at.row_offset[pairs[0]]
        + at.column_offset[pairs[1]]
        + (at.rows[pairs[0]] * at.columns[pairs[1]]).sum(1)
    )
    rows = (w * (p.ridge * at.rows.square().sum(1) + p.offset_ridge * at.row_offset**2)).sum()
    columns = (v * (p.ridge * at.columns.square().sum(1) + p.offset_ridge * at.column_offset**2)).sum()
    return ((values - fit).square().sum() + rows + columns) / 2 / len(values)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True), (False, False)])
def test_half_steps_minimise_and_report_the_objective(power, rows, columns):
    two_sided, pairs, values = problem(power)
    at = point(rows=rows, columns=columns)
    for step, names in (
        (two_sided.column_step, ("columns", "column_offset")),
        (two_sided.row_step, ("rows", "row_offset")),
    ):
        new, reported = step(at)
        torch.testing.assert_close(reported, float(objective(two_sided, new, pairs, values)), rtol=1e-11, atol=0)
        free = [getattr(new, name).clone().requires_grad_() for name in names]
        value = objective(
            two_sided, new.__class__(**{**vars(new), **dict(zip(names, free, strict=True))}), pairs, values
        )
        gradients = torch.autograd.grad(value, free)
        assert float(gradients[0].abs().max()) < 1e-12
        if getattr(new, f"with_{names[1]}"):
            assert float(gradients[1].abs().max()) < 1e-12
        else:
            assert float(getattr(new, names[1]).abs().max()) == 0


def test_balance_keeps_the_model_and_reaches_the_nuclear_norm():
    """Without weights the least penalty of a product is twice its nuclear norm, halved by the ½ in front."""
    two_sided, pairs, values = problem(power=0.0)
    at = point()
    new = two_sided.balance(at)
    torch.testing.assert_close(new.rows @ new.columns.T, at.rows @ at.columns.T, rtol=0, atol=1e-12)
    penalty = (new.rows.square().sum() + new.columns.square().sum()) / 2
    torch.testing.assert_close(penalty, torch.linalg.matrix_norm(at.rows @ at.columns.T, "nuc"), rtol=1e-12, atol=0)
    assert objective(two_sided, new, pairs, values) < objective(two_sided, at, pairs, values)


def test_weighted_balance_makes_both_moments_equal_and_diagonal():
    two_sided, _, _ = problem(power=0.5)
    new = two_sided.balance(point())
    left = new.rows.T @ (two_sided.row_weights[:, None] * new.rows)
    right = new.columns.T @ (two_sided.column_weights[:, None] * new.columns)
    torch.testing.assert_close(left, right, rtol=0, atol=1e-11)
    torch.testing.assert_close(left, torch.diag(left.diagonal()), rtol=0, atol=1e-11)
    assert left[0, 0] >= left[1, 1]


def test_a_row_step_is_the_damped_row_block_natural_gradient_step():
    """u_j ← u_j - (Σ a aᵀ + λ w_j S)⁻¹ (gradient of row j with the term λ w_j S u_j of the frame's own length)."""
    two_sided, pairs, values = problem()
    at = point(rows=False, columns=False)
    frame, turn = torch.linalg.qr(at.rows)
    a, prior = at.columns @ turn.T, turn @ turn.T
    new, _ = two_sided.row_step(at)
    for j in range(N):
        mine = pairs[0] == j
        rows = a[pairs[1][mine]]
        block = rows.T @ rows + two_sided.penalty.ridge * two_sided.row_weights[j] * prior
        gradient = block @ frame[j] - rows.T @ (values[mine] - at.mean)
        stepped = frame[j] - torch.linalg.solve(block, gradient)
        torch.testing.assert_close(turn.T @ stepped, new.rows[j], rtol=0, atol=1e-11)


def test_residual_products_and_growth():
    two_sided, pairs, values = problem()
    at, ratings = point(), two_sided.ratings
    residual = torch.zeros(N, M, dtype=torch.float64)
    residual[pairs[0], pairs[1]] = values - at.predict(pairs[0], pairs[1])
    table = torch.randn(M, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(residual_product(ratings, at, table), residual @ table, rtol=0, atol=1e-12)
    grown = grow(ratings, at, RANK + 1, torch.Generator().manual_seed(0), sweeps=60)
    left, singular, right = torch.linalg.svd(residual)
    added = torch.outer(grown.rows[:, -1], grown.columns[:, -1])
    torch.testing.assert_close(added, singular[0] * torch.outer(left[:, 0], right[0]), rtol=0, atol=1e-6)
    assert grow(ratings, at, RANK, torch.Generator()) is at


def test_the_additive_model_explains_additive_data():
    rows, columns = torch.arange(N * M) // M, torch.arange(N * M) % M
    values = 3.0 + rows.double() - 0.5 * columns
    model = additive_model(Ratings(rows, columns, values), Penalty(1.0, 1e-9), rows=True, columns=True, mean=True)
    torch.testing.assert_close(model.predict(rows, columns), values, rtol=0, atol=1e-6)
    only = additive_model(Ratings(rows, columns, values), Penalty(1.0, 1e-9), rows=False, columns=False, mean=True)
    torch.testing.assert_close(only.predict(rows, columns), values.mean().expand(N * M), rtol=1e-12, atol=0)


def test_many_systems_are_solved_in_runs():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40_000, 5, 3, generator=generator, dtype=torch.float64)
    square, rhs = rows.mT @ rows, torch.randn(40_000, 3, generator=generator, dtype=torch.float64)
    for diagonal in (torch.full((1, 1), 0.5, dtype=torch.float64), torch.rand(40_000, 1, dtype=torch.float64)):
        x, share = solve_positive(pack(square), rhs, diagonal)
        lifted = square + torch.diag_embed(diagonal.expand(40_000, 3))
        torch.testing.assert_close((lifted @ x.unsqueeze(-1)).squeeze(-1), rhs, rtol=1e-7, atol=1e-7)
        assert share.shape == (40_000,)
