"""What ``SubspaceRegressor`` does between the statistics of its tasks and their coefficients, for both inferences.

    marginal    a prior N(m, U Σ Uᵀ) and noise variances, by their likelihood; coefficients are posterior means
    point       a frame U and w_t = argmin ‖y_t - X_t U w‖² + λ ‖w‖², the ridge λ chosen first

Learning goes on from a checkpoint, and from the model itself where rows were added to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.distributed import ALONE, Axis, Group
from fisherfold.files import sound
from fisherfold.subspace.further import fit_further
from fisherfold.subspace.marginal import SubspacePrior, noise_floor, posterior
from fisherfold.subspace.marginal_fit import common_noise, fit_marginal, new_noise, revived
from fisherfold.subspace.noise import fit_noise
from fisherfold.subspace.point import choose_ridge, fit_point
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.shared import part_of
from fisherfold.subspace.spread import TaskSpread, task_spread
from fisherfold.tables import parameters
from fisherfold.tables.checkpoint import FitCheckpoint
from fisherfold.tables.posterior_files import check_trace, take

if TYPE_CHECKING:
    from fisherfold.subspace.task_rows import Rows, Scaling
    from fisherfold.tables.ids import IdIndex

_OF_ONE_INFERENCE = (
    *("_prior", "_spread", "_common_noise", "prior_covariance_", "noise_variance_", "ridge_", "ridge_errors_"),
)


class SubspaceLearning:
    """How an estimator of many regressions learns from ``statistics_``, and sets what it has learnt."""

    if TYPE_CHECKING:
        inference: str
        ridge: float | str | Any
        noise: str
        solver: str
        solver_options: Mapping[str, Any] | None
        max_iter: int
        tol: float
        random_state: int | None
        statistics_: Any
        scaling_: Scaling
        _index: IdIndex

        def _checked_rank(self, n_features: int) -> int: ...
        def _saved(self, data: Iterable[Tensor], group: Group = ALONE, **more: Any) -> FitCheckpoint | None: ...
        def _show(self, row: Mapping[str, float]) -> bool: ...

    def _learn(self, rows: Rows | None, changed: Tensor | None = None) -> None:
        """Fit what is shared; with fresh rows the ridge is chosen, with changed tasks learning goes on."""
        rank = self._frame.shape[1] if rows is None else self._checked_rank(self.statistics_.n_features)
        if rows is not None:
            for name in _OF_ONE_INFERENCE:  # an earlier fit may have been of the other kind
                self.__dict__.pop(name, None)
        data = self.statistics_.parts()
        if self.inference == "marginal":
            saved = self._saved(data, self.statistics_.all_tasks.group)
            self._learn_marginal(rank, saved, changed)
            return
        if rows is not None:
            self._choose_ridge(rows, rank)
        saved = self._saved(data, self.statistics_.all_tasks.group, chosen=self.ridge_)
        frame, weights, result = fit_point(
            self.statistics_, rank=rank, ridge=self._ridges(), solver=str(self.solver),
            options=parameters.storable(self.solver_options or {}), max_iter=int(self.max_iter), tol=float(self.tol),
            seed=parameters.seed_of(self.random_state, 0),
            frame=None if rows is not None else self._frame, saved=saved,
            callback=lambda iteration, loss: self._show({"round": iteration, "loss": loss}),
        )  # fmt: skip
        self.trace_ = [] if result is None else result.trace.rows
        self.n_iter_ = 1 if result is None else max(1, result.iterations)
        self._set_point(frame, weights)
        if saved is not None:
            saved.remove()

    def _learn_marginal(self, rank: int, saved: FitCheckpoint | None, changed: Tensor | None) -> None:
        prior = None if changed is None else revived(self.statistics_, self._grown_prior(changed))
        trace: list[dict[str, float]] = []
        tasks = self.statistics_.all_tasks
        if saved is not None and (found := saved.load()) is not None:
            n = self.statistics_.n_features
            shapes = {"mean": (n,), "frame": (n, rank), "covariance": (rank, rank), "noise": (tasks.size,)}
            with sound(saved.path, "checkpoint"):
                prior = SubspacePrior(**{name: take(found[0], name, shape) for name, shape in shapes.items()})
                prior = replace(prior, noise=tasks.part(prior.noise).clone())
                trace = check_trace(found[1]["trace"])

        def save(prior: SubspacePrior, trace: list[dict[str, float]]) -> None:
            if saved is not None:
                saved.save(vars(prior) | {"noise": tasks.gather(prior.noise)}, {"trace": trace})

        fit = fit_marginal(
            self.statistics_, rank=rank, noise=self.noise, max_rounds=int(self.max_iter), tol=float(self.tol),
            prior=prior, trace=trace, callback=self._show, save=save,
        )  # fmt: skip
        rounds, tol = int(self.max_iter), float(self.tol)
        fit = fit_further(self.statistics_, fit, self.noise, max_rounds=rounds, tol=tol, callback=self._show)
        self.trace_, self.n_iter_ = fit.trace, len(fit.trace)
        noisy = fit_noise(self.statistics_, fit.prior, self.noise, max_rounds=rounds, tol=tol)
        self._common_noise = noisy.common
        self._set_marginal(noisy.prior, task_spread(self.statistics_, noisy.prior, self.noise, common=noisy.common))
        if saved is not None:
            saved.remove()

    def _choose_ridge(self, rows: Rows, rank: int) -> None:
        if isinstance(self.ridge, str):
            self.ridge_: Any
            self.ridge_, self.ridge_errors_ = choose_ridge(
                rows, self.statistics_.all_tasks, rank=rank, seed=parameters.seed_of(self.random_state, 0)
            )
            return
        given = np.asarray(self.ridge, dtype=np.float64)
        if given.ndim == 1 and len(given) != len(self._index):
            raise ValueError(f"ridge must be one number or one per task ({len(self._index)}), got shape {given.shape}")
        self.ridge_ = given.item() if given.ndim == 0 else given

    def _ridges(self) -> Tensor:
        """One ridge per task; tasks that came later get the mean of the given ones."""
        given = torch.as_tensor(self.ridge_, dtype=torch.float64)
        if given.ndim == 0 or self.statistics_.all_tasks.is_shared:
            return part_of(self.statistics_.all_tasks, given)
        more = self.statistics_.n_tasks - len(given)
        return torch.cat([given, given.mean().expand(more)]) if more > 0 else given

    def _point_weights(self, frame: Tensor) -> Tensor:
        if frame.shape[0] == frame.shape[1]:
            return fit_point(
                self.statistics_, rank=len(frame), ridge=self._ridges(), solver="rngd", options={}, max_iter=1, tol=0.0,
                seed=0,
            )[1]  # fmt: skip
        return SubspaceProblem(self.statistics_, rank=frame.shape[1], ridge=self._ridges()).coefficients(frame)

    def _set_point(self, frame: Tensor, weights: Tensor) -> None:
        self._frame = frame
        self._set_coefficients(self.statistics_.all_tasks.gather(weights) @ frame.mT)

    def _set_marginal(self, prior: SubspacePrior, spread: TaskSpread) -> None:
        found, tasks = posterior(self.statistics_, prior), self.statistics_.all_tasks
        prior = replace(prior, noise=tasks.gather(prior.noise))
        per_task = {name: tasks.gather(getattr(spread, name)) for name in ("moments", "covariance", "reach", "noise")}
        self._prior, self._frame, self._spread = prior, prior.frame, replace(spread, **per_task)
        self.prior_covariance_ = np.asarray(prior.covariance.numpy())
        self.noise_variance_ = np.asarray(self._spread.noise.numpy())
        self._set_coefficients(prior.mean + tasks.gather(found.mean) @ prior.frame.mT)

    def _set_coefficients(self, weights: Tensor) -> None:
        self._weights = weights
        self.coef_, self.intercept_ = self.scaling_.to_user(weights)

    def _grown_prior(self, changed: Tensor) -> SubspacePrior:
        """The prior with noise variances for all tasks of statistics that have grown."""
        known = self._prior.noise
        common = getattr(self, "_common_noise", None)  # files of earlier versions do not have it
        if common is None:
            common = common_noise(known, self.noise, Axis.whole(len(known)))
        # the noise of targets that were all alike is next to nothing, and no measure for the rows that have come since
        floor = noise_floor(self.statistics_)
        prior = replace(self._prior, noise=known.clamp(min=floor))
        noise = new_noise(self.statistics_, prior, self.noise, common=max(common, floor), changed=changed)
        return replace(prior, noise=noise)
