"""What is known of an image from the reports attached to it, and whether that is enough to run it.

The pipeline attaches its report to the image as an OCI referrer. Whoever reads it (a registry, a file, a test) hands
an ``Evidence`` to the rules; the rules themselves touch no network. A check that was not run is never taken for one
that passed, and no evidence is not good evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, Protocol

from buildkit.errors import BuildkitError, FormatError
from buildkit.model import Digest, Platform, Reference, load_json_object

EVIDENCE_TYPE = "application/vnd.buildkit.evidence.v1+json"
"""Artifact type and media type of the small document that the rules read; see ``Evidence.parse`` for its fields."""
MAX_EVIDENCE = 2**20
"""Bytes."""
DEFAULT_REQUIRED = ("check", "smoke")

Verdict = Literal["pass", "fail", "not-run"]
_VERDICTS: tuple[Verdict, ...] = ("pass", "fail", "not-run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the pipeline found for one image.

    ``digest`` is the manifest that was checked, ``verdicts`` the result of each step by name (``check``, ``smoke``),
    ``architectures`` the GPU targets that were proven (``sm_70``), ``known_bad`` the date of the list of bad revisions
    that the image was held against, ``revisions`` the source revision of each project in the image, by the project's
    name, and ``origin`` says where this was read.
    """

    digest: Digest
    platform: Platform
    created: datetime
    verdicts: Mapping[str, Verdict]
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    architectures: tuple[str, ...] = ()
    known_bad: datetime | None = None
    revisions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    origin: str = ""

    @classmethod
    def parse(cls, raw: bytes, *, where: str) -> Evidence:
        """From the attached JSON::

            {"schema": "buildkit/evidence/1", "digest": "sha256:…", "platform": "linux/amd64",
             "created": "2026-07-22T10:00:00Z", "architectures": ["sm_70"],
             "revisions": {"attention.rs": "…"},
             "known_bad": "2026-07-20T00:00:00Z",
             "verdicts": {"check": {"verdict": "pass"}, "smoke": {"verdict": "not-run", "reason": "no GPU"}}}

        Raises FormatError for anything else; unknown members are ignored.
        """
        document = load_json_object(raw, where=where, limit=MAX_EVIDENCE)
        if document.get("schema") != "buildkit/evidence/1":
            raise FormatError(f"schema {document.get('schema')!r} is not buildkit/evidence/1", where=where)
        try:
            digest = Digest.parse(document.get("digest"))
            platform = Platform.parse(str(document.get("platform")))
        except BuildkitError as error:
            raise FormatError(error.message, where=where) from error
        verdicts, reasons = _verdicts(document.get("verdicts"), where)
        architectures = document.get("architectures", [])
        if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
            raise FormatError("architectures is not a list of names", where=where)
        known_bad, revisions = document.get("known_bad"), document.get("revisions", {})
        if not isinstance(revisions, dict) or not all(isinstance(r, str) for r in revisions.values()):
            raise FormatError("revisions is not an object of names and commits", where=where)
        return cls(
            digest=digest,
            platform=platform,
            created=_time(document.get("created"), f"{where}: created"),
            verdicts=verdicts,
            reasons=reasons,
            architectures=tuple(architectures),
            known_bad=None if known_bad is None else _time(known_bad, f"{where}: known_bad"),
            revisions=MappingProxyType(revisions),
            origin=where,
        )

    def to_json(self) -> dict[str, Any]:
        """The document that ``parse`` reads."""
        return {
            "schema": "buildkit/evidence/1",
            "digest": str(self.digest),
            "platform": str(self.platform),
            "created": self.created.astimezone(UTC).isoformat().replace("+00:00", "Z"),
            "architectures": list(self.architectures),
            "revisions": dict(self.revisions),
            "known_bad": self.known_bad and self.known_bad.astimezone(UTC).isoformat().replace("+00:00", "Z"),
            "verdicts": {
                name: {"verdict": verdict} | ({"reason": self.reasons[name]} if name in self.reasons else {})
                for name, verdict in self.verdicts.items()
            },
        }


class EvidenceReader(Protocol):
    """Where evidence comes from."""

    def read(self, image: Reference) -> Evidence | None:
        """The newest evidence attached to ``image``; None where none is. Raises RegistryError, FormatError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidencePolicy:
    """What evidence must say: the steps that must have passed, the GPU target, and how recent the bad list was.

    ``bad_revisions`` maps a commit to what is wrong with it: a revision that was listed after the image was checked.
    """

    required: tuple[str, ...] = DEFAULT_REQUIRED
    architecture: str | None = "sm_70"
    platform: Platform = field(default_factory=Platform)
    known_bad: datetime | None = None
    bad_revisions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    allow_not_run: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """Why evidence is not enough. ``rule`` is the finding's rule id."""

    rule: str
    message: str
    remedy: str


