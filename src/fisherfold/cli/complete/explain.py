"""``fisherfold complete explain``: explain a prediction."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fisherfold.cli.common import command
from fisherfold.cli.complete.options import K, Shown, app
from fisherfold.cli.complete.tables import load, show
from fisherfold.cli.options import Folder, check_predictions
from fisherfold.cli.voice import Voice


@command(app, examples=["fisherfold complete explain model/ 42 7 -k 5"])
def explain(
    voice: Voice,
    folder: Folder,
    row: Annotated[str, typer.Argument(help="A row id.")],
    column: Annotated[str, typer.Argument(help="The column id that is predicted.")],
    k: K = 10,
    output: Shown = None,
) -> None:
    """List the ratings of a row that moved one of its predictions most."""
    check_predictions(output, voice)
    model: Any = load(folder)
    if not hasattr(model, "explain"):
        raise ValueError("explain is for models of ratings; this one is of observed pairs")
    found = model.explain(row, column, k)
    show(voice, found, output, "Explanation")
