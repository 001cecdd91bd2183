"""What a diagnosis says: one line for each thing that was looked at. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from buildkit.errors import BuildkitError, MissingComponentError, one_line


class Level(StrEnum):
    """``problem``: a push (or a build) will fail. ``not-run``: it could not be looked at, which is not ``ok``."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_RUN = "not-run"


class Area(StrEnum):
    """In the order in which a report has them."""

    RECIPE = "recipe"
    ENGINE = "engine"
    TOOLS = "tools"
    DISK = "disk"
    WAY = "way"
    REGISTRY = "registry"
    CREDENTIALS = "credentials"
    CHUNKS = "chunks"
    LIMIT = "limit"
    DOCKER_PUSH = "docker push"
    TIDINESS = "tidiness"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``seen``: what was found out. ``means``: what follows from it. ``remedy``: what to do; empty where nothing is.

    ``missing``: something has to be installed or started, as opposed to being wrong.
    """

    area: Area
    level: Level
    seen: str
    means: str = ""
    remedy: str = ""
    missing: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "area": str(self.area),
            "level": str(self.level),
            "seen": self.seen,
            "means": self.means,
            "do": self.remedy,
        }


def of_error(area: Area, error: BuildkitError, *, level: Level = Level.PROBLEM, means: str = "") -> Finding:
    """An exception as a finding: its message is what was seen, its hint what to do."""
    return Finding(
        area=area,
        level=level,
        seen=one_line(error.message, 1000),
        means=means,
        remedy=error.hint or "",
        missing=isinstance(error, MissingComponentError),
    )
