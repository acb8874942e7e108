"""Train one network on CIFAR and log every epoch; resumes from its checkpoint.

Settings are judged on validation images (a tenth of the training images) unless ``--split test``.
On a GPU the forward and backward pass run in bf16 autocast and channels-last memory.

Against: any optimizer of optimizers.py
Takes: minutes to hours on a GPU
Page: docs/reproduction/cifar.md
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import fisherfold
from benchmarks.cifar import models, optimizers
from benchmarks.cifar.data import Pool

SMOKE = (
    "cifar10 resnet4 spectral --epochs 2 --images 40 --batch 10 --out {folder}/spectral.jsonl",
    "cifar10 resnet4 sgd --epochs 1 --images 40 --batch 10 --out {folder}/sgd.jsonl",
)


def options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("dataset", choices=("cifar10", "cifar100"))
    add("model", help="vgg16bn, wrn16_4 or resnet64")
    add("optimizer", help="a name of optimizers.py")
    add(
        "--lr",
        type=float,
        default=0.02,
        help="the rate, or the angle in radians of optimizers on spheres",
    )
    add("--rest-lr", type=float, default=0.1, help="the rate of what is not on spheres")
    add("--weight-decay", type=float, default=5e-4)
    add("--damping", type=float, default=2.0)
    add("--every", type=int, default=10, help="steps between collections of curvature")
    add("--smoothing", type=float, default=0.0)
    add("--epochs", type=int, default=15)
    add("--batch", type=int, default=128)
    add("--seed", type=int, default=0)
    add("--images", type=int, help="only so many training images")
    add("--split", choices=("validation", "test"), default="validation")
    add("--device", help="a CUDA device where there is one")
    add("--checkpoint-every", type=int, default=10, help="epochs between checkpoints; 0 for none")
    add("--out", required=True, help="the log")


def main(given: Namespace) -> None:
    out = Path(given.out)
    saved = Path(given.out).with_suffix(".checkpoint")
    if ended(out):
        return
    given.device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    lines = out.read_text().splitlines() if out.exists() else []
    torch.manual_seed(given.seed)
    pool = Pool(given.dataset, device=given.device, split=given.split, images=given.images)
    given.batch = min(given.batch, len(pool))
    network = models.build(given.model, pool.classes).to(
        given.device, memory_format=torch.channels_last
    )
    task = (given.dataset, given.model[:3])
    settings = vars(given)
    example = pool.normalised(pool.padded[:32, 4:36, 4:36])
    per = len(pool) // given.batch
    given.steps = per * given.epochs
    optimizer = optimizers.build(given.optimizer, network, example, task, settings)
    own = [group["lr"] for group in optimizer.param_groups]
    start = 0
    if lines and saved.exists():
        state = torch.load(saved, weights_only=True, map_location=given.device)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"]
        lines = lines[: 1 + state["epoch"]]
    else:
        lines = [json.dumps({**settings, **provenance(given.device)})]
    for epoch in range(start, given.epochs):
        began = time.perf_counter()
        images, labels = pool.epoch(given.seed, epoch)
        stage = sum(epoch >= round(share * given.epochs) for share in optimizers.MILESTONES)
        if given.optimizer.startswith("paper") and (
            epoch == 0
            or stage
            > sum(epoch - 1 >= round(share * given.epochs) for share in optimizers.MILESTONES)
        ):
            optimizers.paper_stage(optimizer, task, stage)
            if given.optimizer == "paper-mkfac":
                pairs = batches(pool, images, labels, given.batch)
                with autocast(given.device):
                    optimizer.refresh(pairs, functional.cross_entropy, sampler="mc")
        loss = train_epoch(network, optimizer, pool, images, labels, given, epoch, own, per)
        accuracy = judge(network, pool, given.device)
        entry = {
            "epoch": epoch + 1,
            "accuracy": accuracy,
            "train_loss": loss,
            "seconds": time.perf_counter() - began,
        }
        lines.append(json.dumps(entry))
        if not math.isfinite(loss) or epoch + 1 == given.epochs:
            lines.append(json.dumps({"ended": "done" if math.isfinite(loss) else "diverged"}))
        write(out, "\n".join(lines) + "\n")
        if "ended" in lines[-1]:
            saved.unlink(missing_ok=True)
            break
        if given.checkpoint_every and (epoch + 1) % given.checkpoint_every == 0:
            state = {
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch + 1,
            }
            torch.save(state, f"{saved}.new")
            os.replace(f"{saved}.new", saved)
    print(f"{out.stem}: {lines[-2]}")


def ended(out: Path) -> bool:
    """Whether the log is that of a finished run."""
    return out.exists() and "ended" in json.loads(out.read_text().splitlines()[-1])


def train_epoch(
    network: nn.Module,
    optimizer: Any,
    pool: Pool,
    images: Any,
    labels: Any,
    given: Any,
    epoch: int,
    own: list[float],
    per: int,
) -> float:
    network.train()
    total = torch.zeros((), device=given.device)
    for step in range(per):
        part = slice(step * given.batch, (step + 1) * given.batch)
        if not given.optimizer.startswith(("paper", *optimizers.OWN_RATES)):
            share = optimizers.factor((epoch + step / per) / given.epochs)
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = rate * max(share, 1e-6)
        with autocast(given.device):
            outputs = network(pool.normalised(images[part]))
            loss = functional.cross_entropy(outputs, labels[part], label_smoothing=given.smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return float(total) / per


@torch.no_grad()
def judge(network: nn.Module, pool: Pool, device: str) -> float:
    network.eval()
    hits = 0
    for start in range(0, len(pool.judged), 1000):
        with autocast(device):
            outputs = network(pool.normalised(pool.judged[start : start + 1000]))
        hits += int((outputs.argmax(1) == pool.judged_labels[start : start + 1000]).sum())
    return round(100 * hits / len(pool.judged), 3)


def batches(pool: Pool, images: Any, labels: Any, size: int, count: int = 50) -> Any:
    for start in range(0, min(count * size, len(images) - size + 1), size):
        yield pool.normalised(images[start : start + size]), labels[start : start + size]


def autocast(device: str) -> Any:
    return (
        torch.autocast("cuda", dtype=torch.bfloat16)
        if device == "cuda"
        else contextlib.nullcontext()
    )


def provenance(device: str) -> dict[str, str]:
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {
        "date": now,
        "on": name,
        "torch": torch.__version__,
        "fisherfold": fisherfold.__version__,
    }


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    os.replace(new, path)
