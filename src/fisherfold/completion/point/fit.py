"""Completion by a point estimate, in the form of a posterior: prediction, new rows and files are the same for both.

``solver="auto"`` is the natural gradient of ``fisherfold.completion.point.als``: half-steps of length 1 with row-block
Fisher, nothing to tune. Without a ridge, λ is chosen on a tenth of the ratings along a warm-started path λ = c σ²/s, σ²
the variance that offsets leave and s the standard deviation of all values, and on below it where its least λ is the
best; then all ratings are fitted. Other solvers are those of ``minimize``, for the paper's problem on what offsets
leave:

    min over U of (1/2N) Σ_i min_a ‖U_i a - x_i‖² + λ ‖a‖²

The factors and offsets are the means of the posterior. The prior precisions are the penalties over the residual
variance, K = τ diag(λ I, λ₀) with 1/τ = (1/N) Σ r_ij², and the covariances are the inverses of the blocks of the
Hessian (Laplace): a new rating is then one ridge step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.completion.entries import mixed
from fisherfold.completion.inference.gram import moments
from fisherfold.completion.inference.posterior import CompletionPosterior, Side
from fisherfold.completion.inference.variational import noise_floor, update_side
from fisherfold.completion.point.als import Factors, Penalty, TwoSided, additive_model, grow
from fisherfold.completion.point.problem import CompletionProblem
from fisherfold.completion.ratings import Ratings
from fisherfold.solvers import GradientNorm, Stagnation, minimize

# those that need no step size; of rngd-vr the one that did best on the paper's data is taken
SOLVERS = ("rngd", "rngd-vr", "rcg", "rgd")
OPTIONS: dict[str, dict[str, Any]] = {"rngd-vr": {"step": 0.05, "fisher": "kronecker"}}

# λ/σ² on the validation path: upwards, because a direction that a large λ has killed does not come back.
_PATH = tuple(2.0 ** (k / 2) for k in range(2, 13))
_DOWN, _HELPS = 4.0, 0.999
_DEFAULT_LEVEL = 8.0
_ENOUGH_TO_VALIDATE, _VALIDATION = 50, 0.1
_Record = Callable[[dict[str, float]], object]


def fit_point(
    ratings: Ratings, rank: int, *, ridge: float | None = None, offsets: str = "both", solver: str = "auto",
    max_iter: int = 30, tol: float = 1e-4, seed: int = 0, callback: _Record | None = None,
) -> tuple[CompletionPosterior, float]:  # fmt: skip
    """Fit a point estimate and write it as a posterior.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(40, 2, generator=g) @ torch.randn(2, 30, generator=g)
        >>> i, j = (torch.rand(40, 30, generator=g) < 0.6).nonzero().T
        >>> posterior, level = fit_point(Ratings(i, j, x[i, j]), 2, ridge=0.01, max_iter=200)
        >>> hidden = posterior.predict(i, j)[0] + level - x[i, j]
        >>> bool(hidden.square().mean() < 1e-2 * x.square().mean())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    trace: list[dict[str, float]] = []
    began = time.perf_counter()

    def record(row: dict[str, float]) -> None:
        trace.append({"iteration": float(len(trace) + 1), "seconds": time.perf_counter() - began} | row)
        if callback is not None:
            callback(trace[-1])

    if solver == "auto":
        at, penalty, converged = _alternate(ratings, rank, ridge, offsets, max_iter, tol, generator, record)
        scales = penalty.ridge * torch.eye(rank, dtype=torch.float64)
        penalties, offset_ridge = (scales, scales), penalty.offset_ridge
    else:
        at, penalties, converged = _minimize(
            ratings, rank, ridge or 0.0, offsets, solver, max_iter, tol, seed, record
        )
        offset_ridge = 3.0
    residual = at.mean_square_error(ratings)
    precision = 1 / max(residual, noise_floor(ratings.dtype))
    sides = [
        _side(*parts, offset_ridge, precision)
        for parts in (
            (at.rows, at.row_offset, at.with_row_offset, ratings.row_counts, ratings, penalties[0]),
            (at.columns, at.column_offset, at.with_column_offset, ratings.column_counts, ratings.T, penalties[1]),
        )
    ]
    posterior = CompletionPosterior(
        sides[0], sides[1], precision, 0.0, ratings.n_ratings, penalty.ridge if solver == "auto" else ridge or 0.0,
        residual * ratings.n_ratings, trace, converged,
    )  # fmt: skip
    _set_covariances(posterior, ratings)
    return posterior, at.mean


