"""What a part of the theory report is: findings with a verdict, a table, a figure and a sentence; and its files.

A finding sets a predicted number or statement beside the measured one. Its verdict is ``holds``, ``partly`` (true with
a restriction that the note states) or ``fails``.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure

from fisherfold.files import write_atomically
from fisherfold.reproduce.figures import png

Verdict = Literal["holds", "partly", "fails"]
Say = Callable[[str], None]

# colours that stay apart for colour-blind readers
BLACK, BLUE, ORANGE, GREEN, PINK, SKY, YELLOW = (
    "#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK)


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
    table: list[dict[str, Any]] = field(default_factory=list)  # neither this nor the figure of one that was recorded
    figure: Figure | None = None


@dataclass(frozen=True)
class Settings:
    """How large a part is run, and where."""

    quick: bool = False
    seeds: int = 5
    device: str = "cpu"
    say: Say = field(default=lambda what: None)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        try:
            kind = torch.device(self.device).type
        except RuntimeError:
            raise ValueError(f"device must be a name such as cpu or cuda:0, got {self.device!r}") from None
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device must be one that this machine has, got {self.device!r}; no CUDA is seen")


def holds_if(condition: bool, otherwise: Verdict = "fails") -> Verdict:
    """The verdict of a plain comparison."""
    return "holds" if condition else otherwise


def fitted_power(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y over log x by least squares."""
    a, b = [math.log(v) for v in x], [math.log(v) for v in y]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    covariance = sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b, strict=True))
    return covariance / sum((p - mean_a) ** 2 for p in a)


def summary(parts: Sequence[Part]) -> dict[str, Any]:
    """The report as plain data."""
    results = [asdict(finding) | {"part": part.name} for part in parts for finding in part.findings]
    return {"results": results, "sentences": {part.name: part.sentence for part in parts}}


def files_of(name: str, folder: Path) -> dict[str, Path]:
    """The picture and the table of a part."""
    return {file: folder / file for file in (f"{name}.png", f"{name}.csv")}


def write_part(part: Part, folder: Path) -> None:
    """Write the picture and the table of a part."""
    files = files_of(part.name, folder)
    assert part.figure is not None
    write_atomically(files[f"{part.name}.png"], png(part.figure))
    columns = list(dict.fromkeys(name for row in part.table for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(part.table)
    write_atomically(files[f"{part.name}.csv"], text.getvalue().encode())
