"""A network with batch norm, trained in an ordinary loop with SphereOptimizer and with SGD.

    python examples/train_digits.py train_digits.png

Copy ``train``: the only line that is not in every training loop is the one that builds the
optimizer.
"""

from __future__ import annotations

import sys

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fisherfold


def network() -> nn.Module:
    """A perceptron with batch norm.

    Returns:
        A freshly initialised module.
    """
    return nn.Sequential(
        nn.Linear(64, 128, bias=False),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 128, bias=False),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(
    model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, *, epochs: int = 5
) -> list[float]:
    """An ordinary training loop on mini-batches of 64.

    Args:
        model: the network.
        opt: any optimizer.
        x: inputs.
        y: classes.
        epochs: passes over all samples.

    Returns:
        The loss of every step.
    """
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(64):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return losses


def main() -> Figure:
    """Print how each parameter is treated and the test accuracy of both; draw the losses."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = network()
    twin = network()
    twin.load_state_dict(model.state_dict())
    opt = fisherfold.SphereOptimizer(model, lr=0.02)
    print(opt.report())
    ours = train(model, opt, x[:1200], y[:1200])
    theirs = train(
        twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9), x[:1200], y[:1200]
    )
    for name, net in (("SphereOptimizer", model), ("SGD", twin)):
        accuracy = (net.eval()(x[1200:]).argmax(1) == y[1200:]).float().mean()
        print(f"{name}: {100 * float(accuracy):.1f} % of the test digits")

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    panel = figure.subplots()
    panel.semilogy(ours, "-", label="SphereOptimizer")
    panel.semilogy(theirs, "--", label="SGD with momentum")
    panel.set(xlabel="step", ylabel="training loss")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "train_digits.png", dpi=100)
