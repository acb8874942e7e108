"""What commands write: looked at before the work, and not lost because its folder cannot be written."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fisherfold.cli.voice import Voice
from fisherfold.cli.words import cell, named

Output = Annotated[
    Path,
    typer.Option("--output", "-o", help="The folder of the model.", callback=named("--output of a model", "a folder")),
]
Predictions = Annotated[
    Path,
    typer.Option("--output", "-o", help="The table to write: .csv, .csv.gz or .parquet; - prints CSV."),
]


def check_output(output: Path, kind: str) -> None:
    """Look whether a model can be written, and what it would replace, before it is fitted.

    Args:
        output: the folder.
        kind: what the model is.

    Raises:
        ValueError: if it is a file.
    """
    from fisherfold.files import check_model_folder

    if output.exists() and not output.is_dir():
        raise ValueError(f"--output must be a folder, {output} is a file")
    check_model_folder(output, kind)


def check_predictions(output: Path, voice: Voice) -> None:
    """Look whether predictions can be written to a file of this name, before they are computed.

    Args:
        output: the file, or - for standard output.
        voice: of the command.

    Raises:
        ValueError: if results as JSON would be mixed with them.
    """
    from fisherfold.tables.table_output import STANDARD_OUTPUT, check_name

    check_name(output)
    if output == STANDARD_OUTPUT and voice.as_json:
        raise ValueError("--json and --output - both write to standard output: give a file")


def say_written(voice: Voice, facts: Mapping[str, Any], output: Path, name: str) -> None:
    """Say what was predicted: as the result, or on standard error where the predictions themselves are on the output.

    Args:
        voice: of the command.
        facts: names and values.
        output: the file.
        name: what its name goes by among the facts.
    """
    from fisherfold.tables.table_output import STANDARD_OUTPUT

    if output == STANDARD_OUTPUT:
        voice.remark("predicted: " + ", ".join(f"{key} {cell(value)}" for key, value in facts.items()))
    else:
        voice.result("Predicted", {**facts, name: str(output)})


def write_or_rescue(write: Callable[[Path], None], output: Path) -> None:
    """Write a model; where its folder cannot be written, write it to a temporary one, and say so.

    Args:
        write: writes the model into a folder.
        output: the folder.

    Raises:
        OSError: if the folder cannot be written; it says where the model is instead, if anywhere.
    """
    try:
        write(output)
    except OSError as error:
        place = _elsewhere(write)
        if place is None:
            raise
        raise OSError(f"{error}; the fitted model is in {place}, move it where it should be") from error


def _elsewhere(write: Callable[[Path], None]) -> Path | None:
    """Where the model is now, unless there is no room for it anywhere."""
    with contextlib.suppress(OSError):
        folder = Path(tempfile.mkdtemp(prefix="fisherfold-"))
        try:
            write(folder / "model")
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder / "model"
    return None
