"""The best columns of many rows, similar members, and the model as arrays: scores of ``scoring`` for all pairs.

Rows are scored in blocks, one matrix product each; nothing of the size of rows x columns is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.completion.entries import Codes, Floats
from fisherfold.completion.inference.packed import unpack
from fisherfold.completion.model import COLUMNS, ROWS, CompletionModel
from fisherfold.completion.scoring import (
    Members,
    column_spread,
    column_vectors,
    drift,
    inner,
    noise,
    row_spread,
    row_vectors,
    variance,
)
from fisherfold.threads import threads

BY = ("mean", "upper", "sample")
UPPER = 1.645  # standard deviations: nineteen of twenty expected values lie below
_BLOCK = 2**19  # scores at once: they stay in the cache


@dataclass(frozen=True)
class Lists:
    """Ranked lists, best first within each row.

    Attributes:
        place: which of the rows asked for each line belongs to.
        columns: the columns, by number.
        scores: what they are ranked by: expected values, upper bounds of scores, or draws of them, in units of values.
    """

    place: Codes
    columns: Codes
    scores: Floats


@dataclass(frozen=True)
class Choice:
    """Which columns lists may hold.

    Attributes:
        columns: the candidates of any row, by number, ascending; None for all columns.
        own: the candidates of each row, where they differ.
        excluded: columns that no list may hold.
        boosted: columns whose scores are raised, or lowered.
        boosts: by how much, in units of the values.
    """

    columns: Codes | None = None
    own: Sequence[Codes] | None = None
    excluded: Codes | None = None
    boosted: Codes | None = None
    boosts: Floats | None = None

    def boost(self, place_of: Codes, scale: float) -> Tensor | None:
        """What is added to the scores of the candidates."""
        if self.boosted is None or self.boosts is None:
            return None
        found = np.zeros(int(place_of.max(initial=-1)) + 1)
        place = place_of[self.boosted]
        found[place[place >= 0]] = self.boosts[place >= 0] / scale
        return torch.from_numpy(found)

    def refused(self, part: Codes, place_of: Codes) -> Tensor | None:
        """Which candidates some rows may not have, given the place of each column among the candidates."""
        if self.own is None and self.excluded is None:
            return None
        n = int(place_of.max(initial=-1)) + 1
        found = np.full((len(part), n), self.own is not None)
        if self.own is not None:
            lists = [place_of[self.own[row]] for row in part]
            owner = np.repeat(np.arange(len(part)), [len(each) for each in lists])
            found[owner, np.concatenate(lists)] = False
        if self.excluded is not None:
            place = place_of[self.excluded]
            found[:, place[place >= 0]] = True
        return torch.from_numpy(found)


def best_columns(
    model: CompletionModel,
    rows: Codes,
    k: int,
    *,
    choice: Choice | None = None,
    exclude_seen: bool = True,
    by: str = "mean",
    seed: int = 0,
    when: Tensor | None = None,
    ranking: Callable[..., Any] | None = None,
) -> Lists:
    """The columns with the largest scores for each row, ``ranking`` being what makes the scores."""
    choice = choice or Choice()
    columns = np.arange(len(model.column_ids)) if choice.columns is None else choice.columns
    k = min(k, len(columns))
    ranked = (ranking or Ranking)(model, rows, columns, by, seed, when=when)
    place_of = np.full(len(model.column_ids), -1)
    place_of[columns] = np.arange(len(columns))
    boost = choice.boost(place_of, model.scale)
    n_blocks = max(1, -(-len(rows) * len(columns) // _BLOCK))
    blocks = np.array_split(np.arange(len(rows)), n_blocks) if len(rows) else []

    def best(part: Codes) -> tuple[Codes, Codes, Floats]:
        scores = ranked.scores(part, len(blocks[0]))
        if boost is not None:
            scores += boost.to(scores)
        if exclude_seen:
            seen_rows, seen_columns = model.seen_by(rows[part])
            place = place_of[seen_columns]
            inside = place >= 0
            scores[model.tensor(seen_rows[inside]), model.tensor(place[inside])] = -math.inf
        refused = choice.refused(part, place_of)
        if refused is not None:
            scores.masked_fill_(refused.to(scores.device), -math.inf)
        top, where = scores.topk(k, dim=1)
        good = torch.isfinite(top)
        value = top[good].double().cpu().numpy() * model.scale + model.center
        owner = torch.arange(len(part), device=top.device)[:, None].expand_as(top)[good]
        return part[0] + owner.cpu().numpy(), columns[where[good].cpu().numpy()], value

    workers = torch.get_num_threads() if model.device.type == "cpu" else 1
    with threads(1):  # one block per thread; threads within a block would wait for each other
        if workers > 1 and len(blocks) > workers:
            with ThreadPoolExecutor(workers) as pool:
                found = list(pool.map(best, blocks))
        else:
            found = list(map(best, blocks))
    return Lists(*_joined(found))


def diversified(found: Lists, k: int, diversity: float, directions: Tensor) -> Lists:
    """Lists of k, chosen one after the other by maximal marginal relevance (Carbonell, Goldstein 1998).

    The next column has the largest (1 - d) r - d max s: r is its score, from 0 to 1 within the
    candidates of the list, and s its similarities to the columns that were chosen before.
    """
    starts = np.flatnonzero(np.diff(found.place, prepend=-1))
    kept = []
    for start, end in zip(starts, [*starts[1:], len(found.place)], strict=True):
        score, table = found.scores[start:end], directions[found.columns[start:end]]
        alike = (table @ table.T).double().cpu().numpy()
        spread = score.max() - score.min()
        value = (1 - diversity) * (score - score.min()) / (spread if spread > 0 else 1.0)
        worst = np.full(len(score), -1.0)  # no column is less alike to another
        for _ in range(min(k, len(score))):
            best = int(np.argmax(value - diversity * worst))
            kept.append(start + best)
            value[best] = -math.inf
            worst = np.maximum(worst, alike[best])
    return Lists(found.place[kept], found.columns[kept], found.scores[kept])


class Ranking:
    """What columns are ranked by: blocks of rows by all candidates."""

    def __init__(
        self,
        model: CompletionModel,
        rows: Codes,
        columns: Codes,
        by: str,
        seed: int,
        *,
        when: Tensor | None = None,
    ) -> None:
        self.model, self.by, self.when = model, by, when
        self.rows, self.columns = model.members(ROWS, rows), model.members(COLUMNS, columns)
        self.u = self.rows.mean
        whole = len(columns) == len(model.column_ids)
        if by == "sample":
            generator = torch.Generator().manual_seed(seed)
            v = _draw(self.columns.mean, self.columns.covariance, generator)
            self.u = _draw(self.u, self.rows.covariance, generator)
            self.right = column_vectors(v).T.contiguous()
        elif whole:
            self.right = model.keep("columns", self._table)
        else:
            self.right = self._table()
        self.left = row_vectors(self.u)
        self._spread: Tensor | None = None
        self._here = local()  # a table for each thread: fresh pages for each block would cost more

    def _table(self) -> Tensor:
        return column_vectors(self.columns.mean).T.contiguous()

    def scores(self, part: Codes, most: int) -> Tensor:
        """The scores of a block of rows, of at most so many."""
        if not hasattr(self._here, "table"):
            self._here.table = self.left.new_empty(most, self.right.shape[1])
        here = slice(part[0], part[-1] + 1)
        scores = torch.mm(self.left[here], self.right, out=self._here.table[: len(part)])
        rows = self.rows[here]
        for shift, _ in self._drift(rows):
            scores += shift
        if self.by == "upper":
            scores += UPPER * self._deviations(rows)
        if self.by == "mean" and self.model.posterior.ordinal is not None:
            return self._expected(scores, rows)
        return scores

    def _drift(self, rows: Members) -> Iterator[tuple[Tensor, Tensor]]:
        return drift(self.model.posterior, rows, self.columns, self.when, True)

    def _deviations(self, rows: Members) -> Tensor:
        """Standard deviations of scores."""
        if self._spread is None:
            self._spread = column_spread(self.columns.mean, self.columns.covariance)
        left = row_spread(rows.mean, rows.covariance)
        square = inner(left, self._spread, every=True).clamp_(min=0)
        for _, doubt in self._drift(rows):
            square += doubt
        return square.sqrt_()

    def _expected(self, scores: Tensor, rows: Members) -> Tensor:
        """Expected categories, in scaled units."""
        posterior = self.model.posterior
        ordinal = posterior.ordinal
        assert ordinal is not None
        square = variance(posterior, rows, self.columns, times=self.when, every=True)
        square += noise(posterior, rows, self.columns, every=True)
        std = square.sqrt_().to(scores)
        found = torch.full_like(scores, float(ordinal.values[-1]))
        steps = ordinal.values.diff().tolist()
        for cut, step in zip(ordinal.cuts.tolist(), steps, strict=True):
            found -= step * torch.special.ndtr((cut - scores) / std)
        return found


def _joined(found: Sequence[tuple[npt.NDArray[Any], ...]]) -> tuple[Codes, Codes, Floats]:
    nothing = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)
    i, j, values = (np.concatenate(parts) for parts in zip(nothing, *found, strict=True))
    return i, j, values


def _draw(mean: Tensor, covariance: Tensor, generator: torch.Generator) -> Tensor:
    """One draw of each member from its posterior; an offset that is held at zero has no variance."""
    square = unpack(covariance).double()
    jitter = 1e-10 * square.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30)
    eye = torch.eye(square.shape[1], dtype=square.dtype, device=square.device)
    root = torch.linalg.cholesky(square + jitter[:, None, None] * eye)
    shape = (len(mean), mean.shape[1], 1)
    normal = torch.randn(shape, dtype=torch.float64, generator=generator).to(mean.device)
    return mean + (root @ normal)[:, :, 0].to(mean)


def directions(model: CompletionModel, side: int) -> Tensor:
    """Unit vectors of rows (0) or columns (1) whose inner products are correlations of predicted values."""
    other = model.members(1 - side).mean[:, :-1].double()
    off = other - other.mean(0)
    values, vectors = torch.linalg.eigh(off.T @ off / len(off))
    mean = model.members(side).mean
    table = mean[:, :-1].double() @ vectors * values.clamp(min=0).sqrt()
    return (table / table.norm(dim=1, keepdim=True).clamp(min=1e-300)).to(mean)


def most_similar(
    model: CompletionModel, members: Codes, k: int, *, side: int = COLUMNS
) -> tuple[Codes, Codes, Floats]:
    """The members of one side that are rated most alike.

    Two columns are alike if their predicted values, apart from level, are correlated over the rows of the table.
    """
    table = model.keep(f"directions {side}", lambda: directions(model, side))
    k, found = min(k, len(table) - 1), []
    size = max(1, _BLOCK // max(len(table), 1))
    for start in range(0, len(members), size):
        block = model.tensor(members[start : start + size])
        scores = table[block] @ table.T
        scores[torch.arange(len(block)), block] = -math.inf
        best, where = scores.topk(k, dim=1)
        owner = torch.arange(start, start + len(block))[:, None].expand_as(best)
        found.append(
            tuple(part.reshape(-1).cpu().numpy() for part in (owner, where, best.double()))
        )
    return _joined(found)


def factors(model: CompletionModel, side: int) -> tuple[Floats, Floats, Floats]:
    """The factors, offsets and covariances of one side in units of the values.

    score = offset_ + row offset + column offset + row factors · column factors
    """
    part = model.members(side)
    mean = part.mean.double().cpu().numpy()
    unit = np.full(mean.shape[1], model.scale**0.5)
    unit[-1] = model.scale
    mean = mean * unit
    covariance = unpack(part.covariance).double().cpu().numpy() * (unit[:, None] * unit)
    return mean[:, :-1], mean[:, -1], covariance


def inner_product_vectors(model: CompletionModel) -> tuple[Floats, Floats]:
    """Vectors whose inner products are the scores: (u_i, 1, g + b_i) and (v_j, c_j, 1)."""
    (u, b, _), (v, c, _) = factors(model, ROWS), factors(model, COLUMNS)
    rows = np.column_stack([u, np.ones(len(u)), b + model.center])
    return rows.astype(np.float32), np.column_stack([v, c, np.ones(len(v))]).astype(np.float32)
