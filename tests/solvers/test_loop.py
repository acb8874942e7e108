"""The outer loop: stopping, callbacks, trace, display, checkpoints, interrupts, and bad input read by its message."""

import math
import operator
import re

import numpy as np
import pandas
import polars
import pytest
import torch

from fisherfold import Gaussian, LossProblem, NLLProblem, Result, minimize
from fisherfold.files import write_tensors
from fisherfold.manifolds import Euclidean, Grassmann, Oblique, Product, Sphere
from fisherfold.problems import Problem
from fisherfold.solvers import (
    GradientNorm,
    LossBelow,
    MaxSamples,
    MaxSeconds,
    SmallGradient,
    Stagnation,
    State,
    Trace,
)
from toy import slow

NEVER = GradientNorm(0.0)


@pytest.fixture
def task(tasks):
    return tasks["sphere"]()


# stopping


def test_each_criterion_states_its_reason(task):
    def run(stop, **options):
        return minimize(task.problem, task.x0, stop=stop, max_iter=50, **options)

    result = run(GradientNorm(1e-3))
    assert result.status == "converged"
    assert re.fullmatch(r"the gradient norm \d\.\d+e-\d+ is at most 1e-03", result.message)
    assert result.trace["gradient_norm"][-1] <= 1e-3 < result.trace["gradient_norm"][-2]
    result = run(LossBelow(task.minimum + 1e-3))
    assert (result.status, result.success) == ("converged", True)
    assert "the loss 0.3" in result.message or "is at most" in result.message
    result = run(MaxSamples(130))
    assert (result.status, result.message) == (
        "stopped",
        "160 sample gradients are spent, 130 were allowed",
    )
    assert not result.success
    result = run(MaxSeconds(0.0))
    assert result.status == "stopped"
    assert re.fullmatch(r"0\.\d s are spent, 0 s were allowed", result.message)
    result = run(Stagnation(1e-6, window=3))
    assert result.status == "converged"
    assert "over 3 evaluations" in result.message
    losses = result.trace["loss"]
    assert losses[-4] - losses[-1] <= 1e-6 * losses[-1]


@pytest.mark.parametrize("unit", [1e-20, 1.0, 1e20, *slow(1e-10, 1e-5, 1e5, 1e10)])
@pytest.mark.parametrize("noise", [0.3, 0.0])
def test_the_default_finds_the_solution_in_all_units_of_the_loss(unit, noise):
    g = torch.Generator().manual_seed(0)
    x, e = (torch.randn(60, k, generator=g, dtype=torch.float64) for k in (5, 1))
    truth, x0 = (Sphere(5).random_point(generator=g) for _ in range(2))
    y = torch.tanh(2 * x @ truth) + noise * e[:, 0]
    root = unit**0.5
    problem = NLLProblem(
        Sphere(5), lambda x, w: root * torch.tanh(2 * x @ w), Gaussian(), x, root * y
    )
    exact = minimize(problem, x0, stop=NEVER, max_iter=40).x
    assert float(problem.manifold.dist(x0, exact)) > 0.5
    result = minimize(problem, x0, max_iter=60)
    assert float(problem.manifold.dist(result.x, exact)) < 1e-5
    if noise or unit <= 1e5:  # without a residual nothing is left to tell large units by
        assert result.status == "converged"
        again = minimize(problem, result.x, max_iter=60)
        assert again.status == "converged"
        assert again.iterations < result.iterations
    conjugate = minimize(problem, x0, "rcg", max_iter=60)
    assert float(problem.manifold.dist(conjugate.x, exact)) < 1e-5


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-3), (torch.float32, 3e-2)])
@pytest.mark.parametrize("unit", [1.0, 1e8, *slow(1e3, 3e5)])
@pytest.mark.parametrize("scale", [1.0, 1e-5])
@pytest.mark.parametrize("method", ["rngd", "rcg"])
def test_the_default_finds_the_solution_in_all_units_of_the_parameters(
    method, unit, scale, dtype, rtol
):
    """Prices in units of money, or inputs in large units, from w = 0: small beside the loss, its gradient is not 0."""
    g = torch.Generator().manual_seed(0)
    x, noise = (
        scale * torch.randn(50, 3, generator=g, dtype=torch.float64),
        torch.randn(50, generator=g).double(),
    )
    y = unit * (x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) / scale + 0.3 * noise)
    exact = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    problem = NLLProblem(Euclidean(3), lambda x, w: x @ w, Gaussian(), x.to(dtype), y.to(dtype))
    result = minimize(problem, torch.zeros(3, dtype=dtype), method, max_iter=200)
    assert result.status == "converged"
    assert float((result.x.double() - exact).norm()) < rtol * float(exact.norm())
    # a start at the solution is one still
    assert minimize(problem, result.x, method).iterations == 0


