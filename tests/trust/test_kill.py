"""SIGKILL at random moments: no file is ever half there, and going on leads to the same bits."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fisherfold
from fisherfold.files import HEADER, read_tensors

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="jobs are forked")
HERE = Path(__file__).parent


class Zygote:
    """Starts jobs in children of a process that has imported everything."""

    def __init__(self, folder):
        home = str(Path(fisherfold.__file__).parents[1])
        env = {**os.environ, "PYTHONPATH": home, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "POLARS_MAX_THREADS": "1"}
        self.log = folder / "log.txt"
        self.process = subprocess.Popen(
            [sys.executable, HERE / "zygote.py"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, job, *args, **limits):
        self.log.write_text("")
        order = {"job": job, "args": [str(a) for a in args], "log": str(self.log), **limits}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def status(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def run(self, job, *args, **limits):
        """The exit code of a job that is left alone."""
        self.start(job, *args, **limits)
        return os.waitstatus_to_exitcode(self.status())

    def kill(self, job, *args, after):
        """Kill a job after a time; whether it was still alive."""
        pid = self.start(job, *args)
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(self.status()) == -signal.SIGKILL


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    made = Zygote(tmp_path_factory.mktemp("zygote"))
    yield made
    made.process.stdin.close()
    made.process.wait(30)
    made.process.stdout.close()


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(0)
    rows, columns = np.nonzero(rng.random((400, 200)) < 0.2)
    truth = rng.normal(size=(400, 4)) @ rng.normal(size=(4, 200))
    lines = [f"u{i},{j},{truth[i, j] + rng.normal():.3f}" for i, j in zip(rows, columns, strict=True)]
    (folder / "ratings.csv").write_text("user,item,rating\n" + "\n".join(lines) + "\n")
    X, task = rng.normal(size=(3000, 8)), rng.integers(100, size=3000)
    y = (X * (rng.normal(size=(100, 2)) @ rng.normal(size=(2, 8)))[task]).sum(1) + rng.normal(size=3000)
    lines = [",".join(map("{:.4f}".format, [*x, v])) + f",{t}" for x, v, t in zip(X, y, task, strict=True)]
    (folder / "tasks.csv").write_text(",".join([*"abcdefgh", "y", "task"]) + "\n" + "\n".join(lines) + "\n")
    return folder


def jobs(tables, folder):
    """The words of every job, writing into a folder."""
    fit = ["complete", "fit", tables / "ratings.csv", "-o", folder / "model", "--checkpoint", folder / "c", "-q"]
    many = ["subspace", "fit", tables / "tasks.csv", "--target", "y", "--task", "task", "-o", folder / "model", "-q"]
    return {
        "complete": ["command_line", *fit, "--rank", "6"],
        "complete point": ["command_line", *fit, "--rank", "4", "--inference", "point"],
        "complete auto": ["command_line", *fit, "--rank", "auto", "--max-iter", "4"],
        "subspace": ["command_line", *many, "--rank", "2"],
        "figure": ["figure", folder],
        "training": ["training", folder],
    }


def check_whole(folder):
    """Every file that has its name is complete; only hidden temporary ones may be left of a killed writer."""
    for path in folder.rglob("*"):
        if path.is_dir() or path.name.startswith(".") or path.suffix in {".html", ".svg", ".md"}:
            continue
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".png":
            with Image.open(path) as image:
                image.load()
        elif path.suffix == ".csv":
            assert path.read_bytes().endswith(b"\n")
        else:
            content = path.read_bytes()
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            said = json.loads(header["__metadata__"][HEADER])
            read_tensors(path, kind=said["kind"], version=said["version"])


def outcome(folder):
    """Everything that a job leaves, without times and pictures (which show times)."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix not in {".png", ".csv"}):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            kind = json.loads(json.loads(path.read_bytes()[8:][: int.from_bytes(path.read_bytes()[:8], "little")])[
                "__metadata__"][HEADER])["kind"]  # fmt: skip
            tensors, header = read_tensors(path, kind=kind, version=9)
            found[name] = {k: (t.dtype, t.numpy().tobytes()) for k, t in tensors.items()}, timeless(header)
        else:
            found[name] = timeless(json.loads(path.read_text(encoding="utf-8")))
    return found


def timeless(tree):
    if isinstance(tree, dict):
        return {k: timeless(v) for k, v in tree.items() if "seconds" not in k}
    return [timeless(v) for v in tree] if isinstance(tree, list) else str(tree)


def kill_and_go_on(zygote, tables, tmp_path, name, kills):
    left, killed = tmp_path / "left alone", tmp_path / "killed"
    left.mkdir()
    killed.mkdir()
    zygote.start(*jobs(tables, left)[name])
    began = time.monotonic()
    assert zygote.status() == 0, zygote.log.read_text()
    whole = time.monotonic() - began
    chance = random.Random(name)
    hit = 0
    for attempt in range(kills + 20):
        if attempt >= kills and hit:
            break
        after = chance.uniform(0, whole)
        found = zygote.kill(*jobs(tables, killed)[name], after=after)
        hit += found
        whole = whole if found else after  # it ended before: on a machine that is less busy now it takes less time
        check_whole(killed)
    assert zygote.run(*jobs(tables, killed)[name]) == 0, zygote.log.read_text()
    assert outcome(killed) == outcome(left)
    assert [p for p in tmp_path.rglob("*") if p.name.startswith(".") or p.name.startswith("c.")] == []
    return hit


