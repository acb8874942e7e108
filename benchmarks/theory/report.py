"""What a part of the theory report is.

Findings with a verdict, a table, a figure and a sentence; and its files.

A finding sets a predicted number or statement beside the measured one. Its verdict is ``holds``,
``partly`` (true with a restriction that the note states) or ``fails``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any, Literal

import polars as pl
from matplotlib.figure import Figure

from fisherfold.files import make_folder, write_atomically
from fisherfold.reproduce.figures import png

Verdict = Literal["holds", "partly", "fails"]

# colours that stay apart for colour-blind readers
BLACK = "#000000"
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREEN = "#009e73"
PINK = "#cc79a7"
SKY = "#56b4e9"
YELLOW = "#e69f00"
COLOURS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK)


Row = dict[str, Any]  # of the table of a part


@dataclass(frozen=True)
class Finding:
    """One statement of the paper, and what was seen."""

    name: str
    predicted: float | str
    measured: float | str
    verdict: Verdict
    note: str


@dataclass(frozen=True)
class Part:
    """One part of the report."""

    name: str
    title: str
    sentence: str
    findings: list[Finding]
    table: list[Row]
    figure: Figure | None


@dataclass(frozen=True)
class Settings:
    """How large a part is run."""

    quick: bool = False
    seeds: int = 5


def holds_if(condition: bool, otherwise: Verdict = "fails") -> Verdict:
    """The verdict of a plain comparison."""
    return "holds" if condition else otherwise


def pick(rows: Sequence[Row], **equal: object) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in equal.items())]


def fitted_power(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y over log x by least squares."""
    return linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def write_part(part: Part, folder: Path) -> None:
    """Write the picture and the table of a part."""
    make_folder(folder)
    assert part.figure is not None
    write_atomically(folder / f"{part.name}.png", png(part.figure))
    rows = [
        {name: v for name, v in row.items() if not isinstance(v, (list, dict))}
        for row in part.table
    ]
    frame = pl.concat([pl.DataFrame([row]) for row in rows], how="diagonal_relaxed")
    write_atomically(folder / f"{part.name}.csv", frame.write_csv().encode())
