"""Any model as a problem: loss and gradient by hand, batches, networks, KL along the retraction, and bad input."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fisherfold import (
    Bernoulli,
    Categorical,
    Gaussian,
    NLLProblem,
    Poisson,
    check_fisher,
    check_gradient,
    minimize,
)
from fisherfold.fisher import ExponentialFamily
from fisherfold.manifolds import Euclidean, Grassmann, Oblique, Product, Sphere, Stiefel
from fisherfold.manifolds.base import flatten, leaves, scale, tree_map
from fisherfold.solvers import GradientNorm
from toy import generator


def logistic(n=4, samples=12, seed=0):
    g = generator(seed)
    x = torch.randn(samples, n, generator=g, dtype=torch.float64)
    y = torch.bernoulli(torch.full((samples,), 0.5, dtype=torch.float64), generator=g)
    return NLLProblem(Sphere(n), lambda x, w: x @ w, Bernoulli(), x, y), Sphere(n).random_point(
        generator=g
    )


def test_loss_and_gradient_of_logistic_regression_by_hand():
    problem, w = logistic()
    for batch in (None, torch.tensor([3, 1, 1])):
        x, y = (
            (problem.inputs, problem.targets)
            if batch is None
            else (problem.inputs[batch], problem.targets[batch])
        )
        p = torch.sigmoid(x @ w)
        loss = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
        euclidean = x.T @ (p - y) / len(y)
        riemannian = euclidean - (euclidean @ w) * w
        torch.testing.assert_close(problem.loss(w, batch), loss)
        torch.testing.assert_close(problem.gradient(w, batch), riemannian)
        both = problem.loss_and_gradient(w, batch)
        assert torch.equal(both[0], problem.loss(w, batch))
        assert torch.equal(both[1], problem.gradient(w, batch))


@pytest.mark.parametrize("chunk_size", [None, 1, 5])
def test_per_sample_quantities_add_up_and_do_not_depend_on_the_chunk(chunk_size):
    whole, w = logistic()
    problem = NLLProblem(
        Sphere(4), whole.model, Bernoulli(), whole.inputs, whole.targets, chunk_size=chunk_size
    )
    gradients = problem.per_sample_gradients(w)
    assert gradients.shape == (12, 4)
    torch.testing.assert_close(gradients.mean(0), problem.gradient(w))
    torch.testing.assert_close(problem.jacobian(w), problem.inputs[:, None, :])
    batch = torch.tensor([4, 2])
    torch.testing.assert_close(problem.per_sample_gradients(w, batch), gradients[batch])
    torch.testing.assert_close(problem.jacobian(w, batch), problem.inputs[batch][:, None, :])


@pytest.mark.parametrize(
    "likelihood", [Gaussian(0.5), Categorical(), Bernoulli(), Poisson()], ids=str
)
def test_half_the_fisher_length_is_kl_to_third_order(likelihood):
    """Theorem 1: E KL(p_θ ‖ p_R(td)) = ½ t² <d, F d> + O(t³) along a second-order retraction."""
    g = generator(3)
    manifold = Grassmann(5, 2)
    u = manifold.random_point(generator=g)
    x = torch.randn(15, 5, generator=g, dtype=torch.float64)

    def model(x, u):
        return torch.tanh(x @ u) * x[:, :2]

    problem = NLLProblem(
        manifold, model, likelihood, x, likelihood.sample(model(x, u), generator=g)
    )
    d = manifold.random_tangent(u, generator=g)
    half = 0.5 * float(problem.fisher(u).quadratic(d))
    errors = [
        abs(float(problem.kl(u, manifold.retract(u, t * d))) / t**2 - half) / half
        for t in (1e-2, 1e-3, 1e-4)
    ]
    # the relative error is O(t)
    assert errors[0] < 0.2
    assert errors[1] < 0.15 * errors[0]
    assert errors[2] < 0.15 * errors[1]
    assert float(problem.kl(u, u)) == 0


def test_outputs_may_have_any_shape():
    g = generator(1)
    x = torch.randn(6, 3, generator=g, dtype=torch.float64)
    y = torch.randint(0, 4, (6, 2), generator=g)
    weights = torch.randn(3, 2, 4, generator=g, dtype=torch.float64)
    problem = NLLProblem(
        Sphere(3), lambda x, w: torch.einsum("nd,dkc->nkc", x * w, weights), Categorical(), x, y
    )
    w = Sphere(3).random_point(generator=g)
    z = problem.model(x, w)
    expected = nn.functional.cross_entropy(z.permute(0, 2, 1), y, reduction="none").sum(1).mean()
    torch.testing.assert_close(problem.loss(w), expected)
    operator = problem.fisher(w)
    assert operator.n_rows == 6 * 8
    rows = operator.rows()
    torch.testing.assert_close(rows.T @ rows, operator.dense())
    one = NLLProblem(
        Sphere(3), lambda x, w: torch.exp(x @ w), Gaussian(), x, torch.ones(6, dtype=torch.float64)
    )
    assert one.fisher(w).n_rows == 6


class VonMisesFisher(ExponentialFamily):
    """Directions in space, p(y | z) ~ exp <y, z>, with A(z) = log(sinh κ / κ) for κ = |z|."""

    def log_partition(self, z):
        kappa = z.norm(dim=-1)
        return (kappa.sinh() / kappa).log()

    def sample(self, z, *, generator=None):
        raise NotImplementedError


@pytest.mark.parametrize("solve", ["auto", "cg", "woodbury"])
def test_one_output_may_be_expanded_to_all_samples(solve):
    """Maximum likelihood without inputs: the mean direction, and coth κ - 1/κ = the length of the mean."""
    g = generator(4)
    manifold = Product({"direction": Sphere(3), "log_kappa": Euclidean()})
    y = torch.randn(40, 3, generator=g, dtype=torch.float64) + 2
    y = y / y.norm(dim=1, keepdim=True)

    def model(x, theta):
        return (theta["log_kappa"].exp() * theta["direction"]).expand(len(x), 3)

    problem = NLLProblem(manifold, model, VonMisesFisher(), y, y)
    found = minimize(problem, manifold.random_point(generator=g), solve=solve)
    assert found.success
    mean, kappa = y.mean(0), found.x["log_kappa"].exp()
    torch.testing.assert_close(found.x["direction"], mean / mean.norm())
    torch.testing.assert_close(1 / kappa.tanh() - 1 / kappa, mean.norm())


def test_integer_inputs_are_indices():
    """An embedding: the inputs are item numbers, and only the targets have a dtype to match."""
    items = torch.tensor([0, 2, 1, 2])
    problem = NLLProblem(
        Oblique(3, 2), lambda i, t: t[i, 0], Gaussian(), items, torch.ones(4, dtype=torch.float64)
    )
    t = Oblique(3, 2).random_point(generator=generator())
    expected = 0.5 * (t[items, 0] - 1).square().mean()
    torch.testing.assert_close(problem.loss(t), expected)


def network():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()
    with torch.no_grad():
        module[0].weight.copy_(nn.functional.normalize(module[0].weight, dim=1))
    g = generator(2)
    x, y = (
        torch.randn(10, 3, generator=g, dtype=torch.float64),
        torch.randint(0, 2, (10,), generator=g),
    )
    return module, x, y


def test_a_network_becomes_a_problem_on_a_product():
    module, x, y = network()
    problem, start = NLLProblem.from_module(
        module, Categorical(), x, y, manifolds={"0.weight": Oblique(4, 3)}, draws=3
    )
    assert isinstance(problem.manifold, Product)
    assert list(start) == ["0.weight", "0.bias", "2.weight"]
    assert problem.draws == 3
    loss = nn.functional.cross_entropy(module(x), y)
    torch.testing.assert_close(problem.loss(start), loss.detach())
    loss.backward()
    gradient = problem.gradient(start)
    torch.testing.assert_close(gradient["0.bias"], module[0].bias.grad)
    torch.testing.assert_close(gradient["2.weight"], module[2].weight.grad)
    w, g = module[0].weight.detach(), module[0].weight.grad
    torch.testing.assert_close(gradient["0.weight"], g - (g * w).sum(1, keepdim=True) * w)
    # the network itself is left alone
    with torch.no_grad():
        for leaf in leaves(start):
            leaf.zero_()
    assert float(module[0].weight.detach().abs().min()) > 0
    assert not any(leaf.requires_grad for leaf in leaves(start))


def test_frozen_parameters_stay_as_they_are():
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    network[0].requires_grad_(False)
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    problem, start = NLLProblem.from_module(network, Categorical(), x, (x[:, 0] > 0).long())
    assert list(start) == ["2.weight", "2.bias"]
    torch.testing.assert_close(
        problem.loss(start), nn.functional.cross_entropy(network(x), (x[:, 0] > 0).long())
    )
    with pytest.raises(ValueError, match=r"does not have or has frozen: \['0.weight'\]"):
        NLLProblem.from_module(
            network, Categorical(), x, x[:, 0], manifolds={"0.weight": Oblique(3, 4)}
        )
    with pytest.raises(ValueError, match="a parameter that requires grad, it has none"):
        NLLProblem.from_module(network.requires_grad_(False), Categorical(), x, x[:, 0])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            nn.BatchNorm1d(3),
            r"batch statistics mix the samples: BatchNorm1d '1' must be in evaluation mode",
        ),
        (
            nn.BatchNorm1d(3, track_running_stats=False).eval(),
            "batch statistics mix the samples: BatchNorm1d '1'",
        ),
        (nn.Dropout(0.1), "dropout makes the loss random: Dropout '1' must be in evaluation mode"),
    ],
)
def test_a_network_that_mixes_samples_is_refused(layer, message):
    with pytest.raises(ValueError, match=message):
        NLLProblem.from_module(
            nn.Sequential(nn.Linear(4, 3), layer), Gaussian(), torch.ones(5, 4), torch.ones(5, 3)
        )


class Recurrent(nn.Module):
    """Dropout between the two layers is an option of the GRU, not a module."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 3, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0][:, -1]


