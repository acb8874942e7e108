"""Every benchmark runs on small made-up data, and its index names all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def benchmarks(*given, **environment):
    """Run the program of the benchmarks in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *given],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def names():
    return [line.split()[0] for line in benchmarks("list").stdout.splitlines()]


def test_the_index_is_that_of_the_modules():
    run = benchmarks("index", "--check")
    assert run.returncode == 0, run.stderr


def test_an_unknown_name_is_answered_with_those_there_are():
    run = benchmarks("run", "zero_residuals")
    assert run.returncode == 2
    assert "zero_residual" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_smoke(name):
    run = benchmarks("run", name, "--smoke")
    assert run.returncode == 0, run.stderr
    assert run.stdout
