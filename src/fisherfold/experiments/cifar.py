"""The paper's table of CIFAR accuracies, assembled from logged runs: what was run, what was not, and what it says.

A cell is a data set, a network and an optimizer; its number is the median over the seeds of the best test accuracy of
any epoch, as in the paper, with the least and the greatest; the accuracy of the last epoch, which nobody chose by
looking at the test images, stands beside it.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fisherfold.experiments.sections import Band, Chart, Section, Series, Table, Verdict
from fisherfold.experiments.seeds import Spread
from fisherfold.files import make_folder, write_atomically
from fisherfold.plain import counted, finite
from fisherfold.training import PRESETS, RunLog, Settings, preset_of, read_logs, settings
from fisherfold.training.options import with_defaults

RESULTS = Path("results/cifar")
DATASETS = ("cifar10", "cifar100")
MODELS = ("wrn16_4", "vgg16bn")
OPTIMIZERS = (
    *("sgd", "sgdp", "adam", "adamp", "kfac", "mkfac"),
    *("sgdg", "sgd-tuned", "mkfac-tuned", "sgdg-tuned", "sgd-averaged", "mkfac-averaged", "sgd-sam", "mkfac-sam"),
    *("sgd-cutmix", "mkfac-cutmix"),
)
TASKS = [(dataset, model) for dataset in DATASETS for model in MODELS]
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "wrn16_4": "WRN-16-4", "vgg16bn": "VGG16-BN"}
LABELS = {
    "sgd": "SGD", "sgdp": "SGDP", "adam": "Adam", "adamp": "AdamP", "kfac": "KFAC", "mkfac": "MKFAC",
    "sgdg": "SGDG (MKFAC without curvature)", "sgd-tuned": "SGD, tuned weight decay",
    "mkfac-tuned": "MKFAC, balanced turning", "sgdg-tuned": "SGDG, balanced turning",
    "sgd-averaged": "SGD, tuned weight decay, averaged", "mkfac-averaged": "MKFAC, balanced turning, averaged",
    "sgd-sam": "SGD, averaged, SAM", "mkfac-sam": "MKFAC, averaged, SAM",
    "sgd-cutmix": "SGD, averaged, CutMix", "mkfac-cutmix": "MKFAC, averaged, CutMix",
}  # fmt: skip
# colours that stay apart for colour-blind readers
STYLES = {
    "sgd": ("#000000", "-"), "sgdp": ("#7f7f7f", "-"), "adam": ("#e69f00", "-"), "adamp": ("#f0e442", "-"),
    "kfac": ("#009e73", "-"), "mkfac": ("#0072b2", "-"), "sgdg": ("#d55e00", "-"), "sgd-tuned": ("#000000", ":"),
    "mkfac-tuned": ("#0072b2", ":"), "sgdg-tuned": ("#d55e00", ":"), "sgd-averaged": ("#000000", "--"),
    "mkfac-averaged": ("#0072b2", "--"), "sgd-sam": ("#000000", "-."), "mkfac-sam": ("#0072b2", "-."),
    "sgd-cutmix": ("#000000", (0, (5, 1, 1, 1, 1, 1))), "mkfac-cutmix": ("#0072b2", (0, (5, 1, 1, 1, 1, 1))),
}  # fmt: skip
# medians of five runs as the paper prints them, in the order of TASKS
PAPER_SEEDS = 5
PAPER = {
    "sgd": (93.84, 92.88, 74.30, 71.79),
    "sgdp": (93.42, 92.49, 73.67, 71.54),
    "adam": (92.53, 89.88, 71.64, 62.79),
    "adamp": (92.55, 91.43, 71.23, 58.88),
    "kfac": (93.90, 94.36, 74.31, 76.38),
    "mkfac": (94.06, 94.76, 74.55, 77.28),
}
OURS_AGAINST = (
    ("mkfac-tuned", "sgd-tuned"), ("mkfac-averaged", "sgd-tuned"), ("mkfac-averaged", "sgd-averaged"),
    ("mkfac-sam", "sgd-tuned"), ("mkfac-sam", "sgd-sam"),
    ("mkfac-cutmix", "sgd-tuned"), ("mkfac-cutmix", "sgd-cutmix"),
)  # fmt: skip
CLAIM = "MKFAC has the best test accuracy of six optimizers with WRN-16-4 and VGG16-BN on CIFAR-10 and CIFAR-100."
# all the images there are to train on, by what a run is judged by
ALL_IMAGES = {"test": 50_000, "validation": 45_000}
GUESSED_DEVIATION = 0.1  # of seeds, until there are enough of them to tell


@dataclass(frozen=True)
class CellResult:
    """One cell of the table.

    Attributes:
        dataset: cifar10 or cifar100.
        model: wrn16_4 or vgg16bn.
        optimizer: the preset.
        runs: its finished runs, one per seed; diverged ones too.
        paper: the paper's median, if it has one.
    """

    dataset: str
    model: str
    optimizer: str
    runs: tuple[RunLog, ...]
    paper: float | None

    @property
    def best(self) -> tuple[float, float, float]:
        """Median, least and greatest best accuracy."""
        return _spread([run.best for run in self.runs])

    @property
    def last(self) -> tuple[float, float, float]:
        """Median, least and greatest accuracy of the last epoch; a run that diverged has none."""
        return _spread([run.last for run in self.runs if run.ended == "done"])

    def as_json(self) -> dict[str, Any]:
        """The cell as plain values.

        Returns:
            Names, the number of seeds, medians with their ranges, the paper's median.
        """
        names = ("median", "min", "max")
        numbers = {f"best_{name}": value for name, value in zip(names, self.best, strict=True)}
        numbers |= {f"last_{name}": value for name, value in zip(names, self.last, strict=True)}
        found = {key: None if math.isnan(value) else round(value, 4) for key, value in numbers.items()}
        cell = {"dataset": self.dataset, "model": self.model, "optimizer": self.optimizer, "seeds": len(self.runs)}
        return {**cell, **found, "paper": self.paper, "run": bool(self.runs)}


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    known = [value for value in values if not math.isnan(value)]
    return (statistics.median(known), min(known), max(known)) if known else (math.nan, math.nan, math.nan)


def cells(folder: Path = RESULTS) -> list[CellResult]:
    """All cells of the table, run or not.

    Only finished runs of a preset's own settings on the whole data set, judged on the test images, count; by what name
    they were tried does not matter. Where a seed was run twice, the older run counts.

    Args:
        folder: of the logs.

    Returns:
        A cell per task and optimizer, in the order of the table.

    Raises:
        FileNotFoundError: if there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder} of training runs: 'fisherfold train cifar10 --folder {folder}' makes one, or "
            "give the folder of your runs with --results"
        )
    counted, _ = _shared_out(folder)
    found = []
    for index, (dataset, model) in enumerate(TASKS):
        for optimizer in OPTIMIZERS:
            mine = [log for log in counted if _cell(log) == (dataset, model, optimizer)]
            paper = PAPER[optimizer][index] if optimizer in PAPER else None
            found.append(CellResult(dataset, model, optimizer, tuple(mine), paper))
    return found


