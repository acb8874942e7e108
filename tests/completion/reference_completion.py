"""Variational completion written out: one loop per member, textbook formulas, float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Gamma, MultivariateNormal, kl_divergence

from fisherfold.completion.inference.packed import unpack
from fisherfold.completion.inference.posterior import PRIOR_ROWS, CompletionPosterior, Side
from fisherfold.completion.ratings import Ratings


def member(side: Side, i: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the coefficients of member i, in float64."""
    return side.mean[i].double().clone(), unpack(side.covariance[i : i + 1])[0].double()


def posterior_of_row(
    side: Side, given: Side, i: int, entries: list[tuple[int, float]], tau: float
) -> tuple[Tensor, Tensor]:
    """The optimal Gaussian of member i: regressors z = (v, 1), targets x - c."""
    size = side.mean.shape[1]
    prior_mean = side.prior_mean.double().expand(len(side.mean), -1)[i]
    precision, pull = side.precision.clone(), side.precision @ prior_mean
    for j, x in entries:
        mean, covariance = member(given, j)
        z = torch.cat([mean[:-1], torch.ones(1, dtype=torch.float64)])
        second = torch.outer(z, z)
        second[: size - 1, : size - 1] += covariance[:-1, :-1]
        offset_times_z = mean[-1] * z
        offset_times_z[: size - 1] += covariance[-1, :-1]
        weight = tau * float(side.weight[i]) * float(given.weight[j])
        precision = precision + weight * second
        pull = pull + weight * (x * z - offset_times_z)
    if not side.has_offset:
        keep = slice(0, size - 1)
        covariance = torch.zeros_like(precision)
        covariance[keep, keep] = torch.linalg.inv(precision[keep, keep])
    else:
        covariance = torch.linalg.inv(precision)
    return covariance @ pull, covariance


def expected_square(side: Side, given: Side, i: int, j: int, x: float) -> float:
    """E[(x - b - c - <u, v>)²] from means and covariances."""
    (u, cov_u), (v, cov_v) = member(side, i), member(given, j)
    one = torch.ones(1, dtype=torch.float64)
    k, a = torch.cat([u, one]), torch.cat([v[:-1], one, v[-1:]])
    big_u, big_v = torch.zeros(len(k), len(k)).double(), torch.zeros(len(k), len(k)).double()
    big_u[:-1, :-1] = cov_u
    order = [*range(len(v) - 1), len(v)]
    big_v[torch.tensor(order)[:, None], torch.tensor(order)] = cov_v
    variance = k @ big_v @ k + a @ big_u @ a + (big_u * big_v).sum()
    return float((x - k @ a) ** 2 + variance)


def evidence_lower_bound(posterior: CompletionPosterior, ratings: Ratings) -> float:
    """The bound per rating, term by term; without rated-set effects."""
    rows, columns, tau, nu = (
        posterior.rows,
        posterior.columns,
        posterior.noise_precision,
        posterior.weight_strength,
    )
    logs, total = [], 0.0
    for side in (rows, columns):
        q_gamma = Gamma(nu / 2 + side.counts.double() / 2, nu / 2 + side.weighted_sse.double() / 2)
        logs.append(torch.digamma(q_gamma.concentration) - torch.log(q_gamma.rate))
        prior_gamma = Gamma(torch.tensor(nu / 2).double(), torch.tensor(nu / 2).double())
        total -= float(kl_divergence(q_gamma, prior_gamma).sum())
        prior = MultivariateNormal(side.center.double(), precision_matrix=side.precision)
        for i in range(len(side.mean)):
            total -= float(kl_divergence(MultivariateNormal(*member(side, i)), prior))
        k = side.precision
        total += (
            0.5 * PRIOR_ROWS * float(torch.logdet(k) - (k.diagonal() * side.start_variance).sum())
        )
    for i, j, x in zip(*(t.tolist() for t in ratings.entries()), strict=True):
        weight = tau * float(rows.weight[i]) * float(columns.weight[j])
        total += 0.5 * float(math.log(tau / (2 * math.pi)) + logs[0][i] + logs[1][j])
        total -= 0.5 * weight * expected_square(rows, columns, i, j, x)
    return total / ratings.n_ratings
