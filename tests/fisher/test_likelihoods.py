"""Each likelihood against torch.distributions, automatic differentiation and sampling."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as td

from fisherfold.fisher import Bernoulli, Categorical, ExponentialFamily, Gaussian, Poisson

DTYPES = [torch.float64, torch.float32]
KINDS = ["gaussian", "categorical", "bernoulli", "poisson"]


class Exponential(ExponentialFamily):
    """The documented ten lines: waiting times in natural form, p(y | z) = -z exp(z y), z < 0."""

    def log_partition(self, z):
        return -torch.log(-z)

    def sample(self, z, *, generator=None):
        u = torch.rand(z.shape, generator=generator, dtype=z.dtype, device=z.device)
        return torch.log1p(-u) / z


LIKELIHOODS = {
    "gaussian": Gaussian(0.7),
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "poisson": Poisson(),
    "exponential": Exponential(),
}


def distribution(kind, z):
    """The same distribution in torch.distributions, with one batch entry per sample."""
    if kind == "gaussian":
        return td.Independent(td.Normal(z, 0.7**0.5), z.ndim - 1)
    if kind == "categorical":
        return td.Independent(td.Categorical(logits=z), z.ndim - 2)
    if kind == "bernoulli":
        return td.Independent(td.Bernoulli(logits=z), z.ndim - 1)
    if kind == "exponential":
        return td.Independent(td.Exponential(-z), z.ndim - 1)
    return td.Independent(td.Poisson(z.exp()), z.ndim - 1)


def natural(kind, *shape, seed=0, dtype=torch.float64):
    z = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return -z.exp() if kind == "exponential" else z


def expected_fisher(likelihood, z):
    """∇² of E[nll] over y ~ p(y | z₀), at z₀: nll is linear in T(y), so E[nll](z) = nll at E[T]."""
    mean = torch.func.grad(lambda t: likelihood.log_partition(t).sum())(z)

    def expectation(row, mean_row):
        return likelihood.log_partition(row[None]).sum() - (mean_row * row).sum()

    hessians = [
        torch.func.jacrev(torch.func.jacrev(expectation))(row, m).reshape(row.numel(), -1)
        for row, m in zip(z, mean, strict=True)
    ]
    return torch.stack(hessians)


@pytest.mark.parametrize("kind", [*KINDS, "exponential"])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 2)])
def test_nll_is_the_log_density_up_to_a_constant_in_y(kind, shape):
    likelihood = LIKELIHOODS[kind]
    z, other = natural(kind, *shape), natural(kind, *shape, seed=1)
    y = likelihood.sample(z, generator=torch.Generator().manual_seed(2))
    ours = likelihood.nll(z, y) - likelihood.nll(other, y)
    theirs = distribution(kind, other).log_prob(y) - distribution(kind, z).log_prob(y)
    assert ours.shape == (shape[0],)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [*KINDS, "exponential"])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 2), (5,)])
def test_fisher_product_is_the_hessian_of_the_expected_nll(kind, shape):
    if kind == "categorical" and len(shape) == 1:
        pytest.skip("logits need a dimension of classes")
    likelihood = LIKELIHOODS[kind]
    z, v = natural(kind, *shape), natural("gaussian", *shape, seed=1)
    reference = expected_fisher(likelihood, z)
    torch.testing.assert_close(likelihood.fisher_matrix(z), reference, rtol=1e-12, atol=1e-12)
    product = (reference @ v.reshape(shape[0], -1, 1)).reshape(shape)
    torch.testing.assert_close(likelihood.fisher_vp(z, v), product, rtol=1e-12, atol=1e-12)
    factor = likelihood.fisher_factor(z)
    torch.testing.assert_close(factor @ factor.mT, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [*KINDS, "exponential"])
def test_fisher_matrix_is_the_covariance_of_the_scores_and_the_sample_moments_fit(kind):
    likelihood, count = LIKELIHOODS[kind], 200_000
    z = natural(kind, 1, 3)
    many = z.expand(count, 3)
    y = likelihood.sample(many, generator=torch.Generator().manual_seed(3))
    score = torch.func.grad(lambda t: likelihood.nll(t, y).sum())(many.contiguous())
    # the standard error of a mean of `count` draws; five of them is one failure in a million
    bound = 5 / count**0.5
    covariance = score.T @ score / count
    exact = likelihood.fisher_matrix(z)[0]
    fourth = (score[:, :, None] * score[:, None, :]).square().mean(0).sqrt()
    assert bool(((covariance - exact).abs() <= bound * (fourth + 1e-12)).all())
    assert bool((score.mean(0).abs() <= bound * exact.diagonal().sqrt()).all())
    statistic = likelihood.statistic(y, many)
    assert bool(
        ((statistic.mean(0) - likelihood.mean(z)[0]).abs() <= bound * statistic.std(0)).all()
    )


def test_a_shift_of_all_logits_is_the_singular_direction():
    z = natural("categorical", 4, 5)
    ones = torch.ones_like(z)
    for saturation in (1, 30):
        assert float(Categorical().fisher_vp(saturation * z, 0.3 * ones).abs().max()) == 0
        factor = Categorical().fisher_factor(saturation * z)
        assert float(factor.sum(dim=1).abs().max()) < 1e-15


def test_saturated_logits_keep_the_digits_of_their_fisher_matrix():
    """At p = 1 - 1e-13 the likeliest class has p (1 - p), of which 1 - p alone keeps three digits."""
    z = torch.tensor([[30.0, 0.0, -1.0]], dtype=torch.float64)
    weights = torch.tensor([1.0, 1 / math.e], dtype=torch.float64) * math.exp(-30)
    rest = float(weights.sum()) / (1 + float(weights.sum()))
    first = Categorical().fisher_vp(z, torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64))
    assert float(first[0, 0]) == pytest.approx(rest * (1 - rest), rel=1e-13, abs=0)


@pytest.mark.parametrize("kind", [*KINDS, "exponential"])
def test_kl_is_that_of_torch_distributions(kind):
    likelihood = LIKELIHOODS[kind]
    z, other = natural(kind, 4, 3), natural(kind, 4, 3, seed=1)
    expected = td.kl_divergence(distribution(kind, z), distribution(kind, other))
    torch.testing.assert_close(likelihood.kl(z, other), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_is_the_expected_log_ratio(kind):
    likelihood, count = LIKELIHOODS[kind], 100_000
    z, other = natural(kind, 1, 3), natural(kind, 1, 3, seed=1)
    y = likelihood.sample(z.expand(count, 3), generator=torch.Generator().manual_seed(4))
    ratio = likelihood.nll(other.expand(count, 3), y) - likelihood.nll(z.expand(count, 3), y)
    assert abs(float(ratio.mean() - likelihood.kl(z, other))) <= 5 * float(ratio.std()) / count**0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1e-2, 1e-5, 1e-8, 1e-12])
def test_kl_of_neighbours_is_half_the_fisher_length(kind, length):
    """KL(z ‖ z + d) = ½ d·F d + O(d³), also where the difference of two log-partition functions is all rounding."""
    likelihood = LIKELIHOODS[kind]
    z = natural(kind, 4, 3) + 3
    other = z + length * natural("gaussian", 4, 3, seed=1)
    d = other - z  # as rounding has left it
    half = 0.5 * (d * likelihood.fisher_vp(z, d)).sum(-1)
    torch.testing.assert_close(likelihood.kl(z, other), half, rtol=max(3 * length, 1e-13), atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [25.0, 1e3])
def test_extreme_logits_stay_finite_and_exact(dtype, size):
    z = torch.tensor([[size], [-size]], dtype=dtype)
    y = torch.tensor([[1.0], [1.0]], dtype=dtype)
    # -log sigmoid(z) = log(1 + exp(-z)), all digits
    expected = (
        torch.log1p(torch.exp(-z.double().clamp(min=-700)))
        if size < 700
        else torch.tensor([[0.0], [size]])
    )
    torch.testing.assert_close(Bernoulli().nll(z, y)[:, None], expected.to(dtype))
    gradient = torch.func.grad(lambda t: Bernoulli().nll(t, y).sum())(z)
    torch.testing.assert_close(gradient, -torch.sigmoid(-z), rtol=1e-6, atol=0)
    logits = torch.tensor([[size, 0.0, -size]], dtype=dtype)
    for label, value in ((0, 0.0), (1, size), (2, 2 * size)):
        ours = Categorical().nll(logits, torch.tensor([label]))
        torch.testing.assert_close(ours, torch.tensor([value], dtype=dtype), rtol=1e-6, atol=2e-11)
    for likelihood, at in ((Bernoulli(), z), (Categorical(), logits)):
        v = torch.ones_like(at).cumsum(-1)
        fisher = likelihood.fisher_vp(at, v)
        assert bool(torch.isfinite(fisher).all())
        assert bool((likelihood.kl(at, -at) >= 0).all())
        assert bool(torch.isfinite(likelihood.kl(at, -at)).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_keep_the_dtype(kind, dtype):
    likelihood = LIKELIHOODS[kind]
    z = natural(kind, 3, 2, dtype=dtype)
    y = likelihood.sample(z, generator=torch.Generator().manual_seed(0))
    likelihood.check_targets(y, z)
    found = (likelihood.nll(z, y), likelihood.fisher_vp(z, z), likelihood.kl(z, z + 1))
    assert all(t.dtype == dtype for t in found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_generator_gives_the_same_targets(kind):
    likelihood, z = LIKELIHOODS[kind], natural(kind, 50, 3)
    first, second = (
        likelihood.sample(z, generator=torch.Generator().manual_seed(7)) for _ in range(2)
    )
    assert torch.equal(first, second)


@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS), size=st.floats(0.1, 8))
@settings(max_examples=60, deadline=None)
def test_fisher_matrices_are_symmetric_positive_and_kl_is_not_negative(seed, kind, size):
    likelihood = LIKELIHOODS[kind]
    z, other = size * natural(kind, 2, 3, seed=seed), size * natural(kind, 2, 3, seed=seed + 1)
    matrix = likelihood.fisher_matrix(z)
    assert torch.equal(matrix, matrix.mT) or float(
        (matrix - matrix.mT).abs().max()
    ) <= 1e-15 * float(matrix.abs().max())
    assert float(torch.linalg.eigvalsh(matrix).min()) >= -1e-15 - 1e-14 * float(matrix.abs().max())
    assert bool((likelihood.kl(z, other) >= 0).all())
    assert bool((likelihood.kl(z, z) == 0).all())


@pytest.mark.parametrize(
    "variance", [0.0, -1.0, float("nan"), float("inf"), None, "1", torch.ones(2), [1.0, 2.0]]
)
def test_gaussian_refuses_a_variance_that_is_none(variance):
    with pytest.raises(
        ValueError, match=re.escape(f"variance must be a positive number, got {variance}")
    ):
        Gaussian(variance)


@pytest.mark.parametrize("variance", [2, np.float32(2), torch.tensor(2.0)])
def test_gaussian_takes_numbers_of_all_kinds(variance):
    assert Gaussian(variance).nll(torch.zeros(1), torch.ones(1)).tolist() == [0.25]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_variance_of_one_entry_changes_neither_dtype_nor_shape(shape):
    likelihood, z = Gaussian(torch.full(shape, 2.0, dtype=torch.float64)), torch.zeros(3)
    assert likelihood.nll(z, z).shape == (3,)
    for found in (likelihood.fisher_vp(z, z), likelihood.mean(z), likelihood.sample(z)):
        assert (found.dtype, found.shape) == (z.dtype, z.shape)


@pytest.mark.parametrize(
    ("likelihood", "y", "message"),
    [
        (
            Gaussian(),
            torch.zeros(4),
            r"y must have the shape \(4, 3\) of the model's output, got \(4,\)",
        ),
        (
            Gaussian(),
            torch.full((4, 3), torch.nan),
            "y must be finite, got NaN or infinite entries",
        ),
        (
            Bernoulli(),
            torch.full((4, 3), 0.5),
            r"y must be 0 or 1 for a Bernoulli likelihood, got values in \[0.5, 0.5\]",
        ),
        (
            Poisson(),
            -torch.ones(4, 3),
            r"y must hold counts \(integers ≥ 0\).*got values in \[-1, -1\]",
        ),
        (
            Poisson(),
            torch.full((4, 3), 1.5),
            r"y must hold counts \(integers ≥ 0\).*got values in \[1.5, 1.5\]",
        ),
        (
            Categorical(),
            torch.zeros(4),
            r"class indices \(integers\) of shape \(4,\), got torch.float32 \(4,\)",
        ),
        (
            Categorical(),
            torch.zeros(4, 3).long(),
            r"class indices \(integers\) of shape \(4,\), got torch.int64 \(4, 3\)",
        ),
        (Categorical(), torch.tensor([0, 1, 2, 3]), r"y must lie in 0..2, got 0..3"),
        (Categorical(), torch.tensor([0, 1, -1, 2]), r"y must lie in 0..2, got -1..2"),
        *(
            (p, torch.zeros(4, 3) + 0j, "y must be real, got torch.complex64")
            for p in (Gaussian(), Bernoulli(), Poisson())
        ),
        (Categorical(), torch.zeros(4) + 0j, r"class indices \(integers\).*got torch.complex64"),
        (
            Categorical(),
            torch.zeros(4, dtype=torch.bool),
            r"class indices \(integers\).*got torch.bool",
        ),
    ],
)
def test_targets_that_cannot_be_are_refused(likelihood, y, message):
    with pytest.raises(ValueError, match=message):
        likelihood.check_targets(y, torch.zeros(4, 3))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_counts_may_be_truth_values_and_integers(dtype):
    z, y = torch.tensor([[0.5], [-1.0]]), torch.tensor([[0], [1]])
    Poisson().check_targets(y.to(dtype), z)
    torch.testing.assert_close(Poisson().nll(z, y.to(dtype)), (z.exp() - y * z)[:, 0])


def test_logits_without_classes_are_refused():
    with pytest.raises(
        ValueError, match=r"logits must have shape \(samples, classes\), got \(4,\)"
    ):
        Categorical().check_targets(torch.zeros(4).long(), torch.zeros(4))


@pytest.mark.parametrize("integer", [torch.int32, torch.int16, torch.uint8])
def test_labels_may_be_any_integers(integer):
    z, y = natural("categorical", 4, 3), torch.tensor([0, 1, 2, 1])
    Categorical().check_targets(y.to(integer), z)
    torch.testing.assert_close(Categorical().nll(z, y.to(integer)), Categorical().nll(z, y))
    torch.testing.assert_close(
        Categorical().statistic(y.to(integer), z), Categorical().statistic(y, z)
    )
