"""Streams: the natural-gradient step, fold-in, and what is left of a batch fit after a stream."""

from __future__ import annotations

import numpy as np
import pytest
import reference_completion as reference
import torch

from fisherfold.completion import MatrixCompletion
from fisherfold.completion.inference.packed import unpack
from fisherfold.completion.inference.stream import Batch, append_members, refine, update_batch
from fisherfold.completion.inference.variational import fit_variational
from fisherfold.completion.ratings import Ratings
from toy import low_rank


@pytest.fixture
def fitted():
    ratings, truth = low_rank(40, 30, 2, 0.4, 0.3, 0)
    return fit_variational(ratings, 2, max_iter=30, set_effects=False), truth


def test_fold_in_of_a_row_is_its_textbook_posterior(fitted):
    posterior, _ = fitted
    entries = [(3, 0.4), (8, -0.2), (20, 1.0)]
    append_members(posterior.rows, posterior.columns, 1)
    mean, covariance = reference.posterior_of_row(
        posterior.rows, posterior.columns, 40, entries, posterior.noise_precision
    )
    batch = Ratings([0, 0, 0], [0, 1, 2], [x for _, x in entries], (1, 3))
    columns = posterior.columns.mean.clone()
    update_batch(
        posterior,
        Batch(batch, torch.tensor([40]), torch.tensor([j for j, _ in entries])),
        passes=1,
        move=(True, False),
    )
    torch.testing.assert_close(posterior.rows.mean[40], mean)
    torch.testing.assert_close(unpack(posterior.rows.covariance)[40], covariance)
    assert torch.equal(posterior.columns.mean, columns)


