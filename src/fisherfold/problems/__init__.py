"""Where data lives: losses over manifolds as finite sums."""

from fisherfold.fisher.hessian import Hessian
from fisherfold.problems.base import Problem, Snapshot
from fisherfold.problems.checks import check_fisher, check_gradient
from fisherfold.problems.gaussian_model import GaussianModel
from fisherfold.problems.loss import LossProblem
from fisherfold.problems.nll import NLLProblem

__all__ = [
    "GaussianModel",
    "Hessian",
    "LossProblem",
    "NLLProblem",
    "Problem",
    "Snapshot",
    "check_fisher",
    "check_gradient",
]
