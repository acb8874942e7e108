"""The paper's CIFAR table from recorded runs: medians over seeds, and the paper's claim.

A cell is a data set, a network and a preset. Its figure is the median over seeds of the best test
accuracy of any epoch, as in the paper; the accuracy of the last epoch, which nobody chose on test
images, stands in brackets. Runs are rows of ``results/cifar_runs.parquet`` (see benchmarks/cifar);
those by which settings were chosen are not ``in_table``.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure
from scipy.special import (
    stdtrit,
)  # Student's quantiles; those of scipy.stats are the same and take a while to load

from fisherfold.plain import counted
from fisherfold.reproduce.page import Section, Table, Verdict

RESULTS = Path("results/cifar_runs.parquet")
TASKS = {
    ("cifar10", "wrn16_4"): "CIFAR-10 WRN-16-4",
    ("cifar10", "vgg16bn"): "CIFAR-10 VGG16-BN",
    ("cifar100", "wrn16_4"): "CIFAR-100 WRN-16-4",
    ("cifar100", "vgg16bn"): "CIFAR-100 VGG16-BN",
}
LABELS = {
    "sgd": "SGD",
    "sgdp": "SGDP",
    "adam": "Adam",
    "adamp": "AdamP",
    "kfac": "KFAC",
    "mkfac": "MKFAC",
    "sgdg": "SGDG (MKFAC without curvature)",
    "sgd-tuned": "SGD, tuned weight decay",
    "mkfac-tuned": "MKFAC, one angle per row",
    "sgdg-tuned": "SGDG, one angle per row",
    "sgd-averaged": "SGD, tuned, averaged weights",
    "mkfac-averaged": "MKFAC, one angle per row, averaged weights",
    "sgd-sam": "SGD, averaged weights, SAM",
    "mkfac-sam": "MKFAC, averaged weights, SAM",
    "sgd-cutmix": "SGD, averaged weights, CutMix",
    "mkfac-cutmix": "MKFAC, averaged weights, CutMix",
}
# medians of five runs as the paper prints them, in the order of TASKS
PAPER = {
    "sgd": (93.84, 92.88, 74.30, 71.79),
    "sgdp": (93.42, 92.49, 73.67, 71.54),
    "adam": (92.53, 89.88, 71.64, 62.79),
    "adamp": (92.55, 91.43, 71.23, 58.88),
    "kfac": (93.90, 94.36, 74.31, 76.38),
    "mkfac": (94.06, 94.76, 74.55, 77.28),
}
DRAWN = {
    "sgd": "#000000",
    "kfac": "#009e73",
    "mkfac": "#0072b2",
    "sgdg": "#d55e00",
    "sgd-cutmix": "#7f7f7f",
    "mkfac-cutmix": "#56b4e9",
}
PAIRS = (
    ("mkfac-tuned", "sgd-tuned"),
    ("mkfac-averaged", "sgd-averaged"),
    ("mkfac-sam", "sgd-sam"),
    ("mkfac-cutmix", "sgd-tuned"),
    ("mkfac-cutmix", "sgd-cutmix"),
)
CLAIM = (
    "MKFAC has the best test accuracy of six optimizers with WRN-16-4 and VGG16-BN on CIFAR-10 and "
    "CIFAR-100."
)
MEDIAN_VARIANCES = (
    1.0,
    0.5,
    0.4487,
    0.2982,
    0.2868,
)  # of one to five normal numbers; then about π/2n


@dataclass(frozen=True)
class Spread:
    """The standard deviation over seeds that cells share: s² = Σ (n_c - 1) s_c² / Σ (n_c - 1).

    Medians over n and m seeds are called the same if they differ by less than t s √(v_n + v_m),
    where t is the 97.5 % quantile of Student's distribution and v_n the variance of the median of n
    standard normal numbers.
    """

    deviation: float
    freedom: int

    @classmethod
    def of(cls, cells: Iterable[Sequence[float]]) -> Spread:
        """The spread that cells share; unknown if none of them has several seeds."""
        several = [cell for cell in cells if len(cell) > 1]
        freedom = sum(len(cell) - 1 for cell in several)
        squares = sum((len(cell) - 1) * statistics.variance(cell) for cell in several)
        return cls(math.sqrt(squares / freedom) if freedom else math.inf, freedom)

    def margin(self, first: int, second: int) -> float:
        """By how much two medians must differ to be told apart."""
        if not self.freedom:
            return math.inf
        variances = [
            MEDIAN_VARIANCES[count - 1] if count <= len(MEDIAN_VARIANCES) else math.pi / (2 * count)
            for count in (first, second)
        ]
        return float(stdtrit(self.freedom, 0.975)) * self.deviation * math.sqrt(sum(variances))


@dataclass(frozen=True)
class Cell:
    """The runs of one preset on one task, and the paper's median if it has one."""

    best: tuple[float, ...]
    last: tuple[float, ...]
    seeds: int
    paper: float | None

    @property
    def median(self) -> float:
        """The median over seeds of the best accuracy of any epoch; NaN if nothing was run."""
        return statistics.median(self.best) if self.best else math.nan

    def text(self) -> str:
        """The cell as a person reads it."""
        paper = "" if self.paper is None else f" [{self.paper:.2f}]"
        if not self.best:
            return f"{'diverged' if self.seeds else 'not run'}{paper}"
        spread = f" {min(self.best):.2f}–{max(self.best):.2f}" if len(self.best) > 1 else ""
        failed = f", {self.seeds - len(self.last)} diverged" if len(self.last) < self.seeds else ""
        last = f"{statistics.median(self.last):.2f}" if self.last else "diverged"
        return f"{self.median:.2f}{spread} ({last}), {counted(self.seeds, 'seed')}{failed}{paper}"


