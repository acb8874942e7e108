"""Killed processes and full disks: the old model or the new one is there, whole, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fisherfold
from fisherfold.cli import app
from fisherfold.completion import MatrixCompletion
from toy import slow

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="jobs are forked")
HERE, HOME = Path(__file__).parent, str(Path(fisherfold.__file__).parents[1])
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": HOME,
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "300",
    "POLARS_MAX_THREADS": "1",
}


@pytest.mark.parametrize("count", [8, *slow(200)])
def test_kills_at_random_moments_of_fit_and_save(count):
    words = [sys.executable, HERE.parents[1] / "fuzz" / "kills.py", "--kills", str(count)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.replace("'", '"'))
    assert found["alive when killed"] > 0


class Zygote:
    """Starts commands in children of a process that has imported everything."""

    def __init__(self, folder):
        self.log = folder / "log.txt"
        words, pipes = (
            [sys.executable, HERE / "zygote.py"],
            {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
        )
        self.process = subprocess.Popen(words, env=ENVIRONMENT, text=True, **pipes)

    def run(self, *words, **limits):
        """The exit code of a command."""
        self.log.write_text("")
        order = {"args": [str(word) for word in words], "log": str(self.log), **limits}
        self.process.stdin.write(json.dumps(order) + "\n\n")
        self.process.stdin.flush()
        self.process.stdout.readline()
        return os.waitstatus_to_exitcode(int(self.process.stdout.readline()))


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    made = Zygote(tmp_path_factory.mktemp("zygote"))
    yield made
    made.process.stdin.close()
    made.process.wait(30)
    made.process.stdout.close()


@pytest.fixture(scope="module")
def tables(tmp_path_factory, zygote):
    folder = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(0)
    rows, columns = np.nonzero(rng.random((400, 200)) < 0.2)
    lines = [f"u{i},{j},{rng.normal():.3f}" for i, j in zip(rows, columns, strict=True)]
    (folder / "ratings.csv").write_text("user,item,rating\n" + "\n".join(lines) + "\n")
    lines = [",".join(map("{:.4f}".format, rng.normal(size=9))) + f",{k % 30}" for k in range(600)]
    (folder / "tasks.csv").write_text(
        ",".join([*"abcdefgh", "y", "task"]) + "\n" + "\n".join(lines) + "\n"
    )
    words = ["complete", "fit", folder / "ratings.csv", "-o", folder / "model", "-q"]
    assert zygote.run(*words) == 0, zygote.log.read_text()
    return folder


def writes(tables, folder):
    """Commands that write: a folder, a file, a page."""
    return {
        "complete": [
            "complete",
            "fit",
            tables / "ratings.csv",
            "-q",
            "--rank",
            "2",
            "-o",
            folder / "m",
        ],
        "subspace": [
            "subspace",
            "fit",
            tables / "tasks.csv",
            "--target",
            "y",
            "-q",
            "-o",
            folder / "deep" / "m",
        ],
        "predict": [
            "complete",
            "predict",
            tables / "model",
            tables / "ratings.csv",
            "-q",
            "-o",
            folder / "p.csv",
        ],
        "demo": ["demo", "-q", "--output", folder / "d"],
    }


def rejected(zygote, words, **limits):
    code = zygote.run(*words, **limits)
    text = zygote.log.read_text()
    assert code == 2, text
    assert "Traceback" not in text
    assert text.count("error:") == 1
    return " ".join(text.split())


def rescued(text):
    """The model that was written elsewhere, removed."""
    place = Path(re.search(r"the fitted model is in (\S+), move it where it should be", text)[1])
    found = sorted(p.name for p in place.iterdir())
    shutil.rmtree(place.parent)
    return found


@pytest.mark.parametrize("name", ["complete", "subspace", "predict"])
def test_files_that_may_not_grow(zygote, tables, tmp_path, name):
    """The limit on the size of a file stands for a full disk where nothing can be mounted."""
    text = rejected(zygote, writes(tables, tmp_path)[name], largest_file=4096)
    assert "File too large" in text
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.fixture
def mounted(tmp_path):
    """A file system of 64 KiB, and a read-only one."""
    made = []

    def mount(name, *words):
        folder = tmp_path / name
        folder.mkdir()
        done = subprocess.run(["mount", *words, folder], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("name", ["complete", "predict"])
def test_full_disk(zygote, tables, mounted, name):
    """The old model stays, and hours of work are not lost: the new one is kept elsewhere."""
    folder = mounted("full", "-t", "tmpfs", "-o", "size=64k", "tmpfs")
    if name == "complete":
        MatrixCompletion(rank=1).fit([("a", 1), ("b", 1), ("a", 2), ("b", 2)], [1, 2, 3, 5]).save(
            folder / "m"
        )
    text = rejected(zygote, writes(tables, folder)[name])
    assert "cannot write" in text
    assert "No space left on device" in text
    if name == "complete":
        assert rescued(text) == ["model.json", "model.safetensors"]
        assert len(MatrixCompletion.load(folder / "m").model_.row_ids) == 2
    assert [p.name for p in folder.iterdir()] == (["m"] if name == "complete" else [])


def test_a_checkpoint_goes_once_the_model_is_there(tables, tmp_path, monkeypatch):
    """0.1.0 removed it first: on a full disk both were gone."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    words = [
        "complete",
        "fit",
        tables / "ratings.csv",
        "--checkpoint",
        tmp_path / "c",
        "-o",
        tmp_path / "m",
    ]

    def full(*_, **__):
        raise OSError(28, "the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("fisherfold.completion.base.save_folder", full)
        assert "the disk is full" in str(CliRunner().invoke(app, [*map(str, words)]).exception)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert CliRunner().invoke(app, [*map(str, words)]).exit_code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    MatrixCompletion.load(tmp_path / "m")


@pytest.mark.parametrize("name", ["complete", *slow("subspace", "predict", "demo")])
def test_read_only_folder(zygote, tables, mounted, name):
    folder = mounted("locked", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs")
    text = rejected(zygote, writes(tables, folder)[name])
    assert "ead-only" in text
    if name in {"complete", "subspace"}:
        assert rescued(text)


@pytest.mark.parametrize("name", ["complete", *slow("demo")])
def test_folders_that_cannot_be(zygote, tables, name):
    """As root too: no folder can be made below a device."""
    text = rejected(zygote, writes(tables, Path("/dev/null/x"))[name])
    assert "cannot" in text
    if name != "demo":
        assert rescued(text)
