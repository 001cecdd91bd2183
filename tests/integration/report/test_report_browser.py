"""The report in a real browser: at a phone's and a desktop's width, in light and dark, alone and without a script."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from support import reports

from buildkit.report import Report, to_html

MAKERS: dict[str, Callable[[], Report]] = {
    make.__name__: make
    for make in (reports.good, reports.failed, reports.untested, reports.broken_at_once, reports.hostile, reports.wide)
}
PHONE, DESKTOP = 360, 1280
VIEWS = [(width, scheme) for width in (PHONE, DESKTOP) for scheme in ("light", "dark")]
CONTRAST = 4.5
"""WCAG 2.2, 1.4.3 (AA) for text of this size."""


@pytest.fixture(scope="session")
def browser() -> Iterator[webdriver.Chrome]:
    """Headless Chromium, driven by the driver of its own version; nothing is downloaded."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    assert program, "there is no chromium here: apt-get install --no-install-recommends chromium chromium-driver"
    assert driver, "there is no chromedriver here: apt-get install --no-install-recommends chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)  # the sandbox cannot be had by root, and what is opened are pages of our own
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield started
    finally:
        started.quit()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of the pages, as files."""
    folder = tmp_path_factory.mktemp("pages")
    out = {}
    for name, make in MAKERS.items():
        path: Path = folder / f"{name}.html"
        path.write_text(to_html(make()), encoding="utf-8")
        out[name] = path.as_uri()
    return out


def show(browser: webdriver.Chrome, address: str, width: int, scheme: str) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == PHONE},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    for kind in ("browser", "performance"):
        log(browser, kind)  # what was before is not this page's
    browser.get(address)


def log(browser: webdriver.Chrome, kind: str) -> list[dict[str, Any]]:
    """What was logged since the last time."""
    entries: list[dict[str, Any]] = browser.get_log(kind)  # type: ignore[no-untyped-call]
    return entries


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_asked_for_and_nothing_is_complained_of(
    browser: webdriver.Chrome, pages: dict[str, str], name: str
) -> None:
    show(browser, pages[name], DESKTOP, "light")
    browser.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert log(browser, "browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in log(browser, "performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [pages[name]]


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", MAKERS)
def test_nothing_sticks_out_to_the_side(
    browser: webdriver.Chrome, pages: dict[str, str], name: str, width: int
) -> None:
    show(browser, pages[name], width, "light")
    for opened in (False, True):
        browser.execute_script(
            "for (const fold of document.querySelectorAll('details')) fold.open = arguments[0]", opened
        )
        shown, room, wide = browser.execute_script(
            """
            const root = document.documentElement, wide = [];
            for (const e of document.querySelectorAll('main *')) {
              const box = e.getBoundingClientRect();
              if (box.right > root.clientWidth + 1 && !e.closest('.scroll, .hidden, svg') && box.width)
                wide.push(e.tagName + '.' + e.className + ' ' + box.right);
            }
            return [root.scrollWidth, root.clientWidth, wide.slice(0, 5)]
            """
        )
        assert room == width
        assert shown <= room
        assert wide == []


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_the_figures_are_there_and_seen(
    browser: webdriver.Chrome, pages: dict[str, str], width: int, scheme: str
) -> None:
    show(browser, pages["good"], width, scheme)
    found: dict[str, Any] = browser.execute_script(
        """
        const box = e => e.getBoundingClientRect();
        const seen = selector => [...document.querySelectorAll(selector)].filter(
          e => e.checkVisibility() && box(e).width + box(e).height > 0);
        const marks = selector => seen(selector + ' > title + *');
        const row = text => seen('#layers tr').find(e => e.innerText.includes(text));
        const line = row('2.31 GB').querySelector('line.limit');
        const over = row('2.31 GB').querySelector('rect.over');
        const point = marks('#smoke .mark.dtype0')[0], tolerance = seen('#smoke line.limit')[0];
        return {
          known: seen('#layers rect.known').length, over: seen('#layers rect.over').length,
          limit: box(line).left, over_left: box(over).left,
          cells: seen('#architectures td.cell').length, marks: marks('#smoke .mark').length,
          point: box(point).left, tolerance: box(tolerance).left,
          tokens: seen('#smoke .questions rect.known').length,
          sent: seen('#upload rect.sent').length,
          troubles: ['retry', 'restart', 'limit', 'resume'].map(k => marks('#upload .blobs .mark.' + k).length),
          first: box(seen('h1')[0]).top, height: window.innerHeight,
        }
        """
    )
    assert found["known"] >= 20
    assert found["over"] == 4  # three before the split, the indivisible one after it
    assert abs(found["limit"] - found["over_left"]) <= 1.5
    assert found["cells"] >= 12
    assert found["marks"] >= 60
    assert found["point"] < found["tolerance"]
    assert found["tokens"] == 6
    assert found["sent"] >= 60
    assert all(found["troubles"])
    assert found["first"] < found["height"] / 4


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", ["good", "failed"])
def test_the_ticks_of_an_axis_stand_above_their_lines(
    browser: webdriver.Chrome, pages: dict[str, str], name: str, width: int
) -> None:
    show(browser, pages[name], width, "light")
    charts = browser.execute_script(
        """
        const at = e => { const box = e.getBoundingClientRect(), side = e.getAttribute('text-anchor');
          return side == 'start' ? box.left : side == 'end' ? box.right : (box.left + box.right) / 2; };
        return [...document.querySelectorAll('.chart')].filter(e => e.checkVisibility() && e.tHead).map(chart => [
          [...chart.querySelectorAll('svg.axis text')].map(at).sort((a, b) => a - b),
          [...chart.tBodies[0].rows[0].querySelectorAll('line')].map(at).sort((a, b) => a - b)])
        """
    )
    assert len(charts) >= 2
    for labels, lines in charts:
        assert len(labels) >= 2
        assert all(min(abs(label - line) for line in lines) <= 2 for label in labels), (labels, lines)


def test_errors_above_the_tolerance_lie_right_of_the_line(browser: webdriver.Chrome, pages: dict[str, str]) -> None:
    show(browser, pages["failed"], DESKTOP, "light")
    places = browser.execute_script(
        """
        const at = e => e.getBoundingClientRect(), line = at(document.querySelector('#smoke line.limit')).left;
        return [...document.querySelectorAll('#smoke .errors .mark')].map(
          e => [e.classList.contains('above'), at(e.firstElementChild.nextElementSibling).left - line])
        """
    )
    assert sum(above for above, _ in places) >= 10
    assert all((offset > -6) == above for above, offset in places)  # half of a mark's width


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", ["good", "failed", "untested"])
def test_every_text_can_be_read_on_its_ground(
    browser: webdriver.Chrome, pages: dict[str, str], name: str, width: int, scheme: str
) -> None:
    show(browser, pages[name], width, scheme)
    weak = browser.execute_script(
        """
        const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
        const light = ([r, g, b]) => {
          const [x, y, z] = [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
          return 0.2126 * x + 0.7152 * y + 0.0722 * z;
        };
        const ground = e => {
          for (; e; e = e.parentElement) {
            const colour = parse(getComputedStyle(e).backgroundColor);
            if (colour.length < 4 || colour[3] > 0) return colour;
          }
          return [255, 255, 255];
        };
        const weak = new Map();
        for (const e of document.querySelectorAll('body *')) {
          const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
          if (!own || !e.checkVisibility() || e.tagName === 'title' || e.closest('.hidden')) continue;
          const style = getComputedStyle(e), drawn = e.namespaceURI.endsWith('svg');
          const [one, two] = [light(parse(drawn ? style.fill : style.color)), light(ground(e))];
          const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
          if (ratio < arguments[0]) weak.set(e.tagName + '.' + (e.className.baseVal ?? e.className), ratio.toFixed(2));
        }
        return [...weak]
        """,
        CONTRAST,
    )
    assert weak == []


def test_a_dark_page_is_dark_and_a_light_page_is_light(browser: webdriver.Chrome, pages: dict[str, str]) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        show(browser, pages["good"], DESKTOP, scheme)
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        grounds[scheme] = sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))
    assert grounds["light"] > 600
    assert grounds["dark"] < 150


def test_what_was_not_run_is_yellow(browser: webdriver.Chrome, pages: dict[str, str]) -> None:
    for scheme in ("light", "dark"):
        show(browser, pages["untested"], DESKTOP, scheme)
        red, green, blue = (
            int(part)
            for part in browser.execute_script(
                "return getComputedStyle(document.querySelector('header.verdict .sign')).fill"
            )
            .removeprefix("rgb(")
            .removesuffix(")")
            .split(",")
        )
        assert red > 180
        assert green > 140
        assert blue < 60


def test_nothing_hostile_becomes_an_element(browser: webdriver.Chrome, pages: dict[str, str]) -> None:
    show(browser, pages["hostile"], DESKTOP, "light")
    assert browser.execute_script("return document.querySelectorAll('script, img, iframe, [onerror]').length") == 0
    assert browser.execute_script("return document.body.innerText.includes('<img src=x onerror=alert(1)>')")
    links = browser.execute_script("return [...document.querySelectorAll('a')].map(a => a.protocol + a.host)")
    assert links == ["https:x.example"]
