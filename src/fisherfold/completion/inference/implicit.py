r"""Completion from implicit feedback: clicks or purchases, in which a missing pair is a weak sign of no interest.

    Σ_{(i,j) ∈ Ω} w_ij (1 - p_ij)² + α Σ_{all (i,j)} p_ij²,    p_ij = b_i + c_j + ⟨u_i, v_j⟩

This is the loss of implicit ALS (Hu, Koren and Volinsky 2008, in the form of Rendle et al. 2021); a prediction p is
large where row i is likely to take up column j. Here it is minus twice a Gaussian log-likelihood times τ: both sides
keep a Gaussian posterior, and the priors and τ are learnt, so that no ridge has to be chosen. With a_j = (v_j, c_j, 1)
the evidence about row i is

    T_i = α Σ_j E[a_j a_jᵀ] + Σ_{j ∈ Ω_i} w_ij E[a_j a_jᵀ],     h_i = Σ_{j ∈ Ω_i} w_ij E[a_j],

whose first sum is one small matrix for all rows: a pass costs what the observed pairs cost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inference.gram import Evidence, moments
from fisherfold.completion.inference.posterior import CompletionPosterior, Side
from fisherfold.completion.inference.variational import update_members
from fisherfold.completion.ratings import Ratings

_CHUNK_ENTRIES = 2**18  # of the (n, q, q) working arrays: they stay in the cache
_SWEEPS = 4  # of the subspace iteration that the fit starts from


def fit_implicit(
    ratings: Ratings,
    rank: int,
    *,
    unobserved_weight: float = 4.0,
    max_iter: int = 20,
    tol: float = 1e-2,
    seed: int = 0,
    callback: Callable[[CompletionPosterior], None] | None = None,
) -> CompletionPosterior:
    """Fit the posterior by coordinate ascent on the evidence lower bound of all pairs.

    Example:
        >>> pairs = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [2, 2], [2, 3], [3, 2]]).T
        >>> posterior = fit_implicit(Ratings(*pairs, torch.ones(7), shape=(4, 4)), 1)
        >>> liked, not_liked = posterior.predict(torch.tensor([3, 3]), torch.tensor([3, 0]))[0].tolist()
        >>> liked > not_liked
        True
    """
    weight = ratings.add(ratings.by_row.values())
    amount = weight + unobserved_weight * ratings.shape[0] * ratings.shape[1]
    posterior, began = _start(ratings, rank, seed), time.perf_counter()
    posterior.noise_precision = 2 * amount / weight
    table = moments(posterior.columns.mean, posterior.columns.covariance)
    previous = -math.inf
    for iteration in range(1, max_iter + 1):
        for side, groups in (
            (posterior.rows, ratings.by_row),
            (posterior.columns, ratings.by_column),
        ):
            table, residual = _update_side(
                side, table, groups, posterior.noise_precision, unobserved_weight
            )
            posterior.weighted_sse = float(residual.sum(dtype=torch.float64))
            posterior.noise_precision = amount / posterior.weighted_sse
            side.update_prior()
            side.invalidate()
        tau = posterior.noise_precision
        bound = 0.5 * amount * math.log(tau / (2 * math.pi)) - 0.5 * tau * posterior.weighted_sse
        bound = (
            bound + posterior.rows.bound(0.0) + posterior.columns.bound(0.0)
        ) / ratings.n_ratings
        seconds = time.perf_counter() - began
        posterior.trace.append(
            {"iteration": iteration, "seconds": seconds, "bound": bound, "noise": tau**-0.5}
        )
        posterior.converged = bound - previous < tol
        previous = bound
        if callback is not None:
            callback(posterior)
        if posterior.converged:
            break
    return posterior


def new_rows(posterior: CompletionPosterior, ratings: Ratings, unobserved_weight: float) -> Side:
    """The posterior of rows that were not in the fit, given the columns, which do not move."""
    known, columns = posterior.rows, posterior.columns
    mean = known.center.expand(ratings.n_rows, -1).clone()
    side = Side.start(mean, ratings.row_counts, known.start_variance, has_offset=True)
    side.precision, side.center = known.precision, known.center
    table = moments(columns.mean, columns.covariance)
    _update_side(side, table, ratings.by_row, posterior.noise_precision, unobserved_weight)
    empty, unknown = ratings.row_counts == 0, known.unknown_member()
    side.mean[empty], side.covariance[empty] = unknown.mean, unknown.covariance
    return side


def _start(ratings: Ratings, rank: int, seed: int) -> CompletionPosterior:
    """The leading singular vectors of the table of zeros and ones, without offsets."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = ratings.by_row, ratings.by_column
    right = torch.randn(ratings.n_columns, rank, generator=generator).to(rows.stored_values)
    for _ in range(_SWEEPS):
        left = rows.sums({0: torch.linalg.qr(right)[0].contiguous()})[0]
        right = columns.sums({0: torch.linalg.qr(left)[0].contiguous()})[0]
    # directions that are all but empty start small and are left to the fit
    strength = right.norm(dim=0).clamp(min=1e-3)
    means = torch.linalg.qr(left)[0] * strength.sqrt(), right / strength.sqrt()
    sides = []
    for mean, counts in zip(means, (ratings.row_counts, ratings.column_counts), strict=True):
        start = torch.cat([mean, mean.new_zeros(len(mean), 1)], dim=1)
        sides.append(Side.start(start, counts, start.square().mean(0) + 1e-3, has_offset=True))
    return CompletionPosterior(sides[0], sides[1], 1.0, 0.0, ratings.n_ratings)


def _update_side(
    side: Side, table: Tensor, groups: Grouped, tau: float, alpha: float
) -> tuple[Tensor, Tensor]:
    """Set one side to its optimum given the other's moments; its own moments, and the expected loss of each member."""
    n, size = side.mean.shape
    everyone = alpha * table.sum(0, dtype=torch.float64).to(table)
    moments_of_side, residual = table.new_empty(n, table.shape[1]), table.new_empty(n)
    chunk = max(256, _CHUNK_ENTRIES // size**2)
    for first in range(0, n, chunk):
        part = slice(first, min(first + chunk, n))
        observed = groups.sums({1: table}, part.start, part.stop)[0]
        cross = observed[:, -size - 1 :]
        evidence = Evidence(observed + everyone, cross, cross[:, -1])
        moments_of_side[part], residual[part] = update_members(
            side, part, evidence, side.center[None], tau
        )
    return moments_of_side, residual
