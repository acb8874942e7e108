"""``fisherfold reproduce``: the paper's figures and tables, remade."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from fisherfold.experiments.figures import FigurePlan, FigureResult
    from fisherfold.experiments.theory import Part

app = typer.Typer(help="Remake the figures and tables of the paper.", no_args_is_help=True)

Seeds = Annotated[int, typer.Option("--seeds", min=1, help="How many seeds (split, start and samples).")]
Quick = Annotated[bool, typer.Option("--quick", help="A sketch: a third of the epochs, two seeds, smaller step grids.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The folder for picture, CSV, JSON and recorded runs.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Make recorded runs again instead of reading them.")]


@app.command()
def school(
    seeds: Seeds = 5,
    quick: Quick = False,
    as_json: AsJson = False,
    output: Output = Path("reproduce"),
    fresh: Fresh = False,
) -> None:
    """Multi-task learning on School: RNGD, RSGD, RSVRG and RCG, rank 6."""
    from fisherfold.experiments import subspace

    show_figure(subspace.school(), seeds=seeds, quick=quick, as_json=as_json, output=output, fresh=fresh)


@app.command()
def sarcos(
    seeds: Seeds = 5,
    quick: Quick = False,
    as_json: AsJson = False,
    output: Output = Path("reproduce"),
    fresh: Fresh = False,
    sarcos_file: Annotated[
        Path | None, typer.Option("--sarcos-file", help="The original training file sarcos_inv.mat, if you have it.")
    ] = None,
) -> None:
    """Multi-task learning on Sarcos: RNGD, RSGD, RSVRG and RCG, rank 6."""
    from fisherfold.experiments import subspace

    plan = subspace.sarcos(sarcos_file=sarcos_file)
    show_figure(plan, seeds=seeds, quick=quick, as_json=as_json, output=output, fresh=fresh)


@app.command()
def jester(
    seeds: Seeds = 5,
    quick: Quick = False,
    as_json: AsJson = False,
    output: Output = Path("reproduce"),
    fresh: Fresh = False,
) -> None:
    """Matrix completion on Jester-1: RNGD, RSGD, RSVRG, RCG and our default, rank 5."""
    _completion("jester", seeds=seeds, quick=quick, as_json=as_json, output=output, fresh=fresh)


@app.command()
def movielens(
    seeds: Seeds = 5,
    quick: Quick = False,
    as_json: AsJson = False,
    output: Output = Path("reproduce"),
    fresh: Fresh = False,
) -> None:
    """Matrix completion on MovieLens-1M: RNGD, RSGD, RSVRG, RCG and our default, rank 5."""
    _completion("movielens", seeds=seeds, quick=quick, as_json=as_json, output=output, fresh=fresh)


def _completion(name: str, *, seeds: int, quick: bool, as_json: bool, output: Path, fresh: bool) -> None:
    from fisherfold.experiments import completion

    plan = {"jester": completion.jester, "movielens": completion.movielens}[name]()
    default = completion.default_estimator(name, min(seeds, 2) if quick else seeds)
    more = {
        "MatrixCompletion with its defaults, same rank and splits": (
            f"held-out MSE {default['held_out']:.4f} ± {default['held_out_sd']:.4f}, {default['seconds']:.2f} s a fit"
        )
    }
    show_figure(plan, seeds=seeds, quick=quick, as_json=as_json, output=output, fresh=fresh, more=more)


@app.command()
def theory(
    seeds: Seeds = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A sketch: fewer widths, draws and iterations.")] = False,
    as_json: AsJson = False,
    output: Output = Path("reproduce"),
    device: Annotated[str, typer.Option("--device", help="Where the tensors live, such as cpu or cuda.")] = "cpu",
    part: Annotated[
        list[str] | None,
        typer.Option("--part", help="Only this part: metric, global, rates, stability or invariance. May be repeated."),
    ] = None,
) -> None:
    """The theory made visible: five parts, each with a figure, a table and verdicts."""
    from fisherfold.experiments.theory import Settings, run_theory, summary, write_report

    with Console(stderr=True).status("theory: starting") as status:
        settings = Settings(
            quick=quick, seeds=seeds, device=device, say=lambda what: status.update(f"theory: {what}")
        )
        parts = run_theory(settings, only=tuple(part or ()))
        files = write_report(parts, output / "theory")
    if as_json:
        print(json.dumps(summary(parts) | {"files": files}, ensure_ascii=False))
        return
    console = Console()
    for each in parts:
        console.print(_findings(each))
        console.print(each.sentence, end="\n\n")
    console.print(f"pictures, tables and theory.json are in {output / 'theory'}", soft_wrap=True)


def show_figure(
    plan: FigurePlan,
    *,
    seeds: int,
    quick: bool,
    as_json: bool,
    output: Path,
    fresh: bool,
    more: Mapping[str, str] | None = None,
) -> None:
    """Run a figure, write its files and print its table; every figure command ends here.

    Args:
        plan: the figure.
        seeds: how many seeds.
        quick: run the sketch of the plan, with at most two seeds.
        as_json: print JSON instead of a table.
        output: the folder; the figure gets a folder of its own in it.
        fresh: do not read recorded runs.
        more: further results, a name and a sentence each.
    """
    from fisherfold.experiments.figures import run_figure
    from fisherfold.experiments.plots import write_figure

    if quick:
        plan, seeds = plan.quick(), min(seeds, 2)
    folder = output / plan.name
    errors = Console(stderr=True)
    with errors.status(f"{plan.name}: starting") as status:
        result = run_figure(
            plan, seeds=seeds, output=folder, fresh=fresh, say=lambda what: status.update(f"{plan.name}: {what}")
        )
        files = write_figure(result, folder)
    if as_json:
        extra = {"files": {kind: str(file) for kind, file in files.items()}, "more": dict(more or {})}
        print(json.dumps(result.summary() | extra))
        return
    console = Console()
    console.print(_table(result))
    for claim in result.summary()["claims"]:
        console.print(_sentence(claim, next(iter(result.runs)), plan.metrics[claim["column"]]))
    for name, sentence in (more or {}).items():
        console.print(f"{name}: {sentence}")
    if plan.note:
        console.print(plan.note)
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
