"""Every Python block of the README and the documentation runs, page by page, as a reader would type it."""

import re
from pathlib import Path

import pytest
import torch

from fisherfold.solvers import METHODS

ROOT = Path(__file__).parent.parent
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


def test_every_public_name_is_in_the_api_page():
    import fisherfold

    page = ROOT / "docs" / "api.md"
    if not page.exists():
        pytest.skip("the documentation is not part of an installed package")
    named = set(re.findall(r"^::: fisherfold\.(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE))
    rooms = {"fisher", "manifolds", "problems", "solvers", "optim", "estimators", "testing"}
    missing = sorted(set(fisherfold.__all__) - named - rooms - {"__version__"})
    assert not missing, f"docs/api.md does not document {missing}"
