"""Ratings after validation: numbered, each pair once (``Triplets.merged``), and sorted both ways for the engine.

    Σ_l w_l ρ_l (x_l - η)² = W (x̄ - η)² + Σ_l w_l ρ_l (x_l - x̄)²,    W = Σ_l w_l ρ_l,    ρ = (1 / noise scale)²

Entries of one pair are merged into their weighted mean, which keeps the weight W, the amount Σ w_l (how many ratings
it counts as) and the root of the sum of squares within the pair: nothing of the likelihood is lost.

The way of ratings is ``Entries`` (ids) → ``Triplets`` (numbers, merged) → ``Ratings`` (centred and scaled, both
orders) → a model, which keeps ``TrainingRatings``. Both orders are kept because every pass sums over columns and over
rows: 16 bytes per rating in float32, 24 in float64. Over several processes the members of one side are divided: each
process holds all ratings of its members, numbered from 0 there, and ``Grouped.total`` completes sums over the groups
of the other side.
"""

from __future__ import annotations

import math
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
from fisherfold.tables.ids import IdIndex

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Duplicates = Literal["error", "mean", "last", "sum", "keep"]

RULES = ("mean", "last", "sum", "error")
_MAX_RATINGS = 2**31 - 1
_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
_NAMES = {np.float32: torch.float32, np.float64: torch.float64}
_OPTIONAL = ("amounts", "weights", "spread", "times", "excess")


@dataclass(frozen=True)
class Triplets:
    """Numbered ratings in units of the values.

    Attributes:
        rows: the row of each rating.
        columns: the column of each rating.
        values: their values.
        amounts: how many ratings each counts as, Σ w; None if all are 1.
        weights: what multiplies its square, Σ w ρ; None if these are the amounts.
        spread: the root of Σ w ρ (x - mean)² over the entries it was merged of; None if all are 0.
        times: when; None if that is not known.
        excess: Σ w ρ (w - 1), by which the noise estimate knows one rating of weight w from w ratings; None if all
            entries had the weight 1.

    Example:
        >>> entries = Triplets(np.array([0, 1, 0]), np.array([2, 2, 2]), np.array([1.0, 5.0, 2.0]))
        >>> [entries.merged(rule).values.tolist() for rule in ("mean", "last", "sum")]
        [[1.5, 5.0], [2.0, 5.0], [3.0, 5.0]]
        >>> entries.merged("mean").amounts.tolist()
        [2.0, 1.0]
    """

    rows: Array
    columns: Array
    values: Array
    amounts: Array | None = None
    weights: Floats | None = None
    spread: Floats | None = None
    times: Floats | None = None
    excess: Floats | None = None

    def __len__(self) -> int:
        return len(self.values)

    def at(self, where: Array) -> Triplets:
        """Some of the ratings, by position or mask."""
        parts: dict[str, Any] = {}
        for name in ("rows", "columns", "values", *_OPTIONAL):
            part = getattr(self, name)
            parts[name] = None if part is None else part[where]
        return Triplets(**parts)

    def joined(self, other: Triplets) -> Triplets:
        """These ratings, then others."""
        parts = {}
        for name in ("rows", "columns", "values", *_OPTIONAL):
            one, two = getattr(self, name), getattr(other, name)
            if one is None and two is None:
                continue
            one, two = (
                each._default(name) if part is None else part
                for each, part in ((self, one), (other, two))
            )
            parts[name] = np.concatenate([one, two])
        return Triplets(**parts)

    def _default(self, name: str) -> Floats:
        """What a field that is None stands for."""
        if name == "weights" and self.amounts is not None:
            return self.amounts
        return np.full(len(self), {"spread": 0.0, "times": np.nan, "excess": 0.0}.get(name, 1.0))

    @property
    def total_amount(self) -> float:
        """How many ratings all of them count as."""
        return float(len(self) if self.amounts is None else self.amounts.sum())

    @property
    def repeated(self) -> npt.NDArray[np.bool_]:
        """Which of sorted ratings have the pair of the one before."""
        found = np.zeros(len(self), dtype=bool)
        np.equal(self.columns[1:], self.columns[:-1], out=found[1:])
        found[1:] &= self.rows[1:] == self.rows[:-1]
        return found

    def merged(self, rule: str, ids: tuple[IdIndex, IdIndex] | None = None) -> Triplets:
        """Each pair once, sorted by row, then column; with ``keep`` equal pairs stay, one after the other."""
        entries = self.at(_row_order(self.rows, self.columns)) if len(self) else self
        repeated = entries.repeated
        if rule == "keep" or not repeated.any():
            return entries
        if rule == "error":
            _name_repeats(entries, repeated, ids)
        heads = np.flatnonzero(~repeated)
        sizes = np.diff(heads, append=len(entries))
        if rule == "last":
            return entries.at(heads + sizes - 1)
        times = None if entries.times is None else np.maximum.reduceat(entries.times, heads)
        first = entries.at(heads)
        if rule == "sum":
            one = replace(first, values=np.add.reduceat(entries.values, heads), times=times)
            for name in ("amounts", "weights", "excess"):
                if (given := getattr(entries, name)) is not None:
                    one = replace(one, **{name: np.add.reduceat(given, heads) / sizes})
            return one
        return replace(_mean(entries, first, heads, sizes), times=times)


