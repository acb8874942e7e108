"""Which way up? Averaging rotations when some of them are wrong.

    python examples/rotation_averaging.py rotation_averaging.png

One rotation is measured a hundred times, with errors of about 6 degrees, and a growing share of the
measurements is nonsense. The least-squares average is pulled away; the sum of (smoothed) angles,
one line of torch, is not.
"""

from __future__ import annotations

import math
import sys

import torch
from matplotlib.figure import Figure
from scipy.spatial.transform import Rotation
from torch import Tensor

from fisherfold import LossProblem, minimize
from fisherfold.manifolds import Rotations

SO3 = Rotations(3)


def measure(share: float, seed: int) -> tuple[Tensor, Tensor]:
    """A rotation, and a hundred measurements of it; those that are wrong lean to one side."""
    generator = torch.Generator().manual_seed(seed)
    truth, wrong = SO3.random_point(2, generator=generator)
    centre = torch.where((torch.arange(100) < 100 * share)[:, None, None], wrong, truth)
    noise = SO3.project(centre, torch.randn(100, 3, 3, generator=generator, dtype=torch.float64))
    return truth, SO3.exp(centre, 0.14 * noise)


def least_angles(seen: Tensor, rotation: Tensor) -> Tensor:
    """About the angle, smooth at 0: ‖R - S‖² = 8 sin²(θ/2)."""
    return torch.sqrt((seen - rotation).square().sum((1, 2)) / 2 + 1e-4)


def degrees(x: Tensor, y: Tensor) -> float:
    """The angle between two rotations."""
    return math.degrees(float(SO3.dist(x, y)) / math.sqrt(2))


def main() -> Figure:
    """Average with and without outliers and draw the errors."""
    shares = (0.0, 0.1, 0.2, 0.3, 0.4, 0.45)
    repeats = 10
    plain = []
    robust = []
    for share in shares:
        errors = torch.zeros(2)
        for seed in range(repeats):
            truth, seen = measure(share, seed)
            mean = torch.from_numpy(Rotation.from_matrix(seen.numpy()).mean().as_matrix())
            result = minimize(LossProblem(SO3, least_angles, seen), mean, "trust-region")
            errors += torch.tensor([degrees(mean, truth), degrees(result.x, truth)]) / repeats
        plain.append(float(errors[0]))
        robust.append(float(errors[1]))
        print(
            f"{share:4.0%} wrong: least squares {plain[-1]:5.1f} degrees off, least angles "
            f"{robust[-1]:4.1f}"
        )

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    panel = figure.subplots()
    panel.plot(
        [100 * share for share in shares],
        plain,
        "s--",
        color="#d55e00",
        label="least squares (SciPy's mean)",
    )
    panel.plot(
        [100 * share for share in shares],
        robust,
        "o-",
        color="#0072b2",
        label="least angles (LossProblem)",
    )
    panel.set(
        xlabel="measurements that are wrong, %",
        ylabel="error of the average, degrees",
        yscale="log",
    )
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "rotation_averaging.png", dpi=100)
