"""airbench94 with only the optimizer of its filters exchanged, paired seeds.

The recipe of arXiv 2404.00498 in its form with Muon, written anew: a whitening convolution from
eigenvectors of patches (only its bias is trained, for three epochs), three groups of two
convolutions started as identities, batch norms without gains, GELU, label smoothing 0.2, flips that
alternate by epoch, shifts by two pixels, batch 2,000, rates that fall linearly, and six views at
test time. ``--tune`` judges the rates on 5,000 images left out of training; without it the test
images judge. All parameters but the filters have its SGD in every row. Seconds are those of a run
alone only with ``--processes 1``; more share the GPU (start the MPS control daemon first).

Against: Muon in airbench's form
Takes: two minutes on an H200
Page: docs/benchmarks/networks.md
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cifar.data import load_images
from benchmarks.cifar.optimizers import FlatMuon
from benchmarks.cifar.run_plan import share_device
from fisherfold.optim import SphereOptimizer

SMOKE = (
    "--quick --epochs 1 --seeds 2 --lr muon=0.24,spectral=0.04",
    "--quick --epochs 1 --tune",
)
GRIDS = {"muon": (0.12, 0.24, 0.48), "spectral": (0.03, 0.06, 0.12)}
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
BIAS_LR = 0.053
HEAD_LR = 0.67
DECAY = 2e-6
WHITE_EPOCHS = 3


def norm(channels: int) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


def filters(inputs: int, outputs: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight[:inputs])
    return layer


class Net(nn.Module):
    def __init__(self, images: Tensor, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.white = nn.Conv2d(3, 24, 2)
        with torch.no_grad():
            patches = (
                images[:5000]
                .unfold(2, 2, 1)
                .unfold(3, 2, 1)
                .permute(0, 2, 3, 1, 4, 5)
                .reshape(-1, 12)
                .double()
            )
            values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
            half = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2).float()
            self.white.weight.copy_(torch.cat([half, -half]))
            self.white.bias.zero_()
        self.white.weight.requires_grad_(False)
        layers: list[nn.Module] = [nn.GELU()]
        inputs = 24
        for width in widths:
            layers += [filters(inputs, width), nn.MaxPool2d(2), norm(width), nn.GELU()]
            layers += [filters(width, width), norm(width), nn.GELU()]
            inputs = width
        self.body = nn.Sequential(*layers, nn.MaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(inputs, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.white(x))) / 9


def epoch_images(x: Tensor, first: Tensor, epoch: int, generator: torch.Generator) -> Tensor:
    """Shifted by up to two pixels, and flipped in every other epoch, half of the images in turn."""
    padded = F.pad(x, (2, 2, 2, 2), "reflect")
    shifts = torch.randint(5, (len(x), 2), generator=generator).to(x.device)
    steps = torch.arange(32, device=x.device)
    rows = (shifts[:, :1] + steps)[:, None, :, None]
    columns = (shifts[:, 1:] + steps)[:, None, None, :]
    flipped = (first if epoch % 2 == 0 else ~first)[:, None, None, None]
    columns = torch.where(flipped, columns.flip(3), columns)
    samples = torch.arange(len(x), device=x.device)
    channels = torch.arange(3, device=x.device)
    return padded[samples[:, None, None, None], channels[None, :, None, None], rows, columns]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """With six views: the image and two shifts by a pixel, each with its mirror image."""
    model.eval()
    padded = F.pad(x, (1, 1, 1, 1), "reflect")
    views = ((0.5, x), (0.25, padded[:, :, :32, :32]), (0.25, padded[:, :, 2:, 2:]))
    hits = 0
    for part in torch.arange(len(x), device=x.device).split(2000):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            logits = sum(
                w * (model(v[part]).float() + model(v[part].flip(3)).float()) for w, v in views
            )
        hits += int((logits.argmax(1) == y[part]).sum())
    return 100 * hits / len(x)


def train(
    name: str, lr: float, seed: int, data: tuple[Tensor, ...], given: Namespace
) -> tuple[float, float]:
    x, y, judged, judged_labels = data
    torch.manual_seed(seed)
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    model = Net(x, (8, 8, 8) if given.quick else (64, 256, 256)).to(
        x.device, memory_format=torch.channels_last
    )
    weights = [m.weight for m in model.body.modules() if isinstance(m, nn.Conv2d)]
    biases = [m.bias for m in model.body.modules() if isinstance(m, nn.BatchNorm2d)]
    groups = [([model.white.bias], BIAS_LR), (biases, BIAS_LR), ([model.head.weight], HEAD_LR)]
    batch = min(given.batch, len(x))
    rest = torch.optim.SGD(
        [{"params": p, "lr": rate, "weight_decay": DECAY * batch / rate} for p, rate in groups],
        momentum=0.85,
        nesterov=True,
    )
    if name == "muon":
        own: torch.optim.Optimizer = FlatMuon(weights, lr)
    else:
        own = SphereOptimizer(
            [{"params": weights, "rule": "spheres"}], lr, direction=name, momentum=given.momentum
        )
    every = [*own.param_groups, *rest.param_groups]
    rates = [group["lr"] for group in every]
    per = len(x) // batch
    total = given.epochs * per
    done = 0
    first = torch.rand(len(x), generator=generator).to(x.device) < 0.5
    for epoch in range(given.epochs):
        model.train()
        images = epoch_images(x, first, epoch, generator)
        for part in (
            torch.randperm(len(x), generator=generator).to(x.device)[: per * batch].split(batch)
        ):
            for group, rate in zip(every, rates, strict=True):
                length = WHITE_EPOCHS * per if group["params"][0] is model.white.bias else total
                group["lr"] = rate * max(1 - done / length, 0.0)
            own.zero_grad()
            rest.zero_grad()
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                loss = F.cross_entropy(model(images[part]), y[part], label_smoothing=0.2)
            loss.backward()
            own.step()
            rest.step()
            done += 1
    found = accuracy(model, judged, judged_labels)
    return found, time.perf_counter() - began


DATA: tuple[Tensor, ...] = ()


def prepare(given: Namespace) -> None:
    global DATA
    DATA = load(given, "cuda" if torch.cuda.is_available() else "cpu")


def run(job: tuple[str, float, int, Namespace]) -> tuple[float, float]:
    *what, given = job
    return train(*what, DATA, given)


def load(given: Namespace, device: str) -> tuple[Tensor, ...]:
    data = load_images("cifar10", test=not given.tune)
    parts = [data.train_images, data.train_labels, data.test_images, data.test_labels]
    if given.tune:
        cut = len(parts[0]) - len(parts[0]) // 10
        parts = [parts[0][:cut], parts[1][:cut], parts[0][cut:], parts[1][cut:]]
    if given.quick:
        parts = [part[:400] for part in parts]
    mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, DEVIATION))
    return tuple(
        torch.from_numpy(p).long().to(device)
        if p.ndim == 1
        else ((torch.from_numpy(p).permute(0, 3, 1, 2) / 255 - mean) / deviation).to(device)
        for p in parts
    )


def options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--lr", default="muon=0.24,spectral=0.06")
    add("--momentum", type=float, default=0.6)
    add("--epochs", type=int, default=8)
    add("--batch", type=int, default=2000)
    add("--seeds", type=int, default=50)
    add(
        "--tune", action="store_true", help="three rates each on a tenth of the images, three seeds"
    )
    add("--processes", type=int, default=1, help="that share the GPU")
    add("--mps", action="store_true", help="start the control daemon of MPS")
    add("--data", help="the folder of the CIFAR files, in place of FISHERFOLD_DATA")
    add("--out", type=Path, help="a file that gets a line for every run as it ends")
    add("--quick", action="store_true", help="400 images and a tiny network")


def main(given: Namespace) -> None:
    if given.data:
        os.environ["FISHERFOLD_DATA"] = given.data
    if given.mps:
        share_device()
    chosen = dict(pair.split("=") for pair in given.lr.split(","))
    base: list[float] = []
    settings = (
        [(n, lr) for n, grid in GRIDS.items() for lr in grid]
        if given.tune
        else list(chosen.items())
    )
    seeds = range(3 if given.tune else given.seeds)
    with multiprocessing.get_context("spawn").Pool(given.processes, prepare, (given,)) as pool:
        jobs = [(name, float(lr), seed, given) for name, lr in settings for seed in seeds]
        results = []
        for (name, lr, seed, _), found in zip(jobs, pool.imap(run, jobs), strict=True):
            results.append(found)
            if given.out:
                row = {"method": name, "lr": lr, "seed": seed, "accuracy": found[0]}
                with given.out.open("a") as file:
                    file.write(json.dumps(row | {"seconds": found[1]}) + "\n")
    for index, (name, lr) in enumerate(settings):
        runs = results[index * len(seeds) : (index + 1) * len(seeds)]
        found = [a for a, _ in runs]
        base = base or found
        gaps = [a - b for a, b in zip(found, base, strict=True)]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
        over = f"over the first {statistics.mean(gaps):+.3f} ± {error:.3f}"
        seconds = statistics.median(took for _, took in runs)
        print(
            f"{name:9} {lr:5} {statistics.mean(found):.2f} %, {over}, {seconds:.2f} s a run",
            flush=True,
        )
