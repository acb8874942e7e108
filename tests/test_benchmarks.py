"""Every benchmark runs on small made-up data, and its index names all of them."""

import argparse
import importlib
import os
import re
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


def test_every_benchmark_can_be_imported_and_explains_itself():
    for name in names():
        module = importlib.import_module(f"benchmarks.{name}")
        module.options(argparse.ArgumentParser())
        assert callable(module.main), name


def test_an_unknown_name_is_answered_with_those_there_are():
    run = benchmarks("run", "zero_residuals")
    assert run.returncode == 2
    assert "zero_residual" in run.stderr


def test_pages_name_benchmarks_that_there_are():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for p in pages for name in re.findall(r"benchmarks run ([\w.]+)", p.read_text())}
    assert len(named) > 20
    assert named <= {*names(), "NAME"}


def test_missing_data_ends_with_2_and_says_where_it_belongs(tmp_path):
    folder = str(tmp_path / "nowhere")
    run = benchmarks("run", "completion_stream", FISHERFOLD_DATA=folder, FISHERFOLD_CACHE=folder)
    assert run.returncode == 2
    assert "FISHERFOLD_DATA" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_missing_peer_ends_with_2_and_the_command_that_installs_it(tmp_path):
    (tmp_path / "pymanopt.py").write_text("raise ModuleNotFoundError(name='pymanopt')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = benchmarks("run", "completion_nll", PYTHONPATH=path)
    assert run.returncode == 2
    assert "pip install pymanopt" in run.stderr


@pytest.mark.slow
@pytest.mark.hours
@pytest.mark.parametrize("name", names())
def test_smoke(name):
    run = benchmarks("run", name, "--smoke")
    assert run.returncode == 0, run.stderr
    assert run.stdout
