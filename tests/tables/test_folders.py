"""Model folders: replaced as a whole or not at all, never a foreign one, and read as the old model or the new."""

import errno
import multiprocessing
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from fisherfold.files import sound, write_tensors
from fisherfold.tables import folders
from fisherfold.tables.folders import (
    check_folder,
    expect,
    expect_number,
    load_folder,
    model_file,
    pack_index,
    save_folder,
    unpack_index,
)
from fisherfold.tables.ids import IdIndex
from toy import slow

posix = pytest.mark.skipif(os.name != "posix", reason="links, limits and signals of POSIX")


def save(path, value=1.0, kind="thing"):
    save_folder(
        path,
        kind,
        {"a": np.full(3, value), "n": torch.arange(2)},
        {"value": value, "trace": [float("nan")]},
    )


def test_arrays_and_meta_come_back(tmp_path):
    save(tmp_path / "deep" / "m", 2.0)
    arrays, meta = load_folder(tmp_path / "deep" / "m", "thing")
    assert arrays["a"].tolist() == [2.0] * 3
    assert arrays["n"].tolist() == [0, 1]
    assert (meta["value"], meta["trace"]) == (2.0, [None])
    assert '"value": 2.0' in (tmp_path / "deep" / "m" / "model.json").read_text()


def test_many_text_ids_can_be_saved(tmp_path):
    """0.1.0 kept them in a header of 16 MiB at most, and found out after the fit."""
    index = IdIndex([f"a school with a long name, number {k}" for k in range(430_000)])
    save_folder(tmp_path / "m", "thing", pack_index(index, "tasks"), {})
    arrays, _ = load_folder(tmp_path / "m", "thing")
    assert (
        unpack_index(arrays, "tasks", 430_000).labels[[0, -1]].tolist()
        == index.labels[[0, -1]].tolist()
    )
    with pytest.raises(ValueError, match=r"430000 ids of 7 tasks"):
        unpack_index(arrays, "tasks", 7)


def foreign(folder, what):
    folder.mkdir()
    (folder.parent / "target").write_text("precious")
    if what == "link":
        folder.rmdir()
        (folder.parent / "real").mkdir()
        folder.symlink_to("real")
    elif what in {"model.json", "model.safetensors"}:
        (folder / what).write_text("precious")
    elif what == "links inside":
        for name in ("model.json", "model.safetensors"):
            (folder / name).symlink_to(folder.parent / "target")
    elif what == "another model.json":
        save(folder)
        (folder / "model.json").write_text('{"layers": ["precious"]}')
    elif what == "another kind":
        save(folder, kind="other")
    elif what == "a file beside":
        save(folder)
        (folder / "notes.txt").write_text("precious")
    elif what == "file":
        folder.rmdir()
        folder.write_text("precious")


def everything(folder):
    return {
        str(p): p.read_bytes() if p.is_file() else os.path.realpath(p)
        for p in sorted(folder.rglob("*"))
    }


@posix
@pytest.mark.parametrize(
    "what",
    [
        "link",
        "model.json",
        "model.safetensors",
        "links inside",
        "another model.json",
        "another kind",
        "a file beside",
        "file",
    ],
)
def test_nothing_foreign_is_replaced_and_no_link_is_followed(tmp_path, what):
    foreign(tmp_path / "m", what)
    before = everything(tmp_path)
    for act in (save, lambda path: check_folder(path, "thing")):
        with pytest.raises(FileExistsError, match=r"cannot save into .*m: it (is|holds)"):
            act(tmp_path / "m")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("path", [".", "..", "../here", "../link"])
@pytest.mark.parametrize("model", [False, True])
def test_the_current_folder_is_not_exchanged(tmp_path, monkeypatch, path, model):
    here = tmp_path / "all" / "here"
    here.mkdir(parents=True)
    (tmp_path / "all" / "link").symlink_to("here") if path == "../link" else None
    if model:
        save(here)
    monkeypatch.chdir(here)
    with pytest.raises(
        FileExistsError, match=r"cannot save into .*: it is (the current folder|a symbolic link)"
    ):
        save(path)
    assert here.stat().st_ino == os.stat(".").st_ino
    save("m")
    assert load_folder(here / "m", "thing")[1]["value"] == 1.0


