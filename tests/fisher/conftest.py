"""Small problems on every manifold, and their Fisher matrices built slowly, sample by sample."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fisherfold import Bernoulli, Categorical, Gaussian, NLLProblem, Poisson
from fisherfold.manifolds import Euclidean, Grassmann, Oblique, Product, Sphere, Stiefel
from fisherfold.manifolds.base import flatten, unflatten

MANIFOLDS = {
    "euclidean": Euclidean(3, 2),
    "sphere": Sphere(5),
    "oblique": Oblique(3, 4),
    "stiefel": Stiefel(5, 2),
    "grassmann": Grassmann(5, 2),
    "product": Product(
        {"a": Sphere(3), "b": Product({"c": Grassmann(4, 1), "d": Euclidean(2)}), "e": Euclidean()}
    ),
}
LIKELIHOODS = {
    "gaussian": Gaussian(0.3),
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "poisson": Poisson(),
}


def output_fisher(name, z):
    """The textbook matrices, for one sample."""
    if name == "gaussian":
        return torch.eye(len(z), dtype=z.dtype) / 0.3
    if name == "categorical":
        p = torch.softmax(z, 0)
        return torch.diag(p) - torch.outer(p, p)
    if name == "bernoulli":
        p = torch.sigmoid(z)
        return torch.diag(p * (1 - p))
    return torch.diag(z.exp())


@dataclass
class Case:
    """A problem, a point, and the slow reference."""

    name: str
    problem: NLLProblem
    theta: Any

    def generator(self, seed=0):
        return torch.Generator().manual_seed(seed)

    def tangent(self, seed=0):
        return self.problem.manifold.random_tangent(
            self.theta, generator=self.generator(seed + 100)
        )

    def riemannian_rows(self, matrix):
        """Project every row of a matrix of flattened ambient vectors, one at a time."""
        project = self.problem.manifold.project
        return torch.stack(
            [flatten(project(self.theta, unflatten(row, self.theta))) for row in matrix]
        )

    def jacobians(self, indices=None):
        """The Riemannian Jacobian of every sample, by reverse mode in a loop."""
        problem, flat = self.problem, flatten(self.theta)
        found = []
        for i in range(problem.n_samples) if indices is None else indices:
            row = problem.inputs[i : i + 1]
            euclidean = torch.func.jacrev(
                lambda t, row=row: problem.model(row, unflatten(t, self.theta))[0]
            )(flat)
            found.append(self.riemannian_rows(euclidean.reshape(-1, len(flat))))
        return found

    def dense_fisher(self, indices=None):
        """(1/N) Σ J_iᵀ F_L(z_i) J_i on flattened ambient vectors."""
        total = 0
        jacobians = self.jacobians(indices)
        chosen = range(self.problem.n_samples) if indices is None else indices
        for i, jacobian in zip(chosen, jacobians, strict=True):
            z = self.problem.model(self.problem.inputs[i : i + 1], self.theta)[0]
            total = total + jacobian.T @ output_fisher(self.name, z) @ jacobian
        return total / len(jacobians)

    def gradients(self):
        """The Riemannian gradient of every sample, by reverse mode in a loop."""
        problem, flat = self.problem, flatten(self.theta)
        found = []
        for i in range(problem.n_samples):
            row, target = problem.inputs[i : i + 1], problem.targets[i : i + 1]

            def loss(t, row=row, target=target):
                return problem.likelihood.nll(
                    problem.model(row, unflatten(t, self.theta)), target
                ).sum()

            found.append(torch.func.grad(loss)(flat))
        return self.riemannian_rows(torch.stack(found))


def build(manifold, likelihood, *, samples=8, outputs=3, dtype=torch.float64, seed=0, **options):
    """Outputs sin(C_j (x ∘ θ)): nonlinear, and each sample sees all of θ through its own input."""
    g = torch.Generator().manual_seed(seed)
    theta = MANIFOLDS[manifold].random_point(generator=g, dtype=dtype)
    size = flatten(theta).numel()
    weights = torch.randn(outputs, size, generator=g, dtype=dtype)
    x = torch.randn(samples, size, generator=g, dtype=dtype)

    def model(rows, t):
        return torch.sin(torch.einsum("nd,qd,d->nq", rows, weights, flatten(t)))

    y = LIKELIHOODS[likelihood].sample(
        model(x, MANIFOLDS[manifold].random_point(generator=g, dtype=dtype)), generator=g
    )
    problem = NLLProblem(MANIFOLDS[manifold], model, LIKELIHOODS[likelihood], x, y, **options)
    return Case(likelihood, problem, theta)


@pytest.fixture(params=sorted(MANIFOLDS))
def manifold_name(request):
    return request.param


@pytest.fixture(params=sorted(LIKELIHOODS))
def likelihood_name(request):
    return request.param


@pytest.fixture
def case(manifold_name, likelihood_name):
    return build(manifold_name, likelihood_name)


@pytest.fixture(name="build")
def build_fixture():
    return build


@pytest.fixture
def gaussian_case(manifold_name):
    return build(manifold_name, "gaussian")
