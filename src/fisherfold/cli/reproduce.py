"""``fisherfold reproduce``: the paper's figures and tables, remade, and the report page.

Every command refreshes the page from what has been run so far. A second run reads what the first has recorded, so that
an interrupted command goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from fisherfold.experiments.figures import FigureResult
    from fisherfold.experiments.reproduce import Options
    from fisherfold.experiments.theory import Part

app = typer.Typer(
    help="Remake the figures and tables of the paper; writes a report page.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Seeds = Annotated[int, typer.Option("--seeds", min=1, help="How many seeds (split, start and samples).")]
Quick = Annotated[bool, typer.Option("--quick", help="A sketch: a third of the epochs, two seeds, smaller step grids.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="How many runs at a time; times suffer from several.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The folder for the page, tables and recorded runs.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Make recorded runs again instead of reading them.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
SarcosFile = Annotated[
    Path | None, typer.Option("--sarcos-file", help="The original training file sarcos_inv.mat, if you have it.")
]
Device = Annotated[str, typer.Option("--device", help="Where the tensors live, such as cpu or cuda.")]
REPORT = Path("report")


@app.command(name="all", epilog="Example: `fisherfold reproduce all --quick --jobs 2`")
def everything(
    seeds: Seeds = 5, quick: Quick = False, jobs: Jobs = 1, as_json: AsJson = False, output: Output = REPORT,
    fresh: Fresh = False, quiet: Quiet = False, sarcos_file: SarcosFile = None, device: Device = "cpu",
) -> None:  # fmt: skip
    """Everything: runs what is missing and writes the page. Experiments without data are marked, not an error."""
    from fisherfold.experiments import reproduce
    from fisherfold.experiments.reproduce import Options

    options = Options(quick, seeds, jobs, output, fresh, device, sarcos_file=sarcos_file)
    with _under_way("all", options, quiet) as (shown, progress):
        whole = progress.add_task("all experiments", total=len(reproduce.NAMES))
        for name in reproduce.NAMES:
            try:
                if name == "theory":
                    reproduce.reproduce_theory(shown)
                else:
                    reproduce.reproduce_figure(name, shown)
            except FileNotFoundError as error:
                reproduce.mark_missing(name, str(error), options)
            reproduce.refresh_page(output)
            progress.advance(whole)
    page, found = reproduce.refresh_page(output), reproduce.sections(output)
    if as_json:
        verdicts = {s.name: {"verdict": s.verdict, "why": list(s.why)} for s in found}
        print(json.dumps({"verdicts": verdicts, "page": str(page)}, ensure_ascii=False))
        return
    table = Table(title="The paper's claims and what was seen", show_lines=True)
    for name in ("experiment", "verdict", "why"):
        table.add_column(name)
    for section in found:
        table.add_row(escape(section.title), escape(section.verdict), escape("\n".join(section.why)))
    Console().print(table)
    print(f"report page: {page}")


@app.command(epilog="Example: `fisherfold reproduce school --quick`")
def school(
    seeds: Seeds = 5, quick: Quick = False, jobs: Jobs = 1, as_json: AsJson = False, output: Output = REPORT,
    fresh: Fresh = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Multi-task learning on School: RNGD, RSGD, RSVRG and RCG, rank 6."""
    _figure("school", as_json, quiet, quick=quick, seeds=seeds, jobs=jobs, output=output, fresh=fresh)


@app.command(epilog="Example: `fisherfold reproduce sarcos --sarcos-file sarcos_inv.mat`")
def sarcos(
    seeds: Seeds = 5, quick: Quick = False, jobs: Jobs = 1, as_json: AsJson = False, output: Output = REPORT,
    fresh: Fresh = False, quiet: Quiet = False, sarcos_file: SarcosFile = None,
) -> None:  # fmt: skip
    """Multi-task learning on Sarcos: RNGD, RSGD, RSVRG and RCG, rank 6."""
    options: dict[str, Any] = {"quick": quick, "seeds": seeds, "jobs": jobs, "output": output, "fresh": fresh}
    _figure("sarcos", as_json, quiet, **options, sarcos_file=sarcos_file)


