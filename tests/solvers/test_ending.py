"""Where a run has ended: saddles, which escape=True leaves, and data whose estimate lies at infinity."""

import math

import pytest
import torch

from fisherfold import Bernoulli, Gaussian, LossProblem, NLLProblem, Poisson, minimize
from fisherfold.fisher.solve import lowest_curvature
from fisherfold.manifolds import Euclidean, Oblique, Product, Sphere, Stiefel
from fisherfold.problems import Hessian
from toy import generator, normal

DETERMINISTIC = ["rngd", "rcg", "rgd", "lbfgs", "trust-region"]


def rayleigh(dim=6):
    a = torch.diag(torch.arange(1.0, dim + 1, dtype=torch.float64))
    return LossProblem(Sphere(dim), lambda w: w @ a @ w)


def flat_saddle(samples=60):
    """Two factors whose product is fitted: both 0 is a stationary point."""
    x = normal(samples, 3)
    space = Product({"a": Euclidean(3), "b": Euclidean(1)})
    y = x.sum(1)
    problem = NLLProblem(space, lambda x, t: t["b"] * (x @ t["a"]), Gaussian(), x, y)
    zero = {"a": torch.zeros(3).double(), "b": torch.zeros(1).double()}
    return problem, zero


@pytest.mark.parametrize("method", ["rcg", "lbfgs", "trust-region"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_saddle_is_reported_and_left(method, k):
    """A Rayleigh quotient at an eigenvector that is not the least one."""
    x0 = torch.eye(6, dtype=torch.float64)[k]
    result = minimize(rayleigh(), x0, method)
    assert result.status == "saddle"
    assert not result.success
    assert "escape=True leaves it" in result.message
    left = minimize(rayleigh(), x0, method, escape=True, max_iter=300)
    assert left.success
    torch.testing.assert_close(left.value, 1.0, rtol=1e-9, atol=0)
    assert left.trace["loss"] == sorted(left.trace["loss"], reverse=True)


def test_a_model_with_an_exact_fisher_information_has_saddles_as_well():
    problem, zero = flat_saddle()
    result = minimize(problem, zero)
    assert result.status == "saddle"
    with (
        pytest.warns(RuntimeWarning, match="standard errors of no minimum: a saddle"),
        pytest.raises(ValueError, match="not identified"),
    ):
        result.covariance(lambda t: t["a"])
    left = minimize(problem, zero, escape=True)
    assert left.success
    assert left.value < 1e-12


def test_of_many_samples_a_part_is_looked_at_and_all_decide():
    problem, zero = flat_saddle(20_000)
    assert minimize(problem, zero).status == "saddle"
    assert minimize(problem, zero, escape=True).success


@pytest.mark.parametrize("method", DETERMINISTIC)
@pytest.mark.parametrize("seed", range(3))
def test_minima_are_no_saddles(method, seed):
    problem = rayleigh()
    x0 = problem.manifold.random_point(generator=generator(seed))
    if method == "rngd":
        x = normal(80, 6, seed=seed)
        y = torch.bernoulli(torch.sigmoid(x @ x0), generator=generator(seed))
        problem = NLLProblem(Sphere(6), lambda x, w: x @ w, Bernoulli(), x, y)
    assert minimize(problem, x0, method, max_iter=2000).status == "converged"


@pytest.mark.parametrize("method", DETERMINISTIC)
@pytest.mark.parametrize("quasi", [False, True], ids=["all", "one-group"])
def test_separated_data_are_recognised(method, quasi):
    """A coefficient of 1237 was called converged. One group without events is separated as well."""
    x = normal(60, 3)
    y = (x[:, 0] > 0).double()
    likelihood = Bernoulli()
    if quasi:
        group = (torch.arange(60) % 3 == 0).double()
        x = torch.stack([torch.ones(60).double(), group, x[:, 1]], 1)
        y = torch.poisson(torch.ones(60).double(), generator=generator(1)) * (1 - group)
        likelihood = Poisson()
    problem = NLLProblem(Euclidean(3), lambda x, t: x @ t, likelihood, x, y)
    result = minimize(problem, torch.zeros(3).double(), method, max_iter=1000)
    if method == "rgd":  # does not get there in a thousand steps
        assert result.status in {"unbounded", "max_iter"}
        return
    assert result.status == "unbounded"
    assert "separated data" in result.message
    with pytest.warns(RuntimeWarning, match="standard errors of no minimum"):
        result.covariance()


@pytest.mark.parametrize("method", ["rngd", "trust-region", "lbfgs"])
def test_one_long_step_to_a_minimum_is_none_to_infinity(method):
    """Least squares in one step, from far away."""
    x, y = normal(40, 2), normal(40, seed=1)
    problem = NLLProblem(Euclidean(2), lambda x, t: x @ t, Gaussian(), x, y)
    assert minimize(problem, torch.full((2,), 100.0).double(), method).success


@pytest.mark.parametrize("manifold", [Sphere(7), Stiefel(5, 2), Oblique(3, 4)], ids=repr)
def test_lanczos_finds_the_ends_of_the_spectrum(manifold):
    x = manifold.random_point(generator=generator(1))
    weights = torch.randn(x.numel(), x.numel(), generator=generator(2), dtype=torch.float64)
    hessian = Hessian(manifold, x, lambda t: t.reshape(-1) @ weights @ t.reshape(-1))
    basis = manifold.tangent_basis(x)
    matrix = torch.stack([(basis * hessian.matvec(b)).flatten(1).sum(1) for b in basis])
    values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
    start = manifold.random_tangent(x, generator=generator(3))
    least, largest, v = lowest_curvature(hessian, start, 50)
    assert math.isclose(least, float(values[0]), rel_tol=1e-9)
    assert math.isclose(largest, float(values.abs().max()), rel_tol=1e-9)
    torch.testing.assert_close(float(hessian.quadratic(v)), least)
    # fewer steps see a part of it
    assert float(values[0]) <= lowest_curvature(hessian, start, 3)[0]
