"""Extras that are missing are named in one sentence, and nothing else needs them."""

import os
import subprocess
import sys

import pytest

from fisherfold.extras import EXTRAS, need


@pytest.fixture
def without(tmp_path):
    """Run Python where the packages of all extras are missing."""
    hide = (
        "import sys, importlib.abc\n"
        "class Hidden(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name in {set(EXTRAS)}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda n, *a: None if n in {set(EXTRAS)} else real(n, *a)\n"
    )
    environment = {**os.environ, "FISHERFOLD_CACHE": str(tmp_path), "FISHERFOLD_DATA": ""}

    def run(code):
        words = [sys.executable, "-c", hide + code]
        return subprocess.run(
            words, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
        )

    return run


CLI = "sys.argv[1:] = {}; from fisherfold.cli import main; main()"


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["demo"], "plots"),
        (["reproduce", "school", "--quick"], "plots"),
        (["datasets", "fetch", "movielens1m", "--yes"], "download"),
        (["serve", "model"], "serve"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(without, words, extra):
    run = without(CLI.format(words))
    assert run.returncode == 2, run.stderr
    assert f"pip install 'fisherfold[{extra}]'" in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr


def test_everything_else_is_there_without_extras(without):
    run = without(
        "import fisherfold, fisherfold.datasets as d; d.where('letter'); "
        "import fisherfold.completion, fisherfold.subspace, fisherfold.optim"
    )
    assert run.returncode == 0, run.stderr
    plots = without("import fisherfold.plots")
    assert "ModuleNotFoundError: matplotlib is needed here" in plots.stderr


def test_what_is_installed_is_not_asked_for():
    for package in EXTRAS:
        need(package)
