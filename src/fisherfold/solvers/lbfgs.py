"""Riemannian limited-memory BFGS (Huang, Gallivan and Absil 2015), with a line search.

    θ ← R_θ(α d),    d = -B g,    s = T(α d),  y = g_new - T(g)

B is the inverse of the Hessian that the last m pairs (s, y) imply, by the two-loop recursion from γ
= <s, y>/<y, y>; T carries g and all pairs along. Pairs without clear positive curvature are left
out, which keeps B positive definite.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from typing_extensions import override

from fisherfold.fisher.solve import coordinates
from fisherfold.manifolds.base import (
    Point,
    Tangent,
    combine,
    flatten,
    is_finite,
    scale,
    tree_map,
    unflatten,
)
from fisherfold.problems.base import Problem
from fisherfold.solvers.method import FIRST_STEP, MAX_TRIALS, Method, at_least_one
from fisherfold.solvers.state import State

# the fraction of the linear prediction that a step must achieve (Armijo)
SUFFICIENT = 1e-4
# the cosine between s and y below which a pair is left out
LEAST_CURVATURE = 1e-8


class LBFGS(Method):
    """L-BFGS over all samples.

    Args:
        problem: the problem.
        memory: the number m of pairs that are kept.
    """

    name: ClassVar[str] = "lbfgs"

    def __init__(self, problem: Problem, *, memory: int = 10) -> None:
        super().__init__(problem)
        self.memory = at_least_one("memory", memory)

    @override
    def start(self, state: State) -> None:
        state.vectors["gradient"] = self.evaluate(state)
        state.samples += self.problem.n_samples
        state.numbers["pairs"] = 0

    @override
    def step(self, state: State) -> None:
        x, gradient, norm = state.x, state.vectors["gradient"], state.gradient_norm
        if self.is_over(state):
            return
        pairs = self._pairs(state)
        direction = (
            self._direction(x, gradient, pairs) if pairs else scale(-FIRST_STEP / norm, gradient)
        )
        slope = self.inner(x, gradient, direction)
        if not slope < 0:
            pairs, direction = [], scale(-FIRST_STEP / norm, gradient)
            slope = -FIRST_STEP * norm
        trial, move, trials = self._line_search(state, direction, slope)
        state.record = {"accepted": float(trial is not None), "trials": float(trials)}
        if trial is None:
            # pairs may be of a region that was left: once more along the gradient
            self._keep(state, [])
            if not pairs:
                sentence = (
                    f"the line search found no lower loss along the gradient in {trials} trials"
                )
                state.failure = ("stalled", sentence)
            return
        state.record["step"] = self.norm(x, move)
        pairs = self._carried(x, trial, [*pairs, (move, gradient)])
        s, old = pairs.pop()
        y = combine(1.0, state.vectors["gradient"], -1.0, old)
        if self.inner(trial, s, y) > LEAST_CURVATURE * self.norm(trial, s) * self.norm(trial, y):
            pairs.append((s, y))
        self._keep(state, pairs[-self.memory :])

    def _line_search(
        self, state: State, direction: Tangent, slope: float
    ) -> tuple[Point | None, Tangent, int]:
        """The accepted point, put into the state, or None.

        The step, and the number of evaluations.
        """
        x, gradient, alpha = state.x, state.vectors["gradient"], 1.0
        for trials in range(1, MAX_TRIALS + 1):
            move = scale(alpha, direction)
            trial, value, fallen = self.manifold.retract(x, move), math.inf, -math.inf
            if is_finite(trial):
                loss, new_gradient = self.problem.loss_and_gradient(trial)
                state.samples += self.problem.n_samples
                new_norm = self.norm(trial, new_gradient)
                value = float(loss) if math.isfinite(new_norm) else math.inf
            if math.isfinite(value):
                # where losses no longer tell a fall from a rise gradients do
                blurred = -alpha * slope <= self.problem.loss_rounding(x, state.loss)
                fallen = (
                    self.fall(x, trial, move, gradient, new_gradient)
                    if blurred
                    else state.loss - value
                )
            if fallen >= -SUFFICIENT * alpha * slope:
                state.x, state.loss, state.vectors["gradient"] = trial, value, new_gradient
                state.gradient_norm = new_norm
                return trial, move, trials
            # the minimum of the parabola through slope and value
            best = alpha * slope / (2 * (alpha * slope + fallen)) if math.isfinite(fallen) else 0.1
            alpha *= min(max(best, 0.1), 0.5)
        return None, scale(alpha, direction), trials

    def _direction(
        self, x: Point, gradient: Tangent, pairs: list[tuple[Tangent, Tangent]]
    ) -> Tangent:
        """-B g by the two-loop recursion, on its coefficients of all s, all y and g."""
        m = len(pairs)
        rows = torch.stack(
            [flatten(v) for v in (*(s for s, _ in pairs), *(y for _, y in pairs), gradient)]
        )
        inner = coordinates(self.manifold, x, rows, rows).double().cpu().numpy()
        q, shares = np.eye(2 * m + 1)[-1], np.zeros(m)
        for k in reversed(range(m)):
            shares[k] = inner[k] @ q / inner[k, m + k]
            q[m + k] -= shares[k]
        q *= inner[m - 1, 2 * m - 1] / inner[2 * m - 1, 2 * m - 1]
        for k in range(m):
            q[k] += shares[k] - inner[m + k] @ q / inner[k, m + k]
        return unflatten(-torch.from_numpy(q).to(rows) @ rows, gradient)

    def _carried(
        self, x: Point, y: Point, pairs: list[tuple[Tangent, Tangent]]
    ) -> list[tuple[Tangent, Tangent]]:
        """All vectors in the tangent space at y, carried at once."""
        stacked = tree_map(
            lambda *vectors: torch.stack(vectors), *(vector for pair in pairs for vector in pair)
        )
        moved = self.manifold._transport(x, y, stacked, self.manifold.transport_method)
        vectors = [tree_map(lambda leaf, k=k: leaf[k], moved) for k in range(2 * len(pairs))]
        return list(zip(vectors[::2], vectors[1::2], strict=True))

    def _pairs(self, state: State) -> list[tuple[Tangent, Tangent]]:
        return [
            (state.vectors[f"s{k}"], state.vectors[f"y{k}"])
            for k in range(int(state.numbers["pairs"]))
        ]

    def _keep(self, state: State, pairs: list[tuple[Tangent, Tangent]]) -> None:
        state.vectors = {"gradient": state.vectors["gradient"]}
        for k, (s, y) in enumerate(pairs):
            state.vectors |= {f"s{k}": s, f"y{k}": y}
        state.numbers["pairs"] = len(pairs)
