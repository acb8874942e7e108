"""Both models of hyperbolic space against geoopt, and against each other."""

import warnings

import pytest
import torch

from fisherfold import LossProblem, minimize
from fisherfold.manifolds import Lorentz, PoincareBall


def to_ball(x):
    return x[..., 1:] / (1 + x[..., :1])


@pytest.mark.parametrize("ours", [PoincareBall(4), Lorentz(4)], ids=repr)
def test_geoopt_agrees(pair, same, geoopt, ours):
    theirs = getattr(geoopt, type(ours).__name__)().double()
    x, y, u, v, a = pair(ours)
    atol = 1e-6 if isinstance(ours, PoincareBall) else 1e-10  # geoopt's curvature is a float32
    same(ours.inner(x, u, v), theirs.inner(x, u, v).squeeze(), atol=atol)
    same(ours.exp(x, v), theirs.expmap(x, v), atol=atol)
    same(ours.log(x, y), theirs.logmap(x, y), atol=atol)
    same(ours.dist(x, y), theirs.dist(x, y).squeeze(), atol=atol)
    same(ours.transport(x, y, v), theirs.transp(x, y, v), atol=atol)
    same(ours.riemannian_gradient(x, a), theirs.egrad2rgrad(x, a), atol=atol)


def test_pymanopt_agrees_on_the_ball(pair, same):
    theirs = pytest.importorskip("pymanopt.manifolds").PoincareBall(4)
    ours = PoincareBall(4)
    x, y, u, v, a = pair(ours)
    px, py, pu, pv, pa = (t.numpy() for t in (x, y, u, v, a))
    same(ours.exp(x, v), theirs.exp(px, pv))
    same(ours.log(x, y), theirs.log(px, py))
    same(ours.dist(x, y), theirs.dist(px, py))
    gradient = theirs.euclidean_to_riemannian_gradient(px, pa)
    same(ours.riemannian_gradient(x, a), gradient)
    hessian = theirs.euclidean_to_riemannian_hessian(px, pa, pu, pv)
    same(ours.riemannian_hessian(x, a, u, v), hessian, atol=1e-12)


def test_both_models_are_the_same_space(pair, same):
    lorentz, ball = Lorentz(3), PoincareBall(3)
    x, y, _, v, _ = pair(lorentz)
    same(lorentz.dist(x, y), ball.dist(to_ball(x), to_ball(y)))
    _, w = torch.autograd.functional.jvp(to_ball, x, v)
    same(lorentz.norm(x, v), ball.norm(to_ball(x), w))
    same(to_ball(lorentz.exp(x, 3 * v)), ball.exp(to_ball(x), 3 * w), atol=1e-12)
    _, moved = torch.autograd.functional.jvp(to_ball, y, lorentz.transport(x, y, v))
    same(moved, ball.transport(to_ball(x), to_ball(y), w), atol=1e-12)


def test_steps_far_too_long_end_inside_the_ball():
    ball = PoincareBall(2)
    x = ball.random_point(generator=torch.Generator().manual_seed(0))
    for length in (10.0, 1e3, 1e20):
        y = ball.exp(x, length * torch.ones(2, dtype=x.dtype))
        assert not bool(y.isfinite().all()) or float(y.norm()) < 1


def test_points_outside_are_named():
    with pytest.raises(ValueError, match=r"is not a point of PoincareBall\(2\): its constraint"):
        PoincareBall(2).check_point(torch.tensor([1.0, 0.5]))
    with pytest.raises(ValueError, match="lies on the boundary of the ball"):
        PoincareBall(2).check_point(torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="is on the lower sheet; change its sign"):
        Lorentz(2).check_point(torch.tensor([-1.0, 0.0, 0.0]))


@pytest.mark.parametrize("manifold", [PoincareBall(3), Lorentz(3)], ids=repr)
@pytest.mark.parametrize("method", ["trust-region", "lbfgs", "rcg"])
def test_means_balance_logarithms(manifold, method):
    points = manifold.random_point(20, generator=torch.Generator().manual_seed(0))

    def cost(x):
        return manifold.dist(x.expand_as(points), points).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        result = minimize(LossProblem(manifold, cost), points[0], method)
    assert result.success
    mean = manifold.log(result.x.expand_as(points), points).mean(0)
    assert float(manifold.norm(result.x, mean)) < 1e-6
