"""The scikit-learn face."""

from fisherfold.estimators.completion import MatrixCompletion
from fisherfold.estimators.completion_cv import MatrixCompletionCV
from fisherfold.estimators.imputer import LowRankImputer
from fisherfold.estimators.subspace import SubspaceRegressor
from fisherfold.estimators.subspace_classifier import SubspaceClassifier

__all__ = ["LowRankImputer", "MatrixCompletion", "MatrixCompletionCV", "SubspaceClassifier", "SubspaceRegressor"]
