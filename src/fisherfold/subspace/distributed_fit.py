"""Rows of many tasks over several processes: each brings rows of any tasks, each learns from tasks of its own.

Features are scaled by the means and spreads of all rows, tasks are numbered once for all and cut into runs of about
equally many rows, and every row travels to the process that owns its task, in the order of the shares. From there on a
process holds the statistics of its tasks alone; what the tasks share is learnt in lock step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fisherfold.distributed import Axis, Group, balanced_cuts
from fisherfold.subspace.inputs import Rows, Scaling
from fisherfold.tables.ids import IdIndex, Ids

Array = NDArray[Any]


@dataclass(frozen=True)
class RowShare:
    """Checked rows of one process; there may be none."""

    X: Array  # features
    y: Array  # targets
    task: Ids  # the id of the task of each row
    weight: Array  # row weights


def rows_of_process(model: Any, X: Any, y: Any, task: Any, weight: Any, group: Group) -> RowShare:
    """The checked rows of this process, with the features of all others."""
    found: RowShare | None = None
    with group.together():
        if X is not None and len(X) > 0:
            if task is None:
                raise ValueError("over several processes task must be given: one id for each row")
            A, b, labels, weights = model._read(X, y, task, weight, reset=True, numeric=True, least=1)
            found = RowShare(A, b, labels, np.ones(len(A)) if weights is None else weights)
    mine: list[Any] = []
    if found is not None:
        names = [str(name) for name in getattr(model, "feature_names_in_", [])]
        mine = [len(found.X), weight is not None, found.X.shape[1], names, model.task_column_, model.target_name_]
    known = [(rank, *entry) for rank, entry in enumerate(group.gather_objects(mine)) if entry]
    if sum(count for _, count, *_ in known) < 2:
        raise ValueError("there are fewer than 2 rows on all ranks")
    first, _, weighted, width, names, model.task_column_, model.target_name_ = known[0]
    for rank, _, with_weight, their_width, their_names, *_ in known[1:]:
        if (their_width, their_names) != (width, names):
            raise ValueError(
                f"all ranks must have the same features in one order: rank {first} has {names or width}, rank {rank} "
                f"has {their_names or their_width}"
            )
        if with_weight != weighted:
            raise ValueError(f"sample_weight must be given on all ranks or on none: ranks {first} and {rank} differ")
    if found is not None:
        return found
    model.n_features_in_ = width
    if names:
        model.feature_names_in_ = np.array(names, dtype=object)
    return RowShare(np.zeros((0, width)), np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0))


def distribute_rows(
    share: RowShare, group: Group, *, seed: int, intercept: bool, scale: bool
) -> tuple[Scaling, IdIndex, Rows, Axis]:
    """Send every row to the process that owns its task."""
    scaling = Scaling.learn(share.X, share.y, share.weight, intercept=intercept, scale=scale, group=group)
    index = _joint_index(share.task, group)
    numbers = index.encode(share.task, "task")
    counts = group.sum(torch.from_numpy(np.bincount(numbers, minlength=len(index))))
    cuts = balanced_cuts(counts.numpy(), group.size)
    owner = np.searchsorted(np.asarray(cuts[1:-1]), numbers, side="right")
    order = np.argsort(owner, kind="stable")
    # what one process would draw for these rows: the stream of the seed from their place among all rows on
    before = int(group.gather(torch.tensor([len(numbers)]))[: group.rank].sum())
    keys = np.random.Generator(np.random.PCG64(seed).advance(before)).random(len(numbers))
    columns = [scaling(share.X).numpy(), share.y - scaling.offset, share.weight, numbers, keys]
    packed = torch.from_numpy(np.column_stack(columns)[order])
    arrived = torch.cat(group.exchange(packed, np.bincount(owner, minlength=group.size).tolist()))
    axis = Axis(len(index), cuts[group.rank], cuts[group.rank + 1], group)
    Z, (b, w, task, key) = arrived[:, :-4].contiguous(), arrived[:, -4:].T.contiguous()
    return scaling, index, Rows(Z, b, task.long() - axis.start, w, key.numpy()), axis


def _joint_index(labels: Ids, group: Group) -> IdIndex:
    """One numbering of the tasks of all processes: that of one process with all shares in the order of ranks."""
    _, first = np.unique(labels.astype(str) if labels.dtype == object else labels, return_index=True)
    shares = group.gather_objects(labels[np.sort(first)].tolist())
    return IdIndex([label for share in shares for label in share], "task")
