"""The average of 1,000 rotations: plain and robust, against SciPy's Rotation.mean and pymanopt.

    OMP_NUM_THREADS=1 python benchmarks/rotation_averaging.py

A true rotation is seen 1,000 times with errors of about 6 degrees. The chordal mean, least squares of the matrices, has
a closed form, which SciPy computes. With every fourth observation replaced by a random rotation it breaks down; the
robust mean, of least sum of smoothed angles (Hartley, Aftab and Trumpf 2011), does not. pymanopt gets the same torch
functions. One thread, CPU time, the least of five runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import pymanopt
import torch
from rich.console import Console
from rich.table import Table
from scipy.spatial.transform import Rotation
from torch import Tensor

from fisherfold import LossProblem, minimize
from fisherfold.manifolds import Rotations
from fisherfold.solvers import GradientNorm

torch.set_num_threads(1)
COUNT, NOISE, SMOOTHING = 1000, 0.1, 0.01
ROTATIONS = Rotations(3)


def observations(outliers: float) -> tuple[Tensor, Tensor]:
    """The truth, and rotations around it, of which a share is anywhere."""
    generator = torch.Generator().manual_seed(0)
    truth = ROTATIONS.random_point(generator=generator)
    noise = torch.randn(COUNT, 3, 3, generator=generator, dtype=torch.float64)
    around = truth.expand(COUNT, 3, 3)
    seen = ROTATIONS.exp(around, NOISE * 2**0.5 * ROTATIONS.project(around, noise))
    wrong = int(outliers * COUNT)
    seen[:wrong] = ROTATIONS.random_point(wrong, generator=generator)
    return truth, seen


def chordal(seen: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda r: 0.5 * (r - seen).square().sum((1, 2)).mean()


def robust(seen: Tensor) -> Callable[[Tensor], Tensor]:
    # of the sine of half the angle: |R - S|² = 8 sin²(θ/2)
    return lambda r: ((r - seen).square().sum((1, 2)) / 8 + SMOOTHING**2).sqrt().mean()


def degrees(r: Tensor, truth: Tensor) -> float:
    return math.degrees(float(ROTATIONS.dist(truth, r)) / 2**0.5)


def timed(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    seconds = []
    for _ in range(5):
        began = time.process_time()
        found = run()
        seconds.append(time.process_time() - began)
    return found, min(seconds)


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


def main() -> None:
    table = Table(title=f"The average of {COUNT} rotations")
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
        truth, seen = observations(outliers)
        for name, make in (("chordal", chordal), ("robust", robust)):
            cost, start = make(seen), seen[-1].clone()
            runs = {
                method: timed(partial(ours, cost, start, method))
                for method in ("trust-region", "lbfgs")
            }
            runs["pymanopt TrustRegions"] = timed(partial(pymanopts, cost, start))
            if name == "chordal":
                runs["SciPy Rotation.mean"] = timed(partial(scipys, seen))
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


if __name__ == "__main__":
    main()
