"""Fill a table with holes: ratings, sensor readings, assays.

    x_ij ≈ g + b_i + c_j + ⟨u_i, v_j⟩

``MatrixCompletion`` is the scikit-learn face of two ways to fit this: ``inference="variational"`` (both sides keep a
Gaussian posterior, everything is learnt) and ``inference="point"`` (the paper's problem on the Grassmann manifold).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from fisherfold.completion.fit import FitOptions, fit_model, merged, point_refit
from fisherfold.completion.io import load_completion, save_completion
from fisherfold.completion.model import UNSEEN, CompletionModel, Floats
from fisherfold.completion.partial_fit import take_in
from fisherfold.completion.point_solvers import SOLVERS
from fisherfold.completion.shared import SharedFits
from fisherfold.files import sound
from fisherfold.plain import counted
from fisherfold.tables import parameters
from fisherfold.tables.checkpoint import all_or_nothing
from fisherfold.tables.ids import IdIndex, Ids, id_array
from fisherfold.tables.inputs import Observations, id_names, numbers, observations, pairs
from fisherfold.threads import threads

OFFSETS = ("both", "rows", "columns", "global", "none")


class MatrixCompletion(SharedFits, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Low-rank completion of a partially observed matrix, with error bars and nothing to tune.

    The input of ``fit`` is a table of (row id, column id) pairs with their values; or a sparse matrix (stored zeros are
    data), an array with NaN or a wide data frame; or a long data frame of three columns. Ids are any hashable objects.

    Rules: a pair given twice is merged by ``duplicates``; a row or column without ratings is predicted like an id never
    seen, and that as an average row, an average column, unless ``unseen`` says otherwise.

    Args:
        rank: the number of factors.
        ridge: the prior precision of all coefficients in units of the noise precision (imaginary ratings of value
            zero); learnt if None, which is best for ``variational``.
        offsets: ``both`` (rows, columns and the mean), ``rows``, ``columns``, ``global`` (the mean only) or ``none``.
        inference: ``variational`` or ``point``.
        solver: of ``point``. ``auto`` penalises both factors and chooses the ridge on held-out values. ``rngd``,
            ``rngd-vr``, ``rcg`` and ``rgd`` solve the paper's problem as the methods of ``minimize`` do, on what the
            offsets leave: a ridge on the coefficients of an orthonormal frame, none if ``ridge`` is None, and a rank
            less than both sides of the table.
        rated_sets: whether the mere set of rated columns informs about a row, and of rows about a column
            (``variational`` only). Turn it off when entries are missing by design.
        max_iter: the largest number of passes over the data.
        tol: stop when a pass raises the bound by less than this per rating (``variational``), or lowers the objective
            by less than this share of it (``point``; over five iterations for the solvers of the paper).
        clip: whether predictions are clipped to the range of the observed values.
        unseen: for ids not seen in ``fit``: ``prior``, ``nan`` or ``error``.
        duplicates: for pairs given twice: ``mean``, ``last``, ``sum`` or ``error``.
        random_state: seed of the starting point.
        device: where to compute, for example ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``; with a warning, float64 where a value far from all others rules their scale.
        n_jobs: the number of threads of the fit; None leaves it to torch, -1 takes all cores.
        verbose: whether to show a progress bar.
        on_interrupt: at Ctrl-C ``raise``, or ``return`` the model so far; before the first pass that is the starting
            point, or the mean of all values. While the table is still being sorted, Ctrl-C raises.
        checkpoint: a file that keeps where the fit stands after every pass. A fit that was killed goes on from it to
            the same bits when it is started again with the same data and parameters (``max_iter`` may grow); the file
            is removed when the fit is done. Each fit needs a file of its own.

    Attributes:
        model_: the fitted model (ids, posterior, scale).
        trace_: one record per pass.
        n_iter_: the number of passes.
        converged_: whether the tolerance was reached.
        interrupted_: whether the fit was ended by Ctrl-C.
        feature_names_in_: the names of the row ids and the column ids, if a data frame of them was fitted; data frames
            of pairs must then have the same.
        n_duplicates_: how many entries were merged into another one.
        noise_: the standard deviation of an ordinary value around its prediction.

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
        self, rank: int = 10, *, ridge: float | None = None, offsets: str = "both", inference: str = "variational",
        solver: str = "auto", rated_sets: bool = True, max_iter: int = 50, tol: float = 3e-4, clip: bool = True,
        unseen: str = "prior", duplicates: str = "mean", random_state: int | None = 0, device: str | None = None,
        dtype: str = "float32", n_jobs: int | None = None, verbose: bool = False, on_interrupt: str = "raise",
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
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
        self.on_interrupt = on_interrupt
        self.checkpoint = checkpoint

    @all_or_nothing
    def fit(self, X: Any, y: Any = None) -> MatrixCompletion:
        """Fit the model.

        Args:
            X: (n, 2) ids with ``y``, or a matrix with holes, or a long data frame; see the class.
            y: the values of the pairs.

        Returns:
            This estimator.
        """
        self._validate()
        found = observations(X, y)
        for name in ("n_features_in_", "feature_names_in_"):
            self.__dict__.pop(name, None)
        if not found.is_table:
            self.n_features_in_ = 2
            if (names := id_names(X)) is not None:
                self.feature_names_in_ = np.array(names, dtype=object)
        return self.fit_observations(found)

    def fit_observations(self, found: Observations) -> MatrixCompletion:
        """Fit the model to entries that were read already, for example from a file.

        Args:
            found: the observed entries.

        Returns:
            This estimator.
        """
        self._validate()
        return self._fit(found, self.rank, self.ridge)

    def _fit(self, found: Observations, rank: int, ridge: float | None) -> MatrixCompletion:
        model, interrupted = fit_model(found, self._options(rank, ridge))
        return self._adopt(model, interrupted)

    def _adopt(self, model: CompletionModel, interrupted: bool) -> MatrixCompletion:
        """Make a fitted model this estimator's own."""
        self.model_ = model
        self.trace_, self.n_iter_ = model.posterior.trace, len(model.posterior.trace)
        self.converged_, self.interrupted_ = model.posterior.converged, interrupted
        self.n_duplicates_ = model.n_merged
        return self

    def _options(self, rank: int, ridge: float | None) -> FitOptions:
        return FitOptions(
            rank=parameters.whole("rank", rank, 1), ridge=None if ridge is None else parameters.number("ridge", ridge),
            offsets=str(self.offsets), inference=str(self.inference), solver=str(self.solver),
            rated_sets=bool(self.rated_sets), max_iter=parameters.whole("max_iter", self.max_iter, 1),
            tol=parameters.number("tol", self.tol),
            duplicates=str(self.duplicates), seed=parameters.seed_of(self.random_state),
            device=str(parameters.device_of(self.device)), dtype=parameters.dtype_of(self.dtype),
            n_jobs=parameters.jobs(self.n_jobs), verbose=parameters.loudness(self.verbose),
            return_on_interrupt=self.on_interrupt == "return", checkpoint=self.checkpoint,
            may_grow=getattr(self, "_grows", False),
        )  # fmt: skip

    def _validate(self) -> None:
        """Look at the parameters before any data is touched."""
        parameters.whole("max_iter", self.max_iter, 1)
        parameters.number("tol", self.tol)
        for name, allowed in (
            ("offsets", OFFSETS), ("inference", ("variational", "point")), ("solver", ("auto", *SOLVERS)),
            ("unseen", UNSEEN), ("duplicates", ("mean", "last", "sum", "error")), ("on_interrupt", ("raise", "return")),
        ):  # fmt: skip
            parameters.choice(name, getattr(self, name), allowed)
        if self.inference == "variational" and self.solver != "auto":
            raise ValueError(
                f"solver must be 'auto' for inference='variational', got {self.solver!r}; 'point' takes others"
            )
        for name in ("rated_sets", "clip"):
            parameters.flag(name, getattr(self, name))
        parameters.dtype_of(self.dtype)
        parameters.jobs(self.n_jobs)
        parameters.loudness(self.verbose)
        parameters.check_seed(self.random_state)
        parameters.check_path("checkpoint", self.checkpoint)
        self._validate_model()

    def _validate_model(self) -> None:
        parameters.whole("rank", self.rank, 1)
        self._check_ridge("ridge", self.ridge)

    def _check_ridge(self, name: str, ridge: Any) -> None:
        if ridge is None:
            return
        if parameters.number(name, ridge, "None or a finite number of at least 0") == 0 and self.inference != "point":
            raise ValueError(f"{name} must be positive for inference='variational', got 0; None lets it be learnt")

    @property
    def noise_(self) -> float:
        """The standard deviation of an ordinary value around its prediction."""
        return float(self.model_.scale * self.model_.posterior.noise_precision**-0.5)

    def predict(self, X: Any, *, return_std: bool = False) -> Floats | tuple[Floats, Floats]:
        """Predict entries.

        Args:
            X: (n, 2) row and column ids.
            return_std: whether the predictive standard deviations are returned as well (``variational`` only).

        Returns:
            The predictions, or predictions and standard deviations.
        """
        check_is_fitted(self, "model_")
        rows, columns = pairs(X)
        self._check_names(X)
        return self._predict(self.model_, *self.model_.locate(rows, columns, self.unseen), return_std)

    def _predict(
        self, model: CompletionModel, i: torch.Tensor, j: torch.Tensor, return_std: bool
    ) -> Floats | tuple[Floats, Floats]:
        if return_std and model.inference == "point":
            raise ValueError("return_std needs inference='variational': a point estimate has no error bars")
        mean, std = model.predict(i, j, with_std=return_std, clip=self.clip, unseen=self.unseen)
        return mean if std is None else (mean, std)

    def _check_names(self, X: Any) -> None:
        """Refuse a data frame whose columns stand for others than those of the fit: rows and columns exchanged."""
        known, names = getattr(self, "feature_names_in_", None), id_names(X)
        if known is not None and names is not None and names != known.tolist():
            raise ValueError(
                "The feature names should match those that were passed during fit: the columns of ids were "
                f"{known.tolist()}, got {names}"
            )

    def recommend(self, row_id: Hashable, k: int = 10, *, exclude_seen: bool = True) -> tuple[Ids, Floats]:
        """The columns with the largest predictions for a row.

        Args:
            row_id: the row; one that was never seen gets what an average row would.
            k: how many columns.
            exclude_seen: whether columns in which the row has a value are left out.

        Returns:
            Column ids and predictions (not clipped), best first; fewer than ``k`` if there are no more.
        """
        check_is_fitted(self, "model_")
        k = parameters.whole("k", k, 1)
        rows = id_array([row_id], "row")
        i, _ = self.model_.locate(rows, self.model_.column_ids.labels[:0], self.unseen)
        return self._top(self.model_, int(i[0]), k, exclude_seen)

    def _top(self, model: CompletionModel, row: int, k: int, exclude_seen: bool) -> tuple[Ids, Floats]:
        columns = torch.arange(len(model.column_ids), device=model.device)
        scores, _ = model.predict(torch.full_like(columns, row), columns, clip=False)
        if exclude_seen and row >= 0:
            scores[model.seen_by(row).numpy()] = -np.inf
        best = np.argsort(-scores, kind="stable")[:k]
        best = best[np.isfinite(scores[best])]
        return model.column_ids.labels[best], scores[best]

    def predict_new(
        self, rated: Any, values: Any, wanted: Any, *, return_std: bool = False
    ) -> Floats | tuple[Floats, Floats]:
        """Predict for a new row from a few of its values, without changing the model (fold-in).

        Args:
            rated: the ids of the columns in which the row has values; unknown ones are left out, and ``duplicates``
                decides about one given twice.
            values: these values.
            wanted: the ids of the columns to predict.
            return_std: whether standard deviations are returned as well.

        Returns:
            The predictions, or predictions and standard deviations.

        Raises:
            ValueError: if the ids and values do not fit together or a value is not finite.
        """
        check_is_fitted(self, "model_")
        columns, given = id_array(rated, "column"), numbers(values, "values")
        if len(columns) != len(given) or not np.isfinite(given).all():
            raise ValueError(
                f"rated and values must have one length and finite values, got {counted(len(columns), 'id')} "
                f"and {given!r}"
            )
        if len(given):
            row = id_array(["new"] * len(given), "row")
            found = merged(Observations(row, columns, given, row, columns), self.duplicates)
            columns, given = found.columns, found.values
        model = self.model_.of_new_row(columns, given, self.unseen)
        _, j = model.locate(model.row_ids.labels[:0], id_array(wanted, "column"), self.unseen)
        return self._predict(model, torch.zeros_like(j), j, return_std)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The coefficient of determination R² of predictions.

        With ``y``, or a long data frame, that of ``predict``. A matrix with holes alone is taken row by row, and every
        row as a new one, so that cross-validation over its rows is honest: the values of a row are cut into five parts
        at random, and each part is predicted from the other four (fold-in, as by ``predict_new``). To hold out entries
        of known rows, score pairs, or search with ``MatrixCompletionCV``.

        Args:
            X: as for ``fit``.
            y: the values of pairs.
            sample_weight: a weight per pair.

        Returns:
            R², at most 1.

        Raises:
            ValueError: if there are fewer than two values, weights without pairs, or a pair without a prediction.
        """
        if y is not None:
            return self._r2(y, self.predict(X), sample_weight)
        check_is_fitted(self, "model_")
        if sample_weight is not None:
            raise ValueError("sample_weight needs pairs of ids with y, got X alone")
        found, model = observations(X), self.model_
        if found.is_table:  # a pair given twice must not be held out and in the rest at once
            found = merged(found, self.duplicates)
        else:
            self._check_names(X)
        if len(found.values) < 2:
            raise ValueError(f"R² needs at least 2 values, got {len(found.values)}")
        i, j = model.locate(found.rows[: 0 if found.is_table else None], found.columns, self.unseen)
        if found.is_table:
            rows = IdIndex(found.rows).numbers(found.rows)
            predicted = model.from_the_rest(rows, j.cpu().numpy(), found.values, parts=5, clip=self.clip)
        else:
            predicted, _ = model.predict(i, j, clip=self.clip, unseen=self.unseen)
        return self._r2(found.values, predicted)

    def _r2(self, values: Any, predicted: Any, weight: Any = None) -> float:
        if n_unknown := int(np.isnan(predicted).sum()):
            raise ValueError(
                f"R² needs a prediction of every pair, got NaN for {n_unknown} of {len(predicted)}, of ids not seen in "
                "fit (unseen='nan'): leave these pairs out, or set unseen='prior'"
            )
        return float(r2_score(values, predicted, sample_weight=weight))

    def partial_fit(self, X: Any, y: Any = None) -> MatrixCompletion:
        """Add new ratings, rows and columns; the first call fits, to a batch of any size (``variational``).

        A few new ratings change the rows and columns they touch, by one natural-gradient step that adds their evidence.
        When a twentieth more ratings have come in than at the last look back, two passes go over all of them from where
        the posterior stands (``variational``), and when as many have come as there were at the last start, the factors
        are found anew. At a cost per rating that does not grow, a stream ends where a fit would; a point estimate
        trails it between two starts. The rank stays. Within a batch ``duplicates`` decides as in ``fit``; a pair that
        was rated before is one more observation until the next look back, then it decides as well (``error``: the
        mean), and what was replaced is forgotten. A point estimate needs a first batch of at least ``rank`` rows and
        columns.

        Args:
            X: as for ``fit``.
            y: as for ``fit``.

        Returns:
            This estimator.
        """
        if not hasattr(self, "model_"):
            self._grows = True
            try:
                return self.fit(X, y)
            finally:
                del self._grows
        self._validate()
        found, options = observations(X, y), self._options(self.model_.posterior.rank, self._ridge())
        if not found.is_table:
            self._check_names(X)
        if self.duplicates != "mean":  # the mean is taken over all that a pair ever had
            found = merged(found, self.duplicates)
        model = copy.copy(self.model_)
        with threads(options.n_jobs):
            take_in(
                model, found, refit=point_refit(options), duplicates=self.duplicates, centred=self.offsets != "none",
                max_iter=options.max_iter, tol=options.tol, seed=options.seed,
            )  # fmt: skip
        return self._adopt(model, self.interrupted_)

    def _ridge(self) -> float | None:
        """The ridge of a point estimate that starts anew."""
        return self.ridge

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model into a folder: ``model.safetensors`` and a readable ``model.json``; no pickle.

        Args:
            path: the folder; it is made if it does not exist.
        """
        check_is_fitted(self, "model_")
        self._validate()  # what was set since the fit: a file with it could not be read
        save_completion(path, self.model_, type(self).__name__, self.get_params(deep=False), self._learnt())

    def _learnt(self) -> dict[str, Any]:
        """What a file keeps besides the model and the parameters."""
        names = getattr(self, "feature_names_in_", None)
        return {} if names is None else {"feature_names": names.tolist()}

    def _recall(self, learnt: dict[str, Any]) -> None:
        if (names := learnt.get("feature_names")) is not None:
            if not (isinstance(names, list) and len(names) == 2 and all(isinstance(name, str) for name in names)):
                raise ValueError(f"feature_names are {str(names)[:40]!r}, two names are expected")
            self.feature_names_in_ = np.array(names, dtype=object)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MatrixCompletion:
        """Read a model that ``save`` wrote.

        Args:
            path: the folder.

        Returns:
            The fitted estimator.
        """
        model, params, learnt = load_completion(path)
        known = cls._get_param_names()
        params = {"rank": model.posterior.rank, **params}
        estimator = cls(**{name: value for name, value in params.items() if name in known})
        with sound(path, "completion"):
            estimator._validate()
            estimator._recall(learnt)
        estimator.n_features_in_ = 2
        return estimator._adopt(model, False)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        tags.input_tags.allow_nan = True
        tags.target_tags.required = False
        tags.regressor_tags.poor_score = True
        return tags
