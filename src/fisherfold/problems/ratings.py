"""The observed entries of a matrix with holes, held once by column and once by row.

    Ω = {(j, i)},  x_ji for (j, i) ∈ Ω;   Ω_i: the rows seen in column i,   Ω^j: the columns seen in row j

Both orders are kept because every pass sums over columns (coefficients) and over rows (gradients). A rating costs at
most 16 bytes in all: two int32 indices, and its value twice as float32; or, for float64, twice as an int16 code into a
table of the distinct values (12 bytes), or once with a position in place of the second index (16 bytes).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import csc_array, csr_array
from torch import Tensor

from fisherfold.problems.grouped import Grouped, GroupedByPosition, both_orders

Duplicates = Literal["error", "mean", "last", "sum"]

_MAX_RATINGS = 2**31 - 1
_DTYPES = (torch.float32, torch.float64)


class Ratings:
    """The observed entries of an ``n_rows`` × ``n_columns`` matrix.

    Attributes:
        shape: the number of rows and columns.
        by_row: the ratings in row order, columns ascending.
        by_column: the ratings in column order, rows ascending.
        dtype: the dtype of the values, float32 or float64.
        n_duplicates: how many given entries were merged into another one by the rule ``duplicates``.

    Example:
        >>> r = Ratings([0, 2, 2], [1, 0, 1], [5.0, 3.0, 4.0], shape=(3, 2))
        >>> r.by_column.offsets.tolist(), r.by_column.indices().tolist(), r.by_column.values().tolist()
        ([0, 1, 3], [2, 0, 2], [3.0, 5.0, 4.0])
        >>> r.T.shape, r.row_counts.tolist()
        ((2, 3), [1, 0, 2])
    """

    def __init__(
        self,
        rows: npt.ArrayLike | Tensor,
        columns: npt.ArrayLike | Tensor,
        values: npt.ArrayLike | Tensor,
        shape: tuple[int, int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        duplicates: Duplicates = "error",
        device: torch.device | str | None = None,
    ) -> None:
        """Sort the entries into both orders.

        Args:
            rows: the row of each entry, whole numbers from 0.
            columns: the column of each entry.
            values: the value of each entry; an explicit zero is an observed zero.
            shape: rows and columns of the matrix; just large enough if not given.
            dtype: float32 or float64; that of floating tensors and arrays if not given, float64 for whole numbers.
            duplicates: what happens to a pair that is given twice: ``error``, ``mean``, ``last`` or ``sum``.
            device: where to keep them; the CPU if not given.
        """
        row_ids, column_ids = _ids(rows, "rows"), _ids(columns, "columns")
        data = _checked_values(values, dtype)
        self.shape = _checked_shape(row_ids, column_ids, data, shape)
        by_column = _column_order(row_ids, column_ids, data, self.shape)
        by_column, self.n_duplicates = _merge(by_column, duplicates)
        self.by_column, self.by_row = both_orders(by_column)
        if device is not None and torch.device(device).type != "cpu":
            moved = self.to(device)
            self.by_column, self.by_row = moved.by_column, moved.by_row

    @classmethod
    def _of(cls, shape: tuple[int, int], by_row: Grouped, by_column: Grouped, n_duplicates: int) -> Ratings:
        new = cls.__new__(cls)
        new.shape, new.by_row, new.by_column, new.n_duplicates = shape, by_row, by_column, n_duplicates
        return new

    @property
    def T(self) -> Ratings:
        """The transposed matrix; nothing is copied."""
        return Ratings._of((self.shape[1], self.shape[0]), self.by_column, self.by_row, self.n_duplicates)

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return self.shape[0]

    @property
    def n_columns(self) -> int:
        """The number of columns."""
        return self.shape[1]

    @property
    def n_ratings(self) -> int:
        """The number of observed entries."""
        return self.by_column.n_ratings

    @property
    def density(self) -> float:
        """The observed share of the matrix."""
        return self.n_ratings / (self.shape[0] * self.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        side = self.by_column.source if isinstance(self.by_column, GroupedByPosition) else self.by_column
        return side.stored_values.dtype if side.codebook is None else side.codebook.dtype

    @property
    def device(self) -> torch.device:
        """Where the ratings are kept."""
        return self.by_column.offsets.device

    @property
    def row_counts(self) -> Tensor:
        """The number of ratings of each row, int32."""
        return self.by_row.counts

    @property
    def column_counts(self) -> Tensor:
        """The number of ratings of each column, int32."""
        return self.by_column.counts

    @property
    def nbytes(self) -> int:
        """The memory in bytes: at most 16 per rating, plus 4 per row and column and a table of distinct values."""
        return self.by_row.nbytes + self.by_column.nbytes

    @property
    def mean(self) -> float:
        """The mean of the observed values."""
        return float(self.by_column.values().double().mean())

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """All entries in column order.

        Returns:
            Rows (int32), columns (int32) and values.
        """
        return self.by_column.indices(), self.by_column.groups(), self.by_column.values()

    def take_columns(self, columns: Tensor) -> Ratings:
        """The ratings of some columns, as a matrix of these columns alone.

        Args:
            columns: column numbers; one that occurs twice is taken twice.

        Returns:
            A copy with ``len(columns)`` columns and all rows.
        """
        by_column = self.by_column.take(columns)
        rows, order = by_column.indices().sort(stable=True)
        offsets = torch.bincount(rows, minlength=self.n_rows).cumsum(0)
        offsets = torch.cat([offsets.new_zeros(1), offsets]).int()
        by_row = Grouped(offsets, by_column.groups()[order], by_column.values()[order])
        return Ratings._of((self.n_rows, len(columns)), by_row, by_column, 0)

    def to(self, device: torch.device | str) -> Ratings:
        """The same ratings on another device.

        Args:
            device: the device.

        Returns:
            The copy, or this object if it is there already.
        """
        if self.device == torch.device(device):
            return self
        if isinstance(self.by_column, GroupedByPosition):
            return self.T.to(device).T
        by_column = self.by_column.to(device)
        if isinstance(self.by_row, GroupedByPosition):
            offsets, positions = self.by_row.offsets.to(device), self.by_row.stored_indices.to(device)
            by_row: Grouped = GroupedByPosition(offsets, positions, positions, other=by_column)
        else:
            by_row = self.by_row.to(device)
        return Ratings._of(self.shape, by_row, by_column, self.n_duplicates)

    def __repr__(self) -> str:
        return (
            f"Ratings({self.n_ratings} of {self.shape[0]} x {self.shape[1]}, "
            f"{str(self.dtype).removeprefix('torch.')}, {self.nbytes / self.n_ratings:.1f} bytes each)"
        )


def _ids(values: npt.ArrayLike | Tensor, name: str) -> npt.NDArray[np.int32]:
    # Whole numbers from 0 below 2³¹, or an error.
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold whole numbers, got dtype {array.dtype}")
    if len(array) and (int(array.min()) < 0 or int(array.max()) > _MAX_RATINGS - 1):
        raise ValueError(
            f"{name} must lie between 0 and {_MAX_RATINGS - 1}, got values from {array.min()} to {array.max()}"
        )
    return array.astype(np.int32, copy=False)


def _checked_values(values: npt.ArrayLike | Tensor, dtype: torch.dtype | None) -> npt.NDArray[np.floating]:
    # Finite floating values of the wanted dtype, or an error.
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"values must be numbers, got dtype {array.dtype}")
    if dtype is None:
        dtype = torch.float32 if array.dtype == np.float32 else torch.float64
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    array = array.astype(np.float32 if dtype == torch.float32 else np.float64, copy=False)
    bad = np.count_nonzero(~np.isfinite(array))
    if bad:
        raise ValueError(f"values must be finite, got {bad} NaN or infinite among {array.size}")
    return array


def _checked_shape(
    rows: npt.NDArray[np.int32],
    columns: npt.NDArray[np.int32],
    values: npt.NDArray[np.floating],
    shape: tuple[int, int] | None,
) -> tuple[int, int]:
    # The shape of the matrix, after looking whether everything fits into it.
    if not rows.shape == columns.shape == values.shape:
        raise ValueError(
            f"rows, columns and values must have one length, got {rows.shape}, {columns.shape} and {values.shape}"
        )
    if not 0 < len(rows) <= _MAX_RATINGS:
        raise ValueError(f"there must be between 1 and {_MAX_RATINGS} ratings, got {len(rows)}")
    needed = int(rows.max()) + 1, int(columns.max()) + 1
    if shape is None:
        return needed
    if shape[0] < needed[0] or shape[1] < needed[1]:
        raise ValueError(f"shape must be at least {needed} for these rows and columns, got {tuple(shape)}")
    return int(shape[0]), int(shape[1])


def _column_order(
    rows: npt.NDArray[np.int32],
    columns: npt.NDArray[np.int32],
    values: npt.NDArray[np.floating],
    shape: tuple[int, int],
) -> csc_array:
    # The entries by column, rows ascending, equal pairs in the given order: two counting sorts, in linear time.
    if np.any(rows[1:] < rows[:-1]):
        order = _radix_argsort(rows, shape[0])
        rows, columns, values = rows[order], columns[order], values[order]
    offsets = np.zeros(shape[0] + 1, dtype=np.int32)
    np.cumsum(np.bincount(rows, minlength=shape[0]), out=offsets[1:])
    return csr_array((values, columns, offsets), shape=shape).tocsc()


def _radix_argsort(keys: npt.NDArray[np.int32], bound: int) -> npt.NDArray[np.intp]:
    # A stable argsort of keys below ``bound`` in linear time: NumPy sorts 16-bit digits by counting.
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    if bound > 2**16:
        order = order[np.argsort((keys[order] >> 16).astype(np.uint16), kind="stable")]
    return order


def _merge(matrix: csc_array, rule: Duplicates) -> tuple[csc_array, int]:
    # Apply the rule for pairs given twice, which are neighbours in the given order.
    if rule not in ("error", "mean", "last", "sum"):
        raise ValueError(f"duplicates must be 'error', 'mean', 'last' or 'sum', got {rule!r}")
    rows, values = matrix.indices, matrix.data
    fresh = np.ones(len(rows), dtype=bool)
    np.not_equal(rows[1:], rows[:-1], out=fresh[1:])
    starts_of_columns = matrix.indptr[:-1]
    fresh[starts_of_columns[starts_of_columns < len(rows)]] = True
    starts = np.flatnonzero(fresh)
    repeated = len(rows) - len(starts)
    if not repeated:
        return matrix, 0
    if rule == "error":
        k = int(np.flatnonzero(~fresh)[0])
        column = int(np.searchsorted(matrix.indptr, k, side="right")) - 1
        raise ValueError(
            f"{repeated} entries repeat a pair that was given before, the first is row {rows[k]}, column {column}; "
            "choose duplicates='mean', 'last' or 'sum' to merge them"
        )
    counts = np.diff(np.append(starts, len(rows)))
    if rule == "last":
        merged = values[starts + counts - 1]
    else:
        merged = np.add.reduceat(values.astype(np.float64), starts)
        merged = (merged / counts if rule == "mean" else merged).astype(values.dtype)
    offsets = np.concatenate([[0], np.cumsum(fresh)])[matrix.indptr].astype(np.int32)
    return csc_array((merged, rows[starts], offsets), shape=matrix.shape), repeated
