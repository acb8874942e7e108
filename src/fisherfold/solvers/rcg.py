"""Riemannian conjugate gradients and gradient descent, both with a line search.

    θ ← R_θ(α d),    d = -g + β T(d_old),    β = max(0, <g, y> / <T(d_old), y>),  y = g - T(g_old)
    (Hestenes-Stiefel)

The step α comes from backtracking that remembers what worked: a step accepted at once is doubled
for the next search. Near a minimum, where losses differ by rounding only, the fall along a step is
taken from the slopes at its ends.
"""

from __future__ import annotations

import math
from typing import ClassVar

from typing_extensions import override

from fisherfold.manifolds.base import Point, Tangent, combine, is_finite, leaves, scale
from fisherfold.solvers.method import FIRST_STEP, MAX_TRIALS, Method
from fisherfold.solvers.state import State

# the fraction of the linear prediction that a step must achieve (Armijo), and the factor of a
# shorter one
SUFFICIENT, CONTRACTION = 0.5, 0.5
# a step shorter than this share of the point changes it by rounding only
SHORTEST_STEP = 1e-12
# failed searches in a row before a run has stalled: the last goes on where the one before ended
SEARCHES = 3


class RCG(Method):
    """Hestenes-Stiefel conjugate gradients over all samples."""

    name: ClassVar[str] = "rcg"

    @override
    def start(self, state: State) -> None:
        gradient = self.evaluate(state)
        state.samples += self.problem.n_samples
        state.vectors |= {"gradient": gradient, "direction": scale(-1.0, gradient)}
        state.numbers |= {"restarted": 0, "rejections": 0}
        if 0 < state.gradient_norm < math.inf:
            state.numbers["alpha"] = FIRST_STEP / state.gradient_norm

    @override
    def step(self, state: State) -> None:
        x, gradient, direction = state.x, state.vectors["gradient"], state.vectors["direction"]
        if self.is_over(state):
            return
        # of the unit gradient: in float32 squares of gradients below 1e-22 are 0, a slope at which
        # any step will do
        unit = scale(1 / state.gradient_norm, gradient)
        slope = state.gradient_norm * self.inner(x, unit, direction)
        trial, trials, finite = self._line_search(state, direction, slope)
        if trial is None:
            state.numbers["restarted"] += 1
            if state.numbers["restarted"] == 1:
                # the direction or the remembered step was bad: one more try along the gradient
                # itself
                state.vectors["direction"] = scale(-1.0, gradient)
                state.numbers["alpha"] = FIRST_STEP / state.gradient_norm
            shortest = self._shortest(x, state.vectors["direction"])
            if state.numbers["restarted"] < SEARCHES and state.numbers["alpha"] >= shortest:
                state.record = {"accepted": 0.0, "trials": float(trials)}
                return
            seen = "lower" if finite else "finite"
            length = state.numbers["alpha"] * self.norm(x, state.vectors["direction"])
            message = f"the line search found no {seen} loss along the gradient, down to steps of {length:.1e}"
            state.failure = ("stalled" if finite else "non_finite", message)
            return
        before = (x, state.loss, state.gradient_norm)
        state.x = trial
        new_gradient = self.evaluate(state)
        state.samples += self.problem.n_samples
        if not is_finite(new_gradient):
            state.x, state.loss, state.gradient_norm = before
            # stay, and try a much shorter step next
            state.numbers["alpha"] /= 16
            state.record = {"accepted": 0.0, "trials": float(trials)}
            self.reject(state, "non_finite", "the gradient ahead is not finite", MAX_TRIALS)
            return
        state.numbers |= {"restarted": 0, "rejections": 0}
        state.vectors |= {
            "gradient": new_gradient,
            "direction": self._next_direction(x, trial, gradient, new_gradient, direction),
        }
        state.record = {"accepted": 1.0, "trials": float(trials), "step": state.numbers["alpha"]}

    def _line_search(
        self, state: State, direction: Tangent, slope: float
    ) -> tuple[Point | None, int, bool]:
        """The accepted point or None, the number of loss evaluations, and whether any was finite.

        Moves α on.
        """
        alpha, shortest, finite = state.numbers["alpha"], self._shortest(state.x, direction), False
        for trials in range(1, MAX_TRIALS + 1):
            trial = self.manifold.retract(state.x, scale(alpha, direction))
            loss = self.value(trial) if is_finite(trial) else math.inf
            finite = finite or math.isfinite(loss)
            if math.isfinite(loss) and -alpha * slope <= self.problem.loss_rounding(
                state.x, state.loss
            ):
                fallen = self._fall_by_slopes(state, trial, scale(alpha, direction))
            else:
                fallen = state.loss - loss
            enough = fallen >= -SUFFICIENT * alpha * slope
            if enough or (trials == MAX_TRIALS and loss < state.loss):
                # on average one extra evaluation: push when it went well or after a long retreat,
                # else keep the pace
                state.numbers["alpha"] = alpha if trials == 2 else 2 * alpha
                return trial, trials, finite
            alpha *= CONTRACTION
            if alpha < shortest:
                break
        state.numbers["alpha"] = alpha
        return None, trials, finite

    def _shortest(self, x: Point, direction: Tangent) -> float:
        """The α below which a step changes the point by rounding only."""
        size = math.hypot(*(float(leaf.norm()) for leaf in leaves(x)))
        return SHORTEST_STEP * size / self.norm(x, direction)

    def _fall_by_slopes(self, state: State, trial: Point, move: Tangent) -> float:
        gradient = self.problem.gradient(trial)
        state.samples += self.problem.n_samples
        return self.fall(state.x, trial, move, state.vectors["gradient"], gradient)

    def _next_direction(
        self, x: Point, y: Point, gradient: Tangent, new_gradient: Tangent, direction: Tangent
    ) -> Tangent:
        carried = self.manifold.transport(x, y, direction)
        change = combine(1.0, new_gradient, -1.0, self.manifold.transport(x, y, gradient))
        along = self.inner(y, carried, change)
        beta = max(0.0, self.inner(y, new_gradient, change) / along) if along != 0 else 0.0
        candidate = combine(-1.0, new_gradient, beta, carried)
        if not self.inner(y, new_gradient, candidate) < 0:
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
