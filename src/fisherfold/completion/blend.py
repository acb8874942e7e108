"""A weighted sum of models of observed pairs, its weights learnt on pairs that are held out.

    score_ui = Σ_k weight_k s^k_ui / rms_i(s^k_ui)

Factors know what is alike over many steps, a matrix of columns by columns the close neighbours of a rare column: lists by
the sum are better than those of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.completion.entries import Codes
from fisherfold.completion.implicit import ImplicitCompletion
from fisherfold.completion.implicit_search import HeldOut
from fisherfold.completion.item_to_item import ItemScorer, ItemToItem
from fisherfold.completion.ranking_base import RANKING_CHECKS, RankingEstimator
from fisherfold.completion.ranking_model import (
    Arrays,
    FactorScorer,
    RankingModel,
    Scorer,
    unpack_parts,
)
from fisherfold.completion.ratings import Ratings, TrainingRatings
from fisherfold.tables import validation

# The weights that are tried for the item-to-item scores, and the one without a held-out part.
_WEIGHTS = (0.1, 0.2, 0.4, 0.7, 1.2, 2.5)
_DEFAULT_WEIGHT = 0.4
_KINDS: dict[str, Any] = {"factors": FactorScorer, "items": ItemScorer}


@dataclass
class BlendScorer(Scorer):
    """A weighted sum of the scores of others, each in units of its root mean square over the columns.

    Attributes:
        parts: the other scorers.
        weights: one for each.
    """

    parts: list[Scorer]
    weights: list[float]
    trace: list[dict[str, float]] = field(default_factory=list)
    converged: bool = True

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The number of factors."""
        return max(part.rank for part in self.parts)

    @property
    def n_columns(self) -> int:
        """The number of columns."""
        return self.parts[0].n_columns

    @property
    def n_ratings(self) -> int:  # type: ignore[override]
        """The number of pairs."""
        return self.parts[0].n_ratings

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.parts[0].device

    def block(self, rows: Codes) -> Tensor:
        """Scores of some rows and all columns."""
        found = None
        for part, weight in zip(self.parts, self.weights, strict=True):
            if not weight:
                continue
            table = _standardised(part.block(rows)).mul_(weight)
            found = table if found is None else found.add_(table.to(found))
        assert found is not None
        return found

    def of_rows(self, seen: TrainingRatings) -> BlendScorer:
        """The same for other rows."""
        return BlendScorer([part.of_rows(seen) for part in self.parts], self.weights)

    def directions(self, side: int) -> Tensor:
        """Vectors of the first model that has some."""
        for part in self.parts:
            if part.rank:
                return part.directions(side)
        return self.parts[0].directions(side)

    def pack(self) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and numbers for a file."""
        arrays: Arrays = {}
        members = []
        for k, part in enumerate(self.parts):
            own, meta = part.pack()
            arrays |= {f"{k}.{name}": value for name, value in own.items()}
            kind = next(name for name, made in _KINDS.items() if isinstance(part, made))
            members.append({"kind": kind, **meta})
        return arrays, {"members": members, "weights": [float(w) for w in self.weights]}


def _standardised(table: Tensor) -> Tensor:
    size = table.square().mean(1, keepdim=True).sqrt_()
    return table / size.clamp_(min=torch.finfo(table.dtype).tiny)


class ImplicitBlend(RankingEstimator):
    """The best lists from pairs that were observed: factors and item-to-item weights in one sum.

    Each model learns its settings from pairs that are held out, then their weights are learnt in the same way, and all
    are fitted to all pairs. There are no error bars: take ``ImplicitCompletion`` for upper bounds and draws.

    Args:
        rank: of ``ImplicitCompletion``.
        form: of ``ItemToItem``.
        item_weight: the weight of the item-to-item scores beside those of the factors; learnt if None.
        validation: the share of the pairs of each row that is held out to learn the weights.
        unseen: for ids not seen in ``fit``: ``prior``, ``nan`` or ``error``.
        duplicates: of pairs given twice the weights are added (``sum``) or averaged (``mean``), or the ``last`` counts.
        random_state: seed of the held-out part.
        device: where to compute, for example ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``.
        n_jobs: the number of threads of the fit; None leaves it to torch, -1 takes all cores.
        verbose: whether to print what is tried.

    Attributes:
        item_weight_: the weight that was used.
        search_: one record per comparison on the held-out part, with its nDCG@20.

    Example:
        >>> tastes = ("tea", "milk", "cake"), ("gin", "rum", "beer")
        >>> users = range(12)  # each takes two of the three
        >>> pairs = [(u, item) for u in users for k, item in enumerate(tastes[u % 2]) if k != u // 2 % 3]
        >>> model = ImplicitBlend().fit(pairs)
        >>> model.recommend(0, k=1)["column"].to_list()
        ['tea']
    """

    _checks = RANKING_CHECKS | {
        "rank": validation.auto_or(validation.integer(1)),
        "form": validation.choice("auto", "dense", "sparse"),
        "item_weight": validation.optional(validation.number(0)),
    }

    def __init__(
        self,
        rank: int | str = "auto",
        *,
        form: str = "auto",
        item_weight: float | None = None,
        validation: float = 0.1,
        unseen: str = "prior",
        duplicates: str = "sum",
        random_state: int | None = 0,
        device: str | None = None,
        dtype: str = "float32",
        n_jobs: int | None = None,
        verbose: bool = False,
    ) -> None:
        self.rank = rank
        self.form = form
        self.item_weight = item_weight
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
    ) -> BlendScorer:
        names = ("validation", "random_state", "device", "dtype", "verbose")
        shared = {name: getattr(self, name) for name in names}
        models: list[RankingEstimator] = [
            ImplicitCompletion(self.rank, **shared),
            ItemToItem(self.form, **shared),
        ]
        self.search_: list[dict[str, Any]] = []
        weight = given["item_weight"]
        if weight is None and given["validation"]:
            held = HeldOut(ratings, given["validation"], validation.draw_seed(self.random_state))
            if held.n_pairs:
                weight = self._learn(held, [_scorer_of(model, held.rest) for model in models])
                models = [type(model)(**model._settled()) for model in models]
        self.item_weight_ = _DEFAULT_WEIGHT if weight is None else float(weight)
        parts = [_scorer_of(model, ratings) for model in models]
        return BlendScorer(parts, [1.0, self.item_weight_])

    def _learn(self, held: HeldOut, parts: list[Scorer]) -> float:
        """The best weight of the second model beside the first."""
        best = 0.0, self._measure(held, parts, 0.0)
        for weight in _WEIGHTS:
            found = self._measure(held, parts, weight)
            if found > best[1]:
                best = weight, found
        return best[0]

    def _measure(self, held: HeldOut, parts: list[Scorer], weight: float) -> float:
        scorer = BlendScorer(parts, [1.0, weight])
        found = held.ndcg(lambda rows: scorer.block(rows.cpu().numpy()))
        self.search_.append({"item_weight": weight, "ndcg": found})
        return found

    def _learnt(self) -> dict[str, Any]:
        learnt = {"item_weight_": self.item_weight_, "search_": self.search_}
        return super()._learnt() | {"learnt": learnt}

    def _recall(self, meta: Mapping[str, Any]) -> None:
        super()._recall(meta)
        learnt = meta.get("learnt")
        if not isinstance(learnt, dict):
            raise ValueError("it does not say what was learnt")
        for name in ("item_weight_", "search_"):
            setattr(self, name, learnt.get(name))

    @staticmethod
    def _unpack(
        arrays: Mapping[str, Any], meta: Mapping[str, Any], device: str = "cpu"
    ) -> RankingModel:
        tensors, seen, ids, merged = unpack_parts(arrays, meta)
        shape = len(ids[0]), len(ids[1])
        parts = []
        for k, member in enumerate(meta["members"]):
            own = {
                name.removeprefix(f"{k}."): value
                for name, value in tensors.items()
                if name.startswith(f"{k}.")
            }
            parts.append(_KINDS[member["kind"]].unpack(own, member, seen, shape, device))
        weights = [float(weight) for weight in meta["weights"]]
        if len(weights) != len(parts) or not np.isfinite(weights).all():
            raise ValueError("its weights do not fit its members")
        return RankingModel.of(ids, BlendScorer(parts, weights), seen, merged)


def _scorer_of(model: RankingEstimator, ratings: Ratings) -> Scorer:
    given = validation.check_parameters(model.get_params(deep=False), model._checks)
    scorer: Scorer = model._scorer(ratings, given, (None, None))
    return scorer
