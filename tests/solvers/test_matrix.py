"""Every method on every problem: the known minimum, both precisions, the same bits from a seed and after a resume."""

import math

import pytest
import torch

from fisherfold import minimize
from fisherfold.files import read_tensors
from fisherfold.manifolds.base import leaves
from fisherfold.solvers import METHODS

DTYPES = [torch.float64, torch.float32]


def rows(result):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in result.trace]


def same_rows(first, second):
    """Equal to the bit, NaN equal to NaN."""
    return len(first) == len(second) and all(
        a.keys() == b.keys()
        and all(a[k] == b[k] or (math.isnan(a[k]) and math.isnan(b[k])) for k in a)
        for a, b in zip(first, second, strict=True)
    )


def same_points(x, y):
    return all(torch.equal(a, b) for a, b in zip(leaves(x), leaves(y), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_minimum_is_found(method, task_name, dtype, tasks, options):
    if (
        dtype == torch.float32
        and method in {"rsgd", "rsvrg", "rngd-vr"}
        and task_name in {"completion", "network"}
    ):
        pytest.skip("slow, and the same code as on the other problems")
    task = tasks[task_name](dtype)
    passes = 10 if method == "rngd-vr" else 40
    result = minimize(task.problem, task.x0, method, max_iter=passes, **options[method])
    task.problem.manifold.check_point(result.x)
    assert all(leaf.dtype == dtype for leaf in leaves(result.x))
    start = float(task.problem.loss(task.x0))
    assert result.value == float(task.problem.loss(result.x))
    assert result.value == min(result.trace["loss"])
    if math.isnan(task.minimum):
        assert result.value < 0.7 * start
        return
    # the decaying steps of rsgd and the damped ones of the variance-reduced methods are not there yet after 40 passes
    rate = {"rsgd": 0.05, "rsvrg": 1e-2, "rngd-vr": 1e-2, "rgd": 1e-3, "rcg": 1e-4}.get(
        method, 1e-6
    )
    floor = 1e-12 if dtype == torch.float64 else 1e-6
    assert result.value >= task.minimum - floor * (1 + start)
    assert result.value - task.minimum <= rate * (start - task.minimum) + floor * (1 + start)


def test_the_same_seed_gives_the_same_bits(method, task_name, tasks, options):
    task = tasks[task_name]()
    first, second = (
        minimize(task.problem, task.x0, method, max_iter=4, seed=7, **options[method])
        for _ in range(2)
    )
    assert same_points(first.x, second.x)
    assert same_points(first.last, second.last)
    assert same_rows(rows(first), rows(second))


def test_the_default_device_does_not_matter(method, tasks, options, tmp_path):
    """Batches are drawn on the CPU, by a generator that belongs there, and traces kept there."""
    task = tasks["grassmann"]()
    extra = {"batch_size": 10} if method == "rngd" else {}
    common = {"max_iter": 4, **options[method], **extra}
    here = minimize(task.problem, task.x0, method, **common)
    with torch.device("meta"):
        minimize(
            task.problem, task.x0, method, checkpoint=tmp_path / "c", **(common | {"max_iter": 2})
        )
        there = minimize(
            task.problem, task.x0, method, checkpoint=tmp_path / "c", resume=True, **common
        )
    assert same_points(here.last, there.last)
    assert same_rows(rows(here), rows(there))


@pytest.mark.parametrize("method_name", ["rsgd", "rsvrg", "rngd-vr", "rngd"])
def test_another_seed_gives_another_run(method_name, tasks, options):
    task = tasks["sphere"]()
    extra = {"batch_size": 10} if method_name == "rngd" else {}
    first, second = (
        minimize(
            task.problem, task.x0, method_name, max_iter=3, seed=s, **(options[method_name] | extra)
        )
        for s in (1, 2)
    )
    assert not same_points(first.last, second.last)


def interrupted(task, method, path, options, *, every, killed_at, until, dtype_seed=0):
    """Run, die in the callback between two checkpoints, and go on from the file."""

    def die(state):
        if state.iteration == killed_at:
            raise RuntimeError("killed")

    common = {"checkpoint": path, "checkpoint_every": every, "seed": dtype_seed, "max_iter": until}
    with pytest.raises(RuntimeError, match="killed"):
        minimize(task.problem, task.x0, method, callback=die, **common, **options)
    return minimize(task.problem, task.x0, method, resume=True, **common, **options)


def test_a_killed_run_goes_on_to_the_same_bits(method, task_name, tasks, options, tmp_path):
    task = tasks[task_name]()
    common = {"max_iter": 7, **options[method]}
    whole = minimize(task.problem, task.x0, method, checkpoint=tmp_path / "whole", **common)
    # die in the middle of what the run needs, between two checkpoints
    killed_at = max(1, min(5, whole.iterations - 1))
    parts = interrupted(
        tasks[task_name](),
        method,
        tmp_path / "parts",
        options[method],
        every=2,
        killed_at=killed_at,
        until=7,
    )
    assert same_points(parts.x, whole.x)
    assert same_points(parts.last, whole.last)
    assert parts.value == whole.value
    assert (parts.status, parts.message, parts.iterations) == (
        whole.status,
        whole.message,
        whole.iterations,
    )
    assert same_rows(rows(parts), rows(whole))
    (ours, our_header), (theirs, their_header) = (
        read_tensors(tmp_path / name, kind="checkpoint", version=3) for name in ("parts", "whole")
    )
    assert ours.keys() == theirs.keys()
    # the trace, which is compared above, has seconds
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "trace")
    assert our_header["numbers"] == their_header["numbers"]


@pytest.mark.parametrize("batch_size", [10, lambda k: min(40, 5 + 3 * k)])
def test_stochastic_rngd_goes_on_to_the_same_bits(batch_size, tasks, tmp_path):
    for name in ("sphere", "network"):
        task, options = tasks[name](), {"batch_size": batch_size, "sigma": 0.1}
        whole = minimize(task.problem, task.x0, "rngd", max_iter=8, evaluate_every=3, **options)
        path = tmp_path / name

        def die(state):
            if state.iteration == 5:
                raise RuntimeError("killed")

        common = {"checkpoint": path, "checkpoint_every": 2, "max_iter": 8, "evaluate_every": 3}
        with pytest.raises(RuntimeError, match="killed"):
            minimize(task.problem, task.x0, "rngd", callback=die, **common, **options)
        parts = minimize(task.problem, task.x0, "rngd", resume=True, **common, **options)
        assert same_points(parts.last, whole.last)
        assert same_rows(rows(parts), rows(whole))


def test_float32_resumes_to_the_same_bits(method, tasks, options, tmp_path):
    task = tasks["grassmann"](torch.float32)
    whole = minimize(task.problem, task.x0, method, max_iter=5, **options[method])
    parts = interrupted(
        task, method, tmp_path / "c", options[method], every=2, killed_at=3, until=5
    )
    assert same_points(parts.last, whole.last)
    assert same_rows(rows(parts), rows(whole))


def test_a_longer_run_continues_a_finished_one(method, tasks, options, tmp_path):
    task = tasks["sphere"]()
    whole = minimize(task.problem, task.x0, method, max_iter=6, **options[method])
    minimize(
        task.problem, task.x0, method, max_iter=3, checkpoint=tmp_path / "c", **options[method]
    )
    more = minimize(
        task.problem,
        task.x0,
        method,
        max_iter=6,
        checkpoint=tmp_path / "c",
        resume=True,
        **options[method],
    )
    assert same_points(more.last, whole.last)
    assert same_rows(rows(more), rows(whole))


def test_all_methods_are_in_this_matrix(options):
    assert set(options) == set(METHODS)


def test_the_start_is_left_alone(method, tasks, options):
    task = tasks["quadratic"]()
    before = task.x0.clone()
    minimize(task.problem, task.x0, method, max_iter=3, **options[method])
    assert torch.equal(task.x0, before)


def test_no_iteration_at_all_returns_the_start(method, task_name, tasks, options):
    task = tasks[task_name]()
    result = minimize(task.problem, task.x0, method, max_iter=0, **options[method])
    assert same_points(result.x, task.x0)
    assert (result.status, result.iterations) == ("max_iter", 0)
    assert result.message.startswith("0 iterations are made; the gradient norm is")
    assert len(result.trace) == 1
    assert result.value == float(task.problem.loss(task.x0))
