"""Options that several families of commands take, and checks of what they are to write."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fisherfold.cli.common import held_interrupts
from fisherfold.cli.voice import Voice, cell, option

TABLES = "Tables"
PROCESSES = "Several processes (torchrun)"


@dataclass
class Reading:
    """How a table is read; a command that takes one as an argument has its fields as options."""

    separator: str | None = option(
        None, "Of fields: one character or :: (found out from the first line).", panel=TABLES
    )
    decimal: str = option(".", "The decimal mark of numbers, . or ,", metavar="MARK", panel=TABLES)
    encoding: str | None = option(
        None, "Of text that is neither UTF-8 nor UTF-16, such as latin-1.", panel=TABLES
    )
    unpack_limit: float = option(
        4.0, "The most GiB that a packed file may take.", min=0, metavar="GIB", panel=TABLES
    )

    def format(self) -> dict[str, Any]:
        """What ``fisherfold.tables.readers`` call these, but for the decimal mark."""
        most = int(min(self.unpack_limit * 2**30, sys.maxsize))
        return {"separator": self.separator, "encoding": self.encoding, "max_bytes": most}


def _no_dash(what: str, expected: str) -> Callable[[Path | None], Path | None]:
    """An error for ``-`` where it cannot stand for standard input or output."""

    def checked(given: Path | None) -> Path | None:
        if given == Path("-"):
            raise ValueError(
                f"{what} must be {expected}, got -, which is standard input or output of tables"
            )
        return given

    return checked


SkipBadLines = Annotated[
    bool,
    typer.Option(
        "--skip-bad-lines",
        help="Leave out lines that cannot be used, even if more than 1 %.",
        rich_help_panel=TABLES,
    ),
]
Seed = Annotated[int, typer.Option("--seed", "-s", help="Seed of everything random.")]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        help="Save the state of the fit in this file; the same command continues from it.",
        callback=_no_dash("--checkpoint", "a file"),
        rich_help_panel=PROCESSES,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        min=1,
        max=10**6,
        metavar="SECONDS",
        help="How long one waits for another that does not answer.",
        rich_help_panel=PROCESSES,
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        help="The folder of the model.",
        callback=_no_dash("--output of a model", "a folder"),
    ),
]
Folder = Annotated[
    Path,
    typer.Argument(
        help="The folder of a fitted model.", callback=_no_dash("the model", "a folder")
    ),
]
Predictions = Annotated[
    Path,
    typer.Option(
        "--output", "-o", help="The table to write: .csv, .csv.gz or .parquet; - prints CSV."
    ),
]


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


def say_written(voice: Voice, title: str, facts: Mapping[str, Any], output: Path) -> None:
    """Report what was written: on standard error where the table itself is on standard output."""
    if output == Path("-"):
        voice.remark(
            f"{title.lower()}: " + ", ".join(f"{key} {cell(value)}" for key, value in facts.items())
        )
    else:
        voice.result(title, {**facts, "written": str(output)})


def write_or_rescue(write: Callable[[Path], None], output: Path) -> None:
    """Write a model; where its folder cannot be written, to a temporary one."""
    try:
        with held_interrupts(f"the model is saved in {output}"):
            write(output)
    except OSError as error:
        place = Path(tempfile.mkdtemp(prefix="fisherfold-")) / "model"
        try:
            write(place)
        except OSError:  # there is no room for it anywhere
            shutil.rmtree(place.parent, ignore_errors=True)
            raise error from None
        raise OSError(
            f"{error}; the fitted model is in {place}, move it where it should be"
        ) from error
