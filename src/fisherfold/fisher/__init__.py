"""Output distributions and the Fisher information as an operator on the tangent space."""

from fisherfold.fisher.conjugate import Solution
from fisherfold.fisher.covariance import Covariance, covariance
from fisherfold.fisher.general_likelihoods import (
    HeteroscedasticGaussian,
    MultivariateGaussian,
    NegativeBinomial,
    OrderedProbit,
    StudentT,
    VonMisesFisher,
)
from fisherfold.fisher.hessian import PriorFisher
from fisherfold.fisher.jacobian import EmpiricalFisher, ExactFisher, MonteCarloFisher
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.layers import BlockFisher
from fisherfold.fisher.likelihoods import (
    Bernoulli,
    Categorical,
    ExponentialFamily,
    Gaussian,
    Likelihood,
    Poisson,
)
from fisherfold.fisher.operators import DenseFisher, FisherOperator, VarianceReducedFisher
from fisherfold.fisher.rowblock import RowBlockFisher
from fisherfold.fisher.solve import solve

__all__ = [
    "Bernoulli",
    "BlockFisher",
    "Categorical",
    "Covariance",
    "DenseFisher",
    "EmpiricalFisher",
    "ExactFisher",
    "ExponentialFamily",
    "FisherOperator",
    "Gaussian",
    "HeteroscedasticGaussian",
    "KroneckerFisher",
    "Likelihood",
    "MonteCarloFisher",
    "MultivariateGaussian",
    "NegativeBinomial",
    "OrderedProbit",
    "Poisson",
    "PriorFisher",
    "RowBlockFisher",
    "Solution",
    "StudentT",
    "VarianceReducedFisher",
    "VonMisesFisher",
    "covariance",
    "solve",
]