def _side(
    factors: Tensor, offset: Tensor, has_offset: bool, counts: Tensor, ratings: Ratings, penalty: Tensor,
    offset_ridge: float, precision: float,
) -> Side:  # fmt: skip
    mean = torch.cat([factors, offset[:, None]], dim=1)
    variance, axes = torch.ones(mean.shape[1], device=mean.device), (ratings.row_axis, ratings.column_axis)
    side = Side.start(mean, counts, variance, has_offset=has_offset, axis=axes[0], others=axes[1])
    side.precision[:-1, :-1] = precision * penalty
    if has_offset:
        side.precision[-1, -1] = precision * offset_ridge
    return side


def _set_covariances(posterior: CompletionPosterior, ratings: Ratings) -> None:
    """The inverse Hessian blocks as covariances; the means stay."""
    rows, columns = posterior.rows, posterior.columns
    tables = [moments(side.mean, side.covariance) for side in (columns, rows)]
    for side, table, groups in zip((rows, columns), tables, (ratings.by_row, ratings.by_column), strict=True):
        mean = side.mean.clone()
        update_side(side, table, groups, posterior.noise_precision)
        side.mean = mean
        side.changed()


def _additive(ratings: Ratings, offsets: str) -> Factors:
    rows, columns = offsets in {"both", "rows"}, offsets in {"both", "columns"}
    return additive_model(ratings, Penalty(1.0, 3.0), rows=rows, columns=columns, mean=offsets != "none")


def _alternate(
    ratings: Ratings, rank: int, ridge: float | None, offsets: str, max_iter: int, tol: float,
    generator: torch.Generator, record: _Record,
) -> tuple[Factors, Penalty, bool]:  # fmt: skip
    """The penalised factors, the penalty, and whether the objective has settled."""
    held_out = None
    if ridge is None and ratings.n_ratings >= _ENOUGH_TO_VALIDATE:
        held_out = held_out_entries(ratings, _VALIDATION, int(torch.randint(2**31, (1,), generator=generator)))
    train = ratings if held_out is None else _part(ratings, ~held_out)
    at = _additive(train, offsets)
    # λ times a product of factors is a square of values: λ has the unit of the values, λ₀ has none
    unit = _spread(ratings, centred=offsets != "none")
    left = (at.mean_square_error(train) or 1.0) / unit
    # with no ridge at all, rows with few ratings would be singular: the floor selects their least-norm solution
    floor = torch.finfo(ratings.dtype).eps ** 0.5 * left

    def penalty(level: float) -> Penalty:
        return Penalty(max(level, floor), max(level / 3, floor) / unit)

    level = ridge if ridge is not None else (_DEFAULT_LEVEL if held_out is None else _PATH[0]) * left
    at = TwoSided(train, penalty(level)).balance(grow(train, at, rank, generator))
    if held_out is not None:
        level, at = _choose_ridge(train, _part(ratings, held_out), at, left, penalty, record)
    problem = TwoSided(ratings, penalty(level))
    at, objective = problem.column_step(at)
    for _ in range(max_iter):
        before = objective
        at, objective = problem.sweep(at)
        record({"ridge": problem.penalty.ridge, "objective": objective})
        if before - objective <= tol * abs(objective):
            return at, problem.penalty, True
    return at, problem.penalty, False


def _spread(ratings: Ratings, *, centred: bool) -> float:
    values = ratings.entries()[2].double()
    mean = ratings.add(values) / ratings.n_ratings if centred else 0.0
    return math.sqrt(ratings.add((values - mean).square()) / ratings.n_ratings) or 1.0


def _part(ratings: Ratings, chosen: Tensor) -> Ratings:
    rows, columns, values = ratings.entries()
    return ratings.like(rows[chosen], columns[chosen], values[chosen])


def held_out_entries(ratings: Ratings, share: float, seed: int) -> Tensor | None:
    """Choose a share of the entries at random by a hash of their pair, whichever process holds them."""
    rows, columns, _ = ratings.entries()
    pair = (rows.cpu().numpy().astype(np.uint64) + np.uint64(ratings.row_axis.start)) << np.uint64(32)
    key = pair + columns.cpu().numpy().astype(np.uint64) + np.uint64(ratings.column_axis.start)
    key += np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    chosen = torch.from_numpy(mixed(key) < np.uint64(share * 2.0**64)).to(ratings.device)
    count = int(ratings.group.sum(chosen.sum().cpu()))
    return chosen if 0 < count < ratings.n_ratings else None


_Trial = tuple[float, float, Factors]  # λ, the validation error and where it was found


