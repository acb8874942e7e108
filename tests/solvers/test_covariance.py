"""Standard errors on manifolds: closed forms, invariance, and the coverage of intervals."""

import sys

import numpy as np
import pytest
import torch

import fisherfold.fisher.jacobian as fisher_jacobian
from fisherfold import Bernoulli, Categorical, Gaussian, LossProblem, NLLProblem, Poisson, minimize
from fisherfold.fisher import VonMisesFisher
from fisherfold.manifolds import SPD, Euclidean, Grassmann, Product, Sphere, Stiefel
from fisherfold.problems import GaussianModel
from toy import generator, normal

fisher_covariance = sys.modules["fisherfold.fisher.covariance"]


def test_in_euclidean_space_it_is_the_textbook_matrix():
    x = normal(200, 3)
    y = x.sum(1) + 0.5 * normal(200, seed=1)
    result = minimize(
        NLLProblem(Euclidean(3), lambda x, t: x @ t, Gaussian(), x, y), torch.zeros(3).double()
    )
    dispersion = float((y - x @ result.x).square().sum()) / 197
    expected = dispersion * torch.linalg.inv(x.T @ x)
    torch.testing.assert_close(result.covariance(lambda t: t, dispersion=dispersion), expected)
    low, high = result.covariance(dispersion=dispersion).interval(lambda t: t, 0.95)
    torch.testing.assert_close(
        (high - low) / 2, 1.959964 * expected.diagonal().sqrt(), rtol=1e-6, atol=0
    )


def test_the_sandwich_is_whites():
    x = normal(300, 2)
    y = x.sum(1) + x[:, 0].abs() * normal(300, seed=1)
    result = minimize(
        NLLProblem(Euclidean(2), lambda x, t: x @ t, Gaussian(), x, y), torch.zeros(2).double()
    )
    r = y - x @ result.x
    bread = torch.linalg.inv(x.T @ x)
    expected = bread @ (x.T * r.square()) @ x @ bread
    torch.testing.assert_close(result.covariance(lambda t: t, robust=True), expected)


def test_weights_count_as_samples():
    x = normal(50, 2)
    y = torch.poisson((x @ torch.ones(2).double()).exp(), generator=generator(1))
    one = NLLProblem(Euclidean(2), lambda x, t: x @ t, Poisson(), x.repeat(3, 1), y.repeat(3))
    three = NLLProblem(
        Euclidean(2), lambda x, t: x @ t, Poisson(), x, y, weights=torch.full((50,), 3.0)
    )
    found = [minimize(p, torch.zeros(2).double()).covariance(lambda t: t) for p in (one, three)]
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("metric", ["embedded", "affine-invariant"])
def test_functions_of_the_estimate_do_not_depend_on_the_metric_of_the_manifold(metric):
    """Σ on SPD(2) with its own metric, and as ΛΛᵀ in Euclidean space, whose rotations are not identified."""
    y = normal(80, 2) @ normal(2, 2, seed=1)
    if metric == "embedded":
        problem = GaussianModel(Euclidean(2, 2), lambda t: (y.mean(0), t @ t.mT), y)
        start, sigma = torch.eye(2).double(), lambda t: t @ t.mT
    else:
        problem = GaussianModel(SPD(2), lambda t: (y.mean(0), t), y)
        start, sigma = torch.eye(2).double(), lambda t: t
    result = minimize(problem, start)
    s = torch.cov(y.T, correction=0)
    found = result.covariance(lambda t: sigma(t).reshape(-1))
    # Wishart: Cov(S_ij, S_kl) = (S_ik S_jl + S_il S_jk)/n
    expected = (torch.einsum("ik,jl->ijkl", s, s) + torch.einsum("il,jk->ijkl", s, s)).reshape(
        4, 4
    ) / 80
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)


def test_what_is_not_identified_is_named():
    y = normal(80, 3) @ normal(3, 3, seed=1)
    result = minimize(
        GaussianModel(Euclidean(3, 3), lambda t: (y.mean(0), t @ t.mT), y), torch.eye(3).double()
    )
    with pytest.raises(ValueError, match="f is not identified: it changes along 3 directions"):
        result.covariance(lambda t: t[0, 0])


