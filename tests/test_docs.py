"""Every Python block of the README and the documentation runs, page by page, as a reader would type it."""

import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import fisherfold
from fisherfold.solvers import METHODS

ROOT = Path(__file__).parent.parent
SOURCE = Path(fisherfold.__file__).parent
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page.exists()]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page):
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.skipif(not PAGES, reason="the documentation is not part of an installed package")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    # the page on solvers adds a method of its own
    known = dict(METHODS)
    request.addfinalizer(lambda: (METHODS.clear(), METHODS.update(known)))
    torch.manual_seed(0)
    namespace = {"__name__": page.stem}
    for code in blocks(page):
        exec(compile(code, str(page), "exec"), namespace)
    assert namespace


ROOMS = ("datasets", "completion", "subspace", "fisher", "manifolds", "optim", "problems", "solvers", "testing")
# tables, not things with a documentation of their own
TABLES = {"METHODS", "OFFICIAL", "REGISTRY"}


def public_names():
    """Every public name with its room; a thing that is public in two places needs one entry."""
    faces = {name: getattr(fisherfold, name) for name in set(fisherfold.__all__) - {"__version__"}}
    yield from (f"fisherfold.{name}" for name, thing in faces.items() if not inspect.ismodule(thing))
    for room in ROOMS:
        module = importlib.import_module(f"fisherfold.{room}")
        yield from (f"fisherfold.{room}.{name}" for name in module.__all__)


def test_every_public_name_is_in_the_api_page():
    page = ROOT / "docs" / "api.md"
    if not page.exists():
        pytest.skip("the documentation is not part of an installed package")
    named = set(re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE))
    shown = {id(pkgutil.resolve_name(":".join(path.rsplit(".", 1)))) for path in named}
    things = {path: pkgutil.resolve_name(":".join(path.rsplit(".", 1))) for path in public_names()}
    missing = [path for path, thing in things.items() if id(thing) not in shown and path.split(".")[-1] not in TABLES]
    assert not missing, f"docs/api.md does not document {sorted(missing)}"


def test_every_room_that_is_documented_can_be_reached():
    pages = [ROOT / "README.md", ROOT / "docs" / "api.md"]
    if not all(page.exists() for page in pages):
        pytest.skip("the documentation is not part of an installed package")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    rooms = sorted({room for room in re.findall(r"fisherfold\.([a-z]+)\b", text) if (SOURCE / room).is_dir()})
    assert set(rooms) >= {"datasets", "distributed", "testing"}
    assert set(rooms) <= set(fisherfold.__all__)
    # asked directly: as an attribute it may be there by accident, because another import has loaded it
    assert all(inspect.ismodule(fisherfold.__getattr__(room)) for room in rooms)


def test_every_page_is_in_the_navigation():
    configuration = ROOT / "mkdocs.yml"
    if not configuration.exists():
        pytest.skip("the documentation is not part of an installed package")
    text = configuration.read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.name != "README.md"]
    assert [page for page in pages if f": {page}" not in text] == []


def test_links_of_the_readme_lead_somewhere():
    if not (ROOT / "README.md").exists():
        pytest.skip("the documentation is not part of an installed package")
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) > 8
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", ["results.md", "benchmarks-point.md"])
@pytest.mark.parametrize("figure", ["jester", "movielens"])
def test_the_figures_of_completion_are_those_that_were_recorded(page, figure):
    recorded = ROOT / "results" / "completion" / f"{figure}.json"
    if not recorded.exists() or not (ROOT / "docs" / page).exists():
        pytest.skip("documentation and results are not part of an installed package")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    methods = json.loads(recorded.read_text(encoding="utf-8"))["methods"]
    for row in methods:
        refit, train = (
            "" if row[name] is None else f"{row[name]:.3f} ± {row[f'{name}_sd']:.3f}" for name in ("refit", "train")
        )
        assert f"| {refit} | {train} |" in text.replace("| - |", "|  |"), row["method"]


@pytest.mark.skipif(not PAGES, reason="the documentation is not part of an installed package")
def test_the_citation_names_this_version():
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {fisherfold.__version__}" in lines
