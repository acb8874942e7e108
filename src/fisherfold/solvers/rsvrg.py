"""Variance reduction around a snapshot.

RSVRG, and RNGD with variance-reduced gradient and Fisher information.

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
from fisherfold.solvers.method import Schedule, Stochastic, at, check_kind, positive
from fisherfold.solvers.state import State


class RSVRG(Stochastic):
    """Variance-reduced stochastic gradient steps of fixed size.

    An epoch that ends in values that are not finite is repeated from its snapshot with a quarter of
    the step; ``max_rejections`` of them in a row end the run.

    Args:
        problem: the problem.
        step: t, a number or a function of the epoch.
        **options: ``batch_size``, ``sampling``, ``stream`` and ``max_rejections``, as of
            ``Stochastic``.
    """

    name: ClassVar[str] = "rsvrg"

    def __init__(self, problem: Problem, *, step: Schedule, **options: Any) -> None:
        super().__init__(problem, **options)
        self.step_size = step if callable(step) else positive("step", step)
        self._snapshot: Snapshot | None = None

    def _anchor(self, state: State) -> Snapshot:
        self._snapshot = self.problem.snapshot(state.x)
        state.loss = float(self._snapshot.loss)
        state.gradient_norm = self.norm(state.x, self._snapshot.full_gradient)
        return self._snapshot

    @override
    def start(self, state: State) -> None:
        super().start(state)
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
            self.shorten(state, step)
        else:
            state.numbers["rejections"] = 0
            state.record = {"accepted": 1.0, "step": step}


class RNGDVR(RSVRG):
    """RNGD with variance-reduced gradient and Fisher information, as in the paper's first two experiments.

    ``fisher`` is one of the problem's ``fisher_kinds``, the first if not given; ``damping`` is λ, a
    number or a function of the epoch. All other options are those of ``RSVRG``.
    """

    name: ClassVar[str] = "rngd-vr"

    def __init__(
        self,
        problem: Problem,
        *,
        step: Schedule,
        fisher: str | None = None,
        damping: Schedule = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(problem, step=step, **options)
        self.kind = check_kind(fisher, problem)
        self.damping = damping if callable(damping) else positive("damping", damping, zero=True)

    @override
    def _inner(self, snapshot: Snapshot, state: State, batches: list[Tensor], step: float) -> Point:
        damping = at("damping", self.damping, state.iteration)
        return snapshot.epoch(state.x, batches, step=step, kind=self.kind, damping=damping)
