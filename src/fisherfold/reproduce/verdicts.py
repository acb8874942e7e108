"""Whether the paper's sentence about a figure is true of our runs, seed by seed.

For ``lowest`` (the multi-task figures) it is the final error of the first method less the best of
the paper's others; for ``fastest`` (the completion figures) the #grad/N at which the error comes
near the lowest that any of them ends at.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fisherfold.plain import counted
from fisherfold.reproduce.figures import FigureResult, Run
from fisherfold.reproduce.page import Verdict

Kind = Literal["lowest", "fastest"]
Outcome = Literal["ahead", "level", "behind"]
MAJORITY = 0.8
LEVEL = 0.02
NEAR = 1.05
RULES = (
    "RNGD is the paper's natural gradient; RSGD and RSVRG are stochastic gradients, without and "
    "with variance reduction; RCG is a conjugate gradient. Methods marked as ours take no part in "
    "verdicts.",
    "A refit fits the coefficients to the held-out data, as the released code does. MSE is the "
    "mean squared error, NMSE the squared error over the variance. #grad/N counts sample gradients "
    "over the number of samples N.",
    "Lowest: the final error of RNGD against the best other method, seed by seed: ahead if it is "
    f"lower on at least {MAJORITY:.0%} of the seeds, level if it is lower or within {LEVEL:.0%} on "
    "as many, else behind. Fastest: the same for the #grad/N at which the error first comes within "
    f"{NEAR - 1:.0%} of the lowest that any method ends at.",
    "The paper charges RNGD two gradients per sample where it evaluates three. A claim holds if "
    "RNGD is ahead in every error in both counts; it does not hold if in the paper's count it is "
    "ahead in none and behind in one; else it holds partly. A part of the theory holds if all its "
    "findings do, and does not hold if all fail.",
)


@dataclass(frozen=True)
class Comparison:
    """The first method against the best of the others in one error."""

    column: str
    kind: Kind
    own: Sequence[float]
    other: Sequence[float]

    @property
    def wins(self) -> int:
        """On how many seeds the first method is strictly ahead."""
        return sum(a < b for a, b in zip(self.own, self.other, strict=True))

    @property
    def ties(self) -> int:
        """On how many seeds it is not ahead, but within the tolerance."""
        slack = LEVEL if self.kind == "lowest" else 0.0
        return sum(b <= a <= b + slack * abs(b) for a, b in zip(self.own, self.other, strict=True))

    @property
    def outcome(self) -> Outcome:
        """Ahead, level or behind."""
        enough = MAJORITY * len(self.own)
        if self.wins >= enough:
            return "ahead"
        return "level" if self.wins + self.ties >= enough else "behind"

    def sentence(self, label: str, method: str) -> str:
        """The comparison in words."""
        own = statistics.median(self.own)
        other = statistics.median(self.other)
        seeds = f"{self.wins} of {counted(len(self.own), 'seed')}"
        if self.kind == "lowest":
            part = (
                f", {(own - other) / abs(other):+.1%}"
                if other and math.isfinite(own + other)
                else ""
            )
            medians = f"median {own:.4g}, best other: {other:.4g}{part}"
            return f"{label}: {method} ends lowest on {seeds} ({medians}): {self.outcome}."
        return (
            f"{label}: {method} is the first within 5 % of the lowest on {seeds} (median "
            f"{_count(own)}, best other: {_count(other)}): {self.outcome}."
        )


def compare(result: FigureResult, column: str, kind: Kind, *, true: bool = False) -> Comparison:
    """Compare the first method with the paper's others."""
    groups = [result.runs[m.label] for m in result.plan.methods if m.paper]
    axis = "paper_grads"
    budget = math.inf
    if true:
        axis = "true_grads"
        budget = min(run.last("true_grads") for runs in groups for run in runs)
    own = []
    other = []
    for runs in zip(*groups, strict=True):
        ends = [_value_at(run, column, budget) for run in runs]
        values = (
            ends
            if kind == "lowest"
            else [cost_of(run, column, NEAR * min(ends), axis) for run in runs]
        )
        own.append(values[0])
        other.append(min(values[1:]))
    return Comparison(column, kind, own, other)


def cost_of(run: Run, column: str, level: float, axis: str = "paper_grads") -> float:
    """Where a run first reaches a level."""
    return next(
        (float(row[axis]) for row in run.rows if row.get(column, math.nan) <= level), math.inf
    )


def judge(comparisons: Sequence[Comparison], true: Sequence[Comparison] = ()) -> Verdict:
    """The verdict on a figure from the comparisons of all its errors."""
    outcomes = {comparison.outcome for comparison in comparisons}
    if outcomes == {"ahead"}:
        return (
            "holds" if all(comparison.outcome == "ahead" for comparison in true) else "holds partly"
        )
    return "does not hold" if "behind" in outcomes and "ahead" not in outcomes else "holds partly"


def true_count(result: FigureResult, comparisons: Sequence[Comparison]) -> str:
    """What becomes of the comparisons when every sample gradient is counted."""
    groups = {m.label: result.runs[m.label] for m in result.plan.methods if m.paper}
    used = (
        f"{label} {statistics.fmean(r.last('true_grads') for r in runs):.0f}"
        for label, runs in groups.items()
    )
    found = (
        f"{result.plan.metrics[c.column]} {c.outcome} ({c.wins} of {counted(len(c.own), 'seed')})"
        for c in comparisons
    )
    return f"With every sample gradient counted (#grad/N: {', '.join(used)}): {'; '.join(found)}."


def _value_at(run: Run, column: str, budget: float) -> float:
    reached = [row for row in run.rows if math.isinf(budget) or row["true_grads"] <= budget + 1e-9]
    value = float(reached[-1].get(column, math.nan))
    return value if math.isfinite(value) else math.inf


def _count(value: float) -> str:
    return f"{value:.0f} #grad/N" if math.isfinite(value) else "never"
