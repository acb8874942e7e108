"""Losses and functions on quotients: those that depend on the representative are detected."""

import pytest
import torch

from fisherfold import Gaussian, LossProblem, NLLProblem, minimize
from fisherfold.manifolds import Grassmann, Power, Product, Sphere
from fisherfold.problems import check_gradient
from toy import generator, normal

WORDS = r"is no function of the points of Grassmann\(5, 2\): .* use Stiefel\(5, 2\)"


def regression(model):
    x = normal(40, 5)
    y = normal(40, 2, seed=1)
    return NLLProblem(Grassmann(5, 2), model, Gaussian(), x, y)


@pytest.mark.parametrize("method", ["rngd", "trust-region", "lbfgs", "rcg", "rsgd"])
def test_a_loss_of_the_frame_is_no_loss_of_the_subspace(method):
    """Four starts "converged" to 0.905, 0.947, 0.919 and 1.245."""
    problem = regression(lambda x, u: x @ u)
    start = problem.manifold.random_point(generator=generator())
    options = {"step": 0.1} if method == "rsgd" else {}
    with pytest.raises(ValueError, match=f"the loss {WORDS}"):
        minimize(problem, start, method, **options)
    with pytest.raises(ValueError, match=f"the loss {WORDS}"):
        check_gradient(problem)


def test_standard_errors_are_of_functions_of_the_subspace():
    problem = regression(lambda x, u: (x @ u @ u.mT)[:, :2])
    result = minimize(problem, problem.manifold.random_point(generator=generator()))
    assert result.success
    covariance = result.covariance()
    assert covariance.standard_errors(lambda u: (u @ u.mT)[0])[1].shape == (5,)
    with pytest.raises(ValueError, match=f"f {WORDS}"):
        covariance.standard_errors(lambda u: u[0])
    # what is 0 for every representative, up to rounding
    covariance.standard_errors(lambda u: (u @ u.mT @ u - u).sum()[None])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_losses_of_subspaces_pass_also_at_a_perfect_fit(dtype):
    truth = Grassmann(6, 2).random_point(generator=generator(), dtype=dtype)
    x = normal(30, 6).to(dtype)
    problem = NLLProblem(
        Grassmann(6, 2), lambda x, u: x @ u @ u.mT, Gaussian(), x, x @ truth @ truth.mT
    )
    assert minimize(problem, truth).value < 1e-10
    assert (
        minimize(problem, Grassmann(6, 2).random_point(generator=generator(1), dtype=dtype)).x.dtype
        == dtype
    )


def test_factors_of_products_and_powers_are_looked_at():
    space = Product({"a": Grassmann(4, 1), "b": Sphere(3)})
    wrong = LossProblem(space, lambda t: t["a"].sum() + t["b"].sum())
    right = LossProblem(space, lambda t: (t["a"] @ t["a"].mT)[0, 1] + t["b"].sum())
    start = space.random_point(generator=generator(2))
    with pytest.raises(ValueError, match=r"the points of Product\(.*arrays themselves"):
        minimize(wrong, start, "rcg")
    assert minimize(right, start, "rcg", max_iter=300).success
    several = LossProblem(Power(Grassmann(4, 1), 3), lambda t: t.sum())
    with pytest.raises(ValueError, match="the loss is no function of the points of Power"):
        minimize(several, several.manifold.random_point(generator=generator(3)), "rcg")
