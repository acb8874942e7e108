"""Likelihoods beyond exponential families: scipy's densities, scores of mean zero, F = E[score scoreᵀ], samples."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import special, stats

from fisherfold.fisher import (
    HeteroscedasticGaussian,
    MultivariateGaussian,
    NegativeBinomial,
    OrderedProbit,
    StudentT,
    VonMisesFisher,
)
from fisherfold.fisher.jacobian import score


def covariance(d, seed):
    root = torch.randn(d, 2 * d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T / d


def outputs(*rows):
    return torch.tensor(rows, dtype=torch.float64)


MEAN, SIGMA = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64), covariance(3, 0)
CASES = {
    "student": (StudentT(4.0, 0.7), outputs([0.3], [-2.0])),
    "negative-binomial": (NegativeBinomial(2.5), outputs([0.3], [2.0], [-3.0])),
    "heteroscedastic": (HeteroscedasticGaussian(), outputs([0.3, -1.0], [2.0, 1.5])),
    "ordered": (OrderedProbit([-1.0, 0.2, 1.5]), outputs([0.3], [-2.0], [2.0])),
    "von-mises": (VonMisesFisher(2), outputs([2.0, -1.0], [0.0, 0.1])),
    "von-mises-fisher": (VonMisesFisher(4), outputs([2.0, -1.0, 5.0, 0.0], [0.0, 0.1, 0.0, 0.0])),
    "gaussian": (MultivariateGaussian(3), MultivariateGaussian.pack(MEAN, SIGMA)[None]),
}


def log_density(name, z, y):
    """scipy's, for one z and one y."""
    if name == "student":
        return stats.t.logpdf(y, 4.0, loc=z[0], scale=0.7).sum()
    if name == "negative-binomial":
        return stats.nbinom.logpmf(y, 2.5, 2.5 / (2.5 + np.exp(z[0]))).sum()
    if name == "heteroscedastic":
        return stats.norm.logpdf(y, z[0], np.exp(z[1] / 2)).sum()
    if name == "ordered":
        cuts = np.array([-np.inf, -1.0, 0.2, 1.5, np.inf])
        return np.log(
            stats.norm.cdf(cuts[int(y[0]) + 1] - z[0]) - stats.norm.cdf(cuts[int(y[0])] - z[0])
        )
    if name.startswith("von"):
        kappa, d = np.linalg.norm(z), len(z)
        log_bessel = np.log(special.ive(d / 2 - 1, kappa)) + kappa
        return z @ y + (d / 2 - 1) * np.log(kappa) - d / 2 * np.log(2 * np.pi) - log_bessel
    return stats.multivariate_normal.logpdf(y, z[:, 0], z[:, 1:])


@pytest.fixture(params=sorted(CASES))
def case(request):
    return request.param, *CASES[request.param]


def draw(likelihood, z, count, seed=0):
    many = z.repeat_interleave(count, 0)
    return many, likelihood.sample(many, generator=torch.Generator().manual_seed(seed))


def test_nll_is_scipys_up_to_a_constant_in_y(case):
    """The difference between two outputs for one target has no constant."""
    name, likelihood, z = case
    other = z.clone()
    other[..., 0] += 0.3
    for k in range(len(z)):
        y = draw(likelihood, z[k : k + 1], 5, seed=k)[1]
        ours = likelihood.nll(z[k].expand(5, *z.shape[1:]), y) - likelihood.nll(
            other[k].expand(5, *z.shape[1:]), y
        )
        theirs = [
            log_density(name, other[k].numpy(), t) - log_density(name, z[k].numpy(), t)
            for t in y.numpy()
        ]
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-7, atol=1e-9)


def test_scores_of_samples_have_mean_zero_and_the_fisher_matrix_as_their_second_moment(case):
    _, likelihood, z = case
    count = 20_000
    exact = likelihood.fisher_matrix(z)
    many, y = draw(likelihood, z, count)
    likelihood.check_targets(y, many)
    s = score(likelihood, many, y).reshape(len(z), count, -1)
    products = s.unsqueeze(-1) * s.unsqueeze(-2)
    for found, expected in ((s, 0.0), (products, exact)):
        error = found.std(1) / count**0.5
        assert bool(((found.mean(1) - expected).abs() <= 6 * error + 1e-9).all())


def test_products_and_factors_are_those_of_the_matrix(case):
    _, likelihood, z = case
    matrix, factor = likelihood.fisher_matrix(z), likelihood.fisher_factor(z)
    torch.testing.assert_close(factor @ factor.mT, matrix, rtol=1e-9, atol=1e-12)
    v = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=z.dtype)
    expected = (matrix @ v.reshape(len(z), -1, 1)).reshape(z.shape)
    torch.testing.assert_close(likelihood.fisher_vp(z, v), expected, rtol=1e-9, atol=1e-12)


def test_the_second_derivative_of_the_divergence_is_the_fisher_matrix(case):
    name, likelihood, z = case
    if name in {"student", "negative-binomial"}:
        with pytest.raises(NotImplementedError, match="has no closed form of its divergence"):
            likelihood.kl(z, z)
        return
    v = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=z.dtype)
    if name == "gaussian":  # the covariance stays symmetric
        v[..., 1:] = v[..., 1:] + v[..., 1:].mT
    expected = (v * likelihood.fisher_vp(z, v)).flatten(1).sum(1)
    t = 1e-3
    found = (likelihood.kl(z, z + t * v) + likelihood.kl(z, z - t * v)) / t**2
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-7)


