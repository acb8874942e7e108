"""The report page: well formed, self-contained, and readable in a real browser."""

from __future__ import annotations

from html.parser import HTMLParser

import chromium
import pytest
from matplotlib.figure import Figure

from fisherfold.reproduce.figures import png
from fisherfold.reproduce.page import Section, Table, write_page

HOSTILE = "</script><script>alert(1)</script> & <b>'\"\u2028"


def section(**changed) -> Section:
    table = Table("numbers", ["name", "value"], [["a", 1.5], ["b", float("nan")], [HOSTILE, None]])
    given = {
        "name": "one",
        "title": "A title",
        "claim": HOSTILE,
        "verdict": "holds partly",
        "why": ["a reason"],
        "settings": {"seeds": 5},
        "command": "fisherfold reproduce one",
        "tables": [table, table],
    }
    return Section(**{**given, **changed})


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    figure = Figure(figsize=(4, 3))
    figure.subplots().plot([1, 2], [3, 4])
    (folder / "one.png").write_bytes(png(figure))
    return write_page(
        [section(picture="one.png"), section(name="two", verdict="not run")], folder, ["a rule"]
    )


def test_text_is_escaped_and_the_page_asks_nobody(file):
    text = file.read_text(encoding="utf-8")
    open_tags = []

    class Check(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert tag not in {"script", "b"}
            if tag not in {"meta", "link", "img", "br"}:
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Check().feed(text)
    assert open_tags == []
    assert "http://" not in text
    assert "https://" not in text
    assert "nan" not in text.lower().replace("finance", "")
    assert text.count("data:image/png;base64") == 1


def test_the_same_sections_give_the_same_bytes_and_come_back_from_their_files(tmp_path):
    first = write_page([section()], tmp_path, []).read_bytes()
    section().save(tmp_path / "s" / "one.json")
    loaded = Section.load(tmp_path / "s" / "one.json")
    assert write_page([loaded], tmp_path, []).read_bytes() == first
    (tmp_path / "s" / "one.json").write_text("[]")
    assert Section.load(tmp_path / "s" / "one.json") is None


@pytest.mark.skipif(chromium.find() is None, reason="no Chromium is installed")
def test_a_browser_shows_it_in_light_and_dark_and_on_a_phone(file, tmp_path):
    browser = chromium.Chromium(tmp_path / "profile")
    try:
        colours = set()
        for width, dark in ((1200, False), (1200, True), (390, False)):
            browser.open(file, width=width, dark=dark)
            assert browser.ask("document.documentElement.scrollWidth") <= width
            colours.add(browser.ask("getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2
        assert browser.ask("document.querySelectorAll('section').length") == 3
        assert [url for url in browser.requested if not url.startswith(("file:", "data:"))] == []
        assert browser.errors == []
    finally:
        browser.close()
