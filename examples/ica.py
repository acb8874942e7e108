"""Unmixing signals: independent component analysis as a minimum over orthogonal matrices.

    python examples/ica.py ica.png

Three signals arrive mixed. Whitened, they differ from the sources by an orthogonal matrix W, and
the mean of log cosh(Wᵀx) is least where the components are most independent (for sources with heavy
tails): a loss on ``Stiefel(3, 3)``.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.decomposition import FastICA
from torch import Tensor
from torch.nn.functional import softplus

from fisherfold import LossProblem, minimize
from fisherfold.manifolds import Stiefel


def sources(n: int) -> np.ndarray:
    """Bursts, spikes and Laplace noise: all with heavy tails."""
    rng = np.random.default_rng(0)
    t = np.linspace(0, 8, n)
    bursts = np.sin(40 * t) * np.exp(-20 * np.sin(np.pi * t / 2) ** 2)
    spikes = np.where(rng.random(n) < 0.03, rng.standard_normal(n), 0.01 * rng.standard_normal(n))
    found = np.stack([bursts, spikes, rng.laplace(size=n)], 1)
    return (found - found.mean(0)) / found.std(0)


def log_cosh(x: Tensor, w: Tensor) -> Tensor:
    """Of every component, summed, for each sample; up to a constant."""
    z = x @ w
    return (softplus(2 * z) - z).sum(1)


def matched(estimate: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Signs and order cannot be known.

    Put the components next to the sources that they resemble.
    """
    correlation = np.corrcoef(truth.T, estimate.T)[:3, 3:]
    order = np.abs(correlation).argmax(1)
    return estimate[:, order] * np.sign(correlation[np.arange(3), order])


def main() -> Figure:
    """Mix, unmix with both, and draw."""
    truth = sources(2000)
    mixed = truth @ np.random.default_rng(1).standard_normal((3, 3))
    white = np.linalg.qr(mixed)[0] * len(mixed) ** 0.5
    frames = Stiefel(3, 3)
    problem = LossProblem(frames, log_cosh, torch.from_numpy(white))
    starts = frames.random_point(5, generator=torch.Generator().manual_seed(0))
    result = min(
        (minimize(problem, start, "trust-region") for start in starts), key=lambda run: run.value
    )
    print(result)

    fast = FastICA(whiten=False, fun="logcosh", tol=1e-8, max_iter=1000, random_state=0).fit(white)
    rotation = torch.from_numpy(fast.components_.T.copy())
    ours, theirs = (matched(white @ w.numpy(), truth) for w in (result.x, rotation))
    for name, found, w in (("trust-region", ours, result.x), ("FastICA", theirs, rotation)):
        correlations = [np.corrcoef(found[:, k], truth[:, k])[0, 1] for k in range(3)]
        print(
            f"{name:12} loss {float(problem.loss(w)):.8f}, correlations {np.round(correlations, 4)}"
        )

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for row, panels in enumerate(figure.subplots(3, 3, sharex=True)):
        for panel, signal, title in zip(
            panels, (truth, mixed, ours), ("sources", "mixed", "unmixed"), strict=True
        ):
            panel.plot(signal[:600, row], linewidth=0.7, color="#0072b2")
            panel.set(yticks=[], title=title if row == 0 else "")
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "ica.png", dpi=100)
