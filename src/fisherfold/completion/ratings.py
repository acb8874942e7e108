"""The observed entries of a matrix with holes, held once by column and once by row.

    Ω = {(j, i)},  x_ji for (j, i) ∈ Ω;   Ω_i: the rows seen in column i,   Ω^j: the columns seen in row j

Both orders are kept because every pass sums over columns (coefficients) and over rows (gradients): 16 bytes per rating
in float32, 24 in float64. Over several processes the members of one side are divided: each process holds all ratings
of its members, numbered from 0 there, and ``Grouped.total`` completes sums over the groups of the other side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.distributed import ALONE, Axis, Group
from fisherfold.plain import counted

Array = npt.NDArray[Any]
Duplicates = Literal["error", "mean", "last", "sum"]

_RULES = ("error", "mean", "last", "sum")
_MAX_RATINGS = 2**31 - 1
_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


class Ratings:
    """The observed entries of an ``n_rows`` × ``n_columns`` matrix.

    Attributes:
        shape: the number of rows and columns, over all processes.
        by_row: the ratings in row order, columns ascending.
        by_column: the ratings in column order, rows ascending.
        row_axis: which rows are in this process; all of them without torch.distributed.
        column_axis: which columns are in this process.
        n_ratings: the number of observed entries, over all processes.
        n_duplicates: how many given entries were merged into another one by the rule ``duplicates``.

    Example:
        >>> r = Ratings([0, 2, 2], [1, 0, 1], [5.0, 3.0, 4.0], shape=(3, 2))
        >>> r.by_column.offsets.tolist(), r.by_column.indices().tolist(), r.by_column.values().tolist()
        ([0, 1, 3], [2, 0, 2], [3.0, 5.0, 4.0])
        >>> r.T.shape, r.row_counts.tolist()
        ((2, 3), [1, 0, 2])
    """

    shape: tuple[int, int]
    by_row: Grouped
    by_column: Grouped
    row_axis: Axis
    column_axis: Axis
    n_ratings: int
    n_duplicates: int
    _counts: tuple[Tensor, Tensor]

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
        shape = _checked_shape(row_ids, column_ids, data, shape)
        axes = Axis.whole(shape[0]), Axis.whole(shape[1])
        self._build([row_ids, column_ids, data], axes, duplicates, device)

    @classmethod
    def over(
        cls,
        axes: tuple[Axis, Axis],
        rows: Array,
        columns: Array,
        values: Array,
        *,
        dtype: torch.dtype = torch.float32,
        duplicates: Duplicates = "error",
        device: torch.device | str | None = None,
    ) -> Ratings:
        """Sort the entries that belong to this process, rows and columns numbered from the start of their axis."""
        new = cls.__new__(cls)
        numbers = values.astype(_DTYPES[_checked_dtype(dtype)], copy=False)
        entries = [rows.astype(np.int32, copy=False), columns.astype(np.int32, copy=False), numbers]
        new._build(entries, axes, duplicates, device)
        return new

    def _build(
        self,
        entries: list[Array],
        axes: tuple[Axis, Axis],
        duplicates: str,
        device: torch.device | str | None,
    ) -> None:
        if duplicates not in _RULES:
            raise ValueError(
                f"duplicates must be 'error', 'mean', 'last' or 'sum', got {duplicates!r}"
            )
        with _group_of(axes).together():
            if len(entries[0]) > _MAX_RATINGS:
                raise ValueError(
                    f"one process can hold {_MAX_RATINGS} ratings, got {len(entries[0])}; use more processes"
                )
            by_row, by_column, merged = _sorted_both_ways(
                entries, (len(axes[0]), len(axes[1])), duplicates
            )
        self._set(axes, by_row, by_column, merged)
        if device is not None and torch.device(device).type != "cpu":
            self.__dict__ |= self.to(device).__dict__

    def _set(
        self, axes: tuple[Axis, Axis], by_row: Grouped, by_column: Grouped, merged: int
    ) -> None:
        self.row_axis, self.column_axis = axes
        self.shape = axes[0].size, axes[1].size
        if axes[1].is_shared:
            by_row = replace(by_row, across=axes[1])
        if axes[0].is_shared:
            by_column = replace(by_column, across=axes[0])
        self.by_row, self.by_column = by_row, by_column
        found = self.group.sum(torch.tensor([by_column.n_ratings, merged])).tolist()
        self.n_ratings, self.n_duplicates = found
        self._counts = by_row.total(by_row.counts), by_column.total(by_column.counts)

    def _with(self, **changes: Any) -> Ratings:
        new = type(self).__new__(type(self))
        new.__dict__ |= self.__dict__ | changes
        return new

    def like(self, rows: Tensor, columns: Tensor, values: Tensor) -> Ratings:
        """Other entries of the same matrix, numbered as in ``entries``, over the same processes."""
        entries = [part.cpu().numpy() for part in (rows, columns, values)]
        return Ratings.over(
            (self.row_axis, self.column_axis), *entries, dtype=self.dtype, device=self.device
        )

    @property
    def group(self) -> Group:
        """The processes that hold the ratings together."""
        return _group_of((self.row_axis, self.column_axis))

    @property
    def T(self) -> Ratings:
        """The transposed matrix; nothing is copied."""
        return self._with(
            shape=self.shape[::-1],
            by_row=self.by_column,
            by_column=self.by_row,
            row_axis=self.column_axis,
            column_axis=self.row_axis,
            _counts=self._counts[::-1],
        )

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return self.shape[0]

    @property
    def n_columns(self) -> int:
        """The number of columns."""
        return self.shape[1]

    @property
    def density(self) -> float:
        """The observed share of the matrix."""
        return self.n_ratings / (self.shape[0] * self.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.by_column.dtype

    @property
    def device(self) -> torch.device:
        """Where the ratings are kept."""
        return self.by_column.offsets.device

    @property
    def row_counts(self) -> Tensor:
        """The number of ratings of each row that is here, over all processes, int32."""
        return self._counts[0]

    @property
    def column_counts(self) -> Tensor:
        """The number of ratings of each column that is here, over all processes, int32."""
        return self._counts[1]

    @property
    def nbytes(self) -> int:
        """The memory in bytes: at most 16 per rating, plus 4 per row and column and a table of distinct values."""
        return self.by_row.nbytes + self.by_column.nbytes

    @property
    def mean(self) -> float:
        """The mean of the observed values."""
        return self.add(self.by_column.values()) / self.n_ratings

    def add(self, x: Tensor) -> float:
        """The sum of one number for each rating over all processes, in float64."""
        return float(self.group.sum(x.sum(dtype=torch.float64)))

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, columns and values of the entries that are here, in column order, numbered from the start of axes."""
        return self.by_column.indices(), self.by_column.groups(), self.by_column.values()

    def take_columns(self, columns: Tensor) -> Ratings:
        """The ratings of some columns, as a matrix of these alone; one that occurs twice is taken twice."""
        chosen, here = self.column_axis.local(columns)
        by_column = self.by_column.take(here)
        rows, order = by_column.indices().sort(stable=True)
        offsets = torch.bincount(rows, minlength=len(self.row_axis)).cumsum(0)
        offsets = torch.cat([offsets.new_zeros(1), offsets]).int()
        entries = by_column.groups()[order], by_column.values()[order]
        by_row = Grouped(offsets, *entries, len(chosen), across=self.by_row.across)
        axis = replace(self.column_axis, size=len(columns), start=0, stop=len(chosen))
        new = self._with(
            shape=(self.n_rows, len(columns)), by_row=by_row, by_column=by_column, column_axis=axis
        )
        new._counts = by_row.total(by_row.counts), by_column.total(by_column.counts)
        return new

    def to(self, device: torch.device | str) -> Ratings:
        """The same ratings on another device; this object if it is there already."""
        if self.device == torch.device(device):
            return self
        counts = self._counts[0].to(device), self._counts[1].to(device)
        return self._with(
            by_row=self.by_row.to(device), by_column=self.by_column.to(device), _counts=counts
        )

    def __repr__(self) -> str:
        each = self.nbytes / max(self.by_column.n_ratings, 1)
        kind = str(self.dtype).removeprefix("torch.")
        return f"Ratings({self.n_ratings} of {self.shape[0]} x {self.shape[1]}, {kind}, {each:.1f} bytes each)"


