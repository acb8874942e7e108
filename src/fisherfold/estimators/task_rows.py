"""Rows of many tasks in the forms that people have them: one table with a task per row, lists, or several outputs.

Inside, features are standardised and the intercept is one more column, z = ((x - μ)/σ, 1), so that all parts of a model
live in one space and are turned back into the user's units at the end.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherfold.distributed import Axis
from fisherfold.estimators.ids import id_array, is_missing, plain
from fisherfold.estimators.inputs import arrow_as_frame, unmasked
from fisherfold.plain import counted
from fisherfold.problems.tasks import TaskStatistics

Array = NDArray[Any]

# differences of this part of the numbers are rounding
ROUNDING = 1e-12


@dataclass(frozen=True)
class TaskRows:
    """A table of rows, one task each.

    Attributes:
        X: features as given, not yet checked.
        y: targets; two-dimensional for several outputs over shared rows.
        task: the task of each row as given, or None for a single task or several outputs.
        sizes: how many rows each table of a list has; None for a single table.
    """

    X: Any
    y: Any
    task: Any
    sizes: list[int] | None = None

    def like_given(self, values: Array) -> Any:
        """What was found for the rows in the form in which they were given.

        Args:
            values: the first axis over rows.

        Returns:
            The array, or a list with one for each table.
        """
        return values if self.sizes is None else np.split(values, np.cumsum(self.sizes)[:-1])

    def row_weights(self, weight: Any) -> Any:
        """Weights of all rows from weights as given: one per row, or a list like the tables.

        Args:
            weight: the weights, or None.

        Returns:
            Those of a list in one array, anything else as it is.

        Raises:
            ValueError: if a table has another number of rows than its weights.
        """
        if self.sizes is None or not isinstance(weight, (list, tuple)) or not any(np.ndim(part) for part in weight):
            return weight
        parts = [np.asarray(part).reshape(-1) for part in weight]
        if (lengths := [len(part) for part in parts]) != self.sizes:
            raise ValueError(f"sample_weight must be a list like X, with {self.sizes} rows, got {lengths}")
        return np.concatenate(parts)


def read_rows(X: Any, y: Any, task: Any) -> TaskRows:
    """Bring lists of per-task arrays into one table; leave a table as it is.

    Args:
        X: a table, or a list with one table per task.
        y: targets, in the same form; None if there are none.
        task: one id per row, or one per list entry; None for a single task, several outputs, or list positions.

    Returns:
        The table.

    Raises:
        ValueError: if lists have different lengths, or tables different columns.
    """
    if not _is_list_of_tables(X):
        return TaskRows(unmasked(X), y, task)
    targets = None if y is None else [np.asarray(part).reshape(-1) for part in y]
    ids = list(range(len(X))) if task is None else list(task)
    if len(ids) != len(X) or (targets is not None and len(targets) != len(X)):
        in_y = "" if targets is None else f", {len(targets)} in y"
        raise ValueError(
            f"lists of tasks must have the same length, got {counted(len(X), 'table')} in X{in_y} and "
            f"{counted(len(ids), 'id')} in task"
        )
    sizes, shown = [len(table) for table in X], [plain(name) for name in ids]
    for number, table in enumerate(X):
        if targets is not None and len(targets[number]) != sizes[number]:
            rows = counted(sizes[number], "row")
            raise ValueError(f"task {shown[number]!r}: X has {rows} and y has {len(targets[number])}")
        if table.shape[1] != X[0].shape[1]:
            features = counted(table.shape[1], "feature")
            raise ValueError(f"task {shown[number]!r} has {features}, the first task {X[0].shape[1]}")
    labels = np.repeat(id_array(ids, "task"), sizes)
    return TaskRows(_stacked(X, shown), None if targets is None else np.concatenate(targets), labels, sizes)


def _stacked(tables: Sequence[Any], ids: list[Any]) -> Any:
    """One table of all rows; data frames must have the same columns, and keep their names."""
    tables = [arrow_as_frame(table) for table in tables]
    kinds = {type(table).__module__.split(".")[0] for table in tables}
    if kinds not in ({"pandas"}, {"polars"}):
        return np.concatenate([np.asarray(unmasked(table)) for table in tables])
    first = list(tables[0].columns)
    for name, table in zip(ids, tables, strict=True):
        if list(table.columns) != first:
            raise ValueError(f"task {name!r} has the columns {list(table.columns)}, the first task {first}")
    if kinds == {"polars"}:
        import polars

        return polars.concat(tables, how="vertical_relaxed")
    import pandas

    return pandas.concat(tables, ignore_index=True)


def _is_list_of_tables(X: Any) -> bool:
    return isinstance(X, (list, tuple)) and len(X) > 0 and all(len(getattr(part, "shape", ())) == 2 for part in X)


def reject_masked(values: Any, name: str) -> None:
    """Refuse masked entries, which a conversion would take for data.

    Args:
        values: an array, a list of arrays or anything else.
        name: what they are.

    Raises:
        ValueError: if an entry is masked.
    """
    for part in values if isinstance(values, (list, tuple)) else (values,):
        if np.ma.is_masked(part):
            count = int(np.ma.getmaskarray(part).sum())
            raise ValueError(f"{name} must have no missing values, {counted(count, 'entry is', 'entries are')} masked")


def reject_text(X: Any) -> None:
    """Name the column that holds text or dates, before a conversion fails without a name or makes numbers of them.

    Args:
        X: a data frame, an array or anything else.

    Raises:
        ValueError: if a column holds text that is no number, or dates.
    """
    X = arrow_as_frame(X)
    if isinstance(X, np.ndarray) or not hasattr(X, "columns"):
        if getattr(getattr(X, "dtype", None), "kind", "O") in "mM":
            raise ValueError(f"X must hold numbers, got dtype {X.dtype}")
        return
    for name in X.columns:
        column = np.asarray(X[name])
        if column.dtype.kind in "mM":
            raise ValueError(f"column {name!r} must hold numbers, got dtype {column.dtype}")
        if column.dtype.kind not in "OUS":
            continue
        for row, value in enumerate(column.tolist()):
            if isinstance(value, str) and not _is_number(value):
                raise ValueError(f"column {name!r} must hold numbers, got the text {value!r} in row {row}")
            if isinstance(value, (datetime.date, datetime.time, datetime.timedelta)):
                raise ValueError(f"column {name!r} must hold numbers, got {value!r} in row {row}")


def reject_missing_labels(y: Any) -> None:
    """Name the label that is missing, before labels are compared with it.

    Args:
        y: labels, a sequence or a column.

    Raises:
        ValueError: if one is None, NaN or ``pandas.NA``.
    """
    # a list with NaN between words would become words
    array = np.array(y, dtype=object) if isinstance(y, (list, tuple)) else np.asarray(y)
    if array.dtype != object:
        return
    for position, value in enumerate(array.reshape(-1).tolist()):
        if is_missing(value):
            raise ValueError(f"y must have no missing labels, got {value!r} at position {position}")


def reject_text_targets(y: Any) -> None:
    """Name the target that is no number, before a conversion fails without a name.

    Args:
        y: targets, one or several columns.

    Raises:
        ValueError: if one is text, or anything else that is no number.
    """
    array = np.asarray(y)
    if array.dtype.kind in "mM":
        raise ValueError(f"y must hold numbers, got dtype {array.dtype}")
    if array.dtype.kind in "OUS":
        for position, value in enumerate(array.reshape(-1).tolist()):
            if isinstance(value, (str, bytes)) or not _is_number(value):
                raise ValueError(f"y must hold numbers, got {value!r} at position {position}")


def reject_overflow(values: Array, name: str) -> None:
    """Refuse numbers whose squares are infinite.

    Args:
        values: finite numbers.
        name: what they are.

    Raises:
        ValueError: if one is too large.
    """
    largest = float(np.abs(values).max(initial=0.0))
    if largest > 1e150:
        raise ValueError(f"{name} must be of absolute value 1e150 at most, so that squares are finite, got {largest:g}")


def reject_vanishing(largest: float) -> None:
    """Refuse targets whose squares vanish, all of them.

    Args:
        largest: the absolute value of the largest target.

    Raises:
        ValueError: if it is too small, and not zero.
    """
    if 0 < largest < 1e-140:
        raise ValueError(f"y must hold values of 1e-140 at least, or zeros, so that squares are seen, got {largest:g}")


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except (ValueError, TypeError):
        return False
    return True


def task_labels(task: Any, n_rows: int) -> Array:
    """One id per row, none of them missing.

    Args:
        task: a sequence or column of ids.
        n_rows: how many rows there are.

    Returns:
        An array of ids.

    Raises:
        ValueError: if the length is wrong or an id is missing.
    """
    labels = id_array(task, "task")
    if labels.ndim != 1 or len(labels) != n_rows:
        raise ValueError(f"task must have one id per row of X ({n_rows}), got shape {labels.shape}")
    return labels


@dataclass(frozen=True)
class Rows:
    """Rows in the model's features.

    Attributes:
        Z: features.
        y: targets less their mean.
        task: task numbers.
        weight: row weights, or None.
        keys: a random number per row that a split is made by; drawn from the seed if not given.
    """

    Z: Tensor
    y: Tensor
    task: Tensor
    weight: Tensor | None
    keys: Array | None = None

    def statistics(self, n_tasks: int, axis: Axis | None = None, chosen: Tensor | None = None) -> TaskStatistics:
        """The statistics of these rows, or of some of them.

        Args:
            n_tasks: how many tasks there are here.
            axis: which ones, if tasks are shared out over processes.
            chosen: the numbers of the rows; all if not given.

        Returns:
            The statistics.
        """
        found = TaskStatistics.empty(n_tasks, self.Z.shape[1])
        rows = (self.Z, self.y, self.task) if chosen is None else (self.Z[chosen], self.y[chosen], self.task[chosen])
        weight = self.weight if chosen is None or self.weight is None else self.weight[chosen]
        if len(rows[0]):
            found.add(*rows, sample_weight=weight)
        return found if axis is None else replace(found, axis=axis)


def power_of_two(largest: Array) -> Array:
    """A unit in which numbers have squares that do not vanish; a power of two, so that dividing rounds nothing.

    Args:
        largest: the largest absolute value of each feature.

    Returns:
        The next power of two above each, 1 for 0.

    Example:
        >>> power_of_two(np.array([3.0, 0.0, 0.25])).tolist()
        [4.0, 1.0, 0.5]
    """
    return np.exp2(np.frexp(largest)[1])


@dataclass(frozen=True)
class Scaling:
    """The map from the user's features to the model's, and back for coefficients.

    Attributes:
        center: μ per feature.
        scale: σ per feature; 1 for a constant feature, which becomes 0 and carries no weight.
        offset: the mean target, taken off before fitting; of two classes the log odds of the second.
        intercept: whether a column of ones is added.
        flat: whether each feature was constant, up to rounding, in the rows that this was learnt from.
    """

    center: Array
    scale: Array
    offset: float
    intercept: bool
    flat: Array

    @classmethod
    def learn(cls, X: Array, y: Array, weight: Array | None, *, intercept: bool, scale: bool) -> Scaling:
        """Weighted means and standard deviations.

        Args:
            X: features.
            y: targets, one or several columns.
            weight: row weights.
            intercept: whether to centre and add a column of ones.
            scale: whether to divide by the standard deviation.

        Returns:
            The scaling.
        """
        n = X.shape[1]
        center = np.average(X, axis=0, weights=weight) if intercept else np.zeros(n)
        largest = np.abs(X).max(axis=0)
        unit = power_of_two(largest)
        spread = unit * np.sqrt(np.average(((X - center) / unit) ** 2, axis=0, weights=weight))
        offset = float(np.average(y.reshape(len(y), -1).mean(axis=1), weights=weight)) if intercept else 0.0
        return cls.of(center, spread, largest, offset, intercept=intercept, scale=scale)

    @classmethod
    def of(
        cls, center: Array, spread: Array, largest: Array, offset: float, *, intercept: bool, scale: bool
    ) -> Scaling:
        """The scaling of features with these moments.

        Args:
            center: their means, or zeros.
            spread: their standard deviations about these.
            largest: their largest absolute values.
            offset: the mean target.
            intercept: whether to add a column of ones.
            scale: whether to divide by the standard deviation.

        Returns:
            The scaling.
        """
        # a spread of rounding size is none
        flat = spread <= ROUNDING * np.maximum(largest, 1e-300)
        return cls(center, np.where(flat | (not scale), 1.0, spread), offset, bool(intercept), flat)

    def __call__(self, X: Array) -> Tensor:
        """The model's features of some rows.

        Args:
            X: the user's features.

        Returns:
            A float64 tensor, with the column of ones last.
        """
        shifted = X - self.center
        # what centring leaves of a constant feature is rounding; entry by entry, so that no row depends on others
        shifted[self.flat & (np.abs(shifted) <= ROUNDING * np.abs(self.center))] = 0.0
        Z = shifted / self.scale
        if self.intercept:
            Z = np.concatenate([Z, np.ones((len(Z), 1))], axis=1)
        return torch.from_numpy(np.ascontiguousarray(Z))

    def to_user(self, weights: Tensor) -> tuple[Array, Array]:
        """Coefficients and intercepts in the user's units.

        Args:
            weights: per task in the model's space, shape (tasks, features).

        Returns:
            Coefficients (tasks, features) and intercepts (tasks,).
        """
        values = weights.numpy()
        slopes = (values[:, :-1] if self.intercept else values) / self.scale
        constant = values[:, -1] + self.offset if self.intercept else np.zeros(len(values))
        return slopes, constant - slopes @ self.center
