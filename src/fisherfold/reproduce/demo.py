"""The five-minute look: three small problems, natural gradient beside first-order methods, one table, one picture.

A table with holes, many small regressions that share a subspace, and a network with batch normalisation. The step sizes
of the first-order methods are searched on a small grid, the best final training loss wins; rngd has nothing to search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fisherfold.completion import CompletionProblem, Ratings
from fisherfold.files import write_atomically
from fisherfold.manifolds.base import Point
from fisherfold.optim import MKFAC, SGDG
from fisherfold.problems import Problem
from fisherfold.solvers import GradientNorm, minimize
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.tasks import TaskStatistics
from fisherfold.threads import one_thread

PASSES = 100
SMOOTH, NETWORK = ("rngd", "rcg", "rsvrg", "rsgd"), ("mkfac", "riem. sgd", "sgd")
FITS = 2 * len(SMOOTH) + len(NETWORK)
FISHER = {"completion": "gauss-newton", "multi-task": "exact"}
STEPS = (0.03, 0.1, 0.3, 1.0)
EPOCHS = 12
TITLES = {
    "completion": "Matrix with holes, Gr(300, 5)",
    "multi-task": "100 regressions, Gr(30, 4)",
    "digits": "Convolutional net with batch norm",
}
GAP = "gap: training loss above the lowest found (for the digits: the loss itself)"
# gaps below these are rounding and are drawn at them
FLOORS = {"completion": 1e-13, "multi-task": 1e-13, "digits": 1e-6}


@dataclass(frozen=True)
class Run:
    """One curve of the demo."""

    problem: str
    method: str
    passes: list[float]
    values: list[float]
    seconds: float
    step: float | None = None
    accuracy: float = math.nan
    times: list[float] = field(default_factory=list)


def run_demo(*, seed: int = 0, report: Callable[[str], object] = lambda _: None) -> list[Run]:
    """Fit the three problems with every method."""
    runs = []
    with one_thread():
        for name, (problem, start) in {"completion": completion(seed), "multi-task": multi_task(seed)}.items():
            for method in SMOOTH:
                report(f"{name}: {method}")
                runs.append(_fit(name, problem, start, method, seed))
        for method in NETWORK:
            report(f"digits: {method}")
            runs.append(_best_network(method, seed))
    return runs


def completion(seed: int) -> tuple[Problem, Point]:
    """A 300 × 600 matrix of rank 5 with noise; as in ratings, some rows are seen often and most of them rarely."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    full = normal(300, 5) * torch.tensor([3.0, 2.0, 1.5, 1.0, 0.7]) @ normal(5, 600) + 0.5 * normal(300, 600)
    popularity = torch.linspace(0.02, 1, 300, dtype=torch.float64)[:, None] ** 1.5
    seen = torch.rand(full.shape, generator=generator, dtype=torch.float64) < popularity
    rows, columns = torch.nonzero(seen, as_tuple=True)
    problem = CompletionProblem(Ratings(rows, columns, full[rows, columns], (300, 600)), 5, orientation="rows")
    return problem, problem.manifold.random_point(generator=generator)


