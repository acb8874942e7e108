"""Statistics of many tasks: equal to the plain sums, whatever the sizes and however the rows arrive."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherfold.subspace.tasks import TaskStatistics


def rows(seed: int, sizes: list[int], n: int = 3):
    g = torch.Generator().manual_seed(seed)
    task = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    task = task[torch.randperm(len(task), generator=g)]
    X = torch.randn(len(task), n, generator=g, dtype=torch.float64)
    y = torch.randn(len(task), generator=g, dtype=torch.float64)
    weight = torch.rand(len(task), generator=g, dtype=torch.float64)
    return X, y, task, weight


def plain(X, y, task, weight, t):
    inside = task == t
    Xt, yt, s = X[inside], y[inside], weight[inside]
    return Xt.T @ (s[:, None] * Xt), Xt.T @ (s * yt), (s * yt * yt).sum(), (s * yt).sum(), s.sum()


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda s: sum(s) > 0),
    st.integers(0, 10**6),
)
def test_statistics_are_the_sums_over_the_rows_of_each_task(sizes, seed):
    X, y, task, weight = rows(seed, sizes)
    found = TaskStatistics.from_rows(X, y, task, n_tasks=len(sizes), sample_weight=weight)
    for t in range(len(sizes)):
        parts = (found.gram[t], found.cross[t], found.power[t], found.sums[t], found.counts[t])
        for got, expected in zip(parts, plain(X, y, task, weight, t), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_streaming_in_pieces_gives_the_same():
    X, y, task, weight = rows(1, [5, 1, 30, 8])
    whole = TaskStatistics.from_rows(X, y, task, sample_weight=weight)
    pieces = TaskStatistics.empty(4, 3)
    for part in torch.arange(len(y)).split(7):
        pieces.add(X[part], y[part], task[part], sample_weight=weight[part])
    for got, expected in zip(pieces.parts(), whole.parts(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_many_blocks_under_a_small_memory_limit(monkeypatch):
    X, y, task, weight = rows(2, list(range(1, 60)))
    whole = TaskStatistics.from_rows(X, y, task, sample_weight=weight)
    monkeypatch.setattr("fisherfold.subspace.tasks._BLOCK_ENTRIES", 50)
    small = TaskStatistics.from_rows(X, y, task, sample_weight=weight)
    torch.testing.assert_close(small.gram, whole.gram, rtol=1e-13, atol=1e-13)


def test_nmse_is_the_mean_of_the_per_task_ratios():
    X, y, task, _ = rows(3, [6, 9, 4])
    found = TaskStatistics.from_rows(X, y, task)
    v = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ratios = [
        ((X[task == t] @ v[t] - y[task == t]) ** 2).mean() / y[task == t].var(unbiased=True)
        for t in range(3)
    ]
    torch.testing.assert_close(found.nmse(v), torch.stack(ratios).mean(), rtol=1e-12, atol=0)


def test_nmse_leaves_out_tasks_without_variance():
    X, y, task, _ = rows(4, [6, 1, 5])
    y = torch.where(task == 2, 7.3, y)
    found = TaskStatistics.from_rows(X, y, task)
    v = torch.zeros(3, 3, dtype=torch.float64)
    only = TaskStatistics.from_rows(X[task == 0], y[task == 0], task[task == 0])
    torch.testing.assert_close(found.nmse(v), only.nmse(v[:1]))
    assert float(found.target_variance()[2]) == 0.0


def test_extended_selected_and_pooled():
    X, y, task, _ = rows(5, [6, 2, 5])
    found = TaskStatistics.from_rows(X, y, task)
    assert found.extended(5).counts.tolist() == [6, 2, 5, 0, 0]
    torch.testing.assert_close(found.select(torch.tensor([2, 0])).cross, found.cross[[2, 0]])
    torch.testing.assert_close(found.pooled().gram[0], X.T @ X, rtol=1e-13, atol=1e-13)


def test_errors_name_the_argument():
    X, y, task, weight = rows(6, [3, 3])
    with pytest.raises(ValueError, match="X has no rows"):
        TaskStatistics.from_rows(X[:0], y[:0], task[:0])
    with pytest.raises(
        ValueError, match=r"y must have one entry per row of X \(6\), got shape \(5,\)"
    ):
        TaskStatistics.from_rows(X, y[:5], task)
    with pytest.raises(ValueError, match="X must be finite"):
        TaskStatistics.from_rows(X.index_fill(0, torch.tensor([1]), float("nan")), y, task)
    with pytest.raises(ValueError, match=r"sample_weight must not be negative, got -0.5"):
        TaskStatistics.from_rows(
            X, y, task, sample_weight=weight.index_fill(0, torch.tensor([0]), -0.5)
        )
    with pytest.raises(ValueError, match="task must lie between 0 and 0, got 0 to 1"):
        TaskStatistics.from_rows(X, y, task, n_tasks=1)
    with pytest.raises(ValueError, match=r"X must have shape \(rows, 3\), got \(6, 2\)"):
        TaskStatistics.empty(2, 3).add(X[:, :2], y, task)


def test_products_that_are_kept_are_those_of_the_vectors_asked_for():
    X, y, task, _ = rows(4, [6, 9, 4])
    found = TaskStatistics.from_rows(X, y, task)
    kept = found.cached()
    frames = [
        torch.randn(3, 2, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
        for s in range(3)
    ]
    for frame in (*frames, frames[0], frames[2], frames[2].mT.contiguous().mT, frames[2][:, :1]):
        assert torch.equal(kept.times(frame), found.times(frame))
        torch.testing.assert_close(kept.times(frame), found.gram @ frame, rtol=1e-13, atol=1e-13)
    assert kept.times(frames[1]) is kept.times(frames[1].clone())
    frames[1][0, 0] += 1
    assert torch.equal(kept.times(frames[1]), found.times(frames[1]))
    noise = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(kept.scaled_gram(noise), (found.gram / noise[:, None, None]).sum(0))


def test_the_power_of_residuals_of_one_vector_is_that_of_a_copy_for_each_task():
    X, y, task, _ = rows(5, [6, 9, 4])
    found = TaskStatistics.from_rows(X, y, task)
    shared = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    expected = torch.stack(
        [(X[task == t] @ shared - y[task == t]).square().sum() for t in range(3)]
    )
    for weights in (shared, shared.expand(3, 3)):
        torch.testing.assert_close(found.residual_power(weights), expected, rtol=1e-12, atol=0.0)
