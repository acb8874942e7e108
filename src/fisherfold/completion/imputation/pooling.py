"""Rubin's rules: the analyses of several imputed tables as one.

    q̄ = mean of q_k,   T = W + (1 + 1/m) B,   W = mean of u_k,   B = variance of q_k over m - 1

with the degrees of freedom of Barnard and Rubin (1999), where λ = (1 + 1/m) B/T is the share that
is due to the holes:

    1/ν = 1/ν_m + 1/ν_obs,   ν_m = (m - 1)/λ²,   ν_obs = (ν_com + 1)/(ν_com + 3) ν_com (1 - λ)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

Floats = npt.NDArray[np.float64]
_LEAST = 1e-12  # of a share and of degrees of freedom, which are divided by


class Pooled(NamedTuple):
    """Estimates pooled over imputations.

    Attributes:
        estimate: their mean.
        std_error: its standard error, with what is not known about the missing values.
        df: the degrees of freedom of its t distribution.
        missing: the share of its variance that is due to the missing values.
    """

    estimate: Floats
    std_error: Floats
    df: Floats
    missing: Floats

    def interval(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """Give the lower and upper ends of a confidence interval."""
        half = student.ppf((1 + level) / 2, self.df) * self.std_error
        return self.estimate - half, self.estimate + half


def pool_estimates(estimates: Any, variances: Any, *, df_complete: float = np.inf) -> Pooled:
    """Combine the analyses of m imputed tables by Rubin's rules.

    Args:
        estimates: m estimates, or m vectors of them.
        variances: their squared standard errors, of the same shape.
        df_complete: the degrees of freedom of the analysis of a complete table.

    Returns:
        The pooled estimates.

    Raises:
        ValueError: if there are fewer than two.

    Example:
        >>> pooled = pool_estimates([1.0, 1.2, 0.8], [0.1, 0.1, 0.1])
        >>> float(pooled.estimate), round(float(pooled.std_error), 4)
        (1.0, 0.3916)
    """
    q = np.asarray(estimates, dtype=np.float64)
    u = np.asarray(variances, dtype=np.float64)
    m = len(q) if q.ndim else 0
    if m < 2 or q.shape != u.shape:
        raise ValueError(
            f"at least 2 estimates with as many variances are needed, got {q.shape} and {u.shape}"
        )
    if not (df_complete > 0):
        raise ValueError(f"df_complete must be positive, got {df_complete!r}")
    within = u.mean(axis=0)
    between = (1 + 1 / m) * q.var(axis=0, ddof=1)
    total = within + between
    share = between / np.where(total > 0, total, 1)
    df = (m - 1) / np.maximum(share, _LEAST) ** 2
    if np.isfinite(df_complete):
        observed = (df_complete + 1) / (df_complete + 3) * df_complete * (1 - share)
        df = 1 / (1 / df + 1 / np.maximum(observed, _LEAST))
    return Pooled(q.mean(axis=0), np.sqrt(total), df, share)
