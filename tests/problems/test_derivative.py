"""Derivatives from values, with errors that hold; gradients that are wrong in the sixth digit are found out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fisherfold import (
    Bernoulli,
    Categorical,
    Gaussian,
    NLLProblem,
    Poisson,
    check_fisher,
    check_gradient,
)
from fisherfold.manifolds import Euclidean, Grassmann, Product, Sphere, Stiefel
from fisherfold.manifolds.base import scale
from fisherfold.problems.checks import _derivative

EPS = 2.0**-52
_RNG = np.random.default_rng(0)
SLOPES, PLACES = _RNG.normal(size=30), _RNG.normal(size=30)


def units(x):
    return float(np.maximum(0.0, SLOPES * x + PLACES).sum())


# functions and their derivatives at 0.3, which is no special place for any of them
FUNCTIONS = {
    "exponential": (lambda x: float(np.exp(x)), math.exp(0.3)),
    "sine": (math.sin, math.cos(0.3)),
    "quartic": (lambda x: x**4 + x**2, 4 * 0.3**3 + 0.6),
    "logistic": (lambda x: float(np.log1p(np.exp(3 * x))), 3 / (1 + math.exp(-0.9))),
    "line": (lambda x: 0.7 * x, 0.7),
    "constant": (lambda x: 0.7, 0.0),
    "flat top": (lambda x: math.cos(x - 0.3), 0.0),
    "flat inflection": (lambda x: (x - 0.3) ** 3, 0.0),
    "pole": (lambda x: 1 / (1.6 + x), -1 / 1.9**2),
    "edge of a domain": (lambda x: math.log(x) if x > 0 else math.nan, 1 / 0.3),
    "kinks": (units, float(SLOPES[SLOPES * 0.3 + PLACES > 0].sum())),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_derivatives_are_right_within_their_errors_in_all_units(name, offset):
    f, truth = FUNCTIONS[name]
    for unit in (1e-12, 1.0, 1e12):
        for length in (1e-4, 1.0, 1e4):

            def g(t, unit=unit, length=length):
                return unit * (offset + f(0.3 + t / length))

            rounding = EPS * abs(g(0.0))
            value, error = _derivative(g, longest=0.3 * max(1.0, length), rounding=rounding)
            size = unit / length
            assert abs(value - truth * size) <= 2 * error + 4 * EPS * abs(value), (unit, length)
            assert error <= 1e-7 * size * max(1.0, offset), (unit, length)


def test_functions_that_are_not_finite_have_none():
    assert math.isnan(_derivative(lambda t: math.nan, longest=0.3, rounding=EPS)[0])
    assert _derivative(lambda t: math.inf if t else 1.0, longest=0.3, rounding=EPS)[1] == math.inf


X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0).double()
SOUND = {
    "Bernoulli": (Sphere(6), lambda x, w: x @ w, Bernoulli(), Y),
    "exponential": (Sphere(6), lambda x, w: (x @ w).exp(), Gaussian(), X[:, 0]),
    "quadratic": (Grassmann(6, 2), lambda x, u: (x @ u).square().sum(-1), Bernoulli(), Y),
    "classes": (Stiefel(6, 3), lambda x, u: x @ u, Categorical(), torch.arange(40) % 3),
    "counts": (Euclidean(6), lambda x, w: x @ w, Poisson(), Y),
    "product": (
        Product({"w": Sphere(6), "b": Euclidean(1)}),
        lambda x, p: x @ p["w"] + p["b"],
        Gaussian(),
        X[:, 1],
    ),
    "kinks": (Euclidean(24), lambda x, w: torch.relu(x @ w.reshape(6, 4)).sum(-1), Gaussian(), Y),
    "large": (Euclidean(6), lambda x, w: 1e9 * (x @ w).tanh(), Gaussian(), 1e9 * Y),
    "small": (Euclidean(6), lambda x, w: 1e-9 * (x @ w).tanh(), Gaussian(), 1e-9 * Y),
    "steep": (Euclidean(6), lambda x, w: (1e2 * x @ w).tanh() + x @ w, Gaussian(), Y),
    "overflow": (Euclidean(6), lambda x, w: torch.exp(100 * (x @ w).square()), Gaussian(), Y),
}
BLURRED = {
    "offset": (Euclidean(6), lambda x, w: 1e8 + x @ w, Gaussian(), Y),
    "nearly flat": (Euclidean(6), lambda x, w: 1 + 1e-12 * (x @ w).sin(), Gaussian(), Y),
    "flat": (Euclidean(6), lambda x, w: 0 * (x @ w), Gaussian(), Y),
}


class Off(NLLProblem):
    """Gradients in error by a share of them."""

    share = 0.0

    def loss_and_gradient(self, x, batch=None):
        loss, gradient = super().loss_and_gradient(x, batch)
        return loss, scale(1 + self.share, gradient)


def off(case, share):
    manifold, model, likelihood, targets = case
    problem = Off(manifold, model, likelihood, X, targets)
    problem.share = share
    return problem


@pytest.mark.parametrize("name", SOUND)
def test_gradients_off_by_a_millionth_are_found_out(name):
    for seed in range(5):
        point = SOUND[name][0].random_point(generator=torch.Generator().manual_seed(seed))
        if name == "overflow":
            point = 0.05 * point
        verdict = check_gradient(off(SOUND[name], 0.0), point, seed=seed)
        assert verdict, (seed, str(verdict))
        for share in (1e-2, 1e-4, -1e-6):
            verdict = check_gradient(off(SOUND[name], share), point, seed=seed)
            assert not verdict, (seed, share, str(verdict))
            assert verdict.measured > verdict.expected


@pytest.mark.parametrize("name", BLURRED)
def test_right_gradients_of_blurred_losses_pass(name):
    for seed in range(20):
        verdict = check_gradient(off(BLURRED[name], 0.0), seed=seed)
        assert verdict, (seed, str(verdict))


def test_problems_in_single_precision_and_vectors_of_any_length():
    x, y = X.float(), Y.float()
    problem = NLLProblem(Sphere(6), lambda x, w: x @ w, Bernoulli(), x, y)
    start = problem.manifold.random_point(
        generator=torch.Generator().manual_seed(0), dtype=torch.float32
    )
    assert check_gradient(problem, start)
    case = off(SOUND["Bernoulli"], 1e-6)
    point = case.manifold.random_point(generator=torch.Generator().manual_seed(0))
    vector = case.manifold.random_tangent(point, generator=torch.Generator().manual_seed(1))
    for length in (1e-6, 1.0, 1e6):
        assert not check_gradient(case, point, length * vector)
        assert check_gradient(off(SOUND["Bernoulli"], 0.0), point, length * vector)
    with pytest.raises(
        ValueError, match=r"d must be a tangent vector of positive length, got one of length 0\.0"
    ):
        check_gradient(case, point, 0 * vector)


def test_a_manifold_without_directions_has_nothing_to_find_out():
    assert check_gradient(
        NLLProblem(Stiefel(1, 1), lambda x, w: x[:, :1] @ w, Gaussian(), X, X[:, :1])
    )


def test_a_point_drawn_from_the_same_seed_leaves_a_vector_to_look_along():
    point = Sphere(6).random_point(generator=torch.Generator().manual_seed(3))
    assert not check_gradient(off(SOUND["Bernoulli"], 1e-4), point, seed=3)


def test_the_verdict_says_what_was_compared():
    verdict = check_gradient(off(SOUND["Bernoulli"], 1e-4), seed=1)
    assert str(verdict).startswith("FAILED: gradient: differences of the loss are ")
    assert ", the gradient says " in str(verdict)
    assert not check_gradient(off((Euclidean(6), lambda x, w: (x @ w).log(), Gaussian(), Y), 0.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_checks_draw_where_the_point_is():
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).cuda()
    problem = NLLProblem(Sphere(4), lambda x, w: (x @ w).exp(), Gaussian(), x, x[:, 0])
    w = torch.eye(4, dtype=torch.float64, device="cuda")[0]
    assert check_gradient(problem, w)
    assert check_fisher(problem, w)