def _choose_ridge(
    train: Ratings, held_out: Ratings, at: Factors, left: float, penalty: Callable[[float], Penalty], record: _Record
) -> tuple[float, Factors]:
    # A few warm-started half-steps per λ are enough to rank them; stop when two in a row are worse than the best.
    def tried(level: float, at: Factors, rounds: int) -> _Trial:
        problem = TwoSided(train, penalty(level * left))
        for _ in range(rounds):
            at = problem.balance(problem.row_step(problem.column_step(at)[0])[0])
        at, _ = problem.column_step(at)
        error = math.sqrt(at.mean_square_error(held_out))
        record({"ridge": level * left, "validation_rmse": error})
        return level * left, error, at

    path: list[_Trial] = []
    best = 0
    for k, level in enumerate(_PATH):
        path.append(tried(level, path[-1][2] if path else at, 3 if path else 6))
        best = min(range(len(path)), key=lambda i: path[i][1])
        if k - best >= 2:
            break
    # the least λ of the path is the best where there is little noise: go on below it while that helps
    least, level, below = torch.finfo(train.dtype).eps ** 0.5, _PATH[0], [path[0]]
    while best == 0 and level >= _DOWN * least:
        level /= _DOWN
        below.append(tried(level, below[-1][2], 3))
        if not below[-1][1] < _HELPS * below[-2][1]:
            break
    if len(below) > 1:
        chosen = min(below, key=lambda trial: trial[1])
        return chosen[0], chosen[2]
    return _vertex(path, best), path[best][2]


def _vertex(path: list[_Trial], best: int) -> float:
    """The minimum of the parabola through the best λ and its neighbours on the logarithmic grid."""
    if not 0 < best < len(path) - 1:
        return path[best][0]
    before, here, after = (path[best + k][1] for k in (-1, 0, 1))
    shift = 0.5 * (before - after) / max(before - 2 * here + after, 1e-300)
    return path[best][0] * math.sqrt(2.0) ** max(-0.5, min(0.5, shift))


def _minimize(
    ratings: Ratings, rank: int, ridge: float, offsets: str, solver: str, max_iter: int, tol: float, seed: int,
    record: _Record,
) -> tuple[Factors, tuple[Tensor, Tensor], bool]:  # fmt: skip
    """The paper's problem by one of its solvers: factors, the penalties of both sides, and whether it has settled."""
    base = _additive(ratings, offsets)
    rows, columns, values = ratings.entries()
    residual = values - base.predict(rows, columns)
    # divided by its root mean square, so that no tolerance has a unit
    unit = math.sqrt(ratings.add(residual.double().square()) / ratings.n_ratings) or 1.0
    problem = CompletionProblem(ratings.like(rows, columns, residual / unit), rank, ridge=ridge)
    generator = torch.Generator().manual_seed(seed)
    x0 = problem.manifold.random_point(generator=generator, dtype=ratings.dtype, device=ratings.device)

    def after(state: Any) -> None:
        row = state.trace.rows[-1]
        record(row | {name: row[name] * unit**2 for name in ("loss", "gradient_norm")})

    stop = GradientNorm(1e-10 if x0.dtype == torch.float64 else 1e-5) | Stagnation(rtol=tol)
    result = minimize(
        problem, x0, solver, max_iter=max_iter, stop=stop, seed=seed, callback=after, **OPTIONS.get(solver, {})
    )
    coefficients = unit * problem.fit(result.x).coefficients
    factors = (coefficients, result.x) if problem.transposed else (result.x, coefficients)
    at = replace(base, rows=factors[0], columns=factors[1])
    # Members that come later are penalised by the ridge where there is one, else by s C⁻¹, s the variance left and C
    # the second moment of the members of the fit: without any, one with fewer ratings than the rank has no solution.
    total = ratings.add(values.double().square()) / ratings.n_ratings
    noise = max(at.mean_square_error(ratings), torch.finfo(ratings.dtype).eps ** 0.5 * total) or 1.0
    axes = (ratings.row_axis, at.rows), (ratings.column_axis, at.columns)
    given = [noise * _inverse_moment(axis.second_moment(part.double()) / axis.size) for axis, part in axes]
    if ridge > 0:
        given[0 if problem.transposed else 1] = ridge * torch.eye(rank, dtype=torch.float64)
    return at, (given[0], given[1]), result.status == "converged"


def _inverse_moment(moment: Tensor) -> Tensor:
    """The inverse; directions that are all but empty count as the weakest of the others."""
    values, vectors = torch.linalg.eigh(moment)
    largest = float(values.max())
    values = values.clamp(min=1e-6 * largest) if largest > 0 else torch.ones_like(values)
    return (vectors / values) @ vectors.mT
