"""The Fisher–Rao geometry of probabilities and scales: its metric is the Fisher information."""

import pytest
import torch

from fisherfold import LossProblem, NLLProblem, minimize
from fisherfold.fisher import Categorical
from fisherfold.manifolds import PositiveOrthant, Simplex, Sphere
from fisherfold.solvers import GradientNorm


def test_the_metric_is_the_information_of_a_categorical_distribution():
    simplex, generator = Simplex(4), torch.Generator().manual_seed(0)
    x = simplex.random_point(generator=generator)
    rows, targets = torch.zeros(8, 1, dtype=x.dtype), torch.arange(8) % 4
    problem = NLLProblem(simplex, lambda r, p: p.log() + 0 * r, Categorical(), rows, targets)
    information = problem.fisher(x)
    for _ in range(3):
        v = simplex.random_tangent(x, generator=generator)
        torch.testing.assert_close(information @ v, v, atol=1e-13, rtol=0)


def test_distances_are_twice_the_angles_of_roots(pair, same):
    simplex = Simplex(5)
    x, y, u, v, _ = pair(simplex, length=0.3)
    same(simplex.dist(x, y), 2 * torch.arccos((x * y).sqrt().sum()))
    same(simplex.dist(x, y), 2 * Sphere(5).dist(x.sqrt(), y.sqrt()))
    same(simplex.inner(x, u, v), (u * v / x).sum())


def test_maximum_likelihood_is_a_single_step_from_anywhere():
    """The natural gradient of a multinomial likelihood points straight at the frequencies."""
    simplex = Simplex(3)
    counts = torch.tensor([5.0, 3.0, 2.0], dtype=torch.float64)
    x = simplex.random_point(generator=torch.Generator().manual_seed(0))
    egrad = -counts / counts.sum() / x
    step = -simplex.riemannian_gradient(x, egrad)
    torch.testing.assert_close(x + step, counts / counts.sum(), atol=1e-14, rtol=0)


@pytest.mark.parametrize("method", ["trust-region", "lbfgs", "rcg"])
def test_minima_on_the_boundary_are_approached(method):
    simplex = Simplex(4)
    costs = torch.tensor([3.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    start = torch.full((4,), 0.25, dtype=torch.float64)
    problem = LossProblem(simplex, lambda p: (costs * p).sum())
    result = minimize(problem, start, method, stop=GradientNorm(1e-6), max_iter=500)
    assert result.value == pytest.approx(1, abs=1e-6)
    simplex.check_point(result.x)


def test_points_outside_are_named():
    with pytest.raises(ValueError, match="constraint is violated by"):
        Simplex(2).check_point(torch.tensor([0.5, 0.6], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"PositiveOrthant\(2\): its entries must be positive"):
        PositiveOrthant(2).check_point(torch.tensor([0.0, 1.0]))


def test_pymanopt_agrees_on_positive_numbers(pair, same):
    theirs = pytest.importorskip("pymanopt.manifolds").Positive(3, 2)
    ours = PositiveOrthant(3, 2)
    x, y, u, v, a = pair(ours)
    px, py, pu, pv, pa = (t.numpy() for t in (x, y, u, v, a))
    same(ours.exp(x, v), theirs.exp(px, pv))
    same(ours.log(x, y), theirs.log(px, py))
    same(ours.dist(x, y), theirs.dist(px, py))
    same(ours.inner(x, u, v), theirs.inner_product(px, pu, pv))
    same(ours.riemannian_gradient(x, a), theirs.euclidean_to_riemannian_gradient(px, pa))
    hessian = theirs.euclidean_to_riemannian_hessian(px, pa, pu, pv)
    same(ours.riemannian_hessian(x, a, u, v), hessian)
