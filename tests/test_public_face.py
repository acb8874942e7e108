"""The public face: silent on import, complete, documented, and quick to load."""

import importlib
import inspect
import subprocess
import sys

import pytest

import fisherfold

PUBLIC = sorted(set(fisherfold.__all__) - {"__version__"})
ROOMS = ["manifolds", "fisher", "problems", "solvers"]


def run(code, *flags):
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_imports_are_silent_under_errors_for_warnings():
    modules = ["fisherfold", *(f"fisherfold.{room}" for room in ROOMS), "fisherfold.testing"]
    done = run("; ".join(f"import {module}" for module in modules), "-W", "error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_alone_loads_no_torch():
    done = run("import sys, fisherfold; print('torch' in sys.modules, fisherfold.__version__)")
    assert done.stdout.split() == ["False", fisherfold.__version__]


@pytest.mark.slow
def test_the_first_forward_mode_product_is_silent():
    code = (
        "import torch, fisherfold as f; x = torch.ones(2, 2)\n"
        "p = f.NLLProblem(f.manifolds.Euclidean(2), lambda x, t: x @ t, f.Gaussian(), x, torch.ones(2))\n"
        "p.fisher(torch.zeros(2)).matvec(torch.ones(2)); f.minimize(p, torch.zeros(2))"
    )
    done = run(code, "-W", "error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_and_is_documented(name):
    thing = getattr(fisherfold, name)
    doc = inspect.getdoc(thing)
    assert doc
    if not inspect.ismodule(thing):
        assert any(
            part in doc for part in ("Args:", "Examples:", "Attributes:", ">>>")
        ) or inspect.isabstract(thing)


@pytest.mark.parametrize("room", ROOMS)
def test_every_name_of_a_room_resolves_and_is_documented(room):
    module = importlib.import_module(f"fisherfold.{room}")
    for name in module.__all__:
        thing = getattr(module, name)
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing):
            methods = inspect.getmembers(thing, inspect.isfunction)
            own = [
                m
                for key, m in methods
                if not key.startswith("_") and m.__module__.startswith("fisherfold")
            ]
            assert all(inspect.getdoc(m) for m in own), name


def test_all_is_sorted_and_listed_by_dir():
    assert sorted(fisherfold.__all__) == sorted(set(fisherfold.__all__))
    assert set(fisherfold.__all__) <= set(dir(fisherfold))


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="module 'fisherfold' has no attribute 'Minimise'"):
        fisherfold.Minimise  # noqa: B018


def test_the_promised_spelling():
    """Issue 2 fixes these names for good."""
    assert {"Grassmann", "Stiefel", "Sphere", "Euclidean", "Oblique", "Product"} <= set(
        fisherfold.manifolds.__all__
    )
    assert {"NLLProblem", "Gaussian", "Categorical", "Bernoulli", "Poisson", "minimize"} <= set(
        PUBLIC
    )
    x = fisherfold.manifolds.Grassmann(4, 2).random_point()
    assert x.shape == (4, 2)
