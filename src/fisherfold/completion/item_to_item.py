"""Recommend what goes with what a row has: a matrix of columns by columns, in closed form.

    score_u = r_u B,     dense:  B = I - P / diag(P),  P = (RᵀR + λ I)⁻¹           (EASE^R, Steck 2019)
                         sparse: B = D⁻ᵇ (R̃ᵀR̃) Dᵇ,   R̃ = A⁻ᵃ R D⁻ᵇ               (a linear graph filter)

R holds the weights of the observed pairs, A and D how many pairs each row and each column has. The dense form solves the
least squares problem of every column given all others, at the price of one inverse. The sparse form is the Gram matrix
of the table with the degrees of both sides taken out, of which each column keeps its strongest neighbours: it needs no
inverse, and takes tables of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg
import scipy.sparse
import torch
from torch import Tensor

from fisherfold.completion.entries import Codes
from fisherfold.completion.implicit_search import HeldOut
from fisherfold.completion.ranking_base import RANKING_CHECKS, RankingEstimator
from fisherfold.completion.ranking_model import (
    Arrays,
    RankingModel,
    Scorer,
    pairs_of,
    unpack_parts,
)
from fisherfold.completion.ratings import Ratings, TrainingRatings
from fisherfold.progress import track
from fisherfold.tables import validation
from fisherfold.tables.folders import expect
from fisherfold.warn import warn

# The largest number of columns for which ``auto`` takes the dense form, and for which it may be asked for.
_DENSE_AT_ONCE = 6_000
_DENSE_AT_MOST = 20_000
# The ridges that are tried, times the mean number of pairs of a column.
_RIDGES = (1.0, 3.0, 10.0, 30.0)
# The exponents of the degrees of rows and columns that are tried for the sparse form.
_DEGREES = ((0.3, 0.5), (0.5, 0.5), (0.0, 0.5), (0.3, 0.3))
_DEFAULT_RIDGE = 5.0
_ROWS = 2048  # columns that are worked on at once


@dataclass
class ItemScorer(Scorer):
    """Sums of rows of a matrix of columns by columns over the pairs of a row.

    Attributes:
        weights: B, dense or sparse.
        seen: the pairs of the rows.
    """

    weights: Tensor | scipy.sparse.csr_array
    seen: TrainingRatings
    trace: list[dict[str, float]] = field(default_factory=list)
    converged: bool = True
    rank: int = 0

    @property
    def n_columns(self) -> int:
        """The number of columns."""
        return int(self.weights.shape[1])

    @property
    def n_ratings(self) -> int:  # type: ignore[override]
        """The number of pairs."""
        return len(self.seen.columns)

    def block(self, rows: Codes) -> Tensor:
        """Scores of some rows and all columns; an unknown row has the pairs of an average one."""
        pairs = pairs_of(self.seen, rows, self.n_columns)
        if isinstance(self.weights, Tensor):
            found = pairs.to(self.weights.device).sums({1: self.weights})[0]
        else:
            parts = (pairs.values().numpy(), pairs.indices().numpy(), pairs.offsets.numpy())
            table = scipy.sparse.csr_array(parts, shape=(len(rows), self.n_columns))
            found = torch.from_numpy((table @ self.weights).toarray())
        if (rows < 0).any():
            found[torch.from_numpy(rows < 0)] = self._average().to(found)
        return found

    def _average(self) -> Tensor:
        """How many pairs each column has."""
        return torch.from_numpy(np.bincount(self.seen.columns, minlength=self.n_columns)).float()

    def of_rows(self, seen: TrainingRatings) -> ItemScorer:
        """The same for other rows."""
        return ItemScorer(self.weights, seen)

    def directions(self, side: int) -> Tensor:
        """Not there: columns are compared by their weights."""
        raise ValueError(
            "an item-to-item model has no vectors: ask for similar columns, and without diversity"
        )

    def alike(self, columns: Codes, k: int) -> tuple[Codes, Codes, npt.NDArray[np.float64]]:
        """The columns with the largest weights for each of some."""
        picked = self.weights[columns]
        table = picked.clone() if isinstance(picked, Tensor) else torch.from_numpy(picked.toarray())
        table[torch.arange(len(columns)), torch.from_numpy(columns)] = -torch.inf
        best, where = table.double().topk(min(k, self.n_columns - 1), dim=1)
        good = torch.isfinite(best) & (best != 0)
        place = torch.arange(len(columns))[:, None].expand_as(best)[good]
        return place.numpy(), where[good].cpu().numpy(), best[good].cpu().numpy()

    def pack(self) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and numbers for a file."""
        if isinstance(self.weights, Tensor):
            return {"weights.dense": self.weights.cpu().numpy()}, {}
        parts = {"data": self.weights.data, "indices": self.weights.indices.astype(np.int32)}
        parts["indptr"] = self.weights.indptr.astype(np.int64)
        return {f"weights.{name}": value for name, value in parts.items()}, {}

    @classmethod
    def unpack(
        cls,
        arrays: Mapping[str, Any],
        meta: Mapping[str, Any],
        seen: TrainingRatings,
        shape: tuple[int, int],
        device: str,
    ) -> ItemScorer:
        """The scorer of a file."""
        m = shape[1]
        if "weights.dense" in arrays:
            return cls(expect(arrays, "weights.dense", (m, m)).to(device), seen)
        ends = expect(arrays, "weights.indptr", (m + 1,), integers=True, least=0).numpy()
        columns = expect(arrays, "weights.indices", (None,), integers=True, least=0).numpy()
        data = expect(arrays, "weights.data", (len(columns),)).numpy()
        right = ends[0] == 0 and ends[-1] == len(columns) and (np.diff(ends) >= 0).all()
        if not right or columns.max(initial=-1) >= m:
            raise ValueError("weights.indptr and weights.indices do not fit the table")
        return cls(scipy.sparse.csr_array((data, columns, ends), shape=(m, m)), seen)


