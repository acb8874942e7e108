"""How rngd solves its damped systems: the choice of solve="auto" beside every named method.

CPU seconds of a run to convergence on eight problems; hopeless methods are left out. "auto" is
chosen from the rows, the dimension, the model's counted operations and the digits asked for.

Against: solve="dense", "woodbury" and "cg" of the same method
Takes: a minute
Page: docs/benchmarks/core.md
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks._common import show, table
from fisherfold import Bernoulli, Categorical, Gaussian, NLLProblem, Poisson, minimize
from fisherfold.fisher.solve import METHODS as SOLVES
from fisherfold.manifolds import Euclidean, Grassmann, Manifold, Sphere, Stiefel

SMOKE = "--share 0.02 --runs 1 --problems 2"
METHODS = ("auto", "dense", "woodbury", "cg")
# Entries of a factor beyond which a method that forms it is left out.
FORMED = 5e8


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--share", type=float, default=1.0, help="of the samples (1)")
    parser.add_argument("--runs", type=int, default=1, help="of which the faster counts (1)")
    parser.add_argument("--problems", type=int, default=8, help="the first ones only (8)")


def main(given: Namespace) -> None:
    shown = table(
        "CPU seconds to convergence (auto over the best)",
        ("problem", "N", *METHODS, "ratio", "auto took"),
        left=1,
    )
    seconds(*problems()["Poisson, R^10"](0.1), "auto")  # what is loaded once
    for name, make in list(problems().items())[: given.problems]:
        problem, start = make(given.share)
        times: dict[str, float] = {}
        took = ""
        for method in METHODS:
            if not fits(problem, method):
                continue
            found = [seconds(problem, start, method) for _ in range(given.runs)]
            times[method] = min(spent for spent, _ in found)
            if method == "auto":
                took = found[0][1]
        best = min(times.values())
        cells = [f"{times[m]:.2f}" if m in times else "-" for m in METHODS]
        shown.add_row(name, f"{problem.n_samples}", *cells, f"{times['auto'] / best:.2f}", took)
    show(shown)


def seconds(problem: NLLProblem, start: Tensor, method: str) -> tuple[float, str]:
    """CPU seconds of a run, and which solves it has made."""
    began = time.process_time()
    result = minimize(problem, start, "rngd", solve=method, max_iter=200)
    spent = time.process_time() - began
    taken = {SOLVES[int(row["solve"])] for row in result.trace.rows[1:]}
    return spent, ", ".join(sorted(taken))


def fits(problem: NLLProblem, method: str) -> bool:
    dim, entries = problem.manifold.dim, problem.manifold.random_point().numel()
    point = problem.manifold.random_point()
    rows = problem.n_samples * problem.model(problem.inputs[:1], point).numel()
    if method == "woodbury":
        return dim > 200 and rows < 4000 and rows * entries < FORMED
    return method != "dense" or (dim <= 250)


def problems() -> dict[str, Callable[[float], tuple[NLLProblem, Tensor]]]:
    """Eight problems, from many samples of few parameters to few samples of many."""
    return {
        "scalar response, Grassmann(300, 10)": _projected(300, 10, 1500),
        "scalar response, Grassmann(500, 10)": _projected(500, 10, 2000),
        "logistic, Sphere(20)": _linear(Sphere(20), Bernoulli(), 1_000_000),
        "Poisson, R^10": _linear(Euclidean(10), Poisson(), 100_000),
        "logistic, Sphere(200)": _linear(Sphere(200), Bernoulli(), 20_000),
        "reduced rank, Stiefel(40, 3)": _reduced(40, 3, 20_000),
        "classes, Stiefel(40, 5)": _classes(40, 5, 20_000),
        "few samples, Sphere(5000)": _linear(Sphere(5000), Gaussian(0.1), 100),
    }


def _data(n: int, d: int) -> tuple[Tensor, torch.Generator]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, d, generator=g, dtype=torch.float64), g


def _linear(manifold: Manifold, likelihood: object, n: int) -> Callable[..., tuple]:
    def make(share: float) -> tuple[NLLProblem, Tensor]:
        x, g = _data(int(share * n), manifold.point_shape[0])
        truth = manifold.random_point(generator=g)
        truth = truth / max(1.0, float(truth.norm()))
        y = likelihood.sample(x @ truth, generator=g)
        problem = NLLProblem(manifold, lambda x, w: x @ w, likelihood, x, y)
        start = truth if manifold.retraction == "add" else manifold.random_point(generator=g)
        return problem, 0.0 * start if isinstance(manifold, Euclidean) else start

    return make


def _projected(d: int, p: int, n: int) -> Callable[..., tuple]:
    """½‖Uᵀx‖² as the mean of a response."""
    manifold = Grassmann(d, p)

    def model(x: Tensor, u: Tensor) -> Tensor:
        return (x @ u).square().sum(-1) / 2

    def make(share: float) -> tuple[NLLProblem, Tensor]:
        x, g = _data(max(int(share * n), 20), d)
        truth = manifold.random_point(generator=g)
        y = model(x, truth)
        start = manifold.retract(truth, 0.5 * manifold.random_tangent(truth, generator=g))
        return NLLProblem(manifold, model, Gaussian(), x, y), start

    return make


def _reduced(d: int, p: int, n: int) -> Callable[..., tuple]:
    manifold = Stiefel(d, p)

    def make(share: float) -> tuple[NLLProblem, Tensor]:
        x, g = _data(int(share * n), d)
        truth = manifold.random_point(generator=g)
        y = torch.tanh(x @ truth) + 0.3 * torch.randn(len(x), p, generator=g, dtype=x.dtype)
        problem = NLLProblem(manifold, lambda x, u: torch.tanh(x @ u), Gaussian(0.09), x, y)
        return problem, manifold.random_point(generator=g)

    return make


def _classes(d: int, p: int, n: int) -> Callable[..., tuple]:
    manifold = Stiefel(d, p)

    def make(share: float) -> tuple[NLLProblem, Tensor]:
        x, g = _data(int(share * n), d)
        truth = manifold.random_point(generator=g)
        y = Categorical().sample(3 * x @ truth, generator=g)
        problem = NLLProblem(manifold, lambda x, u: 3 * x @ u, Categorical(), x, y)
        return problem, manifold.random_point(generator=g)

    return make
