"""Models of pairs that were observed or not: what ranks the columns is a scorer, the rest is that of every model.

A scorer gives scores of pairs and of blocks of rows by all columns, and says what it knows of rows that were not in the
fit. ``FactorScorer`` has factors, ``ItemScorer`` a matrix of columns by columns, ``BlendScorer`` others of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import torch
from torch import Tensor

from fisherfold.completion.entries import Codes, Floats
from fisherfold.completion.grouped import Grouped
from fisherfold.completion.inference.implicit import Blocks, Factors, half_pass
from fisherfold.completion.model import CompletionModel
from fisherfold.completion.ratings import TrainingRatings, Triplets
from fisherfold.tables.folders import expect, expect_number, pack_index, unpack_index

UPPER = 1.645  # standard deviations: nineteen of twenty expected scores lie below
_BLOCK = 2**22  # scores of a block of rows by all columns
Arrays = dict[str, npt.NDArray[Any]]


class Scorer:
    """What ranks the columns of a model.

    Attributes:
        trace: one record per pass of the fit.
        converged: whether the fit stopped by itself.
        rank: the number of factors, 0 without any.
    """

    ordinal = None
    time_effects = (None, None)
    trace: list[dict[str, float]]
    converged: bool
    rank: int
    n_ratings: int

    def block(self, rows: Codes) -> Tensor:
        """Expected scores of some rows, -1 being an unknown one, and all columns."""
        raise NotImplementedError

    def deviations(self, rows: Codes) -> Tensor:
        """Posterior standard deviations of the same scores."""
        raise ValueError("this model has no error bars: rank by='mean'")

    def sampled(self, rows: Codes, seed: int) -> Tensor:
        """A draw of the same scores from the posterior; one seed is one draw of the columns."""
        raise ValueError("this model has no posterior to draw from: rank by='mean'")

    def pairs(self, rows: Codes, columns: Codes) -> Tensor:
        """Expected scores of pairs; -1 is an unknown row or column."""
        return self._of_pairs(self.block, rows, columns)

    def pair_deviations(self, rows: Codes, columns: Codes) -> Tensor:
        """Posterior standard deviations of the scores of pairs."""
        return self._of_pairs(self.deviations, rows, columns)

    def _of_pairs(self, block: Any, rows: Codes, columns: Codes) -> Tensor:
        found = torch.zeros(len(rows))
        asked, place = np.unique(rows, return_inverse=True)
        for part, table in self._blocks(block, asked):
            inside = np.flatnonzero((place >= part.start) & (place < part.stop))
            at = torch.from_numpy(place[inside] - part.start), torch.from_numpy(columns[inside])
            values = table[at[0], at[1].clamp(min=0)]
            unknown = table.mean(1)[at[0]]
            found[inside] = torch.where(at[1] < 0, unknown, values).float().cpu()
        return found

    def _blocks(self, block: Any, rows: Codes) -> Any:
        size = max(1, _BLOCK // max(self.n_columns, 1))
        for start in range(0, len(rows), size):
            yield slice(start, start + size), block(rows[start : start + size])

    @property
    def n_columns(self) -> int:
        """The number of columns."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return torch.device("cpu")

    def of_rows(self, seen: TrainingRatings) -> Scorer:
        """The same for other rows, of which only these pairs are known."""
        raise NotImplementedError

    def directions(self, side: int) -> Tensor:
        """Vectors of the rows (0) or columns (1) whose inner products say how alike they are."""
        raise NotImplementedError

    def pack(self) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and numbers for a file."""
        raise NotImplementedError


@dataclass
class FactorScorer(Scorer):
    """Inner products of factors, and their posterior given the factors of the other side.

    Attributes:
        factors: the factors of both sides.
        seen: the pairs of the rows.
        fitted: the pairs of the fit, if those of the rows are others.
    """

    factors: Factors
    seen: TrainingRatings
    fitted: TrainingRatings | None = None
    trace: list[dict[str, float]] = field(default_factory=list)
    converged: bool = True
    _columns: HeldVariances | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The number of factors."""
        return self.factors.rank

    @property
    def n_columns(self) -> int:
        """The number of columns."""
        return len(self.factors.columns)

    @property
    def n_ratings(self) -> int:  # type: ignore[override]
        """The number of pairs."""
        return len(self.seen.columns)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.factors.rows.device

    def block(self, rows: Codes) -> Tensor:
        """Expected scores of some rows and all columns."""
        return self._vectors(0, rows) @ self.factors.columns.T

    def pairs(self, rows: Codes, columns: Codes) -> Tensor:
        """Expected scores of pairs."""
        return (self._vectors(0, rows) * self._vectors(1, columns)).sum(1)

    def deviations(self, rows: Codes) -> Tensor:
        """Posterior standard deviations of scores of some rows and all columns."""
        u, v = self._vectors(0, rows), self.factors.columns
        of_rows, of_columns = self._row_variances(rows), self._column_variances()
        square = (u.square() + of_rows) @ of_columns.T + of_rows @ v.square().T
        return square.clamp_(min=0).sqrt_()

    def sampled(self, rows: Codes, seed: int) -> Tensor:
        """A draw of the scores from the posterior."""
        generator = torch.Generator().manual_seed(seed)
        v = _drawn(self.factors.columns, self._column_variances(), generator)
        generator.manual_seed(seed + 1 + int(rows[0]) if len(rows) else seed)
        return _drawn(self._vectors(0, rows), self._row_variances(rows), generator) @ v.T

    def _vectors(self, side: int, codes: Codes) -> Tensor:
        table = (self.factors.rows, self.factors.columns)[side]
        at = torch.from_numpy(np.ascontiguousarray(codes)).to(table.device)
        unknown = at < 0
        if not bool(unknown.any()):
            return table[at]
        average = table.mean(0) if len(table) else table.new_zeros(table.shape[1])
        return torch.where(unknown[:, None], average, table[at.clamp(min=0)])

    def _groups(self, seen: TrainingRatings, rows: Codes) -> Grouped:
        return pairs_of(seen, rows, self.n_columns, self.factors.rows.dtype).to(self.device)

    def _row_variances(self, rows: Codes) -> Tensor:
        part = replace(self.factors, row_prior=None)
        blocks = Blocks(self._groups(self.seen, rows))
        found = half_pass(part, blocks, of_columns=False).variances()
        return found * self.factors.noise

    def _column_variances(self) -> Tensor:
        if self._columns is None:
            self._columns = HeldVariances(self.factors, self.fitted or self.seen)
        return self._columns.table()

    def of_rows(self, seen: TrainingRatings) -> FactorScorer:
        """The same for other rows: their factors are solved from their pairs."""
        part = replace(self.factors, row_prior=None)
        codes = np.arange(len(seen.offsets) - 1)
        blocks = Blocks(self._groups(seen, codes))
        rows = half_pass(part, blocks, of_columns=False).solve()
        empty = torch.from_numpy(np.diff(seen.offsets) == 0).to(self.device)
        rows[empty] = self._vectors(0, np.array([-1]))
        factors = replace(self.factors, rows=rows, row_prior=None)
        columns = self._columns or HeldVariances(self.factors, self.fitted or self.seen)
        return FactorScorer(factors, seen, self.fitted or self.seen, _columns=columns)

    def directions(self, side: int) -> Tensor:
        """Unit vectors whose inner products are cosines of the scores over the other side."""
        tables = self.factors.rows, self.factors.columns
        other = tables[1 - side].double()
        values, vectors = torch.linalg.eigh(other.T @ other)
        table = tables[side].double() @ vectors * values.clamp(min=0).sqrt()
        return (table / table.norm(dim=1, keepdim=True).clamp(min=1e-300)).float()

    def pack(self) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and numbers for a file."""
        found = self.factors
        names = [*(name for name in _TABLES if getattr(found, name) is not None), "column_missing"]
        arrays = {name: getattr(found, name).cpu().contiguous().numpy() for name in names}
        meta = {name: float(getattr(found, name)) for name in ("alpha", "ridge", "noise")}
        trace = [{k: v for k, v in row.items() if k != "seconds"} for row in self.trace]
        return arrays, meta | {"trace": trace, "converged": bool(self.converged)}

    @classmethod
    def unpack(
        cls,
        arrays: Mapping[str, Any],
        meta: Mapping[str, Any],
        seen: TrainingRatings,
        shape: tuple[int, int],
        device: str,
    ) -> FactorScorer:
        """The scorer of a file."""
        rank = expect(arrays, "rows", (shape[0], None)).shape[1]
        sizes = dict(zip(_TABLES, (shape[0], shape[1], shape[0], shape[1]), strict=True))
        tables: dict[str, Any] = {
            name: expect(arrays, name, (size, rank)).to(device)
            for name, size in sizes.items()
            if name in arrays
        }
        missing = expect(arrays, "column_missing", (shape[1],), least=0).to(device)
        least = {"alpha": 0.0, "ridge": 0.0, "noise": 0.0}
        numbers = {name: expect_number(meta, name, least=value) for name, value in least.items()}
        factors = Factors(column_missing=missing, **tables, **numbers)
        trace = meta.get("trace")
        if not isinstance(trace, list) or not all(isinstance(row, dict) for row in trace):
            raise ValueError("its trace is not a table of numbers")
        return cls(factors, seen, trace=trace, converged=bool(meta.get("converged")))


_TABLES = ("rows", "columns", "row_prior", "column_prior")
_SEEN = ("offsets", "columns", "values")


class HeldVariances:
    """The posterior variances of the columns of a fit, computed when they are first asked for."""

    def __init__(self, factors: Factors, seen: TrainingRatings) -> None:
        self.factors = factors
        self.seen = seen
        self._table: Tensor | None = None

    def table(self) -> Tensor:
        """One line for each column."""
        if self._table is None:
            seen, found = self.seen, self.factors
            shape = len(seen.offsets) - 1, len(found.columns)
            table = scipy.sparse.csr_array((seen.values, seen.columns, seen.offsets), shape=shape)
            order = table.tocsc()
            parts = (order.indptr.astype(np.int32), order.indices.astype(np.int32), order.data)
            offsets, indices, values = (torch.from_numpy(part) for part in parts)
            groups = Grouped(offsets, indices, values.to(found.rows.dtype), shape[0])
            blocks = Blocks(groups.to(found.rows.device))
            self._table = half_pass(found, blocks, of_columns=True).variances() * found.noise
        return self._table


def _drawn(mean: Tensor, variance: Tensor, generator: torch.Generator) -> Tensor:
    normal = torch.randn(mean.shape, generator=generator).to(mean)
    return mean + variance.clamp(min=0).sqrt() * normal


def pairs_of(
    seen: TrainingRatings, rows: Codes, n_columns: int, dtype: torch.dtype = torch.float32
) -> Grouped:
    """The pairs of some rows; an unknown one (-1) has none."""
    known = rows >= 0
    counts = np.where(known, np.diff(seen.offsets)[rows] if len(seen.offsets) > 1 else 0, 0)
    starts = np.where(known, seen.offsets[rows], 0)
    ends = np.cumsum(counts)
    place = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
    offsets = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
    columns = torch.from_numpy(seen.columns[place].astype(np.int32))
    values = torch.from_numpy(np.ascontiguousarray(seen.values[place])).to(dtype)
    return Grouped(offsets, columns, values, n_columns)


@dataclass
class RankingModel(CompletionModel):
    """Ids, pairs and the scorer (as ``posterior``) of a model of observed pairs."""

    @classmethod
    def of(cls, ids: Any, scorer: Scorer, seen: TrainingRatings, n_merged: int = 0) -> RankingModel:
        """The model of a scorer."""
        posterior: Any = scorer
        return cls(
            row_ids=ids[0],
            column_ids=ids[1],
            posterior=posterior,
            center=0.0,
            scale=1.0,
            low=0.0,
            high=1.0,
            seen=seen,
            inference="implicit",
            n_merged=n_merged,
            n_at_start=len(seen.columns),
        )

    @property
    def scorer(self) -> Any:
        """What ranks the columns."""
        return self.posterior

    @property
    def device(self) -> torch.device:
        """Where the scorer computes."""
        found: torch.device = self.scorer.device
        return found

    def pairs(self, rows: Codes, columns: Codes, times: Floats | None = None) -> Any:
        """Pairs by number, to be predicted."""
        if times is not None:
            self.checked_times(times)
        return ScoredPairs(self, rows, columns)

    def checked_times(self, times: Floats) -> Tensor:
        """An error: there are no effects of time."""
        raise ValueError("models of observed pairs know no times: predict without them")


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs of a model and what can be said of their scores."""

    model: RankingModel
    rows: Codes
    columns: Codes

    def predict(self, *, clip: bool = False) -> Floats:
        """Expected scores."""
        found = self.model.scorer.pairs(self.rows, self.columns)
        return np.asarray(found.double().cpu().numpy())

    def deviations(self) -> Floats:
        """Posterior standard deviations of the scores."""
        found = self.model.scorer.pair_deviations(self.rows, self.columns)
        return np.asarray(found.double().cpu().numpy())

    @property
    def unknown(self) -> npt.NDArray[np.bool_]:
        """Which of the pairs have an unknown member."""
        return np.asarray((self.rows < 0) | (self.columns < 0))