def most_alike_items(
    model: RankingModel, members: Codes, k: int, *, side: int = 1
) -> tuple[Codes, Codes, npt.NDArray[np.float64]]:
    """The columns that go most with others."""
    if side == 0:
        model.scorer.directions(side)
    found: tuple[Codes, Codes, npt.NDArray[np.float64]] = model.scorer.alike(members, k)
    return found


class ItemToItem(RankingEstimator):
    """Recommendation by what goes with what a row has, in closed form.

    Fits pairs as ``ImplicitCompletion`` does and serves alike, without factors and error bars. Which form and setting is
    best is learnt on a part of the pairs that is held out, then the model is fitted to all.

    Args:
        form: ``dense`` (EASE^R: one inverse of columns by columns), ``sparse`` (a Gram matrix without degrees), or
            ``auto``: dense up to 6,000 columns, sparse above. A table of more than 20,000 columns is too large for the
            dense form and takes the sparse one, with a warning.
        ridge: of the dense form, in units of the mean number of pairs of a column.
        degrees: of the sparse form, the exponents with which the degrees of rows and columns are taken out.
        neighbours: how many columns each column keeps in the sparse form.
        validation: the share of the pairs of each row that is held out to learn what is None; 0 takes the ridge 5 and the
            degrees (0.3, 0.5) instead.
        unseen: for ids not seen in ``fit``: ``prior`` (the popular columns), ``nan`` or ``error``.
        duplicates: of pairs given twice the weights are added (``sum``) or averaged (``mean``), or the ``last`` counts.
        random_state: seed of the held-out part.
        device: where to compute the dense form, for example ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``.
        n_jobs: the number of threads of the fit; None leaves it to torch, -1 takes all cores.
        verbose: whether to print what is tried.

    Attributes:
        form_: the form that was used.
        ridge_: the ridge, and degrees_: the exponents.
        search_: one record per comparison on the held-out part, with its nDCG@20.

    Example:
        >>> tastes = ("tea", "milk", "cake"), ("gin", "rum", "beer")
        >>> users = range(12)  # each takes two of the three
        >>> pairs = [(u, item) for u in users for k, item in enumerate(tastes[u % 2]) if k != u // 2 % 3]
        >>> model = ItemToItem().fit(pairs)
        >>> model.recommend(0, k=1)["column"].to_list()
        ['tea']
        >>> sorted(model.similar("rum", k=2)["similar"].to_list())
        ['beer', 'gin']
    """

    _most_similar = staticmethod(most_alike_items)
    _checks = RANKING_CHECKS | {
        "form": validation.choice("auto", "dense", "sparse"),
        "ridge": validation.optional(validation.number(0, above=True)),
        "degrees": validation.optional(validation.each(validation.number(0, 1))),
        "neighbours": validation.integer(1),
    }

    def __init__(
        self,
        form: str = "auto",
        *,
        ridge: float | None = None,
        degrees: tuple[float, float] | None = None,
        neighbours: int = 500,
        validation: float = 0.1,
        unseen: str = "prior",
        duplicates: str = "sum",
        random_state: int | None = 0,
        device: str | None = None,
        dtype: str = "float32",
        n_jobs: int | None = None,
        verbose: bool = False,
    ) -> None:
        self.form = form
        self.ridge = ridge
        self.degrees = degrees
        self.neighbours = neighbours
        self.validation = validation
        self.unseen = unseen
        self.duplicates = duplicates
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.verbose = verbose

    def _scorer(
        self, ratings: Ratings, given: dict[str, Any], features: tuple[Tensor | None, ...]
    ) -> ItemScorer:
        m = ratings.n_columns
        form = given["form"]
        if form == "dense" and m > _DENSE_AT_MOST:
            warn(
                f"a table of {m} columns is too large for form='dense', which takes at most "
                f"{_DENSE_AT_MOST}; form='sparse' is used"
            )
            form = "sparse"
        if form == "auto":
            form = "dense" if m <= _DENSE_AT_ONCE else "sparse"
        self.form_ = form
        self.ridge_ = given["ridge"]
        self.degrees_ = None if given["degrees"] is None else tuple(given["degrees"])
        self.search_: list[dict[str, Any]] = []
        self._learn(ratings, given)
        weights = self._weights(ratings, given["neighbours"])
        seen = TrainingRatings.from_ratings(ratings)
        return ItemScorer(weights, seen)

    def _learn(self, ratings: Ratings, given: dict[str, Any]) -> None:
        """Learn the ridge or the degrees where they are None."""
        name, options, default = {
            "dense": ("ridge_", _RIDGES, _DEFAULT_RIDGE),
            "sparse": ("degrees_", _DEGREES, _DEGREES[0]),
        }[self.form_]
        if getattr(self, name) is not None:
            return
        setattr(self, name, default)
        seed = validation.draw_seed(self.random_state)
        held = HeldOut(ratings, given["validation"], seed) if given["validation"] else None
        if held is None or held.n_pairs < 100:
            return
        best = (0.0, default)
        with track("learning", len(options), verbose=given["verbose"]) as line:
            for value in options:
                setattr(self, name, value)
                scorer = ItemScorer(
                    self._weights(held.rest, given["neighbours"]),
                    TrainingRatings.from_ratings(held.rest),
                )
                found = held.ndcg(_block_of(scorer))
                self.search_.append({name[:-1]: value, "ndcg": found})
                best = max(best, (found, value), key=lambda each: each[0])
                line.advance()
        setattr(self, name, best[1])

    def _weights(self, ratings: Ratings, neighbours: int) -> Tensor | scipy.sparse.csr_array:
        table = _sparse(ratings)
        if self.form_ == "dense":
            return dense_weights(table, float(self.ridge_)).to(ratings.device)
        assert self.degrees_ is not None
        return sparse_weights(table, self.degrees_, neighbours)

    def _learnt(self) -> dict[str, Any]:
        names = ("form_", "ridge_", "degrees_", "search_")
        return super()._learnt() | {"learnt": {name: getattr(self, name) for name in names}}

    def _recall(self, meta: Mapping[str, Any]) -> None:
        super()._recall(meta)
        learnt = meta.get("learnt")
        if not isinstance(learnt, dict):
            raise ValueError("it does not say what was learnt")
        for name in ("form_", "ridge_", "degrees_", "search_"):
            setattr(self, name, learnt.get(name))

    def _settled(self) -> dict[str, Any]:
        """The parameters that give the same fit without a search."""
        learnt = {"form": self.form_, "ridge": self.ridge_, "degrees": self.degrees_}
        return self.get_params(deep=False) | learnt | {"validation": 0.0}

    @staticmethod
    def _unpack(
        arrays: Mapping[str, Any], meta: Mapping[str, Any], device: str = "cpu"
    ) -> RankingModel:
        tensors, seen, ids, merged = unpack_parts(arrays, meta)
        scorer = ItemScorer.unpack(tensors, meta, seen, (len(ids[0]), len(ids[1])), device)
        return RankingModel.of(ids, scorer, seen, merged)


