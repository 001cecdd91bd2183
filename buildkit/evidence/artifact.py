"""What is attached to an image: the kinds, and an artifact as a value.

An artifact is an OCI image manifest with an ``artifactType``, the empty config, one layer for each file and the image
as its ``subject`` (image-spec 1.1, manifest.md, "Guidelines for Artifact Usage").
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import NamedTuple

from buildkit.build.labels import CREATED
from buildkit.deploy.evidence import EVIDENCE_TYPE, Evidence
from buildkit.errors import FormatError, UsageError
from buildkit.model import Descriptor, Digest, Reference

REPORT_TYPE = "application/vnd.buildkit.report.v1+json"
CHECK_TYPE = "application/vnd.buildkit.check.v1+json"
SBOM_TYPE = "application/vnd.cyclonedx+json"
HTML_TYPE = "text/html"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"

KINDS: Mapping[str, str] = MappingProxyType(
    {"evidence": EVIDENCE_TYPE, "report": REPORT_TYPE, "check": CHECK_TYPE, "sbom": SBOM_TYPE}
)
"""What people call them, and their artifact types."""
MAX_FILE = 256 * 2**20
"""Bytes of one artifact's files that are read back."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}", re.ASCII)


class ArtifactFile(NamedTuple):
    """``name`` is what a client that pulls the artifact writes it to."""

    name: str
    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """``kind`` is the artifact type; ``created`` says which of several is the newest. The same values make the same
    bytes, and so the same digest, wherever they are attached to the same image.

    Raises UsageError for a name that is no plain file name, a media type that is none, annotations that are no text,
    or no files at all.
    """

    kind: str
    files: tuple[ArtifactFile, ...]
    created: datetime | None = None
    annotations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        if not names or len(set(names)) != len(names):
            raise UsageError(f"an artifact {self.kind} needs files with different names, not {names}")
        for name in names:
            if not is_file_name(name):
                raise UsageError(f"{name!r} is not a plain file name for an artifact")
        for kind in (self.kind, *(file.media_type for file in self.files)):
            if not _MEDIA_TYPE.fullmatch(kind):
                raise UsageError(f"{kind!r} is not a media type")
        try:
            "".join(text for pair in self.annotations.items() for text in pair).encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"an annotation of the artifact {self.kind} is not Unicode text") from error

    def all_annotations(self) -> dict[str, str]:
        """Those of the manifest, ``created`` among them."""
        own = {CREATED: rfc3339(self.created)} if self.created is not None else {}
        return dict(sorted({**self.annotations, **own}.items()))


def evidence_artifact(evidence: Evidence) -> Artifact:
    """What ``deploy.check`` and ``deploy.pin`` read."""
    data = _json(evidence.to_json())
    return Artifact(
        kind=EVIDENCE_TYPE,
        files=(ArtifactFile("evidence.json", EVIDENCE_TYPE, data),),
        created=evidence.created,
    )


def report_artifact(report: bytes, html: bytes | None = None, *, created: datetime) -> Artifact:
    """``report.json``, and ``report.html`` where it is given."""
    files = [ArtifactFile("report.json", REPORT_TYPE, report)]
    if html is not None:
        files.append(ArtifactFile("report.html", HTML_TYPE, html))
    return Artifact(kind=REPORT_TYPE, files=tuple(files), created=created)


def check_artifact(report: bytes, *, created: datetime) -> Artifact:
    """The check's own JSON."""
    return Artifact(kind=CHECK_TYPE, files=(ArtifactFile("check.json", CHECK_TYPE, report),), created=created)


def sbom_artifact(bom: bytes) -> Artifact:
    """The result of ``make_sbom``, under the time that it names itself."""
    return Artifact(kind=SBOM_TYPE, files=(ArtifactFile("sbom.cdx.json", SBOM_TYPE, bom),), created=_timestamp(bom))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """One artifact that a registry holds for an image. ``files`` are its layers' names and descriptors; ``created`` is
    None where it says nothing that can be read as a time."""

    image: Reference
    descriptor: Descriptor
    kind: str
    created: datetime | None
    annotations: Mapping[str, str]
    files: tuple[tuple[str, Descriptor], ...]

    @property
    def digest(self) -> Digest:
        return self.descriptor.digest

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(descriptor.size for _, descriptor in self.files)

    @property
    def name(self) -> str:
        """``report`` for ours, the artifact type for others'."""
        return next((name for name, kind in KINDS.items() if kind == self.kind), self.kind)

    @property
    def order(self) -> tuple[datetime, str]:
        """By which the newest is the greatest; the digest settles it between those of one moment."""
        return self.created or _EARLIEST, str(self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """An artifact with its files' bytes."""

    attached: Attached
    files: tuple[ArtifactFile, ...]


_EARLIEST = datetime.min.replace(tzinfo=UTC)


def is_file_name(text: str) -> bool:
    """Whether it names a file in any folder, on any system."""
    return bool(_FILE_NAME.fullmatch(text))


def rfc3339(moment: datetime) -> str:
    """In UTC, with ``Z``: texts of one length, that sort as their times do. To the millisecond: a pipeline may attach
    twice within one second."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: object) -> datetime | None:
    """A time with a zone (RFC 3339); None for anything else."""
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) and len(text) <= 40 else None
        return moment.astimezone(UTC) if moment is not None and moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def _json(document: object) -> bytes:
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _timestamp(bom: bytes) -> datetime | None:
    try:
        document = json.loads(bom)
    except ValueError as error:
        raise FormatError("is not JSON", where="SBOM") from error
    metadata = document.get("metadata") if isinstance(document, dict) else None
    return parse_time(metadata.get("timestamp")) if isinstance(metadata, dict) else None
