"""Small regressions in a shared subspace at one frame, their Fisher and Hessian.

A_t is X_tᵀX_t (X_tᵀDX_t of classifications), G_t = UᵀA_tU + λ I, and e_t the gradient of the loss
in U w_t. Along H the coefficients change by ẇ_t = -G_t⁻¹ (UᵀA_t H w_t + Hᵀe_t), and U w_t by k_t =
H w_t + U ẇ_t. The Fisher information is H ↦ P (1/N) Σ_t J_tᵀA_t k_t with J_t H = k_t; the ridge is
a Gaussian observation √λ w_t of zero and adds λ ẇ_tᵀẇ_t. The Hessian of the penalised loss is

    P (1/N) Σ_t [ A_tk_t w_tᵀ + e_t ẇ_tᵀ ] - H Uᵀ∇Ψ,

which differs from the Fisher information by terms in the residuals e_t.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from fisherfold.distributed import Axis
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.operators import FisherOperator
from fisherfold.subspace.tasks import TaskStatistics

Array = NDArray[Any]


@dataclass(frozen=True)
class TaskState:
    """Everything that follows from a frame for a set of tasks; G_t = UᵀA_tU + λ I."""

    gram_frame: Tensor  # A_tU, shape (tasks, features, rank)
    inner: Tensor  # UᵀA_tU, shape (tasks, rank, rank)
    ridge: float  # λ
    floor: Tensor  # eigenvalues of UᵀA_tU up to it count as zero, shape (tasks,)
    weights: Tensor  # w_t, shape (tasks, rank)
    residual: Tensor  # e_t = A_tUw_t - b_t, shape (tasks, features)
    losses: Tensor  # ψ_t, with the penalty if it is part of the objective, shape (tasks,)

    @cached_property
    def inverse(self) -> Tensor:
        """G_t⁻¹, the pseudo-inverse where G_t is singular, shape (tasks, rank, rank)."""
        if bool((self.floor < self.ridge).all()):
            eye = torch.eye(self.inner.shape[-1], dtype=self.inner.dtype)
            factor, failed = torch.linalg.cholesky_ex(self.inner + self.ridge * eye)
            if not bool(failed.any()):
                return torch.cholesky_inverse(factor)
        values, vectors = torch.linalg.eigh(self.inner)
        values = torch.where(values > self.floor[:, None], values, 0.0) + self.ridge
        return (vectors * torch.where(values > 0, 1 / values, 0.0)[:, None, :]) @ vectors.mT

    @classmethod
    def at(
        cls,
        x: Tensor,
        data: TaskStatistics,
        ridge: float,
        floor: Tensor,
        *,
        regular: bool,
        penalised: bool,
    ) -> TaskState:
        """The state at a frame."""
        # numpy on the tensors' memory: fewer microseconds per call
        parts = (part.numpy() for part in (data.gram, data.cross, data.power, x))
        found = _forward(*parts, floor=floor, regular=regular, ridge=ridge)
        wide, inner, weights, residual, losses, shrunk = (torch.from_numpy(part) for part in found)
        if penalised:
            losses = losses + shrunk / 2
        return cls(wide.permute(1, 2, 0), inner, ridge, floor, weights, residual, losses)

    def select(self, batch: Tensor) -> TaskState:
        """The state of some of the tasks."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "ridge"}
        return TaskState(ridge=self.ridge, **{name: part[batch] for name, part in parts.items()})


def _forward(
    gram: Array,
    cross: Array,
    power: Array,
    x: Array,
    *,
    floor: Tensor,
    regular: bool,
    ridge: float,
) -> tuple[Array, ...]:
    """UᵀA_t, UᵀA_tU, w_t, e_t, ψ_t and λ‖w_t‖², as two products of tall matrices."""
    tasks = len(gram)
    n, p = x.shape
    tall = (gram.reshape(tasks * n, n) @ x).reshape(tasks, n, p)
    wide = tall.swapaxes(1, 2).swapaxes(0, 1).reshape(p * tasks, n)
    inner = (wide @ x).reshape(p, tasks, p).swapaxes(0, 1)
    target = cross @ x
    weights = _solve(inner, ridge, target, floor, regular)
    wide = wide.reshape(p, tasks, n)
    residual = (wide * weights.T[:, :, None]).sum(0) - cross
    shrunk = ridge * (weights * weights).sum(-1)
    # UᵀA_tU w_t = Uᵀb_t - λ w_t saves a third
    losses = ((power - (target * weights).sum(-1) - shrunk) / 2).clip(min=0)
    return wide, inner, weights, residual, losses, shrunk


def _solve(inner: Array, ridge: float, target: Array, floor: Tensor, regular: bool) -> Array:
    """w_t = G_t⁻¹ Uᵀb_t; the shortest solution where G_t is singular."""
    if regular:
        with contextlib.suppress(np.linalg.LinAlgError):
            return np.asarray(
                np.linalg.solve(inner + ridge * np.eye(inner.shape[-1]), target[..., None])[..., 0]
            )
    # in the eigenbasis, not through an explicit inverse, in whose rounding a large 1/λ drowns the
    # small ones
    values, vectors = torch.linalg.eigh(torch.from_numpy(inner))
    scales = torch.where(values > floor[:, None], 1 / (values + ridge), 0.0)
    parts = scales * (vectors.mT @ torch.from_numpy(target)[..., None]).squeeze(-1)
    return np.asarray((vectors @ parts[..., None]).squeeze(-1).numpy())


class SubspaceFisher(FisherOperator):
    """The exact Fisher information (1/N) Σ_t J_tᵀJ_t with J_t H = (X_t k_t, √λ ẇ_t)."""

    preconditioner: KroneckerFisher
    approximates = (
        "nothing: the Fisher information of the targets, w_t(U) being the penalised solution"
    )

    def __init__(
        self,
        point: Tensor,
        grams: Tensor,
        state: TaskState,
        count: int,
        *,
        preconditioner: KroneckerFisher,
        samples: Axis,
    ) -> None:
        super().__init__(preconditioner.manifold, point)
        self.grams = grams
        self.state = state
        self.count = count
        self.preconditioner = preconditioner
        self.samples = samples

    def _moved(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """ẇ_t and A_tk_t."""
        state = self.state
        moved = state.weights @ v.mT
        change = -_apply(state.inverse, _apply(state.gram_frame.mT, moved) + state.residual @ v)
        return change, _apply(self.grams, moved + change @ self.point.mT)

    @override
    def _matvec(self, v: Tensor) -> Tensor:
        state = self.state
        x = self.point
        change, image = self._moved(v)
        back = _apply(state.inverse, image @ x + state.ridge * change)
        through = image - _apply(state.gram_frame, back)
        product = through.mT @ state.weights - state.residual.mT @ back
        return self.manifold.project(x, self.samples.total(product) / self.count)


class SubspaceHessian(SubspaceFisher):
    """The Riemannian Hessian of the penalised loss."""

    approximates = "the Fisher information; it is the Hessian"

    @override
    def _matvec(self, v: Tensor) -> Tensor:
        residual = self.state.residual
        x = self.point
        w = self.state.weights
        change, image = self._moved(v)
        product = image.mT @ w + residual.mT @ change - v @ (x.mT @ (residual.mT @ w))
        return self.manifold.project(x, self.samples.total(product) / self.count)

    @override
    def precondition(self, v: Tensor, damping: float) -> Tensor:
        return self.preconditioner.precondition_hessian(v, damping)


def _apply(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[..., None]).squeeze(-1)
