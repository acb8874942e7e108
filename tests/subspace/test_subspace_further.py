"""Fits whose subspace has stopped before its place: the step of EM, the evidence, and when to go on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from fisherfold.subspace import SubspaceRegressor
from fisherfold.subspace import information as subspace_information
from fisherfold.subspace.em import CompleteInformation, expected_step
from fisherfold.subspace.further import evidence, fit_further, stalled
from fisherfold.subspace.information import shared_information, shared_prior
from fisherfold.subspace.marginal import MarginalSubspaceProblem, SubspacePrior, posterior
from fisherfold.subspace.marginal_fit import fit_marginal, noise_penalty
from fisherfold.subspace.tasks import TaskStatistics


def table(seed, tasks, rows, features, rank, noise):
    """Rows drawn from the model, and the weights of the tasks."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    weights = normal(features) + normal(tasks, rank) @ normal(rank, features)
    task = torch.arange(tasks).repeat_interleave(rows)
    X = normal(tasks * rows, features) + 3 * normal(features)
    y = (X * weights[task]).sum(1) + noise * normal(tasks * rows)
    return X, y, task, weights


def a_prior(seed, *, tasks, features, rank, singular=False):
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(rank, rank, generator=g, dtype=torch.float64)
    if singular:
        root[:, 0] = 0
    frame = torch.linalg.qr(torch.randn(features, rank, generator=g, dtype=torch.float64))[0]
    mean = torch.randn(features, generator=g, dtype=torch.float64)
    noise = 0.5 + torch.rand(tasks, generator=g, dtype=torch.float64)
    return SubspacePrior(mean, frame, root @ root.mT, noise)


def error(fit, weights):
    return float((fit.weights - weights).square().mean())


def test_the_complete_information_is_that_of_seen_coefficients_and_bounds_the_hessian():
    X, y, task, _ = table(0, tasks=5, rows=4, features=6, rank=2, noise=1.0)
    statistics, prior = TaskStatistics.from_rows(X, y, task), a_prior(1, tasks=5, features=6, rank=2)
    problem = MarginalSubspaceProblem(statistics, prior)
    U, moments = prior.frame, posterior(statistics, prior).second_moment()
    operator = CompleteInformation(problem, U)
    H = problem.manifold.random_tangent(U, generator=torch.Generator().manual_seed(2))
    dense = sum(X[task == t].T @ X[task == t] @ H @ moments[t] / prior.noise[t] for t in range(5)) / 5
    torch.testing.assert_close(operator @ H, problem.manifold.project(U, dense), rtol=1e-11, atol=1e-12)
    # -log p at L = U + H lies below its value at U by what Q falls, at least
    slope, curvature = (problem.gradient(U) * H).sum(), operator.quadratic(H)
    for length in (-1.0, -0.1, 0.1, 1.0):
        frame, change = torch.linalg.qr(U + length * H)
        there = replace(prior, frame=frame, covariance=change @ prior.covariance @ change.mT)
        rise = posterior(statistics, there).losses.mean() - posterior(statistics, prior).losses.mean()
        assert float(rise) <= float(length * slope + length**2 / 2 * curvature) + 1e-12


