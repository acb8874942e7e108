"""The price of a training step on one GPU, over fused SGD in the same process.

Batch 128, bf16 autocast, channels last. ``graph``: forward pass, backward pass and step in one CUDA
graph; ``eager``: as a user's loop. Methods take turns, the ratio to SGD of the same mode is taken
within each round, and its median and range are printed, with the bytes of the optimizer's state
per parameter. SOAP, whose bases come from QR, runs eagerly alone. On a machine without a GPU CPU
seconds are counted and nothing is captured.

Against: SGD, AdamW, Muon and SOAP
Takes: two minutes on an H200
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

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks._common import names
from benchmarks.cifar import models, optimizers

SMOKE = "--networks resnet4 --batch 8 --rounds 1 --steps 1"
NETWORKS = ["vgg16bn", "resnet64", "wrn16_4", "vit256_6"]
METHODS = ["sgd", "drop-in", "muon", "adamw", "soap"]
UNCAPTURED = {"soap"}
GOALS = {
    ("vgg16bn", "graph"): 1.25,
    ("resnet64", "graph"): 1.10,
    ("wrn16_4", "graph"): 1.12,
    ("vgg16bn", "eager"): 1.10,
    ("resnet64", "eager"): 1.10,
    ("wrn16_4", "eager"): 1.10,
}


class Method:
    """A network and its optimizer: a step, eager or in a graph."""

    def __init__(self, network: str, name: str, mode: str, x: Tensor, y: Tensor) -> None:
        torch.manual_seed(0)
        self.model = models.build(network, 100).to(x.device, memory_format=torch.channels_last)
        settings = {"lr": 1e-3, "rest_lr": 0.01, "weight_decay": 0.0, "every": 10, "damping": 0.1}
        task = ("cifar100", network[:3])
        self.optimizer = optimizers.build(name, self.model, x[:32], task, settings)
        self.x = x
        self.y = y
        for group in self.optimizer.param_groups if x.is_cuda else ():
            group.update({key: True for key in ("fused", "capturable") if key in group})
        for _ in range(3):
            self.eager()
        self.replay: Callable[[], Any] = self.eager
        if mode == "graph":
            self.replay = self.captured()

    def captured(self) -> Callable[[], Any]:
        """A step in a CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.eager()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.eager(set_to_none=False)
        return graph.replay

    def eager(self, *, set_to_none: bool = True) -> None:
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.x.is_cuda):
            loss = F.cross_entropy(self.model(self.x), self.y)
        self.optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        self.optimizer.step()

    def seconds(self, steps: int) -> float:
        clock = time.perf_counter if self.x.is_cuda else time.process_time
        if self.x.is_cuda:
            torch.cuda.synchronize()
        start = clock()
        for _ in range(steps):
            self.replay()
        if self.x.is_cuda:
            torch.cuda.synchronize()
        return (clock() - start) / steps

    def state_bytes(self) -> float:
        """The size of the optimizer's state per parameter."""
        parts = getattr(self.optimizer, "parts", (self.optimizer,))
        found = [t for part in parts for state in part.state.values() for t in _tensors(state)]
        size = sum(t.numel() * t.element_size() for t in found)
        return size / sum(p.numel() for p in self.model.parameters())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for each in value for t in _tensors(each)] if isinstance(value, list) else []


def options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=int, default=9)
    add("--steps", type=int, default=50)
    add("--batch", type=int, default=128)
    add("--methods", type=names, default=METHODS)
    add("--networks", type=names, default=NETWORKS)
    add("--modes", type=names, default=["graph", "eager"])
    add("--out", type=Path, help="where to write the milliseconds")


def main(given: Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    modes = given.modes if device == "cuda" else ["eager"]
    torch.backends.cudnn.benchmark = True
    x = torch.randn(given.batch, 3, 32, 32, device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(100, (given.batch,), device=device)
    on = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {on}, batch {given.batch}")
    record: dict[str, Any] = {"torch": torch.__version__, "on": on, "batch": given.batch}
    for mode in modes:
        for network in given.networks:
            taken = measured(given, network, mode, x, y)
            key = "milliseconds" if mode == modes[0] else f"milliseconds, {mode}"
            record.setdefault(key, {})[network] = taken
            if given.out:
                given.out.write_text(json.dumps(record, indent=1) + "\n")


def measured(given: Namespace, network: str, mode: str, x: Tensor, y: Tensor) -> dict[str, float]:
    """Milliseconds of a step by method; prints the ratios to the first."""
    wanted = [m for m in given.methods if mode == "eager" or m not in UNCAPTURED]
    found = {name: Method(network, name, mode, x, y) for name in wanted}
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(given.rounds):
        for name, method in found.items():
            times[name].append(method.seconds(given.steps))
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, times[wanted[0]], strict=True)]
        goal = GOALS.get((network, mode)) if name == "drop-in" else None
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
        size = f"{found[name].state_bytes():5.2f} bytes of state per parameter"
        milliseconds = 1e3 * statistics.median(values)
        print(
            f"{mode:5} {network:8} {name:9} {milliseconds:8.3f} ms  {spread}, {size}"
            + (f", goal {goal}" if goal else ""),
            flush=True,
        )
    return {name: round(1e3 * statistics.median(values), 4) for name, values in times.items()}