def test_the_default_is_a_gradient_norm_of_1e_8_where_losses_are_of_ordinary_size():
    state = State(x=torch.zeros(1), generator=torch.Generator(), loss=0.5)
    state.trace.rows = [{"loss": 2.0, "gradient_norm": 1.0}]
    for norm, met in ((1.01e-8, False), (0.99e-8, True)):
        state.gradient_norm = norm
        assert (SmallGradient().reason(state) is not None) is met
    state.gradient_norm = math.nan
    assert SmallGradient().reason(state) is None
    state.trace.rows, state.gradient_norm = [{"loss": 0.0, "gradient_norm": 0.0}], 0.0
    assert SmallGradient().reason(state) == "the gradient norm 0.00e+00 is at most 1.0e-08"


class Line(Problem):
    """Ψ(x) = <c, x> + offset on a sphere."""

    n_samples = 1

    def __init__(self, c, offset=0.0):
        self.manifold, self.c, self.offset = Sphere(len(c)), c, offset

    def loss(self, x, batch=None):
        return (self.c * x).sum() + self.offset

    def gradient(self, x, batch=None):
        return self.manifold.project(x, self.c)

    def fisher(self, x, batch=None, *, kind="exact"):
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_points_have_no_history():
    """Where a gradient has one, of what else could be trained, each step would be added to it, and be kept."""
    c, x0 = (
        torch.eye(4, dtype=torch.float64)[0].requires_grad_(),
        torch.eye(4, dtype=torch.float64)[1],
    )

    class Trained(Line):
        def loss(self, x, batch=None):
            return super().loss(x).detach()

    steps = []
    result = minimize(Trained(c), x0, "rcg", callback=lambda state: steps.append(state.x))
    assert result.status == "converged"
    assert not any(x.requires_grad for x in (result.x, result.last, *steps))


@pytest.mark.parametrize(
    "options", [{}, {"fisher": "kronecker"}, {"batch_size": 10}, {"step": 1.0, "damping": 0.1}]
)
def test_a_layer_around_the_model_is_not_trained_and_leaves_no_history(options, recwarn):
    layer, x = (
        torch.nn.Linear(5, 5).double(),
        torch.randn(30, 5, generator=torch.Generator().manual_seed(0)).double(),
    )
    problem = NLLProblem(Grassmann(5, 2), lambda x, u: layer(x) @ u @ u.mT, Gaussian(), x, x)
    x0 = problem.manifold.random_point(generator=torch.Generator().manual_seed(1))
    result = minimize(problem, x0, max_iter=4, **options)
    assert not result.x.requires_grad
    assert result.value < float(problem.loss(x0).detach())
    assert layer.weight.grad is None
    assert not list(recwarn)


@pytest.mark.parametrize("unit", [1e-30, 1e12, *slow(1e-12, 1e-9, 1.0)])
@pytest.mark.parametrize("offset", [0.0, -1e-14])
def test_a_loss_that_starts_at_zero_and_falls_below_it_is_not_converged_there(unit, offset):
    c, x0 = unit * torch.eye(4, dtype=torch.float64)[0], torch.eye(4, dtype=torch.float64)[1]
    result = minimize(Line(c, offset * unit), x0, "rcg", max_iter=60)
    assert result.status == "converged"
    torch.testing.assert_close(result.x, -c / unit, atol=1e-5, rtol=0)


def test_a_solution_without_a_loss_is_one_in_whatever_units():
    """Its gradient is zero too, and a negative loss of ordinary size is a level to compare with."""
    c = torch.eye(4, dtype=torch.float64)[0]
    for unit in (1e-20, 1.0):
        assert minimize(Line(unit * c, unit), -c, "rcg").iterations == 0
    assert minimize(Line(c, -5.0), -c + 1e-9 * c.roll(1), "rcg").iterations == 0


def test_criteria_are_joined(task):
    either = minimize(task.problem, task.x0, stop=GradientNorm(1e-30) | MaxSamples(90))
    assert (either.status, either.message) == (
        "stopped",
        "120 sample gradients are spent, 90 were allowed",
    )
    both = minimize(task.problem, task.x0, stop=GradientNorm(1e-2) & MaxSamples(1000), max_iter=100)
    assert both.status == "converged"
    assert re.fullmatch(
        r"the gradient norm .* is at most 1e-02 and 1000 sample gradients are spent.*", both.message
    )
    assert both.trace["samples"][-1] >= 1000
    nested = minimize(
        task.problem, task.x0, stop=(GradientNorm(1e-30) & MaxSamples(1)) | LossBelow(100.0)
    )
    assert (nested.status, nested.iterations) == ("converged", 0)
    # met at once, the one that means success counts, in whichever order they are joined
    for stop in (MaxSamples(1) | LossBelow(100.0), LossBelow(100.0) | MaxSamples(1)):
        assert minimize(task.problem, task.x0, stop=stop).status == "converged"


