"""Options that several families of commands take, and what typer is told about their values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fisherfold.cli.words import named

Encoding = Annotated[
    str | None, typer.Option("--encoding", help="Encoding of text that is neither UTF-8 nor UTF-16, such as latin-1.")
]
Decimal = Annotated[
    str | None,
    typer.Option("--decimal", help="The decimal mark of numbers, . or , (detected if not given).", metavar="MARK"),
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


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Completion of a value in the shell.

    Args:
        *values: what it can be.

    Returns:
        What ``typer.Option(autocompletion=...)`` takes.

    Examples:
        >>> one_of("both", "rows")("b")
        ['both']
    """
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def in_bytes(limit: float) -> int:
    """A limit in GiB as a number of bytes.

    Args:
        limit: as given; it may be infinite.

    Returns:
        At most what a file can have.

    Examples:
        >>> in_bytes(0.5), in_bytes(float("inf")) == sys.maxsize
        (536870912, True)
    """
    return int(min(limit * 2**30, sys.maxsize))
