"""Factor analysis and probabilistic PCA by Fisher scoring.

Both see the same data; the log-likelihood per observation is computed from the two covariance
matrices by one function. scikit-learn stops where its likelihood changes by less than tol=1e-9
between two iterations. CPU time includes passing over the data once; medians over data sets.

Against: scikit-learn's EM and closed form
Takes: half a minute
Page: docs/benchmarks/core.md
"""

from __future__ import annotations

import time
import warnings
from argparse import ArgumentParser, Namespace
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.decomposition import PCA, FactorAnalysis

from fisherfold import minimize
from fisherfold.manifolds import Euclidean, Product, Stiefel
from fisherfold.problems import GaussianModel
from fisherfold.solvers import GradientNorm

SMOKE = "--seeds 1 --n 300 --d 8 --q 2"


def data(n: int, d: int, q: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    loadings = torch.randn(d, q, generator=g, dtype=torch.float64)
    noise = 0.2 + 2 * torch.rand(d, generator=g, dtype=torch.float64)
    factors, rest = (torch.randn(n, k, generator=g, dtype=torch.float64) for k in (q, d))
    return factors @ loadings.mT + rest * noise.sqrt()


def log_likelihood(covariance: torch.Tensor, y: torch.Tensor) -> float:
    """Per observation."""
    centred = y - y.mean(0)
    sample = centred.mT @ centred / len(y)
    d = len(sample)
    fit = torch.logdet(covariance) + torch.linalg.solve(covariance, sample).trace()
    return -0.5 * float(fit + d * np.log(2 * np.pi))


def factor_model(y: torch.Tensor, q: int) -> tuple[GaussianModel, dict[str, torch.Tensor]]:
    """Σ = Λ Λᵀ + diag(exp ψ) around the mean, from the principal components."""
    d = y.shape[1]
    space = Product({"loadings": Euclidean(d, q), "log_noise": Euclidean(d)})
    mean = y.mean(0)

    def moments(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return mean, t["loadings"] @ t["loadings"].mT + torch.diag(t["log_noise"].exp())

    problem = GaussianModel(space, moments, y)
    values, vectors = torch.linalg.eigh(problem.covariance)
    noise = values[:-q].mean()
    loadings = vectors[:, -q:] * (values[-q:] - noise).sqrt()
    rest = (problem.covariance.diagonal() - loadings.square().sum(1)).clamp(min=0.1 * float(noise))
    return problem, {"loadings": loadings, "log_noise": rest.log()}


def component_model(y: torch.Tensor, q: int) -> tuple[GaussianModel, dict[str, torch.Tensor]]:
    """Σ = U diag(exp s) Uᵀ + exp(ψ) I with orthonormal U, from a random start."""
    d = y.shape[1]
    space = Product({"axes": Stiefel(d, q), "log_scales": Euclidean(q), "log_noise": Euclidean(1)})
    mean = y.mean(0)

    def moments(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        signal = (t["axes"] * t["log_scales"].exp()) @ t["axes"].mT
        return mean, signal + t["log_noise"].exp() * torch.eye(d, dtype=torch.float64)

    problem = GaussianModel(space, moments, y)
    start = space.random_point(generator=torch.Generator().manual_seed(0))
    return problem, {
        **start,
        "log_scales": start["log_scales"] * 0 + 1,
        "log_noise": start["log_noise"] * 0,
    }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--d", type=int, default=50)
    parser.add_argument("--q", type=int, default=5)


def main(given: Namespace) -> None:
    table = Table(
        title=f"n = {given.n}, d = {given.d}, q = {given.q}, medians of {given.seeds} data sets"
    )
    for name in (
        "model",
        "by",
        "iterations",
        "CPU ms",
        "log-likelihood / n",
        "less than the best by",
    ):
        table.add_column(name, justify="left" if name in ("model", "by") else "right")
    rows: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for seed in range(given.seeds):
        y = data(given.n, given.d, given.q, seed)
        for model, make in (
            ("factor analysis", factor_model),
            ("probabilistic PCA", component_model),
        ):
            began = time.process_time()
            problem, start = make(y, given.q)
            result = minimize(problem, start, stop=GradientNorm(1e-6), max_iter=200)
            spent = time.process_time() - began
            ours = log_likelihood(problem.moments(result.x)[1], y)
            rows.setdefault((model, f"rngd ({result.status})"), []).append(
                (result.iterations, spent, ours)
            )
            began = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if model == "factor analysis":
                    fit = FactorAnalysis(
                        given.q, tol=1e-9, max_iter=20_000, svd_method="lapack"
                    ).fit(y.numpy())
                    steps = fit.n_iter_
                    covariance = fit.get_covariance()
                else:
                    fit = PCA(given.q).fit(y.numpy())
                    steps = 1
                    covariance = fit.get_covariance() * (len(y) - 1) / len(y)
            spent = time.process_time() - began
            theirs = log_likelihood(torch.from_numpy(covariance), y)
            rows.setdefault((model, "scikit-learn"), []).append((steps, spent, theirs))
    for (model, by), runs in rows.items():
        both = zip(*(found for (name, _), found in rows.items() if name == model), strict=True)
        best = [max(run[2] for run in pair) for pair in both]
        lost = max(b - run[2] for b, run in zip(best, runs, strict=True))
        steps, spent, value = (median(run[k] for run in runs) for k in range(3))
        table.add_row(
            model, by, f"{steps:.0f}", f"{1e3 * spent:.0f}", f"{value:.8f}", f"{lost:.1e}"
        )
    Console(width=120).print(table)
