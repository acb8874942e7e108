"""The paper's E[a aᵀ] ⊗ E[g gᵀ] of parameters that are applied as linear layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fisherfold import Categorical, Gaussian, NLLProblem, minimize
from fisherfold.fisher import KroneckerFisher
from fisherfold.manifolds import Euclidean, Grassmann, Oblique
from toy import generator


def agree(found, expected, rtol):
    assert float((found - expected).norm()) <= rtol * float(expected.norm())


MODELS = {
    "product": (lambda x, w: x @ w, (4, 3)),
    "linear": (lambda x, w: functional.linear(x, w), (3, 4)),
    "transposed": (lambda x, w: torch.matmul(x, w.T), (3, 4)),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_one_linear_layer_with_a_gaussian_is_exact_but_for_the_draws(name):
    model, shape = MODELS[name]
    x = torch.randn(30, 4, generator=generator(), dtype=torch.float64)
    y = torch.zeros(30, 3, dtype=torch.float64)
    problem = NLLProblem(Euclidean(*shape), model, Gaussian(0.5), x, y, draws=2000)
    theta = problem.manifold.random_point(generator=generator(1))
    operator = problem.fisher(theta, kind="layers")
    assert isinstance(operator, KroneckerFisher)
    agree(operator.dense(), problem.fisher(theta).dense(), 0.03)


def test_the_factors_are_the_moments_of_inputs_and_sensitivities():
    """E[g gᵀ] of the two factors apart, which E[‖a‖² g gᵀ] of whole gradients is not."""
    x = torch.randn(200, 5, generator=generator(), dtype=torch.float64)
    head = torch.randn(2, 3, generator=generator(1), dtype=torch.float64)
    problem = NLLProblem(
        Grassmann(5, 2),
        lambda x, u: torch.tanh(x @ u) @ head,
        Categorical(),
        x,
        torch.zeros(200, dtype=torch.int64),
        draws=300,
    )
    u = problem.manifold.random_point(generator=generator(2))
    inner = torch.tanh(x @ u)
    p = torch.softmax(inner @ head, 1)
    output = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    jacobian = (1 - inner.square())[:, :, None] * head
    g = torch.einsum("nab,nbc,ndc->ad", jacobian, output, jacobian) / 200
    operator = problem.fisher(u, kind="layers")
    agree(operator.right, g, 0.03)
    outside = torch.eye(5, dtype=torch.float64) - u @ u.T
    agree(operator.left, outside @ (x.T @ x / 200) @ outside, 1e-12)


def test_networks_have_one_block_per_parameter_and_train_with_it():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        module[0].weight.copy_(nn.functional.normalize(module[0].weight, dim=1))
    x = torch.randn(150, 4, generator=generator(), dtype=torch.float64)
    y = (x @ torch.randn(4, 3, generator=generator(1), dtype=torch.float64)).argmax(1)
    problem, start = NLLProblem.from_module(
        module, Categorical(), x, y, manifolds={"0.weight": Oblique(6, 4)}, draws=200
    )
    operator = problem.fisher(start, kind="layers")
    exact = problem.fisher(start).dense()
    place = 0
    for name, block in operator.blocks.items():
        size = start[name].numel()
        own = exact[place : place + size, place : place + size]
        agree(block.dense(), own, 0.1 if start[name].ndim == 1 else 0.4)
        place += size
    problem.draws = 5
    result = minimize(problem, start, fisher="layers", max_iter=40)
    assert result.value < 0.25 * float(problem.loss(start))


def test_sequences_sum_over_their_places():
    x = torch.randn(20, 7, 4, generator=generator(), dtype=torch.float64)
    problem = NLLProblem(
        Euclidean(4, 2),
        lambda x, w: (x @ w).sum(1),
        Gaussian(),
        x,
        torch.zeros(20, 2, dtype=torch.float64),
        draws=2000,
    )
    operator = problem.fisher(torch.zeros(4, 2, dtype=torch.float64), kind="layers")
    agree(operator.left, torch.einsum("nti,ntj->ij", x, x) / 140, 1e-12)
    agree(operator.right, 7 * torch.eye(2, dtype=torch.float64), 0.05)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda x, w: x @ w.exp(), "but the model calls exp on it"),
        (
            lambda x, w: x @ w + (x @ w).tanh(),
            "needs each parameter in one layer, theta is in several",
        ),
        (lambda x, w: x[:, :2] * 1.0, "applied as a linear layer, .'theta'. are not"),
    ],
)
def test_parameters_that_are_no_layers_are_named(model, words):
    x = torch.randn(5, 4, dtype=torch.float64)
    problem = NLLProblem(
        Euclidean(4, 2), model, Gaussian(), x, torch.zeros(5, 2, dtype=torch.float64)
    )
    with pytest.raises(ValueError, match=words):
        problem.fisher(torch.ones(4, 2, dtype=torch.float64), kind="layers")
