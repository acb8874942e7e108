"""The common noise with mean and subspace integrated out: against differences, dense sums and the textbook."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fisherfold import SubspaceRegressor
from fisherfold.subspace import noise as subspace_noise
from fisherfold.subspace.marginal import (
    MarginalSubspaceProblem,
    SubspacePrior,
    factor_above_one,
    posterior,
)
from fisherfold.subspace.marginal_fit import common_noise, fit_marginal
from fisherfold.subspace.noise import SharedPrior, _Search, fit_noise, shared_information
from fisherfold.subspace.tasks import TaskStatistics
from toy import related_tasks, slow


def fitted(noise: str = "task", **shape: int) -> tuple[TaskStatistics, SubspacePrior]:
    X, y, task, *_ = (
        torch.tensor(part)
        for part in related_tasks(**({"tasks": 7, "rows": 5, "n": 4, "noise": 1.0} | shape))
    )
    statistics = TaskStatistics.from_rows(X, y, task)
    return statistics, fit_marginal(statistics, rank=2, noise=noise).prior


def half_log_determinant(statistics: TaskStatistics, prior: SubspacePrior) -> torch.Tensor:
    """½ log det(I + R F R) with F from the covariances of the targets, ½ tr(C⁻¹ dC C⁻¹ dC), entry by entry."""
    n, p = prior.frame.shape
    loading, information = (
        prior.frame @ prior.covariance,
        torch.zeros((1 + p) * n, (1 + p) * n, dtype=torch.float64),
    )
    for gram, noise in zip(statistics.gram, prior.noise, strict=True):
        X = torch.linalg.cholesky(gram + 1e-14 * gram.trace() * torch.eye(n, dtype=gram.dtype)).T
        inverse = torch.linalg.inv(
            noise * torch.eye(n, dtype=X.dtype) + X @ loading @ prior.frame.T @ X.T
        )
        information[:n, :n] += X.T @ inverse @ X
        changes = []
        for k in range(p):
            for i in range(n):
                step = torch.zeros(n, p, dtype=X.dtype)
                step[i, k] = 1
                half = X @ step @ loading.T @ X.T
                changes.append(inverse @ (half + half.T))
        changes = torch.stack(changes)
        information[n:, n:] += torch.einsum("aij,bji->ab", changes, changes) / 2
    known = SharedPrior.of(statistics, prior)
    root = torch.kron(known.root, torch.diag(known.units))
    return (
        torch.linalg.slogdet(torch.eye(len(root), dtype=root.dtype) + root @ information @ root)[1]
        / 2
    )


def test_the_information_of_the_subspace_is_that_of_the_problem() -> None:
    statistics, prior = fitted()
    information = shared_information(statistics, prior, posterior(statistics, prior))
    problem = MarginalSubspaceProblem(statistics, prior)
    v = problem.manifold.random_tangent(prior.frame, generator=torch.Generator().manual_seed(0))
    product = torch.einsum("kilj,jl->ik", information[1:, :, 1:, :], v) / statistics.n_tasks
    expected = problem.fisher(prior.frame).matvec(v)
    torch.testing.assert_close(
        problem.manifold.project(prior.frame, product), expected, rtol=1e-10, atol=1e-12
    )


def test_the_determinant_is_that_of_the_covariances_of_the_targets() -> None:
    """With as many rows as features in a task, whose rows may then be replaced by a root of their Gram matrix."""
    statistics, prior = fitted(rows=4)
    found = _Search(statistics, "task", 300, 1e-7).place(0.0, prior).value
    assert found == pytest.approx(float(half_log_determinant(statistics, prior)), rel=1e-6)


@pytest.mark.parametrize("noise", ["task", "shared"])
@pytest.mark.parametrize("rows", [12, 20])
def test_one_task_with_a_strong_signal_has_the_noise_of_the_textbook(noise: str, rows: int) -> None:
    """The posterior of s² is an inverse gamma distribution with ν = rows - features degrees of freedom."""
    draw = torch.Generator().manual_seed(rows)
    X = torch.randn(rows, 4, generator=draw, dtype=torch.float64)
    y = X @ torch.full((4,), 100.0, dtype=torch.float64) + torch.randn(
        rows, generator=draw, dtype=torch.float64
    )
    statistics = TaskStatistics.from_rows(X, y, torch.zeros(rows, dtype=torch.int64))
    prior = fit_marginal(statistics, rank=1, noise=noise).prior
    errors = ((y - X @ torch.linalg.lstsq(X, y).solution) ** 2).sum()
    found = fit_noise(statistics, prior, noise)
    assert found.common == pytest.approx(float(errors) / (rows - 4 - 2), rel=0.01)


def test_where_rows_are_plenty_the_search_finds_what_one_step_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statistics, prior = fitted("shared", tasks=25, rows=20)
    step = fit_noise(statistics, prior, "shared")
    monkeypatch.setattr(subspace_noise, "_SMALL", 0.0)
    search = fit_noise(statistics, prior, "shared")
    assert common_noise(prior.noise, "shared", statistics.all_tasks) < 0.99 * step.common
    assert step.common == pytest.approx(search.common, rel=0.01)


def test_steps_in_the_noise_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics, prior = fitted(tasks=12, rows=3)
    found = fit_noise(statistics, prior, "task")
    monkeypatch.setattr(subspace_noise, "_STEP", 0.5)
    monkeypatch.setattr(subspace_noise, "_EVEN", 100)
    monkeypatch.setattr(subspace_noise, "_MOST", 100)
    assert found.common == pytest.approx(fit_noise(statistics, prior, "task").common, rel=0.03)


def test_units_of_targets_and_features_do_not_matter() -> None:
    X, y, task, *_ = related_tasks(12, 3, 4, noise=1.0, seed=3)
    models = [
        SubspaceRegressor(rank=2).fit(a * X, b * y, task=task) for a, b in ((1, 1), (1e6, 1e-5))
    ]
    np.testing.assert_allclose(
        models[1].noise_variance_, 1e-10 * models[0].noise_variance_, rtol=1e-4
    )


def test_of_weights_that_add_up_to_a_few_rows_nothing_is_learnt() -> None:
    statistics, prior = fitted()
    light = {
        name: 0.1 * getattr(statistics, name)
        for name in ("gram", "cross", "power", "sums", "counts")
    }
    found = fit_noise(replace(statistics, **light), prior, "task")
    assert found.prior is prior
    assert found.common == common_noise(prior.noise, "task", statistics.all_tasks)


@pytest.mark.parametrize("rows", [1, *slow(2)])
def test_fresh_targets_lie_in_the_intervals_with_few_rows_in_each_task(rows: int) -> None:
    """With the noise at the maximum of the likelihood, 90 % intervals held 46 and 33 % of them."""
    level, inside = 0.9, []
    for seed in (0, 2):
        X, y, task, fresh, later = related_tasks(40, rows, 6, noise=1.0, seed=seed)
        model = SubspaceRegressor(rank=2, max_iter=100).fit(X, y, task=task)
        values, deviations = model.predict(fresh, task=task, return_std=True)
        inside.append(np.mean(np.abs(later - values) < norm.ppf((1 + level) / 2) * deviations))
    assert np.mean(inside) == pytest.approx(level, abs=0.08)


@pytest.mark.slow
def test_the_interval_of_a_single_task_of_a_few_rows_is_that_of_student() -> None:
    """With the noise of the textbook in place of its mean they held 79 % of them."""
    level, inside = 0.9, []
    for seed in range(30):
        X, y, _, fresh, later = related_tasks(1, 11, 5, noise=1.0, seed=seed)
        values, deviations = SubspaceRegressor(rank=1).fit(X, y).predict(fresh, return_std=True)
        inside.append(np.mean(np.abs(later - values) < norm.ppf((1 + level) / 2) * deviations))
    assert np.mean(inside) == pytest.approx(level, abs=0.04)


def test_factors_of_matrices_above_one_survive_rounding() -> None:
    draw = torch.Generator().manual_seed(0)
    half = torch.randn(4, 6, 2, generator=draw, dtype=torch.float64)
    eye = torch.eye(6, dtype=torch.float64)
    ordinary = eye + half @ half.mT
    assert torch.equal(factor_above_one(ordinary), torch.linalg.cholesky(ordinary))
    extreme = eye + 1e18 * half @ half.mT
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.cholesky(extreme)
    factor = factor_above_one(extreme)
    assert bool((factor.diagonal(dim1=-2, dim2=-1) > 0).all())
    assert bool((factor.triu(1) == 0).all())
    torch.testing.assert_close(factor @ factor.mT / 1e18, extreme / 1e18, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:targets differ in their last digit")
@pytest.mark.parametrize("noise", ["task", "shared"])
@pytest.mark.parametrize("seed", [5, 43])
def test_rows_that_are_fitted_all_but_exactly_leave_finite_deviations(
    noise: str, seed: int
) -> None:
    """With as many directions as features and hardly more rows, next to no noise is left, and rounding speaks."""
    draw = np.random.default_rng(seed)
    task = np.repeat(np.arange(5), draw.integers(1, 5, size=5))
    X = draw.normal(size=(len(task), 5)) * 10.0 ** draw.integers(-8, 8, size=5)
    y = draw.normal(size=len(task)) * 1e-12 + 1e3
    model = SubspaceRegressor(rank=6, noise=noise).fit(X, y, task=task)
    model.partial_fit(X[:3], y[:3], task=task[:3])
    values, deviations = model.predict(X, task=task, return_std=True)
    assert np.isfinite(values).all()
    assert np.isfinite(deviations).all()


@pytest.mark.parametrize("seed", [0, *slow(3)])
def test_a_likelihood_that_has_fitted_the_noise_is_left_for_where_there_is_some(seed: int) -> None:
    """Two rows in a task and one noise for all: the maximum has next to none, and coefficients of up to 10⁷."""
    draw = np.random.default_rng(seed)
    task, later = np.repeat(np.arange(20), 2), np.repeat(np.arange(20), 50)
    frame = np.linalg.qr(draw.normal(size=(8, 2)))[0]
    weights = draw.normal(size=(20, 2)) @ frame.T
    X = draw.normal(size=(40, 8))
    y = (X * weights[task]).sum(1) + 0.5 * draw.normal(size=40)
    fresh = draw.normal(size=(1000, 8))
    truth = (fresh * weights[later]).sum(1)
    model = SubspaceRegressor(rank=2, noise="shared").fit(X, y, task=task)
    values, deviations = model.predict(fresh, task=later, return_std=True)
    assert np.mean((values - truth) ** 2) < 1.5 * np.mean(truth**2)
    assert (
        np.mean(np.abs(truth + 0.5 * draw.normal(size=1000) - values) < norm.ppf(0.95) * deviations)
        > 0.7
    )
