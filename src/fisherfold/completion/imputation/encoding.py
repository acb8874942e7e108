"""Columns of a table as standardised numbers, and back.

- A numeric column is standardised, z = (x - μ)/s, or brought to normal scores first (``ranks``).
- A column of K categories becomes K columns of zeros and ones, one if K = 2, each standardised like
  a number.

The Gaussian model says of a hole in a column of categories how likely each indicator is to be one:
with its predictive mean m_k and standard deviation s_k, and π_k, √(π_k (1 - π_k)) where nothing is
known of the row, Bayes' rule is

    log p_k = log π_k + c ((m_k - ½)/s_k² - (π_k - ½)/(π_k (1 - π_k))) + constant

which gives the frequencies π back where the row tells nothing. c is 1 for the single indicator of
two categories; among more, each comparison of two categories stands in both of their indicators,
and c is ½.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit, logit, ndtr, ndtri, softmax
from torch import Tensor

from fisherfold.tables.folders import expect

Floats = npt.NDArray[Any]
Codes = npt.NDArray[np.int64]
# in standard deviations: squares of more leave float64, and a row with as much is not believed
_FURTHEST = 1e100
# a spread below this part of the mean is rounding
_CONSTANT = 1e-12
# a column of normal scores has steps, not a scale, if it has so few values per entry (or two)
_STEPS = 0.1
_LEAST_STD = 1e-6  # of an indicator
# how much of the evidence of an indicator is its own, among three categories or more
_SHARED = 0.5


@dataclass
class TableEncoding:
    """How each column of a table becomes standardised columns.

    Attributes:
        sizes: the number of categories of each column of the table, 0 for numbers.
        mean: of each standardised column.
        scale: of each standardised column, 1 where all values are alike.
        observed: whether a standardised column had any value.
        levels: the sorted values of each column of the table, for normal scores; else None.
    """

    sizes: Codes
    mean: Floats
    scale: Floats
    observed: npt.NDArray[np.bool_]
    levels: list[Floats] | None = None

    def __post_init__(self) -> None:
        """Say where the standardised columns of each column lie."""
        widths = np.where(self.sizes > 2, self.sizes, 1)
        self.ends = np.cumsum(widths)
        self.starts = self.ends - widths
        self.source = np.repeat(np.arange(len(widths)), widths)

    @classmethod
    def of(
        cls, table: Floats, sizes: Codes, *, ranks: bool, weights: Floats | None = None
    ) -> TableEncoding:
        """Learn from a table with NaN where nothing was observed, categories as their numbers."""
        width = int(np.where(sizes > 2, sizes, 1).sum())
        levels = None
        if ranks:
            levels = [np.sort(x[~np.isnan(x)]).astype(np.float64) for x in table.T]
        plain = cls(sizes, np.zeros(width), np.ones(width), np.ones(width, dtype=bool), levels)
        x = plain.spread_out(table)
        seen = ~np.isnan(x)
        share = seen / np.maximum(seen.sum(axis=0), 1)
        if weights is not None:
            share = seen * weights[:, plain.source]
            share = share / np.where(seen.any(axis=0), share.sum(axis=0), 1)
        mean = (share * np.where(seen, x, 0)).sum(axis=0, dtype=np.float64)
        off = np.where(seen, x - mean, 0)
        largest = np.abs(off).max(axis=0)  # dividing first keeps the squares in range
        squares = share * (off / np.where(largest > 0, largest, 1)) ** 2
        spread = largest * np.sqrt(squares.sum(axis=0))
        scale = np.where(spread > _CONSTANT * np.abs(mean), spread, 1.0)
        return cls(sizes, mean, scale, np.asarray(seen.any(axis=0)), levels)

    def to_arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """What a file keeps."""
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "mean": self.mean,
            "scale": self.scale,
            "observed": self.observed.astype(np.int64),
            "sizes": self.sizes,
        }
        if self.levels is not None:
            arrays["levels"] = np.concatenate(self.levels)
            arrays["level_sizes"] = np.array([len(level) for level in self.levels])
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], width: int) -> TableEncoding:
        """Make the encoding again whose arrays were kept; older files have none for categories."""
        sizes = np.zeros(width, dtype=np.int64)
        if "sizes" in arrays:
            sizes = expect(arrays, "sizes", (None,), integers=True, least=0).numpy()
        mean = expect(arrays, "mean", (width,)).numpy()
        scale = expect(arrays, "scale", (width,), positive=True).numpy()
        observed = expect(arrays, "observed", (width,), integers=True).numpy() > 0
        levels = None
        if "levels" in arrays:
            shape = (len(sizes),)
            counts = expect(arrays, "level_sizes", shape, integers=True, least=0).numpy()
            values = expect(arrays, "levels", (int(counts.sum()),)).numpy()
            levels = np.split(values, np.cumsum(counts)[:-1])
        found = cls(sizes, mean, scale, observed, levels)
        if len(found.source) != width:
            raise ValueError(f"sizes stand for {len(found.source)} columns, there are {width}")
        return found

    def spread_out(self, table: Floats) -> Floats:
        """Numbers or their normal scores, and indicators."""
        found = np.full((len(table), len(self.source)), np.nan)
        for j, (size, start, end) in enumerate(
            zip(self.sizes, self.starts, self.ends, strict=True)
        ):
            column = table[:, j]
            here = ~np.isnan(column)
            if size > 0:
                first = 1 if size <= 2 else 0
                kinds = np.arange(first, first + end - start)
                found[here, start:end] = column[here, None] == kinds
            elif self.levels is not None:
                found[here, start] = _scores(column[here], self.levels[j])
            else:
                found[here, start] = column[here]
        return found

    def standardise(self, table: Floats) -> Floats:
        """Standardised columns, NaN where there is no value or where the fit had none."""
        z = (self.spread_out(table) - self.mean) / self.scale
        z = z.clip(-_FURTHEST, _FURTHEST)
        z[:, ~self.observed] = np.nan
        return z

    def restore(self, z: Floats, column: int) -> Floats:
        """Standardised values of a column of numbers in its own units."""
        at = self.starts[column]
        x = self.mean[at] + self.scale[at] * z * self.observed[at]
        return x if self.levels is None else _values(x, self.levels[column])

    def restore_std(self, z: Floats, std: Floats, column: int) -> Floats:
        """Standard deviations of a column of numbers in its own units."""
        if self.levels is not None:
            return (self.restore(z + std, column) - self.restore(z - std, column)) / 2
        at = self.starts[column]
        return self.scale[at] * std * self.observed[at]

    def probabilities(self, z: Floats, std: Floats, column: int) -> Floats:
        """Probabilities of the categories of a column from the moments of its indicators."""
        part = slice(self.starts[column], self.ends[column])
        size = int(self.sizes[column])
        if size == 1:
            return np.ones((len(z), 1))
        frequency = self.mean[part]
        deviation = np.maximum(self.scale[part] * std, _LEAST_STD)
        evidence = (frequency + self.scale[part] * z - 0.5) / deviation**2
        evidence = evidence - (frequency - 0.5) / self.scale[part] ** 2
        if size == 2:
            chance = expit(evidence + logit(frequency))
            return np.hstack([1 - chance, chance])
        return np.asarray(softmax(_SHARED * evidence + np.log(frequency), axis=1))


def _scores(x: Floats, levels: Floats) -> Floats:
    """Normal scores: quantiles of a Gaussian at the mid-ranks among the sorted values of a fit."""
    count = len(levels)
    if count < 2:
        return np.zeros(len(x))
    rank = (np.searchsorted(levels, x, "left") + np.searchsorted(levels, x, "right")) / 2
    return np.asarray(ndtri(rank.clip(0.5, count - 0.5) / count))


def _values(scores: Floats, levels: Floats) -> Floats:
    """Values of a fit at the ranks of normal scores; between them if the column has no steps."""
    count = len(levels)
    if count == 0:
        return np.zeros(len(scores))
    place = (ndtr(scores) * count - 0.5).clip(0, count - 1)
    if len(np.unique(levels)) <= max(2, _STEPS * count):
        return levels[np.rint(place).astype(np.int64)]
    return np.interp(place, np.arange(count), levels)
