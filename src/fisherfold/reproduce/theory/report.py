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

import matplotlib
import torch
from matplotlib.figure import Figure

from fisherfold.files import write_atomically
from fisherfold.reproduce.sections import Chart

Verdict = Literal["holds", "partly", "fails"]
Say = Callable[[str], None]

# colours that stay apart for colour-blind readers
BLACK, BLUE, ORANGE, GREEN, PINK, SKY, YELLOW = (
    "#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK)


@dataclass(frozen=True)
class Finding:
    """One statement of the paper, and what was seen.

    Attributes:
        name: the statement.
        predicted: what the text says.
        measured: what was measured.
        verdict: ``holds``, ``partly`` or ``fails``.
        note: how it was measured and where it departs from the text.
    """

    name: str
    predicted: float | str
    measured: float | str
    verdict: Verdict
    note: str


@dataclass(frozen=True)
class Part:
    """One part of the report.

    Attributes:
        name: the name of its files.
        title: the title of its table.
        sentence: what is seen, and where it departs from the text.
        findings: its findings.
        table: every measurement behind them, one row each.
        figure: its picture; none if the part was read from its record.
        charts: the curves of the picture for the page, once the part is recorded.
    """

    name: str
    title: str
    sentence: str
    findings: list[Finding]
    table: list[dict[str, Any]]
    figure: Figure | None
    charts: Sequence[Chart] = ()


@dataclass(frozen=True)
class Settings:
    """How large a part is run, and where.

    Attributes:
        quick: fewer sizes, draws and iterations.
        seeds: how many seeds; a part that needs many draws makes a multiple of it.
        device: where the tensors live. Random draws are made on the CPU, so that they do not depend on it.
        say: told what is under way.
    """

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
    """The verdict of a plain comparison.

    Args:
        condition: whether the statement was seen to be true.
        otherwise: the verdict if not.

    Returns:
        ``holds`` or the other one.
    """
    return "holds" if condition else otherwise


def fitted_power(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y over log x by least squares.

    Args:
        x: positive abscissae, at least two different ones.
        y: positive values.

    Returns:
        The power.

    Examples:
        >>> round(fitted_power([1, 10, 100], [2, 20, 200]), 12)
        1.0
    """
    a, b = [math.log(v) for v in x], [math.log(v) for v in y]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    covariance = sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b, strict=True))
    return covariance / sum((p - mean_a) ** 2 for p in a)


def summary(parts: Sequence[Part]) -> dict[str, Any]:
    """The report as plain data.

    Args:
        parts: the parts.

    Returns:
        ``results``, one entry per finding, and ``sentences``, one per part.
    """
    results = [asdict(finding) | {"part": part.name} for part in parts for finding in part.findings]
    return {"results": results, "sentences": {part.name: part.sentence for part in parts}}


def write_part(part: Part, folder: Path) -> dict[str, str]:
    """Write the picture and the table of a part.

    Args:
        part: the part; one without a figure has its picture there already.
        folder: where.

    Returns:
        The files by name.
    """
    files = {f"{part.name}.png": str(folder / f"{part.name}.png")}
    if part.figure is not None:
        picture = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": part.name}):
            part.figure.savefig(picture, format="png", dpi=130)
        files |= _write(folder, f"{part.name}.png", picture.getvalue())
    return files | _write(folder, f"{part.name}.csv", _csv(part.table).encode())


def _write(folder: Path, name: str, content: bytes) -> dict[str, str]:
    write_atomically(folder / name, content)
    return {name: str(folder / name)}


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
