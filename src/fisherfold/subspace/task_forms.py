"""Rows of many tasks in the forms that people have them: one table with a task per row, lists, or several outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherfold.plain import counted
from fisherfold.tables.ids import id_array, plain
from fisherfold.tables.inputs import arrow_as_frame, unmasked

Array = NDArray[Any]


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
