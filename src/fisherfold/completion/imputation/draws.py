"""Draws of a whole table given its observed entries, for multiple imputation.

    x_ij = c_j + ⟨u_i, f_j⟩ + e_ij,    u_i ~ N(m, K⁻¹),    e_ij ~ N(0, s_j)

Each draw is a pair: c_j + ⟨u_i, f_j⟩ for all entries, and the standard deviation of e in each
column.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

from fisherfold.completion.inference.packed import unpack
from fisherfold.completion.inference.posterior import CompletionPosterior

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Draws = Iterator[tuple[Floats, Floats]]
# a table has rows enough for the chain if it has so many for each column
_ROWS_FOR_CHAIN = 5
_BURN_IN = 100
_THINNED = 20
# shape and rate of the gamma prior of the noise precision of standardised columns
_NOISE_SHAPE = 1.0
_NOISE_RATE = 0.005
# added to a covariance before its root is taken
_JITTER = 1e-12


def draw_tables(posterior: CompletionPosterior, z: Floats, rng: np.random.Generator) -> Draws:
    """Draw tables given the entries of ``z`` that are not NaN.

    Where the table has rows enough, a Gibbs sampler starts at the posterior and uses wide priors:
    what is learnt shrinks, and draws that shrink would bias analyses. For a few rows, columns are
    drawn from their posterior.
    """
    seen = ~np.isnan(z)
    filled = np.where(seen, z, 0.0)
    if len(z) >= _ROWS_FOR_CHAIN * z.shape[1]:
        return gibbs_chain(posterior, filled, seen, rng)
    return posterior_draws(posterior, filled, seen, rng)


def posterior_draws(
    posterior: CompletionPosterior, z: Floats, seen: Mask, rng: np.random.Generator
) -> Draws:
    """Draw columns from their posterior, and rows given these columns and their entries."""
    side = posterior.columns
    mean = side.mean.numpy()
    prior = posterior.rows.precision.numpy()
    start = prior @ posterior.rows.center.double().numpy()
    covariance = unpack(side.covariance).double() + _JITTER * torch.eye(mean.shape[1])
    root = torch.linalg.cholesky(covariance).numpy()
    weight = posterior.noise_precision * side.weight.numpy()
    while True:
        drawn = mean + (root @ rng.normal(size=(*mean.shape, 1)))[:, :, 0]
        loadings = np.column_stack([drawn[:, :-1], np.ones(len(drawn))])
        offsets = drawn[:, -1]
        precision = prior + _outer_sums(seen * weight, loadings)
        pull = start + (seen * (z - offsets) * weight) @ loadings
        u = _normal(precision, pull, rng)
        yield u @ loadings.T + offsets, 1 / np.sqrt(weight)


def gibbs_chain(
    posterior: CompletionPosterior, z: Floats, seen: Mask, rng: np.random.Generator
) -> Draws:
    """Draw from a chain with u_i, f_j, c_j ~ N(0, I), some sweeps after each other."""
    loadings, offsets, variance = _start_of(posterior)
    eye = np.eye(loadings.shape[1] + 1)
    for sweep in count(1):
        precision = eye[1:, 1:] + _outer_sums(seen / variance, loadings)
        u = _normal(precision, (seen / variance * (z - offsets)) @ loadings, rng)
        one = np.column_stack([u, np.ones(len(u))])
        precision = eye + _outer_sums(seen.T / variance[:, None], one)
        found = _normal(precision, (seen * z).T @ one / variance[:, None], rng)
        loadings = found[:, :-1]
        offsets = found[:, -1]
        squares = (seen * (z - one @ found.T) ** 2).sum(axis=0)
        shape = _NOISE_SHAPE + seen.sum(axis=0) / 2
        variance = (_NOISE_RATE + squares / 2) / rng.gamma(shape)
        if sweep >= _BURN_IN and (sweep - _BURN_IN) % _THINNED == 0:
            yield u @ loadings.T + offsets, np.sqrt(variance)


def _start_of(posterior: CompletionPosterior) -> tuple[Floats, Floats, Floats]:
    """Loadings, offsets and noise variances for rows with a standard normal prior."""
    side = posterior.columns
    mean = side.mean.numpy()
    root = np.linalg.cholesky(np.linalg.inv(posterior.rows.precision.numpy()))
    loadings = np.column_stack([mean[:, :-1], np.ones(len(mean))])
    offsets = mean[:, -1] + loadings @ posterior.rows.center.double().numpy()
    variance = 1 / (posterior.noise_precision * side.weight.numpy())
    return loadings @ root, offsets, variance


def _outer_sums(weights: Floats, vectors: Floats) -> Floats:
    """Σ_j w_ij v_j v_jᵀ for each i."""
    n, q = vectors.shape
    products = (vectors[:, :, None] * vectors[:, None, :]).reshape(n, q * q)
    return (weights @ products).reshape(-1, q, q)


def _normal(precision: Floats, pull: Floats, rng: np.random.Generator) -> Floats:
    """Draws of N(Λ⁻¹h, Λ⁻¹) for a stack of precisions Λ and vectors h."""
    lower = np.linalg.cholesky(precision)
    half = np.linalg.solve(lower, pull[:, :, None]) + rng.normal(size=(*pull.shape, 1))
    return np.linalg.solve(lower.transpose(0, 2, 1), half)[:, :, 0]
