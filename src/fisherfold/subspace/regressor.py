"""Many small related regressions as a scikit-learn estimator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fisherfold.subspace.learning import SubspaceLearning
from fisherfold.subspace.marginal_fit import NOISES
from fisherfold.subspace.point import SOLVERS
from fisherfold.subspace.shared import SharedTaskFits
from fisherfold.subspace.spread import grown_spread
from fisherfold.subspace.task_estimator import TaskEstimator
from fisherfold.subspace.task_forms import task_labels
from fisherfold.subspace.task_rows import Rows, Scaling
from fisherfold.subspace.tasks import TaskStatistics
from fisherfold.tables import parameters
from fisherfold.tables.checkpoint import all_or_nothing
from fisherfold.tables.ids import IdIndex
from fisherfold.tables.refusals import reject_vanishing

Array = NDArray[Any]
INFERENCES = ("marginal", "point")


class SubspaceRegressor(SharedTaskFits, SubspaceLearning, RegressorMixin, TaskEstimator):  # type: ignore[misc]
    """Regressions for many tasks whose coefficients share a low-dimensional subspace.

    ``inference="marginal"``: y = xᵀ(m + U a_t) + noise with a learnt mean m, subspace U and Gaussian prior on a_t, the
    a_t integrated out; nothing to tune, and predictions come with standard deviations. ``inference="point"``: the
    paper's model y = xᵀ U w_t with a ridge on w_t, by default chosen on held-out rows.

    Args:
        rank: the dimension of the subspace, at most the number of features (plus one with an intercept), where the
            prior covariance is full; None for 6, or as many as there are.
        inference: ``marginal`` or ``point``.
        ridge: of the point model: a number, one per task (in the order of ``task_ids_``), or ``auto``.
        noise: of the marginal model: ``task`` (a variance per task, drawn together) or ``shared``.
        fit_intercept: centre the features and give every task an intercept.
        scale: of the point model: divide features by their standard deviation, so that the ridge does not shrink those
            with small numbers the most. The marginal model is the same for all units, and its features are divided.
        solver: of the point model: rngd, rngd-vr, rsgd, rsvrg or rcg.
        solver_options: further options for that solver, such as ``step``, for targets of mean square 1, which it is
            given.
        max_iter: the most rounds (marginal) or iterations (point).
        tol: stop when a round improves the log likelihood per row by less (marginal), or five iterations the loss by a
            smaller fraction (point).
        random_state: fixes the split for the ridge and the draws of stochastic solvers.
        verbose: print the progress.
        checkpoint: a file that keeps where the fit stands; one that was killed goes on from it to the same bits when it
            is started again with the same rows and parameters. It is removed when the fit is done.

    Attributes:
        coef_: coefficients per task in the units of X, shape (tasks, features).
        intercept_: intercepts per task.
        noise_variance_: per task, its posterior mean: what is shared is not taken for known (marginal).
        prior_covariance_: of the coefficients in ``components_`` (marginal).
        ridge_: the ridge that was used (point).
        ridge_errors_: held-out squared error per ridge tried (point, ``auto``).
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

    def __init__(
        self,
        rank: int | None = None,
        *,
        inference: str = "marginal",
        ridge: float | str | Any = "auto",
        noise: str = "task",
        fit_intercept: bool = True,
        scale: bool = True,
        solver: str = "rngd",
        solver_options: Mapping[str, Any] | None = None,
        max_iter: int = 300,
        tol: float = 1e-7,
        random_state: int | None = None,
        verbose: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        self.rank = rank
        self.inference = inference
        self.ridge = ridge
        self.noise = noise
        self.fit_intercept = fit_intercept
        self.scale = scale
        self.solver = solver
        self.solver_options = solver_options
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.verbose = verbose
        self.checkpoint = checkpoint

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @all_or_nothing
    def fit(self, X: Any, y: Any, task: Any = None, sample_weight: Any = None) -> SubspaceRegressor:
        """Learn from rows of all tasks.

        Args:
            X: features, one row per sample; or a list with one table per task.
            y: targets, one per row; or a list like X; or several columns over shared rows, each of them a task.
            task: the task of each row, any ids; None for a single task or several columns in y. For lists: their names.
            sample_weight: a weight per row, or a list like X; a row of weight 2 counts as two, so that weights which
                add up to 1 stand for a single row.

        Returns:
            The estimator.
        """
        self._check_parameters()
        X, y, labels, weight = self._read(X, y, task, sample_weight, reset=True, numeric=True)
        reject_vanishing(float(np.abs(y).max()))
        self.scaling_ = Scaling.learn(X, y, weight, intercept=self.fit_intercept, scale=self._scales)
        self._outputs = labels is None and y.ndim == 2
        self._index = IdIndex(np.arange(y.shape[1] if self._outputs else 1) if labels is None else labels)
        self._checked_rank(X.shape[1] + int(self.fit_intercept))
        rows = self._rows(X, y, labels, weight)
        self.statistics_ = rows.statistics(len(self._index))
        self._learn(rows)
        return self

    @all_or_nothing
    def partial_fit(self, X: Any, y: Any, task: Any = None, sample_weight: Any = None) -> SubspaceRegressor:
        """Take in more rows, of known or of new tasks, and go on learning from where the model stands.

        The first call is ``fit``; later ones keep the rank, the scaling and, for the point model, the ridge.

        Args:
            X: as in ``fit``.
            y: as in ``fit``.
            task: as in ``fit``.
            sample_weight: as in ``fit``.

        Returns:
            The estimator.

        Raises:
            ValueError: if the model was fitted with another ``inference``.
        """
        if not hasattr(self, "statistics_"):
            return self.fit(X, y, task=task, sample_weight=sample_weight)
        if self.inference != self._fitted:
            raise ValueError(f"this model was fitted with inference={self._fitted!r}, call fit for {self.inference!r}")
        self._learn(None, self._take_in(X, y, task, sample_weight))
        return self

    @all_or_nothing
    def fold_in(self, X: Any, y: Any, task: Any, sample_weight: Any = None) -> SubspaceRegressor:
        """Fit the coefficients of new tasks, or refresh known ones with more rows, with all that is shared held fixed.

        Rows may come in any order and in any number of calls.

        Args:
            X: as in ``fit``.
            y: as in ``fit``.
            task: the task of each row.
            sample_weight: as in ``fit``.

        Returns:
            The estimator.
        """
        check_is_fitted(self)
        changed = self._take_in(X, y, task, sample_weight)
        if self._fitted == "marginal":
            prior = self._grown_prior(changed)
            self._set_marginal(prior, grown_spread(self.statistics_, prior, self._spread, self.noise, changed))
        else:
            self._set_point(self._frame, self._point_weights(self._frame))
        return self

    def predict(self, X: Any, task: Any = None, *, return_std: bool = False, unseen: str = "error") -> Any:
        """Predict targets.

        Args:
            X: features, one row per sample; or a list with one table per task.
            task: the task of each row; None if the model has a single task, or for all outputs at once. For lists: as
                in ``fit``.
            return_std: also return predictive standard deviations (marginal).
            unseen: what to do with a task that was not seen: ``error``, or ``mean`` for what all tasks share (marginal:
                the mean m, with the spread of the tasks in the standard deviation).

        Returns:
            One prediction per row, or a column per output; a list like X; with ``return_std`` a pair.

        Raises:
            ValueError: if a task was not seen, or standard deviations are asked of a point model.
        """
        given = self._asked(X, task)
        X, task = given.X, given.task
        if return_std and self._fitted != "marginal":
            raise ValueError(f"return_std needs inference='marginal', this model has {self._fitted!r}")
        if task is None and self._outputs:
            columns = [self._predict(X, np.full(len(X), t), return_std) for t in range(len(self._index))]
            stacked = [np.stack(parts, axis=1) for parts in zip(*columns, strict=True)]
            return (stacked[0], stacked[1]) if return_std else stacked[0]
        numbers = self._numbers(task, len(X), unseen)
        values, deviations = (given.like_given(part) for part in self._predict(X, numbers, return_std))
        return (values, deviations) if return_std else values

    def score(
        self, X: Any, y: Any, task: Any = None, sample_weight: Any = None, *, unseen: str = "error"
    ) -> float:  # fmt: skip
        """The coefficient of determination R² of the predictions over all rows.

        Args:
            X: as in ``predict``.
            y: targets, one per row; or a list like X.
            task: as in ``predict``.
            sample_weight: a weight per row; or a list like X.
            unseen: as in ``predict``.

        Returns:
            R², at most 1.
        """
        from sklearn.metrics import r2_score

        given = self._one_table(X, y, task)
        weight = given.row_weights(sample_weight)
        predicted = self.predict(given.X, task=given.task, unseen=unseen)
        return float(r2_score(given.y, predicted, sample_weight=weight))

    def nmse(self, X: Any, y: Any, task: Any = None, *, unseen: str = "error") -> float:
        """The mean over tasks of the squared error over the variance of the task's targets, as in the paper.

        Tasks with fewer than two rows or a constant target have no variance to compare with and are left out.

        Args:
            X: as in ``predict``.
            y: targets, one per row; or a list like X.
            task: as in ``predict``.
            unseen: as in ``predict``; every unseen task counts for itself.

        Returns:
            The mean ratio.

        Raises:
            ValueError: if it is undefined for every task.
        """
        check_is_fitted(self)
        rows = self._one_table(X, y, task)
        predicted = np.asarray(self.predict(rows.X, task=rows.task, unseen=unseen), dtype=np.float64)
        given = np.array(rows.y, dtype=np.float64)
        if given.size != predicted.size:
            raise ValueError(f"y must have the shape {predicted.shape} of the predictions, got {given.shape}")
        target = torch.from_numpy(given.reshape(predicted.shape))
        residual = target - torch.from_numpy(predicted)
        if target.ndim == 2:
            numbers = torch.arange(target.shape[1]).expand(target.shape)
        elif rows.task is None:
            numbers = torch.zeros(len(target), dtype=torch.int64)
        else:
            labels = task_labels(rows.task, len(target))
            numbers = torch.as_tensor(IdIndex(labels).numbers(labels, "task"))
        flat = TaskStatistics.from_rows(residual.reshape(-1, 1), target.reshape(-1), numbers.reshape(-1))
        ratios = flat.gram[:, 0, 0] / (flat.counts * flat.target_variance())
        defined = torch.isfinite(ratios)
        if not bool(defined.any()):
            raise ValueError("NMSE is undefined: every task has a constant target or a single row")
        return float(ratios[defined].mean())

    def _check_parameters(self) -> None:
        self._check_common()
        for name, allowed in (("inference", INFERENCES), ("noise", NOISES), ("solver", SOLVERS)):
            parameters.choice(name, getattr(self, name), allowed)
        if self.solver_options is not None and not isinstance(self.solver_options, Mapping):
            raise ValueError(f"solver_options must be a dictionary or None, got {self.solver_options!r}")
        if isinstance(self.ridge, str) and self.ridge == "auto":
            return
        expected = "finite and not negative, one number or one per task, or 'auto'"
        if np.ndim(self.ridge) > 1 or np.size(self.ridge) == 0:
            raise ValueError(f"ridge must be {expected}, got {self.ridge!r}")
        for value in np.atleast_1d(np.asarray(self.ridge, dtype=object)).tolist():
            parameters.number("ridge", value, expected)

    @property
    def _scales(self) -> bool:
        """Whether features are divided: Σ is full, so nothing but rounding errors is lost by it (marginal)."""
        return bool(self.scale) or self.inference == "marginal"

    @property
    def _fitted(self) -> str:
        """The kind of inference that the model comes from, whatever its parameter says since."""
        return "marginal" if hasattr(self, "_prior") else "point"

    def _check_loaded(self) -> None:
        """Whether everything is there that a fitted model has."""
        self._check_parameters()
        needed = {"_outputs"} | ({"_prior"} if self._fitted == "marginal" else {"ridge_"})
        if missing := sorted(name for name in needed if not hasattr(self, name)):
            raise ValueError(f"it has no {', '.join(missing)}")

    def _rows(self, X: Array, y: Array, labels: Array | None, weight: Array | None) -> Rows:
        """Rows in the model's features with task numbers; several outputs are one block of rows per output."""
        Z, target = self.scaling_(X), torch.from_numpy(np.ascontiguousarray(y - self.scaling_.offset))
        weights = None if weight is None else torch.from_numpy(weight)
        if not self._outputs:
            numbers = np.zeros(len(X), np.int64) if labels is None else self._index.numbers(labels, "task")
            return Rows(Z, target.reshape(-1), torch.from_numpy(numbers), weights)
        outputs = y.shape[1]
        repeated = None if weights is None else weights.repeat(outputs)
        numbered = torch.arange(outputs).repeat_interleave(len(X))
        return Rows(Z.repeat(outputs, 1), target.mT.reshape(-1), numbered, repeated)

    def _take_in(self, X: Any, y: Any, task: Any, sample_weight: Any) -> Tensor:
        """Add rows to the statistics, new tasks included; the numbers of the tasks that have them."""
        if self.statistics_ is None:
            raise ValueError("this model was saved without its statistics and cannot learn from further rows")
        if task is None and len(self._index) > 1 and not self._outputs and not isinstance(X, (list, tuple)):
            raise ValueError(f"task must be given: the model has {len(self._index)} tasks")
        X, y, labels, weight = self._read(X, y, task, sample_weight, reset=False, numeric=True)
        self._check_form(y, labels)
        self._index = copy(self._index)
        if labels is not None:
            self._index.add(labels)
        self.statistics_ = self.statistics_.extended(len(self._index))  # a copy
        rows = self._rows(X, y, labels, weight)
        self.statistics_.add(rows.Z, rows.y, rows.task, sample_weight=rows.weight)
        return torch.unique(rows.task)

    def _check_form(self, y: Array, labels: Array | None) -> None:
        """Whether further targets come as those of the fit did: several outputs over shared rows, or one per row."""
        outputs = len(self._index)
        if self._outputs and (labels is not None or y.shape[1:] != (outputs,)):
            given = f"shape {y.shape}" if labels is None else "a task for each row"
            raise ValueError(f"the model was fitted to {outputs} outputs: y must have one column for each, got {given}")
        if not self._outputs and y.ndim == 2 and y.shape[1] != 1:
            raise ValueError(f"y must have one dimension, as in fit, got shape {y.shape}")

    def _predict(self, X: Array, numbers: Array, with_std: bool) -> tuple[Array, Array]:
        Z, index = self.scaling_(X), torch.from_numpy(numbers)
        shared = self._prior.mean if self._fitted == "marginal" else self._weights.mean(0)
        weights = torch.cat([self._weights, shared[None]])[index]
        values = (Z * weights).sum(-1).numpy() + self.scaling_.offset
        if not with_std:
            return values, values
        return values, np.asarray(self._spread.variance(Z, index, self._frame).sqrt().numpy())

    def _show(self, row: Mapping[str, float]) -> bool:
        if self.verbose:
            print(f"round {int(row['round'])}: loss {row['loss']:.6f}")
        return False
