"""A GPT on bytes: the loss after some steps, every optimizer with as many rates.

Bytes of the Python standard library's sources, in the order of their names; the last 5 % judge.
Batches of 64 sequences, bf16 on a GPU, linear warm-up over a tenth of the steps and linear decay to
zero. ``--size char`` is a smaller network for a CPU. ``drop-in`` is
``SphereOptimizer(model, lr, total_steps=...)``.

Against: AdamW, Muon in Moonlight's form and SOAP
Takes: three minutes on an H200
Page: docs/benchmarks/networks.md
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks._common import names
from benchmarks.cifar import models, optimizers
from benchmarks.cifar.run_plan import share_device
from benchmarks.cifar.train import autocast

SMOKE = "--size char --steps 4 --batch 4 --methods adamw,drop-in --trials 1 --bytes 40000"
# width, depth and length of sequences
SIZES = {"byte": (256, 4, 128), "char": (128, 3, 64)}
GRIDS: dict[str, tuple[float, ...]] = {
    "soap": (3e-3, 6e-3, 1.5e-3),
    "drop-in": (0.03, 0.02, 0.045, 0.06),
    "muon": (6e-3, 1.2e-2, 3e-3, 2.4e-2),
    "adamw": (2e-3, 5e-3, 1e-3, 1e-2),
}
DECAY = 0.05


def options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--size", choices=list(SIZES), default="byte")
    add("--steps", type=int, default=2000)
    add("--batch", type=int, default=64)
    add("--methods", type=names, default=list(GRIDS))
    add("--trials", type=int, default=3, help="rates per method")
    add("--seeds", type=int, default=1)
    add("--bytes", type=int, default=6_000_000)
    add("--processes", type=int, default=1)
    add("--mps", action="store_true", help="start the control daemon of MPS")
    add("--out", type=Path, help="a file that gets a line for every run as it ends")


def read(count: int) -> bytes:
    """The sources of the standard library."""
    folder = Path(os.__file__).parent
    paths = [*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))]
    return b"".join(path.read_bytes() for path in paths if "site-packages" not in path.parts)[
        :count
    ]


def run(job: tuple[str, float, int, Namespace]) -> dict[str, Any]:
    """Train once and return the loss on the bytes that judge."""
    method, lr, seed, given = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, depth, length = SIZES[given.size]
    text = torch.from_numpy(np.frombuffer(read(given.bytes), np.uint8).copy()).long().to(device)
    cut = int(0.95 * len(text))
    model = models.GPT(width, depth, length).to(device)
    settings = {"lr": lr, "weight_decay": DECAY, "rest_lr": lr, "every": 10, "damping": 0.1}
    settings["steps"] = given.steps
    example = text[: 2 * length].view(2, length)
    optimizer = optimizers.build(method, model, example, ("bytes", "gpt"), settings)
    own = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(seed)
    began = time.perf_counter()
    for step in range(given.steps):
        if method not in optimizers.OWN_RATES:
            share = optimizers.factor((step + 1) / (given.steps + 1))
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = rate * share
        starts = torch.randint(0, cut - length - 1, (given.batch, 1), generator=generator)
        x = text[(starts + torch.arange(length + 1)).to(device)]
        with autocast(device):
            logits = model(x[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = {"method": method, "lr": lr, "seed": seed, "steps": given.steps, "size": given.size}
    judged = judge(model, text[cut:], length, given.batch)
    return found | {"loss": round(judged, 4), "seconds": round(time.perf_counter() - began, 1)}


@torch.no_grad()
def judge(model: torch.nn.Module, text: Tensor, length: int, batch: int) -> float:
    """The mean loss in nats per byte."""
    count = (len(text) - 1) // length
    x = text[: count * length].view(count, length)
    y = text[1 : count * length + 1].view(count, length)
    total = 0.0
    for part in torch.arange(count, device=text.device).split(batch):
        with autocast(text.device.type):
            logits = model(x[part])
        total += float(
            F.cross_entropy(logits.flatten(0, 1).float(), y[part].flatten(), reduction="sum")
        )
    return total / (count * length)


def main(given: Namespace) -> None:
    if given.mps:
        share_device()
    jobs = [
        (method, lr, seed, given)
        for method, seed in itertools.product(given.methods, range(given.seeds))
        for lr in GRIDS[method][: given.trials]
    ]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for row in pool.imap_unordered(run, jobs):
            print(json.dumps(row), flush=True)
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
