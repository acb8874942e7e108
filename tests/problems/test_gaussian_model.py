"""Mean-and-covariance models against their closed forms, scikit-learn and statsmodels."""

import math

import numpy as np
import pytest
import torch

from fisherfold import NLLProblem, check_fisher, check_gradient, minimize
from fisherfold.fisher import MultivariateGaussian
from fisherfold.manifolds import SPD, Euclidean, Product, Stiefel
from fisherfold.problems import GaussianModel
from fisherfold.solvers import GradientNorm
from toy import generator, normal


def factor_model(y, q):
    """Σ = Λ Λᵀ + diag(exp ψ), and a start from the principal components."""
    d = y.shape[1]
    space = Product({"mean": Euclidean(d), "loadings": Euclidean(d, q), "log_noise": Euclidean(d)})

    def moments(t):
        return t["mean"], t["loadings"] @ t["loadings"].mT + torch.diag(t["log_noise"].exp())

    problem = GaussianModel(space, moments, y)
    values, vectors = torch.linalg.eigh(problem.covariance)
    noise = values[:-q].mean()
    loadings = vectors[:, -q:] * (values[-q:] - noise).clamp(min=0).sqrt()
    log_noise = (
        (problem.covariance.diagonal() - loadings.square().sum(1))
        .clamp(min=0.1 * float(noise))
        .log()
    )
    return problem, {"mean": problem.mean, "loadings": loadings, "log_noise": log_noise}


def factor_data(n, d, q, seed=0):
    noise = 0.3 + torch.rand(d, generator=generator(seed + 1), dtype=torch.float64)
    return (
        normal(n, q, seed=seed) @ normal(q, d, seed=seed + 2)
        + normal(n, d, seed=seed + 3) * noise.sqrt()
        + 1.0
    )


def test_gradient_and_fisher_information_are_those_of_the_model():
    problem, start = factor_model(factor_data(300, 6, 2), 2)
    start = {name: leaf + 0.1 * normal(*leaf.shape, seed=5) for name, leaf in start.items()}
    assert check_gradient(problem, start)
    assert check_fisher(problem, start)
    operator = problem.fisher(start)
    v = problem.manifold.random_tangent(start, generator=generator(1))
    _, sigma = problem.moments(start)
    t = 1e-5
    ahead, behind = (problem.moments({k: x + s * v[k] for k, x in start.items()}) for s in (t, -t))
    d_mean, d_sigma = ((a - b) / (2 * t) for a, b in zip(ahead, behind, strict=True))
    inverse = torch.linalg.inv(sigma)
    expected = d_mean @ inverse @ d_mean + (inverse @ d_sigma @ inverse @ d_sigma).trace() / 2
    assert float(operator.quadratic(v)) == pytest.approx(float(expected), rel=1e-8)
    torch.testing.assert_close(operator.dense(), problem.fisher(start, kind="dense").dense())


def test_an_unrestricted_covariance_is_that_of_the_sample():
    y = normal(100, 3) @ normal(3, 3, seed=1)
    space = Product({"mean": Euclidean(3), "covariance": SPD(3)})
    problem = GaussianModel(space, lambda t: (t["mean"], t["covariance"]), y)
    start = {
        "mean": torch.zeros(3, dtype=torch.float64),
        "covariance": torch.eye(3, dtype=torch.float64),
    }
    result = minimize(problem, start, stop=GradientNorm(1e-10))
    assert result.status == "converged"
    torch.testing.assert_close(result.x["mean"], y.mean(0))
    torch.testing.assert_close(result.x["covariance"], torch.cov(y.T, correction=0))


@pytest.mark.parametrize("kind", ["exact", "dense"])
def test_systems_are_solved_in_the_metric_of_the_manifold(kind):
    """On SPD(3) the affine-invariant metric makes of F half of the identity at every point."""
    problem = GaussianModel(
        SPD(3), lambda t: (torch.zeros(3, dtype=torch.float64), t), normal(100, 3)
    )
    x = SPD(3).random_point(generator=generator(1))
    operator, g = problem.fisher(x, kind=kind), problem.gradient(x)
    torch.testing.assert_close(operator.matvec(g), g / 2)
    for method in ("dense", "cg"):
        torch.testing.assert_close(operator.solve(g, 0.1, method=method), g / 0.6)
    solution = operator.solution(g, 0.1, method="dense")
    assert solution.decrease == pytest.approx(float(SPD(3).inner(x, g, g)) / 1.2)


def test_factor_analysis_has_the_likelihood_of_scikit_learn():
    decomposition = pytest.importorskip("sklearn.decomposition")
    y = factor_data(500, 8, 2)
    theirs = decomposition.FactorAnalysis(2, tol=1e-12, max_iter=20_000, svd_method="lapack").fit(
        y.numpy()
    )
    problem, start = factor_model(y, 2)
    result = minimize(problem, start, stop=GradientNorm(1e-8))
    assert result.status == "converged"
    ours, other = problem.log_likelihood(result.x) / 500, float(theirs.score(y.numpy()))
    assert ours >= other - 1e-8
    assert ours == pytest.approx(other, abs=1e-6)
    np.testing.assert_allclose(
        theirs.get_covariance(), problem.moments(result.x)[1].numpy(), atol=1e-3
    )