@dataclass(frozen=True)
class TrainingRatings:
    """The ratings that a model keeps, row by row, centred and scaled.

    Attributes:
        offsets: where those of each row start, and the end.
        columns: their column numbers.
        values: their values.
    """

    offsets: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int32]
    values: npt.NDArray[np.floating]

    @classmethod
    def of(cls, ratings: Ratings) -> TrainingRatings:
        """The ratings of a fit."""
        by_row = ratings.by_row
        parts = by_row.offsets.long(), by_row.indices(), by_row.values()
        return cls(*(part.cpu().numpy() for part in parts))

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The row of each rating."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @classmethod
    def from_entries(
        cls, rows: Array, columns: Array, values: Array, n_rows: int
    ) -> TrainingRatings:
        """Ratings in any order of the rows."""
        order = np.argsort(rows, kind="stable")
        counts = np.bincount(rows, minlength=n_rows)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return cls(offsets, columns.astype(np.int32)[order], values[order])

    def of_rows(self, rows: Array) -> tuple[Array, Array]:
        """The columns in which some rows have ratings, and which of the rows each belongs to."""
        known = rows >= 0
        starts = np.where(known, self.offsets[rows], 0)
        counts = np.where(known, self.offsets[rows + 1] - starts, 0)
        place = np.repeat(np.arange(len(rows)), counts)
        inside = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        return place, self.columns[starts[place] + inside].astype(np.int64)


def _group_of(axes: tuple[Axis, Axis]) -> Group:
    return next((axis.group for axis in axes if axis.is_shared), ALONE)


