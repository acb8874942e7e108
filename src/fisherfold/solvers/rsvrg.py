"""Variance reduction around a snapshot: RSVRG, and RNGD with variance-reduced gradient and Fisher information.

One iteration is one outer epoch: a full pass at the snapshot θ₀, then one pass of inner steps

    θ ← R_θ(-t g),                 g = g_B(θ) + T(g(θ₀) - g_B(θ₀))           (rsvrg)
    θ ← R_θ(-t (F + λ I)⁻¹ g),     F = the batch at θ, all others at θ₀       (rngd-vr)

The inner pass is the snapshot's, so that a problem may fuse it.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from fisherfold.manifolds.base import Point, is_finite
from fisherfold.problems.base import Problem, Snapshot
from fisherfold.solvers.method import Draws, Method, Schedule, at, at_least_one, check_kind, positive
from fisherfold.solvers.state import State


class RSVRG(Method):
    """Variance-reduced stochastic gradient steps of fixed size.

    An epoch that ends in values that are not finite is repeated from its snapshot with a quarter of the step.

    Args:
        problem: the problem.
        step: t, a number or a function of the epoch.
        batch_size: samples per inner step; one tenth of the samples if not given.
        sampling: ``shuffle`` (every sample once per epoch; so it is if not given) or ``replacement``.
        stream: recorded sample indices, shape (epochs, draws), in place of ``sampling``.
        max_rejections: so many spoilt epochs in a row end the run.
    """

    name: ClassVar[str] = "rsvrg"

    def __init__(
        self,
        problem: Problem,
        *,
        step: Schedule,
        batch_size: int | None = None,
        sampling: str | None = None,
        stream: Tensor | None = None,
        max_rejections: int = 10,
    ) -> None:
        super().__init__(problem)
        self.step_size = step if callable(step) else positive("step", step)
        self.draws = Draws(problem.n_samples, batch_size, sampling, stream)
        self.max_rejections = at_least_one("max_rejections", max_rejections)
        self._snapshot: Snapshot | None = None

    def _anchor(self, state: State) -> Snapshot:
        self._snapshot = self.problem.snapshot(state.x)
        state.loss = float(self._snapshot.loss)
        state.gradient_norm = self.norm(state.x, self._snapshot.full_gradient)
        return self._snapshot

    @override
    def start(self, state: State) -> None:
        state.numbers |= {"shrink": 1.0, "rejections": 0}
        self._anchor(state)
        state.samples += self.problem.n_samples

    def _inner(self, snapshot: Snapshot, state: State, batches: list[Tensor], step: float) -> Point:
        return snapshot.epoch(state.x, batches, step=step)

    @override
    def step(self, state: State) -> None:
        snapshot = self._snapshot or self._anchor(state)
        step = at("step", self.step_size, state.iteration) * state.numbers["shrink"]
        batches = list(self.draws.epoch(state))
        x = self._inner(snapshot, state, batches, step)
        # every inner sample is evaluated at the iterate and again at the snapshot
        state.samples += 2 * sum(len(batch) for batch in batches)
        before, state.x = state.x, x
        if is_finite(x):
            self._anchor(state)
            state.samples += self.problem.n_samples
        if not (is_finite(x) and math.isfinite(state.loss) and math.isfinite(state.gradient_norm)):
            state.x, self._snapshot = before, snapshot
            state.loss = float(snapshot.loss)
            state.gradient_norm = self.norm(before, snapshot.full_gradient)
            state.numbers["shrink"] /= 4
            state.numbers["rejections"] += 1
            if state.numbers["rejections"] >= self.max_rejections:
                state.failure = ("non_finite", f"a step of {step:.1e} leads to values that are not finite")
        else:
            state.numbers["rejections"] = 0
        state.record = {"accepted": float(state.numbers["rejections"] == 0), "step": step}


class RNGDVR(RSVRG):
    """RNGD with variance-reduced gradient and Fisher information, as in the paper's first two experiments.

    ``fisher`` is one of the problem's ``fisher_kinds``, the first if not given; ``damping`` is λ, a number or a
    function of the epoch. All other options are those of ``RSVRG``.
    """

    name: ClassVar[str] = "rngd-vr"

    def __init__(
        self, problem: Problem, *, step: Schedule, fisher: str | None = None, damping: Schedule = 0.0, **options: Any
    ) -> None:
        super().__init__(problem, step=step, **options)
        self.kind = check_kind(fisher, problem)
        self.damping = damping if callable(damping) else positive("damping", damping, zero=True)

    @override
    def _inner(self, snapshot: Snapshot, state: State, batches: list[Tensor], step: float) -> Point:
        damping = at("damping", self.damping, state.iteration)
        return snapshot.epoch(state.x, batches, step=step, kind=self.kind, damping=damping)
