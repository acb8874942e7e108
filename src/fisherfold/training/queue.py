"""Train the entries of a plan until the time is up; started again, go on where it stopped.

Time on a GPU comes in pieces, so nothing here has to be finished: runs that have ended are skipped, runs that were cut
off go on from their checkpoints, a run that fails is reported and left out, and a plan that is a file is read again
after every epoch, so that it can be changed while the queue is at work: what is taken out of it is left with a
checkpoint. How far a search has come is read off its logs; candidates that act late share their first epochs
(``fisherfold.training.trunks``), and what is chosen is written down with the scores of all, and is not searched again.
Several processes may work through one plan in one folder: each takes what no other holds, and towards the end none
begins a run that would not end in time while others still do, since it would take their part of the device from them.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from fisherfold.files import make_folder
from fisherfold.plain import counted
from fisherfold.training.choices import Choices
from fisherfold.training.data import ImagePool
from fisherfold.training.log import RunLog, paces
from fisherfold.training.plan import Entry
from fisherfold.training.run import Run
from fisherfold.training.train import Job, claim, has_ended, log_name, open_job, provenance, train_side_by_side
from fisherfold.training.trunks import Start, arrange, forget_checkpoints, kept_checkpoint

KEPT = 3
KINDS_COMPILED = 6  # the compiler gives up on the ninth kind of a network
LOOK_AGAIN = 1.0  # seconds between looks at a plan of which others hold all that is left


class Tally:
    """How many runs several processes have in training at the moment; each of them is given it at its start."""

    def __init__(self) -> None:
        self._count = multiprocessing.get_context("spawn").Value("i", 0)

    @property
    def count(self) -> int:
        """The runs of all processes."""
        return self._count.value

    @contextmanager
    def with_mine(self, runs: int) -> Iterator[None]:
        """Count the runs of this process while the block runs.

        Args:
            runs: how many.

        Yields:
            Nothing.
        """
        with self._count:
            self._count.value += runs
        try:
            yield
        finally:
            with self._count:
                self._count.value -= runs


class Queue:
    """Runs of a plan, with their logs in one folder.

    Args:
        folder: of logs and checkpoints; those of runs on the validation split are in ``search`` below it.
        device: where to train.
        minutes: when to stop.
        width: how many runs side by side.
        tally: of the runs of all processes that share the device and the plan, where there are several.
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
        tally: Tally | None = None,
        images: int | None = None,
        compiled: bool = True,
        checkpoint_every: int = 0,
        load: Callable[..., ImagePool] = ImagePool.load,
        say: Callable[[str], None] = print,
    ) -> None:
        if minutes <= 0 or width < 1:
            raise ValueError(f"minutes and width must be positive, got {minutes} and {width}")
        self.folder, self.device, self.width, self.images = make_folder(folder), device, width, images
        self.searches, self.tally = make_folder(self.folder / "search"), tally or Tally()
        self.choices = Choices(self.searches)
        self.compiled, self.checkpoint_every, self.load, self.say = compiled, checkpoint_every, load, say
        self.until = time.monotonic() + 60 * minutes
        self.failed: set[Path] = set()
        self._plan: Callable[[], Sequence[Entry]] = list
        self._entries: Sequence[Entry] = []
        self._asked: set[Path] | None = None  # by a plan that has changed since the runs in training began
        self._starts: dict[Path, Start] = {}  # of trials; others of a search wait
        self._waiting: set[Path] = set()
        self._pools: dict[tuple[str, str], ImagePool] = {}
        self._kinds: set[tuple[Any, ...]] = set()
        self._paces: dict[tuple[str, str], float] = {}  # of networks and presets: seconds per epoch, had it been alone
        self._logged: dict[tuple[str, str], float] | None = None  # the same, of earlier runs

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.until

    def work(self, plan: Callable[[], Sequence[Entry]]) -> bool:
        """Train until all is done or the time is up.

        Args:
            plan: gives the entries; asked again after every epoch.

        Returns:
            Whether all that can be trained has ended.
        """
        self._plan, self._entries = plan, plan()
        while not self.over:
            missing = [run for entry in self._entries for run in self._due(entry)]
            if not missing:
                return True
            # with nobody else at work a part of a run is better than none
            free = [run for run in missing if self._path(run) not in self._waiting]
            ready = [run for run in free if not self.tally.count or self._ends_in_time(run)]
            with self._taken(ready) as group:
                if group:
                    self.train(group)
            if not group:
                time.sleep(min(LOOK_AGAIN, max(0.0, self.until - time.monotonic())))
            self._look()
        self.say("the time is up; the same command goes on")
        return False

    def train(self, entries: Sequence[Entry]) -> None:
        """Train runs side by side; if they fail together, one after the other, so that only the guilty one is lost.

        Args:
            entries: without searches.
        """
        start, self._asked = time.monotonic(), None
        jobs: list[Job] = []
        self._make_room(entries)
        try:
            jobs = [self._job(entry) for entry in entries]
            before = [len(job.log.epochs) for job in jobs]
            with self.tally.with_mine(len(jobs)):
                train_side_by_side(
                    jobs, checkpoint_every=self.checkpoint_every, until=self.until, wanted=self._wanted,
                    tell=self._keep, beside=lambda: self.tally.count - len(jobs),
                )  # fmt: skip
        except Exception as error:  # the other runs of the plan are still worth their time
            del jobs
            gc.collect()
            self._forget_compiled()
            if len(entries) > 1:
                self.say(f"{len(entries)} runs failed side by side ({_in_words(error)}); now one by one")
                for entry in entries:
                    self.train([entry])
                return
            path = self._path(entries[0])
            self.failed.add(path)
            self.say(f"{path.stem} failed and is left out: {_in_words(error)}")
            return
        for entry, job, behind in zip(entries, jobs, before, strict=True):
            self.say(_account(job))
            if shares := sum(each["side_by_side"] for each in job.log.epochs[behind:]):
                self._paces[entry.model, entry.preset] = (time.monotonic() - start) / shares
        self._logged = None  # others have ended runs meanwhile
        left = (self.until - time.monotonic()) / 60
        self.say(f"  {time.monotonic() - start:.0f} s, {left:.1f} min left")

    def _make_room(self, entries: Sequence[Entry]) -> None:
        """Keep compiled code from run to run, and forget it before the compiler gives up on too many kinds."""
        kinds = {_kind(entry) for entry in entries}
        if len(self._kinds | kinds) > KINDS_COMPILED:
            self._forget_compiled()
        self._kinds |= kinds

    def _forget_compiled(self) -> None:
        self._kinds.clear()
        if self.compiled and self.device.type == "cuda":
            torch.compiler.reset()

    # ------------------------------------------------------------------ what is due, and who does it

    def _look(self) -> bool:
        """Ask for the plan; whether it has changed."""
        try:
            before, self._entries = self._entries, self._plan()
        except (OSError, ValueError) as error:  # somebody is at it; the next look may find it whole
            self.say(f"going on with the plan as it was: {error}")
            return False
        return before != self._entries

    def _wanted(self, job: Job) -> bool:
        """Whether the plan still asks for a run that is being trained."""
        if self._look():
            try:
                self._asked = {self._path(run) for entry in self._entries for run in self._due(entry)}
            except ValueError as error:  # as for a plan that somebody is at; these runs are not to blame
                self.say(f"going on with the runs as they were: {error}")
        return self._asked is None or job.path in self._asked

    def _due(self, entry: Entry) -> list[Entry]:
        """The runs that an entry asks for now: itself, what its search has chosen, or trials of its search."""
        if entry.stages:
            chosen = self.choices.of(entry, self._given_up)
            if chosen is None:
                trials, chosen = self._search(entry)
                if chosen is None:
                    return trials
            searched, entry = entry, entry.chosen(chosen)
            if entry == searched.trial(chosen, searched.rounds[-1]):
                return []  # there is a record of it, with or without its log
        return [entry] if self._missing(entry) else []

    def _ends_in_time(self, entry: Entry) -> bool:
        """Whether a run would end in time beside those in training."""
        path, pace = self._path(entry), self._pace(entry.model, entry.preset)
        behind = len(RunLog.read(path).epochs) if path.is_file() else 0
        left = entry.settings().epochs - max(behind, self._starts.get(path, Start()).epoch)
        return time.monotonic() + left * pace * (self.tally.count + 1) <= self.until

    def _pace(self, model: str, preset: str) -> float:
        """As seen here, or else as other runs have it in their logs; of a kind never seen, the best pace seen here."""
        if (model, preset) not in self._paces:
            if self._logged is None:
                self._logged = paces([self.folder, self.searches], provenance(self.device)["device"])
            return self._logged.get((model, preset), min(self._paces.values(), default=0.0))
        return self._paces[model, preset]

    @contextmanager
    def _taken(self, missing: Sequence[Entry]) -> Iterator[list[Entry]]:
        """The first runs that can be trained together and that nobody else holds, held while the block runs."""
        with ExitStack() as held:
            group: list[Entry] = []
            for entry in missing:
                if len(group) == self.width or (group and entry.company != group[0].company):
                    break
                mine = held.enter_context(claim(self._path(entry)))
                if mine and self._missing(entry):  # it may have ended since we looked
                    group.append(entry)
            yield group

    def _missing(self, entry: Entry) -> bool:
        path, names = self._path(entry), {"dataset": entry.dataset, "model": entry.model, "split": entry.split}
        header = {**names, "seed": entry.seed, "settings": entry.settings().as_json()}
        try:
            return path not in self.failed and not has_ended(path, header)
        except ValueError as error:  # a damaged log is that of one run, not the end of all others
            self.failed.add(path)
            self.say(f"{path.stem} is left out: {error}")
            return False

    def _path(self, entry: Entry) -> Path:
        chosen, folder = entry.settings(), self.folder if entry.split == "test" else self.searches
        return folder / log_name(entry.dataset, entry.model, chosen, entry.seed, entry.split, self.images)

    def _job(self, entry: Entry) -> Job:
        key = (entry.dataset, entry.split)
        if key not in self._pools:
            self._pools[key] = self.load(entry.dataset, device=self.device, split=entry.split, images=self.images)
        run = Run(entry.settings(), entry.model, self._pools[key], seed=entry.seed, compiled=self.compiled)
        job = open_job(run, self._path(entry))
        start = self._starts.get(job.path, Start())
        if start.source is not None and not job.log.epochs:
            run.load(str(kept_checkpoint(start.source, start.epoch)), of=start.settings)
            job.log.epochs = RunLog.read(start.source).epochs[: start.epoch]
        return job

    def _keep(self, job: Job, entry: dict[str, Any]) -> None:
        """Keep a checkpoint for trials that part from this one after an epoch."""
        if entry["epoch"] in self._starts.get(job.path, Start()).keep:
            job.run.save(str(kept_checkpoint(job.path, entry["epoch"])))

    # ------------------------------------------------------------------ searches

    def _search(self, entry: Entry) -> tuple[list[Entry], dict[str, Any] | None]:
        """How far a search has come: the trials it waits for, or what it has chosen, which is written down."""
        chosen: dict[str, Any] = {}
        best = -1.0
        tried: list[dict[str, Any]] = []
        for stage in entry.stages:
            alive = [{**chosen, **candidate} for candidate in stage]
            for number, epochs in enumerate(entry.rounds, start=1):
                trials = [entry.trial(candidate, epochs) for candidate in alive]
                if missing := [trial for trial in trials if self._missing(trial)]:
                    self._arrange(trials, missing)
                    return missing, None
                if all(map(self._given_up, trials)):
                    return [], None
                if not any(map(self._given_up, trials)):
                    for trial in trials:
                        forget_checkpoints(self._path(trial))
                scores = [self._score(trial) for trial in trials]
                tried += [{"candidate": c, "epochs": epochs, "accuracy": s} for c, s in zip(alive, scores, strict=True)]
                order = sorted(range(len(alive)), key=lambda i: -(scores[i] or 0.0))
                kept = 1 if number == len(entry.rounds) else -(-len(alive) // KEPT)
                alive = [alive[i] for i in order[:kept]]
            if (score := scores[order[0]] or 0.0) > best:  # else what was chosen before them stays
                chosen, best = alive[0], score
        if self.choices.add(entry, chosen, tried, provenance(self.device)):
            failed = sum(each["accuracy"] is None for each in tried)
            beside = f", {failed} of which failed" if failed else ""
            what = f"{entry.dataset} {entry.model} {entry.preset}"
            self.say(f"{what}: chosen {chosen} of {counted(len(tried), 'trial')}{beside}")
        return [], chosen

    def _arrange(self, trials: Sequence[Entry], missing: Sequence[Entry]) -> None:
        """See which trials may begin, and from where; those that share epochs with another wait for it."""
        paths = [self._path(trial) for trial in missing]
        whole = {path: trial.settings() for trial in trials if (path := self._path(trial)) not in self.failed}
        starts = arrange(whole, paths)
        self._starts |= starts
        self._waiting = self._waiting.difference(paths) | (set(paths) - starts.keys())

    def _given_up(self, trial: Entry) -> bool:
        return self._path(trial) in self.failed

    def _score(self, trial: Entry) -> float | None:
        """The validation accuracy of a trial's last epoch; 0 for one that diverged, None for one that failed."""
        if self._given_up(trial):
            return None
        log = RunLog.read(self._path(trial))
        return log.last if log.ended == "done" else 0.0


def _kind(entry: Entry) -> tuple[Any, ...]:
    """What is written into compiled code, of the network and of steps on spheres; seeds and rates are not."""
    chosen = entry.settings()
    network = (entry.dataset, entry.model, chosen.batch, chosen.dropout)
    return (*network, chosen.momentum, chosen.balanced, chosen.max_angle, chosen.clip, chosen.orthogonality)


def _account(job: Job) -> str:
    log = job.log
    loss = log.epochs[-1]["train_loss"] if log.epochs else float("nan")
    return (
        f"{job.path.stem:60} {log.ended or 'cut off':8} best {log.best:6.2f} last {log.last:6.2f} "
        f"loss {loss:.4f} {log.seconds:.2f} s/epoch"
    )


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
