"""The code of the how-to pages runs, top to bottom."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = sorted(FOLDER.glob("*.md"))


@pytest.mark.skipif(not PAGES, reason="the documentation is not part of this distribution")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    if not blocks:
        pytest.skip("no Python on this page")
    scope = {"__name__": "how_to"}
    for block in blocks:
        # as many empty lines as stand before it, so that a traceback names the line of the page
        above = text[: block.start(1)].count("\n")
        exec(compile("\n" * above + block.group(1), str(page), "exec"), scope)
