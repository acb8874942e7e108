"""Directions have a mean: a von Mises-Fisher distribution with its cone of confidence.

    python examples/directions.py directions.png

Directions in space, as of magnetised rocks or of flying birds, are points of a sphere. The
likelihood exp(κ <μ, y>) κ / sinh κ has a mean direction μ on ``Sphere(3)`` and a concentration κ,
fitted together on a product manifold.
"""

from __future__ import annotations

import math
import sys

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fisherfold import LossProblem, minimize
from fisherfold.manifolds import Euclidean, Product, Sphere

SPHERE = Sphere(3)
SPACE = Product({"mean": SPHERE, "log_concentration": Euclidean()})


def loss(y: Tensor, theta: dict[str, Tensor]) -> Tensor:
    """The negative log-likelihood of each direction.

    Log(sinh κ / κ) - κ <μ, y>, without overflow.
    """
    k = theta["log_concentration"].exp()
    return k + torch.log1p(-torch.exp(-2 * k)) - torch.log(2 * k) - k * (y @ theta["mean"])


def draw(n: int, mean: Tensor, k: float, generator: torch.Generator) -> Tensor:
    """The cosine to the mean by inversion, the angle around it at random."""
    u = torch.rand(n, 1, generator=generator, dtype=torch.float64)
    cosine = 1 + torch.log(u + (1 - u) * math.exp(-2 * k)) / k
    around = SPHERE.project(mean, torch.randn(n, 3, generator=generator, dtype=torch.float64))
    return cosine * mean + (1 - cosine**2).sqrt() * torch.nn.functional.normalize(around, dim=-1)


def main() -> Figure:
    """Fit, compare with the closed form, count how often the cone holds the truth, and draw."""
    generator = torch.Generator().manual_seed(1)
    n = 60
    k = 15.0
    truth = torch.tensor([0.36, 0.48, 0.8], dtype=torch.float64)
    # of χ² with two degrees of freedom: 95 %
    inside = 0
    quantile = 5.991
    for repeat in range(40):
        y = draw(n, truth, k, generator)
        start = {"mean": y[0].clone(), "log_concentration": torch.tensor(1.0, dtype=torch.float64)}
        result = minimize(LossProblem(SPACE, loss, y), start, "trust-region")
        found = result.x
        # the mean scatters in two directions, alike in both
        covariance = result.covariance(lambda theta: theta["mean"])
        cone = math.sqrt(quantile * float(covariance.trace()) / 2)
        inside += float(SPHERE.dist(found["mean"], truth)) <= cone
        if repeat == 0:
            closed = torch.nn.functional.normalize(y.sum(0), dim=0)
            kappa = float(found["log_concentration"].exp())
            print(result)
            print(
                f"off the resultant by {float(SPHERE.dist(found['mean'], closed)):.0e}; κ = "
                f"{kappa:.1f}, truly {k}"
            )
            print(
                f"95 % cone: {math.degrees(cone):.1f} degrees, off by "
                f"{math.degrees(float(SPHERE.dist(found['mean'], truth))):.1f}"
            )
            first = (y, found["mean"], cone)
    print(f"the cone holds the true direction in {inside} of 40 repeats")

    y, mean, cone = first
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    panel = figure.subplots(subplot_kw={"projection": "mollweide"})
    turn = torch.linspace(0, 2 * math.pi, 100, dtype=torch.float64)[:, None]
    basis = SPHERE.tangent_basis(mean)
    rim = SPHERE.exp(mean.expand(100, 3), cone * (turn.cos() * basis[0] + turn.sin() * basis[1]))
    for points, style, label in (
        (y, ".", "observed"),
        (rim, "-", "95 % cone"),
        (truth[None], "k+", "truth"),
    ):
        panel.plot(
            torch.atan2(points[:, 1], points[:, 0]), torch.asin(points[:, 2]), style, label=label
        )
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, loc="lower right")
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "directions.png", dpi=100)
