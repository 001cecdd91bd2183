"""The step summary, read by a Markdown parser: only our own markup in it, whole tables, within its limit."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from support import reports

from buildkit.report import Report, Stage, to_markdown
from buildkit.report.markdown import MAX_SUMMARY, code, escape
from buildkit.report.text import clean

MAKERS = (
    reports.good, reports.failed, reports.untested, reports.broken_at_once, reports.hostile, reports.huge,
    reports.wide, reports.begun,
)  # fmt: skip
PARSER = MarkdownIt("commonmark").enable("table").enable("strikethrough")


def _tokens(text: str) -> list[Token]:
    return [t for token in PARSER.parse(text) for t in (token, *(token.children or ()))]


def _shown(text: str) -> str:
    return "".join(t.content for t in _tokens(text) if t.type in ("text", "code_inline", "text_special"))


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_summary_is_bounded_and_has_no_markup_but_its_own(make: Callable[[], Report]) -> None:
    text = to_markdown(make())
    assert len(text.encode()) <= MAX_SUMMARY < 2**20
    kinds = {token.type for token in _tokens(text)}
    assert not kinds & {
        "html_block",
        "html_inline",
        "link_open",
        "image",
        "s_open",
        "hr",
        "lheading_open",
        "code_block",
    }


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_every_row_has_as_many_cells_as_its_header(make: Callable[[], Report]) -> None:
    """A bar that is not escaped would end a cell early; the parser drops what is too much, so lines are counted."""
    width = 0
    for line in to_markdown(make()).splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        width = width or cells
        assert cells == width, line


@given(st.text(max_size=60))
def test_any_text_is_shown_as_it_is_and_is_never_markup(text: str) -> None:
    cell = escape(text)
    tokens = _tokens(f"| a | b |\n| --- | --- |\n| {cell} | end |")
    assert not {t.type for t in tokens} & {"html_inline", "html_block", "link_open", "em_open", "code_inline", "s_open"}
    assert [t.content for t in tokens if t.type == "inline"][-1] == "end"
    assert _shown(f"x {cell}")[1:].strip() == clean(text).strip()


@pytest.mark.parametrize(
    "text",
    ["# a", "- a", "+ a", "1. a", "12) a", "> a", "---", "===", "    a", "| a | b |", "~~~", "```", "[a]: b", "<!--"],
)
def test_no_text_makes_a_block_of_its_own(text: str) -> None:
    blocks = {t.type for t in PARSER.parse(escape(text))}
    assert blocks == {"paragraph_open", "inline", "paragraph_close"}


@pytest.mark.parametrize("text", ["https://x.example", "www.x.example", "a@x.example", "@team", ":boom:", "$x$", "~a~"])
def test_what_forges_turn_into_links_and_pictures_is_escaped(text: str) -> None:
    assert "\\" in escape(text)


@given(st.text(max_size=60))
def test_code_stays_within_its_ticks(text: str) -> None:
    written = code(text)
    if written:
        tokens = _tokens(f"| a |\n| --- |\n| {written} |")
        assert sum(t.type == "code_inline" for t in tokens) == 1
        assert not {t.type for t in tokens} & {"html_inline", "link_open"}


def test_the_verdict_comes_first() -> None:
    assert to_markdown(reports.good()).startswith("## ✅ candle-vllm passed\n")
    assert to_markdown(reports.failed()).startswith("## ❌ candle-vllm failed\n\ncheck failed: ")
    assert to_markdown(reports.untested()).startswith("## ⚠️ candle-vllm is not fully tested\n")


def test_what_was_not_run_is_said_loudly_and_never_ticked() -> None:
    text = to_markdown(reports.untested())
    assert "**NOT RUN" in text
    row = next(line for line in text.splitlines() if "`smoke`" in line)
    assert "NOT RUN" in row
    assert "✅" not in row


def test_digest_and_how_to_pull_are_there() -> None:
    report = reports.good()
    assert f"docker pull {report.pull}\n" in to_markdown(report)
    assert "**Nothing was pushed.**" in to_markdown(reports.failed())


def test_the_diagnosis_is_bold_and_before_the_tables() -> None:
    text = to_markdown(reports.failed())
    assert text.index("- **conv_prefill: as with key band zeroed in causal_conv1d_fwd") < text.index("| --- |")


def test_the_worst_of_many_is_shown_and_the_rest_counted() -> None:
    text = to_markdown(reports.huge())
    assert "and 9,980 findings more, see the report" in text
    assert "files more, see the report" in text


def test_a_reason_of_any_length_fits() -> None:
    report = reports.begun()
    for number in range(3000):
        report = report.with_stage(Stage(name=f"stage {number}", verdict="fail", reason="|" * 10_000))
    assert len(to_markdown(report).encode()) <= MAX_SUMMARY
