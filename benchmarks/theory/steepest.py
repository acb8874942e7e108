r"""Part 1, continued: of equal divergence, the natural direction decreases Ψ most.

    -F^{-1} g / ‖g‖_{F^{-1}} = lim_{ε→0} (1/ε) argmin { Ψ(R_θ(d)) : E KL(p_θ ‖ p_{R_θ(d)}) ≤ ε²/2 }

Checked twice: against many random directions, each stretched to the same divergence, and against
the constrained minimum found by sequential quadratic programming in coordinates of the tangent
space.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize as constrained_minimum
from torch import Tensor

from benchmarks.theory import divergence
from benchmarks.theory.divergence import LIKELIHOODS, make_problem
from benchmarks.theory.pictures import draw_metric
from benchmarks.theory.report import (
    Finding,
    Part,
    Row,
    Settings,
    fitted_power,
    holds_if,
    pick,
)
from fisherfold.fisher.solve import tangent_basis
from fisherfold.manifolds import Stiefel
from fisherfold.problems import NLLProblem

RADII = [0.1, 0.05, 0.025, 0.0125, 0.00625, 0.003125]


@dataclass(frozen=True)
class Scene:
    """A problem on the Stiefel manifold: loss and divergence of a step in coordinates."""

    problem: NLLProblem
    theta: Tensor
    method: str
    basis: Tensor

    @classmethod
    def make(cls, likelihood: str, method: str, *, seed: int) -> Scene:
        """A random scene."""
        problem, theta = make_problem(Stiefel(4, 2), LIKELIHOODS[likelihood], seed=seed)
        return cls(problem, theta, method, tangent_basis(problem.manifold, theta))

    def loss(self, c: Tensor) -> Tensor:
        """Ψ(R_θ(B c)) - Ψ(θ) for rows of coordinates c."""
        return torch.func.vmap(self._mean_nll)(self._moved(c)) - self._mean_nll(self.theta)

    def divergence(self, c: Tensor) -> Tensor:
        """E KL(p_θ ‖ p_{R_θ(B c)}) for rows of coordinates c."""
        return torch.func.vmap(lambda point: self.problem.kl(self.theta, point))(self._moved(c))

    def natural_direction(self) -> Tensor:
        """-F^{-1} g / ‖g‖_{F^{-1}} in coordinates, of Fisher length 1."""
        g = self.problem.gradient(self.theta)
        d = self.basis.T @ self.problem.fisher(self.theta).solve(g, method="dense").flatten()
        return -d / (d @ (self.basis.T @ g.flatten())).sqrt()

    def _mean_nll(self, point: Tensor) -> Tensor:
        problem = self.problem
        return problem.likelihood.nll(problem.model(problem.inputs, point), problem.targets).mean()

    def _moved(self, c: Tensor) -> Tensor:
        steps = (c @ self.basis.T).reshape(*c.shape[:-1], *self.theta.shape)
        return self.problem.manifold.retract(self.theta.expand_as(steps), steps, method=self.method)

    def stretched(self, c: Tensor, radius: float) -> Tensor:
        """Stretch rows of coordinates until each has the divergence ε²/2."""
        # KL grows like the square of the length, so this fixed point settles in a few turns
        c = c * (1e-3 * radius / c.norm(dim=-1, keepdim=True))
        for _ in range(12):
            c = c * (radius**2 / 2 / self.divergence(c)).sqrt()[:, None]
        return c

    def best_step(self, radius: float, start: Tensor) -> Tensor:
        """The constrained minimum of the theorem, by sequential quadratic programming."""

        def value(c: Tensor) -> Tensor:
            return self.loss(radius * c[None])[0] / radius

        def room(c: Tensor) -> Tensor:
            return 1 - self.divergence(radius * c[None])[0] * 2 / radius**2

        def numpy(
            function: Callable[[Tensor], Tensor],
        ) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
            return lambda c: function(torch.tensor(c)).detach().numpy()

        found = constrained_minimum(
            numpy(value),
            start.numpy(),
            jac=numpy(torch.func.grad(value)),
            method="SLSQP",
            constraints=[{"type": "ineq", "fun": numpy(room), "jac": numpy(torch.func.grad(room))}],
            options={"ftol": 1e-14, "maxiter": 300},
        )
        return torch.as_tensor(found.x)


def measure(settings: Settings) -> list[Row]:
    """Distance of the constrained minimum from the natural direction, and random ones."""
    count, seeds = (500, 1) if settings.quick else (5000, settings.seeds)
    rows = []
    for seed, likelihood, method in itertools.product(
        range(seeds), ("gaussian", "categorical"), ("polar", "qr")
    ):
        scene = Scene.make(likelihood, method, seed=seed)
        natural = scene.natural_direction()
        gradient = scene.basis.T @ scene.problem.gradient(scene.theta).flatten()
        for radius in RADII:
            generator = torch.Generator().manual_seed(seed)
            draws = torch.randn(count, len(natural), generator=generator, dtype=torch.float64)
            falls = -scene.loss(
                scene.stretched(torch.cat([natural[None], -gradient[None], draws]), radius)
            )
            start = 0.5 * torch.randn(len(natural), generator=generator, dtype=torch.float64)
            best = scene.best_step(radius, start)
            rows.append(
                {
                    "likelihood": likelihood,
                    "retraction": method,
                    "seed": seed,
                    "radius": radius,
                    "directions": count,
                    "distance": float((best - natural).norm() / natural.norm()),
                    "beaten": float((falls[2:] < falls[0]).double().mean()),
                    "best_random": float(falls[2:].max() / falls[0]),
                    "gradient": float(falls[1] / falls[0]),
                    "optimum": float(-scene.loss(radius * best[None])[0] / falls[0]),
                }
            )
    return rows


def findings(rows: list[Row]) -> list[Finding]:
    """What the scenes say about the steepest-descent characterisation."""
    found = []
    for method, order in (("polar", "second"), ("qr", "first")):
        chosen = pick(rows, retraction=method)
        power = fitted_power([r["radius"] for r in chosen], [r["distance"] for r in chosen])
        least = max(r["distance"] for r in pick(chosen, radius=min(RADII)))
        found.append(
            Finding(
                f"steepest descent: constrained minimum/ε → natural direction ({method})",
                "distance → 0, like ε",
                f"ε^{power:.2f}, {least:.3f} at ε={min(RADII):g}",
                holds_if(abs(power - 1) < 0.2),
                f"SLSQP from a random start on Stiefel(4, 2), {order}-order retraction; Gaussian "
                "and categorical",
            )
        )
    small = pick(rows, radius=min(RADII))
    beaten = min(r["beaten"] for r in small)
    best = max(r["best_random"] for r in small)
    found.append(
        Finding(
            "steepest descent: natural beats random directions of equal KL",
            1.0,
            beaten,
            holds_if(beaten == 1.0, "partly"),
            f"share of {small[0]['directions']} directions per scene that decrease the loss less, "
            f"the worst scene at ε={min(RADII):g}; the best random one reaches {best:.4f} of the "
            f"natural decrease, the Riemannian gradient {fmean(r['gradient'] for r in small):.3f} "
            f"on average, the numerical optimum {max(r['optimum'] for r in small):.4f}",
        )
    )
    return found


def part(settings: Settings) -> Part:
    """Run part 1 as a whole: the expansion of KL and the steepest direction."""
    slopes = divergence.measure(settings)
    scenes = measure(settings)
    sentence = (
        "For every likelihood, manifold and retraction KL departs from ½t²<d, F d> by a term of "
        "order t³, and at equal small KL no direction decreases the loss more than the natural "
        "one. The hypothesis of a second-order retraction is not needed for that: QR and Cayley on "
        "Stiefel show the same slope 3. It is needed where the gradient does not vanish, for the "
        "second-order model of the loss itself."
    )
    table = [
        {"section": name, **r}
        for name, rows in (("slope", slopes), ("steepest", scenes))
        for r in rows
    ]
    found = divergence.findings(slopes) + findings(scenes)
    picture = draw_metric(divergence.STEPS, slopes, scenes)
    return Part("metric", "The RFIM is the metric of KL", sentence, found, table, picture)
