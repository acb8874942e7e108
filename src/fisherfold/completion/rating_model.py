"""Fill a table with holes: ratings, sensor readings, assays.

    x_ij ≈ g + b_i + c_j + ⟨u_i, v_j⟩

``MatrixCompletion`` is the scikit-learn face of two ways to fit this: ``inference="variational"`` (both sides keep a
Gaussian posterior, everything is learnt) and ``inference="point"`` (the paper's problem on the Grassmann manifold).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils import Tags

from fisherfold.completion.base import SHARED_CHECKS, CompletionBase
from fisherfold.completion.entries import Entries, Floats
from fisherfold.completion.events import Events
from fisherfold.completion.explain import Explanation, explain
from fisherfold.completion.inference.features import FeatureColumns, encode_features
from fisherfold.completion.inference.likelihoods import LIKELIHOODS
from fisherfold.completion.inference.rank import USUAL_RANK
from fisherfold.completion.model import Pairs
from fisherfold.completion.ratings import RULES, Triplets, places
from fisherfold.completion.training import (
    SOLVERS,
    Settings,
    SideInformation,
    extend_ids,
    fitted,
    merge_rule,
)
from fisherfold.completion.updating import updated, with_new_rows
from fisherfold.tables import validation
from fisherfold.tables.frames import columns_of, frame_kind, numbers
from fisherfold.tables.ids import IdIndex
from fisherfold.threads import threads
from fisherfold.warn import warn

CHECKS: dict[str, validation.Check] = SHARED_CHECKS | {
    "rank": validation.auto_or(validation.integer(1)),
    "ridge": validation.optional(validation.number(0)),
    "offsets": validation.choice("both", "rows", "columns", "global", "none"),
    "inference": validation.choice("variational", "point"),
    "solver": validation.choice("auto", *SOLVERS),
    "rated_sets": validation.flag(),
    "clip": validation.flag(),
    "duplicates": validation.choice(*RULES),
    "likelihood": validation.choice(*LIKELIHOODS),
}


class RatingModel(RegressorMixin, CompletionBase):  # type: ignore[misc]
    """A fitted model of ratings: besides what every model serves, intervals, probabilities and R²."""

    clip: bool
    likelihood: str

    @property
    def _clips(self) -> bool:  # type: ignore[override]
        return self.clip

    @property
    def merge_rule(self) -> str:
        """What becomes of pairs given twice: each of several categories is kept."""
        return merge_rule(self.duplicates, self.likelihood)

    @property
    def categories_(self) -> Floats:
        """The values of ordered categories, ascending."""
        if (found := self._fitted().categories) is None:
            raise AttributeError("categories_ needs likelihood='ordered' or 'binary'")
        return found

    @property
    def rank_(self) -> int:
        """The number of factors."""
        return self._fitted().posterior.rank

    @property
    def noise_(self) -> float:
        """The standard deviation of an ordinary value around its prediction."""
        return float(self._fitted().scale * self.model_.posterior.noise_precision**-0.5)

    def predict_proba(
        self, X: Any, *, time: Any = None, row_features: Any = None, column_features: Any = None
    ) -> Floats:
        """The probability of each category, for ``likelihood="ordered"`` or ``"binary"``.

        Args:
            X: (n, 2) row and column ids.
            time: as for ``predict``.
            row_features: as for ``predict``.
            column_features: as for ``predict``.

        Returns:
            One row per pair, one column per entry of ``categories_``.
        """
        if self._fitted().posterior.ordinal is None:
            raise ValueError("predict_proba needs likelihood='ordered' or 'binary'")
        pairs = self._knowing(row_features, column_features)._pairs(X, time)
        return self._hide_unseen(pairs, pairs.probabilities())

    def predict_interval(
        self,
        X: Any,
        coverage: float = 0.9,
        *,
        time: Any = None,
        row_features: Any = None,
        column_features: Any = None,
    ) -> tuple[Floats, Floats]:
        """Intervals that hold a new value with a given probability, within the range or the steps of the scale.

        Args:
            X: (n, 2) row and column ids.
            coverage: the probability, between 0 and 1.
            time: as for ``predict``.
            row_features: as for ``predict``.
            column_features: as for ``predict``.

        Returns:
            Lower and upper ends.
        """
        self._fitted()
        pairs = self._knowing(row_features, column_features)._pairs(X, time)
        return self._intervals(pairs, coverage)

    def predict_new_interval(
        self, rated: Any, values: Any, wanted: Any, coverage: float = 0.9, *, features: Any = None
    ) -> tuple[Floats, Floats]:
        """Intervals that hold new values of a new row with a given probability.

        Args:
            rated: the ids of the columns in which the row has values, as for ``predict_new``.
            values: these values.
            wanted: the ids of the columns whose intervals are wanted.
            coverage: the probability, between 0 and 1.
            features: of the row, as for ``recommend_new``.

        Returns:
            Lower and upper ends, as of ``predict_interval``.
        """
        self._fitted()
        model, _, _ = self._folded(None, rated, numbers(values, "values"), features)
        j = self._locate(wanted, "column")
        return self._intervals(model.pairs(np.zeros_like(j), j), coverage)

    def _intervals(self, pairs: Pairs, coverage: float) -> tuple[Floats, Floats]:
        if not 0 < coverage < 1:
            raise ValueError(f"coverage must lie between 0 and 1, got {coverage!r}")
        self._check_error_bars("predict_interval")
        low, high = pairs.intervals(coverage, clip=self.clip)
        return self._hide_unseen(pairs, low), self._hide_unseen(pairs, high)

    def explain(self, row: Any, column: Any, k: int | None = 10, *, features: Any = None) -> Any:
        """The ratings of a row that moved one of its predictions most, for ``likelihood="gaussian"``.

        Given the columns, a prediction is linear in the ratings of the row: the share of each is how
        far it lies from what was expected of it, times what it tells of the column. All shares
        (``k=None``) and the prior part (offsets, features, the mere set of rated columns) sum to the
        prediction before it is clipped.

        Args:
            row: a row id of the fit, or ``{column id: value}`` of a new row.
            column: the id of the column that is predicted.
            k: how many ratings; None for all.
            features: of a new row, ``{name: value}``, as for ``recommend_new``.

        Returns:
            A data frame, largest share first: column id, ``value`` of the rating and its ``share``
            in units of the values; the same in every line are ``prior`` and ``prediction``.

        Raises:
            ValueError: if an id was not seen in the fit, or the model is not a Gaussian one.
        """
        found = self._explanation(row, column, features)
        k = len(found.shares) if k is None else validation.integer(1)("k", k)
        best = np.argsort(-np.abs(found.shares), kind="stable")[:k]
        ids = self.model_.column_ids.decode(found.columns[best])
        parts = {"value": found.values[best], "share": found.shares[best]}
        whole = {"prior": found.prior, "prediction": found.prediction}
        same = {name: np.full(len(best), each) for name, each in whole.items()}
        return self._output({self.names_[1]: ids} | parts | same)

    def _explanation(self, row: Any, column: Any, features: Any) -> Explanation:
        """The parts of a prediction."""
        model = self._fitted()
        j = int(model.locate([column], "column", "error")[0])
        if not isinstance(row, Mapping):
            if features is not None:
                raise ValueError("features are for a new row, given as {column id: value}")
            return explain(model, int(model.locate([row], "row", "error")[0]), j)
        values = numbers(list(row.values()), "the ratings of row")
        folded, _, table = self._folded(None, list(row), values, features)
        return explain(folded, 0, j, fit=model, features=table)

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
        entries = self._read_more(X, y, matrix=matrix)
        if len(entries.values) < 2:
            raise ValueError(f"R² needs at least 2 values, got {len(entries.values)}")
        if entries.is_matrix:
            # a pair given twice must not be held out and in the rest at once
            entries = entries.merged(self.duplicates)
            predicted = self._from_the_rest(entries)
        else:
            pairs = model.pairs(*self._located(entries.rows, entries.columns))
            predicted = self._hide_unseen(pairs, pairs.predict(clip=self.clip))
        if n_unknown := int(np.isnan(predicted).sum()):
            raise ValueError(
                f"R² needs a prediction of every pair, got NaN for {n_unknown} of {len(predicted)}, of ids not seen in "
                "fit (unseen='nan'): leave these pairs out, or set unseen='prior'"
            )
        return float(r2_score(entries.values, predicted, sample_weight=sample_weight))

    def _from_the_rest(self, entries: Entries, parts: int = 5) -> Floats:
        """Predict entries of new rows, those of each part from the other parts of their row."""
        _, i = IdIndex.fit(entries.rows)
        j, values = self._locate(entries.columns, "column"), entries.values
        part = places(i, np.random.default_rng(0).random(len(i))) % parts
        found = np.empty(len(i))
        for number in range(parts):
            held = part == number
            rest = ~held & (j >= 0)
            given = Triplets(i[rest], j[rest], values[rest]).merged("keep")
            model = with_new_rows(self.model_, int(i.max()) + 1, given)
            found[held] = model.pairs(i[held], j[held]).predict(clip=self.clip)
        return found

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags


class MatrixCompletion(RatingModel):
    """Low-rank completion of a partially observed matrix, with error bars and nothing to tune.

    ``fit`` takes pairs of ids with values, a data frame of entries, or a matrix with holes. Ids are integers or text;
    7 and ``"7"`` are one id.

    Args:
        rank: the number of factors; less, with a warning, where the table is smaller. ``auto`` finds
            it on held-out ratings before they are fitted too (``variational``, in one process, and
            from 1,000 ratings on; 10 or what the table allows otherwise).
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
        rank: int | str = "auto",
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
    ) -> MatrixCompletion:
        """Fit the model.

        Args:
            X: (n, 2) ids with ``y``; or a data frame of entries; or a matrix with holes (sparse, or NaN).
            y: the values of the pairs.
            columns: the row id, column id and value columns of a data frame whose names are not the usual ones.
            matrix: True says that X is a matrix where it could be entries too.
            row_features: what is known of the rows: a data frame with ids in a column or its index, or a pair (ids,
                matrix). Ids without ratings can be predicted from their features; ids without features are average.
            column_features: the same for the columns.
            time: when each value was observed, as numbers (seconds) or dates, or the name of a column of X: rows then
                drift from day to day, columns over longer periods.
            sample_weight: the importance of each value, or the name of a column: its log likelihood is multiplied by
                it, so that 2 counts as two ratings, 0.1 as a tenth of one, and 0 is left out. Nothing is rescaled.
            noise_scale: the standard deviation of each value in units of that of an ordinary one, where measurements
                are of known precision; or the name of a column.
            ids: a key per entry, or the name of a column: ``partial_fit`` then leaves out entries that come again.

        Returns:
            This estimator.
        """
        entries = self._read(X, y, columns=columns, matrix=matrix)
        entries = with_extras(X, entries, time, sample_weight, noise_scale, ids)
        return self.fit_entries(entries, side_information(entries, row_features, column_features))

    def fit_entries(
        self, entries: Entries, known: SideInformation | None = None, *, grows: bool = False
    ) -> MatrixCompletion:
        """Fit the model to what was read already, for example from a file; a table that grows gets the full rank."""
        settings, known = self._settings(), known or SideInformation()
        check_possible(settings, entries, known)
        events = None
        if entries.keys is not None:
            events, fresh = Events.of(entries.keys, entries.values)
            entries = entries.at(np.flatnonzero(fresh))
        with threads(self.n_jobs):
            numbers, i, j = numbered(entries, known)
            if not grows:
                settings = settings.for_table(len(numbers[0]), len(numbers[1]))
            elif settings.rank is None:  # a first batch says little about it
                settings = replace(settings, rank=USUAL_RANK)
            model = fitted(settings, numbers, entries.numbered(i, j), known)
        model.events = events
        self._adopt(model, entries)
        return self

    def _settings(self, **chosen: Any) -> Settings:
        """The checked parameters of a fit."""
        given = validation.check_parameters(self.get_params(deep=False), self._checks)
        return settings_of(given | chosen, self.solver, self.random_state)

    def partial_fit(
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
    ) -> MatrixCompletion:
        """Add new ratings, rows and columns; the first call fits, to a batch of any size (``variational``).

        A few new ratings change the rows and columns they touch, by one natural-gradient step. Each time the ratings
        have grown by 5 %, two full passes refine the posterior; when by half, the factors are found anew.
        The rank stays until then, and after it if it was given. Within a batch ``duplicates`` decides as in ``fit``; a
        pair that was rated before is one more observation until the next full pass, then the rule decides. With ``ids``
        an entry that was delivered before is left out. Features are those of new ids, or new ones of known ids. The
        arguments are those of ``fit``.

        Returns:
            This estimator.
        """
        if not hasattr(self, "model_"):
            entries = self._read(X, y, columns=columns, matrix=matrix)
            entries = with_extras(X, entries, time, sample_weight, noise_scale, ids)
            known = side_information(entries, row_features, column_features)
            # a variational fit keeps what the data do not speak of at its prior
            return self.fit_entries(entries, known, grows=self.inference == "variational")
        entries = self._read_more(X, y, columns=columns, matrix=matrix)
        entries = with_extras(X, entries, time, sample_weight, noise_scale, ids)
        return self.update_entries(entries, row_features, column_features)

    def update_entries(
        self, entries: Entries, row_features: Any = None, column_features: Any = None
    ) -> MatrixCompletion:
        """Add ratings that were read already, for example from a file."""
        model = self._fitted()
        searched = self.rank == "auto" and self.inference == "variational"
        settings = self._settings(rank="auto" if searched else self.rank_)
        check_possible(settings, entries, SideInformation())
        features = self._encoded(row_features, "row"), self._encoded(column_features, "column")
        with threads(self.n_jobs):
            self._adopt(updated(model, entries, settings, features))
        return self

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
            return None if nothing else self._read(X, y, columns=columns, matrix=matrix)

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
            if not len(table.values):
                return None
            return Entries(table.rows, table.columns, table.values, names, "polars")

        return fit_shared(self, read, process_group, checkpoint, file=path)


