"""The report page in a real browser: hovering, toggling, axes, sorting, themes, a phone."""

from __future__ import annotations

import json
from itertools import pairwise

import chromium
import pytest

from fisherfold.reproduce.report import write_page
from fisherfold.reproduce.sections import Band, Chart, Section, Series, Table

pytestmark = pytest.mark.skipif(chromium.find() is None, reason="no chromium is installed")
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
PLOT = "#one .chart svg"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = chromium.Chromium(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Two methods over 0 to 10 epochs; the first one's value at epoch k is 2^-k, with a band of a tenth."""
    epochs = list(range(11))
    series = []
    for label, base, pace in (("halving", 2.0, 0.5), (HOSTILE, 1.25, 0.1)):
        values = [base**-k for k in epochs]
        band = Band(values, [0.9 * v for v in values], [1.1 * v for v in values])
        x = {"epochs": epochs, "seconds": [pace * k for k in epochs]}
        series.append(Series(label, x, {"loss": band, "error": Band(epochs, epochs, epochs)}))
    axes = {"epochs": "#grad/N", "seconds": "seconds"}
    chart = Chart("curves", axes, {"loss": "the loss", "error": "the error"}, series)
    wide = Table("numbers", ["method", *(f"column {i}" for i in range(12))], [
        [name, value, *range(11)] for name, value in (("b", 10.0), ("c", None), ("a", 9.0), ("d", 1e-3))
    ])  # fmt: skip
    section = Section("one", "One", "a claim", "holds", charts=[chart], tables=[wide], command="x " * 80)
    # as the theory has it: one axis, one error, both logarithmic
    powers = [10.0**-k for k in range(5)]
    cubes = Series("cubes", {"x": powers}, {"y": Band(*3 * [[t**3 for t in powers]])})
    theory = Chart("the remainder", {"x": "t"}, {"y": "the remainder"}, [cubes], True, True)
    other = Section("two", "Two", "another claim", "no claim", charts=[theory], files=["a b/t<i>.csv"])
    # four charts of a section: not all methods are in all of them
    names = ("abc", "bdca", "e", "ae")
    line = {"x": {"x": [0.0, 1.0]}, "y": {"y": Band([0.0, 1.0], [0.0, 1.0], [0.0, 1.0])}}
    several = [Chart(word, {"x": "x"}, {"y": "y"}, [Series(label, **line) for label in word]) for word in names]
    third = Section("three", "Three", "a third claim", "no claim", charts=several)
    return write_page([section, other, third], tmp_path_factory.mktemp("page"), title=HOSTILE, lead="lead")


def test_nothing_is_asked_of_any_host_and_nothing_fails(browser, file):
    browser.requested.clear()
    browser.errors.clear()
    browser.open(file)
    assert browser.requested
    assert all(address.startswith(("file:", "data:")) for address in browser.requested)
    assert browser.errors == []
    assert browser.ask("window.hacked === undefined && document.querySelectorAll('img').length === 0")
    assert browser.ask(f"document.title === {json.dumps(HOSTILE)}")


def test_hovering_shows_the_nearest_values_of_every_method(browser, file):
    browser.open(file)
    # the third epoch lies at 64 + 3/10 (width - 78) of the drawing
    width = browser.ask(f"document.querySelector('{PLOT}').viewBox.baseVal.width")
    browser.move(PLOT, (64 + 0.31 * (width - 78)) / width)
    text = browser.ask("document.querySelector('.tip').textContent")
    assert "halving at 3: 0.125 (0.1125 to 0.1375)" in text
    assert f"{HOSTILE} at 3: 0.512" in text
    assert browser.ask(f"document.querySelectorAll('{PLOT} .mark circle').length") == 2
    browser.move("h1")
    assert browser.ask("document.querySelector('.tip') === null")


def test_arrow_keys_read_the_values_of_a_chart_in_focus(browser, file):
    browser.open(file)
    text = "document.querySelector('.tip')?.textContent ?? ''"
    browser.ask(f"document.querySelector('{PLOT}').focus()")
    assert "arrow keys" in browser.ask("document.activeElement.getAttribute('aria-label')")
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft", "End", "ArrowRight", "ArrowLeft", "Home"):
        browser.press(key)
        seen.append(int(browser.ask(text).split("halving at ")[1].split(":")[0]))
    assert seen == [0, 1, 0, 0, 10, 10, 9, 0]
    browser.press("Escape")
    assert browser.ask(text) == ""
    browser.press("ArrowRight")
    assert "halving at 1: 0.5 (0.45 to 0.55)" in browser.ask(text)
    browser.ask("document.activeElement.blur()")
    assert browser.ask(text) == ""


def test_a_click_in_the_legend_hides_a_method_and_brings_it_back(browser, file):
    browser.open(file)
    curves = f"document.querySelectorAll('{PLOT} .curve').length"
    first = ".legend button:first-child"
    assert browser.ask(curves) == 2
    browser.click(first)
    assert browser.ask(curves) == 1
    assert browser.ask(f"document.querySelector('{first}').getAttribute('aria-pressed')") == "false"
    browser.move(PLOT)
    assert "halving" not in browser.ask("document.querySelector('.tip').textContent")
    browser.click(first)
    assert browser.ask(curves) == 2


def test_a_method_has_the_same_pen_in_all_charts_of_a_section(browser, file):
    browser.open(file)
    buttons = "[...document.querySelectorAll('#three .chart')].map((c) => [...c.querySelectorAll('.legend button')]"
    found = browser.ask(f"{buttons}.map((b) => [b.textContent, b.querySelector('line').getAttribute('style')]))")
    charts = [dict(chart) for chart in found]
    first, second, third, fourth = charts
    assert {label: second[label] for label in "abc"} == first
    assert len(set(second.values())) == 4
    # what has no others beside it begins anew, and makes room where it has
    assert third["e"] == first["a"] == fourth["a"] != fourth["e"]
    assert "stroke-width: 2.8" in first["a"]


def choose(browser, selector, value):
    browser.ask(
        f"(() => {{ const s = document.querySelector('{selector}'); s.value = '{value}';"
        " s.dispatchEvent(new Event('change')); })()"
    )


def test_x_switches_to_seconds_and_y_to_another_error(browser, file):
    browser.open(file)
    path = f"document.querySelector('{PLOT} .curve').getAttribute('d')"
    label = "document.querySelector('.x-label').textContent"
    before = browser.ask(path)
    assert browser.ask(label) == "#grad/N"
    choose(browser, ".horizontal-axis", "seconds")
    assert browser.ask(label) == "seconds"
    browser.move(PLOT, 0.99)
    assert "halving at 5: 9.77e-4" in browser.ask("document.querySelector('.tip').textContent")
    choose(browser, ".error", "error")
    browser.move(PLOT, 0.99)
    assert "halving at 5: 10" in browser.ask("document.querySelector('.tip').textContent")
    assert browser.ask(path) != before


def test_a_logarithmic_y_makes_powers_a_straight_line(browser, file):
    browser.open(file)
    browser.click(".logY")
    path = browser.ask(f"document.querySelector('{PLOT} .curve').getAttribute('d')")
    heights = [float(pair.split(",")[1]) for pair in path[1:].split("L")]
    steps = [b - a for a, b in pairwise(heights)]
    assert len(steps) == 10
    assert max(steps) - min(steps) < 0.05
    # zero has no logarithm: the first epoch leaves the picture
    browser.click(".logX")
    path = browser.ask(f"document.querySelector('{PLOT} .curve').getAttribute('d')")
    assert path.count("L") == 9


def test_a_click_on_a_head_sorts_numbers_as_numbers_and_blanks_last(browser, file):
    browser.open(file)
    rows = "[...document.querySelectorAll('#one tbody tr')].map(row => row.cells[0].textContent).join('')"
    assert browser.ask(rows) == "bcad"
    browser.click("#one th:nth-child(2) button")
    assert browser.ask(rows) == "dabc"
    browser.click("#one th:nth-child(2) button")
    assert browser.ask(rows) == "badc"
    assert browser.ask("document.querySelector('#one th:nth-child(2)').getAttribute('aria-sort')") == "descending"
    browser.click("#one th:nth-child(1) button")
    assert browser.ask(rows) == "abcd"


def brightness(browser) -> int:
    colour = browser.ask("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in colour[4:-1].split(","))


def is_remembered(browser, file):
    """Whether the light that was chosen is there when the page is opened in the dark; chosen once more if not.

    A browser writes its storage when it finds the time: on a busy machine after the next page is read, or not at all.
    """
    browser.ask("new Promise((done) => setTimeout(done, 100))")
    browser.open(file, dark=True)
    if brightness(browser) > 600:
        return True
    browser.click("#theme")
    return False


def test_the_theme_follows_the_system_and_then_the_button(browser, file):
    # an empty page, where a fresh browser begins, has no storage
    browser.open(file)
    browser.ask("localStorage.clear()")
    browser.open(file, dark=True)
    assert brightness(browser) < 150
    browser.click("#theme")
    assert brightness(browser) > 600
    assert any(is_remembered(browser, file) for _ in range(20)), "the choice is remembered"
    browser.ask("localStorage.clear()")
    browser.open(file)
    assert brightness(browser) > 600


@pytest.mark.parametrize("width", [320, 390, 900])
def test_nothing_is_wider_than_the_screen(browser, file, width):
    browser.open(file, width=width)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask("document.querySelector('#one').scrollWidth") <= width
    # the wide table moves inside its own box
    assert browser.ask("(box => box.scrollWidth > box.clientWidth)(document.querySelector('#one .scroll'))")


def test_paper_shows_whole_tables_and_what_the_curves_are(browser, file):
    browser.open(file, width=700)
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        box = "document.querySelector('#one .sortable').getBoundingClientRect()"
        assert browser.ask(f"{box}.right") <= 700
        assert browser.ask("getComputedStyle(document.querySelector('#one .scroll')).overflowX") == "visible"
        command = "document.querySelector('#one .command code')"
        assert browser.ask(f"{command}.scrollWidth <= {command}.clientWidth")
        shown = "(word => document.querySelector(word).getClientRects().length > 0)"
        assert browser.ask(f"{shown}('#one select.error')")
        assert browser.ask(f"{shown}('#one .legend button')")
        assert not browser.ask(f"{shown}('#one .controls button')")
        assert not browser.ask(f"{shown}('#theme')")
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


def test_tables_and_buttons_have_names_that_can_be_read_out(browser, file):
    browser.open(file)
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    browser.call("Accessibility.disable")
    named = [(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if "role" in node]
    assert {name for role, name in named if role == "table"} == {"Overview", "numbers"}
    assert all(name for role, name in named if role in {"button", "combobox", "columnheader", "image", "link"})


def test_a_chart_of_one_axis_and_one_error_is_logarithmic_from_the_start_and_says_each_once(browser, file):
    browser.open(file)
    path = browser.ask("document.querySelector('#two .curve').getAttribute('d')")
    points = [tuple(map(float, pair.split(","))) for pair in path[1:].split("L")]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    assert max(slopes) - min(slopes) < 0.01, "a power is a straight line"
    assert browser.ask("document.querySelector('#two figcaption') === null")
    assert browser.ask("document.querySelector('#two .controls').textContent") == "the remainderlog xlog y"
    assert browser.ask("document.querySelector('#two .x-label').textContent") == "t"
    width = browser.ask("document.querySelector('#two .chart svg').viewBox.baseVal.width")
    browser.move("#two .chart svg", (64 + 0.5 * (width - 78)) / width)
    assert browser.ask("document.querySelector('#two .tip').textContent") == "cubes at 0.01: 1.00e-6"
    browser.click("#two .logX")
    assert browser.ask("document.querySelector('#two .logX').getAttribute('aria-pressed')") == "false"
    assert browser.ask("document.querySelector('#two .curve').getAttribute('d')") != path


def test_raw_tables_are_links_beside_the_page(browser, file):
    browser.open(file)
    link = "document.querySelector('#two .files a')"
    assert browser.ask(f"{link}.textContent") == "a b/t<i>.csv"
    assert browser.ask(f"{link}.getAttribute('href')") == "a%20b/t%3Ci%3E.csv"


def test_the_overview_leaves_the_claims_to_the_sections_on_a_phone(browser, file):
    shown = "getComputedStyle(document.querySelector('.overview td:last-child')).display"
    browser.open(file, width=390)
    assert browser.ask(shown) == "none"
    browser.open(file)
    assert browser.ask(shown) == "table-cell"
