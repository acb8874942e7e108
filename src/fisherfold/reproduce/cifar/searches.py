"""What is beside the table of CIFAR accuracies: runs that are in no cell, and what searches have chosen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fisherfold.plain import counted
from fisherfold.reproduce.cifar.cells import (
    ALL_IMAGES,
    LABELS,
    NAMES,
    RESULTS,
    ended_logs,
    preset_name,
    told_apart,
)
from fisherfold.reproduce.sections import Table
from fisherfold.training import PRESETS, settings
from fisherfold.training.choices import Choices
from fisherfold.training.options import with_defaults


class Beside(NamedTuple):
    """What is beside the table.

    Attributes:
        trials: of ``trials``.
        searches: of ``searches``.
    """

    trials: Table
    searches: Table

    def as_json(self) -> dict[str, list[dict[str, Any]]]:
        """Both as plain values.

        Returns:
            The rows of each by its name.
        """
        return {name: as_rows(shown) for name, shown in self._asdict().items()}


def beside(folder: Path = RESULTS) -> Beside:
    """All that was run or chosen and is in no cell of the table.

    Args:
        folder: of the logs; those of searches are in ``search`` below it.

    Returns:
        Both tables.
    """
    return Beside(trials(folder), searches(folder))


def trials(folder: Path = RESULTS) -> Table:
    """What settings were chosen by, and what else was run: all runs that are in no cell.

    Args:
        folder: of the logs; those of searches are in ``search`` below it.

    Returns:
        A row per run with what differs from the preset, ordered by task, preset, images, epochs and accuracy.
    """
    searched = folder / "search"
    logs = told_apart(folder)[1] + (ended_logs(searched) if searched.is_dir() else [])
    rows: list[tuple[str, str, str, str, int, float, float]] = []
    for log in logs:
        header = log.header
        task, preset = (header["dataset"], header["model"]), preset_name(log)
        own = _own(preset, *task)
        given = with_defaults(header["settings"])
        changed = [key for key in own if key not in {"preset", "epochs"} and given[key] != own[key]]
        other = [_in_words(key, given[key]) for key in changed]
        if header["images"] != ALL_IMAGES[header["split"]]:
            other.append(counted(header["images"], "image"))
        loss = round(float(log.epochs[-1]["train_loss"]), 3)
        differs = ", ".join(other) or "nothing"
        rows.append((*_names(preset, *task), differs, header["split"], len(log.epochs), log.last, loss))
    columns = ["task", "preset", "what differs", "judged by", "epochs", "accuracy of the last", "training loss"]
    rows.sort(key=lambda row: (*row[:2], row[3], row[4], -row[5]))
    return Table("Runs that settings were chosen by, and others", columns, rows)


def searches(folder: Path = RESULTS) -> Table:
    """What searches have chosen among many candidates, with the preset's own values beside it.

    Args:
        folder: of the logs; the record of choices is in ``search`` below it.

    Returns:
        A row per search; the accuracy of the preset's own values is None where they did not come to the last round.
    """
    rows = []
    for record in Choices(folder / "search").records():
        task, preset, epochs = (record["dataset"], record["model"]), record["preset"], record["rounds"][-1]
        own, chosen = _own(preset, *task), record["chosen"]
        last = [each for each in record["tried"] if each["epochs"] == epochs and each["accuracy"] is not None]
        best = next((each["accuracy"] for each in last if each["candidate"] == chosen), None)
        usual = {key: own[key] for key in chosen if key in own}
        before = [each["accuracy"] for each in last if _same(each["candidate"], own)]
        words = [", ".join(_in_words(*pair) for pair in values.items()) or "nothing" for values in (chosen, usual)]
        counts, usually = (len(record["tried"]), epochs), max(before, default=None)
        rows.append((*_names(preset, *task), *counts, words[0], best, words[1], usually))
    columns = ["task", "preset", "trials", "epochs of the last", "chosen", "accuracy", "the preset has", "its accuracy"]
    return Table("Searches on validation images", columns, rows)


def _names(preset: str, dataset: str, model: str) -> tuple[str, str]:
    """Those of the task and of the preset, as people know them."""
    return f"{NAMES.get(dataset, dataset)} {NAMES.get(model, model)}", LABELS.get(preset, preset)


def _own(preset: str, dataset: str, model: str) -> dict[str, Any]:
    """The settings of a preset; none of one that another release has."""
    return settings(preset, dataset, model).as_json() if preset in PRESETS else {}


def _same(candidate: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    return all(own.get(key) == value for key, value in candidate.items())


def _in_words(key: str, value: Any) -> str:
    return f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"


def as_rows(shown: Table) -> list[dict[str, Any]]:
    """A table as plain values.

    Args:
        shown: the table.

    Returns:
        An entry per row, with the names of the columns.
    """
    return [dict(zip(shown.columns, row, strict=True)) for row in shown.rows]
