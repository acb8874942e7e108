"""Everything that ``fisherfold reproduce`` runs: each experiment by name, its files, its section, and the page.

An experiment leaves its raw tables, its recorded runs and one section file; the page is made from the section files, so
that every command refreshes it and nothing has to be run twice. A sketch (``quick``) lies in a folder of its own: the
page shows it only until the whole experiment has been run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fisherfold.files import make_folder, write_atomically
from fisherfold.reproduce import cifar, completion, subspace
from fisherfold.reproduce.figures import FigureResult, Say, Tick, png, run_figure, write_figure
from fisherfold.reproduce.page import Section, Verdict, write_page
from fisherfold.reproduce.plans import FigurePlan
from fisherfold.reproduce.sections import CLAIMS, THEORY_CLAIMS, figure_section, theory_section
from fisherfold.reproduce.theory import Part, Settings
from fisherfold.reproduce.theory.records import SUMMARY, run_recorded
from fisherfold.reproduce.theory.report import files_of
from fisherfold.reproduce.verdicts import RULES

FIGURES: dict[str, Callable[..., FigurePlan]] = {
    "jester": completion.jester,
    "movielens": completion.movielens,
    "school": subspace.school,
    "sarcos": subspace.sarcos,
}
NAMES = (*FIGURES, "cifar", "theory")
TITLES = {"jester": "Jester-1, rank 5", "movielens": "MovieLens-1M, rank 5", "school": "School, 139 tasks",
          "sarcos": "Sarcos, 7 tasks", "cifar": "CIFAR-10 and CIFAR-100 with MKFAC"}  # fmt: skip
_MOST_JOBS = 256  # each is a process that imports torch
ORDER = (*FIGURES, "cifar", *(f"theory-{part}" for part in THEORY_CLAIMS))


@dataclass(frozen=True)
class Options:
    """How the experiments are run."""

    quick: bool = False
    seeds: int = 5
    jobs: int = 1
    output: Path = Path("report")
    fresh: bool = False
    device: str = "cpu"
    parts: tuple[str, ...] = ()
    sarcos_file: Path | None = None
    say: Say = field(default=lambda _: None)
    tick: Tick = field(default=lambda _done, _total: None)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        if not 1 <= self.jobs <= _MOST_JOBS:
            raise ValueError(f"jobs must be from 1 to {_MOST_JOBS}, got {self.jobs}")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"output must be a folder, {self.output} is a file")
        if self.sarcos_file is not None and not self.sarcos_file.is_file():
            raise FileNotFoundError(f"sarcos_file must be the file sarcos_inv.mat, there is no file {self.sarcos_file}")

    def folder(self, name: str) -> Path:
        """Where the files of an experiment go."""
        return (self.output / "quick" if self.quick else self.output) / name

    def command(self, name: str) -> str:
        """What to type to repeat an experiment, or to go on with it."""
        words = ["fisherfold", "reproduce", name]
        if name != "cifar":  # which runs nothing
            words += ["--quick"] if self.quick else []
            words += ["--seeds", str(self.seeds)] if self.seeds != Options.seeds else []
            words += ["--jobs", str(self.jobs)] if self.jobs != Options.jobs else []
        words += ["--output", str(self.output)] if self.output != Options.output else []
        if name in {"all", "sarcos"} and self.sarcos_file is not None:
            words += ["--sarcos-file", str(self.sarcos_file)]
        if name in {"all", "theory"} and self.device != Options.device:
            words += ["--device", self.device]
        if name == "theory":
            words += [word for part in self.parts for word in ("--part", part)]
        return shlex.join(words)


class Reproduced(NamedTuple):
    """What a figure left behind."""

    result: FigureResult
    files: dict[str, Path]
    more: dict[str, str]
    section: Section


def reproduce_figure(name: str, options: Options) -> Reproduced:
    """Run a four-method figure, write its files and its section."""
    folder = options.folder(name)
    source = partial(make_plan, name, options.quick, options.sarcos_file)
    seeds = min(options.seeds, 2) if options.quick else options.seeds
    more = {"what refit hides": completion.HIDDEN} if name in {"jester", "movielens"} else {}
    result = run_figure(
        source, folder, seeds=seeds, jobs=options.jobs, fresh=options.fresh, say=options.say, tick=options.tick
    )
    files = write_figure(result, folder)
    picture = files["png"].relative_to(options.output).as_posix()
    section = figure_section(result, command=options.command(name), picture=picture, more=more)
    section.save(_section_file(options.output, name, options.quick))
    return Reproduced(result, files, more, section)


def make_plan(name: str, quick: bool, sarcos_file: Path | None = None) -> FigurePlan:
    """The plan of a figure."""
    plan = FIGURES[name](**({"sarcos_file": sarcos_file} if name == "sarcos" else {}))
    return plan.quick() if quick else plan


def reproduce_theory(options: Options) -> tuple[list[Part], dict[str, str]]:
    """Run the theory, write its files and a section per part."""
    folder = options.folder("theory")
    settings = Settings(quick=options.quick, seeds=options.seeds, device=options.device, say=options.say)
    parts = run_recorded(
        settings, folder, only=options.parts, fresh=options.fresh, jobs=options.jobs, tick=options.tick
    )
    files = {name: str(file) for part in parts for name, file in files_of(part.name, folder).items()}
    files[SUMMARY] = str(folder / SUMMARY)
    shown = {"quick": options.quick, "seeds": options.seeds, "device": options.device}
    for part in parts:
        command = replace(options, parts=(part.name,)).command("theory")
        section = theory_section(part, command=command, folder=folder.relative_to(options.output), settings=shown)
        section.save(_section_file(options.output, section.name, options.quick))
    return parts, files


def reproduce_cifar(options: Options, results: Path = cifar.RESULTS) -> tuple[dict[str, Any], Section, dict[str, Path]]:
    """Assemble the CIFAR table from recorded runs, write its files and its section; training is in benchmarks/cifar."""
    runs = cifar.read_runs(results)
    found, chosen = cifar.cells(runs), cifar.searches(results.with_name("cifar_searches.jsonl"))
    folder = make_folder(options.folder("cifar"))
    files = {kind: folder / f"cifar.{kind}" for kind in ("png", "json")}
    write_atomically(files["png"], png(cifar.draw(runs)))
    facts = {"cells": [asdict(cell) for cell in found], "claim": cifar.CLAIM}
    write_atomically(files["json"], json.dumps(facts, indent=1).encode())
    command = options.command("cifar") + (f" --results {shlex.quote(str(results))}" * (results != cifar.RESULTS))
    picture = files["png"].relative_to(options.output).as_posix()
    section = cifar.section(found, runs, chosen, command=command, picture=picture)
    section.save(_section_file(options.output, "cifar"))
    return facts | {"verdict": section.verdict, "why": list(section.why)}, section, files


def mark_missing(name: str, hint: str, options: Options) -> None:
    """Let the page say that the data of an experiment were not found, unless it has results from before."""
    if _found(options.output, name) is None:
        _empty(name, "data not found", hint, options.command(name)).save(_section_file(options.output, name))


def refresh_page(output: Path) -> Path:
    """Make the page from the sections that are there; what was not run is marked as such."""
    return write_page(sections(output), output, RULES)


def sections(output: Path) -> list[Section]:
    """All sections of the page in its order."""
    shown = []
    for name in ORDER:
        found = _found(output, name) or _read(_section_file(output, name))
        shown.append(_not_run(output, name) if found is None else found)
    return shown


def _not_run(output: Path, name: str) -> Section:
    kind, _, part = name.partition("-")
    command = Options(output=output, parts=(part,) if part else ()).command(kind)
    damaged = [file for quick in (False, True) if (file := _section_file(output, name, quick)).is_file()]
    reason = f"{damaged[0]} cannot be read: run it again." if damaged else "It has not been run yet."
    return _empty(name, "not run", reason, command)


def _found(output: Path, name: str) -> Section | None:
    """The section of an experiment that was run: the whole one before the sketch."""
    for quick in (False, True):
        section = _read(_section_file(output, name, quick))
        if section is not None and section.verdict != "data not found":
            return section
    return None


def _read(file: Path) -> Section | None:
    """A section, if there is one: a damaged one must not keep the page from showing all others."""
    try:
        return Section.load(file) if file.is_file() else None
    except ValueError:
        return None


def _empty(name: str, verdict: Verdict, reason: str, command: str) -> Section:
    part = name.removeprefix("theory-")
    claim = cifar.CLAIM if name == "cifar" else CLAIMS[name][1] if name in CLAIMS else THEORY_CLAIMS[part]
    title = TITLES.get(name, f"Theory: {part}")
    return Section(name, title, claim, verdict, [reason], command=command)


def _section_file(output: Path, name: str, quick: bool = False) -> Path:
    return output / "sections" / ("quick" if quick else "") / f"{name}.json"
