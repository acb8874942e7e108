"""The paper's four-method figures: every method over several seeds, its step size searched first.

The step of a method is the one with the lowest training loss at the full budget on the first seed,
searched over decades and then over a 1-2-5 grid around the best decade. Every run is recorded in a
file of its own and read again. The paper's count of gradients (``paper_grads``) and the true one
(``true_grads``), both over N, stand side by side; the budget is in the paper's: an iteration of a
method is charged what the paper charges for it.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import polars as pl
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fisherfold._version import __version__
from fisherfold.files import digest, make_folder, write_atomically
from fisherfold.manifolds.base import Point
from fisherfold.plain import counted
from fisherfold.problems.base import Problem
from fisherfold.progress import track
from fisherfold.reproduce.workers import Workers
from fisherfold.solvers import minimize
from fisherfold.solvers.stopping import GradientNorm
from fisherfold.threads import one_thread

_LEAST_GRID = 3  # steps; fewer are settings of the paper to choose from

AXES = {
    "paper_grads": "#grad/N as counted in the paper",
    "true_grads": "sample gradients evaluated / N",
    "seconds": "seconds (solver time)",
}
# colours that stay apart for colour-blind readers, and a marker each
_STYLES = (
    ("#000000", "<"),
    ("#0072b2", "o"),
    ("#d55e00", "s"),
    ("#009e73", "^"),
    ("#cc79a7", "D"),
    ("#e69f00", "v"),
)


@dataclass(frozen=True)
class MethodPlan:
    """One method of a figure."""

    label: str
    method: str
    charge: int
    steps: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: bool = True
    curve: Callable[[int], list[dict[str, float]]] | None = None


@dataclass(frozen=True)
class FigurePlan:
    """One figure."""

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
        """A sketch of the same figure: a third of the budget, and all decades of every grid."""
        methods = tuple(replace(m, steps=_decades(m)) for m in self.methods)
        return replace(
            self,
            methods=methods,
            budget=max(6, self.budget // 3),
            title=f"{self.title} (quick sketch)",
        )


def checksum(*arrays: NDArray[Any]) -> str:
    """What tells data from other data: recorded runs of other ones are not read."""
    return digest(map(torch.from_numpy, arrays))[:16]


def grid_125(largest: float, smallest: float) -> tuple[float, ...]:
    """The grid 5, 2, 1, 0.5, 0.2, ... between two numbers, largest first."""
    low = math.floor(math.log10(smallest))
    high = math.ceil(math.log10(largest))
    values = [
        float(f"{digit}e{power}") for power in range(high, low - 1, -1) for digit in (5, 2, 1)
    ]
    return tuple(v for v in values if smallest * (1 - 1e-9) <= v <= largest * (1 + 1e-9))


def four_methods(
    steps: tuple[float, ...], grid: tuple[float, ...], batch_size: int
) -> tuple[MethodPlan, ...]:
    """The methods that the paper compares."""
    stochastic = {"batch_size": batch_size, "sampling": "replacement"}
    return (
        MethodPlan("RNGD", "rngd-vr", 2, steps, stochastic | {"fisher": "kronecker"}),
        MethodPlan("RSGD", "rsgd", 1, grid, stochastic),
        MethodPlan("RSVRG", "rsvrg", 3, grid, stochastic),
        MethodPlan("RCG", "rcg", 1),
    )


@dataclass(frozen=True)
class Run:
    """One method, step and seed; ``rows`` is its trace with both counts of gradients."""

    label: str
    step: float | None
    seed: int
    status: str
    rows: list[dict[str, float]]

    def last(self, column: str) -> float:
        """The final value of a column, infinite if the run diverged."""
        return _ordered(float(self.rows[-1].get(column, math.nan)))


@dataclass(frozen=True)
class FigureResult:
    """All runs of a figure: those of the step search and those with the chosen step, by label."""

    plan: FigurePlan
    seeds: tuple[int, ...]
    searched: dict[str, list[Run]]
    runs: dict[str, list[Run]]

    def final(self, label: str, column: str) -> tuple[float | None, float | None]:
        """The mean and the standard deviation over the seeds of a final figure.

        None if it was not measured.
        """
        runs = self.runs[label]
        if any(column not in run.rows[-1] for run in runs):
            return None, None
        values = [run.last(column) for run in runs]
        return statistics.fmean(values), deviation(values)

    def at_the_edge(self) -> list[str]:
        """A sentence for each method whose best step is the first or the last of its grid."""
        found = []
        for method in self.plan.methods:
            if method.label not in self.searched or len(method.steps) < _LEAST_GRID:
                continue
            step = self.runs[method.label][0].step
            least = min(method.steps)
            most = max(method.steps)
            if step in (least, most):
                found.append(
                    f"The best step of {method.label}, {step:g}, is at the edge of its grid "
                    f"({least:g} to {most:g}): there may be a better one beyond."
                )
        return found


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation over seeds; None of a single seed and where a run diverged.

    Examples:
        >>> deviation([1.0, 3.0]), deviation([1.0]), deviation([1.0, math.inf])
        (1.4142135623730951, None, None)
    """
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


