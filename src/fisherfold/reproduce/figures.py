"""The paper's four-method figures: every method over several seeds, its step size searched first.

The step of a method is the one with the lowest training loss at the full budget on the first seed, searched over
decades and then over a 1-2-5 grid around the best decade; every run is recorded.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fisherfold._version import __version__
from fisherfold.files import make_folder, write_atomically
from fisherfold.manifolds.base import Point
from fisherfold.problems.base import Problem
from fisherfold.reproduce.plans import FigurePlan, MethodPlan
from fisherfold.reproduce.runs import FigureResult, Run
from fisherfold.solvers import minimize
from fisherfold.solvers.stopping import GradientNorm
from fisherfold.threads import one_thread

Say = Callable[[str], None]
Tick = Callable[[int, int], None]
# a run by the place of its method in the plan, its step and its seed; a spread yields each when it is recorded
Place = tuple[int, float | None, int]
Spread = Callable[[list[Place]], Iterable[Place]]
Wanted = tuple[MethodPlan, float | None, int]


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


def _best(runs: list[Run]) -> float:
    return min((run for run in runs if run.step is not None), key=lambda run: run.last("loss")).step or math.nan


def _near(method: MethodPlan, coarse: list[float], best: float) -> list[float]:
    return [step for step in method.steps if step not in coarse and 0.1 < step / best < 10]


def _name(method: MethodPlan, step: float | None, seed: int) -> str:
    return f"{method.label}  step {'-' if step is None else f'{step:g}'}  seed {seed}"


def _is_decade(step: float) -> bool:
    return abs(math.log10(step) - round(math.log10(step))) < 1e-9
