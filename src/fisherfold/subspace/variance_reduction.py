"""One epoch of steps on single tasks, fused: thousands of them on tiny matrices.

The damped left factor M = (1/N) Σ A + δ I never changes, so it is inverted once, and the solve on
the complement of U follows from a p×p system,

    P M d = g, Uᵀd = 0   ⇔   d = M⁻¹(g - U (UᵀM⁻¹U)⁻¹ UᵀM⁻¹g).

The small products of a step are called through numpy on the memory of the tensors, a third of the
cost of the same calls through torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.linalg import pinv
from numpy.typing import NDArray
from scipy.linalg import lapack
from torch import Tensor

from fisherfold.manifolds.frames import MAX_CONDITION
from fisherfold.subspace.tasks import TaskStatistics, zero_threshold

Array = NDArray[Any]


class TaskGradient:
    """The gradient of one task before projection, as arrays."""

    def __init__(self, data: TaskStatistics, ridge: float, sizes: Tensor, regular: Tensor) -> None:
        self.grams = as_array(data.gram)
        self.crosses = as_array(data.cross)
        self.sizes = as_array(sizes)
        self.ridge = ridge
        self.regular = regular.tolist()
        self.share = 1 / data.n_tasks

    def __call__(self, frame: Array, t: int) -> tuple[Array, Array]:
        """The gradient of task t and its coefficients."""
        ridge = self.ridge
        cross = self.crosses[t]
        gram_frame = self.grams[t] @ frame
        inner = frame.T @ gram_frame
        if self.regular[t]:
            w = _solve(inner + ridge * np.eye(len(inner)), cross @ frame)
        else:
            w = _solve_singular(inner, ridge, zero_threshold(self.sizes[t], frame), cross @ frame)
        residual = gram_frame @ w - cross
        return residual[:, None] * w, w


def fused_epoch(
    gradient: TaskGradient,
    x: Tensor,
    tasks: list[int],
    *,
    step: float,
    corrections: Tensor,
    moments: Tensor,
    left_inverse: Tensor | None,
) -> Tensor:
    """Variance-reduced steps of one epoch."""
    rest = as_array(corrections)
    own = as_array(moments)
    frame = as_array(x)
    inverse = None if left_inverse is None else as_array(left_inverse)
    p = frame.shape[1]
    for t in tasks:
        g, w = gradient(frame, t)
        d = rest[t] + g
        d -= frame @ (frame.T @ d)
        if inverse is not None:
            second_moment = own[t] + w[:, None] * (gradient.share * w)
            both = inverse @ np.concatenate((_solve(second_moment, d.T).T, frame), axis=1)
            d = both[:, :p] - both[:, p:] @ _solve(frame.T @ both[:, p:], frame.T @ both[:, :p])
            d -= frame @ (frame.T @ d)
        frame = _retract(frame, d, step)
    return torch.from_numpy(frame)


def fused_descent(
    gradient: TaskGradient, x: Tensor, tasks: list[int], step: Callable[[int], float]
) -> Tensor:
    """Plain stochastic gradient steps on single tasks."""
    frame = as_array(x)
    for k, t in enumerate(tasks):
        g, _ = gradient(frame, t)
        g -= frame @ (frame.T @ g)
        frame = _retract(frame, g, step(k))
    return torch.from_numpy(frame)


def as_array(tensor: Tensor) -> Array:
    """The memory of a tensor on the CPU as an array."""
    return np.asarray(tensor.detach().contiguous().numpy())


def _retract(frame: Array, d: Array, step: float) -> Array:
    # polar: U - s d has the Gram matrix I + s² dᵀd for a tangent d
    squares, vectors, _ = lapack.dsyevd(d.T @ d)
    moved = frame - step * d
    if step * step * squares[-1] > MAX_CONDITION:  # I is lost in rounding
        left, _, right = np.linalg.svd(moved, full_matrices=False)
        return np.asarray(left @ right)
    return np.asarray(moved @ ((vectors / np.sqrt(1 + step * step * squares)) @ vectors.T))


def _solve(matrix: Array, right: Array) -> Array:
    # LAPACK's Cholesky solver itself: numpy's wrapper costs more than the solve; shortest solution
    # if singular
    _, solution, failed = lapack.dposv(matrix, right)
    return np.asarray(pinv(matrix, hermitian=True) @ right if failed else solution)


def _solve_singular(inner: Array, ridge: float, floor: float, right: Array) -> Array:
    # a Cholesky factor of what rounding has made of a singular matrix may well exist
    values, vectors, _ = lapack.dsyevd(inner)
    scales = np.zeros_like(values)
    np.divide(1, values + ridge, out=scales, where=values > floor)
    return np.asarray(vectors @ (scales * (right @ vectors)))
