"""The point estimate: its optimum, its choice of λ, early stopping, and hostile input."""

import itertools
import math

import numpy as np
import pytest
import torch

from fisherfold.completion.point_completion import fit_point
from fisherfold.completion.ratings import Ratings


def low_rank(seed=0, n=120, m=80, rank=3, noise=0.5, density=0.4, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((n, rank)) @ rng.standard_normal((rank, m))
    matrix += 1.0 + rng.standard_normal((n, 1)) + rng.standard_normal(m)
    seen = np.nonzero(rng.random((n, m)) < density)
    values = matrix[seen] + noise * rng.standard_normal(len(seen[0]))
    return Ratings(*seen, values, shape=(n, m), dtype=dtype), torch.from_numpy(matrix)


def predict_all(model):
    return model.U @ model.A.T + model.row_offset[:, None] + model.column_offset + model.global_offset


def rmse(model, matrix):
    return float((predict_all(model) - matrix).square().mean().sqrt())


def test_the_ridge_found_on_validation_beats_both_extremes():
    ratings, matrix = low_rank(noise=1.0, density=0.3)
    auto = fit_point(ratings, 6)
    assert auto.ridge > 0
    assert rmse(auto, matrix) < min(rmse(fit_point(ratings, 6, ridge=r), matrix) for r in (0.05, 100.0))
    searched = [row for row in auto.trace if "validation_rmse" in row]
    best = min(searched, key=lambda row: row["validation_rmse"])["ridge"]
    assert auto.ridge == pytest.approx(best, rel=0.25)


@pytest.mark.parametrize(("noise", "expected"), [(0.0, 1e-3), (0.05, 0.06)])
def test_with_little_noise_the_ridge_goes_below_its_path(noise, expected):
    """The path begins at twice the variance that offsets leave, which is nearly all signal here: an error of 0.25."""
    rng = np.random.default_rng(0)
    matrix = torch.from_numpy(rng.normal(size=(60, 3)) @ rng.normal(size=(3, 40)))
    seen = torch.from_numpy(np.argwhere(rng.random(matrix.shape) < 0.4))
    values = matrix[seen[:, 0], seen[:, 1]] + noise * torch.from_numpy(rng.normal(size=len(seen)))
    model = fit_point(Ratings(seen[:, 0], seen[:, 1], values, matrix.shape), 3)
    assert rmse(model, matrix) < expected * float(matrix.std())
    searched = [row for row in model.trace.rows if "validation_rmse" in row]
    assert model.ridge == min(searched, key=lambda row: row["validation_rmse"])["ridge"]


def test_an_interrupt_below_the_path_keeps_the_best_so_far():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(60, 3)) @ rng.normal(size=(3, 40))
    seen = np.argwhere(rng.random(matrix.shape) < 0.4)
    ratings = Ratings(seen[:, 0], seen[:, 1], matrix[seen[:, 0], seen[:, 1]], matrix.shape, dtype=torch.float64)
    errors: list[float] = []

    def interrupt(row):
        errors.append(row["validation_rmse"])
        if len(errors) == 6:
            raise KeyboardInterrupt

    model = fit_point(ratings, 3, callback=interrupt, on_interrupt="return")
    assert model.status == "interrupted"
    # what the sixth trial found is lost; the fifth was the best of the others
    assert min(errors[:5]) == errors[4]
    assert rmse(model, torch.from_numpy(matrix)) < 3 * errors[4]


def test_the_model_is_a_frame_with_coefficients_and_predicts_what_it_says():
    ratings, _ = low_rank()
    model = fit_point(ratings, 3, ridge=1.0)
    torch.testing.assert_close(model.U.T @ model.U, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12)
    rows, columns = torch.tensor([0, 5]), torch.tensor([7, 2])
    torch.testing.assert_close(model.predict(rows, columns), predict_all(model)[rows, columns], rtol=0, atol=1e-12)
    assert model.rank == 3


