"""How many steps MKFAC needs to reach the training loss that tuned SGD ends with.

    FISHERFOLD_DATA=folder PYTHONPATH=src python benchmarks/mkfac_steps_to_loss.py

Two tasks, both with batch norm, on full batches: scikit-learn's digits with a perceptron, and 500 real CIFAR-10 images
with a small convolutional network (left out where FISHERFOLD_DATA does not hold them). Rates are constant; curvature is
renewed every second step. SGD with momentum is tuned over its rate, the others over theirs, momentum and the
damping, all on seed 0; then five other seeds (other initial networks) run with what was chosen. The target is SGD's
final training loss of the same seed, with batch statistics. ``--batch`` makes it stochastic.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fisherfold.optim import KFAC, MKFAC, SGDG
from fisherfold.optim.statistics import preserved

RENEWAL = 2
SEEDS = (1, 2, 3, 4, 5)
Maker = Callable[[nn.Module, Tensor], torch.optim.Optimizer]


@dataclass(frozen=True)
class Task:
    name: str
    x: Tensor
    y: Tensor
    build: Callable[[], nn.Module]
    steps: int
    batch: int


def digits() -> Task:
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.data / 16.0, dtype=torch.float32)

    def build() -> nn.Module:
        def block(i: int, o: int) -> list[nn.Module]:
            return [nn.Linear(i, o, bias=False), nn.BatchNorm1d(o), nn.ReLU()]

        return nn.Sequential(*block(64, 128), *block(128, 128), nn.Linear(128, 10))

    return Task("digits", x, torch.tensor(found.target), build, steps=40, batch=len(x))


def cifar(count: int = 500) -> Task:
    from fisherfold.datasets import load_images

    found = load_images("cifar10")
    x = torch.tensor(found.train_images[:count], dtype=torch.float32).permute(0, 3, 1, 2).contiguous()
    x = (x - x.mean(dim=(0, 2, 3), keepdim=True)) / x.std(dim=(0, 2, 3), keepdim=True)
    y = torch.tensor(found.train_labels[:count].astype("int64"))

    def build() -> nn.Module:
        def block(i: int, o: int) -> list[nn.Module]:
            return [nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]

        return nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Linear(1024, 10))

    return Task("CIFAR-10, 500 images", x, y, build, steps=60, batch=count)


def run(task: Task, make: Maker, seed: int, steps: int) -> list[tuple[int, float]]:
    """The full training loss along a run."""
    torch.manual_seed(seed)
    model = task.build()
    optimizer = make(model, task.x[:64])
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for step in range(steps):
        whole = task.batch >= len(task.x)
        chosen = slice(None) if whole else torch.randint(len(task.x), (task.batch,), generator=generator)
        x, y = task.x[chosen], task.y[chosen]
        curved = isinstance(optimizer, MKFAC) and optimizer.uses_curvature
        if curved and step % RENEWAL == 0:
            with optimizer.statistics():
                loss = _backward(model, optimizer, x, y)
        else:
            loss = _backward(model, optimizer, x, y)
        if not torch.isfinite(loss):
            return [*curve, (step, float("inf"))]
        optimizer.step()
        with torch.no_grad(), preserved(model):
            curve.append((step + 1, F.cross_entropy(model(task.x), task.y).item()))
    return curve


def _backward(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def candidates() -> dict[str, dict[str, Maker]]:
    """The settings that are searched, by method."""

    def sgd(lr: float) -> Maker:
        return lambda model, _: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def sgdg(lr: float, ratio: float) -> Maker:
        return lambda model, x: SGDG(model, lr=lr, manifold_lr=ratio * lr, example_input=x)

    def kfac(lr: float, damping: float, momentum: float) -> Maker:
        shared: dict[str, Any] = {"damping": damping, "momentum": momentum, "factor_decay": 0.8}
        return lambda model, _: KFAC(model, lr=lr, **shared)

    def mkfac(lr: float, damping: float, momentum: float) -> Maker:
        shared: dict[str, Any] = {"damping": damping, "momentum": momentum, "factor_decay": 0.8, "euclidean": "kfac"}
        # KFAC's weights grow under long steps, which shortens the next ones; on spheres the cap on the angle does that
        return lambda model, x: MKFAC(model, lr=lr, manifold_lr=lr, example_input=x, max_angle=0.1, **shared)

    curved = list(itertools.product(((0.05, 0.001), (0.1, 0.001), (0.1, 0.003), (0.2, 0.003)), (0.6, 0.8)))
    return {
        "SGD": {f"lr {lr}": sgd(lr) for lr in (0.03, 0.1, 0.3, 0.7, 1.2, 2.0)},
        "SGDG": {f"lr {lr}, {r}×": sgdg(lr, r) for lr in (0.1, 0.5, 2.0) for r in (0.3, 1.0)},
        "KFAC": {f"lr {lr}, λ {d}, μ {m}": kfac(lr, d, m) for (lr, d), m in curved},
        "MKFAC": {f"lr {lr}, λ {d}, μ {m}": mkfac(lr, d, m) for (lr, d), m in curved},
    }


def steps_to(curve: list[tuple[int, float]], target: float) -> float:
    return next((step for step, loss in curve if loss <= target), float("inf"))


def compare(task: Task, quick: bool) -> None:
    print(f"\n{task.name}: {len(task.x)} samples, batch {task.batch}, {task.steps} steps")
    chosen: dict[str, tuple[str, Maker]] = {}
    goal = None
    for method, settings in candidates().items():
        scores = {}
        for name, make in settings.items():
            curve = run(task, make, 0, task.steps if method == "SGD" else task.steps // 2)
            # SGD is tuned for its final loss, the others for the steps to that loss, then for theirs
            scores[name] = (0.0 if goal is None else steps_to(curve, goal), curve[-1][1])
        best = min(scores, key=lambda key: scores[key])
        chosen[method] = (best, settings[best])
        goal = scores[best][1] if goal is None else goal
    print(f"{'method':7} {'chosen on seed 0':23} final loss         steps to SGD's final loss  share of SGD's")
    targets: dict[int, float] = {}
    for method, (name, make) in chosen.items():
        curves = {seed: run(task, make, seed, task.steps) for seed in (SEEDS[:2] if quick else SEEDS)}
        targets = targets or {seed: curve[-1][1] for seed, curve in curves.items()}
        finals = [curve[-1][1] for curve in curves.values()]
        counts = [steps_to(curve, targets[seed]) for seed, curve in curves.items()]
        share = statistics.mean(counts) / task.steps
        reached = (
            f"{statistics.mean(counts):.1f} ± {statistics.stdev(counts):.1f}" if max(counts) < math.inf else f"{counts}"
        )
        losses = f"{statistics.mean(finals):.5f} ± {statistics.stdev(finals):.5f}"
        goal_met = "met" if max(counts) <= task.steps / 2 else "missed"
        verdict = f"  goal 0.50 on every seed: {goal_met}" if method == "MKFAC" else ""
        print(f"{method:7} {name:23} {losses}  {reached:25}  {share:.2f}{verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two seeds, digits only")
    parser.add_argument("--task", choices=("digits", "cifar"), help="one task only")
    parser.add_argument("--batch", type=int, help="samples per step, drawn with replacement; all if not given")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, curvature every {RENEWAL} steps, {time.strftime('%Y-%m-%d')}")
    tasks = [] if arguments.task == "cifar" else [digits]
    if (
        arguments.task != "digits"
        and not arguments.quick
        and (Path(os.environ.get("FISHERFOLD_DATA", "")) / "cifar10_train_0.npz").is_file()
    ):
        tasks.append(cifar)
    for make in tasks:
        task = make()
        if arguments.batch:
            task = dataclasses.replace(task, batch=arguments.batch)
        compare(task, arguments.quick)


if __name__ == "__main__":
    main()
