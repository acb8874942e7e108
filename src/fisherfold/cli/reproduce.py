"""``fisherfold reproduce``: the paper's figures and tables, remade, and the report page.

Every command refreshes the page from what has been run so far. A second run reads what the first
has recorded, so that an interrupted command goes on where it stopped.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fisherfold.cli.common import command, group
from fisherfold.cli.voice import Voice, grid, option
from fisherfold.progress import track

if TYPE_CHECKING:
    from rich.table import Table

    from fisherfold.reproduce import page
    from fisherfold.reproduce.page import Section
    from fisherfold.reproduce.reproduce import Options

app = group(
    "Remake the figures and tables of the paper; writes a report page.",
    examples=["fisherfold reproduce all --quick --jobs 2"],
)

_FOLDER = "The folder for the page, tables and recorded runs."
RUNS = Path("results/cifar_runs.parquet")
FIGURES = {
    "jester": "Matrix completion on Jester-1: RNGD, RSGD, RSVRG, RCG and our default, rank 5.",
    "movielens": "Matrix completion on MovieLens-1M: RNGD, RSGD, RSVRG, RCG, our default; rank 5.",
    "school": "Multi-task learning on School: RNGD, RSGD, RSVRG and RCG, rank 6.",
    "sarcos": "Multi-task learning on Sarcos: RNGD, RSGD, RSVRG and RCG, rank 6.",
}
PARTS = ("metric", "global", "rates", "stability", "invariance")


@dataclass
class Running:
    """What all experiments take, by the names of ``reproduce.Options``."""

    quick: bool = option(False, "A sketch: a third of the epochs, two seeds, smaller step grids.")
    seeds: int = option(5, "How many seeds (split, start and samples).", min=1, metavar="N")
    jobs: int = option(
        1, "Runs at a time; several distort the times.", "-j", min=1, max=256, metavar="N"
    )
    output: Path = option(Path("report"), _FOLDER, "-o")

    def options(self, voice: Voice) -> Options:
        """For the experiments."""
        from fisherfold.reproduce import reproduce

        voice.resume = f"what was finished is recorded in {self.output}; the same command goes on"
        return reproduce.Options(**vars(self))


@command(
    app, "all", examples=["fisherfold reproduce all --quick --jobs 2", "fisherfold reproduce all"]
)
def everything(voice: Voice, *, running: Running) -> None:
    """Run what is missing and write the page; experiments without data are marked."""
    from fisherfold.reproduce import reproduce

    options = running.options(voice)
    with track("all experiments", len(reproduce.NAMES)) as whole:
        for name in reproduce.NAMES:
            with suppress(FileNotFoundError):
                reproduce.run(name, options)
            whole.advance()
    found = reproduce.sections(options)
    rows = ((section.title, section.verdict, "\n".join(section.why)) for section in found)
    columns = ("experiment", "verdict", "why")
    table = grid("The paper's claims and what was seen", columns, rows, text=3, show_lines=True)
    verdicts = {s.name: {"verdict": s.verdict, "why": list(s.why)} for s in found}
    voice.answer(
        {"verdicts": verdicts, "page": options.page}, table, f"report page: {options.page}"
    )


def _add_figure(name: str, text: str) -> None:
    def run(voice: Voice, *, running: Running) -> None:
        _answer(voice, name, running.options(voice))

    run.__doc__ = text
    command(
        app,
        name,
        examples=[f"fisherfold reproduce {name} --quick --jobs 2", f"fisherfold reproduce {name}"],
    )(run)


for _name, _text in FIGURES.items():
    _add_figure(_name, _text)


@command(
    app,
    examples=[
        "fisherfold reproduce theory --quick --part metric",
        "fisherfold reproduce theory --jobs 2",
    ],
)
def theory(
    voice: Voice,
    *,
    running: Running,
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help=f"Only this part: {', '.join(PARTS)}. May be repeated.",
            autocompletion=lambda incomplete: [
                part for part in PARTS if part.startswith(incomplete)
            ],
        ),
    ] = None,
) -> None:
    """The theory made visible: five parts, each with a figure, a table and verdicts."""
    _answer(voice, "theory", running.options(voice), parts=tuple(part or ()))


@command(
    app,
    examples=[
        "fisherfold reproduce cifar",
        "fisherfold reproduce cifar --results runs.parquet --json",
    ],
)
def cifar(
    voice: Voice,
    results: Annotated[Path, typer.Option("--results", help="The table of recorded runs.")] = RUNS,
    output: Annotated[Path, typer.Option("--output", "-o", help=_FOLDER)] = Path("report"),
) -> None:
    """The CIFAR table from recorded training runs: medians over seeds and the verdict."""
    _answer(voice, "cifar", Running(output=output).options(voice), results=results)


def _answer(voice: Voice, name: str, options: Options, **more: Any) -> None:
    """Run an experiment and print its sections."""
    from fisherfold.reproduce import reproduce

    found = reproduce.run(name, options, **more)
    shown: list[Table | str] = []
    for section in found:
        shown += [_grid(section, table) for table in section.tables[: 2 if name == "cifar" else 1]]
        shown += [
            f"the paper: {section.claim}",
            f"verdict: {section.verdict}",
            *section.why,
            *section.notes,
            "",
        ]
    facts = {"sections": [asdict(section) for section in found], "page": options.page}
    voice.answer(
        facts, *shown, f"tables and pictures are in {options.folder}; report page: {options.page}"
    )


def _grid(section: Section, table: page.Table) -> Table:
    words = 1 if table.title.startswith("Final") else len(table.columns)
    rows = (
        [f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in table.rows
    )
    return grid(
        f"{section.title}: {table.title[:1].lower()}{table.title[1:]}",
        table.columns,
        rows,
        text=words,
        show_lines=words > 1,
    )
