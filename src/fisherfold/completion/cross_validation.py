"""Rank and ridge chosen by cross-validation along a warm-started path."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fisherfold.completion.estimator import MatrixCompletion
from fisherfold.completion.fit import FitOptions, checkpoint_of, prepare, run
from fisherfold.completion.posterior import CompletionPosterior
from fisherfold.completion.ratings import Ratings
from fisherfold.completion.shared_ratings import Prepared
from fisherfold.completion.start import raise_rank
from fisherfold.completion.variational import largest_first
from fisherfold.files import sound
from fisherfold.plain import counted
from fisherfold.tables import parameters
from fisherfold.tables.checkpoint import FitCheckpoint, all_or_nothing
from fisherfold.tables.inputs import Observations
from fisherfold.tables.posterior_files import finite_number
from fisherfold.threads import threads


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
        on_interrupt: see there; during the search, where there is no model of all values yet, Ctrl-C raises.
        checkpoint: see there; the errors found so far lie beside it with the suffix ``.search``.

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
        verbose: bool = False, on_interrupt: str = "raise", checkpoint: str | os.PathLike[str] | None = None,
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
        self.on_interrupt = on_interrupt
        self.checkpoint = checkpoint

    @all_or_nothing
    def fit_observations(self, found: Observations) -> MatrixCompletionCV:
        """Choose rank and ridge, then fit to all values.

        Args:
            found: the observed entries.

        Returns:
            This estimator.

        Raises:
            ValueError: if there are fewer pairs than folds, or none of the ranks is allowed.
        """
        self._validate()
        ranks = self._allowed_ranks(found)
        ridges = parameters.several("ridges", self.ridges)
        options = replace(self._options(ranks[0], None), return_on_interrupt=False)
        with threads(options.n_jobs):
            ready = prepare(found, options)
            if ready.ratings.n_ratings < self.cv:
                raise ValueError(f"cv={self.cv} folds need as many ratings, got {ready.ratings.n_ratings}")
            chosen = {"ranks": ranks, "ridges": ridges, "cv": self.cv, "clip": self.clip}
            saved = checkpoint_of(ready.ratings, options, **chosen)
            errors = self._search(ready, ranks, ridges, options, saved)
        self._keep([(rank, ridge) for ridge in ridges for rank in ranks], errors.reshape(-1, self.cv))
        self._fit(found, self.best_rank_, self.best_ridge_)
        if saved is not None and not self.interrupted_:
            saved.remove()
        return self

    def _ridge(self) -> float | None:
        return getattr(self, "best_ridge_", None)

    def _validate_model(self) -> None:
        parameters.whole("cv", self.cv, 2)
        for rank in parameters.several("ranks", self.ranks):
            parameters.whole("each of ranks", rank, 1)
        for ridge in parameters.several("ridges", self.ridges):
            self._check_ridge("each of ridges", ridge)

    def _allowed_ranks(self, found: Observations) -> list[int]:
        sizes = len(np.unique(_codes(found.all_rows))), len(np.unique(_codes(found.all_columns)))
        whole = min(sizes)
        # the solvers of the paper need a subspace that is not the whole space
        largest = whole if self.solver == "auto" else whole - 1
        allowed = sorted({int(rank) for rank in parameters.several("ranks", self.ranks) if rank <= largest})
        if not allowed:
            bound = f"min(n_rows, n_columns)={whole}" + ("" if largest == whole else f" less one for {self.solver}")
            raise ValueError(f"ranks must contain one between 1 and {bound}, got {self.ranks!r}")
        return allowed

    def _search(
        self, ready: Prepared, ranks: list[int], ridges: list[float | None], options: FitOptions,
        saved: FitCheckpoint | None,
    ) -> npt.NDArray[np.float64]:  # fmt: skip
        """The held-out error of every (ridge, rank, fold)."""
        rows, columns, values = ready.ratings.entries()
        fold = np.random.default_rng(options.seed).permutation(len(values)) % self.cv
        errors = np.full((len(ridges), len(ranks), self.cv), np.nan)
        if saved is not None and (found := saved.load()) is not None:
            with sound(saved.path, "checkpoint"):
                errors[:] = found[0]["errors"].numpy()
        for k in range(self.cv):
            held = torch.from_numpy(fold == k).to(rows.device)
            train = Ratings(
                rows[~held], columns[~held], values[~held], ready.ratings.shape, dtype=ready.ratings.dtype,
                device=options.device,
            )  # fmt: skip
            test = rows[held].long(), columns[held].long(), values[held]
            for r, ridge in enumerate(ridges):
                if np.isnan(errors[r, :, k]).any():
                    errors[r, :, k] = self._path(train, test, ranks, replace(options, ridge=ridge), ready)
                    if saved is not None:
                        saved.save({"errors": torch.from_numpy(errors)}, {})
        return errors

    def _path(
        self, train: Ratings, test: tuple[torch.Tensor, torch.Tensor, torch.Tensor], ranks: list[int],
        options: FitOptions, ready: Prepared,
    ) -> list[float]:  # fmt: skip
        errors: list[float] = []
        posterior: CompletionPosterior | None = None
        for rank in ranks:
            # a path ends where the fit itself does only if ratings are many and factors are free to be switched off
            warm = self.inference == "variational" and options.ridge is None and rank <= largest_first(train)
            init = raise_rank(posterior, train, rank, seed=options.seed) if posterior is not None and warm else None
            outcome = run(train, replace(options, rank=rank), init)
            posterior = outcome.posterior
            mean = posterior.predict(test[0], test[1])[0] + outcome.level
            if self.clip:
                mean = mean.clamp(*((v - ready.center) / ready.scale for v in (ready.low, ready.high)))
            errors.append(ready.scale * float((mean - test[2]).double().square().mean().sqrt()))
        return errors

    def _keep(self, tried: list[tuple[int, float | None]], errors: npt.NDArray[np.float64]) -> None:
        """Make a table of the held-out errors, one row per pair of rank and ridge, and choose the best."""
        mean = errors.mean(axis=1)
        self.cv_results_: dict[str, Any] = {
            "rank": [rank for rank, _ in tried], "ridge": [ridge for _, ridge in tried], "mean_rmse": mean,
            "std_rmse": errors.std(axis=1, ddof=1), **{f"split{k}_rmse": part for k, part in enumerate(errors.T)},
        }  # fmt: skip
        best = int(np.argmin(mean))
        (self.best_rank_, self.best_ridge_), self.best_rmse_ = tried[best], float(mean[best])

    def _learnt(self) -> dict[str, Any]:
        if not hasattr(self, "cv_results_"):  # read from a file of an estimator without a search
            return super()._learnt()
        found = self.cv_results_
        folds = sum(name.startswith("split") for name in found)
        errors = np.stack([found[f"split{k}_rmse"] for k in range(folds)], axis=1)
        return super()._learnt() | {"rank": found["rank"], "ridge": found["ridge"], "errors": errors}

    def _recall(self, learnt: dict[str, Any]) -> None:
        super()._recall(learnt)
        if "errors" not in learnt:
            return
        ranks = [parameters.whole("rank", rank, 1) for rank in learnt["rank"]]
        ridges = [None if ridge is None else finite_number("ridge", ridge) for ridge in learnt["ridge"]]
        errors = np.array([[finite_number("an error", e) for e in row] for row in learnt["errors"]])
        tried = list(zip(ranks, ridges, strict=True))
        if errors.ndim != 2 or errors.shape[1] < 2 or len(tried) != len(errors):
            pairs = counted(len(tried), "searched pair has", "searched pairs have")
            raise ValueError(f"{pairs} errors of the shape {errors.shape}")
        self._keep(tried, errors)


def _codes(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Ids of any type as numbers that can be compared."""
    if ids.dtype != object:
        return ids
    known: dict[Any, int] = {}
    return np.array([known.setdefault(v, len(known)) for v in ids.tolist()])
