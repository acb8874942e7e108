"""Inversion-free natural gradients on manifolds (arXiv 2604.02969) on its three kinds of problem.

The paper keeps an estimate of the inverse Fisher matrix by rank-one updates with scores that are
drawn from the model, carries it along by transport, and steps with stochastic gradients. Its
abstract and algorithm are followed here; the data sets, sizes and step sizes of its experiments
could not be looked up, so that these problems are of its kinds, not its own:

- variational Bayes: a Gaussian posterior of a logistic regression on the Bures-Wasserstein
  manifold;
- a Sylvester flow with frames on the Stiefel manifold, fitted to a bent and rotated density;
- logistic regression of reduced rank, weights U Vᵀ with an orthonormal U.

Its step is c / (10 + s)^0.75 with the best of three c and of two first estimates on a run of its
own. Ours sees the same model: quadrature instead of draws for the posterior, fixed draws for the
flow, all rows for the regression. Seconds of CPU until the objective, on draws or rows that no run
uses, is within a share of the whole fall of the best value that was reached.

Against: our own implementation of the paper's algorithm
Takes: ten minutes
Page: docs/benchmarks/core.md
"""

from __future__ import annotations

import math
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fisherfold import LossProblem, NLLProblem, Problem, minimize
from fisherfold.fisher import Categorical
from fisherfold.manifolds import Euclidean, LowRankPSD, Manifold, Product, Stiefel
from fisherfold.manifolds.base import flatten, tree_map, unflatten
from fisherfold.solvers import State

SMOKE = "--seeds 1 --seconds 2"

# c of the steps, and the inverse Fisher matrix at the start in units of the identity
GRID = [(c, h) for c in (0.1, 0.5, 2.0) for h in (0.01, 1.0)]
# shares of the fall of the objective at which time is taken
SHARES = (0.01, 0.001)
Generator = torch.Generator


@dataclass
class Case:
    """A model: a noisy gradient and a drawn score for the paper's method, a problem for ours."""

    name: str
    manifold: Manifold
    start: Any
    gradient: Callable[[Any, Generator], Any]
    score: Callable[[Any, Generator], Any]
    problem: Problem
    method: str
    objective: Callable[[Any], float]


def derivative(f: Callable[[Any], Tensor], x: Any) -> Any:
    return torch.func.grad(f)(x)


def posterior(seed: int) -> Case:
    g = torch.Generator().manual_seed(seed)
    n, d = 500, 10
    rows = torch.randn(n, d, generator=g, dtype=torch.float64)
    truth = torch.randn(d, generator=g, dtype=torch.float64)
    signs = 2.0 * (torch.rand(n, generator=g) < torch.sigmoid(rows @ truth)).double() - 1
    signed = signs[:, None] * rows
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(20))
    weights = weights / weights.sum()
    manifold = Product({"mean": Euclidean(d), "root": LowRankPSD(d, d)})

    def divergence(x: Any) -> Tensor:
        """KL to the prior N(0, 10 I), less a constant."""
        prior = (x["mean"].square().sum() + x["root"].square().sum()) / 20
        return prior - torch.linalg.slogdet(x["root"]).logabsdet

    def exact(x: Any) -> Tensor:
        mean, spread = signed @ x["mean"], (signed @ x["root"]).norm(dim=1)
        logits = mean[:, None] + spread[:, None] * nodes
        return (torch.nn.functional.softplus(-logits) @ weights).sum() + divergence(x)

    def gradient(x: Any, g: Generator) -> Any:
        draws = torch.randn(10, d, generator=g, dtype=torch.float64)

        def noisy(x: Any) -> Tensor:
            beta = x["mean"] + draws @ x["root"].mT
            return torch.nn.functional.softplus(-beta @ signed.T).sum() / 10 + divergence(x)

        return derivative(noisy, x)

    def score(x: Any, g: Generator) -> Any:
        z = x["mean"] + x["root"] @ torch.randn(d, generator=g, dtype=torch.float64)

        def density(x: Any) -> Tensor:
            white = torch.linalg.solve(x["root"], z - x["mean"])
            return -0.5 * white @ white - torch.linalg.slogdet(x["root"]).logabsdet

        return derivative(density, x)

    start = {"mean": torch.zeros(d).double(), "root": torch.eye(d, dtype=torch.float64)}
    problem = LossProblem(manifold, exact)
    name = "variational Bayes, Bures-Wasserstein(10)"
    return Case(
        name, manifold, start, gradient, score, problem, "trust-region", lambda x: float(exact(x))
    )


