"""Many small related regressions as a scikit-learn estimator."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fisherfold.distributed import Axis, current_group
from fisherfold.subspace.estimator import SHARED_CHECKS, Callback, TaskEstimator, all_or_nothing
from fisherfold.subspace.inputs import Rows, Scaling, distribute_rows, rows_of_process, task_ids
from fisherfold.subspace.marginal import SubspacePrior, noise_floor, posterior
from fisherfold.subspace.marginal_fit import NOISES, extend_noise, fit_marginal
from fisherfold.subspace.noise import continue_stalled, fit_noise
from fisherfold.subspace.predictive import TaskSpread, extend_spread, task_spread
from fisherfold.subspace.problem import choose_ridge, fit_point, point_coefficients
from fisherfold.subspace.tasks import TaskStatistics
from fisherfold.tables import validation
from fisherfold.tables.agreement import check_same_options
from fisherfold.tables.ids import IdIndex
from fisherfold.tables.validation import Check

if TYPE_CHECKING:
    import polars as pl

Array = NDArray[Any]
_OF_ONE_INFERENCE = ("_prior", "_spread", "log_likelihood_", "ridge_", "ridge_errors_")


class SubspaceRegressor(RegressorMixin, TaskEstimator):  # type: ignore[misc]
    """Regressions for many tasks whose coefficients share a low-dimensional subspace.

    ``inference="marginal"``: y = xᵀ(m + U a_t) + noise with a learnt mean m, subspace U and
    Gaussian prior on a_t, the a_t integrated out; nothing to tune, and predictions come with
    standard deviations. ``inference="point"``: the paper's model y = xᵀ U w_t with a ridge on w_t,
    by default chosen on held-out rows.

    Args:
        rank: the dimension of the subspace, at most the number of features (plus one with an
            intercept), where the prior covariance is full; None for 6, or as many as there are.
        inference: ``marginal`` or ``point``.
        ridge: of the point model: a number, or ``auto``.
        noise: of the marginal model: ``task`` (a variance per task, drawn together) or ``shared``.
        fit_intercept: centre the features and give every task an intercept.
        scale: of the point model: divide features by their standard deviation, so that the ridge
            treats all units alike. The marginal model does not depend on units.
        max_iter: the most rounds (marginal) or iterations (point).
        tol: stop when a round improves the log likelihood per row by less (marginal), or five
            iterations the loss by a smaller fraction (point).
        random_state: seed of the split for the ridge.
        verbose: print the progress.

    Attributes:
        coef_: coefficients per task in the units of X, shape (tasks, features).
        intercept_: intercepts per task.
        coef_std_: standard errors of ``coef_``: posterior standard deviations (marginal).
        intercept_std_: the same of ``intercept_``.
        noise_variance_: per task, its posterior mean (marginal).
        prior_covariance_: of the coefficients in ``components_`` (marginal).
        log_likelihood_: log p(y) of the training rows, coefficients integrated out (marginal).
        ridge_: the ridge that was used (point).
        ridge_errors_: held-out squared error per ridge tried (point, ``auto``).
        task_column_: the column of the data frame that held the tasks, or None.
        trace_: one row per round or iteration.
        n_iter_: how many.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> X, task = rng.normal(size=(200, 3)), np.repeat(["a", "b", "c", "d"], 50)
        >>> slope = {"a": 0.5, "b": 1.0, "c": 1.5, "d": 2.0}
        >>> y = np.array([slope[t] for t in task]) * X[:, 0] + 0.01 * rng.normal(size=200)
        >>> model = SubspaceRegressor(rank=1).fit(X, y, task=task)
        >>> model.predict([[1.0, 0.0, 0.0]], task=["c"]).round(2)
        array([1.5])
    """

    CHECKS: ClassVar[dict[str, Check]] = SHARED_CHECKS | {
        "inference": validation.choice("marginal", "point"),
        "ridge": validation.auto_or(validation.number(0)),
        "noise": validation.choice(*NOISES),
    }

    def __init__(
        self,
        rank: int | None = None,
        *,
        inference: str = "marginal",
        ridge: float | str = "auto",
        noise: str = "task",
        fit_intercept: bool = True,
        scale: bool = True,
        max_iter: int = 300,
        tol: float = 1e-7,
        random_state: int | None = None,
        verbose: bool = False,
    ) -> None:
        self.rank = rank
        self.inference = inference
        self.ridge = ridge
        self.noise = noise
        self.fit_intercept = fit_intercept
        self.scale = scale
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @all_or_nothing
    def fit(
        self,
        X: Any,
        y: Any,
        task: Any = None,
        sample_weight: Any = None,
        *,
        callback: Callback | None = None,
    ) -> SubspaceRegressor:
        """Learn from rows of all tasks.

        Args:
            X: features, one row per sample; or a list with one table per task.
            y: targets, one per row; or a list like X; or several columns over shared rows, each of
                them a task.
            task: the task of each row (integers or text), or the name of a column of the data frame
                X, which later calls then look up by themselves; None for a single task or several
                columns in y. For lists: their names.
            sample_weight: a weight per row, or a list like X; a row of weight 2 counts as two, so
                that weights which add up to 1 stand for a single row.
            callback: called after every round with a dictionary of ``round`` and ``loss``; a true
                value stops.
        """
        self._check_parameters()
        X, y, labels, weight = self._read(X, y, task, sample_weight, reset=True, numeric=True)
        self.scaling_ = Scaling.learn(
            X, y, weight, intercept=self.fit_intercept, scale=self._scales
        )
        self._outputs = labels is None and y.ndim == 2
        self._index = IdIndex(
            np.arange(y.shape[1] if self._outputs else 1) if labels is None else labels, "task"
        )
        rank = self._checked_rank(X.shape[1] + int(self.fit_intercept))
        rows = self._rows(X, y, labels, weight)
        self.statistics_: Any = rows.statistics(Axis.whole(len(self._index)))
        self._learn(rank, rows, callback)
        return self

    @all_or_nothing
    def fit_share(
        self,
        X: Any = None,
        y: Any = None,
        task: Any = None,
        sample_weight: Any = None,
        *,
        process_group: Any = None,
        callback: Callback | None = None,
    ) -> SubspaceRegressor:
        """Learn from the shares of all processes of a group; every one of them must call this.

        The model is that of one process which is given all shares one after the other, to rounding,
        and the same on every process to the bit. It predicts, and is saved, like any other; it does
        not keep the statistics that learning from further rows would need.

        Arguments are those of ``fit`` for the rows of this process: X is None if it has none,
        weights are given on all processes or on none, the callback must return the same on all.
        ``process_group`` is a group of ``torch.distributed``, by default its default group.
        """
        group = current_group(process_group)
        with group.together():
            self._check_parameters()
        check_same_options(validation.saved_parameters(self.get_params(deep=False)), group)
        share = rows_of_process(self, X, y, task, sample_weight, group=group)
        self._outputs = False
        rank_limit = self.n_features_in_ + int(self.fit_intercept)
        with group.together():
            rank = self._checked_rank(rank_limit)
        random = validation.draw_seed(self.random_state, 0)
        self.scaling_, self._index, rows, tasks = distribute_rows(
            share, group, seed=random, intercept=self.fit_intercept, scale=self._scales
        )
        self.statistics_ = rows.statistics(tasks)
        self._learn(rank, rows, callback)
        self.statistics_ = None
        return self

    @all_or_nothing
    def partial_fit(
        self,
        X: Any,
        y: Any,
        task: Any = None,
        sample_weight: Any = None,
        *,
        callback: Callback | None = None,
    ) -> SubspaceRegressor:
        """Add rows, of known or of new tasks, and learn again from the statistics of all rows.

        Arguments are those of ``fit``. The first call is ``fit``; later ones keep the rank, the
        scaling and, for the point model, the ridge.
        """
        if not hasattr(self, "statistics_"):
            return self.fit(X, y, task=task, sample_weight=sample_weight, callback=callback)
        if self.inference != self._fitted:
            raise ValueError(
                f"this model was fitted with inference={self._fitted!r}, call fit for "
                f"{self.inference!r}"
            )
        self._add_rows(X, y, task, sample_weight)
        learn = self._learn_marginal if self._fitted == "marginal" else self._learn_point
        learn(self._frame.shape[1], callback)
        return self

    @all_or_nothing
    def fold_in(
        self, X: Any, y: Any, task: Any = None, sample_weight: Any = None
    ) -> SubspaceRegressor:
        """Fit new tasks, or known ones with more rows, with what is shared held fixed.

        Arguments are those of ``fit``. Rows may come in any order and in any number of calls.
        """
        check_is_fitted(self)
        changed = self._add_rows(X, y, task, sample_weight)
        if self._fitted == "marginal":
            prior = self._extended_prior(changed)
            self._set_marginal(
                prior, extend_spread(self.statistics_, prior, self._spread, self.noise, changed)
            )
        else:
            self._weights = (
                point_coefficients(self.statistics_, self._frame, self.ridge_) @ self._frame.mT
            )
        return self

    def predict(
        self, X: Any, task: Any = None, *, return_std: bool = False, unseen: str = "error"
    ) -> Any:
        """Predict targets.

        Args:
            X: features, one row per sample; or a list with one table per task.
            task: the task of each row, or the name of a column; None if the model has a single
                task, for all outputs at once, or if X has the column of the fit. For lists: as in
                ``fit``.
            return_std: also return predictive standard deviations (marginal).
            unseen: what to do with a task that was not in the fit: ``error``, or ``mean`` for what
                all tasks share (marginal: the mean m, with the spread of the tasks in the standard
                deviation).

        Returns:
            One prediction per row, or a column per output; a list like X; with ``return_std`` a
            pair.
        """
        given = self._table(X, None, task)
        features = self._features(given.X)
        if return_std and self._fitted != "marginal":
            raise ValueError(
                f"return_std needs inference='marginal', this model has {self._fitted!r}"
            )
        if given.task is None and self._outputs:
            columns = [
                self._predict(features, np.full(len(features), t), return_std)
                for t in range(len(self._index))
            ]
            stacked = [np.stack(parts, axis=1) for parts in zip(*columns, strict=True)]
            return (stacked[0], stacked[1]) if return_std else stacked[0]
        numbers = self._numbers(given.task, len(features), unseen)
        values, deviations = (
            given.like_given(part) for part in self._predict(features, numbers, return_std)
        )
        return (values, deviations) if return_std else values

    def score(
        self, X: Any, y: Any, task: Any = None, sample_weight: Any = None, *, unseen: str = "error"
    ) -> float:
        """R² of the predictions over all rows; arguments as in ``predict``."""
        from sklearn.metrics import r2_score

        given, predicted = self._compared(X, y, task, unseen)
        return float(r2_score(given.y, predicted, sample_weight=given.row_weights(sample_weight)))

    def nmse(self, X: Any, y: Any, task: Any = None, *, unseen: str = "error") -> float:
        """The mean over tasks of the squared error over the variance of the targets.

        Each task counts the same, an unseen one for itself, so R² and NMSE do not add up to 1.
        Tasks with fewer than two rows or a constant target are left out. Arguments as in
        ``predict``.
        """
        given, predicted = self._compared(X, y, task, unseen)
        known = np.array(given.y, dtype=np.float64)
        if known.size != predicted.size:
            raise ValueError(
                f"y must have the shape {predicted.shape} of the predictions, got {known.shape}"
            )
        target = torch.from_numpy(known.reshape(predicted.shape))
        if target.ndim == 2:
            numbers = torch.arange(target.shape[1]).expand(target.shape)
        elif given.task is None:
            numbers = torch.zeros(len(target), dtype=torch.int64)
        else:
            numbers = torch.from_numpy(IdIndex.fit(task_ids(given.task, len(target)), "task")[1])
        residual = (target - torch.from_numpy(predicted)).reshape(-1, 1)
        flat = TaskStatistics.from_rows(residual, target.reshape(-1), numbers.reshape(-1))
        ratios = flat.gram[:, 0, 0] / (flat.counts * flat.target_variance())
        defined = torch.isfinite(ratios)
        if not bool(defined.any()):
            raise ValueError("NMSE is undefined: every task has a constant target or a single row")
        return float(ratios[defined].mean())

    @property
    def noise_variance_(self) -> Array:
        """The noise variance of each task (marginal)."""
        return np.asarray(self._spread.noise.numpy())

    @property
    def prior_covariance_(self) -> Array:
        """The prior covariance Σ of the coefficients in ``components_`` (marginal)."""
        return np.asarray(self._prior.covariance.numpy())

    @property
    def coef_std_(self) -> Array:
        """Standard errors of ``coef_``, shape (tasks, features) (marginal)."""
        return self._standard_errors(np.arange(len(self._index)))[:, : self.n_features_in_]

    @property
    def intercept_std_(self) -> Array:
        """Standard errors of ``intercept_`` (marginal)."""
        if not self.scaling_.intercept:
            return np.zeros(len(self._index))
        return self._standard_errors(np.arange(len(self._index)))[:, -1]

    def summary(self, task: Any = None) -> pl.DataFrame:
        """A table of coefficients with standard errors (marginal).

        Args:
            task: the id of a task; what all tasks share if None.

        Returns:
            A row per feature and one for the intercept. For a task: ``coef``, ``std_error`` and the
            bounds ``low`` and ``high`` of a 90 % interval. For all tasks: ``mean``, ``std_error``
            of that mean, and ``between_tasks``, the standard deviation of the coefficient over
            tasks.
        """
        import polars as pl

        check_is_fitted(self)
        if self._fitted != "marginal":
            raise ValueError(
                "summary needs inference='marginal': a point model has no standard errors"
            )
        default = [f"x{k}" for k in range(self.n_features_in_)]
        names = [str(name) for name in getattr(self, "feature_names_in_", default)]
        names += ["(intercept)"] if self.scaling_.intercept else []
        if task is not None:
            number = self._numbers([task], 1, "error")
            slopes = self.coef_[number[0]]
            constant = self.intercept_[number[0]]
            values = np.append(slopes, constant)[: len(names)]
            errors = self._standard_errors(number)[0]
            bounds = {"low": values - 1.645 * errors, "high": values + 1.645 * errors}
            return pl.DataFrame({"feature": names, "coef": values, "std_error": errors, **bounds})
        slopes, constant = (part[0] for part in self.scaling_.to_user(self._prior.mean[None]))
        rows = self.scaling_.coefficient_rows()
        known = self._spread.shared
        inside = rows @ self._frame
        of_mean = (
            ((rows @ known[0, :, 0, :]) * rows).sum(-1)
            if len(known)
            else torch.full((len(rows),), torch.nan)
        )
        between = ((inside @ self._prior.covariance) * inside).sum(-1)
        return pl.DataFrame(
            {
                "feature": names,
                "mean": np.append(slopes, constant)[: len(names)],
                "std_error": of_mean.clamp(min=0).sqrt().numpy(),
                "between_tasks": between.clamp(min=0).sqrt().numpy(),
            }
        )

    def _standard_errors(self, numbers: Array) -> Array:
        """Standard errors of coefficients and, last, intercepts, in the user's units."""
        if self._fitted != "marginal":
            raise AttributeError("standard errors need inference='marginal'")
        rows = self.scaling_.coefficient_rows()
        task = torch.from_numpy(numbers).repeat_interleave(len(rows))
        variance = self._spread.of_weights(rows.repeat(len(numbers), 1), task, self._frame)
        return np.asarray(variance.sqrt().reshape(len(numbers), len(rows)).numpy())

    @property
    def _scales(self) -> bool:
        """Whether features are divided; the marginal model depends on it by rounding."""
        return bool(self.scale) or self.inference == "marginal"

    @property
    def _fitted(self) -> str:
        """The kind of inference that the model comes from, whatever its parameter says since."""
        return "marginal" if hasattr(self, "_prior") else "point"

    def _check_fitted(self) -> None:
        self._check_parameters()
        if self._fitted == "point" and not hasattr(self, "ridge_"):
            raise ValueError("it has neither a prior nor a ridge")

    def _rows(self, X: Array, y: Array, labels: Array | None, weight: Array | None) -> Rows:
        """Rows in the model's features; several outputs are one block of rows each."""
        Z = self.scaling_(X)
        target = torch.from_numpy(np.ascontiguousarray(y - self.scaling_.offset))
        weights = None if weight is None else torch.from_numpy(weight)
        if not self._outputs:
            return Rows(Z, target.reshape(-1), self._numbers_of(labels, len(X)), weights)
        outputs = y.shape[1]
        repeated = None if weights is None else weights.repeat(outputs)
        return Rows(
            Z.repeat(outputs, 1),
            target.mT.reshape(-1),
            torch.arange(outputs).repeat_interleave(len(X)),
            repeated,
        )

    def _add_rows(self, X: Any, y: Any, task: Any, sample_weight: Any) -> Tensor:
        """Add rows to a copy of the statistics; the numbers of the tasks that have them."""
        if self.statistics_ is None:
            raise ValueError(
                "this model was saved without its statistics and cannot learn from further rows"
            )
        X, y, labels, weight = self._read(X, y, task, sample_weight, reset=False, numeric=True)
        if labels is None and len(self._index) > 1 and not self._outputs:
            raise ValueError(f"task must be given: the model has {len(self._index)} tasks")
        if self._outputs and (labels is not None or y.shape[1:] != (len(self._index),)):
            raise ValueError(
                f"y must have a column for each of the {len(self._index)} outputs, got shape "
                f"{y.shape}"
            )
        self._index = copy(self._index)
        if labels is not None:
            self._index.extend(labels, "task")
        self.statistics_ = self.statistics_.extended(len(self._index))
        rows = self._rows(X, y, labels, weight)
        self.statistics_.add(rows.Z, rows.y, rows.task, sample_weight=rows.weight)
        return torch.unique(rows.task)

    def _learn(self, rank: int, rows: Rows, callback: Callback | None) -> None:
        """Learn everything from ``statistics_``; the rows are for the choice of the ridge."""
        for name in _OF_ONE_INFERENCE:  # an earlier fit may have been of the other kind
            self.__dict__.pop(name, None)
        if self.inference == "marginal":
            self._learn_marginal(rank, callback)
            return
        if isinstance(self.ridge, str):
            split = validation.draw_seed(self.random_state, 0)
            self.ridge_, self.ridge_errors_ = choose_ridge(
                rows, self.statistics_.all_tasks, rank=rank, seed=split
            )
        else:
            self.ridge_ = float(self.ridge)
        self._learn_point(rank, callback)

    def _learn_point(self, rank: int, callback: Callback | None) -> None:
        with self._progress(callback) as report:
            frame, weights, result = fit_point(
                self.statistics_,
                rank=rank,
                ridge=self.ridge_,
                max_iter=int(self.max_iter),
                tol=float(self.tol),
                callback=report,
            )
        self._keep(frame, self.statistics_.all_tasks.gather(weights), result)

    def _learn_marginal(self, rank: int, callback: Callback | None) -> None:
        how: dict[str, Any] = {
            "noise": self.noise,
            "max_rounds": int(self.max_iter),
            "tol": float(self.tol),
        }
        with self._progress(callback) as report:
            fit = fit_marginal(self.statistics_, rank=rank, callback=report, **how)
            fit = continue_stalled(self.statistics_, fit, callback=report, **how)
        self.trace_ = fit.trace
        self.n_iter_ = len(fit.trace)
        self.log_likelihood_ = -self.statistics_.all_tasks.add(fit.posterior.losses)
        noisy = fit_noise(self.statistics_, fit.prior, **how)
        spread = task_spread(self.statistics_, noisy.prior, self.noise, common=noisy.common)
        self._set_marginal(noisy.prior, spread)

    def _set_marginal(self, prior: SubspacePrior, spread: TaskSpread) -> None:
        found = posterior(self.statistics_, prior)
        tasks = self.statistics_.all_tasks
        per_task = {
            name: tasks.gather(getattr(spread, name))
            for name in ("moments", "covariance", "reach", "noise")
        }
        self._prior = replace(prior, noise=tasks.gather(prior.noise))
        self._frame = prior.frame
        self._spread = replace(spread, **per_task)
        self._weights = prior.mean + tasks.gather(found.mean) @ prior.frame.mT

    def _extended_prior(self, changed: Tensor) -> SubspacePrior:
        """The prior with noise variances for all tasks of statistics that have grown."""
        floor = noise_floor(
            self.statistics_
        )  # of targets that were all alike, the noise is no measure for more rows
        prior = replace(self._prior, noise=self._prior.noise.clamp(min=floor))
        common = max(float(self._spread.common), floor)
        noise = extend_noise(self.statistics_, prior, self.noise, common=common, changed=changed)
        return replace(prior, noise=noise)

    def _predict(self, X: Array, numbers: Array, with_std: bool) -> tuple[Array, Array]:
        Z = self.scaling_(X)
        index = torch.from_numpy(numbers)
        shared = self._prior.mean if self._fitted == "marginal" else self._weights.mean(0)
        weights = torch.cat([self._weights, shared[None]])[index]
        values = (Z * weights).sum(-1).numpy() + self.scaling_.offset
        if not with_std:
            return values, values
        return values, np.asarray(self._spread.variance(Z, index, self._frame).sqrt().numpy())