def _block_of(scorer: Scorer) -> Callable[[Tensor], Tensor]:
    return lambda rows: scorer.block(rows.cpu().numpy())


def _sparse(ratings: Ratings) -> scipy.sparse.csr_array:
    groups = ratings.by_row
    parts = (groups.values(), groups.indices(), groups.offsets)
    data, indices, offsets = (part.cpu().numpy() for part in parts)
    return scipy.sparse.csr_array((data, indices, offsets), shape=ratings.shape)


def dense_weights(table: scipy.sparse.csr_array, ridge: float) -> Tensor:
    """B = I - P / diag(P) with P = (RᵀR + λ I)⁻¹, in the memory of one matrix of columns by columns.

    Example:
        >>> table = scipy.sparse.csr_array(np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]]))
        >>> weights = dense_weights(table, 0.1)
        >>> bool(weights[0, 1] > weights[0, 2]), weights.diagonal().tolist()
        (True, [0.0, 0.0, 0.0])
    """
    m = table.shape[1]
    # the transpose has the order in which LAPACK works in place, and the matrix is symmetric
    inverse = (table.T @ table).toarray().T
    diagonal = np.einsum("ii->i", inverse)
    diagonal += ridge * float(diagonal.mean())
    name = "s" if inverse.dtype == np.float32 else "d"
    factor, invert = (getattr(scipy.linalg.lapack, f"{name}{kind}") for kind in ("potrf", "potri"))
    inverse, failed = factor(inverse, lower=True, overwrite_a=True)
    if not failed:
        inverse, failed = invert(inverse, lower=True, overwrite_c=True)
    if failed:
        raise ArithmeticError("the Gram matrix of the columns is singular: raise the ridge")
    found = torch.from_numpy(inverse.T)  # its upper triangle is the inverse
    for start in range(0, m, _ROWS):
        part = slice(start, min(start + _ROWS, m))
        square = found[part, part].triu()
        found[part, part] = square + square.triu(1).T
        found[part, :start] = found[:start, part].T
    found /= -found.diagonal().clone()
    found.fill_diagonal_(0)
    return found


