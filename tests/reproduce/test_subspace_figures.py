"""The plans of the School and Sarcos figures."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from fisherfold import datasets
from fisherfold.reproduce import subspace
from fisherfold.reproduce.figures import run_figure
from fisherfold.solvers import minimize

needs_data = pytest.mark.skipif(not os.environ.get("FISHERFOLD_DATA"), reason="FISHERFOLD_DATA is not set")


def test_every_task_is_split_80_to_20():
    task = np.repeat([0, 1, 2], [5, 10, 23])
    train, test = subspace.split_rows(task, 3)
    assert sorted([*train, *test]) == list(range(38))
    assert np.bincount(task[train]).tolist() == [4, 8, 18]
    assert not np.array_equal(train, subspace.split_rows(task, 4)[0])


def write_sarcos(path, rows=60):
    from scipy.io import savemat

    values = np.random.default_rng(0).normal(size=(rows, 28))
    savemat(path, {"sarcos_inv": values})
    return values


def test_a_sarcos_file_that_is_given_is_used(tmp_path):
    values = write_sarcos(tmp_path / "mine.mat")
    plan = subspace.sarcos(sarcos_file=tmp_path / "mine.mat")
    assert plan.note == ""
    assert "60 rows" in plan.title
    problem, _ = plan.make(0)
    assert problem.n_samples == 7
    assert float(problem.statistics.counts.sum() + problem.held_out.counts.sum()) == 7 * 60
    total = problem.statistics.power + problem.held_out.power
    torch.testing.assert_close(total, torch.tensor((values[:, 21:] ** 2).sum(0)))


def test_a_sarcos_file_in_the_data_folder_is_found(tmp_path):
    write_sarcos(tmp_path / "sarcos_inv.mat")
    assert "60 rows" in subspace.sarcos(folder=tmp_path).title


def test_sarcos_files_of_the_same_length_are_told_apart(tmp_path):
    values = write_sarcos(tmp_path / "sarcos_inv.mat")
    one = subspace.sarcos(folder=tmp_path).settings
    assert one == subspace.sarcos(sarcos_file=tmp_path / "sarcos_inv.mat").settings
    from scipy.io import savemat

    savemat(tmp_path / "sarcos_inv.mat", {"sarcos_inv": values[::-1]})
    assert subspace.sarcos(folder=tmp_path).settings != one


@needs_data
def test_sarcos_is_found_in_the_cache_without_a_data_folder(tmp_path, monkeypatch):
    whole = subspace.sarcos()
    (tmp_path / "sarcos_7x2000.npz").symlink_to(datasets.data_folder() / "sarcos_7x2000.npz")
    monkeypatch.setenv("FISHERFOLD_CACHE", str(tmp_path))
    monkeypatch.delenv("FISHERFOLD_DATA")
    assert subspace.sarcos().settings == whole.settings


@needs_data
def test_the_data_of_the_record_leave_no_trace_in_the_settings():
    for plan in (subspace.school(), subspace.sarcos()):
        assert "data" not in plan.settings
        assert "other data" not in plan.title


def test_a_sarcos_file_of_another_shape_is_refused(tmp_path):
    from scipy.io import savemat

    savemat(tmp_path / "bad.mat", {"a": np.zeros((3, 5))})
    with pytest.raises(ValueError, match=r"one matrix of 28 columns .* got \{'a': \(3, 5\)\}"):
        subspace.sarcos(sarcos_file=tmp_path / "bad.mat")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none.mat; SARCOS comes from http"):
        subspace.sarcos(sarcos_file=tmp_path / "none.mat")


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
        claim = result.claim(column)
        assert claim["lowest_in"] == 2
        assert claim["gap"] < -0.02


@needs_data
def test_a_school_run_improves_the_training_error_and_not_the_held_out_one():
    plan = subspace.school()
    problem, x0 = plan.make(0)
    method = plan.methods[0]
    result = minimize(problem, x0, method.method, max_iter=12, step=method.steps[0], **method.options)
    assert result.trace["train_nmse"][-1] < 0.9 * result.trace["train_nmse"][0]
    # the plain problem does not generalise: worse than predicting each school's mean
    assert result.trace["held_out_nmse"][-1] > 0.9
