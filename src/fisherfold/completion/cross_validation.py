"""Rank and ridge chosen by cross-validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from fisherfold.completion.entries import Entries, pair_numbers
from fisherfold.completion.model import CompletionModel
from fisherfold.completion.rating_model import (
    CHECKS,
    MatrixCompletion,
    RatingModel,
    check_possible,
    numbered,
    settings_of,
    side_information,
    with_extras,
)
from fisherfold.completion.training import (
    Settings,
    SideInformation,
    model_of,
    prepare,
    solve,
)
from fisherfold.progress import track
from fisherfold.tables import validation
from fisherfold.threads import threads
from fisherfold.warn import warn

SEARCH_CHECKS: dict[str, validation.Check] = {
    "ranks": validation.each(validation.integer(1)),
    "ridges": validation.each(validation.optional(validation.number(0))),
    "cv": validation.integer(2),
}
_SEARCHED = ("rank", "ridge")


class MatrixCompletionCV(RatingModel):
    """``MatrixCompletion`` that picks its rank and ridge by the held-out error of ``cv`` random folds.

    The best pair is then fitted to all values. Parameters that are not listed are those of ``MatrixCompletion``.

    Args:
        ranks: the ranks to try; those that the table does not allow are left out.
        ridges: the ridges to try; None is the learnt one.
        cv: the number of folds.
        random_state: seed of the folds and of the starting points.
        likelihood: as in ``MatrixCompletion``; errors are those of the predicted means.

    Attributes:
        best_estimator_: the ``MatrixCompletion`` of that rank and ridge, fitted to all values.
        best_rank_: the chosen rank.
        best_ridge_: the chosen ridge.
        best_rmse_: its mean held-out root mean square error.
        cv_results_: ``rank``, ``ridge``, ``mean_rmse``, ``std_rmse`` and the error of each fold, one entry per pair.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> table = np.outer(rng.normal(size=30), rng.normal(size=20)) + 0.1 * rng.normal(size=(30, 20))
        >>> table[rng.random(table.shape) < 0.5] = np.nan
        >>> MatrixCompletionCV(ranks=(1, 4)).fit(table).best_rank_ in (1, 4)
        True
    """

    def __init__(
        self,
        ranks: tuple[int, ...] = (5, 10, 20),
        *,
        ridges: tuple[float | None, ...] = (None,),
        cv: int = 3,
        offsets: str = "both",
        inference: str = "variational",
        solver: str = "auto",
        rated_sets: bool = True,
        max_iter: int = 50,
        tol: float = 3e-4,
        clip: bool = True,
        unseen: str = "prior",
        duplicates: str = "mean",
        random_state: int | None = 0,
        device: str | None = None,
        dtype: str = "float32",
        n_jobs: int | None = None,
        verbose: bool = False,
        likelihood: str = "gaussian",
    ) -> None:
        self.ranks = ranks
        self.ridges = ridges
        self.cv = cv
        self.offsets = offsets
        self.inference = inference
        self.solver = solver
        self.rated_sets = rated_sets
        self.max_iter = max_iter
        self.tol = tol
        self.clip = clip
        self.unseen = unseen
        self.duplicates = duplicates
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.verbose = verbose
        self.likelihood = likelihood

    _checks = {
        name: check for name, check in CHECKS.items() if name not in _SEARCHED
    } | SEARCH_CHECKS

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        columns: Any = None,
        matrix: bool | None = None,
        row_features: Any = None,
        column_features: Any = None,
        time: Any = None,
        sample_weight: Any = None,
        noise_scale: Any = None,
        ids: Any = None,
    ) -> MatrixCompletionCV:
        """Choose rank and ridge, and fit the model; the arguments are those of ``MatrixCompletion.fit``."""
        entries = self._read(X, y, columns=columns, matrix=matrix)
        entries = with_extras(X, entries, time, sample_weight, noise_scale, ids)
        return self.fit_entries(entries, side_information(entries, row_features, column_features))

    def fit_entries(
        self, entries: Entries, known: SideInformation | None = None
    ) -> MatrixCompletionCV:
        """Choose and fit, for what was read already."""
        given = validation.check_parameters(self.get_params(deep=False), self._checks)
        tried = [settings_of(given | {"rank": 1, "ridge": r}, self.solver, 0) for r in self.ridges]
        seed = validation.draw_seed(self.random_state)
        with threads(self.n_jobs):
            results = self._search(
                [replace(each, seed=seed) for each in tried], entries, known or SideInformation()
            )
        self._set_results(results)
        best = self._estimator().set_params(random_state=seed)
        self.best_estimator_ = best.fit_entries(entries, known)
        self._adopt(best.model_, entries)
        return self

    def _estimator(self) -> MatrixCompletion:
        """The model of the chosen rank and ridge."""
        shared = {
            name: value
            for name, value in self.get_params(deep=False).items()
            if name not in SEARCH_CHECKS
        }
        return MatrixCompletion(self.best_rank_, ridge=self.best_ridge_, **shared)

    def _search(
        self, tried: list[Settings], entries: Entries, known: SideInformation
    ) -> dict[str, Any]:
        """The held-out errors of all ranks and ridges."""
        settings = tried[0]
        check_possible(settings, entries, known)
        ids, i, j = numbered(entries, known)
        data = entries.numbered(i, j)
        if settings.rule not in ("mean", "keep"):
            data = data.merged(settings.rule, ids)
        pair = pair_numbers(data.rows, data.columns)  # no pair is both held out and in the fit
        if (n := int(pair.max()) + 1) < self.cv:
            raise ValueError(f"cv={self.cv} folds need as many ratings, got {n}")
        ranks = self._possible_ranks(settings, len(ids[0]), len(ids[1]))
        errors = np.empty((len(tried), len(ranks), self.cv))
        fold = (np.random.default_rng(settings.seed).permutation(n) % self.cv)[pair]
        with track("cross-validation", errors.size) as line:
            for k in range(self.cv):
                held = data.at(fold == k)
                table = prepare(data.at(fold != k), ids, settings, known)
                for r, with_ridge in enumerate(tried):
                    for s, rank in enumerate(ranks):
                        chosen = replace(with_ridge, rank=rank)
                        model = model_of(ids, table, solve(table, chosen), settings.inference)
                        pairs = model.pairs(held.rows, held.columns, held.times)
                        off = pairs.predict(clip=self.clip) - held.values
                        errors[r, s, k] = np.sqrt(np.average(off**2, weights=held.amounts))
                        line.advance()
        pairs_tried = [(rank, each.ridge) for each in tried for rank in ranks]
        return _results(pairs_tried, errors.reshape(-1, self.cv))

    def _possible_ranks(self, settings: Settings, n_rows: int, n_columns: int) -> list[int]:
        """The ranks to try that a table of this size has."""
        largest = settings.largest_rank(n_rows, n_columns)
        if ranks := sorted({int(rank) for rank in self.ranks if rank <= largest}):
            return ranks
        size = f"{n_rows} x {n_columns}"
        warn(
            f"all of ranks={self.ranks!r} are more than a table of {size} allows; {largest} is used"
        )
        return [largest]

    def _set_results(self, results: dict[str, Any]) -> None:
        self.cv_results_ = results
        best = int(np.argmin(results["mean_rmse"]))
        self.best_rank_ = results["rank"][best]
        self.best_ridge_ = results["ridge"][best]
        self.best_rmse_ = float(results["mean_rmse"][best])

    def _adopt(self, model: CompletionModel, entries: Entries | None = None) -> None:
        super()._adopt(model, entries)
        if not hasattr(self, "best_estimator_"):  # from a file
            self.best_estimator_ = self._estimator()
            self.best_estimator_._set_names(Entries([], [], np.zeros(0), self.names_, self.frame_))
        self.best_estimator_._adopt(model)

    def partial_fit(self, X: Any, y: Any = None, **options: Any) -> MatrixCompletionCV:
        """Add new ratings to the chosen model, as ``MatrixCompletion.partial_fit``; the first call searches."""
        if not hasattr(self, "model_"):
            return self.fit(X, y, **options)
        self.best_estimator_.partial_fit(X, y, **options)
        self._adopt(self.best_estimator_.model_)
        return self

    def fit_share(self, *args: Any, **options: Any) -> NoReturn:  # noqa: D102
        raise ValueError(
            "over several processes the rank must be given; choose it in one process, on a part"
        )

    fit_file_share = fit_share

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("best_estimator_", None)  # made again from the model
        return state

    def _learnt(self) -> dict[str, Any]:
        found = self.cv_results_
        count = sum(name.startswith("split") for name in found)
        errors = [found[f"split{k}_rmse"].tolist() for k in range(count)]
        search = {"rank": found["rank"], "ridge": found["ridge"], "errors": errors}
        return super()._learnt() | {"search": search}

    def _recall(self, meta: Mapping[str, Any]) -> None:
        super()._recall(meta)
        search = meta["search"]
        ranks = SEARCH_CHECKS["ranks"]("rank", search["rank"])
        ridges = SEARCH_CHECKS["ridges"]("ridge", search["ridge"])
        errors = np.array(search["errors"], dtype=np.float64).T
        shape = errors.shape[0] if errors.ndim == 2 else -1
        if not shape == len(ranks) == len(ridges) or not np.isfinite(errors).all():
            raise ValueError(
                f"its search has {len(ranks)} ranks, {len(ridges)} ridges and errors {errors.shape}"
            )
        self._set_results(_results(list(zip(ranks, ridges, strict=True)), errors))


def _results(
    tried: list[tuple[int, float | None]], errors: npt.NDArray[np.float64]
) -> dict[str, Any]:
    """A table of the held-out errors, one row per pair of rank and ridge."""
    return {
        "rank": [rank for rank, _ in tried],
        "ridge": [ridge for _, ridge in tried],
        "mean_rmse": errors.mean(axis=1),
        "std_rmse": errors.std(axis=1, ddof=1),
        **{f"split{k}_rmse": part for k, part in enumerate(errors.T)},
    }