class ScorerRanking:
    """What columns are ranked by: blocks of rows by all candidates."""

    def __init__(
        self, model: RankingModel, rows: Codes, columns: Codes, by: str, seed: int, **_: Any
    ) -> None:
        self.scorer, self.rows = model.scorer, rows
        self.by, self.seed = by, seed
        whole = len(columns) == len(model.column_ids)
        self.columns = None if whole else model.tensor(columns)

    def scores(self, part: Codes, most: int) -> Tensor:
        """The scores of a block of rows."""
        rows = self.rows[part]
        if self.by == "sample":
            found = self.scorer.sampled(rows, self.seed)
        else:
            found = self.scorer.block(rows)
        if self.by == "upper":
            found = found + UPPER * self.scorer.deviations(rows)
        return found if self.columns is None else found[:, self.columns]


def with_new_rows(
    model: RankingModel, count: int, entries: Triplets, features: None = None
) -> RankingModel:
    """A model of new rows, numbered from 0, and the same columns."""
    seen = TrainingRatings.of(entries, count)
    return replace(model, posterior=model.scorer.of_rows(seen), seen=seen)


def most_alike(
    model: RankingModel, members: Codes, k: int, *, side: int = 1
) -> tuple[Codes, Codes, Floats]:
    """The members of one side that are taken up most alike."""
    table = model.keep(f"directions {side}", lambda: model.scorer.directions(side))
    k = min(k, len(table) - 1)
    size = max(1, _BLOCK // max(len(table), 1))
    parts = []
    for start in range(0, len(members), size):
        block = torch.from_numpy(members[start : start + size])
        scores = table[block] @ table.T
        scores[torch.arange(len(block)), block] = -torch.inf
        best, where = scores.topk(k, dim=1)
        owner = torch.arange(start, start + len(block))[:, None].expand_as(best)
        parts.append([each.flatten().cpu().numpy() for each in (owner, where, best.double())])
    nothing = [np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)]
    place, found, similarity = map(np.concatenate, zip(nothing, *parts, strict=True))
    return place, found, similarity


