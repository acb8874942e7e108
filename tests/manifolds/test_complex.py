"""Complex manifolds against pymanopt, and against their real and imaginary parts."""

import numpy as np
import pytest
import torch

from fisherfold import Gaussian, LossProblem, NLLProblem, minimize
from fisherfold.manifolds import SPD, Grassmann, Sphere, Stiefel, Unitary
from fisherfold.problems import check_gradient
from fisherfold.solvers import GradientNorm


def hermitian(n, seed=0):
    noise = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.complex128)
    return 0.5 * (noise + noise.mH)


def test_pymanopt_agrees_on_subspaces(pair, same):
    peer = pytest.importorskip("pymanopt.manifolds").ComplexGrassmann(7, 3)
    ours = Grassmann(7, 3, complex=True)
    x, y, u, v, a = pair(ours)
    px, py, pu, pv, pa = (t.numpy() for t in (x, y, u, v, a))
    same(ours.project(x, a), peer.projection(px, pa))
    same(ours.inner(x, u, v), peer.inner_product(px, pu, pv).real)
    same(ours.dist(x, y), peer.dist(px, py))
    z = ours.exp(x, v)
    same(z @ z.mH, (lambda q: q @ q.conj().T)(peer.exp(px, pv)))
    same(ours.norm(x, ours.log(x, y)), peer.norm(px, peer.log(px, py)))
    assert ours.dim == peer.dim


def test_pymanopt_agrees_on_unitary_matrices(pair, same):
    peer = pytest.importorskip("pymanopt.manifolds").UnitaryGroup(4)
    ours = Unitary(4)
    x, y, u, v, _ = pair(ours)
    # pymanopt writes tangent vectors as skew-Hermitian matrices; its projection (2.2.1) is not
    flat = [(x.mH @ t).numpy() for t in (u, v)]
    same(ours.inner(x, u, v), peer.inner_product(x.numpy(), *flat).real)
    same(ours.exp(x, v), peer.exp(x.numpy(), flat[1]))
    same(ours.dist(x, y), peer.dist(x.numpy(), y.numpy()))
    same(x.mH @ ours.log(x, y), peer.log(x.numpy(), y.numpy()))
    assert ours.dim == peer.dim


def test_pymanopt_agrees_on_hermitian_matrices(pair, same):
    peer = pytest.importorskip("pymanopt.manifolds").HermitianPositiveDefinite(4)
    ours = SPD(4, complex=True)
    x, y, u, v, a = pair(ours)
    px, py, pu, pv, pa = (t.numpy() for t in (x, y, u, v, a))
    same(ours.inner(x, u, v), peer.inner_product(px, pu, pv).real)
    same(ours.exp(x, v), peer.exp(px, pv), atol=1e-12)
    same(ours.dist(x, y), peer.dist(px, py))
    same(ours.log(x, y), peer.log(px, py), atol=1e-12)
    same(ours.riemannian_gradient(x, a), peer.euclidean_to_riemannian_gradient(px, pa), atol=1e-12)
    assert ours.dim == 16  # pymanopt (2.2.1) says n (n + 1)


@pytest.mark.parametrize("method", ["trust-region", "lbfgs", "rcg"])
@pytest.mark.parametrize("kind", [Grassmann, Stiefel])
def test_the_dominant_subspace_of_a_hermitian_matrix_is_found(kind, method):
    matrix = hermitian(8)
    manifold = kind(8, 3, complex=True)
    problem = LossProblem(manifold, lambda u: -(u.conj() * (matrix @ u)).sum().real)
    start = manifold.random_point(generator=torch.Generator().manual_seed(1))
    result = minimize(problem, start, method, stop=GradientNorm(1e-8), max_iter=500)
    best = float(torch.linalg.eigvalsh(matrix)[-3:].sum())
    assert result.value == pytest.approx(-best, abs=1e-12)


def test_natural_gradients_retrieve_phases():
    """Intensities |<x, θ>|² determine θ up to its phase, a flat direction of the information."""
    generator = torch.Generator().manual_seed(0)
    sphere = Sphere(6, complex=True)
    truth = sphere.random_point(generator=generator)
    x = torch.randn(400, 6, generator=generator, dtype=truth.dtype)
    y = (x @ truth).abs().square()
    problem = NLLProblem(sphere, lambda x, t: (x @ t).abs().square(), Gaussian(), x, y)
    start = sphere.random_point(generator=generator)
    assert check_gradient(problem, start)
    result = minimize(problem, start)
    assert result.success
    assert float((result.x.conj() @ truth).abs()) == pytest.approx(1, abs=1e-12)
    flat = problem.fisher(result.x) @ (1j * result.x)
    assert float(flat.abs().max()) < 1e-12


def test_a_holomorphic_loss_is_named():
    sphere = Sphere(3, complex=True)
    start = sphere.random_point(generator=torch.Generator().manual_seed(0))
    problem = LossProblem(sphere, lambda x: x.square().sum())
    with pytest.raises(
        ValueError, match=r"got torch\.complex128 .*; a loss is real: take its \.real"
    ):
        minimize(problem, start, "lbfgs")
    x = torch.randn(9, 3, dtype=torch.complex128)
    model = NLLProblem(sphere, lambda x, t: x @ t, Gaussian(), x, torch.randn(9).double())
    with pytest.raises(
        ValueError, match=r"floating tensor, got torch\.complex128; take its \.real"
    ):
        minimize(model, start)


def test_the_complex_circle_is_the_circle(same):
    circle, plane = Sphere(1, complex=True), Sphere(2)
    x, y = (torch.tensor([np.exp(1j * t)]) for t in (0.3, 2.0))
    same(circle.dist(x, y), plane.dist(*(torch.view_as_real(t)[0] for t in (x, y))))
    assert float(circle.dist(x, y)) == pytest.approx(1.7, abs=1e-14)
