"""Tables and models of the commands, and how results are shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisherfold.cli.options import say_written
from fisherfold.cli.voice import Voice, grid
from fisherfold.progress import track

if TYPE_CHECKING:
    import numpy.typing as npt

    from fisherfold.cli.complete.options import Columns
    from fisherfold.completion.base import CompletionBase
    from fisherfold.completion.entries import Entries
    from fisherfold.tables.readers import RatingTable


def load(folder: Path) -> CompletionBase:
    """The model in a folder, whatever its kind."""
    from fisherfold.completion.base import CompletionBase

    return CompletionBase.load(folder)


def read_table_of(file: Path, reading: Columns, skip_bad_lines: bool, **other: Any) -> RatingTable:
    """A table of ratings or pairs."""
    from fisherfold.tables.readers import read_ratings

    how = reading.format() | {"decimal": reading.decimal, "skip_bad_lines": skip_bad_lines}
    with track(f"reading {file.name}"):
        return read_ratings(file, **how | other)


def read_more(
    file: Path,
    reading: Columns,
    model: CompletionBase,
    skip_bad_lines: bool = False,
    **other: Any,
) -> RatingTable:
    """A table for a fitted model, whose names of columns come first."""
    implicit = model.model_.inference == "implicit"
    known = model.names_[:2] if implicit and model.names_[2] == "weight" else model.names_
    return read_table_of(file, reading, skip_bad_lines, known=known, implicit=implicit, **other)


def column_ids(file: Path, reading: Columns, name: str) -> npt.NDArray[Any]:
    """The ids in the column of a table that has the name of the column ids, or in its first."""
    from fisherfold.tables.readers import ids, read_table

    how = {key: value for key, value in reading.format().items() if key != "columns"}
    table = read_table(file, **how)
    return ids(
        table.frame[name if name in table.frame.columns else table.frame.columns[0]], table.path
    )


def feature_table(file: Path, name: str, side: str, reading: Columns, skip_bad_lines: bool) -> Any:
    """A table of features, whose separator may be another than that of the ratings."""
    from fisherfold.completion.inference.features import with_numbers
    from fisherfold.tables.readers import read_table

    how = {"encoding": reading.encoding, "max_bytes": reading.format()["max_bytes"]}
    return with_numbers(read_table(file, skip_bad_lines=skip_bad_lines, **how).frame, name, side)


def described(
    model: CompletionBase, rows: Path | None, columns: Path | None, reading: Columns
) -> dict[str, Any]:
    """The features of ids that were not in the fit."""
    return {
        f"{side}_features": feature_table(file, name, side, reading, False)
        for side, file, name in zip(("row", "column"), (rows, columns), model.names_, strict=False)
        if file is not None
    }


def entries_of(table: RatingTable) -> Entries:
    """The entries of a table."""
    from fisherfold.completion.entries import Entries

    names = ("row", "column") if table.header is None else (table.names[0], table.names[1])
    value = (
        "weight" if not table.has_values else "value" if table.header is None else table.names[2]
    )
    entries = Entries(table.rows, table.columns, table.values, (*names, value), "polars")
    return entries.with_extras(weights=table.weights, times=table.times, keys=table.keys)


def account(table: RatingTable) -> dict[str, Any]:
    """What was read, and what of it was rejected."""
    return {
        **({"header": "none"} if table.header is None else {}),
        "lines": table.n_lines,
        "rejected": table.rejected,
        "columns read": ", ".join(table.names),
        **({"columns not read": ", ".join(table.others)} if table.others else {}),
    }


def size(model: CompletionBase) -> dict[str, int]:
    """How large a model is."""
    inside = model.model_
    sides = {
        f"rows ({model.names_[0]})": len(inside.row_ids),
        f"columns ({model.names_[1]})": len(inside.column_ids),
    }
    return sides | {"ratings": inside.posterior.n_ratings}


def show(voice: Voice, found: Any, output: Path | None, title: str) -> None:
    """Print lists, or write them into a file."""
    import polars as pl

    from fisherfold.tables.writers import write_table

    frame = pl.DataFrame(found)
    if output is not None:
        write_table(frame, output)
        say_written(
            voice, title, {"lines": frame.height, "ids": frame.to_series(0).n_unique()}, output
        )
        return
    text = sum(not kind.is_float() for kind in frame.dtypes)
    voice.answer(
        {title.lower(): frame.to_dicts()}, grid(title, frame.columns, frame.iter_rows(), text=text)
    )
