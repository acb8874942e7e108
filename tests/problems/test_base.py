"""The contract of a problem: what its defaults do, with the smallest problem there is."""

import math

import pytest
import torch

from fisherfold import (
    Bernoulli,
    Categorical,
    Gaussian,
    NLLProblem,
    Problem,
    check_fisher,
    minimize,
)
from fisherfold.completion import CompletionProblem, Ratings
from fisherfold.fisher import DenseFisher, ExponentialFamily
from fisherfold.manifolds import Euclidean, Grassmann, Oblique, Sphere
from fisherfold.problems.base import Snapshot
from fisherfold.solvers import GradientNorm
from fisherfold.subspace.logistic import LabelledRows, LogisticSubspaceProblem
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.tasks import TaskStatistics


class Pull(Problem):
    """½ mean ‖x - a_i‖² on Euclidean space, written without automatic differentiation."""

    def __init__(self, anchors):
        self.anchors = anchors
        self.manifold = Euclidean(anchors.shape[1])
        self.n_samples = len(anchors)

    def _chosen(self, batch):
        return self.anchors if batch is None else self.anchors[batch]

    def loss(self, x, batch=None):
        return 0.5 * (x - self._chosen(batch)).square().sum(1).mean()

    def gradient(self, x, batch=None):
        return x - self._chosen(batch).mean(0)

    def fisher(self, x, batch=None, *, kind="exact"):
        return DenseFisher(self.manifold, x, torch.eye(len(x), dtype=x.dtype))


def pull():
    return Pull(torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def test_the_defaults_are_made_of_the_three_abstract_methods():
    problem, x = pull(), torch.ones(3, dtype=torch.float64)
    loss, gradient = problem.loss_and_gradient(x)
    assert torch.equal(loss, problem.loss(x))
    assert torch.equal(gradient, problem.gradient(x))
    assert problem.metrics(x) == {}
    assert problem.fisher_kinds == ("exact",)


class Measured(Pull):
    """With the divergence ½ ‖x - y‖² of normal distributions around x and y, or a wrong one."""

    def __init__(self, anchors, factor=0.5):
        super().__init__(anchors)
        self.factor = factor

    def kl(self, x, other):
        return self.factor * (x - other).square().sum()


def test_the_fisher_information_of_an_own_problem_is_checked_against_its_divergence():
    with pytest.raises(
        TypeError, match=r"mean divergence as kl\(x, other\), as NLLProblem has; Pull has none"
    ):
        check_fisher(pull())
    assert check_fisher(Measured(pull().anchors))
    assert not check_fisher(Measured(pull().anchors, 0.6))


class Plain(Bernoulli):
    """With the divergence as a difference of log-partition functions, which rounding leaves fewer digits of."""

    kl = ExponentialFamily.kl


@pytest.mark.parametrize("units", [1e-10, 1e-4, 1e-2, 1.0, 1e4, 1e8])
def test_the_fisher_information_is_checked_in_any_units(units):
    """With small inputs a divergence is far below 1: any operator had passed, as only rounding was looked for."""
    x = units * torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sphere, labels, weight = Sphere(4), torch.arange(50) % 3, torch.ones(50, dtype=torch.float64)
    for problem in (
        NLLProblem(sphere, lambda x, w: x @ w, Gaussian(), x, x[:, 0] + 3 * units * weight),
        NLLProblem(sphere, lambda x, w: x @ w / units, Plain(), x, weight),
        NLLProblem(Oblique(3, 4), lambda x, w: x @ w.T / max(1.0, units), Categorical(), x, labels),
    ):
        assert check_fisher(problem)
        assert not check_fisher(problem, kind="monte-carlo")
    for in_units in (units, 1 / units):  # those of the parameters, and a point of their size
        scaled = NLLProblem(
            Euclidean(4), lambda x, w, s=in_units * units: x @ w / s, Bernoulli(), x, weight
        )
        point = in_units * torch.ones(4, dtype=torch.float64)
        assert check_fisher(scaled, point)
        assert not check_fisher(scaled, point, kind="monte-carlo")
    for size, passes in (
        (1e-2, False),
        (1e-6, True),
    ):  # where rounding hides the whole divergence none can fail
        hidden = NLLProblem(
            sphere, lambda x, w, size=size: size * x @ w / units, Plain(), x, weight
        )
        assert check_fisher(hidden)
        assert bool(check_fisher(hidden, kind="monte-carlo")) == passes


def test_a_snapshot_gradient_is_exact_for_a_quadratic_and_unbiased_in_general():
    problem, x0 = pull(), torch.zeros(3, dtype=torch.float64)
    snapshot = problem.snapshot(x0)
    x = torch.ones(3, dtype=torch.float64)
    for batch in torch.arange(6).split(2):
        # every sample has the same curvature, so the correction removes all noise
        torch.testing.assert_close(snapshot.gradient(x, batch), problem.gradient(x))
    g = torch.Generator().manual_seed(1)
    manifold, inputs = Sphere(4), torch.randn(6, 4, generator=g, dtype=torch.float64)
    nll = NLLProblem(
        manifold,
        lambda a, w: torch.sin(a @ w),
        Gaussian(),
        inputs,
        torch.zeros(6, dtype=torch.float64),
    )
    x0, x = (manifold.random_point(generator=g) for _ in range(2))
    anchor = nll.snapshot(x0)
    assert isinstance(anchor, Snapshot)
    assert torch.equal(anchor.full_gradient, nll.gradient(x0))
    assert torch.equal(anchor.loss, nll.loss(x0))
    mean = torch.stack([anchor.gradient(x, batch) for batch in torch.arange(6).split(2)]).mean(0)
    torch.testing.assert_close(mean, nll.gradient(x))
    torch.testing.assert_close(anchor.gradient(x0, torch.tensor([2])), nll.gradient(x0))


def test_an_epoch_is_its_steps():
    problem = pull()
    x0 = torch.zeros(3, dtype=torch.float64)
    batches = [torch.tensor([0, 1]), torch.tensor([3])]
    mean = problem.anchors.mean(0)
    torch.testing.assert_close(problem.snapshot(x0).epoch(x0, batches, step=0.5), 0.75 * mean)
    natural = problem.snapshot(x0).epoch(x0, batches, step=0.5, kind="exact", damping=1.0)
    torch.testing.assert_close(natural, (1 - 0.75**2) * mean)


def test_steps_end_where_the_iterate_leaves_the_finite_numbers():
    problem, seen = pull(), []
    problem.anchors[2] = math.inf

    def batches():
        for k in range(6):
            seen.append(k)
            yield torch.tensor([k])

    x0 = torch.zeros(3, dtype=torch.float64)
    assert not bool(torch.isfinite(problem.descend(x0, batches(), step=lambda k: 0.1)).all())
    assert seen == [0, 1, 2]
    problem = pull()
    snapshot = problem.snapshot(x0)
    problem.anchors[2] = math.nan
    for kind in (None, "exact"):
        seen.clear()
        assert not bool(torch.isfinite(snapshot.epoch(x0, batches(), step=0.1, kind=kind)).all())
        assert seen == [0, 1, 2]


def test_the_plain_steps_count_from_zero():
    problem, steps = pull(), []
    problem.descend(
        torch.zeros(3, dtype=torch.float64),
        torch.arange(6).split(2),
        step=lambda k: steps.append(k) or 0.1,
    )
    assert steps == [0, 1, 2]


def test_a_fisher_matrix_that_is_not_finite_ends_the_epoch_without_a_crash():
    class Broken(NLLProblem):
        def fisher(self, x, batch=None, *, kind="exact"):
            operator = super().fisher(x, batch, kind=kind)
            operator.blocks = operator.blocks * math.nan
            return operator

    g = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, generator=g, dtype=torch.float64)
    problem = Broken(Grassmann(4, 2), lambda x, u: x @ u @ u.T, Gaussian(), x, x)
    u = problem.manifold.random_point(generator=g)
    moved = problem.snapshot(u).epoch(
        u, torch.arange(8).split(4), step=1.0, kind="row-block", damping=0.1
    )
    assert not bool(torch.isfinite(moved).all())


