"""The kinds of data sets, and how the arrays of each named one become its kind.

Values are exact copies of the originals in a float dtype, ids count from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Ratings:
    """A table of ratings with holes, one entry per rating."""

    rows: Array  # user ids from 0, int32
    cols: Array  # item ids from 0, int32
    values: Array  # the ratings, float64
    shape: tuple[int, int]  # the number of users and items
    timestamp: Array | None = None  # seconds since 1970, where the set has them
    test_fold: Array | None = (
        None  # from 1: in the test part of that official split, where the set has splits
    )


@dataclass(frozen=True)
class Tasks:
    """Rows of several related tasks."""

    X: Array  # features, float64, one row per sample
    y: Array  # targets; float64, or -1 and 1 for the classification sets
    task: Array  # the task of each row, int32 from 0
    task_ids: Array  # the original id of each task
    train_idx: Array | None = None  # the distributed training rows, one split per row of the array
    train_fold: Array | None = None  # the cross-validation fold of each distributed training row


@dataclass(frozen=True)
class Table:
    """Inputs and several outputs per row, float64."""

    X: Array
    Y: Array


# what `load` may return
Dataset: TypeAlias = Ratings | Tasks | Table


def decode(name: str, arrays: dict[str, Array]) -> Dataset:
    """Make a data set of its stored arrays."""
    a = arrays
    if name == "school":
        start = a["task_start"]
        ids = np.repeat(np.arange(1, len(start) + 1), np.diff(np.append(start, len(a["y"]))))
        return _tasks(a["x"].astype(np.float64), a["y"].astype(np.float64), ids, a)
    if name == "sarcos_7x2000":
        return _tasks(a["x_micro"] / 1e6, a["y_micro"] / 1e6, a["task"], a)
    if name == "sarcos_test":
        return Table(a["micro"][:, :21] / 1e6, a["micro"][:, 21:] / 1e6)
    if name == "jester1":
        rows, cols = np.nonzero(a["ratings_x100"] != 9900)
        n_users, n_jokes = a["ratings_x100"].shape
        values = a["ratings_x100"][rows, cols] / 100.0
        return Ratings(rows.astype(np.int32), cols.astype(np.int32), values, (n_users, n_jokes))
    if name.startswith("movielens"):
        users, items = (
            a[key].astype(np.int32) - 1
            for key in ("user_id", "movie_id" if "shape" in a else "item_id")
        )
        n_users, n_items = a.get("shape", (users.max() + 1, items.max() + 1))
        extra = [a[key].astype(np.int64) for key in ("timestamp", "test_fold") if key in a]
        return Ratings(
            users, items, a["rating"].astype(np.float64), (int(n_users), int(n_items)), *extra
        )
    return _tasks(a["X"].astype(np.float64), a["y"].astype(np.int64), a["task"], a)


def _tasks(X: Array, y: Array, ids: Array, arrays: dict[str, Array]) -> Tasks:
    task_ids, task = np.unique(ids, return_inverse=True)
    splits = (arrays["train_idx"].astype(np.int64), arrays["train_fold"].astype(np.int64))
    return Tasks(X, y, task.reshape(-1).astype(np.int32), task_ids, *splits)
