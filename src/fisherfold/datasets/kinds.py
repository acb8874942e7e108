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
    """A table of ratings with holes, one entry per rating.

    Attributes:
        rows: user ids from 0, int32.
        cols: item ids from 0, int32.
        values: the ratings, float64.
        shape: the number of users and items.
        timestamp: seconds since 1970, where the set has them.
        test_fold: from 1: the rating is in the test part of that official split, where the set has splits.
    """

    rows: Array
    cols: Array
    values: Array
    shape: tuple[int, int]
    timestamp: Array | None = None
    test_fold: Array | None = None


@dataclass(frozen=True)
class Tasks:
    """Rows of several related tasks.

    Attributes:
        X: features, float64, one row per sample.
        y: targets; float64, or -1 and 1 for the classification sets.
        task: the task of each row, int32 from 0.
        task_ids: the original id of each task.
        train_idx: the distributed training rows, one split per row of the array, where there are any.
        train_fold: the cross-validation fold of each distributed training row.
    """

    X: Array
    y: Array
    task: Array
    task_ids: Array
    train_idx: Array | None = None
    train_fold: Array | None = None


@dataclass(frozen=True)
class Table:
    """Inputs and several outputs per row.

    Attributes:
        X: inputs, float64.
        Y: outputs, float64.
    """

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
        values = a["ratings_x100"][rows, cols] / 100.0
        n_users, n_jokes = a["ratings_x100"].shape
        return Ratings(rows.astype(np.int32), cols.astype(np.int32), values, (n_users, n_jokes))
    if name == "movielens1m":
        n_users, n_movies = (int(size) for size in a["shape"])
        return Ratings(*_from_zero(a, "movie_id"), a["rating"].astype(np.float64), (n_users, n_movies))
    if name == "movielens100k":
        rows, cols = _from_zero(a, "item_id")
        shape, extra = (int(rows.max()) + 1, int(cols.max()) + 1), (a["timestamp"], a["test_fold"])
        return Ratings(rows, cols, a["rating"].astype(np.float64), shape, *(e.astype(np.int64) for e in extra))
    return _tasks(a["X"].astype(np.float64), a["y"].astype(np.int64), a["task"], a)


def _from_zero(arrays: dict[str, Array], items: str) -> tuple[Array, Array]:
    return arrays["user_id"].astype(np.int32) - 1, arrays[items].astype(np.int32) - 1


def _tasks(X: Array, y: Array, ids: Array, arrays: dict[str, Array]) -> Tasks:
    task_ids, task = np.unique(ids, return_inverse=True)
    splits = (arrays["train_idx"].astype(np.int64), arrays["train_fold"].astype(np.int64))
    return Tasks(X, y, task.reshape(-1).astype(np.int32), task_ids, *splits)
