"""Weights, offsets and priors of NLLProblem against problems that have them written out."""

import pytest
import torch

from fisherfold import Bernoulli, Gaussian, NLLProblem, Poisson, minimize
from fisherfold.manifolds import SPD, Euclidean, Sphere
from toy import generator


def data(samples=40, columns=3):
    x = torch.randn(samples, columns, generator=generator(), dtype=torch.float64)
    return x, torch.poisson((0.4 * x.sum(1)).exp(), generator=generator(1))


def model(x, t):
    return x @ t


KINDS = ["exact", "dense", "empirical"]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_weights_are_repeated_samples(kind):
    x, y = data()
    counts = torch.randint(0, 4, (40,), generator=generator(2))
    weighted = NLLProblem(Euclidean(3), model, Poisson(), x, y, weights=counts.double())
    repeated = NLLProblem(
        Euclidean(3), model, Poisson(), x.repeat_interleave(counts, 0), y.repeat_interleave(counts)
    )
    t = torch.full((3,), 0.2, dtype=torch.float64)
    share = int(counts.sum()) / 40
    assert float(weighted.loss(t)) == pytest.approx(share * float(repeated.loss(t)))
    torch.testing.assert_close(weighted.gradient(t), share * repeated.gradient(t))
    torch.testing.assert_close(
        weighted.fisher(t, kind=kind).dense(), share * repeated.fisher(t, kind=kind).dense()
    )
    rows = weighted.fisher(t, kind=kind)
    g = weighted.gradient(t)
    torch.testing.assert_close(rows.solve(g, 0.1, method="dense"), rows.solve(g, 0.1, method="cg"))
    batch = torch.arange(5, 20)
    parts = (
        weights_of(weighted, batch) * weighted.likelihood.nll(model(x[batch], t), y[batch])
    ).mean()
    assert float(weighted.loss(t, batch)) == pytest.approx(float(parts))


def weights_of(problem, batch):
    return problem.weights[batch]


@pytest.mark.parametrize("kind", ["monte-carlo", "kronecker", "row-block", "layers"])
def test_weights_reach_the_kinds_with_drawn_targets(kind):
    x, _ = data()
    weights = torch.rand(40, generator=generator(3), dtype=torch.float64) * 3
    problem = NLLProblem(
        Euclidean(3, 1), model, Gaussian(0.5), x, x[:, :1], weights=weights, draws=1000
    )
    t = torch.zeros(3, 1, dtype=torch.float64)
    exact = problem.fisher(t).dense()
    found = problem.fisher(t, kind=kind).dense()
    exact = exact.diag().diag() if kind == "row-block" else exact
    # the factors of layers take the mean of a product for the product of means
    assert float((found - exact).norm()) < (0.08 if kind != "layers" else 0.3) * float(exact.norm())


def test_an_offset_is_added_to_the_output():
    x, y = data()
    exposure = torch.rand(40, generator=generator(2), dtype=torch.float64).log()
    offset = NLLProblem(Euclidean(3), model, Poisson(), x, y, offset=exposure)
    columns = torch.cat([x, exposure[:, None]], 1)
    written = NLLProblem(Euclidean(3), lambda x, t: x[:, :3] @ t + x[:, 3], Poisson(), columns, y)
    t = torch.full((3,), 0.2, dtype=torch.float64)
    for batch in (None, torch.arange(7, 11)):
        torch.testing.assert_close(offset.gradient(t, batch), written.gradient(t, batch))
        for kind in KINDS:
            torch.testing.assert_close(
                offset.fisher(t, batch, kind=kind).dense(),
                written.fisher(t, batch, kind=kind).dense(),
            )
    torch.testing.assert_close(offset.per_sample_gradients(t), written.per_sample_gradients(t))


def test_a_gaussian_prior_is_ridge_regression():
    x, _ = data()
    y = x.sum(1)
    problem = NLLProblem(
        Euclidean(3), model, Gaussian(), x, y, prior=lambda t: 2.5 * t.square().sum()
    )
    t = torch.zeros(3, dtype=torch.float64)
    expected = torch.linalg.solve(x.T @ x + 5 * torch.eye(3, dtype=torch.float64), x.T @ y)
    result = minimize(problem, t)
    assert result.status == "converged"
    assert result.iterations <= 4
    torch.testing.assert_close(result.x, expected)
    hessian = (x.T @ x + 5 * torch.eye(3, dtype=torch.float64)) / 40
    torch.testing.assert_close(problem.fisher(t).dense(), hessian)
    torch.testing.assert_close(
        problem.fisher(t, torch.arange(4)).dense(), x[:4].T @ x[:4] / 4 + 5 / 40 * torch.eye(3)
    )


