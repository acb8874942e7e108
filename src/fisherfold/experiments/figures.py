"""The paper's four-method figures: every method over several seeds, its step size searched first.

A figure is a plan: how to make the problem and the start for a seed, which methods with which step grids, and a budget
in the paper's count of gradients. The step of a method is the one with the lowest training loss at the full budget on
the first seed, searched over decades and then over a 1-2-5 grid around the best decade; every run is recorded. The
count of the figures (``paper_grads``) and the true number of sample gradients (``true_grads``), both over N, are kept
beside each other.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fisherfold._version import __version__
from fisherfold.files import make_folder, write_atomically
from fisherfold.manifolds.base import Point
from fisherfold.problems.base import Problem
from fisherfold.solvers import minimize
from fisherfold.solvers.stopping import GradientNorm
from fisherfold.threads import one_thread

Say = Callable[[str], None]
Tick = Callable[[int, int], None]
# a run by the place of its method in the plan, its step and its seed; a spread yields each when it is recorded
Place = tuple[int, float | None, int]
Spread = Callable[[list[Place]], Iterable[Place]]
_COUNTS = frozenset({"loss", "seconds", "paper_grads", "true_grads"})  # what every point of a curve has


@dataclass(frozen=True)
class MethodPlan:
    """One method of a figure.

    Attributes:
        label: its name on the figure.
        method: its name for ``minimize``.
        charge: how many #grad/N one iteration costs in the paper's count.
        steps: the step sizes to search, largest first; one for a fixed step, none for a line search.
        options: further options for ``minimize``.
        paper: whether the paper has it; ours are drawn beside and take no part in its claim.
        curve: makes the rows for a seed where no ``minimize`` is run, with ``paper_grads`` and ``true_grads``.
    """

    label: str
    method: str
    charge: int
    steps: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: bool = True
    curve: Callable[[int], list[dict[str, float]]] | None = None


@dataclass(frozen=True)
class FigurePlan:
    """One figure.

    Attributes:
        name: the name of the command and of the files.
        title: the title of the figure.
        make: the problem and the starting point for a seed.
        methods: the methods, the paper's first.
        budget: #grad/N in the paper's count.
        metrics: trace columns to show and their labels, the honest one first.
        settings: whatever else determines the numbers (data, rank, damping, ...), part of a run's identity.
        note: a sentence that is printed on the figure.
        one_thread: whether runs are made on one thread, so that their rounding does not depend on the machine's cores.
    """

    name: str
    title: str
    make: Callable[[int], tuple[Problem, Point]]
    methods: tuple[MethodPlan, ...]
    budget: int
    metrics: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    one_thread: bool = False

    def quick(self) -> FigurePlan:
        """A sketch of the same figure: a third of the budget and the middle of every grid.

        Returns:
            A smaller plan.
        """
        methods = tuple(replace(m, steps=_middle(m.steps)) for m in self.methods)
        return replace(self, methods=methods, budget=max(6, self.budget // 3), title=f"{self.title} (quick sketch)")


Wanted = tuple[MethodPlan, float | None, int]


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


def run_figure(
    plan: FigurePlan,
    *,
    seeds: int = 5,
    output: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    say: Say = lambda _: None,
    tick: Tick = lambda _done, _total: None,
    spread: Spread | None = None,
) -> FigureResult:
    """Search the steps and run every method on every seed.

    Args:
        plan: the figure.
        seeds: how many seeds, from 0.
        output: a folder in which every run is recorded; a run that is there already is not made again.
        fresh: make all runs again.
        say: told what is being run.
        tick: told how many runs are done and how many there will be at most.
        spread: makes and records runs in other processes; needs ``output``.

    Returns:
        All runs.

    Raises:
        ValueError: if there is no seed.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    record = None if output is None else Path(output) / "runs"
    if record is not None:
        make_folder(record)
    runner = Runner(plan, record, fresh, say, spread)
    searching = [m for m in plan.methods if len(m.steps) > 1]
    decades = {m.label: [s for s in m.steps if _is_decade(s)] or list(m.steps) for m in searching}
    # around the best decade there are at most four more steps of a 1-2-5 grid
    bound = sum(len(steps) + 4 for steps in decades.values()) + seeds * len(plan.methods)
    runner.tick = lambda done: tick(min(done, bound), bound)
    runner.make_all([(m, step, 0) for m in searching for step in decades[m.label]])
    searched = {m.label: [runner.run(m, step, 0) for step in decades[m.label]] for m in searching}
    near = [(m, step, 0) for m in searching for step in _near(m, decades[m.label], _best(searched[m.label]))]
    runner.make_all(near)
    for method, step, seed in near:
        searched[method.label].append(runner.run(method, step, seed))
    chosen = {m.label: next(iter(m.steps), None) for m in plan.methods}
    chosen |= {label: _best(runs) for label, runs in searched.items()}
    runner.make_all([(m, chosen[m.label], seed) for seed in range(seeds) for m in plan.methods])
    runs = {m.label: [runner.run(m, chosen[m.label], seed) for seed in range(seeds)] for m in plan.methods}
    tick(bound, bound)
    return FigureResult(plan, tuple(range(seeds)), searched, runs)


