"""``fisherfold complete recommend``: recommend to rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fisherfold.cli.common import command
from fisherfold.cli.complete.options import ColumnFeatures, Columns, K, RowFeatures, Shown, app
from fisherfold.cli.complete.tables import (
    column_ids,
    described,
    entries_of,
    load,
    read_more,
    show,
)
from fisherfold.cli.options import Folder, check_predictions
from fisherfold.cli.voice import Voice
from fisherfold.progress import track


@command(
    app,
    examples=[
        "fisherfold complete recommend model/ 42 -k 5",
        "fisherfold complete recommend model/ --all -o lists.parquet",
        "fisherfold complete recommend model/ --rated new.csv",
    ],
)
def recommend(
    voice: Voice,
    folder: Folder,
    ids: Annotated[list[str] | None, typer.Argument(help="Row ids.")] = None,
    *,
    k: K = 10,
    everyone: Annotated[bool, typer.Option("--all", help="For all rows of the model.")] = False,
    rated: Annotated[
        Path | None,
        typer.Option(help="For new rows: a table of their row ids, column ids and values."),
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(
            help="A table with a column of ids to choose from; the first, if none has its name."
        ),
    ] = None,
    by: Annotated[
        Literal["mean", "upper", "sample"],
        typer.Option(help="mean, upper (bounds) or sample (of the posterior)."),
    ] = "mean",
    include_seen: Annotated[
        bool, typer.Option("--include-seen", help="Also columns that the row has rated.")
    ] = False,
    exclude: Annotated[
        Path | None, typer.Option(help="A table with a column of ids that no list may hold.")
    ] = None,
    row_features: RowFeatures = None,
    column_features: ColumnFeatures = None,
    output: Shown = None,
    reading: Columns,
) -> None:
    """List the columns with the largest predictions for some rows, for all, or for new ones."""
    import polars as pl

    from fisherfold.tables.readers import ids as typed_ids

    if (ids is None or not ids) + (not everyone) + (rated is None) != 2:
        raise ValueError("give row ids, or --all, or --rated FILE: one of the three")
    check_predictions(output, voice)
    model = load(folder)
    if model.model_.seen is None and not include_seen and rated is None:
        raise ValueError(
            "this model does not keep the ratings it was fitted to, to leave them out: "
            "add --include-seen"
        )
    options: dict[str, Any] = {"exclude_seen": not include_seen, "by": by}
    for name, file in (("candidates", candidates), ("exclude", exclude)):
        if file is not None:
            options[name] = column_ids(file, reading, model.names_[1])
    known = described(model, row_features, column_features, reading)
    if rated is not None:
        known["features"] = known.pop("row_features", None)
    options |= known
    with track("recommending"):
        if rated is not None:
            found = model.recommend_new(entries_of(read_more(rated, reading, model)), k, **options)
        else:
            found = model.recommend(
                None if everyone else typed_ids(pl.Series("ids", ids)), k, **options
            )
    unknown = (
        []
        if everyone or rated is not None
        else [t for t in ids or () if model.model_.row_ids.encode([t])[0] < 0]
    )
    if unknown:
        voice.remark(f"{', '.join(unknown)}: not in the fit; this is what does best on average")
    show(voice, found, output, "Recommendations")
