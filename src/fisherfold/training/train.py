"""Train networks, several side by side, with a log and a checkpoint per run.

Runs in one process take turns step by step, each on a stream of its own, so that the kernels of one fill the gaps of
another; on a CPU they simply alternate. Whatever stops the process, each log holds the epochs done so far and each
checkpoint lets its run go on from the last one written.
"""

from __future__ import annotations

import datetime
import math
import operator
import os
import re
import subprocess  # nosec B404
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from fisherfold._version import __version__
from fisherfold.files import claimed, make_folder
from fisherfold.plain import counted
from fisherfold.training.checkpoint import refuse_another
from fisherfold.training.data import ImagePool
from fisherfold.training.log import RunLog
from fisherfold.training.options import Settings
from fisherfold.training.presets import preset_of, settings
from fisherfold.training.run import Run

Tell = Callable[["Job", dict[str, Any]], None]


@dataclass
class Job:
    """A run with its files.

    Attributes:
        run: the run.
        log: its log.
        path: of the log; the checkpoint lies beside it.
    """

    run: Run
    log: RunLog
    path: Path

    @property
    def checkpoint(self) -> Path:
        """The file from which the run goes on."""
        return self.path.with_suffix(".safetensors")


def train(
    dataset: str,
    model: str = "wrn16_4",
    preset: str = "mkfac",
    *,
    seeds: Sequence[int] = (0,),
    folder: str | os.PathLike[str] = "runs",
    device: str | torch.device = "auto",
    split: str = "test",
    images: int | None = None,
    data: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 10,
    compiled: bool = True,
    tell: Tell = lambda _job, _entry: None,
    **changes: Any,
) -> list[RunLog]:
    """Train a network of the paper on CIFAR, once per seed, all seeds side by side; finished runs are only read.

    Args:
        dataset: cifar10 or cifar100.
        model: wrn16_4 or vgg16bn.
        preset: a name of ``PRESETS``.
        seeds: one run for each that is different.
        folder: of logs and checkpoints; made if it is not there.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        split: ``"test"``, or ``"validation"`` to judge by training images left out.
        images: only so many training images.
        data: where the images are, if not where ``fisherfold datasets`` finds them.
        checkpoint_every: epochs between checkpoints.
        compiled: pass the network through ``torch.compile`` on a GPU.
        tell: called with each run and each epoch's entry.
        **changes: fields of ``Settings`` to replace.

    Returns:
        One log per seed.

    Raises:
        TypeError: if seeds are not a list of whole numbers.
        ValueError: if another process is training one of the runs in this folder, a log there is of another run, or
            ``checkpoint_every`` is no number of epochs.
    """
    try:
        seeds = list(dict.fromkeys(map(operator.index, seeds)))  # whole numbers of any type
    except TypeError:
        raise TypeError(f"seeds must be a list of whole numbers, got {seeds!r}") from None
    if not isinstance(checkpoint_every, Integral) or checkpoint_every < 0:
        raise ValueError(f"checkpoint_every must be a whole number, at least 0, got {checkpoint_every!r}")
    chosen = settings(preset, dataset, model, **changes)
    place = pick_device(device)
    target = make_folder(folder)
    paths = [target / log_name(dataset, model, chosen, seed, split, images) for seed in seeds]
    task: dict[str, Any] = {"dataset": dataset, "model": model, "split": split, "settings": chosen.as_json()}
    task |= {} if images is None else {"images": images}

    def is_missing(seed: int, path: Path) -> bool:
        return not has_ended(path, {**task, "seed": seed})

    with ExitStack() as held:
        missing = [(seed, path) for seed, path in zip(seeds, paths, strict=True) if is_missing(seed, path)]
        for _, path in missing:
            if not held.enter_context(claim(path)):
                raise ValueError(f"another process is training {path.stem} in {target}: wait for it, or end it first")
        missing = [(seed, path) for seed, path in missing if is_missing(seed, path)]  # since we looked, perhaps
        if missing:
            pool = ImagePool.load(dataset, device=place, split=split, images=images, folder=data)
            jobs = [open_job(Run(chosen, model, pool, seed=s, compiled=compiled), p) for s, p in missing]
            train_side_by_side(jobs, checkpoint_every=checkpoint_every, tell=tell)
    return [RunLog.read(path) for path in paths]


