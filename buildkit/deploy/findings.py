"""What a check of manifests found, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from buildkit.errors import one_line


class Severity(StrEnum):
    """``error`` fails the check, ``warning`` does not, ``unknown`` says that something could not be checked."""

    ERROR = "error"
    WARNING = "warning"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, where it stands (``line`` from 1), and what to do about it.

    ``rule`` is one of ``RULES`` in ``buildkit.deploy.rules``; ``subject`` names the object as ``Kind/name``.
    """

    rule: str
    severity: Severity
    file: str
    line: int
    message: str
    remedy: str
    subject: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "severity": str(self.severity),
            "file": one_line(self.file),
            "line": self.line,
            "subject": self.subject,
            "message": one_line(self.message),
            "remedy": one_line(self.remedy),
        }

    def render(self) -> str:
        """Two lines for people; the first in the form that editors and CI logs link."""
        subject = f"{one_line(self.subject)}: " if self.subject else ""
        head = f"{one_line(self.file)}:{self.line}: {self.severity} [{self.rule}] {subject}{one_line(self.message)}"
        return f"{head}\n    -> {one_line(self.remedy)}"
