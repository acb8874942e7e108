"""Where a run has ended: at a minimum, at a saddle, or on the way to infinity.

A gradient of 0 belongs to saddles as well, and far out on a loss that falls for ever gradients are
as small as one likes. Both are looked for once, at the end: a direction of negative curvature by a
few steps of Lanczos on the Hessian,

    Q_k = basis of span{v, Hv, ..., H^k v},  T = Q_kᵀ H Q_k,  least eigenvalue of T < 0,

and a run to infinity, as of separated data, by a last step that is long and still leads downhill
when repeated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fisherfold.fisher.solve import lowest_curvature
from fisherfold.manifolds.base import (
    Point,
    Tangent,
    combine,
    dot,
    is_finite,
    leaves,
    scale,
    tolerance,
)
from fisherfold.problems.base import Problem
from fisherfold.solvers.state import State

# Lanczos steps: a tenth of the evaluations of the run, within these bounds.
STEPS = (5, 20)
# Samples on which a direction is looked for; it is measured on all of them.
SAMPLES = 4096
# Curvatures below this many tolerances of the largest one are rounding.
CURVATURE_UNITS = 100.0
# A stationary point lies within this share of the size of the point, by the gradient over the
# curvature.
STATIONARY = 1e-2
# A last step of this share of the point is long; so often it is repeated.
LONG, REPEATS = 1e-3, 4.0
# By how much entries have to grow along a step to infinity, as a share of its length.
GROWTH = 0.25
# The share of a run that its flattest direction has to be, and that of its curvature that may be
# left.
MAINLY, VANISHED = 0.5, 1e-4
INFINITY = "its minimum lies at infinity, as that of separated data does; add a prior, or leave parameters out"
# Trials of a step away from a saddle.
TRIALS = 20


def is_judged(problem: Problem) -> bool:
    """Whether a problem says what its Hessian is, so that the end of a run can be judged."""
    return type(problem).hessian is not Problem.hessian


def judge(problem: Problem, state: State, x0: Point) -> tuple[str, str, Tangent | None] | None:
    """The status and reason of a run that has not ended at a minimum, with the way out of a saddle."""
    if problem.manifold.dim == 0 or not is_finite(state.x):
        return None
    if (found := _runs_on(problem, state)) is not None:
        return "unbounded", found, None
    steps = min(max(state.samples // (10 * problem.n_samples), STEPS[0]), STEPS[1])
    least, largest, direction = _lowest(problem, state.x, steps)
    flat = CURVATURE_UNITS * tolerance(leaves(state.x)[0].dtype) * largest
    near = state.gradient_norm <= STATIONARY * -least * max(_size(state.x), 1.0)
    if least < -flat and near:
        reason = (
            f"a saddle: the gradient norm is {state.gradient_norm:.1e}, but the loss falls along a "
            f"direction of curvature {least:.2e} (the largest seen is {largest:.2e}); escape=True "
            "leaves it"
        )
        return "saddle", reason, direction
    if (found := _falls_far_out(problem, state, x0, least, direction)) is not None:
        return "unbounded", found, None
    return None


def _lowest(problem: Problem, x: Point, steps: int) -> tuple[float, float, Tangent]:
    """The least and the largest curvature that Lanczos finds, and the direction of the least."""
    device = leaves(x)[0].device
    generator = torch.Generator(device=device).manual_seed(0)
    start = problem.manifold.random_tangent(x, generator=generator)
    some: Tensor | None = None
    if problem.n_samples > 2 * SAMPLES:
        some = torch.randint(problem.n_samples, (SAMPLES,), generator=generator, device=device)
    least, largest, direction = lowest_curvature(problem.hessian(x, some), start, steps)
    if some is not None and least < 0:
        # half of all directions that a part of the samples calls flat would be negative by chance
        least = float(problem.hessian(x).quadratic(direction))
    return least, largest, direction


def _runs_on(problem: Problem, state: State) -> str | None:
    """Whether the last step was long, and leads downhill when it is repeated."""
    if state.before is None:
        return None
    last = problem.manifold.project(state.x, combine(1.0, state.x, -1.0, state.before))
    length = _size(last)
    if not length > LONG * max(_size(state.x), 1.0):
        return None
    if not _leads_down(problem, state, scale(REPEATS, last)):
        return None
    return (
        f"the last step had length {length:.2g}, and further ones still lower the loss: {INFINITY}"
    )


def _falls_far_out(
    problem: Problem, state: State, x0: Point, least: float, direction: Tangent
) -> str | None:
    """Whether the run has gone along its flattest direction until the curvature there was gone."""
    manifold, x = problem.manifold, state.x
    moved = combine(1.0, x, -1.0, x0)
    along = float(dot(moved, direction)) / max(_size(direction), 1e-300)
    if not abs(along) > MAINLY * _size(moved):
        return None
    far = scale(math.copysign(max(_size(x), 1.0), along) / _size(direction), direction)
    if not _leads_down(problem, state, far):
        return None
    before = float(problem.hessian(x0).quadratic(manifold.project(x0, direction)))
    if not least < VANISHED * before:
        return None
    share = least / before
    return (
        f"{abs(along):.2g} along a direction only {share:.0e} of its curvature is left: {INFINITY}"
    )


def _leads_down(problem: Problem, state: State, move: Tangent) -> bool:
    """Whether entries grow along a step, and at its end the loss is not higher and does not rise."""
    manifold, x = problem.manifold, state.x
    ahead = manifold.retract(x, move)
    if not (is_finite(ahead) and _size(ahead) > _size(x) + GROWTH * _size(move)):
        return False
    value, gradient = problem.loss_and_gradient(ahead)
    rounding = problem.loss_rounding(x, state.loss)
    slope = float(manifold.inner(ahead, gradient, manifold.transport(x, ahead, move)))
    return float(value) <= state.loss + rounding and slope <= rounding


def leave_saddle(problem: Problem, state: State, direction: Tangent) -> bool:
    """Move the iterate along a direction of negative curvature to a lower loss, if there is one."""
    manifold, x = problem.manifold, state.x
    length = max(1.0, _size(x)) / max(_size(direction), torch.finfo(leaves(x)[0].dtype).tiny)
    for k in range(TRIALS):
        for sign in (1.0, -1.0):
            trial = manifold.retract(x, scale(sign * 0.5 ** (k + 1) * length, direction))
            value = float(problem.loss(trial)) if is_finite(trial) else math.inf
            if value < state.loss - problem.loss_rounding(x, state.loss):
                state.x = trial
                return True
    return False


def _size(x: Point) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(leaf)) for leaf in leaves(x)))
