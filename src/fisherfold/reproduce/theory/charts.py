"""The curves of a picture for the page: what matplotlib has drawn, read back from its panels.

So the page shows the numbers of the picture and nothing has to be said twice. Lines without a label that follow a
labelled one of the same colour and style, such as the other seeds, become its band from the least to the greatest. A
label that begins with ``_guide`` is kept from the legend of the picture, but has its place on the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from fisherfold.reproduce.sections import Band, Chart, Series

GUIDE = "_guide "


def charts_of(figure: Figure) -> list[Chart]:
    """A chart for every panel that has curves.

    Args:
        figure: a picture.

    Returns:
        The charts, in the order of the panels; bars are left to the picture.

    Examples:
        >>> figure = Figure()
        >>> panel = figure.subplots()
        >>> for shift in (0, 2): _ = panel.plot([1, 2], [shift, 1 + shift], "r", label="seeds" if not shift else None)
        >>> chart, = charts_of(figure)
        >>> chart.series[0].label, list(chart.series[0].y["y"].median)
        ('seeds', [1.0, 2.0])
    """
    charts = []
    for panel in figure.axes:
        series = _series(panel)
        if series:
            label = panel.get_ylabel()
            log_y, log_x = panel.get_yscale() == "log", panel.get_xscale() == "log"
            charts.append(Chart(label, {"x": panel.get_xlabel()}, {"y": label}, series, log_y, log_x))
    return charts


def _series(panel: Axes) -> list[Series]:
    groups: list[tuple[str, list[Any]]] = []
    latest: dict[tuple[str, str], list[Any]] = {}
    for line in panel.get_lines():
        key = (to_hex(line.get_color()), f"{line.get_linestyle()} {line.get_marker()}")
        label = str(line.get_label()).removeprefix(GUIDE)
        # matplotlib names lines without a label itself, with a leading underscore
        if label.startswith("_"):
            latest.get(key, []).append(line)
            continue
        latest[key] = [line]
        groups.append((label, latest[key]))
    return [_merged(label, lines) for label, lines in groups]


def _merged(label: str, lines: Iterable[Any]) -> Series:
    values: dict[float, list[float]] = {}
    for line in lines:
        for x, y in zip(line.get_xdata(orig=True), line.get_ydata(orig=True), strict=True):
            if math.isfinite(y):
                values.setdefault(float(x), []).append(float(y))
    places = sorted(values)
    found = [values[x] for x in places]
    band = Band([float(median(v)) for v in found], [min(v) for v in found], [max(v) for v in found])
    return Series(label, {"x": places}, {"y": band})
