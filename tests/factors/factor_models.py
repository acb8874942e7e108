"""Factor models whose rotated loadings are known, and how often intervals hold them."""

import numpy as np
from scipy.optimize import linear_sum_assignment

from fisherfold import FactorAnalysis

LOADINGS = np.array(
    [
        [0.8, 0.0, 0.1],
        [0.7, 0.1, 0.0],
        [0.6, 0.0, 0.0],
        [0.7, 0.3, 0.0],
        [0.0, 0.8, 0.0],
        [0.1, 0.7, 0.0],
        [0.0, 0.6, 0.2],
        [0.0, 0.7, 0.0],
        [0.0, 0.0, 0.8],
        [0.2, 0.0, 0.7],
        [0.0, 0.1, 0.6],
        [0.0, 0.0, 0.7],
    ]
)
CORRELATIONS = np.array([[1.0, 0.4, 0.3], [0.4, 1.0, 0.2], [0.3, 0.2, 1.0]])


def population(rotation):
    """The covariance of standardised variables, and the rotated loadings and correlations in it."""
    phi = np.eye(3) if rotation == "varimax" else CORRELATIONS
    common = LOADINGS @ phi @ LOADINGS.T
    covariance = common + np.diag(1 - np.diag(common))
    return covariance, FactorAnalysis(3, rotation).fit_covariance(covariance, 10**6)


def aligned(model, truth):
    """The order and signs of factors that bring an estimate next to the truth."""
    products = truth.loadings_.T @ model.loadings_
    order = linear_sum_assignment(-np.abs(products))[1]
    return order, np.sign(products[np.arange(3), order])


def coverage(rotation, replicates, *, draw, seed=0, **options):
    """The shares of 90 % intervals of loadings, and of factor correlations, that hold the truth."""
    rng = np.random.default_rng(seed)
    covariance, truth = population(rotation)
    root, lower = np.linalg.cholesky(covariance), np.tril_indices(3, -1)
    loadings, correlations = [], []
    for _ in range(replicates):
        x = draw(rng, root)
        model = FactorAnalysis(3, rotation, rotation_starts=1, **options).fit(x)
        order, signs = aligned(model, truth)
        off = model.loadings_[:, order] * signs - truth.loadings_
        loadings.append(np.abs(off) < 1.6449 * model.loadings_std_error_[:, order])
        phi = model.factor_correlations_[order][:, order] * signs * signs[:, None]
        errors = model.factor_correlations_std_error_[order][:, order]
        off = (phi - truth.factor_correlations_)[lower]
        correlations.append(np.abs(off) < 1.6449 * errors[lower])
    return np.mean(loadings), np.mean(correlations)


def normal(rng, root, n=400):
    """Rows of a normal distribution."""
    return rng.standard_normal((n, len(root))) @ root.T