@app.command(epilog="Example: `fisherfold reproduce jester --quick --jobs 2`")
def jester(
    seeds: Seeds = 5, quick: Quick = False, jobs: Jobs = 1, as_json: AsJson = False, output: Output = REPORT,
    fresh: Fresh = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Matrix completion on Jester-1: RNGD, RSGD, RSVRG, RCG and our default, rank 5."""
    _figure("jester", as_json, quiet, quick=quick, seeds=seeds, jobs=jobs, output=output, fresh=fresh)


@app.command(epilog="Example: `fisherfold reproduce movielens --quick --jobs 2`")
def movielens(
    seeds: Seeds = 5, quick: Quick = False, jobs: Jobs = 1, as_json: AsJson = False, output: Output = REPORT,
    fresh: Fresh = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Matrix completion on MovieLens-1M: RNGD, RSGD, RSVRG, RCG and our default, rank 5."""
    _figure("movielens", as_json, quiet, quick=quick, seeds=seeds, jobs=jobs, output=output, fresh=fresh)


@app.command(epilog="Example: `fisherfold reproduce theory --quick --part metric`")
def theory(
    seeds: Seeds = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A sketch: fewer widths, draws and iterations.")] = False,
    as_json: AsJson = False, output: Output = REPORT, fresh: Fresh = False, quiet: Quiet = False,
    device: Device = "cpu",
    part: Annotated[
        list[str] | None,
        typer.Option("--part", help="Only this part: metric, global, rates, stability or invariance. May be repeated."),
    ] = None,
) -> None:  # fmt: skip
    """The theory made visible: five parts, each with a figure, a table and verdicts."""
    from fisherfold.experiments import reproduce
    from fisherfold.experiments.theory import summary

    options = reproduce.Options(quick, seeds, 1, output, fresh, device, tuple(part or ()))
    with _under_way("theory", options, quiet) as (shown, _):
        parts, files = reproduce.reproduce_theory(shown)
    page = reproduce.refresh_page(output)
    if as_json:
        print(json.dumps(summary(parts) | {"files": files, "page": str(page)}, ensure_ascii=False))
        return
    console = Console()
    for each in parts:
        console.print(_findings(each))
        console.print(each.sentence, end="\n\n")
    console.print(f"pictures, tables and theory.json are in {output / 'theory'}", soft_wrap=True)
    print(f"report page: {page}")


def _figure(name: str, as_json: bool, quiet: bool, **given: Any) -> None:
    """Run a figure, refresh the page and print the table; every figure command ends here."""
    from fisherfold.experiments import reproduce

    options = reproduce.Options(**given)
    try:
        with _under_way(name, options, quiet) as (shown, _):
            result, files, more, section = reproduce.reproduce_figure(name, shown)
    except FileNotFoundError as error:
        reproduce.mark_missing(name, str(error), options)
        reproduce.refresh_page(options.output)
        raise
    page = reproduce.refresh_page(options.output)
    if as_json:
        paths = {kind: str(file) for kind, file in files.items()} | {"page": str(page)}
        judged = {"claim": section.claim, "verdict": section.verdict, "why": list(section.why)}
        print(json.dumps(result.summary() | judged | {"files": paths, "more": more}))
        return
    _print(result, more, files)
    Console().print(f"the paper: {section.claim}\nverdict: [bold]{section.verdict}[/]", highlight=False)
    print(f"report page: {page}")


@contextmanager
def _under_way(name: str, options: Options, quiet: bool) -> Iterator[tuple[Options, Progress]]:
    """Progress with the time left; at Ctrl-C says how to go on.

    Args:
        name: the command.
        options: how it is run.
        quiet: show nothing.

    Yields:
        The options, telling the progress what is under way, and the progress.

    Raises:
        Exit: after an interrupt, with the exit code of one.
    """
    errors = Console(stderr=True)
    times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    columns = TextColumn("{task.description}"), BarColumn(), *times
    # the mean over many runs: single runs differ too much for a shorter window
    progress = Progress(*columns, console=errors, transient=True, disable=quiet, speed_estimate_period=600)
    try:
        with progress:
            task = progress.add_task(f"{name}: reading the data", total=None)

            def say(what: str) -> None:
                progress.update(task, description=escape(what))

            def tick(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            yield replace(options, say=say, tick=tick), progress
    except KeyboardInterrupt:
        errors.print(f"stopped; what was finished is recorded in {options.output}. To go on:", soft_wrap=True)
        errors.print(f"  {options.command(name)}", soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None


def _print(result: FigureResult, more: Mapping[str, str], files: Mapping[str, Path]) -> None:
    console = Console()
    console.print(_table(result))
    for claim in result.summary()["claims"]:
        console.print(_sentence(claim, next(iter(result.runs)), result.plan.metrics[claim["column"]]))
    for name, sentence in more.items():
        console.print(f"{name}: {sentence}")
    if result.plan.note:
        console.print(result.plan.note)
    console.print(f"picture {files['png']}, curves {files['csv']}, summary {files['json']}", soft_wrap=True)


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
    table = Table(title=f"{result.plan.title}: final figures, mean ± standard deviation over {len(result.seeds)} seeds")
    for name in ("method", "step", *result.plan.metrics.values(), "seconds", "#grad/N (paper)", "#grad/N (true)"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in result.table():
        step = "-" if row["step"] is None else f"{row['step']:.3g}"
        errors = (f"{row[c]:.4f} ± {row[f'{c}_sd']:.4f}" for c in result.plan.metrics)
        cost = (f"{row['seconds']:.2f}", f"{row['paper_grads']:.0f}", f"{row['true_grads']:.0f}")
        table.add_row(row["method"], step, *errors, *cost)
    return table


def _sentence(claim: dict[str, float], method: str, label: str) -> str:
    return (
        f"{label}: {method} is lowest in {claim['lowest_in']} of {claim['seeds']} seeds; against the best other "
        f"{claim['gap']:+.4f} ± {claim['gap_sd']:.4f}"
    )