@pytest.mark.parametrize("singular", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_step_of_em_never_raises_the_loss(seed, singular):
    X, y, task, _ = table(seed, tasks=8, rows=5, features=6, rank=2, noise=0.3)
    statistics = TaskStatistics.from_rows(X, y, task)
    prior = a_prior(seed, tasks=8, features=6, rank=3, singular=singular)
    before = float(posterior(statistics, prior).losses.sum())
    for _ in range(4):
        prior = expected_step(statistics, prior)
        after = float(posterior(statistics, prior).losses.sum())
        assert after < before
        before = after
    torch.testing.assert_close(prior.frame.mT @ prior.frame, torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("noise", ["task", "shared"])
def test_the_evidence_is_the_loss_with_the_determinant_of_what_is_shared(noise):
    X, y, task, _ = table(3, tasks=6, rows=5, features=4, rank=2, noise=1.0)
    statistics, prior = TaskStatistics.from_rows(X, y, task), a_prior(4, tasks=6, features=4, rank=2)
    found, known = posterior(statistics, prior), shared_prior(statistics, prior)
    information = shared_information(statistics, prior, found).reshape(12, 12)
    root = torch.kron(known.root, torch.diag(known.units))
    determinant = torch.logdet(torch.eye(12, dtype=torch.float64) + root @ information @ root) / 2
    expected = found.losses.sum() + determinant + noise_penalty(prior.noise, noise, statistics.all_tasks)
    assert evidence(statistics, prior, noise) == pytest.approx(float(expected), rel=1e-11)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_fit_whose_subspace_has_stopped_goes_on_to_a_better_model(seed):
    X, y, task, weights = table(seed, tasks=10, rows=15, features=12, rank=2, noise=1.0)
    statistics = TaskStatistics.from_rows(X, y, task)
    fit = fit_marginal(statistics, rank=2)
    assert fit.converged
    assert stalled(statistics, fit.prior)
    further = fit_further(statistics, fit, "task")
    assert evidence(statistics, further.prior, "task") < evidence(statistics, fit.prior, "task") - 5
    assert error(further, weights) < error(fit, weights) / 2
    losses = [row["loss"] for row in further.trace]
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(losses))
    assert [row["round"] for row in further.trace] == list(range(1, len(further.trace) + 1))
    assert further.trace[: len(fit.trace)] == fit.trace


def test_a_higher_likelihood_with_less_evidence_is_not_taken():
    X, y, task, weights = table(2, tasks=10, rows=6, features=12, rank=2, noise=1.0)
    statistics = TaskStatistics.from_rows(X, y, task)
    fit = fit_marginal(statistics, rank=2)
    assert stalled(statistics, fit.prior)
    assert fit_further(statistics, fit, "task") is fit
    longest = fit_marginal(statistics, rank=2, prior=fit.prior, expected=True)
    assert longest.trace[-1]["loss"] < fit.trace[-1]["loss"]
    assert evidence(statistics, longest.prior, "task") > evidence(statistics, fit.prior, "task")
    assert error(longest, weights) > error(fit, weights)


def test_a_fit_is_left_alone_where_nothing_is_to_be_judged(monkeypatch):
    X, y, task, _ = table(4, tasks=10, rows=15, features=12, rank=2, noise=1.0)
    statistics = TaskStatistics.from_rows(X, y, task)
    fit = fit_marginal(statistics, rank=2)
    assert fit_further(statistics, fit, "task", max_rounds=len(fit.trace)) is fit
    unsettled = fit_marginal(statistics, rank=2, max_rounds=3)
    assert fit_further(statistics, unsettled, "task") is unsettled
    seen: list[float] = []
    assert len(fit_further(statistics, fit, "task", callback=lambda row: seen.append(row["round"]) or True).trace) == (
        len(fit.trace) + 1
    )
    assert seen == [len(fit.trace) + 1]
    monkeypatch.setattr(subspace_information, "MOST_SHARED", 35)
    assert evidence(statistics, fit.prior, "task") is None
    assert fit_further(statistics, fit, "task") is fit


def test_a_fit_that_is_stationary_is_left_alone():
    X, y, task, _ = table(0, tasks=40, rows=20, features=6, rank=2, noise=1.0)
    statistics = TaskStatistics.from_rows(X, y, task)
    fit = fit_marginal(statistics, rank=2)
    assert fit.converged
    assert not stalled(statistics, fit.prior)
    assert fit_further(statistics, fit, "task") is fit


def test_the_estimator_goes_on_where_the_subspace_has_stopped():
    X, y, task, weights = table(3, tasks=10, rows=15, features=12, rank=2, noise=1.0)
    model = SubspaceRegressor(rank=2, fit_intercept=False).fit(X.numpy(), y.numpy(), task=task.numpy())
    # 0.051 where it stopped, 0.038 further on
    assert float(np.mean((model.coef_ - weights.numpy()) ** 2)) < 0.042
    assert model.n_iter_ == len(model.trace_) == model.trace_[-1]["round"]
