"""Coverage of intervals where the model is wrong, by simulation: the sandwich with the Hessian as its bread.

Every interval is to hold the value that the estimate tends to, in 87 to 93 of 100 data sets.
"""

import math

import pytest
import torch

from fisherfold import Bernoulli, Gaussian, LossProblem, NLLProblem, minimize
from fisherfold.fisher import StudentT
from fisherfold.manifolds import Euclidean, Sphere
from fisherfold.problems import GaussianModel
from toy import generator, normal


def coverage(made, value, start, f, data_sets, **options):
    """How often a 90 % interval of every entry of f holds a value, over data sets."""
    hits = []
    for seed in range(data_sets):
        problem, extra = made(seed)
        found = minimize(problem, start, "trust-region").covariance(**options, **extra)
        low, high = found.interval(f, 0.9)
        hits.append(((low <= value) & (value <= high)).double())
    return float(torch.stack(hits).mean())


def student(seed, *, noise=1.0, samples=800):
    """A location model with heavy tails for data with none: the slopes are right, their spread is not."""
    x = normal(samples, 3, seed=seed)
    y = x.sum(1) + noise * normal(samples, seed=10_000 + seed)
    return NLLProblem(Euclidean(3), lambda x, t: x @ t, StudentT(3, scale=0.4), x, y), {}


def student_truth(seed, samples=800):
    x = normal(samples, 3, seed=seed)
    y = StudentT(3, scale=0.4).sample(x.sum(1), generator=generator(10_000 + seed))
    return NLLProblem(Euclidean(3), lambda x, t: x @ t, StudentT(3, scale=0.4), x, y), {}


def sphere(seed, *, scale=4.0, samples=800):
    """README's direction with a scale of 4, for data with another one."""
    truth = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    x = normal(samples, 3, seed=seed)
    y = torch.bernoulli(torch.sigmoid(scale * x @ truth), generator=generator(10_000 + seed))
    return NLLProblem(Sphere(3), lambda x, w: 4 * x @ w, Bernoulli(), x, y), {}


def angles(w):
    return torch.stack([torch.atan2(w[0], w[2]), torch.asin(w[1])])


def clustered(seed, *, clusters=100, size=5):
    """Rows of a cluster share a random intercept and their first covariate."""
    shared = normal(clusters, 1, seed=seed).expand(-1, size)
    x = torch.stack([shared, normal(clusters, size, seed=20_000 + seed)], -1).flatten(0, 1)
    effects = normal(clusters, 1, seed=30_000 + seed).expand(-1, size).reshape(-1)
    y = x.sum(1) + effects + normal(clusters * size, seed=10_000 + seed)
    problem = NLLProblem(Euclidean(2), lambda x, t: x @ t, Gaussian(), x, y)
    return problem, {"groups": torch.arange(clusters).repeat_interleave(size)}


ONES3 = torch.ones(3, dtype=torch.float64)
TRUE_ANGLES = torch.tensor([math.atan2(0.6, 0.8), 0.0], dtype=torch.float64)
START = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)


@pytest.mark.parametrize("made", [student, student_truth])
def test_a_student_likelihood_on_gaussian_and_on_its_own_data(made):
    assert 0.87 < coverage(made, ONES3, ONES3, lambda t: t, 160, robust=True) < 0.93


def test_the_model_alone_is_trusted_where_it_is_right():
    found = coverage(student_truth, ONES3, ONES3, lambda t: t, 160)
    assert 0.87 < found < 0.93
    assert coverage(student, ONES3, ONES3, lambda t: t, 50) < 0.6


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_direction_with_a_wrong_and_with_the_right_scale(scale):
    def made(seed):
        return sphere(seed, scale=scale)

    assert 0.87 < coverage(made, TRUE_ANGLES, START, angles, 200, robust=True) < 0.93
    if scale == 4.0:
        assert 0.87 < coverage(made, TRUE_ANGLES, START, angles, 200) < 0.93


def test_clustered_rows():
    start = torch.ones(2, dtype=torch.float64)
    assert 0.87 < coverage(clustered, start, start, lambda t: t, 200, robust=True) < 0.93

    def alone(seed):
        return clustered(seed)[0], {}

    # rows taken as independent: the slope of what a cluster shares
    assert coverage(alone, start[0], start, lambda t: t[0], 100, robust=True) < 0.8


def gaussian_losses(seed, samples=800):
    problem, _ = student(seed, samples=samples)
    x, y, likelihood = problem.inputs, problem.targets, problem.likelihood
    return LossProblem(Euclidean(3), lambda data, t: likelihood.nll(data[0] @ t, data[1]), (x, y))


