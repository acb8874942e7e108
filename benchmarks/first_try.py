"""Networks at the first try: our defaults against the best of three rates of others, no schedules.

Scripts as a newcomer writes them, with a constant rate: digits for 2 and for 8 epochs (a
convolutional network), and on CIFAR-10 shrunk to 16x16 (3,000 images, 4 epochs, batches of 64) a
residual network, a vision transformer and a ConvNeXt; a GPT on bytes of the standard library for
250 steps. Validation accuracy in percent (the loss in nats for the GPT), mean over seeds. Ours is
``SphereOptimizer(model)`` and nothing else, with ``average=True`` evaluated by ``averaged()``, and
with ``total_steps``.

Against: AdamW, SGD, Muon and SOAP
Takes: ten minutes
Page: docs/benchmarks/networks.md
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._common import names, show, table
from benchmarks.cifar import models
from benchmarks.cifar.data import load_images
from benchmarks.cifar.optimizers import Muon, Several, Soap
from benchmarks.gpu.gpt import read
from fisherfold.optim import SphereOptimizer
from fisherfold.optim.roles import findings_of

SMOKE = "--tasks digits2,gpt --images 64 --steps 3 --rates 1"
BATCH = 64
DECAY = 0.01
RATES = {
    "AdamW": (3e-3, 1e-2, 1e-3),
    "SGD": (0.1, 0.03, 0.3),
    "Muon": (1e-2, 3e-3, 3e-2),
    "SOAP": (1e-2, 3e-3, 3e-2),
}
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours+average": {"average": True},
    "ours+total_steps": {"total_steps": 0},
}


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, layer norm, two pointwise maps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


def convnext(width: int = 32) -> nn.Module:
    blocks = (ConvNeXtBlock(width) for _ in range(3))
    return nn.Sequential(
        nn.Conv2d(3, width, 2, 2), *blocks, models.Mean(), nn.LayerNorm(width), nn.Linear(width, 10)
    )


def residual() -> nn.Module:
    layers: list[nn.Module] = [models.conv(3, 16), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [models.Block(16, 32, 2), models.Block(32, 64, 2)]
    return nn.Sequential(*layers, models.Mean(), nn.Linear(64, 10))


class ViT(nn.Module):
    """Three blocks on 16 patches."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.Sequential(*(models.TransformerBlock(width, 4) for _ in range(3)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patch(x).flatten(2).mT + self.place)).mean(1))


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@cache
def digits() -> tuple[Tensor, ...]:
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 0.6
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1200]], y[order[:1200]], x[order[1200:]], y[order[1200:]]


@cache
def cifar() -> tuple[Tensor, ...]:
    data = load_images("cifar10", test=False)

    def take(part: slice) -> tuple[Tensor, Tensor]:
        pixels = np.ascontiguousarray(data.train_images[part])
        x = torch.from_numpy(pixels).float().permute(0, 3, 1, 2) / 255
        labels = torch.from_numpy(data.train_labels[part].astype(np.int64))
        return (F.avg_pool2d(x, 2) - 0.47) / 0.22, labels

    return *take(slice(0, 3000)), *take(slice(-2000, None))


def images(load: Callable[[], tuple[Tensor, ...]], epochs: int, given: Namespace) -> Any:
    """Batches of a classification, and a judge of a model."""
    x, y, judged, labels = load()
    x = x[: given.images]
    y = y[: given.images]

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            for part in torch.randperm(len(x), generator=generator).split(BATCH):
                flips = torch.rand(len(part), 1, 1, 1, generator=generator) < 0.5
                yield torch.where(flips & (x.shape[1] == 3), x[part].flip(3), x[part]), y[part]

    def judge(model: nn.Module) -> float:
        parts = zip(judged.split(500), labels.split(500), strict=True)
        hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
        return 100 * hits / len(labels)

    return batches, judge, x