def test_fisher_matrices_by_quadrature():
    y, w = np.polynomial.legendre.leggauss(1200)
    y, w = torch.from_numpy(40 * y)[:, None], torch.from_numpy(40 * w)
    for name, law in (
        ("student", stats.t(4.0, 0.3, 0.7)),
        ("heteroscedastic", stats.norm(0.3, math.exp(-0.5))),
    ):
        likelihood, z = CASES[name]
        many = z[:1].expand(1200, -1)
        density = torch.from_numpy(law.pdf(y[:, 0].numpy()))
        s = score(likelihood, many, y if name == "student" else y[:, 0])
        found = torch.einsum("n,na,nb->ab", w * density, s, s)
        torch.testing.assert_close(found, likelihood.fisher_matrix(z[:1])[0], rtol=1e-4, atol=1e-6)


def test_limits():
    z = outputs([0.4])
    torch.testing.assert_close(NegativeBinomial(1e9).fisher_weight(z), z.exp(), rtol=1e-8, atol=0)
    torch.testing.assert_close(StudentT(1e9).fisher_weight(z), torch.ones_like(z))
    kappa = outputs([0.0, 0.0, 2000.0])
    found = VonMisesFisher(3).mean(kappa)[0, 2]
    assert float(found) == pytest.approx(1 / math.tanh(2000.0) - 1 / 2000.0, abs=1e-10)
    far = OrderedProbit([0.0]).nll(outputs([30.0]), torch.zeros(1, 1))
    assert float(far) == pytest.approx(-stats.norm.logcdf(-30.0))


@pytest.mark.parametrize("d", [2, 3, 4, 50])
@pytest.mark.parametrize("kappa", [0.1, 20.0, 2e3, 1e4, 1e6])
def test_directions_of_any_concentration_have_the_moments_of_bessel_functions(d, kappa):
    z = torch.zeros(1, d, dtype=torch.float64)
    z[0, 0] = kappa
    with mpmath.workdps(50):
        k, order = mpmath.mpf(kappa), mpmath.mpf(d) / 2 - 1
        mean = mpmath.besseli(order + 1, k) / mpmath.besseli(order, k)
        along, across = 1 - mean**2 - (d - 1) * mean / k, mean / k
        partition = mpmath.log(
            mpmath.gamma(order + 1) * mpmath.besseli(order, k)
        ) - order * mpmath.log(k / 2)
        expected = [float(part) for part in (mean, along, across)]
    likelihood = VonMisesFisher(d)
    matrix = likelihood.fisher_matrix(z)[0]
    found = [float(part) for part in (likelihood.mean(z)[0, 0], matrix[0, 0], matrix[1, 1])]
    np.testing.assert_allclose(found, expected, rtol=1e-11)
    assert float(likelihood.log_partition(z)) == pytest.approx(
        float(partition), rel=1e-12, abs=1e-13
    )
    derivative = torch.func.grad(lambda t: likelihood.log_partition(t).sum())(z)
    torch.testing.assert_close(derivative, likelihood.mean(z), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_concentrated_directions_are_drawn_at_the_right_distance(dtype):
    """κ ‖y - z/κ‖² has a χ² distribution with d - 1 degrees of freedom for large κ."""
    z = torch.zeros(4000, 3, dtype=dtype)
    z[:, 0] = 1e6
    y = VonMisesFisher(3).sample(z, generator=torch.Generator().manual_seed(0))
    assert (
        stats.kstest(1e6 * y[:, 1:].double().square().sum(1).numpy(), stats.chi2(2).cdf).pvalue
        > 0.01
    )


def test_moments_stand_for_the_samples_they_are_of():
    y = torch.randn(50, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    likelihood, z = CASES["gaussian"]
    mean = y.mean(0)
    moments = MultivariateGaussian.pack(mean, (y - mean).T @ (y - mean) / 50)[None]
    assert float(likelihood.nll(z, moments)) == pytest.approx(
        float(likelihood.nll(z.expand(50, 3, 4), y).mean())
    )
    assert not bool(likelihood.nll(-z, moments).isfinite().any())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: StudentT(-1.0), "df must be a positive number"),
        (lambda: OrderedProbit([1.0, 0.0]), "in increasing order"),
        (
            lambda: OrderedProbit([0.0]).check_targets(torch.tensor([[2]]), outputs([0.0])),
            "must lie in 0..1",
        ),
        (
            lambda: VonMisesFisher(2).check_targets(outputs([1.0, 1.0]), outputs([1.0, 0.0])),
            "must hold unit vectors",
        ),
        (
            lambda: NegativeBinomial(1.0).check_targets(outputs([0.5]), outputs([1.0])),
            "must hold counts",
        ),
        (
            lambda: HeteroscedasticGaussian().check_targets(outputs([0.5]), outputs([1.0])),
            "mean, log variance",
        ),
        (
            lambda: MultivariateGaussian(2).check_targets(outputs([0.5]), outputs([1.0])),
            "MultivariateGaussian.pack",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
