"""RSGD, RSVRG and its natural-gradient form against their formulas; RCG and RGD against textbooks and pymanopt."""

import itertools
import math
import warnings

import pytest
import torch

from fisherfold import Gaussian, NLLProblem, minimize
from fisherfold.manifolds import Euclidean, Sphere, Stiefel
from fisherfold.solvers import GradientNorm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pymanopt = pytest.importorskip("pymanopt")
    from pymanopt.manifolds import Grassmann as TheirGrassmann
    from pymanopt.manifolds import Sphere as TheirSphere
    from pymanopt.optimizers import ConjugateGradient, SteepestDescent

NEVER = GradientNorm(0.0)


def order(samples, epochs, seed=9):
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(samples, generator=g) for _ in range(epochs)])


def test_rsgd_takes_the_decaying_steps_of_the_paper(tasks):
    """η_k = η₀ / (1 + η₀ δ k), k counting steps over all epochs."""
    task = tasks["sphere"]()
    stream = order(40, 3)
    result = minimize(
        task.problem,
        task.x0,
        "rsgd",
        step=0.7,
        decay=0.1,
        batch_size=16,
        stream=stream,
        max_iter=3,
        stop=NEVER,
    )
    x, k = task.x0, 0
    for epoch in stream:
        for batch in torch.split(epoch, 16):
            x = Sphere(5).retract(x, -0.7 / (1 + 0.7 * 0.1 * k) * task.problem.gradient(x, batch))
            k += 1
    assert k == 9
    torch.testing.assert_close(result.last, x, rtol=1e-13, atol=1e-13)
    assert result.trace["samples"] == [0, 40, 80, 120]
    assert result.trace["step"][-1] == pytest.approx(0.7 / (1 + 0.7 * 0.1 * 9))


