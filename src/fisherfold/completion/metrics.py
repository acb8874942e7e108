"""Errors of predicted values, calibration of intervals, and metrics of ranked lists.

    DCG@k = Σ_{r ≤ k} gain_r / log2(r + 1),    nDCG@k = DCG@k / DCG@k of the best order

Ranked lists and relevant items come as data frames (as ``recommend`` returns them), or as pairs of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.special import ndtri

from fisherfold.completion.entries import Codes, Floats
from fisherfold.completion.ratings import Triplets, places
from fisherfold.tables.frames import columns_of, frame_kind, numbers
from fisherfold.tables.ids import IdIndex, as_array
from fisherfold.tables.validation import integer


def rmse(values: Any, predictions: Any) -> float:
    """The root mean square error.

    Example:
        >>> rmse([3.0, 4.0], [3.0, 2.0])
        1.4142135623730951
    """
    off = numbers(values, "values") - numbers(predictions, "predictions")
    return float(np.sqrt(np.mean(off**2)))


def mae(values: Any, predictions: Any) -> float:
    """The mean absolute error."""
    return float(np.mean(np.abs(numbers(values, "values") - numbers(predictions, "predictions"))))


def interval_coverage(values: Any, predictions: Any, std: Any, level: float = 0.9) -> float:
    """The share of values that lie within their central predictive intervals; ``level`` if these are calibrated."""
    off = np.abs(numbers(values, "values") - numbers(predictions, "predictions"))
    return float(np.mean(off <= ndtri((1 + level) / 2) * numbers(std, "std")))


def calibration(
    values: Any, predictions: Any, std: Any, levels: Any = (0.5, 0.8, 0.9, 0.95)
) -> dict[float, float]:
    """``interval_coverage`` for each of several levels."""
    return {
        float(level): interval_coverage(values, predictions, std, float(level)) for level in levels
    }


def ranking_metrics(
    recommended: Any, relevant: Any, k: int | Sequence[int] = 10, *, trained: Any = None
) -> dict[str, float]:
    """Metrics of ranked lists, averaged over the rows that have relevant columns.

    Args:
        recommended: lists, best first within each row: a data frame whose first two columns are row and column ids, or
            a pair of such columns.
        relevant: the relevant columns of each row, in the same form; a third column holds gains (1 if there is none).
            A gain of 0 is none, and a pair given twice counts once.
        k: the length of the lists that counts, or several: the names then end in ``@5`` and so on.
        trained: the entries of the fit in the same form, for ``coverage`` and ``novelty``.

    Returns:
        ``ndcg``, ``recall``, ``precision``, ``map``, ``mrr`` and ``hit_rate``; with ``trained`` also ``coverage`` (the
        share of its columns that is recommended to anybody) and ``novelty`` (mean -log2 of their share of the rows).

    Raises:
        ValueError: if there are no relevant columns.

    Example:
        >>> found = ranking_metrics((["ann"] * 3, ["a", "b", "c"]), (["ann"] * 2, ["b", "z"]), k=3)
        >>> found["recall"], found["precision"], found["mrr"]
        (0.5, 0.3333333333333333, 0.5)
    """
    if np.ndim(k) == 1:
        found: dict[str, float] = {}
        for length in np.asarray(k).tolist():
            metrics = _metrics(recommended, relevant, length, trained)
            found |= {f"{name}@{length}": value for name, value in metrics.items()}
        return found
    return _metrics(recommended, relevant, k, trained)


def _metrics(recommended: Any, relevant: Any, length: Any, trained: Any) -> dict[str, float]:
    """Metrics of lists of one length."""
    k, (rows, columns, gains) = integer(1)("k", length), _parts(relevant)
    good = gains > 0
    if not good.any():
        raise ValueError("there are no relevant columns to look for")
    row_ids, i = IdIndex.fit(as_array(rows)[good])
    column_ids, j = IdIndex.fit(as_array(columns)[good])
    wanted = Triplets(i, j, gains[good]).merged("last")
    i, j, gains = wanted.rows, wanted.columns, wanted.values
    table = np.zeros((len(row_ids), k))
    listed_rows, listed, _ = _parts(recommended)
    at = row_ids.encode(listed_rows)
    listed = np.asarray(listed)[at >= 0]
    at = at[at >= 0]
    place = places(at, np.arange(len(at)))
    inside = place < k
    codes = column_ids.encode(listed)
    known = inside & (codes >= 0)
    gain_of = csr_array((gains, (i, j)), shape=(len(row_ids), len(column_ids)))
    table[at[known], place[known]] = gain_of[at[known], codes[known]]
    ideal = np.zeros((len(row_ids), k))
    rank = places(i, -gains)
    ideal[i[rank < k], rank[rank < k]] = gains[rank < k]
    found = _per_row(table, ideal, np.bincount(i))
    result = {name: float(values.mean()) for name, values in found.items()}
    if trained is not None:
        result |= _of_catalogue(listed[inside], trained)
    return result


def _per_row(gains: Floats, ideal: Floats, n_relevant: npt.NDArray[np.int64]) -> dict[str, Floats]:
    """Metrics of each list: the gains at its places, those of the best order, how many columns are relevant."""
    k = gains.shape[1]
    discount = 1 / np.log2(np.arange(2, k + 2))
    hits = (gains > 0).astype(np.float64)
    precision = np.cumsum(hits, axis=1) / np.arange(1, k + 1)
    first = np.where(hits.any(axis=1), 1 / (hits.argmax(axis=1) + 1), 0.0)
    return {
        "ndcg": (gains @ discount) / (ideal @ discount),
        "recall": hits.sum(axis=1) / n_relevant,
        "precision": hits.mean(axis=1),
        "map": (precision * hits).sum(axis=1) / np.minimum(n_relevant, k),
        "mrr": first,
        "hit_rate": hits.max(axis=1),
    }


def _of_catalogue(listed: Any, trained: Any) -> dict[str, float]:
    rows, columns, _ = _parts(trained)
    index, codes = IdIndex.fit(columns)
    share = np.bincount(codes) / len(IdIndex.fit(rows)[0])
    at: Codes = index.encode(listed)
    return {
        "coverage": len(np.unique(at[at >= 0])) / len(index),
        "novelty": float(-np.log2(share[at[at >= 0]]).mean()),
    }


def _parts(X: Any) -> tuple[Any, Any, Floats]:
    """Row ids, column ids and gains of a data frame or of a tuple of columns."""
    parts = list(columns_of(X).values()) if frame_kind(X) is not None else list(X)
    gains = numbers(parts[2], "gains") if len(parts) > 2 else np.ones(len(parts[0]))
    return parts[0], parts[1], gains
