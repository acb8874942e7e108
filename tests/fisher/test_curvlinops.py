"""A peer: curvlinops' matrices of a network with Euclidean parameters are ours to rounding."""

import warnings

import pytest
import torch
from torch import nn

from fisherfold import Categorical, Gaussian, NLLProblem
from fisherfold.manifolds.base import flatten

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    curvlinops = pytest.importorskip("curvlinops")


def network(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def matrix(kind, model, loss, x, y, **options):
    """Their operator as a matrix, with the parameters in our order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operator = getattr(curvlinops, kind)(
            model, loss, list(model.parameters()), [(x, y)], check_deterministic=False, **options
        )
        size = sum(p.numel() for p in model.parameters())
        return (operator @ torch.eye(size, dtype=torch.float64)).detach()


def cases(name):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(10, 3, generator=g, dtype=torch.float64)
    if name == "categorical":
        return x, torch.randint(0, 3, (10,), generator=g), Categorical(), nn.CrossEntropyLoss(), 1.0
    y = torch.randn(10, 3, generator=g, dtype=torch.float64)
    # their squared error over 10·3 numbers is mean(r²), that is 2/3 of our mean over samples of ½|r|²
    return x, y, Gaussian(), nn.MSELoss(), 2 / 3


@pytest.mark.parametrize("name", ["categorical", "gaussian"])
def test_the_exact_operator_is_their_generalised_gauss_newton_matrix(name):
    x, y, likelihood, loss, factor = cases(name)
    model = network(3)
    theirs = matrix("GGNLinearOperator", model, loss, x, y)
    problem, theta = NLLProblem.from_module(model, likelihood, x, y)
    torch.testing.assert_close(
        factor * problem.fisher(theta).dense(), theirs, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("name", ["categorical", "gaussian"])
def test_the_empirical_operator_is_theirs(name):
    x, y, likelihood, loss, _ = cases(name)
    model = network(3)
    problem, theta = NLLProblem.from_module(model, likelihood, x, y)
    ours = problem.fisher(theta, kind="empirical").dense()
    theirs = matrix("EFLinearOperator", model, loss, x, y)
    # the gradient of their |r|² is twice ours, squared it is four times, and their mean is over outputs, too
    factor = 1.0 if name == "categorical" else 4 / 3
    torch.testing.assert_close(factor * ours, theirs, rtol=1e-10, atol=1e-12)


def test_both_monte_carlo_operators_estimate_the_same_matrix():
    x, y, likelihood, loss, factor = cases("categorical")
    model = network(3)
    problem, theta = NLLProblem.from_module(model, likelihood, x, y, draws=4000)
    exact = factor * problem.fisher(theta).dense()
    ours = factor * problem.fisher(theta, kind="monte-carlo").dense()
    theirs = matrix("FisherMCLinearOperator", model, loss, x, y, mc_samples=1000, seed=0)
    for estimate in (ours, theirs):
        assert float((estimate - exact).norm()) < 0.05 * float(exact.norm())
    assert flatten(theta).numel() == len(exact)
