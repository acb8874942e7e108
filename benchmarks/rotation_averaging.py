"""The average of 1,000 rotations, plain and robust.

A true rotation is seen 1,000 times with errors of about 6 degrees. The chordal mean, least squares
of the matrices, has a closed form, which SciPy computes. With every fourth observation replaced by
a random rotation it breaks down; the robust mean, of least sum of smoothed angles (Hartley, Aftab
and Trumpf 2011), does not. pymanopt gets the same torch functions. One thread, CPU time, the least
of five runs.

Against: SciPy's Rotation.mean, pymanopt
Takes: half a minute
Page: docs/benchmarks/core.md
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial

import pymanopt
import torch
from rich.console import Console
from rich.table import Table
from scipy.spatial.transform import Rotation
from torch import Tensor

from benchmarks._common import least_seconds
from fisherfold import LossProblem, minimize
from fisherfold.manifolds import Rotations
from fisherfold.solvers import GradientNorm

SMOKE = "--count 30 --rounds 1"

NOISE = 0.1
SMOOTHING = 0.01
ROTATIONS = Rotations(3)


def observations(count: int, outliers: float) -> tuple[Tensor, Tensor]:
    """The truth, and rotations around it, of which a share is anywhere."""
    generator = torch.Generator().manual_seed(0)
    truth = ROTATIONS.random_point(generator=generator)
    noise = torch.randn(count, 3, 3, generator=generator, dtype=torch.float64)
    around = truth.expand(count, 3, 3)
    seen = ROTATIONS.exp(around, NOISE * 2**0.5 * ROTATIONS.project(around, noise))
    wrong = int(outliers * count)
    seen[:wrong] = ROTATIONS.random_point(wrong, generator=generator)
    return truth, seen


def chordal(seen: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda r: 0.5 * (r - seen).square().sum((1, 2)).mean()


def robust(seen: Tensor) -> Callable[[Tensor], Tensor]:
    # of the sine of half the angle: |R - S|² = 8 sin²(θ/2)
    return lambda r: ((r - seen).square().sum((1, 2)) / 8 + SMOOTHING**2).sqrt().mean()


def degrees(r: Tensor, truth: Tensor) -> float:
    return math.degrees(float(ROTATIONS.dist(truth, r)) / 2**0.5)


def best(run: Callable[[], Tensor], rounds: int) -> tuple[Tensor, float]:
    """The result, and the least CPU seconds."""
    return run(), least_seconds(run, rounds)


def ours(cost: Callable[[Tensor], Tensor], start: Tensor, method: str) -> Tensor:
    result = minimize(LossProblem(ROTATIONS, cost), start, method, stop=GradientNorm(1e-9))
    return result.x


def pymanopts(cost: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    manifold = pymanopt.manifolds.SpecialOrthogonalGroup(3)
    problem = pymanopt.Problem(manifold, pymanopt.function.pytorch(manifold)(cost))
    optimizer = pymanopt.optimizers.TrustRegions(verbosity=0, min_gradient_norm=1e-9)
    return torch.from_numpy(optimizer.run(problem, initial_point=start.numpy().copy()).point)


def scipys(seen: Tensor) -> Tensor:
    return torch.from_numpy(Rotation.from_matrix(seen.numpy()).mean().as_matrix())


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=1000, help="of rotations (1000)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the best counts (5)")


def main(given: Namespace) -> None:
    table = Table(title=f"The average of {given.count} rotations")
    for column in (
        "outliers",
        "loss",
        "method",
        "CPU seconds",
        "loss above the least",
        "error, degrees",
    ):
        table.add_column(column)
    for outliers in (0.0, 0.25):
        truth, seen = observations(given.count, outliers)
        for name, make in (("chordal", chordal), ("robust", robust)):
            cost = make(seen)
            start = seen[-1].clone()
            runs = {
                method: best(partial(ours, cost, start, method), given.rounds)
                for method in ("trust-region", "lbfgs")
            }
            runs["pymanopt TrustRegions"] = best(partial(pymanopts, cost, start), given.rounds)
            if name == "chordal":
                runs["SciPy Rotation.mean"] = best(partial(scipys, seen), given.rounds)
            least = min(float(cost(r)) for r, _ in runs.values())
            for method, (r, seconds) in runs.items():
                table.add_row(
                    f"{outliers:.0%}",
                    name,
                    method,
                    f"{seconds:.4f}",
                    f"{float(cost(r)) - least:.0e}",
                    f"{degrees(r, truth):.3f}",
                )
    Console(width=120).print(table)
