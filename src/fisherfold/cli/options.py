"""Options that several families of commands take, and checks of what they are to write."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fisherfold.cli.voice import Voice
from fisherfold.cli.words import cell, named


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Complete a value in the shell.

    Examples:
        >>> one_of("both", "rows")("b")
        ['both']
    """
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


Separator = Annotated[
    str | None,
    typer.Option("--separator", help="Of fields: one character or :: (found out from the first line).", metavar="MARK"),
]
Decimal = Annotated[
    str, typer.Option("--decimal", help="The decimal mark of numbers, . or ,", metavar="MARK",
                      autocompletion=one_of(".", ",")),
]  # fmt: skip
Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header", show_default="auto",
        help="Whether the first line names the columns (it is data if one of its fields is a number).",
    ),
]  # fmt: skip
SkipBadLines = Annotated[
    bool, typer.Option("--skip-bad-lines", help="Leave out lines that cannot be used, even if more than 1 %.")
]
Encoding = Annotated[
    str | None, typer.Option("--encoding", help="Encoding of text that is neither UTF-8 nor UTF-16, such as latin-1.")
]
UnpackLimit = Annotated[
    float,
    typer.Option("--unpack-limit", min=0, help="The most GiB that a packed file may take unpacked.", metavar="GIB"),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", help="Save the state of the fit in this file; the same command continues from it.",
        callback=named("--checkpoint", "a file"),
    ),
]  # fmt: skip
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=1, max=10**6, metavar="SECONDS",
        help="How long a process of a shared fit (torchrun) waits for another one that does not answer.",
    ),
]  # fmt: skip
Output = Annotated[
    Path,
    typer.Option("--output", "-o", help="The folder of the model.", callback=named("--output of a model", "a folder")),
]
Predictions = Annotated[
    Path,
    typer.Option("--output", "-o", help="The table to write: .csv, .csv.gz or .parquet; - prints CSV."),
]


def in_bytes(limit: float) -> int:
    """Convert a limit in GiB to bytes.

    Examples:
        >>> in_bytes(0.5), in_bytes(float("inf")) == sys.maxsize
        (536870912, True)
    """
    return int(min(limit * 2**30, sys.maxsize))


def check_output(output: Path, kind: str) -> None:
    """Check whether a model can be written, and what it would replace, before it is fitted."""
    from fisherfold.tables.folders import check_folder

    if output.exists() and not output.is_dir():
        raise ValueError(f"--output must be a folder, {output} is a file")
    check_folder(output, kind)


def check_predictions(output: Path | None, voice: Voice) -> None:
    """Check whether predictions can be written to a file of this name, before they are computed."""
    from fisherfold.tables.writers import STANDARD_OUTPUT, check_table_name

    if output is None:
        return
    check_table_name(output)
    if output == STANDARD_OUTPUT and voice.as_json:
        raise ValueError("--json and --output - both write to standard output: give a file")


def say_written(voice: Voice, facts: Mapping[str, Any], output: Path, name: str) -> None:
    """Report what was predicted: on standard error where the predictions themselves are on standard output."""
    if output == Path("-"):
        voice.remark("predicted: " + ", ".join(f"{key} {cell(value)}" for key, value in facts.items()))
    else:
        voice.result("Predicted", {**facts, name: str(output)})


def write_or_rescue(write: Callable[[Path], None], output: Path) -> None:
    """Write a model; where its folder cannot be written, write it to a temporary one, and say so."""
    try:
        write(output)
    except OSError as error:
        if (place := _elsewhere(write)) is None:
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
