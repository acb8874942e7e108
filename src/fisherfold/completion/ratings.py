"""The observed entries of a matrix with holes, held once by column and once by row.

    Ω = {(j, i)},  x_ji for (j, i) ∈ Ω;   Ω_i: the rows seen in column i,   Ω^j: the columns seen in row j

Both orders are kept because every pass sums over columns (coefficients) and over rows (gradients). A rating costs at
most 16 bytes in all: two int32 indices, and its value twice as float32; or, for float64, twice as an int16 code into a
table of the distinct values (12 bytes), or once with a position in place of the second index (16 bytes).

Over several processes one side is shared out: each process holds all ratings of its members of that side, numbered from
0 there, and sums over the groups of the other side are completed by ``Grouped.total``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.completion.building import CHUNK, ColumnOrder, RepeatedPairs
from fisherfold.completion.grouped import Grouped, GroupedByPosition
from fisherfold.completion.tiled import tiled
from fisherfold.distributed import ALONE, Axis, Group

Duplicates = Literal["error", "mean", "last", "sum"]


class Chunk(NamedTuple):
    """Some entries, from one of several sources that count as coming one after the other."""

    rows: npt.NDArray[np.int32]
    columns: npt.NDArray[np.int32]
    values: npt.NDArray[Any]
    source: int = 0


_MAX_RATINGS = 2**31 - 1
_DTYPES = (torch.float32, torch.float64)


def _group_of(axes: tuple[Axis, Axis]) -> Group:
    return next((axis.group for axis in axes if axis.is_shared), ALONE)


class Ratings:
    """The observed entries of an ``n_rows`` × ``n_columns`` matrix.

    Attributes:
        shape: the number of rows and columns, over all processes.
        by_row: the ratings in row order, columns ascending.
        by_column: the ratings in column order, rows ascending.
        row_axis: which rows are here; all of them in one process.
        column_axis: which columns are here.
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
        self._build(lambda: _slices(row_ids, column_ids, data), axes, data.dtype.type, duplicates, None, device)

    @classmethod
    def from_chunks(
        cls,
        chunks: Callable[[], Iterable[Chunk]],
        axes: tuple[Axis, Axis],
        *,
        dtype: torch.dtype = torch.float32,
        duplicates: Duplicates = "error",
        column_counts: npt.NDArray[np.int64] | None = None,
        device: torch.device | str | None = None,
        named: Callable[[RepeatedPairs], RepeatedPairs] = lambda found: found,
    ) -> Ratings:
        """Sort entries that come in pieces and are never all in memory besides the result.

        Args:
            chunks: called to go through the entries: rows, columns (numbered from the start of their axis) and values,
                int32 and floating, a bounded number at a time; called twice unless ``column_counts`` is given.
            axes: the rows and the columns that are here.
            dtype: float32 or float64.
            duplicates: as for the constructor.
            column_counts: how many entries come for each column that is here, or a table with a line per source.
            device: where to keep them; the CPU if not given.
            named: brings a refusal of repeated pairs from the numbers that they have here to their names.

        Returns:
            The ratings.

        Example:
            >>> pieces = [Chunk(np.array([0], "i4"), np.array([1], "i4"), np.array([5.0]))] * 2
            >>> Ratings.from_chunks(lambda: pieces, (Axis.whole(2), Axis.whole(2)), duplicates="sum").entries()
            (tensor([0], dtype=torch.int32), tensor([1], dtype=torch.int32), tensor([10.]))
        """
        new = cls.__new__(cls)
        kind = np.float32 if _checked_dtype(dtype) == torch.float32 else np.float64
        new._build(chunks, axes, kind, duplicates, column_counts, device, named)
        return new

    def _build(
        self,
        chunks: Callable[[], Iterable[Chunk]],
        axes: tuple[Axis, Axis],
        dtype: type[np.floating],
        duplicates: str,
        counts: npt.NDArray[np.int64] | None,
        device: torch.device | str | None,
        named: Callable[[RepeatedPairs], RepeatedPairs] = lambda found: found,
    ) -> None:
        if duplicates not in ("error", "mean", "last", "sum"):
            raise ValueError(f"duplicates must be 'error', 'mean', 'last' or 'sum', got {duplicates!r}")
        if counts is None:
            counts = np.zeros(len(axes[1]), dtype=np.int64)
            for chunk in chunks():
                counts += np.bincount(chunk.columns, minlength=len(counts))
        group = _group_of(axes)
        with group.together():
            if (here := int(counts.sum())) > _MAX_RATINGS:
                raise ValueError(f"one process can hold {_MAX_RATINGS} ratings, got {here}; use more of them")
        order = ColumnOrder(counts, dtype)
        for chunk in chunks():
            order.place(*chunk)
        order.arrange()
        with group.together():
            try:
                merged = order.merge(duplicates)
            except RepeatedPairs as error:
                raise named(error) from None
        order.compress()
        by_column, by_row = order.both(len(axes[0]))
        del order
        # the order that reads from the longer table
        if len(axes[0]) > len(axes[1]):
            by_column = tiled(by_column, by_row)
        else:
            by_row = tiled(by_row, by_column)
        self._set(axes, by_row, by_column, merged)
        if device is not None and torch.device(device).type != "cpu":
            self.__dict__ |= self.to(device).__dict__

    def _set(self, axes: tuple[Axis, Axis], by_row: Grouped, by_column: Grouped, merged: int) -> None:
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
        """Other entries of the same matrix, over the same processes.

        Args:
            rows: row numbers as in ``entries``.
            columns: column numbers as in ``entries``.
            values: values.

        Returns:
            The ratings, of the same dtype and on the same device.
        """
        parts = [part.cpu().numpy() for part in (rows.int(), columns.int(), values.to(self.dtype))]
        return Ratings.from_chunks(
            lambda: _slices(*parts), (self.row_axis, self.column_axis), dtype=self.dtype, device=self.device
        )

    @property
    def group(self) -> Group:
        """The processes that hold the ratings together."""
        return _group_of((self.row_axis, self.column_axis))

    def with_sides(self, by_row: Grouped, by_column: Grouped) -> Ratings:
        """The same ratings, their orders held in another form.

        Args:
            by_row: the ratings in row order.
            by_column: the ratings in column order.

        Returns:
            Ratings that share everything else.
        """
        return self._with(by_row=by_row, by_column=by_column)

    @property
    def T(self) -> Ratings:
        """The transposed matrix; nothing is copied."""
        return self._with(
            shape=self.shape[::-1], by_row=self.by_column, by_column=self.by_row, row_axis=self.column_axis,
            column_axis=self.row_axis, _counts=self._counts[::-1],
        )  # fmt: skip

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
        """Σ over all ratings, in float64.

        Args:
            x: one number for each rating that is here.

        Returns:
            The sum over all processes.
        """
        return float(self.group.sum(x.sum(dtype=torch.float64)))

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """The entries that are here, in column order.

        Returns:
            Rows (int32), columns (int32), both numbered from the start of their axis, and values.
        """
        return self.by_column.indices(), self.by_column.groups(), self.by_column.values()

    def take_columns(self, columns: Tensor) -> Ratings:
        """The ratings of some columns, as a matrix of these columns alone.

        Args:
            columns: column numbers; one that occurs twice is taken twice.

        Returns:
            A copy with ``len(columns)`` columns and all rows.
        """
        chosen, here = self.column_axis.local(columns)
        by_column = self.by_column.take(here)
        rows, order = by_column.indices().sort(stable=True)
        offsets = torch.bincount(rows, minlength=len(self.row_axis)).cumsum(0)
        offsets = torch.cat([offsets.new_zeros(1), offsets]).int()
        by_row = Grouped(offsets, by_column.groups()[order], by_column.values()[order], across=self.by_row.across)
        axis = replace(self.column_axis, size=len(columns), start=0, stop=len(chosen))
        new = self._with(shape=(self.n_rows, len(columns)), by_row=by_row, by_column=by_column, column_axis=axis)
        new._counts = by_row.total(by_row.counts), by_column.total(by_column.counts)
        return new

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
        counts = self._counts[0].to(device), self._counts[1].to(device)
        if isinstance(self.by_row, GroupedByPosition):
            offsets, positions = self.by_row.offsets.to(device), self.by_row.stored_indices.to(device)
            by_row: Grouped = GroupedByPosition(
                offsets, positions, positions, across=self.by_row.across, other=by_column
            )
        else:
            by_row = self.by_row.to(device)
        return self._with(by_row=by_row, by_column=by_column, _counts=counts)

    def __repr__(self) -> str:
        each = self.nbytes / max(self.by_column.n_ratings, 1)
        kind = str(self.dtype).removeprefix("torch.")
        return f"Ratings({self.n_ratings} of {self.shape[0]} x {self.shape[1]}, {kind}, {each:.1f} bytes each)"


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


def _slices(
    rows: npt.NDArray[np.int32], columns: npt.NDArray[np.int32], values: npt.NDArray[Any]
) -> Iterable[Chunk]:
    for start in range(0, len(rows), CHUNK):
        part = slice(start, start + CHUNK)
        yield Chunk(rows[part], columns[part], values[part])


def _checked_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    return dtype


def _checked_values(values: npt.ArrayLike | Tensor, dtype: torch.dtype | None) -> npt.NDArray[np.floating]:
    # Finite floating values of the wanted dtype, or an error.
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"values must be numbers, got dtype {array.dtype}")
    dtype = _checked_dtype(dtype or (torch.float32 if array.dtype == np.float32 else torch.float64))
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
