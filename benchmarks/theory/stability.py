r"""Part 4: the Jacobian of a wide two-layer network hardly moves, and how wide that is.

The local theorem asks that for all θ with ‖θ - θ⁰‖ ≤ Q = 4 κ_L ‖u⁰ - y‖/(μ σ₀)

    ‖J(θ) - J(θ⁰)‖ ≤ min{1/2, μ/(6 κ_L)} σ₀,    σ₀ the least singular value of J(θ⁰),

and the lemmas bound the left-hand side by a multiple of m^{-1/6}. For the square loss κ_L = μ = 1.
Three points of the ball are looked at: where RNGD ends, a random point of the sphere of radius Q,
and an adversary that spends Q on turning over those units that are nearest to the kink of one
sample. Counting shows what to expect of a ReLU network: the adversary turns over of order
(Qm)^{2/3} of m units, so ‖ΔJ‖ ~ m^{-1/6}; a random point turns over a share of order Q/√m, so ‖ΔJ‖
~ m^{-1/4}; and a smooth activation gives m^{-1/2}.

The lemmas rest on how often a random unit vector is nearly orthogonal to a given one:

    P(|xᵀv| ≤ γ) ≤ √(πn) γ    for v uniform on the sphere of R^n

xᵀv has the density h(r) = c_n (1 - r²)^{(n-3)/2}, c_n = Γ(n/2)/(√π Γ((n-1)/2)), so for n ≥ 3 the
probability is at most 2 c_n γ ≤ √(2(n-1)/π) γ, and for n = 2 it is (2/π) arcsin γ ≤ γ. The proof in
the text integrates over [-γ, γ] and keeps c_n γ, half of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import NamedTuple

import torch
from scipy.special import betainc
from torch import Tensor

from benchmarks.theory.pictures import draw_stability
from benchmarks.theory.report import (
    Finding,
    Part,
    Row,
    Settings,
    fitted_power,
    holds_if,
    pick,
)
from fisherfold.reproduce.twolayer import TwoLayer, balanced_inputs
from fisherfold.solvers import GradientNorm, minimize

SAMPLES = 8
DIM = 4
THRESHOLD = 1 / 6
WHERE = ("path", "random", "adversary")
NEAR = 0.1
DIMENSIONS = (2, 3, 5, 10, 30, 100)
WIDTHS = (0.001, 0.01, 0.03, 0.1, 0.3)


class Constants(NamedTuple):
    """The constants M and L of the lemmas for inputs, by search over directions."""

    m_constant: float
    l_constant: float


def inputs(n_samples: int, dim: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs as the paper assumes them and targets of order one."""
    generator = torch.Generator().manual_seed(seed)
    x = balanced_inputs(n_samples, dim, generator=generator)
    y = torch.randn(n_samples, generator=generator, dtype=torch.float64)
    return x, y


def constants(x: Tensor) -> Constants:
    """Estimate M and L from below, over random directions u.

    φ_i(u) = x_i/s - (u·x_i) V u/s³ with s² = uᵀVu; its derivative comes from automatic
    differentiation.
    """
    covariance = x.T @ x / len(x)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(4096, x.shape[1], generator=generator, dtype=x.dtype)
    u = torch.nn.functional.normalize(u, dim=1)

    def phi(direction: Tensor) -> Tensor:
        pulled = covariance @ direction
        square = direction @ pulled
        return x / square.sqrt() - torch.outer(x @ direction, pulled) / square**1.5

    values = torch.func.vmap(phi)(u)
    derivative = torch.func.vmap(torch.func.jacrev(phi))(u)
    tangent = derivative - (derivative @ u[:, None, :, None]) * u[:, None, None, :]
    return Constants(
        float(values.square().sum(dim=-1).max()),
        float(torch.linalg.matrix_norm(tangent, ord=2).max()),
    )


def change_norm(problem: TwoLayer, theta: Tensor, other: Tensor) -> float:
    """The spectral norm ‖J(θ) - J(θ')‖."""
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(problem.gram(theta, other))[-1])))


