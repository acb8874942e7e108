"""Accuracy against CPU seconds of optimizers on small networks.

CIFAR-10 shrunk to 16x16: 5,000 training images, flipped and shifted, 2,000 images of the training
file for validation, which choose one of four rates per optimizer (three for ``vit``), and 5,000
test images, used once with three seeds. Batch 64, cosine schedule to zero over all steps. ``cnn``
is a residual network whose convolutions are all followed by batch norms; ``vit`` a transformer of
four blocks on patches of four by four. The picture has the accuracy at the end of every epoch. With
``--resume`` every finished run is a line of a file, and is not run again.

Against: SGD, AdamW, SOAP, Muon, K-FAC
Takes: an hour
Page: docs/benchmarks/networks.md
"""

from __future__ import annotations

import json
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cifar.data import load_images
from benchmarks.cifar.models import Block, Mean, conv
from benchmarks.cifar.optimizers import FlatMuon, Several, Soap
from fisherfold.optim import KFAC, MKFAC, SphereOptimizer

SMOKE = (
    "--epochs 1 --seeds 2 --images 64 --picture {folder}/networks.png --resume {folder}/runs.jsonl",
    "--epochs 1 --seeds 1 --images 64 --network vit",
)

BATCH = 64
Maker = Callable[[nn.Module, float, Tensor], Any]


