"""The report as Markdown, for a job's summary page. Pure.

A step summary may have 1 MiB (GitHub, "Adding a job summary"; Gitea keeps to it), and is cut off or refused above it.
Cells hold no line break, and everything that Markdown or HTML could take for its own is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from buildkit.report import facts, figures
from buildkit.report.figures import Limits
from buildkit.report.model import Report, Verdict
from buildkit.report.text import clean, clip, clip_path, counted
from buildkit.units import format_duration, format_rate, format_size

MAX_SUMMARY = 512 * 1024
"""Bytes. Half of what is allowed: other steps of the job write into the same file."""

SIGNS = {"pass": "✅", "fail": "❌", "not-run": "⚠️", "skipped": "➖"}
_TITLES: dict[Verdict, str] = {"pass": "passed", "fail": "failed", "not-run": "is not fully tested"}
_SPECIAL = re.compile(
    r"[\\`*{}\[\]#|~$@^]"  # markup, mathematics, references, mentions
    r"|_(?![A-Za-z0-9])|(?<![A-Za-z0-9])_"  # not within a word, where it is none: sm_70
    r"|:(?=//|[\w+-]+:)|(?<=www)\."  # what becomes a link or a picture without brackets
    r"|^[-+=]|(?<=^\d)[.)]|(?<=^\d\d)[.)]"  # a list or a heading, at the beginning of a line
)
_HTML = str.maketrans({"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def to_markdown(report: Report) -> str:
    """At most ``MAX_SUMMARY`` bytes of UTF-8: of long lists the worst, and how many more there are."""
    known, limits = facts.read(report), Limits(shown=20, folded=0, text=300)
    while True:
        page = "\n".join(_lines(report, known, limits)).rstrip() + "\n"
        if len(page.encode()) <= MAX_SUMMARY or limits == limits.smaller():
            return page
        limits = limits.smaller()


def escape(text: str) -> str:
    """``text`` as words of a paragraph or cell: no markup, no HTML, no mention, no link, no line break."""
    return _SPECIAL.sub(lambda found: "\\" + found[0], clean(text).strip()).translate(_HTML)


def code(text: str) -> str:
    """``text`` as code in a paragraph or cell. A bar would end a cell, a backtick the code: they are replaced."""
    plain = clean(text).replace("`", "'").replace("|", "¦").strip()
    return f"`{plain}`" if plain else ""


class _Writer:
    """Escapes and clips, within the limits of one page."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def words(self, text: str) -> str:
        return escape(clip(clean(text), self.limits.text))

    def path(self, text: str) -> str:
        return code(clip_path(clean(text), self.limits.text))

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
        """Cells are escaped already. Empty where there are no rows."""
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        if not lines:
            return []
        rule = ["---:" if number in right else "---" for number in range(len(header))]
        return ["| " + " | ".join(header) + " |", "| " + " | ".join(rule) + " |", *lines, ""]

    def cut(self, items: Sequence[object], noun: str) -> list[str]:
        """What is said of the items that are not shown."""
        left = len(items) - self.limits.shown
        return [f"and {counted(left, noun)} more, see the report", ""] if left > 0 else []


def _lines(report: Report, known: facts.Facts, limits: Limits) -> Iterator[str]:
    writer = _Writer(limits)
    words = writer.words
    yield f"## {SIGNS[report.verdict]} {words(report.name)} {_TITLES[report.verdict]}"
    yield ""
    yield words(report.reason) + "."
    yield ""
    if report.verdict == "not-run":
        yield "> **NOT RUN: nothing says that this image computes right on the GPU.**"
        yield ""
    for sentence in (known.smoke.diagnosis if known.smoke else ())[: limits.shown]:
        yield f"- **{words(sentence)}**"
    yield ""
    yield from _pull(report)
    yield from _stages(report, writer)
    if known.check:
        yield from _check(known.check, writer)
    if known.smoke:
        yield from _smoke(known.smoke, writer)
    yield from _layers(report, writer)
    if known.push:
        yield from _push(known.push, writer)
    yield from _warnings(known.warnings, writer)
    yield f"{words(report.tool)}; {format_duration(report.seconds)} of work"


def _pull(report: Report) -> Iterator[str]:
    if report.pull is None:
        yield "**Nothing was pushed.**"
        yield ""
        return
    if report.verdict == "fail":
        yield "**This image failed: do not run it.**"
        yield ""
    tags = ", ".join(code(tag) for tag in report.tags)
    yield f"Digest {code(str(report.digest))}" + (f", tags {tags}" if tags else "")
    yield ""
    yield from ("~~~~", f"docker pull {clean(report.pull)}", "~~~~")  # one line, which does not begin with a fence
    yield ""


def _stages(report: Report, writer: _Writer) -> Iterator[str]:
    rows = [
        (
            SIGNS[report.shown(stage)],
            code(stage.name),
            "NOT RUN" if report.shown(stage) == "not-run" else stage.verdict,
            format_duration(stage.seconds) if stage.seconds else "",
            writer.words(stage.reason),
        )
        for stage in report.stages
    ]
    yield from writer.table(("", "stage", "result", "time", "in short"), rows, right=(3,))


