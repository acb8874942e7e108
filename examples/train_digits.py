"""Train a small network with batch norm on scikit-learn's digits, with MKFAC and with SGD.

    python examples/train_digits.py

Copy ``train``: apart from the line that builds the optimizer and the ``with opt.statistics(...)`` around the forward
and backward pass, it is an ordinary training loop.
"""

from __future__ import annotations

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


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, *, steps: int = 100) -> list[float]:
    """An ordinary training loop, with curvature renewed every ten steps where the optimizer has any.

    Args:
        model: the network.
        opt: ``fisherfold.MKFAC`` or any other optimizer.
        x: inputs.
        y: classes.
        steps: how many batches of 128.

    Returns:
        The loss of every batch.
    """
    loss_fn = nn.CrossEntropyLoss()
    losses = []
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        batch = torch.randint(len(x), (128,), generator=generator)
        if isinstance(opt, fisherfold.MKFAC) and step % 10 == 0:
            opt.refresh([(x[batch], y[batch])], loss_fn)
        opt.zero_grad()
        loss = loss_fn(model(x[batch]), y[batch])
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
        model, lr=0.1, manifold_lr=0.1, damping=0.03, euclidean="kfac", fisher="mc", example_input=x[:32]
    )
    print(opt.report())
    ours = train(model, opt, x, y)
    theirs = train(twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9), x, y)
    print("\nstep    MKFAC     SGD")
    for step in (0, 10, 20, 40, 60, 80, 99):
        print(f"{step:4d}  {ours[step]:.5f}  {theirs[step]:.5f}")
    print()
    for name, found in opt.diagnostics().items():
        print(f"{name}: cos(direction, gradient) = {found.cosine:.2f}, top eigenvalue / damping = {found.top:.1f}")


if __name__ == "__main__":
    main()