Cells = dict[tuple[str, str, str], Cell]  # by data set, network and preset


def read_runs(path: Path = RESULTS) -> pl.DataFrame:
    """The recorded runs, one row each."""
    if not path.is_file():
        raise FileNotFoundError(
            f"there are no recorded CIFAR runs in {path}; give their file with --results"
        )
    return pl.read_parquet(path)


def cells(runs: pl.DataFrame) -> Cells:
    """Every cell of the table, run or not."""
    own = runs.filter("in_table").with_columns(
        best=pl.col("accuracy").list.max(), last=pl.col("accuracy").list.last()
    )
    found = {}
    for (dataset, model), preset in itertools.product(TASKS, LABELS):
        mine = own.filter(dataset=dataset, model=model, preset=preset)
        best, last = (
            tuple(round(v, 2) for v in c) for c in (mine["best"], mine.filter(ended="done")["last"])
        )
        paper = PAPER[preset][list(TASKS).index((dataset, model))] if preset in PAPER else None
        found[dataset, model, preset] = Cell(best, last, mine.height, paper)
    return found


def judge(found: Cells) -> tuple[Verdict, list[str]]:
    """The verdict on the paper's claim, with a sentence per task."""
    sentences = []
    wins = []
    for (dataset, model), task in TASKS.items():
        mine = found[dataset, model, "mkfac"]
        rivals = {
            name: cell
            for name in PAPER
            if name != "mkfac" and (cell := found[dataset, model, name]).best
        }
        if not mine.best or not rivals:
            sentences.append(f"{task}: not enough was run to judge.")
            continue
        name, top = max(rivals.items(), key=lambda item: item[1].median)
        gap = mine.median - top.median
        margin = spread_of(found, dataset).margin(mine.seeds, top.seeds)
        wins.append(gap > margin)
        where = "above" if gap > margin else "below" if gap < -margin else "within noise of"
        sentences.append(
            f"{task}: MKFAC {mine.median:.2f} is {where} the best of {len(rivals)} rivals, "
            f"{LABELS[name]} {top.median:.2f}; the paper has {mine.paper:.2f} and {top.paper:.2f}."
        )
    if not wins:
        return "not run", sentences
    return (
        "holds"
        if all(wins) and len(wins) == 4
        else "holds partly"
        if any(wins)
        else "does not hold"
    ), sentences


