"""``fisherfold demo``: three small problems in under two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from fisherfold.experiments.demo import Run


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where picture and page go.")] = Path("demo-output"),
    seed: Annotated[int, typer.Option("--seed", help="Of the data and the starts.")] = 0,
) -> None:
    """Fit three small problems, print a table, write a picture and a page. Needs no data and no network.

    Example: `fisherfold demo --output demo-output`
    """
    from fisherfold.experiments.adapters import demo_section
    from fisherfold.experiments.demo import draw, run_demo
    from fisherfold.experiments.report import write_page

    output.mkdir(parents=True, exist_ok=True)
    with Console(stderr=True).status("starting") as status:
        runs = run_demo(seed=seed, report=lambda name: status.update(f"fitting {name}"))
    Console().print(_table(runs))
    picture = output / "demo.png"
    draw(runs, picture)
    print(f"picture: {picture}")
    section = demo_section(runs, command=f"fisherfold demo --seed {seed}")
    page = write_page([section], output, title="fisherfold demo", lead="Three small problems, fitted on this machine.")
    print(f"report page: {page}")


def _table(runs: list[Run]) -> Table:
    from fisherfold.experiments.demo import gaps

    table = Table(
        title="Natural gradient (rngd, mkfac) beside first-order methods",
        caption="gap: training loss above the lowest found; step: the best of a small grid; test: accuracy in %",
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
            run.problem, run.method, f"{run.passes[-1]:.0f}", f"{run.values[-1]:.6f}",
            f"{heights[run.problem, run.method][-1]:.1e}", f"{run.seconds:.1f}", step, accuracy, style=style,
        )  # fmt: skip
    return table