class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize("count", [1, 7])
def test_a_network_that_draws_or_mixes_in_a_function_is_refused(count):
    torch.manual_seed(0)
    x, y = torch.randn(count, 6, 4), torch.zeros(count, 3)
    if count > 1:
        problem, start = NLLProblem.from_module(Recurrent(), Gaussian(), x, y)
        with pytest.raises(
            ValueError, match="the same outputs twice: nothing in it may be drawn at random"
        ):
            problem.loss(start)
    problem, start = NLLProblem.from_module(Recurrent().eval(), Gaussian(), x, y)
    assert torch.equal(problem.loss(start), problem.loss(start))
    if count > 1:
        problem, start = NLLProblem.from_module(Centred(4, 3), Gaussian(), x[:, 0], y)
        with pytest.raises(
            ValueError,
            match="treat samples independently, got other outputs for the first of 4 alone",
        ):
            problem.loss(start)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            (Sphere, torch.matmul, Gaussian()),
            r"manifold must be a manifold such as Sphere\(3\), got <class",
        ),
        (
            (Sphere(4), None, Gaussian()),
            "model must be a function of the inputs and theta, got None",
        ),
        (
            (Sphere(4), torch.matmul, Gaussian),
            r"likelihood must be a likelihood such as Gaussian\(\), got <class",
        ),
    ],
)
def test_parts_of_another_kind_are_named(parts, message):
    with pytest.raises(TypeError, match=message):
        NLLProblem(*parts, torch.ones(5, 4), torch.ones(5))


