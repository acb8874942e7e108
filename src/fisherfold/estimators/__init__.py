"""The scikit-learn face."""

from fisherfold.estimators.completion import MatrixCompletion
from fisherfold.estimators.completion_cv import MatrixCompletionCV
from fisherfold.estimators.imputer import LowRankImputer

__all__ = ["LowRankImputer", "MatrixCompletion", "MatrixCompletionCV"]
