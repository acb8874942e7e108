"""Rows of many tasks as people have them, and as the model takes them.

Accepted are one table with a task per row, a data frame with a column of tasks, lists with one
table per task, and several outputs over shared rows. The model's features are z = ((x - μ)/σ, 1),
so that the intercept is a coefficient like the others; ``Scaling`` turns coefficients back into the
user's units.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherfold.distributed import ALONE, Axis, Group, balanced_cuts
from fisherfold.subspace.tasks import TaskStatistics
from fisherfold.tables.ids import IdIndex, Ids, as_ids
from fisherfold.tables.ranges import check_range, warn_of_lost_digits

Array = NDArray[Any]
RowShare = tuple[
    Array, Array, Ids, Array
]  # features, targets, task ids and weights of the rows of a process

# Differences below this fraction of the numbers are rounding.
_ROUNDING = 1e-14  # of a constant, relative to its size, when its mean is subtracted


@dataclass(frozen=True)
class TaskTable:
    """A table of rows, one task each."""

    X: Any  # features as given, not yet checked
    y: Any  # targets; two-dimensional for several outputs over shared rows
    task: Any  # the id of the task of each row, or None for a single task or several outputs
    sizes: list[int] | None = (
        None  # the number of rows of each table of a list; None for a single table
    )

    def like_given(self, values: Array) -> Any:
        """Values per row in the form in which the rows were given."""
        return values if self.sizes is None else np.split(values, np.cumsum(self.sizes)[:-1])

    def row_weights(self, weight: Any) -> Any:
        """Weights of all rows from weights as given: one per row, or a list like the tables."""
        if (
            self.sizes is None
            or not isinstance(weight, (list, tuple))
            or not any(np.ndim(part) for part in weight)
        ):
            return weight
        parts = [np.asarray(part).reshape(-1) for part in weight]
        if (lengths := [len(part) for part in parts]) != self.sizes:
            raise ValueError(
                f"sample_weight must be a list like X, with {self.sizes} rows, got {lengths}"
            )
        return np.concatenate(parts)


def read_table(X: Any, y: Any, task: Any, column: str | None = None) -> TaskTable:
    """Bring rows in any of the accepted forms into one table."""
    if _is_list_of_tables(X):
        return _from_lists(X, y, task)
    if isinstance(task, str):
        names = [str(name) for name in getattr(X, "columns", [])]
        if task not in names:
            seen = (
                f"its columns are {', '.join(names)}"
                if names
                else "X is no data frame; pass one id per row"
            )
            raise ValueError(f"task={task!r} is not a column of X: {seen}")
        column = task
        task = X[task]
    elif task is None and column is not None and hasattr(X, "columns"):
        if column not in list(X.columns):
            raise ValueError(
                f"task must be given: X has no column {column!r}, which held the tasks in fit"
            )
        task = X[column]
    return TaskTable(without_column(X, column), y, task)


def without_column(X: Any, column: str | None) -> Any:
    """A data frame without one column, if it is there."""
    if column is None or column not in list(getattr(X, "columns", [])):
        return X
    return X.drop(columns=column) if hasattr(X, "iloc") else X.drop(column)


def _from_lists(X: Any, y: Any, task: Any) -> TaskTable:
    tables = [np.asarray(table) for table in X]
    targets = None if y is None else [np.asarray(part).reshape(-1) for part in y]
    ids = as_ids(np.arange(len(X)) if task is None else task, "task")
    if len(ids) != len(X) or (targets is not None and len(targets) != len(X)):
        counts = f"{len(X)} in X, {len(ids)} in task" + (
            "" if targets is None else f", {len(targets)} in y"
        )
        raise ValueError(f"lists of tasks must have the same length, got {counts}")
    sizes = [len(table) for table in tables]
    for number, (name, table) in enumerate(zip(ids.tolist(), tables, strict=True)):
        if targets is not None and len(targets[number]) != sizes[number]:
            raise ValueError(
                f"task {name!r}: X has {sizes[number]} rows and y has {len(targets[number])}"
            )
        if table.shape[1] != tables[0].shape[1]:
            raise ValueError(
                f"task {name!r} has {table.shape[1]} features, the first task {tables[0].shape[1]}"
            )
    rows = None if targets is None else np.concatenate(targets)
    return TaskTable(np.concatenate(tables), rows, np.repeat(ids, sizes), sizes)


def _is_list_of_tables(X: Any) -> bool:
    return (
        isinstance(X, (list, tuple))
        and len(X) > 0
        and all(len(getattr(part, "shape", ())) == 2 for part in X)
    )


def check_numeric(X: Any) -> None:
    """Name the column of a data frame that does not hold numbers."""
    for name in getattr(X, "columns", []):
        column = np.asarray(X[name])
        if column.dtype.kind in "mM":
            raise ValueError(f"column {name!r} must hold numbers, got dtype {column.dtype}")
        try:
            column.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"column {name!r} must hold numbers: {error}") from None


def task_ids(task: Any, n_rows: int) -> Array:
    """One id per row, none of them missing."""
    labels = as_ids(task, "task")
    if len(labels) != n_rows:
        raise ValueError(f"task must have one id per row of X ({n_rows}), got {len(labels)}")
    return labels


@dataclass(frozen=True)
class Rows:
    """Rows in the model's features."""

    Z: Tensor  # features
    y: Tensor  # targets without their mean
    task: Tensor  # task numbers
    weight: Tensor | None  # row weights, or None
    keys: Array | None = None  # a random number per row for splits; drawn from the seed if None

    def select(self, chosen: Tensor) -> Rows:
        """Some of the rows."""
        weight = None if self.weight is None else self.weight[chosen]
        return Rows(self.Z[chosen], self.y[chosen], self.task[chosen], weight)

    def statistics(self, tasks: Axis) -> TaskStatistics:
        """The statistics of these rows."""
        found = TaskStatistics.empty(len(tasks), self.Z.shape[1])
        found.add(self.Z, self.y, self.task, sample_weight=self.weight)
        return replace(found, axis=tasks) if tasks.is_shared else found


