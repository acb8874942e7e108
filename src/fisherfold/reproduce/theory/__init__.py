"""The theory of the paper, made visible: five parts, each a figure, a table and findings with verdicts.

metric      Theorem 1: the RFIM is the metric of KL; the natural direction is the steepest one
global      Algorithm 1 with estimates of growing and of fixed accuracy
rates       local linear and quadratic rates on the two-layer network
stability   how far the Jacobian of that network moves, against its width
invariance  rows behind a normalisation: <∇w_i, w_i> = 0 and RFIM = FIM
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fisherfold.reproduce.theory import global_convergence, invariance, rates, stability, steepest
from fisherfold.reproduce.theory.report import Finding, Part, Settings

PARTS: dict[str, Callable[[Settings], Part]] = {
    "metric": steepest.part,
    "global": global_convergence.part,
    "rates": rates.part,
    "stability": stability.part,
    "invariance": invariance.part,
}

__all__ = ["PARTS", "Finding", "Part", "Settings", "chosen", "run_theory"]


def chosen(only: Sequence[str]) -> list[str]:
    """The names of the parts that are asked for, all if none is."""
    if unknown := sorted(set(only) - set(PARTS)):
        raise ValueError(f"part must be one of {list(PARTS)}, got {unknown}")
    return [name for name in PARTS if not only or name in only]


def run_theory(settings: Settings, *, only: Sequence[str] = ()) -> list[Part]:
    """Run the parts of the report."""
    return [PARTS[name](settings) for name in chosen(only)]
