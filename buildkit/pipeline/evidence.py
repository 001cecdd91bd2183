"""What of a report goes with the image: the artifacts that are attached to it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

from buildkit.build import labels
from buildkit.deploy.evidence import DEFAULT_REQUIRED, Evidence
from buildkit.deploy.evidence import Verdict as StepVerdict
from buildkit.gdn.plain import plain
from buildkit.model import Digest, Platform
from buildkit.report import Report


def evidence_of(report: Report, digest: Digest, platform: Platform, *, known_bad: datetime | None) -> Evidence:
    """The small document that ``deploy.check`` and ``deploy.pin`` judge. What was not run is said to be not run.

    ``known_bad`` is the date of the list of bad revisions that the check held the image against.
    """
    verdicts: dict[str, StepVerdict] = {}
    reasons: dict[str, str] = {}
    for name in DEFAULT_REQUIRED:
        stage = report.stage(name)
        verdicts[name] = stage.verdict if stage is not None and stage.verdict in ("pass", "fail") else "not-run"
        if stage is not None and stage.reason and verdicts[name] != "pass":
            reasons[name] = stage.reason
    check = _data(report, "check")
    proven = verdicts["check"] == "pass"
    policy = check.get("policy")
    required = policy.get("require") if isinstance(policy, dict) else None
    if not isinstance(required, list):
        required = []
    return Evidence(
        digest=digest,
        platform=platform,
        created=report.finished,
        verdicts=MappingProxyType(verdicts),
        reasons=MappingProxyType(reasons),
        architectures=tuple(arch for arch in required if isinstance(arch, str)) if proven else (),
        known_bad=known_bad if check else None,
        revisions=MappingProxyType(_revisions(report, check)),
    )


def _revisions(report: Report, check: Mapping[str, Any]) -> dict[str, str]:
    """The revision of each project in the image: what the check found in it, and what the build was told."""
    out = {}
    built = _data(report, "build").get("labels")
    source = built.get(labels.SOURCE_REVISION) if isinstance(built, dict) else None
    if isinstance(source, str):
        out[report.name] = source
    found = check.get("revisions")
    for entry in found if isinstance(found, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("project"), str) and isinstance(entry.get("revision"), str):
            out[entry["project"]] = entry["revision"]
    return out


def later(at: datetime, others: Iterable[datetime | None]) -> datetime:
    """``at``, or the first millisecond after all ``others``, whichever is later.

    What is attached last has to be the newest for whoever reads, also where the clock of the machine before was ahead,
    or this one's was set back: else a failure would stay hidden behind an older pass, or a pass behind a failure.
    """
    at = at.replace(microsecond=at.microsecond // 1000 * 1000)
    latest = max((other for other in others if other is not None), default=None)
    if latest is None or at > latest:
        return at
    try:
        return latest + timedelta(milliseconds=1)
    except OverflowError:
        return at


def check_json(report: Report) -> bytes | None:
    """The check's JSON as it is attached; None where there was no check."""
    data = _data(report, "check")
    return json.dumps(plain(dict(data)), indent=1, allow_nan=False).encode() + b"\n" if data else None


def _data(report: Report, name: str) -> Mapping[str, Any]:
    stage = report.stage(name)
    return stage.data if stage is not None and stage.data is not None else {}
