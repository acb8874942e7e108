"""The kinds of data sets, and how the arrays of each named one become its kind.

Values are exact copies of the originals in a float dtype, ids count from 0.
"""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(frozen=True)
class Images:
    """Images with labels in their official order and split.

    Attributes:
        train_images: uint8 (n, 32, 32, 3), RGB.
        train_labels: int64.
        test_images: uint8 (n, 32, 32, 3), RGB.
        test_labels: int64.
        train_coarse_labels: the labels of the groups of classes, where there are any.
        test_coarse_labels: the same for the test images.
    """

    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array
    train_coarse_labels: Array | None = None
    test_coarse_labels: Array | None = None


# what `load` may return
Dataset: TypeAlias = Ratings | Tasks | Table | Images


def decode(name: str, arrays: dict[str, Array]) -> Dataset:
    """The data set that stored arrays make.

    Args:
        name: of the data set.
        arrays: by the names of its record.

    Returns:
        The data in their kind.
    """
    return _DECODERS.get(name, _labelled_tasks)(arrays)


def _tasks(X: Array, y: Array, ids: Array, arrays: dict[str, Array]) -> Tasks:
    task_ids, task = np.unique(ids, return_inverse=True)
    splits = (arrays["train_idx"].astype(np.int64), arrays["train_fold"].astype(np.int64))
    return Tasks(X, y, task.reshape(-1).astype(np.int32), task_ids, *splits)


def _school(arrays: dict[str, Array]) -> Tasks:
    start = arrays["task_start"]
    sizes = np.diff(np.append(start, len(arrays["y"])))
    ids = np.repeat(np.arange(1, len(start) + 1), sizes)
    return _tasks(arrays["x"].astype(np.float64), arrays["y"].astype(np.float64), ids, arrays)


def _sarcos(arrays: dict[str, Array]) -> Tasks:
    return _tasks(arrays["x_micro"] / 1e6, arrays["y_micro"] / 1e6, arrays["task"], arrays)


def _sarcos_test(arrays: dict[str, Array]) -> Table:
    values = arrays["micro"] / 1e6
    return Table(values[:, :21], values[:, 21:])


def _labelled_tasks(arrays: dict[str, Array]) -> Tasks:
    return _tasks(arrays["X"].astype(np.float64), arrays["y"].astype(np.int64), arrays["task"], arrays)


def _jester(arrays: dict[str, Array]) -> Ratings:
    stored = arrays["ratings_x100"]
    rows, cols = np.nonzero(stored != 9900)
    values = stored[rows, cols] / 100.0
    return Ratings(rows.astype(np.int32), cols.astype(np.int32), values, (stored.shape[0], stored.shape[1]))


def _movielens1m(arrays: dict[str, Array]) -> Ratings:
    rows, cols = (arrays[key].astype(np.int32) - 1 for key in ("user_id", "movie_id"))
    n_users, n_movies = (int(size) for size in arrays["shape"])
    return Ratings(rows, cols, arrays["rating"].astype(np.float64), (n_users, n_movies))


def _movielens100k(arrays: dict[str, Array]) -> Ratings:
    rows, cols = (arrays[key].astype(np.int32) - 1 for key in ("user_id", "item_id"))
    shape = (int(rows.max()) + 1, int(cols.max()) + 1)
    extra = (arrays["timestamp"].astype(np.int64), arrays["test_fold"].astype(np.int64))
    return Ratings(rows, cols, arrays["rating"].astype(np.float64), shape, *extra)


def _images(arrays: dict[str, Array]) -> Images:
    return Images(**{key: a if key.endswith("images") else a.astype(np.int64) for key, a in arrays.items()})


_DECODERS: dict[str, Callable[[dict[str, Array]], Dataset]] = {
    "school": _school,
    "sarcos_7x2000": _sarcos,
    "sarcos_test": _sarcos_test,
    "jester1": _jester,
    "movielens1m": _movielens1m,
    "movielens100k": _movielens100k,
    "cifar10": _images,
    "cifar100": _images,
}
