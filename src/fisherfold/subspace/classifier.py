"""Many small related binary classifications as a scikit-learn estimator."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor

from fisherfold.solvers import Result
from fisherfold.subspace.estimator import SHARED_CHECKS, Callback, TaskEstimator, all_or_nothing
from fisherfold.subspace.inputs import Scaling, TaskTable
from fisherfold.subspace.logistic import LabelledRows, LogisticSubspaceProblem, newton_coefficients
from fisherfold.subspace.marginal import start_frame
from fisherfold.subspace.problem import RIDGES, held_out_rows, solve
from fisherfold.tables import validation
from fisherfold.tables.ids import IdIndex
from fisherfold.tables.validation import Check

Array = NDArray[Any]


class SubspaceClassifier(ClassifierMixin, TaskEstimator):  # type: ignore[misc]
    """Logistic regressions for many tasks whose coefficients share a subspace.

    The log odds of the second class are o + xᵀ U w_t, with U on the Grassmann manifold moved by
    RNGD, w_t by damped Newton for all tasks at once, and a ridge on w_t. o are the log odds of all
    rows together (0 without intercepts), so that the ridge draws tasks to the share of the class,
    and not to one half.

    Args:
        rank: the dimension of the subspace, at most the number of features (plus one with an
            intercept), where every task has its own ridge solution; None for 6, or as many as there
            are.
        ridge: λ > 0, or ``auto`` for the one with the lowest log loss on a fifth of every task's
            rows.
        fit_intercept: centre the features and give every task an intercept.
        scale: divide features by their standard deviation.
        fisher: the matrix of the steps: ``observed``, the Hessian; ``exact``, the Fisher
            information; ``kronecker``, the paper's approximation of it. The last two take more
            steps.
        max_iter: the most iterations.
        tol: stop when five iterations lower the loss by less than this fraction.
        random_state: seed of the split for the ridge.
        verbose: print the progress.

    Attributes:
        classes_: the two classes.
        coef_: coefficients per task in the units of X, shape (tasks, features).
        intercept_: intercepts per task.
        ridge_: the ridge that was used.
        ridge_errors_: held-out log loss per ridge tried (``auto``).
        task_column_: the column of the data frame that held the tasks, or None.
        trace_: one row per iteration.
        n_iter_: how many.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> X, task = rng.normal(size=(200, 3)), np.repeat(["a", "b"], 100)
        >>> y = np.where(task == "a", X[:, 0] > 0, X[:, 0] < 0)
        >>> model = SubspaceClassifier(rank=1).fit(X, y, task=task)
        >>> model.predict([[1.0, 0.0, 0.0]] * 2, task=["a", "b"])
        array([ True, False])
    """

    CHECKS: ClassVar[dict[str, Check]] = SHARED_CHECKS | {
        "ridge": validation.auto_or(validation.number(0, above=True)),
        "fisher": validation.choice(*LogisticSubspaceProblem.fisher_kinds),
    }

    def __init__(
        self,
        rank: int | None = None,
        *,
        ridge: float | str = "auto",
        fit_intercept: bool = True,
        scale: bool = True,
        fisher: str = "observed",
        max_iter: int = 100,
        tol: float = 1e-6,
        random_state: int | None = None,
        verbose: bool = False,
    ) -> None:
        self.rank = rank
        self.ridge = ridge
        self.fit_intercept = fit_intercept
        self.scale = scale
        self.fisher = fisher
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    @all_or_nothing
    def fit(
        self,
        X: Any,
        y: Any,
        task: Any = None,
        sample_weight: Any = None,
        *,
        callback: Callback | None = None,
    ) -> SubspaceClassifier:
        """Learn from rows of all tasks.

        Args:
            X: features, one row per sample; or a list with one table per task.
            y: labels of two classes, one per row; or a list like X.
            task: the task of each row (integers or text), or the name of a column of the data frame
                X, which later calls then look up by themselves; None for a single task. For lists:
                their names.
            sample_weight: a weight per row, or a list like X; a row of weight 2 counts as two, so
                that weights which add up to 1 stand for a single row.
            callback: called after every iteration with a dictionary of ``round`` and ``loss``; a
                true value stops.
        """
        self._check_parameters()
        X, y, labels, weight = self._read(X, y, task, sample_weight, reset=True, numeric=False)
        self.classes_ = _two_classes(y)
        scaling = Scaling.learn(
            X, np.zeros(len(X)), weight, intercept=self.fit_intercept, scale=self.scale
        )
        offset = _log_odds_of(y == self.classes_[1], weight) if self.fit_intercept else 0.0
        self.scaling_ = replace(scaling, offset=offset)
        self._index = IdIndex(np.zeros(1, dtype=np.int64) if labels is None else labels, "task")
        rank = self._checked_rank(X.shape[1] + int(self.fit_intercept))
        rows = self._rows(X, y, labels, weight)
        self.__dict__.pop("ridge_errors_", None)
        self.ridge_ = (
            self._choose_ridge(rows, rank) if isinstance(self.ridge, str) else float(self.ridge)
        )
        how: dict[str, Any] = {
            "max_iter": int(self.max_iter),
            "tol": float(self.tol),
            "fisher": self.fisher,
        }
        with self._progress(callback) as report:
            self._keep(*_solve(rows, rank, self.ridge_, **how, callback=report))
        return self

    @all_or_nothing
    def fold_in(
        self, X: Any, y: Any, task: Any = None, sample_weight: Any = None
    ) -> SubspaceClassifier:
        """Fit the coefficients of new tasks, or fit known ones anew, with the subspace held fixed.

        Arguments are those of ``fit``; a known task gets the coefficients of these rows alone.
        """
        check_is_fitted(self)
        X, y, labels, weight = self._read(X, y, task, sample_weight, reset=False, numeric=False)
        unknown = set(np.unique(y).tolist()) - set(self.classes_.tolist())
        if unknown:
            raise ValueError(
                f"y must hold the classes {self.classes_.tolist()}, got also {sorted(unknown)}"
            )
        if labels is None:
            raise ValueError("task must be given: it names what is folded in")
        self._index = copy(self._index)
        self._index.extend(labels, "task")
        rows = self._rows(X, y, labels, weight)
        present, place = torch.unique(rows.task, return_inverse=True)
        chosen = replace(rows, task=place, n_tasks=len(present))
        found, _ = newton_coefficients(chosen, chosen.X @ self._frame, self.ridge_)
        grown = torch.zeros(len(self._index), self._weights.shape[1], dtype=torch.float64)
        grown[: len(self._weights)] = self._weights
        grown[present] = found @ self._frame.mT
        self._weights = grown
        return self

    def decision_function(self, X: Any, task: Any = None, *, unseen: str = "error") -> Any:
        """The log odds of the second class.

        Args:
            X: features, one row per sample; or a list with one table per task.
            task: the task of each row; None if the model has a single task. For lists: as in
                ``fit``.
            unseen: what to do with a task that was not seen: ``error``, or ``mean`` for the mean
                coefficients.

        Returns:
            One number per row; a list like X.
        """
        given = self._table(X, None, task)
        return given.like_given(self._log_odds(given, unseen))

    def _log_odds(self, given: TaskTable, unseen: str) -> Array:
        features = self._features(given.X)
        numbers = torch.from_numpy(self._numbers(given.task, len(features), unseen))
        weights = torch.cat([self._weights, self._weights.mean(0, keepdim=True)])[numbers]
        return (
            np.asarray((self.scaling_(features) * weights).sum(-1).numpy()) + self.scaling_.offset
        )

    def predict_proba(self, X: Any, task: Any = None, *, unseen: str = "error") -> Any:
        """Probabilities of the classes, (rows, 2); arguments as in ``decision_function``."""
        given = self._table(X, None, task)
        second = expit(self._log_odds(given, unseen))
        return given.like_given(np.stack([1 - second, second], axis=1))

    def predict(self, X: Any, task: Any = None, *, unseen: str = "error") -> Any:
        """The more likely class; arguments as in ``decision_function``."""
        given = self._table(X, None, task)
        odds = self._log_odds(given, unseen)
        return given.like_given(np.asarray(self.classes_[(odds > 0).astype(np.int64)]))

    def score(
        self, X: Any, y: Any, task: Any = None, sample_weight: Any = None, *, unseen: str = "error"
    ) -> float:
        """The share of correctly classified rows; arguments as in ``decision_function``."""
        from sklearn.metrics import accuracy_score

        given, predicted = self._compared(X, y, task, unseen)
        return float(
            accuracy_score(
                column_or_1d(given.y), predicted, sample_weight=given.row_weights(sample_weight)
            )
        )

    def _check_fitted(self) -> None:
        self._check_parameters()
        if len(getattr(self, "classes_", ())) != 2 or not hasattr(self, "ridge_"):
            raise ValueError("it must have two classes and a ridge")

    def _rows(self, X: Array, y: Array, labels: Array | None, weight: Array | None) -> LabelledRows:
        target = torch.from_numpy((y == self.classes_[1]).astype(np.float64))
        weights = None if weight is None else torch.from_numpy(weight)
        return LabelledRows.make(
            self.scaling_(X),
            target,
            self._numbers_of(labels, len(X)),
            n_tasks=len(self._index),
            weight=weights,
            offset=torch.full_like(target, self.scaling_.offset),
        )

    def _choose_ridge(self, rows: LabelledRows, rank: int) -> float:
        held = torch.from_numpy(
            held_out_rows(rows.task.numpy(), validation.draw_seed(self.random_state, 0))
        )
        train, test = (rows.select(part) for part in (~held, held))
        self.ridge_errors_ = {}
        for ridge in RIDGES:  # ranked by a few cheap steps each
            frame, weights, _ = _solve(
                train, rank, ridge, max_iter=15, tol=1e-4, fisher="kronecker"
            )
            logits = test.offset + (test.X @ frame * weights[test.task]).sum(-1)
            losses = torch.nn.functional.softplus(logits) - test.y * logits
            self.ridge_errors_[ridge] = float(
                (test.weight * losses).sum() / test.weight.sum().clamp(min=1e-300)
            )
        return min(self.ridge_errors_, key=self.ridge_errors_.__getitem__)


def _solve(
    rows: LabelledRows,
    rank: int,
    ridge: float,
    *,
    max_iter: int,
    tol: float,
    fisher: str,
    callback: Callback | None = None,
) -> tuple[Tensor, Tensor, Result | None]:
    """Frame, coefficients and the solver's result (None without a subspace to learn)."""
    n = rows.X.shape[1]
    if rank == n:
        return torch.eye(n, dtype=torch.float64), newton_coefficients(rows, rows.X, ridge)[0], None
    # one Newton step from zero is enough for a start
    own, _ = newton_coefficients(rows, rows.X, ridge, max_iter=1)
    problem = LogisticSubspaceProblem(rows, rank=rank, ridge=ridge)
    frame = start_frame(own.mT @ own / len(own), rows.X.mT @ rows.X, rank)[0]
    result = solve(problem, frame, max_iter=max_iter, tol=tol, fisher=fisher, callback=callback)
    return result.x, problem.state(result.x).weights, result


def _two_classes(y: Array) -> Array:
    check_classification_targets(y)
    kind = type_of_target(y, input_name="y", raise_unknown=True)
    classes = np.unique(y)
    if kind != "binary":
        raise ValueError(
            f"Only binary classification is supported. The type of the target is {kind}."
        )
    if len(classes) < 2:
        raise ValueError(f"y must hold two classes, got one class: {classes.tolist()}")
    return classes


def _log_odds_of(second: Array, weight: Array | None) -> float:
    """The log odds of the second class, finite for any weights: each class has half a row more."""
    shares = np.ones(len(second)) if weight is None else weight
    return float(np.log(shares[second].sum() + 0.5) - np.log(shares[~second].sum() + 0.5))