def tables(found: Cells) -> list[Table]:
    """The table of the paper, and our settings against SGD's."""
    columns = list(TASKS.values())
    rows = [[LABELS[preset], *(found[d, m, preset].text() for d, m in TASKS)] for preset in LABELS]
    gaps = [[LABELS[a], LABELS[b], *(_gap(found, d, m, a, b) for d, m in TASKS)] for a, b in PAIRS]
    title = "Best test accuracy of 100 epochs (last epoch), the paper's median in brackets"
    return [
        Table(title, ["preset", *columns], rows),
        Table(
            "Differences of medians, in brackets where not significant",
            ["preset", "less", *columns],
            gaps,
        ),
    ]


def margins(found: Cells) -> list[str]:
    """How far apart medians must be to differ significantly, per data set."""
    spreads = {
        name: spread_of(found, name.lower().replace("-", "")) for name in ("CIFAR-10", "CIFAR-100")
    }
    return [
        f"{name}: standard deviation over seeds {spread.deviation:.2f} ({spread.freedom} degrees "
        f"of freedom); single runs closer than {spread.margin(1, 1):.2f} and medians of five "
        f"closer than {spread.margin(5, 5):.2f} do not differ."
        for name, spread in spreads.items()
    ]


def section(found: Cells, runs: pl.DataFrame, *, command: str, picture: str) -> Section:
    """The table as a section of the report page."""
    verdict, why = judge(found)
    own = runs.filter("in_table")
    made = {"runs": own.height} | {
        name: ", ".join(sorted({str(v)[:n] for v in own[column]}))
        for name, column, n in (
            ("devices", "device", 40),
            ("dates", "date", 10),
            ("version", "fisherfold", 20),
        )
    }
    notes = [
        "The best of all epochs looks at the test images a hundred times; the last epoch does not.",
        *margins(found),
    ]
    title = "CIFAR-10 and CIFAR-100 with MKFAC"
    return Section(
        "cifar", title, CLAIM, verdict, why, made, command, tables(found), picture, notes
    )


def spread_of(found: Cells, dataset: str) -> Spread:
    """The standard deviation over seeds on a data set."""
    return Spread.of([cell.best for key, cell in found.items() if key[0] == dataset])


def draw(runs: pl.DataFrame) -> Figure:
    """Median test accuracy over epochs, a panel per task, bands from the least to the greatest."""
    figure = Figure(figsize=(11, 7.8), layout="constrained")
    for panel, ((dataset, model), task) in zip(
        figure.subplots(2, 2).flat, TASKS.items(), strict=True
    ):
        panel.set_title(task, fontsize=10)
        for preset, colour in DRAWN.items():
            curves = runs.filter(
                "in_table", dataset=dataset, model=model, preset=preset, ended="done"
            )["accuracy"]
            if not len(curves):
                continue
            columns = list(zip(*curves.to_list(), strict=True))
            epochs = range(1, len(columns) + 1)
            panel.fill_between(
                epochs,
                [min(c) for c in columns],
                [max(c) for c in columns],
                color=colour,
                alpha=0.15,
            )
            panel.plot(
                epochs, [statistics.median(c) for c in columns], color=colour, label=LABELS[preset]
            )
        panel.set(
            xlabel="epoch",
            ylabel="test accuracy, percent",
            ylim=(60, 95.5) if dataset == "cifar10" else (15, 79),
        )
        panel.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _gap(found: Cells, dataset: str, model: str, first: str, second: str) -> str:
    mine = found[dataset, model, first]
    other = found[dataset, model, second]
    if not mine.best or not other.best:
        return ""
    gap = mine.median - other.median
    return (
        f"({gap:+.2f})"
        if abs(gap) <= spread_of(found, dataset).margin(mine.seeds, other.seeds)
        else f"{gap:+.2f}"
    )
