"""Splits of entries into a training and a test part, as positions of the entries, ascending.

Of ``n`` entries, or of columns with one item per entry, a share ``test`` is held out; ``seed`` is that of the draw.

train, test = time_split(ratings["timestamp"], test=0.1)
model = MatrixCompletion().fit(ratings[train])          # .iloc[train] of pandas
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fisherfold.completion.inference.features import as_times
from fisherfold.tables.ids import IdIndex

Positions = npt.NDArray[np.int64]


def random_split(n: int, test: float = 0.1, *, seed: int = 0) -> tuple[Positions, Positions]:
    """Hold out entries at random.

    Example:
        >>> train, test = random_split(10, 0.2)
        >>> len(train), len(test)
        (8, 2)
    """
    held = np.zeros(n, dtype=bool)
    held[np.random.default_rng(seed).permutation(n)[: _count(n, test)]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def time_split(times: Any, test: float = 0.1) -> tuple[Positions, Positions]:
    """Hold out the latest entries; those of one time (numbers, or dates) stay together, on the training side."""
    stamps = as_times(times, len(times))
    cut = np.sort(stamps)[len(stamps) - _count(len(stamps), test) - 1]
    held = stamps > cut
    if not held.any():
        raise ValueError(
            "nothing is later than the training part: too many entries share the last time"
        )
    return np.flatnonzero(~held), np.flatnonzero(held)


def last_out_split(rows: Any, times: Any, n: int = 1) -> tuple[Positions, Positions]:
    """Hold out the last ``n`` entries of each row that has more than these."""
    _, i = IdIndex.fit(rows)
    order = np.lexsort((as_times(times, len(times)), i))
    counts = np.bincount(i)
    from_end = np.repeat(np.cumsum(counts), counts) - np.arange(len(i))
    held = np.zeros(len(i), dtype=bool)
    held[order] = (from_end <= n) & (np.repeat(counts, counts) > n)
    return np.flatnonzero(~held), np.flatnonzero(held)


def row_split(rows: Any, test: float = 0.1, *, seed: int = 0) -> tuple[Positions, Positions]:
    """Hold out all entries of a share of the rows, for ``recommend_new`` and ``predict_new``."""
    index, i = IdIndex.fit(rows)
    chosen = np.random.default_rng(seed).permutation(len(index))[: _count(len(index), test)]
    held = np.isin(i, chosen)
    return np.flatnonzero(~held), np.flatnonzero(held)


def _count(n: int, test: float) -> int:
    if not 0 < test < 1 or n < 2:
        raise ValueError(f"test must be a share between 0 and 1 of at least 2, got {test} of {n}")
    return min(max(1, round(test * n)), n - 1)
