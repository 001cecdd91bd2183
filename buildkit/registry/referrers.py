"""What refers to an image, as machines (no I/O) (distribution-spec 1.1, "Listing Referrers", "Referrers Tag Schema").

Two ways lead to it: the registry's own list, where it keeps one; and, where it keeps none (distribution 2.8 and 3.0,
Gitea), an index under the tag ``sha256-HEX`` that clients keep. No registry offers a conditional PUT for that index, so
two who add to it at once may each miss the other's entry: whoever has written looks again after a while, and writes
again until nobody else does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from buildkit.errors import FormatError, NotFoundError, ProtocolError, RegistryError, UnreachableError
from buildkit.model import INDEX_TYPES, MAX_MANIFEST, OCI_INDEX, Descriptor, Digest, Reference, load_json_object
from buildkit.registry.answers import describe, error_for, is_html
from buildkit.registry.location import Origin, resolve
from buildkit.registry.manifests import MAX_FETCHED, Patient, PutManifest, get, head
from buildkit.registry.steps import Budget, Pause, Request, Steps
from buildkit.registry.upload import pull_scope

MAX_REFERRERS = 2000
"""Entries of a list that are read. An image has a handful; more is somebody's joke."""
MAX_PAGES = 50
MAX_LISTED = 1000
"""Entries that an index of ours grows to before superseded ones of our own kinds leave it."""
SETTLE = 1.0
"""Seconds after which a write is looked at again. Longer than another client takes from reading to writing."""
ATTEMPTS = 12

_NO_API = frozenset({400, 404, 405, 406, 501})
"""What registries answer that do not know the endpoint; the specification says 404, the field says all of these."""
_LINK = re.compile(r"<([^<>]*)>((?:\s*;\s*[\w!#$%&'*+.^`|~-]+\s*(?:=\s*(?:\"[^\"]*\"|[^\s\";,]+))?)*)", re.ASCII)
_NEXT = re.compile(r";\s*rel\s*=\s*(?:\"(?:[^\"]*\s)?next(?:\s[^\"]*)?\"|next)(?=[\s;,]|$)", re.IGNORECASE)


def subject_tag(digest: Digest) -> str:
    """The tag under which referrers are kept where a registry has no list of them: both parts cut as it is written."""
    return f"{digest.algorithm[:32]}-{digest.hex[:64]}"


def referrers(origin: Origin, reference: Reference, patient: Patient) -> Steps[tuple[Descriptor, ...]]:
    """All that refers to ``reference`` (by digest), in the registry's order, each once.

    Raises ProtocolError for an answer that is no list of descriptors, or that goes on without end.
    """
    listed = yield from from_registry(origin, reference, patient)
    if listed is None:
        listed = yield from from_index(origin, reference, patient)
    return listed


def from_registry(origin: Origin, reference: Reference, patient: Patient) -> Steps[tuple[Descriptor, ...] | None]:
    """The registry's own list; None where it keeps none."""
    url = f"{origin}/v2/{reference.repository}/referrers/{reference.digest}"
    found: list[object] = []
    for page in range(MAX_PAGES):
        request = Request(
            doing=f"listing what refers to {reference}",
            method="GET",
            url=url,
            scopes=(pull_scope(reference.repository),),
            headers={"Accept": OCI_INDEX},
        )
        answer = yield from patient.ask(request)
        if not page and (answer.status in _NO_API or 300 <= answer.status < 400):
            # A redirect leads to a page for people: registries in front of a forge send them for what they do not know.
            return None
        if answer.status != 200:
            raise error_for(request, answer)
        if is_html(answer):
            raise ProtocolError(f"{describe(request, answer)}: not a list", hint="is this address a registry?")
        found += _entries(answer.body, request.doing)
        if len(found) > MAX_REFERRERS:
            raise ProtocolError(f"{request.doing}: there are more than {MAX_REFERRERS}")
        following = next_page(answer.headers.get("link", ""))
        if following is None:
            return _descriptors(found, request.doing)
        url, _ = resolve(following, request_url=url, origin=origin)
        if Origin.of(url) != origin:
            raise ProtocolError(f"{request.doing}: the next page is on another host, {Origin.of(url)}")
    raise ProtocolError(f"listing what refers to {reference}: there are more than {MAX_PAGES} pages")


