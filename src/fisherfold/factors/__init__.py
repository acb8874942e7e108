"""Factor analysis by maximum likelihood, with standard errors of rotated loadings."""

from fisherfold.factors.estimator import FactorAnalysis
from fisherfold.factors.fit_statistics import FitStatistics
from fisherfold.factors.rotation import rotate

__all__ = ["FactorAnalysis", "FitStatistics", "rotate"]
