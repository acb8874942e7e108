"""The logistic subspace problem against finite differences, automatic differentiation and scikit-learn."""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fisherfold.problems import check_gradient
from fisherfold.subspace.logistic import LabelledRows, LogisticSubspaceProblem, newton_coefficients

SIZES = (14, 9, 20, 5)


def case(seed: int = 0, rank: int = 2, ridge: float = 0.7, n: int = 5):
    g = torch.Generator().manual_seed(seed)
    task = torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES))
    task = task[torch.randperm(len(task), generator=g)]
    X = torch.randn(len(task), n, generator=g, dtype=torch.float64)
    y = (
        X[:, 0] * (task - 1.5) + torch.randn(len(task), generator=g, dtype=torch.float64) > 0
    ).double()
    weight = 0.5 + torch.rand(len(task), generator=g, dtype=torch.float64)
    offset = 0.3 * torch.randn(len(task), generator=g, dtype=torch.float64)
    rows = LabelledRows.make(X, y, task, weight=weight, offset=offset)
    problem = LogisticSubspaceProblem(rows, rank=rank, ridge=ridge)
    return problem, problem.manifold.random_point(generator=g)


def test_coefficients_are_those_of_scikit_learn():
    g = torch.Generator().manual_seed(3)
    X = torch.randn(120, 3, generator=g, dtype=torch.float64)
    task = torch.arange(120) % 3
    y = (X[:, 0] + torch.randn(120, generator=g, dtype=torch.float64) > 0).double()
    w, _ = newton_coefficients(LabelledRows.make(X, y, task), X, 0.5)
    for t in range(3):
        peer = LogisticRegression(C=2.0, fit_intercept=False, tol=1e-12, solver="newton-cholesky")
        peer.fit(X[task == t].numpy(), y[task == t].numpy())
        torch.testing.assert_close(w[t], torch.tensor(peer.coef_[0]), rtol=1e-7, atol=1e-8)


def test_newton_converges_from_a_far_start_and_on_separable_data():
    problem, U = case()
    features = problem.rows.X @ U
    reference, _ = newton_coefficients(problem.rows, features, problem.ridge)
    far = 50 * torch.ones_like(reference)
    found, _ = newton_coefficients(problem.rows, features, problem.ridge, far)
    torch.testing.assert_close(found, reference, rtol=1e-8, atol=1e-9)
    separable = LabelledRows.make(features, (features[:, 0] > 0).double(), problem.rows.task)
    w, _ = newton_coefficients(separable, features, 1e-6)
    assert bool(torch.isfinite(w).all())
    predicted = (features * w[separable.task]).sum(-1) > 0
    assert bool((predicted == (separable.y > 0)).all())


def test_the_gradient_is_the_derivative_of_the_minimised_loss():
    problem, U = case()
    gradient = problem.gradient(U)
    for seed in range(3):
        v = problem.manifold.random_tangent(U, generator=torch.Generator().manual_seed(seed))
        h = 1e-5
        ahead, behind = (problem.loss(problem.manifold.exp(U, s * v)) for s in (h, -h))
        assert float((ahead - behind) / (2 * h)) == pytest.approx(
            float((gradient * v).sum()), rel=1e-7, abs=1e-9
        )


@pytest.mark.parametrize("ridge", [1e-2, 1e-4, 1e-8])
def test_tasks_that_can_be_separated_keep_their_digits(ridge):
    """Logits beyond 20, where softplus takes log(1 + exp) for its argument: losses were off by up to a percent."""
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        X = torch.randn(60, 5, generator=g, dtype=torch.float64)
        frame = torch.linalg.qr(torch.randn(5, 2, generator=g, dtype=torch.float64))[0]
        rows = LabelledRows.make(X, (X @ frame[:, 0] > 0).double(), torch.arange(60) % 4)
        problem = LogisticSubspaceProblem(rows, rank=2, ridge=ridge)
        assert check_gradient(problem, seed=seed)
        state = problem.state(frame)
        logits = (X @ frame * state.weights[rows.task]).sum(-1)
        wrong = torch.where(rows.y > 0, -logits, logits)
        assert float(logits.abs().max()) > 20
        losses = torch.logaddexp(torch.zeros_like(wrong), wrong)
        penalised = rows.total(losses) + ridge / 2 * state.weights.square().sum(-1)
        torch.testing.assert_close(state.losses, penalised, rtol=1e-13, atol=0)
        # at its minimum a task pulls as much as its ridge: what rounding has left is far below both
        slopes = rows.total((torch.sigmoid(wrong) * (1 - 2 * rows.y))[:, None] * (X @ frame))
        torch.testing.assert_close(slopes, -ridge * state.weights, rtol=1e-4, atol=0)


