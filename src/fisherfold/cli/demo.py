"""``fisherfold demo``: three small problems in under two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fisherfold.cli.voice import Voice

if TYPE_CHECKING:
    from fisherfold.reproduce.demo import Run


def demo(
    voice: Voice,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where picture and page go.")] = Path("demo-output"),
    seed: Annotated[int, typer.Option("--seed", "-s", help="Seed of the data and the starts.")] = 0,
) -> None:
    """Fit three small problems, print a table, write a picture and a page. Needs no data and no network."""
    from fisherfold.files import make_folder
    from fisherfold.reproduce.demo import FITS, draw, run_demo

    make_folder(output)
    with voice.progress("starting", FITS) as bar:
        names: list[str] = []

        def report(name: str) -> None:
            bar.tick(len(names))
            bar.say(f"fitting {name}")
            names.append(name)

        runs = run_demo(seed=seed, report=report)
    picture = output / "demo.png"
    draw(runs, picture)
    facts = [
        {"problem": run.problem, "method": run.method, "step": run.step, "passes": run.passes[-1],
         "loss": run.values[-1], "seconds": run.seconds, "test accuracy": run.accuracy}
        for run in runs
    ]  # fmt: skip
    shown = _table(runs), f"picture: {picture}"
    voice.answer({"runs": facts, "picture": picture}, *shown)


def _table(runs: list[Run]) -> Table:
    from fisherfold.reproduce.demo import GAP, gaps

    table = Table(
        title="Natural gradient (rngd, mkfac) beside first-order methods",
        caption=f"{GAP}; step: the best of a small grid; test: accuracy in %",
    )
    for name in ("problem", "method", "passes", "loss", "gap", "s", "step", "test"):
        table.add_column(name, justify="left" if name in {"problem", "method"} else "right", no_wrap=True)
    heights, before = gaps(runs), ""
    for run in runs:
        if run.problem != before and before:
            table.add_section()
        before = run.problem
        accuracy = "" if run.accuracy != run.accuracy else f"{100 * run.accuracy:.1f}"
        step = "" if run.step is None else f"{run.step:.1e}"
        style = "bold" if run.method in {"rngd", "mkfac"} else ""
        table.add_row(
            run.problem, run.method, f"{run.passes[-1]:.0f}", f"{run.values[-1]:.4f}",
            f"{heights[run.problem, run.method][-1]:.1e}", f"{run.seconds:.1f}", step, accuracy, style=style,
        )  # fmt: skip
    return table
