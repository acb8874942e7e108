"""Riemannian natural gradient descent, Algorithm 1 of the paper, and its fixed-step form.

At θ_k, from estimates g_k, F_k on a batch and with λ_k = σ_k ‖g_k‖:

    d_k = -(F_k + λ_k I)⁻¹ g_k,    z_k = R_{θ_k}(d_k),
    ρ_k = (Ψ(z_k) - Ψ(θ_k)) / (m_k(d_k) - Ψ(θ_k))

Accept z_k when ρ_k ≥ η₁ and ‖g_k‖ ≥ η₂/σ_k, then σ ← max(σ_min, σ/γ); else stay and σ ← γσ. With η₃
> 0 an accepted step lowers σ only if ρ_k ≥ η₃, and raises it if ρ_k < η₃/3, as trust regions do;
the paper has η₃ = 0.

On batches both losses in ρ_k come from a second batch that g_k and F_k have not seen: on their own
batch nearly every step looks good, σ falls to its minimum, and half of the steps raise the loss
over all samples.

On batches of a fixed size noise decides sooner or later, and log σ would be a random walk. After n
turns, which are rejections that follow an acceptance and the reverse, σ moves by γ^(1/(1 + n/10))
instead: Kesten's rule of stochastic approximation, by which σ tends to a power of n.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from fisherfold.fisher.conjugate import Solution
from fisherfold.fisher.operators import FisherOperator
from fisherfold.fisher.solve import METHODS, solve
from fisherfold.manifolds.base import Point, Tangent, is_finite, leaves, scale
from fisherfold.problems.base import LOSS_ROUNDING, Problem
from fisherfold.problems.cache import LastPoint
from fisherfold.solvers.method import (
    BatchSize,
    Method,
    Schedule,
    at,
    at_least_one,
    check_batch_size,
    check_kind,
    positive,
)
from fisherfold.solvers.state import State
from fisherfold.warn import warn

RELATIVE_DAMPING = 1e-2
LEAST_SIGMA = 1e-6
# rounding of a gradient, in units of the precision: its square over the curvature is a fall of the
# loss
GRADIENT_ROUNDING = 1e2
# turns of σ after which its moves on batches are half as long
TURNS = 10


class RNGD(Method):
    """Algorithm 1, deterministic or on batches.

    With ``step`` its fixed-step form without acceptance test.

    Args:
        problem: the problem.
        fisher: one of the problem's ``fisher_kinds``; the first if not given.
        batch_size: samples per estimate, or a function of the iteration (for growing accuracy; what
            is beyond all samples means all); all if not given.
        test_batch: samples of the second batch, on which ρ is measured: a number, or a function of
            the iteration; as many as ``batch_size`` if not given. ``"same"`` measures ρ on the
            batch of the gradient itself, which is not a test.
        sigma: σ₀, the first regularisation over the gradient norm; if not given, such that λ₀ is a
            hundredth of the curvature <g, F g>/<g, g> along the first gradient, whatever the units
            of the problem.
        sigma_min: the least σ; 1e-6 if not given, or σ₀ where that is less, as it is in large
            units.
        eta1: the least ratio ρ of an accepted step; 0.1 if not given.
        eta2: steps are accepted while ‖g‖ ≥ η₂/σ; the theory wants it large, practice 0, as it is
            if not given.
        eta3: from which ρ on an accepted step lowers σ; below a third of it σ rises. 0.75 if not
            given, and 0, which is the paper's rule, on batches. With that rule the step after a
            poor one, but accepted, is often rejected.
        gamma: the factor by which σ moves, less and less on batches of a fixed size; in the
            fixed-step form that by which steps are shortened where one has left the finite numbers.
        solve: how the damped system is solved; ``auto`` or a name of
            ``fisherfold.fisher.solve.METHODS``; ``pinv``, which has no damping, only with ``step``.
        forcing: CG stops at the relative residual min(forcing, 0.9 (‖g_k‖/‖g_{k-1}‖)^1.618), the
            rule of Eisenstat and Walker: no more accuracy than the outer convergence can use.
        step: a fixed step t, or a schedule t(k): then d is scaled by t and always taken; σ and η,
            which have no say there, are errors with it.
        damping: λ of the fixed-step form; an error without ``step``, where λ_k = σ_k ‖g_k‖.
        max_rejections: so many rejections in a row end the run.
    """

    name: ClassVar[str] = "rngd"

    def __init__(
        self,
        problem: Problem,
        *,
        fisher: str | None = None,
        batch_size: BatchSize = None,
        test_batch: BatchSize | Literal["same"] = None,
        sigma: float | None = None,
        sigma_min: float | None = None,
        eta1: float | None = None,
        eta2: float | None = None,
        eta3: float | None = None,
        gamma: float = 4.0,
        solve: str = "auto",
        forcing: float = 0.3,
        step: Schedule | None = None,
        damping: Schedule = 0.0,
        max_rejections: int = 40,
    ) -> None:
        super().__init__(problem)
        if step is not None:
            _refuse_unused(
                sigma=sigma,
                sigma_min=sigma_min,
                eta1=eta1,
                eta2=eta2,
                eta3=eta3,
                test_batch=test_batch,
            )
        self.kind = check_kind(fisher, problem)
        for name, size in (("batch_size", batch_size), ("test_batch", test_batch)):
            if not callable(size) and size != "same":
                check_batch_size(size, problem.n_samples, name)
        self.batch_size = batch_size
        self.exact = batch_size is None or batch_size == problem.n_samples
        if self.exact and test_batch is not None:
            raise ValueError(
                "test_batch is for runs on batches, with batch_size=, got "
                f"test_batch={test_batch!r}"
            )
        self.test_batch = batch_size if test_batch is None else test_batch
        self.sigma = None if sigma is None else positive("sigma", sigma)
        self.sigma_min = None if sigma_min is None else positive("sigma_min", sigma_min)
        self.eta2 = 0.0 if eta2 is None else positive("eta2", eta2, zero=True)
        self.eta1 = 0.1 if eta1 is None else positive("eta1", eta1)
        if not self.eta1 < 1:
            raise ValueError(f"eta1 must lie between 0 and 1, got {eta1}")
        self.eta3 = (
            (0.75 if self.exact else 0.0) if eta3 is None else positive("eta3", eta3, zero=True)
        )
        if not self.eta3 <= 1:
            raise ValueError(f"eta3 must lie between 0 and 1, got {eta3}")
        self.gamma = positive("gamma", gamma)
        if not self.gamma > 1:
            raise ValueError(f"gamma must be greater than 1, got {gamma}")
        if solve not in ("auto", *METHODS):
            raise ValueError(f"solve must be 'auto' or one of {list(METHODS)}, got {solve!r}")
        self.solver, self.forcing = solve, positive("forcing", forcing)
        self.step_size = step if step is None or callable(step) else positive("step", step)
        self.damping = damping if callable(damping) else positive("damping", damping, zero=True)
        if step is None and self.damping != 0:
            raise ValueError(
                "damping is for the fixed-step form, with step=; without it λ is σ‖g‖, got "
                f"{damping}"
            )
        if solve == "pinv" and (step is None or self.damping != 0):
            raise ValueError(
                "solve='pinv' has no damping: it is for the fixed-step form, with step= and "
                "damping=0"
            )
        self.max_rejections = at_least_one("max_rejections", max_rejections)
        self._operator: LastPoint[FisherOperator] = LastPoint()
        if self.manifold.retraction_order < 2:
            warn(
                f"the retraction {self.manifold.retraction!r} of {self.manifold!r} is of first "
                "order; the theory of rngd asks for second order, since the model m_k else misses "
                "the curve's own acceleration",
            )

    @override
    def start(self, state: State) -> None:
        state.numbers |= {"rejections": 0, "shrink": 1.0}
        if self.sigma is not None:
            state.numbers["sigma"] = state.numbers["first_sigma"] = self.sigma
        if self.exact:
            state.vectors["gradient"] = self.evaluate(state)
            state.samples += self.problem.n_samples

    @override
    def step(self, state: State) -> None:
        batch, loss, gradient = self._estimates(state)
        norm = self.norm(state.x, gradient)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if not finite:
            self._reject(
                state, "non_finite", "the loss or gradient estimate at the iterate is not finite"
            )
        if not finite or norm == 0:
            state.record = {
                "rho": math.nan,
                "sigma": state.numbers.get("sigma", math.nan),
                "accepted": 0.0,
            }
            return
        operator = self._fisher(state, batch)
        size = self.problem.n_samples if batch is None else len(batch)
        damping, length = self._damping(state, operator, gradient, norm, size)
        solution = self._direction(state, operator, gradient, damping, norm, size)
        move = scale(-length, solution.x)
        trial = self.manifold.retract(state.x, move)
        rho = math.nan
        if is_finite(trial):
            # m(0) - m(-t d) = t <g, d> - ½ t² <(F + λ)d, d>, and the last product is 2 (<g, d> -
            # decrease)
            slope = self.inner(state.x, gradient, solution.x)
            predicted = length * slope - length**2 * (slope - solution.decrease)
            if self.exact:
                rho = self._test(state, trial, move, predicted)
            else:
                rho = self._test_on_batch(state, trial, batch, predicted, norm)
        else:
            self._reject(state, "non_finite", "the natural gradient direction is not finite")
        state.record = {
            "rho": rho,
            "sigma": state.numbers.get("sigma", math.nan),
            "accepted": float(state.numbers["rejections"] == 0),
            "damping": damping,
            "solve": float(METHODS.index(solution.method))
            if solution.method in METHODS
            else math.nan,
            "cg_iterations": float(solution.iterations),
            "residual": solution.residual,
        }
        if not self.exact:
            state.record |= {"batch_loss": loss, "batch_gradient_norm": norm}

    def _estimates(self, state: State) -> tuple[Tensor | None, float, Tangent]:
        if self.exact:
            return None, state.loss, state.vectors["gradient"]
        batch = self._draw(state, "batch_size", self.batch_size)
        loss, gradient = self.problem.loss_and_gradient(state.x, batch)
        state.samples += len(batch)
        return batch, float(loss), gradient

    def _draw(self, state: State, name: str, size: BatchSize) -> Tensor:
        """A batch without replacement; a size that grows ends with all samples."""
        if callable(size):
            size = min(int(at(name, size, state.iteration)), self.problem.n_samples)
        count = check_batch_size(size, self.problem.n_samples, name)
        order = torch.randperm(self.problem.n_samples, generator=state.generator, device="cpu")
        return order[:count].to(leaves(state.x)[0].device)

    def _fisher(self, state: State, batch: Tensor | None) -> FisherOperator:
        """F at the iterate; after a rejection only λ has changed."""
        kept = (
            self._operator.get(state.x)
            if self.exact and self.kind not in self.problem.random_kinds
            else None
        )
        return kept or self._operator.put(
            state.x, self.problem.fisher(state.x, batch, kind=self.kind)
        )

    def _damping(
        self, state: State, operator: FisherOperator, gradient: Tangent, norm: float, size: int
    ) -> tuple[float, float]:
        """λ and the length of the step: of a fixed-step run as they are given, else σ‖g‖ and 1."""
        if self.step_size is not None:
            length = at("step", self.step_size, state.iteration) * state.numbers["shrink"]
            return at("damping", self.damping, state.iteration), length
        if "sigma" not in state.numbers:
            # λ is RELATIVE_DAMPING times the curvature along the unit gradient
            unit = scale(1 / norm, gradient)
            curvature = self.inner(state.x, unit, operator._matvec(unit))
            state.products += size
            natural = RELATIVE_DAMPING * curvature / norm if math.isfinite(curvature) else 1.0
            first = max(self.sigma_min or 0.0, natural if natural > 0 else LEAST_SIGMA)
            state.numbers["sigma"] = state.numbers["first_sigma"] = first
        # a loss without lower bound has gradients of any size: more damping than there are numbers
        # is the largest one
        return min(state.numbers["sigma"] * norm, torch.finfo(leaves(state.x)[0].dtype).max), 1.0

    def _direction(
        self,
        state: State,
        operator: FisherOperator,
        gradient: Tangent,
        damping: float,
        norm: float,
        size: int,
    ) -> Solution:
        ratio = min(1.0, norm / state.numbers.get("last_norm", norm))
        rtol = max(min(self.forcing, 0.9 * ratio**1.618), 1e-12)
        state.numbers["last_norm"] = norm
        try:
            solution = solve(operator, gradient, damping, method=self.solver, rtol=rtol)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # an eigenvalue problem with NaN in it: a direction that is not finite, like any other
            return Solution(scale(math.nan, gradient), self.solver, decrease=math.nan)
        state.products += solution.iterations * size
        if solution.method in {"dense", "woodbury", "pinv"} and operator.n_rows is not None:
            # a row of the factor is one reverse pass over one sample
            state.products += operator.n_rows
        return solution

    def _test(self, state: State, trial: Point, move: Tangent, predicted: float) -> float:
        """Algorithm 1's test over all samples, and the gradient for the next iteration.

        Returns ρ.
        """
        before, norm = state.vectors["gradient"], state.gradient_norm
        value, gradient = self.problem.loss_and_gradient(trial)
        loss = float(value)
        state.samples += self.problem.n_samples
        if not (math.isfinite(loss) and is_finite(gradient)):
            self._reject(state, "non_finite", "the loss at the trial point is not finite")
            return math.nan
        rounding, eps = (
            self.problem.loss_rounding(state.x, state.loss),
            torch.finfo(leaves(trial)[0].dtype).eps,
        )
        # where losses no longer tell a fall from a rise gradients do, down to their own rounding:
        # with the same guard on both falls ρ tends to 1 there instead of noise
        guard = GRADIENT_ROUNDING**2 * eps * rounding / LOSS_ROUNDING
        fallen = state.loss - loss
        if predicted <= rounding:
            fallen = self.fall(state.x, trial, move, before, gradient)
        rho = (fallen + guard) / (predicted + guard) if predicted > 0 else -math.inf
        accepted = self._judge(state, trial, rho, norm)
        if accepted:
            state.vectors["gradient"] = gradient
            state.loss, state.gradient_norm = loss, self.norm(trial, gradient)
        if (
            self.step_size is None
            and 0 < predicted <= guard
            and not (accepted and state.gradient_norm <= norm / 2)
        ):
            state.failure = (
                "converged",
                f"the gradient norm {state.gradient_norm:.1e} is its rounding error",
            )
        return rho

    def _test_on_batch(
        self, state: State, trial: Point, batch: Tensor | None, predicted: float, norm: float
    ) -> float:
        """Algorithm 1's test on a batch that the direction has not seen. Returns ρ."""
        test = batch
        if self.step_size is None and self.test_batch != "same":
            test = self._draw(state, "test_batch", self.test_batch)
        loss, after = self.value(state.x, test), self.value(trial, test)
        if not math.isfinite(after):
            self._reject(state, "non_finite", "the loss at the trial point is not finite")
            return math.nan
        guard = self.problem.loss_rounding(state.x, loss)
        rho = (loss - after + guard) / (predicted + guard) if predicted > 0 else -math.inf
        self._judge(state, trial, rho, norm)
        return rho

    def _judge(self, state: State, trial: Point, rho: float, norm: float) -> bool:
        """Accept the trial point or stay, and move σ."""
        numbers = state.numbers
        if self.step_size is not None:
            state.x, numbers["rejections"] = trial, 0
            return True
        if not (rho >= self.eta1 and norm >= self.eta2 / numbers["sigma"]):
            self._reject(state, "stalled", f"no step was accepted, the last ratio ρ is {rho:.2g}")
            return False
        # an absolute bound of σ would be damping without end where gradients are large
        least = self.sigma_min or min(LEAST_SIGMA, numbers["first_sigma"])
        numbers["sigma_before"] = numbers["sigma"]
        if rho >= self.eta3:
            numbers["sigma"] = max(least, numbers["sigma"] / self._factor(numbers, -1))
        elif rho < self.eta3 / 3:
            numbers["sigma"] *= self._factor(numbers, 1)
        state.x, numbers["rejections"] = trial, 0
        return True

    def _factor(self, numbers: dict[str, float], direction: int) -> float:
        """By how much σ falls (direction -1) or rises (1)."""
        if self.exact or callable(self.batch_size):
            return self.gamma
        turned = direction * numbers.get("direction", 0.0) < 0
        numbers["turns"], numbers["direction"] = numbers.get("turns", 0.0) + turned, direction
        return self.gamma ** (1 / (1 + numbers["turns"] / TURNS))

    @override
    def retreat(self, state: State) -> None:
        super().retreat(state)
        # the batch had accepted the step and moved σ: take that back, too
        if "sigma_before" in state.numbers:
            state.numbers["sigma"] = state.numbers["sigma_before"]
        state.numbers["rejections"] = state.numbers["retreats"] = (
            state.numbers.get("retreats", 0) + 1
        )
        self._reject(
            state, "non_finite", "steps that a batch accepts lead to a loss that is not finite"
        )
        state.record |= {"accepted": 0.0, "sigma": state.numbers.get("sigma", math.nan)}

    def _reject(self, state: State, status: str, sentence: str) -> None:
        if self.step_size is not None:
            state.numbers["shrink"] /= self.gamma
        else:
            state.numbers["sigma"] = self._factor(state.numbers, 1) * state.numbers.get(
                "sigma", 1.0
            )
        self.reject(state, status, sentence, self.max_rejections)


def _refuse_unused(**given: object) -> None:
    """Refuse what the fixed-step form would ignore."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} is for Algorithm 1, without step=; the fixed-step form takes every step, "
                f"with damping=, got {name}={value}"
            )