def adversary(problem: TwoLayer, theta: Tensor, radius: float) -> Tensor:
    """A point within the radius that turns over as many units as it can for a sample.

    To turn a unit over for x_i it is rotated by the angle arcsin|x_i·θ_j| (and a little more)
    towards or away from x_i.
    """
    cosines = problem.inputs @ theta.T
    angles = cosines.abs().clamp(max=1).asin() + 1e-9
    order = angles.argsort(dim=1)
    spent = (2 * (angles.gather(1, order) / 2).sin()).square().cumsum(dim=1)
    counts = (spent <= radius**2).sum(dim=1)
    sample = int(counts.argmax())
    chosen = order[sample, : int(counts[sample])]
    towards = problem.manifold.project(theta, problem.inputs[sample].expand_as(theta).contiguous())
    unit = torch.nn.functional.normalize(towards, dim=1)
    step = torch.zeros_like(theta)
    step[chosen] = (
        -(cosines[sample, chosen].sign() * angles[sample, chosen])[:, None] * unit[chosen]
    )
    return problem.manifold.exp(theta, step)


def look(problem: TwoLayer, theta: Tensor, *, generator: torch.Generator) -> dict[str, float]:
    """The assumption at one draw of the network."""
    least = math.sqrt(max(0.0, float(torch.linalg.eigvalsh(problem.gram(theta))[0])))
    residual = problem.residual(theta)
    radius = 4 * residual / least if least > 0 else math.inf
    result = minimize(problem, theta, step=1.0, max_iter=15, stop=GradientNorm(1e-9))
    end = (
        change_norm(problem, result.x, theta)
        if problem.residual(result.x) < 1e-3 * residual
        else math.nan
    )
    row = {"sigma0": least, "residual": residual, "radius": radius, "path": end}
    row["path_length"] = float((result.x - theta).norm())
    direction = problem.manifold.random_tangent(theta, generator=generator)
    for suffix, distance in (("", radius), ("_1", 1.0)):
        # no two points of the product of m spheres are further apart than 2√m
        random = problem.manifold.exp(
            theta, min(distance, 2 * math.sqrt(problem.width)) * direction
        )
        row[f"random{suffix}"] = change_norm(problem, random, theta)
        row[f"adversary{suffix}"] = change_norm(problem, adversary(problem, theta, distance), theta)
    return row


def moved_targets(
    problem: TwoLayer, theta: Tensor, distance: float, *, generator: torch.Generator
) -> TwoLayer:
    """The same network with targets at a given distance from its outputs."""
    v = torch.randn(problem.n_samples, generator=generator, dtype=theta.dtype)
    y = problem.outputs(theta) + distance * v / v.norm()
    return problem.with_targets(y)


def sufficient_width(
    c: Constants, n_samples: int, dim: int, sigma0: float, residual: float, epsilon: float
) -> float:
    """The width from which the lemma's bound on ‖J(θ) - J(θ⁰)‖ is below σ₀/6.

    √(N (2M + L)) (πn Q² N²/(ε² m))^{1/6}, with the printed constants.
    """
    share = (math.pi * dim * (4 * residual / sigma0) ** 2 * n_samples**2 / epsilon**2) ** (1 / 3)
    return (n_samples * share * (2 * c.m_constant + c.l_constant)) ** 3 / (THRESHOLD * sigma0) ** 6


def deterministic_bound(problem: TwoLayer, theta: Tensor, distance: float, c: Constants) -> float:
    """The bound of the deterministic lemma.

    √(Nk(2M + L²)/m) for the least k with distance ≤ √k [x_iᵀθ⁰]_{k-}.
    """
    ordered = (problem.inputs @ theta.T).abs().sort(dim=1).values.amin(dim=0)
    k = torch.arange(1, problem.width + 1, dtype=theta.dtype)
    enough = (k.sqrt() * ordered >= distance).nonzero()
    if len(enough) == 0:
        return math.inf
    least = int(enough[0]) + 1
    return math.sqrt(
        problem.n_samples * least * (2 * c.m_constant + c.l_constant**2) / problem.width
    )


def networks(
    x: Tensor, y: Tensor, widths: Iterable[int], draws: int
) -> Iterator[tuple[Row, TwoLayer, Tensor, torch.Generator]]:
    """Random networks of every width and both activations.

    What names them, the network, its weights, the generator.
    """
    for width, draw, activation in itertools.product(widths, range(draws), ("relu", "tanh")):
        generator = torch.Generator().manual_seed(draw)
        problem, theta = TwoLayer.draw(x, y, width, activation=activation, generator=generator)
        yield {"activation": activation, "width": width, "draw": draw}, problem, theta, generator