def judge(evidence: Evidence | None, image: Digest | None, policy: EvidencePolicy) -> tuple[Objection, ...]:
    """Everything that speaks against running ``image`` on this evidence; empty where nothing does."""
    if evidence is None:
        return (Objection(rule="evidence-missing", message="no evidence is attached to the image", remedy=_RUN),)
    found = []
    if image is not None and evidence.digest != image:
        found.append(
            Objection(
                rule="evidence-missing",
                message=f"the attached evidence is for another image, {evidence.digest.short}…",
                remedy=_RUN,
            )
        )
    for step in policy.required:
        verdict = evidence.verdicts.get(step, "not-run")
        reason = f": {evidence.reasons[step]}" if step in evidence.reasons else ""
        if verdict == "fail":
            found.append(
                Objection(
                    rule="evidence-failed",
                    message=f"the image failed {step}{reason}",
                    remedy="do not run it; build one that passes",
                )
            )
        elif verdict == "not-run" and step not in policy.allow_not_run:
            found.append(
                Objection(
                    rule="evidence-failed",
                    message=f"{step} was not run on the image{reason}",
                    remedy=f"run invoke {step} where it can run and attach its report",
                )
            )
    for project, revision in evidence.revisions.items():
        fault = _known_fault(revision, policy.bad_revisions)
        if fault is not None:
            found.append(
                Objection(
                    rule="evidence-failed",
                    message=f"{project} {revision[:12]} is known to be bad: {fault}",
                    remedy="do not run it; build from a revision that has the fix",
                )
            )
    if policy.known_bad is not None and (evidence.known_bad is None or evidence.known_bad < policy.known_bad):
        age = (
            "no list of known-bad revisions"
            if evidence.known_bad is None
            else f"the list of {_day(evidence.known_bad)}"
        )
        found.append(
            Objection(
                rule="evidence-stale",
                message=f"the image was held against {age}; the current one is of {_day(policy.known_bad)}",
                remedy="run invoke check again and attach its report",
            )
        )
    if (evidence.platform.os, evidence.platform.architecture) != (policy.platform.os, policy.platform.architecture):
        found.append(
            Objection(
                rule="evidence-architecture",
                message=f"the evidence is for {evidence.platform}, the node is {policy.platform}",
                remedy="build and check the image for the node's platform",
            )
        )
    if policy.architecture and policy.architecture not in evidence.architectures:
        proven = ", ".join(evidence.architectures) or "no GPU target"
        found.append(
            Objection(
                rule="evidence-architecture",
                message=f"the evidence proves {proven}, the card needs {policy.architecture}",
                remedy=f"run invoke check --require {policy.architecture} and build for it",
            )
        )
    return tuple(found)


def _known_fault(revision: str, bad: Mapping[str, str]) -> str | None:
    """What is wrong with a revision; labels and lock files may abbreviate it."""
    given = revision.lower()
    if len(given) < _SHORTEST:
        return None
    return next((fault for known, fault in bad.items() if known.startswith(given)), None)


_SHORTEST = 12
"""Digits of an abbreviated revision that are taken for one, as `buildkit check` does."""
_RUN = "run invoke pipeline, which checks the image and attaches the evidence"


def _verdicts(value: object, where: str) -> tuple[Mapping[str, Verdict], Mapping[str, str]]:
    if not isinstance(value, dict):
        raise FormatError("verdicts is not an object", where=where)
    verdicts: dict[str, Verdict] = {}
    reasons: dict[str, str] = {}
    for name, entry in value.items():
        word = entry.get("verdict") if isinstance(entry, dict) else None
        match = next((v for v in _VERDICTS if v == word), None)
        if match is None:
            raise FormatError(f"verdicts.{name}: {word!r} is not pass, fail or not-run", where=where)
        verdicts[name] = match
        if isinstance(entry.get("reason"), str):
            reasons[name] = entry["reason"]
    return MappingProxyType(verdicts), MappingProxyType(reasons)


def _time(value: object, where: str) -> datetime:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        moment = None
    if moment is None:
        raise FormatError(f"{value!r} is not a time like 2026-07-22T10:00:00Z", where=where)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _day(moment: datetime) -> str:
    return moment.astimezone(UTC).date().isoformat()
