"""Riemannian stochastic gradient descent with the paper's decay.

    θ ← R_θ(-η_k g_B(θ)),    η_k = η₀ / (1 + η₀ δ k),  k counts steps, δ = 1/10 in the paper

One iteration is one epoch.
"""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from fisherfold.manifolds.base import is_finite
from fisherfold.problems.base import Problem
from fisherfold.solvers.method import Stochastic, positive
from fisherfold.solvers.state import State


class RSGD(Stochastic):
    """Stochastic gradient steps.

    An epoch that leaves the finite numbers is repeated with a quarter of the step.

    Args:
        problem: the problem.
        step: η₀.
        decay: δ of the schedule.
        **options: ``batch_size``, ``sampling``, ``stream`` and ``max_rejections``, as of
            ``Stochastic``.
    """

    name: ClassVar[str] = "rsgd"
    exact = False

    def __init__(
        self, problem: Problem, *, step: float, decay: float = 0.1, **options: Any
    ) -> None:
        super().__init__(problem, **options)
        self.step_size, self.decay = positive("step", step), positive("decay", decay, zero=True)

    @override
    def start(self, state: State) -> None:
        super().start(state)
        state.numbers["steps"] = 0

    @override
    def step(self, state: State) -> None:
        taken = int(state.numbers["steps"])
        first = self.step_size * state.numbers["shrink"]

        def step(k: int) -> float:
            return first / (1 + first * self.decay * (taken + k))

        batches = list(self.draws.epoch(state))
        x = self.problem.descend(state.x, batches, step=step)
        state.samples += sum(len(batch) for batch in batches)
        if is_finite(x):
            state.x = x
            state.numbers["steps"] = taken + len(batches)
            state.record = {"accepted": 1.0, "step": step(len(batches))}
            return
        self.shorten(state, first)

    @override
    def retreat(self, state: State) -> None:
        super().retreat(state)
        self.shorten(state, self.step_size * state.numbers["shrink"])
