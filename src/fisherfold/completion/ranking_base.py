"""What all models of observed pairs do: read pairs and weights, fit, serve by a scorer, and measure their lists."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fisherfold.completion.base import SHARED_CHECKS, CompletionBase
from fisherfold.completion.entries import Entries, Floats, read_entries
from fisherfold.completion.metrics import ranking_metrics
from fisherfold.completion.ranking_model import (
    RankingModel,
    ScorerRanking,
    most_alike,
    pack_model,
    with_new_rows,
)
from fisherfold.completion.rating_model import numbered
from fisherfold.completion.ratings import Ratings, TrainingRatings
from fisherfold.completion.training import SideInformation
from fisherfold.tables import validation
from fisherfold.tables.frames import frame_kind, names_of
from fisherfold.tables.ids import IdIndex
from fisherfold.threads import threads
from fisherfold.warn import warn

# Weights must lie within this factor of 1: their sums of squares then stay within float32.
_LARGEST_WEIGHT = 1e12
RANKING_CHECKS: dict[str, validation.Check] = {
    name: SHARED_CHECKS[name]
    for name in ("unseen", "random_state", "device", "dtype", "n_jobs", "verbose")
} | {
    "duplicates": validation.choice("sum", "mean", "last"),
    "validation": validation.number(0, 0.5),
}


class RankingEstimator(CompletionBase):
    """A model of observed pairs; subclasses make its scorer from the pairs."""

    n_jobs: int | None
    model_: RankingModel
    _ranking = ScorerRanking
    _directions = staticmethod(lambda model, side: model.scorer.directions(side))
    _most_similar = staticmethod(most_alike)  # type: ignore[assignment]
    _with_new_rows = staticmethod(with_new_rows)  # type: ignore[assignment]
    _pack = staticmethod(pack_model)  # type: ignore[assignment]
    _features: ClassVar[bool] = False  # whether a fit takes what is known of rows and columns

    def _read(self, X: Any, y: Any = None, *, columns: Any = None, matrix: Any = None) -> Entries:
        return read_entries(X, y, columns=columns, matrix=matrix, implicit=True)

    def _encoded(self, features: Any, side: str) -> None:
        if features is not None:
            raise ValueError(
                f"models of observed pairs take {side}_features in fit; fit them again to describe "
                f"other {side}s"
            )

    def _columns_of(self, X: Any, n: int = 2) -> list[Any] | None:
        if self.frame_ is not None and frame_kind(X) is not None:
            given = set(map(str, names_of(X)))
            weight = self.names_[2]
            if weight not in given and (len(given) == 2 or weight == "weight"):
                n = 2  # pairs of weight 1, as those of the fit were
        return super()._columns_of(X, n)

    def fit(self, X: Any, y: Any = None, *, columns: Any = None, matrix: bool | None = None) -> Any:
        """Fit the model.

        Args:
            X: (n, 2) ids of the observed pairs; or a data frame with two such columns, and a third for weights; or a
                sparse matrix of weights.
            y: a weight for each pair, such as the number of plays or its logarithm; 1 if not given. It multiplies the
                loss of the pair. A negative weight is a known dislike of that importance.
            columns: the row id, the column id and perhaps the weight column of a data frame.
            matrix: as for ``MatrixCompletion``.

        Returns:
            This estimator.
        """
        return self.fit_entries(self._read(X, y, columns=columns, matrix=matrix))

    def fit_entries(self, entries: Entries, known: SideInformation | None = None) -> Any:
        """Fit the model to pairs and weights that were read already, for example from a file."""
        known = known or SideInformation()
        given = validation.check_parameters(self.get_params(deep=False), self._checks)
        _check_weights(entries.values)
        _remark_stars(entries.values)
        ids, i, j = numbered(entries, known)
        ratings = Ratings(
            i,
            j,
            entries.values,
            (len(ids[0]), len(ids[1])),
            dtype=given["dtype"],
            duplicates=given["duplicates"],
            device=given["device"],
        )
        features = tuple(
            None if table is None else _table(table, index, side).to(ratings.device, ratings.dtype)
            for table, index, side in zip(known.features, ids, ("row", "column"), strict=True)
        )
        with threads(self.n_jobs):
            scorer = self._scorer(ratings, given, features)
        merged = len(entries.values) - ratings.n_ratings
        model = RankingModel.of(ids, scorer, TrainingRatings.from_ratings(ratings), merged)
        self._adopt(model, entries)
        return self

    def _settled(self) -> dict[str, Any]:
        """The parameters that give the same fit without a search."""
        raise NotImplementedError

    def _scorer(
        self, ratings: Ratings, given: dict[str, Any], features: tuple[Tensor | None, ...]
    ) -> Any:
        """What ranks the columns, fitted to the pairs."""
        raise NotImplementedError

    def partial_fit(
        self, X: Any, y: Any = None, *, columns: Any = None, matrix: bool | None = None
    ) -> Any:
        """Add observed pairs, and fit the model to all so far; the arguments are those of ``fit``."""
        if not hasattr(self, "model_"):
            return self.fit(X, y, columns=columns, matrix=matrix)
        return self.fit_entries(
            self._with_old(self._read_more(X, y, columns=columns, matrix=matrix))
        )

    def _with_old(self, entries: Entries) -> Entries:
        """Entries after those of the fit."""
        model = self.model_
        old = model.given()
        return Entries(
            np.concatenate([model.row_ids.decode(old.rows), np.asarray(entries.rows)]),
            np.concatenate([model.column_ids.decode(old.columns), np.asarray(entries.columns)]),
            np.concatenate([old.values, entries.values]),
            self.names_,
            self.frame_,
        )

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """nDCG@10 of the recommendations for the rows of held-out pairs, what the rows had in the fit left out.

        Args:
            X: the held-out pairs, as for ``fit``.
            y: their gains; 1 if not given.
            sample_weight: not used.

        Returns:
            Between 0 and 1, the mean over the rows.
        """
        return self.ranking_metrics(X, y, k=10)["ndcg@10"]

    def ranking_metrics(
        self, X: Any, y: Any = None, *, k: int | Sequence[int] = (5, 10, 20)
    ) -> dict[str, float]:
        """Metrics of the recommendations for the rows of held-out pairs, at several lengths of the lists.

        Args:
            X: the held-out pairs, as for ``fit``.
            y: their gains; 1 if not given.
            k: the lengths.

        Returns:
            ``ndcg@5``, ``recall@5`` and so on, as ``fisherfold.completion.ranking_metrics`` defines them.
        """
        lengths = [validation.integer(1)("k", each) for each in np.atleast_1d(k).tolist()]
        entries = self._read_more(X, y)
        rows = IdIndex.fit(entries.rows)[0].labels
        lists = self.recommend(rows, max(lengths))
        relevant = entries.rows, entries.columns, entries.values
        return ranking_metrics(lists, relevant, lengths)

    def cross_validate(
        self, X: Any, y: Any = None, *, k: int = 10, folds: int = 3, time: Any = None
    ) -> list[dict[str, float]]:
        """Ranking metrics of fits to parts of the pairs, each measured on the pairs that were held out.

        Args:
            X: pairs, as for ``fit``.
            y: their weights.
            k: the length of the lists.
            folds: random parts that are held out in turn; with ``time`` the steps of a walk forward, each of which is
                fitted to what came before and measured on the next part of a ``folds + 1``-th.
            time: when each pair was observed.

        Returns:
            The metrics of each fold.
        """
        entries = self._read(X, y)
        n, folds = len(entries.values), validation.integer(1)("folds", folds)
        if time is None:
            place = np.random.default_rng(validation.draw_seed(self.random_state)).permutation(n)
            parts = [(np.flatnonzero(place % folds != f), place % folds == f) for f in range(folds)]
            pairs = [(train, np.flatnonzero(test)) for train, test in parts]
        else:
            pairs = _walk_forward(time, n, folds)
        found = []
        for train, test in pairs:
            model = type(self)(**self.get_params(deep=False)).fit_entries(entries.at(train))
            held = entries.at(test)
            known = np.isin(held.rows, model.row_ids_)
            gains = np.maximum(held.values[known], 0)
            pair = np.asarray(held.rows)[known], np.asarray(held.columns)[known]
            lists = model.recommend(IdIndex.fit(pair[0])[0].labels, k)
            found.append(ranking_metrics(lists, (*pair, gains), k))
        return found

    @property
    def row_offsets_(self) -> Floats:
        """Zeros: there are no offsets."""
        return np.zeros(len(self._fitted().row_ids))

    @property
    def column_offsets_(self) -> Floats:
        """Zeros: there are no offsets."""
        return np.zeros(len(self._fitted().column_ids))

    def fit_share(self, *args: Any, **options: Any) -> Any:  # noqa: D102
        raise ValueError("implicit feedback is fitted by one process; call fit")

    fit_file_share = fit_share


def _walk_forward(time: Any, n: int, folds: int) -> list[tuple[Any, Any]]:
    """What came before each of some times, and what came until the next."""
    from fisherfold.completion.inference.features import as_times

    stamps = as_times(time, n)
    cuts = np.quantile(stamps, np.arange(1, folds + 2) / (folds + 1))
    found = []
    for low, high in itertools.pairwise(cuts):
        train, test = (
            np.flatnonzero(stamps <= low),
            np.flatnonzero((stamps > low) & (stamps <= high)),
        )
        if len(test):
            found.append((train, test))
    if not found:
        raise ValueError("all pairs have one time: there is no later part to hold out")
    return found


def _table(features: Any, index: IdIndex, side: str) -> Tensor:
    return torch.from_numpy(features.of(index.encode(features.ids, side), len(index)))


def _remark_stars(weights: Floats) -> None:
    """Warn of weights that look like ratings, of which low ones mean dislike."""
    steps = np.unique(weights)
    few = 5 <= len(steps) <= 10 and (steps * 2 == np.round(steps * 2)).all()
    if few and steps[0] > 0 and steps[-1] <= 10 and weights.mean() > 0.5 * steps[-1]:
        warn(
            f"the weights are {len(steps)} steps from {steps[0]:g} to {steps[-1]:g}, as ratings are: here every"
            " pair counts as liked, one star as well; MatrixCompletion is for ratings, or keep those that"
            " are liked"
        )


def _check_weights(weights: Floats) -> None:
    size = np.abs(weights)
    bad = ~((size >= 1 / _LARGEST_WEIGHT) & (size <= _LARGEST_WEIGHT))
    if bad.any():
        raise ValueError(
            f"weights of pairs must lie between {1 / _LARGEST_WEIGHT:g} and {_LARGEST_WEIGHT:g} "
            f"(negative for a known dislike), got {weights[bad][0]:g}; leave out pairs that were "
            "not observed, and divide the weights by their median"
        )
    if not (weights > 0).any():
        raise ValueError("there are no observed pairs: all weights are negative (known dislikes)")
