"""A network with batch norm, trained by MKFAC and by SGD: the losses step by step.

    python examples/train_digits.py train_digits.png

Both train on full batches of scikit-learn's digits, with rates of the grids in ``benchmarks/mkfac_steps_to_loss.py``.
Copy ``train``: apart from the line that builds the optimizer and the ``with`` around the forward and backward pass, it
is an ordinary training loop.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

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
        nn.Linear(64, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, *, steps: int = 40) -> list[float]:
    """An ordinary training loop, with curvature renewed every second step where the optimizer has any.

    Args:
        model: the network.
        opt: ``fisherfold.MKFAC`` or any other optimizer.
        x: inputs.
        y: classes.
        steps: how many passes, each over all samples.

    Returns:
        The loss of every pass.
    """
    loss_fn = nn.CrossEntropyLoss()
    losses = []
    for step in range(steps):
        # MKFAC renews its curvature from the training pass itself
        renew = opt.statistics(enabled=step % 2 == 0) if isinstance(opt, fisherfold.MKFAC) else nullcontext()
        with renew:
            opt.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def main() -> Figure:
    """Print both losses, what MKFAC does to each parameter, how far it bends the gradient; draw the losses."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target)
    torch.manual_seed(0)
    model, twin = network(), network()
    twin.load_state_dict(model.state_dict())
    opt = fisherfold.MKFAC(
        model,
        lr=0.1,
        manifold_lr=0.1,
        momentum=0.8,
        damping=0.001,
        max_angle=0.1,
        factor_decay=0.8,
        euclidean="kfac",
        example_input=x[:32],
    )
    print(opt.report())
    ours = train(model, opt, x, y)
    theirs = train(twin, torch.optim.SGD(twin.parameters(), lr=1.2, momentum=0.9), x, y)
    print("\nstep    MKFAC     SGD")
    for step in (0, 5, 10, 15, 20, 30, 39):
        print(f"{step:4d}  {ours[step]:.5f}  {theirs[step]:.5f}")
    print()
    for name, found in opt.diagnostics().items():
        print(f"{name}: cos(direction, gradient) = {found.cosine:.2f}, top eigenvalue / damping = {found.top:.1f}")

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    panel = figure.subplots()
    panel.semilogy(ours, "-", label="MKFAC")
    panel.semilogy(theirs, "--", label="SGD with momentum")
    panel.set(xlabel="step", ylabel="training loss")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "train_digits.png", dpi=100)
