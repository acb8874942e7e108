"""Recommend from implicit feedback: clicks, plays, purchases.

``ImplicitCompletion`` is for pairs that were observed or not: the loss is that of implicit ALS
(``fisherfold.completion.inference.implicit``); serving and files are those of ``CompletionBase``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fisherfold.completion.base import SHARED_CHECKS, CompletionBase
from fisherfold.completion.entries import Entries, read_entries
from fisherfold.completion.inference.implicit import fit_implicit
from fisherfold.completion.metrics import ranking_metrics
from fisherfold.completion.model import CompletionModel
from fisherfold.completion.ratings import Ratings, TrainingRatings
from fisherfold.progress import track
from fisherfold.tables import validation
from fisherfold.tables.frames import frame_kind, names_of
from fisherfold.tables.ids import IdIndex
from fisherfold.threads import threads
from fisherfold.warn import warn


class ImplicitCompletion(CompletionBase):
    """Low-rank recommendation from pairs that were observed, such as clicks, with nothing to tune.

    ``fit`` takes pairs of ids, with a weight each if they are not all alike, a data frame of them, or a sparse matrix.
    A prediction is large where a row is likely to take up a column; its scale means nothing else. Parameters that are
    not listed are those of ``MatrixCompletion``.

    Args:
        rank: the number of factors; less, with a warning, where the table is smaller.
        unobserved_weight: the weight of "no interest" in every pair, where an observed pair has the weight 1 of
            interest. Between 1 and 10 it matters little.
        max_iter: the largest number of passes over the data.
        tol: stop when a pass raises the bound by less than this per observed pair.
        duplicates: of pairs given twice the weights are added (``sum``) or averaged (``mean``), or the ``last`` counts.

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

    _checks = SHARED_CHECKS | {
        "unobserved_weight": validation.number(0, above=True),
        "duplicates": validation.choice("sum", "mean", "last"),
    }

    def __init__(
        self,
        rank: int = 32,
        *,
        unobserved_weight: float = 4.0,
        max_iter: int = 20,
        tol: float = 1e-2,
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
        self.max_iter = max_iter
        self.tol = tol
        self.unseen = unseen
        self.duplicates = duplicates
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.verbose = verbose

    def _read(self, X: Any, y: Any = None, *, columns: Any = None, matrix: Any = None) -> Entries:
        return read_entries(X, y, columns=columns, matrix=matrix, implicit=True)

    def _columns_of(self, X: Any, n: int = 2) -> list[Any] | None:
        if self.frame_ is not None and frame_kind(X) is not None:
            given = set(map(str, names_of(X)))
            weight = self.names_[2]
            if weight not in given and (len(given) == 2 or weight == "weight"):
                n = 2  # pairs of weight 1, as those of the fit were
        return super()._columns_of(X, n)

    def fit(
        self, X: Any, y: Any = None, *, columns: Any = None, matrix: bool | None = None
    ) -> ImplicitCompletion:
        """Fit the model.

        Args:
            X: (n, 2) ids of the observed pairs; or a data frame with two such columns, and a third for weights; or a
                sparse matrix of weights.
            y: a weight for each pair, such as the number of plays or its logarithm; 1 if not given.
            columns: the row id, the column id and perhaps the weight column of a data frame.
            matrix: as for ``MatrixCompletion``.

        Returns:
            This estimator.
        """
        return self.fit_entries(self._read(X, y, columns=columns, matrix=matrix))

    def fit_entries(self, entries: Entries, known: None = None) -> ImplicitCompletion:
        """Fit the model to pairs and weights that were read already, for example from a file."""
        given = validation.check_parameters(self.get_params(deep=False), self._checks)
        row_ids, column_ids, i, j = entries.indexed()
        weights, shape = entries.values, (len(row_ids), len(column_ids))
        if not (weights > 0).all():
            raise ValueError(
                f"the weights of observed pairs must be positive, got {weights[~(weights > 0)][0]:g}; leave out pairs "
                "that were not observed, and use MatrixCompletion for ratings"
            )
        if (rank := min(given["rank"], *shape)) < given["rank"]:
            warn(
                f"rank={given['rank']} is more than a table of {shape[0]} x {shape[1]} allows; rank={rank} is used"
            )
        ratings = Ratings(
            i,
            j,
            weights,
            shape,
            dtype=given["dtype"],
            duplicates=given["duplicates"],
            device=given["device"],
        )
        with (
            threads(self.n_jobs),
            track("fitting", at_most=given["max_iter"], verbose=given["verbose"]) as line,
        ):
            posterior = fit_implicit(
                ratings,
                rank,
                unobserved_weight=given["unobserved_weight"],
                max_iter=given["max_iter"],
                tol=given["tol"],
                seed=validation.draw_seed(self.random_state),
                callback=lambda posterior: line.update(len(posterior.trace), posterior.trace[-1]),
            )
        model = CompletionModel(
            row_ids,
            column_ids,
            posterior,
            0.0,
            1.0,
            0.0,
            1.0,
            TrainingRatings.of(ratings),
            "implicit",
            len(weights) - ratings.n_ratings,
            ratings.n_ratings,
            unobserved_weight=given["unobserved_weight"],
        )
        self._adopt(model, entries)
        return self

    def partial_fit(
        self, X: Any, y: Any = None, *, columns: Any = None, matrix: bool | None = None
    ) -> ImplicitCompletion:
        """Add observed pairs, and fit the model to all so far; the arguments are those of ``fit``."""
        if not hasattr(self, "model_"):
            return self.fit(X, y, columns=columns, matrix=matrix)
        entries, model = self._read_more(X, y, columns=columns, matrix=matrix), self.model_
        rows, old_columns, weights = model.given()
        more = Entries(
            np.concatenate([model.row_ids.decode(rows), np.asarray(entries.rows)]),
            np.concatenate([model.column_ids.decode(old_columns), np.asarray(entries.columns)]),
            np.concatenate([weights, entries.values]),
            self.names_,
            self.frame_,
        )
        return self.fit_entries(more)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """nDCG@10 of the recommendations for the rows of held-out pairs, what the rows had in the fit left out.

        Args:
            X: the held-out pairs, as for ``fit``.
            y: their gains; 1 if not given.
            sample_weight: not used.

        Returns:
            Between 0 and 1, the mean over the rows.
        """
        entries = self._read_more(X, y)
        rows = IdIndex.fit(entries.rows)[0].labels
        return ranking_metrics(
            self.recommend(rows, 10), (entries.rows, entries.columns, entries.values), 10
        )["ndcg"]

    def fit_share(self, *args: Any, **options: Any) -> Any:  # noqa: D102
        raise ValueError("implicit feedback is fitted by one process; call fit")

    fit_file_share = fit_share
