"""What a newcomer meets: every setting that a guide recommends, on mini-batches of digits, beside tuned SGD.

The networks, the loop and the grid of SGD are those of anybody; settings are those of docs/guides/networks.md. The
lines of the README with and without a schedule, all others with a cosine to zero, as the guide says; three seeds.
"""

from __future__ import annotations

import functools

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import fisherfold

SEEDS = range(3)
EPOCHS = 8


def mlp():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


NETWORKS = {"mlp": mlp, "cnn": cnn}
SGD = {
    rate: lambda net, x, rate=rate: torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    for rate in (0.03, 0.1, 0.3)
}
FEW_STEPS = lambda net, x: fisherfold.SphereOptimizer(net, lr=0.08, rest_lr=0.02)  # noqa: E731
RECOMMENDED = {
    "few steps": FEW_STEPS,
    "README": lambda net, x: fisherfold.SphereOptimizer(net, lr=0.02),
    "larger angle": lambda net, x: fisherfold.SphereOptimizer(net, lr=0.04),
    "rest sgd": lambda net, x: fisherfold.SphereOptimizer(net, lr=0.02, rest="sgd"),
    "gradient": lambda net, x: fisherfold.SphereOptimizer(net, lr=0.02, direction="gradient"),
    "natural": lambda net, x: fisherfold.SphereOptimizer(net, lr=0.02, direction="natural"),
    "mkfac": lambda net, x: fisherfold.MKFAC(net, example_input=x),
    "mkfac, large damping": lambda net, x: fisherfold.MKFAC(net, damping=1.0, example_input=x),
    "mkfac, kfac": lambda net, x: fisherfold.MKFAC(net, rest="kfac", example_input=x),
    "kfac": lambda net, x: fisherfold.KFAC(net),
    "sgdg": lambda net, x: fisherfold.SGDG(net, example_input=x),
}


@functools.lru_cache
def digits():
    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(
        found.target
    )


def accuracy(network, make, seed, epochs, schedule):
    x, y = digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    train, test = order[:1200], order[1200:]
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    optimizer = make(model, x[train[:32]])
    scheduler = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * 19) if schedule else None
    )
    for _ in range(epochs):
        for batch in train[torch.randperm(1200, generator=generator)].split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
    model.eval()
    with torch.no_grad():
        return 100 * (model(x[test]).argmax(1) == y[test]).float().mean().item()


@functools.lru_cache
def mean_accuracy(network, make, epochs=EPOCHS, schedule=True):
    return sum(accuracy(network, make, seed, epochs, schedule) for seed in SEEDS) / len(SEEDS)


@functools.lru_cache
def tuned_sgd(network, epochs=EPOCHS, schedule=True):
    return max(mean_accuracy(network, make, epochs, schedule) for make in SGD.values())


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "setting",
    [s if s == "README" else pytest.param(s, marks=pytest.mark.slow) for s in RECOMMENDED],
)
def test_every_recommended_setting_is_within_a_point_of_tuned_sgd(setting, network):
    assert mean_accuracy(network, RECOMMENDED[setting]) > tuned_sgd(network) - 1.0


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("setting", ["mkfac"])
def test_no_schedule_is_needed(setting, network):
    ours = mean_accuracy(network, RECOMMENDED[setting], schedule=False)
    assert ours > tuned_sgd(network, schedule=False) - 1.0
