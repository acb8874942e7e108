"""Multi-task subspace learning: tasks, their problem and Fisher operators, inference, estimators."""

from fisherfold.subspace.classifier import SubspaceClassifier
from fisherfold.subspace.regressor import SubspaceRegressor

__all__ = ["SubspaceClassifier", "SubspaceRegressor"]
