"""``SubspaceRegressor`` over several processes: each brings rows of any tasks, each learns from tasks of its own.

The features are scaled by the means and spreads of all rows, the tasks are numbered once for all and cut into runs of
about equally many rows, and every row travels to the process that owns its task, in the order of the shares. From there
on a process holds the statistics of its tasks alone; what the tasks share is learnt in lock step.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from fisherfold.distributed import Axis, Group, balanced_cuts, current_group
from fisherfold.subspace.task_rows import Rows, Scaling, power_of_two
from fisherfold.tables.checkpoint import all_or_nothing
from fisherfold.tables.ids import objects
from fisherfold.tables.parameters import seed_of
from fisherfold.tables.refusals import reject_vanishing
from fisherfold.tables.shared_ids import cast, joint_index
from fisherfold.tables.shared_options import check_agreement

if TYPE_CHECKING:
    from fisherfold.tables.ids import IdIndex

Array = NDArray[Any]


class SharedTaskFits:
    """The fit of an estimator of many tasks together with other processes of ``torch.distributed``."""

    if TYPE_CHECKING:
        fit_intercept: bool
        random_state: int | None
        statistics_: Any
        scaling_: Scaling
        _index: IdIndex

        @property
        def _scales(self) -> bool: ...
        def get_params(self, deep: bool = ...) -> dict[str, Any]: ...  # noqa: D102
        def _check_parameters(self) -> None: ...
        def _checked_rank(self, n_features: int) -> int: ...
        def _read(self, *given: Any, **options: Any) -> tuple[Array, Array, Array | None, Array | None]: ...
        def _learn(self, rows: Rows | None, changed: Tensor | None = None) -> None: ...

    @all_or_nothing
    def fit_share(
        self, X: Any = None, y: Any = None, task: Any = None, sample_weight: Any = None, *, process_group: Any = None
    ) -> Self:
        """Learn from the shares of all processes of a group; every one of them must call this.

        The model is that of one process which is given all shares one after the other, to rounding, and the same on
        every process to the bit. It predicts, and is saved, like any other; it does not keep the statistics that
        learning from further rows would need.

        Args:
            X: features of this process's rows; None if it has none.
            y: their targets.
            task: their tasks, numbers or text; where a share has text, the whole numbers of all others are names too.
            sample_weight: a weight per row; on all processes or on none.
            process_group: a group of ``torch.distributed``; its default group if not given.

        Returns:
            The estimator.
        """
        group = current_group(process_group)
        with group.together():
            self._check_parameters()
        check_agreement(self.get_params(deep=False), group)
        given = self._own_rows(X, y, task, sample_weight, group)
        features, target, labels, weight = given
        reject_vanishing(float(group.largest(torch.tensor(np.abs(target).max(initial=0.0)))))
        how = {"intercept": self.fit_intercept, "scale": self._scales}
        self.scaling_ = _joint_scaling(features, target, weight, group, **how)
        self._outputs = False
        self._index = joint_index(_first_seen(labels), group, "task")
        with group.together():
            self._checked_rank(features.shape[1] + int(self.fit_intercept))
        numbers = self._index.numbers(cast(labels, str(self._index.labels.dtype)), "task")
        rows, axis = self._owned(features, target, numbers, weight, group)
        self.statistics_ = rows.statistics(len(axis), axis)
        self._learn(rows)
        self.statistics_ = None
        return self

    def _own_rows(self, X: Any, y: Any, task: Any, weight: Any, group: Group) -> tuple[Array, Array, Array, Array]:
        """Checked rows of this process, none of them if it has no share, with the features of all others."""
        empty = X is None or len(X) == 0
        found: tuple[Array, Array, Array, Array] | None = None
        with group.together():
            if not empty:
                if task is None:
                    raise ValueError("over several processes task must be given: one id for each row")
                A, b, labels, weights = self._read(X, y, task, weight, reset=True, numeric=True, least=1)
                assert labels is not None
                found = A, b, labels, np.ones(len(A)) if weights is None else weights
        names = [str(name) for name in getattr(self, "feature_names_in_", [])]
        mine = [] if found is None else [len(found[0]), weight is not None, found[0].shape[1], names]
        width, names = _agreed_features(group.gather_texts(json.dumps(mine)))
        if found is not None:
            return found
        self.n_features_in_ = width
        if names:
            self.feature_names_in_ = np.array(names, dtype=object)
        return np.zeros((0, width)), np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0)

    def _owned(self, X: Array, y: Array, numbers: Array, weight: Array, group: Group) -> tuple[Rows, Axis]:
        """The rows of the tasks that this process owns."""
        counts = group.sum(torch.from_numpy(np.bincount(numbers, minlength=len(self._index))))
        cuts = balanced_cuts(counts.numpy(), group.size)
        owner = np.searchsorted(np.asarray(cuts[1:-1]), numbers, side="right")
        order = np.argsort(owner, kind="stable")
        columns = [self.scaling_(X).numpy(), y - self.scaling_.offset, weight, numbers, self._keys(len(X), group)]
        packed = torch.from_numpy(np.column_stack(columns)[order])
        arrived = torch.cat(group.exchange(packed, np.bincount(owner, minlength=group.size).tolist()))
        axis = Axis(len(self._index), cuts[group.rank], cuts[group.rank + 1], group)
        Z, (b, w, task, key) = arrived[:, :-4].contiguous(), arrived[:, -4:].T.contiguous()
        return Rows(Z, b, task.long() - axis.start, w, key.numpy()), axis

    def _keys(self, count: int, group: Group) -> Array:
        """What one process would draw for these rows: the stream of the seed from their place among all rows on."""
        before = group.gather(torch.tensor([count]))[: group.rank].sum()
        generator = np.random.PCG64(seed_of(self.random_state, 0))
        return np.random.Generator(generator.advance(int(before))).random(count)


def _agreed_features(told: list[str]) -> tuple[int, list[str]]:
    """The number of features and their names, from what each process tells of its rows."""
    known = [(rank, *found) for rank, found in enumerate(map(json.loads, told)) if found]
    rows = sum(count for _, count, *_ in known)
    if rows < 2:
        raise ValueError(f"there {'is 1 row' if rows else 'are no rows'} on all ranks, at least 2 are needed")
    first, _, weighted, width, names = known[0]
    for rank, _, with_weight, their_width, their_names in known[1:]:
        if (their_width, their_names) != (width, names):
            raise ValueError(
                f"all ranks must have the same features, in one order: rank {first} has {_features(width, names)}, "
                f"rank {rank} has {_features(their_width, their_names)}"
            )
        if with_weight != weighted:
            who = (first, rank) if weighted else (rank, first)
            raise ValueError(
                f"sample_weight must be given on all ranks or on none: rank {who[0]} has it, rank {who[1]} has not"
            )
    return width, names


def _features(width: int, names: list[str]) -> str:
    shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return f"{width} ({shown or 'without names'})"


def _first_seen(labels: Array) -> Array:
    if labels.dtype == object:
        return objects(list(dict.fromkeys(labels.tolist())))
    _, places = np.unique(labels, return_index=True)
    return np.asarray(labels[np.sort(places)])


def _joint_scaling(
    X: Array, y: Array, weight: Array, group: Group, *, intercept: bool, scale: bool
) -> Scaling:
    """``Scaling.learn`` from the rows of all processes."""

    def total(values: Array) -> Array:
        return np.asarray(group.sum(torch.from_numpy(np.asarray(values, dtype=np.float64))).numpy())

    weights = float(total(weight.sum()))
    n = X.shape[1]
    center = total(weight @ X) / weights if intercept else np.zeros(n)
    largest = group.largest(torch.from_numpy(np.abs(X).max(axis=0, initial=0.0))).numpy()
    unit = power_of_two(largest)
    spread = unit * np.sqrt(total(weight @ ((X - center) / unit) ** 2) / weights)
    offset = float(total(weight @ y) / weights) if intercept else 0.0
    return Scaling.of(center, spread, largest, offset, intercept=intercept, scale=scale)


def part_of(axis: Axis, values: Tensor) -> Tensor:
    """The entries of the tasks that are here, of one value for all or one per task.

    Args:
        axis: the tasks.
        values: a number, or one per task.

    Returns:
        One per task that is here.
    """
    return values.expand(len(axis)) if values.ndim == 0 else axis.part(values)
