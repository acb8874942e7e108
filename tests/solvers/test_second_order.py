"""Trust regions and L-BFGS: rates, negative curvature, the oracle pymanopt, and messages."""

import math
from itertools import pairwise

import pytest
import torch

from fisherfold import Gaussian, LossProblem, NLLProblem, minimize
from fisherfold.manifolds import SPD, Euclidean, Grassmann, Rotations, Sphere
from fisherfold.solvers import GradientNorm
from fisherfold.subspace import SubspaceProblem, TaskStatistics
from toy import generator, normal

FLOAT = torch.float64


def rayleigh(n=30, p=3):
    a = normal(n, n)
    a = a + a.T
    return LossProblem(Grassmann(n, p), lambda u: -(u * (a @ u)).sum()), -float(
        torch.linalg.eigvalsh(a)[-p:].sum()
    )


@pytest.mark.parametrize("method", ["trust-region", "lbfgs"])
@pytest.mark.parametrize("dtype", [FLOAT, torch.float32])
def test_dominant_subspaces(method, dtype):
    problem, lowest = rayleigh()
    a = normal(30, 30).to(dtype)
    problem = LossProblem(Grassmann(30, 3), lambda u: -(u * ((a + a.T) @ u)).sum())
    start = Grassmann(30, 3).random_point(generator=torch.Generator().manual_seed(1), dtype=dtype)
    result = minimize(problem, start, method, max_iter=300)
    assert result.success
    assert result.value == pytest.approx(lowest, rel=1e-12 if dtype == FLOAT else 1e-5)


def test_the_observed_information_of_a_problem_is_its_hessian():
    x, tasks = normal(200, 6), torch.arange(10).repeat_interleave(20)
    y = normal(200, seed=1) + (x[:, :2] * normal(10, 2, seed=2)[tasks]).sum(1)
    problem = SubspaceProblem(TaskStatistics.from_rows(x, y, tasks), rank=2, ridge=0.1)
    start = Grassmann(6, 2).random_point(generator=torch.Generator().manual_seed(1))
    result = minimize(problem, start, "trust-region", stop=GradientNorm(1e-11))
    assert result.success
    assert result.iterations < 20


def test_trust_regions_converge_quadratically():
    problem, _ = rayleigh()
    start = Grassmann(30, 3).random_point(generator=torch.Generator().manual_seed(1))
    result = minimize(problem, start, "trust-region", stop=GradientNorm(1e-11))
    norms = [norm for norm in result.trace["gradient_norm"] if norm < 0.3]
    assert result.success
    assert all(after <= 10 * before**1.8 for before, after in pairwise(norms) if after > 1e-11)
    assert result.trace["products"][-1] > 0


def test_trust_regions_leave_saddles_by_negative_curvature():
    # from next to a maximum and a saddle of the Rayleigh quotient
    a = torch.diag(torch.tensor([3.0, 2.0, 1.0, -1.0], dtype=FLOAT))
    problem = LossProblem(Sphere(4), lambda w: w @ a @ w)
    for axis in range(3):
        start = torch.eye(4, dtype=FLOAT)[axis] + 1e-5 * normal(4)
        result = minimize(problem, start / start.norm(), "trust-region")
        assert result.success
        assert result.value == pytest.approx(-1, abs=1e-14)


def test_the_empirical_fisher_information_can_be_the_model():
    x, truth = normal(200, 5), Sphere(5).random_point(generator=torch.Generator().manual_seed(1))
    y = torch.tanh(x @ truth) + 0.3 * normal(200, seed=2)
    problem = LossProblem(
        Sphere(5), lambda d, w: (torch.tanh(d[0] @ w) - d[1]).square() / 2, (x, y)
    )
    start = Sphere(5).random_point(generator=torch.Generator().manual_seed(3))
    runs = {
        model: minimize(problem, start, "trust-region", model=model)
        for model in ("hessian", "empirical")
    }
    assert all(run.success for run in runs.values())
    assert runs["hessian"].value == pytest.approx(runs["empirical"].value, rel=1e-10)


@pytest.mark.parametrize("method", ["trust-region", "lbfgs", "rcg"])
def test_means_of_covariances_and_of_rotations(method):
    spd, rotations = SPD(4), Rotations(3)
    points = spd.random_point(10, generator=torch.Generator().manual_seed(0))
    mean = LossProblem(spd, lambda y, w: spd.dist(w.expand_as(y), y).square() / 2, points)
    result = minimize(mean, points[0] + 0.1 * torch.eye(4, dtype=FLOAT), method)
    assert result.success
    # where the logarithms of all points add up to zero
    total = spd.log(result.x.expand_as(points), points).mean(0)
    assert float(spd.norm(result.x, spd.project(result.x, total))) < 1e-7
    centre = rotations.random_point(generator=torch.Generator().manual_seed(1))
    turns = rotations.exp(
        centre.expand(50, 3, 3), 0.4 * rotations.project(centre, normal(50, 3, 3))
    )
    chordal = LossProblem(rotations, lambda y, w: (y - w).square().sum((1, 2)) / 2, turns)
    result = minimize(chordal, turns[0].clone(), method)
    left, _, right = torch.linalg.svd(turns.mean(0))
    torch.testing.assert_close(result.x, left @ right, atol=1e-7, rtol=0)