def sparse_weights(
    table: scipy.sparse.csr_array, degrees: tuple[float, float], neighbours: int
) -> scipy.sparse.csr_array:
    """D⁻ᵇ (R̃ᵀR̃) Dᵇ with R̃ = A⁻ᵃ R D⁻ᵇ, each column keeping its strongest neighbours and itself."""
    a, b = degrees
    size = abs(table)
    rows = np.maximum(np.asarray(size.sum(1)).ravel() / size.data.mean(), 1e-30)
    columns = np.maximum(np.asarray(size.sum(0)).ravel() / size.data.mean(), 1e-30)
    left = scipy.sparse.diags_array((rows ** (-2 * a)).astype(table.dtype)).tocsr()
    right = (left @ table).tocsr()
    parts = []
    transposed = table.T.tocsr()
    for start in range(0, table.shape[1], _ROWS):
        gram = (transposed[start : start + _ROWS] @ right).tocsr()
        parts.append(_strongest(gram, neighbours))
    found = scipy.sparse.vstack(parts).tocsr()
    before = scipy.sparse.diags_array((columns ** (-2 * b)).astype(table.dtype))
    return scipy.sparse.csr_array(before @ found)


def _strongest(table: scipy.sparse.csr_array, most: int) -> scipy.sparse.csr_array:
    """Each row with its largest entries only."""
    counts = np.diff(table.indptr)
    if counts.max(initial=0) <= most:
        return table
    order = np.lexsort((-table.data, np.repeat(np.arange(len(counts)), counts)))
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = np.sort(order[place < most])
    indptr = np.concatenate([[0], np.cumsum(np.minimum(counts, most))])
    return scipy.sparse.csr_array(
        (table.data[kept], table.indices[kept], indptr), shape=table.shape
    )