def noisy(name):
    """A problem with noise, so that its gradient cancels at a minimum."""
    g = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(240, n, generator=g, dtype=torch.float64) for n in (6, 1))
    task, y = torch.arange(240) % 8, x[:, 0] + x[:, 1] * x[:, 2] + noise[:, 0]
    if name == "completion":
        return CompletionProblem(
            Ratings(torch.arange(240) // 16, torch.arange(240) % 16, y), rank=2, ridge=0.1
        )
    if name == "subspace":
        statistics = TaskStatistics.from_rows(x, y, task)
        return SubspaceProblem(statistics, rank=2, ridge=0.1)
    return LogisticSubspaceProblem(LabelledRows.make(x, (y > 0).double(), task), rank=2)


@pytest.mark.parametrize("name", ["completion", "subspace", "logistic"])
def test_gradients_can_be_solved_for_where_nothing_but_rounding_is_left_of_them(name):
    problem = noisy(name)
    start = problem.manifold.random_point(generator=torch.Generator().manual_seed(1))
    x = minimize(problem, start, fisher="exact", max_iter=300).last
    gradient = problem.gradient(x)
    assert float(gradient.norm()) < 1e-6
    estimates = [gradient, problem.loss_and_gradient(x)[1]]
    if name != "logistic":  # which takes all tasks at once
        estimates.append(problem.snapshot(x).gradient(x, torch.arange(4)))
    for found in estimates:
        problem.manifold.check_tangent(x, found, atol=1e-12)
    assert math.isfinite(float(problem.fisher(x).solve(gradient, 1e-3).norm()))


@pytest.mark.parametrize("kind", ["exact", "row-block"])
def test_noiseless_completion_ends_at_the_accuracy_of_its_gradients(kind):
    """Its loss is a difference of squares, with rounding errors of ε‖x‖² where the truth is 0."""
    g = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (60, 200))
    table, seen = left @ right.mT, torch.rand(60, 200, generator=g) < 0.4
    rows, columns = seen.nonzero().mT
    problem = CompletionProblem(Ratings(rows, columns, table[seen]), rank=3, orientation="rows")
    start = problem.spectral_start()
    assert (
        minimize(problem, start, fisher=kind, max_iter=60, stop=GradientNorm(1e-12)).status
        == "converged"
    )
    result = minimize(problem, start, fisher=kind, max_iter=60, stop=GradientNorm(0.0))
    assert result.status == "converged"
    assert "is its rounding error" in result.message
    assert result.trace["gradient_norm"][-1] < 1e-13
