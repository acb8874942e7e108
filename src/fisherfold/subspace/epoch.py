"""Epochs of steps on single tasks, fused.

The paper's protocol is thousands of steps on matrices of a few hundred numbers: all call overhead. Two things make it
cheap. The damped left factor M = (1/N) Σ ω A + δ I never changes, so it is inverted once, and the solve on the
complement of U follows from a p×p system,

    P M d = g, Uᵀd = 0   ⇔   d = M⁻¹(g - U (UᵀM⁻¹U)⁻¹ UᵀM⁻¹g),

without ever touching the singular direction. And the few small products per step are called through numpy on the
tensors' own memory, which costs a third of the same calls through torch (docs/decisions.md has the measurement).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.linalg import pinv
from numpy.typing import NDArray
from scipy.linalg import lapack
from torch import Tensor

from fisherfold.manifolds.frames import MAX_CONDITION
from fisherfold.subspace.tasks import rounding

if TYPE_CHECKING:
    from fisherfold.subspace.problem import SubspaceProblem, SubspaceSnapshot


def fused_epoch(
    problem: SubspaceProblem, snapshot: SubspaceSnapshot, x: Tensor, tasks: list[int], *, step: float, natural: bool
) -> Tensor:
    """Run the variance-reduced steps of one epoch.

    Args:
        problem: with ``factor_damping`` > 0 for natural-gradient steps.
        snapshot: the anchor.
        x: where to start.
        tasks: the task of each step.
        step: the step size.
        natural: natural-gradient steps instead of plain ones.

    Returns:
        The last iterate.
    """
    gradient = _TaskGradient(problem)
    corrections, rests = (_numpy(part) for part in _anchor_parts(problem, snapshot))
    inverse = _numpy(problem.left_inverse) if natural else corrections
    frame = _numpy(x)
    p = frame.shape[1]
    for t in tasks:
        transposed = frame.T
        g, w, share = gradient(frame, t)
        d = corrections[t] + g
        d -= frame @ (transposed @ d)
        if natural:
            second_moment = rests[t] + w[:, None] * (share * w)
            both = inverse @ np.concatenate((_solve(second_moment, d.T).T, frame), axis=1)
            d = both[:, :p] - both[:, p:] @ _solve(transposed @ both[:, p:], transposed @ both[:, :p])
            d -= frame @ (transposed @ d)
        frame = _retract(frame, d, step)
    return torch.from_numpy(frame)


def fused_descent(problem: SubspaceProblem, x: Tensor, tasks: list[int], step: Callable[[int], float]) -> Tensor:
    """Run plain stochastic gradient steps on single tasks.

    Args:
        problem: the problem.
        x: where to start.
        tasks: the task of each step.
        step: the step size as a function of the number of the step.

    Returns:
        The last iterate.
    """
    gradient, frame = _TaskGradient(problem), _numpy(x)
    for k, t in enumerate(tasks):
        g, _, _ = gradient(frame, t)
        g -= frame @ (frame.T @ g)
        frame = _retract(frame, g, step(k))
    return torch.from_numpy(frame)


class _TaskGradient:
    """The gradient of one task before projection, its coefficients and its share ω_t/N of the second moment."""

    def __init__(self, problem: SubspaceProblem) -> None:
        data = problem.statistics
        self.grams, self.crosses, self.sizes = _numpy(data.gram), _numpy(data.cross), _numpy(problem.sizes)
        self.regular = problem.regular.tolist()
        self.ridge, self.omega = problem.ridge.tolist(), problem.weights.tolist()
        self.with_jacobian, self.n_samples = problem.with_jacobian, problem.n_samples
        self.eye = np.eye(problem.manifold.p)

    def __call__(self, frame: NDArray[Any], t: int) -> tuple[NDArray[Any], NDArray[Any], float]:
        ridge, omega, cross = self.ridge[t], self.omega[t], self.crosses[t]
        gram_frame = self.grams[t] @ frame
        inner = frame.T @ gram_frame
        if self.regular[t]:
            solve = partial(_solve, inner + ridge * self.eye)
        else:
            solve = partial(_solve_singular, inner, ridge, rounding(self.sizes[t], frame))
        w = solve(cross @ frame)
        residual = gram_frame @ w - cross
        g = residual[:, None] * (omega * w)
        if self.with_jacobian:
            shift = omega * ridge * solve(w)
            g += residual[:, None] * shift + (gram_frame @ shift)[:, None] * w
        return g, w, omega / self.n_samples


def _retract(frame: NDArray[Any], d: NDArray[Any], step: float) -> NDArray[Any]:
    # polar: U - s d has the Gram matrix I + s² dᵀd for a tangent d; in that of a long step I drowns
    squares, vectors, _ = lapack.dsyevd(d.T @ d)
    moved = frame - step * d
    if step * step * squares[-1] > MAX_CONDITION:
        left, _, right = np.linalg.svd(moved, full_matrices=False)
        return np.asarray(left @ right)
    return np.asarray(moved @ ((vectors / np.sqrt(1 + step * step * squares)) @ vectors.T))


def _anchor_parts(problem: SubspaceProblem, snapshot: SubspaceSnapshot) -> tuple[Tensor, Tensor]:
    """Per task: the full gradient less the task's own, and the second moment less the task's own."""
    state, omega = snapshot.state, problem.weights[:, None, None]
    own = state.residual[:, :, None] * state.weights[:, None, :]
    if problem.with_jacobian:
        shift = problem.ridge[:, None] * (state.inverse @ state.weights[..., None]).squeeze(-1)
        own = own + state.residual[:, :, None] * shift[:, None, :]
        own = own + (state.gram_frame @ shift[..., None]) * state.weights[:, None, :]
    own = omega * (own - snapshot.x @ (snapshot.x.mT @ own))
    outer = omega * state.weights[:, :, None] * state.weights[:, None, :] / problem.n_samples
    return snapshot.full_gradient - own, snapshot.second_moment - outer


def _solve(matrix: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    # LAPACK's Cholesky solver itself: numpy's wrapper costs more than the solve. A singular system gets the shortest
    # solution: a task with fewer rows than the rank, fewer tasks than the rank
    _, solution, failed = lapack.dposv(matrix, right)
    return np.asarray(pinv(matrix, hermitian=True) @ right if failed else solution)


def _solve_singular(inner: NDArray[Any], ridge: float, floor: float, right: NDArray[Any]) -> NDArray[Any]:
    # the shortest solution; a Cholesky factor of what rounding has made of a singular matrix may well exist
    values, vectors, _ = lapack.dsyevd(inner)
    scales = np.zeros_like(values)
    np.divide(1, values + ridge, out=scales, where=values > floor)
    return np.asarray(vectors @ (scales * (right @ vectors)))


def _numpy(tensor: Tensor) -> NDArray[Any]:
    return np.asarray(tensor.detach().contiguous().numpy())
