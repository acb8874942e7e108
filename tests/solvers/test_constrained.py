"""Constraints on manifolds against closed forms and SciPy, with their multipliers."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize as scipy_minimize

from fisherfold import LossProblem
from fisherfold.manifolds import Euclidean, Sphere, Stiefel
from fisherfold.solvers import minimize_constrained

MATRIX = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MATRIX = MATRIX @ MATRIX.T


def start(manifold, seed=1):
    return manifold.random_point(generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", ["trust-region", "lbfgs", "rcg"])
def test_an_eigenvector_among_positive_vectors(method):
    """Nonnegative principal components, against SLSQP."""
    sphere = Sphere(6)
    matrix = MATRIX - 3 * torch.eye(6, dtype=torch.float64)
    problem = LossProblem(sphere, lambda x: -x @ matrix @ x)
    first = torch.full((6,), 6**-0.5, dtype=torch.float64)
    result = minimize_constrained(problem, first, method, inequality=lambda x: -x, max_iter=500)
    assert result.success, result.message
    assert result.violation <= 1e-6
    array = matrix.numpy()
    peer = scipy_minimize(
        lambda x: -x @ array @ x,
        first.numpy(),
        constraints=[
            {"type": "eq", "fun": lambda x: x @ x - 1},
            {"type": "ineq", "fun": lambda x: x},
        ],
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert result.value == pytest.approx(peer.fun, abs=1e-5)
    # complementary: a multiplier only where a bound binds
    assert float((result.inequality_multipliers * result.x).abs().max()) < 1e-4


def test_the_eigenvector_orthogonal_to_another_one():
    """An equality on the sphere: the second eigenvector, and no multiplier."""
    values, vectors = torch.linalg.eigh(MATRIX)
    sphere = Sphere(6)
    problem = LossProblem(sphere, lambda x: -x @ MATRIX @ x)
    result = minimize_constrained(
        problem, start(sphere), equality=lambda x: (vectors[:, -1] @ x).reshape(1)
    )
    assert result.success
    assert result.value == pytest.approx(-float(values[-2]), abs=1e-6)
    assert float(result.equality_multipliers.abs()) < 1e-4


def test_multipliers_are_slopes_of_the_minimum():
    space = Euclidean(2)
    problem = LossProblem(space, lambda x: (x - torch.tensor([2.0, 1.0])).square().sum())
    result = minimize_constrained(
        problem,
        torch.zeros(2, dtype=torch.float64),
        inequality=lambda x: torch.stack([x.sum() - 1, x[0] - 9]),
    )
    np.testing.assert_allclose(result.x, [1.0, 0.0], atol=1e-5)
    np.testing.assert_allclose(result.inequality_multipliers, [2.0, 0.0], atol=1e-4)


def test_frames_with_bounded_entries():
    stiefel = Stiefel(6, 2)
    problem = LossProblem(stiefel, lambda x: -(x * (MATRIX @ x)).sum())
    result = minimize_constrained(problem, start(stiefel), inequality=lambda x: x.abs() - 0.6)
    stiefel.check_point(result.x)
    assert float(result.x.abs().max()) < 0.6 + 1e-5


def test_constraints_that_no_point_satisfies_are_reported():
    sphere = Sphere(3)
    problem = LossProblem(sphere, lambda x: x[0])
    result = minimize_constrained(
        problem, start(sphere), inequality=lambda x: 2 - x[:1], max_rounds=6
    )
    assert result.status == "infeasible"
    assert not result.success
    assert "begin nearer to a point that satisfies them" in result.message
    assert result.violation == pytest.approx(1, abs=1e-3)


def test_bad_constraints_are_named():
    sphere = Sphere(3)
    problem = LossProblem(sphere, lambda x: x[0])
    with pytest.raises(ValueError, match="needs equality or inequality; use minimize"):
        minimize_constrained(problem, start(sphere))
    with pytest.raises(ValueError, match=r"equality must return a real torch vector, got float"):
        minimize_constrained(problem, start(sphere), equality=lambda x: 0.0)
    with pytest.raises(ValueError, match="inequality must be finite at x0"):
        minimize_constrained(problem, start(sphere), inequality=lambda x: x / 0)
    with pytest.raises(ValueError, match="x0 is not a point of Sphere"):
        minimize_constrained(problem, 2 * start(sphere), inequality=lambda x: x)
