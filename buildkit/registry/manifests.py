"""Requests for manifests, as machines without I/O (distribution-spec 1.1, "Pulling manifests", "Pushing Manifests")."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from buildkit.errors import DigestMismatchError, FormatError, NotFoundError, ProtocolError
from buildkit.model import INDEX_TYPES, MANIFEST_TYPES, MAX_MANIFEST, Digest, Reference
from buildkit.registry.answers import describe, error_for, is_html, reason
from buildkit.registry.events import Event, QuirkMet, Retrying
from buildkit.registry.location import Origin
from buildkit.registry.quirks import Quirk
from buildkit.registry.steps import (
    Answer,
    Budget,
    Failure,
    Pause,
    Request,
    Steps,
    Tell,
    ask,
    come_back_later,
    is_retryable,
)
from buildkit.registry.upload import pull_scope, push_scope

ACCEPT = ", ".join(MANIFEST_TYPES + INDEX_TYPES)
MAX_FETCHED = MAX_MANIFEST * 4
"""Bytes of a manifest or index that are read; registries refuse larger ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedManifest:
    """``raw`` are the exact bytes, ``digest`` their sha256 (or the reference's, with which they were checked)."""

    raw: bytes
    media_type: str
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """A request that may be repeated without harm, with its budget."""

    label: str
    budget: Budget

    @classmethod
    def of(cls, label: str, *, retries: int, rng: Random, max_wait: float) -> Patient:
        return cls(label=label, budget=Budget(limit=retries, rng=rng, max_wait=max_wait))

    def ask(self, request: Request) -> Steps[Answer]:
        """An answer that is no passing failure. Raises the last failure's error once the budget is used up."""
        while True:
            reply = yield from ask(request)
            if isinstance(reply, Answer) and not is_retryable(reply):
                return reply
            yield from self.pause(request, reply)

    def pause(self, request: Request, reply: Answer | Failure) -> Steps[None]:
        if not is_retryable(reply) or not self.budget.spend():
            raise error_for(request, reply)
        wait = self.budget.wait(reply)
        if wait > self.budget.max_wait:
            error = error_for(request, reply)
            error.hint = come_back_later(wait)
            raise error
        event: Event = Retrying(blob=self.label, reason=reason(reply), wait=wait, left=self.budget.left)
        yield Tell(event=event)
        yield Pause(seconds=wait)


def manifest_url(origin: Origin, reference: Reference) -> str:
    return f"{origin}/v2/{reference.repository}/manifests/{reference.target}"


def get(origin: Origin, reference: Reference, patient: Patient) -> Steps[FetchedManifest]:
    """The manifest's exact bytes, checked against the reference's digest and the registry's own header.

    Raises NotFoundError where there is none, DigestMismatchError where the bytes are not what they are called.
    """
    request = Request(
        doing=f"fetching the manifest {reference}",
        method="GET",
        url=manifest_url(origin, reference),
        scopes=(pull_scope(reference.repository),),
        headers={"Accept": ACCEPT},
    )
    answer = yield from patient.ask(request)
    if answer.status != 200:
        raise error_for(request, answer)
    if is_html(answer):
        raise ProtocolError(f"{describe(request, answer)}: not a manifest", hint="is this address a registry?")
    raw = answer.body
    if len(raw) >= MAX_FETCHED:
        raise ProtocolError(f"{request.doing}: it has more than {MAX_FETCHED} bytes")
    expected = reference.digest or _named_digest(answer)
    if expected is not None:
        expected.check(raw, f"the manifest {reference}")
    media_type = answer.headers.get("content-type", "").partition(";")[0].strip()
    return FetchedManifest(raw=raw, media_type=media_type, digest=expected or Digest.of(raw))


def head(origin: Origin, reference: Reference, patient: Patient) -> Steps[Digest | None]:
    """The digest that the registry names for the reference; None where it has no such manifest.

    Registries that name none in their HEAD are asked with GET.
    """
    request = Request(
        doing=f"looking for the manifest {reference}",
        method="HEAD",
        url=manifest_url(origin, reference),
        scopes=(pull_scope(reference.repository),),
        headers={"Accept": ACCEPT},
    )
    answer = yield from patient.ask(request)
    if answer.status == 404:
        return None
    if answer.status == 200 and (named := _named_digest(answer)) is not None:
        return named
    if answer.status not in (200, 405):
        raise error_for(request, answer)
    try:
        return (yield from get(origin, reference, patient)).digest
    except NotFoundError:
        return None


@dataclass(slots=True, kw_only=True)
class PutManifest:
    """PUT of a manifest. An unclear end (time-out, 5xx, dropped) is settled by asking what the registry holds now."""

    origin: Origin
    reference: Reference
    raw: bytes
    media_type: str
    patient: Patient
    quirks: list[Quirk] = field(default_factory=list)
    subject_listed: bool = False
    """Whether the registry said that it lists the manifest as its subject's referrer (``OCI-Subject``)."""

    def run(self) -> Steps[Digest]:
        """The digest under which the registry holds the manifest: that of ``raw``, or an error."""
        digest = Digest.of(self.raw)
        request = Request(
            doing=f"putting the manifest {self.reference}",
            method="PUT",
            url=manifest_url(self.origin, self.reference),
            scopes=(push_scope(self.reference.repository),),
            headers={"Content-Type": self.media_type, "Content-Length": str(len(self.raw))},
            body=self.raw,
        )
        while True:
            reply = yield from ask(request)
            if isinstance(reply, Answer) and reply.status in (200, 201, 202, 204):
                self.subject_listed = bool(reply.headers.get("oci-subject"))
                named = _named_digest(reply)
                if named is not None and named.algorithm == digest.algorithm and named != digest:
                    raise DigestMismatchError(f"{self.reference}: the registry stored {named}, sent was {digest}")
                if reply.status in (201, 204) and named == digest:
                    return digest
                # A success that does not say what it stored (an edge may answer 200 to anything) is checked.
                if (yield from head(self.origin, self.reference, self.patient)) == digest:
                    return digest
                raise ProtocolError(f"{describe(request, reply)}: the manifest is not there afterwards")
            if not is_retryable(reply):
                raise error_for(request, reply)
            yield from self.patient.pause(request, reply)
            if (yield from head(self.origin, self.reference, self.patient)) == digest:
                self.quirks.append(Quirk.MANIFEST_UNKNOWN)
                yield Tell(event=QuirkMet(blob=self.patient.label, quirk=Quirk.MANIFEST_UNKNOWN))
                return digest


def delete(origin: Origin, reference: Reference, patient: Patient) -> Steps[bool]:
    """Delete by digest or tag; False where it was not there. 405 means that this registry does not allow it."""
    name = reference.repository
    request = Request(
        doing=f"deleting the manifest {reference}",
        method="DELETE",
        url=manifest_url(origin, reference),
        scopes=(f"repository:{name}:delete,pull,push",),
    )
    answer = yield from patient.ask(request)
    if answer.status in (200, 202, 204):
        return True
    if answer.status == 404:
        return False
    raise error_for(request, answer)


def _named_digest(answer: Answer) -> Digest | None:
    """Docker-Content-Digest, where it is one."""
    try:
        return Digest.parse(answer.headers.get("docker-content-digest", ""))
    except FormatError:
        return None
