"""The paper's completion problem by its own solvers: subspace over the smaller side, offsets removed first.

    min over U of (1/2N) Σ_i min_a ‖U_i a - x_i‖² + λ ‖a‖²

The solvers see what the offsets leave, divided by its root mean square, so that no tolerance has a unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fisherfold.completion.factors import Factors, Penalty
from fisherfold.completion.point_model import PointFit
from fisherfold.completion.problem import CompletionProblem
from fisherfold.completion.ratings import Ratings
from fisherfold.solvers import Result, minimize
from fisherfold.solvers.result import Trace
from fisherfold.solvers.state import State
from fisherfold.solvers.stopping import GradientNorm, Stagnation
from fisherfold.tables.checkpoint import FitCheckpoint, in_solver

# those that need no step size; of rngd-vr the one that did best on the paper's data is taken
SOLVERS = ("rngd", "rngd-vr", "rcg", "rgd")
_OPTIONS: dict[str, dict[str, Any]] = {"rngd-vr": {"step": 0.05, "fisher": "kronecker"}}


@dataclass(frozen=True)
class SolverRun:
    """How to run a solver.

    Attributes:
        solver: one of ``SOLVERS``.
        max_iter: the most iterations.
        tol: stop when five iterations lower the loss by less than this share of it.
        seed: of the start and of the draws.
        callback: called with the trace row of every iteration; a true value stops the fit.
        return_on_interrupt: return the best point so far on Ctrl-C.
        verbose: show a progress bar.
        saved: keeps the state of the solver after every iteration; a fit that was killed goes on from it.
    """

    solver: str
    max_iter: int
    tol: float
    seed: int
    callback: Callable[[dict[str, float]], object] | None
    return_on_interrupt: bool
    verbose: bool
    saved: FitCheckpoint | None

    def minimize(self, problem: CompletionProblem, x0: Tensor) -> Result:
        """Run the solver.

        Args:
            problem: the problem.
            x0: the start.

        Returns:
            The result; after Ctrl-C that of the last whole iteration.

        Raises:
            KeyboardInterrupt: at Ctrl-C, if it is not to be caught.
        """
        kept = Result(x0, math.nan, "interrupted", "interrupted by the user before the first iteration", Trace(), 0, x0)

        def after(state: State) -> object:
            nonlocal kept
            kept = Result(
                state.best, state.best_loss, "interrupted", "interrupted by the user; the best point so far is kept",
                state.trace, state.iteration, state.x,
            )  # fmt: skip
            return self.callback is not None and self.callback(state.trace.rows[-1])

        stop = GradientNorm(1e-10 if x0.dtype == torch.float64 else 1e-5) | Stagnation(rtol=self.tol)
        try:
            return minimize(
                problem, x0, self.solver, max_iter=self.max_iter, stop=stop, seed=self.seed, callback=after,
                verbose=self.verbose, **in_solver(self.saved), **_OPTIONS.get(self.solver, {}),
            )  # fmt: skip
        except KeyboardInterrupt:
            if not self.return_on_interrupt:
                raise
            return kept


def fit_by_solver(ratings: Ratings, rank: int, base: Factors, *, ridge: float, run: SolverRun) -> PointFit:
    """Fit a subspace and coefficients to what offsets leave.

    Args:
        ratings: the observed entries.
        rank: the dimension of the subspace, less than the smaller side of the matrix.
        base: the offsets.
        ridge: λ on the coefficients.
        run: how to run the solver.

    Returns:
        The model.
    """
    rows, columns, values = ratings.entries()
    residual = values - base.predict(rows, columns)
    unit = math.sqrt(ratings.add(residual.double().square()) / ratings.n_ratings) or 1.0
    problem = CompletionProblem(ratings.like(rows, columns, residual / unit), rank, ridge=ridge)
    generator = torch.Generator().manual_seed(run.seed)
    x0 = problem.manifold.random_point(generator=generator, dtype=ratings.dtype, device=ratings.device)
    result = run.minimize(problem, x0)
    for row in result.trace.rows:
        row.update({name: row[name] * unit**2 for name in ("loss", "gradient_norm")})
    coefficients = unit * problem.samples.gather(problem.fit(result.x).coefficients)
    factors = (coefficients, result.x) if problem.transposed else (result.x, coefficients)
    at = replace(base.gathered(ratings), rows=factors[0], columns=factors[1])
    found = PointFit.of(at, ratings, Penalty(ridge or 1.0, 3.0), result.trace, result.status, result.message)
    return _with_fold_in(replace(found, ridge=ridge), ratings, transposed=problem.transposed)


def _with_fold_in(fit: PointFit, ratings: Ratings, *, transposed: bool) -> PointFit:
    """The penalties of members that come later: the ridge where there is one, else s C⁻¹.

    The paper's problem has no prior for the rows of the frame, and none for the coefficients without a ridge, so that a
    row with fewer ratings than the rank could not be folded in. s is the variance left, C the second moment of the
    members of the fit.

    Args:
        fit: the model.
        ratings: what it was fitted to.
        transposed: whether the rows are the coefficients.

    Returns:
        The model with these penalties.
    """
    rows, columns, values = ratings.entries()
    i, j = rows.long() + ratings.row_axis.start, columns.long() + ratings.column_axis.start
    left = ratings.add((fit.predict(i, j) - values).double().square()) / ratings.n_ratings
    total = ratings.add(values.double().square()) / ratings.n_ratings
    noise = max(left, torch.finfo(ratings.dtype).eps ** 0.5 * total) or 1.0
    ridge_on_rows, ridge_on_columns = fit.ridge > 0 and transposed, fit.ridge > 0 and not transposed
    return replace(
        fit,
        row_penalty=fit.row_penalty if ridge_on_rows else noise * _inverse_moment(fit.U),
        column_penalty=fit.column_penalty if ridge_on_columns else noise * _inverse_moment(fit.A),
    )


def _inverse_moment(members: Tensor) -> Tensor:
    """The inverse second moment; directions that are all but empty count as the weakest of the others."""
    values, vectors = torch.linalg.eigh(members.double().mT @ members.double() / len(members))
    largest = float(values.max())
    values = values.clamp(min=1e-6 * largest) if largest > 0 else torch.ones_like(values)
    return ((vectors / values) @ vectors.mT).to(members)
