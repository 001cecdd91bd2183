"""A pipeline's report as values: what was done to an image, with the result of each stage. Pure.

``schema.json`` beside this file describes the JSON form, ``buildkit/report/1``. Members are added without a new
version; one that changes its meaning or goes makes a new one. So a reader ignores what it does not know and insists on
the rest. ``verdict``, ``reason`` and ``pull`` follow from the other members: they are written for other readers and
never read back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, cast, get_args

from buildkit.errors import FormatError, one_line
from buildkit.gdn.plain import plain
from buildkit.model import Digest, load_json_object

SCHEMA = "buildkit/report/1"
MAX_REPORT = 256 * 2**20
"""Bytes of a report that is read. A check of 10,000 files with all their units makes some tens of megabytes."""

MAX_DEPTH = 64
"""Objects and lists within each other in a stage's data. The stages' own JSON has fewer than ten."""

STAGES = ("preflight", "build", "check", "smoke", "split", "push", "verify", "attach", "promote")
"""The stages in their order. A report may have others, which come after these."""
PROVING = ("check", "smoke")
"""Without these nothing is known of the image: a report in which they did not run is no pass."""

Verdict = Literal["pass", "fail", "not-run", "skipped"]
EventKind = Literal[
    "started", "acknowledged", "retrying", "resumed", "restarted", "limit", "finished", "failed", "skipped"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage. ``data`` is the JSON that the stage's own command prints, or None.

    ``not-run``: was wanted and could not be run (no GPU). ``skipped``: was not asked for, or a stage before it failed.
    """

    name: str
    verdict: Verdict
    reason: str = ""
    started: datetime | None = None
    seconds: float = 0.0
    data: Mapping[str, Any] | None = field(default=None, hash=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "reason": self.reason,
            "started": _write_time(self.started),
            "seconds": _round(self.seconds),
            "data": None if self.data is None else plain(dict(self.data)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of an image. ``size`` is what is transferred (compressed), ``tar_size`` before compression; bytes."""

    label: str
    digest: Digest | None = None
    size: int | None = None
    tar_size: int | None = None
    created_by: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "digest": _text(self.digest),
            "size": self.size,
            "tar_size": self.tar_size,
            "created_by": self.created_by,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """Something that happened to the upload of ``blob`` (a label), ``at`` seconds after the push began.

    ``offset``: bytes that the registry holds; ``size``: bytes of the whole blob, None while it grows; ``sent`` bytes
    took ``seconds``; ``text`` says why, where there is a why. In ``limit``, ``size`` is the body that was refused.
    """

    at: float
    blob: str
    event: EventKind
    offset: int | None = None
    size: int | None = None
    sent: int | None = None
    seconds: float | None = None
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "at": _round(self.at),
            "blob": self.blob,
            "event": self.event,
            "offset": self.offset,
            "size": self.size,
            "sent": self.sent,
            "seconds": None if self.seconds is None else _round(self.seconds),
            "text": self.text,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """One process that added to the report: when, where (``host``), which stages, and the CI run's page."""

    started: datetime
    host: str | None = None
    stages: tuple[str, ...] = ()
    url: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "started": _write_time(self.started),
            "host": self.host,
            "stages": list(self.stages),
            "url": self.url,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is known of one image. Times are aware; ``limit`` is the edge's limit for one request body, in bytes.

    ``target`` is ``host/repository``; ``digest`` the manifest's, None until it has been pushed. ``after`` is None where
    the image was not divided. ``started`` and ``finished`` span all runs, the waiting between jobs included.
    """

    tool: str
    name: str
    started: datetime
    finished: datetime
    revision: str | None = None
    target: str | None = None
    tags: tuple[str, ...] = ()
    digest: Digest | None = None
    limit: int | None = None
    before: tuple[Layer, ...] = ()
    after: tuple[Layer, ...] | None = None
    stages: tuple[Stage, ...] = ()
    timeline: tuple[TimelineEvent, ...] = ()
    runs: tuple[RunInfo, ...] = ()

    @property
    def failed(self) -> Stage | None:
        """The first stage that failed."""
        return next((stage for stage in self.stages if stage.verdict == "fail"), None)

    @property
    def verdict(self) -> Verdict:
        """``fail`` if a stage failed; else ``not-run`` unless check and smoke did run; else ``pass``."""
        return "fail" if self.failed else "not-run" if self._unproven() else "pass"

    @property
    def reason(self) -> str:
        """Why the verdict is what it is, on one line."""
        if failed := self.failed:
            return one_line(f"{failed.name} failed" + (f": {failed.reason}" if failed.reason else ""))
        if unproven := self._unproven():
            return one_line("; ".join(unproven))
        done = [stage.name for stage in self.stages if stage.verdict == "pass"]
        return f"{len(done)} stages passed: {', '.join(done)}"

    @property
    def seconds(self) -> float:
        """Time that the stages took, together."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def pull(self) -> str | None:
        """What ``docker pull`` takes to get exactly this image."""
        return f"{self.target}@{self.digest}" if self.target and self.digest else None

    def shown(self, stage: Stage) -> Verdict:
        """How a stage's verdict is shown: one without which nothing is known of the image was not merely skipped."""
        missed = stage.verdict == "skipped" and stage.name in PROVING and self.failed is None
        return "not-run" if missed else stage.verdict

    def stage(self, name: str) -> Stage | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    def with_stage(self, stage: Stage) -> Report:
        """The same with ``stage`` in its place; one of that name from an earlier run gives way."""
        others = [known for known in self.stages if known.name != stage.name]
        return replace(self, stages=tuple(sorted([*others, stage], key=_place)))

    def with_run(self, run: RunInfo) -> Report:
        """The same with one more run."""
        return replace(self, runs=(*self.runs, run), started=min(self.started, run.started))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, in the form of ``schema.json``."""
        return {
            "schema": SCHEMA,
            "tool": self.tool,
            "name": self.name,
            "verdict": self.verdict,
            "reason": self.reason,
            "started": _write_time(self.started),
            "finished": _write_time(self.finished),
            "seconds": _round(self.seconds),
            "revision": self.revision,
            "target": self.target,
            "tags": list(self.tags),
            "digest": _text(self.digest),
            "pull": self.pull,
            "limit": self.limit,
            "layers": {
                "before": [layer.to_json() for layer in self.before],
                "after": None if self.after is None else [layer.to_json() for layer in self.after],
            },
            "stages": [stage.to_json() for stage in self.stages],
            "timeline": [event.to_json() for event in self.timeline],
            "runs": [run.to_json() for run in self.runs],
        }

    def dump(self) -> bytes:
        """``report.json``: the same values give the same bytes."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False).encode("ascii") + b"\n"

    @classmethod
    def parse(cls, raw: bytes, *, where: str) -> Report:
        """From ``report.json``. Members that are not known are ignored, also in later versions of this schema.

        Raises FormatError, with the dotted path of the first member that is missing or not what it should be.
        """
        document = load_json_object(raw, where=where, limit=MAX_REPORT)
        if document.get("schema") != SCHEMA:
            raise FormatError(
                f"schema {_show(document.get('schema'))} is not {SCHEMA}",
                where=where,
                hint="it is not a report of the pipeline, or one of a newer version",
            )
        root = _Object(document, where, where)
        layers = root.object("layers")
        after = layers.objects("after") if layers.value.get("after") is not None else None
        return cls(
            tool=root.text("tool"),
            name=root.text("name"),
            started=root.time("started"),
            finished=root.time("finished"),
            revision=root.maybe_text("revision"),
            target=root.maybe_text("target"),
            tags=root.texts("tags"),
            digest=root.maybe_digest("digest"),
            limit=root.maybe_count("limit"),
            before=tuple(_parse_layer(item) for item in layers.objects("before")),
            after=None if after is None else tuple(_parse_layer(item) for item in after),
            stages=_parse_stages(root),
            timeline=tuple(_parse_event(item) for item in root.objects("timeline")),
            runs=tuple(_parse_run(item) for item in root.objects("runs")),
        )

    def _unproven(self) -> list[str]:
        out = []
        for name in PROVING:
            stage = self.stage(name)
            if stage is None or stage.verdict in ("not-run", "skipped"):
                out.append(f"{name} was not run" + (f": {stage.reason}" if stage and stage.reason else ""))
        return out


# Reading -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Object:
    """A JSON object that is read strictly. ``where`` is what errors name: the file and the dotted path."""

    value: Mapping[str, Any]
    where: str
    file: str

    def _error(self, name: str, problem: str) -> FormatError:
        path = f"{self.where}: {name}" if self.where == self.file else f"{self.where}.{name}"
        return FormatError(problem, where=path)

    def get(self, name: str) -> Any:
        if name not in self.value:
            raise self._error(name, "is missing")
        return self.value[name]

    def text(self, name: str) -> str:
        found = self.get(name)
        if not isinstance(found, str):
            raise self._error(name, f"{_show(found)} is not a text")
        return found

    def maybe_text(self, name: str) -> str | None:
        return None if self.value.get(name) is None else self.text(name)

    def texts(self, name: str) -> tuple[str, ...]:
        found = self.get(name)
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise self._error(name, f"{_show(found)} is not a list of texts")
        return tuple(found)

    def choice(self, name: str, choices: Iterable[str]) -> str:
        found = self.text(name)
        if found not in choices:
            raise self._error(name, f"{_show(found)} is none of {', '.join(choices)}")
        return found

    def number(self, name: str) -> float:
        found = self.get(name)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise self._error(name, f"{_show(found)} is not a number")
        try:
            number = float(found)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number < 0:
            raise self._error(name, f"{_show(found)} is not a number of seconds")
        return number

    def maybe_number(self, name: str) -> float | None:
        return None if self.value.get(name) is None else self.number(name)

    def maybe_count(self, name: str) -> int | None:
        found = self.value.get(name)
        if found is not None and (not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < 2**63):
            raise self._error(name, f"{_show(found)} is not a number of bytes")
        return found

    def time(self, name: str) -> datetime:
        """RFC 3339: a date-time with its offset from UTC."""
        found = self.text(name)
        try:
            at = datetime.fromisoformat(found)
            return at.astimezone(UTC) if at.tzinfo else _fail()
        except (ValueError, OverflowError) as error:
            raise self._error(name, f"{_show(found)} is not an RFC 3339 time") from error

    def maybe_time(self, name: str) -> datetime | None:
        return None if self.value.get(name) is None else self.time(name)

    def maybe_digest(self, name: str) -> Digest | None:
        found = self.maybe_text(name)
        try:
            return None if found is None else Digest.parse(found)
        except FormatError as error:
            raise self._error(name, error.message) from error

    def _child(self, value: Any, name: str) -> _Object:
        path = f"{self.where}: {name}" if self.where == self.file else f"{self.where}.{name}"
        if not isinstance(value, dict):
            raise FormatError(f"{_show(value)} is not an object", where=path)
        return _Object(value, path, self.file)

    def object(self, name: str) -> _Object:
        return self._child(self.get(name), name)

    def objects(self, name: str) -> tuple[_Object, ...]:
        found = self.get(name)
        if not isinstance(found, list):
            raise self._error(name, f"{_show(found)} is not a list")
        return tuple(self._child(item, f"{name}[{number}]") for number, item in enumerate(found))


def _fail() -> datetime:
    raise ValueError("no offset from UTC")


def _parse_stages(root: _Object) -> tuple[Stage, ...]:
    stages = tuple(_parse_stage(item) for item in root.objects("stages"))
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise FormatError("has two stages of one name", where=f"{root.where}: stages")
    return tuple(sorted(stages, key=_place))


def _parse_stage(item: _Object) -> Stage:
    data = item.value.get("data")
    if _depth_exceeds(data, MAX_DEPTH):
        raise FormatError(f"is nested more than {MAX_DEPTH} deep", where=f"{item.where}.data")
    return Stage(
        name=item.text("name"),
        verdict=cast(Verdict, item.choice("verdict", get_args(Verdict))),
        reason=item.maybe_text("reason") or "",
        started=item.maybe_time("started"),
        seconds=item.maybe_number("seconds") or 0.0,
        data=None if data is None else item.object("data").value,
    )


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Without recursion: it is what protects others' recursion."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def _parse_layer(item: _Object) -> Layer:
    return Layer(
        label=item.text("label"),
        digest=item.maybe_digest("digest"),
        size=item.maybe_count("size"),
        tar_size=item.maybe_count("tar_size"),
        created_by=item.maybe_text("created_by"),
    )


def _parse_event(item: _Object) -> TimelineEvent:
    return TimelineEvent(
        at=item.number("at"),
        blob=item.text("blob"),
        event=cast(EventKind, item.choice("event", get_args(EventKind))),
        offset=item.maybe_count("offset"),
        size=item.maybe_count("size"),
        sent=item.maybe_count("sent"),
        seconds=item.maybe_number("seconds"),
        text=item.maybe_text("text") or "",
    )


def _parse_run(item: _Object) -> RunInfo:
    return RunInfo(
        started=item.time("started"),
        host=item.maybe_text("host"),
        stages=item.texts("stages"),
        url=item.maybe_text("url"),
    )


# Writing -------------------------------------------------------------------------------------------------------------


def _place(stage: Stage) -> int:
    return STAGES.index(stage.name) if stage.name in STAGES else len(STAGES)


def _write_time(at: datetime | None) -> str | None:
    """RFC 3339 in UTC, to the millisecond."""
    return None if at is None else at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _round(seconds: float) -> float:
    """To the millisecond; what is no number of seconds (a clock that was set back) is 0."""
    return round(float(seconds), 3) if math.isfinite(seconds) and seconds > 0 else 0.0


def _text(digest: Digest | None) -> str | None:
    return str(digest) if digest else None


def _show(value: object) -> str:
    return one_line(repr(value), 80)
