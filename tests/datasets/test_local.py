"""Reading packed files: exact values, ids from 0, and errors that say where a set comes from."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest

from fisherfold import datasets

needs_data = pytest.mark.skipif(
    not os.environ.get("FISHERFOLD_DATA"), reason="FISHERFOLD_DATA is not set"
)
SPLITS = {"train_idx": np.zeros((10, 2), np.uint16), "train_fold": np.ones((10, 2), np.uint8)}


def test_school_tasks_follow_task_start(tmp_path):
    x = np.arange(5 * 28, dtype=np.uint8).reshape(5, 28)
    y = np.array([3, 1, 4, 1, 5], np.uint8)
    np.savez(tmp_path / "school.npz", x=x, y=y, task_start=np.array([0, 2, 3], np.int32), **SPLITS)
    data = datasets.load_tasks("school", folder=tmp_path)
    assert data.X.dtype == np.float64
    np.testing.assert_array_equal(data.X, x)
    np.testing.assert_array_equal(data.y, [3.0, 1.0, 4.0, 1.0, 5.0])
    np.testing.assert_array_equal(data.task, [0, 0, 1, 2, 2])
    np.testing.assert_array_equal(data.task_ids, [1, 2, 3])


def test_tasks_with_gaps_in_their_ids_count_from_zero(tmp_path):
    task = np.array([2, 92, 2, 40], np.uint8)
    y = np.array([-1, 1, 1, -1], np.int8)
    np.savez(tmp_path / "mhc.npz", X=np.eye(4, dtype=np.uint8), task=task, y=y, **SPLITS)
    data = datasets.load_tasks("mhc", folder=tmp_path)
    np.testing.assert_array_equal(data.task, [0, 2, 0, 1])
    np.testing.assert_array_equal(data.task_ids[data.task], task)
    np.testing.assert_array_equal(data.y, y)


def test_jester_leaves_out_what_was_not_rated(tmp_path):
    stored = np.array([[9900, -995, 0], [123, 9900, 9900]], np.int16)
    np.savez(tmp_path / "jester1.npz", ratings_x100=stored)
    data = datasets.load_ratings("jester1", folder=tmp_path)
    assert data.shape == (2, 3)
    assert data.rows.dtype == np.int32
    np.testing.assert_array_equal(np.stack([data.rows, data.cols]), [[0, 0, 1], [1, 2, 0]])
    np.testing.assert_array_equal(data.values, [-9.95, 0.0, 1.23])


def test_movielens_ids_count_from_zero(tmp_path):
    ids = np.array([1, 3], np.uint16)
    rating = np.array([5, 2], np.uint8)
    arrays = {
        "user_id": ids,
        "movie_id": ids[::-1],
        "rating": rating,
        "shape": np.array([3, 4], np.int32),
    }
    np.savez(tmp_path / "movielens1m.npz", **arrays)
    data = datasets.load_ratings("movielens1m", folder=tmp_path)
    assert data.shape == (3, 4)
    np.testing.assert_array_equal(np.stack([data.rows, data.cols]), [[0, 2], [2, 0]])
    np.testing.assert_array_equal(data.values, [5.0, 2.0])


def test_missing_folder_says_what_the_variable_is(monkeypatch, tmp_path):
    monkeypatch.delenv("FISHERFOLD_DATA", raising=False)
    with pytest.raises(
        FileNotFoundError, match="set the environment variable FISHERFOLD_DATA to the folder"
    ):
        datasets.load("school")
    monkeypatch.setenv("FISHERFOLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(
        FileNotFoundError, match=r"FISHERFOLD_DATA, the folder .* is '.*nowhere', which is not"
    ):
        datasets.load("school")


def test_missing_file_says_where_the_set_comes_from(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"no file movielens1m.npz .* comes from https://grouplens.org.* perm",
    ):
        datasets.load("movielens1m", folder=tmp_path)


@pytest.mark.parametrize("name", sorted(datasets.REGISTRY))
def test_what_is_missing_comes_with_a_command_that_works(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FISHERFOLD_CACHE", str(tmp_path))
    wanted = f"datasets {'fetch' if datasets.record(name).url else 'info'} {name}'"
    for given in (None, str(tmp_path)):
        monkeypatch.delenv("FISHERFOLD_DATA", raising=False)
        if given is not None:
            monkeypatch.setenv("FISHERFOLD_DATA", given)
        with pytest.raises(FileNotFoundError, match=wanted):
            datasets.load(name)


def test_a_file_without_its_arrays_is_named(tmp_path):
    np.savez(tmp_path / "jester1.npz", other=np.zeros(2))
    with pytest.raises(
        ValueError, match=r"jester1.npz lacks the arrays \['ratings_x100'\], it has \['other'\]"
    ):
        datasets.load("jester1", folder=tmp_path)


@pytest.mark.parametrize("form", ["short", "pointer", "empty", "array", "bit"])
def test_a_damaged_file_is_named(tmp_path, form):
    file = tmp_path / "jester1.npz"
    np.savez(file, ratings_x100=np.arange(300, dtype=np.int16).reshape(3, 100))
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 255
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    contents = {
        "short": whole[:400],
        "pointer": pointer,
        "empty": b"",
        "array": buffer.getvalue(),
        "bit": whole,
    }
    file.write_bytes(contents[form])
    said = r"jester1.npz cannot be read as a packed data file: (it is cut|Bad CRC).*; delete it and get it again"
    with pytest.raises(ValueError, match=said):
        datasets.load("jester1", folder=tmp_path)


def test_pickled_content_is_refused(tmp_path):
    np.savez(tmp_path / "jester1.npz", ratings_x100=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        datasets.load("jester1", folder=tmp_path)


def test_unknown_name_and_wrong_kind(tmp_path):
    with pytest.raises(ValueError, match="there is no data set 'iris'; the names are jester1"):
        datasets.record("iris")
    np.savez(tmp_path / "jester1.npz", ratings_x100=np.zeros((2, 3), np.int16))
    with pytest.raises(ValueError, match="jester1 is not a data set of Tasks but Ratings"):
        datasets.load_tasks("jester1", folder=tmp_path)


def test_verify_finds_a_changed_shape_and_a_changed_byte(tmp_path):
    np.savez(tmp_path / "sarcos_test.npz", micro=np.zeros((2, 28), np.int32))
    with pytest.raises(
        ValueError, match=r"array 'micro' should be int32 \(4449, 28\), got int32 \(2, 28\)"
    ):
        datasets.verify("sarcos_test", folder=tmp_path)
    np.savez(tmp_path / "sarcos_test.npz", micro=np.zeros((4449, 28), np.int32))
    with pytest.raises(
        ValueError,
        match=r"array 'micro' has the sha256 [0-9a-f]{64}, expected d5d94fe1.* delete it",
    ):
        datasets.verify("sarcos_test", folder=tmp_path)


@needs_data
@pytest.mark.parametrize("name", sorted(datasets.REGISTRY))
def test_real_files_have_their_checksums(name):
    datasets.verify(name)


@needs_data
def test_real_sets_have_the_published_figures():
    school = datasets.load_tasks("school")
    assert np.bincount(school.task).min() == 22
    assert np.bincount(school.task).max() == 251
    assert school.y.mean() == pytest.approx(20.597, abs=5e-4)
    jester = datasets.load_ratings("jester1")
    assert jester.values.size == 1_810_455
    assert jester.values.mean() == pytest.approx(0.879759, abs=5e-7)
    movies = datasets.load_ratings("movielens1m")
    assert movies.values.mean() == pytest.approx(3.581564, abs=5e-7)
    sarcos = datasets.load_tasks("sarcos_7x2000")
    assert np.bincount(sarcos.task).tolist() == [2000] * 7
