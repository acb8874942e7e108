"""Accuracy against seconds on CIFAR-100, every optimizer tuned alike.

The first ``--trials`` settings per method and network are judged on validation images at the first
length, the best ``--again`` of them at the other lengths. With ``--finals`` the best of each is
then trained on all training images with ``--seeds`` seeds at the first length, and the test images
are used once. Finished runs are lines of ``runs.jsonl`` in the folder, written as they finish;
``--minutes 0``, the default, prints the tables of those that are there. Seconds are those of a run
alone on one GPU: steps times the time of a step by ``gpu.step_cost``. ``drop-in`` is
``SphereOptimizer(model, lr, total_steps=...)``, all others have the same schedule from outside.
The paper's own settings: ``--paper`` (two data sets and networks, 100 epochs, test images; on
VGG16-BN two seeds, with the same steps without curvature beside them). ``--head``: VGG16-BN with
the head of VGG16 for ImageNet, 40 epochs, validation images.

The recorded tables: ``--out results/cifar_frontier --steps results/step_cost.json``.

Against: SGD, AdamW, SOAP and Muon
Takes: half an hour on an H200; a second for the recorded tables
Page: docs/benchmarks/networks.md
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import integers, names
from benchmarks.cifar.run_plan import share_device, work

SMOKE = (
    "--out {folder}/runs --models resnet4 --methods sgd,drop-in --epochs 2,1 --trials 2 --images "
    "60 --finals sgd --seeds 2 --minutes 2"
)

Setting = dict[str, float]
DECAY = {"weight-decay": 0.05}
SGD: list[Setting] = [
    {"lr": 0.1},
    {"lr": 0.05, "weight-decay": 1e-3},
    {"lr": 0.2},
    {"lr": 0.02, "weight-decay": 2e-3},
]
# the likely best first: a smaller number of trials keeps the first
METHODS: dict[str, list[Setting]] = {
    "soap": [{"lr": lr, **DECAY} for lr in (3e-3, 1e-3, 6e-3)],
    "drop-in": [{"lr": lr} for lr in (0.02, 0.03, 0.015, 0.04)],
    "muon": [{"lr": lr} for lr in (0.06, 0.12, 0.03, 0.24)],
    "adamw": [{"lr": lr, **DECAY} for lr in (2e-3, 1e-3, 4e-3, 5e-4)],
    "sgd": SGD,
    "kfac": [{"lr": lr, "damping": 0.1, "every": 100} for lr in (0.1, 0.05, 0.2, 0.4)],
    "mkfac": [
        {"lr": lr, "damping": 0.1, "every": 100, "rest-lr": 0.05} for lr in (0.1, 0.2, 0.05, 0.4)
    ],
}
PEERS = ["soap", "drop-in", "muon", "adamw", "sgd"]
# the grids that are others for transformers
TRANSFORMER: dict[str, list[Setting]] = {
    "muon": [{"lr": lr, **DECAY} for lr in (2e-3, 5e-3, 1e-3)],
    "adamw": [{"lr": lr, **DECAY} for lr in (1e-3, 2e-3, 5e-4)],
    "drop-in": [{"lr": lr} for lr in (0.02, 0.03, 0.01)],
}
HEAD = [
    ("sgd", ("--lr", "0.05", "--weight-decay", "1e-3")),
    ("drop-in", ("--lr", "0.02")),
    ("kfac", ("--lr", "0.1", "--damping", "0.1", "--every", "100")),
    ("mkfac", ("--lr", "0.1", "--damping", "0.1", "--every", "100", "--rest-lr", "0.05")),
]
PAPER = [
    *itertools.product(
        ("cifar100", "cifar10"), ("vgg16bn",), ("paper-mkfac", "paper-sgdg"), (0, 1)
    ),
    *itertools.product(("cifar100", "cifar10"), ("wrn16_4",), ("paper-mkfac",), (0,)),
]


def settings(model: str, method: str) -> list[Setting]:
    """The grid of a method for a network."""
    own = TRANSFORMER if model.startswith("vit") else METHODS
    return own.get(method, METHODS[method])


class Runs:
    """The finished runs of a folder by name, and the commands of those that are not."""

    def __init__(self, given: Namespace) -> None:
        self.given = given
        self.record = given.out / "runs.jsonl"
        self.done: dict[str, dict[str, Any]] = {}
        self.collect()

    def collect(self) -> None:
        """Take up the logs of finished runs, and record them in one file."""
        if self.record.exists():
            self.done = {
                run["name"]: run for run in map(json.loads, self.record.read_text().splitlines())
            }
        for log in sorted(self.given.logs.glob("*.jsonl")):
            settings, *epochs = map(json.loads, log.read_text().splitlines())
            if log.stem not in self.done and epochs and "ended" in epochs[-1]:
                kept = {key: settings[key] for key in ("date", "on", "torch")}
                accuracies = [epoch["accuracy"] for epoch in epochs[:-1]]
                loss = round(epochs[-2]["train_loss"], 4)
                self.done[log.stem] = {
                    "name": log.stem,
                    **kept,
                    "train_loss": loss,
                    "accuracies": accuracies,
                }
        if self.done:
            self.record.write_text(
                "".join(json.dumps(self.done[name]) + "\n" for name in sorted(self.done))
            )

    def name(
        self, model: str, epochs: int, method: str, setting: Setting, split: str, seed: int
    ) -> str:
        options = "-".join(f"{key}{value:g}" for key, value in sorted(setting.items()))
        return f"{model}-{epochs}-{method}-{options}-{split}-{seed}"

    def missing(
        self, model: str, epochs: int, method: str, setting: Setting, split: str, seed: int
    ) -> list[list[str]]:
        """The arguments of train.py, unless the run is there."""
        name = self.name(model, epochs, method, setting, split, seed)
        if name in self.done:
            return []
        options = {
            **setting,
            "smoothing": self.given.smoothing,
            "epochs": epochs,
            "seed": seed,
            "split": split,
        }
        options |= {"checkpoint-every": 0, "out": self.given.logs / f"{name}.jsonl"}
        options |= {"images": self.given.images} if self.given.images else {}
        pairs = itertools.chain.from_iterable(
            (f"--{key}", str(value)) for key, value in options.items()
        )
        return [["cifar100", model, method, *pairs]]

    def accuracy(
        self, model: str, epochs: int, method: str, setting: Setting, split: str, seed: int
    ) -> float | None:
        """The accuracy after the last epoch; 0 of a run that diverged."""
        run = self.done.get(self.name(model, epochs, method, setting, split, seed))
        return (
            None
            if run is None
            else run["accuracies"][-1]
            if len(run["accuracies"]) == epochs
            else 0.0
        )

    def ranked(self, model: str, epochs: int, method: str) -> list[tuple[float, Setting]]:
        """The judged settings of a cell, the best first."""
        every = [
            (self.accuracy(model, epochs, method, s, "validation", 0), s)
            for s in settings(model, method)
        ]
        return sorted([(a, s) for a, s in every if a is not None], key=lambda pair: -pair[0])


def plan(given: Namespace, runs: Runs) -> list[list[str]]:
    """The runs that are missing and can be made.

    Trials at the first length, then those that need them.
    """
    first, *others = given.epochs
    cells = list(itertools.product(given.models, given.methods))
    trials = [
        r
        for m, o in cells
        for s in settings(m, o)[: given.trials]
        for r in runs.missing(m, first, o, s, "validation", 0)
    ]
    if trials:
        return trials
    again = [
        r
        for n, (m, o) in itertools.product(sorted(others, reverse=True), cells)
        if n < 30 or o in given.long
        for _, s in runs.ranked(m, first, o)[: given.again]
        for r in runs.missing(m, n, o, s, "validation", 0)
    ]
    finals = [
        r
        for seed in range(given.seeds)
        for m, o in cells
        if o in given.finals
        for r in runs.missing(m, first, o, runs.ranked(m, first, o)[0][1], "test", seed)
    ]
    return again + finals  # the longest first


def options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder of runs.jsonl and of the logs")
    add("--models", type=names, default=["vgg16bn", "resnet64", "wrn16_4", "vit256_6"])
    add("--epochs", type=integers, default=[15, 5, 60])
    add("--methods", type=names, default=PEERS)
    add("--logs", type=Path, help="the folder of the logs; logs in the folder of runs.jsonl")
    add("--data", help="the folder of the CIFAR files, in place of FISHERFOLD_DATA")
    add("--mps", action="store_true", help="start the control daemon of MPS")
    add("--trials", type=int, default=3, help="settings per method and network at the first length")
    add("--again", type=int, default=1, help="settings per method and network at the other lengths")
    add(
        "--long",
        type=names,
        default=["sgd", "muon", "drop-in"],
        help="methods for lengths from 30 epochs",
    )
    add(
        "--finals",
        type=names,
        default=[],
        help="methods that are judged on test images at the first length",
    )
    add("--seeds", type=int, default=3)
    add("--smoothing", type=float, default=0.1)
    add("--images", type=int, help="only so many training images")
    add("--processes", type=int, default=1)
    add("--minutes", type=float, default=0)
    add("--steps", type=Path, help="the file of step_cost.py, for seconds")
    add("--picture", type=Path)
    add("--paper", action="store_true", help="train the paper's rows instead")
    add("--head", action="store_true", help="train VGG16-BN with a wide head instead")


def main(given: Namespace) -> None:
    until = time.monotonic() + 60 * given.minutes
    if given.data:
        os.environ["FISHERFOLD_DATA"] = given.data
    given.logs = given.logs or given.out / "logs"
    for folder in (given.out, given.logs):
        folder.mkdir(parents=True, exist_ok=True)
    if given.mps:
        share_device()
    runs = Runs(given)
    if given.paper or given.head:
        wanted = paper_rows(given) if given.paper else head_rows(given)
        print(f"{work(wanted, given.processes, until, runs.collect)} runs are left")
        runs.collect()
        for name, run in runs.done.items():
            print(name, run["accuracies"][-1])
        return
    for _ in range(2 if given.minutes else 0):
        left = work(plan(given, runs), given.processes, until, runs.collect)
        print(f"{left} runs are left", flush=True)
        runs.collect()
    show(given, runs)


def paper_rows(given: Namespace) -> list[list[str]]:
    """The runs with the paper's settings."""
    fixed = ["--epochs", "100", "--split", "test"]
    fixed += ["--images", str(given.images)] if given.images else []
    return [
        [d, m, o, *fixed, "--seed", f"{seed}", "--out", f"{given.logs}/{d}-{m}-{o}-{seed}.jsonl"]
        for d, m, o, seed in PAPER
    ]


