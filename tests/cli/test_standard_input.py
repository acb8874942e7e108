"""Tables from pipes: the same models and predictions as from files, and streams that hold no table."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import threading

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fisherfold.cli import app
from fisherfold.distributed import ALONE
from fisherfold.tables.file_shares import FileShare
from fisherfold.tables.tables import read_ratings

POSIX = pytest.mark.skipif(os.name != "posix", reason="descriptors with names")


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A folder with ratings.csv and pupils.csv."""
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    lines = [f"u{rng.integers(12)},{rng.integers(9)},{rng.normal():.4f}" for _ in range(120)]
    (folder / "ratings.csv").write_text("\n".join(["user,item,rating", *lines]) + "\n")
    lines = [f"s{k % 6},{rng.normal():.4f},{rng.normal():.4f},{rng.normal():.4f}" for k in range(90)]
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


@pytest.mark.parametrize(
    ("name", "options", "given"),
    [
        ("ratings.csv", ("complete", "fit", "-r", 2), "-"),
        pytest.param("pupils.csv", ("subspace", "fit", "--target=score", "--task=school"), "/dev/stdin", marks=POSIX),
    ],
)
def test_a_pipe_gives_what_the_file_gives(tables, tmp_path, name, options, given):
    content, family = (tables / name).read_bytes(), options[0]
    answer = json.loads(piped(content, *options, given, "-o", tmp_path / "piped", "--json"))
    run(*options, tables / name, "-o", tmp_path / "filed")
    models = [load_file(tmp_path / way / "model.safetensors") for way in ("piped", "filed")]
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    assert answer.get("file", "standard input") == "standard input"
    predictions = piped(content, family, "predict", tmp_path / "piped", given, "-o", "-")
    assert predictions == run(family, "predict", tmp_path / "filed", tables / name, "-o", "-")
    assert predictions.count(b"\n") == content.count(b"\n")


def test_the_content_of_a_stream_tells_its_format(tables, tmp_path):
    text = (tables / "ratings.csv").read_bytes()
    frame = pl.read_csv(text)
    buffer = io.BytesIO()
    frame.to_pandas().set_index(["user", "item"]).to_parquet(buffer)
    contents = [
        text, gzip.compress(text), text.replace(b",", b"\t"), text.replace(b",", b"::"), text.replace(b",", b";"),
        text.decode().encode("utf-16"), text.replace(b"\n", b"\r\n"), text.replace(b"\n", b"\r"), buffer.getvalue(),
    ]  # fmt: skip
    told = []
    for content in contents:
        fitted = json.loads(run("complete", "fit", "-", "-r", 1, "-o", tmp_path / "m", "--json", content=content))
        told.append({key: fitted[key] for key in ("file", "lines", "refused", "ratings", "noise")})
    assert told == [told[0]] * len(contents)
    errors = run("complete", "evaluate", "-", "-r", 1, "--json", content=gzip.compress(text))
    assert errors == run("complete", "evaluate", tables / "ratings.csv", "-r", 1, "--json").replace(
        str(tables / "ratings.csv").encode(), b"standard input"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "standard input is empty"),
        (b"\n\n", "standard input is empty"),
        (gzip.compress(b"", mtime=0), "standard input is empty"),
        (b"\x7fELF\x02\x01\x01\0\0\0", "standard input is binary, not text: NUL bytes are at its start"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "standard input is binary, not text: NUL bytes are at its start"),
        ("a,b,1\n".encode("utf-16-le"), "name that (encoding, --encoding utf-16-le)"),
        (gzip.compress(b"a,b,1\n", mtime=0)[:-9], "standard input is a damaged gzip file"),
        (b"PK\x03\x04....", "standard input is packed with zip; unpack it first"),
        (b"PAR1....", "standard input cannot be read as a table"),
        (b"u,i\n1,2\n", "standard input must have 3 columns"),
        (b"u,i,r\n1,2,x\n", "standard input: none of 1 line can be used"),
    ],
)
def test_streams_without_a_table_are_refused(tmp_path, content, message):
    assert message in run("complete", "fit", "-", "-o", tmp_path / "m", content=content)
    assert not (tmp_path / "m").exists()


def test_gzip_in_a_stream_is_unpacked_up_to_the_limit(tmp_path):
    bomb = gzip.compress(b"0" * 2**22)
    refused = run("complete", "fit", "-", "-o", tmp_path / "m", "--unpack-limit", 2**-10, content=bomb)
    assert "standard input unpacks to more bytes than that, 1,048,576 bytes are allowed" in refused


def test_standard_input_and_output_are_for_tables_alone(tables, tmp_path):
    text = (tables / "ratings.csv").read_bytes()
    for words, what in (
        (("complete", "predict", "-", "-", "-o", "-"), "the model must be a folder, got -"),
        (("complete", "recommend", "-", "u1"), "the model must be a folder, got -"),
        (("subspace", "evaluate", "-", "-"), "the model must be a folder, got -"),
        (("complete", "fit", "-", "-o", "-"), "--output of a model must be a folder, got -"),
        (("complete", "fit", "-", "-o", tmp_path / "m", "--checkpoint", "-"), "--checkpoint must be a file, got -"),
    ):
        assert what in run(*words, content=text)


def test_several_processes_need_a_file():
    with pytest.raises(ValueError, match="standard input cannot be shared by several processes"):
        FileShare("-", ALONE)


@POSIX
def test_a_terminal_and_a_closed_stream_are_refused(tmp_path, monkeypatch):
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "fisherfold", "complete", "fit", "-", "-o", str(tmp_path / "m")]
    done = subprocess.run(words, stdin=theirs, capture_output=True, timeout=300, check=False)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 2
    assert b"standard input is a terminal; pipe a table into the command, or name a file" in done.stderr
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed"):
        read_ratings("-")


@POSIX
def test_what_a_shell_gives_for_the_output_of_a_command(tables):
    content = (tables / "ratings.csv").read_bytes() * 20  # more than a pipe holds at once
    ours, theirs = os.pipe()

    def write():
        with os.fdopen(theirs, "wb") as stream:
            stream.write(content)

    writer = threading.Thread(target=write)
    writer.start()
    table = read_ratings(f"/dev/fd/{ours}")
    writer.join()
    os.close(ours)
    assert (len(table.values), table.refused) == (2400, {"value is not a number": 19})


def test_a_stream_is_cut_without_another_pass_over_it(tables, monkeypatch):
    """The bytes that came are the ones that the reader is given."""
    content, seen = (tables / "pupils.csv").read_bytes(), []
    reader = pl.read_csv
    monkeypatch.setattr(pl, "read_csv", lambda source, **options: (seen.append(source), reader(source, **options))[1])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    from fisherfold.tables.table_files import read_table

    assert read_table("-").frame.height == 90
    assert seen == [content]