@pytest.mark.parametrize("manifold", [Sphere(5), Rotations(3), SPD(3)], ids=repr)
def test_pymanopt_finds_the_same_minimum(manifold):
    pymanopt = pytest.importorskip("pymanopt")
    theirs = {
        "Sphere": lambda: pymanopt.manifolds.Sphere(5),
        "Rotations": lambda: pymanopt.manifolds.SpecialOrthogonalGroup(3),
        "SPD": lambda: pymanopt.manifolds.SymmetricPositiveDefinite(3),
    }[type(manifold).__name__]()
    weights = normal(manifold.point_shape[-1], manifold.point_shape[-1]) + 3 * torch.eye(
        manifold.point_shape[-1]
    )

    def cost(x):
        image = weights @ x
        if isinstance(manifold, SPD):
            return torch.einsum("ij,ji", weights @ weights.T, torch.linalg.inv(x)) + torch.logdet(x)
        return image.square().sum() - image.reshape(-1)[0]

    start = manifold.random_point(generator=torch.Generator().manual_seed(1))
    lowest = [
        minimize(LossProblem(manifold, cost), start, method).value
        for method in ("trust-region", "lbfgs")
    ]
    problem = pymanopt.Problem(theirs, pymanopt.function.pytorch(theirs)(cost))
    found = pymanopt.optimizers.TrustRegions(verbosity=0).run(problem, initial_point=start.numpy())
    assert lowest == pytest.approx([float(found.cost)] * 2, rel=1e-12)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("trust-region", {"radius": -1}, "radius must be a number > 0, got -1"),
        (
            "trust-region",
            {"model": "exact"},
            r"fisher must be one of \['empirical', 'observed'\], got 'exact'",
        ),
        ("trust-region", {"max_products": 0}, "max_products must be at least 1, got 0"),
        ("lbfgs", {"memory": 0}, "memory must be at least 1, got 0"),
    ],
)
def test_options_are_checked(method, options, message):
    with pytest.raises(ValueError, match=message):
        minimize(
            LossProblem(Sphere(3), lambda w: w[0]), torch.eye(3, dtype=FLOAT)[1], method, **options
        )


@pytest.mark.parametrize("method", ["trust-region", "lbfgs"])
def test_losses_that_are_not_finite_ahead_are_survived_or_named(method):
    # the logarithm ends at 0: steps beyond it are NaN, and the minimum is at 1/2
    barrier = LossProblem(Euclidean(), lambda w: w - 0.5 * torch.log(w))
    result = minimize(barrier, torch.tensor(40.0, dtype=FLOAT), method)
    assert result.success
    assert float(result.x) == pytest.approx(0.5)
    wall = LossProblem(Euclidean(), lambda w: torch.where(w >= 3, w, math.nan * w))
    result = minimize(wall, torch.tensor(3.0, dtype=FLOAT), method)
    assert result.status in {"stalled", "non_finite"}
    assert float(result.x) == 3.0


@pytest.mark.parametrize("seed", range(4))
def test_truncated_conjugate_gradients_solve_the_subproblem(seed):
    """argmin <g, d> + ½ <d, H d> over ‖d‖ ≤ Δ: the Newton step inside, the boundary where it is longer.

    The lengths that the recursions carry along are those of the steps, so that no step leaves Δ.
    """
    g = generator(seed)
    rows = torch.randn(9, 6, generator=g, dtype=torch.float64)
    a = rows.T @ rows / 9 + 0.05 * torch.eye(6, dtype=torch.float64)
    problem = LossProblem(Euclidean(6), lambda t: t @ a @ t / 2)
    x0 = torch.randn(6, generator=g, dtype=torch.float64)
    newton = minimize(
        problem, x0, "trust-region", radius=1e6, max_iter=1, max_products=50, stop=GradientNorm(0.0)
    )
    # ‖r‖ ≤ κ ‖g‖ with κ = 0.1 in the first step: so far from the minimum, at most
    assert float((a @ newton.last).norm()) <= 0.1 * float((a @ x0).norm())
    assert newton.trace["cg_iterations"][1] <= 6
    for radius in (0.05, 0.2, 0.5):
        step = minimize(problem, x0, "trust-region", radius=radius, max_iter=1).last - x0
        assert float(step.norm()) <= radius * (1 + 1e-12)
        if float((newton.last - x0).norm()) > radius:
            assert float(step.norm()) == pytest.approx(radius, rel=1e-12)
        # at least as good as the best step along the gradient (Cauchy)
        gradient = a @ x0
        size = float(gradient.norm())
        length = min(radius / size, size**2 / float(gradient @ a @ gradient))
        cauchy = -length * gradient
        model = [float(gradient @ d + d @ a @ d / 2) for d in (step, cauchy)]
        assert model[0] <= model[1] * (1 - 1e-12) or model[0] == pytest.approx(model[1])


def test_auto_takes_what_the_problem_knows():
    x, y = torch.randn(30, 3, generator=generator(), dtype=torch.float64), torch.ones(30).double()
    likelihood = NLLProblem(Euclidean(3), lambda x, t: x @ t, Gaussian(), x, y)
    losses = LossProblem(Euclidean(3), lambda x, t: (x @ t - 1).square(), x)
    cost = LossProblem(Euclidean(3), lambda t: (t - 1).square().sum())
    zeros = torch.zeros(3, dtype=torch.float64)
    assert "sigma" in minimize(likelihood, zeros).trace.columns
    for problem in (losses, cost):
        assert "radius" in minimize(problem, zeros).trace.columns
        assert minimize(problem, zeros).success
    assert "sigma" in minimize(losses, zeros, batch_size=10, max_iter=2).trace.columns
