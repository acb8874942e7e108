"""The theory of the paper, made visible: five parts, each a figure, a table and findings with verdicts.

metric      Theorem 1: the RFIM is the metric of KL; the natural direction is the steepest one
global      Algorithm 1 with estimates of growing and of fixed accuracy
rates       local linear and quadratic rates on the two-layer network
stability   how far the Jacobian of that network moves, against its width
invariance  rows behind a normalisation: <∇w_i, w_i> = 0 and RFIM = FIM
"""

from __future__ import annotations

from collections.abc import Callable

from fisherfold.reproduce.theory import global_convergence, invariance, metric, rates, stability
from fisherfold.reproduce.theory.report import Finding, Part, Settings, summary

PARTS: dict[str, Callable[[Settings], Part]] = {
    "metric": metric.part,
    "global": global_convergence.part,
    "rates": rates.part,
    "stability": stability.part,
    "invariance": invariance.part,
}

__all__ = ["PARTS", "Finding", "Part", "Settings", "run_theory", "summary"]


def run_theory(settings: Settings, *, only: tuple[str, ...] = ()) -> list[Part]:
    """Run the parts of the report."""
    if unknown := sorted(set(only) - set(PARTS)):
        raise ValueError(f"part must be one of {list(PARTS)}, got {unknown}")
    return [make(settings) for name, make in PARTS.items() if not only or name in only]