def test_probabilistic_principal_components_have_the_likelihood_of_scikit_learn():
    decomposition = pytest.importorskip("sklearn.decomposition")
    y = factor_data(400, 7, 2)
    space = Product(
        {
            "mean": Euclidean(7),
            "axes": Stiefel(7, 2),
            "log_scales": Euclidean(2),
            "log_noise": Euclidean(1),
        }
    )

    def moments(t):
        signal = (t["axes"] * t["log_scales"].exp()) @ t["axes"].mT
        return t["mean"], signal + t["log_noise"].exp() * torch.eye(7, dtype=torch.float64)

    problem = GaussianModel(space, moments, y)
    start = space.random_point(generator=generator(4))
    start = {**start, "mean": torch.zeros(7, dtype=torch.float64)}
    result = minimize(problem, start, stop=GradientNorm(1e-9))
    theirs = decomposition.PCA(2).fit(y.numpy())
    # scikit-learn divides by n - 1: its covariance is n/(n-1) times the maximum-likelihood one
    values = torch.linalg.eigvalsh(problem.covariance)
    noise = float(values[:5].mean())
    best = -0.5 * (
        float(values[5:].log().sum()) + 5 * math.log(noise) + 7 + 7 * math.log(2 * math.pi)
    )
    assert problem.log_likelihood(result.x) / 400 == pytest.approx(best, abs=1e-8)
    assert best == pytest.approx(float(theirs.score(y.numpy())), abs=1e-4)


def test_reduced_rank_regression_is_that_of_anderson():
    """B = A Cᵀ of rank 1 and any Σ: the canonical correlations, as closed form."""
    n, p, d = 300, 4, 3
    x, sigma = normal(n, p), 0.5 * torch.eye(d, dtype=torch.float64)
    y = (
        x @ normal(p, 1, seed=1) @ normal(1, d, seed=2)
        + normal(n, d, seed=3) @ torch.linalg.cholesky(sigma).T
    )
    space = Product({"left": Euclidean(p, 1), "right": Euclidean(d, 1), "covariance": SPD(d)})

    def model(x, t):
        return MultivariateGaussian.pack(x @ t["left"] @ t["right"].mT, t["covariance"])

    problem = NLLProblem(space, model, MultivariateGaussian(d), x, y)
    start = {"left": normal(p, 1, seed=5), "right": normal(d, 1, seed=6), "covariance": 2 * sigma}
    result = minimize(problem, start, stop=GradientNorm(1e-9), max_iter=200)
    ols = torch.linalg.lstsq(x, y).solution
    residual = (y - x @ ols).T @ (y - x @ ols) / n
    fitted = (x @ ols).T @ (x @ ols) / n
    lower = torch.linalg.cholesky(residual)
    half = torch.linalg.solve_triangular(lower, fitted, upper=False)
    gains = torch.linalg.eigvalsh(torch.linalg.solve_triangular(lower, half.T, upper=False))
    best = 0.5 * (float(torch.logdet(residual)) + float((1 + gains[:-1]).log().sum()) + d)
    assert result.value == pytest.approx(best, abs=1e-9)


def test_a_random_intercept_has_the_likelihood_of_statsmodels():
    """Groups of one size: V = σ² I + τ² 1 1ᵀ."""
    statsmodels = pytest.importorskip("statsmodels.regression.mixed_linear_model")
    groups, size = 60, 5
    x = normal(groups, size, 2)
    slopes = torch.tensor([1.0, -2.0], dtype=torch.float64)
    y = x @ slopes + normal(groups, 1, seed=1) + 0.7 * normal(groups, size, seed=2)
    fit = statsmodels.MixedLM(
        y.reshape(-1).numpy(), x.reshape(-1, 2).numpy(), groups=np.repeat(np.arange(groups), size)
    ).fit(reml=False, gtol=1e-10)
    result = minimize(*random_intercept(x, y), stop=GradientNorm(1e-9))
    constant = size * math.log(2 * math.pi) / 2
    assert -groups * (result.value + constant) == pytest.approx(fit.llf, abs=1e-6)
    errors = result.covariance().standard_errors(lambda t: t["slopes"])[1]
    np.testing.assert_allclose(errors.numpy(), fit.bse_fe, rtol=5e-3)


def random_intercept(x, y):
    size = x.shape[1]
    space = Product(
        {"slopes": Euclidean(2), "log_noise": Euclidean(1), "log_between": Euclidean(1)}
    )

    def model(x, t):
        eye, ones = (
            torch.eye(size, dtype=torch.float64),
            torch.ones(size, size, dtype=torch.float64),
        )
        covariance = t["log_noise"].exp() * eye + t["log_between"].exp() * ones
        return MultivariateGaussian.pack(x @ t["slopes"], covariance)

    start = {"slopes": torch.zeros(2), "log_noise": torch.zeros(1), "log_between": torch.zeros(1)}
    return NLLProblem(space, model, MultivariateGaussian(size), x, y), {
        k: v.double() for k, v in start.items()
    }


def test_a_random_intercept_is_found_where_the_truth_is():
    x = normal(400, 5, 2)
    y = (
        x @ torch.tensor([1.0, -2.0], dtype=torch.float64)
        + normal(400, 1, seed=1)
        + 0.7 * normal(400, 5, seed=2)
    )
    result = minimize(*random_intercept(x, y))
    assert result.status == "converged"
    assert result.covariance().contains(
        {
            "slopes": torch.tensor([1.0, -2.0]).double(),
            "log_noise": torch.tensor([2 * math.log(0.7)]).double(),
            "log_between": torch.zeros(1).double(),
        },
        level=0.999,
    )


def test_batches_and_other_data_are_refused():
    problem, start = factor_model(factor_data(50, 4, 1), 1)
    with pytest.raises(ValueError, match="leave out batch_size"):
        minimize(problem, start, batch_size=10)
    with pytest.raises(ValueError, match=r"y must be a tensor of shape \(observations, d\)"):
        GaussianModel(Euclidean(2), lambda t: (t, t), torch.zeros(3))
