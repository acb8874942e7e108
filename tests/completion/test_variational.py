"""Variational completion: the fast half-step against the loop, the bound against its definition, and its ascent."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import reference_completion as reference
import torch

import fisherfold.completion.inference.gram as gram
import fisherfold.completion.inference.posterior as predictive
import fisherfold.completion.inference.variational as module
from fisherfold.completion.inference.gram import moments
from fisherfold.completion.inference.packed import unpack
from fisherfold.completion.inference.start import raise_rank, start_posterior
from fisherfold.completion.inference.variational import fit_variational, gradual_start, update_side
from fisherfold.completion.ratings import Ratings
from toy import low_rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offsets", [(True, True), (False, True), (False, False)])
def test_half_step_is_the_textbook_posterior(dtype, offsets):
    ratings, _ = low_rank(9, 7, 2, 0.6, 0.3, 0, dtype)
    posterior = fit_variational(
        ratings, 2, max_iter=3, tol=0, row_offsets=offsets[0], column_offsets=offsets[1]
    )
    tau = posterior.noise_precision
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    for side, given, groups in (
        (posterior.rows, posterior.columns, ratings.by_row),
        (posterior.columns, posterior.rows, ratings.by_column),
    ):
        before = copy.deepcopy(side)
        _, residual = update_side(
            side, moments(given.mean, given.covariance) * given.weight[:, None], groups, tau
        )
        for i in range(groups.n_groups):
            start, stop = groups.offsets[i : i + 2].tolist()
            entries = list(
                zip(
                    groups.indices(start, stop).tolist(),
                    groups.values(start, stop).tolist(),
                    strict=True,
                )
            )
            mean, covariance = reference.posterior_of_row(before, given, i, entries, tau)
            torch.testing.assert_close(side.mean[i].double(), mean, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(
                unpack(side.covariance)[i].double(), covariance, atol=tolerance, rtol=tolerance
            )
            expected = sum(
                float(given.weight[j]) * reference.expected_square(side, given, i, j, x)
                for j, x in entries
            )
            assert float(residual[i]) == pytest.approx(
                expected, rel=10 * tolerance, abs=10 * tolerance
            )


def test_half_step_in_chunks_is_the_same(monkeypatch):
    ratings, _ = low_rank(900, 20, 2, 0.3, 0.3, 1)
    whole = fit_variational(ratings, 3, max_iter=4, tol=0)
    monkeypatch.setattr(module, "_CHUNK_ENTRIES", 1)
    parts = fit_variational(ratings, 3, max_iter=4, tol=0)
    torch.testing.assert_close(parts.rows.mean, whole.rows.mean)
    torch.testing.assert_close(parts.columns.covariance, whole.columns.covariance)


def test_bound_is_its_definition():
    ratings, _ = low_rank(8, 6, 1, 0.7, 0.3, 2)
    for passes in (1, 2, 5):
        posterior = fit_variational(ratings, 2, max_iter=passes, tol=0, set_effects=False)
        assert posterior.bound() == pytest.approx(
            reference.evidence_lower_bound(posterior, ratings), rel=1e-10
        )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"set_effects": False},
        {"weight_strength": 0.0},
        {"ridge": 3.0},
        {"ridge": 3.0, "row_offsets": False},
        {"row_offsets": False, "column_offsets": False},
    ],
)
def test_bound_never_decreases(options):
    ratings, _ = low_rank(60, 40, 3, 0.3, 0.4, 3)
    posterior = fit_variational(ratings, 4, max_iter=60, tol=-np.inf, **options)
    bounds = np.array([record["bound"] for record in posterior.trace])
    assert len(bounds) == 60
    assert (np.diff(bounds) > -1e-11).all()
    assert bounds[-1] > bounds[0]


def test_float32_follows_float64():
    single, _ = low_rank(80, 60, 3, 0.4, 0.3, 4, torch.float32)
    double, _ = low_rank(80, 60, 3, 0.4, 0.3, 4, torch.float64)
    a, b = (fit_variational(r, 3, max_iter=30, tol=1e-8) for r in (single, double))
    i, j = torch.meshgrid(torch.arange(80), torch.arange(60), indexing="ij")
    for x, y in zip(
        a.predict(i.flatten(), j.flatten(), with_std=True),
        b.predict(i.flatten(), j.flatten(), with_std=True),
        strict=True,
    ):
        torch.testing.assert_close(x.double(), y, atol=3e-3, rtol=3e-3)


def test_noise_free_table_is_recovered():
    ratings, truth = low_rank(60, 50, 2, 0.5, 0.0, 5)
    posterior = fit_variational(ratings, 2, max_iter=300, tol=1e-7, set_effects=False)
    i, j = torch.meshgrid(torch.arange(60), torch.arange(50), indexing="ij")
    mean, _ = posterior.predict(i.flatten(), j.flatten())
    error = float((mean - torch.from_numpy(truth).flatten()).square().mean().sqrt())
    assert error < 1e-3


def test_surplus_rank_does_no_harm():
    ratings, truth = low_rank(120, 90, 2, 0.25, 0.5, 6)
    i, j = torch.meshgrid(torch.arange(120), torch.arange(90), indexing="ij")
    errors = []
    for rank in (2, 12):
        posterior = fit_variational(ratings, rank, max_iter=200, tol=1e-6)
        mean, _ = posterior.predict(i.flatten(), j.flatten())
        errors.append(float((mean - torch.from_numpy(truth).flatten()).square().mean().sqrt()))
    assert errors[1] < 1.15 * errors[0]


@pytest.mark.parametrize("shape", [(60, 30, 0.2, 0.5), (20, 10, 0.6, 0.3)])
def test_surplus_rank_does_no_harm_with_fewer_ratings_than_coefficients(shape):
    rows, columns, density, noise = shape
    i, j = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    errors = {2: [], 10: []}
    for seed in range(6):
        ratings, truth = low_rank(rows, columns, 2, density, noise, seed)
        for rank, found in errors.items():
            posterior = fit_variational(ratings, rank, init=gradual_start(ratings, rank))
            assert posterior.rank == rank
            assert [row["iteration"] for row in posterior.trace[:2]] == [1, 2]
            mean, _ = posterior.predict(i.flatten(), j.flatten())
            found.append(float((mean - torch.from_numpy(truth).flatten()).square().mean().sqrt()))
    assert np.mean(errors[10]) < 1.1 * np.mean(errors[2])


def test_a_start_is_gradual_only_where_a_coefficient_has_less_than_three_ratings():
    ratings, _ = low_rank(60, 40, 2, 0.3, 0.4, 3)
    for rank, options in ((ratings.n_ratings // 300, {}), (20, {"ridge": 2.0})):
        direct, chosen = (
            start_posterior(ratings, rank, **options),
            gradual_start(ratings, rank, **options),
        )
        torch.testing.assert_close(chosen.columns.mean, direct.columns.mean, rtol=0, atol=0)
        assert chosen.noise_precision == direct.noise_precision
    assert gradual_start(ratings, 20).noise_precision > start_posterior(ratings, 20).noise_precision


@pytest.mark.parametrize("seed", range(3))
def test_no_factor_of_a_sparse_table_is_lost_on_the_way(seed):
    ratings, truth = low_rank(200, 200, 6, 0.1, 0.3, seed)
    known = start_posterior(ratings, 6)
    right = np.linalg.svd(truth - truth.mean(1, keepdims=True), full_matrices=False)[2][:6]
    known.columns.mean[:, :-1] = torch.from_numpy(right.T * np.sqrt(200))
    best = fit_variational(ratings, 6, init=known).bound()
    for rank in (6, 8, 10):
        found = fit_variational(ratings, rank, init=gradual_start(ratings, rank)).bound()
        assert found > best - 0.015, rank


def test_factors_that_are_added_start_at_their_size():
    """A missing factor starts with about the variance that it has; surplus ones with almost none."""
    ratings, _ = low_rank(300, 200, 3, 0.3, 0.3, 3)
    few = fit_variational(ratings, 2)
    variance = raise_rank(few, ratings, 4).rows.start_variance[2:4]
    whole = fit_variational(ratings, 3, init=raise_rank(few, ratings, 3))
    size = float(whole.rows.mean[:, 2].square().mean() * whole.columns.mean[:, 2].square().mean())
    assert 0.4 * size < float(variance[0]) < 2 * size
    assert float(variance[1]) < 0.3 * float(variance[0])


def test_intervals_cover_what_they_promise():
    rng = np.random.default_rng(7)
    ratings, truth = low_rank(300, 200, 3, 0.15, 0.5, 7)
    posterior = fit_variational(ratings, 3, max_iter=100, tol=1e-6)
    seen = np.zeros((300, 200), bool)
    r, c, _ = ratings.entries()
    seen[r.numpy(), c.numpy()] = True
    i, j = np.nonzero(~seen)
    mean, std = posterior.predict(torch.from_numpy(i), torch.from_numpy(j), with_std=True)
    scale = 0.5 / low_rank_scale(7)
    observed = truth[i, j] + scale * rng.normal(size=len(i))
    for level, z in ((0.5, 0.6745), (0.9, 1.6449)):
        covered = np.mean(np.abs(observed - mean.numpy()) <= z * std.numpy())
        assert abs(covered - level) < 0.03


def low_rank_scale(seed: int) -> float:
    """The standard deviation by which ``low_rank(300, 200, 3, 0.15, 0.5, seed)`` divided its values."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(300, 3)) @ rng.normal(size=(3, 200)) / np.sqrt(3)
    truth += 0.5 * rng.normal(size=(300, 1)) + 0.5 * rng.normal(size=(1, 200))
    rows, columns = np.nonzero(rng.random((300, 200)) < 0.15)
    return float((truth[rows, columns] + 0.5 * rng.normal(size=len(rows))).std())


