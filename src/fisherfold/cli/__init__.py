"""The command line: one voice for fitting, reproducing and inspecting.

Each command family lives in a file of its own and is attached here. Errors of the user's making are one sentence and a
hint on standard error with exit code 2; ``--debug`` shows the trace.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fisherfold._version import __version__
from fisherfold.cli import complete, datasets, reproduce, subspace
from fisherfold.cli.demo import demo
from fisherfold.cli.info import info

app = typer.Typer(
    name="fisherfold",
    help="Maximum likelihood on manifolds with the Riemannian Fisher information.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(info)
app.add_typer(datasets.app, name="datasets")
app.add_typer(complete.app, name="complete")
app.add_typer(reproduce.app, name="reproduce")
app.add_typer(subspace.app, name="subspace")


def _show_version(value: bool) -> None:
    if value:
        print(f"fisherfold {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full trace of an error.")] = False,
) -> None:
    """Options that every command shares; ``--debug`` is read by ``main``."""


def main() -> None:
    """Run the command line and turn errors of the user's making into one sentence."""
    try:
        app()
    except (ValueError, TypeError, FileNotFoundError, PermissionError, IsADirectoryError) as error:
        if "--debug" in sys.argv:
            raise
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise SystemExit(2) from None
