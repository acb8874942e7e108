"""Where data lives: losses over manifolds as finite sums."""

from fisherfold.problems.base import Problem, Snapshot
from fisherfold.problems.nll import NLLProblem

__all__ = ["NLLProblem", "Problem", "Snapshot"]