def test_predictive_moments_are_those_of_the_posterior():
    ratings, _ = low_rank(6, 5, 2, 0.8, 0.3, 8)
    posterior = fit_variational(ratings, 2, max_iter=5, tol=0)
    i, j = torch.meshgrid(torch.arange(6), torch.arange(5), indexing="ij")
    mean, std = posterior.predict(i.flatten(), j.flatten(), with_std=True)
    nu, tau = posterior.weight_strength, posterior.noise_precision
    for k, (a, b) in enumerate(zip(i.flatten().tolist(), j.flatten().tolist(), strict=True)):
        spread = reference.expected_square(posterior.rows, posterior.columns, a, b, float(mean[k]))
        noise = 1 / tau
        for side, member in ((posterior.rows, a), (posterior.columns, b)):
            noise *= float((nu + side.weighted_sse[member]) / (nu + side.counts[member] - 2))
        assert float(std[k] ** 2) == pytest.approx(spread + noise, rel=1e-9)


def test_the_noisy_row_is_found():
    rng = np.random.default_rng(9)
    truth = rng.normal(size=(40, 1)) * rng.normal(size=(1, 200))
    values = truth + 0.2 * rng.normal(size=truth.shape)
    values[7] = truth[7] + 2.0 * rng.normal(size=200)
    rows, columns = np.nonzero(np.ones_like(truth))
    ratings = Ratings(rows, columns, values.flatten() / values.std(), truth.shape)
    posterior = fit_variational(ratings, 1, max_iter=50)
    weights = posterior.rows.weight
    assert int(weights.argmin()) == 7
    assert float(weights[7]) < 0.2 * float(weights.median())