@pytest.mark.parametrize(
    ("criterion", "values", "message"),
    [
        (GradientNorm, (-1e-6,), "tol of GradientNorm must be a number ≥ 0, got -1e-06"),
        (GradientNorm, (math.nan,), "tol of GradientNorm must be a number ≥ 0, got nan"),
        (SmallGradient, (1e-8, "small"), "rtol of SmallGradient must be a number ≥ 0, got 'small'"),
        (LossBelow, (None,), "value of LossBelow must be a number, got None"),
        (Stagnation, (1e-6, 0), "window of Stagnation must be a whole number ≥ 1, got 0"),
        (Stagnation, (1e-6, 2.5), "window of Stagnation must be a whole number ≥ 1, got 2.5"),
        (MaxSeconds, (True,), "seconds of MaxSeconds must be a number ≥ 0, got True"),
    ],
)
def test_limits_that_no_run_could_reach_are_refused(criterion, values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        criterion(*values)
    assert LossBelow(-3.0).value == -3.0


@pytest.mark.parametrize("other", [1e-6, MaxSeconds])
def test_only_criteria_are_joined(other):
    for join in (operator.or_, operator.and_):
        with pytest.raises(TypeError, match="unsupported operand"):
            join(GradientNorm(1e-6), other)


def test_rejected_steps_are_no_stagnation():
    """Algorithm 1 may reject many times while σ rises: that is no reason to call it converged."""
    state = State(x=torch.zeros(1), generator=torch.Generator())
    losses = [5.0, 4.0, 3.0]
    state.trace.rows = [{"loss": loss, "accepted": 1.0} for loss in losses] + [
        {"loss": 3.0, "accepted": 0.0}
    ] * 10
    assert Stagnation(1e-3, window=2).reason(state) is None
    state.trace.rows += [{"loss": 3.0, "accepted": 1.0}] * 2
    assert (
        Stagnation(1e-3, window=2).reason(state)
        == "the loss fell by only 0.0e+00 over 2 evaluations"
    )
    state.trace.rows = [{"loss": math.nan}] * 5 + [{"loss": 1.0}]
    assert Stagnation(window=1).reason(state) is None


def test_the_default_tolerance_follows_the_precision(tasks):
    for dtype, tol in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
        task = tasks["quadratic"](dtype)
        result = minimize(task.problem, task.x0)
        assert result.status == "converged"
        assert result.trace["gradient_norm"][-1] <= tol


def test_the_gradients_of_criteria_are_counted(task):
    """In Euclidean units the default criterion measures curvature by gradients ahead."""
    evaluated, original = [], task.problem.loss_and_gradient

    def counted(x, batch=None):
        evaluated.append(task.problem.n_samples if batch is None else len(batch))
        return original(x, batch)

    task.problem.loss_and_gradient = counted
    result = minimize(task.problem, task.x0)
    assert result.status == "converged"
    assert result.trace["samples"][-1] == sum(evaluated)


@pytest.mark.parametrize(("method", "count"), [("rgd", 8), ("lbfgs", 8), ("trust-region", 12)])
def test_a_run_that_ends_on_its_way_through_a_valley_is_told_to_go_on(method, count):
    """Rosenbrock's function: gradients rise and fall on the way, the loss falls in every iteration."""
    problem = LossProblem(Euclidean(2), lambda t: 100 * (t[1] - t[0] ** 2) ** 2 + (1 - t[0]) ** 2)
    result = minimize(
        problem, torch.tensor([-1.2, 1.0], dtype=torch.float64), method, max_iter=count
    )
    assert "the loss still falls: raise max_iter" in result.message


def test_max_iter_is_a_status(task):
    result = minimize(task.problem, task.x0, "rgd", max_iter=3)
    assert (result.status, result.message.split(";")[0], result.iterations) == (
        "max_iter",
        "3 iterations are made",
        3,
    )
    assert repr(result).startswith("Result(max_iter after 3 iterations, value 0.")
    once = minimize(task.problem, task.x0, "rgd", max_iter=1)
    assert once.message.startswith("1 iteration is made; ")
    assert repr(once).startswith("Result(max_iter after 1 iteration, value 0.")


def test_a_run_that_has_made_more_than_is_asked_for_says_how_many(task, tmp_path):
    file = tmp_path / "c"
    minimize(task.problem, task.x0, "rgd", max_iter=3, checkpoint=file)
    fewer = minimize(task.problem, task.x0, "rgd", max_iter=2, checkpoint=file, resume=True)
    assert (fewer.message.split(";")[0], fewer.iterations) == (
        "3 iterations are made, max_iter is 2",
        3,
    )


# callbacks


def test_a_callback_sees_every_iteration_and_may_stop(task):
    seen = []

    def callback(state):
        seen.append((state.iteration, state.loss))
        return "enough seen" if state.iteration == 3 else None

    result = minimize(task.problem, task.x0, "rgd", callback=callback)
    assert [k for k, _ in seen] == [1, 2, 3]
    assert [loss for _, loss in seen] == result.trace["loss"][1:]
    assert (result.status, result.message) == ("stopped", "enough seen")
    result = minimize(task.problem, task.x0, "rgd", callback=lambda state: state.iteration == 2)
    assert (result.iterations, result.message) == (2, "the callback asked to stop")


# trace


def test_the_trace_is_a_table(task):
    result = minimize(task.problem, task.x0, max_iter=4, stop=NEVER)
    trace = result.trace
    assert trace.columns[:6] == [
        "iteration",
        "samples",
        "products",
        "seconds",
        "loss",
        "gradient_norm",
    ]
    assert {"rho", "sigma", "accepted"} <= set(trace.columns)
    assert trace["iteration"] == [0, 1, 2, 3, 4]
    assert len(trace) == 5
    assert all(
        later >= earlier
        for earlier, later in zip(trace["seconds"], trace["seconds"][1:], strict=False)
    )
    table, frame = trace.to_polars(), trace.to_pandas()
    assert isinstance(table, polars.DataFrame)
    assert isinstance(frame, pandas.DataFrame)
    assert table.columns == list(frame.columns) == trace.columns
    assert table["loss"].to_list() == frame["loss"].to_list() == trace["loss"]
    assert table["iteration"].dtype.is_integer()
    assert math.isnan(table["rho"][0])
    assert [row["iteration"] for row in trace] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match=r"the trace has the columns .*, not 'colour'"):
        trace["colour"]
    assert Trace()["anything"] == []
    assert Trace().to_polars().shape == (0, 0)


