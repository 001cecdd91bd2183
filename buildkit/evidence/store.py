"""Attaching to an image, and reading back what is attached: through the registry's referrers, or the index under the
fallback tag."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from buildkit.build.labels import CREATED
from buildkit.deploy.evidence import EVIDENCE_TYPE, MAX_EVIDENCE, Evidence
from buildkit.errors import FormatError, NotFoundError, ProtocolError, UsageError
from buildkit.evidence.artifact import (
    KINDS,
    MAX_FILE,
    REPORT_TYPE,
    Artifact,
    ArtifactFile,
    Attached,
    Fetched,
    parse_time,
)
from buildkit.model import Descriptor, Manifest, Reference
from buildkit.registry import RegistryClient

TITLE = "org.opencontainers.image.title"
MOST_READ = 200
"""Manifests of referrers that are fetched: the newest of our kinds, and then others'."""


def attach(client: RegistryClient, image: Reference, artifact: Artifact) -> Descriptor:
    """Attach one artifact to ``image`` (by digest). See ``attach_all``."""
    return attach_all(client, image, (artifact,))[0]


def attach_all(client: RegistryClient, image: Reference, artifacts: Sequence[Artifact]) -> tuple[Descriptor, ...]:
    """Attach artifacts to ``image``, so that the registry (or the fallback index) lists them.

    Idempotent: what is there already is neither sent nor listed again. Others' entries stay, also where two attach at
    once. Raises UsageError without a digest, NotFoundError where the image is not there, RegistryError.
    """
    from buildkit.evidence.push import Pusher  # deferred: oras brings jsonschema, which may take a second to load

    image = _by_digest(image)
    subject = client.get_manifest(image)
    assert image.digest is not None
    described = Descriptor(media_type=subject.media_type, digest=image.digest, size=len(subject.raw))
    descriptors = []
    promised = True
    with tempfile.TemporaryDirectory(prefix="buildkit-attach-") as folder:
        for number, artifact in enumerate(artifacts):
            place = Path(folder) / str(number)
            pushed = Pusher(client).push_artifact(image, described, artifact, place)
            promised = promised and pushed.promised
            descriptors.append(pushed.descriptor)
    _make_listed(client, image, descriptors, promised=promised)
    return tuple(descriptors)


def list_artifacts(client: RegistryClient, image: Reference) -> tuple[Attached, ...]:
    """What is attached to ``image``, the newest first. Only manifests that name this very image count.

    Raises UsageError without a digest, RegistryError, FormatError.
    """
    image = _by_digest(image)
    entries = sorted(client.referrers(image), key=_interest, reverse=True)[:MOST_READ]
    found = [_attached(client, image, entry) for entry in entries]
    return tuple(sorted((a for a in found if a is not None), key=lambda a: a.order, reverse=True))


def newest(artifacts: Sequence[Attached], kind: str) -> Attached | None:
    """The newest of ``kind`` (an artifact type, or one of the names in ``KINDS``)."""
    wanted = KINDS.get(kind, kind)
    return max((a for a in artifacts if a.kind == wanted), key=lambda a: a.order, default=None)


def fetch(client: RegistryClient, image: Reference, kind: str) -> Fetched | None:
    """The newest artifact of ``kind`` with its files; None where there is none.

    Raises RegistryError, FormatError for files above ``MAX_FILE`` bytes.
    """
    attached = newest(list_artifacts(client, image), kind)
    return read(client, attached) if attached is not None else None


def read(client: RegistryClient, attached: Attached) -> Fetched:
    """The bytes of all its files, proven by their digests. Raises RegistryError, FormatError for files above
    ``MAX_FILE`` bytes together: whoever attaches may name one blob a thousand times."""
    where = f"{attached.image.name}@{attached.digest.short}"
    if attached.size > MAX_FILE:
        raise FormatError(f"its files are {attached.size} bytes, more than the {MAX_FILE} read", where=where)
    files = tuple(_file(client, attached, name, layer) for name, layer in attached.files)
    return Fetched(attached=attached, files=files)


