"""Where data lives: losses over manifolds as finite sums."""

from fisherfold.problems.base import Problem, Snapshot
from fisherfold.problems.completion import CompletionProblem
from fisherfold.problems.nll import NLLProblem
from fisherfold.problems.ratings import Ratings
from fisherfold.problems.twolayer import TwoLayer

__all__ = ["CompletionProblem", "NLLProblem", "Problem", "Ratings", "Snapshot", "TwoLayer"]
