"""What searches have chosen, one JSON line each, with the scores of all that was tried."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fisherfold.files import claimed, parse_json, write_atomically
from fisherfold.training.log import CHOICES
from fisherfold.training.plan import Entry


class Choices:
    """The record of a folder, which several processes may read and write.

    Args:
        folder: of the logs of searches.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / CHOICES

    def of(self, entry: Entry, given_up: Callable[[Entry], bool]) -> dict[str, Any] | None:
        """What the search of an entry has chosen before.

        Args:
            entry: with a search.
            given_up: whether a trial that failed where the choice was made is not to be tried again here.

        Returns:
            The newest choice; None where there is none, or only ones that were made without trials worth trying again.
        """
        for record in reversed(self._records(entry)):
            failed = (entry.trial(each["candidate"], each["epochs"]) for each in record["tried"] if _failed(each))
            if all(map(given_up, failed)):
                return dict(record["chosen"])
        return None

    def add(
        self, entry: Entry, chosen: dict[str, Any], tried: Sequence[dict[str, Any]], made: Mapping[str, Any]
    ) -> bool:
        """Write a choice down, unless another process has done so or is about to.

        Args:
            entry: with a search.
            chosen: the best candidate.
            tried: each candidate with its epochs and its accuracy, None for one that failed.
            made: where and when.

        Returns:
            Whether it has been written.
        """
        with claimed(self.path.with_name(f".{CHOICES}.claim")) as mine:
            if not mine or any(record["tried"] == list(tried) for record in self._records(entry)):
                return False
            record = {**_question(entry), "chosen": chosen, "tried": list(tried), **made}
            before = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
            write_atomically(self.path, (before + json.dumps(record) + "\n").encode())
        return True

    def records(self) -> list[dict[str, Any]]:
        """All choices, oldest first.

        Returns:
            What was asked and chosen, and every candidate that was tried with its epochs and its accuracy.

        Raises:
            ValueError: if a line of the file is no record of a choice.
        """
        if not self.path.is_file():
            return []
        try:
            return [_checked(parse_json(line)) for line in self.path.read_text(encoding="utf-8").splitlines()]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{self.path} holds a line that is no record of a choice: {error}") from None

    def _records(self, entry: Entry) -> list[dict[str, Any]]:
        question = json.loads(json.dumps(_question(entry)))
        return [r for r in self.records() if all(r.get(key) == value for key, value in question.items())]


def _checked(record: Any) -> dict[str, Any]:
    tried = [{key: each[key] for key in ("candidate", "epochs", "accuracy")} for each in record.get("tried", [])]
    return {**record, "chosen": dict(record["chosen"]), "tried": tried}


def _failed(trial: dict[str, Any]) -> bool:
    return trial["accuracy"] is None


def _question(entry: Entry) -> dict[str, Any]:
    """What a search asks: a record answers it where all of this is the same."""
    names = {"dataset": entry.dataset, "model": entry.model, "preset": entry.preset, "changes": entry.changes}
    return {**names, "candidates": entry.stages, "rounds": entry.rounds}
