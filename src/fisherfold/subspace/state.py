"""Coefficients, residuals and losses of many small regressions in a shared subspace at one frame, all tasks at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.subspace.tasks import TaskStatistics


@dataclass(frozen=True)
class TaskState:
    """Everything that follows from a frame for a set of tasks.

    Attributes:
        gram_frame: A_tU, shape (tasks, features, rank).
        inner: UᵀA_tU, shape (tasks, rank, rank).
        ridge: λ_t, shape (tasks,).
        floor: eigenvalues of UᵀA_tU that are not above it count as zero, shape (tasks,).
        weights: w_t, shape (tasks, rank).
        residual: e_t = A_tUw_t - b_t, shape (tasks, features).
        losses: ψ_t, with the penalty if it is part of the objective, shape (tasks,).
    """

    gram_frame: Tensor
    inner: Tensor
    ridge: Tensor
    floor: Tensor
    weights: Tensor
    residual: Tensor
    losses: Tensor

    @cached_property
    def inverse(self) -> Tensor:
        """G_t⁻¹, the pseudo-inverse where G_t is singular, shape (tasks, rank, rank)."""
        return _inverse(self.inner, self.ridge, self.floor)

    @classmethod
    def at(
        cls, x: Tensor, data: TaskStatistics, ridge: Tensor, floor: Tensor, *, regular: bool, penalised: bool
    ) -> TaskState:
        """The state at a frame.

        Args:
            x: the frame U.
            data: A_t, b_t and ‖y_t‖² of the tasks.
            ridge: λ_t.
            floor: as the attribute.
            regular: whether the ridge alone keeps every G_t away from singular.
            penalised: whether the losses have the penalty in them.

        Returns:
            The state.
        """
        parts = (data.gram, data.cross, data.power, ridge, x)
        solver = partial(_solve, floor=floor, regular=regular)
        if x.device.type == "cpu":
            # numpy on the tensors' memory: fewer microseconds per call, and a BLAS that likes six columns
            found = _forward(solver, *(part.numpy() for part in parts))
            wide, inner, weights, residual, losses, shrunk = (torch.from_numpy(part) for part in found)
        else:
            wide, inner, weights, residual, losses, shrunk = _forward(solver, *parts)
        if penalised:
            losses = losses + shrunk / 2
        return cls(wide.permute(1, 2, 0), inner, ridge, floor, weights, residual, losses)

    def select(self, batch: Tensor) -> TaskState:
        """The state of some of the tasks.

        Args:
            batch: their indices.

        Returns:
            A copy.
        """
        parts = (
            self.gram_frame, self.inner, self.ridge, self.floor, self.weights, self.residual, self.losses,
        )  # fmt: skip
        return TaskState(*(part[batch] for part in parts))


def _forward(solver: Callable[..., Any], gram: Any, cross: Any, power: Any, ridge: Any, x: Any) -> tuple[Any, ...]:
    # UᵀA_t, UᵀA_tU, w_t, e_t, ψ_t and λ_t‖w_t‖² for all tasks, on tensors or on arrays alike: two products of tall
    # matrices instead of many tiny ones; UᵀA_tU w_t = Uᵀb_t - λ_t w_t saves a third
    tasks, (n, p) = len(gram), x.shape
    tall = (gram.reshape(tasks * n, n) @ x).reshape(tasks, n, p)
    wide = tall.swapaxes(1, 2).swapaxes(0, 1).reshape(p * tasks, n)
    inner = (wide @ x).reshape(p, tasks, p).swapaxes(0, 1)
    target = cross @ x
    weights = solver(inner, ridge, target)
    wide = wide.reshape(p, tasks, n)
    residual = (wide * weights.T[:, :, None]).sum(0) - cross
    shrunk = ridge * (weights * weights).sum(-1)
    losses = ((power - (target * weights).sum(-1) - shrunk) / 2).clip(min=0)
    return wide, inner, weights, residual, losses, shrunk


def _solve(inner: Any, ridge: Any, target: Any, *, floor: Tensor, regular: bool) -> Any:
    """w_t = G_t⁻¹ Uᵀb_t on tensors or on arrays; where G_t is singular, the shortest solution."""
    if isinstance(inner, np.ndarray):
        if regular:
            with contextlib.suppress(np.linalg.LinAlgError):
                lifted = inner + ridge[:, None, None] * np.eye(inner.shape[-1])
                return np.linalg.solve(lifted, target[..., None])[..., 0]
        inner, ridge, target = (torch.from_numpy(part) for part in (inner, ridge, target))
        return _shortest(inner, ridge, target, floor).numpy()
    if regular:
        lifted = inner + ridge[:, None, None] * torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
        weights, failed = torch.linalg.solve_ex(lifted, target)
        if not failed.any():
            return weights
    return _shortest(inner, ridge, target, floor)


def _shortest(inner: Tensor, ridge: Tensor, target: Tensor, floor: Tensor) -> Tensor:
    # in the eigenbasis, not through an explicit inverse, in whose rounding a large 1/λ drowns the small ones. Uᵀb_t has
    # no part where UᵀA_tU is zero, so that there is nothing to divide by the ridge either
    values, vectors = torch.linalg.eigh(inner)
    scales = torch.where(values > floor[:, None], 1 / (values + ridge[:, None]), 0.0)
    parts = scales * (vectors.mT @ target[..., None]).squeeze(-1)
    return (vectors @ parts[..., None]).squeeze(-1)


def _inverse(inner: Tensor, ridge: Tensor, floor: Tensor) -> Tensor:
    """(UᵀA_tU + λ_t I)⁻¹; where λ_t = 0 the pseudo-inverse."""
    eye = torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
    if bool((ridge > floor).all()):
        factor, failed = torch.linalg.cholesky_ex(inner + ridge[:, None, None] * eye)
        if not bool(failed.any()):
            return torch.cholesky_inverse(factor)
    values, vectors = torch.linalg.eigh(inner)
    values = torch.where(values > floor[:, None], values, 0.0) + ridge[:, None]
    return (vectors * torch.where(values > 0, 1 / values, 0.0)[:, None, :]) @ vectors.mT
