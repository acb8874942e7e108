"""Algorithm 1 against a plain re-implementation, its rules one by one, and its fixed-step form."""

import math
import warnings
from itertools import pairwise

import pytest
import torch

from fisherfold import Bernoulli, Categorical, Gaussian, NLLProblem, Poisson, minimize
from fisherfold.fisher.solve import tangent_basis
from fisherfold.manifolds import Euclidean, Grassmann, Product, Sphere, Stiefel
from fisherfold.manifolds.base import flatten, scale, unflatten
from fisherfold.solvers import GradientNorm, LossBelow
from toy import generator, slow


def algorithm_1(
    problem,
    x,
    *,
    iterations,
    sigma,
    sigma_min,
    eta1,
    eta2,
    gamma,
    eta3=0.0,
    batches=None,
    tests=None,
):
    """The paper's Algorithm 1 with a dense solve in a tangent basis, η₃ as in trust regions; on batches γ fades."""
    path, moves = [], []
    for k in range(iterations):
        batch = None if batches is None else batches[k]
        loss, g = problem.loss(x, batch), problem.gradient(x, batch)
        norm = flatten(g).norm()
        damping = sigma * norm
        basis = tangent_basis(problem.manifold, x)
        matrix = basis.T @ problem.fisher(x, batch).dense() @ basis
        damped = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype)
        d = -basis @ torch.linalg.solve(damped, basis.T @ flatten(g))
        trial = problem.manifold.retract(x, problem.manifold.project(x, unflatten(d, x)))
        model = loss + flatten(g) @ d + 0.5 * d @ (basis @ (damped @ (basis.T @ d)))
        test = batch if tests is None else tests[k]
        rho = float((problem.loss(trial, test) - problem.loss(x, test)) / (model - loss))
        accepted = rho >= eta1 and float(norm) >= eta2 / sigma
        if accepted:
            x = trial
        rises = not accepted or rho < eta3 / 3
        moves.append(rises)
        turns = 0 if batches is None else sum(a != b for a, b in pairwise(moves))
        factor = gamma ** (1 / (1 + turns / 10))
        if rises:
            sigma = factor * sigma
        elif rho >= eta3:
            sigma = max(sigma_min, sigma / factor)
        path.append((rho, sigma, accepted, x))
    return path


def test_an_accepted_step_lowers_keeps_or_raises_sigma():
    """The model must be good for σ to fall; the paper's rule lowers it after every step."""
    g = generator(3)
    x = torch.randn(200, 12, generator=g, dtype=torch.float64)
    y = torch.sin(2 * x[:, :1]) + torch.randn(200, 1, generator=g, dtype=torch.float64)
    out = torch.randn(3, 1, generator=g, dtype=torch.float64)
    problem = NLLProblem(Stiefel(12, 3), lambda x, u: torch.tanh(x @ u) @ out, Gaussian(), x, y)
    start = problem.manifold.random_point(generator=g)
    factors = {True: set(), False: set()}
    lengths = {}
    for paper in (True, False):
        rule = {"eta3": 0.0} if paper else {}
        result = minimize(problem, start, "rngd", max_iter=400, stop=GradientNorm(1e-6), **rule)
        assert result.status == "converged"
        lengths[paper] = len(result.trace.rows)
        for before, row in pairwise(result.trace.rows[1:]):
            if row["accepted"] and row["sigma"] > 1e-5:
                factors[paper].add(row["sigma"] / before["sigma"])
                expected = (
                    0.25 if paper or row["rho"] >= 0.75 else 4.0 if row["rho"] < 0.25 else 1.0
                )
                assert row["sigma"] == pytest.approx(expected * before["sigma"])
    assert factors == {True: {0.25}, False: {0.25, 1.0, 4.0}}
    assert lengths[False] < lengths[True]


