"""Fill a table with holes: ratings, sensor readings, assays.

    x_ij ≈ g + b_i + c_j + ⟨u_i, v_j⟩

``MatrixCompletion`` is the scikit-learn face of two ways to fit this: ``inference="variational"`` (both sides keep a
Gaussian posterior, everything is learnt) and ``inference="point"`` (the paper's problem on the Grassmann manifold).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from fisherfold.completion.entries import (
    RULES,
    Codes,
    Entries,
    Floats,
    merge,
    read_entries,
    read_pairs,
)
from fisherfold.completion.files import KIND, pack, unpack
from fisherfold.completion.fit import Extras, Settings
from fisherfold.completion.inference.features import FeatureColumns, as_times, encode_features
from fisherfold.completion.inference.likelihoods import LIKELIHOODS
from fisherfold.completion.model import UNSEEN, CompletionModel, fitted
from fisherfold.completion.point.fit import SOLVERS
from fisherfold.completion.ratings import places
from fisherfold.completion.recommend import (
    BY,
    best_columns,
    factors,
    inner_product_vectors,
    most_similar,
)
from fisherfold.files import sound
from fisherfold.plain import counted
from fisherfold.tables import validation
from fisherfold.tables.folders import load_folder, model_file, save_folder
from fisherfold.tables.frames import FRAMES, columns_of, frame_kind, make_frame, names_of, numbers
from fisherfold.tables.ids import IdIndex
from fisherfold.threads import threads
from fisherfold.warn import warn

CHECKS: dict[str, validation.Check] = {
    "rank": validation.integer(1),
    "ridge": validation.optional(validation.number(0)),
    "offsets": validation.choice("both", "rows", "columns", "global", "none"),
    "inference": validation.choice("variational", "point"),
    "solver": validation.choice("auto", *SOLVERS),
    "rated_sets": validation.flag(),
    "max_iter": validation.integer(1),
    "tol": validation.number(0),
    "clip": validation.flag(),
    "unseen": validation.choice(*UNSEEN),
    "duplicates": validation.choice(*RULES),
    "random_state": validation.seed(),
    "device": validation.torch_device(),
    "dtype": validation.torch_dtype(),
    "n_jobs": validation.jobs(),
    "verbose": validation.verbosity(),
    "likelihood": validation.choice(*LIKELIHOODS),
}


SEARCH_CHECKS: dict[str, validation.Check] = {
    "ranks": validation.each(validation.integer(1)),
    "ridges": validation.each(validation.optional(validation.number(0))),
    "cv": validation.integer(2),
}


_MANY = 10  # pairs, of which most are strangers: a mistake rather than a question about strangers


class MatrixCompletion(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Low-rank completion of a partially observed matrix, with error bars and nothing to tune.

    ``fit`` takes pairs of ids with values, a data frame of entries, or a matrix with holes. Ids are integers or text;
    7 and ``"7"`` are one id.

    Args:
        rank: the number of factors; less, with a warning, where the table is smaller.
        ridge: the prior precision of all coefficients in units of the noise precision (prior strength in
            pseudo-ratings); learnt if None, which is best for ``variational``.
        offsets: ``both`` (rows, columns and the mean), ``rows``, ``columns``, ``global`` (the mean only) or ``none``.
        inference: ``variational`` or ``point``.
        solver: of ``point``. ``auto`` penalises both factors and chooses the ridge on held-out values; ``rngd``,
            ``rngd-vr``, ``rcg`` and ``rgd`` solve the paper's problem as the methods of ``minimize`` do.
        rated_sets: whether the mere set of rated columns informs about a row, and of rows about a column
            (``variational`` only). Turn it off when entries are missing by design.
        max_iter: the largest number of passes over the data.
        tol: stop when a pass raises the bound by less than this per rating, or moves predictions by less than 30 times
            this (root mean square, in standard deviations of the values) (``variational``); or when it lowers the
            objective by less than this share of it (``point``).
        clip: whether predictions are clipped to the range of the observed values.
        unseen: for ids not seen in ``fit``: ``prior`` (an average row or column), ``nan`` or ``error``.
        duplicates: for pairs given twice: ``mean``, ``last``, ``sum`` or ``error``.
        random_state: seed of the starting point.
        device: where to compute, for example ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``; with a warning, float64 where a value far from all others rules their scale.
        n_jobs: the number of threads of the fit; None leaves it to torch, -1 takes all cores.
        verbose: whether to print a line per pass.
        likelihood: ``gaussian``; ``ordered`` for a few values that are steps of a scale, as stars are (ordered probit
            with learnt cut points); or ``binary`` for two values (probit).

    Attributes:
        row_ids_: the ids of the rows.
        column_ids_: the ids of the columns.
        row_factors_: u_i, and column_factors_: v_j, in units of the values: ``predict`` is ``offset_ + row_offsets_[i]
            + column_offsets_[j] + row_factors_[i] @ column_factors_[j]``, clipped.
        row_offsets_: b_i, and column_offsets_: c_j.
        row_covariances_: the posterior covariance of (u_i, b_i), and column_covariances_: of (v_j, c_j).
        offset_: g, the level of all values.
        categories_: the values of ordered categories, ascending.
        noise_: the standard deviation of an ordinary value around its prediction.
        trace_: one record per pass.
        n_iter_: the number of passes.
        converged_: whether the tolerance was reached.
        n_duplicates_: how many entries were merged into another one.
        feature_names_in_: the names of the row ids and the column ids, if a data frame was fitted.
        model_: ids, posterior, scale and what was seen, for the functions of ``fisherfold.completion``.

    Example:
        >>> X = [("ann", "tea"), ("ann", "rum"), ("bob", "tea"), ("bob", "gin"), ("eve", "gin"), ("eve", "rum")]
        >>> model = MatrixCompletion(rank=1).fit(X, [5, 1, 4, 2, 5, 4])
        >>> model.predict([("ann", "gin")]).shape
        (1,)
        >>> mean, std = model.predict([("ann", "gin"), ("tom", "tea")], return_std=True)
        >>> bool((std > 0).all())
        True
    """

    def __init__(
        self,
        rank: int = 10,
        *,
        ridge: float | None = None,
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
        self.rank = rank
        self.ridge = ridge
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

    _checks = CHECKS
    _implicit = False

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
    ) -> MatrixCompletion:
        """Fit the model.

        Args:
            X: (n, 2) ids with ``y``; or a data frame of entries; or a matrix with holes (sparse, or NaN).
            y: the values of the pairs.
            columns: the row id, column id and value columns of a data frame whose names are not the usual ones.
            matrix: True says that X is a matrix where it could be entries too.
            row_features: what is known of the rows: a data frame with a column of ids, or a pair (ids, matrix). Ids
                without ratings can be predicted from their features; ids without features are average ones.
            column_features: the same for the columns.
            time: when each value was observed, as numbers (seconds) or dates, or the name of a column of X: rows then
                drift from day to day, columns over longer periods.
            sample_weight: a weight per value; a value of weight 2 counts as two.

        Returns:
            This estimator.
        """
        entries = read_entries(X, y, columns=columns, matrix=matrix)
        extras = self._extras(X, entries, row_features, column_features, time, sample_weight)
        return self.fit_entries(entries, extras)

    def _extras(
        self,
        X: Any,
        entries: Entries,
        row_features: Any,
        column_features: Any,
        time: Any,
        sample_weight: Any,
    ) -> Extras:
        """Features, times and weights in the engine's form."""
        encoded = [
            None if given is None else encode_features(given, side, entries.names[k])
            for k, (given, side) in enumerate(((row_features, "row"), (column_features, "column")))
        ]
        count = len(entries.values)
        if isinstance(time, str):
            time = self._column(X, time, "time")
        if isinstance(sample_weight, str):
            sample_weight = self._column(X, sample_weight, "sample_weight")
        if entries.is_matrix and (time is not None or sample_weight is not None):
            raise ValueError(
                "time and sample_weight need entries: pass pairs of ids, or a data frame of entries"
            )
        times = None if time is None else as_times(time, count)
        weights = None
        if sample_weight is not None:
            weights = numbers(sample_weight, "sample_weight")
            if len(weights) != count or not (np.isfinite(weights).all() and (weights > 0).all()):
                raise ValueError(
                    f"sample_weight must hold {count} positive finite numbers, leave out the others"
                )
        return Extras((encoded[0], encoded[1]), times, weights)

    @staticmethod
    def _column(X: Any, name: str, what: str) -> Any:
        if frame_kind(X) is None or name not in (found := columns_of(X)):
            raise ValueError(
                f"{what}={name!r} must name a column of the data frame X, or hold one entry per rating"
            )
        return found[name]

    def fit_entries(
        self, entries: Entries, extras: Extras | None = None, *, grows: bool = False
    ) -> MatrixCompletion:
        """Fit the model to what was read already, for example from a file; a table that grows gets the full rank."""
        settings, extras = self._settings(), extras or Extras()
        if settings.inference == "point" and (settings.likelihood != "gaussian" or extras.given):
            raise ValueError(
                "features, time, sample_weight and likelihood need inference='variational'"
            )
        with threads(self.n_jobs):
            *ids, i, j = entries.indexed()
            shape = len(ids[0]), len(ids[1])
            for index, given, side in zip(ids, extras.features, ("row", "column"), strict=True):
                if given is not None:
                    self._join(index, given, side)
            data = (ids[0], ids[1]), i, j, entries.values, extras
            model = fitted(settings if grows else self._chosen(settings, shape, *data), *data)
        return self._remember(entries)._adopt(model)

    def _chosen(self, settings: Settings, shape: tuple[int, int], *data: Any) -> Settings:
        """The settings of the fit, for a table of which so many rows and columns have ratings."""
        return settings.for_table(*shape)

    @staticmethod
    def _join(index: IdIndex, features: FeatureColumns, side: str) -> None:
        """Number the ids that have features and no ratings, after the others."""
        known = index.encode(features.ids, side) >= 0
        if not known.any():
            raise ValueError(
                f"none of the ids of {side}_features has ratings: do they name the {side}s?"
            )
        if known.sum() < len(index) / 2:
            warn(
                f"{len(index) - known.sum()} of {len(index)} {side}s have no line in {side}_features: average ones"
            )
        index.extend(features.ids, side)

    def _settings(self, **chosen: Any) -> Settings:
        """The checked parameters of a fit."""
        given = validation.check_parameters(self.get_params(deep=False), self._checks)
        if given["inference"] == "variational" and given["solver"] != "auto":
            raise ValueError(
                f"solver must be 'auto' for inference='variational', got {self.solver!r}; 'point' takes others"
            )
        given = {"rank": 1, "ridge": None, "likelihood": "gaussian"} | given | chosen
        ridges = [given["ridge"], *given.get("ridges", ())]
        if given["inference"] == "variational" and 0 in ridges:
            raise ValueError(
                "ridge must be positive for inference='variational', got 0; None lets it be learnt"
            )
        given |= {"seed": validation.draw_seed(self.random_state), "device": str(given["device"])}
        return Settings(**{name: given[name] for name in Settings.__dataclass_fields__})

    def _remember(self, entries: Entries) -> MatrixCompletion:
        """Keep the names and the kind of frame that outputs are to have."""
        self.names_, self.frame_ = entries.names, entries.frame
        self.__dict__.pop("feature_names_in_", None)
        self.__dict__.pop("n_features_in_", None)
        if not entries.is_matrix:
            self.n_features_in_ = 2
        if entries.frame is not None:
            self.feature_names_in_ = np.array(entries.names[:2], dtype=object)
        return self

    def _adopt(self, model: CompletionModel) -> MatrixCompletion:
        """Make a fitted model this estimator's own."""
        self.model_ = model
        self.trace_, self.n_iter_ = model.posterior.trace, len(model.posterior.trace)
        self.converged_, self.n_duplicates_ = model.posterior.converged, model.n_merged
        return self

    def _fitted(self) -> CompletionModel:
        check_is_fitted(self, "model_")
        return self.model_

    def predict(
        self, X: Any, *, return_std: bool = False, time: Any = None
    ) -> Floats | tuple[Floats, Floats]:
        """Predict entries.

        Args:
            X: (n, 2) row and column ids; of a data frame the columns with the names of the fit.
            return_std: whether the predictive standard deviations are returned as well (``variational`` only).
            time: when, as for ``fit``, or one time for all pairs; without it drift counts as zero.

        Returns:
            The predictions, or predictions and standard deviations.
        """
        model = self._fitted()
        i, j, times = self._asked(X, time)
        return self._predict(model, i, j, return_std, times)

    def _asked(self, X: Any, time: Any) -> tuple[Codes, Codes, Floats | None]:
        rows, columns, _, _ = read_pairs(X, self._columns_of(X))
        i, j = self._located(rows, columns)
        if time is None:
            return i, j, None
        if isinstance(time, str) and frame_kind(X) is not None and time in names_of(X):
            time = columns_of(X)[time]
        if np.ndim(time) == 0:
            return i, j, np.full(len(i), as_times([time], 1)[0])
        return i, j, as_times(time, len(i))

    def predict_proba(self, X: Any, *, time: Any = None) -> Floats:
        """The probability of each category, for ``likelihood="ordered"`` or ``"binary"``.

        Args:
            X: (n, 2) row and column ids.
            time: as for ``predict``.

        Returns:
            One row per pair, one column per entry of ``categories_``.
        """
        model = self._fitted()
        if model.posterior.ordinal is None:
            raise ValueError("predict_proba needs likelihood='ordered' or 'binary'")
        return model.probabilities(*self._asked(X, time))

    def predict_interval(
        self, X: Any, coverage: float = 0.9, *, time: Any = None
    ) -> tuple[Floats, Floats]:
        """Intervals that hold a new value with a given probability, within the range or the steps of the scale.

        Args:
            X: (n, 2) row and column ids.
            coverage: the probability, between 0 and 1.
            time: as for ``predict``.

        Returns:
            Lower and upper ends.
        """
        model = self._fitted()
        if not 0 < coverage < 1:
            raise ValueError(f"coverage must lie between 0 and 1, got {coverage!r}")
        self._check_error_bars("predict_interval")
        i, j, times = self._asked(X, time)
        return model.intervals(i, j, coverage, clip=self.clip, unseen=self.unseen, times=times)

    def _located(self, rows: Any, columns: Any) -> tuple[Codes, Codes]:
        """Numbers of pairs, with a warning where most of them are strangers."""
        i, j = self._locate(rows, "row"), self._locate(columns, "column")
        for name, codes in (("row", i), ("column", j)):
            unknown = int((codes < 0).sum())
            if self.unseen == "prior" and len(codes) >= _MANY and unknown > len(codes) / 2:
                warn(
                    f"the {name} ids of {unknown} of {len(codes)} pairs were not seen in fit and are predicted as "
                    f"average ones; if these are folds of ratings sorted by {name}, shuffle them: KFold(shuffle=True)"
                )
        return i, j

    def _predict(
        self,
        model: CompletionModel,
        i: Codes,
        j: Codes,
        return_std: bool,
        times: Floats | None = None,
    ) -> Floats | tuple[Floats, Floats]:
        if return_std:
            self._check_error_bars("return_std")
        mean, std = model.predict(
            i, j, with_std=return_std, clip=self.clip, unseen=self.unseen, times=times
        )
        return mean if std is None else (mean, std)

    def _check_error_bars(self, what: str) -> None:
        if self.model_.inference == "point":
            raise ValueError(
                f"{what} needs inference='variational': a point estimate has no error bars"
            )

    def _locate(self, ids: Any, side: str) -> Codes:
        return self.model_.locate(ids, side, self.unseen)

    def _columns_of(self, X: Any, n: int = 2) -> list[Any] | None:
        """The columns of a data frame that have the names of the fit."""
        if self.frame_ is None or frame_kind(X) is None:
            return None
        given = {str(name): name for name in names_of(X)}
        if (
            self._implicit
            and self.names_[2] not in given
            and (len(given) == 2 or self.names_[2] == "weight")
        ):
            n = 2  # pairs of weight 1, as those of the fit were
        known = self.names_[:n]
        return [given[name] for name in known] if set(known) <= set(given) else None

    def _later(
        self, X: Any, y: Any = None, *, columns: Any = None, matrix: bool | None = None
    ) -> Entries:
        """Entries for a model: the columns of a data frame are those with the names of the fit, if it has them."""
        if columns is None:
            columns = self._columns_of(X, 3 if y is None else 2)
        return read_entries(X, y, columns=columns, matrix=matrix, implicit=self._implicit)

    def recommend(
        self,
        ids: Any = None,
        k: int = 10,
        *,
        candidates: Any = None,
        exclude_seen: bool = True,
        by: str = "mean",
        seed: int | None = None,
    ) -> Any:
        """The columns with the largest predictions for some rows.

        Args:
            ids: one row id, a sequence of them, or None for all rows; one that was never seen gets what an average row
                would, or nothing, with a warning, if ``unseen`` is ``nan``.
            k: how many columns for each row.
            candidates: the ids of the columns to choose from; all if not given.
            exclude_seen: whether columns in which the row has a value are left out.
            by: ``mean``; ``upper``, the 95 % quantile of the expected value, which favours what is not known yet; or
                ``sample``, one draw from the posterior (Thompson sampling).
            seed: of the draw; a new one every time if not given.

        Returns:
            A data frame of row id, column id and ``prediction`` (not clipped), best first within each row; fewer than
            ``k`` of a row if there are no more. It is of the library of the data frame that was fitted, else of polars.
        """
        model = self._fitted()
        rows = model.row_ids.labels if ids is None else [ids] if np.ndim(ids) == 0 else ids
        i = np.arange(len(rows)) if ids is None else self._locate(rows, "row")
        if self.unseen == "nan" and (i < 0).any():
            unknown, rows = (
                np.asarray(rows, dtype=object)[i < 0],
                np.asarray(rows, dtype=object)[i >= 0],
            )
            warn(
                f"{counted(len(unknown), 'row id was', 'row ids were')} not seen in fit and get no list "
                f"(unseen='nan'), the first is {unknown[0]!r}"
            )
            i = i[i >= 0]
        return self._best(model, i, rows, k, candidates, exclude_seen, by, seed)

    def _best(
        self,
        model: CompletionModel,
        i: Codes,
        rows: Any,
        k: int,
        candidates: Any,
        exclude_seen: bool,
        by: str,
        seed: int | None,
    ) -> Any:
        """Lists for rows, with their ids if there are any."""
        k, by = validation.integer(1)("k", k), validation.choice(*BY)("by", by)
        if by != "mean":
            self._check_error_bars(f"by={by!r}")
        chosen = None
        if candidates is not None:
            chosen = np.unique(self._locate(candidates, "column"))
            chosen = chosen[chosen >= 0]
            if not len(chosen):
                raise ValueError(
                    "none of the candidates was seen in fit, there is nothing to recommend"
                )
        place, columns, scores = best_columns(
            model,
            i,
            k,
            candidates=chosen,
            exclude_seen=exclude_seen,
            by=by,
            seed=validation.draw_seed(seed),
        )
        owner = {} if rows is None else {self.names_[0]: np.asarray(rows)[place]}
        return self._output(
            owner | {self.names_[1]: model.column_ids.decode(columns), "prediction": scores}
        )

    def _output(self, columns: dict[str, Any]) -> Any:
        return make_frame(self.frame_ or "polars", columns)

    def recommend_new(
        self,
        ratings: Any,
        k: int = 10,
        *,
        candidates: Any = None,
        exclude_seen: bool = True,
        by: str = "mean",
        seed: int | None = None,
    ) -> Any:
        """Recommend to rows that were not in the fit, from a few of their values; the model does not change.

        ``ratings`` are ``{column id: value}`` of one new row, or a data frame of entries as for ``fit`` of several;
        unknown columns are left out, with a warning. The other arguments are those of ``recommend``, whose frame this
        returns; of one new row without the column of row ids.
        """
        self._fitted()
        if isinstance(ratings, Mapping):
            model, _ = self._folded(None, list(ratings), numbers(list(ratings.values()), "ratings"))
            return self._best(
                model, np.zeros(1, dtype=np.int64), None, k, candidates, exclude_seen, by, seed
            )
        entries = self._later(ratings)
        model, rows = self._folded(entries.rows, entries.columns, entries.values)
        return self._best(model, np.arange(len(rows)), rows, k, candidates, exclude_seen, by, seed)

    def _folded(self, rows: Any, columns: Any, values: Floats) -> tuple[CompletionModel, Any]:
        """A model of new rows, or of one without an id; columns that were not seen are left out, with a warning."""
        if not np.isfinite(values).all():
            raise ValueError(f"the values must be finite, got {values[~np.isfinite(values)][0]}")
        index, i = IdIndex.fit(np.zeros(len(values), dtype=np.int64) if rows is None else rows)
        known = (j := self._locate(columns, "column")) >= 0
        if not known.all():
            first = np.asarray(columns, dtype=object)[~known][0]
            if not known.any():
                raise ValueError(
                    f"none of the rated column ids was seen in fit, the first is {first!r}: nothing is known"
                )
            unknown = counted(int((~known).sum()), "rated column id was", "rated column ids were")
            warn(f"{unknown} not seen in fit and left out, of {len(known)}; the first is {first!r}")
        i, j, values = merge(
            i[known], j[known], values[known], self.duplicates, (index, self.model_.column_ids)
        )
        return self.model_.with_new_rows(
            1 if rows is None else len(index), i, j, values
        ), index.labels

    def predict_new(
        self, rated: Any, values: Any, wanted: Any, *, return_std: bool = False
    ) -> Floats | tuple[Floats, Floats]:
        """Predict for a new row from a few of its values, without changing the model.

        Args:
            rated: the ids of the columns in which the row has values; unknown ones are left out, with a warning.
            values: these values.
            wanted: the ids of the columns to predict.
            return_std: whether standard deviations are returned as well.

        Returns:
            The predictions, or predictions and standard deviations.
        """
        self._fitted()
        given = numbers(values, "values")
        if len(rated) != len(given):
            raise ValueError(
                f"rated and values must have one length, got {len(rated)} and {len(given)}"
            )
        model, _ = self._folded(None, rated, given)
        j = self._locate(wanted, "column")
        return self._predict(model, np.zeros_like(j), j, return_std)

    def similar(self, ids: Any, k: int = 10, *, of: str = "columns") -> Any:
        """The columns that are rated most like others: correlation of their predicted values, apart from level.

        Args:
            ids: one id, or a sequence of them.
            k: how many for each.
            of: ``columns`` or ``rows``.

        Returns:
            A data frame of the id, the ``similar`` id and the ``similarity``, best first.
        """
        model, k = self._fitted(), validation.integer(1)("k", k)
        side = ("rows", "columns").index(validation.choice("rows", "columns")("of", of))
        asked = [ids] if np.ndim(ids) == 0 else ids
        index = (model.row_ids, model.column_ids)[side]
        members = index.encode(asked)
        if (members < 0).any():
            unknown = np.asarray(asked, dtype=object)[members < 0]
            raise ValueError(
                f"{counted(len(unknown), f'{of[:-1]} id was', f'{of[:-1]} ids were')} not seen in fit, the first is "
                f"{unknown[0]!r}: there is nothing to compare"
            )
        place, found, similarity = most_similar(model, members, k, side=side)
        own = index.decode(members[place])
        return self._output(
            {self.names_[side]: own, "similar": index.decode(found), "similarity": similarity}
        )

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The coefficient of determination R² of predictions.

        With ``y``, or a data frame of entries, that of ``predict``. A matrix is taken row by row, and every row as a
        new one, so that cross-validation over its rows is honest: the values of a row are cut into five parts at
        random, and each part is predicted from the other four, as by ``predict_new``.

        Args:
            X: as for ``fit``.
            y: the values of pairs.
            sample_weight: a weight per pair.

        Returns:
            R², at most 1.
        """
        model = self._fitted()
        # rows of a matrix that was fitted, as scikit-learn's search hands them over, may be narrow
        matrix = y is None and (frame_kind(X) is None or not hasattr(self, "n_features_in_"))
        entries = self._later(X, y, matrix=matrix)
        if len(entries.values) < 2:
            raise ValueError(f"R² needs at least 2 values, got {len(entries.values)}")
        if entries.is_matrix:
            entries = entries.merged(
                self.duplicates
            )  # a pair given twice must not be held out and in the rest at once
            predicted = self._from_the_rest(entries)
        else:
            i, j = self._located(entries.rows, entries.columns)
            predicted, _ = model.predict(i, j, clip=self.clip, unseen=self.unseen)
        if n_unknown := int(np.isnan(predicted).sum()):
            raise ValueError(
                f"R² needs a prediction of every pair, got NaN for {n_unknown} of {len(predicted)}, of ids not seen in "
                "fit (unseen='nan'): leave these pairs out, or set unseen='prior'"
            )
        return float(r2_score(entries.values, predicted, sample_weight=sample_weight))

    def _from_the_rest(self, entries: Entries, parts: int = 5) -> Floats:
        """Predict entries of new rows, those of each part from the other parts of their row."""
        (_, i), j, values = (
            IdIndex.fit(entries.rows),
            self._locate(entries.columns, "column"),
            entries.values,
        )
        part, found = places(i, np.random.default_rng(0).random(len(i))) % parts, np.empty(len(i))
        for number in range(parts):
            held, rest = part == number, (part != number) & (j >= 0)
            model = self.model_.with_new_rows(int(i.max()) + 1, i[rest], j[rest], values[rest])
            found[held] = model.predict(i[held], j[held], clip=self.clip)[0]
        return found

    def partial_fit(
        self, X: Any, y: Any = None, *, columns: Any = None, matrix: bool | None = None
    ) -> MatrixCompletion:
        """Add new ratings, rows and columns; the first call fits, to a batch of any size (``variational``).

        A few new ratings change the rows and columns they touch, by one natural-gradient step. Each time the ratings
        have grown by 5 %, two full passes refine the posterior; when they have doubled, the factors are found anew.
        The rank stays. Within a batch ``duplicates`` decides as in ``fit``; a pair that was rated before is one more
        observation until the next full pass, then the rule decides. The arguments are those of ``fit``.

        Returns:
            This estimator.
        """
        if not hasattr(self, "model_"):
            entries = read_entries(X, y, columns=columns, matrix=matrix)
            # a variational fit keeps what the data do not speak of at its prior
            return self.fit_entries(
                entries, grows="rank" in self.get_params() and self.inference == "variational"
            )
        ridge = getattr(self, "best_ridge_", getattr(self, "ridge", None))
        settings = self._settings(rank=self.model_.posterior.rank, ridge=ridge)
        entries = self._later(X, y, columns=columns, matrix=matrix)
        if self.duplicates != "mean":  # the mean is taken over all that a pair ever had
            entries = entries.merged(self.duplicates)
        with threads(self.n_jobs):
            return self._adopt(
                self.model_.updated(entries.rows, entries.columns, entries.values, settings)
            )

    def fit_share(
        self,
        X: Any = None,
        y: Any = None,
        *,
        columns: Any = None,
        matrix: bool | None = None,
        process_group: Any = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> MatrixCompletion:
        """Fit the model to the shares of all processes of a group; every one of them must call this.

        The model is that of one process which is given all shares one after the other, to rounding, and the same on
        every process to the bit. Arguments are those of ``fit`` for the share of this process; X is None if it has
        none. ``process_group`` is a group of ``torch.distributed``, by default its default group. ``checkpoint`` is a
        file that keeps where the fit stands after every pass (``variational``); the same call resumes from it. It stays
        when the fit is done: remove it when the model is saved.
        """
        from fisherfold.completion.distributed_fit import fit_shared

        def read(group: Any) -> Entries | None:
            nothing = X is None or (y is not None and len(y) == 0)
            return None if nothing else read_entries(X, y, columns=columns, matrix=matrix)

        return fit_shared(self, read, process_group, checkpoint)

    def fit_file_share(
        self,
        path: str | Path,
        *,
        process_group: Any = None,
        checkpoint: str | os.PathLike[str] | None = None,
        **reading: Any,
    ) -> MatrixCompletion:
        """Fit the model to a file of which each process of a group reads a part.

        Args:
            path: a table with row ids, column ids and values: CSV, Parquet, or a folder of Parquet files.
            process_group: a group of ``torch.distributed``; its default group if not given.
            checkpoint: as for ``fit_share``.
            **reading: options of ``fisherfold.tables.readers.read_ratings``, such as ``columns``.

        Returns:
            This estimator.
        """
        from fisherfold.completion.distributed_fit import fit_shared
        from fisherfold.tables.readers import read_ratings

        def read(group: Any) -> Entries | None:
            table = read_ratings(path, part=(group.rank, group.size), **reading)
            names = (table.names[0], table.names[1], table.names[2])
            return (
                Entries(table.rows, table.columns, table.values, names, "polars")
                if len(table.values)
                else None
            )

        return fit_shared(self, read, process_group, checkpoint, file=path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model into a folder: ``model.safetensors`` and a readable ``model.json``; no pickle.

        Args:
            path: the folder; it is made if it does not exist.
        """
        arrays, meta = pack(self._fitted())
        params = validation.saved_parameters(self.get_params(deep=False))
        save_folder(
            path,
            KIND,
            arrays,
            meta | {"estimator": type(self).__name__, "params": params} | self._learnt(),
        )

    def _learnt(self) -> dict[str, Any]:
        """What a file keeps besides the model and the parameters."""
        return {"names": list(self.names_), "frame": self.frame_}

    def _recall(self, meta: Mapping[str, Any]) -> None:
        names, frame = meta.get("names"), meta.get("frame")
        if not (
            isinstance(names, list)
            and len(names) == 3
            and all(isinstance(name, str) for name in names)
        ):
            raise ValueError(f"names are {str(names)[:40]!r}, three names are expected")
        if frame is not None and frame not in FRAMES:
            raise ValueError(f"frame is {str(frame)[:40]!r}")
        self._remember(Entries([], [], np.zeros(0), (names[0], names[1], names[2]), frame))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | None = None) -> MatrixCompletion:
        """Read a model that ``save`` wrote.

        Args:
            path: the folder.
            device: where the model is to compute.

        Returns:
            The fitted estimator.
        """
        arrays, meta = load_folder(path, KIND)
        if meta.get("estimator") == "ImplicitCompletion":
            from fisherfold.completion.implicit import ImplicitCompletion

            cls = ImplicitCompletion
        with sound(model_file(path), KIND):
            model = unpack(arrays, meta, str(validation.torch_device()("device", device)))
            params = validation.loaded_parameters(
                meta.get("params"), CHECKS | cls._checks | SEARCH_CHECKS
            )
            params = {"rank": model.posterior.rank} | params
            estimator = cls(
                **{name: value for name, value in params.items() if name in cls._get_param_names()}
            )
            estimator.device = device
            estimator._recall(meta)
        return estimator._adopt(model)

    def __getstate__(self) -> dict[str, Any]:
        """Plain arrays and numbers, so that any pickler (mlflow, skops, joblib) can take them."""
        state = dict(super().__getstate__())
        if (model := state.pop("model_", None)) is not None:
            arrays, meta = pack(model)
            state |= {"model_arrays_": arrays, "model_meta_": meta}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays, meta = state.pop("model_arrays_", None), state.pop("model_meta_", None)
        super().__setstate__(state)
        if arrays is not None:
            self._adopt(unpack(arrays, meta))

    categories_ = property(lambda self: self._fitted().categories)
    noise_ = property(
        lambda self: float(self._fitted().scale * self.model_.posterior.noise_precision**-0.5)
    )
    offset_ = property(lambda self: float(self._fitted().center))
    row_ids_ = property(lambda self: self._fitted().row_ids.labels)
    column_ids_ = property(lambda self: self._fitted().column_ids.labels)
    row_factors_ = property(lambda self: factors(self._fitted(), 0)[0])
    column_factors_ = property(lambda self: factors(self._fitted(), 1)[0])
    row_offsets_ = property(lambda self: factors(self._fitted(), 0)[1])
    column_offsets_ = property(lambda self: factors(self._fitted(), 1)[1])
    row_covariances_ = property(lambda self: factors(self._fitted(), 0)[2])
    column_covariances_ = property(lambda self: factors(self._fitted(), 1)[2])

    def inner_product_vectors(self) -> tuple[Floats, Floats]:
        """Vectors for a nearest-neighbour index: their inner products are the predictions, offsets included.

        Returns:
            One float32 vector per row and one per column, in the order of ``row_ids_`` and ``column_ids_``.
        """
        return inner_product_vectors(self._fitted())

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        tags.input_tags.allow_nan = True
        tags.target_tags.required = False
        tags.regressor_tags.poor_score = True
        return tags