def test_intervals_of_functions_of_a_subspace_cover():
    """Grassmann(4, 1): the entries of the projector, 60 data sets."""
    truth = torch.tensor([[0.6], [0.8], [0.0], [0.0]], dtype=torch.float64)
    hits = []
    for seed in range(60):
        x = normal(150, 4, seed=seed)
        y = x @ truth @ truth.T + normal(150, 4, seed=1000 + seed)
        problem = NLLProblem(Grassmann(4, 1), lambda x, u: x @ u @ u.mT, Gaussian(), x, y)
        low, high = (
            minimize(problem, truth)
            .covariance()
            .interval(lambda u: (u @ u.mT)[[0, 0, 1], [1, 2, 3]], 0.9)
        )
        value = (truth @ truth.T)[[0, 0, 1], [1, 2, 3]]
        hits.append(((low <= value) & (value <= high)).double())
    assert 0.8 < float(torch.stack(hits)[:, :2].mean()) < 0.98


def test_regions_follow_the_manifold_and_hold_the_truth():
    truth, hits = Sphere(3).random_point(generator=generator(1)), []
    for seed in range(60):
        y = VonMisesFisher(3).sample(10 * truth.expand(40, 3), generator=generator(seed))
        problem = NLLProblem(
            Sphere(3), lambda x, m: 10 * m.expand(len(x), 3), VonMisesFisher(3), y[:, :1], y
        )
        region = minimize(problem, truth).covariance()
        hits.append(region.contains(truth, 0.9))
    assert 0.8 < np.mean(hits) < 0.99
    boundary = region.boundary(50, 0.9)
    Sphere(3).check_point(boundary)
    distances = [region.distance(point) for point in boundary]
    np.testing.assert_allclose(distances, 4.605, rtol=0.05)


def test_products_and_what_a_result_does_not_know():
    x = normal(300, 3)
    space = Product({"direction": Sphere(3), "slope": Euclidean(1)})
    truth = {
        "direction": Sphere(3).random_point(generator=generator(2)),
        "slope": torch.tensor([2.0]).double(),
    }

    def model(x, t):
        return t["slope"] * (x @ t["direction"])

    y = torch.bernoulli(torch.sigmoid(model(x, truth)), generator=generator(3))
    result = minimize(NLLProblem(space, model, Bernoulli(), x, y), truth)
    covariance = result.covariance()
    plain = minimize(
        NLLProblem(Euclidean(3), lambda x, t: x @ t, Bernoulli(), x, y), torch.zeros(3).double()
    )
    # the same model in other coordinates
    torch.testing.assert_close(
        covariance.of(lambda t: t["slope"] * t["direction"])[1],
        plain.covariance(lambda t: t),
        rtol=1e-5,
        atol=1e-9,
    )
    whole = result.covariance(lambda t: t)  # a point itself: its entries, factor after factor
    assert whole.shape == (4, 4)
    torch.testing.assert_close(whole[:3, :3], result.covariance(lambda t: t["direction"]))
    torch.testing.assert_close(whole[3:, 3:], result.covariance(lambda t: t["slope"]))
    assert covariance.contains(truth, 0.999)
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        covariance.contains(truth, 90)


def test_an_estimate_that_is_no_minimum_has_no_covariance():
    """A Rayleigh quotient at its middle eigenvector, a saddle."""
    a = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    saddle = minimize(
        LossProblem(Sphere(3), lambda w: w @ a @ w), torch.eye(3).double()[1], method="trust-region"
    )
    with (
        pytest.warns(RuntimeWarning, match="standard errors of no minimum"),
        pytest.raises(
            ValueError, match=r"negative eigenvalue -2.00e\+00 .* no minimum of the loss"
        ),
    ):
        saddle.covariance()


@pytest.mark.parametrize("robust", [False, True])
def test_a_run_that_ends_early_warns(robust, recwarn):
    """A step of three standard errors along one coefficient, in units that do not matter to the sandwich."""
    x = normal(300, 2)
    y = x.sum(1) + normal(300, seed=1)
    if robust:
        problem = LossProblem(
            Euclidean(2), lambda data, t: 50 * (data[0] @ t - data[1]).square(), (x, y)
        )
    else:
        problem = NLLProblem(Euclidean(2), lambda x, t: x @ t, Gaussian(), x, y)
    best = minimize(problem, torch.zeros(2).double(), "trust-region")
    error = best.covariance(lambda t: t[0], robust=robust).sqrt()
    assert not recwarn.list
    early = minimize(
        problem,
        best.x + torch.cat([3 * error.reshape(1), torch.zeros(1)]),
        "trust-region",
        max_iter=0,
    )
    with pytest.warns(
        RuntimeWarning, match=r"next step would be (2\.[5-9]|3)\S* standard errors long"
    ):
        early.covariance(robust=robust)