def test_rsgd_on_a_quadratic_is_textbook_sgd(tasks):
    task = tasks["quadratic"]()
    stream = order(40, 2)
    result = minimize(
        task.problem,
        task.x0,
        "rsgd",
        step=0.1,
        decay=0.0,
        batch_size=8,
        stream=stream,
        max_iter=2,
        stop=NEVER,
    )
    x, y, w = task.problem.inputs, task.problem.targets, task.x0
    for batch in torch.split(stream.reshape(-1), 8):
        w = w - 0.1 * x[batch].T @ (x[batch] @ w - y[batch]) / 8
    torch.testing.assert_close(result.last, w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sphere", "grassmann", "quadratic"])
def test_rsvrg_makes_the_steps_of_its_formula(name, tasks):
    """g = g_B(x) - T(g_B(x₀) - g(x₀)), T the projection onto the tangent space at x."""
    task, stream = tasks[name](), order(40, 2)
    result = minimize(
        task.problem,
        task.x0,
        "rsvrg",
        step=0.2,
        batch_size=15,
        stream=stream,
        max_iter=2,
        stop=NEVER,
    )
    manifold, gradient, x = task.problem.manifold, task.problem.gradient, task.x0
    for epoch in stream:
        anchor = x
        for batch in torch.split(epoch, 15):
            carried = manifold.transport(anchor, x, gradient(anchor, batch) - gradient(anchor))
            x = manifold.retract(x, -0.2 * (gradient(x, batch) - carried))
    torch.testing.assert_close(result.last, x, rtol=1e-12, atol=1e-12)
    # a full pass at every snapshot, and two evaluations of every inner sample
    assert result.trace["samples"] == [40, 160, 280]


@pytest.mark.parametrize("name", ["sphere", "quadratic"])
def test_rngd_vr_makes_the_steps_of_its_formula(name, tasks):
    """(F + λ)⁻¹ g with the batch at x and all others at x₀, on dense matrices."""
    task, stream = tasks[name](), order(40, 1)
    result = minimize(
        task.problem,
        task.x0,
        "rngd-vr",
        step=0.4,
        damping=0.1,
        batch_size=15,
        stream=stream,
        max_iter=1,
        stop=NEVER,
    )
    problem, manifold, anchor, x = task.problem, task.problem.manifold, task.x0, task.x0
    eye = torch.eye(x.numel(), dtype=x.dtype)
    for batch in torch.split(stream[0], 15):
        share = len(batch) / 40
        carried = manifold.transport(
            anchor, x, problem.gradient(anchor, batch) - problem.gradient(anchor)
        )
        g = problem.gradient(x, batch) - carried
        rest = problem.fisher(anchor).dense() - share * problem.fisher(anchor, batch).dense()
        there = torch.stack([manifold.project(anchor, e) for e in eye])
        here = torch.stack([manifold.project(x, e) for e in eye])
        fisher = share * problem.fisher(x, batch).dense() + here @ there @ rest @ there @ here
        # on the normal space the damped matrix is λ, and g has nothing there
        x = manifold.retract(
            x, manifold.project(x, -0.4 * torch.linalg.solve(fisher + 0.1 * eye, g))
        )
    torch.testing.assert_close(result.last, x, rtol=1e-8, atol=1e-8)


def test_rngd_vr_with_one_batch_of_everything_is_a_natural_gradient_step(tasks):
    task = tasks["quadratic"]()
    result = minimize(task.problem, task.x0, "rngd-vr", step=1.0, batch_size=40, max_iter=1)
    expected = torch.linalg.lstsq(task.problem.inputs, task.problem.targets[:, None]).solution[:, 0]
    torch.testing.assert_close(result.last, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "kind", ["exact", "monte-carlo", "empirical", "kronecker", "row-block", "dense"]
)
@pytest.mark.parametrize("sampling", ["shuffle", "replacement"])
def test_rngd_vr_descends_with_every_kind_and_sampling(kind, sampling, tasks):
    task = tasks["grassmann"]()
    result = minimize(
        task.problem,
        task.x0,
        "rngd-vr",
        step=0.5,
        damping=0.3,
        fisher=kind,
        sampling=sampling,
        batch_size=10,
        max_iter=5,
    )
    start = float(task.problem.loss(task.x0))
    assert result.value - task.minimum < 0.3 * (start - task.minimum)


@pytest.mark.parametrize("name", ["rsgd", "rsvrg", "rngd-vr"])
def test_steps_that_leave_the_finite_numbers_are_taken_back_and_shortened(name, tasks):
    """A step of 1e200 on a quadratic overflows within an epoch; quarters of it do for a while, and the run says so."""
    task = tasks["quadratic"]()
    extra = {"rsgd": {"decay": 0.0}, "rngd-vr": {"damping": 1e-3}}.get(name, {})
    result = minimize(
        task.problem,
        task.x0,
        name,
        step=1e200,
        batch_size=10,
        max_iter=50,
        max_rejections=6,
        **extra,
    )
    assert result.status == "non_finite"
    assert "leads to values that are not finite" in result.message
    assert math.isfinite(result.value)
    assert result.value <= float(task.problem.loss(task.x0))


@pytest.mark.parametrize("name", ["rsgd", "rsvrg", "rngd-vr"])
def test_a_step_that_is_only_somewhat_too_long_recovers(name):
    """Outputs turn to NaN beyond a ball: the epoch is repeated with a quarter of the step until it stays inside."""

    def model(x, t):
        return torch.where(t.norm() > 3, torch.nan, 1.0) * (x @ t)

    x = torch.eye(4, dtype=torch.float64)
    problem = NLLProblem(Euclidean(4), model, Gaussian(), x, torch.ones(4, dtype=torch.float64))
    result = minimize(
        problem, torch.zeros(4, dtype=torch.float64), name, step=60.0, batch_size=2, max_iter=40
    )
    accepted = result.trace["accepted"][1:]
    assert accepted[0] == 0
    assert 1.0 in accepted
    assert result.value < 0.1


@pytest.mark.parametrize("sampling", ["shuffle", "replacement"])
def test_sampling_is_what_it_says(sampling, tasks):
    task = tasks["quadratic"]()
    seen = []

    class Watching(NLLProblem):
        def gradient(self, x, batch=None):
            if batch is not None:
                seen.extend(batch.tolist())
            return super().gradient(x, batch)

    problem = Watching(
        Euclidean(4), lambda x, t: x @ t, Gaussian(), task.problem.inputs, task.problem.targets
    )
    minimize(problem, task.x0, "rsgd", step=0.01, batch_size=7, sampling=sampling, max_iter=2)
    assert len(seen) == 80
    whole = all(sorted(seen[i : i + 40]) == list(range(40)) for i in (0, 40))
    assert whole is (sampling == "shuffle")


def test_rgd_takes_the_textbook_steps_of_a_quadratic(tasks):
    """Every step is x - α g with the α that the trace reports, and satisfies Armijo's condition."""
    task = tasks["quadratic"]()
    visited = []
    result = minimize(
        task.problem,
        task.x0,
        "rgd",
        max_iter=10,
        stop=NEVER,
        callback=lambda s: visited.append(s.x) and None,
    )
    x, y, w = task.problem.inputs, task.problem.targets, task.x0
    for point, row in zip(visited, result.trace.rows[1:], strict=True):
        g = x.T @ (x @ w - y) / 40
        moved = w - point
        alpha = float(moved @ g / (g @ g))
        torch.testing.assert_close(moved, alpha * g, rtol=1e-9, atol=1e-12)
        assert row["loss"] <= float(task.problem.loss(w)) - 0.5 * alpha * float(g @ g) * (1 - 1e-9)
        w = point


def test_rcg_on_a_quadratic_keeps_pace_with_linear_conjugate_gradients():
    """Badly scaled: gradient descent crawls, conjugate directions do not."""
    scales = torch.logspace(0, -1.5, 6, dtype=torch.float64)
    x = torch.diag(scales) * 6**0.5
    problem = NLLProblem(
        Euclidean(6), lambda x, t: x @ t, Gaussian(), x, x @ torch.ones(6, dtype=torch.float64)
    )
    x0, stop = torch.zeros(6, dtype=torch.float64), GradientNorm(1e-5)
    rcg = minimize(problem, x0, "rcg", max_iter=200, stop=stop)
    assert rcg.status == "converged"
    assert minimize(problem, x0, "rgd", max_iter=4 * rcg.iterations, stop=stop).status == "max_iter"
    torch.testing.assert_close(rcg.x, torch.ones(6, dtype=torch.float64), rtol=0, atol=2e-2)


def pymanopt_run(manifold, x, optimizer, start, **options):
    @pymanopt.function.numpy(manifold)
    def cost(point):
        z = x @ point
        outer = z[:, None] * point if point.ndim == 1 else z @ point.T
        return 0.5 * ((outer - x) ** 2).sum(1).mean()

    @pymanopt.function.numpy(manifold)
    def gradient(point):
        # d/dw of ½|x - w wᵀx|² = ½|x|² - (x·w)² + ½ (x·w)² |w|²
        c = x.T @ x / len(x)
        if point.ndim == 1:
            return -2 * c @ point + (c @ point) * (point @ point) + (point @ c @ point) * point
        gram = point.T @ point
        return -2 * c @ point + c @ point @ gram + point @ (point.T @ c @ point)

    problem = pymanopt.Problem(manifold, cost, euclidean_gradient=gradient)
    return optimizer(verbosity=0, min_gradient_norm=1e-8, **options).run(
        problem, initial_point=start
    )


@pytest.mark.parametrize(("name", "theirs"), [("rcg", ConjugateGradient), ("rgd", SteepestDescent)])
def test_the_line_search_methods_walk_with_pymanopt(name, theirs, tasks):
    """The same rule on the same cost: the same minimum after nearly the same number of iterations."""
    for task, manifold in (
        (tasks["sphere"](), TheirSphere(5)),
        (tasks["grassmann"](), TheirGrassmann(6, 2)),
    ):
        peer = pymanopt_run(
            manifold, task.problem.inputs.numpy(), theirs, task.x0.numpy(), max_iterations=2000
        )
        ours = minimize(task.problem, task.x0, name, max_iter=2000, stop=GradientNorm(1e-8))
        assert ours.value == pytest.approx(peer.cost, abs=1e-12)
        assert ours.value == pytest.approx(task.minimum, abs=1e-12)
        assert abs(ours.iterations - peer.iterations) <= max(3, 0.3 * peer.iterations)


def test_the_first_steps_on_the_sphere_are_those_of_pymanopt(tasks):
    task = tasks["sphere"]()
    for count in (1, 2, 5):
        peer = pymanopt_run(
            TheirSphere(5),
            task.problem.inputs.numpy(),
            ConjugateGradient,
            task.x0.numpy(),
            max_iterations=count,
            log_verbosity=1,
        )
        ours = minimize(task.problem, task.x0, "rcg", max_iter=peer.iterations, stop=NEVER)
        near = [i for i in range(len(ours.trace)) if abs(ours.trace["loss"][i] - peer.cost) < 1e-10]
        assert near, (peer.cost, ours.trace["loss"])


def test_a_line_search_with_nothing_finite_ahead_says_so():
    def model(x, t):
        return torch.where((t != 0).any(), torch.nan, 1.0) * (x @ t)

    x = torch.eye(3, dtype=torch.float64)
    problem = NLLProblem(Euclidean(3), model, Gaussian(), x, torch.ones(3, dtype=torch.float64))
    for name in ("rcg", "rgd"):
        result = minimize(problem, torch.zeros(3, dtype=torch.float64), name)
        assert result.status == "non_finite"
        assert result.message.startswith(
            "the line search found no finite loss along the gradient, down to steps of "
        )
        assert torch.equal(result.x, torch.zeros(3, dtype=torch.float64))


def test_a_line_search_backs_away_from_points_without_a_gradient():
    """√(a - t) ends at t = a with an infinite slope; beyond, it is NaN. The minimum lies before."""

    def model(x, t):
        return x * (2 - (1 - t).sqrt())

    x = torch.ones(3, 1, dtype=torch.float64)
    problem = NLLProblem(Euclidean(1), model, Gaussian(), x, 1.5 * x)
    for name in ("rcg", "rgd"):
        result = minimize(problem, torch.zeros(1, dtype=torch.float64), name)
        assert result.status == "converged"
        assert float(result.x) == pytest.approx(0.75, abs=1e-6)


def test_at_the_minimum_a_line_search_stalls_with_its_best_point(tasks):
    task = tasks["sphere"]()
    result = minimize(task.problem, task.x0, "rcg", max_iter=3000, stop=NEVER)
    assert result.status in {"stalled", "max_iter"}
    assert result.value == pytest.approx(task.minimum, abs=1e-12)
    if result.status == "stalled":
        assert (
            "the line search found no lower loss along the gradient, down to steps of "
            in result.message
        )


@pytest.mark.parametrize("name", ["rcg", "rgd", "rngd"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_methods_converge_where_losses_differ_by_rounding_only(name, seed):
    """With noise the loss is not zero at the minimum, and below ‖g‖ ≈ 1e-8 no loss tells a fall from a rise. The point
    that is returned is the one that met the criterion, not an earlier one whose loss was rounded down."""
    generator = torch.Generator().manual_seed(seed)
    manifold = Stiefel(12, 3)
    inputs = torch.randn(200, 12, dtype=torch.float64, generator=generator)
    truth, start = (
        manifold.random_point(generator=generator, dtype=torch.float64) for _ in range(2)
    )
    targets = inputs @ truth + 0.5 * torch.randn(200, 3, dtype=torch.float64, generator=generator)
    problem = NLLProblem(manifold, lambda x, t: x @ t, Gaussian(), inputs, targets)
    result = minimize(problem, start, name, stop=GradientNorm(1e-11))
    assert result.status == "converged"
    assert float(manifold.norm(result.x, problem.gradient(result.x))) <= 1e-11
    assert result.value == pytest.approx(min(result.trace["loss"]), rel=1e-13)


@pytest.mark.parametrize("unit", [1e6, 1.0, 1e-6, 1e-8, 1e-13])
@pytest.mark.parametrize("name", ["rcg", "rgd"])
def test_units_of_the_parameters_do_not_stop_a_line_search(name, unit):
    """The first trial step has length one, whatever the minimum's; from zero there is nothing to compare it with."""
    torch.manual_seed(0)
    x = torch.randn(50, 4, dtype=torch.float64)
    y = (x @ torch.ones(4, dtype=torch.float64) + 0.1 * torch.randn(50, dtype=torch.float64))[
        :, None
    ]
    problem = NLLProblem(
        Euclidean(4), lambda row, w: ((row / unit) @ w)[:, None], Gaussian(1.0), x, y
    )
    expected = torch.linalg.lstsq(x, y).solution[:, 0]
    for start in (
        torch.zeros(4, dtype=torch.float64),
        torch.full((4,), 3 * unit, dtype=torch.float64),
    ):
        result = minimize(problem, start, name, max_iter=200, stop=GradientNorm(1e-7 / unit))
        assert result.status == "converged"
        torch.testing.assert_close(result.x / unit, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["rgd", "rcg"])
def test_steps_whose_slope_underflows_in_float32_go_down_still(method):
    """Inputs and targets of 1e-12: gradients of 1e-24, whose squares are 0."""
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        truth, x0 = (Stiefel(3, 3).random_point(generator=g, dtype=torch.float32) for _ in range(2))
        x = 1e-12 * torch.randn(6, 3, generator=g)
        problem = NLLProblem(Stiefel(3, 3), lambda x, w: x @ w, Gaussian(), x, x @ truth)
        losses = minimize(problem, x0, method, max_iter=25, stop=NEVER).trace["loss"]
        assert all(
            after <= before + 1e-6 * losses[0] for before, after in itertools.pairwise(losses)
        )