def test_seed_decides():
    ratings, _ = low_rank(50, 40, 2, 0.3, 0.3, 10, torch.float32)
    one, two = (fit_variational(ratings, 3, max_iter=5, seed=1) for _ in range(2))
    assert torch.equal(one.rows.mean, two.rows.mean)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_is_the_same():
    ratings, _ = low_rank(60, 50, 2, 0.4, 0.3, 11)
    here, there = (
        fit_variational(ratings.to(device), 3, max_iter=5, tol=0) for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(there.rows.mean.cpu(), here.rows.mean, atol=1e-8, rtol=1e-8)


@pytest.mark.slow
def test_chunks_of_predictions_are_those_of_one_and_leave_nothing_behind(monkeypatch):
    """A tensor kept for each chunk lies between the tables of the next ones, whose memory then cannot be given back."""
    ratings, _ = low_rank(6, 5, 2, 0.8, 0.3, 8)
    posterior = fit_variational(ratings, 2, max_iter=5, tol=0)
    i, j = (
        t.flatten() for t in torch.meshgrid(torch.arange(-1, 6), torch.arange(-1, 5), indexing="ij")
    )
    whole = posterior.predict(i, j, with_std=True)
    alive, variance = [], predictive.variance

    def counting(*parts, **options):
        gc.collect()
        alive.append(sum(type(found) is torch.Tensor for found in gc.get_objects()))
        return variance(*parts, **options)

    monkeypatch.setattr(predictive, "_CHUNK", 10)
    monkeypatch.setattr(predictive, "variance", counting)
    for part, all_at_once in zip(posterior.predict(i, j, with_std=True), whole, strict=True):
        torch.testing.assert_close(part, all_at_once)
    assert len(alive) == 5
    assert len(set(alive[1:])) == 1  # in the first, nothing is left of one before


def test_wide_tables_are_summed_in_slices(monkeypatch):
    ratings, _ = low_rank(60, 40, 2, 0.4, 0.3, 1)
    whole = fit_variational(ratings, 4, max_iter=3, tol=0)
    for name, value in (("_WIDEST", 10), ("_SLICE", 7), ("_BLOCK_ENTRIES", 2**9)):
        monkeypatch.setattr(gram, name, value)
    sliced = fit_variational(ratings, 4, max_iter=3, tol=0)
    torch.testing.assert_close(sliced.rows.mean, whole.rows.mean)
    torch.testing.assert_close(sliced.columns.covariance, whole.columns.covariance)


def test_momentum_that_lowers_the_bound_is_taken_back(monkeypatch):
    ratings, _ = low_rank(60, 40, 3, 0.3, 0.4, 3)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_SLOW", np.inf)
        plain = fit_variational(ratings, 3, max_iter=8, tol=-np.inf)
    quick = fit_variational(ratings, 3, max_iter=8, tol=-np.inf)
    assert quick.bound() > plain.bound()
    monkeypatch.setattr(module, "_MOMENTUM", 1e4)
    hasty = fit_variational(ratings, 3, max_iter=8, tol=-np.inf)
    torch.testing.assert_close(hasty.rows.mean, plain.rows.mean)
    torch.testing.assert_close(hasty.columns.mean, plain.columns.mean)
    assert hasty.bound() == pytest.approx(plain.bound())
