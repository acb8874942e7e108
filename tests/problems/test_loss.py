"""Losses given as torch functions: derivatives, the empirical Fisher information, and messages."""

import copy

import pytest
import torch

from fisherfold import Gaussian, LossProblem, NLLProblem, Problem, check_gradient, minimize
from fisherfold.manifolds import (
    SPD,
    Euclidean,
    Grassmann,
    Oblique,
    Power,
    Product,
    Rotations,
    Sphere,
    Stiefel,
)
from fisherfold.manifolds.base import flatten, leaves, scale, tree_map, unflatten
from toy import normal

FLOAT = torch.float64


MATRIX, LONG = normal(6, 6), normal(12, 12, seed=1)
CASES = [
    (Sphere(6), lambda w: w @ MATRIX @ w + (w**4).sum()),
    (Stiefel(6, 3), lambda w: (w * (MATRIX @ w) * torch.arange(1, 4)).sum() + (w**3).sum()),
    (Grassmann(6, 2), lambda w: (w @ w.mT * MATRIX).sum() + ((w @ w.mT) ** 3).sum()),
    (Rotations(4), lambda w: (w * MATRIX[:4, :4]).sum() + (w**3).sum()),
    (SPD(3), lambda w: torch.logdet(w) + (w.inverse() * (MATRIX @ MATRIX.T)[:3, :3]).sum()),
    (Oblique(3, 2), lambda w: w.flatten() @ MATRIX @ w.flatten() + (w**3).sum()),
    (Power(Rotations(2), 3), lambda w: w.flatten() @ LONG @ w.flatten()),
    (
        Product({"r": Rotations(3), "t": Euclidean(3), "s": SPD(2)}),
        lambda w: (
            (w["r"] @ w["t"] - 1).square().sum()
            + (w["s"] @ w["t"][:2]).square().sum()
            - torch.logdet(w["s"])
        ),
    ),
]


