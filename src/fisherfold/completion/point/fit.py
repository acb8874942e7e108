r"""Completion by a point estimate, in the form of a posterior without covariances: all else is shared with it.

``solver="auto"`` penalises both factors,

    min  ½ Σ_{(i,j) ∈ Ω} (x_ij - b_i - c_j - u_iᵀv_j)² + ½ Σ_i w_i (λ‖u_i‖² + λ₀b_i²) + ½ Σ_j w_j (λ‖v_j‖² + λ₀c_j²)

by half-steps of the variational engine that take the other side for known. With w = 1 and L = U T (U a frame) the
penalty is λ (tr S + tr AᵀA S⁻¹)/2 with S = T Tᵀ, and its least value over S is λ ‖A‖_*: so this is the problem
min_A ½ ‖P_Ω(UAᵀ - X)‖² + λ ‖A‖_* on Gr(n, p), a prior covariance S being carried along with the frame, and a half-step
is a natural-gradient step of length 1 with the row-block Fisher Σ_i a_i a_iᵀ damped by λ S. The weights w_i = √(n_i/n̄)
give the weighted nuclear norm, which spares the seldom rated. Without a ridge λ is chosen on a tenth of the ratings
along a warm-started path λ = c σ², σ² the variance that offsets leave, and on below it where its least λ is the best.

Other solvers are those of ``minimize``, for the paper's problem on what offsets leave:

    min over U of (1/2N) Σ_i min_a ‖U_i a - x_i‖² + λ ‖a‖²

The prior precisions of the result are the penalties over the residual variance, K = τ diag(λ I, λ₀) with
1/τ = (1/N) Σ r_ij², and the covariances are the inverses of the blocks of the Hessian (Laplace): a new rating is then
one ridge step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.completion.entries import mixed
from fisherfold.completion.inference.gram import moments
from fisherfold.completion.inference.posterior import CompletionPosterior, Side
from fisherfold.completion.inference.start import start_posterior
from fisherfold.completion.inference.variational import noise_floor, update_side
from fisherfold.completion.point.problem import CompletionProblem
from fisherfold.completion.ratings import Ratings
from fisherfold.solvers import GradientNorm, Stagnation, minimize

# of rngd-vr the step that did best on the paper's data is taken
OPTIONS: dict[str, dict[str, Any]] = {"rngd-vr": {"step": 0.05, "fisher": "kronecker"}}

# λ/σ² on the validation path: upwards, because a direction that a large λ has killed does not come back.
_PATH = tuple(2.0 ** (k / 2) for k in range(2, 13))
_DOWN, _HELPS = 4.0, 0.999
_DEFAULT_LEVEL, _OFFSET_RIDGE = 8.0, 3.0
_ENOUGH_TO_VALIDATE, _VALIDATION = 50, 0.1
_Record = Callable[[dict[str, float]], object]


def fit_point(
    ratings: Ratings,
    rank: int,
    *,
    ridge: float | None = None,
    row_offsets: bool = True,
    column_offsets: bool = True,
    solver: str = "auto",
    max_iter: int = 30,
    tol: float = 1e-4,
    seed: int = 0,
    callback: _Record | None = None,
) -> CompletionPosterior:
    """Fit a point estimate to ratings that were centred and scaled, and write it as a posterior.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(40, 2, generator=g) @ torch.randn(2, 30, generator=g)
        >>> i, j = (torch.rand(40, 30, generator=g) < 0.6).nonzero().T
        >>> posterior = fit_point(Ratings(i, j, x[i, j]), 2, ridge=0.01, max_iter=200)
        >>> hidden = posterior.predict(i, j)[0] - x[i, j]
        >>> bool(hidden.square().mean() < 1e-2 * x.square().mean())
        True
    """
    trace: list[dict[str, float]] = []
    began = time.perf_counter()

    def record(row: dict[str, float]) -> None:
        trace.append(
            {"iteration": float(len(trace) + 1), "seconds": time.perf_counter() - began} | row
        )
        if callback is not None:
            callback(trace[-1])

    start = partial(
        start_posterior,
        rank=rank,
        row_offsets=row_offsets,
        column_offsets=column_offsets,
        weight_strength=0.0,
        seed=seed,
    )
    if solver == "auto":
        posterior = _alternate(ratings, ridge, start, max_iter, tol, seed, record)
        penalties = [side.precision for side in (posterior.rows, posterior.columns)]
    else:
        posterior, penalties = _minimize(
            ratings, ridge or 0.0, start, solver, max_iter, tol, seed, record
        )
    posterior.trace, posterior.weighted_sse = trace, _squares(posterior, ratings)
    posterior.noise_precision = 1 / max(
        posterior.weighted_sse / ratings.n_ratings, noise_floor(ratings.dtype)
    )
    for side, penalty in zip((posterior.rows, posterior.columns), penalties, strict=True):
        side.weight = torch.ones_like(side.weight)
        side.set_precision(posterior.noise_precision * penalty)
    _set_covariances(posterior, ratings)
    return posterior


def _set_covariances(posterior: CompletionPosterior, ratings: Ratings) -> None:
    """The inverse Hessian blocks as covariances; the means stay."""
    rows, columns = posterior.rows, posterior.columns
    tables = [_known(side) for side in (columns, rows)]
    for side, table, groups in zip(
        (rows, columns), tables, (ratings.by_row, ratings.by_column), strict=True
    ):
        mean = side.mean.clone()
        update_side(side, table, groups, posterior.noise_precision)
        side.mean = mean
        side.invalidate()


def _known(side: Side) -> Tensor:
    """The moments of a side that is taken for known."""
    return moments(side.mean, side.mean[:, :0])


def _squares(posterior: CompletionPosterior, ratings: Ratings) -> float:
    """Σ (x_ij - prediction)²."""
    rows, columns, values = ratings.entries()
    return ratings.add((posterior.predict(rows, columns)[0] - values).double().square())


def _alternate(
    ratings: Ratings,
    ridge: float | None,
    start: Callable[[Ratings], CompletionPosterior],
    max_iter: int,
    tol: float,
    seed: int,
    record: _Record,
) -> CompletionPosterior:
    """Both factors by turns; the precisions of the result are its penalties."""
    held_out = None
    if ridge is None and ratings.n_ratings >= _ENOUGH_TO_VALIDATE:
        held_out = held_out_entries(ratings, _VALIDATION, seed)
    train = ratings if held_out is None else _part(ratings, ~held_out)
    posterior = start(train)  # the factors of the rows are zero: it predicts what offsets do
    left = _squares(posterior, train) / train.n_ratings or 1.0
    if held_out is not None:
        posterior, ridge = _choose_ridge(train, _part(ratings, held_out), posterior, left, record)
    _penalise(posterior, ratings, _DEFAULT_LEVEL * left if ridge is None else ridge, left)
    objective = sweep(posterior, ratings)
    for _ in range(max_iter):
        before, objective = objective, sweep(posterior, ratings)
        record({"ridge": posterior.fixed_ridge or 0.0, "objective": objective})
        if before - objective <= tol * abs(objective):
            posterior.converged = True
            break
    return posterior


def _penalise(posterior: CompletionPosterior, ratings: Ratings, ridge: float, left: float) -> None:
    """Set λ, λ₀ and the weights w."""
    # with no ridge at all, rows with few ratings would be singular: the floor selects their least-norm solution
    floor = torch.finfo(ratings.dtype).eps ** 0.5 * left
    posterior.fixed_ridge = max(ridge, floor)
    for side, counts in (
        (posterior.rows, ratings.row_counts),
        (posterior.columns, ratings.column_counts),
    ):
        side.counts = counts.to(side.mean)
        side.weight = (side.counts.clamp(min=1) * (side.size / ratings.n_ratings)).rsqrt()
        penalty = torch.full_like(side.precision[0], posterior.fixed_ridge)
        penalty[-1] = max(ridge / 3, floor)
        side.set_precision(torch.diag(penalty))


def sweep(posterior: CompletionPosterior, ratings: Ratings) -> float:
    """The exact minimum in the rows, the best S, and the minimum in the columns; the objective per rating."""
    rows, columns = posterior.rows, posterior.columns
    update_side(rows, _known(columns), ratings.by_row, 1.0, known=True)
    _balance(posterior, ratings)
    _, squares = update_side(columns, _known(rows), ratings.by_column, 1.0, known=True)
    objective = float(columns.total(squares.sum(dtype=torch.float64)))
    for side in (rows, columns):
        lengths = side.mean.double().square() @ side.precision.diagonal()
        objective += float(side.total((lengths / side.weight.double()).sum()))
    return objective / (2 * ratings.n_ratings)


def _balance(posterior: CompletionPosterior, ratings: Ratings) -> None:
    """The best S for the products ⟨u_i, v_j⟩: coordinates in which Σ w u uᵀ and Σ w v vᵀ are equal and diagonal."""
    u, v = posterior.rows.mean[:, :-1], posterior.columns.mean[:, :-1]
    sides = (
        (u, posterior.rows.weight, ratings.row_axis),
        (v, posterior.columns.weight, ratings.column_axis),
    )
    left, right = (
        axis.second_moment(x / weight.sqrt()[:, None]).double() for x, weight, axis in sides
    )
    if float(left.trace() * right.trace()) ** 0.5 <= torch.finfo(u.dtype).tiny ** 0.25:
        return  # nothing left to balance
    values, vectors = torch.linalg.eigh(left)
    values = values.clamp(min=float(values.max()) * 1e-14 + 1e-300).sqrt()
    root, inverse = (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT
    strength, turn = torch.linalg.eigh(root @ right @ root)
    strength, turn = strength.flip(0), turn.flip(1)
    scale = strength.clamp(min=float(strength.max()) * 1e-28 + 1e-300) ** 0.25
    u.copy_(u @ (inverse @ turn * scale).to(u))
    v.copy_(v @ (root @ turn / scale).to(v))


def _part(ratings: Ratings, chosen: Tensor) -> Ratings:
    rows, columns, values = ratings.entries()
    return ratings.like(rows[chosen], columns[chosen], values[chosen])


def held_out_entries(ratings: Ratings, share: float, seed: int) -> Tensor | None:
    """Choose a share of the entries at random by a hash of their pair, whichever process holds them."""
    rows, columns, _ = ratings.entries()
    pair = (rows.cpu().numpy().astype(np.uint64) + np.uint64(ratings.row_axis.start)) << np.uint64(
        32
    )
    key = pair + columns.cpu().numpy().astype(np.uint64) + np.uint64(ratings.column_axis.start)
    key += np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    chosen = torch.from_numpy(mixed(key) < np.uint64(share * 2.0**64)).to(ratings.device)
    count = int(ratings.group.sum(chosen.sum().cpu()))
    return chosen if 0 < count < ratings.n_ratings else None


def _choose_ridge(
    train: Ratings, held_out: Ratings, posterior: CompletionPosterior, left: float, record: _Record
) -> tuple[CompletionPosterior, float]:
    """Where the error of held-out ratings is least, and its λ."""

    def tried(
        level: float, start: CompletionPosterior, rounds: int
    ) -> tuple[float, CompletionPosterior]:
        found = start.copied()
        _penalise(found, train, level * left, left)
        for _ in range(rounds):  # a few are enough to rank the levels
            sweep(found, train)
        error = math.sqrt(_squares(found, held_out) / held_out.n_ratings)
        record({"ridge": level * left, "validation_rmse": error})
        return error, found

    path = [tried(_PATH[0], posterior, 4)]
    best = path[0]
    for level in _PATH[1:]:
        path.append(tried(level, path[-1][1], 2))
        best = min(path, key=itemgetter(0))
        if all(trial is not best for trial in path[-2:]):
            break
    # the least λ of the path is the best where there is little noise: go on below it while that helps
    level, helps = _PATH[0], best is path[0]
    while helps and level >= _DOWN * torch.finfo(train.dtype).eps ** 0.5:
        level /= _DOWN
        below = tried(level, best[1], 2)
        helps = below[0] < _HELPS * best[0]
        best = below if helps else best
    return best[1], best[1].fixed_ridge or 0.0


def _minimize(
    ratings: Ratings,
    ridge: float,
    start: Callable[[Ratings], CompletionPosterior],
    solver: str,
    max_iter: int,
    tol: float,
    seed: int,
    record: _Record,
) -> tuple[CompletionPosterior, list[Tensor]]:
    """The paper's problem by one of its solvers, and the penalties of both sides."""
    posterior = start(ratings)
    rank = posterior.rank
    rows, columns, values = ratings.entries()
    residual = (
        values - posterior.predict(rows, columns)[0]
    )  # of the offsets: the factors of the rows are zero
    # divided by its root mean square, so that no tolerance has a unit
    unit = math.sqrt(ratings.add(residual.double().square()) / ratings.n_ratings) or 1.0
    problem = CompletionProblem(ratings.like(rows, columns, residual / unit), rank, ridge=ridge)
    generator = torch.Generator().manual_seed(seed)
    x0 = problem.manifold.random_point(
        generator=generator, dtype=ratings.dtype, device=ratings.device
    )

    def after(state: Any) -> None:
        row = state.trace.rows[-1]
        record(row | {name: row[name] * unit**2 for name in ("loss", "gradient_norm")})

    stop = GradientNorm(1e-10 if x0.dtype == torch.float64 else 1e-5) | Stagnation(rtol=tol)
    result = minimize(
        problem,
        x0,
        solver,
        max_iter=max_iter,
        stop=stop,
        seed=seed,
        callback=after,
        **OPTIONS.get(solver, {}),
    )
    posterior.converged, posterior.fixed_ridge = result.status == "converged", ridge
    factors = [result.x, unit * problem.fit(result.x).coefficients]
    sides = (posterior.rows, ratings.row_axis), (posterior.columns, ratings.column_axis)
    for (side, _), part in zip(
        sides, reversed(factors) if problem.transposed else factors, strict=True
    ):
        side.mean[:, :-1] = part
    # Members that come later are penalised by the ridge where there is one, else by s C⁻¹, s the variance left and C
    # the second moment of the members of the fit: without any, one with fewer ratings than the rank has no solution.
    total = ratings.add(values.double().square())
    noise = (
        max(_squares(posterior, ratings), torch.finfo(ratings.dtype).eps ** 0.5 * total)
        / ratings.n_ratings
        or 1.0
    )
    penalties = []
    for k, (side, axis) in enumerate(sides):
        penalty = _OFFSET_RIDGE * torch.eye(rank + 1, dtype=torch.float64, device=ratings.device)
        if ridge > 0 and k != problem.transposed:
            penalty[:-1, :-1] = ridge * torch.eye(rank)
        else:
            moment = axis.second_moment(side.mean[:, :-1].double()) / axis.size
            penalty[:-1, :-1] = noise * _inverse_moment(moment)
        penalties.append(penalty)
    return posterior, penalties


def _inverse_moment(moment: Tensor) -> Tensor:
    """The inverse; directions that are all but empty count as the weakest of the others."""
    values, vectors = torch.linalg.eigh(moment)
    largest = float(values.max())
    values = values.clamp(min=1e-6 * largest) if largest > 0 else torch.ones_like(values)
    return (vectors / values) @ vectors.mT
