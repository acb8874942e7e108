"""Riemannian trust regions with truncated conjugate gradients (Absil, Baker and Gallivan 2007).

At θ_k, with the gradient g_k, a model H_k of the curvature (the Riemannian Hessian or a Fisher
information) and Δ_k:

    d_k ≈ argmin m_k(d) = <g_k, d> + ½ <d, H_k d>  over ‖d‖ ≤ Δ_k,    ρ_k = (Ψ(R_{θ_k}(d_k)) -
    Ψ(θ_k)) / m_k(d_k)

by conjugate gradients that end at the boundary, at negative curvature, or at ‖r‖ ≤ ‖g_k‖ min(κ,
(‖g_k‖/‖g_0‖)^ϑ). Accept when ρ_k ≥ η; Δ shrinks to a quarter of the step when ρ_k < ¼, and doubles
when ρ_k > ¾ at the boundary.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from typing_extensions import override

from fisherfold.fisher.conjugate import Solution
from fisherfold.fisher.operators import FisherOperator
from fisherfold.manifolds.base import Tangent, combine, is_finite, leaves, scale
from fisherfold.problems.base import Problem
from fisherfold.problems.cache import LastPoint
from fisherfold.solvers.method import Method, at_least_one, check_kind, positive
from fisherfold.solvers.state import State

ETA, KAPPA, THETA = 0.1, 0.1, 0.5


class TrustRegion(Method):
    """Trust regions over all samples.

    Args:
        problem: the problem.
        model: ``hessian``, by automatic differentiation of the loss, or one of the problem's
            ``fisher_kinds``.
        radius: the first Δ; if not given, an eighth of the root of the dimension, times the root
            mean square of a start with entries above 1 where the metric is ambient.
        max_products: products of one run of conjugate gradients; the dimension if not given, at
            most 1000.
        max_rejections: so many rejections in a row end the run.
    """

    name: ClassVar[str] = "trust-region"

    def __init__(
        self,
        problem: Problem,
        *,
        model: str = "hessian",
        radius: float | None = None,
        max_products: int | None = None,
        max_rejections: int = 40,
    ) -> None:
        super().__init__(problem)
        self.model = model if model == "hessian" else check_kind(model, problem)
        self.radius = None if radius is None else positive("radius", radius)
        limit = (
            min(self.manifold.dim, 1000)
            if max_products is None
            else at_least_one("max_products", max_products)
        )
        self.max_products = max(limit, 1)
        self.max_rejections = at_least_one("max_rejections", max_rejections)
        self._kept: LastPoint[FisherOperator] = LastPoint()

    @override
    def start(self, state: State) -> None:
        state.vectors["gradient"] = self.evaluate(state)
        state.samples += self.problem.n_samples
        state.numbers |= {"radius": self.radius or self._first_radius(state), "rejections": 0}
        state.numbers["first_norm"] = state.gradient_norm

    @override
    def step(self, state: State) -> None:
        x, gradient, norm, radius = (
            state.x,
            state.vectors["gradient"],
            state.gradient_norm,
            state.numbers["radius"],
        )
        if self.is_over(state):
            return
        found, boundary = self._truncated(
            state, self._curvature_model(state), scale(1 / norm, gradient), norm
        )
        state.products += found.iterations * self.problem.n_samples
        move = scale(norm, found.x)
        trial = self.manifold.retract(x, move)
        rho = math.nan
        if is_finite(trial):
            value, new_gradient = self.problem.loss_and_gradient(trial)
            state.samples += self.problem.n_samples
            if math.isfinite(float(value)) and is_finite(new_gradient):
                predicted, gained = norm**2 * found.decrease, state.loss - float(value)
                # where losses no longer tell a fall from a rise gradients do; what they do not tell
                # is no rejection
                if predicted <= self.problem.loss_rounding(x, state.loss):
                    gained = self.fall(x, trial, move, gradient, new_gradient)
                guard = (1e2 * torch.finfo(leaves(x)[0].dtype).eps) ** 2 * abs(state.loss)
                rho = (gained + guard) / (predicted + guard) if predicted > 0 else -math.inf
        if rho >= ETA:
            state.x, state.vectors["gradient"] = trial, new_gradient
            state.loss, state.gradient_norm = float(value), self.norm(trial, new_gradient)
            state.numbers["rejections"] = 0
        elif math.isnan(rho):
            self.reject(
                state, "non_finite", "the loss or gradient ahead is not finite", self.max_rejections
            )
        else:
            self.reject(
                state,
                "stalled",
                f"no step was accepted, the last ratio ρ is {rho:.2g}",
                self.max_rejections,
            )
        if not rho >= 0.25:
            length = norm * self.norm(x, found.x)
            state.numbers["radius"] = 0.25 * (
                min(radius, length) if math.isfinite(length) else radius
            )
        elif rho > 0.75 and boundary:
            state.numbers["radius"] = 2 * radius
        state.record = {
            "rho": rho,
            "radius": radius,
            "accepted": float(state.numbers["rejections"] == 0),
            "cg_iterations": float(found.iterations),
        }

    def _first_radius(self, state: State) -> float:
        size = 1.0
        if self.manifold.ambient_metric:
            entries = torch.cat([leaf.reshape(-1) for leaf in leaves(state.x)])
            size = max(1.0, float(entries.norm()) / len(entries) ** 0.5)
        return size * max(self.manifold.dim, 1) ** 0.5 / 8

    def _curvature_model(self, state: State) -> FisherOperator:
        """The model at the iterate, which a rejected step has not moved."""
        if (kept := self._kept.get(state.x)) is not None:
            return kept
        if self.model == "hessian":
            return self._kept.put(state.x, self.problem.hessian(state.x))
        return self._kept.put(state.x, self.problem.fisher(state.x, kind=self.model))

    def _truncated(
        self, state: State, operator: FisherOperator, unit: Tangent, norm: float
    ) -> tuple[Solution, bool]:
        """Conjugate gradients for H d = -g/‖g‖ within Δ/‖g‖.

        In these units no square leaves the range of numbers.
        """
        x, radius = state.x, state.numbers["radius"] / norm
        target = min(KAPPA, (norm / state.numbers["first_norm"]) ** THETA) ** 2
        d, image, residual, p = scale(0.0, unit), scale(0.0, unit), unit, scale(-1.0, unit)
        rr, dd, dp, pp = 1.0, 0.0, 0.0, 1.0  # inner products of r, d and p
        boundary, products = False, 0
        while products < self.max_products and rr > target:
            product = operator._matvec(p)
            products += 1
            bend = self.inner(x, p, product)
            alpha = rr / bend if bend > 0 else math.inf
            boundary = not dd + 2 * alpha * dp + alpha**2 * pp < radius**2
            if boundary:
                alpha = (
                    (math.sqrt(dp**2 + pp * (radius**2 - dd)) - dp) / pp
                    if not math.isnan(bend)
                    else math.nan
                )
            d, image = combine(1.0, d, alpha, p), combine(1.0, image, alpha, product)
            dd += 2 * alpha * dp + alpha**2 * pp
            if boundary:
                break
            residual = combine(1.0, residual, alpha, product)
            before, rr = rr, self.inner(x, residual, residual)
            p = combine(1.0, scale(rr / before, p), -1.0, residual)
            dp, pp = rr / before * (dp + alpha * pp), rr + (rr / before) ** 2 * pp
        model = self.inner(x, combine(1.0, unit, 0.5, image), d)
        return Solution(d, "cg", decrease=-model, iterations=products), boundary
