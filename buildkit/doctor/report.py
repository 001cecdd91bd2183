"""What a diagnosis hands back, and how it is shown. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from buildkit.doctor.findings import Area, Finding, Level
from buildkit.doctor.search import Interval
from buildkit.units import format_size

SCHEMA = 1
_MARKS = {Level.OK: "✅", Level.NOTE: "ℹ️", Level.WARNING: "⚠️", Level.PROBLEM: "❌", Level.NOT_RUN: "⏭️"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """``lines`` are in the order of areas. ``sent`` are bytes of bodies that went out of ``budget``; ``limit`` is what
    was measured of the way's body limit (None: not measured). ``seconds`` is how long it all took."""

    subject: str
    lines: tuple[Finding, ...]
    kind: str = ""
    version: str | None = None
    limit: Interval | None = None
    limit_by: str = ""
    sent: int = 0
    budget: int = 0
    uploads: int = 0
    cancelled: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing is wrong, as far as it was looked at."""
        return not self.problems

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(line for line in self.lines if line.level is Level.PROBLEM)

    @property
    def only_missing(self) -> bool:
        """All that is wrong is that something is not installed or not started."""
        return bool(self.problems) and all(line.missing for line in self.problems)

    def summary(self) -> str:
        """One line."""
        counts = Counter(line.level for line in self.lines)
        parts = [
            f"{counts[level]} {word}{'s' if counts[level] != 1 and word in ('problem', 'warning', 'note') else ''}"
            for level, word in (
                (Level.PROBLEM, "problem"),
                (Level.WARNING, "warning"),
                (Level.NOTE, "note"),
                (Level.NOT_RUN, "not looked at"),
                (Level.OK, "fine"),
            )
            if counts[level] or level is Level.PROBLEM
        ]
        return f"{self.subject}: {', '.join(parts)}"

    def traffic(self) -> str:
        if not self.uploads:
            return "no upload was opened"
        sent = f"{format_size(self.sent)} of at most {format_size(self.budget)} sent"
        if self.uploads == 1:
            return f"{sent} in a throw-away upload, {'cancelled' if self.cancelled else 'which could not be cancelled'}"
        cancelled = "all" if self.cancelled == self.uploads else f"{self.cancelled} of them"
        return f"{sent} in {self.uploads} throw-away uploads, {cancelled} cancelled"

    def render(self) -> str:
        """For a terminal: what was seen; where it matters, what that means and what to do."""
        out = []
        width = max((len(str(line.area)) for line in self.lines), default=0)
        for line in self.lines:
            level = str(line.level).upper() if line.level is Level.PROBLEM else str(line.level)
            indent = " " * (9 + width + 2)
            out.append(f"{level:<9}{line.area!s:<{width}}  {line.seen}")
            if line.means:
                out.append(f"{indent}→ {line.means}")
            if line.remedy:
                out.append(f"{indent}do: {line.remedy}")
        return "\n".join([*out, "", self.summary(), self.traffic()])

    def to_markdown(self) -> str:
        """For a job's summary page: problems first, everything in a table."""
        head = "❌ **pushes will fail**" if self.problems else "✅ **nothing in the way**"
        rows = [f"### Doctor: {_cell(self.subject)}", "", f"{head}; {_cell(self.traffic())}.", ""]
        rows += ["| | area | seen | means | do |", "| --- | --- | --- | --- | --- |"]
        for line in sorted(self.lines, key=lambda line: line.level is not Level.PROBLEM):
            cells = (line.seen, line.means, line.remedy)
            rows.append(f"| {_MARKS[line.level]} {line.level} | {line.area} | {' | '.join(map(_cell, cells))} |")
        return "\n".join(rows) + "\n"

    def to_json(self) -> dict[str, Any]:
        limit = None
        if self.limit is not None:
            limit = {"accepted": self.limit.accepted, "refused": self.limit.refused, "by": self.limit_by or None}
        return {
            "ok": self.ok,
            "schema": SCHEMA,
            "subject": self.subject,
            "registry": {"kind": self.kind or None, "version": self.version},
            "limit": limit,
            "bytes_sent": self.sent,
            "budget": self.budget,
            "uploads": {"opened": self.uploads, "cancelled": self.cancelled},
            "seconds": round(self.seconds, 3),
            "lines": [line.to_json() for line in self.lines],
        }


def in_order(lines: Sequence[Finding]) -> tuple[Finding, ...]:
    """By area; within one, as they came."""
    order = {area: number for number, area in enumerate(Area)}
    return tuple(sorted(lines, key=lambda line: order[line.area]))


def _cell(text: str) -> str:
    """Text of a server's or a file's in a Markdown table: no markup of its own."""
    for mark in "\\`*_[]<>|#!~":
        text = text.replace(mark, f"\\{mark}")
    return text
