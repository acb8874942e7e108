"""Riemannian stochastic gradient descent with the paper's decay.

    θ ← R_θ(-η_k g_B(θ)),    η_k = η₀ / (1 + η₀ δ k),  k counts steps, δ = 1/10 in the paper

One iteration is one epoch.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from fisherfold.manifolds.base import is_finite
from fisherfold.problems.base import Problem
from fisherfold.solvers.method import Draws, Method, at_least_one, positive
from fisherfold.solvers.state import State


class RSGD(Method):
    """Stochastic gradient steps; an epoch that leaves the finite numbers is repeated with a quarter of the step.

    Args:
        problem: the problem.
        step: η₀.
        decay: δ of the schedule.
        batch_size: samples per step; one tenth of the samples if not given.
        sampling: ``shuffle`` (every sample once per epoch; so it is if not given) or ``replacement``.
        stream: recorded sample indices, shape (epochs, draws), in place of ``sampling``.
        max_rejections: so many spoilt epochs end the run.
    """

    name: ClassVar[str] = "rsgd"
    exact = False

    def __init__(
        self,
        problem: Problem,
        *,
        step: float,
        decay: float = 0.1,
        batch_size: int | None = None,
        sampling: str | None = None,
        stream: Tensor | None = None,
        max_rejections: int = 10,
    ) -> None:
        super().__init__(problem)
        self.step_size, self.decay = positive("step", step), positive("decay", decay, zero=True)
        self.draws = Draws(problem.n_samples, batch_size, sampling, stream)
        self.max_rejections = at_least_one("max_rejections", max_rejections)

    @override
    def start(self, state: State) -> None:
        state.numbers |= {"steps": 0, "shrink": 1.0, "rejections": 0}

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
        self._shorten(state)

    @override
    def retreat(self, state: State) -> None:
        super().retreat(state)
        self._shorten(state)

    def _shorten(self, state: State) -> None:
        first = self.step_size * state.numbers["shrink"]
        state.numbers["shrink"] /= 4
        state.numbers["rejections"] += 1
        state.record = {"accepted": 0.0, "step": first}
        if state.numbers["rejections"] >= self.max_rejections:
            state.failure = ("non_finite", f"a step of {first:.1e} leads to values that are not finite")
