"""One inner epoch of variance-reduced natural-gradient steps with batch 1, fused.

The paper's protocol is thousands of steps on matrices of a few hundred numbers: all call overhead. Two things make it
cheap. The damped left factor M = (1/N) Σ ω A + δ I never changes, so it is inverted once, and the solve on the
complement of U follows from a p×p system,

    P M d = g, Uᵀd = 0   ⇔   d = M⁻¹(g - U (UᵀM⁻¹U)⁻¹ UᵀM⁻¹g),

without ever touching the singular direction. And the few small products per step are called through numpy on the
tensors' own memory, which costs a third of the same calls through torch (docs/decisions.md has the measurement).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.linalg import LinAlgError, eigh, pinv, solve
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from fisherfold.problems.subspace import SubspaceProblem, SubspaceSnapshot


def fused_epoch(
    problem: SubspaceProblem, snapshot: SubspaceSnapshot, x: Tensor, tasks: list[int], *, step: float, natural: bool
) -> Tensor:
    """Run the steps of one epoch.

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
    data, n_samples = problem.statistics, problem.n_samples
    grams, crosses = _numpy(data.gram), _numpy(data.cross)
    inverse = _numpy(left_inverse(problem)) if natural else grams[0]
    ridge, omega = problem.ridge.tolist(), problem.weights.tolist()
    corrections, rests = (_numpy(part) for part in _anchor_parts(problem, snapshot))
    frame = _numpy(x)
    p = frame.shape[1]
    eye = np.eye(p)
    for t in tasks:
        transposed, gram_frame = frame.T, grams[t] @ frame
        inner = transposed @ gram_frame + ridge[t] * eye
        w = _solve(inner, crosses[t] @ frame)
        residual = gram_frame @ w - crosses[t]
        d = corrections[t] + residual[:, None] * (omega[t] * w)
        if problem.with_jacobian:
            shift = omega[t] * ridge[t] * _solve(inner, w)
            d += residual[:, None] * shift + (gram_frame @ shift)[:, None] * w
        d -= frame @ (transposed @ d)
        if natural:
            second_moment = rests[t] + w[:, None] * (omega[t] / n_samples * w)
            both = inverse @ np.concatenate((_solve(second_moment, d.T).T, frame), axis=1)
            d = both[:, :p] - both[:, p:] @ solve(transposed @ both[:, p:], transposed @ both[:, :p])
            d -= frame @ (transposed @ d)
        # polar retraction: U - s d has the Gram matrix I + s² dᵀd
        squares, vectors = eigh(d.T @ d)
        frame = (frame - step * d) @ ((vectors / np.sqrt(1 + step * step * squares)) @ vectors.T)
    return torch.from_numpy(frame)


def left_inverse(problem: SubspaceProblem) -> Tensor:
    """M⁻¹ for the damped left factor; eigenvalues that are rounding errors of zero count as zero.

    Args:
        problem: with ``factor_damping`` > 0.

    Returns:
        A symmetric matrix.
    """
    values, vectors = torch.linalg.eigh(problem.mean_gram)
    floor = values[-1] * len(values) * torch.finfo(values.dtype).eps
    values = torch.where(values > floor, values, 0.0) + problem.factor_damping
    return (vectors / values) @ vectors.mT


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
    # a singular system gets the shortest solution: a task with fewer rows than the rank, fewer tasks than the rank
    try:
        return np.asarray(solve(matrix, right))
    except LinAlgError:
        return np.asarray(pinv(matrix, hermitian=True) @ right)


def _numpy(tensor: Tensor) -> NDArray[Any]:
    return np.asarray(tensor.detach().contiguous().numpy())
