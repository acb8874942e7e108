"""A likelihood of your own on a manifold.

Find a rotation from noisy directions, with its error from the Fisher matrix.

    python examples/rotation.py rotation.png

Stars are seen in known directions x_i, but through a camera that is rotated by an unknown R: y_i
has the von Mises-Fisher distribution around R x_i. R is a point of ``Rotations(3)``; the likelihood
is ten lines. The inverse Fisher information predicts the error of the estimate.
"""

from __future__ import annotations

import sys

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fisherfold import NLLProblem, check_fisher, check_gradient, minimize
from fisherfold.fisher import ExponentialFamily
from fisherfold.manifolds import Rotations

CONCENTRATION = 20.0


class VonMisesFisher(ExponentialFamily):
    """Directions in R³: p(y | z) = exp(<y, z> - A(z)), A(z) = log(sinh|z| / |z|) + const."""

    def log_partition(self, z: Tensor) -> Tensor:
        """log(sinh r / r) = r + log(1 - exp(-2r)) - log(2r), without overflow."""
        r = z.norm(dim=-1)
        return r + torch.log1p(-torch.exp(-2 * r)) - torch.log(2 * r)

    def sample(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """The cosine to the mean by inversion, the angle around it at random."""
        r = z.norm(dim=-1, keepdim=True)
        u = torch.rand(r.shape, generator=generator, dtype=z.dtype)
        cosine = 1 + torch.log(u + (1 - u) * torch.exp(-2 * r)) / r
        around = torch.randn(z.shape, generator=generator, dtype=z.dtype)
        around = torch.nn.functional.normalize(
            around - (around * z).sum(-1, keepdim=True) / r**2 * z, dim=-1
        )
        return cosine * z / r + (1 - cosine**2).clamp(min=0).sqrt() * around


def observe(n: int, truth: Tensor, seed: int) -> NLLProblem:
    """A camera that sees n stars."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.normalize(
        torch.randn(n, 3, generator=generator, dtype=torch.float64), dim=-1
    )

    def model(x: Tensor, rotation: Tensor) -> Tensor:
        return CONCENTRATION * x @ rotation.mT

    y = VonMisesFisher().sample(model(x, truth), generator=generator)
    return NLLProblem(Rotations(3), model, VonMisesFisher(), x, y)


def main() -> Figure:
    """Check the likelihood, estimate the rotation from few and many stars, draw errors."""
    truth = Rotations(3).random_point(generator=torch.Generator().manual_seed(0))
    problem = observe(100, truth, 0)
    print(check_gradient(problem), check_fisher(problem), sep="\n")
    print(minimize(problem, truth))

    sizes = (10, 30, 100, 300, 1000)
    repeats = 12
    seen = []
    predicted = []
    for n in sizes:
        squares = []
        for seed in range(repeats):
            problem = observe(n, truth, seed)
            result = minimize(problem, truth)
            squares.append(float((result.x - truth).square().sum()))
        seen.append((sum(squares) / repeats) ** 0.5)
        # three tangent directions, orthonormal in the metric of the frames: F is a 3 × 3 matrix
        moments = torch.linalg.eigvalsh(problem.fisher(truth, kind="dense").matrix)
        predicted.append(float(((1 / moments[moments > 1e-8]).sum() / n).sqrt()))
    for n, error, bound in zip(sizes, seen, predicted, strict=True):
        print(f"{n:5d} stars: error {error:.4f}, predicted {bound:.4f}")

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    panel = figure.subplots()
    panel.loglog(sizes, seen, "o", label=f"seen, {repeats} repeats")
    panel.loglog(sizes, predicted, "--", label="predicted: √(tr F⁻¹ / N)")
    panel.set(xlabel="stars N", ylabel="distance of the estimate to the true rotation")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "rotation.png", dpi=100)
