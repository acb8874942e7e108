"""The examples folder of pymanopt: the same torch functions by both libraries.

Sizes, manifolds and costs are those of pymanopt's scripts; Oblique is transposed (its unit vectors
are columns, ours rows), fixed rank is (u, s, vᵀ) there and {u, s, v} here. Both begin at the same
point and end at a Riemannian gradient of 1e-6 of the first. CPU time on one thread, the least of
several runs in turn; of each library the fastest method that reaches the lower minimum to 1e-8.

Against: pymanopt's SteepestDescent, ConjugateGradient and TrustRegions with its PyTorch backend
Takes: two minutes
Page: docs/guides/coming-from-pymanopt.md
"""

from __future__ import annotations

import math
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pymanopt
import torch
from pymanopt import manifolds, optimizers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fisherfold import LossProblem, minimize
from fisherfold.manifolds import (
    SPD,
    Euclidean,
    FixedRank,
    Grassmann,
    LowRankPSD,
    Manifold,
    Oblique,
    Power,
    Product,
    Rotations,
    Sphere,
    Stiefel,
)
from fisherfold.solvers import GradientNorm

SMOKE = "--rounds 1 --only 3"

OURS = ("trust-region", "lbfgs", "rcg")
ACCURACY = 1e-6


@dataclass
class Example:
    """A cost for both libraries."""

    name: str
    ours: Manifold
    theirs: str
    sizes: tuple[Any, ...]
    cost: Callable[..., Tensor]
    # from our point to theirs, and from the arguments of their cost to our point
    there: Callable[[Any], Any] = field(default=lambda x: x.numpy())
    here: Callable[..., Any] = field(default=lambda x: x)


def examples() -> list[Example]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    symmetric = normal(128, 128)
    symmetric = 0.5 * (symmetric + symmetric.T)
    hermitian = normal(128, 128) + 1j * normal(128, 128)
    hermitian = 0.5 * (hermitian + hermitian.mH)
    columns, small, square = normal(5, 8), normal(5, 4), normal(10, 10)
    square = 0.5 * (square + square.T)
    factor = normal(1000, 5)
    psd = factor @ factor.T
    samples, targets = normal(200, 3), normal(200)
    pairs = normal(10, 3, 10) @ normal(10, 3, 10).mT
    cloud = normal(200, 3) * torch.tensor([3.0, 2.0, 1.0])
    cloud = cloud - cloud.mean(0)
    fixed = FixedRank(5, 4, 2)

    def packing(x: Tensor) -> Tensor:
        rows, others = torch.triu_indices(24, 24, 1).unbind()
        return 0.005 * torch.logsumexp((x @ x.T)[rows, others] / 0.005, 0)

    return [
        Example(
            "dominant_eigenvector",
            Sphere(128),
            "Sphere",
            (128,),
            lambda x: -(x @ symmetric @ x),
        ),
        Example(
            "dominant_invariant_subspace",
            Grassmann(128, 3),
            "Grassmann",
            (128, 3),
            lambda x: -(x * (symmetric @ x)).sum(),
        ),
        Example(
            "dominant_invariant_complex_subspace",
            Grassmann(128, 3, complex=True),
            "ComplexGrassmann",
            (128, 3),
            lambda x: -(x.conj() * (hermitian @ x)).real.sum(),
        ),
        Example(
            "closest_unit_norm_column_approximation",
            Oblique(8, 5),
            "Oblique",
            (5, 8),
            lambda x: 0.5 * (x.T - columns).square().sum(),
            lambda x: x.T.numpy(),
            lambda x: x.T,
        ),
        Example(
            "rank_k_correlation_matrix_approximation",
            Oblique(10, 3),
            "Oblique",
            (3, 10),
            lambda x: 0.25 * (x @ x.T - square).square().sum(),
            lambda x: x.T.numpy(),
            lambda x: x.T,
        ),
        Example(
            "packing_on_the_sphere",
            Oblique(24, 3),
            "Oblique",
            (3, 24),
            packing,
            lambda x: x.T.numpy(),
            lambda x: x.T,
        ),
        Example(
            "low_rank_matrix_approximation",
            fixed,
            "FixedRankEmbedded",
            (5, 4, 2),
            lambda x: (fixed.matrix(x) - small).square().sum(),
            _fixed_rank_there,
            lambda u, s, vt: {"u": u, "s": torch.diag(s), "v": vt.T},
        ),
        Example(
            "low_rank_psd_matrix_approximation",
            LowRankPSD(1000, 5),
            "PSDFixedRank",
            (1000, 5),
            lambda x: (x @ x.T - psd).square().sum(),
        ),
        Example(
            "multiple_linear_regression",
            Euclidean(3),
            "Euclidean",
            (3,),
            lambda w: (targets - samples @ w).square().sum(),
        ),
        Example(
            "optimal_rotations",
            Power(Rotations(3), 10),
            "SpecialOrthogonalGroup",
            (3,),
            lambda x: -(x * pairs).sum(),
        ),
        Example(
            "pca",
            Stiefel(3, 2),
            "Stiefel",
            (3, 2),
            lambda w: (cloud - cloud @ w @ w.T).square().sum(),
        ),
        _mixture(),
    ]


def _fixed_rank_there(x: dict[str, Tensor]) -> tuple[np.ndarray, ...]:
    u, s, vt = torch.linalg.svd(x["s"])
    return (x["u"] @ u).numpy(), s.numpy(), (x["v"] @ vt.T).T.numpy()


