"""Train the cells of the CIFAR table one group after the other until the time is up; started again, it goes on.

    PYTHONPATH=src python benchmarks/gpu/cifar_queue.py --minutes 25 --folder results/cifar --side-by-side 3

Without ``--plan`` the order is that of importance: SGD, MKFAC, SGDG and KFAC on both networks for CIFAR-10, then
CIFAR-100, then the other presets; one seed of everything before the next seed of anything. A plan is a file of JSON
lines such as

    {"dataset": "cifar10", "model": "vgg16bn", "preset": "sgd", "seed": 0, "split": "validation", "lr": 0.1}

whose further entries replace settings; with "candidates", a list of such replacements, each is tried for
"search_epochs" on the validation split, and the one with the best accuracy of its last epoch is taken. Neighbours in
the order that share a data set, a split and a network are trained side by side. Finished runs are skipped, and a group
that the time cut off leaves checkpoints. Nothing but PyTorch, NumPy, safetensors and Pillow is needed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fisherfold.training import ImagePool, Run, RunLog, settings
from fisherfold.training.train import Job, log_name, open_job, pick_device, train_side_by_side

FIRST = ("sgd", "mkfac", "sgdg", "kfac")
THEN = ("mkfac-tuned", "sgd-tuned", "sgdp", "adam", "adamp", "sgdg-tuned")


def default_plan(seeds: int) -> list[dict[str, Any]]:
    cells = [(d, m, p) for d in ("cifar10", "cifar100") for m in ("vgg16bn", "wrn16_4") for p in FIRST]
    cells += [(d, m, p) for d in ("cifar10", "cifar100") for m in ("vgg16bn", "wrn16_4") for p in THEN]
    return [{"dataset": d, "model": m, "preset": p, "seed": seed} for seed in range(seeds) for d, m, p in cells]


def grouped(plan: list[dict[str, Any]], width: int) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    for entry in plan:
        if group and (len(group) == width or kind(entry) != kind(group[0])):
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def kind(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["dataset"], entry.get("split", "test"), entry["model"], entry.get("epochs", 100)


class Queue:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder, self.arguments = Path(arguments.folder), arguments
        self.folder.mkdir(parents=True, exist_ok=True)
        self.device = pick_device(arguments.device)
        self.until = time.monotonic() + 60 * arguments.minutes
        self.pools: dict[tuple[str, str], ImagePool] = {}

    def pool(self, dataset: str, split: str) -> ImagePool:
        if (dataset, split) not in self.pools:
            self.pools[dataset, split] = ImagePool.load(
                dataset, device=self.device, split=split, images=self.arguments.images
            )
        return self.pools[dataset, split]

    def job(self, entry: dict[str, Any], folder: Path) -> Job | RunLog:
        """The run of an entry, or its log if it has ended."""
        task = dict(entry)
        dataset, model, preset = (task.pop(key) for key in ("dataset", "model", "preset"))
        seed, split = task.pop("seed", 0), task.pop("split", "test")
        chosen = settings(preset, dataset, model, **task)
        path = folder / log_name(dataset, model, chosen, seed, split, self.arguments.images)
        if path.is_file() and (log := RunLog.read(path)).ended:
            return log
        run = Run(chosen, model, self.pool(dataset, split), seed=seed, compiled=not self.arguments.eager)
        return open_job(run, path)

    def search(self, entry: dict[str, Any]) -> dict[str, Any] | None:
        """The entry with the best of its candidates; nothing if the time was up before."""
        task = dict(entry)
        epochs, candidates = task.pop("search_epochs", 20), task.pop("candidates")
        folder = self.folder / "search"
        folder.mkdir(exist_ok=True)
        trials = [{**task, **change, "seed": 0, "split": "validation", "epochs": epochs} for change in candidates]
        scores: list[float] = []
        for group in grouped(trials, self.arguments.side_by_side):
            jobs = [self.job(trial, folder) for trial in group]
            if not self.train(jobs):
                return None
            logs = [job.log if isinstance(job, Job) else job for job in jobs]
            scores += [log.last if log.ended == "done" else 0.0 for log in logs]
        best = max(range(len(scores)), key=scores.__getitem__)
        print(f"  of {list(zip(candidates, scores, strict=True))} chosen: {candidates[best]}", flush=True)
        return {**task, **candidates[best]}

    def train(self, jobs: list[Job | RunLog]) -> bool:
        missing = [job for job in jobs if isinstance(job, Job)]
        start = time.monotonic()
        every = self.arguments.checkpoint_every
        finished = not missing or train_side_by_side(missing, checkpoint_every=every, until=self.until)
        for job in missing:
            log = job.log
            print(
                f"{job.path.stem:60} {log.ended or 'cut off':8} best {log.best:6.2f} last {log.last:6.2f} "
                f"loss {log.epochs[-1]['train_loss'] if log.epochs else 0:.4f} {log.seconds:.2f} s/epoch",
                flush=True,
            )
        left = (self.until - time.monotonic()) / 60
        print(f"  {time.monotonic() - start:.0f} s, {left:.1f} min left", flush=True)
        return finished

    def work(self, plan: list[dict[str, Any]]) -> None:
        for group in grouped(plan, self.arguments.side_by_side):
            decided = [self.search(entry) if "candidates" in entry else entry for entry in group]
            settled = [entry for entry in decided if entry is not None]
            finished = self.train([self.job(entry, self.folder) for entry in settled])
            if not finished or len(settled) < len(group) or time.monotonic() >= self.until:
                print("the time is up; the same command goes on", flush=True)
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--folder", default="results/cifar")
    parser.add_argument("--side-by-side", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plan", type=Path, help="a file of JSON lines instead of the default order")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="epochs; 0 only when the time is up")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--images", type=int, help="only so many training images, for a trial")
    parser.add_argument("--eager", action="store_true", help="do not compile the networks")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    plan = default_plan(arguments.seeds)
    if arguments.plan is not None:
        plan = [json.loads(line) for line in arguments.plan.read_text().splitlines() if line.strip()]
    Queue(arguments).work(plan)


if __name__ == "__main__":
    main()