def test_a_problem_can_be_copied_and_pickled_after_it_was_evaluated():
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    problem, theta = (
        NLLProblem(Sphere(4), torch.matmul, Gaussian(), x, x[:, 1]),
        torch.eye(4, dtype=torch.float64)[0],
    )
    value, gradient = problem.loss_and_gradient(theta)
    for other in (copy.deepcopy(problem), pickle.loads(pickle.dumps(problem))):
        again = other.loss_and_gradient(theta)
        assert torch.equal(again[0], value)
        assert torch.equal(again[1], gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("manifold", [Sphere(5), Stiefel(5, 2)], ids=repr)
def test_gradients_are_tangent_where_nothing_but_rounding_is_left_of_them(manifold, dtype):
    """Noisy regression, whose Euclidean gradient does not vanish at the minimum: a loop of one's own, and rngd-vr."""
    g = torch.Generator().manual_seed(0)
    x, truth = (
        torch.randn(200, 5, generator=g, dtype=dtype),
        manifold.random_point(generator=g, dtype=dtype),
    )

    def model(x, theta):
        return torch.tanh(x @ leaves(theta)[0])

    y = model(x, truth)
    y = y + 0.5 * torch.randn(y.shape, generator=g, dtype=dtype)
    problem, theta = NLLProblem(manifold, model, Gaussian(), x, y), truth
    for _ in range(40):
        theta = manifold.retract(
            theta, scale(-1.0, problem.fisher(theta).solve(problem.gradient(theta)))
        )
    assert float(manifold.norm(theta, problem.gradient(theta))) < 100 * torch.finfo(dtype).eps
    options = {
        "step": 0.9,
        "damping": 0.01,
        "max_iter": 30,
        "batch_size": 100,
        "stop": GradientNorm(0.0),
    }
    result = minimize(problem, truth, "rngd-vr", **options)
    assert min(result.trace["gradient_norm"]) < 100 * torch.finfo(dtype).eps


def test_inference_mode_is_named():
    x = torch.ones(5, 4)
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"no gradients inside torch.inference_mode\(\)"),
    ):
        NLLProblem(Sphere(4), torch.matmul, Gaussian(), x, x[:, 1]).gradient(torch.eye(4)[0])


