"""Fixed-rank matrices against dense matrices and pymanopt; low-rank covariances against NumPy."""

import numpy as np
import pytest
import torch

from fisherfold import Gaussian, LossProblem, NLLProblem, minimize
from fisherfold.manifolds import FixedRank, LowRankPSD
from fisherfold.manifolds.base import combine, scale
from fisherfold.solvers import GradientNorm

MANIFOLD = FixedRank(7, 5, 2)


def draw(seed=0, manifold=MANIFOLD):
    generator = torch.Generator().manual_seed(seed)
    x = manifold.random_point(generator=generator)
    return x, *(manifold.random_tangent(x, generator=generator) for _ in range(2))


def ambient(x, v):
    """The matrix that a tangent vector stands for."""
    return v["u"] @ x["s"] @ x["v"].T + x["u"] @ v["s"] @ x["v"].T + x["u"] @ x["s"] @ v["v"].T


def tangent_projector(x):
    left, right = x["u"] @ x["u"].T, x["v"] @ x["v"].T
    return lambda z: left @ z + z @ right - left @ z @ right


def test_the_metric_is_that_of_the_matrices(same):
    x, u, v = draw()
    same(MANIFOLD.inner(x, u, v), (ambient(x, u) * ambient(x, v)).sum())
    y, _, _ = draw(1)
    moved = ambient(y, MANIFOLD.transport(x, y, v))
    same(moved, tangent_projector(y)(ambient(x, v)))


