"""Train the entries of a plan until the time is up; started again, go on where it stopped.

Time on a GPU comes in pieces, so nothing here has to be finished: runs that have ended are skipped, runs that were cut
off go on from their checkpoints, a run that fails is reported and left out, and a plan that is a file is read again
after every group, so that it can be changed while the queue is at work. What a search has chosen is written down with
the scores of all candidates, and is not searched again.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fisherfold.files import make_folder, write_atomically
from fisherfold.training.data import ImagePool
from fisherfold.training.log import RunLog
from fisherfold.training.plan import Entry, side_by_side
from fisherfold.training.run import Run
from fisherfold.training.train import Job, log_name, open_job, provenance, train_side_by_side

CHOICES = "chosen.jsonl"
KEPT = 3


class Queue:
    """Runs of a plan, with their logs in one folder.

    Args:
        folder: of logs and checkpoints; those of searches are in ``search`` below it.
        device: where to train.
        minutes: when to stop.
        width: how many runs side by side.
        images: only so many training images, for a trial.
        compiled: pass networks through ``torch.compile`` on a GPU.
        checkpoint_every: epochs between checkpoints; 0 only when the time is up.
        load: reads a pool of images; ``ImagePool.load`` if not given.
        say: called with each line of the account.

    Raises:
        ValueError: if there is no time or no run to do at once.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        minutes: float,
        width: int = 3,
        images: int | None = None,
        compiled: bool = True,
        checkpoint_every: int = 0,
        load: Callable[..., ImagePool] = ImagePool.load,
        say: Callable[[str], None] = print,
    ) -> None:
        if minutes <= 0 or width < 1:
            raise ValueError(f"minutes and width must be positive, got {minutes} and {width}")
        self.folder, self.device, self.width, self.images = make_folder(folder), device, width, images
        self.compiled, self.checkpoint_every, self.load, self.say = compiled, checkpoint_every, load, say
        self.until = time.monotonic() + 60 * minutes
        self.failed: set[Path] = set()
        self._pools: dict[tuple[str, str], ImagePool] = {}

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.until

    def work(self, plan: Callable[[], Sequence[Entry]]) -> bool:
        """Train until all is done or the time is up.

        Args:
            plan: gives the entries; asked again after every group.

        Returns:
            Whether all that can be trained has ended.
        """
        entries = plan()
        while not self.over:
            settled = [self._settled(entry) for entry in entries]
            group = next(side_by_side([entry for entry in settled if self._missing(entry)], self.width), None)
            if group is None:
                return True
            if group[0].stages:
                self.search(group[0])
            else:
                self.train(group, self.folder)
            try:
                entries = plan()
            except (OSError, ValueError) as error:  # somebody is at it; the next look may find it whole
                self.say(f"going on with the plan as it was: {error}")
        self.say("the time is up; the same command goes on")
        return False

    def train(self, entries: Sequence[Entry], folder: Path) -> None:
        """Train runs side by side; if they fail together, one after the other, so that only the guilty one is lost.

        Args:
            entries: without searches.
            folder: of their logs.
        """
        start, jobs = time.monotonic(), []
        try:
            jobs = [self._job(entry, folder) for entry in entries]
            train_side_by_side(jobs, checkpoint_every=self.checkpoint_every, until=self.until)
        except Exception as error:  # the other runs of the plan are still worth their time
            del jobs
            gc.collect()
            if len(entries) > 1:
                self.say(f"{len(entries)} runs failed side by side ({_in_words(error)}); now one by one")
                for entry in entries:
                    self.train([entry], folder)
                return
            path = self._path(entries[0], folder)
            self.failed.add(path)
            self.say(f"{path.stem} failed and is left out: {_in_words(error)}")
            return
        for job in jobs:
            self.say(_account(job))
        left = (self.until - time.monotonic()) / 60
        self.say(f"  {time.monotonic() - start:.0f} s, {left:.1f} min left")

    def search(self, entry: Entry) -> dict[str, Any] | None:
        """Choose the best of an entry's candidates on the validation split and write the choice down.

        Args:
            entry: with candidates.

        Returns:
            The chosen replacements, or nothing if the time was up before.
        """
        chosen: dict[str, Any] = {}
        tried: list[dict[str, Any]] = []
        for stage in entry.stages:
            alive = [{**chosen, **candidate} for candidate in stage]
            for number, epochs in enumerate(entry.rounds, start=1):
                scores = self._scores(entry, alive, epochs)
                if scores is None:
                    return None
                tried += [
                    {"candidate": c, "epochs": epochs, "accuracy": s} for c, s in zip(alive, scores, strict=True)
                ]
                order = sorted(range(len(alive)), key=lambda i: -scores[i])
                kept = 1 if number == len(entry.rounds) else -(-len(alive) // KEPT)
                alive = [alive[i] for i in order[:kept]]
            chosen = alive[0]
        record = {**_question(entry), "chosen": chosen, "tried": tried, **provenance(self.device)}
        path = make_folder(self.folder / "search") / CHOICES
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        write_atomically(path, (before + json.dumps(record) + "\n").encode())
        self.say(f"{entry.dataset} {entry.model} {entry.preset}: chosen {chosen} of {len(tried)} trials")
        return chosen

    def _scores(self, entry: Entry, candidates: Sequence[dict[str, Any]], epochs: int) -> list[float] | None:
        """The validation accuracy of the last epoch of each candidate; 0 for one that failed or diverged."""
        folder = make_folder(self.folder / "search")
        trials = [entry.trial(candidate, epochs) for candidate in candidates]
        for group in side_by_side([t for t in trials if self._missing(t, folder)], self.width):
            if self.over:
                return None
            self.train(group, folder)
        if any(self._missing(trial, folder) for trial in trials):
            return None
        paths = [self._path(trial, folder) for trial in trials]
        logs = [None if path in self.failed else RunLog.read(path) for path in paths]
        return [log.last if log is not None and log.ended == "done" else 0.0 for log in logs]

    def _settled(self, entry: Entry) -> Entry:
        """The entry with what its search has chosen, if it was searched before."""
        path = self.folder / "search" / CHOICES
        if not entry.stages or not path.is_file():
            return entry
        question = json.loads(json.dumps(_question(entry)))
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if all(record.get(key) == value for key, value in question.items()):
                return entry.chosen(record["chosen"])
        return entry

    def _missing(self, entry: Entry, folder: Path | None = None) -> bool:
        if entry.stages:
            return True
        path = self._path(entry, folder or self.folder)
        return path not in self.failed and not (path.is_file() and RunLog.read(path).ended)

    def _path(self, entry: Entry, folder: Path) -> Path:
        chosen = entry.settings()
        return folder / log_name(entry.dataset, entry.model, chosen, entry.seed, entry.split, self.images)

    def _job(self, entry: Entry, folder: Path) -> Job:
        key = (entry.dataset, entry.split)
        if key not in self._pools:
            self._pools[key] = self.load(entry.dataset, device=self.device, split=entry.split, images=self.images)
        run = Run(entry.settings(), entry.model, self._pools[key], seed=entry.seed, compiled=self.compiled)
        return open_job(run, self._path(entry, folder))


def _question(entry: Entry) -> dict[str, Any]:
    """What a search asks: a record answers it where all of this is the same."""
    names = {"dataset": entry.dataset, "model": entry.model, "preset": entry.preset, "changes": entry.changes}
    return {**names, "candidates": entry.stages, "rounds": entry.rounds}


def _account(job: Job) -> str:
    log = job.log
    loss = log.epochs[-1]["train_loss"] if log.epochs else float("nan")
    return (
        f"{job.path.stem:60} {log.ended or 'cut off':8} best {log.best:6.2f} last {log.last:6.2f} "
        f"loss {loss:.4f} {log.seconds:.2f} s/epoch"
    )


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