def _check(check: facts.Check, writer: _Writer) -> Iterator[str]:
    shown = writer.limits.shown
    bad = check.level("violation")
    if bad:
        yield "### Findings"
        yield ""
        yield from writer.table(
            ("", "where", "what", "rule"),
            [("❌", writer.path(f.path), writer.words(f.message), writer.words(f.rule)) for f in bad[:shown]],
        )
        yield from writer.cut(bad, "finding")
    files = [file for file in check.files if file.status != "pass"]
    if files:
        yield "### Files that do not run everywhere"
        yield ""
        header = ("", "file", "verdict", *map(code, check.required))
        yield from writer.table(header, [_file_row(file, check, writer) for file in files[:shown]])
        yield from writer.cut(files, "file")


def _file_row(file: facts.CodeFile, check: facts.Check, writer: _Writer) -> tuple[str, ...]:
    judged = {j.arch: j for j in file.judgements}
    cells = []
    for arch in check.required:
        found = judged.get(arch)
        cells.append(f"{found.native + found.jit}/{found.total}" if found else "–")
    verdict = writer.words(file.verdict + (f", accepted: {file.accepted}" if file.accepted else ""))
    return (SIGNS[file.status], writer.path(file.path), verdict, *cells)


def _smoke(smoke: facts.Smoke, writer: _Writer) -> Iterator[str]:
    for level in smoke.levels[:8]:
        sign, name = SIGNS[level.status], writer.words(level.name.capitalize())
        yield f"### {sign} {name} level: {writer.words(level.verdict)}"
        yield ""
        yield writer.words(level.reason)
        yield ""
        if level.kernels:
            # What failed first; of what passed, no more than is room for.
            cases = sorted(level.kernels.cases, key=lambda case: case.status == "pass")
            rows = [
                (
                    SIGNS[case.status],
                    code(f"{case.stage} {case.case} {case.dtype}"),
                    "–" if case.worst is None else f"{case.worst:.1e}",
                    "–" if case.tolerance is None else f"{case.tolerance:.0e}",
                    writer.words(case.note),
                )
                for case in cases[: max(writer.limits.shown * 2, 1)]
            ]
            yield from writer.table(("", "case", "worst error", "tolerance", "note"), rows, right=(2, 3))
            if len(cases) > len(rows):
                yield f"and {counted(len(cases) - len(rows), 'case')} more, see the report"
                yield ""
        if level.server:
            rows = [
                (
                    SIGNS[q.status],
                    writer.words(q.name),
                    f"{q.identical}/{q.tokens}" if q.tokens else "–",
                    "–" if q.logprob_error is None else f"{q.logprob_error:.1e}",
                    writer.words(q.note),
                )
                for q in level.server.questions[: writer.limits.shown]
            ]
            yield from writer.table(("", "question", "identical", "logprob error", "note"), rows, right=(2, 3))
            yield from writer.cut(level.server.questions, "question")


def _layers(report: Report, writer: _Writer) -> Iterator[str]:
    layers = report.before if report.after is None else report.after
    if not layers:
        return
    yield "### Layers"
    yield ""
    figure = figures.layers_figure("", layers, report.limit, writer.limits)
    limit = f", limit {format_size(report.limit)}" if report.limit else ""
    before = f"{counted(len(report.before), 'layer')} before the split; " if report.after is not None else ""
    yield f"{before}{figure.summary}{limit}."
    yield ""
    largest = sorted((layer for layer in layers if layer.size is not None), key=lambda layer: -(layer.size or 0))
    rows = [
        (
            "⚠️" if report.limit and (layer.size or 0) > report.limit else "",
            writer.words(layer.label),
            format_size(layer.size or 0),
            f"{(layer.size or 0) / report.limit:.0%}" if report.limit else "",
            code(clip(clean(layer.created_by or ""), 80)),
        )
        for layer in largest[: min(writer.limits.shown, 10)]
    ]
    yield from writer.table(("", "largest layers", "size", "of the limit", "made by"), rows, right=(2, 3))


def _push(push: facts.Push, writer: _Writer) -> Iterator[str]:
    yield "### Upload"
    yield ""
    if push.up_to_date:
        yield "Everything was there already; nothing was sent."
        yield ""
        return
    parts = [f"{format_size(push.sent)} sent in {format_duration(push.seconds)}"]
    if push.resent:
        parts.append(f"of that {format_size(push.resent)} again")
    if push.present:
        parts.append(f"{counted(len(push.present), 'blob')} there already")
    if push.limit_learned is not None:
        parts.append(f"**a limit of {format_size(push.limit_learned)} was met**")
    yield ", ".join(parts) + "."
    yield ""
    # Those with something to tell first, then the largest.
    uploads = sorted(push.uploads, key=lambda u: (not (u.retries or u.restarts or u.limit_learned), -u.size))
    rows = [
        (
            writer.words(u.label),
            format_size(u.size),
            writer.words(u.outcome),
            str(u.chunks),
            str(len(u.retries)),
            format_size(u.resent),
            format_duration(u.seconds),
            format_rate(u.sent, u.seconds) if u.sent else "–",
        )
        for u in uploads[: writer.limits.shown]
    ]
    header = ("blob", "size", "how", "chunks", "retries", "re-sent", "time", "rate")
    yield from writer.table(header, rows, right=(1, 3, 4, 5, 6, 7))
    yield from writer.cut(uploads, "blob")


def _warnings(warnings: Sequence[tuple[str, str]], writer: _Writer) -> Iterator[str]:
    if warnings:
        yield "### Warnings"
        yield ""
        for stage, text in warnings[: writer.limits.shown]:
            yield f"- {stage}: {writer.words(text)}"
        yield ""
        yield from writer.cut(warnings, "warning")