def from_index(origin: Origin, reference: Reference, patient: Patient) -> Steps[tuple[Descriptor, ...]]:
    """What the index under the fallback tag lists; nothing where there is no such tag."""
    assert reference.digest is not None
    held = yield from _read(origin, reference.with_tag(subject_tag(reference.digest)), patient)
    return _descriptors(held.entries, f"{reference.name}:{subject_tag(reference.digest)}")


def next_page(header: str) -> str | None:
    """The target of the ``Link`` with ``rel="next"`` (RFC 8288); None where there is none."""
    for link in _LINK.finditer(header[:16384]):
        if _NEXT.search(link[2]):
            return link[1]
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The index as it was found: ``entries`` as decoded, ``document`` without them; ``digest`` None where none is."""

    digest: Digest | None
    document: Mapping[str, Any]
    entries: Sequence[object]


@dataclass(slots=True, kw_only=True)
class AddToIndex:
    """Lists ``added`` in the index under the fallback tag of ``subject``, each once. Everyone else's entries stay.

    ``spare`` says which entries of a full index may go, oldest first, as long as there are newer ones of their type.
    """

    origin: Origin
    subject: Reference
    added: tuple[Descriptor, ...]
    patient: Patient
    rng: Random
    spare: Callable[[Mapping[str, Any]], bool] = lambda _: False
    settle: float = SETTLE

    def run(self) -> Steps[bool]:
        """True where the index had to be written. Returns when it was found unchanged, with all of ``added`` in it, a
        settling time after it was last seen to change. Raises RegistryError where others never leave it alone."""
        assert self.subject.digest is not None
        tag = self.subject.with_tag(subject_tag(self.subject.digest))
        wrote = False
        seen: Digest | None = None
        failed: RegistryError | None = None
        tidy = False
        for attempt in range(ATTEMPTS):
            if attempt:
                # Jitter: two who write in step would overwrite each other in step.
                yield Pause(seconds=self.settle * self.rng.uniform(1.0, 1.5 + attempt / 2))
            held = yield from _read(self.origin, tag, self.patient)
            if held.digest is None and (yield from head(self.origin, tag, self.patient)) is not None:
                continue  # there is one: an edge's 404, or another client was faster; a new one would hide its entries
            missing = tuple(d for d in self.added if str(d.digest) not in _digests(held.entries))
            if not missing:
                if not wrote or held.digest == seen:
                    return wrote
                seen = held.digest
                continue
            raw = yield from self._merged(tag, held, missing, tidy=tidy)
            put = PutManifest(
                origin=self.origin,
                reference=tag,
                raw=raw,
                media_type=OCI_INDEX,
                # Not repeated as it is: after a failure the index may hold entries that these bytes lack.
                patient=Patient(label=self.patient.label, budget=Budget(limit=0, rng=self.rng, max_wait=0.0)),
            )
            wrote = True
            try:
                seen = yield from put.run()
            except RegistryError as error:
                failed = error
                if isinstance(error, UnreachableError | ProtocolError):
                    continue
                # Registries refuse an index that points at what was deleted since; once without it, then it is true.
                if tidy or error.status not in (400, 404):
                    raise
                tidy = True
        raise failed or UnreachableError(
            f"{tag}: others rewrite this index of referrers all the time", hint="run the same command again"
        )

    def _merged(self, tag: Reference, held: _Held, missing: tuple[Descriptor, ...], *, tidy: bool) -> Steps[bytes]:
        entries = [*held.entries, *(d.to_json() for d in missing)]
        raw = _index(held, entries)
        if tidy or len(entries) > MAX_LISTED or len(raw) > MAX_MANIFEST:
            entries = yield from self._present(tag, entries)
            raw = _index(held, entries)
        own = {str(d.digest) for d in self.added}
        known = sorted((e for e in entries if isinstance(e, dict)), key=created)
        newest = {str(e.get("artifactType")): e for e in known}
        for entry in known:
            if entry.get("digest") in own or entry is newest[str(entry.get("artifactType"))] or not self.spare(entry):
                continue
            if len(entries) <= MAX_LISTED and len(raw) <= MAX_MANIFEST:
                break
            entries.remove(entry)
            raw = _index(held, entries)
        if len(entries) > MAX_REFERRERS or len(raw) > MAX_MANIFEST:
            raise RegistryError(
                f"{tag} lists {len(entries)} referrers, {len(raw)} bytes: no more go in",
                hint="remove what is not needed with the registry's own tools",
            )
        return raw

    def _present(self, tag: Reference, entries: Sequence[object]) -> Steps[list[object]]:
        """``entries`` without those whose manifest the registry does not have any more."""
        kept = []
        for entry in entries:
            digest = entry.get("digest") if isinstance(entry, dict) else None
            try:
                named = Digest.parse(digest)
            except FormatError:
                continue
            if (yield from head(self.origin, tag.with_digest(named), self.patient)) is not None:
                kept.append(entry)
        return kept


def created(entry: Mapping[str, Any]) -> str:
    """The entry's annotation of that name; empty where it has none. RFC 3339 in UTC, so that texts sort as times."""
    annotations = entry.get("annotations")
    value = annotations.get("org.opencontainers.image.created") if isinstance(annotations, dict) else None
    return value if isinstance(value, str) else ""