@pytest.mark.parametrize("kind", ["exact", "monte-carlo", "empirical"])
def test_an_operator_is_not_zero_inside_inference_mode(kind):
    """Without a graph the outputs would look as if they did not depend on θ, and F v would be 0."""
    x, theta, v = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), *torch.eye(4)[:2]
    problem = NLLProblem(Sphere(4), torch.matmul, Gaussian(), x, x[:, 1])
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"no gradients inside torch.inference_mode\(\)"),
    ):
        problem.fisher(theta, kind=kind)
    operator = problem.fisher(theta, kind=kind)
    with torch.inference_mode():
        inside = operator.matvec(v)
    torch.testing.assert_close(inside, operator.matvec(v))
    assert float(inside.abs().max()) > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_jacobians_do_not_depend_on_the_grad_mode(mode):
    """A model that solves a linear system in every sample, as variable projection does."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 6, generator=g, dtype=torch.float64)

    def model(x, u):
        gram = torch.einsum("jp,nj,jq->npq", u, x.square(), u)
        return torch.linalg.solve(gram, x @ u) @ u.mT

    u = Stiefel(6, 2).random_point(generator=g)
    problem = NLLProblem(Stiefel(6, 2), model, Gaussian(), x, x)
    expected = problem.jacobian(u), problem.per_sample_gradients(u), problem.fisher(u).rows()
    exact = torch.func.jacrev(lambda u: model(x, u))(u)
    torch.testing.assert_close(expected[0], exact)
    with mode():
        torch.testing.assert_close(
            (problem.jacobian(u), problem.per_sample_gradients(u)), expected[:2]
        )
    with torch.no_grad():
        torch.testing.assert_close(problem.fisher(u).rows(), expected[2])


def test_jacobians_and_gradients_are_those_of_theta_alone():
    """A network that the model passes its inputs through has parameters that could be trained as well."""
    layer, x = (
        torch.nn.Linear(4, 4).double(),
        torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double(),
    )
    problem = NLLProblem(Stiefel(4, 2), lambda x, u: layer(x) @ u, Gaussian(), x, x[:, :2])
    u = torch.eye(4, 2, dtype=torch.float64)
    assert not problem.jacobian(u).requires_grad
    assert not problem.per_sample_gradients(u).requires_grad
    g = problem.gradient(u)
    for kind in problem.fisher_kinds:
        assert not problem.fisher(u, kind=kind).solve(g, 0.1).requires_grad


def test_truth_values_are_targets_of_a_gaussian():
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    truth = x[:, 1] > 0
    losses = [
        NLLProblem(Sphere(4), torch.matmul, Gaussian(), x, y).loss(torch.eye(4)[0])
        for y in (truth, 1.0 * truth)
    ]
    assert losses[0] == losses[1]


def test_a_network_on_the_cpu_beside_another_default_device():
    module, x, y = network()
    here, start = NLLProblem.from_module(module, Categorical(), x, y)
    with torch.device("meta"):
        there, same = NLLProblem.from_module(module, Categorical(), x, y)
        value = there.loss(same)
    assert torch.equal(value, here.loss(start))


def test_unknown_parameters_are_named():
    module, x, y = network()
    with pytest.raises(ValueError, match=r"the module does not have or has frozen: \['1.weight'\]"):
        NLLProblem.from_module(module, Categorical(), x, y, manifolds={"1.weight": Oblique(4, 3)})


X, Y = torch.ones(4, 2), torch.ones(4)


@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        ([[1.0]], Y, TypeError, r"x must be a torch.Tensor, got list"),
        (X, [1.0], TypeError, r"y must be a torch.Tensor, got list"),
        (X[:0], Y[:0], ValueError, r"x must hold at least one sample, got shape \(0, 2\)"),
        (torch.tensor(1.0), Y, ValueError, r"x must hold at least one sample, got shape \(\)"),
        (X, Y[:3], ValueError, r"x and y must have the same number of samples, got 4 and 3"),
        (X * torch.nan, Y, ValueError, r"x must be finite, got NaN or infinite entries"),
        (X, Y * torch.inf, ValueError, r"y must be finite, got NaN or infinite entries"),
        (X, Y.to("meta"), ValueError, r"x and y must be on one device, got cpu and meta"),
    ],
)
def test_bad_data_is_named(x, y, error, message):
    with pytest.raises(error, match=message):
        NLLProblem(Euclidean(2), lambda x, t: x @ t, Gaussian(), x, y)


@pytest.mark.parametrize("option", ["draws", "chunk_size"])
@pytest.mark.parametrize("count", [0, 2.5, torch.nan, "3", True])
def test_bad_counts_are_named(option, count):
    with pytest.raises(ValueError, match=f"{option} must be a positive integer, got {count!r}"):
        NLLProblem(Euclidean(2), lambda x, t: x @ t, Gaussian(), X, Y, **{option: count})


CALLS = {
    "loss": lambda p, t: p.loss(t),
    "gradient": lambda p, t: p.gradient(t),
    "fisher": lambda p, t: p.fisher(t),
    "row-block": lambda p, t: p.fisher(t, kind="row-block"),
    "per_sample_gradients": lambda p, t: p.per_sample_gradients(t),
    "jacobian": lambda p, t: p.jacobian(t),
}


@pytest.mark.parametrize("call", sorted(CALLS))
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda x, t: (x @ t).sum(),
            r"model must return a tensor with one row per sample, \(\d, ...\), got \(\)",
        ),
        (lambda x, t: (x @ t).repeat(2, 1), r"one row per sample, \(\d, ...\), got \(\d, 1\)"),
        (
            lambda x, t: [x @ t],
            r"model must return a tensor with one row per sample, \(\d, ...\), got list",
        ),
        (lambda x, t: (x @ t).long(), r"model must return a floating tensor, got torch.int64"),
        (lambda x, t: x @ t, r"y must have the shape \(4, 1\) of the model's output, got \(4,\)"),
    ],
    ids=["scalar", "rows", "list", "integer", "targets"],
)
def test_a_model_of_the_wrong_shape_is_named_whatever_is_asked_first(model, message, call):
    problem = NLLProblem(Euclidean(2, 1), model, Gaussian(), X, Y)
    with pytest.raises(ValueError, match=message):
        CALLS[call](problem, torch.zeros(2, 1))


@pytest.mark.parametrize("call", sorted(CALLS))
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda x, t: (x - x.mean(0)) @ t,
            "treat samples independently, got other outputs for the first of 4 alone",
        ),
        (
            lambda x, t: (x / x.std(0)) @ t,
            "treat samples independently, got other outputs for the first of 4 alone",
        ),
        (lambda x, t: torch.log_softmax(x @ t, 0), "treat samples independently"),
        (
            lambda x, t: nn.functional.dropout(x, 0.5) @ t,
            "the same outputs twice: nothing in it may be drawn",
        ),
        (lambda x, t: x.sub_(1) @ t, "at random, nor written into its inputs"),
    ],
    ids=["mean", "deviation", "softmax", "dropout", "in-place"],
)
@pytest.mark.filterwarnings("ignore:std... degrees of freedom")
def test_a_function_that_mixes_samples_or_draws_is_refused_whatever_is_asked_first(
    model, message, call
):
    """Jacobians of single samples are not those of the loss: the dense Fisher matrix of centred inputs would be 0."""
    torch.manual_seed(0)
    x = torch.randn(9, 2, generator=generator())
    problem = NLLProblem(Euclidean(2, 1), model, Gaussian(), x, x[:, :1])
    with pytest.raises(ValueError, match=message):
        CALLS[call](problem, torch.ones(2, 1))


def test_samples_that_are_mixed_show_as_soon_as_outputs_are_not_zero():
    x = torch.randn(9, 2, generator=generator(), dtype=torch.float64)
    problem = NLLProblem(Euclidean(2), lambda x, t: (x - x.mean(0)) @ t, Gaussian(), x, x[:, 0])
    with pytest.raises(ValueError, match="model must treat samples independently"):
        minimize(problem, torch.zeros(2, dtype=torch.float64), max_iter=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_that_are_nothing_but_rounding_are_no_mixed_samples(dtype):
    """One sample alone goes through other kernels, and has other rounding errors, which are all there is at 0."""
    x = torch.randn(9, 2, generator=generator(), dtype=dtype)
    problem = NLLProblem(
        Euclidean(2),
        lambda x, t: x @ t + len(x) * torch.finfo(dtype).eps,
        Gaussian(),
        x,
        torch.zeros(9, dtype=dtype),
    )
    assert float(problem.loss(torch.zeros(2, dtype=dtype))) < 1e-10
    torch.testing.assert_close(problem.gradient(torch.ones(2, dtype=dtype)), x.T @ x.sum(1) / 9)


EXPOSURES = torch.linspace(0.5, 2.0, 9)[:, None]


@pytest.mark.parametrize("call", sorted(CALLS))
@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            9,
            r"any number of samples, but fails with the first 4 of 9 \(.*\); .* must be columns of x",
        ),
        (
            3,
            r"one row per sample, \(1, 1\) for the first sample alone, got \(3, 1\); .* must be columns of x",
        ),
    ],
)
def test_a_function_with_numbers_of_samples_inside_is_refused(samples, message, call):
    """For one sample alone all exposures were taken in, and the first one counted: F was 28 in place of 46."""
    x = torch.randn(samples, 2, generator=generator())
    problem = NLLProblem(
        Euclidean(2, 1), lambda x, t: x @ t * EXPOSURES[:samples], Gaussian(), x, x[:, :1]
    )
    with pytest.raises(ValueError, match=message):
        CALLS[call](problem, torch.ones(2, 1))


def test_a_model_that_fails_with_all_samples_says_so_itself():
    x = torch.randn(9, 3, generator=generator())
    problem = NLLProblem(Euclidean(2, 1), lambda x, t: x @ t, Gaussian(), x, x[:, :1])
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        problem.loss(torch.ones(2, 1))


def test_a_model_that_drops_the_dimension_of_a_single_sample_is_named_where_one_is_asked_for():
    x = torch.randn(9, 2, generator=generator(), dtype=torch.float64)
    plain = NLLProblem(Euclidean(2, 1), lambda x, t: (x @ t)[:, 0], Gaussian(), x, x[:, 0])
    squeezed = NLLProblem(Euclidean(2, 1), lambda x, t: (x @ t).squeeze(), Gaussian(), x, x[:, 0])
    start = torch.zeros(2, 1, dtype=torch.float64)
    for call in ("per_sample_gradients", "jacobian"):
        with pytest.raises(
            ValueError, match=r"\(1, ...\), got \(\); a batch of one keeps its first dimension"
        ):
            CALLS[call](squeezed, start)
    assert torch.equal(minimize(squeezed, start, "rcg").x, minimize(plain, start, "rcg").x)


def test_targets_outside_the_first_batch_are_checked_too():
    y = torch.tensor([0.0, 1.0, 1.0, 2.0])
    problem = NLLProblem(Euclidean(2), lambda x, t: x @ t, Bernoulli(), X, y)
    with pytest.raises(
        ValueError, match=r"y must be 0 or 1 for a Bernoulli likelihood, got values in \[0, 2\]"
    ):
        problem.loss(torch.zeros(2), torch.tensor([0, 1]))


def test_bad_points_are_named():
    problem, w = logistic()
    for call in (problem.loss, problem.gradient, problem.fisher, problem.per_sample_gradients):
        with pytest.raises(ValueError, match=r"theta is not a point of Sphere\(4\)"):
            call(2 * w)
        with pytest.raises(
            ValueError,
            match=r"theta must have the dtype torch.float64 of the data x, got torch.float32",
        ):
            call(w.float())
        with pytest.raises(ValueError, match=r"theta must be on cpu like the data, got meta"):
            call(w.to("meta"))
        with pytest.raises(
            ValueError, match=r"theta must have shape \(..., 4\) on Sphere\(4\), got \(3,\)"
        ):
            call(w[:3])
        with pytest.raises(ValueError, match=r"theta must be finite, got NaN or infinite entries"):
            call(w * torch.nan)
        with pytest.raises(TypeError, match=r"theta must be a torch.Tensor, got list"):
            call([1.0, 0.0, 0.0, 0.0])
    many = torch.stack([w, -w])
    torch.testing.assert_close(
        torch.func.vmap(lambda v: problem.kl(w, v))(many)[0], torch.tensor(0.0).double()
    )


def test_mixed_dtypes_in_a_product_are_named():
    module, x, y = network()
    problem, start = NLLProblem.from_module(module, Categorical(), x, y)
    start["2.weight"] = start["2.weight"].float()
    with pytest.raises(
        ValueError,
        match=r"theta must have the dtype torch.float64 of the data x, got torch.float32",
    ):
        problem.loss(start)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (
            torch.tensor([], dtype=torch.int64),
            ValueError,
            r"batch must hold at least one sample, got none",
        ),
        (torch.tensor([0, 12]), ValueError, r"batch must lie in 0..11, got 0..12"),
        (torch.tensor([-1, 2]), ValueError, r"batch must lie in 0..11, got -1..2"),
        (
            torch.tensor([0.0, 1.0]),
            ValueError,
            r"batch must be a vector of int64 or int32 indices, got torch.float32",
        ),
        (
            torch.ones(12, dtype=torch.bool),
            ValueError,
            r"batch must be a vector of int64 or int32 indices, got torch.bool",
        ),
        (
            torch.tensor([[0, 1]]),
            ValueError,
            r"vector of int64 or int32 indices, got torch.int64 of shape \(1, 2\)",
        ),
        (
            torch.arange(12, dtype=torch.uint8),
            ValueError,
            r"int64 or int32 indices, got torch.uint8 of shape \(12,\)",
        ),
        (
            torch.tensor([0, 1], dtype=torch.int16),
            ValueError,
            r"int64 or int32 indices, got torch.int16",
        ),
        ([0, 1], TypeError, r"batch must be a tensor of sample indices, got list"),
        (
            torch.tensor([0, 1], device="meta"),
            ValueError,
            r"batch must be on cpu like the data, got meta",
        ),
    ],
)
def test_bad_batches_are_named(batch, error, message):
    problem, w = logistic()
    for call in (problem.loss, problem.gradient, problem.fisher, problem.per_sample_gradients):
        with pytest.raises(error, match=message):
            call(w, batch)


def test_an_operator_never_belongs_to_an_earlier_point():
    """The graph of the last gradient is kept for the operator; it must not outlive what it was computed from."""
    module, x, y = network()
    problem, start = NLLProblem.from_module(module, Categorical(), x, y)
    fresh, _ = NLLProblem.from_module(module, Categorical(), x, y)
    batch = torch.tensor([0, 1, 2])

    def check():
        torch.testing.assert_close(problem.fisher(start, batch).z, fresh.model(x[batch], start))
        torch.testing.assert_close(
            problem.fisher(start, batch).dense(), fresh.fisher(start, batch).dense()
        )

    problem.gradient(start, batch)
    check()
    start["2.weight"] = 2 * start["2.weight"]
    check()
    problem.gradient(start, batch)
    start["0.bias"].add_(1.0)
    check()
    problem.gradient(start, batch)
    batch[0] = 7
    check()
    problem.gradient(start)
    check()


def test_unknown_kinds_are_named():
    problem, w = logistic()
    with pytest.raises(
        ValueError, match=r"kind must be one of \['exact', 'monte-carlo', .*\], got 'diagonal'"
    ):
        problem.fisher(w, kind="diagonal")


def test_the_gradient_is_the_slope_along_the_retraction():
    module, x, y = network()
    problem, start = NLLProblem.from_module(
        module, Categorical(), x, y, manifolds={"0.weight": Oblique(4, 3)}
    )
    manifold = problem.manifold
    d = manifold.random_tangent(start, generator=generator(5))
    slope = float(manifold.inner(start, problem.gradient(start), d))
    t = 1e-5
    ahead, behind = (float(problem.loss(manifold.retract(start, scale(s, d)))) for s in (t, -t))
    assert (ahead - behind) / (2 * t) == pytest.approx(slope, rel=1e-7)
    assert flatten(d).numel() == 12 + 4 + 8


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class _Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = (
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
            nn.Linear(4, 3),
        )

    def forward(self, x):
        return self.head(self.body(x).mean(1))


class _Ragged(nn.Linear):
    """The number of rows that it takes depends on the values."""

    def forward(self, x):
        return super().forward(torch.stack([row[row[:, 0] < 1].sum(0) for row in x]))


@pytest.mark.parametrize("build", [_Recurrent, _Attentive, lambda: _Ragged(4, 3)])
def test_networks_that_vmap_does_not_know(build):
    torch.manual_seed(0)
    x = torch.randn(8, 5, 4, dtype=torch.float64)
    problem, start = NLLProblem.from_module(
        build().double().eval(), Categorical(), x, torch.arange(8) % 3
    )
    each = problem.per_sample_gradients(start)
    for i in range(8):
        alone = problem.gradient(start, torch.tensor([i]))
        torch.testing.assert_close(
            tree_map(lambda leaf, i=i: leaf[i], each), alone, atol=1e-12, rtol=0
        )
    operator = problem.fisher(start)
    torch.testing.assert_close(
        operator.dense(), operator.rows().T @ operator.rows(), atol=1e-12, rtol=0
    )
    assert check_gradient(problem, start)
    assert check_fisher(problem, start)
    assert minimize(problem, start, max_iter=10).value < float(problem.loss(start))
