"""Two races on wall time: a small network, and a badly scaled model on a sphere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer

from fisherfold.fisher import Gaussian
from fisherfold.manifolds import Sphere
from fisherfold.optim import SphereOptimizer
from fisherfold.problems import NLLProblem
from fisherfold.solvers import GradientNorm, minimize
from fisherfold.threads import one_thread

Make = Callable[[nn.Module, float], Optimizer]


@dataclass(frozen=True)
class Race:
    """The curve of one method: seconds, and the value reached by then."""

    method: str
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def race_networks(*, epochs: int = 4, seeds: int = 3) -> list[Race]:
    """Test accuracy on handwritten digits against CPU seconds on one thread, mean over seeds.

    Every method has three rates, and the one with the best accuracy on validation images is shown.
    SGD and AdamW get half as many epochs more, so that all take about the same seconds.
    """
    digits = load_digits()
    x = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train = order[:1000]
    validation = order[1000:1200]
    test = order[1200:]

    def run(
        make: Make, rate: float, epochs: int, seed: int
    ) -> tuple[list[float], list[float], float]:
        torch.manual_seed(seed)
        net = _network()
        optimizer = make(net, rate)
        batches = len(train) // 64
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(1 - step / (epochs * batches), 0.0)
        )
        seconds = []
        accuracies = []
        spent = 0.0
        for epoch in range(epochs):
            began = time.process_time()
            net.train()
            shuffled = train[
                torch.randperm(
                    len(train), generator=torch.Generator().manual_seed(100 * seed + epoch)
                )
            ]
            for part in torch.split(shuffled[: 64 * batches], 64):
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(net(x[part]), y[part]))
                optimizer.step()
                schedule.step()
            spent += time.process_time() - began
            seconds.append(spent)
            accuracies.append(100 * _accuracy(net, x[test], y[test]))
        return seconds, accuracies, _accuracy(net, x[validation], y[validation])

    def best(
        name: str,
        make: Make,
        rates: Sequence[float],
        epochs: int,
    ) -> Race:
        tried = []
        for rate in rates:
            runs = [run(make, rate, epochs, seed) for seed in range(seeds)]
            seconds, values, judged = zip(*runs, strict=True)
            race = Race(f"{name} {rate:g}", _means(seconds), _means(values))
            tried.append((fmean(judged), race))
        return max(tried, key=lambda each: each[0])[1]

    with one_thread():
        return [
            best(
                "SphereOptimizer, angle",
                lambda net, rate: SphereOptimizer(net, lr=rate),
                (0.04, 0.08, 0.16),
                epochs,
            ),
            best(
                "SGD, rate",
                lambda net, rate: torch.optim.SGD(
                    net.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=5e-4
                ),
                (0.03, 0.1, 0.3),
                epochs * 3 // 2,
            ),
            best(
                "AdamW, rate",
                lambda net, rate: torch.optim.AdamW(net.parameters(), rate),
                (0.003, 0.01, 0.03),
                epochs * 3 // 2,
            ),
        ]


def _means(curves: Iterable[Sequence[float]]) -> list[float]:
    return [fmean(column) for column in zip(*curves, strict=True)]


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


@torch.no_grad()
def _accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    net.eval()
    return float((net(x).argmax(1) == y).double().mean())


def race_gradients(*, seed: int = 0) -> list[Race]:
    """Training loss of a badly scaled regression on a sphere, to a gradient of 1e-10."""
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
        for name, method in (
            ("natural gradient", "rngd"),
            ("conjugate gradient", "rcg"),
            ("gradient", "rgd"),
        ):
            minimize(
                problem, start, method, max_iter=1
            )  # what is loaded by the first call is not part of the race
            trace = minimize(problem, start, method, max_iter=300, stop=GradientNorm(1e-10)).trace
            races.append(
                Race(
                    name,
                    list(trace["seconds"]),
                    [max(loss - least, 1e-18) for loss in trace["loss"]],
                )
            )
    return races
