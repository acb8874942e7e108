"""Closed and full streams, pipes as output, signals at bad moments, odd names: a true sentence and exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fisherfold import MatrixCompletion, cli
from fisherfold.cli import app, common, main
from fisherfold.cli.options import write_or_rescue
from fisherfold.cli.voice import Voice
from fisherfold.files import write_atomically
from toy import slow

pytestmark = pytest.mark.skipif(os.name != "posix", reason="shells and signals of POSIX")


def shell(line, **options):
    """Run a line of the shell in which F is the command."""
    line = line.replace("F ", f"{sys.executable} -m fisherfold ", 1)
    done = subprocess.run(
        ["/bin/sh", "-c", line], capture_output=True, text=True, check=False, **options
    )
    return done.returncode, done.stdout, " ".join(done.stderr.split())


@pytest.mark.parametrize("words", ["datasets list", *slow("info", "--version", "complete fit x")])
def test_without_standard_output_nothing_is_begun(words):
    code, _, said = shell(f"F {words} >&-")
    assert (code, said[:32]) == (2, "error: standard output is closed")


def test_without_the_other_streams_a_command_does_its_work():
    code, out, _ = shell("F datasets list --json <&- 2>&-")
    assert code == 0
    assert out.startswith("{")
    code, out, said = shell("F complete fit - -o /tmp/nowhere/model <&-")
    assert (code, out) == (2, "")
    assert "standard input is empty" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_result_that_cannot_be_written_is_an_error():
    code, _, said = shell("F datasets list > /dev/full")
    assert code == 2
    assert "No space left on device" in said
    assert "Traceback" not in said
    assert "Exception ignored" not in said


@pytest.mark.slow
def test_who_reads_the_result_may_stop():
    code, out, said = shell("( F datasets list; echo $? >&2 ) | true")
    assert (code, out) == (0, "")
    assert said in {"141", "1", "0"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "m"
    MatrixCompletion(rank=1, max_iter=2).fit(
        [("a", 1), ("b", 1), ("a", 2), ("b", 2)], [1, 2, 3, 5]
    ).save(folder)
    return folder


def test_a_pipe_with_a_name_is_no_output(model, tmp_path):
    """0.2.0 waited for someone to write into it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pairs.csv").write_text("a,1\n")
    words = ["complete", "predict", model, tmp_path / "pairs.csv", "-o", tmp_path / "pipe"]
    found = CliRunner().invoke(app, [*map(str, words)])
    assert "it is a device or a pipe, a file is expected" in str(found.exception)


@pytest.mark.parametrize("length", [242, 250, 255])
@pytest.mark.parametrize("letter", ["x", "é"])
def test_the_longest_names_can_be_saved_under(model, tmp_path, length, letter):
    name = (letter * length).encode()[:length].decode("utf-8", "ignore")
    found = MatrixCompletion.load(model)
    for _ in range(2):
        found.save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    write_atomically(tmp_path / name[1:], b"x")
    assert (tmp_path / name[1:]).read_bytes() == b"x"


def test_a_mask_that_forbids_everything_is_named(model, tmp_path, monkeypatch):
    """The folder that was just made cannot be written; root can, so the error is made here."""

    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fisherfold.tables.folders.write_synced", forbidden)
    with pytest.raises(PermissionError, match=r"Permission denied; .* it may be the umask") as told:
        MatrixCompletion.load(model).save(tmp_path / "m")
    assert "read-only" not in str(told.value)


NUMBERS = [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]


@pytest.mark.parametrize(("number", "code"), NUMBERS)
def test_a_signal_during_a_save_waits_for_it(tmp_path, monkeypatch, capsys, number, code):
    tree = common.group("A probe.", examples=["fisherfold probe"])
    place = tmp_path / "m"

    def write(folder):
        signal.raise_signal(number)
        signal.raise_signal(number)
        folder.mkdir()
        (folder / "whole").touch()

    @common.command(tree, examples=["fisherfold probe"])
    def probe(voice: Voice) -> None:
        """Save."""
        write_or_rescue(write, place)
        raise AssertionError("the command went on")

    monkeypatch.setattr(cli, "app", tree)
    monkeypatch.setattr(sys, "argv", ["fisherfold"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert (place / "whole").exists()
    assert capsys.readouterr().err == f"stopped; the model is saved in {place}\n"


LATE = """
import atexit, os, signal
import fisherfold.__main__ as program
atexit.register(lambda: os.kill(os.getpid(), {number}))
program.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, *slow(signal.SIGHUP, signal.SIGINT)])
def test_a_signal_after_the_result_is_too_late(number):
    words = [sys.executable, "-c", LATE.format(number=int(number)), "datasets", "list", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("{")
