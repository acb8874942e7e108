import pytest
import torch

from fisherfold.manifolds import Euclidean


def test_everything_is_flat(pair, same):
    space = Euclidean(3, 2)
    x, y, u, v, a = pair(space)
    assert torch.equal(space.project(x, a), a)
    assert torch.equal(space.transport(x, y, v), v)
    assert torch.equal(space.exp(x, v), x + v)
    same(space.dist(x, y), u.norm())
    assert space.dim == 6
    assert space.retraction_order == 2


def test_numbers_are_points_too():
    line = Euclidean()
    x = line.random_point(5, generator=torch.Generator().manual_seed(0))
    assert x.shape == (5,)
    assert line.dim == 1
    assert line.inner(x, x, x).shape == (5,)


@pytest.mark.parametrize("shape", [(4,), (3, 2)])
def test_pymanopt_agrees(pair, same, shape):
    manifolds = pytest.importorskip("pymanopt.manifolds")
    ours, theirs = Euclidean(*shape), manifolds.Euclidean(*shape)
    x, y, u, v, a = pair(ours)
    same(ours.project(x, a), theirs.projection(x.numpy(), a.numpy()))
    same(ours.log(x, y), theirs.log(x.numpy(), y.numpy()))
    same(ours.dist(x, y), theirs.dist(x.numpy(), y.numpy()))
    same(ours.inner(x, u, v), theirs.inner_product(x.numpy(), u.numpy(), v.numpy()))
    assert ours.dim == theirs.dim