@pytest.mark.parametrize("method", ["trust-region", "lbfgs"])
def test_curvature_along_an_invariance_is_not_taken_for_a_saddle(method):
    """Loadings ΛΛᵀ turn freely; what a run leaves of the gradient gives that direction a curvature of either sign."""
    y = normal(200, 4) @ normal(4, 4, seed=3)
    s = y.T @ y / 200

    def loss(t):
        sigma = t @ t.mT + torch.eye(4, dtype=torch.float64)
        return 100 * (torch.logdet(sigma) + torch.linalg.solve(sigma, s).trace())

    for seed in range(5):
        result = minimize(
            LossProblem(Euclidean(4, 2), loss), normal(4, 2, seed=seed), method=method, max_iter=500
        )
        assert result.success
        assert bool((result.covariance(lambda t: (t @ t.mT).diagonal()).diagonal() > 0).all())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dispersion": -1.0}, "dispersion must be a positive number, got -1.0"),
        ({"dispersion": float("nan")}, "dispersion must be a positive number, got nan"),
        ({"dispersion": 4.0, "robust": True}, "leave out dispersion=4.0"),
    ],
)
def test_the_dispersion_is_positive_and_not_for_the_sandwich(options, words):
    x = normal(50, 2)
    result = minimize(
        NLLProblem(Euclidean(2), lambda x, t: x @ t, Gaussian(), x, x[:, 0]),
        torch.zeros(2).double(),
    )
    with pytest.raises(ValueError, match=words):
        result.covariance(**options)


def categorical(samples=3000):
    manifold = Stiefel(12, 3)
    x, u = normal(samples, 12), manifold.random_point(generator=generator(1))
    y = torch.distributions.Categorical(logits=2 * x @ u).sample()
    problem = NLLProblem(manifold, lambda x, u: 2 * x @ u, Categorical(), x, y)
    return minimize(problem, u, "trust-region")


@pytest.mark.parametrize(
    "options", [{}, {"information": "observed"}, {"robust": True}], ids=["expected", "H", "robust"]
)
@pytest.mark.parametrize("samples", [3000, 20_000], ids=["no-preconditioner", "subsample"])
def test_solves_and_matrices_give_the_same_covariance(monkeypatch, options, samples):
    """A softmax does not see what is added to all logits: differences of columns are identified."""
    result = categorical(samples)

    def differences(u):
        return (u[:, 1:] - u[:, :1])[:2]

    monkeypatch.setattr(fisher_covariance, "dense_costs_less", lambda *_: True)
    dense = result.covariance(differences, **options)
    monkeypatch.setattr(fisher_covariance, "dense_costs_less", lambda *_: False)
    torch.testing.assert_close(
        result.covariance(differences, **options), dense, rtol=1e-5, atol=1e-12
    )
    with pytest.raises(ValueError, match="f is not identified: it changes along a direction"):
        result.covariance(lambda u: u[0], **options)


def test_matrices_are_the_same_whatever_is_summed_at_once(monkeypatch):
    operator = categorical().problem.fisher(Stiefel(12, 3).random_point(generator=generator(2)))
    basis = operator.manifold.tangent_basis(operator.point).flatten(1)
    once = operator.in_basis(basis)
    torch.testing.assert_close(once, basis @ operator.dense() @ basis.mT)
    monkeypatch.setattr(fisher_jacobian, "BLOCK_ENTRIES", 1)
    torch.testing.assert_close(operator.in_basis(basis), once)


def test_there_is_no_limit_to_the_dimension():
    """6,000 means of groups: the variance of a sum is the sum of 1/n_i."""
    place = torch.arange(20_000) % 6000
    y = normal(20_000)
    problem = NLLProblem(Euclidean(6000), lambda x, t: t[x[:, 0]], Gaussian(), place[:, None], y)
    result = minimize(problem, torch.zeros(6000, dtype=torch.float64), solve="cg")
    counts = torch.bincount(place).double()
    for options in ({}, {"information": "observed"}):
        found = result.covariance(lambda t: torch.stack([t[:10].sum(), t[5999]]), **options)
        expected = torch.stack([(1 / counts[:10]).sum(), 1 / counts[5999]])
        torch.testing.assert_close(found, torch.diag(expected), rtol=1e-6, atol=1e-10)


def test_a_saddle_of_many_dimensions_has_no_covariance():
    a = torch.diag(torch.arange(60, dtype=torch.float64))
    problem = LossProblem(Sphere(60), lambda w: w @ a @ w)
    saddle = minimize(problem, torch.eye(60).double()[30], method="trust-region")
    with (
        pytest.warns(RuntimeWarning, match="standard errors of no minimum"),
        pytest.raises(ValueError, match="no minimum of the loss"),
    ):
        saddle.covariance(lambda w: w.sum())
