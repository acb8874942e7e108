"""Fill the holes of feature tables: a scikit-learn transformer.

    x_ij ≈ μ_j + s_j (b_i + c_j + ⟨u_i, v_j⟩)

Columns (features) are standardised, their factors learnt in ``fit`` with a Gaussian posterior; each row given to
``transform`` gets its own coefficients from what it has (one small solve per row), so new rows need no new fit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from fisherfold.completion.posterior import CompletionPosterior, Side
from fisherfold.completion.ratings import Ratings
from fisherfold.completion.stream import absorb, grow
from fisherfold.completion.variational import fit_variational, gradual_start
from fisherfold.tables import parameters
from fisherfold.tables.checkpoint import all_or_nothing
from fisherfold.tables.inputs import LARGEST, unmasked
from fisherfold.tables.refusals import reject_text
from fisherfold.threads import threads

Table = npt.NDArray[np.floating]
_ROWS_AT_ONCE = 4096
_FURTHEST = 1e100  # in standard deviations; squares of more leave float64, and a row with as much is not believed


class LowRankImputer(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Impute missing values (NaN, or masked) by a low-rank Gaussian model of the table.

    Observed values are returned as they are. A column without any observed value in ``fit`` is filled with 0, and what
    it has in ``transform`` does not count for the others. A row without any is filled with what an average row has.

    Args:
        rank: the largest number of factors; smaller tables use min(n_samples, n_features). Factors that the data does
            not support are switched off by their learnt prior.
        max_iter: the largest number of passes of the fit.
        tol: stop when a pass raises the bound by less than this per value.
        random_state: seed of the starting point.
        n_jobs: the number of threads of the fit; None leaves it to torch.

    Attributes:
        rank_: the number of factors used.
        mean_: the mean of the observed values of each column.
        scale_: their standard deviation, 1 for constant columns.
        n_iter_: the number of passes.

    Example:
        >>> X = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, np.nan], [3.0, np.nan, 9.0], [4.0, 8.0, 12.0]])
        >>> filled = LowRankImputer(rank=1).fit_transform(X)
        >>> bool(np.isfinite(filled).all()), bool((filled[~np.isnan(X)] == X[~np.isnan(X)]).all())
        (True, True)
    """

    def __init__(
        self, rank: int = 5, *, max_iter: int = 100, tol: float = 1e-5, random_state: int | None = 0,
        n_jobs: int | None = None,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.n_jobs = n_jobs

    @all_or_nothing
    def fit(self, X: Any, y: Any = None) -> LowRankImputer:
        """Learn the factors of the columns.

        Args:
            X: a table with NaN where a value is missing.
            y: not used.

        Returns:
            This transformer.

        Raises:
            ValueError: if no value is observed, or one is so large that sums are infinite.
        """
        rank, max_iter = (parameters.whole(name, getattr(self, name), 1) for name in ("rank", "max_iter"))
        tol, n_jobs = parameters.number("tol", self.tol), parameters.jobs(self.n_jobs)
        parameters.check_seed(self.random_state)
        reject_text(X)
        X = validate_data(self, unmasked(X), dtype=[np.float64, np.float32], ensure_all_finite="allow-nan")
        seen = ~np.isnan(X)
        if not seen.any():
            raise ValueError("X must contain at least one observed value, got only NaN")
        if (size := float(np.nanmax(np.abs(X)))) > LARGEST:
            raise ValueError(f"X must hold values of absolute value {LARGEST:g} at most, got {size:g}")
        counts = np.maximum(seen.sum(axis=0), 1)
        self.mean_ = np.where(seen, X, 0).sum(axis=0, dtype=np.float64) / counts
        off = np.where(seen, X - self.mean_, 0)
        # dividing first keeps the squares in range
        largest = np.abs(off).max(axis=0)
        spread = largest * np.sqrt(((off / np.where(largest > 0, largest, 1)) ** 2).sum(axis=0) / counts)
        self.scale_ = np.where(spread > 1e-12 * np.abs(self.mean_), spread, 1.0)
        self._observed = seen.any(axis=0)
        self.rank_ = min(rank, *X.shape)
        rows, columns = np.nonzero(seen)
        ratings = Ratings(rows, columns, (off / self.scale_)[rows, columns], X.shape, dtype=torch.float64)
        seed = parameters.seed_of(self.random_state)
        with threads(n_jobs):
            start = gradual_start(ratings, self.rank_, set_effects=False, seed=seed)
            posterior = fit_variational(
                ratings, self.rank_, max_iter=max_iter, tol=tol, set_effects=False, init=start
            )
        self.n_iter_ = len(posterior.trace)
        self._posterior = replace(posterior, rows=posterior.rows.prior_member())
        return self

    def transform(self, X: Any) -> Table:
        """Fill the holes of a table with the same columns.

        Args:
            X: a table with NaN where a value is missing.

        Returns:
            The table without NaN, in its own dtype.
        """
        check_is_fitted(self, "mean_")
        reject_text(X)
        X = validate_data(
            self, unmasked(X), dtype=[np.float64, np.float32], ensure_all_finite="allow-nan", reset=False, copy=True
        )
        for start in range(0, len(X), _ROWS_AT_ONCE):
            self._fill(X[start : start + _ROWS_AT_ONCE])
        return X

    def _fill(self, X: Table) -> None:
        """Fill a run of rows in place."""
        holes = np.isnan(X)
        needy = np.flatnonzero(holes.any(axis=1))
        if len(needy) == 0:
            return
        part = X[needy]
        rows, columns = np.nonzero(holes[needy])
        mean, _ = self._fold_in(part).predict(torch.from_numpy(rows), torch.from_numpy(columns))
        off = self.scale_[columns] * mean.numpy() * self._observed[columns]
        part[rows, columns] = self.mean_[columns] + off
        X[needy] = part

    def _fold_in(self, X: Table) -> CompletionPosterior:
        """The posterior of these rows given the columns of the fit."""
        columns = self._posterior.columns
        one: Side = replace(self._posterior.rows)
        grow(one, columns, len(X))
        everyone = torch.arange(1, len(X) + 1)
        posterior = replace(self._posterior, rows=one, columns=replace(columns))
        # a column without a value in the fit has no scale, and nothing follows from what it has here
        rows, there = np.nonzero(~np.isnan(X) & self._observed)
        if len(rows):
            values = ((X[rows, there] - self.mean_[there]) / self.scale_[there]).clip(-_FURTHEST, _FURTHEST)
            batch = Ratings(rows, there, values, X.shape, dtype=torch.float64)
            absorb(posterior, batch, everyone, torch.arange(X.shape[1]), move=(True, False))
        for name in ("mean", "covariance", "weight", "shortfall", "counts", "log_det"):
            setattr(one, name, getattr(one, name)[1:])
        return posterior

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