def multi_task(seed: int) -> tuple[Problem, Point]:
    """A hundred regressions of 20 to 60 rows in 30 correlated features whose coefficients share a subspace of dim 4."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sizes = torch.randint(20, 61, (100,), generator=generator)
    task = torch.repeat_interleave(torch.arange(100), sizes)
    features = normal(int(sizes.sum()), 30) * torch.logspace(0.5, -0.5, 30, dtype=torch.float64)
    weights = normal(30, 4) @ normal(4, 100)
    targets = (features * weights.T[task]).sum(1) + normal(len(task))
    problem = SubspaceProblem(TaskStatistics.from_rows(features, targets, task), rank=4, ridge=1e-3)
    return problem, problem.manifold.random_point(generator=generator)


def _fit(name: str, problem: Problem, start: Point, method: str, seed: int) -> Run:
    grid: list[float | None] = list(_steps(problem, start)) if method in {"rsgd", "rsvrg"} else [None]
    curves = []
    for step in grid:
        began = time.perf_counter()
        options: dict[str, Any] = {} if step is None else {"step": step}
        if method == "rngd":
            options["fisher"] = FISHER[name]
        # an epoch of rsvrg goes through the data three times
        budget = PASSES // 3 if method == "rsvrg" else PASSES
        stop = GradientNorm(1e-9)
        result = minimize(problem, start, method, max_iter=budget, stop=stop, seed=seed, **options)
        seen = zip(result.trace["samples"], result.trace["products"], strict=True)
        passes = [(samples + products) / problem.n_samples for samples, products in seen]
        times = list(result.trace["seconds"])
        curves.append(
            Run(name, method, passes, result.trace["loss"], time.perf_counter() - began, step, times=times)
        )
    return min(curves, key=lambda run: run.values[-1] if math.isfinite(run.values[-1]) else math.inf)


def _steps(problem: Problem, start: Point) -> list[float]:
    """The grid in units of the inverse curvature along the first gradient, so that it fits problems of any scale."""
    gradient = problem.gradient(start)
    curvature = problem.fisher(start, kind="exact").quadratic(gradient) / problem.manifold.norm(start, gradient) ** 2
    return [step / float(curvature) for step in STEPS]


def _best_network(method: str, seed: int) -> Run:
    grid = {"mkfac": (0.03, 0.1, 0.3), "riem. sgd": (0.05, 0.2, 0.8), "sgd": (0.03, 0.1, 0.3)}[method]
    return min((_train(method, rate, seed) for rate in grid), key=lambda run: run.values[-1])


def _train(method: str, rate: float, seed: int) -> Run:
    """A convolutional network with batch normalisation on scikit-learn's digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1400], order[1400:]
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    loss_fn = nn.CrossEntropyLoss()
    optimizer: torch.optim.Optimizer
    if method == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    elif method == "riem. sgd":
        optimizer = SGDG(model, lr=0.05, manifold_lr=rate, example_input=x[train[:64]])
    else:
        optimizer = MKFAC(model, lr=0.05, manifold_lr=rate, damping=0.3, every=0, example_input=x[train[:64]])
    passes, values, times = [0.0], [float(_evaluate(model, x[train], y[train])[0])], [0.0]
    generator = torch.Generator().manual_seed(seed)
    began = time.perf_counter()
    for epoch in range(EPOCHS):
        batches = torch.split(train[torch.randperm(len(train), generator=generator)], 64)
        if isinstance(optimizer, MKFAC) and method == "mkfac":
            optimizer.refresh([(x[batch], y[batch]) for batch in batches[:5]], loss_fn)
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(model(x[batch]), y[batch]).backward()
            optimizer.step()
        passes.append(epoch + 1.0)
        times.append(time.perf_counter() - began)
        values.append(float(_evaluate(model, x[train], y[train])[0]))
    accuracy = float(_evaluate(model, x[test], y[test])[1])
    return Run("digits", method, passes, values, time.perf_counter() - began, rate, accuracy, times)


def _evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    model.eval()
    with torch.no_grad():
        logits = model(x)
    model.train()
    return nn.functional.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()


def gaps(runs: list[Run]) -> dict[tuple[str, str], list[float]]:
    """How far every point of every curve lies above the lowest loss that any method found on its problem."""
    lowest = {run.problem: min(min(r.values) for r in runs if r.problem == run.problem) for run in runs}
    lowest["digits"] = 0.0
    return {(run.problem, run.method): [value - lowest[run.problem] for value in run.values] for run in runs}


def draw(runs: list[Run], path: Path) -> None:
    """Draw one panel per problem, the loss over passes through the data."""
    import io

    from matplotlib.figure import Figure

    colours = {"rngd": "#c0392b", "mkfac": "#c0392b", "rcg": "#2471a3", "rsvrg": "#1e8449", "rsgd": "#7d3c98",
               "riem. sgd": "#1e8449", "sgd": "#2471a3"}  # fmt: skip
    heights = gaps(runs)
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axis, (problem, title) in zip(figure.subplots(1, 3), TITLES.items(), strict=True):
        for run in (run for run in runs if run.problem == problem):
            height = [max(gap, FLOORS[problem]) for gap in heights[problem, run.method]]
            strong = run.method in {"rngd", "mkfac"}
            axis.semilogy(run.passes, height, label=run.method, color=colours[run.method], lw=2.4 if strong else 1.4)
        axis.set_title(title)
        axis.set_xlabel("passes over the data")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
        axis.set_ylabel("training loss" if problem == "digits" else "loss above the lowest found")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_atomically(path, buffer.getvalue())
