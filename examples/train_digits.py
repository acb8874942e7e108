"""Train a small network with batch norm on scikit-learn's digits, with MKFAC and with SGD.

    python examples/train_digits.py

Both train on full batches, with rates found by ``benchmarks/mkfac_steps_to_loss.py``. Copy ``train``: apart from the
line that builds the optimizer and the ``with`` around the forward and backward pass, it is an ordinary training loop.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
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


def main() -> None:
    """Print both losses, what MKFAC does to each parameter, and how far it bends the gradient."""
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


if __name__ == "__main__":
    main()
