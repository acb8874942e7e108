"""Four costs of statistics on four manifolds, to the same accuracy.

fisherfold gets the cost as a torch function and nothing else. pymanopt runs twice: with its PyTorch
backend on the same function, differentiated automatically, and with its NumPy backend on gradients
and Hessians derived by hand. Same start, same metric and the same end, a Riemannian gradient norm
of 1e-7 of the first; one thread, CPU time, the least of five runs in turn. The fastest method of
each that reaches the common minimum to 1e-10 counts.

Against: pymanopt's TrustRegions and ConjugateGradient
Takes: five minutes
Page: docs/benchmarks/core.md
"""

from __future__ import annotations

import math
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pymanopt
import torch
from pymanopt import manifolds as theirs
from pymanopt.optimizers import ConjugateGradient, TrustRegions
from rich.console import Console
from rich.table import Table

from fisherfold import LossProblem, minimize
from fisherfold.manifolds import SPD, Grassmann, Manifold, Oblique, Stiefel
from fisherfold.solvers import GradientNorm

SMOKE = "--rounds 1 --only ica"

ACCURACY = 1e-7
OURS = ("trust-region", "lbfgs", "rcg")


@dataclass
class Case:
    """A cost for both: as a torch function, and in NumPy with its derivatives.

    The derivatives are Euclidean, or Riemannian where ``riemannian`` says so.
    """

    name: str
    manifold: Manifold
    peer: Any
    cost: Callable[[torch.Tensor], torch.Tensor]
    numpy_cost: Callable[[np.ndarray], float]
    gradient: Callable[[np.ndarray], np.ndarray]
    hessian: Callable[[np.ndarray, np.ndarray], np.ndarray] | None
    riemannian: bool = False
    # pymanopt has unit vectors in columns on its oblique manifold, we in rows
    transposed: bool = False


def ica() -> Case:
    """Independent components.

    Orthonormal directions of least E log cosh, 10 mixtures, 5,000 samples.
    """
    rng = np.random.default_rng(0)
    x = rng.laplace(size=(5000, 10)) @ rng.standard_normal((10, 10))
    x = np.linalg.qr(x - x.mean(0)).Q * 5000**0.5
    tx = torch.from_numpy(x)

    def cost(w: torch.Tensor) -> torch.Tensor:
        z = tx @ w
        return (torch.nn.functional.softplus(2 * z) - z).mean() * 10

    def hessian(w: np.ndarray, v: np.ndarray) -> np.ndarray:
        return x.T @ ((1 - np.tanh(x @ w) ** 2) * (x @ v)) / 5000

    return Case(
        "independent components, Stiefel(10, 10)",
        Stiefel(10, 10),
        theirs.Stiefel(10, 10),
        cost,
        lambda w: float(np.logaddexp(x @ w, -(x @ w)).mean() * 10),
        lambda w: x.T @ np.tanh(x @ w) / 5000,
        hessian,
    )


def covariances() -> Case:
    """The affine-invariant mean of 100 covariances."""
    factors = np.random.default_rng(0).standard_normal((100, 8, 12))
    points = factors @ factors.transpose(0, 2, 1) / 12
    spd = SPD(8)
    peer = theirs.SymmetricPositiveDefinite(8)
    tpoints = torch.from_numpy(points)
    return Case(
        "mean of 100 covariances, SPD(8)",
        spd,
        peer,
        lambda m: 0.5 * spd.dist(m.expand_as(tpoints), tpoints).square().mean(),
        lambda m: 0.5 * float(np.mean([peer.dist(m, p) ** 2 for p in points])),
        lambda m: -np.mean([peer.log(m, p) for p in points], axis=0),
        None,
        riemannian=True,
    )


