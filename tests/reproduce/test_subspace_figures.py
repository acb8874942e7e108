"""The plans of the School and Sarcos figures."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from fisherfold import datasets
from fisherfold.reproduce import subspace
from fisherfold.reproduce.figures import run_figure
from fisherfold.reproduce.verdicts import compare
from fisherfold.solvers import minimize

needs_data = pytest.mark.skipif(
    not os.environ.get("FISHERFOLD_DATA"), reason="FISHERFOLD_DATA is not set"
)


def test_every_task_is_split_80_to_20():
    task = np.repeat([0, 1, 2], [5, 10, 23])
    train, test = subspace.split_rows(task, 3)
    assert sorted([*train, *test]) == list(range(38))
    assert np.bincount(task[train]).tolist() == [4, 8, 18]
    assert not np.array_equal(train, subspace.split_rows(task, 4)[0])


def write_sarcos(path, rows=60, seed=0):
    from scipy.io import savemat

    values = np.random.default_rng(seed).normal(size=(rows, 28))
    savemat(path, {"sarcos_inv": values})
    return values


def test_the_original_sarcos_file_is_used_if_it_is_in_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FISHERFOLD_DATA", str(tmp_path))
    values = write_sarcos(tmp_path / "sarcos_inv.mat")
    plan = subspace.sarcos()
    assert plan.note == ""
    assert "60 rows" in plan.title
    problem, _ = plan.make(0)
    assert problem.n_samples == 7
    assert float(problem.statistics.counts.sum() + problem.held_out.counts.sum()) == 7 * 60
    total = problem.statistics.power + problem.held_out.power
    torch.testing.assert_close(total, torch.tensor((values[:, 21:] ** 2).sum(0)))
    write_sarcos(tmp_path / "sarcos_inv.mat", seed=1)
    assert subspace.sarcos().settings != plan.settings, "files of the same length are told apart"


@needs_data
def test_the_stand_in_is_named_on_the_figure():
    plan = subspace.sarcos()
    assert "Not the paper's data" in plan.note
    assert "2,000 rows" in plan.title


@needs_data
def test_scaling_is_between_0_and_1_within_each_task():
    data = datasets.load_tasks("sarcos_7x2000")
    scaled = subspace.scaled_per_task(data.X, data.task)
    for t in range(7):
        assert scaled[data.task == t].min() == 0.0
        assert scaled[data.task == t].max() == 1.0


@needs_data
def test_rngd_ends_lowest_on_sarcos(tmp_path):
    result = run_figure(lambda: subspace.sarcos().quick(), tmp_path, seeds=2)
    for column in result.plan.metrics:
        found = compare(result, column, "lowest")
        assert found.wins == 2
        assert max(np.subtract(found.own, found.other)) < -0.02


@needs_data
def test_a_school_run_improves_the_training_error_and_not_the_held_out_one():
    plan = subspace.school()
    problem, x0 = plan.make(0)
    method = plan.methods[0]
    result = minimize(
        problem, x0, method.method, max_iter=12, step=method.steps[0], **method.options
    )
    assert result.trace["train_nmse"][-1] < 0.9 * result.trace["train_nmse"][0]
    # the plain problem does not generalise: worse than predicting each school's mean
    assert result.trace["held_out_nmse"][-1] > 0.9
