"""Standard errors on a sphere: where does the true direction lie, and how far off is the estimate?

    python examples/standard_errors.py standard_errors.png

A direction in space is estimated by logistic regression, from 100 and from 800 observations. The
inverse Fisher information gives a confidence region on the sphere, and an interval for anything
that is computed from the direction, such as its angle to the north pole.
"""

from __future__ import annotations

import sys

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fisherfold import Bernoulli, NLLProblem, Result, minimize
from fisherfold.manifolds import Sphere

SCALES = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)


def fit(n: int, truth: Tensor) -> Result:
    """The direction from n answers of yes and no."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64) * SCALES
    y = torch.bernoulli(torch.sigmoid(2 * x @ truth), generator=generator)
    return minimize(NLLProblem(Sphere(3), lambda x, w: 2 * x @ w, Bernoulli(), x, y), truth)


def angle(w: Tensor) -> Tensor:
    """To the north pole, in degrees."""
    return torch.rad2deg(torch.acos(w[2:]))


def main() -> Figure:
    """Estimate, and draw the regions that hold the truth with a probability of 90 %."""
    truth = torch.nn.functional.normalize(torch.tensor([0.4, 0.3, 0.8], dtype=torch.float64), dim=0)
    figure = Figure(figsize=(4.6, 4.4), layout="constrained")
    panel = figure.subplots()
    for n, style in ((100, "C0--"), (800, "C1-")):
        result = fit(n, truth)
        covariance = result.covariance()
        low, high = covariance.interval(angle, level=0.9)
        held = "holds" if covariance.contains(truth, level=0.9) else "does not hold"
        print(
            f"n = {n}: {float(angle(result.x)):.1f}° from the pole, 90 % interval "
            f"{float(low):.1f}° to {float(high):.1f}° (truth {float(angle(truth)):.1f}°); the "
            f"region {held} the truth"
        )
        boundary = covariance.boundary(200, level=0.9)
        panel.plot(boundary[:, 0], boundary[:, 1], style, label=f"90 % region, n = {n}")
        panel.plot(*result.x[:2], style[:2] + "o", markersize=4)
    panel.plot(*truth[:2], "k+", markersize=12, label="truth")
    turn = torch.linspace(0, 2 * torch.pi, 200)
    panel.plot(turn.cos(), turn.sin(), color="0.7", linewidth=0.8)
    panel.set(
        xlabel="east", ylabel="north", aspect="equal", title="The sphere seen from above its pole"
    )
    panel.legend(frameon=False, loc="lower left", fontsize=8)
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "standard_errors.png", dpi=100)
