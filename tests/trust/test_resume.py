"""A fit that ends after any pass goes on from its checkpoint to the same bits as one that was left alone."""

from __future__ import annotations

import os
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from fisherfold.completion import MatrixCompletion, MatrixCompletionCV
from fisherfold.solvers.state import State
from fisherfold.tables.checkpoint import FitCheckpoint
from fisherfold.tables.posterior_files import pack_posterior


class Killed(BaseException):
    """Ends a fit as nothing inside it expects."""


@pytest.fixture(scope="module")
def ratings():
    rng = np.random.default_rng(0)
    rows, columns = np.nonzero(rng.random((60, 40)) < 0.4)
    truth = rng.normal(size=(60, 3)) @ rng.normal(size=(3, 40))
    return np.column_stack([rows, columns]), truth[rows, columns] + 0.3 * rng.normal(size=len(rows))


@pytest.fixture(scope="module")
def tasks():
    rng = np.random.default_rng(1)
    X, task = rng.normal(size=(400, 7)), rng.integers(20, size=400)
    slopes = rng.normal(size=(20, 2)) @ rng.normal(size=(2, 7))
    return X, (X * slopes[task]).sum(1) + 0.2 * rng.normal(size=400), task


@contextmanager
def killed_after(monkeypatch, saves):
    """Let a number of checkpoints be written and end the fit right after the last of them."""
    with monkeypatch.context() as patch:
        _count_saves(patch, saves)
        with pytest.raises(Killed):
            yield


def _count_saves(patch, saves):
    for owner in (FitCheckpoint, State):
        save, count = owner.save, [0]

        def counted(self, *args, _save=save, _count=count, **options):
            _save(self, *args, **options)
            _count[0] += 1
            if _count[0] == saves:
                raise Killed

        patch.setattr(owner, "save", counted)


COMPLETIONS = {
    "variational": {},
    "float64": {"dtype": "float64", "rated_sets": False},
    "fixed ridge": {"ridge": 2.0},
    "no offsets": {"offsets": "none"},
}


def assert_same_completion(ours, theirs):
    one, two = (pack_posterior(m.model_.posterior) for m in (ours, theirs))
    assert set(one[0]) == set(two[0])
    for name, tensor in one[0].items():
        assert torch.equal(tensor, two[0][name]), name
    traces = [[{k: v for k, v in row.items() if k != "seconds"} for row in part[1].pop("trace")] for part in (one, two)]
    assert traces[0] == traces[1]
    assert one[1] == two[1]


@pytest.mark.parametrize("name", list(COMPLETIONS))
@pytest.mark.parametrize("passes", [1, 3])
def test_completion(ratings, tmp_path, monkeypatch, name, passes):
    options = {"rank": 3, "max_iter": 8, "tol": 0.0, **COMPLETIONS[name]}
    whole = MatrixCompletion(**options).fit(*ratings)
    file = tmp_path / "fit.checkpoint"
    with killed_after(monkeypatch, passes):
        MatrixCompletion(**options, checkpoint=file).fit(*ratings)
    assert file.is_file()
    resumed = MatrixCompletion(**options, checkpoint=file).fit(*ratings)
    assert_same_completion(whole, resumed)
    assert list(tmp_path.iterdir()) == []


def test_a_fit_killed_after_its_last_pass_makes_no_further_one(ratings, tmp_path, monkeypatch):
    options = {"rank": 2}
    whole = MatrixCompletion(**options).fit(*ratings)
    assert whole.converged_
    with killed_after(monkeypatch, whole.n_iter_):
        MatrixCompletion(**options, checkpoint=tmp_path / "c").fit(*ratings)
    assert_same_completion(whole, MatrixCompletion(**options, checkpoint=tmp_path / "c").fit(*ratings))