@dataclass(frozen=True)
class Scaling:
    """The map from the user's features to the model's, and back for coefficients."""

    center: Array  # μ per feature
    scale: Array  # σ per feature; 1 for a constant feature, which becomes 0 and carries no weight
    flat: Array  # whether each feature was constant, up to rounding, in the rows of the fit
    # the mean target, subtracted before fitting; of two classes the log odds of the second
    offset: float
    intercept: bool  # whether a column of ones is added

    @classmethod
    def learn(
        cls,
        X: Array,
        y: Array,
        weight: Array | None,
        *,
        intercept: bool,
        scale: bool,
        group: Group = ALONE,
    ) -> Scaling:
        """Weighted means and standard deviations over the rows of all processes."""
        for numbers, what in ((X, "features"), (y, "targets")):
            check_range(numbers, what)
            warn_of_lost_digits(numbers, what)
        w = np.ones(len(X)) if weight is None else weight

        def mean(values: Array) -> Array:
            total = (values * (w if values.ndim == 1 else w[:, None])).sum(axis=0)
            both = group.sum(torch.from_numpy(np.append(total, w.sum()))).numpy()
            return np.asarray(both[:-1] / both[-1])

        center = mean(X) if intercept else np.zeros(X.shape[1])
        spread = np.sqrt(mean((X - center) ** 2))
        offset = float(mean(y if y.ndim == 1 else y.mean(axis=1))[0]) if intercept else 0.0
        largest = group.largest(torch.from_numpy(np.abs(X).max(axis=0, initial=0.0))).numpy()
        flat = spread <= _ROUNDING * np.maximum(largest, 1e-300)
        return cls(center, np.where(flat | (not scale), 1.0, spread), flat, offset, bool(intercept))

    def __call__(self, X: Array) -> Tensor:
        """The model's features of some rows."""
        shifted = X - self.center
        # what centring leaves of a constant feature is rounding
        shifted[self.flat & (np.abs(shifted) <= _ROUNDING * np.abs(self.center))] = 0.0
        Z = shifted / self.scale
        if self.intercept:
            Z = np.concatenate([Z, np.ones((len(Z), 1))], axis=1)
        return torch.from_numpy(np.ascontiguousarray(Z))

    def to_user(self, weights: Tensor) -> tuple[Array, Array]:
        """Coefficients and intercepts in the user's units."""
        values = weights.numpy()
        slopes = (values[:, :-1] if self.intercept else values) / self.scale
        constant = values[:, -1] + self.offset if self.intercept else np.zeros(len(values))
        return slopes, constant - slopes @ self.center

    def coefficient_rows(self) -> Tensor:
        """Rows z with zᵀw = the coefficients in the user's units, the intercept last."""
        rows = np.diag(1 / self.scale)
        if self.intercept:
            rows = np.block(
                [[rows, np.zeros((len(rows), 1))], [-self.center / self.scale, np.ones(1)]]
            )
        return torch.from_numpy(rows)


