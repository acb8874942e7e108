"""``fisherfold complete update``: add new ratings to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fisherfold.cli.common import command
from fisherfold.cli.complete.options import (
    ColumnFeatures,
    Columns,
    File,
    KeyColumn,
    RowFeatures,
    TimeColumn,
    WeightColumn,
    app,
)
from fisherfold.cli.complete.tables import account, entries_of, feature_table, load, read_more, size
from fisherfold.cli.options import Folder, SkipBadLines, check_output, write_or_rescue
from fisherfold.cli.voice import Voice
from fisherfold.progress import track


@command(app, examples=["fisherfold complete update model/ new.csv"])
def update(
    voice: Voice,
    folder: Folder,
    file: File,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A folder for the model, if not that of the old one."),
    ] = None,
    time_column: TimeColumn = None,
    weight_column: WeightColumn = None,
    key_column: KeyColumn = None,
    row_features: RowFeatures = None,
    column_features: ColumnFeatures = None,
    reading: Columns,
    skip_bad_lines: SkipBadLines = False,
) -> None:
    """Add new ratings, rows and columns to a model."""
    from fisherfold.completion.files import KIND

    place = output or folder
    check_output(place, KIND)
    model: Any = load(folder)
    columns = {"time": time_column, "weight": weight_column, "key": key_column}
    table = read_more(file, reading, model, skip_bad_lines, **columns)
    features = [
        None if path is None else feature_table(path, name, side, reading, skip_bad_lines)
        for path, name, side in zip(
            (row_features, column_features), model.names_[:2], ("row", "column"), strict=True
        )
    ]
    with track("updating"):
        if model.model_.inference == "implicit":
            model.partial_fit(entries_of(table))
        else:
            model.update_entries(entries_of(table), *features)
    write_or_rescue(model.save, place)
    voice.result(
        f"Updated {place.name}",
        {"file": str(file), **account(table), **size(model), "model": str(place)},
    )
