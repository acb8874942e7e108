"""``fisherfold complete predict``: predict the pairs of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fisherfold.cli.common import command
from fisherfold.cli.complete.options import ColumnFeatures, Columns, RowFeatures, TimeColumn, app
from fisherfold.cli.complete.tables import described, load
from fisherfold.cli.options import Folder, Predictions, check_predictions, say_written
from fisherfold.cli.voice import Voice
from fisherfold.plain import counted
from fisherfold.progress import track


@command(
    app,
    examples=[
        "fisherfold complete predict model/ pairs.csv -o predictions.csv",
        "fisherfold complete predict model/ - --interval 0.9 -o -",
    ],
)
def predict(
    voice: Voice,
    folder: Folder,
    pairs: Annotated[
        Path, typer.Argument(help="A table with row ids and column ids; - reads standard input.")
    ],
    *,
    output: Predictions = Path("-"),
    std: Annotated[
        bool, typer.Option("--std", help="Add the predictive standard deviation, column std.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            help="Add intervals of this probability, such as 0.9: columns low and high.",
            metavar="P",
        ),
    ] = None,
    time_column: TimeColumn = None,
    row_features: RowFeatures = None,
    column_features: ColumnFeatures = None,
    name: Annotated[
        str, typer.Option(help="The name of the column of predictions.", metavar="NAME")
    ] = "prediction",
    reading: Columns,
) -> None:
    """Predict pairs: the table is written with a last column `prediction`."""
    import numpy as np

    from fisherfold.tables.readers import find_columns, read_pairs
    from fisherfold.tables.writers import add_columns, write_table

    check_predictions(output, voice)
    if interval is not None and not 0 < interval < 1:
        raise ValueError(f"--interval must lie between 0 and 1, got {interval}")
    model = load(folder)
    table, rows, columns = read_pairs(pairs, known=model.names_[:2], **reading.format())
    frame = table.frame
    more = [*(["std"] if std else []), *(["low", "high"] if interval is not None else [])]
    add_columns(frame.head(0), {each: [] for each in [name, *more]}, table.path)
    asked = {model.names_[0]: rows, model.names_[1]: columns}
    times = None if time_column is None else frame[find_columns(table, [time_column])[0]]
    known = described(model, row_features, column_features, reading) | {"time": times}
    with track(f"predicting {counted(len(frame), 'pair', form=',')}"):
        found: Any = model.predict(asked, return_std=std, **known)
        extra = {"std": found[1], name: found[0]} if std else {name: found}
        if interval is not None:
            extra = (
                dict(
                    zip(
                        ("low", "high"),
                        model.predict_interval(asked, interval, **known),
                        strict=True,
                    )
                )
                | extra
            )
    write_table(add_columns(frame, extra, table.path), output, reading.decimal)
    inside = model.model_
    unknown = int(
        np.count_nonzero(
            (inside.row_ids.encode(rows) < 0) | (inside.column_ids.encode(columns) < 0)
        )
    )
    say_written(
        voice, "Predicted", {"pairs": len(rows), "with ids not seen in the fit": unknown}, output
    )