def test_fold_in_of_a_row_does_not_take_the_effects_of_its_rated_set_for_known():
    """With q(x_j) = N(x̄_j, K⁻¹/(γ + d_j)) integrated out, by conditioning the joint Gaussian of (u, x_1 .. x_n)."""
    ratings, _ = low_rank(40, 30, 2, 0.4, 0.3, 0)
    posterior = fit_variational(ratings, 2, max_iter=30, weight_strength=0.0)
    entries = [(3, 0.4), (8, -0.2), (20, 1.0)]
    number = torch.tensor([j for j, _ in entries])
    rows, columns, n = posterior.rows, posterior.columns, len(entries)
    effects = rows.set_effects.effects.double()[number]
    shares = torch.tensor(
        [
            sum(1 / rows.counts[i] for i in ratings.entries()[0][ratings.entries()[1] == j])
            for j in number
        ],
        dtype=torch.float64,
    )
    spread = torch.linalg.inv(rows.precision)
    prior_mean = rows.center.double() + effects.sum(0) / n**0.5
    prior = spread + sum(spread / (3.0 + share) for share in shares) / n
    precision, pull = torch.linalg.inv(prior), torch.linalg.solve(prior, prior_mean)
    for j, x in entries:
        a, A = columns.mean[j].double(), unpack(columns.covariance[j : j + 1])[0].double()
        one = torch.cat([a[:-1], a.new_ones(1)])
        second = torch.outer(one, one)
        second[:-1, :-1] += A[:-1, :-1]
        offset = x * one - a[-1] * one
        offset[:-1] -= A[:-1, -1]
        precision, pull = (
            precision + posterior.noise_precision * second,
            pull + posterior.noise_precision * offset,
        )
    append_members(rows, columns, 1)
    batch = Ratings([0, 0, 0], [0, 1, 2], [x for _, x in entries], (1, 3))
    update_batch(
        posterior,
        Batch(batch, torch.tensor([40]), number),
        passes=1,
        move=(True, False),
        new_rows=True,
    )
    expected = torch.linalg.solve(precision, pull)
    torch.testing.assert_close(rows.mean[40].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        unpack(rows.covariance)[40].double(), torch.linalg.inv(precision), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("rated_sets", [True, False])
def test_fresh_values_of_rows_that_are_folded_in_lie_in_the_intervals(rated_sets):
    rng = np.random.default_rng(0)
    U, V, b, c = (rng.normal(size=shape) for shape in ((400, 2), (60, 2), (400, 1), (1, 60)))
    X = U @ V.T + b + c + 0.5 * rng.normal(size=(400, 60))
    i, j = np.nonzero(rng.random((100, 60)) < 0.3)
    model = MatrixCompletion(rank=2, clip=False, rated_sets=rated_sets).fit(np.c_[i, j], X[i, j])
    z = []
    for row in X[100:]:
        order = rng.permutation(60)
        mean, std = model.predict_new(order[:1], row[order[:1]], order[1:21], return_std=True)
        z.append((row[order[1:21]] - mean) / std)
    assert 0.9 < np.mean(np.square(z)) < 1.17


def test_one_step_is_the_natural_gradient(fitted):
    """The step in natural parameters equals the gradient of the bound in the mean parameters (E u, E u uᵀ)."""
    posterior, _ = fitted
    row, entries = 5, [(1, 0.7), (9, -0.6)]
    mean, covariance = reference.member(posterior.rows, row)
    old = torch.linalg.inv(covariance)
    tau, alpha = posterior.noise_precision, float(posterior.rows.weight[row])
    first = mean.clone().requires_grad_()
    second = (covariance + torch.outer(mean, mean)).requires_grad_()
    bound = (old @ mean) @ first - 0.5 * (old * second).sum()
    for j, x in entries:
        v, cov = reference.member(posterior.columns, j)
        z = torch.cat([v[:-1], torch.ones(1).double()])
        zz, cz = torch.outer(z, z), v[-1] * z
        zz[:-1, :-1] += cov[:-1, :-1]
        cz[:-1] += cov[-1, :-1]
        scale = tau * alpha * float(posterior.columns.weight[j])
        bound = bound + scale * ((x * z - cz) @ first - 0.5 * (zz * second).sum())
    bound = bound + 0.5 * torch.logdet(second - torch.outer(first, first))
    by_first, by_second = torch.autograd.grad(bound, (first, second))
    batch = Ratings([0, 0], [0, 1], [x for _, x in entries], (1, 2))
    update_batch(
        posterior,
        Batch(batch, torch.tensor([row]), torch.tensor([1, 9])),
        passes=1,
        move=(True, False),
    )
    new_mean, new_covariance = reference.member(posterior.rows, row)
    new = torch.linalg.inv(new_covariance)
    torch.testing.assert_close(new @ new_mean - old @ mean, by_first, atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(
        -0.5 * (new - old), (by_second + by_second.T) / 2, atol=1e-8, rtol=1e-6
    )


def test_stream_comes_close_to_the_batch_fit():
    ratings, truth = low_rank(150, 100, 2, 0.3, 0.4, 1)
    rows, columns, values = (t.numpy() for t in ratings.entries())
    order = np.random.default_rng(0).permutation(len(rows))
    first, *rest = np.split(order, [int(share * len(order)) for share in (0.4, 0.55, 0.7, 0.85)])
    i, j = torch.meshgrid(torch.arange(150), torch.arange(100), indexing="ij")

    def error(posterior):
        mean, _ = posterior.predict(i.flatten(), j.flatten())
        return float((mean - torch.from_numpy(truth).flatten()).square().mean().sqrt())

    stream = fit_variational(Ratings(rows[first], columns[first], values[first], (150, 100)), 2)
    at_first = error(stream)
    for part in rest:
        r, local_r = np.unique(rows[part], return_inverse=True)
        c, local_c = np.unique(columns[part], return_inverse=True)
        batch = Ratings(local_r, local_c, values[part], (len(r), len(c)))
        update_batch(stream, Batch(batch, torch.from_numpy(r).long(), torch.from_numpy(c).long()))
    batch_fit = fit_variational(ratings, 2)
    whole = error(batch_fit)
    assert stream.noise_precision == pytest.approx(batch_fit.noise_precision, rel=0.5)
    assert stream.n_ratings == ratings.n_ratings
    assert torch.equal(stream.rows.counts, ratings.row_counts.double())
    assert error(stream) < 0.65 * at_first
    assert error(stream) < 1.3 * whole
    streamed = error(stream)
    refine(stream, ratings, passes=4)
    assert error(stream) < min(streamed, 1.02 * whole)


def test_rated_sets_grow_with_the_stream():
    ratings, _ = low_rank(30, 20, 2, 0.5, 0.3, 2)
    posterior = fit_variational(ratings, 2)
    effects = posterior.rows.set_effects.effects
    sums = posterior.rows.set_effects.sums[4].clone()
    batch = Ratings([0, 0], [0, 1], [0.1, 0.2], (1, 2))
    update_batch(posterior, Batch(batch, torch.tensor([4]), torch.tensor([2, 11])))
    torch.testing.assert_close(posterior.rows.set_effects.sums[4], sums + effects[2] + effects[11])


def test_new_members_are_the_prior(fitted):
    posterior, _ = fitted
    append_members(posterior.columns, posterior.rows, 2)
    prior = torch.linalg.inv(posterior.columns.precision)
    torch.testing.assert_close(unpack(posterior.columns.covariance)[-1], prior)
    torch.testing.assert_close(posterior.columns.mean[-1], posterior.columns.center)
    seen, unseen = (
        posterior.predict(torch.tensor([3]), torch.tensor([j]), with_std=True) for j in (31, -1)
    )
    torch.testing.assert_close(seen, unseen)
    torch.testing.assert_close(posterior.columns.prior_members().mean[0], posterior.columns.center)


def test_a_look_back_is_a_fit_that_goes_on():
    """With a member for every row and column the passes are those of a longer fit, and the bound keeps rising."""
    ratings, _ = low_rank(60, 40, 2, 0.3, 0.4, 1)
    short, long = (
        fit_variational(ratings, 2, max_iter=n, tol=0.0) for n in (2, 4)
    )  # momentum ends with a fit
    refine(short, ratings, passes=2)
    for mine, other in ((short.rows, long.rows), (short.columns, long.columns)):
        torch.testing.assert_close(mine.mean, other.mean, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(
            mine.set_effects.sums, other.set_effects.sums, atol=1e-10, rtol=1e-10
        )
    bounds = [record["bound"] for record in short.trace]
    assert bounds == sorted(bounds)
    assert len(bounds) == 4