def test_fold_in_with_the_penalties_returns_the_fitted_column():
    """The optimum over one column, given everything else, is the small ridge problem of the docstring."""
    ratings, _ = low_rank()
    model = fit_point(ratings, 3, ridge=1.0, max_iter=5, tol=0.0)
    side = ratings.by_column
    for i in (0, 11):
        part = slice(int(side.offsets[i]), int(side.offsets[i + 1]))
        rows, values = side.indices()[part].long(), side.values()[part]
        design = torch.cat([model.U[rows], torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
        penalty = torch.zeros(4, 4, dtype=torch.float64)
        penalty[:3, :3], penalty[3, 3] = model.column_penalty, model.offset_ridge
        target = values - model.row_offset[rows] - model.global_offset
        system = design.T @ design + model.weight(len(rows), "columns") * penalty
        expected = torch.linalg.solve(system, design.T @ target)
        torch.testing.assert_close(torch.cat([model.A[i], model.column_offset[i : i + 1]]), expected, rtol=0, atol=1e-9)


def test_the_objective_falls_and_the_fit_converges():
    ratings, _ = low_rank()
    model = fit_point(ratings, 3, ridge=1.0, max_iter=200, tol=1e-9)
    objective = model.trace["objective"]
    assert all(b <= a for a, b in itertools.pairwise(objective))
    assert model.status == "converged"
    assert "less than 1e-09" in model.message


def test_continuation_and_the_direct_start_reach_the_same_minimum():
    ratings, _ = low_rank()
    direct = fit_point(ratings, 3, ridge=0.5, max_iter=300, tol=1e-12)
    stepped = fit_point(ratings, 3, ridge=0.5, max_iter=300, tol=1e-12, continuation=True)
    torch.testing.assert_close(predict_all(stepped), predict_all(direct), rtol=0, atol=1e-3)


def test_early_stopping_returns_the_best_iterate_on_the_validation_part():
    ratings, _ = low_rank(noise=2.0, density=0.4)
    held, _ = low_rank(seed=0, noise=2.0, density=0.4)
    model = fit_point(ratings, 8, ridge=1e-3, max_iter=60, tol=0.0, validation=0.2)
    errors = model.trace["validation_rmse"]
    assert model.status == "stopped"
    assert errors[-1] >= min(errors[:-1])
    assert "validation error rose" in model.message
    given = fit_point(ratings, 2, ridge=1.0, validation=held, max_iter=2, tol=0.0)
    final = float((given.predict(*held.entries()[:2]) - held.entries()[2]).square().mean().sqrt())
    assert min(given.trace["validation_rmse"]) == pytest.approx(final, rel=1e-9)


@pytest.mark.parametrize("offsets", ["all", "rows", "columns", "global", "none", True, False])
def test_offsets_are_fitted_as_asked(offsets):
    ratings, _ = low_rank()
    model = fit_point(ratings, 2, ridge=1.0, offsets=offsets, max_iter=3)
    assert bool(model.row_offset.any()) == (offsets in {"all", "rows", True})
    assert bool(model.column_offset.any()) == (offsets in {"all", "columns", True})
    assert (model.global_offset != 0) == (offsets not in {"none", False})


@pytest.mark.parametrize("solver", ["rngd", "rcg", "rgd", "rngd-vr"])
def test_the_papers_solvers_fit_what_the_offsets_leave(solver):
    ratings, matrix = low_rank(noise=0.01, density=0.7)
    model = fit_point(ratings, 3, solver=solver, ridge=1e-3, max_iter=60)
    assert rmse(model, matrix) < 0.1 * float(matrix.std())
    assert model.U.shape == (120, 3)


def test_seeded_runs_are_equal_and_callbacks_stop():
    ratings, _ = low_rank()
    torch.testing.assert_close(fit_point(ratings, 2, seed=3).A, fit_point(ratings, 2, seed=3).A, rtol=0, atol=0)
    rows = []
    model = fit_point(ratings, 2, ridge=1.0, callback=lambda row: rows.append(row) or len(rows) == 2, tol=0.0)
    assert (model.status, len(rows), len(model.trace)) == ("stopped", 2, 2)


@pytest.mark.parametrize("ridge", [1.0, "auto"])
def test_an_interrupt_returns_the_model_if_asked(ridge):
    ratings, _ = low_rank()

    def interrupt(row):
        raise KeyboardInterrupt

    model = fit_point(ratings, 2, ridge=ridge, callback=interrupt, on_interrupt="return")
    assert model.status == "interrupted"
    assert bool(torch.isfinite(predict_all(model)).all())
    with pytest.raises(KeyboardInterrupt):
        fit_point(ratings, 2, ridge=ridge, callback=interrupt)


@pytest.mark.parametrize(
    "entries",
    [([0], [0], [2.5]), ([0, 1, 1], [0, 0, 1], [4.0, 4.0, 4.0]), ([0, 3], [5, 5], [1.0, 2.0])],
    ids=["one rating", "constant", "empty rows and columns"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ridge", ["auto", 0.0])
def test_degenerate_tables_give_finite_models(entries, dtype, ridge):
    ratings = Ratings(*entries, dtype=dtype)
    model = fit_point(ratings, 1, ridge=ridge)
    assert bool(torch.isfinite(predict_all(model)).all())
    if len(set(entries[2])) == 1:
        torch.testing.assert_close(model.predict(*ratings.entries()[:2]), ratings.entries()[2], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 81}, r"rank must be a whole number between 1 and min\(n_rows, n_columns\)=80, got 81"),
        ({"rank": 2.5}, "rank must be a whole number .* got 2.5"),
        ({"ridge": -1.0}, r"ridge must be a finite number ≥ 0.* got -1\.0"),
        ({"ridge": math.nan}, "ridge must be a finite number ≥ 0.* got nan"),
        ({"ridge": "best"}, "ridge must be a finite number .* got 'best'"),
        ({"offset_ridge": -2.0}, "offset_ridge must be a finite number"),
        ({"ridge_weighting": "sqrt"}, r"ridge_weighting must be one of \['none', 'root', 'count'\], got 'sqrt'"),
        ({"offsets": "users"}, "offsets must be 'all', .* got 'users'"),
        ({"max_iter": 0}, "max_iter must be at least 1, got 0"),
        ({"validation": 1.5}, r"validation must be a share between 0 and 1, or ratings, got 1\.5"),
        ({"validation": Ratings([0], [0], [1.0])}, r"validation must have the shape \(120, 80\).*got \(1, 1\)"),
        ({"on_interrupt": "keep"}, "on_interrupt must be 'raise' or 'return', got 'keep'"),
        ({"solver": "adam"}, "solver must be one of auto, rngd, rngd-vr, rcg, rgd, got 'adam'"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    ratings, _ = low_rank()
    with pytest.raises(ValueError, match=message):
        fit_point(ratings, **{"rank": 2, **options})


def test_options_that_a_method_of_the_paper_does_not_have_are_refused():
    ratings = Ratings([0, 0, 1, 1, 2], [0, 1, 0, 1, 1], [1.0, 2.0, 2.0, 4.0, 3.0])
    for option in ({"validation": 0.2}, {"continuation": True}, {"offset_ridge": 1.0}):
        with pytest.raises(ValueError, match=r"validation, continuation and .* need solver='auto', got solver='rngd'"):
            fit_point(ratings, 1, solver="rngd", **option)