def images(most: int) -> dict[str, tuple[Tensor, Tensor]]:
    data = load_images("cifar10")

    def take(pixels: Any, labels: Any, part: slice) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(np.ascontiguousarray(pixels[part])).float().permute(0, 3, 1, 2) / 255
        return (F.avg_pool2d(x, 2) - 0.47) / 0.22, torch.from_numpy(labels[part].astype(np.int64))

    validation = 4 * len(data.train_labels) // 5
    return {
        "train": take(data.train_images, data.train_labels, slice(0, most)),
        "validation": take(
            data.train_images, data.train_labels, slice(validation, validation + 2 * most // 5)
        ),
        "test": take(data.test_images, data.test_labels, slice(0, most)),
    }


def cnn() -> nn.Module:
    layers: list[nn.Module] = [conv(3, 16), nn.BatchNorm2d(16), nn.ReLU()]
    for inputs, outputs, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers.append(Block(inputs, outputs, stride))
    return nn.Sequential(*layers, Mean(), nn.Linear(64, 10))


class Transformer(nn.Module):
    """Four pre-norm blocks of width 64 with four heads, on 16 patches."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, depth, nn.LayerNorm(width), enable_nested_tensor=False
        )
        for block in self.blocks.layers:  # the layers of TransformerEncoder begin as copies of one
            for module in block.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            block.self_attn._reset_parameters()
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(x).flatten(2).mT + self.place).mean(1))


def airbench_muon(model: nn.Module, lr: float, _: Tensor) -> Any:
    filters = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    others = [p for p in model.parameters() if not any(p is f for f in filters)]
    return Several(
        FlatMuon(filters, lr),
        torch.optim.SGD(others, 0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
    )


def torch_muon(model: nn.Module, lr: float, _: Tensor) -> Any:
    hidden = [p for n, p in model.named_parameters() if "blocks" in n and p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is h for h in hidden)]
    muon = torch.optim.Muon(
        hidden, lr, weight_decay=0.05, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    return Several(muon, torch.optim.AdamW(others, lr, weight_decay=0.05))


def sgd(model: nn.Module, lr: float, _: Tensor) -> Any:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4)


def spheres(**options: Any) -> Maker:
    return lambda model, lr, x: SphereOptimizer(model, lr, **options)


def adamw(model: nn.Module, lr: float, _: Tensor) -> Any:
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=0.05)


def soap(model: nn.Module, lr: float, _: Tensor) -> Any:
    return Soap(model.parameters(), lr, weight_decay=0.05)


METHODS: dict[str, dict[str, tuple[Maker, tuple[float, ...]]]] = {
    "cnn": {
        "SGD": (sgd, (0.01, 0.03, 0.1, 0.3)),
        "AdamW": (adamw, (1e-3, 3e-3, 1e-2, 3e-2)),
        "SOAP": (soap, (3e-3, 1e-2, 3e-2, 1e-1)),
        "Muon (airbench)": (airbench_muon, (0.06, 0.12, 0.24, 0.48)),
        "K-FAC": (lambda m, lr, x: KFAC(m, lr, weight_decay=5e-4), (0.03, 0.1, 0.3, 1.0)),
        "MKFAC": (
            lambda m, lr, x: MKFAC(m, 0.05, lr, weight_decay=5e-4, example_input=x),
            (0.03, 0.1, 0.3, 1.0),
        ),
        "natural angles": (spheres(direction="natural"), (0.02, 0.04, 0.08, 0.16)),
        "SphereOptimizer": (spheres(), (0.02, 0.04, 0.08, 0.16)),
    },
    "vit": {
        "SGD": (sgd, (0.03, 0.1, 0.3)),
        "AdamW": (adamw, (1e-3, 2e-3, 4e-3)),
        "SOAP": (soap, (2e-3, 4e-3, 8e-3)),
        "Muon (torch)": (torch_muon, (4e-3, 8e-3, 1.6e-2)),
        "SphereOptimizer": (
            lambda m, lr, x: SphereOptimizer(m, lr, weight_decay=0.05),
            (0.01, 0.02, 0.04),
        ),
    },
}
NETWORKS: dict[str, Callable[[], nn.Module]] = {"cnn": cnn, "vit": Transformer}


def train(
    network: str, make: Maker, lr: float, seed: int, epochs: int, data: Any, judged: str
) -> tuple[list[float], list[float]]:
    """Accuracies after each epoch, and the CPU seconds of training before them."""
    x, y = data["train"]
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    optimizer = make(model, lr, x[:32])
    own = [group["lr"] for group in optimizer.param_groups]
    steps = epochs * (len(x) // BATCH)
    generator = torch.Generator().manual_seed(seed)
    done = 0
    seconds = 0.0
    found = []
    times = []
    for _ in range(epochs):
        began = time.process_time()
        model.train()
        for batch in torch.randperm(len(x), generator=generator)[: len(x) // BATCH * BATCH].split(
            BATCH
        ):
            share = 0.5 * (1 + np.cos(np.pi * done / steps)) * min(1.0, (done + 1) / (0.1 * steps))
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = rate * share
            optimizer.zero_grad()
            try:
                F.cross_entropy(model(augmented(x[batch], generator)), y[batch]).backward()
                optimizer.step()
            except FloatingPointError:
                return [10.0] * epochs, [seconds] * epochs
            done += 1
        seconds += time.process_time() - began
        found.append(accuracy(model, *data[judged]))
        times.append(seconds)
    return found, times


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    flips = torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5
    down, right = torch.randint(5, (2,), generator=generator).tolist()
    return F.pad(torch.where(flips, x.flip(3), x), (2, 2, 2, 2))[
        :, :, down : down + 16, right : right + 16
    ]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    hits = sum(
        int((model(a).argmax(1) == b).sum())
        for a, b in zip(x.split(500), y.split(500), strict=True)
    )
    return 100 * hits / len(x)


class Runs:
    """Runs by their settings, kept as lines of a file if there is one."""

    def __init__(self, network: str, epochs: int, data: Any, path: Path | None) -> None:
        self.network = network
        self.epochs = epochs
        self.data = data
        self.path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.done = {json.dumps(key): tuple(found) for key, found in map(json.loads, lines)}

    def __call__(
        self, name: str, make: Maker, lr: float, seed: int, judged: str
    ) -> tuple[list[float], list[float]]:
        key = [self.network, self.epochs, name, lr, seed, judged]
        if json.dumps(key) not in self.done:
            found = train(self.network, make, lr, seed, self.epochs, self.data, judged)
            self.done[json.dumps(key)] = found
            if self.path:
                with self.path.open("a") as file:
                    file.write(json.dumps([key, found]) + "\n")
        return self.done[json.dumps(key)]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--network", choices=NETWORKS, default="cnn")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="methods, separated by commas")
    parser.add_argument("--resume", type=Path, help="a file with the runs that are done")
    parser.add_argument("--images", type=int, default=5000, help="for training (5000)")
    parser.add_argument("--picture", type=Path)


def main(given: Namespace) -> None:
    run = Runs(given.network, given.epochs, images(given.images), given.resume)
    curves = {}
    print(
        f"torch {torch.__version__}, {given.network}, {given.epochs} epochs, {given.seeds} seeds",
        flush=True,
    )
    for name, (make, rates) in METHODS[given.network].items():
        if given.only and name not in given.only.split(","):
            continue
        trials = {lr: run(name, make, lr, 100, "validation")[0][-1] for lr in rates}
        best = max(trials, key=lambda lr: trials[lr])
        runs = [run(name, make, best, seed, "test") for seed in range(given.seeds)]
        last = [found[-1] for found, _ in runs]
        spread = statistics.stdev(last) if len(last) > 1 else 0.0
        accuracies = [statistics.mean(v) for v in zip(*(f for f, _ in runs), strict=True)]
        seconds = [statistics.mean(v) for v in zip(*(t for _, t in runs), strict=True)]
        tried = ", ".join(f"{lr:g}: {value:.1f}" for lr, value in trials.items())
        line = f"{name:16} {accuracies[-1]:5.1f} ± {spread:.1f} % in {seconds[-1]:5.1f} s"
        print(f"{line}   (validation {tried})", flush=True)
        curves[name] = list(zip(seconds, accuracies, strict=True))
        if given.picture:
            draw(curves, given.picture)


def draw(curves: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    panel = figure.subplots()
    for name, points in sorted(
        curves.items(), key=lambda item: -item[1][-1][1]
    ):  # the legend from best to worst
        ours = name == "SphereOptimizer"
        label = f"{name}, {points[-1][1]:.1f} %"
        panel.plot(
            *zip(*points, strict=True),
            "o-",
            ms=3,
            lw=2.8 if ours else 1.3,
            label=label,
            zorder=3 if ours else 2,
        )
    panel.set(xlabel="CPU seconds of training", ylabel="test accuracy, %", xlim=(0, None))
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
