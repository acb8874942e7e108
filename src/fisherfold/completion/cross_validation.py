"""Rank and ridge chosen by cross-validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fisherfold.completion.estimator import CHECKS, SEARCH_CHECKS, MatrixCompletion
from fisherfold.completion.fit import Settings, once, prepare, solve
from fisherfold.completion.model import CompletionModel
from fisherfold.progress import track
from fisherfold.warn import warn


class MatrixCompletionCV(MatrixCompletion):
    """``MatrixCompletion`` that picks its rank and ridge by the held-out error of ``cv`` random folds.

    The best pair is then fitted to all values. Parameters that are not listed are those of ``MatrixCompletion``.

    Args:
        ranks: the ranks to try; those that the table does not allow are left out.
        ridges: the ridges to try; None is the learnt one.
        cv: the number of folds.
        random_state: seed of the folds and of the starting points.
        likelihood: as in ``MatrixCompletion``; errors are those of the predicted means.

    Attributes:
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
        super().__init__(
            offsets=offsets,
            inference=inference,
            solver=solver,
            rated_sets=rated_sets,
            max_iter=max_iter,
            tol=tol,
            clip=clip,
            unseen=unseen,
            duplicates=duplicates,
            random_state=random_state,
            device=device,
            dtype=dtype,
            n_jobs=n_jobs,
            verbose=verbose,
            likelihood=likelihood,
        )

    _checks = {
        name: check for name, check in CHECKS.items() if name not in ("rank", "ridge")
    } | SEARCH_CHECKS

    def _chosen(self, settings: Settings, shape: tuple[int, int], *data: Any) -> Settings:
        """Choose rank and ridge."""
        ids, i, j, values, extras = data
        i, j, values, extras = once(i, j, values, extras, ids, settings.rule)
        if (n := len(values)) < self.cv:
            raise ValueError(f"cv={self.cv} folds need as many ratings, got {n}")
        largest, ridges = settings.largest_rank(*shape), list(self.ridges)
        if not (ranks := sorted({int(rank) for rank in self.ranks if rank <= largest})):
            ranks = [largest]
            size = f"{shape[0]} x {shape[1]}"
            warn(
                f"all of ranks={self.ranks!r} are more than a table of {size} allows; {largest} is used"
            )
        errors = np.empty((len(ridges), len(ranks), self.cv))
        fold = np.random.default_rng(settings.seed).permutation(n) % self.cv
        with track("cross-validation", errors.size) as line:
            for k in range(self.cv):
                kept, held, inside, asked = (
                    fold != k,
                    fold == k,
                    extras.at(fold != k),
                    extras.at(fold == k),
                )
                table = prepare(i[kept], j[kept], values[kept], ids, settings, inside)
                for r, ridge in enumerate(ridges):
                    for s, rank in enumerate(ranks):
                        chosen = replace(settings, rank=rank, ridge=ridge)
                        model = CompletionModel.of(
                            ids, table, solve(table, chosen), settings.inference
                        )
                        mean, _ = model.predict(i[held], j[held], clip=self.clip, times=asked.times)
                        errors[r, s, k] = np.sqrt(
                            np.average((mean - values[held]) ** 2, weights=asked.weights)
                        )
                        line.advance()
        tried = [(rank, ridge) for ridge in ridges for rank in ranks]
        self._choose(_results(tried, errors.reshape(-1, self.cv)))
        return replace(settings, rank=self.best_rank_, ridge=self.best_ridge_)

    def _choose(self, results: dict[str, Any]) -> None:
        self.cv_results_ = results
        best = int(np.argmin(results["mean_rmse"]))
        self.best_rank_, self.best_ridge_ = results["rank"][best], results["ridge"][best]
        self.best_rmse_ = float(results["mean_rmse"][best])

    def _learnt(self) -> dict[str, Any]:
        if not hasattr(self, "cv_results_"):  # read from a file of an estimator without a search
            return super()._learnt()
        found = self.cv_results_
        errors = [
            found[f"split{k}_rmse"].tolist()
            for k in range(sum(name.startswith("split") for name in found))
        ]
        return super()._learnt() | {
            "search": {"rank": found["rank"], "ridge": found["ridge"], "errors": errors}
        }

    def _recall(self, meta: Mapping[str, Any]) -> None:
        super()._recall(meta)
        if (search := meta.get("search")) is None:
            return
        ranks, ridges = (
            SEARCH_CHECKS[f"{name}s"](name, search[name]) for name in ("rank", "ridge")
        )
        errors = np.array(search["errors"], dtype=np.float64).T
        if (
            errors.ndim != 2
            or errors.shape[0] != len(ranks) != len(ridges)
            or not np.isfinite(errors).all()
        ):
            raise ValueError(
                f"its search has {len(ranks)} ranks, {len(ridges)} ridges and errors {errors.shape}"
            )
        self._choose(_results(list(zip(ranks, ridges, strict=True)), errors))


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