def settings_of(given: dict[str, Any], solver: str, random_state: Any) -> Settings:
    """The settings of a fit from checked parameters."""
    if given["inference"] == "variational" and given["solver"] != "auto":
        raise ValueError(
            f"solver must be 'auto' for inference='variational', got {solver!r}; 'point' takes others"
        )
    if given["inference"] == "variational" and given["ridge"] == 0:
        raise ValueError(
            "ridge must be positive for inference='variational', got 0; None lets it be learnt"
        )
    given = given | {"seed": validation.draw_seed(random_state), "device": str(given["device"])}
    if given["rank"] == "auto":
        given["rank"] = None
    return Settings(**{name: given[name] for name in Settings.__dataclass_fields__})


def check_possible(settings: Settings, entries: Entries, known: SideInformation) -> None:
    """Check whether a kind of inference can use what was given."""
    extra = (entries.weights, entries.noise_scale, entries.times)
    given = known.given or any(part is not None for part in extra)
    if settings.inference == "point" and (settings.likelihood != "gaussian" or given):
        raise ValueError("features, time, weights and likelihood need inference='variational'")


def numbered(entries: Entries, known: SideInformation) -> tuple[tuple[IdIndex, IdIndex], Any, Any]:
    """The ids of entries and features, and the numbers of the entries."""
    row_ids, column_ids, i, j = entries.indexed()
    for index, given, side in zip(
        (row_ids, column_ids), known.features, ("row", "column"), strict=True
    ):
        if given is not None:
            _join(index, given, side)
    return (row_ids, column_ids), i, j


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
    extend_ids(index, features.ids, side)


def side_information(entries: Entries, row_features: Any, column_features: Any) -> SideInformation:
    """Features in the engine's form."""
    row, column = (
        None if given is None else encode_features(given, side, entries.names[k])
        for k, (given, side) in enumerate(((row_features, "row"), (column_features, "column")))
    )
    return SideInformation((row, column))


def with_extras(
    X: Any, entries: Entries, time: Any, sample_weight: Any, noise_scale: Any, ids: Any
) -> Entries:
    """Entries with times, weights, scales of noise and keys, any of which may be the name of a column of X."""
    given = {
        "time": time,
        "sample_weight": sample_weight,
        "noise_scale": noise_scale,
        "ids": ids,
    }
    found = {
        name: _column(X, value, name) if isinstance(value, str) else value
        for name, value in given.items()
    }
    return entries.with_extras(
        weights=found["sample_weight"],
        noise_scale=found["noise_scale"],
        times=found["time"],
        keys=found["ids"],
    )


def _column(X: Any, name: str, what: str) -> Any:
    if frame_kind(X) is None or name not in (found := columns_of(X)):
        raise ValueError(
            f"{what}={name!r} must name a column of the data frame X, or hold one entry per rating"
        )
    return found[name]