def test_the_exact_fisher_is_that_of_the_logits_whose_coefficients_follow():
    problem, U = case()
    operator = problem.fisher(U, kind="exact")
    rows = problem.rows

    def logits(V):
        features = rows.X @ V
        w, _ = newton_coefficients(rows, features, problem.ridge)
        return (features * w[rows.task]).sum(-1), w

    mu = torch.sigmoid(rows.offset + logits(U)[0])
    spread = rows.weight * mu * (1 - mu)
    for seed in range(3):
        v = problem.manifold.random_tangent(U, generator=torch.Generator().manual_seed(seed))
        h = 1e-5
        (ahead, w_ahead), (behind, w_behind) = logits(U + h * v), logits(U - h * v)
        moved, change = (ahead - behind) / (2 * h), (w_ahead - w_behind) / (2 * h)
        expected = (spread * moved**2).sum() + (problem.ridge * change**2).sum()
        assert float(operator.quadratic(v)) == pytest.approx(float(expected / 4), rel=1e-6)
    dense = operator.dense()
    torch.testing.assert_close(dense, dense.mT, rtol=1e-10, atol=1e-11)


def test_observed_information_is_the_hessian():
    """The gradient along a geodesic, projected back; its square along v the second derivative of the loss."""
    problem, U = case()
    operator = problem.fisher(U, kind="observed")
    for seed in range(3):
        v = problem.manifold.random_tangent(U, generator=torch.Generator().manual_seed(seed))
        h = 1e-5
        ahead, behind = (problem.gradient(problem.manifold.exp(U, s * v)) for s in (h, -h))
        expected = problem.manifold.project(U, (ahead - behind) / (2 * h))
        torch.testing.assert_close(operator @ v, expected, rtol=1e-6, atol=1e-8)
    dense = operator.dense()
    torch.testing.assert_close(dense, dense.mT, rtol=1e-10, atol=1e-11)


def test_errors_name_the_argument():
    X, task = torch.randn(6, 3), torch.arange(6) % 2
    rows = LabelledRows.make(X, torch.tensor([0.0, 1, 1, 0, 1, 1]), task)
    with pytest.raises(ValueError, match=r"ridge must be positive, got 0.0"):
        LogisticSubspaceProblem(rows, rank=1, ridge=0.0)
    with pytest.raises(ValueError, match="rank must be between 1 and"):
        LogisticSubspaceProblem(rows, rank=3)
    problem = LogisticSubspaceProblem(rows, rank=1)
    with pytest.raises(ValueError, match="kind must be one of"):
        problem.fisher(torch.eye(3, 1, dtype=torch.float64), kind="dense")


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_coefficients_are_right_beyond_what_the_loss_can_show(scale):
    """The loss is flat to rounding within 1e-8 of them; the gradient in U is as wrong as they are."""
    for seed in range(5):
        problem, U = case(seed)
        features = scale * (problem.rows.X @ U)
        w, _ = newton_coefficients(problem.rows, features, problem.ridge)
        rows, logits = problem.rows, problem.rows.offset + (features * w[problem.rows.task]).sum(-1)
        pull = (rows.weight * (torch.sigmoid(logits) - rows.y))[:, None] * features
        left = rows.total(pull) + problem.ridge * w
        assert float((left.abs() / (rows.total(pull.abs()) + problem.ridge)).max()) < 1e-11
