"""Output distributions and the Fisher information as an operator on the tangent space."""

from fisherfold.fisher.conjugate import Solution
from fisherfold.fisher.jacobian import EmpiricalFisher, ExactFisher, MonteCarloFisher
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from fisherfold.fisher.operators import DenseFisher, FisherOperator, VarianceReducedFisher
from fisherfold.fisher.rowblock import RowBlockFisher
from fisherfold.fisher.solve import solve

__all__ = [
    "Bernoulli", "Categorical", "DenseFisher", "EmpiricalFisher", "ExactFisher", "FisherOperator", "Gaussian",
    "KroneckerFisher", "Likelihood", "MonteCarloFisher", "Poisson", "RowBlockFisher", "Solution",
    "VarianceReducedFisher", "solve",
]  # fmt: skip
