"""Tables from pipes: the same models and predictions as from files, and streams that hold no table."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fisherfold.cli import app
from fisherfold.tables.readers import read_ratings

POSIX = pytest.mark.skipif(os.name != "posix", reason="descriptors with names")


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A folder with ratings.csv and pupils.csv."""
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    lines = [f"u{rng.integers(12)},{rng.integers(9)},{rng.normal():.4f}" for _ in range(120)]
    (folder / "ratings.csv").write_text("\n".join(["user,item,rating", *lines]) + "\n")
    lines = [
        f"s{k % 6},{rng.normal():.4f},{rng.normal():.4f},{rng.normal():.4f}" for k in range(90)
    ]
    (folder / "pupils.csv").write_text("\n".join(["school,a,b,score", *lines]) + "\n")
    return folder


def piped(content, *words):
    """Run a command in a process of its own, at the end of a real pipe."""
    words = [sys.executable, "-m", "fisherfold", *map(str, words)]
    done = subprocess.run(words, input=content, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def run(*words, content=None):
    found = CliRunner().invoke(app, [*map(str, words)], input=content)
    return found.stdout_bytes if found.exit_code == 0 else str(found.exception)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "given"),
    [
        ("ratings.csv", ("complete", "fit", "-r", 2), "-"),
        pytest.param(
            "pupils.csv",
            ("subspace", "fit", "--target=score", "--task=school"),
            "/dev/stdin",
            marks=POSIX,
        ),
    ],
)
def test_a_pipe_gives_what_the_file_gives(tables, tmp_path, name, options, given):
    content, family = (tables / name).read_bytes(), options[0]
    answer = json.loads(piped(content, *options, given, "-o", tmp_path / "piped", "--json"))
    run(*options, tables / name, "-o", tmp_path / "filed")
    models = [load_file(tmp_path / way / "model.safetensors") for way in ("piped", "filed")]
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    assert answer.get("file", "-") in ("-", "standard input")
    predictions = piped(content, family, "predict", tmp_path / "piped", given, "-o", "-")
    assert predictions == run(family, "predict", tmp_path / "filed", tables / name, "-o", "-")
    assert predictions.count(b"\n") == content.count(b"\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "standard input is empty"),
        (
            gzip.compress(b"0" * 2**22, mtime=0),
            "standard input takes more than 1,048,576 bytes unpacked",
        ),
        (
            b"u,i,r\n1,2,x\n",
            "standard input: 1 of 1 lines (100.0%) cannot be used: 1 value is not a number",
        ),
    ],
)
def test_streams_without_a_table_are_rejected(tmp_path, content, message):
    words = ("complete", "fit", "-", "-o", tmp_path / "m", "--unpack-limit", 2**-10)
    assert message in run(*words, content=content)
    assert not (tmp_path / "m").exists()


def test_standard_input_and_output_are_for_tables_alone(tables, tmp_path):
    text = (tables / "ratings.csv").read_bytes()
    for words, what in (
        (("complete", "predict", "-", "-", "-o", "-"), "the model must be a folder, got -"),
        (("complete", "recommend", "-", "u1"), "the model must be a folder, got -"),
        (("subspace", "evaluate", "-", "-"), "the model must be a folder, got -"),
        (("complete", "fit", "-", "-o", "-"), "--output of a model must be a folder, got -"),
        (
            ("complete", "fit", "-", "-o", tmp_path / "m", "--checkpoint", "-"),
            "--checkpoint must be a file, got -",
        ),
    ):
        assert what in run(*words, content=text)


@POSIX
def test_a_terminal_is_rejected(tmp_path):
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "fisherfold", "complete", "fit", "-", "-o", str(tmp_path / "m")]
    done = subprocess.run(words, stdin=theirs, capture_output=True, timeout=300, check=False)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 2
    assert b"standard input, which is a terminal: pipe a file into it" in done.stderr


@POSIX
def test_what_a_shell_gives_for_the_output_of_a_command(tables):
    content = (tables / "ratings.csv").read_bytes() * 20  # more than a pipe holds at once
    ours, theirs = os.pipe()

    def write():
        with os.fdopen(theirs, "wb") as stream:
            stream.write(content)

    writer = threading.Thread(target=write)
    writer.start()
    table = read_ratings(f"/dev/fd/{ours}", skip_bad_lines=True)
    writer.join()
    os.close(ours)
    assert (len(table.values), table.rejected) == (2400, {"value is not a number": 19})