def rows_of_process(
    model: Any, X: Any, y: Any, task: Any, weight: Any, *, group: Group
) -> RowShare:
    """The rows of this process, with the same features as those of all others."""
    found: RowShare | None = None
    with group.together():
        if X is not None and len(X) > 0:
            if task is None:
                raise ValueError("over several processes task must be given: one id for each row")
            A, b, labels, weights = model._read(
                X, y, task, weight, reset=True, numeric=True, least=1
            )
            found = A, b, labels, np.ones(len(A)) if weights is None else weights
    mine: list[Any] = []
    if found is not None:
        names = [str(name) for name in getattr(model, "feature_names_in_", [])]
        mine = [*found[0].shape, weight is not None, names, model.task_column_, model.target_name_]
    known = [(rank, *entry) for rank, entry in enumerate(group.gather_objects(mine)) if entry]
    if sum(count for _, count, *_ in known) < 2:
        raise ValueError("there are fewer than 2 rows on all ranks")
    first, _, width, weighted, names, model.task_column_, model.target_name_ = known[0]
    for rank, _, their_width, with_weight, their_names, *_ in known[1:]:
        if (their_width, their_names) != (width, names):
            raise ValueError(
                f"all ranks must have the same features in one order: rank {first} has "
                f"{names or width}, rank {rank} "
                f"has {their_names or their_width}"
            )
        if with_weight != weighted:
            raise ValueError(
                f"sample_weight must be given on all ranks or on none: ranks {first} and {rank} "
                "differ"
            )
    if found is not None:
        return found
    model.n_features_in_ = width
    if names:
        model.feature_names_in_ = np.array(names, dtype=object)
    return np.zeros((0, width)), np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0)


def distribute_rows(
    share: RowShare, group: Group, *, seed: int, intercept: bool, scale: bool
) -> tuple[Scaling, IdIndex, Rows, Axis]:
    """Send every row to the process that owns its task.

    Features are scaled by the means and spreads of all rows, tasks are numbered once for all and
    cut into runs of about equally many rows; from there on a process learns from tasks of its own,
    and what tasks share in lock step.
    """
    X, y, labels, weight = share
    scaling = Scaling.learn(X, y, weight, intercept=intercept, scale=scale, group=group)
    index = _joint_index(labels, group)
    numbers = index.encode(labels, "task")
    counts = group.sum(torch.from_numpy(np.bincount(numbers, minlength=len(index))))
    cuts = balanced_cuts(counts.numpy(), group.size)
    owner = np.searchsorted(np.asarray(cuts[1:-1]), numbers, side="right")
    order = np.argsort(owner, kind="stable")
    # what one process would draw for these rows: the stream of the seed from their place among all
    # rows on
    before = int(group.gather(torch.tensor([len(numbers)]))[: group.rank].sum())
    keys = np.random.Generator(np.random.PCG64(seed).advance(before)).random(len(numbers))
    columns = [scaling(X).numpy(), y - scaling.offset, weight, numbers, keys]
    packed = torch.from_numpy(np.column_stack(columns)[order])
    arrived = torch.cat(group.exchange(packed, np.bincount(owner, minlength=group.size).tolist()))
    axis = Axis(len(index), cuts[group.rank], cuts[group.rank + 1], group)
    Z = arrived[:, :-4].contiguous()
    b, w, task, key = arrived[:, -4:].T.contiguous()
    return scaling, index, Rows(Z, b, task.long() - axis.start, w, key.numpy()), axis


def _joint_index(labels: Ids, group: Group) -> IdIndex:
    """Number the tasks as one process would with all shares in the order of ranks."""
    _, first = np.unique(
        labels.astype(str) if labels.dtype == object else labels, return_index=True
    )
    shares = group.gather_objects(labels[np.sort(first)].tolist())
    return IdIndex([label for share in shares for label in share], "task")
