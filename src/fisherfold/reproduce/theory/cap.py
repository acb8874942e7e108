r"""Part 4, continued: how often a random unit vector is nearly orthogonal to a given one.

    P(|xᵀv| ≤ γ) ≤ √(πn) γ    for v uniform on the sphere of R^n

xᵀv has the density h(r) = c_n (1 - r²)^{(n-3)/2}, c_n = Γ(n/2)/(√π Γ((n-1)/2)), so for n ≥ 3 the probability is at most
2 c_n γ ≤ √(2(n-1)/π) γ, and for n = 2 it is (2/π) arcsin γ ≤ γ. The proof in the text integrates over [-γ, γ] and
keeps c_n γ, half of it.
"""

from __future__ import annotations

import math

from scipy.special import betainc

from fisherfold.reproduce.theory.report import Finding, Row, holds_if

DIMENSIONS = (2, 3, 5, 10, 30, 100)
WIDTHS = (0.001, 0.01, 0.03, 0.1, 0.3)


def density_at_zero(dim: int) -> float:
    """c_n, the density of xᵀv at 0."""
    return math.exp(math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2)) / math.sqrt(math.pi)


def exact_probability(dim: int, gamma: float) -> float:
    """P(|xᵀv| ≤ γ): the square of xᵀv has the distribution Beta(1/2, (n-1)/2)."""
    return float(betainc(0.5, (dim - 1) / 2, min(1.0, gamma**2)))


def measure() -> list[Row]:
    """Probabilities beside the bounds."""
    return [
        {"dimension": dim, "gamma": gamma, "exact": exact_probability(dim, gamma),
         "bound": math.sqrt(math.pi * dim) * gamma, "proof": density_at_zero(dim) * gamma}
        for dim in DIMENSIONS for gamma in WIDTHS
    ]  # fmt: skip


def findings(rows: list[Row]) -> list[Finding]:
    """What they say about the lemma."""
    ratio, proof = (max(r["exact"] / r[name] for r in rows) for name in ("bound", "proof"))
    return [
        Finding(
            "lemma: P(|xᵀv| ≤ γ) ≤ √(πn) γ", "≤ 1", round(ratio, 4), holds_if(ratio <= 1),
            "largest exact probability over its bound, n = 2 to 100",
        ),
        Finding(
            "lemma: its intermediate step P ≤ γ Γ(n/2)/(√π Γ((n-1)/2))", "≤ 1", round(proof, 4), holds_if(proof <= 1),
            "largest exact probability over it: the interval [-γ, γ] has length 2γ; the final bound has room for the 2",
        ),
    ]  # fmt: skip
