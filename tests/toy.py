"""Toy data of all tests: small, drawn from a seed, with the truth beside what is observed.

Every generator returns what its name says in the order of the arguments of the estimators: ``X, y, task``,
or the ids of pairs and their values. Numpy where estimators are tested, tensors where the mathematics is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from fisherfold.completion.ratings import Ratings

Array = npt.NDArray[Any]


def slow(*values: Any) -> list[Any]:
    """Parameters of a test that only ``make test-slow`` runs."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def generator(seed: int = 0) -> torch.Generator:
    """A generator of torch that starts at a seed."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def low_rank(
    n: int,
    m: int,
    rank: int,
    share: float,
    noise: float,
    seed: int,
    dtype: torch.dtype = torch.float64,
) -> tuple[Ratings, Array]:
    """A standardised table with offsets: its observed share as ratings, and the truth."""
    from fisherfold.completion.ratings import Ratings  # not needed by tests of other packages

    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(n, rank)) @ rng.normal(size=(rank, m)) / np.sqrt(rank)
    truth += 0.5 * rng.normal(size=(n, 1)) + 0.5 * rng.normal(size=(1, m))
    rows, columns = np.nonzero(rng.random((n, m)) < share)
    values = truth[rows, columns] + noise * rng.normal(size=len(rows))
    center, scale = values.mean(), values.std()
    ratings = Ratings(rows, columns, (values - center) / scale, (n, m), dtype=dtype)
    return ratings, (truth - center) / scale


class RatedTable(NamedTuple):
    """A noisy table with holes.

    Attributes:
        holes: The table, NaN where nothing was observed.
        pairs: The row and column of each observed value.
        values: The observed values.
        held: The other pairs.
        hidden: Their values.
    """

    holes: Array
    pairs: Array
    values: Array
    held: Array
    hidden: Array


def rated_table(
    n: int = 60,
    m: int = 40,
    *,
    rank: int = 2,
    share: float = 0.5,
    noise: float = 0.1,
    seed: int = 0,
) -> RatedTable:
    """A table around 3 with offsets of the rows, and which of its values were observed."""
    rng = np.random.default_rng(seed)
    truth = 3 + rng.normal(size=(n, rank)) @ rng.normal(size=(rank, m))
    truth += 0.3 * rng.normal(size=(n, 1))
    noisy = truth + noise * rng.normal(size=truth.shape)
    seen = rng.random(truth.shape) < share
    holes = np.where(seen, noisy, np.nan)
    return RatedTable(holes, np.argwhere(seen), noisy[seen], np.argwhere(~seen), noisy[~seen])


def rating_lines(table: RatedTable, header: str = "user,item,rating") -> str:
    """The observed values as a CSV file."""
    lines = [f"u{i},{j},{x:.4f}" for (i, j), x in zip(table.pairs, table.values, strict=True)]
    return "\n".join([header, *lines, ""])


def two_tastes(
    n: int = 60, m: int = 20, seed: int = 0
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Even users take even items, odd users odd ones; of each user one item is held out."""
    rng = np.random.default_rng(seed)
    pairs = [(u, i) for u in range(n) for i in range(m) if u % 2 == i % 2 and rng.random() < 0.7]
    held = {u: int(rng.choice([i for v, i in pairs if v == u])) for u in range(n)}
    kept = [(u, i) for u, i in pairs if held[u] != i]
    return kept, list(held.items())


class TaskRows(NamedTuple):
    """Rows of related linear tasks.

    Attributes:
        X: The features.
        y: The targets.
        task: The task of each row.
        fresh: Other rows of the same tasks.
        later: Their targets.
    """

    X: Array
    y: Array
    task: Array
    fresh: Array
    later: Array


def related_tasks(
    tasks: int = 6, rows: int = 9, n: int = 4, *, rank: int = 2, noise: float = 0.5, seed: int = 0
) -> TaskRows:
    """Linear tasks, numbered, whose weights differ along a few directions."""
    rng = np.random.default_rng(seed)
    task = np.repeat(np.arange(tasks), rows)
    weights = rng.normal(size=n) + rng.normal(size=(tasks, rank)) @ rng.normal(size=(rank, n))
    X, fresh = rng.normal(size=(2, len(task), n))
    y, later = (
        (part * weights[task]).sum(1) + noise * rng.normal(size=len(task)) for part in (X, fresh)
    )
    return TaskRows(X, y, task, fresh, later)


def named_tasks(
    tasks: int = 12, per_task: int = 20, n: int = 5, *, noise: float = 0.1, seed: int = 0
) -> tuple[Array, Array, Array]:
    """Tasks with names, mixed rows, features and targets that are not centred."""
    rng = np.random.default_rng(seed)
    task = np.repeat([f"t{i}" for i in range(tasks)], per_task)
    X = 3 + 2 * rng.normal(size=(len(task), n))
    frame = rng.normal(size=(n, 2))
    mean = rng.normal(size=n)
    weights = (mean + rng.normal(size=(tasks, 2)) @ frame.T).repeat(per_task, axis=0)
    y = (X * weights).sum(1) + 5 + noise * rng.normal(size=len(task))
    order = rng.permutation(len(task))
    return X[order], y[order], task[order]


def labelled_tasks(
    tasks: int = 15, per_task: int = 40, n: int = 8, *, seed: int = 0
) -> tuple[Array, Array, Array]:
    """Tasks with names whose targets are "yes" or "no", with odds that differ along two directions."""
    rng = np.random.default_rng(seed)
    task = np.repeat([f"t{i}" for i in range(tasks)], per_task)
    X = rng.normal(size=(len(task), n))
    weights = 3 * rng.normal(size=(tasks, 2)) @ rng.normal(size=(2, n))
    odds = (X * weights.repeat(per_task, axis=0)).sum(1)
    y = np.where(rng.random(len(task)) < 1 / (1 + np.exp(-odds)), "yes", "no")
    return X, y, task


def task_rows(
    sizes: tuple[int, ...] | list[int], n: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of normal features and targets of tasks of given sizes, and the tasks in order."""
    g = generator(seed)
    task = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    X = torch.randn(len(task), n, generator=g, dtype=torch.float64)
    y = torch.randn(len(task), generator=g, dtype=torch.float64)
    return X, y, task