def _read(origin: Origin, tag: Reference, patient: Patient) -> Steps[_Held]:
    try:
        found = yield from get(origin, tag, patient)
    except NotFoundError:
        return _Held(digest=None, document={}, entries=())
    where = f"{tag.name}:{tag.tag}"
    document = load_json_object(found.raw, where=where, limit=MAX_FETCHED)
    entries = document.pop("manifests", None)
    if not isinstance(entries, list) or document.get("mediaType", OCI_INDEX) not in INDEX_TYPES:
        raise ProtocolError(
            f"{where} is not an index of referrers, as the specification wants it under this tag",
            hint="remove the tag, or keep the evidence in another repository",
        )
    if len(entries) > MAX_REFERRERS:
        raise ProtocolError(f"{where}: there are more than {MAX_REFERRERS} referrers")
    return _Held(digest=Digest.of(found.raw), document=document, entries=entries)


def _entries(raw: bytes, what: str) -> list[object]:
    try:
        document = load_json_object(raw, where=what, limit=MAX_FETCHED)
    except FormatError as error:
        raise ProtocolError(error.message, hint="is this address a registry?") from error
    entries = document.get("manifests")
    # Servers written in Go send null for an empty list.
    if entries is None and "manifests" in document:
        return []
    if not isinstance(entries, list):
        raise ProtocolError(f"{what}: the answer is not an index", hint="is this address a registry?")
    return entries


def _descriptors(entries: Sequence[object], where: str) -> tuple[Descriptor, ...]:
    found: dict[Digest, Descriptor] = {}
    for number, entry in enumerate(entries):
        try:
            descriptor = Descriptor.parse(entry, where=f"{where}: manifests.{number}")
        except FormatError as error:
            raise ProtocolError(error.message) from error
        found.setdefault(descriptor.digest, descriptor)
    return tuple(found.values())


def _digests(entries: Sequence[object]) -> frozenset[object]:
    return frozenset(e["digest"] for e in entries if isinstance(e, dict) and isinstance(e.get("digest"), str))


def _index(held: _Held, entries: Sequence[object]) -> bytes:
    document = {"schemaVersion": 2, "mediaType": OCI_INDEX, **held.document, "manifests": entries}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
