"""Two races on wall time: a small network with batch norm, and a badly scaled regression on a sphere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fisherfold.fisher import Gaussian
from fisherfold.manifolds import Sphere
from fisherfold.optim import SphereOptimizer
from fisherfold.problems import NLLProblem
from fisherfold.solvers import GradientNorm, minimize
from fisherfold.threads import one_thread


@dataclass(frozen=True)
class Race:
    """The curve of one method: seconds, and the value reached by then."""

    method: str
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def race_networks(*, epochs: int = 6, seeds: int = 3) -> list[Race]:
    """Test accuracy on handwritten digits, mean over seeds: SphereOptimizer and SGD at the best rate of a grid."""
    digits = load_digits()
    x = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]

    def run(make: Callable[[nn.Module], torch.optim.Optimizer], seed: int) -> tuple[list[float], list[float]]:
        torch.manual_seed(seed)
        net = _network()
        optimizer = make(net)
        total = epochs * (len(train) // 64)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / total, 0.0))
        seconds, accuracies, spent = [], [], 0.0
        for epoch in range(epochs):
            began = time.perf_counter()
            net.train()
            shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(100 * seed + epoch))]
            for step in range(len(train) // 64):
                part = shuffled[64 * step : 64 * (step + 1)]
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(net(x[part]), y[part]))
                optimizer.step()
                schedule.step()
            spent += time.perf_counter() - began
            seconds.append(spent)
            accuracies.append(100 * _accuracy(net, x[test], y[test]))
        return seconds, accuracies

    def race(name: str, make: Callable[[nn.Module], torch.optim.Optimizer]) -> Race:
        runs = [run(make, seed) for seed in range(seeds)]
        seconds, values = ([fmean(column) for column in zip(*part, strict=True)] for part in zip(*runs, strict=True))
        return Race(name, seconds, values)

    def sgd(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda net: torch.optim.SGD(net.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=5e-4)

    with one_thread():
        ours = race("SphereOptimizer, angle 0.1", lambda net: SphereOptimizer(net, lr=0.1, example_input=x[train[:16]]))
        first_order = [race(f"SGD, best rate {rate:g}", sgd(rate)) for rate in (0.03, 0.1, 0.3)]
    return [ours, max(first_order, key=lambda race: race.values[-1])]


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


@torch.no_grad()
def _accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    net.eval()
    return float((net(x).argmax(1) == y).double().mean())


def race_gradients(*, seed: int = 0) -> list[Race]:
    """Training loss of a nonlinear regression on a sphere with badly scaled features, to a gradient of 1e-10."""
    manifold = Sphere(200)
    generator = torch.Generator().manual_seed(seed)
    truth, start = (manifold.random_point(generator=generator) for _ in range(2))
    scale = torch.logspace(0, -1.5, 200, dtype=torch.float64)
    x = torch.randn(2000, 200, generator=generator, dtype=torch.float64) * scale

    def model(x: Tensor, direction: Tensor) -> Tensor:
        return torch.tanh(x @ direction)

    y = model(x, truth)
    problem = NLLProblem(manifold, model, Gaussian(), x, y)
    least = float(problem.likelihood.nll(y, y).mean())
    races = []
    with one_thread():
        for name, method in (("natural gradient", "rngd"), ("conjugate gradient", "rcg"), ("gradient", "rgd")):
            minimize(problem, start, method, max_iter=1)  # what is loaded by the first call is not part of the race
            trace = minimize(problem, start, method, max_iter=300, stop=GradientNorm(1e-10)).trace
            races.append(Race(name, list(trace["seconds"]), [max(loss - least, 1e-18) for loss in trace["loss"]]))
    return races
