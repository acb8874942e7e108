"""A figure on paper: one row of panels per error, one column per way to count the cost; CSV and JSON beside it."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fisherfold.files import make_folder, write_atomically
from fisherfold.plain import counted, finite
from fisherfold.reproduce.runs import FigureResult, band

AXES = {
    "paper_grads": "#grad/N as counted in the paper",
    "true_grads": "sample gradients evaluated / N",
    "seconds": "seconds (solver time)",
}
# colours that stay apart for colour-blind readers, and a marker each
_STYLES = (("#000000", "<"), ("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#e69f00", "v"))


def draw(result: FigureResult) -> Figure:
    """Draw medians with bands from the least to the greatest value over the seeds.

    Args:
        result: the runs.

    Returns:
        A matplotlib figure.
    """
    metrics = result.plan.metrics
    figure = Figure(figsize=(4.4 * len(AXES), 3.1 * len(metrics) + 0.9), layout="constrained")
    panels = figure.subplots(len(metrics), len(AXES), squeeze=False)
    for row, (column, label) in enumerate(metrics.items()):
        for panel, (axis, axis_label) in zip(panels[row], AXES.items(), strict=True):
            _panel(panel, result, axis, column)
            panel.set_xlabel(axis_label)
            panel.set_ylabel(label)
    panels[0][0].legend(frameon=False)
    seeds = f"{counted(len(result.seeds), 'seed')}: median, least and greatest"
    figure.suptitle("\n".join(filter(None, (f"{result.plan.title} - {seeds}", result.plan.note))), fontsize=11)
    return figure


def _panel(panel: Any, result: FigureResult, axis: str, column: str) -> None:
    for (label, runs), (colour, marker) in zip(result.runs.items(), _STYLES, strict=False):
        if column not in runs[0].rows[-1]:
            continue
        x, median, least, greatest = band(runs, axis, column)
        name = label if runs[0].step is None else f"{label} (step {runs[0].step:.3g})"
        panel.fill_between(x, least, greatest, color=colour, alpha=0.15, linewidth=0)
        panel.plot(x, median, color=colour, marker=marker, markevery=max(1, len(x) // 10), markersize=4, label=name)
    panel.grid(alpha=0.3)
    edges = [v for runs in result.runs.values() for values in band(runs, axis, column)[2:] for v in values]
    known = [v for v in edges if math.isfinite(v)]
    if known and min(known) > 0 and max(known) > 20 * min(known):
        panel.set_yscale("log")


def curves_csv(result: FigureResult) -> str:
    """All curves as a table: one row per method, seed and iteration.

    Args:
        result: the runs.

    Returns:
        CSV text.
    """
    columns = ["iteration", "paper_grads", "true_grads", "seconds", "loss", "gradient_norm", *result.plan.metrics]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["method", "step", "seed", *columns])
    for label, runs in result.runs.items():
        for run in runs:
            writer.writerows([label, run.step, run.seed, *(row.get(c) for c in columns)] for row in run.rows)
    return text.getvalue()


def write_figure(result: FigureResult, output: str | os.PathLike[str]) -> dict[str, Path]:
    """Write the picture, the curves and the summary.

    Args:
        result: the runs.
        output: a folder, made if needed.

    Returns:
        The files by kind: ``png``, ``csv``, ``json``.
    """
    folder = Path(output)
    make_folder(folder)
    files = {kind: folder / f"{result.plan.name}.{kind}" for kind in ("png", "csv", "json")}
    picture = io.BytesIO()
    with matplotlib.rc_context({"font.size": 9}):
        draw(result).savefig(picture, format="png", dpi=130)
    write_atomically(files["png"], picture.getvalue())
    write_atomically(files["csv"], curves_csv(result).encode())
    write_atomically(files["json"], json.dumps(finite(result.summary()), indent=1, allow_nan=False).encode())
    return files
