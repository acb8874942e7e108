"""Every Python block of the README and the documentation runs, page by page, as a reader would type it."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch

import fisherfold
from fisherfold.reproduce import cifar
from fisherfold.solvers import METHODS

ROOT = Path(__file__).parent.parent
SOURCE = Path(fisherfold.__file__).parent
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page.exists()
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page):
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.skipif(not PAGES, reason="the documentation is not part of an installed package")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem
)
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


def test_every_public_package_has_an_api_page():
    pages = ROOT / "docs" / "api"
    if not pages.exists():
        pytest.skip("the documentation is not part of an installed package")
    packages = [name for name in fisherfold.__all__ if inspect.ismodule(getattr(fisherfold, name))]
    assert {page.stem for page in pages.glob("*.md")} == {*packages, "plots"}
    for name in packages:
        assert f"::: fisherfold.{name}\n" in (pages / f"{name}.md").read_text(encoding="utf-8")
        assert all(
            hasattr(getattr(fisherfold, name), public)
            for public in getattr(fisherfold, name).__all__
        )


def test_every_page_is_in_the_navigation():
    configuration = ROOT / "mkdocs.yml"
    if not configuration.exists():
        pytest.skip("the documentation is not part of an installed package")
    text = configuration.read_text(encoding="utf-8")
    pages = [
        page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.name != "README.md"
    ]
    assert [page for page in pages if f": {page}" not in text] == []


def test_links_of_the_readme_lead_somewhere():
    if not (ROOT / "README.md").exists():
        pytest.skip("the documentation is not part of an installed package")
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) > 8
    assert [
        link for link in links if not link.startswith("http") and not (ROOT / link).exists()
    ] == []


@pytest.mark.parametrize("page", ["reproduction/index.md"])
@pytest.mark.parametrize("figure", ["jester", "movielens"])
def test_the_figures_of_completion_are_those_that_were_recorded(page, figure):
    recorded = ROOT / "results" / "completion" / f"{figure}.json"
    if not recorded.exists() or not (ROOT / "docs" / page).exists():
        pytest.skip("documentation and results are not part of an installed package")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    methods = json.loads(recorded.read_text(encoding="utf-8"))["methods"]
    for row in methods:
        refit, train = (
            "" if row[name] is None else f"{row[name]:.3f} ± {row[f'{name}_sd']:.3f}"
            for name in ("refit", "train")
        )
        assert f"| {refit} | {train} |" in text.replace("| - |", "|  |"), row["method"]


def test_the_cifar_page_shows_the_recorded_runs():
    page, results = (
        ROOT / "docs" / "reproduction" / "cifar.md",
        ROOT / "results" / "cifar_runs.parquet",
    )
    if not page.exists() or not results.exists():
        pytest.skip("documentation and results are not part of an installed package")
    text, runs = page.read_text(encoding="utf-8"), cifar.read_runs(results)
    for table in cifar.tables(cifar.cells(runs)):
        for row in table.rows:
            assert f"| {' | '.join(map(str, row))} |" in text


@pytest.mark.skipif(not PAGES, reason="the documentation is not part of an installed package")
def test_the_citation_names_this_version():
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {fisherfold.__version__}" in lines
