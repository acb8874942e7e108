"""A point estimate in the form of a posterior, so that prediction, fold-in, streams and files are the same for both.

The factors and offsets of ``fit_point`` are the means. The prior precisions are its penalties over the residual
variance,

    K_rows = τ diag(λ S, λ₀),     K_columns = τ diag(λ S⁻¹, λ₀),     1/τ = (1/N) Σ r_ij²,

and the covariances the inverses of the blocks of the Hessian (Laplace): a new rating is then one ridge step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fisherfold.completion.gram import moments
from fisherfold.completion.point_completion import Offsets, fit_point
from fisherfold.completion.point_model import PointFit
from fisherfold.completion.posterior import CompletionPosterior, Side
from fisherfold.completion.ratings import Ratings
from fisherfold.completion.variational import noise_floor, update_side
from fisherfold.distributed import Axis
from fisherfold.tables.checkpoint import FitCheckpoint

_OFFSETS: dict[str, Offsets] = {
    "both": "all", "rows": "rows", "columns": "columns", "global": "global", "none": "none"
}  # fmt: skip


def point_posterior(
    ratings: Ratings, rank: int, *, ridge: float | None, offsets: str, solver: str, max_iter: int, tol: float,
    seed: int, return_on_interrupt: bool, callback: Callable[[dict[str, float]], None],
    saved: FitCheckpoint | None = None,
) -> tuple[CompletionPosterior, bool, float]:  # fmt: skip
    """Fit a point estimate and write it as a posterior.

    Args:
        ratings: the centred and scaled ratings.
        rank: the number of factors.
        ridge: λ; chosen on a validation part if None, or 0 for the solvers of the paper.
        offsets: as in ``MatrixCompletion``.
        solver: as in ``MatrixCompletion``.
        max_iter: the largest number of iterations.
        tol: the relative decrease of the objective at which to stop.
        seed: of the start and of the validation part.
        return_on_interrupt: whether Ctrl-C returns what there is.
        callback: called with each record of the trace.
        saved: where to keep the state of the fit, and to go on from if there is one.

    Returns:
        The posterior, whether the fit was interrupted, and the global offset that the posterior leaves out.
    """
    fit = fit_point(
        ratings, rank, ridge="auto" if ridge is None else float(ridge), offsets=_OFFSETS[offsets], solver=solver,
        max_iter=max_iter, tol=tol, seed=seed, callback=callback, saved=saved,
        on_interrupt="return" if return_on_interrupt else "raise",
    )  # fmt: skip
    rows, columns, values = ratings.entries()
    i, j = rows.long() + ratings.row_axis.start, columns.long() + ratings.column_axis.start
    residual = ratings.add((fit.predict(i, j) - values).double().square()) / ratings.n_ratings
    precision = 1 / max(residual, noise_floor(ratings.dtype))
    axes = ratings.row_axis, ratings.column_axis
    sides = [
        _side(
            fit.U, fit.row_offset, fit.row_penalty, fit, ratings.row_counts, precision, offsets in ("both", "rows"),
            axes,
        ),
        _side(
            fit.A, fit.column_offset, fit.column_penalty, fit, ratings.column_counts, precision,
            offsets in ("both", "columns"), axes[::-1],
        ),
    ]  # fmt: skip
    records = [{"iteration": float(k), **row} for k, row in enumerate(fit.trace.rows, start=1)]
    posterior = CompletionPosterior(
        sides[0], sides[1], precision, 0.0, ratings.n_ratings, fit.ridge, residual * ratings.n_ratings, records,
        fit.status == "converged",
    )  # fmt: skip
    _laplace(posterior, ratings)
    return posterior, fit.status == "interrupted", float(fit.global_offset)


def _side(
    factors: Tensor, offset: Tensor, penalty: Tensor, fit: PointFit, counts: Tensor, precision: float, has_offset: bool,
    axes: tuple[Axis, Axis],
) -> Side:  # fmt: skip
    mean = axes[0].part(torch.cat([factors, offset[:, None]], dim=1)).clone()
    variance = torch.ones(mean.shape[1], device=mean.device)
    side = Side.start(mean, counts, variance, has_offset=has_offset, axis=axes[0], others=axes[1])
    side.precision[:-1, :-1] = precision * penalty.double()
    if has_offset:
        side.precision[-1, -1] = precision * fit.offset_ridge
    return side


def _laplace(posterior: CompletionPosterior, ratings: Ratings) -> None:
    """Set the covariances to the inverse Hessian blocks and leave the means alone."""
    means = posterior.rows.mean.clone(), posterior.columns.mean.clone()
    tables = [moments(side.mean, side.covariance) for side in (posterior.columns, posterior.rows)]
    for side, table, groups, mean in zip(
        (posterior.rows, posterior.columns), tables, (ratings.by_row, ratings.by_column), means, strict=True
    ):
        update_side(side, table, groups, posterior.noise_precision)
        side.mean = mean