def test_an_empty_folder_and_a_model_of_ours_are_replaced_and_nothing_is_left_over(
    tmp_path, monkeypatch
):
    (tmp_path / "m").mkdir()
    for k in range(3):
        save(tmp_path / "m", float(k))
        if k == 1:
            (tmp_path / "m").chmod(0o700)
            model_file(tmp_path / "m").chmod(0o600)
            monkeypatch.setattr(
                folders, "_exchange", lambda *_: False
            )  # a system without it: file by file
        assert load_folder(tmp_path / "m", "thing")[1]["value"] == k
        assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert model_file(tmp_path / "m").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["write_synced", "flush_folder", "_put_in_place"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_save_that_fails_at_any_stage_leaves_the_old_model(tmp_path, monkeypatch, name, error):
    save(tmp_path / "m", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(folders, name, lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(type(error), match=r"No space left|^$"):
            save(tmp_path / "m", 2.0)
    assert load_folder(tmp_path / "m", "thing")[1]["value"] == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    "change", ["truncate", "nan array", "nan meta", "kind", "version", "no file", "no folder"]
)
def test_hostile_models_give_one_error_with_the_name_of_the_file(tmp_path, change):
    save(tmp_path / "m")
    file, error = model_file(tmp_path / "m"), ValueError
    bad = {
        "nan array": ({"a": torch.tensor([np.nan])}, {}),
        "nan meta": ({}, {"x": [{"y": float("nan")}]}),
    }
    if change == "truncate":
        file.write_bytes(file.read_bytes()[:-3])
    elif change == "no file":
        file.unlink()
        error = FileNotFoundError
    elif change == "no folder":
        file = tmp_path / "nothing"
        error = FileNotFoundError
    else:
        tensors, header = bad.get(change, ({}, {}))
        kind, version = (
            ("other" if change == "kind" else "thing"),
            (9 if change == "version" else 1),
        )
        write_tensors(file, tensors, kind=kind, version=version, header=header)
    with pytest.raises(error) as found:
        load_folder(file if change == "no folder" else tmp_path / "m", "thing")
    assert str(tmp_path) in str(found.value)
    with pytest.raises(ValueError, match=r"cannot save the model: its a contain NaN"):
        save_folder(tmp_path / "x", "thing", {"a": np.array([np.inf])}, {})


def test_parts_of_a_model_are_checked(tmp_path):
    arrays = {
        "x": torch.zeros(2, 3),
        "n": torch.arange(3),
        "scalar": torch.tensor(1.0),
        "half": torch.zeros(1).half(),
    }
    assert expect(arrays, "x", (2, None), least=0.0) is arrays["x"]
    assert expect(arrays, "n", (3,), integers=True) is arrays["n"]
    for name, shape, options in [
        ("y", None, {}),
        ("x", (3, 2), {}),
        ("x", (6,), {}),
        ("x", None, {"positive": True}),
        ("x", None, {"least": 1}),
        ("x", None, {"integers": True}),
        ("n", None, {}),
        ("scalar", None, {}),
        ("half", None, {}),
    ]:
        with pytest.raises(ValueError, match=name):
            expect(arrays, name, shape, **options)
    assert expect_number({"x": 3}, "x", least=1) == 3.0
    for value in (None, True, "3", 0, float("nan"), float("inf"), 2**5000, 2.5, [3]):
        with pytest.raises(ValueError, match=r"x is "):
            expect_number({"x": value}, "x", least=1, integer=True)
    with (
        pytest.raises(ValueError, match=r"f is damaged or not a thing .*: it lacks 'k'"),
        sound("f", "thing"),
    ):
        raise KeyError("k")


def write_until(path, value, end):
    while time.time() < end:
        save(path, value)


def read_until(path, end, found):
    seen = set()
    try:
        while time.time() < end:
            arrays, meta = load_folder(path, "thing")
            assert set(arrays["a"].tolist()) == {meta["value"]}
            seen.add(meta["value"])
        found.put(seen)
    except BaseException as error:
        found.put(repr(error))


@posix
@pytest.mark.parametrize("seconds", [1.0, *slow(60.0)])
def test_two_writers_and_three_readers_never_meet_a_mixture_or_an_error(tmp_path, seconds):
    context = multiprocessing.get_context("fork")
    save(tmp_path / "m", 1.0)
    end, found = time.time() + seconds, context.Queue()
    processes = [
        context.Process(target=write_until, args=(tmp_path / "m", value, end))
        for value in (1.0, 2.0)
    ]
    processes += [
        context.Process(target=read_until, args=(tmp_path / "m", end, found)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    seen = [found.get(timeout=seconds + 60) for _ in range(3)]
    for process in processes:
        process.join()
    assert all(isinstance(each, set) for each in seen), seen
    assert set.union(*seen) == {1.0, 2.0}
    assert [process.exitcode for process in processes] == [0] * 5
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@posix
def test_a_full_disk_leaves_the_old_model(tmp_path):
    """A limit on the size of files stands for the disk: the system stops the write in the middle."""
    save(tmp_path / "m", 1.0)
    script = (
        "import resource, signal, sys, numpy as np; from fisherfold.tables.folders import save_folder\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "for limit in (200_000, 5000, 1, 0):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        "    try: save_folder(sys.argv[1], 'thing', {'a': np.zeros(10**5)}, {})\n"
        "    except OSError as error: assert 'File too large' in str(error), error\n"
        "    else: raise SystemExit('saved')\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "m"], check=True)
    assert load_folder(tmp_path / "m", "thing")[1]["value"] == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
