"""The affine-invariant metric against its definition, pymanopt and geoopt."""

import math

import pytest
import scipy.linalg
import torch

from fisherfold.manifolds import SPD
from toy import normal

FLOAT = torch.float64


def test_the_metric_is_affine_invariant(pair, same):
    spd, mix = SPD(4), normal(4, 4, seed=3)
    x, y, u, v, _ = pair(spd)

    def mixed(m):
        m = mix @ m @ mix.T
        return (m + m.T) / 2

    same(spd.inner(mixed(x), mixed(u), mixed(v)), spd.inner(x, u, v), atol=1e-9)
    same(spd.dist(mixed(x), mixed(y)), spd.dist(x, y), atol=1e-10)
    same(spd.exp(mixed(x), mixed(v)), mixed(spd.exp(x, v)), atol=1e-10)
    inverse = torch.linalg.inv(x)
    same(spd.inner(x, u, v), torch.trace(inverse @ u @ inverse @ v), atol=1e-12)


def test_it_is_twice_the_fisher_information_of_a_normal_distribution():
    # KL(N(0, x) ‖ N(0, x + t v)) = ¼ t² <v, v>_x + O(t³)
    spd = SPD(3)
    x = spd.random_point(generator=torch.Generator().manual_seed(0))
    v = spd.random_tangent(x, generator=torch.Generator().manual_seed(1))

    def divergence(t):
        ratio = torch.linalg.solve(x + t * v, x)
        return float(torch.trace(ratio) - 3 - torch.logdet(ratio)) / 2

    h = 1e-3
    assert (divergence(h) + divergence(-h)) / h**2 == pytest.approx(0.5, rel=1e-5)


def test_scipy_agrees(pair, same):
    spd = SPD(5)
    x, y, _, v, _ = pair(spd)
    solved = scipy.linalg.solve(x.numpy(), y.numpy())
    same(spd.log(x, y), x.numpy() @ scipy.linalg.logm(solved).real, atol=1e-12)
    same(
        spd.exp(x, v),
        x.numpy() @ scipy.linalg.expm(scipy.linalg.solve(x.numpy(), v.numpy())),
        atol=1e-12,
    )
    values = scipy.linalg.eigh(y.numpy(), x.numpy(), eigvals_only=True)
    same(spd.dist(x, y), math.sqrt(sum(math.log(value) ** 2 for value in values)), atol=1e-12)


@pytest.mark.parametrize("factor", [1e-10, 1e-3, 1 + 1e-12, 1 + 1e-6, 1e8])
def test_distances_keep_their_digits(factor):
    spd, x = SPD(3), torch.diag(torch.tensor([1.0, 10.0, 100.0], dtype=FLOAT))
    expected = math.sqrt(3) * abs(math.log(factor))
    assert float(spd.dist(x, factor * x)) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_the_gradient_of_half_the_squared_distance_is_minus_the_logarithm(pair, same):
    spd = SPD(4)
    x, y, _, _, _ = pair(spd)
    point = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(spd.dist(point, y) ** 2 / 2, point)
    same(spd.riemannian_gradient(x, slope), -spd.log(x, y), atol=1e-10)
    (slope,) = torch.autograd.grad(spd.dist(point, x) ** 2, point)
    assert not bool(slope.isnan().any())


def test_the_quadratic_retraction_is_positive_definite_for_every_step():
    spd, generator = SPD(4), torch.Generator().manual_seed(0)
    x = spd.random_point(100, generator=generator)
    for length in (1.0, 10.0, 1e3):
        spd.check_point(spd.retract(x, length * spd.random_tangent(x, generator=generator)))


def test_bases_are_orthonormal_in_the_metric():
    spd = SPD(3)
    x = spd.random_point(generator=torch.Generator().manual_seed(0))
    basis = spd.tangent_basis(x)
    products = spd.inner(
        x.expand(6, 6, 3, 3), basis[:, None].expand(6, 6, 3, 3), basis[None].expand(6, 6, 3, 3)
    )
    torch.testing.assert_close(products, torch.eye(6, dtype=FLOAT), atol=1e-12, rtol=0)
    with pytest.raises(
        ValueError, match=r"x must be a single point, got one with the batch dimensions \(2,\)"
    ):
        spd.tangent_basis(torch.stack([x, x]))


def test_matrices_that_are_no_covariances_are_named():
    spd = SPD(2)
    with pytest.raises(
        ValueError, match=r"it is not positive definite, its smallest eigenvalue is -1\.00e\+00"
    ):
        spd.check_point(torch.diag(torch.tensor([1.0, -1.0])))
    with pytest.raises(ValueError, match=r"its constraint is violated by 5\.00e-01"):
        spd.check_point(torch.tensor([[1.0, 0.5], [0.0, 1.0]]))
    bad = torch.diag(torch.tensor([1.0, -1.0], dtype=FLOAT))
    assert bool(spd.retract(bad, torch.eye(2, dtype=FLOAT)).isnan().any())


def test_pymanopt_agrees(pair, same):
    manifolds = pytest.importorskip("pymanopt.manifolds")
    ours, theirs = SPD(4), manifolds.SymmetricPositiveDefinite(4)
    x, y, u, v, a = pair(ours)
    px, py, pu, pv, pa = (t.numpy() for t in (x, y, u, v, a))
    same(ours.inner(x, u, v), theirs.inner_product(px, pu, pv), atol=1e-12)
    same(
        ours.riemannian_gradient(x, a), theirs.euclidean_to_riemannian_gradient(px, pa), atol=1e-12
    )
    h = ours.project(x, normal(4, 4, seed=9))
    converted = theirs.euclidean_to_riemannian_hessian(px, (pa + pa.T) / 2, h.numpy(), pv)
    same(ours.riemannian_hessian(x, a, h, v), converted, atol=1e-12)
    same(ours.exp(x, v), theirs.exp(px, pv), atol=1e-12)
    same(ours.log(x, y), theirs.log(px, py), atol=1e-12)
    same(ours.dist(x, y), theirs.dist(px, py), atol=1e-12)
    assert ours.dim == theirs.dim


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # its functions are compiled when first called
def test_geoopt_agrees(pair, same, geoopt):
    ours, theirs = SPD(4), geoopt.SymmetricPositiveDefinite()
    x, y, u, v, _ = pair(ours)
    same(ours.inner(x, u, v), theirs.inner(x, u, v), atol=1e-12)
    same(ours.exp(x, v), theirs.expmap(x, v), atol=1e-12)
    same(ours.transport(x, y, v), theirs.transp(x, y, v), atol=1e-12)
