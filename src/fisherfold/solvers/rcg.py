"""Riemannian conjugate gradients and gradient descent, both with a line search.

    θ ← R_θ(α d),    d = -g + β T(d_old),    β = max(0, <g, y> / <T(d_old), y>),  y = g - T(g_old)    (Hestenes-Stiefel)

The step α comes from backtracking that remembers what worked: a step accepted at once is doubled for the next search.
"""

from __future__ import annotations

import math
from typing import ClassVar

from typing_extensions import override

from fisherfold.manifolds.base import Point, Tangent, combine, is_finite, scale
from fisherfold.problems.base import Problem
from fisherfold.solvers.method import Method, positive
from fisherfold.solvers.state import State

# below this length a step changes the point by rounding only
SHORTEST_STEP = 1e-12


class RCG(Method):
    """Hestenes-Stiefel conjugate gradients over all samples.

    Args:
        problem: the problem.
        first_step: the length ‖α d‖ of the first trial step.
        sufficient: the fraction of the linear prediction that a step must achieve (Armijo).
        contraction: the factor of a backtracking step.
        max_trials: loss evaluations of one line search.
    """

    name: ClassVar[str] = "rcg"

    def __init__(
        self,
        problem: Problem,
        *,
        first_step: float = 1.0,
        sufficient: float = 0.5,
        contraction: float = 0.5,
        max_trials: int = 25,
    ) -> None:
        super().__init__(problem)
        self.first_step = positive("first_step", first_step)
        for name, value in (("sufficient", sufficient), ("contraction", contraction)):
            if not 0 < value < 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {value}")
        self.sufficient, self.contraction, self.max_trials = sufficient, contraction, max_trials

    @override
    def start(self, state: State) -> None:
        gradient = self.evaluate(state)
        state.samples += self.problem.n_samples
        state.vectors |= {"gradient": gradient, "direction": scale(-1.0, gradient)}
        state.numbers["restarted"] = 0
        if state.gradient_norm > 0:
            state.numbers["alpha"] = self.first_step / state.gradient_norm

    @override
    def step(self, state: State) -> None:
        x, gradient, direction = state.x, state.vectors["gradient"], state.vectors["direction"]
        slope = float(self.manifold.inner(x, gradient, direction))
        if state.gradient_norm == 0:
            return
        trial, trials = self._line_search(state, direction, slope)
        if trial is None:
            if not state.numbers["restarted"]:
                # the direction or the remembered step was bad: one more try along the gradient itself
                state.vectors["direction"] = scale(-1.0, gradient)
                state.numbers |= {"alpha": self.first_step / state.gradient_norm, "restarted": 1}
                state.record = {"accepted": 0.0, "trials": float(trials)}
                return
            state.failure = ("stalled", f"the line search found no lower loss in {trials} trials along the gradient")
            return
        state.x = trial
        state.numbers["restarted"] = 0
        new_gradient = self.evaluate(state)
        state.samples += self.problem.n_samples
        state.vectors |= {
            "gradient": new_gradient,
            "direction": self._next_direction(x, trial, gradient, new_gradient, direction),
        }
        state.record = {"accepted": 1.0, "trials": float(trials), "step": state.numbers["alpha"]}

    def _line_search(self, state: State, direction: Tangent, slope: float) -> tuple[Point | None, int]:
        """The accepted point, or None, and the number of loss evaluations; leaves the next first α in the state."""
        alpha, length = state.numbers["alpha"], self.norm(state.x, direction)
        for trials in range(1, self.max_trials + 1):
            trial = self.manifold.retract(state.x, scale(alpha, direction))
            loss = float(self.problem.loss(trial)) if is_finite(trial) else math.inf
            enough = loss <= state.loss + self.sufficient * alpha * slope
            if enough or (trials == self.max_trials and loss < state.loss):
                # on average one extra evaluation: push when it went well or after a long retreat, else keep the pace
                state.numbers["alpha"] = alpha if trials == 2 else 2 * alpha
                return trial, trials
            alpha *= self.contraction
            if alpha * length < SHORTEST_STEP:
                return None, trials
        return None, self.max_trials

    def _next_direction(
        self, x: Point, y: Point, gradient: Tangent, new_gradient: Tangent, direction: Tangent
    ) -> Tangent:
        carried = self.manifold.transport(x, y, direction)
        change = combine(1.0, new_gradient, -1.0, self.manifold.transport(x, y, gradient))
        along = float(self.manifold.inner(y, carried, change))
        beta = max(0.0, float(self.manifold.inner(y, new_gradient, change)) / along) if along != 0 else 0.0
        candidate = combine(-1.0, new_gradient, beta, carried)
        if not float(self.manifold.inner(y, new_gradient, candidate)) < 0:
            return scale(-1.0, new_gradient)
        return candidate


class RGD(RCG):
    """Gradient descent over all samples with the same line search."""

    name: ClassVar[str] = "rgd"

    @override
    def _next_direction(
        self, x: Point, y: Point, gradient: Tangent, new_gradient: Tangent, direction: Tangent
    ) -> Tangent:
        return scale(-1.0, new_gradient)
