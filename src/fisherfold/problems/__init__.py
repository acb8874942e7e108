"""Where data lives: losses over manifolds as finite sums."""

from fisherfold.problems.base import Problem, Snapshot
from fisherfold.problems.checks import check_fisher, check_gradient
from fisherfold.problems.completion import CompletionProblem
from fisherfold.problems.nll import NLLProblem
from fisherfold.problems.ratings import Ratings
from fisherfold.problems.twolayer import TwoLayer

__all__ = [
    "CompletionProblem", "NLLProblem", "Problem", "Ratings", "Snapshot", "TwoLayer", "check_fisher", "check_gradient",
]  # fmt: skip
