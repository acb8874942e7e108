"""What a figure has run: curves over the seeds, final figures and the paper's claim.

The count of the figures (``paper_grads``) and the true number of sample gradients (``true_grads``), both over N, are
kept beside each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fisherfold._version import __version__
from fisherfold.reproduce.plans import FigurePlan

_COUNTS = frozenset({"loss", "seconds", "paper_grads", "true_grads"})  # what every point of a curve has


@dataclass(frozen=True)
class Run:
    """One method, step and seed.

    Attributes:
        label: the method's name on the figure.
        step: the step size, if it has one.
        seed: the seed of split, start and samples.
        status: how the run ended.
        rows: the trace with ``paper_grads`` and ``true_grads``, both over N.
    """

    label: str
    step: float | None
    seed: int
    status: str
    rows: list[dict[str, float]]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Run:
        """The run that a record holds.

        Args:
            content: its fields.

        Returns:
            The run.

        Raises:
            ValueError: if it has no curve.
        """
        run = cls(**content)
        if not run.rows or not all(isinstance(row, dict) and row.keys() >= _COUNTS for row in run.rows):
            raise ValueError(f"rows must be a list of points with {sorted(_COUNTS)}")
        return run

    def last(self, column: str) -> float:
        """The final value of a column, infinite if the run left the finite numbers.

        Args:
            column: a trace column.

        Returns:
            A number.
        """
        return _ordered(float(self.rows[-1].get(column, math.nan)))


@dataclass(frozen=True)
class FigureResult:
    """All runs of a figure.

    Attributes:
        plan: what was run.
        seeds: the seeds.
        searched: every run of the step search, by label.
        runs: the runs with the chosen step, by label, one per seed.
    """

    plan: FigurePlan
    seeds: tuple[int, ...]
    searched: dict[str, list[Run]]
    runs: dict[str, list[Run]]

    def table(self) -> list[dict[str, Any]]:
        """Final figures per method: mean and standard deviation over the seeds.

        Returns:
            One row per method; None for an error that a method does not have, and for deviations that are unknown.
        """
        rows = []
        for label, runs in self.runs.items():
            row: dict[str, Any] = {"method": label, "step": runs[0].step}
            for column in (*self.plan.metrics, "loss", "seconds", "paper_grads", "true_grads"):
                known = all(column in run.rows[-1] for run in runs)
                values = [run.last(column) for run in runs]
                row[column] = statistics.fmean(values) if known else None
                row[f"{column}_sd"] = deviation(values) if known else None
            rows.append(row)
        return rows

    def claim(self, column: str) -> dict[str, Any]:
        """Whether the first method ends lowest of the paper's in a column, seed by seed.

        Args:
            column: a trace column.

        Returns:
            How often it was lowest, and mean and standard deviation over seeds of its final value less the lowest of
            the others; the deviation is None where it is unknown.
        """
        first, *others = (self.runs[method.label] for method in self.plan.methods if method.paper)
        gaps = [run.last(column) - min(o[i].last(column) for o in others) for i, run in enumerate(first)]
        return {
            "column": column,
            "lowest_in": sum(gap < 0 for gap in gaps),
            "seeds": len(gaps),
            "gap": statistics.fmean(gaps),
            "gap_sd": deviation(gaps),
        }

    def summary(self) -> dict[str, Any]:
        """Everything but the curves, for JSON.

        Returns:
            Plain numbers and strings.
        """
        search = {
            label: [{"step": r.step, "loss": r.last("loss"), "status": r.status} for r in runs]
            for label, runs in self.searched.items()
        }
        return {
            "figure": self.plan.name,
            "title": self.plan.title,
            "version": __version__,
            "budget": self.plan.budget,
            "settings": dict(self.plan.settings),
            "note": self.plan.note,
            "seeds": list(self.seeds),
            "methods": self.table(),
            "claims": [self.claim(column) for column in self.plan.metrics],
            "search": search,
        }


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation over seeds, where there is one to speak of.

    Args:
        values: one per seed.

    Returns:
        A number; None of a single seed, and where a run has left the finite numbers.

    Examples:
        >>> deviation([1.0, 3.0]), deviation([1.0]), deviation([1.0, math.inf])
        (1.4142135623730951, None, None)
    """
    known = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.stdev(values) if known else None


def band(runs: Iterable[Run], x: str, y: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """The curve of a method: median, least and greatest value over the seeds at every iteration.

    A run that ended early keeps its last value; one that left the finite numbers is infinite there.

    Args:
        runs: one per seed.
        x: the column of the axis; its median is taken.
        y: the column of the values.

    Returns:
        Positions, medians, minima and maxima.
    """
    runs = list(runs)
    length = max(len(run.rows) for run in runs)
    curves = []
    for row in range(length):
        at = [run.rows[min(row, len(run.rows) - 1)] for run in runs]
        values = [_ordered(float(r[y])) if y in r else math.nan for r in at]
        reached = [float(r[x]) for r, run in zip(at, runs, strict=True) if row < len(run.rows)]
        curves.append((statistics.median(reached), statistics.median(values), min(values), max(values)))
    positions, medians, least, greatest = (list(column) for column in zip(*curves, strict=True))
    return positions, medians, least, greatest


def _ordered(value: float) -> float:
    """A value that can be ordered: what is no finite number is worse than any."""
    return value if math.isfinite(value) else math.inf
