"""What of a report goes with the image: the artifacts that are attached to it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from buildkit.build import labels
from buildkit.deploy.evidence import DEFAULT_REQUIRED, Evidence
from buildkit.deploy.evidence import Verdict as StepVerdict
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
    return Evidence(
        digest=digest,
        platform=platform,
        created=report.finished,
        verdicts=MappingProxyType(verdicts),
        reasons=MappingProxyType(reasons),
        architectures=tuple(arch for arch in required or () if isinstance(arch, str)) if proven else (),
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


def check_json(report: Report) -> bytes | None:
    """The check's JSON as it is attached; None where there was no check."""
    data = _data(report, "check")
    return json.dumps(data, indent=1, allow_nan=False).encode() + b"\n" if data else None


def _data(report: Report, name: str) -> Mapping[str, Any]:
    stage = report.stage(name)
    return stage.data if stage is not None and stage.data is not None else {}
