"""Evidence out of a registry: the documents attached to an image as OCI referrers.

Which manifests those are, the registry's client finds out (``buildkit.registry.referrers``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from buildkit.build.labels import CREATED
from buildkit.check.knownbad import load_known_bad
from buildkit.deploy.evidence import EVIDENCE_TYPE, MAX_EVIDENCE, Evidence, EvidencePolicy
from buildkit.errors import FormatError, NotFoundError
from buildkit.model import MAX_MANIFEST, Descriptor, Reference, load_json_object
from buildkit.registry.client import RegistryClient

Referrers = Callable[[RegistryClient, Reference], Sequence[Descriptor]]
"""The manifests that refer to an image (by digest), most wanted first."""
_MOST = 50
"""Referrers that are looked at."""


def registry_referrers(client: RegistryClient, image: Reference) -> Sequence[Descriptor]:
    """Those that may hold evidence, the newest first. Raises RegistryError."""
    # Of an index that other clients keep, not every entry says what it is.
    found = (d for d in client.referrers(image) if d.artifact_type in (None, EVIDENCE_TYPE))
    return sorted(found, key=lambda d: d.annotations.get(CREATED, ""), reverse=True)


class AttachedEvidence:
    """Reads evidence with clients that it is handed: ``connect`` opens one for a registry's host, and it is closed."""

    def __init__(
        self, connect: Callable[[str], RegistryClient] = RegistryClient, referrers: Referrers = registry_referrers
    ) -> None:
        self._connect = connect
        self._referrers = referrers

    def resolve(self, image: Reference) -> Reference:
        """``image`` by digest: what its tag stands for now. Raises NotFoundError, RegistryError."""
        if image.digest is not None:
            return image
        with self._connect(image.registry) as client:
            digest = client.head_manifest(image)
        if digest is None:
            raise NotFoundError(f"{image} is not in the registry", hint="push it first")
        return image.with_digest(digest)

    def read(self, image: Reference) -> Evidence | None:
        """The newest evidence for ``image``, of all that is attached; None where there is none.

        Only documents that name this very image count: whoever can push could attach another's. Raises RegistryError,
        FormatError.
        """
        image = self.resolve(image)
        found: list[Evidence] = []
        with self._connect(image.registry) as client:
            for descriptor in self._referrers(client, image)[:_MOST]:
                found += _evidence(client, image, descriptor)
        return max(found, key=lambda e: e.created, default=None)


def default_policy(base: EvidencePolicy | None = None) -> EvidencePolicy:
    """The policy with the list of bad revisions that comes with this package, and its date."""
    known = load_known_bad()
    bad = {r: fault.fault for project in known.projects for fault in project.bad for r in fault.revisions}
    return replace(base or EvidencePolicy(), known_bad=known.listed, bad_revisions=MappingProxyType(bad))


def _evidence(client: RegistryClient, image: Reference, descriptor: Descriptor) -> list[Evidence]:
    """The evidence documents in one referring manifest; its subject must be ``image``."""
    raw = client.get_manifest(replace(image, tag=None, digest=descriptor.digest)).raw
    where = f"{image.name}@{descriptor.digest.short}"
    document = load_json_object(raw, where=where, limit=MAX_MANIFEST)
    subject = document.get("subject")
    if not isinstance(subject, dict) or subject.get("digest") != str(image.digest):
        return []
    out = []
    layers = document.get("layers")
    for number, entry in enumerate(layers if isinstance(layers, list) else ()):
        layer = Descriptor.parse(entry, where=f"{where}: layers.{number}")
        if layer.media_type != EVIDENCE_TYPE:
            continue
        if layer.size > MAX_EVIDENCE:
            raise FormatError(f"evidence of {layer.size} bytes, more than the {MAX_EVIDENCE} read", where=where)
        found = Evidence.parse(b"".join(client.read_blob(image.repository, layer)), where=where)
        if found.digest == image.digest:
            out.append(found)
    return out
