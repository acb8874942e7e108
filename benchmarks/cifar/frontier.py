"""Accuracy against seconds on CIFAR-100: every optimizer tuned for every length with the same number of trials.

    python benchmarks/cifar/frontier.py --out runs/frontier --minutes 600
    python benchmarks/cifar/frontier.py --out /tmp/tiny --images 256 --models resnet2 --epochs 1 --methods sgd,spectral

VGG16-BN and ResNet-18, 5, 15 and 60 epochs. First ``--trials`` rates per method, network and length are judged on
validation images; then the best of each is trained on all training images with three seeds, and the test images are
used once. Last comes a table, and with ``--picture`` one figure per network. Everything is resumed where it was left;
on an NVIDIA GPU start the MPS control daemon first, and use ``--processes 1`` for the seconds to be those of one run.
The paper's own settings: the plan of ``--paper`` (both data sets, WRN-16-4 and VGG16-BN, 100 epochs, test images).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from run_plan import work

# rates, from the middle outwards (a smaller number of trials keeps the first), and what else is set
METHODS: dict[str, tuple[tuple[float, ...], dict[str, float]]] = {
    "sgd": ((0.1, 0.05, 0.2, 0.02, 0.4), {"weight-decay": 5e-4}),
    "adamw": ((1e-3, 5e-4, 2e-3, 4e-3, 2.5e-4), {"weight-decay": 0.05}),
    "soap": ((3e-3, 1e-3, 6e-3, 1e-2, 5e-4), {"weight-decay": 0.05}),
    "muon": ((0.12, 0.06, 0.24, 0.48, 0.03), {"rest-lr": 0.1}),
    "kfac": ((0.1, 0.05, 0.2, 0.02, 0.4), {"damping": 0.1}),
    "mkfac": ((0.1, 0.05, 0.2, 0.4, 0.02), {"damping": 0.1, "rest-lr": 0.05}),
    "natural": ((0.02, 0.01, 0.03, 0.04, 0.005), {"rest-lr": 0.1}),
    "spectral": ((0.02, 0.015, 0.03, 0.01, 0.04), {"rest-lr": 0.1}),
}
PAPER = list(itertools.product(("cifar10", "cifar100"), ("wrn16_4", "vgg16bn")))


class Cell:
    """A method on one network for one number of epochs."""

    def __init__(self, given: argparse.Namespace, model: str, epochs: int, method: str) -> None:
        self.given, self.model, self.epochs, self.method = given, model, epochs, method
        self.rates, self.options = METHODS[method]

    def run(self, rate: float, split: str, seed: int) -> list[str]:
        options = {**self.options, "lr": rate, "epochs": self.epochs, "seed": seed, "split": split}
        options |= {"out": self.log(rate, split, seed)} | ({"images": self.given.images} if self.given.images else {})
        pairs = itertools.chain.from_iterable((f"--{key}", str(value)) for key, value in options.items())
        return ["cifar100", self.model, self.method, *pairs]

    def log(self, rate: float, split: str, seed: int) -> Path:
        return self.given.out / f"{self.model}-{self.epochs}-{self.method}-{rate:g}-{split}-{seed}.jsonl"

    def trials(self) -> list[list[str]]:
        return [self.run(rate, "validation", 0) for rate in self.rates[: self.given.trials]]

    def best(self) -> float | None:
        """The rate that validation images prefer, once all trials are done."""
        found = {rate: finished(self.log(rate, "validation", 0)) for rate in self.rates[: self.given.trials]}
        if not all(found.values()):
            return None
        return max(found, key=lambda rate: found[rate][-1]["accuracy"] if len(found[rate]) == self.epochs else -1)

    def finals(self) -> list[list[str]]:
        best = self.best()
        return [] if best is None else [self.run(best, "test", seed) for seed in range(self.given.seeds)]

    def result(self) -> tuple[float, list[float], float] | None:
        """The best rate, the test accuracies by seed and the mean seconds of a run."""
        best = self.best()
        runs = [finished(self.log(best, "test", seed)) for seed in range(self.given.seeds)] if best else []
        if best is None or not all(runs):
            return None
        seconds = statistics.mean(sum(entry["seconds"] for entry in run) for run in runs)
        return best, [run[-1]["accuracy"] for run in runs], seconds


def finished(log: Path) -> list[dict[str, Any]]:
    """The epochs of a run, or nothing if it has not ended."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return lines[1:-1] if lines and "ended" in lines[-1] else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder of the logs")
    add("--models", default="vgg16bn,resnet18")
    add("--epochs", default="5,15,60")
    add("--methods", default=",".join(METHODS))
    add("--trials", type=int, default=5, help="rates per method, network and length")
    add("--seeds", type=int, default=3)
    add("--images", type=int, help="only so many training images")
    add("--processes", type=int, default=1)
    add("--minutes", type=float, default=600)
    add("--picture", type=Path)
    add("--paper", action="store_true", help="train the paper's rows instead")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * given.minutes
    if given.paper:
        runs = [[d, m, "paper-mkfac", "--epochs", "100", "--split", "test", "--out", str(given.out / f"{d}-{m}.jsonl")]
                for d, m in PAPER]  # fmt: skip
        print(f"{work(runs, given.processes, until)} runs are left")
        return
    lengths = [int(e) for e in given.epochs.split(",")]
    cells = [Cell(given, *c) for c in itertools.product(given.models.split(","), lengths, given.methods.split(","))]
    left = work([run for cell in cells for run in cell.trials()], given.processes, until)
    left += work([run for cell in cells for run in cell.finals()], given.processes, until)
    print(f"{left} runs are left\n")
    print("| network | epochs | method | rate | test accuracy | seconds |\n|---|---|---|---|---|---|")
    results = [(cell, found) for cell in cells if (found := cell.result())]
    for cell, (rate, accuracies, seconds) in results:
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        values = f"{rate:g} | {statistics.mean(accuracies):.1f} ± {spread:.1f} | {seconds:.0f}"
        print(f"| {cell.model} | {cell.epochs} | {cell.method} | {values} |")
    if given.picture:
        draw(results, given.picture)


def draw(results: Sequence[Any], path: Path) -> None:
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(cell.model for cell, _ in results))
    figure = Figure(figsize=(5.2 * len(models), 3.8), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for panel, model in zip(panels, models, strict=True):
        for method in METHODS:
            own = [f for cell, f in results if (cell.model, cell.method) == (model, method)]
            points = [(seconds, statistics.mean(accuracies)) for _, accuracies, seconds in own]
            if points:
                panel.plot(*zip(*points, strict=True), "o-", lw=2.6 if method == "spectral" else 1.3, label=method)
        panel.set(xscale="log", xlabel="seconds", ylabel="test accuracy, %", title=model)
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
