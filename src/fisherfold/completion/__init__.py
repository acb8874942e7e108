"""Completion of tables with holes: ratings, their problem and Fisher operators, inference, estimators."""

from fisherfold.completion.cross_validation import MatrixCompletionCV
from fisherfold.completion.estimator import MatrixCompletion
from fisherfold.completion.implicit import ImplicitCompletion
from fisherfold.completion.imputer import LowRankImputer, Pooled, pool_estimates
from fisherfold.completion.point.problem import CompletionProblem
from fisherfold.completion.ratings import Ratings

__all__ = [
    "CompletionProblem",
    "ImplicitCompletion",
    "LowRankImputer",
    "MatrixCompletion",
    "MatrixCompletionCV",
    "Pooled",
    "Ratings",
    "pool_estimates",
]
