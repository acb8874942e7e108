"""The page of the service in a browser: search, rate, a list with reasons, errors, nobody else."""

from __future__ import annotations

import json
import time

import pytest
from served import Process

from reproduce import chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.find() is None, reason="no Chromium is installed"),
]


@pytest.fixture
def browser(tmp_path):
    found = chromium.Chromium(tmp_path / "profile")
    yield found
    found.close()


@pytest.fixture
def served(folder, tmp_path):
    titles = tmp_path / "titles.csv"
    lines = [f"f{k},Film number {k} <b>&amp; friends</b>" for k in range(40)]
    titles.write_text("id,title\n" + "\n".join(lines) + "\n")
    found = []

    def start(*words, token=None):
        found.append(Process(folder, "--titles", titles, *words, token=token))
        return found[-1]

    yield start
    for each in found:
        if each.process.poll() is None:
            each.stop()


def until(browser, expression, seconds=20):
    end = time.monotonic() + seconds
    while not (value := browser.ask(expression)):
        assert time.monotonic() < end, (expression, browser.ask("document.body.innerText"))
        time.sleep(0.05)
    return value


def write(browser, selector, text):
    browser.click(selector)
    browser.ask(f"document.querySelector('{selector}').select()")
    browser.call("Input.insertText", text=text)


def texts(browser, selector):
    return browser.ask(f"[...document.querySelectorAll('{selector}')].map((e) => e.textContent)")


def test_somebody_searches_rates_and_reads_why(browser, served, tmp_path):
    service = served()
    colours = set()
    for width, dark in ((1200, False), (1200, True), (390, True), (390, False)):
        browser.open(service.address, width=width, dark=dark)
        until(browser, "document.querySelectorAll('#found li').length > 3")
        colours.add(browser.ask("getComputedStyle(document.body).backgroundColor"))
        write(browser, "#query", "number 17")
        until(browser, "document.querySelectorAll('#found li').length === 1")
        # titles are text, never markup
        assert texts(browser, "#found li") == ["Film number 17 <b>&amp; friends</b>"]
        browser.click("#found button")
        until(browser, "document.querySelectorAll('#list li').length === 10")
        assert browser.ask("document.querySelectorAll('#list .range').length") == 10
        before = texts(browser, "#list")[0]
        browser.click("#rated input")  # the middle of the slider: 3 stars
        until(browser, f"document.querySelector('#list').textContent !== {json.dumps(before)}")
        assert texts(browser, "#rated output") == ["3"]
        time.sleep(0.5)  # pressed and let go, the slider may have asked twice
        browser.click("#list li button")
        until(browser, "document.querySelector('#list .why') !== null")
        (why,) = texts(browser, ".why")
        assert why.startswith("Because of Film number 17")
        browser.click("#by input[value=upper]")
        until(browser, "document.querySelector('.why') === null")
        assert browser.ask("document.documentElement.scrollWidth") <= width
        name = f"{width}-{'dark' if dark else 'light'}.png"
        (tmp_path / name).write_bytes(browser.picture())
    assert len(colours) == 2
    assert browser.errors == []
    assert [url for url in browser.requested if not url.startswith(service.address)] == []


def test_a_token_is_asked_for_and_a_service_that_has_gone_is_reported(browser, served):
    service = served(token="secret")
    browser.open(service.address)
    until(browser, "!document.querySelector('#login').hidden")
    assert "token is missing or wrong" in browser.ask("document.querySelector('#error').innerText")
    write(browser, "#token", "secret")
    browser.click("#login button")
    until(browser, "document.querySelectorAll('#found li').length > 3")
    assert browser.ask("document.querySelector('#error').hidden")
    assert browser.ask("document.querySelector('#login').hidden")
    service.stop()
    browser.click("#found button")
    until(browser, "!document.querySelector('#error').hidden")
    assert "does not answer" in browser.ask("document.querySelector('#error').innerText")
