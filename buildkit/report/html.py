"""The report as one page of HTML that needs nothing else: no request, no script, no font. Pure.

Everything that is written passes through ``_Writer.finalize`` and Jinja's escaping; no template marks foreign text as
safe. The page's own policy (CSP level 3) forbids it to load or run anything, and allows the one style sheet in it by
its hash, so that not even a mistake here could make the page call anywhere.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from buildkit.report import facts, figures
from buildkit.report.model import SCHEMA, Report, Verdict
from buildkit.report.text import clean, clip, clip_path, counted
from buildkit.units import format_duration, format_rate, format_size

MAX_PAGE = 2 * 10**6
"""Bytes. A page that would be larger shows less of its lists and says so."""

MAX_LINK = 2000
"""Characters; a longer link is not one that a CI server made."""

MAX_LEVELS = 4
"""Levels of a smoke test that are shown; there are two."""

WORDS = {"pass": "Passed", "fail": "Failed", "not-run": "Not run", "skipped": "Skipped"}
_TITLES = {"pass": "passed", "fail": "failed", "not-run": "is not fully tested"}
_ICON_COLOURS = {"pass": "%230b7a50", "fail": "%23b3261e", "not-run": "%23e0a800"}
_ICON_SHAPES = {"pass": "M4 8.5l3 3 5-6", "fail": "M4.5 4.5l7 7m0-7l-7 7", "not-run": "M8 3.5v5.5m0 2.5v1.5"}


def to_html(report: Report) -> str:
    """A whole document of at most ``MAX_PAGE`` bytes of UTF-8; the same report gives the same page."""
    known, limits = facts.read(report), figures.Limits()
    while True:
        page = _render(report, known, limits)
        if len(page.encode()) <= MAX_PAGE or limits == limits.smaller():
            return page
        limits = limits.smaller()


def _render(report: Report, known: facts.Facts, limits: figures.Limits) -> str:
    style = Markup(resources.files("buildkit.report").joinpath("templates/style.css").read_text(encoding="utf-8"))  # noqa: S704 - our own file
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    check, smoke = known.check, known.smoke
    return (
        _environment(limits)
        .get_template("page.html.j2")
        .render(
            report=report,
            schema=SCHEMA,
            limits=limits,
            style=style,
            style_hash=digest,
            icon_url=_icon(report.verdict),
            title=_TITLES[report.verdict],
            words=WORDS,
            why=figures.fold(known.causes, limits, shown=6),
            build=known.build,
            check=check,
            smoke=smoke,
            levels=smoke.levels[:MAX_LEVELS] if smoke else (),
            split=known.split,
            push=known.push,
            verify=known.verify,
            warnings=figures.fold(known.warnings, limits, shown=8),
            stages=figures.stage_rows(report, limits),
            layers=_layers(report, limits),
            matrix=figures.matrix(check, limits) if check else None,
            errors={
                level.name: figures.errors_figure(level.kernels, limits)
                for level in (smoke.levels[:MAX_LEVELS] if smoke else ())
                if level.kernels and level.kernels.cases
            },
            timeline=figures.timeline_figure(report.timeline, limits),
        )
        .lstrip()
    )


def _environment(limits: figures.Limits) -> Environment:
    def finalize(value: Any) -> Any:
        """Every text that a template writes, unless it is markup that a template made."""
        if isinstance(value, str) and not isinstance(value, Markup):
            return clip(clean(value), limits.text)
        return value

    environment = Environment(
        loader=PackageLoader("buildkit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    environment.filters |= {
        "size": format_size,
        "rate": format_rate,
        "duration": format_duration,
        "when": when,
        "counted": counted,
        "whole": lambda text: escape(clean(text)),
        "path": lambda text: clip_path(clean(text), limits.text),
        "link": link,
        "general": lambda number: "–" if number is None else f"{number:.6g}",
        "error": lambda number: "–" if number is None else "0" if number == 0 else f"{number:.1e}",
    }
    environment.globals |= {"fold": lambda items, shown: figures.fold(items, limits, shown=shown)}
    return environment


def when(at: datetime) -> str:
    """``30 Nov 2026, 08:31 UTC``, in any locale."""
    at = at.astimezone(UTC)
    month = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")[at.month - 1]
    return f"{at.day} {month} {at.year}, {at:%H:%M} UTC"


def link(url: str | None) -> Markup:
    """``url``, whole and escaped, if a page may lead there: http or https, with a host; else empty."""
    try:
        parts = urlsplit(url or "")
    except ValueError:
        return Markup()
    fit = url is not None and url.isprintable() and len(url) <= MAX_LINK
    return escape(url) if fit and parts.scheme in ("http", "https") and parts.netloc else Markup()


def _layers(report: Report, limits: figures.Limits) -> list[figures.LayersFigure]:
    if report.after is None:
        title = "As pushed" if report.digest else "As built"
        return [figures.layers_figure(title, report.before, report.limit, limits)] if report.before else []
    return [
        figures.layers_figure("Before the split", report.before, report.limit, limits),
        figures.layers_figure("After the split", report.after, report.limit, limits),
    ]


def _icon(verdict: Verdict) -> Markup:
    """For the browser's tab: the verdict's colour and sign."""
    return Markup(  # noqa: S704 - constants
        "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>"
        f"<rect width='16' height='16' rx='4' fill='{_ICON_COLOURS[verdict]}'/>"
        f"<path d='{_ICON_SHAPES[verdict]}' fill='none' stroke='white' stroke-width='2'/></svg>"
    )