@pytest.mark.parametrize(
    ("manifold", "cost"), CASES, ids=lambda case: repr(case) if not callable(case) else ""
)
def test_gradient_and_hessian_are_the_derivatives_along_geodesics(manifold, cost):
    problem, generator = LossProblem(manifold, cost), torch.Generator().manual_seed(2)
    x = manifold.random_point(generator=generator)
    u, v = (manifold.random_tangent(x, generator=generator) for _ in range(2))
    assert check_gradient(problem, x, v)
    hessian = problem.hessian(x)
    manifold.check_tangent(x, hessian @ v)
    torch.testing.assert_close(manifold.inner(x, hessian @ u, v), manifold.inner(x, u, hessian @ v))
    h = 1e-4
    values = [float(problem.loss(manifold.exp(x, scale(t, v)))) for t in (-h, 0.0, h)]
    bend = (values[0] - 2 * values[1] + values[2]) / h**2
    assert float(hessian.quadratic(v)) == pytest.approx(bend, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("manifold", [Sphere(4), Euclidean(2, 2)], ids=repr)
def test_the_hessian_of_every_problem_is_that_of_its_loss(manifold):
    x, y = normal(20, 4), normal(20, seed=1)
    problem = NLLProblem(manifold, lambda x, w: torch.tanh(x @ w.reshape(-1)), Gaussian(), x, y)
    other = LossProblem(
        manifold, lambda d, w: (torch.tanh(d[0] @ w.reshape(-1)) - d[1]).square() / 2, (x, y)
    )
    theta = manifold.random_point(generator=torch.Generator().manual_seed(3))
    v = manifold.random_tangent(theta, generator=torch.Generator().manual_seed(4))
    batch = torch.arange(7)
    for samples in (None, batch):
        torch.testing.assert_close(problem.loss(theta, samples), other.loss(theta, samples))
        torch.testing.assert_close(problem.gradient(theta, samples), other.gradient(theta, samples))
        torch.testing.assert_close(
            problem.hessian(theta, samples) @ v, other.hessian(theta, samples) @ v
        )
    empirical = problem.fisher(theta, batch, kind="empirical")
    torch.testing.assert_close(other.fisher(theta, batch) @ v, empirical @ v)
    torch.testing.assert_close(other.fisher(theta, batch).rows().abs(), empirical.rows().abs())


def test_a_loss_that_is_linear_in_a_parameter_has_a_hessian():
    manifold = Product({"a": Euclidean(2), "b": Euclidean(2)})
    problem = LossProblem(manifold, lambda w: w["a"].sum() + (w["b"] ** 2).sum())
    x = manifold.random_point(generator=torch.Generator().manual_seed(0))
    image = problem.hessian(x) @ tree_map(torch.ones_like, x)
    assert torch.equal(image["a"], torch.zeros(2, dtype=FLOAT))
    assert torch.equal(image["b"], torch.full((2,), 2.0, dtype=FLOAT))
    flat = LossProblem(Euclidean(2), lambda w: w.sum())
    assert not bool((flat.hessian(x["a"]) @ x["a"]).any())


def test_the_graph_of_the_gradient_is_used_for_the_hessian_until_the_point_is_written_to():
    calls = []
    problem = LossProblem(Euclidean(2), lambda w: calls.append(1) or (w**3).sum())
    x = torch.ones(2, dtype=FLOAT)
    problem.gradient(x)
    assert torch.equal(problem.hessian(x) @ x, torch.full((2,), 6.0, dtype=FLOAT))
    assert len(calls) == 1
    assert torch.equal(problem.hessian(x.mul_(2)) @ x, torch.full((2,), 24.0, dtype=FLOAT))
    assert float(copy.deepcopy(problem).loss(x)) == 16.0


def test_robust_pose_from_matches_as_a_product():
    """SE(3): a rotation and a translation from matched points, a fifth of them wrong."""
    pose = Product({"rotation": Rotations(3), "translation": Euclidean(3)})
    generator = torch.Generator().manual_seed(5)
    truth, points = pose.random_point(generator=generator), normal(60, 3)
    seen = points @ truth["rotation"].mT + truth["translation"]
    seen[:12] += 3 * normal(12, 3, seed=6)

    def loss(data, w):
        gap = (data[0] @ w["rotation"].mT + w["translation"] - data[1]).square().sum(1)
        return torch.log1p(gap / 0.01)

    start = pose.retract(truth, scale(0.5, pose.random_tangent(truth, generator=generator)))
    result = minimize(LossProblem(pose, loss, (points, seen)), start, "trust-region")
    assert result.success
    assert float(pose.dist(result.x, truth)) < 1e-3


def test_covariances_come_from_the_hessian_and_the_sandwich():
    a = MATRIX @ MATRIX.T + torch.eye(6)
    plain = minimize(
        LossProblem(Euclidean(6), lambda w: 0.5 * w @ a @ w),
        torch.ones(6, dtype=FLOAT),
        "trust-region",
    )
    torch.testing.assert_close(plain.covariance(lambda w: w), torch.linalg.inv(a))
    # least squares with unequal variances: the textbook sandwich
    x = normal(200, 3)
    y = x.sum(1) + x[:, 0] * normal(200, seed=1)
    problem = LossProblem(Euclidean(3), lambda d, w: (d[0] @ w - d[1]).square() / 2, (x, y))
    result = minimize(problem, torch.zeros(3, dtype=FLOAT), "trust-region")
    inverse, residual = torch.linalg.inv(x.T @ x), x @ result.x - y
    torch.testing.assert_close(result.covariance(lambda w: w), inverse)
    sandwich = inverse @ (x * residual[:, None] ** 2).T @ x @ inverse
    torch.testing.assert_close(result.covariance(lambda w: w, robust=True), sandwich)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: LossProblem(Sphere, lambda w: w.sum()),
            TypeError,
            "must be a manifold such as Sphere",
        ),
        (
            lambda: LossProblem(Sphere(3), 1.0),
            TypeError,
            "loss must be a function of theta, or of samples and theta",
        ),
        (
            lambda: LossProblem(Sphere(3), torch.dot, "data"),
            TypeError,
            r"x\[0\] must be a torch.Tensor, got str",
        ),
        (
            lambda: LossProblem(Sphere(3), torch.dot, normal(0, 3)),
            ValueError,
            "x must hold at least one sample",
        ),
        (
            lambda: LossProblem(Sphere(3), torch.dot, normal(2, 3) / 0),
            ValueError,
            "x must be finite",
        ),
        (
            lambda: LossProblem(Sphere(3), torch.dot, (normal(2), normal(3))),
            ValueError,
            "same .* 2 and 3",
        ),
    ],
)
def test_bad_parts_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            LossProblem(Sphere(3), lambda w: w),
            r"single floating number, got torch.float64 of shape \(3,\)",
        ),
        (LossProblem(Sphere(3), lambda w: 1.0), "single floating number, got float"),
        (
            LossProblem(Sphere(3), lambda x, w: (x @ w).mean(), normal(5, 3)),
            r"shape \(5,\), whose mean is taken here",
        ),
        (
            LossProblem(Sphere(3), lambda w: w.detach().sum()),
            "loss must depend on theta through torch operations",
        ),
    ],
)
def test_bad_losses_are_named(problem, message):
    with pytest.raises(ValueError, match=message):
        problem.gradient(torch.eye(3, dtype=FLOAT)[0])


