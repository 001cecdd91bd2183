"""Known-bad source revisions: what an image says it was built from, against ``known_bad.yaml``.

Three answers per project: bad, good, and unknown, which is neither.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from importlib import resources
from typing import Any

from buildkit.check.tree import Tree
from buildkit.errors import UsageError

_FULL = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{12,40}(?![0-9A-Za-z])")
_LOCKED = re.compile(
    r'name\s*=\s*"(?P<name>[^"]+)"[^\[]*?source\s*=\s*"git\+(?P<url>[^"#?]+)[^"#]*#(?P<revision>[0-9a-f]{40})"'
)
_SHORTEST = 12
"""Digits of an abbreviated revision that are taken for one."""


class RevisionState(StrEnum):
    BAD = "bad"
    UNKNOWN = "unknown"
    GOOD = "good"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with some revisions; ``fixed_in`` is the commit that cures it, where known."""

    revisions: tuple[str, ...]
    fault: str
    fixed_in: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project whose revisions are judged. ``labels`` and ``files`` are globs that tell its images."""

    name: str
    url: str
    labels: tuple[str, ...]
    files: tuple[str, ...]
    packages: tuple[str, ...]
    bad: tuple[Fault, ...]
    good: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionFinding:
    """What is known of the revision of ``project`` in an image. ``where`` is the label or file that names it."""

    project: str
    state: RevisionState
    revision: str | None
    where: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBad:
    """The list. ``listed`` is the day of its last change (its first moment, UTC)."""

    listed: datetime
    projects: tuple[Project, ...]


def load_known_bad() -> KnownBad:
    """The list that comes with the package."""
    text = resources.files("buildkit").joinpath("known_bad.yaml").read_text("utf-8")
    return parse_known_bad(text, where="buildkit/known_bad.yaml")


def parse_known_bad(text: str, *, where: str) -> KnownBad:
    """Raises UsageError with the dotted path of what is wrong; unknown keys are wrong."""
    import yaml  # deferred: a check of a single file needs no YAML

    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # PyYAML lets ValueError through for the 31st of June
        raise UsageError(f"{where}: is not YAML: {error}") from error
    top = _table(document, {"version", "listed", "projects"}, where)
    if top.get("version") != 1:
        raise UsageError(f"{where}: version: is {top.get('version')!r}, not 1")
    projects = tuple(_project(item, f"{where}: projects[{i}]") for i, item in enumerate(_list(top, "projects", where)))
    return KnownBad(listed=_day(top.get("listed"), f"{where}: listed"), projects=projects)


def judge_revisions(projects: Iterable[Project], labels: Mapping[str, str], tree: Tree) -> Iterator[RevisionFinding]:
    """One finding per project that the image belongs to (or more, where several places name revisions)."""
    for project in projects:
        named = dict(_revisions(project, labels, tree))
        known = [(where, revision) for where, revision in named.items() if _state(project, revision)]
        for where, revision in known:
            fault = _fault(project, revision)
            if fault is not None:
                cure = f"; fixed in {fault.fixed_in[:12]}" if fault.fixed_in else ""
                yield _finding(project, RevisionState.BAD, revision, where, fault.fault + cure)
            else:
                yield _finding(project, RevisionState.GOOD, revision, where, "was proven good")
        if known or not _belongs(project, labels, tree):
            continue
        own = [(where, revision) for where, revision in named.items() if not where.startswith("label ")]
        if own:
            where, revision = own[0]
            yield _finding(project, RevisionState.UNKNOWN, revision, where, "neither known to be bad nor proven good")
        else:
            yield _finding(project, RevisionState.UNKNOWN, None, "", "no label and no lock file names its revision")


def _revisions(project: Project, labels: Mapping[str, str], tree: Tree) -> Iterator[tuple[str, str]]:
    """Place and revision: every hash in a label's value, and the project's packages in lock files."""
    for key, value in sorted(labels.items()):
        for match in _HASH.finditer(value.lower()[:10_000]):
            yield f"label {key}", match[0]
    for path in sorted(tree.files):
        text = tree.files[path].text
        if text is None or not path.endswith("/Cargo.lock"):
            continue
        for match in _LOCKED.finditer(text.decode("utf-8", "replace")):
            if match["name"] in project.packages or match["url"].removesuffix(".git") == project.url:
                yield path, match["revision"]


def _belongs(project: Project, labels: Mapping[str, str], tree: Tree) -> bool:
    texts = [text.lower() for pair in labels.items() for text in pair]
    if any(fnmatch.fnmatchcase(text, pattern.lower()) for pattern in project.labels for text in texts):
        return True
    expressions = [re.compile(fnmatch.translate(pattern)) for pattern in project.files]
    return any(expression.match(path) for path in tree.paths for expression in expressions)


def _state(project: Project, revision: str) -> RevisionState | None:
    if _fault(project, revision) is not None:
        return RevisionState.BAD
    return RevisionState.GOOD if any(_same(revision, good) for good in project.good) else None


def _fault(project: Project, revision: str) -> Fault | None:
    return next((f for f in project.bad if any(_same(revision, bad) for bad in f.revisions)), None)


def _same(given: str, full: str) -> bool:
    return len(given) >= _SHORTEST and full.startswith(given)


def _finding(project: Project, state: RevisionState, revision: str | None, where: str, message: str) -> RevisionFinding:
    return RevisionFinding(project=project.name, state=state, revision=revision, where=where, message=message)


def _project(value: object, where: str) -> Project:
    table = _table(value, {"name", "url", "applies", "bad", "good"}, where)
    applies = _table(table.get("applies"), {"labels", "files", "packages"}, f"{where}.applies")
    faults = []
    for index, item in enumerate(_list(table, "bad", where)):
        place = f"{where}.bad[{index}]"
        row = _table(item, {"revisions", "fault", "fixed_in"}, place)
        fixed = row.get("fixed_in")
        if fixed is not None:
            _hash(fixed, f"{place}.fixed_in")
        revisions = tuple(_hash(r, f"{place}.revisions") for r in _list(row, "revisions", place))
        if not revisions:
            raise UsageError(f"{place}.revisions: is empty")
        faults.append(Fault(revisions=revisions, fault=_text(row, "fault", place), fixed_in=fixed))
    return Project(
        name=_text(table, "name", where),
        url=_text(table, "url", where),
        labels=_texts(applies, "labels", f"{where}.applies"),
        files=_texts(applies, "files", f"{where}.applies"),
        packages=_texts(applies, "packages", f"{where}.applies"),
        bad=tuple(faults),
        good=tuple(_hash(r, f"{where}.good") for r in _list(table, "good", where)),
    )


def _day(value: object, where: str) -> datetime:
    if not isinstance(value, date) or isinstance(value, datetime):
        raise UsageError(f"{where}: {value!r} is not a day such as 2026-07-22")
    return datetime(value.year, value.month, value.day, tzinfo=UTC)


def _table(value: object, keys: set[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: is not a table")
    for key in value:
        if key not in keys:
            raise UsageError(f"{where}: {key!r} is not a key", hint=f"there are {', '.join(sorted(keys))}")
    return value


def _list(table: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = table.get(key, [])
    if not isinstance(value, list):
        raise UsageError(f"{where}.{key}: is not a list")
    return value


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}.{key}: is not a text")
    return " ".join(value.split())


def _texts(table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    values = _list(table, key, where)
    if not all(isinstance(value, str) for value in values):
        raise UsageError(f"{where}.{key}: is not a list of texts")
    return tuple(values)


def _hash(value: object, where: str) -> str:
    if not isinstance(value, str) or not _FULL.fullmatch(value):
        raise UsageError(
            f"{where}: {value!r} is not a full commit hash (40 hex digits, in quotes if it has only digits)"
        )
    return value
