r"""How well a factor model fits: tests and indices from log-likelihoods.

    χ² = 2 (l_saturated - l_model),    RMSEA² = max(0, χ² - df) / (df n),
    CFI = 1 - max(0, χ² - df) / max(χ²_b - df_b, χ² - df, 0),
    TLI = (χ²_b/df_b - χ²/df) / (χ²_b/df_b - 1)

with the baseline b of uncorrelated variables. The interval of RMSEA inverts the noncentral χ²
distribution (Browne and Cudeck 1993); SRMR is the root mean square of the residual correlations,
with those of the variances and means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy import stats
from scipy.optimize import brentq
from torch import Tensor

from fisherfold.factors.moments import Moments


@dataclass(frozen=True)
class FitStatistics:
    """The fit of a factor model.

    Attributes:
        log_likelihood: of the data.
        n_parameters: free ones: loadings less rotations, unique variances and means.
        chi_square: the likelihood-ratio statistic against a saturated model.
        df: its degrees of freedom.
        p_value: the probability of a larger one if the model is right; NaN where df is 0.
        rmsea: the root mean square error of approximation.
        rmsea_interval: its 90 % interval.
        cfi: the comparative fit index.
        tli: the Tucker–Lewis index.
        srmr: the standardised root mean square residual.
        aic: Akaike's criterion.
        bic: the Bayesian criterion.
    """

    log_likelihood: float
    n_parameters: int
    chi_square: float
    df: int
    p_value: float
    rmsea: float
    rmsea_interval: tuple[float, float]
    cfi: float
    tli: float
    srmr: float
    aic: float
    bic: float

    def __str__(self) -> str:
        low, high = self.rmsea_interval
        return (
            f"χ² = {self.chi_square:.3f}, df = {self.df}, p = {self.p_value:.4f}; "
            f"RMSEA {self.rmsea:.3f} (90 % {low:.3f} to {high:.3f}); CFI {self.cfi:.3f}, "
            f"TLI {self.tli:.3f}, SRMR {self.srmr:.3f}; AIC {self.aic:.2f}, BIC {self.bic:.2f}"
        )


def degrees_of_freedom(p: int, k: int) -> int:
    """Of a model of k factors for p variables: ``((p - k)² - p - k) / 2``."""
    return ((p - k) ** 2 - p - k) // 2


def fit_statistics(
    moments: Moments, mean: Tensor, covariance: Tensor, k: int, *, scale: Tensor
) -> FitStatistics:
    """The statistics of a fitted model.

    ``mean`` and ``covariance``: of the model. ``k``: the number of factors. ``scale``: the units of
    the variables, of which the data were divided by.
    """
    p, n = len(mean), moments.n
    free_mean, free_covariance = moments.saturated()
    units = float((moments.counts[:, None] * moments.masks).sum(0) @ scale.log())
    likelihood = moments.log_likelihood(mean, covariance) - units
    saturated = moments.log_likelihood(free_mean, free_covariance) - units
    baseline = moments.log_likelihood(*_uncorrelated(moments)) - units
    chi_square, df = max(0.0, 2 * (saturated - likelihood)), degrees_of_freedom(p, k)
    worst, worst_df = 2 * (saturated - baseline), p * (p - 1) // 2
    n_parameters = p * k - k * (k - 1) // 2 + 2 * p
    excess, worst_excess = max(0.0, chi_square - df), max(0.0, worst - worst_df, chi_square - df)
    ratio = worst / worst_df if worst_df else math.nan
    return FitStatistics(
        log_likelihood=likelihood,
        n_parameters=n_parameters,
        chi_square=chi_square,
        df=df,
        p_value=float(stats.chi2.sf(chi_square, df)) if df else math.nan,
        rmsea=math.sqrt(excess / (df * n)) if df else 0.0,
        rmsea_interval=_rmsea_interval(chi_square, df, n),
        cfi=1 - excess / worst_excess if worst_excess else 1.0,
        tli=(ratio - chi_square / df) / (ratio - 1) if df and ratio != 1 else 1.0,
        srmr=_srmr(free_mean, free_covariance, mean, covariance),
        aic=2 * n_parameters - 2 * likelihood,
        bic=math.log(n) * n_parameters - 2 * likelihood,
    )


def _uncorrelated(moments: Moments) -> tuple[Tensor, Tensor]:
    """The means and variances of each variable alone."""
    weights = moments.counts[:, None] * moments.masks
    mean = (weights * moments.means).sum(0) / weights.sum(0)
    squares = moments.covariances.diagonal(dim1=1, dim2=2) + (moments.means - mean).square()
    return mean, torch.diag((weights * squares).sum(0) / weights.sum(0))


def _rmsea_interval(chi_square: float, df: int, n: int) -> tuple[float, float]:
    if not df:
        return 0.0, 0.0

    def bound(probability: float) -> float:
        def off(noncentrality: float) -> float:
            return float(stats.ncx2.cdf(chi_square, df, noncentrality)) - probability

        if stats.chi2.cdf(chi_square, df) < probability:
            return 0.0
        top = chi_square + 10 * math.sqrt(2 * (df + 2 * chi_square)) + 10
        return math.sqrt(float(brentq(off, 1e-12, top)) / (df * n))

    return bound(0.95), bound(0.05)


def _srmr(free_mean: Tensor, free: Tensor, mean: Tensor, covariance: Tensor) -> float:
    sigma, model = free.diagonal().sqrt(), covariance.diagonal().sqrt()
    residuals = free / sigma / sigma[:, None] - covariance / model / model[:, None]
    variances = 1 - model.square() / sigma.square()
    means = free_mean / sigma - mean / model
    p = len(mean)
    rows, columns = torch.tril_indices(p, p, -1).unbind()
    total = residuals[rows, columns].square().sum() + variances.square().sum()
    total = total + means.square().sum()
    return math.sqrt(float(total) / (p * (p + 1) / 2 + p))
