"""The marginal likelihood of related regressions against dense Gaussians and automatic differentiation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fisherfold.subspace.marginal import (
    MarginalSubspaceProblem,
    SubspacePrior,
    information,
    posterior,
    start,
)
from fisherfold.subspace.marginal_fit import (
    NOISE_ROWS,
    _settled,
    _update_moments,
    fit_marginal,
    update_mean,
)
from fisherfold.subspace.tasks import TaskStatistics
from toy import task_rows

SIZES = (7, 3, 11, 1, 5)


def data(seed: int = 0, sizes=SIZES, n: int = 4):
    X, y, task = task_rows(sizes, n, seed)
    return X, y + 2 * X[:, 0], task


def case(seed: int = 0, rank: int = 2, singular: bool = False):
    rows = data(seed)
    g = torch.Generator().manual_seed(seed + 50)
    root = torch.randn(rank, rank, generator=g, dtype=torch.float64)
    if singular:
        root[:, 0] = 0
    frame = torch.linalg.qr(torch.randn(4, rank, generator=g, dtype=torch.float64))[0]
    noise = 0.5 + torch.rand(len(SIZES), generator=g, dtype=torch.float64)
    mean = torch.randn(4, generator=g, dtype=torch.float64)
    return TaskStatistics.from_rows(*rows), SubspacePrior(mean, frame, root @ root.T, noise), rows


def covariance_of(U, prior, Xt, t):
    return (
        prior.noise[t] * torch.eye(len(Xt), dtype=U.dtype) + Xt @ U @ prior.covariance @ U.T @ Xt.T
    )


def dense_losses(U, mean, prior, rows, tasks=range(5)):
    X, y, task = rows
    terms = []
    for t in tasks:
        Xt, r = X[task == t], y[task == t] - X[task == t] @ mean
        C = covariance_of(U, prior, Xt, t)
        terms.append(
            (len(r) * math.log(2 * math.pi) + torch.logdet(C) + r @ torch.linalg.solve(C, r)) / 2
        )
    return torch.stack(terms)


@pytest.mark.parametrize("singular", [False, True])
def test_losses_are_the_dense_gaussian_densities(singular):
    statistics, prior, rows = case(singular=singular)
    expected = dense_losses(prior.frame, prior.mean, prior, rows)
    torch.testing.assert_close(
        posterior(statistics, prior).losses, expected, rtol=1e-11, atol=1e-11
    )


def weights_of(fit):
    """The coefficients of every task, m + U E[a_t]."""
    return fit.prior.mean + fit.posterior.mean @ fit.prior.frame.mT


def test_the_posterior_is_that_of_conditioning_the_joint_gaussian():
    statistics, prior, (X, y, task) = case()
    found = posterior(statistics, prior)
    for t in range(len(SIZES)):
        Xt, r = X[task == t], y[task == t] - X[task == t] @ prior.mean
        gain = (
            prior.covariance
            @ (Xt @ prior.frame).T
            @ torch.linalg.inv(covariance_of(prior.frame, prior, Xt, t))
        )
        torch.testing.assert_close(found.mean[t], gain @ r, rtol=1e-10, atol=1e-12)
        expected = prior.covariance - gain @ Xt @ prior.frame @ prior.covariance
        torch.testing.assert_close(found.covariance[t], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("singular", [False, True])
def test_the_gradient_is_that_of_the_dense_density(singular):
    statistics, prior, rows = case(singular=singular)
    problem = MarginalSubspaceProblem(statistics, prior)
    tasks = range(5)
    expected = torch.func.grad(lambda U: dense_losses(U, prior.mean, prior, rows, tasks).mean())(
        prior.frame
    )
    loss, gradient = problem.loss_and_gradient(prior.frame)
    torch.testing.assert_close(
        gradient, problem.manifold.project(prior.frame, expected), rtol=1e-10, atol=1e-11
    )
    torch.testing.assert_close(problem.gradient(prior.frame), gradient)
    torch.testing.assert_close(loss, problem.loss(prior.frame))


def test_the_exact_fisher_is_half_the_trace_of_the_dense_covariances():
    statistics, prior, (X, _, task) = case()
    problem = MarginalSubspaceProblem(statistics, prior)
    U = prior.frame
    tasks = range(5)
    operator = problem.fisher(U, kind="exact")
    basis = [
        problem.manifold.random_tangent(U, generator=torch.Generator().manual_seed(s))
        for s in range(5)
    ]
    for H in basis:
        for K in basis[:2]:
            total = 0.0
            for t in tasks:
                Xt = X[task == t]

                def covariance(V, Xt=Xt, t=t):
                    return covariance_of(V, prior, Xt, t)

                C = covariance(U)
                jacobian = torch.func.jacrev(covariance)(U)
                dH, dK = ((jacobian * v).sum((-2, -1)) for v in (H, K))
                total = (
                    total + torch.trace(torch.linalg.solve(C, dH) @ torch.linalg.solve(C, dK)) / 2
                )
            found = (K * operator.matvec(H)).sum()
            torch.testing.assert_close(found, total / len(list(tasks)), rtol=1e-10, atol=1e-11)


def test_the_fisher_is_the_variance_of_the_score_of_data_drawn_from_the_model():
    statistics, prior, (X, _, task) = case()
    U, draws = prior.frame, 20_000
    problem = MarginalSubspaceProblem(statistics, prior)
    H = problem.manifold.random_tangent(U, generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(2)
    expected = 5 * problem.fisher(U, kind="exact").quadratic(H)
    variances = []
    for t in range(5):
        Xt = X[task == t]
        root = torch.linalg.cholesky(covariance_of(U, prior, Xt, t))
        y = Xt @ prior.mean + torch.randn(draws, len(Xt), generator=g, dtype=torch.float64) @ root.T
        many = torch.arange(draws).repeat_interleave(len(Xt))
        drawn = TaskStatistics.from_rows(Xt.repeat(draws, 1), y.reshape(-1), many)
        found = posterior(drawn, replace(prior, noise=prior.noise[t].expand(draws)))
        ambient = found.scaled_gram_frame @ found.second_moment()
        ambient = ambient - found.scaled_residual[:, :, None] * found.mean[:, None, :]
        variances.append((ambient * H).sum((1, 2)).square())
    total = torch.stack(variances).sum(0)
    # five standard errors
    assert abs(float(total.mean() - expected)) < 5 * float(total.std()) / math.sqrt(draws)
    assert float(total.std()) / math.sqrt(draws) < 0.03 * float(expected)


def test_the_kronecker_form_is_the_product_of_the_means():
    statistics, prior, (X, _, task) = case()
    problem = MarginalSubspaceProblem(statistics, prior)
    U = prior.frame
    S = [
        X[task == t].T @ torch.linalg.solve(covariance_of(U, prior, X[task == t], t), X[task == t])
        for t in range(5)
    ]
    R = [prior.covariance @ U.T @ s @ U @ prior.covariance for s in S]
    v = problem.manifold.random_tangent(U, generator=torch.Generator().manual_seed(1))
    expected = problem.manifold.project(U, sum(S) / 5 @ v @ (sum(R) / 5))
    torch.testing.assert_close(
        problem.fisher(U, kind="kronecker") @ v, expected, rtol=1e-10, atol=1e-12
    )
    found = posterior(statistics, prior)
    torch.testing.assert_close(
        information(statistics, prior.noise, found), sum(S), rtol=1e-10, atol=1e-12
    )


def test_the_mean_is_the_maximiser_of_the_density():
    statistics, prior, rows = case()
    best = update_mean(statistics, prior)
    slope = torch.func.grad(lambda m: dense_losses(prior.frame, m, prior, rows).sum())(best.mean)
    assert float(slope.norm()) < 1e-9


def test_directions_that_no_row_has_leave_the_mean_alone():
    X, y, task = data()
    X[:, 3] = 0
    statistics = TaskStatistics.from_rows(X, y, task)
    prior = start(statistics, rank=2)
    assert float(update_mean(statistics, prior).mean[3]) == pytest.approx(
        float(prior.mean[3]), abs=1e-12
    )


@pytest.mark.parametrize("noise", ["task", "shared"])
@pytest.mark.parametrize("expanded", [True, False])
def test_each_closed_form_lowers_the_loss(noise, expanded, monkeypatch):
    if not expanded:
        monkeypatch.setattr("fisherfold.subspace.marginal_fit._EXPANSION_COST", 0.0)
    statistics, prior, rows = case()

    def total(p):
        value = float(dense_losses(p.frame, p.mean, p, rows).sum())
        if noise == "task":
            common = 1 / (1 / p.noise).mean()
            value += float(NOISE_ROWS / 2 * (p.noise.log() + common / p.noise - common.log()).sum())
        return value

    prior = replace(prior, noise=prior.noise.mean().expand(5)) if noise == "shared" else prior
    for _ in range(30):
        values = [total(prior)]
        for update in (
            lambda p: update_mean(statistics, p),
            lambda p: _update_moments(statistics, p, noise),
        ):
            prior = update(prior)
            values.append(total(prior))
        assert values[1] <= values[0] + 1e-9
        assert values[2] <= values[1] + 1e-9


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_the_fit_is_monotone_and_finds_the_model(rank):
    g = torch.Generator().manual_seed(rank)
    tasks, n = 60, 5
    frame = torch.linalg.qr(torch.randn(n, 2, generator=g, dtype=torch.float64))[0]
    mean = torch.randn(n, generator=g, dtype=torch.float64)
    weights = mean + torch.randn(tasks, 2, generator=g, dtype=torch.float64) @ frame.T
    task = torch.arange(tasks * 12) % tasks
    X = torch.randn(len(task), n, generator=g, dtype=torch.float64)
    y = (X * weights[task]).sum(1) + 0.3 * torch.randn(len(task), generator=g, dtype=torch.float64)
    fit = fit_marginal(TaskStatistics.from_rows(X, y, task), rank=rank, noise="shared")
    losses = [row["loss"] for row in fit.trace]
    assert all(b <= a + 1e-9 * abs(a) for a, b in pairwise(losses))
    assert fit.converged
    if rank >= 2:
        error = float((weights_of(fit) - weights).square().sum(1).mean())
        assert error < 0.05
        assert float(fit.prior.noise.mean()) == pytest.approx(0.09, rel=0.15)
        # the two true directions carry the prior variance
        total = fit.prior.frame @ fit.prior.covariance @ fit.prior.frame.T
        torch.testing.assert_close(total, weights.sub(weights.mean(0)).T.cov(), rtol=0.2, atol=0.08)


def test_noise_per_task_tells_quiet_tasks_from_loud_ones():
    g = torch.Generator().manual_seed(0)
    task = torch.arange(40 * 30) % 40
    X = torch.randn(len(task), 4, generator=g, dtype=torch.float64)
    truth = torch.where(torch.arange(40) < 20, 0.1, 1.0).double()
    y = X[:, 0] + truth[task].sqrt() * torch.randn(len(task), generator=g, dtype=torch.float64)
    fit = fit_marginal(TaskStatistics.from_rows(X, y, task), rank=1)
    losses = [row["loss"] for row in fit.trace]
    assert all(b <= a + 1e-9 * abs(a) for a, b in pairwise(losses))
    assert float(fit.prior.noise[:20].max()) < float(fit.prior.noise[20:].min())
    # drawn towards each other, but not together
    assert 0.1 < float(fit.prior.noise[:20].mean()) < 0.3
    assert 0.6 < float(fit.prior.noise[20:].mean()) < 1.1


def test_the_frame_of_a_fit_is_stationary_on_the_manifold():
    X, y, task = data(3, sizes=(12,) * 15)
    statistics = TaskStatistics.from_rows(X, y, task)
    fit = fit_marginal(statistics, rank=2, tol=1e-13, max_rounds=2000)
    problem = MarginalSubspaceProblem(statistics, fit.prior)
    first = MarginalSubspaceProblem(statistics, start(statistics, rank=2))
    assert float(problem.gradient(fit.prior.frame).norm()) < 1e-3 * float(
        first.gradient(first.prior.frame).norm()
    )


def test_noise_free_data_does_not_end_in_a_division_by_zero():
    g = torch.Generator().manual_seed(0)
    X = torch.randn(60, 4, generator=g, dtype=torch.float64)
    task = torch.arange(60) % 6
    y = X[:, 0] * (1 + task)
    fit = fit_marginal(TaskStatistics.from_rows(X, y, task), rank=2, max_rounds=50)
    assert bool(torch.isfinite(weights_of(fit)).all())
    torch.testing.assert_close((X * weights_of(fit)[task]).sum(1), y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("noise", ["task", "shared"])
def test_a_loss_that_rises_by_rounding_is_not_taken_for_settled(noise):
    """Without noise the loss is known to 1e-3 only; the first rise ended the fit, with gains of 0.005 to come."""
    g = torch.Generator().manual_seed(1)
    task = torch.arange(160) % 20
    mean, offsets, directions, X = (
        torch.randn(shape, generator=g, dtype=torch.float64)
        for shape in ((6,), (20, 2), (2, 6), (160, 6))
    )
    y = (X * (mean + offsets @ directions)[task]).sum(1)
    fit = fit_marginal(TaskStatistics.from_rows(X, y, task), rank=3, noise=noise)
    losses = [row["loss"] for row in fit.trace]
    rise = next(number for number, (a, b) in enumerate(pairwise(losses), 1) if b > a + 1e-7 * 8)
    assert fit.converged
    assert losses[-1] < losses[rise - 1] - 0.005
    assert min(losses[-5:]) >= min(losses[:-5]) - 1e-7 * 8


def test_a_loss_has_settled_when_it_stays_or_no_round_of_the_last_finds_a_lower_one():
    def settled(*losses):
        return _settled(list(losses), 0.1)

    assert not settled(3.0)
    assert not settled(3.0, 2.0)
    assert settled(3.0, 2.0, 1.95)
    assert settled(3.0, 2.0, 2.05)
    assert not settled(3.0, 2.0, 2.5)
    assert not settled(3.0, 2.0, 2.5, 2.2, 2.5, 2.2)
    assert settled(3.0, 2.0, 2.5, 2.2, 2.5, 2.2, 2.5)
    assert not settled(3.0, 2.0, 2.5, 2.2, 2.5, 2.2, 1.5)


def test_a_callback_stops_and_errors_name_the_argument():
    X, y, task = data()
    statistics = TaskStatistics.from_rows(X, y, task)
    assert len(fit_marginal(statistics, rank=2, callback=lambda row: row["round"] >= 3).trace) == 3
    problem = MarginalSubspaceProblem(statistics, start(statistics, rank=2))
    with pytest.raises(ValueError, match="kind must be one of"):
        problem.fisher(problem.prior.frame, kind="dense")
