"""The cells of the paper's table of CIFAR accuracies, from logged runs: what was run, and what was not.

A cell is a data set, a network and an optimizer; its number is the median over the seeds of the best test accuracy of
any epoch, as in the paper, with the least and the greatest; the accuracy of the last epoch, which nobody chose by
looking at the test images, stands beside it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fisherfold.training import MODELS, PRESETS, RunLog, Settings, preset_of, read_logs, settings
from fisherfold.training.options import with_defaults

RESULTS = Path("results/cifar")
DATASETS = ("cifar10", "cifar100")
TASKS = [(dataset, model) for dataset in DATASETS for model in MODELS]
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "wrn16_4": "WRN-16-4", "vgg16bn": "VGG16-BN"}
LABELS = {
    "sgd": "SGD", "sgdp": "SGDP", "adam": "Adam", "adamp": "AdamP", "kfac": "KFAC", "mkfac": "MKFAC",
    "sgdg": "SGDG (MKFAC without curvature)", "sgdg-limit": "SGDG, MKFAC's limit at every stage",
    "sgd-tuned": "SGD, tuned weight decay",
    "mkfac-tuned": "MKFAC, balanced turning", "sgdg-tuned": "SGDG, balanced turning",
    "sgd-averaged": "SGD, tuned weight decay, averaged", "mkfac-averaged": "MKFAC, balanced turning, averaged",
    "sgd-sam": "SGD, averaged, SAM", "mkfac-sam": "MKFAC, averaged, SAM",
    "sgd-cutmix": "SGD, averaged, CutMix", "mkfac-cutmix": "MKFAC, averaged, CutMix",
}  # fmt: skip
OPTIMIZERS = tuple(LABELS)
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
# all the images there are to train on, by what a run is judged by
ALL_IMAGES = {"test": 50_000, "validation": 45_000}


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
        return spread_of([run.best for run in self.runs])

    @property
    def last(self) -> tuple[float, float, float]:
        """Median, least and greatest accuracy of the last epoch; a run that diverged has none."""
        return spread_of([run.last for run in self.runs if run.ended == "done"])

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


def spread_of(values: Sequence[float]) -> tuple[float, float, float]:
    """What seeds say together.

    Args:
        values: one per seed; those that are no numbers do not count.

    Returns:
        Median, least and greatest; NaN if there are none.
    """
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
            "give the folder of your runs to 'fisherfold reproduce cifar --results'"
        )
    own, _ = told_apart(folder)
    found = []
    for index, (dataset, model) in enumerate(TASKS):
        for optimizer in OPTIMIZERS:
            mine = [log for log in own if _cell(log) == (dataset, model, optimizer)]
            paper = PAPER[optimizer][index] if optimizer in PAPER else None
            found.append(CellResult(dataset, model, optimizer, tuple(mine), paper))
    return found


def ended_logs(folder: Path) -> list[RunLog]:
    """The runs of a folder that are over, well or not.

    Args:
        folder: of the logs.

    Returns:
        Their logs.
    """
    return [log for log in read_logs(folder) if log.ended]


def told_apart(folder: Path) -> tuple[list[RunLog], list[RunLog]]:
    """Tell finished runs that count in the table from those that do not.

    Args:
        folder: of the logs.

    Returns:
        One per cell and seed, and all others.
    """
    own: dict[tuple[tuple[str, str, str], int], RunLog] = {}
    others = []
    for log in sorted(ended_logs(folder), key=lambda log: str(log.header["date"])):
        place = _cell(log), log.header["seed"]
        if _counts(log) and place not in own:
            own[place] = log
        else:
            others.append(log)
    return list(own.values()), others


def _cell(log: RunLog) -> tuple[str, str, str]:
    return log.header["dataset"], log.header["model"], preset_name(log)


def preset_name(log: RunLog) -> str:
    """The preset whose settings a run had, or the one it was called by where none has them.

    Args:
        log: of the run.

    Returns:
        The name of the preset.
    """
    header, given = log.header, with_defaults(log.header["settings"])
    try:
        return preset_of(Settings(**given), header["dataset"], header["model"])
    except (TypeError, ValueError):  # of a release that knows more settings than this one
        return str(header["preset"])


def _counts(log: RunLog) -> bool:
    header, preset = log.header, preset_name(log)
    if header["split"] != "test" or header["images"] != ALL_IMAGES["test"] or preset not in PRESETS:
        return False
    own = settings(preset, header["dataset"], header["model"]).as_json()
    return {**with_defaults(header["settings"]), "preset": preset} == own