def _file(client: RegistryClient, attached: Attached, name: str, layer: Descriptor) -> ArtifactFile:
    where = f"{attached.image.name}@{attached.digest.short}"
    if layer.size > MAX_FILE:
        raise FormatError(f"{name} is {layer.size} bytes, more than the {MAX_FILE} read", where=where)
    data = b"".join(client.read_blob(attached.image.repository, layer))
    layer.digest.check(data, f"{where}: {name}")
    return ArtifactFile(name, layer.media_type, data)


def fetch_report(client: RegistryClient, image: Reference) -> bytes | None:
    """The newest ``report.json`` that is attached, without what lies beside it; None where there is none."""
    attached = newest(list_artifacts(client, image), REPORT_TYPE)
    if attached is None:
        return None
    found = ((name, layer) for name, layer in attached.files if layer.media_type == REPORT_TYPE)
    return next((_file(client, attached, name, layer).data for name, layer in found), None)


def read_evidence(client: RegistryClient, attached: Attached) -> Evidence | None:
    """The evidence document of one artifact; None where it is for another image. Raises FormatError."""
    where = f"{attached.image.name}@{attached.digest.short}"
    for _, layer in attached.files:
        if layer.media_type != EVIDENCE_TYPE:
            continue
        if layer.size > MAX_EVIDENCE:
            raise FormatError(f"evidence of {layer.size} bytes, more than the {MAX_EVIDENCE} read", where=where)
        found = Evidence.parse(b"".join(client.read_blob(attached.image.repository, layer)), where=where)
        return found if found.digest == attached.image.digest else None
    return None


def _by_digest(image: Reference) -> Reference:
    if image.digest is None:
        raise UsageError(f"{image} has no digest", hint="evidence belongs to one image: write REPOSITORY@sha256:…")
    return replace(image, tag=None)


def _make_listed(
    client: RegistryClient, image: Reference, descriptors: Sequence[Descriptor], *, promised: bool
) -> None:
    """``promised``: the registry said for all of them that it lists them itself."""
    if promised:
        return
    listed = client.own_referrers(image)
    if listed is None:
        client.list_referrers(image, descriptors, spare=_is_ours)
        return
    missing = {d.digest for d in descriptors} - {d.digest for d in listed}
    if missing:
        raise ProtocolError(
            f"{image}: the registry has a list of referrers, and does not put {len(missing)} of ours on it",
            hint="run the same command again; it may be slow to list them",
        )


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return entry.get("artifactType") in KINDS.values()


def _interest(entry: Descriptor) -> tuple[bool, str]:
    known = entry.artifact_type in KINDS.values() or entry.artifact_type is None
    return known, entry.annotations.get(CREATED, "")


def _attached(client: RegistryClient, image: Reference, entry: Descriptor) -> Attached | None:
    """What the entry's manifest says; None where it refers to another image, is gone, or is no artifact of files."""
    where = f"{image.name}@{entry.digest.short}"
    try:
        raw = client.get_manifest(replace(image, digest=entry.digest)).raw
        manifest = Manifest.parse(raw, where=where)
    except NotFoundError:
        return None  # listed, and deleted since
    except FormatError:
        return None  # an index, or another tool's own kind of manifest: nothing that we could show or read
    if manifest.subject is None or manifest.subject.digest != image.digest:
        return None
    files = [(layer.annotations.get(TITLE) or layer.digest.short, layer) for layer in manifest.layers]
    return Attached(
        image=image,
        descriptor=Descriptor(media_type=manifest.media_type, digest=entry.digest, size=len(raw)),
        kind=manifest.artifact_type or manifest.config.media_type,
        created=parse_time(manifest.annotations.get(CREATED)),
        annotations=MappingProxyType(dict(manifest.annotations)),
        files=tuple(files),
    )
