"""``fisherfold reproduce``: the paper's figures and tables, remade, and the report page.

Every command refreshes the page from what has been run so far. A second run reads what the first has recorded, so that
an interrupted command goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from fisherfold.cli.common import command, group
from fisherfold.cli.voice import Voice, grid
from fisherfold.plain import counted
from fisherfold.progress import track

if TYPE_CHECKING:
    from fisherfold.reproduce.figures import FigureResult
    from fisherfold.reproduce.reproduce import Options
    from fisherfold.reproduce.theory import Part

app = group(
    "Remake the figures and tables of the paper; writes a report page.",
    examples=["fisherfold reproduce all --quick --jobs 2"],
)

REPORT = Path("report")
Output = Annotated[Path, typer.Option("--output", "-o", help="The folder for the page, tables and recorded runs.")]


@dataclass
class Running:
    """What all experiments take; the names are those of ``fisherfold.reproduce.reproduce.Options``."""

    quick: Annotated[
        bool, typer.Option("--quick", help="A sketch: a third of the epochs, two seeds, smaller step grids.")
    ] = False
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds (split, start and samples).", metavar="N")] = 5
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="How many runs at a time; several distort times.", metavar="N")
    ] = 1
    output: Output = REPORT
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run again what is recorded, instead of reading it.")
    ] = False

    def options(self, **more: Any) -> Options:
        """For the experiments."""
        from fisherfold.reproduce import reproduce

        return reproduce.Options(**vars(self), **more)


SarcosFile = Annotated[
    Path | None, typer.Option(help="The original training file sarcos_inv.mat, if you have it.")
]
Device = Annotated[str, typer.Option(help="Where the tensors live, such as cpu or cuda.")]
RUNS = Path("results/cifar_runs.parquet")


FIGURES = {
    "school": "Multi-task learning on School: RNGD, RSGD, RSVRG and RCG, rank 6.",
    "jester": "Matrix completion on Jester-1: RNGD, RSGD, RSVRG, RCG and our default, rank 5.",
    "movielens": "Matrix completion on MovieLens-1M: RNGD, RSGD, RSVRG, RCG and our default, rank 5.",
}
PARTS = ("metric", "global", "rates", "stability", "invariance")


@command(app, "all", examples=["fisherfold reproduce all --quick --jobs 2", "fisherfold reproduce all"])
def everything(voice: Voice, *, running: Running, sarcos_file: SarcosFile = None, device: Device = "cpu") -> None:
    """Everything: runs what is missing and writes the page. Experiments without data are marked, not an error."""
    from fisherfold.reproduce import reproduce

    options, output = running.options(device=device, sarcos_file=sarcos_file), running.output
    with track("all experiments", len(reproduce.NAMES)) as whole, _under_way("all", options, voice) as shown:
        for name in reproduce.NAMES:
            try:
                if name == "theory":
                    reproduce.reproduce_theory(shown)
                elif name == "cifar":
                    reproduce.reproduce_cifar(shown)
                else:
                    reproduce.reproduce_figure(name, shown)
            except FileNotFoundError as error:
                reproduce.mark_missing(name, str(error), options)
            reproduce.refresh_page(output)
            whole.advance()
    page, found = reproduce.refresh_page(output), reproduce.sections(output)
    rows = ((section.title, section.verdict, "\n".join(section.why)) for section in found)
    columns = ("experiment", "verdict", "why")
    table = grid("The paper's claims and what was seen", columns, rows, text=3, show_lines=True)
    verdicts = {s.name: {"verdict": s.verdict, "why": list(s.why)} for s in found}
    voice.answer({"verdicts": verdicts, "page": page}, table, f"report page: {page}")


def _add_figure(name: str, text: str) -> None:
    """A command for a figure without options of its own."""

    def run(voice: Voice, *, running: Running) -> None:
        _figure(name, voice, running.options())

    run.__doc__ = text
    command(app, name, examples=[f"fisherfold reproduce {name} --quick --jobs 2", f"fisherfold reproduce {name}"])(run)


for _name, _text in FIGURES.items():
    _add_figure(_name, _text)


@command(app, examples=["fisherfold reproduce sarcos", "fisherfold reproduce sarcos --sarcos-file sarcos_inv.mat"])
def sarcos(voice: Voice, *, running: Running, sarcos_file: SarcosFile = None) -> None:
    """Multi-task learning on Sarcos: RNGD, RSGD, RSVRG and RCG, rank 6."""
    _figure("sarcos", voice, running.options(sarcos_file=sarcos_file))


@command(app, examples=["fisherfold reproduce theory --quick --part metric", "fisherfold reproduce theory --jobs 2"])
def theory(
    voice: Voice, *, running: Running, device: Device = "cpu",
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part", help=f"Only this part: {', '.join(PARTS)}. May be repeated.",
            autocompletion=lambda incomplete: [part for part in PARTS if part.startswith(incomplete)],
        ),
    ] = None,
) -> None:  # fmt: skip
    """The theory made visible: five parts, each with a figure, a table and verdicts."""
    from fisherfold.reproduce import reproduce
    from fisherfold.reproduce.theory import summary

    options, output = running.options(device=device, parts=tuple(part or ())), running.output
    with _under_way("theory", options, voice) as shown:
        parts, files = reproduce.reproduce_theory(shown)
    page = reproduce.refresh_page(output)
    tables = [each for part in parts for each in (_findings(part), f"{part.sentence}\n")]
    where = f"pictures, tables and theory.json are in {options.folder('theory')}", f"report page: {page}"
    voice.answer(summary(parts) | {"files": files, "page": page}, *tables, *where)


@command(app, examples=["fisherfold reproduce cifar", "fisherfold reproduce cifar --results runs.parquet --json"])
def cifar(
    voice: Voice,
    results: Annotated[Path, typer.Option("--results", help="The table of recorded runs.")] = RUNS,
    output: Output = REPORT,
) -> None:
    """The CIFAR table from recorded training runs: medians over seeds and the verdict. It does not train."""
    from fisherfold.reproduce import reproduce

    options = reproduce.Options(output=output)
    facts, section, files = reproduce.reproduce_cifar(options, results)
    page = reproduce.refresh_page(output)
    ending = f"the paper: {section.claim}\nverdict: {section.verdict}", *section.why, *section.notes
    where = f"picture {files['png']}", f"report page: {page}"
    shown = [grid(t.title, t.columns, t.rows, text=len(t.columns), show_lines=True) for t in section.tables[:2]]
    voice.answer({**facts, "files": {**files, "page": page}}, *shown, *ending, *where)


def _figure(name: str, voice: Voice, options: Options) -> None:
    """Run a figure, refresh the page and print the table; every figure command ends here."""
    from fisherfold.reproduce import reproduce

    try:
        with _under_way(name, options, voice) as shown:
            result, files, more, section = reproduce.reproduce_figure(name, shown)
    except FileNotFoundError as error:
        reproduce.mark_missing(name, str(error), options)
        reproduce.refresh_page(options.output)
        raise
    page = reproduce.refresh_page(options.output)
    judged = {"claim": section.claim, "verdict": section.verdict, "why": list(section.why)}
    facts = result.summary() | judged | {"files": {**files, "page": page}, "more": more}
    ending = f"the paper: {section.claim}\nverdict: {section.verdict}", f"report page: {page}"
    voice.answer(facts, *_shown(result, more, files), *ending)


@contextmanager
def _under_way(name: str, options: Options, voice: Voice) -> Iterator[Options]:
    """Progress with the time left; Ctrl-C says how to go on."""
    before = " (what was not made again yet is then read as it was recorded before)" if options.fresh else ""
    voice.resume = f"what was finished is recorded in {options.output}. To go on{before}:\n  {options.command(name)}"
    with track(f"{name}: reading the data") as line:

        def say(what: str) -> None:
            line.update(what=what)
            voice.detail(what)

        yield replace(options, say=say, tick=lambda done, total: line.update(done, total=total))


def _shown(result: FigureResult, more: Mapping[str, str], files: Mapping[str, Path]) -> list[RenderableType]:
    claims, first = result.summary()["claims"], next(iter(result.runs))
    lines = [_sentence(claim, first, result.plan.metrics[claim["column"]]) for claim in claims]
    lines += [f"{name}: {sentence}" for name, sentence in more.items()]
    lines += [result.plan.note] if result.plan.note else []
    lines += [f"picture {files['png']}, curves {files['csv']}, summary {files['json']}"]
    return [_table(result), *lines]


def _findings(part: Part) -> Table:
    table = Table(title=part.title, show_lines=True)
    for name in ("statement", "predicted", "measured", "verdict", "note"):
        table.add_column(name)
    colours = {"holds": "green", "partly": "yellow", "fails": "red"}
    for finding in part.findings:
        seen = (f"{v:.3g}" if isinstance(v, float) else v for v in (finding.predicted, finding.measured))
        verdict = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(escape(finding.name), *map(escape, seen), verdict, escape(finding.note))
    return table


def _table(result: FigureResult) -> Table:
    over = f", mean ± standard deviation over {len(result.seeds)} seeds" if len(result.seeds) > 1 else " of one seed"
    title = f"{result.plan.title}: final figures{over}"
    names = ("method", "step", *result.plan.metrics.values(), "seconds", "#grad/N (paper)", "#grad/N (true)")
    columns = list(zip(*(_cells(row, result.plan.metrics) for row in result.table()), strict=True))
    words = [max(map(len, " ".join((name, *cells)).split())) for name, cells in zip(names, columns, strict=True)]
    lines = [max(width, *map(len, cells)) for width, cells in zip(words, columns, strict=True)]
    # widths are given: with least widths rich may draw a table that is too wide, and cuts off the last figures
    room = Console().width - (len(names) - 1)
    widths = lines if sum(lines) + 2 * len(names) <= room else words
    padding = (0, int(sum(widths) + 2 * len(names) <= room))
    table = Table(title=title, show_edge=False, pad_edge=False, padding=padding)
    for name, width in zip(names, widths, strict=True):
        table.add_column(name, justify="left" if name == "method" else "right", width=width)
    for cells in zip(*columns, strict=True):
        table.add_row(*cells)
    return table


def _cells(row: Mapping[str, Any], metrics: Iterable[str]) -> list[str]:
    step = "-" if row["step"] is None else f"{row['step']:.3g}"
    errors = ("-" if row[c] is None else f"{row[c]:.4f}{_spread(row[f'{c}_sd'])}" for c in metrics)
    cost = (f"{row['seconds']:.2f}", f"{row['paper_grads']:.0f}", f"{row['true_grads']:.0f}")
    return [row["method"], step, *errors, *cost]


def _sentence(claim: Mapping[str, Any], method: str, label: str) -> str:
    seeds = counted(int(claim["seeds"]), "seed")
    return (
        f"{label}: {method} is lowest in {claim['lowest_in']} of {seeds}; against the best other "
        f"{claim['gap']:+.4f}{_spread(claim['gap_sd'])}"
    )


def _spread(deviation: float | None) -> str:
    return "" if deviation is None else f" ± {deviation:.4f}"