def test_metrics_of_the_problem_are_recorded_as_numbers(task, tmp_path):
    class Measured(NLLProblem):
        def metrics(self, x):
            return {"first": x[0], "answer": 42}

    problem = Measured(
        Sphere(5), task.problem.model, Gaussian(), task.problem.inputs, task.problem.targets
    )
    result = minimize(problem, task.x0, max_iter=2, checkpoint=tmp_path / "c")
    assert result.trace["first"][-1] == float(result.last[0])
    assert all(isinstance(value, float) for value in result.trace["answer"])


@pytest.mark.parametrize("name", ["loss", "accepted", "rho"])
def test_metrics_do_not_take_the_columns_of_the_trace(task, name):
    class Measured(NLLProblem):
        def metrics(self, x):
            return {name: 0.0}

    problem = Measured(
        Sphere(5), task.problem.model, Gaussian(), task.problem.inputs, task.problem.targets
    )
    with pytest.raises(
        ValueError, match=rf"must have names of their own, got \['{name}'\], columns of the trace"
    ):
        minimize(problem, task.x0, max_iter=2)


def test_the_best_point_and_the_last_are_told_apart(tasks):
    task = tasks["quadratic"]()
    result = minimize(
        task.problem, task.x0, "rsgd", step=2.2, decay=0.0, batch_size=1, max_iter=15, stop=NEVER
    )
    losses = result.trace["loss"]
    assert result.value == min(losses) == float(task.problem.loss(result.x))
    assert float(task.problem.loss(result.last)) == losses[-1] > result.value


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_converged_returns_a_point_that_meets_the_criterion(seed):
    g = torch.Generator().manual_seed(seed)
    x, noise = (torch.randn(200, n, generator=g, dtype=torch.float64) for n in (6, 1))
    truth, start = (Sphere(6).random_point(generator=g) for _ in range(2))
    targets = torch.tanh(x @ truth) + 0.5 * noise[:, 0]
    problem = NLLProblem(Sphere(6), lambda x, w: torch.tanh(x @ w), Gaussian(), x, targets)
    result = minimize(problem, start, stop=GradientNorm(1e-11))
    assert result.status == "converged"
    # losses no longer tell the last points apart
    assert min(result.trace["loss"]) == pytest.approx(result.value, rel=1e-14)
    assert float(problem.gradient(result.x).norm()) <= 1e-11


def test_full_evaluations_can_be_spaced_out(task):
    result = minimize(
        task.problem, task.x0, "rsgd", step=0.1, max_iter=7, evaluate_every=3, stop=NEVER
    )
    assert [loss == loss for loss in result.trace["loss"]] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
        True,
    ]


def test_a_run_that_ends_between_two_evaluations_returns_its_last_iterate(task, tmp_path):
    """By a callback or a budget: what was done since the last evaluation is not thrown away."""
    options = {"method": "rsgd", "step": 0.01, "max_iter": 20, "evaluate_every": 6}
    for ending in (
        {"callback": lambda state: state.iteration == 9},
        {"stop": MaxSamples(9 * task.problem.n_samples)},
    ):
        result = minimize(task.problem, task.x0, checkpoint=tmp_path / "c", **ending, **options)
        assert (result.status, result.iterations, len(result.trace)) == ("stopped", 9, 10)
        assert [loss == loss for loss in result.trace["loss"]] == [
            k in {0, 6, 9} for k in range(10)
        ]
        assert torch.equal(result.x, result.last)
        assert result.value == result.trace["loss"][-1] == float(task.problem.loss(result.last))
        assert result.value < result.trace["loss"][6]


# display