def _mean(entries: Triplets, first: Triplets, heads: Array, sizes: Array) -> Triplets:
    """Weighted means of runs of entries, with all that the likelihood needs of them."""
    amounts = entries._default("amounts") if entries.amounts is None else entries.amounts
    weights = amounts if entries.weights is None else entries.weights
    # sums and squares stay in range; a power of two divides without rounding
    unit = 2.0 ** (math.frexp(float(np.abs(entries.values).max()))[1] - 1)
    total = np.add.reduceat(weights, heads)
    mean = np.add.reduceat(weights * (entries.values / unit), heads) / total
    off = entries.values / unit - np.repeat(mean, sizes)
    furthest = float(np.abs(off).max())
    if entries.spread is not None:
        furthest = max(furthest, float(entries.spread.max()) / unit)
    spread = None
    if furthest > 0:
        squares = weights * (off / furthest) ** 2
        if entries.spread is not None:
            squares += (entries.spread / unit / furthest) ** 2
        spread = unit * furthest * np.sqrt(np.add.reduceat(squares, heads))
    return replace(
        first,
        values=unit * mean,
        amounts=np.add.reduceat(amounts, heads),
        weights=None if entries.weights is None else total,
        spread=spread,
        excess=None if entries.excess is None else np.add.reduceat(entries.excess, heads),
    )


def _row_order(rows: Array, columns: Array) -> Array:
    """The order by row, then column, then place: two stable counting sorts."""
    shape = int(rows.max()) + 1, int(columns.max()) + 1
    place = np.arange(len(rows), dtype=np.int32 if len(rows) <= _MAX_RATINGS else np.int64)
    parts = (rows.astype(np.int32, copy=False), columns.astype(np.int32, copy=False))
    table = sparse.coo_array((place, parts), shape=shape)
    table.has_canonical_format = True  # keeps repeated pairs apart
    return table.tocsc().tocsr().data


def _name_repeats(
    entries: Triplets, repeated: npt.NDArray[np.bool_], ids: tuple[IdIndex, IdIndex] | None
) -> None:
    first = int(np.argmax(repeated))
    names: list[Any] = [int(entries.rows[first]), int(entries.columns[first])]
    if ids is not None:
        names = [index.decode([k]).tolist()[0] for index, k in zip(ids, names, strict=True)]
    repeats = counted(int(repeated.sum()), "entry repeats", "entries repeat")
    raise ValueError(
        f"{repeats} a pair that was given before, the first is row {names[0]!r}, column "
        f"{names[1]!r}; choose duplicates='mean', 'last' or 'sum' to merge them"
    )


