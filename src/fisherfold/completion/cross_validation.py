"""Rank and ridge chosen by cross-validation along a warm-started path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fisherfold.completion.entries import Entries
from fisherfold.completion.estimator import CHECKS, SEARCH_CHECKS, MatrixCompletion
from fisherfold.completion.fit import Settings, prepare, solve
from fisherfold.completion.inference.posterior import CompletionPosterior
from fisherfold.completion.inference.start import raise_rank
from fisherfold.completion.inference.variational import largest_first
from fisherfold.completion.model import CompletionModel, fitted
from fisherfold.completion.ratings import Ratings
from fisherfold.tables.ids import IdIndex
from fisherfold.threads import threads
from fisherfold.warn import warn


class MatrixCompletionCV(MatrixCompletion):
    """``MatrixCompletion`` that picks its rank and ridge by the held-out error of ``cv`` random folds.

    For each fold and ridge the ranks are fitted in ascending order, each from the one before with singular vectors of
    its residuals added; ``point`` fits, those with a given ridge, and ranks with fewer than three ratings for each
    coefficient start anew. The best pair is then fitted to all values.

    Args:
        ranks: the ranks to try; those that the table does not allow are left out.
        ridges: the ridges to try; None is the learnt one.
        cv: the number of folds.
        offsets: as in ``MatrixCompletion``, like everything that follows.
        inference: see there.
        solver: see there.
        rated_sets: see there.
        max_iter: see there.
        tol: see there.
        clip: see there.
        unseen: see there.
        duplicates: see there.
        random_state: seed of the folds and of the starting points.
        device: see there.
        dtype: see there.
        n_jobs: see there.
        verbose: see there.

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
        self, ranks: tuple[int, ...] = (5, 10, 20), *, ridges: tuple[float | None, ...] = (None,), cv: int = 3,
        offsets: str = "both", inference: str = "variational", solver: str = "auto", rated_sets: bool = True,
        max_iter: int = 50, tol: float = 3e-4, clip: bool = True, unseen: str = "prior", duplicates: str = "mean",
        random_state: int | None = 0, device: str | None = None, dtype: str = "float32", n_jobs: int | None = None,
        verbose: bool = False,
    ) -> None:  # fmt: skip
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

    _checks = {name: check for name, check in CHECKS.items() if name not in ("rank", "ridge")} | SEARCH_CHECKS

    def fit_entries(self, entries: Entries) -> MatrixCompletionCV:
        """Choose rank and ridge, then fit to all values.

        Args:
            entries: the observed entries.

        Returns:
            This estimator.
        """
        settings = self._settings()
        row_ids, column_ids, i, j = entries.indexed()
        with threads(self.n_jobs):
            results = self._search((row_ids, column_ids), i, j, entries.values, settings)
            rank, ridge = results["rank"], results["ridge"]
            best = int(np.argmin(results["mean_rmse"]))
            chosen = replace(settings, rank=rank[best], ridge=ridge[best])
            model = fitted((row_ids, column_ids), i, j, entries.values, chosen)
        self._choose(results)
        self._remember(entries)._adopt(model)
        return self

    def _search(
        self, ids: tuple[IdIndex, IdIndex], i: Any, j: Any, values: Any, settings: Settings
    ) -> dict[str, Any]:
        """The held-out error of every ridge, rank and fold."""
        table = prepare(i, j, values, ids, settings)
        n = table.ratings.n_ratings
        if n < self.cv:
            raise ValueError(f"cv={self.cv} folds need as many ratings, got {n}")
        ranks, ridges = self._allowed_ranks(len(ids[0]), len(ids[1])), list(self.ridges)
        parts = [part.cpu() for part in table.ratings.entries()]
        fold = torch.from_numpy(np.random.default_rng(settings.seed).permutation(n) % self.cv)
        errors = np.empty((len(ridges), len(ranks), self.cv))
        for k in range(self.cv):
            kept, dtype = [part[fold != k] for part in parts], table.ratings.dtype
            train = Ratings(
                kept[0], kept[1], kept[2], table.ratings.shape, dtype=dtype, device=settings.device
            )
            rows, columns, held = (part[fold == k].numpy() for part in parts)
            for r, ridge in enumerate(ridges):
                for s, (posterior, level) in enumerate(_path(train, ranks, replace(settings, ridge=ridge))):
                    low, high = ((value - table.center) / table.scale for value in (table.low, table.high))
                    model = CompletionModel(
                        *ids, posterior, level, 1.0, low, high, None, settings.inference, n_merged=0, n_at_start=n
                    )
                    mean, _ = model.predict(rows.astype(np.int64), columns.astype(np.int64), clip=self.clip)
                    errors[r, s, k] = table.scale * np.sqrt(np.mean((mean - held) ** 2))
        tried = [(rank, ridge) for ridge in ridges for rank in ranks]
        return _results(tried, errors.reshape(-1, self.cv))

    def _allowed_ranks(self, n_rows: int, n_columns: int) -> list[int]:
        # the solvers of the paper need a subspace that is not the whole space
        largest = min(n_rows, n_columns) - (self.solver != "auto")
        allowed = sorted({int(rank) for rank in self.ranks if rank <= largest})
        if allowed:
            return allowed
        if largest < 1:
            raise ValueError(f"solver={self.solver!r} needs a table larger than {n_rows} x {n_columns}")
        warn(f"all of ranks={self.ranks!r} are more than a table of {n_rows} x {n_columns} allows; {largest} is used")
        return [largest]

    def _choose(self, results: dict[str, Any]) -> None:
        self.cv_results_ = results
        best = int(np.argmin(results["mean_rmse"]))
        self.best_rank_, self.best_ridge_ = results["rank"][best], results["ridge"][best]
        self.best_rmse_ = float(results["mean_rmse"][best])

    def _ridge(self) -> float | None:
        return getattr(self, "best_ridge_", None)

    def _learnt(self) -> dict[str, Any]:
        if not hasattr(self, "cv_results_"):  # read from a file of an estimator without a search
            return super()._learnt()
        found = self.cv_results_
        errors = [found[f"split{k}_rmse"].tolist() for k in range(sum(name.startswith("split") for name in found))]
        return super()._learnt() | {"search": {"rank": found["rank"], "ridge": found["ridge"], "errors": errors}}

    def _recall(self, meta: Mapping[str, Any]) -> None:
        super()._recall(meta)
        if (search := meta.get("search")) is None:
            return
        ranks, ridges = (SEARCH_CHECKS[f"{name}s"](name, search[name]) for name in ("rank", "ridge"))
        errors = np.array(search["errors"], dtype=np.float64).T
        if errors.ndim != 2 or errors.shape[0] != len(ranks) != len(ridges) or not np.isfinite(errors).all():
            raise ValueError(f"its search has {len(ranks)} ranks, {len(ridges)} ridges and errors {errors.shape}")
        self._choose(_results(list(zip(ranks, ridges, strict=True)), errors))


def _path(train: Ratings, ranks: list[int], settings: Settings) -> Any:
    """Fits of ascending rank, each from the one before where that ends where a fit by itself does."""
    posterior: CompletionPosterior | None = None
    for rank in ranks:
        # that is so only if ratings are many and factors are free to be switched off
        warm = settings.inference == "variational" and settings.ridge is None and rank <= largest_first(train)
        init = raise_rank(posterior, train, rank, seed=settings.seed) if posterior is not None and warm else None
        posterior, level = solve(train, replace(settings, rank=rank), init)
        yield posterior, level


def _results(tried: list[tuple[int, float | None]], errors: npt.NDArray[np.float64]) -> dict[str, Any]:
    """A table of the held-out errors, one row per pair of rank and ridge."""
    return {
        "rank": [rank for rank, _ in tried], "ridge": [ridge for _, ridge in tried], "mean_rmse": errors.mean(axis=1),
        "std_rmse": errors.std(axis=1, ddof=1), **{f"split{k}_rmse": part for k, part in enumerate(errors.T)},
    }  # fmt: skip
