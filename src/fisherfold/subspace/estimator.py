"""What the regressor and the classifier of many tasks share."""

from __future__ import annotations

import functools
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor
from typing_extensions import ParamSpec, Self

from fisherfold.progress import track
from fisherfold.solvers import Result
from fisherfold.subspace import files
from fisherfold.subspace.inputs import (
    Scaling,
    TaskTable,
    check_numeric,
    read_table,
    task_ids,
    without_column,
)
from fisherfold.tables import validation
from fisherfold.tables.ids import IdIndex, as_array, is_missing
from fisherfold.tables.validation import Check

Array = NDArray[Any]
Callback = Callable[[dict[str, float]], object]
P = ParamSpec("P")
R = TypeVar("R")
_DEFAULT_RANK = 6
SHARED_CHECKS: dict[str, Check] = {
    "rank": validation.optional(validation.integer(1)),
    "fit_intercept": validation.flag(),
    "scale": validation.flag(),
    "max_iter": validation.integer(1),
    "tol": validation.number(),
    "random_state": validation.seed(),
    "verbose": validation.verbosity(),
}


def all_or_nothing(method: Callable[P, R]) -> Callable[P, R]:
    """Restore the attributes of an estimator if a method fails."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        state = vars(args[0])
        before = dict(state)
        try:
            return method(*args, **kwargs)
        except BaseException:
            state.clear()
            state.update(before)
            raise

    return guarded


class TaskEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """An estimator of rows of many tasks with a frame that the tasks share.

    A subclass has the parameters ``rank``, ``fit_intercept``, ``max_iter`` and ``verbose`` and a
    check for each of its parameters; ``fit`` sets ``_frame``, ``_weights``, ``_index`` and
    ``scaling_``.
    """

    CHECKS: ClassVar[dict[str, Check]]
    rank: int | None
    fit_intercept: bool
    max_iter: int
    verbose: bool
    scaling_: Scaling
    task_column_: str | None
    target_name_: str | None
    n_features_in_: int
    _frame: Tensor
    _weights: Tensor
    _index: IdIndex

    @property
    def task_ids_(self) -> Array:
        """The tasks, in the order of all per-task attributes."""
        return self._index.labels

    @property
    def components_(self) -> Array:
        """The frame U in standardised features, the intercept last: (features, rank)."""
        return np.asarray(self._frame.numpy())

    @property
    def coef_(self) -> Array:
        """Coefficients per task in the units of X, shape (tasks, features)."""
        return self.scaling_.to_user(self._weights)[0]

    @property
    def intercept_(self) -> Array:
        """Intercepts per task."""
        return self.scaling_.to_user(self._weights)[1]

    @property
    def _n_features_out(self) -> int:
        return self._frame.shape[1]

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_frame")

    def __getstate__(self) -> dict[str, Any]:
        """Parameters, and the plain state of a fitted model, for pickle and joblib."""
        state = {"parameters": self.get_params(deep=False)}
        return state | {"fitted": files.to_state(self)} if self.__sklearn_is_fitted__() else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["parameters"])
        if "fitted" in state:
            files.restore(self, *state["fitted"])

    def transform(self, X: Any) -> Array:
        """The shared features: rows projected to the learnt subspace."""
        check_is_fitted(self)
        return np.asarray(
            (
                self.scaling_(self._features(without_column(X, self.task_column_))) @ self._frame
            ).numpy()
        )

    def save(self, path: str | os.PathLike[str], *, with_statistics: bool = True) -> None:
        """Write the model into a folder, without pickle."""
        check_is_fitted(self)
        self._check_parameters()
        files.save_model(path, self, with_statistics=with_statistics)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a model that ``save`` wrote."""
        return files.load_model(path, cls)

    def _features(self, X: Any) -> Array:
        check_numeric(X)
        return np.asarray(validate_data(self, X, reset=False, dtype=np.float64))

    def _table(self, X: Any, y: Any, task: Any) -> TaskTable:
        """Rows for a fitted model in any form that ``fit`` takes."""
        check_is_fitted(self)
        return read_table(X, y, task, self.task_column_)

    def _compared(self, X: Any, y: Any, task: Any, unseen: str) -> tuple[TaskTable, Array]:
        """Rows as one table, and their predictions as one array."""
        given = self._table(X, y, task)
        found = self.predict(X, task, unseen=unseen)
        return given, np.concatenate(found) if isinstance(found, list) else found

    def _read(
        self,
        X: Any,
        y: Any,
        task: Any,
        sample_weight: Any,
        *,
        reset: bool,
        numeric: bool,
        least: int | None = None,
    ) -> tuple[Array, Array, Array | None, Array | None]:
        """Validated features, targets, task ids (None for a single task) and weights."""
        given = read_table(X, y, task) if reset else self._table(X, y, task)
        if reset:
            self.task_column_ = task if isinstance(task, str) else None
            name = getattr(y, "name", None)
            self.target_name_ = name if isinstance(name, str) and name else None
        check_numeric(given.X)
        if not numeric and given.y is not None:
            missing = [k for k, label in enumerate(as_array(given.y).tolist()) if is_missing(label)]
            if missing:
                raise ValueError(
                    f"y must have no missing labels, the first is at position {missing[0]}"
                )
        least = (2 if reset else 1) if least is None else least
        X, y = validate_data(
            self,
            given.X,
            given.y,
            reset=reset,
            dtype=np.float64,
            y_numeric=numeric,
            multi_output=numeric,
            ensure_min_samples=least,
        )
        labels = None if given.task is None else task_ids(given.task, len(X))
        if labels is not None and y.ndim == 2:
            if y.shape[1] != 1:
                raise ValueError(f"y must have one column when task is given, got {y.shape[1]}")
            y = y[:, 0]
        if numeric:
            try:
                y = y.astype(np.float64)  # in float32 differences would be rounded
            except ValueError as error:
                raise ValueError(f"y must hold numbers: {error}") from None
        weight = given.row_weights(sample_weight)
        if weight is None:
            return X, y, labels, None
        weight = _check_sample_weight(weight, X, dtype=np.float64, ensure_non_negative=True)
        kept = weight > 0  # a row of weight 0 counts in no scale, split or number of tasks
        if kept.sum() < least:
            raise ValueError(
                f"at least {least} rows must have a positive weight, got {int(kept.sum())}"
            )
        return X[kept], y[kept], None if labels is None else labels[kept], weight[kept]

    def _keep(self, frame: Tensor, weights: Tensor, result: Result | None) -> None:
        """Keep a point fit; there is no result where there was no subspace to learn."""
        self._frame = frame
        self._weights = weights @ frame.mT
        self.trace_ = [] if result is None else result.trace.rows
        self.n_iter_ = 1 if result is None else max(1, result.iterations)

    def _numbers_of(self, labels: Array | None, n_rows: int) -> Tensor:
        """The numbers of tasks that are known; without labels there is one."""
        return torch.from_numpy(
            np.zeros(n_rows, np.int64) if labels is None else self._index.encode(labels, "task")
        )

    def _check_parameters(self) -> dict[str, Any]:
        return validation.check_parameters(self.get_params(deep=False), self.CHECKS)

    @abstractmethod
    def _check_fitted(self) -> None:
        """Raise ``ValueError`` if a loaded model lacks something that a fitted one has."""

    def _checked_rank(self, n_features: int) -> int:
        """The rank; ``n_features`` counts the column of the intercept."""
        if self.rank is None:
            return min(_DEFAULT_RANK, n_features)
        if int(self.rank) > n_features:
            meaning = "features plus one for the intercept" if self.fit_intercept else "features"
            raise ValueError(
                f"rank must be an integer from 1 to {n_features} (the {meaning}), got {self.rank}"
            )
        return int(self.rank)

    def _numbers(self, task: Any, n_rows: int, unseen: str) -> Array:
        """The number of each row's task; -1 for an unseen one where that is allowed."""
        if unseen not in {"error", "mean"}:
            raise ValueError(f"unseen must be 'error' or 'mean', got {unseen!r}")
        if task is None:
            if len(self._index) > 1:
                raise ValueError(f"task must be given: the model has {len(self._index)} tasks")
            return np.zeros(n_rows, dtype=np.int64)
        labels = task_ids(task, n_rows)
        numbers = self._index.encode(labels, "task")
        if unseen == "error" and (numbers < 0).any():
            missing = list(dict.fromkeys(labels[numbers < 0].tolist()))
            shown = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise ValueError(
                f"{len(missing)} task(s) not seen in fit: {shown}; use fold_in to add new tasks, "
                "or unseen='mean' "
                "(--unseen mean) to predict what all tasks share"
            )
        return numbers

    @contextmanager
    def _progress(self, callback: Callback | None) -> Iterator[Callback]:
        """The user's callback, called once the line of the display is up to date."""
        with track("fitting", at_most=int(self.max_iter), verbose=self.verbose) as line:

            def report(row: dict[str, float]) -> object:
                line.update(row["round"], row)
                return callback is not None and callback(row)

            yield report
