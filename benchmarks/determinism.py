"""What a result depends on besides its seed: repetition, threads, device.

Every fit runs twice as it is (equal bits are promised on one machine with one number of threads),
once with two threads, and on a GPU if there is one. Printed is the largest difference of the
predictions relative to their spread.

Against: the same fit again
Takes: a minute
Page: docs/reliability.md
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import fisherfold
from fisherfold import Gaussian, NLLProblem, minimize
from fisherfold.completion import LowRankImputer, MatrixCompletion
from fisherfold.manifolds import Sphere
from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor

SMOKE = "--only rngd"


def ratings() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rows, columns = np.nonzero(rng.random((3000, 1500)) < 0.05)
    truth = rng.normal(size=(3000, 5)) @ rng.normal(size=(5, 1500))
    return np.column_stack([rows, columns]), truth[rows, columns] + 0.5 * rng.normal(size=len(rows))


def completion(device: str, **options: object) -> np.ndarray:
    X, y = ratings()
    return MatrixCompletion(rank=8, device=device, **options).fit(X, y).predict(X)


def tasks() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    X = rng.normal(size=(20000, 30))
    task = rng.integers(200, size=20000)
    y = (X * (rng.normal(size=(200, 4)) @ rng.normal(size=(4, 30)))[task]).sum(1)
    return X, y + rng.normal(size=20000), task


def subspace(device: str, **options: object) -> np.ndarray:
    X, y, task = tasks()
    return SubspaceRegressor(4, max_iter=30, **options).fit(X, y, task=task).predict(X, task=task)


def classifier(device: str) -> np.ndarray:
    X, y, task = tasks()
    return (
        SubspaceClassifier(4, ridge=1.0, max_iter=20)
        .fit(X, y > 0, task=task)
        .decision_function(X, task=task)
    )


def imputer(device: str) -> np.ndarray:
    rng = np.random.default_rng(2)
    table = rng.normal(size=(2000, 3)) @ rng.normal(size=(3, 60)) + 0.2 * rng.normal(
        size=(2000, 60)
    )
    table[rng.random(table.shape) < 0.3] = np.nan
    return LowRankImputer(rank=3).fit(table).transform(table)


def solver(device: str, method: str, **options: object) -> np.ndarray:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(20000, 50, generator=g, dtype=torch.float64)
    w, start = (Sphere(50).random_point(generator=g).to(device) for _ in range(2))
    x = x.to(device)
    problem = NLLProblem(
        Sphere(50), lambda x, w: torch.tanh(x @ w), Gaussian(), x, torch.tanh(x @ w) + 0.1 * x[:, 0]
    )
    return minimize(problem, start, method, max_iter=10, **options).x.cpu().numpy()


def mkfac(device: str) -> np.ndarray:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 36, 128, bias=False),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    x = torch.randn(256, 3, 8, 8).to(device)
    y = torch.randint(10, (256,)).to(device)
    model.to(device)
    opt = fisherfold.MKFAC(
        model, lr=0.05, manifold_lr=0.1, damping=0.1, every=2, example_input=x[:8]
    )
    for _ in range(20):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    return model(x).detach().cpu().numpy()


FITS: dict[str, tuple[bool, Callable[[str], np.ndarray]]] = {
    "MatrixCompletion, variational, float32": (True, completion),
    "MatrixCompletion, variational, float64": (True, lambda d: completion(d, dtype="float64")),
    "MatrixCompletion, point, float32": (
        True,
        lambda d: completion(d, inference="point", ridge=1.0),
    ),
    "LowRankImputer": (False, imputer),
    "SubspaceRegressor, marginal": (False, subspace),
    "SubspaceRegressor, point": (False, lambda d: subspace(d, inference="point", ridge=1.0)),
    "SubspaceClassifier": (False, classifier),
    "minimize rngd, 10 iterations": (True, lambda d: solver(d, "rngd")),
    "minimize rcg, 10 iterations": (True, lambda d: solver(d, "rcg")),
    "minimize rsvrg, 10 epochs": (True, lambda d: solver(d, "rsvrg", step=0.01, batch_size=500)),
    "MKFAC, 20 steps, float32": (True, mkfac),
}


def difference(a: np.ndarray, b: np.ndarray) -> str:
    if a.tobytes() == b.tobytes():
        return "same bits"
    return f"{np.abs(a - b).max() / a.std():.1e}"


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cuda for a GPU (cpu)")
    parser.add_argument("--only", default="", help="fits with this in their names")


def main(given: Namespace) -> None:
    device = given.device
    names = (
        ["again", "2 threads"]
        if device == "cpu"
        else ["again", f"{device} again", f"{device} : cpu"]
    )
    print(f"{'':42s}" + "".join(f"{name:>14s}" for name in names))
    for name, (movable, fit) in FITS.items():
        if given.only not in name:
            continue
        if device != "cpu" and not movable:
            continue
        torch.set_num_threads(1)
        one = fit("cpu")
        again = fit("cpu")
        found = [difference(one, again)]
        if device == "cpu":
            torch.set_num_threads(2)
            found.append(difference(one, fit("cpu")))
        else:
            here = fit(device)
            there = fit(device)
            found += [difference(here, there), difference(one, here)]
        print(f"{name:42s}" + "".join(f"{text:>14s}" for text in found), flush=True)
