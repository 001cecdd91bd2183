"""The page as a document: well-formed, self-contained, bounded, with nothing foreign in it but text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest
from support import reports

from buildkit.report import Report, Stage, to_html
from buildkit.report.html import MAX_PAGE, link

MAKERS = (
    reports.good, reports.failed, reports.untested, reports.broken_at_once, reports.hostile, reports.huge,
    reports.wide, reports.begun,
)  # fmt: skip
VOID = {"meta", "link", "br"}
ATTRIBUTES = {
    "class", "id", "lang", "charset", "http-equiv", "content", "name", "rel", "href", "role", "scope", "colspan",
    "title", "tabindex", "aria-hidden", "aria-label", "data-target", "data-label", "width", "height", "x", "y", "x1",
    "x2", "y1", "y2", "cx", "cy", "r", "rx", "d", "viewbox", "text-anchor", "transform",
}  # fmt: skip
"""All attributes that the page has. None of them runs anything; ``href`` is looked at on its own."""


@cache
def shown(make: Callable[[], Report]) -> str:
    return to_html(make())


class Page(HTMLParser):
    """What is in a page; fails where elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))

    def having(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_page_is_one_document_of_bounded_size_that_refers_to_nothing(make: Callable[[], Report]) -> None:
    text = shown(make)
    assert len(text.encode()) <= MAX_PAGE
    assert text.startswith('<!doctype html>\n<html lang="en">')
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in {"script", "iframe", "object", "embed", "img", "form", "base", "audio", "video", "image"}
        assert set(attributes) <= ATTRIBUTES, tag
        target = attributes.get("href")
        if target is not None:
            allowed = {"use": "#i-", "link": "data:image/svg+xml,", "a": "https://"}[tag]
            assert target.startswith(allowed)
    assert len(page.having("h1")) == 1
    assert page.having("title")[0] is not None


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_the_policy_allows_the_one_style_sheet_by_its_hash_and_nothing_else(make: Callable[[], Report]) -> None:
    text = shown(make)
    style = text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = next(m["content"] for m in Page(text).having("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert "url(" not in style
    assert "@import" not in style


def test_nothing_hostile_is_markup_and_all_of_it_can_be_seen() -> None:
    text = to_html(reports.hostile())
    assert "<img" not in text
    assert "</script" not in text
    assert text.isascii() or not any(c in text for c in "\u202e\u0007\ud800")
    seen = Page(text).text
    assert "</script><img src=x onerror=alert(1)>" in seen
    assert "\\u202e" in seen
    assert "\\ud800" in seen
    assert "{{7*7}}" in seen


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_tables_and_figures_can_be_read_aloud(make: Callable[[], Report]) -> None:
    page = Page(shown(make))
    for heading in page.having("th"):
        assert heading.get("scope") in ("row", "col")
    for figure in page.having("svg"):
        hidden = figure.get("aria-hidden") == "true"
        named = figure.get("role") == "img" and bool(figure.get("aria-label"))
        assert hidden or named or "mark" in (figure.get("class") or "")
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)


def test_the_verdict_is_said_first_in_words_and_with_its_reason() -> None:
    for report, title in (
        (reports.good(), "candle-vllm passed"),
        (reports.failed(), "candle-vllm failed"),
        (reports.untested(), "candle-vllm is not fully tested"),
    ):
        seen = Page(to_html(report)).text
        assert title in seen[:200]
        assert report.reason in seen[:400]


def test_what_was_not_run_is_yellow_and_never_green() -> None:
    for report in (reports.untested(), reports.begun()):
        text = to_html(report)
        page = Page(text)
        assert page.having("header")[0]["class"] == "verdict not-run"
        smoke = text.partition('<section id="smoke">')[2].partition("</section>")[0]
        assert "note not-run" in smoke
        assert "pass" not in re.findall(r'class="([^"]*)"', smoke)
        assert "NOT RUN" in smoke or "Not run" in smoke


@pytest.mark.parametrize("name", ["check", "smoke"])
def test_a_proof_that_was_skipped_is_yellow_too(name: str) -> None:
    report = reports.good().with_stage(Stage(name=name, verdict="skipped", reason="the recipe names none"))
    stages = to_html(report).partition('<section id="stages">')[2].partition("</section>")[0]
    row = next(row for row in stages.split("<tr") if f">{name}</th>" in row)
    assert "badge not-run" in row
    assert "Not run" in row


def test_the_diagnosis_is_prominent() -> None:
    report = reports.failed()
    header = to_html(report).partition("<header")[2].partition("</header>")[0]
    assert "key band zeroed in causal_conv1d_fwd: this build lacks the GDN conv fix" in header


def test_how_to_pull_is_there_whole_and_nothing_is_where_nothing_was_pushed() -> None:
    report = reports.good()
    seen = Page(to_html(report)).text
    assert f"docker pull {report.pull}" in seen
    assert f"invoke deploy.pin candle-vllm --from {report.pull}" in seen
    seen = Page(to_html(reports.failed())).text
    assert "Nothing was pushed." in seen
    assert "docker pull" not in seen


def test_a_failed_image_that_was_pushed_comes_with_a_warning() -> None:
    report = reports.good().with_stage(Stage(name="smoke", verdict="fail", reason="wrong"))
    assert "This image failed: do not run it." in Page(to_html(report)).text


def test_what_is_left_out_is_said() -> None:
    seen = Page(shown(reports.huge)).text
    assert re.search(r"[\d,]+ files more only in report.json", seen)
    assert re.search(r"[\d,]+ violations more only in report.json", seen)


def test_the_same_report_gives_the_same_page() -> None:
    assert to_html(reports.good()) == to_html(Report.parse(reports.good().dump(), where="x"))


@pytest.mark.parametrize("strange", [None, 7, -1, 1e400, "text", "nan", [], [1], {}, {"a": 1}, True], ids=repr)
def test_stages_of_any_json_are_shown(strange: Any) -> None:
    """Every value of every stage replaced; and every stage's whole JSON replaced by an object that holds it."""
    report = reports.failed()
    for stage in reports.good().stages:
        data = _leaves(stage.data, strange)
        report = report.with_stage(Stage(name=stage.name, verdict="fail", data=data))
    Page(to_html(report))
    for stage in report.stages:
        report = report.with_stage(Stage(name=stage.name, verdict="pass", data={"levels": strange, "files": strange}))
    Page(to_html(report))


def _leaves(value: Any, new: Any) -> Any:
    if isinstance(value, dict):
        return {key: _leaves(item, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_leaves(item, new) for item in value]
    return new


@pytest.mark.parametrize(
    "url",
    [
        None, "", "javascript:alert(1)", "JAVASCRIPT:alert(1)", " javascript:alert(1)", "data:text/html,x",
        "//x.example", "https:", "https://", "https://[", "file:///etc/passwd", "https://x.example/\n",
        "https://x.example/" + "a" * 3000,
    ],
)  # fmt: skip
def test_only_whole_links_to_the_web_are_followed(url: str | None) -> None:
    assert link(url) == ""


def test_links_are_escaped() -> None:
    assert link('https://x.example/a?b=1&c="d"') == "https://x.example/a?b=1&amp;c=&#34;d&#34;"


def test_a_report_of_500_layers_and_10_000_files_still_shows_the_worst() -> None:
    seen = Page(shown(reports.huge)).text
    assert "96.0 MB" in seen  # the largest layers
    assert "missing" in seen