def band(
    runs: Sequence[Run], x: str, y: str
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Positions, medians, minima and maxima over the seeds.

    A run that ended early keeps its last value.
    """
    curves = []
    for row in range(max(len(run.rows) for run in runs)):
        at = [run.rows[min(row, len(run.rows) - 1)] for run in runs]
        values = [_ordered(float(r[y])) if y in r else math.nan for r in at]
        reached = [float(r[x]) for r, run in zip(at, runs, strict=True) if row < len(run.rows)]
        curves.append(
            (statistics.median(reached), statistics.median(values), min(values), max(values))
        )
    positions, medians, least, greatest = (list(column) for column in zip(*curves, strict=True))
    return positions, medians, least, greatest


Wanted = tuple[int, float | None, int]  # the place of a method in the plan, its step, a seed


class Runner:
    """Makes runs of a plan, records each, and reads those that are recorded."""

    def __init__(self, plan: FigurePlan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.problems: dict[int, Any] = {}
        make_folder(folder)

    def known(self, wanted: Wanted) -> Run | None:
        """The run if it is recorded; one that was cut short is not."""
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            return Run(**json.loads(self._file(wanted).read_bytes())["run"])
        return None

    def run(self, wanted: Wanted) -> Run:
        """One run, read if it is recorded."""
        if (found := self.known(wanted)) is not None:
            return found
        with one_thread() if self.plan.one_thread else nullcontext():
            run = self._make(*wanted)
        write_atomically(self._file(wanted), json.dumps({"run": asdict(run)}).encode())
        return run

    def _make(self, place: int, step: float | None, seed: int) -> Run:
        method = self.plan.methods[place]
        if method.curve is not None:
            return Run(method.label, step, seed, "converged", method.curve(seed))
        if seed not in self.problems:
            self.problems[seed] = self.plan.make(seed)
        problem, x0 = self.problems[seed]
        options = dict(method.options) | ({} if step is None else {"step": step})
        result = minimize(
            problem,
            x0,
            method.method,
            max_iter=self.plan.budget // method.charge,
            seed=seed,
            stop=GradientNorm(1e-6),
            **options,
        )
        rows = [
            row
            | {
                "paper_grads": method.charge * row["iteration"],
                "true_grads": row["samples"] / problem.n_samples,
            }
            for row in result.trace
        ]
        return Run(method.label, step, seed, result.status, rows)

    def _file(self, wanted: Wanted) -> Path:
        """A file for these settings; a run with others is another one."""
        (place, step, seed) = wanted
        plan = self.plan
        method = plan.methods[place]
        text = json.dumps(
            [
                __version__,
                plan.name,
                plan.budget,
                dict(plan.settings),
                method.method,
                step,
                seed,
                {name: str(value) for name, value in sorted(method.options.items())},
            ]
        )
        label = re.sub(r"[^a-z0-9]+", "-", method.label.lower()).strip("-")
        return self.folder / f"{label}-{seed}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def run_figure(
    source: Callable[[], FigurePlan], folder: Path, *, seeds: int = 5, jobs: int = 1
) -> FigureResult:
    """Search the steps and run every method on every seed.

    ``source`` makes the plan, in every process.
    """
    with track("reading the data") as line, Workers(jobs) as workers:
        plan = source()
        runner = Runner(plan, folder / "runs")
        places = range(len(plan.methods))
        searching = [p for p in places if len(plan.methods[p].steps) > 1]
        decades = {p: list(_decades(plan.methods[p])) for p in searching}
        # around the best decade there are at most four more steps of a 1-2-5 grid
        bound = sum(len(steps) + 4 for steps in decades.values()) + seeds * len(places)
        line.update(0, total=bound, what=plan.title)

        def make(wanted: Sequence[Wanted]) -> list[tuple[int, Run]]:
            missing = [w for w in wanted if runner.known(w) is None]
            line.update(line.done + len(wanted) - len(missing))
            one = partial(_run_one, source, folder / "runs")
            for _ in workers.each(one, missing) if jobs > 1 else map(runner.run, missing):
                line.advance()
            return [(w[0], runner.run(w)) for w in wanted]

        searched: dict[int, list[Run]] = {p: [] for p in searching}
        for place, run in make([(p, step, 0) for p in searching for step in decades[p]]):
            searched[place].append(run)
        near = {p: _near(plan.methods[p], decades[p], _best(searched[p])) for p in searching}
        for place, run in make([(p, step, 0) for p in searching for step in near[p]]):
            searched[place].append(run)
        chosen = {
            p: _best(searched[p]) if p in searched else next(iter(plan.methods[p].steps), None)
            for p in places
        }
        found = [
            run for _, run in make([(p, chosen[p], seed) for p in places for seed in range(seeds)])
        ]
    labels = [method.label for method in plan.methods]
    return FigureResult(
        plan,
        tuple(range(seeds)),
        {labels[p]: runs for p, runs in searched.items()},
        {labels[p]: found[seeds * p : seeds * (p + 1)] for p in places},
    )


_runners: dict[Path, Runner] = {}  # of a worker process


def _run_one(source: Callable[[], FigurePlan], folder: Path, wanted: Wanted) -> None:
    if folder not in _runners:
        _runners[folder] = Runner(source(), folder)
    _runners[folder].run(wanted)


def draw(result: FigureResult) -> Figure:
    """Medians with bands from the least to the greatest.

    A row of panels per error, a column per count of the cost.
    """
    metrics = result.plan.metrics
    figure = Figure(figsize=(4.4 * len(AXES), 3.1 * len(metrics) + 0.9), layout="constrained")
    panels = figure.subplots(len(metrics), len(AXES), squeeze=False)
    for row, (column, label) in enumerate(metrics.items()):
        for panel, (axis, axis_label) in zip(panels[row], AXES.items(), strict=True):
            _panel(panel, result, axis, column)
            panel.set_xlabel(axis_label)
            panel.set_ylabel(label)
    panels[0][0].legend(frameon=False)
    seeds = f"{counted(len(result.seeds), 'seed')}: median, least and greatest"
    figure.suptitle(
        "\n".join(filter(None, (f"{result.plan.title} - {seeds}", result.plan.note))), fontsize=11
    )
    return figure


def _panel(panel: Any, result: FigureResult, axis: str, column: str) -> None:
    edges: list[float] = []
    for (label, runs), (colour, marker) in zip(result.runs.items(), _STYLES, strict=False):
        if column not in runs[0].rows[-1]:
            continue
        x, median, least, greatest = band(runs, axis, column)
        name = label if runs[0].step is None else f"{label} (step {runs[0].step:.3g})"
        panel.fill_between(x, least, greatest, color=colour, alpha=0.15, linewidth=0)
        panel.plot(
            x,
            median,
            color=colour,
            marker=marker,
            markevery=max(1, len(x) // 10),
            markersize=4,
            label=name,
        )
        edges += [v for v in (*least, *greatest) if math.isfinite(v)]
    panel.grid(alpha=0.3)
    if edges and min(edges) > 0 and max(edges) > 20 * min(edges):
        panel.set_yscale("log")


def write_figure(result: FigureResult, folder: Path) -> None:
    """Write the picture, and the curves as CSV."""
    make_folder(folder)
    with matplotlib.rc_context({"font.size": 9}):
        write_atomically(folder / f"{result.plan.name}.png", png(draw(result)))
    names = [
        "iteration",
        "paper_grads",
        "true_grads",
        "seconds",
        "loss",
        "gradient_norm",
        *result.plan.metrics,
    ]
    rows = [
        {"method": run.label, "step": run.step, "seed": run.seed}
        | {name: row.get(name) for name in names}
        for runs in result.runs.values()
        for run in runs
        for row in run.rows
    ]
    frame = pl.DataFrame(rows, infer_schema_length=None)
    write_atomically(folder / f"{result.plan.name}.csv", frame.write_csv().encode())


def png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _best(runs: Sequence[Run]) -> float:
    return (
        min((run for run in runs if run.step is not None), key=lambda run: run.last("loss")).step
        or math.nan
    )


def _near(method: MethodPlan, coarse: Sequence[float], best: float) -> list[float]:
    return [step for step in method.steps if step not in coarse and 0.1 < step / best < 10]


def _decades(method: MethodPlan) -> tuple[float, ...]:
    """The powers of ten among the steps of a method; all of them if there is none."""
    return tuple(step for step in method.steps if _is_decade(step)) or method.steps


def _is_decade(step: float) -> bool:
    return abs(math.log10(step) - round(math.log10(step))) < 1e-9


def _ordered(value: float) -> float:
    """A value that can be ordered: anything that is not finite is worse than any number."""
    return value if math.isfinite(value) else math.inf
