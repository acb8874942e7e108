"""Coefficients, residuals and losses of many small regressions in a shared subspace at one frame, all tasks at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold.subspace.tasks import TaskStatistics


@dataclass(frozen=True)
class TaskState:
    """Everything that follows from a frame for a set of tasks; G_t = UᵀA_tU + λ_t I."""

    gram_frame: Tensor  # A_tU, shape (tasks, features, rank)
    inner: Tensor  # UᵀA_tU, shape (tasks, rank, rank)
    ridge: Tensor  # λ_t, shape (tasks,)
    floor: Tensor  # eigenvalues of UᵀA_tU up to it count as zero, shape (tasks,)
    weights: Tensor  # w_t, shape (tasks, rank)
    residual: Tensor  # e_t = A_tUw_t - b_t, shape (tasks, features)
    losses: Tensor  # ψ_t, with the penalty if it is part of the objective, shape (tasks,)

    @cached_property
    def inverse(self) -> Tensor:
        """G_t⁻¹, the pseudo-inverse where G_t is singular, shape (tasks, rank, rank)."""
        if bool((self.ridge > self.floor).all()):
            eye = torch.eye(self.inner.shape[-1], dtype=self.inner.dtype, device=self.inner.device)
            factor, failed = torch.linalg.cholesky_ex(self.inner + self.ridge[:, None, None] * eye)
            if not bool(failed.any()):
                return torch.cholesky_inverse(factor)
        values, vectors = torch.linalg.eigh(self.inner)
        values = torch.where(values > self.floor[:, None], values, 0.0) + self.ridge[:, None]
        return (vectors * torch.where(values > 0, 1 / values, 0.0)[:, None, :]) @ vectors.mT

    @classmethod
    def at(
        cls, x: Tensor, data: TaskStatistics, ridge: Tensor, floor: Tensor, *, regular: bool, penalised: bool
    ) -> TaskState:
        """The state at a frame."""
        parts = (data.gram, data.cross, data.power, ridge, x)
        if x.device.type == "cpu":  # numpy on the tensors' memory: fewer microseconds per call
            found = _forward(floor, regular, *(part.numpy() for part in parts))
            wide, inner, weights, residual, losses, shrunk = (torch.from_numpy(part) for part in found)
        else:
            wide, inner, weights, residual, losses, shrunk = _forward(floor, regular, *parts)
        if penalised:
            losses = losses + shrunk / 2
        return cls(wide.permute(1, 2, 0), inner, ridge, floor, weights, residual, losses)

    def select(self, batch: Tensor) -> TaskState:
        """The state of some of the tasks."""
        parts = (self.gram_frame, self.inner, self.ridge, self.floor, self.weights, self.residual, self.losses)
        return TaskState(*(part[batch] for part in parts))


def _forward(floor: Tensor, regular: bool, gram: Any, cross: Any, power: Any, ridge: Any, x: Any) -> tuple[Any, ...]:
    """UᵀA_t, UᵀA_tU, w_t, e_t, ψ_t and λ_t‖w_t‖², on tensors or arrays, as two products of tall matrices."""
    tasks, (n, p) = len(gram), x.shape
    tall = (gram.reshape(tasks * n, n) @ x).reshape(tasks, n, p)
    wide = tall.swapaxes(1, 2).swapaxes(0, 1).reshape(p * tasks, n)
    inner = (wide @ x).reshape(p, tasks, p).swapaxes(0, 1)
    target = cross @ x
    weights = _solve(inner, ridge, target, floor, regular)
    wide = wide.reshape(p, tasks, n)
    residual = (wide * weights.T[:, :, None]).sum(0) - cross
    shrunk = ridge * (weights * weights).sum(-1)
    # UᵀA_tU w_t = Uᵀb_t - λ_t w_t saves a third
    losses = ((power - (target * weights).sum(-1) - shrunk) / 2).clip(min=0)
    return wide, inner, weights, residual, losses, shrunk


def _solve(inner: Any, ridge: Any, target: Any, floor: Tensor, regular: bool) -> Any:
    """w_t = G_t⁻¹ Uᵀb_t on tensors or arrays; the shortest solution where G_t is singular."""
    if isinstance(inner, np.ndarray):
        if regular:
            try:
                lifted = inner + ridge[:, None, None] * np.eye(inner.shape[-1])
                return np.linalg.solve(lifted, target[..., None])[..., 0]
            except np.linalg.LinAlgError:
                pass
        inner, ridge, target = (torch.from_numpy(part) for part in (inner, ridge, target))
        return _shortest(inner, ridge, target, floor).numpy()
    if regular:
        lifted = inner + ridge[:, None, None] * torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
        weights, failed = torch.linalg.solve_ex(lifted, target)
        if not failed.any():
            return weights
    return _shortest(inner, ridge, target, floor)


def _shortest(inner: Tensor, ridge: Tensor, target: Tensor, floor: Tensor) -> Tensor:
    # in the eigenbasis, not through an explicit inverse, in whose rounding a large 1/λ drowns the small ones
    values, vectors = torch.linalg.eigh(inner)
    scales = torch.where(values > floor[:, None], 1 / (values + ridge[:, None]), 0.0)
    parts = scales * (vectors.mT @ target[..., None]).squeeze(-1)
    return (vectors @ parts[..., None]).squeeze(-1)
