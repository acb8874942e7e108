"""The price of a training step on one GPU with CUDA graphs, over fused SGD, in one process.

    PYTHONPATH=src python benchmarks/gpu/step_cost.py [--quick]

VGG16-BN and WRN-16-4 at batch 128, bf16 autocast, channels last. One graph holds the forward and backward pass and the
step of the optimizer; methods take turns, the ratio to SGD is taken within each round, and its median and range are
printed. Steps that collect curvature run eagerly and are counted with their share (one in ``--every``). On a machine
without a GPU everything runs eagerly, which only shows that the script works.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fisherfold.optim import MKFAC, SphereOptimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "cifar"))
import models

GOALS = {
    ("vgg16bn", "spectral"): 1.35,
    ("vgg16bn", "natural"): 1.32,
    ("wrn16_4", "spectral"): 1.15,
    ("wrn16_4", "natural"): 1.09,
}


def optimizers(model: nn.Module, x: Tensor, every: int, name: str) -> Any:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True, fused=x.is_cuda)
    if name == "MKFAC":
        return MKFAC(model, 0.01, 0.01, every=every, example_input=x)
    return SphereOptimizer(model, 1e-3, direction=name, rest="sgd", rest_lr=0.01, every=every, example_input=x)


class Method:
    """A network and its optimizer: a step in a graph, and one that collects curvature."""

    def __init__(self, network: str, name: str, x: Tensor, y: Tensor, every: int) -> None:
        torch.manual_seed(0)
        self.model = models.build(network, 100).to(x.device, memory_format=torch.channels_last)
        self.optimizer, self.x, self.y = optimizers(self.model, x[:32], every, name), x, y
        self.every = every if name in {"natural", "MKFAC"} else 0
        for _ in range(3):  # curvature is collected in the second
            self.eager()
        self.replay: Callable[[], Any] = self.eager
        if x.is_cuda:
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

    def collecting(self) -> None:
        self.optimizer.param_groups[0]["steps"] = 10 * self.every - 1
        self.optimizer.curvature.prepare(10 * self.every)
        self.eager()
        self.optimizer.curvature.prepare(10 * self.every + 1)

    def seconds(self, steps: int) -> float:
        plain = self._timed(self.replay, steps)
        if not self.every:
            return plain
        return ((self.every - 1) * plain + self._timed(self.collecting, 2)) / self.every

    def _timed(self, work: Callable[[], Any], steps: int) -> float:
        if self.x.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter() if self.x.is_cuda else time.process_time()
        for _ in range(steps):
            work()
        if self.x.is_cuda:
            torch.cuda.synchronize()
        return ((time.perf_counter() if self.x.is_cuda else time.process_time()) - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--every", type=int, default=100, help="steps between collections of curvature")
    parser.add_argument("--quick", action="store_true", help="a tiny network and few steps")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.steps, given.batch = 2, 2, 8
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    x = torch.randn(given.batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(100, (given.batch,), device=device)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, {given}")
    for network in ("resnet4",) if given.quick else ("vgg16bn", "wrn16_4"):
        found = {n: Method(network, n, x, y, given.every) for n in ("SGD", "gradient", "spectral", "natural", "MKFAC")}
        ratios: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(given.rounds):
            seconds = {name: method.seconds(given.steps) for name, method in found.items()}
            for name, value in seconds.items():
                ratios[name].append(value / seconds["SGD"])
        for name, values in ratios.items():
            goal = GOALS.get((network, name))
            spread = f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
            print(f"{network:8} {name:9} {1e3 * seconds[name]:8.2f} ms  {spread}{f'  goal {goal}' if goal else ''}")


if __name__ == "__main__":
    main()