def has_ended(path: Path, header: dict[str, Any]) -> bool:
    """Whether a run is over, well or not.

    Args:
        path: of its log, which need not exist.
        header: what the run is, as far as it is known.

    Returns:
        False for one that has yet to begin or to go on; the log of another run, such as one of a release whose preset
        had other settings, is refused.
    """
    if not path.is_file():
        return False
    log = RunLog.read(path)
    refuse_another(path, log.header, header)
    return bool(log.ended)


def claim(path: Path) -> AbstractContextManager[bool]:
    """Hold a run, so that no two processes write its log and its checkpoint.

    Args:
        path: of its log.

    Returns:
        What is held while its block runs, and says whether it is ours.
    """
    return claimed(path.with_name(f".{path.stem}.claim"))


def train_side_by_side(
    jobs: Sequence[Job],
    *,
    checkpoint_every: int = 10,
    tell: Tell = lambda _job, _entry: None,
    until: float | None = None,
    wanted: Callable[[Job], bool] = lambda _job: True,
    beside: Callable[[], int] = lambda: 0,
) -> bool:
    """Train several runs in turns until all have ended.

    Args:
        jobs: the runs.
        checkpoint_every: epochs between checkpoints; 0 for none.
        tell: called with each run and each epoch's entry.
        until: stop after the epoch in which ``time.monotonic()`` passes this, with a checkpoint.
        wanted: asked after every epoch; a run for which it is False is left, with a checkpoint.
        beside: how many runs other processes have on the device at the moment; the time of an epoch is divided among
            all.

    Returns:
        Whether all runs have ended.
    """
    active = [job for job in jobs if not job.log.ended]
    while active and (until is None or time.monotonic() < until):
        for job, entry in zip(active, train_epoch(active, beside), strict=True):
            _record(job, entry, checkpoint_every)
            tell(job, entry)
        active = [job for job in active if not job.log.ended]
        for job in [job for job in active if not wanted(job)]:
            active.remove(job)
            job.run.save(str(job.checkpoint))
    for job in active:
        job.run.save(str(job.checkpoint))
    return all(job.log.ended for job in jobs)


def train_epoch(jobs: Sequence[Job], beside: Callable[[], int] = lambda: 0) -> list[dict[str, Any]]:
    """Train several runs for an epoch, in turns.

    Args:
        jobs: the runs; their logs stay as they are.
        beside: as for ``train_side_by_side``.

    Returns:
        The epoch's entry of each.
    """
    start = time.perf_counter()
    with _fastest_convolutions():
        for job in jobs:
            job.run.begin_epoch()
        for index in range(max(job.run.steps_per_epoch for job in jobs)):
            for job in jobs:
                if index < job.run.steps_per_epoch:
                    job.run.step(index)
        for job in jobs:
            job.run.judge()
    entries = [job.run.end_epoch() for job in jobs]
    together = len(jobs) + beside()
    seconds = (time.perf_counter() - start) / together
    return [entry | {"seconds": round(seconds, 4), "side_by_side": together} for entry in entries]


@contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Have cuDNN try its algorithms for shapes that come again and again, unless it is asked to be deterministic."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or not torch.backends.cudnn.deterministic
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _record(job: Job, entry: dict[str, Any], checkpoint_every: int) -> None:
    job.log.epochs.append(entry)
    if not (math.isfinite(entry["train_loss"]) and math.isfinite(entry["loss"])):
        job.log.ended = "diverged"
    elif job.run.over:
        job.log.ended = "done"
    # the log first: one that is ahead of its checkpoint is cut back on resuming, one behind it would have a hole
    job.log.write(job.path)
    if job.log.ended:
        job.checkpoint.unlink(missing_ok=True)
    elif checkpoint_every and job.run.done_epochs % checkpoint_every == 0:
        job.run.save(str(job.checkpoint))