def hard_problem(manifold, seed=0, samples=30):
    """Outputs that saturate, so that undamped steps go too far and some are rejected."""
    g = generator(seed)
    truth = manifold.random_point(generator=g)

    def entries(t):
        return flatten(t @ t.mT if isinstance(manifold, Grassmann) else t)

    size = entries(truth).numel()
    x = 3 * torch.randn(samples, size, generator=g, dtype=torch.float64)

    def model(x, t):
        return torch.tanh(x @ entries(t)[:, None])

    y = model(x, truth) + 0.7 * torch.randn(samples, 1, generator=g, dtype=torch.float64)
    return NLLProblem(manifold, model, Gaussian(0.5), x, y), manifold.random_point(generator=g)


@pytest.mark.parametrize(
    "manifold",
    [
        Euclidean(3),
        Sphere(4),
        Stiefel(4, 2),
        Grassmann(4, 2),
        Product({"a": Sphere(3), "b": Euclidean(2)}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("eta1", "eta3"), [(0.98, 0.0), (0.1, 0.99)])
def test_the_path_is_that_of_algorithm_1(manifold, eta1, eta3):
    rules = {
        "sigma": 1e-3,
        "sigma_min": 1e-3,
        "eta1": eta1,
        "eta2": 1e-20,
        "eta3": eta3,
        "gamma": 3.0,
    }
    seen = set()
    for seed in range(4):
        problem, x0 = hard_problem(manifold, seed)
        expected = algorithm_1(problem, x0, iterations=10, **rules)
        result = minimize(problem, x0, "rngd", max_iter=10, stop=GradientNorm(0.0), **rules)
        # near the minimum both falls are rounding, and the solver says 1 where the plain ratio is noise
        count = next((k for k, norm in enumerate(result.trace["gradient_norm"]) if norm < 1e-4), 10)
        for row, (rho, sigma, accepted, _) in zip(
            result.trace.rows[1 : count + 1], expected, strict=False
        ):
            assert row["rho"] == pytest.approx(rho, rel=1e-4, abs=1e-6)
            assert row["sigma"] == pytest.approx(sigma, rel=1e-12)
            assert bool(row["accepted"]) is accepted
            seen.add(rho >= (eta3 or eta1))
        if count == 10:
            assert float((flatten(result.last) - flatten(expected[-1][3])).norm()) < 1e-6
    assert seen == {True, False}, "the problems must show steps after which σ falls and others"


@pytest.mark.parametrize("test_batch", ["same", None, 9])
def test_the_stochastic_path_is_that_of_algorithm_1(test_batch):
    """The batch of ρ is drawn after that of g and F, and is another one unless the user wants the same."""
    problem, x0 = hard_problem(Sphere(4))
    rules = {"sigma": 0.05, "sigma_min": 1e-3, "eta1": 0.3, "eta2": 1e-20, "gamma": 3.0}
    g = generator(5)
    batches, tests = [], None if test_batch == "same" else []
    for _ in range(8):
        batches.append(torch.randperm(30, generator=g)[:12])
        if tests is not None:
            tests.append(torch.randperm(30, generator=g)[: test_batch or 12])
    expected = algorithm_1(problem, x0, iterations=8, batches=batches, tests=tests, **rules)
    result = minimize(
        problem,
        x0,
        "rngd",
        batch_size=12,
        test_batch=test_batch,
        max_iter=8,
        seed=5,
        stop=GradientNorm(0.0),
        **rules,
    )
    assert [bool(a) for a in result.trace["accepted"][1:]] == [step[2] for step in expected]
    assert result.trace["rho"][1:] == pytest.approx(
        [step[0] for step in expected], rel=1e-4, abs=1e-6
    )
    assert result.trace["sigma"][1:] == pytest.approx([step[1] for step in expected])
    assert float((result.last - expected[-1][3]).norm()) < 1e-8
    # batches give estimates of the gradient; the loss over all samples is evaluated beside them
    assert result.trace["loss"][-1] == pytest.approx(float(problem.loss(result.last)))
    assert result.trace["samples"][-1] == 8 * 12


def test_quadratic_convergence_on_a_zero_residual_problem():
    g = generator(1)
    manifold = Sphere(5)
    truth, x = (
        manifold.random_point(generator=g),
        torch.randn(60, 5, generator=g, dtype=torch.float64),
    )
    problem = NLLProblem(
        manifold, lambda x, w: torch.tanh(x @ w), Gaussian(), x, torch.tanh(x @ truth)
    )
    start = manifold.retract(truth, 0.3 * manifold.random_tangent(truth, generator=g))
    result = minimize(problem, start, max_iter=30, stop=LossBelow(1e-28))
    norms = [n for n in result.trace["gradient_norm"] if n > 1e-14]
    assert float(manifold.dist(result.x, truth)) < 1e-12
    tail = [
        math.log(b) / math.log(a) for a, b in zip(norms[-4:], norms[-3:], strict=False) if a < 1e-2
    ]
    assert tail
    assert min(tail) > 1.6


def test_eta2_ends_the_movement():
    """Steps are accepted only while ‖g‖ ≥ η₂/σ: with a huge η₂ nothing ever moves and the run says so."""
    problem, x0 = hard_problem(Sphere(4))
    result = minimize(problem, x0, "rngd", eta2=1e30, sigma=1.0, max_rejections=5, max_iter=50)
    assert result.status == "stalled"
    assert "5 tries in a row" in result.message
    assert torch.equal(result.last, x0)
    assert result.trace["sigma"][1:] == [4.0**k for k in range(1, 6)]
    # an η₂ in between lets the method walk first
    result = minimize(
        problem,
        x0,
        "rngd",
        eta2=1e-3,
        sigma=0.1,
        max_rejections=3,
        max_iter=200,
        stop=GradientNorm(0.0),
    )
    assert result.status in {"stalled", "max_iter"}
    norms, sigmas = result.trace["gradient_norm"], [0.1, *result.trace["sigma"][1:]]
    for k, accepted in enumerate(result.trace["accepted"][1:]):
        if accepted:
            assert norms[k] >= 1e-3 / sigmas[k]


def test_sigma_never_falls_below_its_minimum(tasks):
    task = tasks["quadratic"]()
    result = minimize(task.problem, task.x0, sigma=1e-3, sigma_min=5e-4, stop=GradientNorm(1e-12))
    assert set(result.trace["sigma"][1:]) == {5e-4}


def test_a_first_order_retraction_warns_and_names_itself():
    manifold = Stiefel(4, 2, retraction="qr")
    problem, x0 = hard_problem(manifold)
    with pytest.warns(
        UserWarning, match=r"retraction 'qr' of Stiefel\(4, 2, retraction='qr'\) is of first order"
    ) as seen:
        minimize(problem, x0, "rngd", max_iter=1)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        minimize(problem, x0, "rgd", max_iter=1)


def test_the_fixed_step_form_with_step_one_is_newton_on_a_quadratic(tasks):
    task = tasks["quadratic"]()
    result = minimize(task.problem, task.x0, "rngd", step=1.0, max_iter=1)
    x, y = task.problem.inputs, task.problem.targets
    expected = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    assert float((result.last - expected).norm()) < 1e-12 * float(expected.norm())
    assert result.trace["rho"][-1] == pytest.approx(1)


@pytest.mark.parametrize("solver", ["auto", "dense", "cg", "pinv"])
def test_the_fixed_step_form_takes_every_step_of_its_formula(solver):
    problem, x0 = hard_problem(Sphere(4))
    result = minimize(
        problem,
        x0,
        "rngd",
        step=lambda k: 0.5 / (k + 1),
        damping=0.3 if solver != "pinv" else 0.0,
        solve=solver,
        forcing=1e-12,
        max_iter=4,
        stop=GradientNorm(0.0),
    )
    x = x0
    for k in range(4):
        operator, g = problem.fisher(x), problem.gradient(x)
        d = (
            operator.solve(g, 0.3, method="dense")
            if solver != "pinv"
            else operator.solve(g, method="pinv")
        )
        x = problem.manifold.retract(x, scale(-0.5 / (k + 1), problem.manifold.project(x, d)))
    assert float((result.last - x).norm()) < 1e-9
    assert result.trace["accepted"][1:] == [1.0] * 4


def test_the_fixed_step_form_shortens_by_gamma_where_a_step_leaves_the_finite_numbers():
    x = torch.ones(8, 1, dtype=torch.float64)
    problem = NLLProblem(
        Euclidean(1), lambda x, w: x @ w, Poisson(), x, torch.full((8,), 2.0, dtype=torch.float64)
    )
    taken = {}
    for gamma in (2.0, 16.0):
        result = minimize(
            problem, torch.zeros(1, dtype=torch.float64), "rngd", step=1e5, gamma=gamma, max_iter=40
        )
        first = result.trace["accepted"].index(1.0, 1)
        # from 0, where the Fisher information is 1 and the gradient -1, a step t leads to t
        taken[gamma] = first, float(result.trace["loss"][first])
    assert taken[2.0][0] == 1 + math.ceil(math.log2(1e5 / 710))
    assert taken[16.0][0] == 1 + math.ceil(math.log(1e5 / 710, 16))
    for gamma, (first, loss) in taken.items():
        step = 1e5 / gamma ** (first - 1)
        assert loss == pytest.approx(math.exp(step) - 2 * step, rel=1e-6)


def test_the_ratio_of_the_fixed_step_form_belongs_to_the_step_that_was_taken(tasks):
    """On a quadratic the model is exact, so ρ = 1 for every t."""
    task = tasks["quadratic"]()
    for solver in ("dense", "cg"):
        result = minimize(
            task.problem,
            task.x0,
            "rngd",
            step=0.5,
            solve=solver,
            max_iter=3,
            stop=GradientNorm(0.0),
        )
        assert result.trace["rho"][1:] == pytest.approx([1.0] * 3, rel=1e-6)


@pytest.mark.parametrize("size", [30, *slow(100, 400)])
def test_on_a_second_batch_sigma_settles_and_leaves_a_fifth_of_the_excess_loss(size):
    """Logistic regression: on its own batch every step looks good, and σ falls to its minimum; else it settles."""
    found = {}
    g = generator(11)
    manifold = Sphere(20)
    truth, x = (
        manifold.random_point(generator=g),
        torch.randn(2000, 20, generator=g, dtype=torch.float64),
    )
    y = torch.bernoulli(torch.sigmoid(3 * x @ truth), generator=g)
    problem = NLLProblem(manifold, lambda x, w: 3 * x @ w, Bernoulli(), x, y)
    x0 = manifold.random_point(generator=g)
    best = minimize(problem, x0).value
    for test_batch in ("same", None):
        runs = [
            minimize(problem, x0, batch_size=size, test_batch=test_batch, max_iter=100, seed=s)
            for s in range(2)
        ]
        accepted = [sum(run.trace["accepted"][1:]) / 100 for run in runs]
        losses = [run.trace["loss"][-1] - best for run in runs]
        found[test_batch] = (
            losses,
            accepted,
            [run.trace["sigma"][-1] / run.trace["sigma"][1] for run in runs],
        )
    assert min(found["same"][1]) > 0.9
    assert max(found["same"][2]) < 0.01
    late = [run.trace["sigma"][50:] for run in runs]
    assert max(max(sigma) / min(sigma) for sigma in late) < 500
    assert max(found[None][1]) < 0.6
    assert min(found[None][2]) > 10
    assert max(found[None][0]) < min(found["same"][0]) / 5


def test_a_rejected_step_does_not_rebuild_the_fisher_information():
    problem, x0 = hard_problem(Sphere(4))
    built, original = [], problem.fisher
    problem.fisher = lambda *args, **options: built.append(1) or original(*args, **options)
    result = minimize(problem, x0, eta1=0.98, max_iter=10, stop=GradientNorm(0.0))
    accepted = sum(result.trace["accepted"][1:])
    assert accepted < 10
    assert len(built) == accepted + (result.trace["accepted"][-1] == 0)


def test_gradient_and_fisher_information_share_one_evaluation_of_the_model():
    problem, x0 = hard_problem(Sphere(4))
    calls, original = [], problem.model
    problem.model = lambda x, t: calls.append(len(x)) or original(x, t)
    minimize(problem, x0, max_iter=5, solve="cg", stop=GradientNorm(0.0))
    assert calls.count(30) == 6


def test_the_fixed_step_form_has_no_sigma():
    problem, x0 = hard_problem(Sphere(4))
    result = minimize(
        problem, x0, step=0.5, damping=0.1, solve="dense", max_iter=3, stop=GradientNorm(0.0)
    )
    assert all(math.isnan(sigma) for sigma in result.trace["sigma"])
    assert result.trace["products"][-1] == 3 * 30


def test_a_problem_that_states_the_rounding_of_its_loss_ends_at_the_accuracy_of_its_gradients():
    """½‖y - Xw‖² as ½(‖y‖² - ...): exact fits have a loss of eps ‖y‖², of either sign."""

    class Cancelling(NLLProblem):
        def loss_and_gradient(self, x, batch=None):
            found, gradient = super().loss_and_gradient(x, batch)
            size = self.targets.square().mean()
            return (found + size) - size, gradient

        def loss_rounding(self, x, loss):
            return super().loss_rounding(x, abs(loss) + float(self.targets.square().mean()))

    g = generator(4)
    x = torch.randn(60, 5, generator=g, dtype=torch.float64)
    truth = Sphere(5).random_point(generator=g)
    y = torch.tanh(x @ truth)
    problem = Cancelling(Sphere(5), lambda x, w: torch.tanh(x @ w), Gaussian(), x, y)
    start = Sphere(5).retract(truth, 0.3 * Sphere(5).random_tangent(truth, generator=g))
    result = minimize(problem, start, max_iter=100, stop=GradientNorm(0.0))
    assert result.status == "converged"
    assert "is its rounding error" in result.message
    assert result.iterations < 12
    assert result.trace["gradient_norm"][-1] < 1e-14


@pytest.mark.parametrize(
    ("samples", "words"), [(None, "falls: raise max_iter"), (40, "the noise of the batches")]
)
def test_a_run_that_uses_up_its_iterations_says_what_to_try(samples, words):
    g = generator(2)
    x = torch.randn(400, 4, generator=g, dtype=torch.float64)
    y = torch.bernoulli(torch.sigmoid(3 * x @ Sphere(4).random_point(generator=g)), generator=g)
    problem = NLLProblem(Sphere(4), lambda x, w: 3 * x @ w, Bernoulli(), x, y)
    x0 = Sphere(4).random_point(generator=g)
    result = minimize(problem, x0, batch_size=samples, max_iter=60 if samples else 3)
    assert result.status == "max_iter"
    assert words in result.message


@pytest.mark.parametrize("kind", [kind for kind in NLLProblem.fisher_kinds if kind != "layers"])
def test_every_kind_of_fisher_information_descends(kind, tasks):
    task = tasks["grassmann"]()
    result = minimize(task.problem, task.x0, fisher=kind, max_iter=40)
    assert result.value < task.minimum + 0.02 * (float(task.problem.loss(task.x0)) - task.minimum)


@pytest.mark.parametrize("solver", ["woodbury", "dense", "cg"])
def test_every_solve_gives_the_same_run(solver):
    problem, x0 = hard_problem(Sphere(4))
    reference = minimize(problem, x0, max_iter=6, stop=GradientNorm(0.0))
    other = minimize(problem, x0, max_iter=6, stop=GradientNorm(0.0), solve=solver, forcing=1e-12)
    assert float((other.last - reference.last).norm()) < 1e-7


def test_the_forcing_term_bounds_the_residual_and_work_is_counted():
    problem, x0 = hard_problem(Grassmann(6, 2), samples=50)
    result = minimize(
        problem, x0, max_iter=8, solve="cg", forcing=0.2, sigma=1e-3, stop=GradientNorm(0.0)
    )
    norms = result.trace["gradient_norm"]
    last = norms[0]
    for norm, row in zip(norms, result.trace.rows[1:], strict=False):
        assert row["residual"] <= min(0.2, 0.9 * min(1, norm / last) ** 1.618)
        last = norm
    products = [row["cg_iterations"] for row in result.trace.rows[1:]]
    assert result.trace["products"][-1] == 50 * sum(products) > 0
    dense = minimize(problem, x0, max_iter=2, solve="dense", sigma=1e-3, stop=GradientNorm(0.0))
    assert dense.trace["products"][-1] == 2 * 50


def test_the_first_damping_is_a_hundredth_of_the_curvature_in_any_units():
    for units in (1e-60, 1.0, 1e60):
        problem, x0 = hard_problem(Sphere(4))
        problem.likelihood = Gaussian(units)
        g = problem.gradient(x0)
        curvature = float(problem.fisher(x0).quadratic(g)) / float(g.norm()) ** 2
        result = minimize(problem, x0, max_iter=1, stop=GradientNorm(0.0))
        assert result.trace["damping"][1] == pytest.approx(1e-2 * curvature)


@pytest.mark.parametrize("solve", ["dense", "cg"])
@pytest.mark.parametrize(
    ("of_x", "of_y"), [(1.0, 1e10), (1e-10, 1.0), (1.0, 1e-10), (1e-12, 1e-12), (1e10, 1.0)]
)
def test_convergence_does_not_depend_on_the_units_of_the_data(of_x, of_y, solve):
    """Least squares from 0: with other units of x and y, gradients and curvature range over twenty powers of ten."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=g, dtype=torch.float64)
    y = x.sum(1) + 0.1 * torch.randn(200, generator=g, dtype=torch.float64)
    best = float((y - x @ torch.linalg.lstsq(x, y[:, None]).solution[:, 0]).square().mean()) / 2
    problem = NLLProblem(Euclidean(5), lambda x, w: x @ w, Gaussian(), of_x * x, of_y * y)
    start = torch.zeros(5, dtype=torch.float64)
    result = minimize(problem, start, max_iter=8, stop=GradientNorm(0.0), solve=solve)
    assert result.value / of_y**2 == pytest.approx(best, rel=1e-9)
    assert min(result.trace["accepted"][1:]) == 1


class Fence:
    """A least-squares model that answers ``beyond`` outside a ball, and counts how often it was asked there."""

    def __init__(self, beyond, radius=1.0):
        self.beyond, self.radius = beyond, radius

    def __call__(self, x, t):
        return torch.where(t.norm() > self.radius, self.beyond, 1.0) * (x @ t)


@pytest.mark.parametrize("beyond", [math.nan, math.inf])
def test_trial_points_that_are_not_finite_raise_sigma_until_a_step_fits(beyond):
    """The minimum lies outside the fence: steps over it are refused, and the run ends near it with its best point."""
    x = torch.eye(3, dtype=torch.float64)
    problem = NLLProblem(
        Euclidean(3), Fence(beyond), Gaussian(), x, torch.full((3,), 2.0, dtype=torch.float64)
    )
    x0 = torch.zeros(3, dtype=torch.float64)
    result = minimize(problem, x0, max_iter=300, sigma=1e-3, max_rejections=15)
    refused = [row for row in result.trace.rows[1:] if math.isnan(row["rho"])]
    assert refused
    assert all(row["accepted"] == 0 for row in refused)
    assert result.trace["sigma"][1] == pytest.approx(4e-3)
    assert math.isfinite(result.value)
    assert result.value < float(problem.loss(x0))
    assert float(result.x.norm()) <= 1
    assert result.status in {"non_finite", "max_iter", "stalled"}


def test_nothing_but_non_finite_ahead_ends_with_a_status_and_the_start():
    def model(x, t):
        return torch.where((t != 0).any(), torch.nan, 1.0) * (x @ t)

    x = torch.eye(3, dtype=torch.float64)
    problem = NLLProblem(Euclidean(3), model, Gaussian(), x, torch.ones(3, dtype=torch.float64))
    x0 = torch.zeros(3, dtype=torch.float64)
    for extra in ({}, {"step": 1.0}, {"batch_size": 2}):
        result = minimize(problem, x0, max_rejections=7, max_iter=100, **extra)
        assert result.status == "non_finite"
        assert "not finite (7 tries in a row)" in result.message
        assert torch.equal(result.x, x0)
        assert result.iterations == 7


def test_a_gradient_that_is_nan_ends_with_a_status(method, options):
    """√ has the value 0 and the derivative ∞ at 0: finite loss, no gradient."""
    x = torch.ones(40, 1, dtype=torch.float64)
    problem = NLLProblem(
        Euclidean(2), lambda x, t: x * (t.square().sum() * 0).sqrt() + t.sum(), Gaussian(), x, 0 * x
    )
    x0 = torch.ones(2, dtype=torch.float64)
    result = minimize(problem, x0, method, max_iter=100, **options[method])
    assert result.status == "non_finite"
    assert torch.equal(result.x, x0)
    assert math.isfinite(result.value)


def test_a_start_that_is_not_finite_is_said(method, options):
    x = torch.ones(40, 1, dtype=torch.float64)
    problem = NLLProblem(Euclidean(2), lambda x, t: x * t.sum() / 0.0, Gaussian(), x, 0 * x)
    result = minimize(problem, torch.ones(2, dtype=torch.float64), method, **options[method])
    assert (result.status, result.iterations) == ("non_finite", 0)
    assert "the loss at the starting point is" in result.message


@pytest.mark.parametrize("solver", ["auto", "cg", "dense", "woodbury"])
def test_a_fisher_matrix_that_overflows_is_no_crash(solver):
    """Outputs of 1e25 are finite in float32, their squares are not."""
    x = torch.full((3, 4), 1e25)
    model = lambda x, t: x @ (t - 1) * 1e-3  # noqa: E731
    problem = NLLProblem(Euclidean(4), model, Gaussian(1e30), x, torch.zeros(3))

    class Overflowing(NLLProblem):
        def fisher(self, x, batch=None, *, kind="exact"):
            operator = super().fisher(x, batch, kind=kind)
            operator.likelihood = Gaussian(1e-30)
            return operator

    problem.__class__ = Overflowing
    result = minimize(
        problem, torch.ones(4) + 1e-5, solve=solver, max_rejections=4, stop=GradientNorm(0.0)
    )
    assert result.status == "non_finite"
    assert "4 tries in a row" in result.message


class Unbounded(Gaussian):
    """A loss -e^z, which falls for ever and leaves the numbers on its way."""

    def nll(self, z, y):
        return -z.exp()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{}, {"solve": "cg"}, {"batch_size": 5, "test_batch": "same"}, {"max_rejections": 1100}],
)
def test_a_loss_without_lower_bound_ends_with_a_status_and_its_best_point(options, dtype):
    """Gradients grow as the loss falls, and σ with every rejection: their product is soon beyond all numbers."""
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).to(dtype) + 1
    problem = NLLProblem(Euclidean(3), lambda x, w: x @ w, Unbounded(), x, x[:, 0])
    result = minimize(problem, torch.zeros(3, dtype=dtype), max_iter=1500, **options)
    assert result.status == "non_finite"
    assert result.value == float(problem.loss(result.x)) < -1e20


def test_a_step_of_length_zero_is_no_progress():
    """A Fisher operator of NaN gives CG nothing to do; the run must not count that as accepted steps."""

    class Broken(NLLProblem):
        def fisher(self, x, batch=None, *, kind="exact"):
            operator = super().fisher(x, batch, kind=kind)
            operator._matvec = lambda v: v * torch.nan
            return operator

    x = torch.eye(3, dtype=torch.float64)
    problem = Broken(
        Euclidean(3), lambda x, t: x @ t, Gaussian(), x, torch.ones(3, dtype=torch.float64)
    )
    result = minimize(problem, torch.zeros(3, dtype=torch.float64), solve="cg", max_rejections=6)
    assert result.iterations == 6
    assert result.status in {"stalled", "non_finite"}
    assert result.trace["accepted"][1:] == [0.0] * 6


def test_a_batch_whose_gradient_vanishes_is_passed_over():
    """The first batches of an easy problem can be fitted already; the forcing term must not divide by their norm."""
    x = torch.eye(4, dtype=torch.float64)
    y = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    problem = NLLProblem(Euclidean(4), lambda x, t: x @ t, Gaussian(), x, y)
    for seed in range(4):
        result = minimize(
            problem,
            torch.zeros(4, dtype=torch.float64),
            batch_size=1,
            test_batch="same",
            solve="cg",
            max_iter=60,
            seed=seed,
        )
        assert result.value < 1e-3


def test_logistic_regression_on_the_sphere_from_many_starts():
    g = generator(2)
    manifold = Sphere(4)
    x = torch.randn(200, 4, generator=g, dtype=torch.float64)
    y = torch.bernoulli(torch.sigmoid(3 * x @ manifold.random_point(generator=g)), generator=g)
    problem = NLLProblem(manifold, lambda x, w: 3 * x @ w, Bernoulli(), x, y)
    found = [minimize(problem, manifold.random_point(generator=g)) for _ in range(5)]
    assert {result.status for result in found} == {"converged"}
    assert max(r.value for r in found) - min(r.value for r in found) < 1e-12


@pytest.mark.parametrize("seed", [0, 3, 5])
def test_steps_that_overshoot_are_told_from_good_ones_where_losses_are_blurred(seed):
    """Curved logits with noise: the Hessian is more than twice the Fisher information, so that full steps diverge."""
    g = torch.Generator().manual_seed(seed)
    truth, x = (
        Sphere(4).random_point(generator=g),
        torch.randn(30, 4, generator=g, dtype=torch.float64),
    )

    def model(x, w):
        z = x @ w
        return torch.stack([z, torch.tanh(z), 0.3 * z.square()], 1)

    problem = NLLProblem(
        Sphere(4), model, Categorical(), x, Categorical().sample(model(x, truth), generator=g)
    )
    result = minimize(problem, Sphere(4).random_point(generator=g), max_iter=150)
    assert result.status == "converged", result


def test_a_batch_that_grows_beyond_all_samples_is_all_samples(tasks):
    task = tasks["sphere"]()
    count = task.problem.n_samples
    options = {"sigma": 0.1, "max_iter": 5}
    growing = minimize(
        task.problem, task.x0, "rngd", batch_size=lambda k: count // 4 << k, **options
    )
    bounded = minimize(
        task.problem, task.x0, "rngd", batch_size=lambda k: min(count // 4 << k, count), **options
    )
    assert growing.trace["loss"] == bounded.trace["loss"]


def test_schedules_may_count_in_tensors(tasks):
    task = tasks["sphere"]()
    found = [
        minimize(task.problem, task.x0, "rngd", step=step, damping=0.1, max_iter=3).trace["loss"]
        for step in (
            lambda k: 0.5 / (k + 1),
            lambda k: torch.tensor(0.5, dtype=torch.float64) / (k + 1),
        )
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("rngd", {"step": lambda k: -0.1}, r"step\(0\) must be a number ≥ 0, got -0.1"),
        (
            "rngd",
            {"step": 0.1, "damping": lambda k: math.nan},
            r"damping\(0\) must be a number ≥ 0, got nan",
        ),
        ("rngd", {"batch_size": lambda k: 0}, "batch_size must be between 1 and n_samples"),
        ("rsvrg", {"step": lambda k: math.inf}, r"step\(0\) must be a number ≥ 0, got inf"),
        ("rngd", {"solve": "pinv"}, "solve='pinv' has no damping: it is for the fixed-step form"),
        ("rngd", {"solve": "pinv", "step": 0.1, "damping": 0.1}, "with step= and damping=0"),
        ("rngd", {"max_rejections": 2.5}, "max_rejections must be a whole number, got 2.5"),
    ],
)
def test_schedules_and_counts_that_are_none_are_named(method, options, words, tasks):
    task = tasks["sphere"]()
    with pytest.raises((ValueError, TypeError), match=words):
        minimize(task.problem, task.x0, method, max_iter=3, **options)