def test_a_directional_prior_decides_where_data_say_nothing():
    """Von Mises-Fisher: π(w) = -κ <μ, w>, linear in the ambient space."""
    x, _ = data(6)
    y = torch.ones(6, dtype=torch.float64)
    mu = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    fits = [
        minimize(
            NLLProblem(
                Sphere(3),
                lambda x, w: 0.0 * (x @ w) + 0.01 * (x @ w),
                Bernoulli(),
                x,
                y,
                prior=prior,
            ),
            Sphere(3).random_point(generator=generator(5)),
        ).x
        for prior in (None, lambda w: -100.0 * (w @ mu))
    ]
    assert float(fits[1] @ mu) > 0.999 > float(fits[0] @ mu)


def riemannian_hessian(manifold, point, f, t=1e-3):
    """The matrix of the second derivatives of f along geodesics, in an orthonormal basis, by differences."""
    basis = manifold.tangent_basis(point)

    def second(v):
        def at(s):
            return f(manifold.exp(point, s * t * v))

        return float(16 * (at(1) + at(-1)) - (at(2) + at(-2)) - 30 * f(point)) / (12 * t * t)

    rows = [[(second(u + v) - second(u - v)) / 4 for v in basis] for u in basis]
    return basis, torch.tensor(rows, dtype=torch.float64)


POLE = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
PRIORS = {
    "sphere": (
        Sphere(3),
        lambda w: -3 * (w @ POLE),
        lambda w: -3 * (w @ POLE) / w.square().sum() + w.square().sum(),
    ),
    "spd": (
        SPD(2),
        lambda s: s.trace() + (s[0, 1] - 0.3).square(),
        lambda s: s.trace() + (s[0, 1] - 0.3) * (s[1, 0] - 0.3),
    ),
}


@pytest.mark.parametrize("name", PRIORS)
def test_a_prior_adds_its_riemannian_hessian_in_whatever_form_it_is_written(name):
    manifold, *forms = PRIORS[name]
    theta = manifold.random_point(generator=generator(7))
    x, y = data()
    fisher = [
        NLLProblem(
            manifold, lambda x, t: x[:, :2] @ t.reshape(-1)[:2], Poisson(), x, y, prior=prior
        ).fisher(theta)
        for prior in (None, *forms)
    ]
    basis, expected = riemannian_hessian(manifold, theta, forms[0])
    assert float(expected.diagonal().abs().min()) > 0.1
    for operator in fisher[1:]:
        found = [
            [
                float(manifold.inner(theta, u, operator.matvec(v) - fisher[0].matvec(v)))
                for v in basis
            ]
            for u in basis
        ]
        torch.testing.assert_close(
            40 * torch.tensor(found, dtype=torch.float64), expected, rtol=1e-6, atol=1e-6
        )


def test_a_prior_on_a_sphere_is_found_from_its_opposite_where_its_hessian_is_negative():
    x, y = data()
    problem = NLLProblem(Sphere(3), model, Poisson(), x, y, prior=lambda w: -400.0 * (w @ POLE))
    far = Sphere(3).retract(-POLE, 0.1 * Sphere(3).random_tangent(-POLE, generator=generator(1)))
    result = minimize(problem, far)
    assert result.success
    assert float(result.x @ POLE) > 0.99


@pytest.mark.parametrize(
    ("prior", "words"),
    [
        (lambda t: 3.0, "prior must return one number as a torch tensor.*got float"),
        (
            lambda t: t.square(),
            r"prior must return one number as a torch tensor.*got a tensor of shape \(3,\)",
        ),
        (
            lambda t: torch.tensor(1.0),
            "prior must depend on theta through torch operations, but it has no gradient",
        ),
        (lambda t: t.sum() / 0, "prior must be finite where a run starts, got nan"),
        (lambda t: -t.abs().sum().log(), "prior must be finite where a run starts, got inf"),
    ],
)
def test_a_prior_is_one_finite_number_that_depends_on_theta(prior, words):
    x, y = data()
    problem = NLLProblem(Euclidean(3), model, Poisson(), x, y, prior=prior)
    with pytest.raises(ValueError, match=words):
        minimize(problem, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"weights": torch.ones(39)},
            "x and weights must have the same number of samples, got 40 and 39",
        ),
        ({"weights": -torch.ones(40)}, "weights must be one number ≥ 0 per sample"),
        ({"weights": torch.zeros(40)}, "not all 0"),
        ({"weights": torch.full((40,), torch.nan)}, "weights must be finite"),
        (
            {"offset": torch.zeros(40, 2, dtype=torch.float64)},
            r"offset must have the shape of the model's output",
        ),
        ({"prior": 3.0}, "prior must be a function of theta"),
    ],
)
def test_what_is_wrong_with_them_is_named(options, words):
    x, y = data()
    with pytest.raises((ValueError, TypeError), match=words):
        NLLProblem(Euclidean(3), model, Poisson(), x, y, **options).loss(
            torch.zeros(3, dtype=torch.float64)
        )