def test_more_passes_may_be_asked_for(ratings, tmp_path, monkeypatch):
    whole = MatrixCompletion(rank=3, max_iter=9, tol=0.0).fit(*ratings)
    with killed_after(monkeypatch, 4):
        MatrixCompletion(rank=3, max_iter=4, tol=0.0, checkpoint=tmp_path / "c").fit(*ratings)
    assert_same_completion(
        whole, MatrixCompletion(rank=3, max_iter=9, tol=0.0, checkpoint=tmp_path / "c").fit(*ratings)
    )


@pytest.mark.parametrize("saves", [1, 4, 8])
def test_cross_validation(ratings, tmp_path, monkeypatch, saves):
    """Three folds with two ridges are six saves of the search; the final fit comes after them."""
    options = {"ranks": (1, 3), "ridges": (None, 1.0), "max_iter": 6}
    whole = MatrixCompletionCV(**options).fit(*ratings)
    with killed_after(monkeypatch, saves):
        MatrixCompletionCV(**options, checkpoint=tmp_path / "c").fit(*ratings)
    resumed = MatrixCompletionCV(**options, checkpoint=tmp_path / "c").fit(*ratings)
    assert_same_completion(whole, resumed)
    for name in ("mean_rmse", "std_rmse"):
        assert whole.cv_results_[name].tolist() == resumed.cv_results_[name].tolist()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_fit_is_refused(ratings, tmp_path, monkeypatch):
    X, y = ratings
    file = tmp_path / "c"
    with killed_after(monkeypatch, 1):
        MatrixCompletion(rank=2, checkpoint=file).fit(X, y)
    with pytest.raises(ValueError, match=r"checkpoint .*c belongs to another fit, it differs in rank; remove the file"):
        MatrixCompletion(rank=3, checkpoint=file).fit(X, y)
    with pytest.raises(ValueError, match="it differs in data"):
        MatrixCompletion(rank=2, checkpoint=file).fit(X, y + 0.1 * np.sin(y))


@pytest.mark.skipif(os.name != "posix", reason="links need rights elsewhere")
def test_a_checkpoint_behind_a_link_is_removed_and_the_link_stays(ratings, tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    link, file = tmp_path / "fit.checkpoint", tmp_path / "scratch" / "fit"
    link.symlink_to(file)
    model = MatrixCompletion(3, checkpoint=link, max_iter=3)
    with killed_after(monkeypatch, 2):
        model.fit(*ratings)
    assert file.exists()
    model.fit(*ratings)
    assert link.is_symlink()
    assert not list(file.parent.iterdir())


def test_a_checkpoint_needs_a_folder(ratings, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"checkpoint .*c: the folder .*no does not exist"):
        MatrixCompletion(rank=2, checkpoint=tmp_path / "no" / "c").fit(*ratings)
    with pytest.raises(IsADirectoryError, match="must be a file, it is a folder"):
        MatrixCompletion(rank=2, checkpoint=tmp_path).fit(*ratings)


def test_a_stream_may_start_with_a_single_rating(ratings):
    """The rank is larger than the first batches have rows; the surplus factors wait at their prior."""
    X, y = ratings
    order = np.random.default_rng(0).permutation(len(y))
    stream = MatrixCompletion(rank=5, tol=1e-5, max_iter=100)
    for start, stop in ((0, 1), (1, 3), (3, 10), (10, 100), (100, len(y))):
        part = order[start:stop]
        stream.partial_fit(X[part], y[part])
        assert np.isfinite(stream.predict(X)).all()
    assert stream.model_.posterior.rank == 5
    whole = MatrixCompletion(rank=5, tol=1e-5, max_iter=100).fit(X, y)
    errors = [np.sqrt(np.mean((model.predict(X) - y) ** 2)) for model in (stream, whole)]
    assert errors[0] < 1.2 * errors[1]
    with pytest.raises(ValueError, match=r"rank must be between 1 and min\(n_rows, n_columns\)"):
        MatrixCompletion(rank=5).fit(X[:1], y[:1])
    with pytest.raises(ValueError, match="rank must be between 1 and min"):
        MatrixCompletion(rank=5, inference="point").partial_fit(X[:1], y[:1])
