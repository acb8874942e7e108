"""The two-layer network: closed forms against automatic differentiation, sample-space solves against dense ones."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from fisherfold import Bernoulli, Gaussian, NLLProblem, Poisson, minimize
from fisherfold.reproduce import twolayer
from fisherfold.reproduce.twolayer import ACTIVATIONS, TwoLayer, balanced_inputs
from fisherfold.solvers import GradientNorm

N, DIM, WIDTH = 9, 4, 11
PAIRS = [("relu", Gaussian()), ("tanh", Gaussian(0.5)), ("tanh", Poisson()), ("relu", Bernoulli())]


def network(activation="relu", likelihood=None, *, seed=0, width=WIDTH):
    g = torch.Generator().manual_seed(seed)
    # a mean and a covariance that are not trivial
    x = (
        torch.randn(N, DIM, generator=g, dtype=torch.float64)
        @ torch.randn(DIM, DIM, generator=g).double()
        + 1
    )
    likelihood = likelihood or Gaussian()
    y = likelihood.sample(torch.zeros(N, dtype=torch.float64), generator=g)
    problem, theta = TwoLayer.draw(
        x, y, width, activation=activation, likelihood=likelihood, generator=g
    )
    mean, covariance, phi = x.mean(dim=0), torch.cov(x.T, correction=0), ACTIVATIONS[activation][0]

    def model(inputs, weights):
        scale = torch.einsum("mi,ij,mj->m", weights, covariance, weights).sqrt()
        return phi((inputs - mean) @ weights.T / scale) @ problem.signs / math.sqrt(width)

    return problem, theta, NLLProblem(problem.manifold, model, likelihood, x, y)


def close(a, b, tol=1e-10):
    return float((a - b).norm()) <= tol * max(float(b.norm()), 1e-3)


@pytest.mark.parametrize(("activation", "likelihood"), PAIRS)
def test_value_gradient_and_jacobian_are_those_of_automatic_differentiation(activation, likelihood):
    problem, theta, reference = network(activation, likelihood)
    loss, gradient = problem.loss_and_gradient(theta)
    expected, slope = reference.loss_and_gradient(theta)
    assert close(loss, expected)
    assert close(problem.loss(theta), expected)
    assert close(gradient, slope)
    assert close(problem.gradient(theta), slope)
    assert close(problem.jacobian(theta), reference.jacobian(theta)[:, 0])


@pytest.mark.parametrize(("activation", "likelihood"), PAIRS)
def test_the_fisher_information_is_the_dense_one(activation, likelihood):
    problem, theta, reference = network(activation, likelihood)
    ours, dense = problem.fisher(theta), reference.fisher(theta, kind="dense")
    assert close(ours.dense(), dense.matrix)
    rows = ours.rows()
    assert close(rows.T @ rows, dense.matrix)


@pytest.mark.parametrize(("activation", "likelihood"), PAIRS)
@pytest.mark.parametrize("damping", [0.0, 1e-6, 0.3])
def test_the_sample_space_solve_is_the_dense_solve(activation, likelihood, damping):
    problem, theta, reference = network(activation, likelihood)
    operator, exact = problem.fisher(theta), reference.fisher(theta)
    for g in (
        problem.gradient(theta),
        problem.manifold.random_tangent(theta, generator=torch.Generator()),
    ):
        ours = operator.solve(g, damping, method="structured")
        if damping == 0:
            assert close(ours, exact.solve(g, 0.0, method="pinv"), 1e-8)
        else:
            assert close(ours, exact.solve(g, damping, method="dense"), 1e-8)
        assert operator.solution(g, damping).method == "structured"


def test_without_damping_it_is_the_formula_of_the_paper():
    problem, theta, _ = network("tanh", Poisson())
    u = problem.outputs(theta)
    jacobian = problem.jacobian(theta).flatten(1)
    inverse = torch.linalg.inv(jacobian @ jacobian.T)
    g = problem.gradient(theta)
    # the paper's F has no 1/N, ours has: hence the factor N
    expected = N * jacobian.T @ inverse @ torch.diag(1 / u.exp()) @ inverse @ jacobian @ g.flatten()
    assert close(problem.fisher(theta).solve(g).flatten(), expected, 1e-8)


def test_every_row_of_the_jacobian_is_tangent():
    problem, theta, _ = network()
    radial = torch.einsum("nmi,mi->nm", problem.jacobian(theta), theta)
    assert float(radial.abs().max()) < 1e-14


@pytest.mark.parametrize("entries", [1, 40, 2**22])
def test_gram_matrices_do_not_depend_on_the_blocks(entries, monkeypatch):
    problem, theta, _ = network("tanh")
    monkeypatch.setattr(twolayer, "_BLOCK_ENTRIES", entries)
    jacobian = problem.jacobian(theta).flatten(1)
    assert close(problem.gram(theta), jacobian @ jacobian.T)
    other = problem.manifold.retract(
        theta, 0.1 * problem.manifold.random_tangent(theta, generator=torch.Generator())
    )
    change = jacobian - problem.jacobian(other).flatten(1)
    assert close(problem.gram(theta, other), change @ change.T)


def test_products_are_adjoint_to_each_other():
    problem, theta, _ = network()
    g = torch.Generator().manual_seed(3)
    v, w = (
        problem.manifold.random_tangent(theta, generator=g),
        torch.randn(N, generator=g, dtype=torch.float64),
    )
    left, right = problem.push_forward(theta, v) @ w, (problem.pull_back(theta, w) * v).sum()
    assert float((left - right).abs()) < 1e-13


@pytest.mark.parametrize("step", [0.25, 0.5, 1.0])
def test_a_wide_network_converges_at_least_as_fast_as_the_theorem_says(step):
    g = torch.Generator().manual_seed(0)
    x, y = balanced_inputs(12, 4, generator=g), torch.randn(12, generator=g, dtype=torch.float64)
    problem, theta = TwoLayer.draw(x, y, 8192, generator=g)
    result = minimize(problem, theta, step=step, max_iter=6, stop=GradientNorm(1e-13))
    losses = [loss for loss in result.trace["loss"] if loss > 1e-24]
    ratios = [math.sqrt(b / a) for a, b in pairwise(losses)]
    assert len(ratios) >= 3
    assert max(ratios) <= 1 - step / 2


def test_balanced_inputs_meet_the_assumption():
    x = balanced_inputs(20, 5, generator=torch.Generator().manual_seed(1))
    assert float((x.norm(dim=1) - 1).abs().max()) < 1e-14
    assert float(x.mean(dim=0).norm()) < 1e-15
    cosines = x @ x.T - 2 * torch.eye(20)
    assert float(cosines.abs().fill_diagonal_(0).max()) < 1


def test_draws_are_those_of_the_paper():
    g = torch.Generator().manual_seed(0)
    x, y = balanced_inputs(8, 3, generator=g), torch.zeros(8, dtype=torch.float64)
    problem, theta = TwoLayer.draw(x, y, 20000, generator=g)
    assert set(problem.signs.tolist()) == {-1.0, 1.0}
    assert abs(float(problem.signs.mean())) < 0.03
    # on the sphere of R^3 every coordinate is uniform on [-1, 1] (Archimedes)
    assert torch.allclose(
        theta.abs().mean(dim=0), torch.full((3,), 0.5, dtype=torch.float64), atol=0.01
    )


def test_batches_are_rejected():
    problem, theta, _ = network()
    with pytest.raises(ValueError, match="measured on all samples"):
        problem.loss(theta, torch.tensor([0]))


def test_a_quadratic_activation_has_a_singular_jacobian(monkeypatch):
    # batch normalisation fixes Σ_i τ_ij² = N, so the sum of all outputs cannot move
    monkeypatch.setitem(ACTIVATIONS, "square", (torch.square, lambda t: 2 * t))
    problem, theta, _ = network("square", width=200)
    gram = problem.gram(theta)
    assert float((gram @ torch.ones(N, dtype=torch.float64)).norm()) < 1e-12 * float(gram.norm())
    relu, theta, _ = network("relu", width=200)
    assert float(torch.linalg.eigvalsh(relu.gram(theta))[0]) > 1e-4 * float(
        torch.linalg.eigvalsh(relu.gram(theta))[-1]
    )
