"""``MatrixCompletion(inference="point")``: the optimum, the choice of λ, the paper's solvers, hostile input."""

import itertools

import numpy as np
import pytest
import torch

from fisherfold import MatrixCompletion, minimize
from fisherfold.completion import CompletionProblem, Ratings
from fisherfold.completion.inference.start import start_posterior
from fisherfold.completion.point.fit import (
    OPTIONS,
    _balance,
    _penalise,
    fit_point,
    held_out_entries,
    sweep,
)
from fisherfold.completion.training import SOLVERS
from fisherfold.solvers import GradientNorm

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(40, 2)) @ RNG.normal(size=(2, 25))
SEEN = RNG.random(TABLE.shape) < 0.6
PAIRS, VALUES = np.argwhere(SEEN), TABLE[SEEN]
HELD = np.argwhere(~SEEN)
each_solver = pytest.mark.parametrize("solver", SOLVERS)


def low_rank(seed=0, n=120, m=80, rank=3, noise=0.5, density=0.4, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((n, rank)) @ rng.standard_normal((rank, m))
    matrix += rng.standard_normal((n, 1)) + rng.standard_normal(m)
    seen = np.nonzero(rng.random((n, m)) < density)
    values = matrix[seen] + noise * rng.standard_normal(len(seen[0]))
    return Ratings(*seen, values, shape=(n, m), dtype=dtype), torch.from_numpy(matrix)


def predict_all(posterior):
    rows, columns = posterior.rows.mean, posterior.columns.mean
    return rows[:, :-1] @ columns[:, :-1].T + rows[:, -1:] + columns[:, -1]


def rmse(found, matrix):
    return float((predict_all(found) - matrix).square().mean().sqrt())


@pytest.fixture
def swept(request):
    """Ratings, and a point after two sweeps with a given penalty."""
    ratings, _ = low_rank(n=12, m=9, density=0.6)
    offsets = dict(
        zip(("row_offsets", "column_offsets"), getattr(request, "param", (True, True)), strict=True)
    )
    posterior = start_posterior(ratings, 2, weight_strength=0.0, **offsets)
    _penalise(posterior, ratings, 0.4, 1.0)
    return ratings, posterior, [sweep(posterior, ratings) for _ in range(2)][-1]


@pytest.mark.parametrize("swept", list(itertools.product((True, False), repeat=2)), indirect=True)
def test_a_sweep_ends_at_the_minimum_in_the_columns_and_reports_the_objective(swept):
    ratings, posterior, reported = swept
    rows, columns, values = ratings.entries()
    free = posterior.columns.mean.clone().requires_grad_()
    lengths = sum(
        ((mean**2 @ side.precision.diagonal()) * (side.counts / side.counts.mean()).sqrt()).sum()
        for mean, side in ((posterior.rows.mean, posterior.rows), (free, posterior.columns))
    )
    u, v = posterior.rows.mean[rows], free[columns]
    fitted = (u[:, :-1] * v[:, :-1]).sum(1) + u[:, -1] + v[:, -1]
    objective = ((values - fitted).square().sum() + lengths) / (2 * len(values))
    assert reported == pytest.approx(float(objective.detach()), rel=1e-10)
    (gradient,) = torch.autograd.grad(objective, free)
    assert float(gradient[:, :-1].abs().max()) < 1e-10
    if posterior.columns.has_offset:
        assert float(gradient[:, -1].abs().max()) < 1e-10
    else:
        assert not bool(free[:, -1].any())


def test_balance_keeps_the_model_and_reaches_the_weighted_nuclear_norm(swept):
    ratings, posterior, _ = swept
    before = predict_all(posterior)
    _balance(posterior, ratings)
    torch.testing.assert_close(predict_all(posterior), before, rtol=0, atol=1e-12)
    left, right = (
        s.mean[:, :-1] / s.weight.sqrt()[:, None] for s in (posterior.rows, posterior.columns)
    )
    torch.testing.assert_close(left.T @ left, right.T @ right, rtol=0, atol=1e-11)
    torch.testing.assert_close(
        (left**2).sum(), torch.linalg.matrix_norm(left @ right.T, "nuc"), rtol=1e-11, atol=0
    )


@pytest.mark.parametrize(
    ("noise", "density", "rank", "expected"),
    [(1.0, 0.3, 6, 1.0), (0.0, 0.4, 3, 1e-3), (0.05, 0.4, 3, 0.06)],
)
def test_the_ridge_found_on_validation_is_the_best_of_its_path(noise, density, rank, expected):
    """With little noise it goes below its path, which begins at twice the variance that offsets leave."""
    ratings, matrix = low_rank(noise=noise, density=density)
    found = fit_point(ratings, rank)
    ridge = found.fixed_ridge
    searched = [row for row in found.trace if "validation_rmse" in row]
    best = min(searched, key=lambda row: row["validation_rmse"])["ridge"]
    assert ridge == pytest.approx(best, rel=0.25)
    assert rmse(found, matrix) < expected * float(matrix.std())
    if noise == 1.0:
        assert rmse(found, matrix) < min(
            rmse(fit_point(ratings, rank, ridge=r), matrix) for r in (0.05, 100.0)
        )


def test_the_held_out_part_is_the_same_whoever_holds_the_entries():
    ratings, _ = low_rank()
    held = held_out_entries(ratings, 0.1, 5)
    assert 0.07 < float(held.double().mean()) < 0.13
    assert not torch.equal(held, held_out_entries(ratings, 0.1, 6))
    rows, columns, values = ratings.entries()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    again = held_out_entries(ratings.like(rows[order], columns[order], values[order]), 0.1, 5)
    assert torch.equal(held, again)
    assert held_out_entries(Ratings([0], [0], [1.0]), 0.1, 0) is None


def test_fold_in_with_the_prior_returns_the_fitted_column():
    """The optimum over one column, given everything else, is a small ridge problem with the precision of the prior."""
    ratings, _ = low_rank()
    posterior = fit_point(ratings, 3, ridge=1.0, max_iter=5, tol=0.0)
    side, tau = ratings.by_column, posterior.noise_precision
    rows_of_model, columns_of_model = posterior.rows.mean, posterior.columns.mean
    mean_count = ratings.n_ratings / ratings.n_columns
    for i in (0, 11):
        part = slice(int(side.offsets[i]), int(side.offsets[i + 1]))
        rows, values = side.indices()[part].long(), side.values()[part]
        design = torch.cat(
            [rows_of_model[rows, :-1], torch.ones(len(rows), 1, dtype=torch.float64)], dim=1
        )
        target = values - rows_of_model[rows, -1]
        system = (
            tau * design.T @ design + (len(rows) / mean_count) ** 0.5 * posterior.columns.precision
        )
        expected = torch.linalg.solve(system, tau * design.T @ target)
        torch.testing.assert_close(columns_of_model[i], expected, rtol=0, atol=1e-9)


def test_the_objective_falls_and_the_fit_converges():
    posterior = fit_point(low_rank()[0], 3, ridge=1.0, max_iter=200, tol=1e-9)
    objective = [row["objective"] for row in posterior.trace]
    assert all(b <= a for a, b in itertools.pairwise(objective))
    assert posterior.converged
    assert not fit_point(low_rank()[0], 3, ridge=1.0, max_iter=2, tol=1e-9).converged


@pytest.mark.parametrize("solver", ["auto", "rngd"])
@pytest.mark.parametrize("offsets", ["both", "rows", "columns", "global", "none"])
def test_offsets_are_fitted_as_asked(offsets, solver):
    model = MatrixCompletion(2, inference="point", solver=solver, offsets=offsets, max_iter=3).fit(
        PAIRS, 1 + VALUES
    )
    assert bool(model.row_offsets_.any()) == (offsets in {"both", "rows"})
    assert bool(model.column_offsets_.any()) == (offsets in {"both", "columns"})
    assert (model.offset_ != 0) == (offsets != "none")


@pytest.mark.parametrize(
    "entries",
    [([0], [0], [2.5]), ([0, 1, 1], [0, 0, 1], [4.0, 4.0, 4.0]), ([0, 3], [5, 5], [1.0, 2.0])],
    ids=["one rating", "constant", "empty rows and columns"],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ridge", [None, 0.0])
def test_degenerate_tables_give_finite_models(entries, dtype, ridge):
    rows, columns, values = entries
    pairs = np.column_stack([rows, columns])
    predicted = (
        MatrixCompletion(1, inference="point", dtype=dtype, ridge=ridge)
        .fit(pairs, values)
        .predict(pairs)
    )
    assert np.isfinite(predicted).all()
    if len(set(values)) == 1:
        np.testing.assert_allclose(predicted, values, rtol=1e-5)


def estimator(**options):
    known = {
        "rank": 2,
        "inference": "point",
        "dtype": "float64",
        "offsets": "none",
        "max_iter": 200,
        "tol": 0.0,
    }
    return MatrixCompletion(**known | options)


@each_solver
def test_every_solver_recovers_a_matrix_without_noise(solver):
    predicted = estimator(solver=solver, clip=False, max_iter=80).fit(PAIRS, VALUES).predict(HELD)
    assert np.sqrt(np.mean((predicted - TABLE[~SEEN]) ** 2)) < 1e-3 * TABLE.std()


@each_solver
def test_the_estimator_solves_the_problem_of_minimize(solver):
    """Coefficients are eliminated at the subspace that ``minimize`` ends at, whose loss the trace ends with."""
    noisy = VALUES + 0.3 * np.random.default_rng(1).normal(size=len(VALUES))
    model = estimator(solver=solver, ridge=0.01, max_iter=10, clip=False).fit(PAIRS, noisy)
    scale = np.sqrt(np.mean(noisy**2))
    problem = CompletionProblem(
        Ratings(*PAIRS.T, noisy / scale, TABLE.shape, dtype=torch.float64), 2, ridge=0.01
    )
    x0 = problem.manifold.random_point(
        generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    found = minimize(
        problem, x0, solver, max_iter=10, stop=GradientNorm(1e-10), **OPTIONS.get(solver, {})
    )
    a = problem.fit(found.x).coefficients
    matrix = (a @ found.x.mT if problem.transposed else found.x @ a.mT).numpy() * scale
    np.testing.assert_allclose(model.predict(HELD), matrix[~SEEN], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(min(row["loss"] for row in model.trace_), found.value, rtol=1e-8)


@pytest.mark.parametrize("solver", ["auto", *SOLVERS])
def test_files_folds_and_new_ids(solver, tmp_path):
    model = estimator(solver=solver, dtype="float32", max_iter=5).fit(PAIRS, VALUES)
    model.save(tmp_path / "model")
    again = MatrixCompletion.load(tmp_path / "model")
    assert again.get_params()["solver"] == solver
    assert np.array_equal(again.predict(HELD), model.predict(HELD))
    assert np.isfinite(again.predict_new([3], [1.0], [0, 1])).all()
    assert np.isfinite(
        again.partial_fit([(50, 3), (50, 4), (0, 50)], [1.0, 2.0, 1.0]).predict(HELD)
    ).all()


@pytest.mark.parametrize("solver", ["auto", "rngd"])
def test_a_new_row_is_folded_into_the_subspace(solver):
    """A new row with many values of the model's own subspace is completed as the subspace says."""
    model = estimator(solver=solver, clip=False).fit(PAIRS, VALUES)
    row = TABLE[0] + TABLE[1]
    found = model.predict_new(np.arange(20), row[:20], np.arange(20, 25))
    np.testing.assert_allclose(found, row[20:], atol=0.02 * np.abs(row).max())
