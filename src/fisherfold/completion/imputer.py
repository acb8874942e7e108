"""Fill the holes of feature tables: a scikit-learn transformer, with error bars and draws for multiple imputation.

    x_ij = μ_j + s_j (b_i + c_j + ⟨u_i, v_j⟩ + e_ij)

Columns (features) are standardised, or brought to normal scores (``marginals="ranks"``); their factors are learnt in
``fit`` with a Gaussian posterior. Each row given to ``transform`` gets its own coefficients from what it has (one small
solve per row), so new rows need no new fit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtr, ndtri
from scipy.stats import t as student
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from fisherfold.completion.entries import LARGEST, unmasked
from fisherfold.completion.files import pack_posterior, unpack_posterior
from fisherfold.completion.inference.packed import unpack
from fisherfold.completion.inference.posterior import CompletionPosterior
from fisherfold.completion.inference.stream import update_batch
from fisherfold.completion.inference.variational import fit_variational, gradual_start
from fisherfold.completion.ratings import Ratings
from fisherfold.files import sound
from fisherfold.tables import validation
from fisherfold.tables.folders import expect, expect_number, load_folder, model_file, save_folder
from fisherfold.tables.frames import columns_of, frame_kind
from fisherfold.threads import threads

Table = npt.NDArray[np.floating]
KIND = "imputer"
_ROWS_AT_ONCE = 4096
_ROWS_FOR_CHAIN, _BURN_IN, _THINNED = 5, 100, 20
_NOISE_PRIOR = (
    1.0,
    0.005,
)  # shape and rate of the gamma prior of the noise precision of standardised columns
_FURTHEST = 1e100  # in standard deviations; squares of more leave float64, and a row with as much is not believed
_CHECKS: dict[str, validation.Check] = {
    "rank": validation.integer(1),
    "marginals": validation.choice("gaussian", "ranks"),
    "max_iter": validation.integer(1),
    "tol": validation.number(0),
    "random_state": validation.seed(),
    "n_jobs": validation.jobs(),
}


class LowRankImputer(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Impute missing values (NaN, or masked) by a low-rank Gaussian model of the table.

    Observed values are returned as they are. A column without any observed value in ``fit`` is filled with 0, and what
    it has in ``transform`` does not count for the others. A row without any is filled with what an average row has.

    Args:
        rank: the largest number of factors; smaller tables use min(n_samples, n_features). Factors that the data does
            not support are switched off by their learnt prior.
        marginals: ``gaussian`` standardises each column; ``ranks`` brings it to normal scores and back, for skewed,
            ordered and binary columns: imputed values then lie among the observed ones.
        max_iter: the largest number of passes of the fit.
        tol: stop when a pass raises the bound by less than this per value.
        random_state: seed of the starting point.
        n_jobs: the number of threads of the fit; None leaves it to torch.

    Attributes:
        rank_: the number of factors used.
        mean_: the mean of the observed values of each column (of their normal scores, for ``ranks``).
        scale_: their standard deviation, 1 for constant columns.
        n_iter_: the number of passes.

    Example:
        >>> X = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, np.nan], [3.0, np.nan, 9.0], [4.0, 8.0, 12.0]])
        >>> filled = LowRankImputer(rank=1).fit_transform(X)
        >>> bool(np.isfinite(filled).all()), bool((filled[~np.isnan(X)] == X[~np.isnan(X)]).all())
        (True, True)
    """

    def __init__(
        self,
        rank: int = 5,
        *,
        marginals: str = "gaussian",
        max_iter: int = 100,
        tol: float = 1e-5,
        random_state: int | None = 0,
        n_jobs: int | None = None,
    ) -> None:
        self.rank = rank
        self.marginals = marginals
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(self, X: Any, y: Any = None) -> LowRankImputer:
        """Learn the factors of the columns from a table with NaN where a value is missing."""
        given = validation.check_parameters(self.get_params(deep=False), _CHECKS)
        X = self._checked(X, reset=True)
        seen = ~np.isnan(X)
        if not seen.any():
            raise ValueError("X must contain at least one observed value, got only NaN")
        if (size := float(np.nanmax(np.abs(X)))) > LARGEST:
            raise ValueError(
                f"X must hold values of absolute value {LARGEST:g} at most, got {size:g}"
            )
        levels = [np.sort(X[here, j]).astype(np.float64) for j, here in enumerate(seen.T)]
        scores = _scores(X, levels) if given["marginals"] == "ranks" else X
        counts = np.maximum(seen.sum(axis=0), 1)
        mean = np.where(seen, scores, 0).sum(axis=0, dtype=np.float64) / counts
        off = np.where(seen, scores - mean, 0)
        largest = np.abs(off).max(axis=0)  # dividing first keeps the squares in range
        spread = largest * np.sqrt(
            ((off / np.where(largest > 0, largest, 1)) ** 2).sum(axis=0) / counts
        )
        scale = np.where(spread > 1e-12 * np.abs(mean), spread, 1.0)
        rank, seed = min(given["rank"], *X.shape), validation.draw_seed(self.random_state)
        rows, columns = np.nonzero(seen)
        ratings = Ratings(rows, columns, (off / scale)[rows, columns], X.shape, dtype=torch.float64)
        with threads(given["n_jobs"]):
            posterior = fit_variational(
                ratings,
                rank,
                max_iter=given["max_iter"],
                tol=given["tol"],
                set_effects=False,
                init=gradual_start(ratings, rank, set_effects=False, seed=seed),
            )
        self.mean_, self.scale_, self.rank_, self.n_iter_ = mean, scale, rank, len(posterior.trace)
        self._observed, self._levels = (
            seen.any(axis=0),
            levels if given["marginals"] == "ranks" else None,
        )
        self._posterior = replace(posterior, rows=posterior.rows.prior_members())
        return self

    def partial_fit(self, X: Any, y: Any = None) -> LowRankImputer:
        """Learn from more rows, by one natural-gradient step on the factors of the columns; the first call fits.

        Means and scales of the columns stay those of the first call.
        """
        if not hasattr(self, "mean_"):
            return self.fit(X)
        X = self._checked(X)
        posterior = self._posterior.copied()
        for start in range(0, len(X), _ROWS_AT_ONCE):
            posterior = self._fold_in(
                self._standard(X[start : start + _ROWS_AT_ONCE]), posterior, learn=True
            )
        self._posterior = replace(posterior, rows=posterior.rows.prior_members())
        return self

    def transform(self, X: Any, *, return_std: bool = False) -> Any:
        """Fill the holes of a table with the same columns.

        Args:
            X: a table with NaN where a value is missing.
            return_std: whether the predictive standard deviations are returned as well, 0 where a value was observed.

        Returns:
            The table without NaN, in its own dtype; or that and the standard deviations.
        """
        check_is_fitted(self, "mean_")
        X = self._checked(X, copy=True)
        std = np.zeros_like(X)
        for first in range(0, len(X), _ROWS_AT_ONCE):
            part = X[first : first + _ROWS_AT_ONCE]
            needy = np.flatnonzero(np.isnan(part).any(axis=1))
            if len(needy) == 0:
                continue
            rows, columns = np.nonzero(np.isnan(part[needy]))
            posterior = self._fold_in(self._standard(part[needy]), self._posterior)
            index = torch.from_numpy(rows), torch.from_numpy(columns)
            mean, spread = posterior.predict(*index, with_std=return_std)
            deviation = None if spread is None else spread.numpy()
            part[needy[rows], columns], deviation = self._back(mean.numpy(), columns, deviation)
            if deviation is not None:
                std[first + needy[rows], columns] = deviation
        return (X, std) if return_std else X

    def sample(self, X: Any, m: int = 20, *, random_state: Any = None) -> Iterator[Table]:
        """Draw completed tables for multiple imputation; analyse each, then combine with ``pool_estimates``.

        Where X has rows enough, a Gibbs sampler starts at the posterior and draws factors of rows and columns and the
        noise of each column in turn, with wide priors: what is learnt shrinks, and draws that shrink would bias the
        analyses. For a few rows, the columns are drawn from their posterior.

        Args:
            X: a table with NaN where a value is missing.
            m: how many.
            random_state: seed of the draws; that of the estimator if not given.

        Yields:
            Completed tables.
        """
        check_is_fitted(self, "mean_")
        m = validation.integer(1)("m", m)
        X = self._checked(X)
        z, holes = self._standard(X), np.isnan(X)
        rng = np.random.default_rng(
            validation.draw_seed(self.random_state if random_state is None else random_state)
        )
        seen = ~np.isnan(z)
        z = np.where(seen, z, 0)
        rows, columns = np.nonzero(holes)
        draw = self._draws(z, seen, rng)
        if len(z) >= _ROWS_FOR_CHAIN * z.shape[1]:
            draw = _chain(self._posterior, z, seen, rng)
        for drawn in islice(draw, m):
            filled = X.copy()
            filled[rows, columns], _ = self._back(drawn[rows, columns], columns, None)
            yield filled

    def _draws(
        self, z: Table, seen: npt.NDArray[np.bool_], rng: np.random.Generator
    ) -> Iterator[Table]:
        """Draws of the whole standardised table given its observed entries, columns from their posterior."""
        side, prior = self._posterior.columns, self._posterior.rows
        mean, k = side.mean.numpy(), prior.precision.numpy()
        root = torch.linalg.cholesky(
            unpack(side.covariance).double() + 1e-12 * torch.eye(mean.shape[1])
        ).numpy()
        weight, start = (
            self._posterior.noise_precision * side.weight.numpy(),
            k @ prior.center.double().numpy(),
        )
        while True:
            drawn = mean + (root @ rng.normal(size=(*mean.shape, 1)))[:, :, 0]
            f, c = np.column_stack([drawn[:, :-1], np.ones(len(drawn))]), drawn[:, -1]
            u = _normal(
                k + _outer_sums(seen * weight, f), start + (seen * (z - c) * weight) @ f, rng
            )
            yield u @ f.T + c + rng.normal(size=z.shape) / np.sqrt(weight)

    def _standard(self, X: Table) -> Table:
        """Standardised values, NaN where there is none or where the fit had none of its column."""
        scores = X if self._levels is None else _scores(X, self._levels)
        z = ((scores - self.mean_) / self.scale_).clip(-_FURTHEST, _FURTHEST)
        z[:, ~self._observed] = np.nan
        return z

    def _back(
        self, z: Table, columns: npt.NDArray[np.int64], std: Table | None
    ) -> tuple[Table, Table | None]:
        """Standardised values, and their standard deviations, in the units of their columns."""
        there = self._observed[columns]

        def unit(values: Table) -> Table:
            raw = self.mean_[columns] + self.scale_[columns] * values * there
            return raw if self._levels is None else _values(raw, columns, self._levels)

        if std is None:
            return unit(z), None
        if self._levels is None:
            return unit(z), self.scale_[columns] * std * there
        return unit(z), (unit(z + std) - unit(z - std)) / 2

    def _fold_in(
        self, z: Table, known: CompletionPosterior, *, learn: bool = False
    ) -> CompletionPosterior:
        """The posterior of these rows given the columns; with ``learn``, the columns learn from the rows as well."""
        columns = known.columns if learn else replace(known.columns)
        posterior = replace(known, rows=known.rows.prior_members(len(z)), columns=columns)
        rows, there = np.nonzero(~np.isnan(z))
        if len(rows):
            batch = Ratings(rows, there, z[rows, there], z.shape, dtype=torch.float64)
            update_batch(
                posterior, batch, torch.arange(len(z)), torch.arange(z.shape[1]), move=(True, learn)
            )
        return posterior

    def _checked(self, X: Any, *, reset: bool = False, copy: bool = False) -> Table:
        if frame_kind(X) in ("pandas", "polars"):
            for name, column in columns_of(X).items():
                if column.dtype.kind in "mM" or any(
                    isinstance(value, str) for value in column[:1000].tolist()
                ):
                    raise ValueError(
                        f"column {name!r} must hold numbers, got {column[0]!r}; encode or drop it"
                    )
        return validate_data(
            self,
            unmasked(X),
            dtype=[np.float64, np.float32],
            ensure_all_finite="allow-nan",
            reset=reset,
            copy=copy,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted imputer into a folder: ``model.safetensors`` and a readable ``model.json``; no pickle.

        Args:
            path: the folder; it is made if it does not exist.
        """
        check_is_fitted(self, "mean_")
        arrays, meta = self._packed()
        save_folder(
            path,
            KIND,
            arrays,
            meta | {"params": validation.saved_parameters(self.get_params(deep=False))},
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LowRankImputer:
        """Read an imputer that ``save`` wrote.

        Args:
            path: the folder.

        Returns:
            The fitted imputer.
        """
        arrays, meta = load_folder(path, KIND)
        with sound(model_file(path), KIND):
            imputer = cls(**validation.loaded_parameters(meta.get("params"), _CHECKS))
            imputer._unpack(arrays, meta)
        return imputer

    def _packed(self) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays, meta = pack_posterior(self._posterior)
        arrays |= {
            "mean": self.mean_,
            "scale": self.scale_,
            "observed": self._observed.astype(np.int64),
        }
        if self._levels is not None:
            sizes = np.array([len(level) for level in self._levels])
            arrays |= {"levels": np.concatenate(self._levels), "level_sizes": sizes}
        names = getattr(self, "feature_names_in_", None)
        meta |= {"n_iter": self.n_iter_, "names": None if names is None else names.tolist()}
        return arrays, meta

    def _unpack(self, arrays: Any, meta: Any) -> None:
        tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
        posterior = unpack_posterior(tensors, meta)
        d = len(posterior.columns.mean)
        self.mean_ = expect(tensors, "mean", (d,)).numpy()
        self.scale_ = expect(tensors, "scale", (d,), positive=True).numpy()
        self._observed = expect(tensors, "observed", (d,), integers=True).numpy() > 0
        self._levels, names = None, meta.get("names")
        if "levels" in tensors:
            sizes = expect(tensors, "level_sizes", (d,), integers=True, least=0).numpy()
            levels = expect(tensors, "levels", (int(sizes.sum()),)).numpy()
            self._levels = np.split(levels, np.cumsum(sizes)[:-1])
        if names is not None:
            if len(names) != d or not all(isinstance(name, str) for name in names):
                raise ValueError("names are not one text per column")
            self.feature_names_in_ = np.array(names, dtype=object)
        self.rank_, self.n_features_in_, self._posterior = posterior.rank, d, posterior
        self.n_iter_ = expect_number(meta, "n_iter", least=0, integer=True)

    def __getstate__(self) -> dict[str, Any]:
        """Plain arrays and numbers, so that any pickler (mlflow, skops, joblib) can take them."""
        state = dict(super().__getstate__())
        if "_posterior" in state:
            state["_arrays"], state["_meta"] = self._packed()
            del state["_posterior"], state["_levels"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays, meta = state.pop("_arrays", None), state.pop("_meta", None)
        super().__setstate__(state)
        if arrays is not None:
            self._unpack(arrays, meta)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _chain(
    posterior: CompletionPosterior, z: Table, seen: npt.NDArray[np.bool_], rng: np.random.Generator
) -> Iterator[Table]:
    """Draws of the whole table, some sweeps of a Gibbs sampler after each other.

    x_ij = c_j + ⟨u_i, f_j⟩ + e_ij,    u_i, f_j, c_j ~ N(0, I),    e_ij ~ N(0, s_j)
    """
    side, prior = posterior.columns, posterior.rows
    root = np.linalg.cholesky(np.linalg.inv(prior.precision.numpy()))
    loading = np.column_stack([side.mean.numpy()[:, :-1], np.ones(len(side.mean))])
    f: Table = loading @ root
    c: Table = side.mean.numpy()[:, -1] + loading @ prior.center.double().numpy()
    s: Table = 1 / (posterior.noise_precision * side.weight.numpy())
    eye = np.eye(f.shape[1] + 1)
    for sweep in count(1):
        u = _normal(eye[1:, 1:] + _outer_sums(seen / s, f), (seen / s * (z - c)) @ f, rng)
        one = np.column_stack([u, np.ones(len(u))])
        found = _normal(
            eye + _outer_sums(seen.T / s[:, None], one), (seen * z).T @ one / s[:, None], rng
        )
        f, c = found[:, :-1], found[:, -1]
        misfit = (seen * (z - one @ found.T) ** 2).sum(axis=0)
        shape, rate = _NOISE_PRIOR[0] + seen.sum(axis=0) / 2, _NOISE_PRIOR[1] + misfit / 2
        s = rate / rng.gamma(shape)
        if sweep >= _BURN_IN and (sweep - _BURN_IN) % _THINNED == 0:
            yield u @ f.T + c + rng.normal(size=z.shape) * np.sqrt(s)


def _outer_sums(weights: Table, vectors: Table) -> Table:
    """Σ_j w_ij v_j v_jᵀ for each i."""
    n, q = vectors.shape
    return (weights @ (vectors[:, :, None] * vectors[:, None, :]).reshape(n, q * q)).reshape(
        -1, q, q
    )


def _normal(precision: Table, pull: Table, rng: np.random.Generator) -> Table:
    """Draws of N(Λ⁻¹h, Λ⁻¹) for a stack of precisions Λ and vectors h."""
    lower = np.linalg.cholesky(precision)
    half = np.linalg.solve(lower, pull[:, :, None]) + rng.normal(size=(*pull.shape, 1))
    return np.linalg.solve(lower.transpose(0, 2, 1), half)[:, :, 0]


def _scores(X: Table, levels: Sequence[Table]) -> Table:
    """Normal scores: quantiles of a Gaussian at the mid-ranks among the observed values of each column."""
    found = np.full(X.shape, np.nan)
    for j, level in enumerate(levels):
        here = ~np.isnan(X[:, j])
        if len(level) and here.any():
            rank = (
                np.searchsorted(level, X[here, j], "left")
                + np.searchsorted(level, X[here, j], "right")
            ) / 2
            found[here, j] = (
                ndtri(rank.clip(0.5, len(level) - 0.5) / len(level)) if len(level) > 1 else 0.0
            )
    return found


def _values(scores: Table, columns: npt.NDArray[np.int64], levels: Sequence[Table]) -> Table:
    """Observed values at the ranks of normal scores; between them where a column is not made of few values."""
    found = np.zeros(len(scores))
    for j in np.unique(columns):
        level, here = levels[j], columns == j
        if len(level):
            place = (ndtr(scores[here]) * len(level) - 0.5).clip(0, len(level) - 1)
            if len(np.unique(level)) <= max(2, len(level) // 10):
                found[here] = level[np.rint(place).astype(np.int64)]
            else:
                found[here] = np.interp(place, np.arange(len(level)), level)
    return found


class Pooled(NamedTuple):
    """Estimates pooled over imputations.

    Attributes:
        estimate: their mean.
        std_error: its standard error, with what is not known about the missing values.
        df: the degrees of freedom of its t distribution.
        missing: the share of its variance that is due to the missing values.
    """

    estimate: npt.NDArray[np.float64]
    std_error: npt.NDArray[np.float64]
    df: npt.NDArray[np.float64]
    missing: npt.NDArray[np.float64]

    def interval(
        self, level: float = 0.95
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The lower and upper ends of a confidence interval of a given probability."""
        half = student.ppf((1 + level) / 2, self.df) * self.std_error
        return self.estimate - half, self.estimate + half


def pool_estimates(estimates: Any, variances: Any, *, df_complete: float = np.inf) -> Pooled:
    """Combine the analyses of m imputed tables by Rubin's rules, with the degrees of freedom of Barnard and Rubin.

    Args:
        estimates: m estimates, or m vectors of them.
        variances: their squared standard errors, of the same shape.
        df_complete: the degrees of freedom of the analysis of a complete table.

    Returns:
        The pooled estimates.

    Raises:
        ValueError: if there are fewer than two.

    Example:
        >>> pooled = pool_estimates([1.0, 1.2, 0.8], [0.1, 0.1, 0.1])
        >>> float(pooled.estimate), round(float(pooled.std_error), 4)
        (1.0, 0.3916)
    """
    q, u = np.asarray(estimates, dtype=np.float64), np.asarray(variances, dtype=np.float64)
    m = len(q)
    if m < 2 or q.shape != u.shape:
        raise ValueError(
            f"at least 2 estimates with as many variances are needed, got {q.shape} and {u.shape}"
        )
    within, between = u.mean(axis=0), q.var(axis=0, ddof=1)
    total = within + (1 + 1 / m) * between
    share = (1 + 1 / m) * between / np.where(total > 0, total, 1)
    df = (m - 1) / np.maximum(share, 1e-12) ** 2
    if np.isfinite(df_complete):
        observed = (df_complete + 1) / (df_complete + 3) * df_complete * (1 - share)
        df = 1 / (1 / df + 1 / np.maximum(observed, 1e-12))
    return Pooled(q.mean(axis=0), np.sqrt(total), df, share)