def robust_subspace() -> Case:
    """The subspace of least mean distance, smoothed.

    3,000 points in 60 dimensions, a third of them outliers.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3000, 5)) @ rng.standard_normal(
        (5, 60)
    ) / 5**0.5 + 0.1 * rng.standard_normal((3000, 60))
    x[:1000] = rng.standard_normal((1000, 60))
    tx = torch.from_numpy(x)
    squares = (x * x).sum(1)
    tsquares = torch.from_numpy(squares)

    def root(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        image = x @ u
        return image, np.sqrt(squares - (image * image).sum(1) + 0.01)

    def gradient(u: np.ndarray) -> np.ndarray:
        image, distance = root(u)
        return -x.T @ (image / distance[:, None]) / 3000

    def hessian(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        (image, distance) = root(u)
        moved = x @ v
        bend = ((image * moved).sum(1) / distance**3)[:, None] * image
        return -x.T @ (moved / distance[:, None] + bend) / 3000

    return Case(
        "robust subspace, Grassmann(60, 5)",
        Grassmann(60, 5),
        theirs.Grassmann(60, 5),
        lambda u: (tsquares - (tx @ u).square().sum(1) + 0.01).sqrt().mean(),
        lambda u: float(root(u)[1].mean()),
        gradient,
        hessian,
    )


def cosine_softmax() -> Case:
    """Classification by unit vectors of 20 classes: 4,000 samples in 40 dimensions."""
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((20, 40))
    x = rng.standard_normal((4000, 40))
    y = np.argmax(x @ truth.T + 3 * rng.gumbel(size=(4000, 20)), axis=1)
    tx = torch.from_numpy(x)
    ty = torch.from_numpy(y)
    hot = np.eye(20)[y]

    def shares(c: np.ndarray) -> np.ndarray:
        z = 2 * x @ c
        z = np.exp(z - z.max(1, keepdims=True))
        return z / z.sum(1, keepdims=True)

    def cost(c: np.ndarray) -> float:
        z = 2 * x @ c
        top = z.max(1)
        return float((top + np.log(np.exp(z - top[:, None]).sum(1)) - z[np.arange(4000), y]).mean())

    def hessian(c: np.ndarray, v: np.ndarray) -> np.ndarray:
        p = shares(c)
        z = 2 * x @ v
        return 2 * x.T @ (p * (z - (p * z).sum(1, keepdims=True))) / 4000

    return Case(
        "softmax of unit vectors, Oblique(20, 40)",
        Oblique(20, 40),
        theirs.Oblique(40, 20),
        lambda w: torch.nn.functional.cross_entropy(2 * tx @ w.T, ty),
        cost,
        lambda c: 2 * x.T @ (shares(c) - hot) / 4000,
        hessian,
        transposed=True,
    )


CASES = {
    "ica": ica,
    "covariances": covariances,
    "robust": robust_subspace,
    "softmax": cosine_softmax,
}


def ours(case: Case, method: str, start: torch.Tensor, tol: float) -> tuple[float, float]:
    problem = LossProblem(case.manifold, case.cost)
    began = time.process_time()
    result = minimize(problem, start, method, max_iter=3000, stop=GradientNorm(tol))
    return time.process_time() - began, result.value if result.success else math.nan


def pymanopts(
    case: Case, backend: str, optimizer: type, start: torch.Tensor, tol: float
) -> tuple[float, float]:
    first = np.ascontiguousarray(start.numpy().T) if case.transposed else start.numpy().copy()
    options: dict[str, Any] = {}
    if backend == "numpy":
        decorate = pymanopt.function.numpy(case.peer)
        cost = decorate(case.numpy_cost)
        kind = "riemannian" if case.riemannian else "euclidean"
        options[f"{kind}_gradient"] = decorate(case.gradient)
        if case.hessian is not None:
            options[f"{kind}_hessian"] = decorate(case.hessian)
    else:
        cost = pymanopt.function.pytorch(case.peer)(
            lambda c: case.cost(c.T if case.transposed else c)
        )
    problem = pymanopt.Problem(case.peer, cost, **options)
    run = optimizer(verbosity=0, min_gradient_norm=tol, max_iterations=3000, min_step_size=1e-14)
    began = time.process_time()
    result = run.run(problem, initial_point=first)
    return time.process_time() - began, float(result.cost)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up (5)")
    parser.add_argument("--only", choices=CASES, help="one of the problems")


def main(given: Namespace) -> None:
    table = Table(
        title=f"CPU seconds to {ACCURACY:g} of the first gradient, least of {given.rounds} runs"
    )
    columns = (
        "problem",
        "fisherfold",
        "s",
        "pymanopt, same function",
        "s",
        "ratio",
        "pymanopt, by hand",
        "s",
        "ratio",
    )
    for column in (*columns, "minima differ by"):
        table.add_column(column)
    for make in [CASES[given.only]] if given.only else CASES.values():
        case = make()
        start = case.manifold.random_point(generator=torch.Generator().manual_seed(1))
        tol = ACCURACY * float(
            case.manifold.norm(start, LossProblem(case.manifold, case.cost).gradient(start))
        )
        runs: dict[str, Callable[[], tuple[float, float]]] = {
            method: partial(ours, case, method, start, tol) for method in OURS
        }
        for backend in ("numpy", "pytorch"):
            for optimizer in (TrustRegions, ConjugateGradient):
                if backend == "numpy" and optimizer is TrustRegions and case.hessian is None:
                    continue  # there is no Hessian by hand
                runs[f"{optimizer.__name__}, {backend}"] = partial(
                    pymanopts, case, backend, optimizer, start, tol
                )
        found = {name: [run()] for name, run in runs.items()}  # the first is a warm-up
        for _ in range(given.rounds):
            for name, run in runs.items():
                found[name].append(run())
        seconds = {name: min(t for t, _ in results[1:]) for name, results in found.items()}
        values = {name: results[-1][1] for name, results in found.items()}
        lowest = min(value for value in values.values() if not math.isnan(value))
        gaps = {name: (value - lowest) / max(1.0, abs(lowest)) for name, value in values.items()}
        print(case.name)
        for name in runs:
            print(f"   {name:28} {seconds[name]:8.4f} s   above the lowest by {gaps[name]:.1e}")
        good = {name: seconds[name] for name in runs if gaps[name] <= 1e-10}
        best = {
            kind: min(
                (name for name in good if (kind in name if kind else name in OURS)),
                key=good.__getitem__,
            )
            for kind in ("", "pytorch", "numpy")
        }
        spread = max(values[name] for name in best.values()) - min(
            values[name] for name in best.values()
        )
        table.add_row(
            case.name,
            best[""],
            f"{good[best['']]:.4f}",
            *(
                text
                for peer in ("pytorch", "numpy")
                for text in (
                    best[peer].split(",")[0],
                    f"{good[best[peer]]:.4f}",
                    f"{good[best['']] / good[best[peer]]:.2f}",
                )
            ),
            f"{spread:.0e}",
        )
    Console(width=190).print(table)
