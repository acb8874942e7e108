"""What a fit of observed pairs learns on a part of them that is held out: the loss, the rank, when to stop.

The Gaussian bound cannot tell how much a missing pair weighs, because missing pairs are no observations. So a share of
the pairs of every row is held out, and settings are compared by nDCG@20 of the lists that a fit to the rest gives. The
search goes along one setting at a time, at a low rank first; all fits start alike, so that none has a head start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.completion.inference.implicit import ImplicitFit, Loss
from fisherfold.completion.ratings import Ratings, places

# Where the search starts, and what is used without one.
DEFAULTS = {"ridge": 3.0, "unobserved_weight": 30.0, "popularity": 0.25}
# The same for tables of fewer pairs than this, whose short rows a strong ridge would hold at zero.
FEW_PAIRS = 1000
FEW_DEFAULTS = {"ridge": 1.0, "unobserved_weight": 1.0, "popularity": 0.25}
DEFAULT_RANK = 64
# The factors by which a setting is changed, and what is added to the exponent.
_STEPS = {"unobserved_weight": 2.5, "ridge": 3.0}
_EXPONENTS = (0.0, 0.25, 0.5)
# The rank at which the loss is learnt, the largest one of ``auto``, and the gain for which it is doubled.
_FIRST_RANK = 32
_LARGEST_RANK = 256
_WORTH_IT = 1.005
# A setting is changed for a gain by this factor: smaller ones are noise.
_BETTER = 1.003
# A weaker ridge and another exponent need this one: at a higher rank they are less good than at a low one.
_CLEARLY = 1.008
# Passes of each fit of the search, all from the same start, and of the last one, which starts from the best of them.
_PASSES = 3
LAST_PASSES = 3
# Pairs times squares of the rank below which the settings are refined at the last rank.
_CHEAP = 2e9
# Held-out pairs below which nothing is learnt.
_FEWEST = 100
# Cells that are ranked for one comparison.
_CELLS = 10**8
LENGTH = 20  # of the lists that are compared


@dataclass(frozen=True)
class Learnt:
    """What the search found.

    Attributes:
        loss: what weighs how much.
        rank: the number of factors.
        columns: factors to start the fit to all pairs from.
        tried: one record per comparison.
        best: the nDCG@20 of the held-out pairs.
    """

    loss: Loss
    rank: int
    columns: Tensor | None
    tried: list[dict[str, float]]
    best: float


class HeldOut:
    """A part of the pairs that is held out, and the metric of lists against it."""

    def __init__(self, ratings: Ratings, share: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        groups = ratings.by_row
        i = groups.groups().long().cpu().numpy()
        j, w = groups.indices().cpu().numpy(), groups.values().cpu().numpy()
        counts = np.bincount(i, minlength=ratings.shape[0])
        wanted = np.floor(share * counts + rng.random(len(counts)))
        wanted = np.minimum(wanted, counts - 1)
        held = (places(i, rng.random(len(i))) < wanted[i]) & (w > 0)
        self.n_pairs = int(held.sum())
        self.shape = ratings.shape
        if not self.n_pairs:
            return
        kind: dict[str, Any] = {"dtype": ratings.dtype, "device": ratings.device}
        self.rest = Ratings(i[~held], j[~held], w[~held], ratings.shape, **kind)
        rows = np.unique(i[held])
        most = max(20, _CELLS // ratings.shape[1])
        self.rows = torch.from_numpy(np.sort(rng.permutation(rows)[:most])).to(ratings.device)
        keys = np.sort(i[held].astype(np.int64) * ratings.shape[1] + j[held])
        self.keys = torch.from_numpy(keys).to(ratings.device)
        self.wanted = torch.from_numpy(np.bincount(i[held], minlength=ratings.shape[0]))
        self.wanted = self.wanted.to(ratings.device)

    def ndcg(self, block: Callable[[Tensor], Tensor]) -> float:
        """nDCG@20 of the rows' lists; ``block`` gives the scores of some rows and all columns."""
        k = min(LENGTH, self.shape[1])
        discount = 1 / torch.log2(torch.arange(2, k + 2, device=self.keys.device).double())
        ideal = discount.cumsum(0)
        total = 0.0
        size = max(1, 2**23 // self.shape[1])
        for start in range(0, len(self.rows), size):
            rows = self.rows[start : start + size]
            scores = block(rows)
            seen = self.rest.by_row.take(rows)
            scores[seen.groups().long(), seen.indices().long()] = -math.inf
            keys = rows[:, None] * self.shape[1] + scores.topk(k, 1).indices
            at = torch.searchsorted(self.keys, keys).clamp_(max=len(self.keys) - 1)
            hits = (self.keys[at] == keys).double()
            best = ideal[self.wanted[rows].clamp(max=k) - 1]
            total += float((hits @ discount / best).sum())
        return total / len(self.rows)


class Search:
    """The search along one setting at a time."""

    def __init__(
        self,
        held: HeldOut,
        options: dict[str, Any],
        report: Callable[[dict[str, float]], None],
    ) -> None:
        self.held = held
        self.options = options
        self.report = report
        self.tried: list[dict[str, float]] = []
        self.best = 0.0
        self.setting: dict[str, float] = {}
        self.columns: Tensor | None = None

    def attempt(self, setting: dict[str, float], gain: float = _BETTER) -> bool:
        """Fit with a setting; whether it is the best so far by a factor."""
        rank = int(setting["rank"])
        fit = ImplicitFit(self.held.rest, loss_of(setting), rank, **self.options)
        factors = fit.run(_PASSES)
        found = self.held.ndcg(lambda rows: factors.rows[rows] @ factors.columns.T)
        self.tried.append({**setting, "ndcg": found})
        self.report(self.tried[-1])
        if not found > self.best * gain:
            return False
        self.best = found
        self.setting = setting
        self.columns = factors.columns
        return True

    def along(self, name: str, share: float = 1.0) -> None:
        """Change one setting, by a share of its step on the log scale, for as long as it helps."""
        if name == "popularity":
            for value in sorted(set(_EXPONENTS) - {self.setting[name]}):
                self.attempt({**self.setting, name: value}, _CLEARLY)
            return
        step = _STEPS[name] ** share
        for factor in (step, 1 / step):
            moved = False
            gain = _CLEARLY if name == "ridge" and factor < 1 else _BETTER
            while self.attempt({**self.setting, name: self.setting[name] * factor}, gain):
                moved = True
            if moved:
                return

    def move(self, rank: int, *, must: bool) -> None:
        """Try another rank, and take it in any case if it must be."""
        if must:
            self.best = 0.0
        self.attempt({**self.setting, "rank": rank})

    def raise_rank(self, largest: int) -> None:
        """Double the rank for as long as it pays, and see whether it then wants a stronger ridge."""
        while (rank := min(2 * int(self.setting["rank"]), largest)) > self.setting["rank"]:
            before = self.best
            if not self.attempt({**self.setting, "rank": rank}):
                stronger = self.setting["ridge"] * _STEPS["ridge"]
                if not self.attempt({**self.setting, "rank": rank, "ridge": stronger}):
                    return
            if self.best < _WORTH_IT * before:
                return


def loss_of(setting: dict[str, float]) -> Loss:
    """The loss of a setting."""
    return Loss(setting["unobserved_weight"], setting["ridge"], setting["popularity"])


def learn(
    ratings: Ratings,
    given: dict[str, float | None],
    rank: int | None,
    share: float,
    *,
    options: dict[str, Any],
    report: Callable[[dict[str, float]], None],
) -> Learnt:
    """Learn what is None among the settings of the loss and the rank.

    Args:
        ratings: all pairs.
        given: ``unobserved_weight``, ``ridge`` and ``popularity``; None where it is to be learnt.
        rank: the number of factors, or None.
        share: the share of the pairs of each row that is held out.
        options: of ``ImplicitFit``: seed and features.
        report: called with a record for each comparison.
    """
    largest = min(*ratings.shape, _LARGEST_RANK)
    few = len(ratings.by_row.indices()) < FEW_PAIRS
    defaults = FEW_DEFAULTS if few else DEFAULTS
    setting = {name: defaults[name] if value is None else value for name, value in given.items()}
    open_names = [name for name, value in given.items() if value is None]
    known = {**setting, "rank": min(rank or DEFAULT_RANK, largest if rank is None else rank)}
    nothing = Learnt(loss_of(known), int(known["rank"]), None, [], math.nan)
    if few or not share or not (open_names or rank is None):
        return nothing
    held = HeldOut(ratings, share, options["seed"])
    if held.n_pairs < _FEWEST:
        return nothing
    search = Search(held, options, report)
    first = min(_FIRST_RANK, largest if rank is None else rank)
    search.attempt({**setting, "rank": first})
    for name in ("ridge", "unobserved_weight"):
        if name in open_names:
            search.along(name)
    if rank is None:
        search.raise_rank(largest)
    elif rank > first:
        search.move(rank, must=True)
    if "ridge" in open_names and search.setting["rank"] > first:
        search.attempt({**search.setting, "ridge": search.setting["ridge"] * _STEPS["ridge"]})
    if "popularity" in open_names:  # at the last rank: it depends most on it
        search.along("popularity")
    if search.held.rest.n_ratings * search.setting["rank"] ** 2 < _CHEAP:
        for name in ("ridge", "unobserved_weight"):
            if name in open_names:
                search.along(name, 0.5)
    found = search.setting
    return Learnt(loss_of(found), int(found["rank"]), search.columns, search.tried, search.best)
