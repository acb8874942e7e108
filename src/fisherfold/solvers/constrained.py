r"""Constraints on a manifold by the augmented Lagrangian, around any method of ``minimize``.

    min f(x)    with h(x) = 0, g(x) ≤ 0,    x ∈ M

    L(x) = f(x) + λᵀh(x) + ρ/2 |h(x)|² + 1/(2ρ) Σ_j [max(0, μ_j + ρ g_j(x))² - μ_j²]

L is minimised to a falling gradient; then ``λ ← λ + ρ h`` and ``μ ← max(0, μ + ρ g)``, and ρ grows
where the violation has not fallen (Liu and Boumal 2020, "Simple algorithms for optimization on
Riemannian manifolds with constraints"). At the end λ and μ are the multipliers: minus the slopes of
the minimum in the bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fisherfold.manifolds.base import Point, leaves
from fisherfold.problems import LossProblem, Problem
from fisherfold.solvers.loop import minimize
from fisherfold.solvers.result import Result, Trace
from fisherfold.solvers.stopping import GradientNorm

Constraint = Callable[[Any], Tensor]

# the violation must fall by this factor in a round, or the penalty grows by the other
_FALL = 0.25
_GROWTH = 10.0
# the gradient norm of the first round, and its fall from round to round
_FIRST_GRADIENT = 1e-2
_GRADIENT_FALL = 0.1
# multipliers are kept within this bound, of a problem without a feasible point
_LARGEST_MULTIPLIER = 1e8


@dataclass(frozen=True)
class ConstrainedResult(Result):
    """The outcome of ``minimize_constrained``.

    Attributes:
        violation: the largest of ``|h(x)|`` and ``max(0, g(x))``.
        equality_multipliers: λ, of the entries of h.
        inequality_multipliers: μ ≥ 0, of the entries of g; 0 where a bound does not bind.
    """

    violation: float = 0.0
    equality_multipliers: Tensor | None = field(default=None, repr=False)
    inequality_multipliers: Tensor | None = field(default=None, repr=False)


def minimize_constrained(
    problem: Problem,
    x0: Point,
    method: str = "trust-region",
    *,
    equality: Constraint | None = None,
    inequality: Constraint | None = None,
    tol: float = 1e-6,
    max_rounds: int = 50,
    penalty: float = 10.0,
    **options: Any,
) -> ConstrainedResult:
    """Minimise a loss over its manifold under further constraints.

    Args:
        problem: the problem; its loss must be a torch function of the point.
        x0: the starting point on the manifold, which need not satisfy the constraints.
        method: a method of ``minimize`` for the rounds: ``trust-region``, ``lbfgs``, ``rcg`` or
            ``rgd``.
        equality: h, a torch function of the point that returns a vector to be 0.
        inequality: g, a torch function that returns a vector to be at most 0.
        tol: the violation and the gradient norm of L at which the run ends.
        max_rounds: the most minimisations of L.
        penalty: ρ at first.
        **options: for every call of ``minimize``.

    Returns:
        The result, with the violation and the multipliers; ``status`` is ``infeasible`` if no point
        was found that satisfies the constraints.

    Raises:
        ValueError: if there is no constraint, or one is no finite real vector at the start.
    """
    if equality is None and inequality is None:
        raise ValueError("minimize_constrained needs equality or inequality; use minimize without")
    state = _Lagrangian(problem, equality, inequality, x0, penalty)
    x, accuracy, iterations = x0, _FIRST_GRADIENT, 0
    before = float("inf")
    trace = Trace()
    for _ in range(max_rounds):
        accuracy = max(tol, _GRADIENT_FALL * accuracy)
        inner = LossProblem(problem.manifold, state.value)
        run = minimize(inner, x, method, **{"stop": GradientNorm(accuracy), **options})
        x, iterations = run.x, iterations + run.iterations
        violation = state.violation(x)
        trace.rows.extend({**row, "penalty": state.penalty} for row in run.trace)
        if violation <= tol and accuracy <= tol:
            break
        state.update(x, grow=violation > _FALL * before)
        before = violation
    status, message = _verdict(run, violation, tol, max_rounds)
    with torch.no_grad():
        value = float(problem.loss(x))
    return ConstrainedResult(
        x=x,
        value=value,
        status=status,
        message=message,
        trace=trace,
        iterations=iterations,
        last=x,
        problem=problem,
        violation=violation,
        equality_multipliers=state.equal_weights,
        inequality_multipliers=state.least_weights,
    )


def _verdict(run: Result, violation: float, tol: float, max_rounds: int) -> tuple[str, str]:
    if not violation <= tol:
        return "infeasible", (
            f"the constraints are violated by {violation:.1e}, more than {tol:.0e}, after "
            f"{max_rounds} rounds; begin nearer to a point that satisfies them, or check that "
            "there is one"
        )
    if run.success:
        return "converged", f"the constraints hold to {violation:.1e}; {run.message}"
    return run.status, run.message


class _Lagrangian:
    """L with its multipliers and penalty."""

    def __init__(
        self,
        problem: Problem,
        equality: Constraint | None,
        inequality: Constraint | None,
        x0: Point,
        penalty: float,
    ) -> None:
        self.problem = problem
        self.equality = equality
        self.inequality = inequality
        self.penalty = penalty
        self.equal_weights = torch.zeros_like(_values(equality, x0, "equality"))
        self.least_weights = torch.zeros_like(_values(inequality, x0, "inequality"))

    def value(self, x: Point) -> Tensor:
        """L(x)."""
        total = self.problem.loss(x)
        if self.equality is not None:
            h = self.equality(x).reshape(-1)
            total = total + self.equal_weights @ h + 0.5 * self.penalty * (h @ h)
        if self.inequality is not None:
            pushed = (self.least_weights + self.penalty * self.inequality(x).reshape(-1)).clamp(0)
            squares = pushed.square() - self.least_weights.square()
            total = total + squares.sum() / (2 * self.penalty)
        return total

    @torch.no_grad()
    def violation(self, x: Point) -> float:
        """The largest violation of a constraint."""
        parts = [leaves(x)[0].real.new_zeros(1)]
        if self.equality is not None:
            parts.append(self.equality(x).reshape(-1).abs())
        if self.inequality is not None:
            parts.append(self.inequality(x).reshape(-1).clamp(min=0))
        return float(torch.cat(parts).max())

    @torch.no_grad()
    def update(self, x: Point, *, grow: bool) -> None:
        """Take the multipliers of a minimum of L, and a larger penalty if asked to."""
        if self.equality is not None:
            found = self.equal_weights + self.penalty * self.equality(x).reshape(-1)
            self.equal_weights = found.clamp(-_LARGEST_MULTIPLIER, _LARGEST_MULTIPLIER)
        if self.inequality is not None:
            found = self.least_weights + self.penalty * self.inequality(x).reshape(-1)
            self.least_weights = found.clamp(0, _LARGEST_MULTIPLIER)
        if grow:
            self.penalty *= _GROWTH


def _values(constraint: Constraint | None, x0: Point, name: str) -> Tensor:
    """The values of a constraint at the start, which must be a finite real vector."""
    if constraint is None:
        return leaves(x0)[0].real.new_zeros(0)
    with torch.no_grad():
        value = constraint(x0)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        seen = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must return a real torch vector, got {seen}")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{name} must be finite at x0, got NaN or infinite entries")
    return value.reshape(-1)
