"""``fisherfold reproduce``: the paper's figures and tables, remade, and the report page.

Every command refreshes the page from what has been run so far. A second run reads what the first has recorded, so that
an interrupted command goes on where it stopped.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fisherfold.cli.common import command, group
from fisherfold.cli.voice import Voice, grid
from fisherfold.progress import track

if TYPE_CHECKING:
    from rich.table import Table

    from fisherfold.reproduce.page import Section
    from fisherfold.reproduce.reproduce import Options

app = group(
    "Remake the figures and tables of the paper; writes a report page.",
    examples=["fisherfold reproduce all --quick --jobs 2"],
)

Output = Annotated[Path, typer.Option("--output", "-o", help="The folder for the page, tables and recorded runs.")]
RUNS = Path("results/cifar_runs.parquet")
FIGURES = {
    "jester": "Matrix completion on Jester-1: RNGD, RSGD, RSVRG, RCG and our default, rank 5.",
    "movielens": "Matrix completion on MovieLens-1M: RNGD, RSGD, RSVRG, RCG and our default, rank 5.",
    "school": "Multi-task learning on School: RNGD, RSGD, RSVRG and RCG, rank 6.",
    "sarcos": "Multi-task learning on Sarcos: RNGD, RSGD, RSVRG and RCG, rank 6.",
}
PARTS = ("metric", "global", "rates", "stability", "invariance")


@dataclass
class Running:
    """What all experiments take; the names are those of ``fisherfold.reproduce.reproduce.Options``."""

    quick: Annotated[
        bool, typer.Option("--quick", help="A sketch: a third of the epochs, two seeds, smaller step grids.")
    ] = False
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds (split, start and samples).", metavar="N")] = 5
    jobs: Annotated[
        int,
        typer.Option("--jobs", "-j", min=1, max=256, metavar="N", help="Runs at a time; several distort the times."),
    ] = 1
    output: Output = Path("report")

    def options(self, voice: Voice) -> Options:
        """For the experiments."""
        from fisherfold.reproduce import reproduce

        voice.resume = f"what was finished is recorded in {self.output}; the same command goes on"
        return reproduce.Options(**vars(self))


@command(app, "all", examples=["fisherfold reproduce all --quick --jobs 2", "fisherfold reproduce all"])
def everything(voice: Voice, *, running: Running) -> None:
    """Everything: runs what is missing and writes the page. Experiments without data are marked, not an error."""
    from fisherfold.reproduce import reproduce

    options = running.options(voice)
    with track("all experiments", len(reproduce.NAMES)) as whole:
        for name in reproduce.NAMES:
            try:
                _run(name, options)
            except FileNotFoundError as error:
                reproduce.mark_missing(name, str(error), options)
            page = reproduce.refresh_page(options)
            whole.advance()
    found = reproduce.sections(options)
    rows = ((section.title, section.verdict, "\n".join(section.why)) for section in found)
    columns = ("experiment", "verdict", "why")
    table = grid("The paper's claims and what was seen", columns, rows, text=3, show_lines=True)
    verdicts = {s.name: {"verdict": s.verdict, "why": list(s.why)} for s in found}
    voice.answer({"verdicts": verdicts, "page": page}, table, f"report page: {page}")


def _add_figure(name: str, text: str) -> None:
    def run(voice: Voice, *, running: Running) -> None:
        from fisherfold.reproduce import reproduce

        options = running.options(voice)
        try:
            found = _run(name, options)
        except FileNotFoundError as error:
            reproduce.mark_missing(name, str(error), options)
            reproduce.refresh_page(options)
            raise
        _answer(voice, found, options)

    run.__doc__ = text
    command(app, name, examples=[f"fisherfold reproduce {name} --quick --jobs 2", f"fisherfold reproduce {name}"])(run)


for _name, _text in FIGURES.items():
    _add_figure(_name, _text)


@command(app, examples=["fisherfold reproduce theory --quick --part metric", "fisherfold reproduce theory --jobs 2"])
def theory(
    voice: Voice, *, running: Running,
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part", help=f"Only this part: {', '.join(PARTS)}. May be repeated.",
            autocompletion=lambda incomplete: [part for part in PARTS if part.startswith(incomplete)],
        ),
    ] = None,
) -> None:  # fmt: skip
    """The theory made visible: five parts, each with a figure, a table and verdicts."""
    options = running.options(voice)
    _answer(voice, _run("theory", options, parts=tuple(part or ())), options)


@command(app, examples=["fisherfold reproduce cifar", "fisherfold reproduce cifar --results runs.parquet --json"])
def cifar(
    voice: Voice,
    results: Annotated[Path, typer.Option("--results", help="The table of recorded runs.")] = RUNS,
    output: Output = Path("report"),
) -> None:
    """The CIFAR table from recorded training runs: medians over seeds and the verdict. It does not train."""
    options = Running(output=output).options(voice)
    _answer(voice, _run("cifar", options, results=results), options)


def _run(name: str, options: Options, **more: Any) -> list[Section]:
    from fisherfold.reproduce import reproduce

    if name == "theory":
        return reproduce.reproduce_theory(options, **more)
    if name == "cifar":
        return [reproduce.reproduce_cifar(options, **more)]
    return [reproduce.reproduce_figure(name, options)]


def _answer(voice: Voice, found: list[Section], options: Options) -> None:
    """Refresh the page, and print the sections that were run."""
    from fisherfold.reproduce import reproduce

    page = reproduce.refresh_page(options)
    shown: list[Table | str] = []
    for section in found:
        shown += [_grid(section, place) for place in range(2 if section.name == "cifar" else 1)]
        shown += [f"the paper: {section.claim}", f"verdict: {section.verdict}", *section.why, *section.notes, ""]
    facts = {"sections": [asdict(section) for section in found], "page": page}
    voice.answer(facts, *shown, f"tables and pictures are in {options.folder}; report page: {page}")


def _grid(section: Section, place: int) -> Table:
    table = section.tables[place]
    words = 1 if table.title.startswith("Final") else len(table.columns)
    rows = ([f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in table.rows)
    return grid(f"{section.title}: {table.title[:1].lower()}{table.title[1:]}", table.columns, rows, text=words,
                show_lines=words > 1)  # fmt: skip
