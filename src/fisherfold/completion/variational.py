"""Matrix completion with the coefficients of both sides integrated out.

    x_ij = g + b_i + c_j + ⟨u_i, v_j⟩ + e_ij,    e_ij ~ N(0, 1/(τ α_i β_j)),    α_i, β_j ~ Gamma(ν/2, ν/2)

Rows (u_i, b_i) and columns (v_j, c_j) have Gaussian priors that are learnt (``sides``) and a mean-field posterior
q = Π q(u_i, b_i) Π q(v_j, c_j) Π q(α_i) Π q(β_j). One half-step sets all rows to the optimum given the columns, and
gives the residuals S_i = Σ_j β_j E[e_ij²] (``completion_step``); then α_i = (ν + n_i)/(ν + τ S_i), τ = N/Σ_i α_i S_i.
Each of these is the exact maximiser of the evidence lower bound in its block, so the bound never decreases. It is also
a step of length one along the natural gradient of the bound in the geometry of the posterior.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fisherfold.completion.ratings import Ratings
from fisherfold.completion.sides import Side, update_set_effects
from fisherfold.completion.variational_start import start_from_svd
from fisherfold.completion.variational_step import half_step, moments
from fisherfold.distributed import Axis

WEIGHT_STRENGTH = 20.0  # ν, chosen on a validation part of MovieLens-1M; 10 and 40 do as well to 0.0005


@dataclass
class CompletionPosterior:
    """What is known after the fit, for ratings that were centred and scaled.

    Attributes:
        rows: the posterior of the rows.
        columns: the posterior of the columns.
        noise_precision: τ, the precision of an ordinary rating.
        weight_strength: ν, 0 if all ratings weigh the same.
        n_ratings: the number of ratings seen.
        fixed_ridge: the prior precision over τ if it was given, None if it is learnt.
        misfit: Σ_ij α_i β_j E[e_ij²].
        trace: one record per pass: iteration, seconds, bound per rating, noise level.
        converged: whether the bound has settled.
    """

    rows: Side
    columns: Side
    noise_precision: float
    weight_strength: float
    n_ratings: int
    fixed_ridge: float | None = None
    misfit: float = 0.0
    trace: list[dict[str, float]] = field(default_factory=list)
    converged: bool = False

    @property
    def rank(self) -> int:
        """The number of factors."""
        return self.rows.mean.shape[1] - 1

    def copied(self) -> CompletionPosterior:
        """A posterior that can be changed in place while this one stays as it is.

        Returns:
            A copy.
        """
        return replace(self, rows=self.rows.copied(), columns=self.columns.copied(), trace=list(self.trace))

    def gathered(self) -> CompletionPosterior:
        """The posterior with all rows and columns, on every process.

        Returns:
            A copy, or this posterior if all are here already.
        """
        if self.rows.axis is None:
            return self
        return replace(self, rows=self.rows.gathered(), columns=self.columns.gathered())

    def shared_out(self, rows: Axis, columns: Axis) -> CompletionPosterior:
        """The part of a whole posterior that belongs to this process.

        Args:
            rows: which rows are to be here.
            columns: which columns are to be here.

        Returns:
            A copy, or this posterior if nothing is shared out.
        """
        if not (rows.is_shared or columns.is_shared):
            return self
        return replace(self, rows=self.rows.shared_out(rows, columns), columns=self.columns.shared_out(columns, rows))

    def bound(self) -> float:
        """The evidence lower bound per rating.

        Returns:
            The bound, up to a constant that depends on nothing learnt.
        """
        tau = self.noise_precision
        data = 0.5 * self.n_ratings * math.log(tau / (2 * math.pi)) - 0.5 * tau * self.misfit
        learnt = self.fixed_ridge is None
        sides = sum(side.bound(self.weight_strength, learnt=learnt) for side in (self.rows, self.columns))
        return (data + sides) / self.n_ratings


def fit_variational(
    ratings: Ratings, rank: int, *, max_iter: int = 50, tol: float = 3e-4, ridge: float | None = None,
    row_offsets: bool = True, column_offsets: bool = True, set_effects: bool = True,
    weight_strength: float = WEIGHT_STRENGTH, seed: int = 0,
    callback: Callable[[CompletionPosterior], None] | None = None, init: CompletionPosterior | None = None,
) -> CompletionPosterior:  # fmt: skip
    """Fit the posterior by coordinate ascent on the evidence lower bound.

    Args:
        ratings: the ratings, centred and of about unit variance.
        rank: the number of factors.
        max_iter: the largest number of passes.
        tol: stop when a pass raises the bound by less than this per rating.
        ridge: the prior precision of all coefficients in units of τ; learnt if not given.
        row_offsets: whether every row has an offset.
        column_offsets: whether every column has an offset.
        set_effects: whether the prior mean of a row (column) depends on the set of columns (rows) it was rated with.
        weight_strength: ν, the strength of the prior of the noise weights; 0 fixes them at 1.
        seed: of the random test matrix of the starting point.
        callback: called after every pass with the posterior so far.
        init: the posterior to start from; by default ``start_posterior``. One with a trace is a fit to go on with.

    Returns:
        The posterior.

    Example:
        >>> r = Ratings([0, 0, 1, 1, 2], [0, 1, 0, 1, 0], [1.0, -1.0, 1.1, -0.9, 0.2], shape=(3, 2))
        >>> posterior = fit_variational(r, 1)
        >>> all(b["bound"] >= a["bound"] for a, b in zip(posterior.trace, posterior.trace[1:]))
        True
    """
    if init is None:
        init = start_posterior(
            ratings, rank, ridge=ridge, row_offsets=row_offsets, column_offsets=column_offsets,
            weight_strength=weight_strength, seed=seed,
        )  # fmt: skip
    posterior, began = init, time.perf_counter()
    before = posterior.trace[-1]["seconds"] if posterior.trace else 0.0
    floor = noise_floor(ratings.dtype)
    table = moments(posterior.columns.mean, posterior.columns.covariance)
    for iteration in range(len(posterior.trace) + 1, 1 if posterior.converged else max_iter + 1):
        for side, given, groups, others in (
            (posterior.rows, posterior.columns, ratings.by_row, ratings.by_column),
            (posterior.columns, posterior.rows, ratings.by_column, ratings.by_row),
        ):
            table, residual = half_step(side, table.mul_(given.weight[:, None]), groups, posterior.noise_precision)
            update_noise(posterior, side, residual, floor)
            if set_effects:
                update_set_effects(side, groups, others)
            update_prior(posterior, side)
        seconds = before + time.perf_counter() - began
        record = {"iteration": iteration, "seconds": seconds, "bound": posterior.bound()}
        posterior.trace.append(record | {"noise": posterior.noise_precision**-0.5})
        gain = record["bound"] - posterior.trace[-2]["bound"] if len(posterior.trace) > 1 else math.inf
        posterior.converged = gain < tol
        if callback is not None:
            callback(posterior)
        if posterior.converged:
            break
    return posterior


def start_posterior(
    ratings: Ratings, rank: int, *, ridge: float | None = None, row_offsets: bool = True, column_offsets: bool = True,
    weight_strength: float = WEIGHT_STRENGTH, seed: int = 0, blank: bool = False,
) -> CompletionPosterior:  # fmt: skip
    """Where a fit starts: offsets and the singular vectors of the residuals, or nothing at all.

    Args:
        ratings: the ratings, centred and of about unit variance.
        rank: the number of factors.
        ridge: as in ``fit_variational``, like everything up to the seed.
        row_offsets: see there.
        column_offsets: see there.
        weight_strength: see there.
        seed: see there.
        blank: know nothing but the mean of all ratings; this takes no pass over them.

    Returns:
        The posterior.
    """
    if blank:
        counts, axes = (ratings.row_counts, ratings.column_counts), (ratings.row_axis, ratings.column_axis)
        ones = torch.ones(rank + 1, device=ratings.device)
        rows, columns = (
            Side.start(
                torch.zeros(len(counts[k]), rank + 1, dtype=ratings.dtype, device=ratings.device), counts[k], ones,
                has_offset=has_offset, axis=axes[k], others=axes[1 - k],
            )
            for k, has_offset in enumerate((row_offsets, column_offsets))
        )  # fmt: skip
        return CompletionPosterior(rows, columns, 1.0, weight_strength, ratings.n_ratings, ridge)
    generator = torch.Generator().manual_seed(seed)
    begin = start_from_svd(ratings, rank, row_offsets=row_offsets, column_offsets=column_offsets, generator=generator)
    return CompletionPosterior(
        begin.rows, begin.columns, begin.noise_precision, weight_strength, ratings.n_ratings, ridge
    )


def update_noise(posterior: CompletionPosterior, side: Side, residual: Tensor, floor: float) -> None:
    """Set the noise weights of one side, then τ, to the values that maximise the bound.

    Args:
        posterior: the posterior; changed in place.
        side: the side whose residuals are new.
        residual: Σ_j β_j E[e_ij²] for each member of that side.
        floor: the smallest noise variance.
    """
    strength = posterior.weight_strength
    if strength:
        side.shortfall = residual * posterior.noise_precision
        side.weight = (strength + side.counts) / (strength + side.shortfall)
    posterior.misfit = float(side.total((side.weight * residual).sum(dtype=torch.float64)))
    amount, total = float(posterior.n_ratings), posterior.misfit
    if posterior.fixed_ridge is not None:
        for each in (posterior.rows, posterior.columns):
            amount += each.size * each.n_free
            total += posterior.fixed_ridge * float(each.deviation().trace())
    posterior.noise_precision = amount / max(total, floor * amount)


def update_prior(posterior: CompletionPosterior, side: Side) -> None:
    """Set the prior of one side: learnt, or the given ridge.

    Args:
        posterior: the posterior; changed in place.
        side: the side.
    """
    if posterior.fixed_ridge is None:
        side.update_prior()
        return
    for each in (posterior.rows, posterior.columns):
        each.fix_prior(posterior.fixed_ridge * posterior.noise_precision)


def noise_floor(dtype: torch.dtype) -> float:
    """The smallest noise variance, relative to that of the ratings, that the sums of a dtype can resolve.

    Args:
        dtype: the dtype of the ratings.

    Returns:
        1e-6 in float32, 1e-12 in float64.
    """
    return 1e-6 if dtype == torch.float32 else 1e-12
