"""Variance-reduced Fisher information: positive semi-definite for every kind, and the sum that it should be."""

import pytest
import torch

from fisherfold import Gaussian, NLLProblem, Poisson
from fisherfold.manifolds import Euclidean, Grassmann, Product
from fisherfold.manifolds.base import flatten, scale, tree_map, unflatten
from toy import generator, normal


def problem(likelihood, prior=None, draws=1):
    x = normal(12, 5)
    y = torch.poisson(torch.ones(12, 3).double(), generator=generator(1))
    return NLLProblem(
        Grassmann(5, 2),
        lambda x, u: 0.7 * (x @ u @ u.mT)[:, :3],
        likelihood,
        x,
        y,
        prior=prior,
        draws=draws,
    )


def dense(operator):
    like = flatten(operator.point)
    columns = []
    for e in torch.eye(len(like)).double():
        v = operator.manifold.project(operator.point, unflatten(e, operator.point))
        columns.append(flatten(operator.matvec(v)))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("kind", NLLProblem.fisher_kinds)
def test_every_kind_stays_positive(kind, draws):
    """With targets of their own for anchor and batch, 6 of 20 Kronecker products were indefinite."""
    if kind == "layers":
        pytest.skip("for parameters that are applied as layers; below")
    made = problem(Poisson(), draws=draws)
    for seed in range(20):
        g = generator(seed)
        made.generator = g
        u = made.manifold.random_point(generator=g)
        v = made.manifold.retract(u, scale(0.3, made.manifold.random_tangent(u, generator=g)))
        batch = torch.randint(12, (9,), generator=g)
        matrix = dense(made.snapshot(u).fisher(v, batch, kind=kind))
        values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
        assert float(values[0]) >= -1e-12 * float(values[-1])


@pytest.mark.parametrize("prior", [None, lambda t: t["a"].square().sum()])
def test_layers_stay_positive(prior):
    space = Product({"a": Euclidean(4, 5), "b": Euclidean(3, 4)})
    x, y = normal(12, 5), normal(12, 3, seed=1)

    def model(x, t):
        return torch.tanh(x @ t["a"].mT) @ t["b"].mT

    made = NLLProblem(space, model, Gaussian(), x, y, prior=prior)
    for seed in range(10):
        made.generator = g = generator(seed)
        theta = space.random_point(generator=g)
        other = tree_map(lambda leaf, g=g: leaf + 0.3 * torch.randn(leaf.shape, generator=g), theta)
        other = tree_map(torch.Tensor.double, other)
        matrix = dense(made.snapshot(theta).fisher(other, torch.arange(9), kind="layers"))
        values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
        assert float(values[0]) >= -1e-12 * float(values[-1])


@pytest.mark.parametrize("kind", ["exact", "empirical", "monte-carlo", "row-block"])
def test_at_the_anchor_nothing_is_reduced(kind):
    """Where the iterate is the anchor, and its batch has the same targets, the sum is that over all samples."""
    made = problem(Gaussian())
    u = made.manifold.random_point(generator=generator(3))
    whole = made.fisher(u, kind=kind)
    batch = torch.tensor([0, 3, 4])
    part = made.fisher_of_part(whole, batch, kind=kind)
    found = whole.variance_reduced(part, part, batch, 3 / 12)
    torch.testing.assert_close(dense(found), dense(whole))
