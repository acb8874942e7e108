"""The problems that every method must solve, with their optima in closed form."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fisherfold import Categorical, Gaussian, NLLProblem
from fisherfold.manifolds import Euclidean, Grassmann, Oblique, Sphere

# enough to reach each problem's optimum; stochastic methods take a step that suits all of them
OPTIONS = {
    "rngd": {},
    "rngd-vr": {"step": 0.5, "damping": 0.05, "batch_size": 20},
    "rsgd": {"step": 0.3, "batch_size": 5},
    "rsvrg": {"step": 0.1, "batch_size": 5},
    "rcg": {},
    "rgd": {},
    "trust-region": {},
    "lbfgs": {},
}


@dataclass
class Task:
    """A problem, a start and what is known of its minimum."""

    problem: NLLProblem
    x0: Any
    minimum: float


def data(samples, columns, *, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0, -0.6, columns, dtype=torch.float64)
    return (torch.randn(samples, columns, generator=g, dtype=torch.float64) * spread).to(dtype)


def quadratic(dtype=torch.float64):
    x = data(40, 4, dtype=dtype)
    y = x @ torch.arange(1, 5, dtype=dtype) + 0.1 * data(40, 1, seed=1, dtype=dtype)[:, 0]
    problem = NLLProblem(Euclidean(4), lambda x, t: x @ t, Gaussian(), x, y)
    best = torch.linalg.lstsq(x.double(), y.double()[:, None]).solution[:, 0]
    minimum = 0.5 * float((x.double() @ best - y.double()).square().mean())
    return Task(problem, torch.zeros(4, dtype=dtype), minimum)


def sphere(dtype=torch.float64):
    """z = w wᵀx with target x: the loss is half the variance that the direction w leaves unexplained."""
    x = data(40, 5, dtype=dtype)
    problem = NLLProblem(Sphere(5), lambda x, w: (x @ w)[:, None] * w, Gaussian(), x, x)
    values = torch.linalg.eigvalsh(x.double().T @ x.double() / 40)
    return Task(
        problem,
        Sphere(5).random_point(generator=torch.Generator().manual_seed(3), dtype=dtype),
        0.5 * float(values[:-1].sum()),
    )


def grassmann(dtype=torch.float64):
    x = data(40, 6, dtype=dtype)
    problem = NLLProblem(Grassmann(6, 2), lambda x, u: x @ u @ u.T, Gaussian(), x, x)
    values = torch.linalg.eigvalsh(x.double().T @ x.double() / 40)
    return Task(
        problem,
        Grassmann(6, 2).random_point(generator=torch.Generator().manual_seed(3), dtype=dtype),
        0.5 * float(values[:-2].sum()),
    )


def completion(dtype=torch.float64):
    """A table of rank 2 with holes, by variable projection: the minimum is 0."""
    g = torch.Generator().manual_seed(4)
    table = (torch.randn(40, 2, generator=g) @ torch.randn(2, 8, generator=g)).to(dtype)
    mask = (torch.rand(40, 8, generator=g) < 0.8).to(dtype)

    def model(x, u):
        seen, observed = x[:, 0], x[:, 1]
        gram = torch.einsum("jp,nj,jq->npq", u, seen, u) + 1e-6 * torch.eye(2, dtype=u.dtype)
        return seen * (torch.linalg.solve(gram, observed @ u) @ u.T)

    problem = NLLProblem(
        Grassmann(8, 2), model, Gaussian(), torch.stack([mask, mask * table], 1), mask * table
    )
    return Task(problem, Grassmann(8, 2).random_point(generator=g, dtype=dtype), 0.0)


def network(dtype=torch.float64):
    """A product of an oblique layer and Euclidean ones."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).to(dtype)
    with torch.no_grad():
        module[0].weight.copy_(nn.functional.normalize(module[0].weight, dim=1))
    x = data(40, 4, dtype=dtype)
    y = (x @ data(4, 3, seed=6, dtype=dtype) + 0.5 * data(40, 3, seed=7, dtype=dtype)).argmax(1)
    problem, start = NLLProblem.from_module(
        module, Categorical(), x, y, manifolds={"0.weight": Oblique(3, 4)}
    )
    return Task(problem, start, float("nan"))


TASKS = {f.__name__: f for f in (quadratic, sphere, grassmann, completion, network)}


@pytest.fixture(params=sorted(OPTIONS))
def method(request):
    return request.param


@pytest.fixture(params=sorted(TASKS))
def task_name(request):
    return request.param


@pytest.fixture
def tasks():
    return TASKS


@pytest.fixture
def options():
    return OPTIONS