def _logs(folder: Path) -> list[RunLog]:
    return [log for log in read_logs(folder) if log.ended]


def _shared_out(folder: Path) -> tuple[list[RunLog], list[RunLog]]:
    """The finished runs that count, one per cell and seed, and all others."""
    counted: dict[tuple[tuple[str, str, str], int], RunLog] = {}
    others = []
    for log in sorted(_logs(folder), key=lambda log: str(log.header["date"])):
        place = _cell(log), log.header["seed"]
        if _counts(log) and place not in counted:
            counted[place] = log
        else:
            others.append(log)
    return list(counted.values()), others


def _cell(log: RunLog) -> tuple[str, str, str]:
    return log.header["dataset"], log.header["model"], _preset(log)


def trials(folder: Path = RESULTS) -> Table:
    """What settings were chosen by, and what else was run: all runs that are in no cell.

    Args:
        folder: of the logs; those of searches are in ``search`` below it.

    Returns:
        A row per run with what differs from the preset, ordered by task, preset, images, epochs and accuracy.
    """
    searched = folder / "search"
    logs = _shared_out(folder)[1] + (_logs(searched) if searched.is_dir() else [])
    rows: list[tuple[str, str, str, str, int, float, float]] = []
    for log in logs:
        header = log.header
        task, preset = (header["dataset"], header["model"]), _preset(log)
        own = settings(preset, *task).as_json() if preset in PRESETS else {}
        given = with_defaults(header["settings"])
        changed = [key for key in own if key not in {"preset", "epochs"} and given[key] != own[key]]
        other = [f"{key} {given[key]:g}" if isinstance(own[key], float) else f"{key} {given[key]}" for key in changed]
        if header["images"] != ALL_IMAGES[header["split"]]:
            other.append(counted(header["images"], "image"))
        name, label = " ".join(NAMES.get(word, word) for word in task), LABELS.get(preset, preset)
        loss = round(float(log.epochs[-1]["train_loss"]), 3)
        differs = ", ".join(other) or "nothing"
        rows.append((name, label, differs, header["split"], len(log.epochs), log.last, loss))
    columns = ["task", "preset", "what differs", "judged by", "epochs", "accuracy of the last", "training loss"]
    rows.sort(key=lambda row: (*row[:2], row[3], row[4], -row[5]))
    return Table("Runs that settings were chosen by, and others", columns, rows)