class Runner:
    """Runs one method at a time and keeps what was run.

    Args:
        plan: the figure.
        record: the folder of recorded runs, if they are kept.
        fresh: do not read recorded runs.
        say: told what is being run.
        spread: makes and records runs in other processes.
    """

    def __init__(
        self, plan: FigurePlan, record: Path | None, fresh: bool, say: Say, spread: Spread | None = None
    ) -> None:
        self.plan, self.record, self.fresh, self.say, self.spread = plan, record, fresh, say, spread
        self.tick: Callable[[int], None] = lambda _: None
        self.made: dict[str, Run] = {}
        self.problems: dict[int, tuple[Problem, Point]] = {}

    def make_all(self, wanted: Iterable[Wanted]) -> None:
        """Make those of the wanted runs that are neither made nor recorded.

        Args:
            wanted: method, step and seed of each.
        """
        missing = [each for each in {self._key(*w): w for w in wanted}.values() if not self._read(*each)]
        done = len(self.made)
        self.tick(done)
        if self.spread is None or len(missing) < 2:
            for each in missing:
                self.run(*each)
                self.tick(len(self.made))
            return
        places = [(self.plan.methods.index(method), step, seed) for method, step, seed in missing]
        for count, (index, step, seed) in enumerate(self.spread(places), start=1):
            self.say(f"{_name(self.plan.methods[index], step, seed)} done")
            self.tick(done + count)
        for each in missing:
            self._read(*each, anew=True)

    def run(self, method: MethodPlan, step: float | None, seed: int) -> Run:
        """One run, read if it is recorded.

        Args:
            method: the method.
            step: its step size.
            seed: the seed.

        Returns:
            The run.
        """
        found = self._read(method, step, seed)
        if found is not None:
            return found
        self.say(_name(method, step, seed))
        with one_thread() if self.plan.one_thread else nullcontext():
            run = self._make(method, step, seed)
        self.made[self._key(method, step, seed)] = run
        if self.record is not None:
            content = {"settings": self._settings(method, step, seed), "run": asdict(run)}
            write_atomically(self._file(method, step, seed), json.dumps(content).encode())
        return run

    def _read(self, method: MethodPlan, step: float | None, seed: int, *, anew: bool = False) -> Run | None:
        """The run if it was made before; ``anew`` trusts the record even if all is to be made again."""
        key = self._key(method, step, seed)
        if key not in self.made and self.record is not None and (anew or not self.fresh):
            file = self._file(method, step, seed)
            # one that cannot be read, from a copy that was cut short for example, is made again
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                self.made[key] = Run.from_json(json.loads(file.read_bytes())["run"])
        return self.made.get(key)

    def _file(self, method: MethodPlan, step: float | None, seed: int) -> Path:
        return (self.record or Path()) / f"{self._key(method, step, seed)}.json"

    def _make(self, method: MethodPlan, step: float | None, seed: int) -> Run:
        if method.curve is not None:
            return Run(method.label, step, seed, "converged", method.curve(seed))
        if seed not in self.problems:
            self.problems[seed] = self.plan.make(seed)
        problem, x0 = self.problems[seed]
        options = dict(method.options) | ({} if step is None else {"step": step})
        iterations = self.plan.budget // method.charge
        result = minimize(
            problem, x0, method.method, max_iter=iterations, seed=seed, stop=GradientNorm(1e-6), **options
        )
        rows = [
            row | {"paper_grads": method.charge * row["iteration"], "true_grads": row["samples"] / problem.n_samples}
            for row in result.trace
        ]
        return Run(method.label, step, seed, result.status, rows)

    def _settings(self, method: MethodPlan, step: float | None, seed: int) -> dict[str, Any]:
        options = {name: str(value) for name, value in sorted(method.options.items())}
        return {
            "figure": self.plan.name, "version": __version__, "budget": self.plan.budget, "method": method.method,
            "options": options, "step": step, "seed": seed, "plan": dict(self.plan.settings),
        }  # fmt: skip

    def _key(self, method: MethodPlan, step: float | None, seed: int) -> str:
        text = json.dumps(self._settings(method, step, seed), sort_keys=True)
        label = re.sub(r"[^a-z0-9]+", "-", method.label.lower()).strip("-")
        return f"{label}-{seed}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def grid_125(largest: float, smallest: float) -> tuple[float, ...]:
    """The grid 5, 2, 1, 0.5, 0.2, ... between two numbers, largest first.

    Args:
        largest: the upper end.
        smallest: the lower end.

    Returns:
        Step sizes.

    Examples:
        >>> grid_125(2, 0.05)
        (2.0, 1.0, 0.5, 0.2, 0.1, 0.05)
    """
    low, high = math.floor(math.log10(smallest)), math.ceil(math.log10(largest))
    values = [float(f"{digit}e{power}") for power in range(high, low - 1, -1) for digit in (5, 2, 1)]
    return tuple(v for v in values if smallest * (1 - 1e-9) <= v <= largest * (1 + 1e-9))


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


def _best(runs: list[Run]) -> float:
    return min((run for run in runs if run.step is not None), key=lambda run: run.last("loss")).step or math.nan


def _near(method: MethodPlan, coarse: list[float], best: float) -> list[float]:
    return [step for step in method.steps if step not in coarse and 0.1 < step / best < 10]


def _name(method: MethodPlan, step: float | None, seed: int) -> str:
    return f"{method.label}  step {'-' if step is None else f'{step:g}'}  seed {seed}"


def _is_decade(step: float) -> bool:
    return abs(math.log10(step) - round(math.log10(step))) < 1e-9


def _middle(steps: tuple[float, ...]) -> tuple[float, ...]:
    cut = len(steps) // 3
    return steps[cut : len(steps) - cut]