def test_gradient_and_hessian_are_those_of_a_function_of_the_matrix(same):
    """Vandereycken (2013), Proposition 2.3, with dense matrices."""
    x, v, _ = draw()
    target = torch.randn(7, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def function(z):
        return (z - target).pow(4).sum() / 4

    dense = MANIFOLD.matrix(x)
    g = (dense - target) ** 3
    problem = LossProblem(MANIFOLD, lambda theta: function(MANIFOLD.matrix(theta)))
    same(ambient(x, problem.gradient(x)), tangent_projector(x)(g))
    z = ambient(x, v)
    inverse = torch.linalg.pinv(dense)
    left = torch.eye(7, dtype=z.dtype) - x["u"] @ x["u"].T
    right = torch.eye(5, dtype=z.dtype) - x["v"] @ x["v"].T
    bend = left @ g @ right @ z.T @ inverse.T + inverse.T @ z.T @ left @ g @ right
    expected = tangent_projector(x)(3 * (dense - target) ** 2 * z) + bend
    same(ambient(x, problem.hessian(x) @ v), expected, atol=1e-12)


def test_the_svd_gives_the_nearest_matrix(same):
    x, v, _ = draw()
    y = MANIFOLD.matrix(MANIFOLD.retract(x, v))
    u, s, vt = torch.linalg.svd(MANIFOLD.matrix(x) + ambient(x, v))
    same(y, u[:, :2] * s[:2] @ vt[:2])
    z = MANIFOLD.matrix(MANIFOLD.retract(x, v, method="orthographic"))
    gap = tangent_projector(x)(z - MANIFOLD.matrix(x) - ambient(x, v))
    same(gap, torch.zeros_like(gap))


def test_pymanopt_agrees(same):
    theirs = pytest.importorskip("pymanopt.manifolds").FixedRankEmbedded(7, 5, 2)
    x = MANIFOLD.from_matrix(MANIFOLD.matrix(draw()[0]))
    v = MANIFOLD.random_tangent(x, generator=torch.Generator().manual_seed(3))
    point = (x["u"].numpy(), x["s"].diagonal().numpy(), x["v"].T.numpy())
    vector = ((v["u"] @ x["s"]).numpy(), v["s"].numpy(), (v["v"] @ x["s"].T).numpy())
    u, s, vt = theirs.retraction(point, vector)
    same(MANIFOLD.matrix(MANIFOLD.retract(x, v)), (u * s) @ vt)
    same(MANIFOLD.inner(x, v, v), theirs.inner_product(point, vector, vector))
    assert MANIFOLD.dim == theirs.dim


@pytest.mark.parametrize("method", ["rngd", "trust-region", "lbfgs", "rcg"])
def test_a_matrix_is_sensed(method):
    """RFIM: on the tangent space the information is that of the matrix in its own coordinates."""
    generator = torch.Generator().manual_seed(0)
    truth, start = MANIFOLD.random_point(2, generator=generator).values(), draw(5)[0]
    truth = dict(zip("usv", (leaf[0] for leaf in truth), strict=True))
    x = torch.randn(200, 7, 5, generator=generator, dtype=torch.float64)

    def model(x, theta):
        return torch.einsum("bij,ij->b", x, MANIFOLD.matrix(theta))

    problem = NLLProblem(MANIFOLD, model, Gaussian(), x, model(x, truth))
    result = minimize(problem, start, method, stop=GradientNorm(1e-9), max_iter=500)
    torch.testing.assert_close(MANIFOLD.matrix(result.x), MANIFOLD.matrix(truth), atol=1e-7, rtol=0)
    v, w = (MANIFOLD.random_tangent(start, generator=generator) for _ in range(2))
    found = MANIFOLD.inner(start, w, problem.fisher(start) @ v)
    images = [torch.einsum("bij,ij->b", x, ambient(start, t)) for t in (v, w)]
    assert float(found) == pytest.approx(float((images[0] * images[1]).mean()), abs=1e-12)


def test_matrices_of_less_rank_are_named():
    matrix = torch.ones(7, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="its rank is less than that"):
        MANIFOLD.from_matrix(matrix)
    with pytest.raises(ValueError, match=r"matrix must have shape \(\.\.\., 7, 5\), got \(5, 7\)"):
        MANIFOLD.from_matrix(matrix.T)
    with pytest.raises(ValueError, match="its columns are linearly dependent"):
        LowRankPSD(3, 2).check_point(torch.ones(3, 2))


def test_distances_are_those_of_bures_and_wasserstein(pair):
    psd = LowRankPSD(5, 2)
    x, y, _, _, _ = pair(psd)
    a, b = (x @ x.T).numpy(), (y @ y.T).numpy()
    values, vectors = np.linalg.eigh(a)
    root = vectors * values.clip(0) ** 0.5 @ vectors.T
    cross = np.linalg.eigvalsh(root @ b @ root).clip(0) ** 0.5
    expected = a.trace() + b.trace() - 2 * cross.sum()
    assert float(psd.dist(x, y)) ** 2 == pytest.approx(expected, abs=1e-6)


def test_pymanopt_agrees_on_low_rank_covariances(pair, same):
    theirs = pytest.importorskip("pymanopt.manifolds").PSDFixedRank(5, 2)
    ours = LowRankPSD(5, 2)
    x, _, u, v, a = pair(ours)
    px, pu, pv, pa = (t.numpy() for t in (x, u, v, a))
    same(ours.project(x, a), theirs.projection(px, pa))
    same(ours.inner(x, u, v), theirs.inner_product(px, pu, pv))
    same(ours.retract(x, v), theirs.retraction(px, pv))
    assert ours.dim == theirs.dim


def test_a_low_rank_covariance_is_approximated():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    target = noise @ noise.T
    psd = LowRankPSD(8, 3)
    problem = LossProblem(psd, lambda x: (x @ x.T - target).square().sum())
    start = psd.random_point(generator=generator)
    result = minimize(problem, start, "trust-region", stop=GradientNorm(1e-8))
    values = torch.linalg.eigvalsh(target)
    assert result.value == pytest.approx(float(values[:5].square().sum()), rel=1e-10)


def test_long_steps_of_the_svd_are_points():
    x, v, _ = draw()
    y = MANIFOLD.retract(x, scale(1e6, v))
    MANIFOLD.check_point(y)
    assert bool(combine(1.0, y, 1.0, x)["s"].isfinite().all())