def as_rows(shown: Table) -> list[dict[str, Any]]:
    """A table as plain values.

    Args:
        shown: the table.

    Returns:
        An entry per row, with the names of the columns.
    """
    return [dict(zip(shown.columns, row, strict=True)) for row in shown.rows]


def _preset(log: RunLog) -> str:
    header, given = log.header, with_defaults(log.header["settings"])
    try:
        return preset_of(Settings(**given), header["dataset"], header["model"])
    except (TypeError, ValueError):  # of a release that knows more settings than this one
        return str(header["preset"])


def _counts(log: RunLog) -> bool:
    header, preset = log.header, _preset(log)
    if header["split"] != "test" or header["images"] != ALL_IMAGES["test"] or preset not in PRESETS:
        return False
    own = settings(preset, header["dataset"], header["model"]).as_json()
    return {**with_defaults(header["settings"]), "preset": preset} == own


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


def judge(found: Sequence[CellResult]) -> tuple[Verdict, list[str]]:
    """What the runs say about the paper's claim, task by task.

    Args:
        found: of ``cells``.

    Returns:
        A verdict and a sentence per task that can be judged.
    """
    by_name = {(c.dataset, c.model, c.optimizer): c for c in found}
    sentences, wins, spreads = [], [], _spreads(found)
    for dataset, model in TASKS:
        task = f"{NAMES[dataset]} {NAMES[model]}"
        mine = by_name[dataset, model, "mkfac"]
        rivals = [by_name[dataset, model, name] for name in PAPER if name != "mkfac"]
        run = [rival for rival in rivals if rival.runs]
        if not mine.runs or not run:
            sentences.append(f"{task}: not enough was run to judge.")
            continue
        top = max(run, key=lambda rival: rival.best[0])
        gap, margin = mine.best[0] - top.best[0], spreads[dataset].margin(len(mine.runs), len(top.runs))
        wins.append(gap > margin)
        word = "above" if gap > margin else "below" if gap < -margin else "within noise of"
        sentences.append(
            f"{task}: MKFAC {mine.best[0]:.2f} is {word} the best of {counted(len(run), 'rival')}, "
            f"{LABELS[top.optimizer]} {top.best[0]:.2f}; the paper has {mine.paper:.2f} and {top.paper:.2f}."
        )
        sentences += _beyond(by_name, dataset, model, spreads[dataset])
    if not wins:
        return "not run", sentences
    verdict: Verdict = "holds" if all(wins) and len(wins) == 4 else "holds partly" if any(wins) else "does not hold"
    return verdict, sentences