def measure(settings: Settings) -> list[Row]:
    """The change of the Jacobian over widths, draws, activations and targets."""
    x, y = inputs(SAMPLES, DIM, seed=0)
    c = constants(x)
    rows = []
    for width in (4**k for k in range(3, 8 if settings.quick else 11)):
        draws = (
            (2 if settings.quick else 4) * settings.seeds
            if width <= 4**8
            else min(settings.seeds, 3)
        )
        for names, problem, theta, generator in networks(x, y, [width], draws):
            near = moved_targets(problem, theta, NEAR, generator=generator)
            for targets, network in (("order one", problem), ("near", near)):
                row = look(network, theta, generator=generator)
                bound = deterministic_bound(network, theta, row["radius"], c)
                rows.append({**names, "targets": targets, **row, "lemma_for_draw": bound})
    return rows


def findings(rows: list[Row], c: Constants) -> list[Finding]:
    """What the draws say about the assumption and the lemmas."""

    def power(activation: str, column: str) -> float:
        chosen = pick(
            rows, activation=activation, **({"targets": "order one"} if column == "path" else {})
        )
        chosen = [r for r in chosen if r["width"] >= 256 and r[column] == r[column]]
        return fitted_power([r["width"] for r in chosen], [r[column] for r in chosen])

    worst = power("relu", "adversary_1")
    typical = power("relu", "random_1")
    found = [
        Finding(
            "Jacobian stability: ‖J(θ) - J(θ⁰)‖ at the worst θ, ReLU",
            "m^-0.167 (bound)",
            f"m^{worst:.3f}",
            holds_if(-0.25 < worst <= -0.12),
            "an adversary turns over the units nearest to a kink, radius 1: the exponent -1/6 of "
            "the lemma is attained",
        ),
        Finding(
            "Jacobian stability: at a random θ, ReLU",
            "m^-0.25 (by counting)",
            f"m^{typical:.3f}",
            holds_if(-0.35 < typical < -0.2),
            "radius 1; faster than the lemma, which has to cover the worst θ",
        ),
        Finding(
            "Jacobian stability: where RNGD ends, ReLU",
            "m^-0.25 (by counting)",
            f"m^{power('relu', 'path'):.3f}",
            holds_if(-0.35 < power("relu", "path") < -0.2),
            "targets of order one; this is all that the proof uses",
        ),
        Finding(
            "Jacobian stability: at a random θ, smooth activation",
            "m^-0.5",
            f"m^{power('tanh', 'random_1'):.3f}",
            holds_if(abs(power("tanh", "random_1") + 0.5) < 0.06),
            "tanh, radius 1: J is Lipschitz there",
        ),
    ]
    return found + _bound_findings(rows, c)


def _bound_findings(rows: list[Row], c: Constants) -> list[Finding]:
    relu = pick(rows, activation="relu")
    over = max(max(r["adversary"], r["random"]) / r["lemma_for_draw"] for r in relu)
    wide = max(r["width"] for r in rows)
    at_wide = pick(relu, width=wide, targets="order one")
    needed = min(
        sufficient_width(c, SAMPLES, DIM, r["sigma0"], r["residual"], 0.1) for r in at_wide
    )
    # ‖ΔJ‖ of the adversary goes like m^{-1/6}: how wide it would have to be
    seen = min(r["width"] * (r["adversary"] / (THRESHOLD * r["sigma0"])) ** 6 for r in at_wide)
    shares = {where: share(relu, where, "near", wide) for where in WHERE}
    drawn = {where: share(relu, where, "order one", wide) for where in WHERE}
    converged = fmean(r["path"] == r["path"] for r in at_wide)
    first = {
        where: min(
            (r["width"] for r in relu if share(relu, where, "near", r["width"]) >= 0.9),
            default="no width",
        )
        for where in WHERE
    }
    return [
        Finding(
            "lemma: ‖J(θ) - J(θ⁰)‖² ≤ Nk(2M + L)/m",
            "≤ 1",
            round(over, 3),
            holds_if(over <= 1),
            "largest measured norm over the bound, with L² for L: a Lipschitz constant enters "
            f"squared (here L = {c.l_constant:.1f}); ReLU, all draws, k the least that fits each "
            "draw",
        ),
        Finding(
            "theorem: width that suffices for the assumption",
            f"{needed:.0e} (its constants, ε = 0.1)",
            f"{seen:.0e} (extrapolated from the adversary)",
            holds_if(seen <= needed),
            f"N = {SAMPLES}, n = {DIM}, σ₀ = {at_wide[0]['sigma0']:.2f}, targets of order one: "
            "both are out of reach of any machine; safe, and no explanation of networks of "
            "ordinary width",
        ),
        Finding(
            "assumption: ‖ΔJ‖ ≤ σ₀/6 on the whole ball, ReLU, targets of order one",
            "→ 1 as m → ∞",
            f"{drawn['adversary']:.0%} (adversary), {drawn['random']:.0%} (random), "
            f"{drawn['path']:.0%} (path)",
            holds_if(drawn["adversary"] > 0.9, "partly"),
            f"share of draws at m = {wide}; true in the limit only. The condition is far from "
            f"necessary: RNGD converges on {converged:.0%} of these draws",
        ),
        Finding(
            f"assumption: the same for near targets, ‖u⁰ - y‖ = {NEAR:g}",
            "→ 1 as m → ∞",
            f"{shares['adversary']:.0%} (adversary), {shares['random']:.0%} (random), "
            f"{shares['path']:.0%} (path)",
            holds_if(shares["adversary"] > 0.9, "partly"),
            f"share of draws at m = {wide}; nine of ten draws from m = {first['random']} (random), "
            f"{first['path']} (path)",
        ),
    ]


