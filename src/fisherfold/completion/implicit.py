"""Recommend from implicit feedback by factors: clicks, plays, purchases.

``ImplicitCompletion`` has the loss of implicit ALS over all cells (``fisherfold.completion.inference.implicit``). How
much a missing pair weighs, the ridge and the rank are learnt on pairs that are held out
(``fisherfold.completion.implicit_search``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fisherfold.completion.entries import Floats
from fisherfold.completion.implicit_search import LAST_PASSES, Learnt, learn
from fisherfold.completion.inference.implicit import Factors, ImplicitFit
from fisherfold.completion.ranking_base import RANKING_CHECKS, RankingEstimator
from fisherfold.completion.ranking_model import FactorScorer, RankingModel, unpack_parts
from fisherfold.completion.rating_model import side_information
from fisherfold.completion.ratings import Ratings, TrainingRatings
from fisherfold.progress import track
from fisherfold.tables import validation
from fisherfold.warn import warn


class ImplicitCompletion(RankingEstimator):
    """Low-rank recommendation from pairs that were observed, such as clicks, with nothing to tune.

    ``fit`` takes pairs of ids, with a weight each if they are not all alike, a data frame of them, or a sparse matrix.
    A prediction is large where a row is likely to take up a column; its scale means nothing else. What is None or
    ``auto`` is learnt on a part of the pairs that is held out, then the model is fitted to all.

    Args:
        rank: the number of factors, or ``auto`` for at most 256; less, with a warning, where the table is smaller.
        unobserved_weight: the weight of all missing pairs together over that of the observed ones.
        ridge: the strength with which factors are held at zero, in average pairs.
        popularity: the exponent of a column's popularity in the weight of its missing pairs: that a row has not taken
            up what many take says more.
        validation: the share of the pairs of each row that is held out to learn what is None; 0 takes the defaults 30,
            3, 0.25 and rank 64 instead.
        max_iter: the largest number of passes of a fit that starts from nothing.
        tol: stop when a pass lowers the loss by less than this share of it.
        unseen: for ids not seen in ``fit``: ``prior`` (an average row or column), ``nan`` or ``error``.
        duplicates: of pairs given twice the weights are added (``sum``) or averaged (``mean``), or the ``last`` counts.
        random_state: seed of the starting point and of the held-out part.
        device: where to compute, for example ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``.
        n_jobs: the number of threads of the fit; None leaves it to torch, -1 takes all cores.
        verbose: whether to print a line per pass.

    Attributes:
        rank_: the rank that was used, and ``unobserved_weight_``, ``ridge_``, ``popularity_``.
        search_: one record per comparison on the held-out part, with its nDCG@20.
        row_factors_: u_i, and column_factors_: v_j; a prediction is their inner product.

    Example:
        >>> tastes = ("tea", "milk", "cake"), ("gin", "rum", "beer")
        >>> users = range(12)  # each takes two of the three
        >>> pairs = [(u, item) for u in users for k, item in enumerate(tastes[u % 2]) if k != u // 2 % 3]
        >>> model = ImplicitCompletion(rank=2).fit(pairs)
        >>> model.recommend(0, k=1)["column"].to_list()
        ['tea']
        >>> model.recommend_new({"rum": 1, "gin": 1}, k=1)["column"].to_list()
        ['beer']
    """

    _checks = RANKING_CHECKS | {
        "rank": validation.auto_or(validation.integer(1)),
        "unobserved_weight": validation.optional(validation.number(0, above=True)),
        "ridge": validation.optional(validation.number(0, above=True)),
        "popularity": validation.optional(validation.number(-2, 2)),
        "max_iter": validation.integer(1),
        "tol": validation.number(0),
    }

    def __init__(
        self,
        rank: int | str = "auto",
        *,
        unobserved_weight: float | None = None,
        ridge: float | None = None,
        popularity: float | None = None,
        validation: float = 0.1,
        max_iter: int = 10,
        tol: float = 3e-3,
        unseen: str = "prior",
        duplicates: str = "sum",
        random_state: int | None = 0,
        device: str | None = None,
        dtype: str = "float32",
        n_jobs: int | None = None,
        verbose: bool = False,
    ) -> None:
        self.rank = rank
        self.unobserved_weight = unobserved_weight
        self.ridge = ridge
        self.popularity = popularity
        self.validation = validation
        self.max_iter = max_iter
        self.tol = tol
        self.unseen = unseen
        self.duplicates = duplicates
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.verbose = verbose

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        columns: Any = None,
        matrix: bool | None = None,
        row_features: Any = None,
        column_features: Any = None,
    ) -> ImplicitCompletion:
        """Fit the model.

        Args:
            X: (n, 2) ids of the observed pairs; or a data frame with two such columns, and a third for weights; or a
                sparse matrix of weights.
            y: a weight for each pair, such as the number of plays or its logarithm; 1 if not given. It multiplies the
                loss of the pair. A negative weight is a known dislike of that importance.
            columns: the row id, the column id and perhaps the weight column of a data frame.
            matrix: as for ``MatrixCompletion``.
            row_features: what is known of the rows: a data frame with a column of ids, or a pair (ids, matrix). Ids
                without pairs get the factors that their features suggest.
            column_features: the same for the columns.

        Returns:
            This estimator.
        """
        entries = self._read(X, y, columns=columns, matrix=matrix)
        known = side_information(entries, row_features, column_features)
        self.fit_entries(entries, known)
        return self

    def _scorer(
        self, ratings: Ratings, given: dict[str, Any], features: tuple[Tensor | None, ...]
    ) -> FactorScorer:
        rank = None if given["rank"] == "auto" else min(given["rank"], *ratings.shape)
        if rank is not None and rank < given["rank"]:
            n, m = ratings.shape
            warn(
                f"rank={given['rank']} is more than a table of {n} x {m} allows; rank={rank} is used"
            )
        options = {"seed": validation.draw_seed(self.random_state), "features": features}
        names = ("ridge", "unobserved_weight", "popularity")
        with track("learning", verbose=given["verbose"]) as line:
            learnt = learn(
                ratings,
                {name: given[name] for name in names},
                rank,
                given["validation"],
                options=options,
                report=lambda record: line.update(0, record),
            )
        self._keep(learnt)
        return _fit_all(ratings, learnt, given, options)

    def _keep(self, learnt: Learnt) -> None:
        self.rank_ = learnt.rank
        self.unobserved_weight_ = learnt.loss.ratio
        self.ridge_ = learnt.loss.ridge
        self.popularity_ = learnt.loss.popularity
        self.search_ = learnt.tried

    def _learnt(self) -> dict[str, Any]:
        names = ("unobserved_weight_", "ridge_", "popularity_", "rank_", "search_")
        return super()._learnt() | {"learnt": {name: getattr(self, name) for name in names}}

    def _recall(self, meta: Mapping[str, Any]) -> None:
        super()._recall(meta)
        learnt = meta.get("learnt")
        if not isinstance(learnt, dict):
            raise ValueError("it does not say what was learnt")
        for name in ("unobserved_weight_", "ridge_", "popularity_", "rank_", "search_"):
            setattr(self, name, learnt.get(name))

    def _settled(self) -> dict[str, Any]:
        """The parameters that give the same fit without a search."""
        names = ("rank", "unobserved_weight", "ridge", "popularity")
        learnt = {name: getattr(self, f"{name}_") for name in names}
        return self.get_params(deep=False) | learnt | {"validation": 0.0}

    @staticmethod
    def _unpack(
        arrays: Mapping[str, Any], meta: Mapping[str, Any], device: str = "cpu"
    ) -> RankingModel:
        tensors, seen, ids, merged = unpack_parts(arrays, meta)
        shape = len(ids[0]), len(ids[1])
        scorer = FactorScorer.unpack(tensors, meta, seen, shape, device)
        return RankingModel.of(ids, scorer, seen, merged)

    def _factors(self) -> Factors:
        self._fitted()
        factors: Factors = self.model_.scorer.factors
        return factors

    @property
    def row_factors_(self) -> Floats:
        """The factors of the rows."""
        return np.asarray(self._factors().rows.double().cpu().numpy())

    @property
    def column_factors_(self) -> Floats:
        """The factors of the columns."""
        return np.asarray(self._factors().columns.double().cpu().numpy())

    def inner_product_vectors(self) -> tuple[Floats, Floats]:
        """Vectors for a nearest-neighbour index: their inner products are the predictions.

        Returns:
            One float32 vector per row and one per column, in the order of ``row_ids_`` and ``column_ids_``.
        """
        return self.row_factors_.astype(np.float32), self.column_factors_.astype(np.float32)


def _fit_all(
    ratings: Ratings, learnt: Learnt, given: dict[str, Any], options: dict[str, Any]
) -> FactorScorer:
    """The fit to all pairs, from the columns of the search where there was one."""
    fit = ImplicitFit(ratings, learnt.loss, learnt.rank, start=learnt.columns, **options)
    passes = given["max_iter"] if learnt.columns is None else min(LAST_PASSES, given["max_iter"])
    trace: list[dict[str, float]] = []
    began = time.perf_counter()
    with track("fitting", at_most=passes, verbose=given["verbose"]) as line:

        def watch(number: int, factors: Factors) -> bool:
            trace.append(
                {
                    "iteration": number,
                    "seconds": time.perf_counter() - began,
                    "loss": factors.noise,
                }
            )
            line.update(number, trace[-1])
            return (
                len(trace) > 1 and trace[-2]["loss"] - factors.noise < given["tol"] * factors.noise
            )

        factors = fit.run(passes, watch)
    return FactorScorer(
        factors, TrainingRatings.from_ratings(ratings), trace=trace, converged=len(trace) < passes
    )