def test_silence_unless_asked_for(task, capsys):
    minimize(task.problem, task.x0, max_iter=2)
    assert capsys.readouterr() == ("", "")
    minimize(task.problem, task.x0, max_iter=2, verbose=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("gradient_norm") == 2


# checkpoints


def test_an_interrupt_in_a_callback_leaves_a_checkpoint(method, tasks, options, tmp_path):
    task = tasks["sphere"]()
    whole = minimize(task.problem, task.x0, method, max_iter=6, stop=NEVER, **options[method])

    def interrupt(state):
        if state.iteration == 3:
            raise KeyboardInterrupt

    common = {"max_iter": 6, "stop": NEVER, "checkpoint": tmp_path / "c", "checkpoint_every": 100}
    with pytest.raises(KeyboardInterrupt):
        minimize(task.problem, task.x0, method, callback=interrupt, **common, **options[method])
    resumed = minimize(task.problem, task.x0, method, resume=True, **common, **options[method])
    assert torch.equal(resumed.last, whole.last)
    assert resumed.trace["loss"] == whole.trace["loss"]


def test_an_interrupt_in_the_middle_of_a_step_costs_only_that_step(
    method, tasks, options, tmp_path
):
    """The draws of the broken step must not be lost, or the resumed run would take other batches."""
    task = tasks["sphere"]()
    whole = minimize(task.problem, task.x0, method, max_iter=5, stop=NEVER, **options[method])
    calls = {"left": None}

    class Interrupting(NLLProblem):
        def _outputs(self, theta, inputs):
            if calls["left"] is not None:
                calls["left"] -= 1
                if calls["left"] == 0:
                    calls["left"] = None
                    raise KeyboardInterrupt
            return super()._outputs(theta, inputs)

    problem = Interrupting(
        Sphere(5), task.problem.model, Gaussian(), task.problem.inputs, task.problem.targets
    )
    common = {"max_iter": 5, "stop": NEVER, "checkpoint": tmp_path / "c", "checkpoint_every": 100}

    def arm(state):
        if state.iteration == 2:
            calls["left"] = 2 if method in {"rsgd", "rsvrg", "rngd-vr"} else 1

    with pytest.raises(KeyboardInterrupt):
        minimize(problem, task.x0, method, callback=arm, **common, **options[method])
    resumed = minimize(task.problem, task.x0, method, resume=True, **common, **options[method])
    assert torch.equal(resumed.last, whole.last)
    assert resumed.trace["loss"] == whole.trace["loss"]
    assert resumed.trace["samples"] == whole.trace["samples"]


def test_a_run_that_ends_before_its_first_iteration_leaves_a_checkpoint(
    method, tasks, options, tmp_path
):
    task, path = tasks["sphere"](), tmp_path / "c"
    path.write_bytes(b"of another run")
    for ending in ({"max_iter": 0}, {"stop": LossBelow(math.inf)}):
        ended = minimize(
            task.problem, task.x0, method, checkpoint=path, **ending, **options[method]
        )
        assert ended.iterations == 0
        resumed = minimize(
            task.problem, task.x0, method, checkpoint=path, resume=True, **ending, **options[method]
        )
        assert (resumed.status, resumed.message, resumed.trace.rows) == (
            ended.status,
            ended.message,
            ended.trace.rows,
        )
    common = {"max_iter": 4, "stop": NEVER, "checkpoint": path}
    resumed = minimize(task.problem, task.x0, method, resume=True, **common, **options[method])
    whole = minimize(task.problem, task.x0, method, **common, **options[method])
    assert torch.equal(resumed.last, whole.last)
    assert resumed.trace["loss"] == whole.trace["loss"]


def test_an_interrupt_at_the_starting_point_replaces_the_checkpoint_of_an_earlier_run(
    method, tasks, options, tmp_path
):
    task, path = tasks["sphere"](), tmp_path / "c"
    minimize(
        task.problem,
        task.x0,
        method,
        max_iter=3,
        stop=NEVER,
        checkpoint=path,
        seed=5,
        **options[method],
    )

    class Interrupting(NLLProblem):
        def _outputs(self, theta, inputs):
            if theta.requires_grad:
                raise KeyboardInterrupt
            return super()._outputs(theta, inputs)

    problem = Interrupting(
        Sphere(5), task.problem.model, Gaussian(), task.problem.inputs, task.problem.targets
    )
    with pytest.raises(KeyboardInterrupt):
        minimize(problem, task.x0, method, checkpoint=path, seed=7, **options[method])
    common = {"max_iter": 4, "stop": NEVER, "seed": 7}
    resumed = minimize(
        task.problem, task.x0, method, checkpoint=path, resume=True, **common, **options[method]
    )
    whole = minimize(task.problem, task.x0, method, **common, **options[method])
    assert torch.equal(resumed.last, whole.last)
    assert resumed.trace["loss"] == whole.trace["loss"]


def test_a_run_without_a_further_step_stays_as_it_ended_unless_its_options_change(task, tmp_path):
    common = {"checkpoint": tmp_path / "c", "max_iter": 30}
    ending = {"eta2": 1e30, "sigma": 1.0, "max_rejections": 3}
    ended = minimize(task.problem, task.x0, **common, **ending)
    assert ended.status == "stalled"
    resumed = minimize(task.problem, task.x0, resume=True, **common, **ending)
    assert (resumed.status, resumed.message) == (ended.status, ended.message)
    assert resumed.iterations == ended.iterations
    further = minimize(
        task.problem, task.x0, resume=True, **common, eta2=0.1, sigma=0.1, max_rejections=20
    )
    assert further.iterations > ended.iterations


def test_resume_without_a_file_starts_fresh_and_a_file_without_resume_is_replaced(task, tmp_path):
    path = tmp_path / "c"
    first = minimize(task.problem, task.x0, max_iter=3, checkpoint=path, resume=True)
    again = minimize(task.problem, task.x0, max_iter=3, checkpoint=path)
    assert first.iterations == again.iterations == 3
    assert torch.equal(first.x, again.x)


def test_wrong_checkpoints_are_refused(task, tasks, tmp_path):
    path = tmp_path / "c"
    minimize(task.problem, task.x0, max_iter=2, checkpoint=path)

    def resume(other=task, method="rngd", **options):
        return minimize(other.problem, other.x0, method, checkpoint=path, resume=True, **options)

    with pytest.raises(ValueError, match="c is a checkpoint of method 'rngd', not of 'rcg'"):
        resume(method="rcg")
    for name in ("grassmann", "network"):
        with pytest.raises(ValueError, match=r"c is a checkpoint of another problem: its x.*"):
            resume(tasks[name]())
    with pytest.raises(
        ValueError, match="checkpoint of another problem: its x does not fit the starting point"
    ):
        resume(tasks["sphere"](torch.float32))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="c is damaged or not a checkpoint file of fisherfold"):
        resume()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="c is damaged or not a checkpoint file of fisherfold"):
        resume()
    write_tensors(path, {"x": torch.zeros(2)}, kind="model", version=1, header={})
    with pytest.raises(ValueError, match="c is not a checkpoint file of fisherfold"):
        resume()
    write_tensors(path, {"x": torch.zeros(2)}, kind="checkpoint", version=99, header={})
    with pytest.raises(
        ValueError, match="c has version 99 of the checkpoint format, at most 3 is known here"
    ):
        resume()