@pytest.mark.parametrize("name", ["complete", "complete point", "complete auto", "subspace", "figure", "training"])
def test_kill(zygote, tables, tmp_path, name):
    assert kill_and_go_on(zygote, tables, tmp_path, name, kills=3) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", list(jobs(Path(), Path())))
def test_kill_often(zygote, tables, tmp_path, name):
    assert kill_and_go_on(zygote, tables, tmp_path, name, kills=40) > 0


def test_kill_while_writing(zygote, tables, tmp_path):
    """Killed the moment a temporary file appears: the old file is whole, and the next run removes the leftover."""
    words = jobs(tables, tmp_path)["complete"]
    leftovers = 0
    for _ in range(4):
        pid = zygote.start(*words)
        end = time.monotonic() + 60
        while time.monotonic() < end and not any(p.name.startswith(".c.") for p in tmp_path.iterdir()):
            pass
        os.kill(pid, signal.SIGKILL)
        zygote.status()
        leftovers += any(p.name.startswith(".c.") for p in tmp_path.iterdir())
        check_whole(tmp_path)
    assert zygote.run(*words) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    assert leftovers > 0, "no kill came while a file was being written"


def writes(tables, folder):
    """Commands that write: a folder, a file, a page."""
    model = tables / "model"
    return {
        "complete": ["complete", "fit", tables / "ratings.csv", "-q", "--rank", "2", "-o", folder / "m"],
        "checkpoint": ["complete", "fit", tables / "ratings.csv", "-o", tables / "n", "--checkpoint", folder / "c"],
        "subspace": ["subspace", "fit", tables / "tasks.csv", "--target", "y", "-q", "-o", folder / "deep" / "m"],
        "predict": ["complete", "predict", model, tables / "ratings.csv", "-q", "-o", folder / "p.csv"],
        "demo": ["demo", "-q", "--output", folder / "d"],
    }


@pytest.fixture(scope="module")
def model(zygote, tables):
    assert zygote.run("command_line", "complete", "fit", tables / "ratings.csv", "-o", tables / "model", "-q") == 0


def refused(zygote, words, **limits):
    code = zygote.run("command_line", *words, **limits)
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


@pytest.mark.parametrize("name", ["complete", "checkpoint", "subspace", "predict"])
def test_files_that_may_not_grow(zygote, tables, model, tmp_path, name):
    """The limit on the size of a file stands for a full disk where nothing can be mounted."""
    text = refused(zygote, writes(tables, tmp_path)[name], largest_file=4096)
    assert "cannot write" in text
    assert "it would be larger than is allowed here" in text
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("name", ["complete", "checkpoint", "predict"])
def test_full_disk(zygote, tables, model, mounted, name):
    folder = mounted("full", "-t", "tmpfs", "-o", "size=64k", "tmpfs")
    text = refused(zygote, writes(tables, folder)[name])
    assert "cannot write" in text
    assert "the disk is full" in text
    assert [p for p in folder.rglob("*") if p.is_file()] == []
    if name == "complete":  # hours of work may be in it
        assert rescued(text) == ["model.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["complete", "checkpoint", "subspace", "predict", "demo"])
def test_read_only_folder(zygote, tables, model, mounted, name):
    folder = mounted("locked", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs")
    text = refused(zygote, writes(tables, folder)[name])
    assert "is read-only" in text
    if name in {"complete", "subspace"}:
        assert rescued(text)


@pytest.mark.parametrize("name", ["complete", "subspace", "demo"])
def test_folders_that_cannot_be(zygote, tables, model, name):
    """As root too: no folder can be made below a device or inside the kernel's own."""
    places = [Path("/dev/null/x"), *([Path("/sys/fisherfold")] if Path("/sys").is_dir() else [])]
    for place in places:
        text = refused(zygote, writes(tables, place)[name])
        assert ("is read-only" if place == Path("/sys/fisherfold") else "cannot") in text
        if name != "demo":
            assert rescued(text)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif(not os.environ.get("FISHERFOLD_DATA"), reason="FISHERFOLD_DATA is not set")
def test_kill_reproduce(zygote, tmp_path):
    """The real command on School: every recorded run is the same in the end, and the page is whole at any time."""
    chance, words = random.Random(0), ["command_line", "reproduce", "school", "--quick", "--seeds", "1", "-q", "-o"]
    zygote.start(*words, tmp_path / "left alone")
    began = time.monotonic()
    assert zygote.status() == 0, zygote.log.read_text()
    whole = time.monotonic() - began
    for _ in range(4):
        zygote.kill(*words, tmp_path / "killed", after=chance.uniform(0, whole / 2))
        if (tmp_path / "killed").is_dir():
            check_whole(tmp_path / "killed")
    assert zygote.run(*words, tmp_path / "killed") == 0, zygote.log.read_text()
    recorded = [
        {path.name: timeless(json.loads(path.read_bytes())) for path in (tmp_path / name).rglob("runs/*.json")}
        for name in ("left alone", "killed")
    ]
    assert recorded[0] == recorded[1]
    assert recorded[0]
