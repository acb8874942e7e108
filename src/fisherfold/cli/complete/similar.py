"""``fisherfold complete similar``: list what is rated alike."""

from __future__ import annotations

from typing import Annotated

import typer

from fisherfold.cli.common import command
from fisherfold.cli.complete.options import K, Shown, app
from fisherfold.cli.complete.tables import load, show
from fisherfold.cli.options import Folder, check_predictions
from fisherfold.cli.voice import Voice


@command(app, examples=["fisherfold complete similar model/ 42 -k 5"])
def similar(
    voice: Voice,
    folder: Folder,
    ids: Annotated[list[str], typer.Argument(help="Column ids.")],
    k: K = 10,
    rows: Annotated[bool, typer.Option("--rows", help="The ids are those of rows.")] = False,
    output: Shown = None,
) -> None:
    """List the columns that are rated most like some."""
    check_predictions(output, voice)
    found = load(folder).similar(ids, k, of="rows" if rows else "columns")
    show(voice, found, output, "Similar")