def open_job(run: Run, path: Path) -> Job:
    """Join a run to its files, going on from its checkpoint where there is one.

    Args:
        run: fresh.
        path: of its log.

    Returns:
        The run, ready to train.

    Raises:
        ValueError: if the log lacks epochs that the checkpoint has behind it, which a log of the rest would hide.
    """
    job = Job(run, RunLog({**run.header, "preset": run.settings.preset, **provenance(run.device)}), path)
    if job.checkpoint.is_file():
        run.load(str(job.checkpoint))
        job.log.epochs = RunLog.read(path).epochs[: run.done_epochs] if path.is_file() else []
        if [entry["epoch"] for entry in job.log.epochs] != list(range(1, run.done_epochs + 1)):
            behind = counted(run.done_epochs, "epoch")
            raise ValueError(
                f"{job.checkpoint} has {behind} behind it, which are not all in {path.name}: put that "
                "log back, or delete the checkpoint to start again"
            )
    return job


def log_name(dataset: str, model: str, chosen: Settings, seed: int, split: str, images: int | None) -> str:
    """The name of a run's log: what is not the own of the preset that it is called by, or that has its settings.

    Args:
        dataset: cifar10 or cifar100.
        model: the network.
        chosen: the settings.
        seed: of the run.
        split: what it is judged by.
        images: how many it is trained on, if not all.

    Returns:
        A file name.
    """
    preset = preset_of(chosen, dataset, model)
    own = settings(preset, dataset, model).as_json()
    changed = {key: value for key, value in chosen.as_json().items() if key != "preset" and own[key] != value}
    words = [dataset, model, preset, *(f"{key}={value}" for key, value in changed.items())]
    words += [split] if split != "test" else []
    words += [f"images={images}"] if images is not None else []
    return "-".join([*words, f"seed{seed}"]) + ".jsonl"


def provenance(device: torch.device) -> dict[str, str]:
    """Where and how a result was made.

    Args:
        device: of the run.

    Returns:
        Command, date, device, commit and versions.
    """
    threads = counted(torch.get_num_threads(), "thread")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {threads}"
    # where things lie on somebody's machine is nobody else's business
    words = [Path(sys.argv[0]).name, *map(_without_place, sys.argv[1:])]
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    versions = {"torch": torch.__version__, "fisherfold": __version__}
    return {"command": " ".join(words), "date": now, "device": name, "commit": commit(), **versions}


def _without_place(word: str) -> str:
    """A word of a command, with the name alone of a file given by its whole path, behind its option too."""
    option = re.match(r"(-\w|--[\w-]+=)?", word)
    start = option.end() if option else 0
    return word[:start] + Path(word[start:]).name if Path(word[start:]).is_absolute() else word


def commit() -> str:
    """The commit of the source tree: from ``FISHERFOLD_COMMIT``, or asked of git.

    Returns:
        Its hash, or "unknown".

    Raises:
        ValueError: if the variable holds less than a whole hash, from which a slip of the pen could not be told.
    """
    told = os.environ.get("FISHERFOLD_COMMIT", "")
    if told and not re.fullmatch("[0-9a-f]{40,64}", told):
        raise ValueError(f"FISHERFOLD_COMMIT must be a whole hash, as 'git rev-parse HEAD' prints it, got {told!r}")
    if told:
        return told
    where = Path(__file__).parent
    try:
        asked = subprocess.run(  # nosec
            ["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=True,  # noqa: S607
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return asked.stdout.strip()


def pick_device(device: str | torch.device) -> torch.device:
    """The device of a name.

    Args:
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; or the device itself.

    Returns:
        The device.

    Raises:
        ValueError: if there is no such device here.
    """
    device = str(device)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and device.split(":")[0] != "cuda":
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but PyTorch sees no CUDA device here: use --device cpu or auto")
    return torch.device(device)
