"""One run, one file of JSON lines: what was run, an entry per epoch, and how it ended.

The first line names the format, the settings, the command, the date, the device and the commit; lines are appended as
the run goes, and on resuming those after the checkpoint are dropped. Losses of a run that diverged are null, which JSON
knows, and NaN once they are read; logs of earlier releases have NaN in the file too.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fisherfold.files import write_atomically
from fisherfold.plain import finite

FORMAT, VERSION = "fisherfold.train", 1
CHOICES = "chosen.jsonl"  # beside the logs of searches
# what the first line of every log says, and how
HEADER = {
    "dataset": str, "model": str, "preset": str, "seed": int, "split": str, "images": int, "settings": dict,
    "date": str, "device": str, "commit": str,
}  # fmt: skip


@dataclass
class RunLog:
    """What a run was and what it did.

    Attributes:
        header: dataset, model, preset, seed, split, settings, command, date, device, commit and versions.
        epochs: one entry per epoch, in order.
        ended: how the run ended: ``"done"``, ``"diverged"``, or nothing yet.
    """

    header: dict[str, Any]
    epochs: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""

    @property
    def best(self) -> float:
        """The best accuracy of all epochs, in percent, as the paper counts."""
        return max((entry["accuracy"] for entry in self.epochs), default=math.nan)

    @property
    def last(self) -> float:
        """The accuracy of the last epoch, in percent."""
        return float(self.epochs[-1]["accuracy"]) if self.epochs else math.nan

    @property
    def seconds(self) -> float:
        """The median time of an epoch."""
        times = sorted(entry["seconds"] for entry in self.epochs)
        return times[len(times) // 2] if times else math.nan

    def lines(self) -> Iterable[dict[str, Any]]:
        """The lines of the file.

        Yields:
            The header, the epochs, the end.
        """
        yield {"format": FORMAT, "version": VERSION, **self.header}
        yield from self.epochs
        if self.ended:
            yield {"ended": self.ended}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the whole file.

        Args:
            path: where.
        """
        lines = (json.dumps(finite(line), allow_nan=False) for line in self.lines())
        write_atomically(path, "".join(line + "\n" for line in lines).encode())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RunLog:
        """Read a file.

        Args:
            path: where.

        Returns:
            The run.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is not such a file, or one of a newer version.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {path}")
        try:
            text = Path(path).read_text(encoding="utf-8")
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
            if not lines:
                raise ValueError("it is empty")
            head = dict(lines[0])
            epochs = [_numbers(entry) for entry in lines[1:] if "epoch" in entry]
            ended = next((entry["ended"] for entry in lines[1:] if "ended" in entry), "")
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no log of a training run: {error}; move it away and run again") from None
        if head.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is no log of a training run: its first line has no format {FORMAT!r}")
        version = head.pop("version", None)
        if version != VERSION:
            raise ValueError(
                f"{path} has version {version} of the {FORMAT} format, this release reads version {VERSION}: "
                "use the release that wrote it, or move it away and run again"
            )
        return cls(head, epochs, ended)


def _numbers(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: math.nan if value is None else value for key, value in entry.items()}


def read_logs(folder: str | os.PathLike[str]) -> list[RunLog]:
    """All runs of a folder.

    Args:
        folder: with files ``*.jsonl``; the record of what searches have chosen is passed over.

    Returns:
        The runs in the order of their file names.

    Raises:
        ValueError: if a log does not say what was run, or lacks epochs before its last; it says which.
    """
    found = []
    for path in sorted(path for path in Path(folder).glob("*.jsonl") if path.name != CHOICES):
        found.append(RunLog.read(path))
        if flaw := _flaw(found[-1]):
            raise ValueError(f"{path} is a damaged log: {flaw}; move it away and run again")
    return found


def _flaw(log: RunLog) -> str:
    """What keeps the numbers of a log from being those of a run; nothing if all is well."""
    for name, kind in HEADER.items():
        value = log.header.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"{name} is {value!r} in its first line"
    if log.header["split"] not in {"test", "validation"}:
        return f"split is {log.header['split']!r} in its first line"
    if log.ended not in {"", "done", "diverged"}:
        return f"it ended as {log.ended!r}"
    if [entry["epoch"] for entry in log.epochs] != list(range(1, len(log.epochs) + 1)):
        return "its epochs are not all there, one after the other"
    if log.ended and not log.epochs:
        return "it ended without an epoch"
    for entry in log.epochs:
        numbers = [entry.get(name) for name in ("accuracy", "train_loss", "loss", "seconds")]
        if not all(isinstance(number, int | float) for number in numbers) or math.isnan(entry["accuracy"]):
            return f"accuracy, losses or seconds of epoch {entry['epoch']} are no numbers"
    return ""


def paces(folders: Iterable[str | os.PathLike[str]], device: str) -> dict[tuple[str, str], float]:
    """How long epochs have taken on a device.

    Args:
        folders: of logs; those that cannot be read are passed over.
        device: as logs name it.

    Returns:
        Seconds per epoch, the median of all runs, by network and preset.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.jsonl"))):
        with suppress(KeyError, TypeError, ValueError):
            log = RunLog.read(path)
            if log.header["device"] == device and log.epochs:
                mean = statistics.fmean(entry["seconds"] for entry in log.epochs)
                found.setdefault((log.header["model"], log.header["preset"]), []).append(mean)
    return {key: statistics.median(times) for key, times in found.items()}
