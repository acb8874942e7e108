"""Multi-task subspace learning: tasks, problem, Fisher operators, inference, estimators."""

from fisherfold.subspace.classifier import SubspaceClassifier
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.regressor import SubspaceRegressor
from fisherfold.subspace.tasks import TaskStatistics

__all__ = ["SubspaceClassifier", "SubspaceProblem", "SubspaceRegressor", "TaskStatistics"]
