"""Riemannian natural gradient descent, Algorithm 1 of the paper, and its fixed-step form.

At θ_k, from estimates g_k, F_k on a batch and with λ_k = σ_k ‖g_k‖:

    d_k = -(F_k + λ_k I)⁻¹ g_k,    z_k = R_{θ_k}(d_k),    ρ_k = (Ψ(z_k) - Ψ(θ_k)) / (m_k(d_k) - Ψ(θ_k))

Accept z_k when ρ_k ≥ η₁ and ‖g_k‖ ≥ η₂/σ_k, then σ ← max(σ_min, σ/γ); else stay and σ ← γσ.
"""

from __future__ import annotations

import math
import warnings
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.fisher.solve import Solution, solve
from fisherfold.manifolds.base import Point, Tangent, is_finite, leaves, scale
from fisherfold.problems.base import Problem
from fisherfold.solvers.method import BatchSize, Method, Schedule, at, check_batch_size, positive
from fisherfold.solvers.state import State


class RNGD(Method):
    """Algorithm 1, deterministic or on batches; with ``step`` its fixed-step form without acceptance test.

    Args:
        problem: the problem.
        fisher: one of the problem's ``fisher_kinds``; the first if not given.
        batch_size: samples per estimate, or a function of the iteration (for growing accuracy); all if not given.
        sigma: σ₀, the first regularisation over the gradient norm.
        sigma_min: the least σ.
        eta1: the least ratio ρ of an accepted step.
        eta2: steps are accepted while ‖g‖ ≥ η₂/σ; the theory wants it large, practice tiny.
        gamma: the factor by which σ moves.
        solve: how the damped system is solved; ``auto`` or a name of ``fisherfold.fisher.solve.METHODS``.
        forcing: CG stops at the relative residual min(forcing, ‖g_k‖/‖g_0‖).
        step: a fixed step t, or a schedule t(k): then d is scaled by t and always taken.
        damping: λ of the fixed-step form.
        max_rejections: so many rejections in a row end the run.
    """

    name: ClassVar[str] = "rngd"

    def __init__(
        self,
        problem: Problem,
        *,
        fisher: str | None = None,
        batch_size: BatchSize = None,
        sigma: float = 1.0,
        sigma_min: float = 1e-6,
        eta1: float = 0.1,
        eta2: float = 1e-20,
        gamma: float = 4.0,
        solve: str = "auto",
        forcing: float = 0.1,
        step: Schedule | None = None,
        damping: Schedule = 0.0,
        max_rejections: int = 40,
    ) -> None:
        super().__init__(problem)
        self.kind = fisher or problem.fisher_kinds[0]
        if not callable(batch_size):
            check_batch_size(batch_size, problem.n_samples)
        self.batch_size = batch_size
        self.exact = batch_size is None or batch_size == problem.n_samples
        self.sigma, self.sigma_min = positive("sigma", sigma), positive("sigma_min", sigma_min)
        self.eta2 = positive("eta2", eta2)
        if not 0 < eta1 < 1:
            raise ValueError(f"eta1 must lie between 0 and 1, got {eta1}")
        if not gamma > 1:
            raise ValueError(f"gamma must be greater than 1, got {gamma}")
        self.eta1, self.gamma = eta1, gamma
        self.solver, self.forcing = solve, positive("forcing", forcing)
        self.step_size, self.damping, self.max_rejections = step, damping, max_rejections
        if step is not None and not callable(step):
            positive("step", step)
        if not callable(damping):
            positive("damping", damping, zero=True)
        if self.manifold.retraction_order < 2:
            warnings.warn(
                f"the retraction {self.manifold.retraction!r} of {self.manifold!r} is of first order; the theory of "
                "rngd asks for second order, since the model m_k else misses the curve's own acceleration",
                stacklevel=4,
            )

    @override
    def start(self, state: State) -> None:
        state.numbers |= {"sigma": self.sigma, "rejections": 0}
        if self.exact:
            state.vectors["gradient"] = self.evaluate(state)
            state.samples += self.problem.n_samples
            state.numbers["first_norm"] = state.gradient_norm

    @override
    def step(self, state: State) -> None:
        batch, loss, gradient = self._estimates(state)
        norm = self.norm(state.x, gradient)
        state.numbers.setdefault("first_norm", norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._reject(state, "non_finite", "the loss or gradient estimate at the iterate is not finite")
            return
        if norm == 0:
            state.record = {"rho": math.nan, "sigma": state.numbers["sigma"], "accepted": 0.0}
            return
        fixed = self.step_size is not None
        damping = at(self.damping, state.iteration) if fixed else state.numbers["sigma"] * norm
        solution = self._direction(state, batch, gradient, damping, norm)
        length = at(self.step_size, state.iteration) * state.numbers.get("shrink", 1.0) if self.step_size else 1.0
        trial = self.manifold.retract(state.x, scale(-length, solution.x))
        rho = math.nan
        if is_finite(trial):
            rho = self._try(state, trial, batch, loss, solution, norm, fixed)
        else:
            self._reject(state, "non_finite", "the natural gradient direction is not finite")
        state.record = {
            "rho": rho, "sigma": state.numbers["sigma"], "accepted": float(state.numbers["rejections"] == 0),
            "damping": damping, "cg_iterations": float(solution.iterations), "residual": solution.residual,
        }  # fmt: skip
        if not self.exact:
            state.record |= {"batch_loss": loss, "batch_gradient_norm": norm}

    def _estimates(self, state: State) -> tuple[Tensor | None, float, Tangent]:
        if self.exact:
            return None, state.loss, state.vectors["gradient"]
        size = at(self.batch_size, state.iteration) if self.batch_size is not None else self.problem.n_samples
        size = check_batch_size(int(size), self.problem.n_samples)
        batch = torch.randperm(self.problem.n_samples, generator=state.generator)[:size]
        batch = batch.to(leaves(state.x)[0].device)
        loss, gradient = self.problem.loss_and_gradient(state.x, batch)
        state.samples += size
        return batch, float(loss), gradient

    def _direction(
        self, state: State, batch: Tensor | None, gradient: Tangent, damping: float, norm: float
    ) -> Solution:
        operator = self.problem.fisher(state.x, batch, kind=self.kind)
        rtol = max(min(self.forcing, norm / state.numbers["first_norm"]), 1e-12)
        solution = solve(operator, gradient, damping, method=self.solver, rtol=rtol)
        state.products += solution.iterations * (self.problem.n_samples if batch is None else len(batch))
        return solution

    def _try(
        self,
        state: State,
        trial: Point,
        batch: Tensor | None,
        loss: float,
        solution: Solution,
        norm: float,
        fixed: bool,
    ) -> float:
        """Evaluate the trial point, accept or reject it, and move σ. Returns ρ."""
        gradient: Tangent | None = None
        if batch is None:
            value, gradient = self.problem.loss_and_gradient(trial)
            state.samples += self.problem.n_samples
        else:
            value = self.problem.loss(trial, batch)
        trial_loss = float(value)
        # both falls shrink to rounding near a minimum: the same guard on both makes ρ tend to 1 there instead of noise
        guard = 1e3 * torch.finfo(leaves(trial)[0].dtype).eps * abs(loss)
        predicted = solution.decrease
        rho = (loss - trial_loss + guard) / (predicted + guard) if predicted + guard > 0 else -math.inf
        sigma = state.numbers["sigma"]
        if not math.isfinite(trial_loss) or (gradient is not None and not is_finite(gradient)):
            self._reject(state, "non_finite", "the loss at the trial point is not finite")
            return math.nan
        if not fixed and not (rho >= self.eta1 and norm >= self.eta2 / sigma):
            self._reject(state, "stalled", f"no step was accepted, the last ratio ρ is {rho:.2g}")
            return rho
        state.x = trial
        state.numbers |= {"sigma": max(self.sigma_min, sigma / self.gamma), "rejections": 0}
        if gradient is not None:
            state.vectors["gradient"] = gradient
            state.loss, state.gradient_norm = trial_loss, self.norm(trial, gradient)
        return rho

    def _reject(self, state: State, status: str, sentence: str) -> None:
        state.numbers["sigma"] *= self.gamma
        state.numbers["rejections"] += 1
        if self.step_size is not None:
            state.numbers["shrink"] = state.numbers.get("shrink", 1.0) / self.gamma
        if state.numbers["rejections"] >= self.max_rejections:
            state.failure = (status, f"{sentence} ({self.max_rejections} tries in a row)")