def test_bad_points_and_kinds_are_named():
    problem = LossProblem(Sphere(3), lambda w: w[0])
    with pytest.raises(ValueError, match=r"theta is not a point of Sphere\(3\)"):
        problem.loss(torch.ones(3))
    with pytest.raises(
        ValueError,
        match=r"theta must have the dtype torch.float64 of the data x, got torch.float32",
    ):
        LossProblem(Sphere(3), torch.mv, normal(5, 3)).loss(torch.eye(3)[0])
    with pytest.raises(ValueError, match="theta must be on meta like the data, got cpu"):
        LossProblem(Sphere(3), torch.mv, torch.ones(5, 3, dtype=torch.int64, device="meta")).loss(
            torch.eye(3)[0]
        )
    with pytest.raises(
        ValueError, match="a plain cost has no samples, and so no empirical Fisher information; use"
    ):
        minimize(problem, torch.eye(3, dtype=FLOAT)[1], "rngd")
    with pytest.raises(
        ValueError, match=r"kind must be one of \['empirical', 'observed'\], got 'exact'"
    ):
        problem.fisher(torch.eye(3, dtype=FLOAT)[0], kind="exact")

    class Bare(Problem):
        manifold, n_samples = Sphere(3), 1

        def loss(self, x, batch=None):
            return x[0]

        def gradient(self, x, batch=None):
            return self.manifold.project(x, torch.eye(3, dtype=FLOAT)[0])

    with pytest.raises(
        NotImplementedError, match="Bare has no Fisher information; use a method without, such as"
    ):
        minimize(Bare(), torch.eye(3, dtype=FLOAT)[1], "rngd")
    result = minimize(Bare(), torch.eye(3, dtype=FLOAT)[1], "lbfgs")
    assert result.value == pytest.approx(-1)
    reflected = torch.diag(torch.tensor([1.0, 1.0, -1.0], dtype=FLOAT))
    with pytest.raises(
        ValueError, match=r"x0 is not a point of Rotations\(3\): its determinant is -1"
    ):
        minimize(LossProblem(Rotations(3), lambda w: w[0, 0]), reflected, "lbfgs")


def test_an_operator_of_flat_vectors_is_the_same_matrix():
    problem = LossProblem(Sphere(3), lambda x, w: (x @ w) ** 2, normal(5, 3))
    x = torch.eye(3, dtype=FLOAT)[0]
    rows = problem.fisher(x).rows()
    torch.testing.assert_close(problem.fisher(x).dense(), rows.T @ rows)
    assert all(
        torch.equal(a, b) for a, b in zip(leaves(unflatten(flatten(x), x)), leaves(x), strict=True)
    )