def _spreads(found: Sequence[CellResult]) -> dict[str, Spread]:
    """By how much seeds differ, in all cells of a data set alike."""
    done = [(cell.dataset, [run.best for run in cell.runs if run.ended == "done"]) for cell in found]
    return {d: Spread.of([best for own, best in done if own == d], guess=GUESSED_DEVIATION) for d in DATASETS}


def _beyond(
    by_name: dict[tuple[str, str, str], CellResult], dataset: str, model: str, spread: Spread
) -> list[str]:  # fmt: skip
    """What our own settings reach, against SGD with tuned weight decay, SGD treated likewise, and the paper."""
    sentences, task = [], f"{NAMES[dataset]} {NAMES[model]}"
    for ours, theirs in OURS_AGAINST:
        mine, other = by_name[dataset, model, ours], by_name[dataset, model, theirs]
        if mine.runs and other.runs:
            far = _far(mine.best[0] - other.best[0], spread.margin(len(mine.runs), len(other.runs)))
            rival = f"{LABELS[theirs]} ({other.best[0]:.2f})"
            sentences.append(f"{task}: {LABELS[ours]}: {mine.best[0]:.2f}, {far} {rival}.")
    own = [cell for name, _ in OURS_AGAINST if (cell := by_name[dataset, model, name]).runs]
    paper = by_name[dataset, model, "mkfac"].paper
    if own and paper is not None:
        top = max(own, key=lambda cell: cell.best[0])
        far = _far(top.best[0] - paper, spread.margin(len(top.runs), PAPER_SEEDS))
        sentences.append(f"{task}: {LABELS[top.optimizer]}: {top.best[0]:.2f}, {far} the paper's MKFAC ({paper:.2f}).")
    return sentences


def _far(gap: float, margin: float) -> str:
    noise = ", within noise of," if abs(gap) <= margin else ""
    return f"{abs(gap):.2f} {'above' if gap >= 0 else 'below'}{noise}"


def margins(found: Sequence[CellResult]) -> list[str]:
    """How far apart medians must be to differ.

    Args:
        found: of ``cells``.

    Returns:
        A sentence per data set.
    """
    return [
        f"{NAMES[dataset]}: the seeds of a cell have a standard deviation of {spread.deviation:.2f}"
        + (f" ({counted(spread.freedom, 'degree')} of freedom)" if spread.freedom else " (a guess: too few were run)")
        + f"; single runs closer than {spread.margin(1, 1):.2f}, medians of five closer than {spread.margin(5, 5):.2f} "
        "are called the same."
        for dataset, spread in _spreads(found).items()
    ]


def section(found: Sequence[CellResult], others: Table, *, command: str, picture: str = "") -> Section:
    """The table as a section of the page.

    Args:
        found: of ``cells``.
        others: of ``trials``.
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
        *margins(found),
        "Train more cells with benchmarks/gpu/cifar_queue.py.",
    ]
    return Section(
        "cifar", "CIFAR-10 and CIFAR-100 with MKFAC", CLAIM, verdict, why, made, command, charts,
        [table(found), others], picture, notes,
    )  # fmt: skip


def _chart(found: Sequence[CellResult], dataset: str, model: str) -> Chart | None:
    series = []
    for cell in found:
        if (cell.dataset, cell.model) != (dataset, model) or not cell.runs:
            continue
        length = min(len(run.epochs) for run in cell.runs)
        seconds = itertools.accumulate(entry["seconds"] for entry in cell.runs[0].epochs[:length])
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


def _band(
    runs: Sequence[RunLog], key: str, length: int, of: Callable[[float], float] = lambda value: value
) -> Band:
    columns = [_spread([of(run.epochs[i][key]) for run in runs]) for i in range(length)]
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
            length = min(len(run.epochs) for run in cell.runs)
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


def write(found: Sequence[CellResult], others: Table, folder: Path) -> dict[str, Path]:
    """The curves as a picture and the raw table as CSV and JSON.

    Args:
        found: of ``cells``.
        others: of ``trials``, for the JSON.
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
    content = finite({"cells": rows, "trials": as_rows(others)})  # a run that diverged ends with a loss of NaN
    write_atomically(files["json"], json.dumps(content, indent=1, allow_nan=False).encode())
    return files