def test_losses_and_likelihoods_have_the_same_sandwich():
    problem = student(1)[0]
    losses = gaussian_losses(1)
    groups = torch.arange(800) // 3
    for options in ({}, {"groups": groups}):
        found = [
            minimize(p, ONES3, "trust-region").covariance(lambda t: t, robust=True, **options)
            for p in (problem, losses)
        ]
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-12)


def test_the_sandwich_against_its_dense_formula():
    """H⁻¹ S H⁻¹/N on the sphere, with S over samples and over clusters, in the coordinates of a basis."""
    problem = sphere(3, scale=2.0)[0]
    result = minimize(problem, START)
    groups = torch.arange(800) // 4
    basis = problem.manifold.tangent_basis(result.x)
    hessian = problem.hessian(result.x)
    h = torch.stack([torch.stack([b @ hessian.matvec(c) for c in basis]) for b in basis])
    gradients = problem.per_sample_gradients(result.x) @ basis.mT
    sums = torch.zeros(200, 2, dtype=torch.float64).index_add_(0, groups, gradients)
    for rows, factor, options in (
        (gradients, 1.0, {}),
        (sums, 200 / 199, {"groups": [f"c{int(k)}" for k in groups]}),
    ):
        filling = factor * rows.mT @ rows / 800
        expected = torch.linalg.inv(h) @ filling @ torch.linalg.inv(h) / 800
        slopes = torch.stack([angles_slope(result.x, b) for b in basis])
        found = result.covariance(angles, robust=True, **options)
        torch.testing.assert_close(found, slopes.mT @ expected @ slopes, rtol=1e-6, atol=1e-12)


def angles_slope(x, v):
    return torch.autograd.functional.jvp(angles, x, v)[1]


def test_weights_are_counts_for_the_sandwich_and_for_clusters():
    x, y = normal(60, 3), normal(60, seed=1)
    counts = 1 + torch.arange(60) % 3
    whole = torch.repeat_interleave(torch.arange(60), counts)
    spaces = Euclidean(3), lambda x, t: x @ t, StudentT(3)
    weighted = NLLProblem(*spaces, x, y, weights=counts.double())
    repeated = NLLProblem(*spaces, x[whole], y[whole])
    zeros = torch.zeros(3, dtype=torch.float64)
    results = [minimize(problem, zeros, "trust-region") for problem in (weighted, repeated)]
    labels = [torch.arange(60) // 2, torch.arange(60)[whole] // 2]
    for options in ([{}, {}], [{"groups": labels[0]}, {"groups": labels[1]}]):
        found = [
            result.covariance(lambda t: t, robust=True, **given)
            for result, given in zip(results, options, strict=True)
        ]
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-12)


def test_a_gaussian_model_has_the_sandwich_of_its_observations():
    """Variances of heavy-tailed data: their spread follows the fourth moments, not the normal 2σ⁴/n."""
    y = StudentT(6).sample(torch.zeros(400, 2).double(), generator=generator(5))
    problem = GaussianModel(Euclidean(2), lambda t: (y.mean(0), torch.diag(t.exp())), y)
    result = minimize(problem, torch.zeros(2, dtype=torch.float64))
    centred = (y - y.mean(0)).square()
    variance = centred.mean(0)
    expected = torch.cov(centred.mT / variance[:, None], correction=0) / 400
    found = result.covariance(lambda t: t, robust=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"robust": True, "groups": [0, 1]}, r"groups must be a label for each of the 800 samples"),
        ({"robust": True, "groups": torch.zeros(800)}, "at least two clusters"),
        ({"groups": torch.arange(800)}, "add robust=True"),
        ({"robust": True, "information": "expected"}, "leave out information='expected'"),
        ({"information": "sandwich"}, "robust=True gives the sandwich"),
    ],
)
def test_what_does_not_fit_together_is_told(options, words):
    result = minimize(sphere(0)[0], START)
    with pytest.raises(ValueError, match=words):
        result.covariance(**options)


def test_a_plain_cost_has_no_sandwich_and_no_expected_information():
    result = minimize(LossProblem(Euclidean(2), lambda t: t.square().sum()), ONES3[:2], "rcg")
    with pytest.raises(ValueError, match="a plain cost has no samples"):
        result.covariance(robust=True)
    with pytest.raises(ValueError, match="LossProblem has no expected information"):
        result.covariance(information="expected")
