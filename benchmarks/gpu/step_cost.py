"""The price of a training step on one GPU with CUDA graphs, over fused SGD.

VGG16-BN, WRN-16-4 and ResNet-14 at batch 128, bf16 autocast, channels last. One graph holds the
forward and backward pass and the step of the optimizer; methods take turns, the ratio to SGD is
taken within each round, and its median and range are printed. Steps that collect curvature run
eagerly and are counted with their share, one in ``--every``, of which one in ten renews the
inverses. SOAP, whose bases come from QR, and the presets of K-FAC, whose inverses change their
shapes, cannot be captured and run eagerly. On a machine without a GPU everything does, which only
shows that the script works.

Against: fused SGD, AdamW, SOAP, Muon
Takes: five minutes on an H200
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

SMOKE = (
    "--rounds 1 --steps 1 --batch 8 --networks resnet4 --out {folder}/step_cost.json",
    "--rounds 1 --steps 1 --batch 8 --networks resnet4 --every 3",
)
NETWORKS = ("vgg16bn", "wrn16_4", "resnet64")
METHODS = ("sgd", "adamw", "soap", "muon", "kfac", "mkfac", "gradient", "spectral", "natural")
CURVED = {"kfac", "mkfac", "natural"}
GOALS = {
    ("vgg16bn", "spectral"): 1.35,
    ("vgg16bn", "natural"): 1.32,
    ("wrn16_4", "spectral"): 1.15,
    ("wrn16_4", "natural"): 1.09,
}


class Method:
    """A network and its optimizer: a step in a graph, and one that collects curvature."""

    def __init__(self, network: str, name: str, x: Tensor, y: Tensor, every: int) -> None:
        torch.manual_seed(0)
        self.model = models.build(network, 100).to(x.device, memory_format=torch.channels_last)
        settings = {
            "lr": 1e-3,
            "rest_lr": 0.01,
            "weight_decay": 0.0,
            "damping": 0.1,
            "every": every,
        }
        self.optimizer = optimizers.build(
            name, self.model, x[:32], ("cifar100", network[:3]), settings
        )
        self.x = x
        self.y = y
        self.every = every if name in CURVED else 0
        for group in self.optimizer.param_groups if x.is_cuda else ():
            group.update({key: True for key in ("fused", "capturable") if key in group})
        for _ in range(3):  # curvature is collected in the second
            self.eager()
        self.replay: Callable[[], Any] = self.eager
        if x.is_cuda and name not in ("soap", "kfac", "mkfac"):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.eager()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.eager()
            self.replay = graph.replay

    def eager(self) -> None:
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.x.is_cuda):
            loss = F.cross_entropy(self.model(self.x), self.y)
        self.optimizer.zero_grad(set_to_none=not self.x.is_cuda)
        loss.backward()
        self.optimizer.step()

    def collecting(self, done: int) -> None:
        """A step that collects after so many collections: the tenth renews the inverses too."""
        for state in self.optimizer.state.values():
            if "collections" in state:
                state["collections"].fill_(done)
        first = self.optimizer.param_groups[0]
        first["steps"] = 10 * self.every
        self.optimizer.curvature.prepare(first)
        self.eager()

    def seconds(self, steps: int) -> float:
        plain = self._timed(self.replay, steps)
        if not self.every:
            return plain
        collected = self._timed(lambda: self.collecting(20), 1)
        renewed = self._timed(lambda: self.collecting(19), 1)
        return ((self.every - 1) * plain + 0.9 * collected + 0.1 * renewed) / self.every

    def _timed(self, work: Callable[[], Any], steps: int) -> float:
        if self.x.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter() if self.x.is_cuda else time.process_time()
        for _ in range(steps):
            work()
        if self.x.is_cuda:
            torch.cuda.synchronize()
        return ((time.perf_counter() if self.x.is_cuda else time.process_time()) - start) / steps


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--every", type=int, default=10, help="steps between collections of curvature"
    )
    parser.add_argument("--methods", type=names, default=METHODS)
    parser.add_argument("--networks", type=names, default=NETWORKS)
    parser.add_argument("--out", type=Path, help="where to write the milliseconds")


def main(given: Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    x = torch.randn(given.batch, 3, 32, 32, device=device).contiguous(
        memory_format=torch.channels_last
    )
    y = torch.randint(100, (given.batch,), device=device)
    on = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {on}, batch {given.batch}, curvature every {given.every}")
    taken: dict[str, dict[str, float]] = {}
    for network in given.networks:
        found = {n: Method(network, n, x, y, given.every) for n in given.methods}
        times: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(given.rounds):
            for name, method in found.items():
                times[name].append(method.seconds(given.steps))
        taken[network] = {
            name: round(1e3 * statistics.median(values), 4) for name, values in times.items()
        }
        for name, values in times.items():
            ratios = [
                value / base for value, base in zip(values, times[given.methods[0]], strict=True)
            ]
            goal = f"  goal {GOALS[network, name]}" if (network, name) in GOALS else ""
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
            print(
                f"{network:8} {name:9} {taken[network][name]:8.3f} ms  {spread}{goal}", flush=True
            )
        if given.out:
            record = {
                "torch": torch.__version__,
                "on": on,
                "batch": given.batch,
                "every": given.every,
                "milliseconds": taken,
            }
            given.out.write_text(json.dumps(record, indent=1) + "\n")
