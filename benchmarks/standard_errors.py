"""Whether 90 % confidence intervals hold the truth in 90 % of data sets.

Three models on three manifolds; every data set is fitted by ``minimize``, and intervals of
functions of the estimate come from ``result.covariance().interval(f)``. Regions are
``contains(truth)``. ± is two standard errors of the coverage, by simulation; intervals of one data
set are not independent, and are counted as one observation.

Against: the nominal level
Takes: five minutes
Page: docs/benchmarks/core.md
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fisherfold import Bernoulli, Gaussian, NLLProblem, Problem, minimize
from fisherfold.manifolds import Euclidean, Grassmann, Product, Sphere
from fisherfold.problems import GaussianModel

SMOKE = "--draws 3"

Draw = Callable[[torch.Generator], Problem]
Model = tuple[str, Draw, Any, Callable[[Any], torch.Tensor], bool]


def normal(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def logistic() -> Model:
    manifold = Sphere(5)
    truth = manifold.random_point(generator=torch.Generator().manual_seed(1))

    def draw(g: torch.Generator) -> Problem:
        x = normal(400, 5, generator=g)
        y = torch.bernoulli(torch.sigmoid(3 * x @ truth), generator=g)
        return NLLProblem(manifold, lambda x, w: 3 * x @ w, Bernoulli(), x, y)

    return "logistic regression, direction on Sphere(5), n = 400", draw, truth, lambda w: w, True


def reduced_rank() -> Model:
    manifold = Product({"left": Grassmann(6, 1), "right": Euclidean(1, 3)})
    truth = manifold.random_point(generator=torch.Generator().manual_seed(2))

    def draw(g: torch.Generator) -> Problem:
        x = normal(200, 6, generator=g)
        y = x @ truth["left"] @ truth["right"] + normal(200, 3, generator=g)
        return NLLProblem(manifold, lambda x, t: x @ t["left"] @ t["right"], Gaussian(), x, y)

    return (
        "reduced-rank regression, Grassmann(6, 1), n = 200",
        draw,
        truth,
        lambda t: t["left"] @ t["right"],
        False,
    )


def factor_analysis() -> Model:
    manifold = Product({"loadings": Euclidean(6, 1), "log_noise": Euclidean(6)})
    generator = torch.Generator().manual_seed(3)
    truth = {
        "loadings": 1 + 0.3 * normal(6, 1, generator=generator),
        "log_noise": 0.3 * normal(6, generator=generator),
    }

    def draw(g: torch.Generator) -> Problem:
        y = normal(500, 1, generator=g) @ truth["loadings"].mT
        y = y + (truth["log_noise"] / 2).exp() * normal(500, 6, generator=g)
        zero = torch.zeros(6, dtype=torch.float64)
        return GaussianModel(
            manifold,
            lambda t: (zero, t["loadings"] @ t["loadings"].mT + torch.diag(t["log_noise"].exp())),
            y,
        )

    def share(t: Any) -> torch.Tensor:
        """The share of every variance that the factor explains."""
        return t["loadings"][:, 0].square() / (t["loadings"][:, 0].square() + t["log_noise"].exp())

    return "factor analysis, shares of variance, n = 500", draw, truth, share, False


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--level", type=float, default=0.9)


def main(given: Namespace) -> None:
    table = Table(title=f"Coverage of {given.level:.0%} intervals, {given.draws} data sets")
    for name in ("model", "intervals", "region", "± 2 s.e.", "CPU ms per data set"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for make in (logistic, reduced_rank, factor_analysis):
        name, draw, truth, f, region = make()
        value = f(truth)
        hits = []
        inside = []
        began = time.process_time()
        for seed in range(given.draws):
            covariance = minimize(
                draw(torch.Generator().manual_seed(1000 + seed)), truth
            ).covariance()
            low, high = covariance.interval(f, given.level)
            hits.append(float(((low <= value) & (value <= high)).double().mean()))
            if region:
                inside.append(float(covariance.contains(truth, given.level)))
        spent = 1e3 * (time.process_time() - began) / given.draws
        error = 2 * stdev(hits) / given.draws**0.5
        table.add_row(
            name,
            f"{fmean(hits):.1%}",
            f"{fmean(inside):.1%}" if inside else "",
            f"{error:.1%}",
            f"{spent:.0f}",
        )
    Console(width=120).print(table)