def _mixture() -> Example:
    """Three Gaussians in the plane, as covariances of augmented points (Hosseini and Sra 2015)."""
    rng = np.random.default_rng(0)
    means = [[-4, 1], [0, 0], [2, -1]]
    covariances = [[[3, 0], [0, 1]], [[1, 1], [1, 3]], [[0.5, 0], [0, 0.5]]]
    kind = rng.choice(3, size=1000, p=[0.1, 0.6, 0.3])
    rows = np.stack([rng.multivariate_normal(means[k], covariances[k]) for k in kind])
    y = torch.from_numpy(np.concatenate([rows, np.ones((1000, 1))], axis=1))

    def cost(x: dict[str, Tensor]) -> Tensor:
        inverse = torch.linalg.inv(x["S"])
        quadratic = torch.einsum("ni,kij,nj->nk", y, inverse, y)
        log_q = -0.5 * (quadratic + torch.linalg.slogdet(x["S"]).logabsdet)
        weights = torch.cat([x["v"], x["v"].new_zeros(1)]).log_softmax(0)
        return -torch.logsumexp(log_q + weights, dim=1).sum()

    return Example(
        "mixture_of_gaussians",
        Product({"S": Power(SPD(3), 3), "v": Euclidean(2)}),
        "mixture",
        (),
        cost,
        lambda x: [x["S"].numpy(), x["v"].numpy()],
        lambda s, v: {"S": s, "v": v},
    )


def ours(example: Example, method: str, start: Any, tol: float) -> tuple[float, float]:
    problem = LossProblem(example.ours, example.cost)
    began = time.process_time()
    result = minimize(problem, start, method, max_iter=2000, stop=GradientNorm(tol))
    return time.process_time() - began, result.value


def theirs(example: Example, optimizer: str, start: Any, tol: float) -> tuple[float, float]:
    if example.theirs == "mixture":
        spaces = [manifolds.SymmetricPositiveDefinite(3, k=3), manifolds.Euclidean(2)]
        manifold = manifolds.Product(spaces)
    elif example.theirs == "SpecialOrthogonalGroup":
        manifold = manifolds.SpecialOrthogonalGroup(3, k=10)
    else:
        manifold = getattr(manifolds, example.theirs)(*example.sizes)
    cost = pymanopt.function.pytorch(manifold)(_with_arguments(example))
    kind = getattr(optimizers, optimizer)
    run = kind(verbosity=0, min_gradient_norm=tol, max_iterations=2000, min_step_size=1e-14)
    problem = pymanopt.Problem(manifold, cost)
    first = example.there(start)
    first = first.copy() if isinstance(first, np.ndarray) else first
    if example.theirs == "FixedRankEmbedded":
        first = manifold.random_point().__class__(*first)
    began = time.process_time()
    try:
        result = run.run(problem, initial_point=first)
    except RuntimeError:  # its Hessian of a cost that is linear in the point
        return math.inf, math.nan
    return time.process_time() - began, float(result.cost)


def _with_arguments(example: Example) -> Callable[..., Tensor]:
    """Their cost, with the arguments that its manifold has."""
    if example.theirs == "FixedRankEmbedded":
        return lambda u, s, vt: example.cost(example.here(u, s, vt))
    if example.theirs == "mixture":
        return lambda s, v: example.cost(example.here(s, v))
    return lambda x: example.cost(example.here(x))


def compared(example: Example, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds and minima of every method of both."""
    start = example.ours.random_point(generator=torch.Generator().manual_seed(1))
    gradient = LossProblem(example.ours, example.cost).gradient(start)
    tol = ACCURACY * float(example.ours.norm(start, gradient))
    names = ["SteepestDescent", "ConjugateGradient"]
    if example.theirs != "FixedRankEmbedded":
        names.append("TrustRegions")
    runs: dict[str, Callable[[], tuple[float, float]]] = {}
    for method in OURS:
        runs[method] = partial(ours, example, method, start, tol)
    for name in names:
        runs[name] = partial(theirs, example, name, start, tol)
    seconds, values = dict.fromkeys(runs, math.inf), {}
    for _ in range(rounds + 1):  # the first is a warm-up
        for name, run in runs.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                spent, values[name] = run()
            seconds[name] = min(seconds[name], spent)
    return seconds, values


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=int, default=99, help="how many examples")


def main(given: Namespace) -> None:
    table = Table(title=f"CPU milliseconds to a gradient of {ACCURACY:g} of the first")
    for column in ("example", "fisherfold", "ms", "pymanopt", "ms", "ratio", "minima differ by"):
        table.add_column(column)
    ratios = []
    for example in examples()[: given.only]:
        seconds, values = compared(example, given.rounds)
        lowest = min(value for value in values.values() if math.isfinite(value))
        good = {n for n, v in values.items() if v - lowest <= 1e-8 * max(1.0, abs(lowest))}
        best = [
            min(names & good, key=seconds.__getitem__, default=None)
            for names in (set(OURS), set(values) - set(OURS))
        ]
        cells = []
        for name in best:
            cells += [name or "none", f"{1e3 * seconds[name]:.1f}" if name else ""]
        if None not in best:
            ratios.append(seconds[best[0]] / seconds[best[1]])
            cells += [f"{ratios[-1]:.2f}", f"{abs(values[best[0]] - values[best[1]]):.0e}"]
        table.add_row(example.name, *cells)
    Console(width=130).print(table)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"geometric mean of the ratios: {mean:.2f}")
