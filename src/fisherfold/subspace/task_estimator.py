"""What the regressor and the classifier of many tasks share: reading rows, numbering tasks, shared features, files."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor
from typing_extensions import Self

from fisherfold.distributed import ALONE, Group
from fisherfold.files import digest
from fisherfold.plain import counted
from fisherfold.subspace.task_forms import TaskRows, read_rows, task_labels
from fisherfold.subspace.task_rows import Scaling
from fisherfold.tables import parameters
from fisherfold.tables.checkpoint import FitCheckpoint
from fisherfold.tables.ids import IdIndex, plain
from fisherfold.tables.inputs import unmasked
from fisherfold.tables.refusals import (
    reject_masked,
    reject_missing_labels,
    reject_overflow,
    reject_text,
    reject_text_targets,
)

Array = NDArray[Any]
DEFAULT_RANK = 6


class TaskEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """An estimator with rows of many tasks and a frame that they share.

    A subclass has the parameters ``rank``, ``fit_intercept``, ``scale``, ``max_iter``, ``tol`` and
    ``checkpoint``, and sets ``_frame``,
    ``_index`` and ``scaling_`` when it is fitted.
    """

    checkpoint: str | os.PathLike[str] | None
    _frame: Tensor
    _index: IdIndex
    scaling_: Scaling

    @property
    def task_ids_(self) -> Array:
        """The tasks, in the order of all per-task attributes."""
        return self._index.labels

    @property
    def components_(self) -> Array:
        """The frame U in the standardised features, the intercept's row last, shape (features, rank)."""
        return np.asarray(self._frame.numpy())

    @property
    def _n_features_out(self) -> int:
        return self._frame.shape[1]

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_frame")

    def transform(self, X: Any) -> Array:
        """The shared features: rows in the learnt subspace.

        Args:
            X: features, one row per sample.

        Returns:
            An array of shape (rows, rank).
        """
        return np.asarray((self.scaling_(self._features(X)) @ self._frame).numpy())

    def save(self, path: str | os.PathLike[str], *, with_statistics: bool = True) -> None:
        """Write the model into a folder, without pickle.

        Args:
            path: the folder.
            with_statistics: keep what learning from further rows needs (features squared numbers per task).
        """
        from fisherfold.subspace.files import save_model

        check_is_fitted(self)
        self._check_parameters()  # what was set since the fit: a file with it could not be read
        save_model(path, self, with_statistics=with_statistics)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a model that ``save`` wrote.

        Args:
            path: the folder.

        Returns:
            A fitted estimator.
        """
        from fisherfold.subspace.files import load_model

        return load_model(path, cls)

    def _saved(self, data: Iterable[Tensor], group: Group = ALONE, **more: Any) -> FitCheckpoint | None:
        """The checkpoint of a fit to these data, if there is to be one."""
        if self.checkpoint is None:
            return None
        free = {"max_iter", "verbose", "checkpoint"}
        params = {name: value for name, value in self.get_params(deep=False).items() if name not in free}
        known = params | more | {"estimator": type(self).__name__, "data": " ".join(group.gather_texts(digest(data)))}
        return FitCheckpoint(self.checkpoint, known, group)

    def _features(self, X: Any) -> Array:
        check_is_fitted(self)
        reject_masked(X, "X")
        reject_text(X)
        found = np.asarray(validate_data(self, unmasked(X), reset=False, dtype=np.float64))
        reject_overflow(found, "X")
        return found

    def _asked(self, X: Any, task: Any) -> TaskRows:
        """Checked features of rows without targets, in any form that ``fit`` takes."""
        check_is_fitted(self)
        reject_masked(X, "X")
        given = read_rows(X, None, task)
        return replace(given, X=self._features(given.X))

    @staticmethod
    def _one_table(X: Any, y: Any, task: Any) -> TaskRows:
        """Lists of tables with their targets as one table; a table as it is."""
        for name, values in (("X", X), ("y", y)):
            reject_masked(values, name)
        return read_rows(X, y, task)

    def _read(
        self, X: Any, y: Any, task: Any, sample_weight: Any, *, reset: bool, numeric: bool,
        least: int | None = None,
    ) -> tuple[Array, Array, Array | None, Array | None]:  # fmt: skip
        """Checked features, targets, task ids (None for a single task or several outputs) and weights."""
        reject_masked(sample_weight, "sample_weight")
        given = self._one_table(X, y, task)
        targets = unmasked(given.y) if numeric else given.y
        reject_text(given.X)
        if targets is not None:
            (reject_text_targets if numeric else reject_missing_labels)(targets)
        least = (2 if reset else 1) if least is None else least
        X, y = validate_data(
            self, given.X, targets, reset=reset, dtype=np.float64, y_numeric=numeric, multi_output=numeric,
            ensure_min_samples=least,
        )  # fmt: skip
        labels = None if given.task is None else task_labels(given.task, len(X))
        if labels is not None and y.ndim == 2:
            if y.shape[1] != 1:
                raise ValueError(f"y must have one column when task is given, got {y.shape[1]}")
            y = y[:, 0]
        reject_overflow(X, "X")
        if numeric:
            # before anything is taken off: in float16 or float32 the differences would be rounded
            y = y.astype(np.float64)
            reject_overflow(y, "y")
        weight = given.row_weights(sample_weight)
        if weight is None:
            return X, y, labels, None
        weight = _check_sample_weight(weight, X, dtype=np.float64, ensure_non_negative=True)
        # a row of weight 0 is no row: it must not count in scales, splits or numbers of tasks
        kept = weight > 0
        if kept.sum() < least:
            raise ValueError(f"at least {counted(least, 'row')} must have a positive weight, got {int(kept.sum())}")
        return X[kept], y[kept], None if labels is None else labels[kept], weight[kept]

    @abstractmethod
    def _check_parameters(self) -> None:
        """Refuse parameters that no fit could use."""

    def _check_common(self) -> None:
        for name in ("fit_intercept", "scale"):
            parameters.flag(name, getattr(self, name))
        parameters.whole("max_iter", self.max_iter, 1)
        parameters.number("tol", self.tol)
        parameters.loudness(self.verbose)
        parameters.check_seed(self.random_state)
        parameters.check_path("checkpoint", self.checkpoint)

    def _checked_rank(self, n_features: int) -> int:
        """The rank; ``n_features`` counts the intercept's column."""
        if self.rank is None:
            return min(DEFAULT_RANK, n_features)
        rank = plain(self.rank)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= n_features:
            meaning = "the number of features plus one for the intercept" if self.fit_intercept else "of features"
            raise ValueError(f"rank must be a whole number between 1 and {n_features} ({meaning}), got {self.rank!r}")
        return rank

    def _numbers(self, task: Any, n_rows: int, unseen: str) -> Array:
        """The number of each row's task; -1 for an unseen one where that is allowed."""
        if unseen not in {"error", "mean"}:
            raise ValueError(f"unseen must be 'error' or 'mean', got {unseen!r}")
        if task is None:
            if len(self._index) > 1:
                raise ValueError(f"task must be given: the model has {len(self._index)} tasks")
            return np.zeros(n_rows, dtype=np.int64)
        labels = task_labels(task, n_rows)
        numbers = self._index.numbers(labels, "task")
        if unseen == "error" and (numbers < 0).any():
            missing = list(dict.fromkeys(plain(label) for label in labels[numbers < 0]))
            shown = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
            count = counted(len(missing), "task was", "tasks were")
            raise ValueError(
                f"{count} not seen in fit: {shown}; "
                "use fold_in to add new tasks, or unseen='mean' (--unseen mean) for what all tasks share"
            )
        return numbers
