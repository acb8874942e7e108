"""Everything that ``fisherfold reproduce`` runs.

Each experiment by name, its claim, its section, and the page.

An experiment leaves tables, recorded runs and one section file; the page is made from the section
files, so that every command refreshes it and nothing has to be run twice. A sketch (``quick``) has
a folder and a page of its own.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from fisherfold._version import __version__
from fisherfold.files import make_folder, write_atomically
from fisherfold.reproduce import cifar, completion, subspace
from fisherfold.reproduce.figures import FigurePlan, FigureResult, png, run_figure, write_figure
from fisherfold.reproduce.page import Section, Table, Verdict, write_page
from fisherfold.reproduce.verdicts import RULES, Kind, compare, judge, true_count

FIGURES: dict[str, Callable[[], FigurePlan]] = {
    "jester": completion.jester,
    "movielens": completion.movielens,
    "school": subspace.school,
    "sarcos": subspace.sarcos,
}
NAMES = (*FIGURES, "cifar", "theory")
FASTEST = "RNGD converges fastest of the four methods, in training and in test error."
KINDS: dict[str, Kind] = {
    "jester": "fastest",
    "movielens": "fastest",
    "school": "lowest",
    "sarcos": "lowest",
}
CLAIMS = {
    "jester": FASTEST,
    "movielens": FASTEST,
    "school": "RNGD ends at the point with the lowest error of the four methods.",
    "sarcos": "RNGD ends at the point with the lowest error of the four methods, by a wide margin.",
    "cifar": cifar.CLAIM,
    "theory-metric": "The RFIM is the metric of the Kullback-Leibler divergence, to third order "
    "along a second-order retraction, and the natural direction is the steepest one (Theorem 1).",
    "theory-global": "Along Algorithm 1 with stochastic estimates the gradient tends to zero.",
    "theory-rates": "On the two-layer network RNGD converges linearly with factor 1 - t/2, and "
    "quadratically at t = 1.",
    "theory-stability": "The Jacobian of a wide two-layer network moves little around its "
    "random start.",
    "theory-invariance": "Behind a normalisation the gradient of a row is orthogonal to the row, "
    "and RFIM = FIM.",
}


@dataclass(frozen=True)
class Options:
    """How the experiments are run; ``output`` holds the page, a sketch goes into a folder below."""

    quick: bool = False
    seeds: int = 5
    jobs: int = 1
    output: Path = Path("report")

    @property
    def folder(self) -> Path:
        """Where the page of these runs goes."""
        return self.output / "quick" if self.quick else self.output

    @property
    def page(self) -> Path:
        """The page."""
        return self.folder / "index.html"

    def command(self, name: str) -> str:
        """What to type to run an experiment."""
        kind, _, part = name.partition("-")
        words = ["fisherfold", "reproduce", kind, *(["--part", part] if part else [])]
        if name != "cifar":  # which runs nothing
            words += ["--quick"] * self.quick
            words += ["--seeds", str(self.seeds)] if self.seeds != Options.seeds else []
        words += ["--output", str(self.output)] if self.output != Options.output else []
        return shlex.join(words)

    def section_file(self, name: str) -> Path:
        """Where the section of an experiment is kept."""
        return self.folder / "sections" / f"{name}.json"


def run(name: str, options: Options, **more: Any) -> list[Section]:
    """Run an experiment by its name and refresh the page, which also names missing data."""
    try:
        if name == "theory":
            return reproduce_theory(options, **more)
        return [
            reproduce_cifar(options, **more) if name == "cifar" else reproduce_figure(name, options)
        ]
    except FileNotFoundError as error:
        mark_missing(name, str(error), options)
        raise
    finally:
        refresh_page(options)


def reproduce_figure(name: str, options: Options) -> Section:
    """Run a four-method figure; write its files and its section."""
    seeds = min(options.seeds, 2) if options.quick else options.seeds
    folder = options.folder / name
    result = run_figure(partial(_plan, name, options.quick), folder, seeds=seeds, jobs=options.jobs)
    write_figure(result, folder)
    section = figure_section(result, command=options.command(name))
    section.save(options.section_file(name))
    return section


def _plan(name: str, quick: bool) -> FigurePlan:
    plan = FIGURES[name]()
    return plan.quick() if quick else plan


def figure_section(result: FigureResult, *, command: str = "") -> Section:
    """A four-method figure as a section."""
    plan = result.plan
    kind = KINDS[plan.name]
    paper, true = (
        [compare(result, c, kind, true=count) for c in plan.metrics] for count in (False, True)
    )
    why = [c.sentence(plan.metrics[c.column], plan.methods[0].label) for c in paper]
    settings = {
        **plan.settings,
        "budget (#grad/N, the paper's count)": plan.budget,
        "seeds": len(result.seeds),
        "version": __version__,
    }
    return Section(
        plan.name,
        plan.title,
        CLAIMS[plan.name],
        judge(paper, true),
        [*why, true_count(result, true)],
        settings,
        command,
        [_final_table(result), _search_table(result)],
        f"{plan.name}/{plan.name}.png",
        [*plan.note.splitlines(), *result.at_the_edge()],
    )


def reproduce_theory(options: Options, parts: tuple[str, ...] = ()) -> list[Section]:
    """Measure the parts of the theory that are not there yet; write their files and sections."""
    found: list[Section] = theory_of_a_clone().run(options, parts)
    return found


def theory_of_a_clone() -> ModuleType:
    """Import the experiments of the theory, which only a clone of the repository has."""
    for root in (Path(__file__).parents[3], Path.cwd()):
        if (root / "benchmarks" / "theory" / "__init__.py").is_file():
            if str(root) not in sys.path:
                sys.path.append(str(root))
            return importlib.import_module("benchmarks.theory")
    raise FileNotFoundError(
        "the experiments of the theory are not part of the installed package: run this command in "
        "a clone of the repository, which has them in benchmarks/theory"
    )


def reproduce_cifar(options: Options, results: Path = cifar.RESULTS) -> Section:
    """Assemble the CIFAR table from recorded runs, write its files and its section.

    Training is in benchmarks/cifar.
    """
    runs = cifar.read_runs(results)
    found = cifar.cells(runs)
    folder = make_folder(options.folder / "cifar")
    write_atomically(folder / "cifar.png", png(cifar.draw(runs)))
    section = cifar.section(
        found, runs, command=options.command("cifar"), picture="cifar/cifar.png"
    )
    section.save(options.section_file("cifar"))
    return section


def mark_missing(name: str, hint: str, options: Options) -> None:
    """Let the page say what an experiment lacks, unless it has results from before."""
    for each in [claim for claim in CLAIMS if claim.partition("-")[0] == name]:
        if Section.load(options.section_file(each)) is None:
            verdict: Verdict = "not run" if name == "theory" else "data not found"
            _empty(each, verdict, hint, options).save(options.section_file(each))


def sections(options: Options) -> list[Section]:
    """All sections of the page in its order; what was not run is marked as such."""
    return [
        Section.load(options.section_file(name))
        or _empty(name, "not run", "It has not been run yet.", options)
        for name in CLAIMS
    ]


def refresh_page(options: Options) -> Path:
    """Make the page from the sections that are there."""
    return write_page(sections(options), options.folder, RULES)


def _empty(name: str, verdict: Verdict, reason: str, options: Options) -> Section:
    title = name.replace("-", ": ").capitalize()
    return Section(name, title, CLAIMS[name], verdict, [reason], {}, options.command(name))


def _final_table(result: FigureResult) -> Table:
    metrics = result.plan.metrics
    rows = [
        [
            label,
            runs[0].step,
            *(value for metric in metrics for value in result.final(label, metric)),
            *(result.final(label, cost)[0] for cost in ("seconds", "paper_grads", "true_grads")),
        ]
        for label, runs in result.runs.items()
    ]
    heads = [head for label in metrics.values() for head in (label, "± sd")]
    over = (
        f", mean and standard deviation over {len(result.seeds)} seeds"
        if len(result.seeds) > 1
        else " of one seed"
    )
    columns = ["method", "step", *heads, "seconds", "#grad/N (paper)", "#grad/N (true)"]
    return Table(f"Final figures{over}", columns, rows)


def _search_table(result: FigureResult) -> Table:
    rows = [
        [
            label,
            run.step,
            run.last("loss"),
            run.status,
            "yes" if run.step == result.runs[label][0].step else "",
        ]
        for label, runs in result.searched.items()
        for run in sorted(runs, key=lambda run: -(run.step or 0))
    ]
    return Table(
        "Step sizes searched on the first seed",
        ["method", "step", "final loss", "status", "chosen"],
        rows,
    )