def _sorted_both_ways(
    entries: list[Array], shape: tuple[int, int], rule: str
) -> tuple[Grouped, Grouped, int]:
    """Both orders, and how many entries were merged; rows, columns and values are taken out of the list."""
    # Three stable counting sorts: by row as they came, hence by column with rows ascending and repeated pairs next to
    # each other in the order of their arrival, hence by row with columns ascending.
    table = sparse.coo_array((entries[2], (entries[0], entries[1])), shape=shape)
    table.has_canonical_format = True  # keeps repeated pairs apart
    entries.clear()  # and no more than two orders are held at a time
    table = table.tocsr()
    by_column = table.tocsc()
    del table
    merged = _merge(by_column, rule)
    by_row = by_column.tocsr()
    return _grouped(by_row, shape[1]), _grouped(by_column, shape[0]), merged


def _grouped(order: Any, n_others: int) -> Grouped:
    offsets, indices = torch.from_numpy(order.indptr), torch.from_numpy(order.indices)
    return Grouped(offsets, indices, torch.from_numpy(order.data), n_others)


def _merge(order: Any, rule: str) -> int:
    """Merge repeated pairs, which are neighbours, in place."""
    fresh = np.ones(order.nnz, dtype=bool)
    np.not_equal(order.indices[1:], order.indices[:-1], out=fresh[1:])
    starts = order.indptr[:-1]
    fresh[starts[starts < order.nnz]] = True
    heads = np.flatnonzero(fresh)
    repeated = order.nnz - len(heads)
    if repeated == 0:
        return 0
    if rule == "error":
        place = int(np.argmin(fresh))
        row, column = (
            int(order.indices[place]),
            int(np.searchsorted(order.indptr, place, side="right")) - 1,
        )
        repeats = counted(repeated, "entry repeats", "entries repeat")
        raise ValueError(
            f"{repeats} a pair that was given before, the first is row {row}, column {column}; "
            "choose duplicates='mean', 'last' or 'sum' to merge them"
        )
    sizes = np.diff(np.append(heads, order.nnz))
    if rule == "last":
        values = order.data[heads + sizes - 1]
    else:
        values = np.add.reduceat(order.data.astype(np.float64), heads)
        values = (values / sizes if rule == "mean" else values).astype(order.data.dtype)
    indptr = np.searchsorted(heads, order.indptr).astype(np.int32)
    order.indices, order.data, order.indptr = order.indices[heads], values, indptr
    return repeated


def places(groups: Array, keys: Array) -> Array:
    """The place of each entry among those of its group, in the order of some keys.

    Examples:
        >>> places(np.array([1, 0, 1, 1]), np.array([0.3, 0.1, 0.2, 0.4])).tolist()
        [1, 0, 0, 2]
    """
    order, counts = np.lexsort((keys, groups)), np.bincount(groups)
    found = np.empty(len(groups), dtype=np.int64)
    found[order] = np.arange(len(groups)) - (np.cumsum(counts) - counts)[groups[order]]
    return found


def _array(values: npt.ArrayLike | Tensor) -> Array:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _ids(values: npt.ArrayLike | Tensor, name: str) -> npt.NDArray[np.int32]:
    """Whole numbers from 0 below 2³¹."""
    array = _array(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold whole numbers, got dtype {array.dtype}")
    if len(array) and (int(array.min()) < 0 or int(array.max()) > _MAX_RATINGS - 1):
        raise ValueError(
            f"{name} must lie between 0 and {_MAX_RATINGS - 1}, got values from {array.min()} to {array.max()}"
        )
    return array.astype(np.int32, copy=False)


def _checked_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    return dtype


def _checked_values(
    values: npt.ArrayLike | Tensor, dtype: torch.dtype | None
) -> npt.NDArray[np.floating]:
    """Finite floating values of the wanted dtype."""
    array = _array(values)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"values must be numbers, got dtype {array.dtype}")
    dtype = _checked_dtype(dtype or (torch.float32 if array.dtype == np.float32 else torch.float64))
    array = array.astype(_DTYPES[dtype], copy=False)
    if bad := np.count_nonzero(~np.isfinite(array)):
        raise ValueError(f"values must be finite, got {bad} NaN or infinite among {array.size}")
    return array


def _checked_shape(
    rows: Array, columns: Array, values: Array, shape: tuple[int, int] | None
) -> tuple[int, int]:
    """The shape of the matrix, into which everything must fit."""
    if not rows.shape == columns.shape == values.shape:
        raise ValueError(
            f"rows, columns and values must have one length, got {rows.shape}, {columns.shape} and {values.shape}"
        )
    if not 0 < len(rows) <= _MAX_RATINGS:
        raise ValueError(f"there must be between 1 and {_MAX_RATINGS} ratings, got {len(rows)}")
    needed = int(rows.max()) + 1, int(columns.max()) + 1
    if shape is not None and (shape[0] < needed[0] or shape[1] < needed[1]):
        raise ValueError(
            f"shape must be at least {needed} for these rows and columns, got {tuple(shape)}"
        )
    return needed if shape is None else (int(shape[0]), int(shape[1]))
