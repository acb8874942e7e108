"""One exact-RFIM product over one gradient, and the memory of a CG solve.

Peak memory is that of tensors, from the allocator's own profile; the dense matrix that is never
formed is shown beside.

Against: one gradient, and the dense matrix
Takes: a minute
Page: docs/benchmarks/core.md
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks._common import least_seconds
from fisherfold import Categorical, Gaussian, NLLProblem
from fisherfold.manifolds import Grassmann, Oblique, Stiefel
from fisherfold.manifolds.base import Point, flatten

SMOKE = "--only network --rounds 1"


def subspace() -> tuple[str, NLLProblem, Point]:
    generator = torch.Generator().manual_seed(0)
    manifold = Grassmann(2000, 10)
    x = torch.randn(2000, 2000, generator=generator, dtype=torch.float64)
    u = manifold.random_point(generator=generator)
    problem = NLLProblem(
        manifold, lambda x, u: torch.tanh(x @ u) @ u.mT[:, :50], Gaussian(), x, x[:, :50]
    )
    return "autoencoder on Gr(2000, 10), N = 2000", problem, u


def frames() -> tuple[str, NLLProblem, Point]:
    generator = torch.Generator().manual_seed(0)
    manifold = Stiefel(500, 20)
    x = torch.randn(4000, 500, generator=generator, dtype=torch.float64)
    y = torch.randint(20, (4000,), generator=generator)
    problem = NLLProblem(manifold, lambda x, w: torch.tanh(x @ w), Categorical(), x, y)
    return (
        "classifier on St(500, 20), N = 4000",
        problem,
        manifold.random_point(generator=generator),
    )


def network() -> tuple[str, NLLProblem, Point]:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)
    ).double()
    x = torch.randn(4000, 64, dtype=torch.float64)
    y = torch.randint(10, (4000,))
    oblique = Oblique(256, 64)
    problem, start = NLLProblem.from_module(
        module, Categorical(), x, y, manifolds={"0.weight": oblique}
    )
    start["0.weight"] = oblique.random_point()
    return "network, first layer on Oblique(256, 64), N = 4000", problem, start


def peak_bytes(function: Callable[[], object]) -> int:
    """The high-water mark of tensor memory that a call adds."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    level = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


MAKERS = {"subspace": subspace, "frames": frames, "network": network}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", choices=MAKERS, help="one of the problems")
    parser.add_argument("--rounds", type=int, default=7, help="of which the best counts (7)")


def main(given: Namespace) -> None:
    table = Table(
        title="Exact RFIM: one product over one gradient (goal ≤ 3.5), and CG without a matrix"
    )
    for name in (
        "problem",
        "dim",
        "gradient ms",
        "product ms",
        "ratio",
        "CG peak MiB",
        "dense would be MiB",
    ):
        table.add_column(name, justify="left" if name == "problem" else "right")
    makers = [MAKERS[given.only]] if given.only else MAKERS.values()
    for make in makers:
        title, problem, x = make()
        v = problem.manifold.random_tangent(x, generator=torch.Generator().manual_seed(1))
        gradient = least_seconds(partial(problem.gradient, x), given.rounds, time.perf_counter)
        operator = problem.fisher(x)
        product = least_seconds(partial(operator.matvec, v), given.rounds, time.perf_counter)
        g = problem.gradient(x)
        peak = peak_bytes(
            lambda p=problem, x=x, g=g: p.fisher(x).solution(g, 1e-3, method="cg", max_iter=20)
        )
        size = flatten(x).numel()
        table.add_row(
            title,
            str(problem.manifold.dim),
            f"{1e3 * gradient:.1f}",
            f"{1e3 * product:.1f}",
            f"{product / gradient:.2f}",
            f"{peak / 2**20:.0f}",
            f"{8 * size**2 / 2**20:.0f}",
        )
    Console(width=130).print(table)
