"""What the report page shows of an experiment, whatever kind it is: a neutral record of plain numbers and strings.

An adapter per kind of experiment fills a ``Section``; the page and its files know nothing else. A section is kept as
JSON beside the results, so that the page can be made again from what was run before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fisherfold.files import make_folder, write_atomically
from fisherfold.plain import finite

Verdict = Literal["holds", "holds partly", "does not hold", "no claim", "not run", "data not found"]
Cell = float | int | str | None


@dataclass(frozen=True)
class Band:
    """One method's values: median, least and greatest over the seeds.

    Attributes:
        median: the curve.
        least: the lower edge.
        greatest: the upper edge.
    """

    median: Sequence[float | None]
    least: Sequence[float | None]
    greatest: Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """One method of a chart.

    Attributes:
        label: its name in the legend.
        x: positions by the key of an axis.
        y: values by the key of a metric, as long as the positions.
    """

    label: str
    x: Mapping[str, Sequence[float | None]]
    y: Mapping[str, Band]


@dataclass(frozen=True)
class Chart:
    """Curves over one axis at a time.

    Attributes:
        title: above the chart.
        axes: what x can be: labels by key, the first one shown first.
        metrics: what y can be: labels by key, the first one shown first.
        series: the methods.
        log_y: whether y is logarithmic at first.
        log_x: the same for x.
    """

    title: str
    axes: Mapping[str, str]
    metrics: Mapping[str, str]
    series: Sequence[Series]
    log_y: bool = False
    log_x: bool = False


@dataclass(frozen=True)
class Table:
    """A table that the reader can sort.

    Attributes:
        title: its caption.
        columns: the heads.
        rows: a cell per column; numbers stay numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Section:
    """One experiment on the page.

    Attributes:
        name: the name of its record and its anchor.
        title: its head.
        claim: what the paper says, in our words.
        verdict: what the numbers say to it.
        why: the reasons, a sentence each.
        settings: what determines the numbers.
        command: what repeats it.
        charts: curves.
        tables: numbers.
        picture: a PNG file below the folder of the page, if there is one.
        notes: what the reader has to know beside it.
        files: its raw tables, below the folder of the page.
    """

    name: str
    title: str
    claim: str
    verdict: Verdict
    why: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    picture: str = ""
    notes: Sequence[str] = ()
    files: Sequence[str] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the section as JSON.

        Args:
            path: the file; its folder is made if needed.
        """
        make_folder(Path(path).parent)
        # in ASCII: the command may name a folder whose name is no text
        write_atomically(path, json.dumps(finite(asdict(self)), allow_nan=False).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Section:
        """Read what ``save`` wrote.

        Args:
            path: the file.

        Returns:
            The section.

        Raises:
            ValueError: if the file is not one of a section.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            charts = tuple(chart_from(chart) for chart in content.pop("charts"))
            tables = tuple(Table(**table) for table in content.pop("tables"))
            return cls(**content, charts=charts, tables=tables)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # not JSON and not text are ValueErrors
            raise ValueError(f"{path} is not a section of a report ({error}); delete it and run again") from None


def chart_from(content: Mapping[str, Any]) -> Chart:
    """A chart from plain data, as ``asdict`` makes it.

    Args:
        content: the fields of the chart.

    Returns:
        The chart.
    """
    series = tuple(
        Series(each["label"], each["x"], {metric: Band(**band) for metric, band in each["y"].items()})
        for each in content["series"]
    )
    return Chart(**{**content, "series": series})