class Ratings:
    """The observed entries of an ``n_rows`` × ``n_columns`` matrix.

    Attributes:
        shape: the number of rows and columns, over all processes.
        by_row: the ratings in row order, columns ascending.
        by_column: the ratings in column order, rows ascending.
        row_axis: which rows are in this process; all of them without torch.distributed.
        column_axis: which columns are in this process.
        n_ratings: the number of observed entries, over all processes.
        amount: as how many ratings they count, the sum of their weights.
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
    amount: float
    _amounts: tuple[Tensor, Tensor]
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
        weights: npt.ArrayLike | Tensor | None = None,
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
            weights: as how many ratings each entry counts; 1 if not given.
        """
        row_ids, column_ids = _ids(rows, "rows"), _ids(columns, "columns")
        data = _checked_values(values, dtype)
        shape = _checked_shape(row_ids, column_ids, data, shape)
        if duplicates not in RULES:
            raise ValueError(
                f"duplicates must be 'error', 'mean', 'last' or 'sum', got {duplicates!r}"
            )
        amounts = None if weights is None else _checked_values(weights, torch.float64)
        entries = Triplets(row_ids, column_ids, data, amounts).merged(duplicates)
        axes = Axis.whole(shape[0]), Axis.whole(shape[1])
        made = Ratings.over(axes, entries, dtype=_NAMES[data.dtype.type], device=device)
        self.__dict__ |= made.__dict__ | {"n_duplicates": len(data) - len(entries)}

    @classmethod
    def over(
        cls,
        axes: tuple[Axis, Axis],
        entries: Triplets,
        *,
        center: float = 0.0,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Ratings:
        """The merged entries that belong to this process, centred and scaled, sorted both ways.

        Rows and columns are numbered from the start of their axis.
        """
        new = cls.__new__(cls)
        with _group_of(axes).together():
            if len(entries) > _MAX_RATINGS:
                raise ValueError(
                    f"one process can hold {_MAX_RATINGS} ratings, got {len(entries)}; use more processes"
                )
            by_row, by_column = _sorted_both_ways(
                entries, (len(axes[0]), len(axes[1])), center, scale, _DTYPES[_checked_dtype(dtype)]
            )
        new._set(axes, by_row, by_column, entries)
        if device is not None and torch.device(device).type != "cpu":
            new.__dict__ |= new.to(device).__dict__
        return new

    def _set(
        self, axes: tuple[Axis, Axis], by_row: Grouped, by_column: Grouped, entries: Triplets
    ) -> None:
        self.row_axis, self.column_axis = axes
        self.shape = axes[0].size, axes[1].size
        if axes[1].is_shared:
            by_row = replace(by_row, across=axes[1])
        if axes[0].is_shared:
            by_column = replace(by_column, across=axes[0])
        self.by_row, self.by_column = by_row, by_column
        amount = torch.tensor(entries.total_amount, dtype=torch.float64)
        self.amount = float(self.group.sum(amount))
        self.n_ratings = int(self.group.sum(torch.tensor(len(entries))))
        self.n_duplicates = 0
        self._counts = by_row.total(by_row.counts), by_column.total(by_column.counts)
        self._amounts = self._counts
        if entries.amounts is not None:
            sides = (entries.rows, axes[0], by_row), (entries.columns, axes[1], by_column)
            row, column = (
                groups.total(torch.from_numpy(np.bincount(codes, entries.amounts, len(axis)))).to(
                    by_row.dtype
                )
                for codes, axis, groups in sides
            )
            self._amounts = row, column

    def _with(self, **changes: Any) -> Ratings:
        new = type(self).__new__(type(self))
        new.__dict__ |= self.__dict__ | changes
        return new

    def like(self, rows: Tensor, columns: Tensor, values: Tensor) -> Ratings:
        """Other entries of the same matrix, numbered as in ``entries``, over the same processes."""
        parts = (part.cpu().numpy() for part in (rows.long(), columns.long(), values))
        entries = Triplets(*parts).merged("error")
        axes = self.row_axis, self.column_axis
        return Ratings.over(axes, entries, dtype=self.dtype, device=self.device)

    @property
    def is_weighted(self) -> bool:
        """Whether the ratings have weights."""
        return self.by_row.weights is not None

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
            _amounts=self._amounts[::-1],
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
    def row_amounts(self) -> Tensor:
        """As how many ratings those of each row count."""
        return self._amounts[0]

    @property
    def column_amounts(self) -> Tensor:
        """As how many ratings those of each column count."""
        return self._amounts[1]

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
        new._amounts = new._counts
        return new

    def to(self, device: torch.device | str) -> Ratings:
        """The same ratings on another device; this object if it is there already."""
        if self.device == torch.device(device):
            return self
        counts = self._counts[0].to(device), self._counts[1].to(device)
        amounts = self._amounts[0].to(device), self._amounts[1].to(device)
        return self._with(
            by_row=self.by_row.to(device),
            by_column=self.by_column.to(device),
            _counts=counts,
            _amounts=amounts,
        )

    def __repr__(self) -> str:
        each = self.nbytes / max(self.by_column.n_ratings, 1)
        kind = str(self.dtype).removeprefix("torch.")
        return f"Ratings({self.n_ratings} of {self.shape[0]} x {self.shape[1]}, {kind}, {each:.1f} bytes each)"


@dataclass(frozen=True)
class TrainingRatings:
    """The ratings that a model keeps, row by row, in units of the values; other fields as in ``Triplets``.

    Attributes:
        offsets: where those of each row start, and the end.
        columns: their column numbers.
    """

    offsets: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int32]
    values: npt.NDArray[np.floating]
    amounts: Floats | None = None
    weights: Floats | None = None
    spread: Floats | None = None
    times: Floats | None = None
    excess: Floats | None = None

    @classmethod
    def of(cls, entries: Triplets, n_rows: int) -> TrainingRatings:
        """Keep merged entries; values that float32 holds exactly are kept in it."""
        counts = np.bincount(entries.rows, minlength=n_rows)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        with np.errstate(over="ignore"):
            short = entries.values.astype(np.float32)
        values = short if np.array_equal(short, entries.values) else entries.values
        others = {name: getattr(entries, name) for name in _OPTIONAL}
        return cls(offsets, entries.columns.astype(np.int32, copy=False), values, **others)

    @classmethod
    def from_ratings(cls, ratings: Ratings) -> TrainingRatings:
        """Keep ratings that were neither centred nor scaled."""
        by_row = ratings.by_row
        parts = by_row.offsets.long(), by_row.indices(), by_row.values()
        return cls(*(part.cpu().numpy() for part in parts))

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The row of each rating."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def entries(self) -> Triplets:
        """All of them, with numbers of rows."""
        others = {name: getattr(self, name) for name in _OPTIONAL}
        values = self.values.astype(np.float64)
        return Triplets(self.rows, self.columns.astype(np.int64), values, **others)

    def of_row(self, row: int) -> Triplets:
        """Those of one row; an unknown one has none."""
        part = slice(0, 0) if row < 0 else slice(*self.offsets[row : row + 2])
        others = {
            name: None if getattr(self, name) is None else getattr(self, name)[part]
            for name in _OPTIONAL
        }
        columns = self.columns[part].astype(np.int64)
        values = self.values[part].astype(np.float64)
        return Triplets(np.full(len(values), row), columns, values, **others)

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
    entries: Triplets, shape: tuple[int, int], center: float, scale: float, dtype: Any
) -> tuple[Grouped, Grouped]:
    """Both orders of entries that are sorted by row."""
    offsets = np.concatenate([[0], np.cumsum(np.bincount(entries.rows, minlength=shape[0]))])
    columns = entries.columns.astype(np.int32, copy=False)
    place = np.arange(len(entries), dtype=np.int32)
    table = sparse.csr_array((place, columns, offsets.astype(np.int32)), shape=shape)
    by_column = table.tocsc()
    parts = [_scaled(entries, center, scale, dtype)]
    parts.append([None if part is None else part[by_column.data] for part in parts[0]])
    row, column = (
        Grouped(
            torch.from_numpy(order.indptr.astype(np.int32, copy=False)),
            torch.from_numpy(order.indices),
            torch.from_numpy(values),
            n_others,
            weights=None if weights is None else torch.from_numpy(weights),
            extra_squares=None if extra is None else torch.from_numpy(extra),
            excess=None if excess is None else torch.from_numpy(excess),
        )
        for order, n_others, (values, weights, extra, excess) in (
            (table, shape[1], parts[0]),
            (by_column, shape[0], parts[1]),
        )
    )
    return row, column


def _scaled(entries: Triplets, center: float, scale: float, dtype: Any) -> list[Any]:
    """Centred and scaled values, weights, and what is added to weighted squares."""
    values = entries.values
    if center != 0.0 or scale != 1.0:
        values = (values - center) / scale
    weights = entries.amounts if entries.weights is None else entries.weights
    extra = None if entries.spread is None else np.square(entries.spread / scale).astype(dtype)
    return [
        values.astype(dtype, copy=False),
        None if weights is None else weights.astype(dtype),
        extra,
        None if entries.excess is None else entries.excess.astype(dtype),
    ]


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
