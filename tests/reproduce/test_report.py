"""The report page: well formed, escaped, self-contained, the same bytes twice."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest

from fisherfold.reproduce.report import page, write_page
from fisherfold.reproduce.sections import Band, Chart, Section, Series, Table

HOSTILE = """</script><script>alert("x")</script><img src=x onerror='alert(1)'> & "quoted" <!--"""
VOID = {"meta", "link", "img", "br"}


class Checker(HTMLParser):
    """Every element that is opened is closed in order; collects attributes, text and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in {"script", "style"}:
            self.text += data


def section(text: str = "plain") -> Section:
    values = [3.0, math.inf, 1.0]
    series = [Series(f"{text} {i}", {"epochs": [0, 1, 2]}, {"loss": Band(values, values, values)}) for i in range(2)]
    return Section(
        "one", text, text, "holds partly", [text], {text: text}, text,
        [Chart(text, {"epochs": text}, {"loss": text}, series)],
        [Table(text, [text, "number"], [[text, 1.5], [text, math.nan]])], notes=[text],
    )  # fmt: skip


def parse(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


def data(text: str) -> dict:
    return json.loads(re.search(r'id="charts">(.*?)</script>', text, re.DOTALL)[1])


@pytest.mark.parametrize("count", [1, 2])
def test_the_page_is_well_formed(tmp_path, count):
    checker = parse(page([section()] * count, tmp_path, title="A title", lead="A lead"))
    assert [tag for tag, _ in checker.tags].count("section") == count + (count > 1)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in checker.tags
    assert "holds partly" in checker.text


def test_hostile_text_stays_text(tmp_path):
    checker = parse(page([section(HOSTILE)] * 2, tmp_path, title=HOSTILE, lead=HOSTILE))
    scripts = [attributes for tag, attributes in checker.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "charts"}, {}]
    assert not [tag for tag, _ in checker.tags if tag == "img"]
    assert not [name for _, attributes in checker.tags for name in attributes if name.startswith("on")]
    assert checker.text.count(HOSTILE) > 10


def test_hostile_text_comes_back_from_the_data_unchanged(tmp_path):
    found = data(page([section(HOSTILE)], tmp_path, title="t", lead="l"))
    assert found["one-0"]["title"] == HOSTILE
    assert found["one-0"]["series"][1]["label"] == f"{HOSTILE} 1"


def test_a_folder_whose_name_is_no_text_does_not_end_the_page(tmp_path):
    named = section("fisherfold reproduce school --output 'r\udcff'")
    named.save(tmp_path / "one.json")
    assert Section.load(tmp_path / "one.json").command == named.command
    write_page([named], tmp_path, title="t", lead="l")
    assert "reproduce school --output 'r?'" in parse((tmp_path / "index.html").read_text(encoding="utf-8")).text


def test_what_is_not_finite_becomes_null(tmp_path):
    found = data(page([section()], tmp_path, title="t", lead="l"))
    assert found["one-0"]["series"][0]["y"]["loss"]["median"] == [3.0, None, 1.0]


def test_no_other_host_is_named(tmp_path):
    text = page([section()], tmp_path, title="t", lead="l")
    # the name space of SVG is a name, not an address that is asked for
    assert set(re.findall(r"(?:https?:)?//[a-z][^\s\"'`;)]*", text)) <= {"http://www.w3.org/2000/svg"}
    for _, attributes in parse(text).tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))


def test_the_same_sections_give_the_same_bytes(tmp_path):
    first = write_page([section()], tmp_path, title="t", lead="l").read_bytes()
    assert write_page([section()], tmp_path, title="t", lead="l").read_bytes() == first
    assert [file.name for file in tmp_path.iterdir()] == ["index.html"]
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "index.html").stat().st_mode == (tmp_path / "plain").stat().st_mode, "as any new file"


def test_a_picture_is_inside_the_page_and_a_missing_one_is_left_out(tmp_path):
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot([0, 1])
    figure.savefig(tmp_path / "curve.png")
    with_picture = dataclasses.replace(section(), picture="curve.png")
    images = [a for tag, a in parse(page([with_picture], tmp_path, title="t", lead="l")).tags if tag == "img"]
    assert len(images) == 1
    assert images[0]["src"].startswith("data:image/png;base64,")
    missing = dataclasses.replace(section(), picture="none.png")
    assert "<img" not in page([missing], tmp_path, title="t", lead="l")


def test_a_section_comes_back_from_its_file(tmp_path):
    original = section(HOSTILE)
    original.save(tmp_path / "deep" / "one.json")
    again = Section.load(tmp_path / "deep" / "one.json")
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "deep" / "one.json").read_bytes()
    assert again.charts[0].series[0].y["loss"].median == [3.0, None, 1.0]
    assert again.title == HOSTILE


@pytest.mark.parametrize("content", ["{", "[]", '{"name": "x"}', '{"charts": [], "tables": [], "more": 1}'])
def test_a_file_that_is_no_section_is_refused(tmp_path, content):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ValueError, match=r"bad.json is not a section of a report .* delete it and run again"):
        Section.load(tmp_path / "bad.json")