def rayleigh(a):
    return LossProblem(Sphere(5), lambda w: w @ a @ w)


@pytest.mark.parametrize("method", ["rcg", "lbfgs", "trust-region"])
def test_a_checkpoint_of_another_problem_start_or_seed_is_refused(method, tmp_path):
    """Of B = -A a run on A was called converged at once."""
    a, x0 = torch.diag(torch.arange(5).double()), torch.full((5,), 5**-0.5, dtype=torch.float64)
    path = tmp_path / "c"
    first = minimize(rayleigh(a), x0, method, checkpoint=path)
    again = minimize(rayleigh(a), x0, method, checkpoint=path, resume=True)
    assert torch.equal(again.x, first.x)
    for problem, start, seed, words in (
        (rayleigh(-a), x0, 0, "its loss has other values"),
        (rayleigh(a * (1 + 1e-4)), x0, 0, "its loss has other values"),
        (rayleigh(a), -x0, 0, "it was started from another x0|its loss has other values"),
        (rayleigh(a), x0, 1, "it was started with seed 0, this run with 1"),
        (LossProblem(Oblique(1, 5), lambda w: w.sum()), x0[None], 0, "its x does not fit"),
    ):
        with pytest.raises(ValueError, match=f"c is a checkpoint of another problem: ({words})"):
            minimize(problem, start, method, seed=seed, checkpoint=path, resume=True)


def test_where_the_loss_has_no_value_nearby_a_run_still_knows_its_checkpoint(tmp_path):
    def loss(w):
        if bool(w[0] != 1):
            raise ValueError("never anywhere else")
        return w.square().sum()

    x0, path = torch.eye(2, dtype=torch.float64)[0], tmp_path / "c"
    problem = LossProblem(Euclidean(2), loss)
    minimize(problem, x0, "rgd", max_iter=0, checkpoint=path)
    assert minimize(problem, x0, "rgd", max_iter=0, checkpoint=path, resume=True).iterations == 0


def test_a_checkpoint_of_a_larger_product_is_refused(tasks, tmp_path):
    task = tasks["network"]()
    minimize(task.problem, task.x0, max_iter=1, checkpoint=tmp_path / "c")
    state_of = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(task.x0) == state_of
    smaller = {key: value for key, value in task.x0.items() if key != "2.bias"}
    with pytest.raises(
        ValueError, match=r"checkpoint of another problem: it also holds \['best/2.bias'"
    ):
        State.load(tmp_path / "c", method="rngd", like=smaller)


# bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"method": "newton"},
            ValueError,
            r"method must be 'auto' or one of \['lbfgs', .*\], got 'newton'",
        ),
        ({"checkpoint": 3}, TypeError, "checkpoint must be a path or None, got 3"),
        ({"max_iter": -1}, ValueError, "max_iter must be at least 0, got -1"),
        ({"max_iter": 2.5}, TypeError, "max_iter must be a whole number, got 2.5"),
        ({"evaluate_every": 1.5}, TypeError, "evaluate_every must be a whole number, got 1.5"),
        ({"seed": None}, TypeError, "seed must be a whole number, got None"),
        (
            {"seed": 2**70},
            ValueError,
            r"seed must lie between -2\*\*63 and 2\*\*64 - 1, got 1180591620717411303424",
        ),
        (
            {"stop": 1e-6},
            TypeError,
            r"stop must be a criterion such as GradientNorm\(1e-6\), got 1e-06",
        ),
        ({"callback": 3}, TypeError, "callback must be a function of the state, got 3"),
        ({"batch_size": 2.5}, TypeError, "batch_size must be a whole number, got 2.5"),
        ({"checkpoint_every": 0}, ValueError, "checkpoint_every must be at least 1, got 0"),
        ({"resume": True}, ValueError, "resume=True needs a checkpoint file, got checkpoint=None"),
        (
            {"checkpoint": "no/such/folder/c"},
            FileNotFoundError,
            "the folder no/such/folder does not exist",
        ),
        (
            {"learning_rate": 1},
            TypeError,
            "method 'rngd': got an unexpected keyword argument 'learning_rate'",
        ),
        (
            {"fisher": "diagonal"},
            ValueError,
            r"fisher must be one of \['exact', .*\], got 'diagonal'",
        ),
        (
            {"solve": "lu"},
            ValueError,
            r"solve must be 'auto' or one of \['structured', .*\], got 'lu'",
        ),
        ({"sigma": 0.0}, ValueError, "sigma must be a number > 0, got 0.0"),
        ({"sigma": math.nan}, ValueError, "sigma must be a number > 0, got nan"),
        ({"eta1": 1.0}, ValueError, "eta1 must lie between 0 and 1, got 1.0"),
        ({"eta1": "a"}, TypeError, "method 'rngd': eta1 must be a number, got str"),
        ({"eta3": 1.5}, ValueError, "eta3 must lie between 0 and 1, got 1.5"),
        ({"gamma": 1.0}, ValueError, "gamma must be greater than 1, got 1.0"),
        ({"forcing": 0.0}, ValueError, "forcing must be a number > 0, got 0.0"),
        ({"step": -1.0}, ValueError, "step must be a number > 0, got -1.0"),
        ({"step": 1.0, "damping": -1.0}, ValueError, "damping must be a number ≥ 0, got -1.0"),
        (
            {"damping": 0.1},
            ValueError,
            "damping is for the fixed-step form, with step=; .* got 0.1",
        ),
        (
            {"step": 0.5, "sigma": 0.1},
            ValueError,
            "sigma is for Algorithm 1, without step=; .* got sigma=0.1",
        ),
        ({"step": 0.5, "eta2": 0.0}, ValueError, "eta2 is for Algorithm 1, .* got eta2=0.0"),
        (
            {"step": lambda k: 0.5, "eta3": 0.5},
            ValueError,
            "eta3 is for Algorithm 1, .* got eta3=0.5",
        ),
        ({"batch_size": 41}, ValueError, "batch_size must be between 1 and n_samples=40, got 41"),
        ({"max_rejections": 0}, ValueError, "max_rejections must be at least 1, got 0"),
        (
            {"method": "rsgd"},
            TypeError,
            "method 'rsgd': missing 1 required keyword-only argument: 'step'",
        ),
        ({"method": "rsgd", "step": -1.0}, ValueError, "step must be a number > 0, got -1.0"),
        (
            {"method": "rsgd", "step": 1.0, "decay": -1.0},
            ValueError,
            "decay must be a number ≥ 0, got -1.0",
        ),
        (
            {"method": "rsgd", "step": 1.0, "sampling": "all"},
            ValueError,
            "sampling must be 'shuffle' or 'replacement'",
        ),
        (
            {
                "method": "rsgd",
                "step": 0.1,
                "stream": torch.zeros(1, 4).long(),
                "max_iter": 2,
                "stop": NEVER,
            },
            ValueError,
            "stream holds 1 epoch, epoch 2 was asked for",
        ),
        (
            {"method": "rsgd", "step": 0.1, "stream": torch.full((1, 4), 40)},
            ValueError,
            r"batch must lie in 0..39, got 40..40",
        ),
        (
            {"method": "rngd-vr", "step": 1.0, "damping": -0.1},
            ValueError,
            "damping must be a number ≥ 0, got -0.1",
        ),
        (
            {"method": "rngd-vr", "step": 1.0, "fisher": "x"},
            ValueError,
            r"fisher must be one of .*, got 'x'",
        ),
    ],
)
def test_bad_options_are_named(task, options, error, message):
    with pytest.raises(error, match=message):
        minimize(task.problem, task.x0, **options)