def share(rows: list[Row], where: str, targets: str, width: int) -> float:
    """The share of draws in which the condition holds at one of the three points."""
    return fmean(
        r[where] <= THRESHOLD * r["sigma0"] for r in pick(rows, targets=targets, width=width)
    )


def density_at_zero(dim: int) -> float:
    """c_n, the density of xᵀv at 0."""
    return math.exp(math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2)) / math.sqrt(math.pi)


def exact_probability(dim: int, gamma: float) -> float:
    """P(|xᵀv| ≤ γ): the square of xᵀv has the distribution Beta(1/2, (n-1)/2)."""
    return float(betainc(0.5, (dim - 1) / 2, min(1.0, gamma**2)))


def measure_caps() -> list[Row]:
    """Probabilities beside the bounds."""
    return [
        {
            "dimension": dim,
            "gamma": gamma,
            "exact": exact_probability(dim, gamma),
            "bound": math.sqrt(math.pi * dim) * gamma,
            "proof": density_at_zero(dim) * gamma,
        }
        for dim in DIMENSIONS
        for gamma in WIDTHS
    ]


def _cap_findings(rows: list[Row]) -> list[Finding]:
    ratio, proof = (max(r["exact"] / r[name] for r in rows) for name in ("bound", "proof"))
    return [
        Finding(
            "lemma: P(|xᵀv| ≤ γ) ≤ √(πn) γ",
            "≤ 1",
            round(ratio, 4),
            holds_if(ratio <= 1),
            "largest exact probability over its bound, n = 2 to 100",
        ),
        Finding(
            "lemma: its intermediate step P ≤ γ Γ(n/2)/(√π Γ((n-1)/2))",
            "≤ 1",
            round(proof, 4),
            holds_if(proof <= 1),
            "largest exact probability over it: the interval [-γ, γ] has length 2γ; the final "
            "bound has room for the 2",
        ),
    ]


def part(settings: Settings) -> Part:
    """Run this part."""
    rows = measure(settings)
    caps = measure_caps()
    x, _ = inputs(SAMPLES, DIM, seed=0)
    c = constants(x)
    sentence = (
        "The Jacobian of a ReLU network moves like m^{-1/6} at the worst point of a ball, so the "
        "exponent of the lemma is sharp; like m^{-1/4} at a random point and along RNGD; like "
        "m^{-1/2} with a smooth activation. The condition ‖ΔJ‖ ≤ σ₀/6 itself asks for widths that "
        "nobody can build when it has to hold on the whole ball; along the path of RNGD it holds "
        "at moderate widths if the targets are near."
    )
    found = findings(rows, c) + _cap_findings(caps)
    table = [{"quantity": "Jacobian", **r} for r in rows] + [{"quantity": "cap", **r} for r in caps]
    title = "Jacobian stability of the two-layer network"
    return Part("stability", title, sentence, found, table, draw_stability(rows, caps))