def text(steps: int, given: Namespace) -> Any:
    """Batches of bytes, and a judge."""
    tokens = torch.frombuffer(bytearray(read(600_000)), dtype=torch.uint8).long()
    cut = len(tokens) - 64 * 200

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(min(steps, given.steps)):
            starts = torch.randint(cut - 65, (16, 1), generator=generator)
            rows = tokens[starts + torch.arange(65)]
            yield rows[:, :-1], rows[:, 1:]

    def judge(model: nn.Module) -> float:
        rows = tokens[cut:].view(-1, 64)
        logits = model(rows[:, :-1])
        return -float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))

    return batches, judge, tokens[:128].view(2, 64)


TASKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "digits2": (small_cnn, partial(images, digits, 2)),
    "digits8": (small_cnn, partial(images, digits, 8)),
    "cnn": (residual, partial(images, cifar, 4)),
    "vit": (ViT, partial(images, cifar, 4)),
    "convnext": (convnext, partial(images, cifar, 4)),
    "gpt": (partial(models.GPT, 64, 2, 64), partial(text, 250)),
}


def build(method: str, rate: float, model: nn.Module, steps: int, options: dict[str, Any]) -> Any:
    """An optimizer as a newcomer makes it."""
    if method == "AdamW":
        return torch.optim.AdamW(model.parameters(), rate, weight_decay=DECAY)
    if method == "SGD":
        return torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-4)
    if method == "SOAP":
        return Soap(model.parameters(), rate, weight_decay=DECAY)
    if method == "Muon":
        found = findings_of(model)
        hidden = [p for n, p in model.named_parameters() if found[n].role == "hidden"]
        others = [p for n, p in model.named_parameters() if found[n].role != "hidden"]
        rest = torch.optim.AdamW(others, rate, betas=(0.9, 0.99), weight_decay=DECAY)
        return Several(Muon(hidden, rate, decay=DECAY), rest)
    own = dict(OURS[method])
    if "total_steps" in own:
        own["total_steps"] = steps
    return SphereOptimizer(model, **{**own, **options})


def run(task: str, method: str, rate: float, seed: int, given: Namespace) -> float:
    """Train once and judge."""
    make, prepare = TASKS[task]
    batches, judge, inputs = prepare(given)
    torch.manual_seed(seed)
    model = make()
    steps = sum(1 for _ in batches(seed))
    optimizer = build(method, rate, model, steps, given.own)
    for step, (x, y) in enumerate(batches(seed)):
        if step == given.steps:
            break
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    averaged: Any = contextlib.nullcontext()
    if isinstance(optimizer, SphereOptimizer) and optimizer.average:
        averaged = optimizer.averaged(inputs.split(BATCH))
    with averaged, torch.no_grad():
        model.eval()
        return judge(model)


def options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--tasks", type=names, default=list(TASKS))
    add("--methods", type=names, default=[])
    add("--rates", type=int, default=3, help="of the peers")
    add("--seeds", type=int, default=1)
    add("--images", type=int, default=100_000)
    add("--steps", type=int, default=100_000)
    add("--own", type=json.loads, default={}, help="options of ours, as JSON")
    add("--out", type=Path, help="a file that gets a line for every run")


def main(given: Namespace) -> None:
    methods = given.methods or [*RATES, *OURS]
    made = table("Validation accuracy, %, or -loss", ["task", *methods])
    for task in given.tasks:
        cells = []
        for method in methods:
            rates = RATES.get(method, (0.0,))[: given.rates]
            found: dict[float, list[float]] = {rate: [] for rate in rates}
            for rate, seed in itertools.product(rates, range(given.seeds)):
                found[rate].append(run(task, method, rate, seed, given))
                if given.out:
                    row = {"task": task, "method": method, "rate": rate, "seed": seed}
                    with given.out.open("a") as file:
                        file.write(json.dumps(row | {"value": found[rate][-1]}) + "\n")
            best = max(found, key=lambda rate: statistics.fmean(found[rate]))
            shown = f"{statistics.fmean(found[best]):.{1 if task != 'gpt' else 3}f}"
            cells.append(shown + (f" ({best:g})" if method in RATES else ""))
        made.add_row(task, *cells)
        print(task, dict(zip(methods, cells, strict=True)), flush=True)
    show(made)