def pack_model(model: RankingModel, *, slim: bool = False) -> tuple[Arrays, dict[str, Any]]:
    """Take a model apart."""
    if slim:
        raise ValueError("models of observed pairs rank by these pairs: they have no slim form")
    arrays, meta = model.scorer.pack()
    arrays |= pack_index(model.row_ids, "row_ids") | pack_index(model.column_ids, "column_ids")
    assert model.seen is not None
    arrays |= {f"seen.{name}": getattr(model.seen, name) for name in _SEEN}
    shape = [len(model.row_ids), len(model.column_ids)]
    return arrays, meta | {"n_merged": int(model.n_merged), "shape": shape}


def unpack_parts(
    arrays: Mapping[str, Any], meta: Mapping[str, Any]
) -> tuple[dict[str, Tensor], TrainingRatings, Any, int]:
    """Tensors, pairs, ids and the number of merged entries of a file."""
    tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
    shape = dict(zip(("n", "m"), meta.get("shape") or (), strict=False))
    n, m = (expect_number(shape, name, least=1, integer=True) for name in ("n", "m"))
    offsets = expect(tensors, "seen.offsets", (n + 1,), integers=True).long().numpy()
    columns = expect(tensors, "seen.columns", (None,), integers=True, least=0).int().numpy()
    values = expect(tensors, "seen.values", (len(columns),)).numpy()
    runs = offsets[0] == 0 and offsets[-1] == len(columns) and (np.diff(offsets) >= 0).all()
    if not runs or columns.max(initial=-1) >= m:
        raise ValueError("seen.offsets and seen.columns do not fit the table")
    ids = unpack_index(tensors, "row_ids", n), unpack_index(tensors, "column_ids", m)
    seen = TrainingRatings(offsets, columns, values)
    return tensors, seen, ids, expect_number(meta, "n_merged", least=0, integer=True)
