"""The table of CIFAR accuracies as people see it: in words, on the page, as curves and as files."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fisherfold.files import make_folder, write_atomically
from fisherfold.plain import counted, finite
from fisherfold.reproduce.cifar.cells import LABELS, NAMES, OPTIMIZERS, TASKS, CellResult, spread_of
from fisherfold.reproduce.cifar.claims import CLAIM, against_paper, comparisons, judge, margins
from fisherfold.reproduce.cifar.searches import Beside
from fisherfold.reproduce.sections import Band, Chart, Section, Series, Table
from fisherfold.training import RunLog

# colours that stay apart for colour-blind readers
STYLES = {
    "sgd": ("#000000", "-"), "sgdp": ("#7f7f7f", "-"), "adam": ("#e69f00", "-"), "adamp": ("#f0e442", "-"),
    "kfac": ("#009e73", "-"), "mkfac": ("#0072b2", "-"), "sgdg": ("#d55e00", "-"),
    "sgdg-limit": ("#d55e00", "--"), "sgd-tuned": ("#000000", ":"),
    "mkfac-tuned": ("#0072b2", ":"), "sgdg-tuned": ("#d55e00", ":"), "sgd-averaged": ("#000000", "--"),
    "mkfac-averaged": ("#0072b2", "--"), "sgd-sam": ("#000000", "-."), "mkfac-sam": ("#0072b2", "-."),
    "sgd-cutmix": ("#000000", (0, (5, 1, 1, 1, 1, 1))), "mkfac-cutmix": ("#0072b2", (0, (5, 1, 1, 1, 1, 1))),
}  # fmt: skip


def table(found: Sequence[CellResult]) -> Table:
    """The table of the paper with ours beside it.

    Args:
        found: of ``cells``.

    Returns:
        A row per optimizer, a column per task.
    """
    columns = ["optimizer", *(f"{NAMES[d]} {NAMES[m]}" for d, m in TASKS)]
    by_name = {(c.dataset, c.model, c.optimizer): c for c in found}
    rows = [
        [LABELS[optimizer], *(text(by_name[d, m, optimizer]) for d, m in TASKS)]
        for optimizer in OPTIMIZERS
    ]  # fmt: skip
    return Table("Best test accuracy of 100 epochs (last epoch), paper's median in brackets", columns, rows)


def text(cell: CellResult) -> str:
    """A cell as a person reads it.

    Args:
        cell: the cell.

    Returns:
        Median, range, last epoch, number of seeds, how many of them diverged if some did, and the paper's median; or
        that it was not run.
    """
    paper = "" if cell.paper is None else f" [{cell.paper:.2f}]"
    if not cell.runs:
        return f"not run{paper}"
    median, least, greatest = cell.best
    spread = f" {least:.2f}–{greatest:.2f}" if len(cell.runs) > 1 else ""
    seeds = counted(len(cell.runs), "seed")
    diverged = sum(run.ended == "diverged" for run in cell.runs)
    last = "diverged" if diverged == len(cell.runs) else f"{cell.last[0]:.2f}"
    some = f", {diverged} diverged" if 0 < diverged < len(cell.runs) else ""
    return f"{median:.2f}{spread} ({last}), {seeds}{some}{paper}"


def section(found: Sequence[CellResult], others: Beside, *, command: str, picture: str = "") -> Section:
    """The table as a section of the page.

    Args:
        found: of ``cells``.
        others: what is beside it.
        command: what repeats it.
        picture: its PNG below the folder of the page.

    Returns:
        The section, with a chart per task that has runs.
    """
    verdict, why = judge(found)
    charts = [chart for task in TASKS if (chart := _chart(found, *task)) is not None]
    runs = [run for cell in found for run in cell.runs]
    made = {
        "runs": len(runs),
        "devices": ", ".join(sorted({run.header["device"] for run in runs})),
        "dates": ", ".join(sorted({run.header["date"][:10] for run in runs})),
        "commits": ", ".join(sorted({run.header["commit"][:12] for run in runs})),
    }
    notes = [
        "Best of all epochs looks at the test images a hundred times; the last epoch, in round brackets, does not.",
        *against_paper(found),
        *margins(found),
        "Train more cells with benchmarks/gpu/cifar_queue.py.",
    ]
    return Section(
        "cifar", "CIFAR-10 and CIFAR-100 with MKFAC", CLAIM, verdict, why, made, command, charts,
        [table(found), comparisons(found), others.searches, others.trials], picture, notes,
    )  # fmt: skip


def _chart(found: Sequence[CellResult], dataset: str, model: str) -> Chart | None:
    series = []
    for cell in found:
        if (cell.dataset, cell.model) != (dataset, model) or not cell.runs:
            continue
        longest = max(cell.runs, key=lambda run: len(run.epochs)).epochs
        length, seconds = len(longest), itertools.accumulate(entry["seconds"] for entry in longest)
        x = {"epoch": [float(i + 1) for i in range(length)], "seconds": list(seconds)}
        metrics = {key: _band(cell.runs, key, length) for key in ("accuracy", "train_loss", "loss")}
        metrics["error"] = _band(cell.runs, "accuracy", length, of=lambda value: 100 - value)
        series.append(Series(LABELS[cell.optimizer], x, metrics))
    if not series:
        return None
    axes = {"epoch": "epoch", "seconds": "seconds on its device"}
    metrics_shown = {
        "accuracy": "test accuracy, percent", "error": "test error, percent", "train_loss": "training loss",
        "loss": "test loss",
    }  # fmt: skip
    return Chart(f"{NAMES[dataset]} {NAMES[model]}", axes, metrics_shown, series)


def _band(runs: Sequence[RunLog], key: str, length: int, of: Callable[[float], float] = lambda value: value) -> Band:
    # a run that diverged early is in the curve for as long as it went, and does not end that of the others
    columns = [spread_of([of(run.epochs[i][key]) for run in runs if i < len(run.epochs)]) for i in range(length)]
    return Band([c[0] for c in columns], [c[1] for c in columns], [c[2] for c in columns])


def draw(found: Sequence[CellResult]) -> Figure:
    """Test accuracy over the epochs, a panel per task.

    Args:
        found: of ``cells``.

    Returns:
        A matplotlib figure: medians, with bands from the least to the greatest value over the seeds.
    """
    figure = Figure(figsize=(11, 7.8), layout="constrained")
    for panel, (dataset, model) in zip(figure.subplots(2, 2).flat, TASKS, strict=True):
        panel.set_title(f"{NAMES[dataset]}, {NAMES[model]}", fontsize=10)
        for cell in found:
            if (cell.dataset, cell.model) != (dataset, model) or not cell.runs:
                continue
            length = max(len(run.epochs) for run in cell.runs)
            band, epochs = _band(cell.runs, "accuracy", length), range(1, length + 1)
            colour, style = STYLES[cell.optimizer]
            panel.fill_between(epochs, band.least, band.greatest, color=colour, alpha=0.15, linewidth=0)
            panel.plot(epochs, band.median, linestyle=style, color=colour, linewidth=1.1, label=LABELS[cell.optimizer])
        if not panel.lines:
            panel.text(0.5, 0.5, "not run yet", ha="center", va="center", transform=panel.transAxes)
            panel.set(xticks=[], yticks=[])
            continue
        low, high = (60, 95.5) if dataset == "cifar10" else (15, 79)
        panel.set(xlabel="epoch", ylabel="test accuracy, percent", ylim=(low, high))
        panel.grid(alpha=0.3)
    shown = {line.get_label(): line for panel in figure.axes for line in panel.lines}
    names = [label for label in LABELS.values() if label in shown]
    if names:
        figure.legend([shown[name] for name in names], names, loc="outside lower center", ncols=4, frameon=False)
    return figure


def write(found: Sequence[CellResult], others: Beside, folder: Path) -> dict[str, Path]:
    """The curves as a picture and the raw table as CSV and JSON.

    Args:
        found: of ``cells``.
        others: what is beside it, for the JSON.
        folder: made if needed.

    Returns:
        The files by kind.
    """
    make_folder(folder)
    rows = [cell.as_json() for cell in found]
    sheet = io.StringIO()
    writer = csv.DictWriter(sheet, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    files = {kind: folder / f"cifar.{kind}" for kind in ("png", "csv", "json")}
    picture = io.BytesIO()
    draw(found).savefig(picture, format="png", dpi=130)
    write_atomically(files["png"], picture.getvalue())
    write_atomically(files["csv"], sheet.getvalue().encode())
    content = finite({"cells": rows, **others.as_json()})  # a run that diverged ends with a loss of NaN
    write_atomically(files["json"], json.dumps(content, indent=1, allow_nan=False).encode())
    return files
