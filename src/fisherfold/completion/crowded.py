"""Tables that are mostly full: sums over the ratings of a group as products with the dense table and its mask.

    Σ_{j ∈ Ω_i} t_j = (M T)_i,    Σ_{j ∈ Ω_i} x_ji t_j = (X T)_i,    M the mask, X the table with zeros at its holes

Above a third of full this moves fewer bytes than indices do. The dense pair is kept beside the ratings, 8 bytes a cell
in float32 and 16 in float64, so only tables of bounded size get one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.ratings import Ratings

# From this share of rated entries on, reading whole columns is quicker than gathering.
CROWDED = 0.3
# Multiply-adds up to which a BLAS multiplies thin matrices as they lie; larger products are packed first, at twice
# the time (measured with OpenBLAS, benchmarks/completion_kernels.py).
SMALL_PRODUCT = 10**6
_FEWEST_CELLS, _MOST_CELLS = 2**17, 2**25

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class CrowdedGrouped(Grouped):
    """Ratings in one order with their dense form, groups × others, at hand.

    Attributes:
        filled: the values, zero at holes.
        mask: one where there is a rating.
    """

    filled: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    mask: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    def sums(  # noqa: D102
        self, tables: Mapping[int, Tensor], first: int = 0, last: int | None = None
    ) -> tuple[Tensor, ...]:
        dense = {0: self.mask, 1: self.filled}
        if any(power not in dense or table.dtype != self.filled.dtype for power, table in tables.items()):
            return super().sums(tables, first, last)
        return tuple(crowded_sum(dense[power][first:last], table) for power, table in tables.items())


def dense_form(ratings: Ratings) -> tuple[Tensor, Tensor]:
    """The transposed matrix with zeros at its holes, and its mask.

    Args:
        ratings: the ratings.

    Returns:
        Two tables with one row per column.
    """
    side = ratings.by_column
    if isinstance(side, CrowdedGrouped) and side.filled.is_contiguous():
        return side.filled, side.mask
    rows, columns, values = ratings.entries()
    shape = (ratings.n_columns, ratings.n_rows)
    places = columns.long() * ratings.n_rows + rows
    filled, mask = (torch.zeros(shape, dtype=values.dtype) for _ in range(2))
    filled.view(-1)[places], mask.view(-1)[places] = values, 1.0
    return filled, mask


def with_dense_form(ratings: Ratings) -> Ratings:
    """The same ratings with their dense form, if that pays.

    Args:
        ratings: the ratings.

    Returns:
        Ratings whose sides are ``CrowdedGrouped``, or the given ones: not on a CPU or not here alone, too sparse, too
        small, too large.
    """
    cells, shared = ratings.shape[0] * ratings.shape[1], ratings.row_axis.is_shared or ratings.column_axis.is_shared
    if shared or ratings.device.type != "cpu" or isinstance(ratings.by_column, CrowdedGrouped):
        return ratings
    if ratings.density < CROWDED or not _FEWEST_CELLS <= cells <= _MOST_CELLS:
        return ratings
    filled, mask = dense_form(ratings)
    return ratings.with_sides(_crowded(ratings.by_row, filled.mT, mask.mT), _crowded(ratings.by_column, filled, mask))


def _crowded(side: Grouped, filled: Tensor, mask: Tensor) -> Grouped:
    if type(side) is not Grouped:
        return side
    return CrowdedGrouped(side.offsets, side.stored_indices, side.stored_values, side.codebook, None, filled, mask)


def crowded_sum(matrix: Tensor, table: Tensor) -> Tensor:
    """A dense matrix times a thin table, in pieces that a BLAS multiplies without packing them.

    Args:
        matrix: groups × others.
        table: others × width.

    Returns:
        Their product.

    Example:
        >>> crowded_sum(torch.ones(2, 3), torch.tensor([[1.0], [2.0], [3.0]]))
        tensor([[6.],
                [6.]])
    """
    left, right = matrix.numpy(), table.detach().numpy()
    groups, others = left.shape
    step = SMALL_PRODUCT // max(1, right.shape[1] * min(groups, others))
    if step < 64:
        return torch.from_numpy(left @ right)
    if others > groups:
        total = np.zeros((groups, right.shape[1]), dtype=right.dtype)
        for start in range(0, others, step):
            total += left[:, start : start + step] @ right[start : start + step]
        return torch.from_numpy(total)
    # Entry-major, as the small systems that follow want it.
    out, thin = np.empty((right.shape[1], groups), dtype=right.dtype), np.ascontiguousarray(right.T)
    for start in range(0, groups, step):
        np.matmul(thin, left[start : start + step].T, out=out[:, start : start + step])
    return torch.from_numpy(out).mT