def head_rows(given: Namespace) -> list[list[str]]:
    """The runs with a wide head."""
    fixed = ["--epochs", "40", "--smoothing", "0.1", "--checkpoint-every", "0"]
    fixed += ["--images", str(given.images)] if given.images else []
    model = "vgg16bn_4096"
    return [
        ["cifar100", model, o, *options, *fixed, "--out", f"{given.logs}/{model}-{o}.jsonl"]
        for o, options in HEAD
    ]


def show(given: Namespace, runs: Runs) -> None:
    """Print the tables, and draw the picture."""
    seconds: dict[str, dict[str, float]] = (
        json.loads(given.steps.read_text())["milliseconds"] if given.steps else {}
    )
    found: list[tuple[str, str, float, list[float]]] = []
    print("| network | epochs | method | best setting | validation, by setting | seconds |")
    print("|---|---|---|---|---|---|")
    for model, epochs, method in itertools.product(
        given.models, sorted(given.epochs), given.methods
    ):
        if not (ranked := runs.ranked(model, epochs, method)):
            continue
        step = seconds.get(model, {}).get(method)
        took = None if step is None else step / 1e3 * epochs * (45_000 // 128)
        best = runs.done[runs.name(model, epochs, method, ranked[0][1], "validation", 0)][
            "accuracies"
        ]
        found += [] if took is None else [(model, method, took, best)]
        setting = ", ".join(f"{key} {value:g}" for key, value in ranked[0][1].items())
        values = ", ".join(f"{accuracy:.1f}" for accuracy, _ in ranked)
        shown = "" if took is None else f"{took:.0f}"
        print(f"| {model} | {epochs} | {method} | {setting} | {values} | {shown} |")
    print("\n| network | epochs | method | test accuracy, mean and standard deviation over seeds |")
    print("|---|---|---|---|")
    for model, method in itertools.product(given.models, given.methods):
        if ranked := runs.ranked(model, given.epochs[0], method):
            every = [
                runs.accuracy(model, given.epochs[0], method, ranked[0][1], "test", s)
                for s in range(given.seeds)
            ]
            kept = [a for a in every if a is not None]
            if len(kept) > 1:
                value = f"{statistics.mean(kept):.2f} ± {statistics.stdev(kept):.2f} ({len(kept)})"
                print(f"| {model} | {given.epochs[0]} | {method} | {value} |")
    if given.picture:
        draw(found, given.picture)


def draw(found: Sequence[tuple[str, str, float, list[float]]], path: Path) -> None:
    """Validation accuracy by epoch against seconds, of the best setting for each length."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(model for model, *_ in found))
    figure = Figure(figsize=(6.4 * len(models), 3.8), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for panel, model in zip(panels, models, strict=True):
        for index, method in enumerate(METHODS):
            for took, accuracies in [(t, a) for m, o, t, a in found if (m, o) == (model, method)]:
                seconds = [took * (epoch + 1) / len(accuracies) for epoch in range(len(accuracies))]
                width = 2.6 if method == "drop-in" else 1.3
                label = f"{method}, {len(accuracies)} epochs: {accuracies[-1]:.1f}"
                panel.plot(seconds, accuracies, lw=width, color=f"C{index}", label=label)
                panel.plot(seconds[-1:], accuracies[-1:], "o", color=f"C{index}")
        panel.set(
            xlabel="seconds on one H200",
            ylabel="validation accuracy, %",
            title=f"{model}, CIFAR-100",
        )
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