def flow(seed: int) -> Case:
    g = torch.Generator().manual_seed(seed)
    d, m, layers = 6, 3, 2
    turn = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q
    factors: dict[str, Manifold] = {}
    for k in range(layers):
        factors |= {f"q{k}": Stiefel(d, m), f"b{k}": Euclidean(m)}
        factors |= {f"r{k}": Euclidean(m, m), f"s{k}": Euclidean(m, m)}
    manifold = Product(factors)

    def target(y: Tensor) -> Tensor:
        """Minus the logarithm of a bent normal density in rotated axes."""
        y = y @ turn
        bent = (y[..., 1] - y[..., 0].square() + 1) / 0.5
        rest = y[..., 0].square() + y[..., 2:].square().sum(-1)
        return 0.5 * (bent.square() + rest)

    def layer(z: Tensor, x: Any, k: int) -> tuple[Tensor, Tensor]:
        upper, lower = x[f"r{k}"].triu(1), x[f"s{k}"].triu(1)
        upper = upper + torch.diag(x[f"r{k}"].diagonal().tanh())
        lower = lower + torch.diag(x[f"s{k}"].diagonal().tanh())
        inner = torch.tanh(z @ x[f"q{k}"] @ lower.mT + x[f"b{k}"])
        slopes = (1 - inner.square()) * upper.diagonal() * lower.diagonal()
        return z + inner @ upper.mT @ x[f"q{k}"].mT, torch.log1p(slopes).sum(-1)

    def pushed(z: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        total = z.new_zeros(z.shape[:-1])
        for k in range(layers):
            z, change = layer(z, x, k)
            total = total + change
        return z, total

    def divergence(x: Any, z: Tensor) -> Tensor:
        y, change = pushed(z, x)
        return (target(y) - change - 0.5 * z.square().sum(-1)).mean()

    def gradient(x: Any, g: Generator) -> Any:
        draws = torch.randn(64, d, generator=g, dtype=torch.float64)
        return derivative(lambda x: divergence(x, draws), x)

    def score(x: Any, g: Generator) -> Any:
        """Of log q at a draw of the flow, which stays where it is as the parameters change."""
        z = torch.randn(d, generator=g, dtype=torch.float64)
        jacobian = torch.func.jacrev(lambda z: pushed(z, x)[0])(z)
        slope = derivative(lambda z: -0.5 * z @ z - pushed(z, x)[1], z)
        pull = torch.linalg.solve(jacobian.mT, slope)

        def density(x: Any) -> Tensor:
            y, change = pushed(z, x)
            return -change - pull @ y

        return derivative(density, x)

    start = manifold.random_point(generator=g)
    start = {k: 0.3 * v if k[0] in "brs" else v for k, v in start.items()}
    fixed = torch.randn(1024, d, generator=g, dtype=torch.float64)
    fixed = torch.cat([fixed, -fixed])
    unseen = torch.randn(20_000, d, generator=g, dtype=torch.float64)
    problem = LossProblem(manifold, lambda x: divergence(x, fixed))
    return Case(
        "Sylvester flow, two frames of Stiefel(6, 3)",
        manifold,
        start,
        gradient,
        score,
        problem,
        "lbfgs",
        lambda x: float(divergence(x, unseen)),
    )


def regression(seed: int) -> Case:
    g = torch.Generator().manual_seed(seed)
    n, d, classes, rank = 5000, 40, 10, 3
    rows = torch.randn(n, d, generator=g, dtype=torch.float64)
    weights = torch.randn(d, rank, generator=g) @ torch.randn(rank, classes, generator=g)
    noise = -torch.log(-torch.log(torch.rand(n, classes, generator=g, dtype=torch.float64)))
    labels = (rows @ weights.double() / d**0.5 + noise).argmax(1)
    manifold = Product({"u": Stiefel(d, rank), "v": Euclidean(classes, rank)})

    def logits(rows: Tensor, x: Any) -> Tensor:
        return rows @ x["u"] @ x["v"].mT

    def nll(x: Any, rows: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits(rows, x), labels)

    def gradient(x: Any, g: Generator) -> Any:
        batch = torch.randint(n, (64,), generator=g)
        return derivative(lambda x: nll(x, rows[batch], labels[batch]), x)

    def score(x: Any, g: Generator) -> Any:
        row = rows[torch.randint(n, (1,), generator=g)]
        label = torch.multinomial(logits(row, x).softmax(1), 1, generator=g)[0]
        return derivative(lambda x: -nll(x, row, label), x)

    start = manifold.random_point(generator=g)
    start["v"] = 0.1 * start["v"]
    problem = NLLProblem(manifold, logits, Categorical(), rows, labels)
    name = "logistic regression of rank 3, Stiefel(40, 3)"
    return Case(
        name,
        manifold,
        start,
        gradient,
        score,
        problem,
        "rngd",
        lambda x: float(nll(x, rows, labels)),
    )


Curve = list[tuple[float, float]]


def papers(case: Case, setting: tuple[float, float], seconds: float, seed: int) -> Curve:
    """CPU time and objective along a run of the paper's method."""
    g = torch.Generator().manual_seed(seed)
    manifold, x = case.manifold, case.start
    rate, first = setting
    inverse = first * torch.eye(flatten(x).numel(), dtype=torch.float64)
    curve, spent, step, due = [(0.0, case.objective(x))], 0.0, 0, 0.02
    while spent < seconds:
        began = time.process_time()
        phi = flatten(manifold.riemannian_gradient(x, case.score(x, g)))
        u = inverse @ phi
        inverse = inverse - torch.outer(u, u) / (1 + phi @ u)
        gradient = flatten(manifold.riemannian_gradient(x, case.gradient(x, g)))
        step += 1
        move = -rate / (10 + step) ** 0.75 * (step * inverse @ gradient)
        # the largest step that the paper's theory would call local
        move = move * min(1.0, 1.0 / float(move.norm()))
        y = manifold.retract(x, manifold.project(x, unflatten(move, x)))
        inverse = carried(manifold, x, y, carried(manifold, x, y, inverse).mT)
        x = y
        spent += time.process_time() - began
        if spent >= due:
            curve.append((spent, case.objective(x)))
            due = 1.1 * spent
    return curve


def carried(manifold: Manifold, x: Any, y: Any, rows: Tensor) -> Tensor:
    """Every row of a matrix as a tangent vector, transported from x to y."""
    count = len(rows)

    def repeated(tree: Any) -> Any:
        return tree_map(lambda leaf: leaf.expand(count, *leaf.shape), tree)

    moved = manifold.transport(repeated(x), repeated(y), unflatten(rows, x))
    return torch.cat([moved[key].reshape(count, -1) for key in x], dim=1)


def ours(case: Case) -> Curve:
    """CPU time and objective along a run of ``minimize``."""
    curve = [(0.0, case.objective(case.start))]
    clock = {"spent": 0.0, "since": time.process_time()}

    def watch(state: State) -> None:
        clock["spent"] += time.process_time() - clock["since"]
        curve.append((clock["spent"], case.objective(state.x)))
        clock["since"] = time.process_time()

    minimize(case.problem, case.start, case.method, max_iter=300, callback=watch)
    return curve


def time_to(curve: Curve, level: float) -> float:
    return next((spent for spent, value in curve if value <= level), math.inf)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a run of the paper's")


def main(given: Namespace) -> None:
    table = Table(title=f"CPU seconds to the objective, medians of {given.seeds} seeds")
    for column in ("problem", "within", "fisherfold", "the paper's", "c, h", "best: ours, theirs"):
        table.add_column(column)
    for build in (posterior, flow, regression):
        ours(build(99))  # a warm-up
        tuning = build(100)
        finals = {s: papers(tuning, s, 0.3 * given.seconds, 0)[-1][1] for s in GRID}
        best_setting = min(finals, key=lambda s: min(math.inf, finals[s]))
        times: dict[float, list[tuple[float, float]]] = {share: [] for share in SHARES}
        ends = []
        for seed in range(given.seeds):
            case = build(seed)
            mine, their = ours(case), papers(case, best_setting, given.seconds, seed)
            best = [min(value for _, value in curve) for curve in (mine, their)]
            ends.append(best)
            fall = mine[0][1] - min(best)
            for share in SHARES:
                level = min(best) + share * fall
                times[share].append((time_to(mine, level), time_to(their, level)))
        for share in SHARES:
            both = [median(pair[i] for pair in times[share]) for i in range(2)]
            cells = [f"{t:.3f}" if math.isfinite(t) else "not reached" for t in both]
            values = ", ".join(f"{median(end[i] for end in ends):.4f}" for i in range(2))
            table.add_row(
                case.name,
                f"{100 * share:g} % of the fall",
                *cells,
                f"{best_setting[0]}, {best_setting[1]}",
                values,
            )
    Console(width=140).print(table)
