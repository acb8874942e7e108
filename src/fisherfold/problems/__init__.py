"""Where data lives: losses over manifolds as finite sums."""

from fisherfold.problems.base import Problem, Snapshot
from fisherfold.problems.checks import check_fisher, check_gradient
from fisherfold.problems.nll import NLLProblem

__all__ = ["NLLProblem", "Problem", "Snapshot", "check_fisher", "check_gradient"]
