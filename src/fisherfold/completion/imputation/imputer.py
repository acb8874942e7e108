"""Fill the holes of feature tables: a scikit-learn transformer, with error bars and draws.

    x_ij = μ_j + s_j (b_i + c_j + ⟨u_i, v_j⟩ + e_ij)

Columns are standardised (``encoding``); their factors are learnt in ``fit`` with a Gaussian
posterior. Each row given to ``transform`` gets its own coefficients from what it has (one small
solve per row), so new rows need no new fit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from fisherfold.completion.entries import LARGEST, unmasked
from fisherfold.completion.files import pack_posterior, unpack_posterior
from fisherfold.completion.imputation.draws import draw_tables
from fisherfold.completion.imputation.encoding import TableEncoding
from fisherfold.completion.imputation.reading import (
    TableGiven,
    check_categories,
    checked_weights,
    chosen_columns,
    extend_frame,
    read_mixed,
)
from fisherfold.completion.inference.posterior import CompletionPosterior
from fisherfold.completion.inference.stream import Batch, update_batch
from fisherfold.completion.inference.variational import fit_variational, gradual_start
from fisherfold.completion.ratings import Ratings, Triplets
from fisherfold.distributed import Axis
from fisherfold.files import sound
from fisherfold.tables import validation
from fisherfold.tables.folders import expect, expect_number, load_folder, model_file, save_folder
from fisherfold.tables.frames import columns_of, frame_kind
from fisherfold.threads import threads

Table = npt.NDArray[Any]
KIND = "imputer"
_ROWS_AT_ONCE = 4096
# the largest rank that is chosen without being asked for
_LARGEST_AUTO = 40


def _check_categorical(name: str, value: Any) -> Any:
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    good = not isinstance(value, (str, bytes)) and hasattr(value, "__iter__")
    if good and all(_is_column(one) for one in value):
        return [one if isinstance(one, str) else int(one) for one in value]
    raise ValueError(f"{name} must be 'auto', None or columns by name or number, got {value!r}")


def _is_column(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Integral) and not isinstance(value, bool))


def _check_missing(name: str, value: Any) -> Any:
    value = validation.plain(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(f"{name} must be a number, a text, NaN or None, got {value!r}")


_CHECKS: dict[str, validation.Check] = {
    "rank": validation.auto_or(validation.integer(1)),
    "marginals": validation.choice("gaussian", "ranks"),
    "categorical": _check_categorical,
    "missing_values": _check_missing,
    "add_indicator": validation.flag(),
    "max_iter": validation.integer(1),
    "tol": validation.number(0),
    "random_state": validation.seed(),
    "n_jobs": validation.jobs(),
}


class LowRankImputer(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Impute missing values by a low-rank Gaussian model of the table.

    Observed values are returned as they are. A column of numbers without any observed value in
    ``fit`` is filled with 0, and what it has in ``transform`` does not count for the others. A row
    without any is filled with what an average row has. A frame with columns of categories comes
    back as a frame, an array of objects as one.

    Args:
        rank: the largest number of factors; smaller tables use min(n_samples, n_columns). Factors
            that the data does not support are switched off by their learnt prior. ``auto`` takes up
            to 40.
        marginals: ``gaussian`` standardises each column of numbers; ``ranks`` brings it to normal
            scores and back, for skewed and ordered columns: imputed values then lie among the
            observed ones.
        categorical: the columns that hold categories, by name or number; ``auto`` takes those of
            text, of truth values and of the type ``category``; None says that all hold numbers.
        missing_values: what stands for a missing value, besides NaN, None and masked entries.
        add_indicator: whether a column of 0 and 1 is added for each column that had holes in
            ``fit``: where it had.
        max_iter: the largest number of passes of the fit.
        tol: stop when a pass raises the bound by less than this per value.
        random_state: seed of the starting point.
        n_jobs: the number of threads of the fit; None leaves it to torch.

    Attributes:
        rank_: the number of factors used.
        mean_: the mean of the observed values of each column (of their normal scores, for
            ``ranks``); NaN for categories.
        scale_: their standard deviation, 1 for constant columns.
        categories_: the categories of each column that holds any, by the number of the column.
        n_iter_: the number of passes.

    Example:
        >>> X = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, np.nan], [3.0, np.nan, 9.0], [4.0, 8.0, 12.0]])
        >>> filled = LowRankImputer(rank=1).fit_transform(X)
        >>> bool(np.isfinite(filled).all()), filled[0].tolist()
        (True, [1.0, 2.0, 3.0])
    """

    def __init__(
        self,
        rank: int | str = "auto",
        *,
        marginals: str = "gaussian",
        categorical: Any = "auto",
        missing_values: Any = np.nan,
        add_indicator: bool = False,
        max_iter: int = 100,
        tol: float = 1e-5,
        random_state: int | None = 0,
        n_jobs: int | None = None,
    ) -> None:
        self.rank = rank
        self.marginals = marginals
        self.categorical = categorical
        self.missing_values = missing_values
        self.add_indicator = add_indicator
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(self, X: Any, y: Any = None, *, sample_weight: Any = None) -> LowRankImputer:
        """Learn the factors of the columns.

        Args:
            X: a table with NaN where a value is missing.
            y: not used.
            sample_weight: how much each row, or each entry, counts: its log likelihood is
                multiplied by the weight, so that 2 counts as two values and 0 as none.

        Returns:
            This imputer.

        Raises:
            ValueError: if the table holds nothing, or text in a column of numbers; or for weights
                that are negative, not finite, all zero or of another shape.
        """
        given = validation.check_parameters(self.get_params(deep=False), _CHECKS)
        table, categories = self._read(X, reset=True)
        weights = None
        numbers = table.numbers
        if sample_weight is not None:
            weights = checked_weights(sample_weight, numbers.shape)
            used = weights.any(axis=1)
            weights = weights[used]
            numbers = np.where(weights > 0, numbers[used], np.nan)
        if np.isnan(numbers).all():
            raise ValueError("X must contain at least one observed value, got only NaN")
        if (size := float(np.nanmax(np.abs(numbers)))) > LARGEST:
            raise ValueError(
                f"X must hold values of absolute value {LARGEST:g} at most, got {size:g}"
            )
        sizes = np.array([len(categories.get(j, ())) for j in range(numbers.shape[1])])
        ranks = given["marginals"] == "ranks"
        encoding = TableEncoding.of(numbers, sizes, ranks=ranks, weights=weights)
        with threads(given["n_jobs"]):
            posterior = self._learnt(encoding, numbers, weights, given)
        self.categories_ = categories
        self.n_iter_ = len(posterior.trace)
        self._indicated = np.flatnonzero(table.holes.any(axis=0))
        self._adopt(encoding, replace(posterior, rows=posterior.rows.prior_members()))
        return self

    def _learnt(
        self, encoding: TableEncoding, numbers: Table, weights: Table | None, given: dict[str, Any]
    ) -> CompletionPosterior:
        """The posterior of the standardised table."""
        z = encoding.standardise(numbers)
        rows, columns = np.nonzero(~np.isnan(z))
        entries = Triplets(rows, columns, z[rows, columns])
        if weights is not None:
            own = weights[rows, encoding.source[columns]]
            entries = replace(entries, amounts=own, excess=own * (own - 1))
        axes = Axis.whole(z.shape[0]), Axis.whole(z.shape[1])
        ratings = Ratings.over(axes, entries, dtype=torch.float64)
        largest = _LARGEST_AUTO if given["rank"] == "auto" else given["rank"]
        rank = min(largest, *z.shape)
        seed = validation.draw_seed(self.random_state)
        return fit_variational(
            ratings,
            rank,
            max_iter=given["max_iter"],
            tol=given["tol"],
            set_effects=False,
            init=gradual_start(ratings, rank, set_effects=False, seed=seed),
        )

    def _adopt(self, encoding: TableEncoding, posterior: CompletionPosterior) -> None:
        """Take over what a fit has learnt."""
        numeric = encoding.sizes == 0
        self.mean_ = np.where(numeric, encoding.mean[encoding.starts], np.nan)
        self.scale_ = np.where(numeric, encoding.scale[encoding.starts], np.nan)
        self.rank_ = posterior.rank
        self._encoding = encoding
        self._posterior = posterior

    def partial_fit(self, X: Any, y: Any = None) -> LowRankImputer:
        """Learn from more rows, by one natural-gradient step on the factors of the columns.

        The first call fits. Means, scales and categories of the columns stay those of the first
        call.

        Args:
            X: more rows of the table.
            y: not used.

        Returns:
            This imputer.
        """
        if not hasattr(self, "mean_"):
            return self.fit(X)
        z = self._encoding.standardise(self._read(X)[0].numbers)
        posterior = self._posterior.copied()
        for start in range(0, len(z), _ROWS_AT_ONCE):
            posterior = self._fold_in(z[start : start + _ROWS_AT_ONCE], posterior, learn=True)
        self._posterior = replace(posterior, rows=posterior.rows.prior_members())
        return self

    def transform(self, X: Any, *, return_std: bool = False) -> Any:
        """Fill the holes of a table with the same columns.

        Args:
            X: a table with holes.
            return_std: whether the predictive standard deviations are returned as well, 0 where a
                value was observed. Of a category it is that of being right, √(p (1 - p)).

        Returns:
            The table without holes, in its own type; or that and an array of the standard
            deviations of its columns.
        """
        check_is_fitted(self, "mean_")
        table, _ = self._read(X)
        filled = table.numbers.copy()
        std = np.zeros_like(filled)
        for first in range(0, len(filled), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            self._fill_(filled[part], std[part], table.holes[part], return_std)
        done = self._with_indicators(table.with_filled(filled, self.categories_), table)
        return (done, std) if return_std else done

    def category_probabilities(self, X: Any) -> dict[int, npt.NDArray[np.float64]]:
        """Give the probabilities of the categories of each column that holds any.

        Args:
            X: a table with holes.

        Returns:
            For the number of each such column one row per row of X and one column per entry of its
            ``categories_``; an observed category has probability 1.
        """
        check_is_fitted(self, "mean_")
        table, _ = self._read(X)
        sizes = self._encoding.sizes
        found = {j: np.zeros((len(table.numbers), int(sizes[j]))) for j in self.categories_}
        for first in range(0, len(table.numbers), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            mean, std = self._predicted(table.numbers[part], with_std=True)
            for j, chances in found.items():
                codes = table.numbers[part, j]
                inside = slice(self._encoding.starts[j], self._encoding.ends[j])
                guess = self._encoding.probabilities(mean[:, inside], std[:, inside], j)
                known = np.arange(int(sizes[j])) == codes[:, None]
                chances[part] = np.where(np.isnan(codes)[:, None], guess, known)
        return found

    def _fill_(
        self, numbers: Table, std: Table, holes: npt.NDArray[np.bool_], with_std: bool
    ) -> None:
        """Fill the holes of some rows in place, and their standard deviations."""
        rows = np.flatnonzero(holes.any(axis=1))
        if len(rows) == 0:
            return
        encoding = self._encoding
        mean, spread = self._predicted(
            numbers[rows], with_std=with_std or len(self.categories_) > 0
        )
        for j in np.flatnonzero(holes.any(axis=0)).tolist():
            here = holes[rows, j]
            inside = slice(encoding.starts[j], encoding.ends[j])
            m, s = mean[here, inside], spread[here, inside]
            if j in self.categories_:
                chances = encoding.probabilities(m, s, j)
                best = chances.max(axis=1)
                numbers[rows[here], j] = chances.argmax(axis=1)
                std[rows[here], j] = np.sqrt(best * (1 - best))
                continue
            numbers[rows[here], j] = encoding.restore(m[:, 0], j)
            if with_std:
                std[rows[here], j] = encoding.restore_std(m[:, 0], s[:, 0], j)

    def _predicted(self, numbers: Table, *, with_std: bool) -> tuple[Table, Table]:
        """Predictive moments of the missing standardised entries of some rows."""
        z = self._encoding.standardise(numbers)
        rows, columns = np.nonzero(np.isnan(z))
        posterior = self._fold_in(z, self._posterior)
        index = torch.from_numpy(rows), torch.from_numpy(columns)
        mean, std = posterior.predict(*index, with_std=with_std)
        means, deviations = np.zeros(z.shape), np.ones(z.shape)
        means[rows, columns] = mean.numpy()
        if std is not None:
            deviations[rows, columns] = std.numpy()
        return means, deviations

    def sample(self, X: Any, m: int = 20, *, random_state: Any = None) -> Iterator[Any]:
        """Draw completed tables for multiple imputation.

        Analyse each, then combine the analyses with ``pool_estimates``.

        Where X has rows enough, a Gibbs sampler starts at the posterior and draws factors of rows
        and columns and the noise of each column in turn, with wide priors: what is learnt shrinks,
        and draws that shrink would bias the analyses. For a few rows, the columns are drawn from
        their posterior.

        Args:
            X: a table with holes.
            m: how many.
            random_state: seed of the draws; that of the estimator if not given.

        Yields:
            Completed tables.
        """
        check_is_fitted(self, "mean_")
        m = validation.integer(1)("m", m)
        table, _ = self._read(X)
        seed = self.random_state if random_state is None else random_state
        rng = np.random.default_rng(validation.draw_seed(seed))
        z = self._encoding.standardise(table.numbers)
        for fitted, noise in islice(draw_tables(self._posterior, z, rng), m):
            filled = self._drawn(table, fitted, noise, rng)
            yield self._with_indicators(table.with_filled(filled, self.categories_), table)

    def _drawn(
        self, table: TableGiven, fitted: Table, noise: Table, rng: np.random.Generator
    ) -> Table:
        """A table whose holes are drawn around what factors say of them."""
        filled, encoding = table.numbers.copy(), self._encoding
        drawn = fitted + rng.normal(size=fitted.shape) * noise
        for j in np.flatnonzero(table.holes.any(axis=0)).tolist():
            here = table.holes[:, j]
            inside = slice(encoding.starts[j], encoding.ends[j])
            if j in self.categories_:
                chances = encoding.probabilities(fitted[here, inside], noise[inside], j)
                passed = rng.random(len(chances))[:, None] > chances.cumsum(axis=1)[:, :-1]
                filled[here, j] = passed.sum(axis=1)
            else:
                filled[here, j] = encoding.restore(drawn[here, encoding.starts[j]], j)
        return filled

    def _fold_in(
        self, z: Table, known: CompletionPosterior, *, learn: bool = False
    ) -> CompletionPosterior:
        """The posterior of these rows given the columns, which learn from them with ``learn``."""
        columns = known.columns if learn else replace(known.columns)
        posterior = replace(known, rows=known.rows.prior_members(len(z)), columns=columns)
        rows, there = np.nonzero(~np.isnan(z))
        if len(rows):
            ratings = Ratings(rows, there, z[rows, there], z.shape, dtype=torch.float64)
            index = torch.arange(len(z)), torch.arange(z.shape[1])
            update_batch(posterior, Batch(ratings, *index), move=(True, learn))
        if not learn:  # what is said of a row does not depend on the rows beside it
            posterior.noise_precision = known.noise_precision
        return posterior

    def _read(self, X: Any, *, reset: bool = False) -> tuple[TableGiven, dict[int, list[Any]]]:
        """The table as numbers, and the categories of its columns."""
        X = unmasked(X)
        missing = self.missing_values
        if reset:
            shape = X.shape if hasattr(X, "shape") else np.asarray(X).shape
            plain = len(shape) != 2  # an error, which scikit-learn words
            columns = [] if plain else chosen_columns(self.categorical, X, missing, shape[1])
        else:
            columns = list(self.categories_)
        if columns:
            validate_data(self, X, skip_check_array=True, reset=reset)
            return read_mixed(X, columns, {} if reset else self.categories_, missing)
        if frame_kind(X) in ("pandas", "polars"):
            _check_numeric(X)
        numbers = validate_data(
            self,
            X,
            dtype=[np.float64, np.float32],
            ensure_all_finite="allow-nan",
            reset=reset,
            copy=True,
        )
        if isinstance(missing, (int, float)):
            numbers[numbers == missing] = np.nan
        return TableGiven(numbers, np.isnan(numbers)), {}

    def _with_indicators(self, done: Any, table: TableGiven) -> Any:
        """A filled table with columns that say where it had holes, if they are wanted."""
        if not self.add_indicator:
            return done
        marks = table.holes[:, self._indicated]
        if frame_kind(done) is None:
            return np.hstack([done, marks.astype(done.dtype)])
        names = self.get_feature_names_out()[self.n_features_in_ :]
        return extend_frame(done, dict(zip(names, marks.T.astype(np.int64), strict=True)))

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[Any]:
        """Name the columns of a filled table.

        Args:
            input_features: the names of the columns of the table, if it had none in ``fit``.

        Returns:
            These names, and ``missingindicator_...`` for each indicator.
        """
        names = super().get_feature_names_out(input_features)
        if not self.add_indicator:
            return np.asarray(names)
        marks = [f"missingindicator_{name}" for name in names[self._indicated]]
        return np.concatenate([names, np.array(marks, dtype=object)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted imputer into a folder, without pickle.

        It holds ``model.safetensors`` and a readable ``model.json``.

        Args:
            path: the folder; it is made if it does not exist.
        """
        check_is_fitted(self, "mean_")
        arrays, meta = self._packed()
        meta["params"] = validation.saved_parameters(self.get_params(deep=False))
        save_folder(path, KIND, arrays, meta)

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
        arrays |= self._encoding.to_arrays()
        arrays["indicated"] = self._indicated
        names = getattr(self, "feature_names_in_", None)
        meta |= {"n_iter": self.n_iter_, "names": None if names is None else names.tolist()}
        meta["categories"] = {str(j): values for j, values in self.categories_.items()}
        return arrays, meta

    def _unpack(self, arrays: Any, meta: Any) -> None:
        tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
        posterior = unpack_posterior(tensors, meta)
        encoding = TableEncoding.from_arrays(tensors, len(posterior.columns.mean))
        self.categories_ = check_categories(meta.get("categories") or {}, encoding.sizes)
        self._indicated = np.empty(0, dtype=np.int64)
        if "indicated" in tensors:
            self._indicated = expect(tensors, "indicated", (None,), integers=True, least=0).numpy()
        self.n_features_in_ = len(encoding.sizes)
        if self._indicated.max(initial=-1) >= self.n_features_in_:
            raise ValueError("indicated names a column that the table does not have")
        names = meta.get("names")
        if names is not None:
            if len(names) != self.n_features_in_ or not all(isinstance(one, str) for one in names):
                raise ValueError("names are not one text per column")
            self.feature_names_in_ = np.array(names, dtype=object)
        self._adopt(encoding, posterior)
        self.n_iter_ = expect_number(meta, "n_iter", least=0, integer=True)

    def __getstate__(self) -> dict[str, Any]:
        """Plain arrays and numbers, so that any pickler (mlflow, skops, joblib) can take them."""
        state = dict(super().__getstate__())
        if "_posterior" in state:
            state["_arrays"], state["_meta"] = self._packed()
            del state["_posterior"], state["_encoding"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = state.pop("_arrays", None)
        meta = state.pop("_meta", None)
        super().__setstate__(state)
        if arrays is not None:
            self._unpack(arrays, meta)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _check_numeric(X: Any) -> None:
    """Name a column of a frame that holds dates or text."""
    for name, column in columns_of(X).items():
        text = any(isinstance(value, str) for value in column[:1000].tolist())
        if text or column.dtype.kind in "mM":
            raise ValueError(
                f"column {name!r} must hold numbers, got {column[0]!r}; encode or drop it"
            )