def test_whole_numbers_may_come_from_numpy(task):
    result = minimize(
        task.problem,
        task.x0,
        max_iter=np.int64(2),
        seed=np.int32(1),
        batch_size=np.int64(8),
        stop=NEVER,
    )
    assert result.iterations == 2


def test_a_function_is_no_problem(task):
    with pytest.raises(
        TypeError, match=r"problem must be a fisherfold.Problem, such as NLLProblem, got function"
    ):
        minimize(lambda x: x.sum(), task.x0)


def test_bad_starts_are_named(task):
    def start(x0):
        return minimize(task.problem, x0)

    with pytest.raises(
        ValueError, match=r"x0 is not a point of Sphere\(5\): its constraint is violated by"
    ):
        start(2 * task.x0)
    with pytest.raises(ValueError, match=r"x0 must not require grad; pass x0.detach()"):
        start(task.x0.clone().requires_grad_())
    with pytest.raises(
        ValueError, match="x0 must be a single point, got one with batch dimensions"
    ):
        start(task.x0.expand(3, 5))
    with pytest.raises(
        ValueError, match=r"x0 must have shape \(..., 5\) on Sphere\(5\), got \(4,\)"
    ):
        start(task.x0[:4])
    with pytest.raises(ValueError, match="x0 must be finite, got NaN or infinite entries"):
        start(task.x0 * torch.nan)
    with pytest.raises(
        ValueError,
        match=r"theta must have the dtype torch.float64 of the data x, got torch.float32",
    ):
        start(task.x0.float())
    with pytest.raises(TypeError, match=r"x0 must be a torch.Tensor, got list"):
        start([1.0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match=r"x0 must have a floating dtype, got torch.int64"):
        start(torch.tensor([1, 0, 0, 0, 0]))
    for half in (torch.float16, torch.bfloat16):
        with pytest.raises(
            ValueError,
            match=rf"x0 must be float32 or float64, one for all factors, got \['{half}'\]",
        ):
            start(torch.eye(5, dtype=half)[0])


@pytest.mark.parametrize("method", ["rngd", "rcg"])
def test_a_start_of_two_precisions_is_named(method):
    manifold = Product({"a": Euclidean(5), "b": Sphere(5)})
    x0 = manifold.random_point(generator=torch.Generator().manual_seed(0))
    problem = NLLProblem(
        manifold, lambda i, t: t["a"][i] * t["b"][i], Gaussian(), torch.arange(5), torch.ones(5)
    )
    with pytest.raises(
        ValueError, match=r"one for all factors, got \['torch.float32', 'torch.float64'\]"
    ):
        minimize(problem, x0 | {"b": x0["b"].float()}, method)


def test_a_start_on_another_device_is_named():
    x = torch.ones(3, 2)
    problem = NLLProblem(Euclidean(2), lambda x, t: x @ t, Gaussian(), x, torch.ones(3))
    with pytest.raises(ValueError, match="theta must be on cpu like the data, got meta"):
        problem.loss(torch.ones(2, device="meta"))


def test_rank_must_be_less_than_n():
    with pytest.raises(ValueError, match="must be less than n=4, got 4"):
        Grassmann(4, 4)


def test_results_say_what_they_are(task):
    result = minimize(task.problem, task.x0)
    assert isinstance(result, Result)
    assert (result.status, result.success) == ("converged", True)


def test_the_order_of_the_keys_of_the_start_means_nothing(tasks):
    task = tasks["network"]()
    backwards = {key: task.x0[key] for key in reversed(task.x0)}
    one, other = (minimize(task.problem, x0, max_iter=5) for x0 in (task.x0, backwards))
    assert one.trace["loss"] == other.trace["loss"]


def test_a_checkpoint_holds_the_trace_of_a_long_run(tmp_path):
    """It lies in tensors, and not in the header, which has no room for a long one."""
    row = {
        "iteration": 7,
        "samples": 2**40,
        "products": 0,
        "seconds": 1 / 3,
        "loss": math.nan,
        "gradient_norm": 2 / 3,
    }
    rows = [{**row, "iteration": k} | ({"accepted": 1.0} if k % 2 else {}) for k in range(20_000)]
    state = State(
        x=torch.ones(2), best=torch.ones(2), generator=torch.Generator(), trace=Trace(rows)
    )
    state.save(tmp_path / "c", method="rsgd")
    found = State.load(tmp_path / "c", method="rsgd", like=torch.zeros(2))
    assert repr(found.trace.rows[:3]) == repr(rows[:3])
    assert repr(found.trace.rows) == repr(rows)
    State(x=torch.ones(2), best=torch.ones(2), generator=torch.Generator()).save(
        tmp_path / "c", method="rsgd"
    )
    assert State.load(tmp_path / "c", method="rsgd", like=torch.zeros(2)).trace.rows == []
