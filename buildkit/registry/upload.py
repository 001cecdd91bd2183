"""Uploading one blob, as a state machine without I/O (distribution-spec 1.1, "Pushing Blobs").

The story: is it there? - can it be mounted? - open a session (or go on with an earlier run's) - send chunks - close.
After every failure the registry is asked where it stands; nothing is assumed. The three ways back:

* *again*: the same request after a pause (nothing was stored, or it can be repeated without harm);
* *resync*: GET on the session says how much is stored, and the next chunk starts there;
* *restart*: the session is useless; it is deleted where it still exists, and the blob starts from its first byte.

All three draw on one budget, which only bytes that were never acknowledged before refill, so every run ends.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from random import Random

from buildkit.blob import BlobState
from buildkit.errors import AuthError, BuildkitError, ProtocolError, RegistryError, SizeRefusedError
from buildkit.model import Descriptor, Digest
from buildkit.registry import chunks
from buildkit.registry.answers import (
    codes,
    describe,
    error_for,
    is_poisoned,
    is_size_refusal,
    reason,
    who,
)
from buildkit.registry.events import (
    BytesAcknowledged,
    LimitFound,
    Outcome,
    QuirkMet,
    Restarted,
    Resumed,
    Retrying,
    UploadReport,
    UploadSkipped,
    UploadStarted,
)
from buildkit.registry.journal import ResumePoint
from buildkit.registry.location import Origin, resolve, stored_bytes, with_query
from buildkit.registry.options import RegistryOptions
from buildkit.registry.quirks import Quirk
from buildkit.registry.steps import (
    Answer,
    Budget,
    Failure,
    LimitLearned,
    Note,
    Patience,
    Pause,
    Request,
    Steps,
    Tell,
    Window,
    ask,
    await_blob,
    come_back_later,
    is_retryable,
    retry_after,
)

STORED = frozenset({200, 201, 202, 204})
"""What registries answer to a stored chunk; the specification says 202, the field says all of these."""

_SESSION_CODES = frozenset({"BLOB_UPLOAD_INVALID", "BLOB_UPLOAD_UNKNOWN", "RANGE_INVALID"})
_STALLS_BEFORE_RESTART = 3
_SMALLEST_SLOW_CHUNK = 1_000_000
_OCTETS = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPlan:
    """What the machine needs to know. ``chunk`` is the size to begin with and ``largest_body`` what one request may
    carry, learned limits considered.

    ``mount_from`` are repositories on the same registry that may hold the blob. ``resume`` is an earlier run's note.
    """

    label: str
    origin: Origin
    repository: str
    options: RegistryOptions
    chunk: int
    largest_body: int
    rng: Random
    mount_from: tuple[str, ...] = ()
    resume: ResumePoint | None = None


def blob_url(origin: Origin, repository: str, digest: Digest) -> str:
    return f"{origin}/v2/{repository}/blobs/{digest}"


def push_scope(repository: str) -> str:
    return f"repository:{repository}:pull,push"


def pull_scope(repository: str) -> str:
    return f"repository:{repository}:pull"


@dataclass(frozen=True, slots=True)
class Present:
    """The registry holds the blob; ``size`` is None where it does not say."""

    size: int | None


@dataclass(frozen=True, slots=True)
class Missing:
    """The registry says clearly that it has no such blob."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """No clear answer: neither there nor missing."""

    reason: str


Presence = Present | Missing | Unknown


def presence(reply: Answer | Failure, digest: Digest) -> Presence:
    """What the reply to a HEAD means. A failure, a redirect or an odd answer is *unknown*, never *missing*."""
    if isinstance(reply, Failure):
        return Unknown(reply.detail)
    if reply.status == 404:
        return Missing()
    if reply.status == 200:
        named = reply.headers.get("docker-content-digest")
        if named is not None and named.startswith(f"{digest.algorithm}:") and named != str(digest):
            return Unknown("the registry answered for another digest")
        return Present(reply.headers.number("content-length"))
    return Unknown(reason(reply))


def head_blob(origin: Origin, repository: str, digest: Digest, scope: str) -> Request:
    return Request(
        doing="looking for the blob", method="HEAD", url=blob_url(origin, repository, digest), scopes=(scope,)
    )


class _RestartBlob(Exception):
    """The session is of no use any more. ``delete``: it still exists. ``free``: this restart needs no budget."""

    def __init__(self, why: str, *, delete: bool, cause: RegistryError | None = None, free: bool = False) -> None:
        super().__init__(why)
        self.why, self.delete, self.cause, self.free = why, delete, cause, free


@dataclass(slots=True, kw_only=True)
class _Session:
    location: str
    rules: chunks.ChunkRules
    offset: int = 0
    # Offsets that the registry may also have meant, to be tried when it refuses ``offset`` (status counted one high).
    alternates: list[int] = field(default_factory=list)
    # Failures in a row at this offset.
    stalls: int = 0
    pace: int | None = None


class Upload:
    """One blob's upload; ``run`` is called once."""

    def __init__(self, plan: UploadPlan) -> None:
        self._plan = plan
        self._options = plan.options
        self._budget = Budget(limit=plan.options.retries, rng=plan.rng, max_wait=plan.options.max_wait)
        self._scopes: tuple[str, ...] = (push_scope(plan.repository),)
        self._chunk = plan.chunk
        self._largest_body = plan.largest_body
        self._session: _Session | None = None
        self._high_water = 0
        self._largest_accepted = 0
        self._refused: int | None = None
        self._limit_told = False
        self._wrong_digests = 0
        self._mount_tried = False
        self._asked_whether_needed = False
        self._resume = plan.resume
        self._quirks: dict[Quirk, None] = {}
        self._known_quirks = set(plan.options.quirks)
        # For the report.
        self._requests = self._chunks = self._bytes_sent = self._resumed_at = self._resumes = 0
        self._retries: list[str] = []
        self._restarts: list[str] = []
        self._seconds = 0.0

    # The story -------------------------------------------------------------------------------------------------------

    def run(self) -> Steps[UploadReport]:
        """Returns the report once the registry holds the blob; raises BuildkitError otherwise."""
        state = yield from await_blob(0)
        if state.descriptor is not None and (yield from self._exists(state.descriptor)):
            return (yield from self._skipped(state.descriptor, Outcome.EXISTS))
        while True:
            try:
                return (yield from self._attempt())
            except _RestartBlob as restart:
                yield from self._start_again(restart)
            except BuildkitError as error:
                yield from self._give_up(error)
                raise

    def _attempt(self) -> Steps[UploadReport]:
        state = yield from self._source(self._chunk + 2)
        descriptor = state.descriptor
        if descriptor is not None and not self._asked_whether_needed and (yield from self._exists(descriptor)):
            return (yield from self._skipped(descriptor, Outcome.EXISTS))
        if descriptor is not None and self._plan.mount_from and not self._mount_tried and self._resume is None:
            self._mount_tried = True
            if (yield from self._mount(descriptor)):
                return (yield from self._skipped(descriptor, Outcome.MOUNTED))
        session = yield from self._open(state)
        if descriptor is not None and self._fits_one_request(descriptor.size, session):
            yield from self._put_whole(session, descriptor)
            return (yield from self._finished(descriptor))
        while True:
            rules = self._paced(session)
            state = yield from self._source(chunks.needed(rules, session.offset))
            descriptor = state.descriptor
            if (
                descriptor is not None
                and not self._asked_whether_needed
                and session.offset < descriptor.size
                and (yield from self._exists(descriptor))
            ):
                # Compressed while it was sent, the blob got its name only now, and is there: no need for the rest.
                yield from self._delete_session()
                return (yield from self._skipped(descriptor, Outcome.EXISTS))
            total = descriptor.size if descriptor is not None else None
            if total is not None and session.offset > total:
                raise _RestartBlob("the registry claims more bytes than the blob has", delete=True)
            if total is not None and session.rules.equal and total - session.offset == 1 and total > 1:
                raise _RestartBlob("a last part of one byte would be left", delete=True)
            piece = chunks.next_chunk(rules, start=session.offset, available=state.available, total=total)
            if piece is not None:
                yield from self._send(session, *piece, total=total)
            elif descriptor is not None and (yield from self._close(session, descriptor)):
                return (yield from self._finished(descriptor))

    def _fits_one_request(self, size: int, session: _Session) -> bool:
        if session.offset or not size:
            return False
        if session.rules.equal and size == 1:
            return True  # as a chunk it would have first == last, which such stores refuse as empty
        if self._options.chunked:
            return False
        return size <= min(self._largest_body, session.rules.largest)

    def _source(self, available: int) -> Steps[BlobState]:
        state = yield from await_blob(available)
        if state.error is not None:
            raise state.error
        return state

    # Asking ----------------------------------------------------------------------------------------------------------

    def _ask(self, request: Request) -> Steps[Answer | Failure]:
        self._requests += 1
        reply = yield from ask(request)
        self._bytes_sent += reply.sent
        self._seconds += reply.seconds
        return reply

    def _ask_patiently(self, request: Request) -> Steps[Answer]:
        """Repeat a request that does no harm when repeated, until there is an answer that is no passing failure."""
        while True:
            reply = yield from self._ask(request)
            if isinstance(reply, Answer) and not is_retryable(reply):
                return reply
            yield from self._pause(request, reply)

    def _pause(self, request: Request, reply: Answer | Failure) -> Steps[None]:
        """Spend from the budget and wait; raises the reply's error when the budget is used up or it is final."""
        if not is_retryable(reply) and isinstance(reply, Failure):
            raise error_for(request, reply)
        yield from self._spend(reason(reply), error_for(request, reply), reply)

    def _spend(
        self, why: str, error: RegistryError | BuildkitError, reply: Answer | Failure | None = None
    ) -> Steps[None]:
        if not self._budget.spend():
            raise error
        wait = self._budget.wait(reply)
        if wait > self._budget.max_wait:
            error.hint = come_back_later(wait)
            raise error
        self._retries.append(why)
        yield Tell(event=Retrying(blob=self._plan.label, reason=why, wait=wait, left=self._budget.left))
        yield Pause(seconds=wait)

    def _note_quirk(self, quirk: Quirk) -> Steps[None]:
        self._known_quirks.add(quirk)
        if quirk not in self._quirks:
            self._quirks[quirk] = None
            yield Tell(event=QuirkMet(blob=self._plan.label, quirk=quirk))

    def _has(self, quirk: Quirk) -> bool:
        return quirk in self._known_quirks and quirk not in self._options.not_quirks

    # Is it there? ----------------------------------------------------------------------------------------------------

    def _exists(self, descriptor: Descriptor) -> Steps[bool]:
        """Whether the registry holds the blob, with its size. A HEAD that fails is repeated, never taken as no."""
        self._asked_whether_needed = True
        request = head_blob(self._plan.origin, self._plan.repository, descriptor.digest, self._scopes[0])
        reply = yield from self._ask_patiently(request)
        if reply.status in (401, 403):
            raise error_for(request, reply)
        found = presence(reply, descriptor.digest)
        return isinstance(found, Present) and found.size in (None, descriptor.size)

    def _mount(self, descriptor: Descriptor) -> Steps[bool]:
        """Cross-repository mount; a refusal of any kind only means that the bytes have to be sent."""
        for source in self._plan.mount_from:
            request = Request(
                doing="mounting the blob",
                method="POST",
                url=f"{self._uploads_url()}?mount={descriptor.digest}&from={source}",
                scopes=(*self._scopes, pull_scope(source)),
                headers={"Content-Length": "0"},
            )
            try:
                reply = yield from self._ask(request)
            except AuthError:
                continue  # no token for the other repository; our own may still be written to
            if isinstance(reply, Answer) and reply.status == 201 and (yield from self._exists(descriptor)):
                return True
            if isinstance(reply, Answer) and reply.status == 202:
                # "Go on and upload": the session is good for it.
                self._session = yield from self._session_from(request, reply, total=descriptor.size)
                return False
        return False

    # Sessions --------------------------------------------------------------------------------------------------------

    def _uploads_url(self) -> str:
        return f"{self._plan.origin}/v2/{self._plan.repository}/blobs/uploads/"

    def _open(self, state: BlobState) -> Steps[_Session]:
        total = state.descriptor.size if state.descriptor is not None else None
        if self._session is None and self._resume is not None:
            point, self._resume = self._resume, None
            self._session = yield from self._take_up(point)
        if self._session is None:
            request = Request(
                doing="opening an upload",
                method="POST",
                url=self._uploads_url(),
                scopes=self._scopes,
                headers={"Content-Length": "0"},
            )
            reply = yield from self._ask_patiently(request)
            if reply.status not in (201, 202, 204):
                raise error_for(request, reply)
            self._session = yield from self._session_from(request, reply, total=total)
        yield Tell(event=UploadStarted(blob=self._plan.label, size=total))
        return self._session

    def _session_from(self, request: Request, answer: Answer, *, total: int | None) -> Steps[_Session]:
        location = answer.headers.get("location")
        if not location:
            identifier = answer.headers.get("docker-upload-uuid", "")
            if not identifier.isascii() or not identifier.replace("-", "").isalnum() or len(identifier) > 200:
                raise ProtocolError(f"{describe(request, answer)}: the session has no Location")
            location = self._uploads_url() + identifier
            yield from self._note_quirk(Quirk.NO_LOCATION)
        url = yield from self._resolve(location, request.url)
        largest = answer.headers.number("oci-chunk-max-length") or None
        if (largest is not None or "_stateHash" in url) and Quirk.EQUAL_PARTS not in self._options.not_quirks:
            yield from self._note_quirk(Quirk.EQUAL_PARTS)
        # Known from here on, so that it is deleted again if its demands cannot be met.
        self._session = _Session(location=url, rules=chunks.ChunkRules(size=self._chunk))
        self._session.rules = chunks.settle(
            self._chunk,
            limit=min(self._options.body_limit, self._refused - 1 if self._refused else 2**63),
            smallest=answer.headers.number("oci-chunk-min-length"),
            largest=largest,
            equal=self._has(Quirk.EQUAL_PARTS),
            total=total,
        )
        return self._session

    def _resolve(self, location: str, request_url: str) -> Steps[str]:
        url, rewritten = resolve(
            location,
            request_url=request_url,
            origin=self._plan.origin,
            allow_plain=self._options.plain_http is True,
        )
        if rewritten:
            yield from self._note_quirk(Quirk.LOCATION_REWRITTEN)
        return url

    def _take_up(self, point: ResumePoint) -> Steps[_Session | None]:
        """An earlier run's session, if the registry still knows it; None otherwise."""
        if self._refused is not None and point.chunk >= self._refused:
            return None
        try:
            url = yield from self._resolve(point.location, self._uploads_url())
        except ProtocolError:
            return None
        # Chunks keep their size where parts must be equal; elsewhere today's size counts.
        equal = self._has(Quirk.EQUAL_PARTS) or "_stateHash" in url
        session = _Session(
            location=url,
            rules=chunks.ChunkRules(size=point.chunk if equal else min(self._chunk, point.chunk), equal=equal),
            offset=point.offset,
        )
        self._session = session
        # A note must never stand in the way: whatever is wrong with it, and be it the host that it names, half of the
        # budget is left for a fresh start, where a fault that is not the note's shows itself again.
        request, reply = yield from self._ask_status(session)
        while is_retryable(reply) and self._budget.left > self._budget.limit // 2:
            yield from self._pause(request, reply)
            request, reply = yield from self._ask_status(session)
        told = stored_bytes(reply.headers.get("range")) if isinstance(reply, Answer) else None
        if not isinstance(reply, Answer) or reply.status not in (200, 204) or not told:
            if isinstance(reply, Answer) and reply.status not in (401, 403, 404):
                yield from self._delete_session()
            self._session = None
            return None
        yield from self._follow(session, request, reply)
        self._place(session, told, boundaries={point.offset, point.offset + point.chunk})
        if equal and session.offset % session.rules.size:
            yield from self._delete_session()
            self._session = None
            return None
        self._resumed_at = session.offset
        self._high_water = session.offset
        self._resumes += 1
        yield Tell(event=Resumed(blob=self._plan.label, offset=session.offset, earlier_run=True))
        return session

    def _follow(self, session: _Session, request: Request, answer: Answer) -> Steps[None]:
        """Always the newest Location: it carries the registry's state."""
        location = answer.headers.get("location")
        if location:
            session.location = yield from self._resolve(location, request.url)

    # Chunks ----------------------------------------------------------------------------------------------------------

    def _paced(self, session: _Session) -> chunks.ChunkRules:
        """The session's rules, with a smaller chunk where the link is slow and parts need not be equal."""
        if session.pace is None or session.rules.equal or session.pace >= session.rules.size:
            return session.rules
        size = max(session.pace, min(_SMALLEST_SLOW_CHUNK, session.rules.size), session.rules.smallest)
        return chunks.ChunkRules(size=size, smallest=session.rules.smallest)

    def _send(self, session: _Session, start: int, end: int, *, total: int | None) -> Steps[None]:
        request = Request(
            doing=f"sending bytes {start}-{end - 1} of {self._plan.label}",
            method="PATCH",
            url=session.location,
            scopes=self._scopes,
            headers={
                "Content-Type": _OCTETS,
                "Content-Length": str(end - start),
                # The specification's form has no unit; "bytes " in front fails to parse at Gitea.
                "Content-Range": f"{start}-{end - 1}",
            },
            body=Window(start=start, end=end),
        )
        self._chunks += 1
        reply = yield from self._ask(request)
        if isinstance(reply, Answer) and reply.status in STORED:
            yield from self._stored(session, request, reply, start, end, total)
        elif isinstance(reply, Answer) and is_size_refusal(request, reply):
            yield from self._shrink(request, reply)
        elif isinstance(reply, Answer) and is_poisoned(reply):
            yield from self._note_quirk(Quirk.POISONED_SESSION)
            raise _RestartBlob(reason(reply), delete=True, cause=_registry_error(request, reply))
        elif isinstance(reply, Answer) and (reply.status == 404 or codes(reply) & {"BLOB_UPLOAD_UNKNOWN"}):
            raise _RestartBlob(
                "the registry has forgotten the session", delete=False, cause=_registry_error(request, reply)
            )
        elif isinstance(reply, Answer) and reply.status == 416 and session.alternates:
            yield from self._spend(reason(reply), error_for(request, reply))
            session.offset = session.alternates.pop(0)
            yield from self._note_quirk(Quirk.STATUS_ONE_HIGH)
        elif is_retryable(reply) or (isinstance(reply, Answer) and _about_session(reply)):
            yield from self._recover(session, request, reply, end)
        else:
            raise error_for(request, reply)

    def _stored(
        self, session: _Session, request: Request, answer: Answer, start: int, end: int, total: int | None
    ) -> Steps[None]:
        yield from self._follow(session, request, answer)
        header = answer.headers.get("range")
        told = stored_bytes(header)
        if told == end + 1:
            yield from self._note_quirk(Quirk.PATCH_ONE_HIGH)
            told = end
        if header is None:
            yield from self._note_quirk(Quirk.NO_RANGE)
        if told is None or (told == 0 and end == 1):
            told = end  # of a blob of one byte, "0-0" says all
        if not start < told <= end:
            # Behind, ahead or not moving: this answer and our bytes do not fit together; ask.
            failure = Failure(
                kind="garbage", detail=f"the registry acknowledged {told} bytes after {start}-{end - 1} was sent"
            )
            yield from self._recover(session, request, failure, end)
            return
        session.offset, session.alternates, session.stalls = told, [], 0
        yield from self._acknowledged(session, sent=told - start, seconds=answer.seconds, total=total)
        if session.rules.equal and told < end:
            raise _RestartBlob("a part was stored only in part", delete=True)

    def _acknowledged(self, session: _Session, *, sent: int, seconds: float, total: int | None) -> Steps[None]:
        if session.offset > self._high_water:
            self._high_water = session.offset
            self._budget.refill()
        self._largest_accepted = max(self._largest_accepted, sent)
        if self._refused is not None and not self._limit_told:
            self._limit_told = True
            yield LimitLearned(accepted=self._chunk, refused=self._refused)
        if seconds > 0:
            session.pace = int(sent / seconds * self._options.chunk_seconds)
        # Noted before it is told: what a user has seen is never lost.
        if session.offset != total:
            yield Note(point=ResumePoint(location=session.location, offset=session.offset, chunk=session.rules.size))
        yield Tell(
            event=BytesAcknowledged(
                blob=self._plan.label, offset=session.offset, size=total, sent=sent, seconds=seconds
            )
        )

    def _shrink(self, request: Request, answer: Answer) -> Steps[None]:
        """A body was refused for its size: half of it, in a fresh session. Raises where that cannot help."""
        size = request.size
        error = _registry_error(request, answer)
        smallest = self._session.rules.smallest if self._session is not None else 1
        if size <= self._largest_accepted:
            error.hint = (
                f"{size} bytes are refused although {self._largest_accepted} went through: the registry limits the "
                "blob or its owner's space, and no chunk size cures that"
            )
            raise error
        half = size // 2
        if not self._options.learn:
            error.hint = f"choose a smaller --chunk-size than {size}, or let the push learn the limit"
            raise error
        if half < max(self._options.smallest_chunk, smallest):
            at_least = f", the registry asks for at least {smallest}" if smallest > half else ""
            error.hint = f"chunks of {half} bytes would be next{at_least}: the way there allows too little"
            raise error
        self._chunk = self._largest_body = half
        self._limit_told = False
        self._refused = min(self._refused or size, size)
        yield Tell(event=LimitFound(blob=self._plan.label, refused=size, chunk=half, who=who(answer)))
        if (wait := retry_after(answer)) is not None and wait <= self._budget.max_wait:
            yield Pause(seconds=wait)
        raise _RestartBlob(f"{size} bytes are too large for the way there ({who(answer)})", delete=True, free=True)

    def _recover(self, session: _Session, request: Request, reply: Answer | Failure, end: int) -> Steps[None]:
        """After a chunk whose fate is unclear: wait, ask the registry, go on from there."""
        session.stalls += 1
        error = error_for(request, reply)
        if session.stalls > _STALLS_BEFORE_RESTART:
            raise _RestartBlob(
                f"the session takes nothing at {session.offset}: {reason(reply)}", delete=True, cause=_as_remote(error)
            )
        yield from self._spend(reason(reply), error, reply)
        if session.stalls > 1 and isinstance(reply, Failure) and not session.rules.equal:
            # Twice in a row at the same place: whatever cuts long or large bodies off, shorter ones stand a chance.
            session.pace = max((request.size) // 2, 2)
        yield from self._resync(session, boundaries={session.offset, end})

    def _resync(self, session: _Session, *, boundaries: set[int]) -> Steps[None]:
        """Set the session's offset to what the registry says. Raises _RestartBlob where it cannot say."""
        if self._has(Quirk.NO_STATUS):
            raise _RestartBlob("the registry cannot tell how much it holds", delete=True)
        request, reply = yield from self._ask_status(session)
        while is_retryable(reply):
            yield from self._pause(request, reply)
            request, reply = yield from self._ask_status(session)
        assert isinstance(reply, Answer)
        if reply.status in (401, 403):
            raise error_for(request, reply)
        if reply.status in (405, 501):
            yield from self._note_quirk(Quirk.NO_STATUS)
            raise _RestartBlob("the registry cannot tell how much it holds", delete=True)
        if reply.status not in (200, 202, 204):
            # 404: forgotten. 400: distribution 2.8 compares a state token and cancels the session where it differs.
            raise _RestartBlob(
                f"the session is lost: {reason(reply)}",
                delete=reply.status != 404,
                cause=_registry_error(request, reply),
            )
        yield from self._follow(session, request, reply)
        told = stored_bytes(reply.headers.get("range"))
        if told is None:
            if session.offset:
                raise _RestartBlob("the registry does not say how much it holds", delete=True)
            told = 0  # Gitea from about 1.25 sends no Range for an empty session.
        before = session.offset
        self._place(session, told, boundaries=boundaries)
        if session.rules.equal and session.offset % session.rules.size and session.offset not in boundaries:
            raise _RestartBlob("a part was stored only in part", delete=True)
        if session.offset != before:
            session.stalls = 0
        self._resumes += 1
        yield Tell(event=Resumed(blob=self._plan.label, offset=session.offset, earlier_run=False))
        if session.offset > self._high_water:
            self._high_water = session.offset
            self._budget.refill()
            yield Note(point=ResumePoint(location=session.location, offset=session.offset, chunk=session.rules.size))

    def _place(self, session: _Session, told: int, *, boundaries: set[int]) -> None:
        """Where to go on if the registry says ``told``: some count one too high, and only they know.

        One more than a boundary that we know is more likely a boundary counted wrongly than a chunk that broke after
        its first byte. The other reading stays as an alternate for the registry to choose by its 416.
        """
        one_high = told - 1 in boundaries or (self._has(Quirk.STATUS_ONE_HIGH) and told > 0)
        if one_high and Quirk.STATUS_ONE_HIGH not in self._options.not_quirks:
            session.offset, session.alternates = told - 1, [told]
        else:
            session.offset, session.alternates = told, [told - 1] if told > 1 else []

    def _ask_status(self, session: _Session) -> Steps[tuple[Request, Answer | Failure]]:
        request = Request(doing="asking how much is stored", method="GET", url=session.location, scopes=self._scopes)
        return request, (yield from self._ask(request))

    # The end ---------------------------------------------------------------------------------------------------------

    def _put_whole(self, session: _Session, descriptor: Descriptor) -> Steps[None]:
        """POST then PUT: the whole blob in one body."""
        request = Request(
            doing=f"sending {self._plan.label}",
            method="PUT",
            url=with_query(session.location, f"digest={descriptor.digest}"),
            scopes=self._scopes,
            headers={"Content-Type": _OCTETS, "Content-Length": str(descriptor.size)},
            body=Window(start=0, end=descriptor.size) if descriptor.size else None,
            patience=Patience.CLOSING,
        )
        self._chunks += 1
        reply = yield from self._ask(request)
        if isinstance(reply, Answer) and reply.status in (200, 201, 204):
            self._check_named_digest(request, reply, descriptor)
            session.offset = descriptor.size
            yield from self._acknowledged(session, sent=descriptor.size, seconds=reply.seconds, total=descriptor.size)
        elif isinstance(reply, Answer) and descriptor.size and is_size_refusal(request, reply):
            yield from self._shrink(request, reply)
        elif is_retryable(reply) or (
            isinstance(reply, Answer) and (reply.status in (404, 409) or _about_session(reply))
        ):
            yield from self._pause_for(request, reply)
            if not (yield from self._confirmed(descriptor)):
                self._count_wrong_digest(request, reply)
                raise _RestartBlob(
                    f"the upload broke: {reason(reply)}", delete=True, cause=_registry_error(request, reply)
                )
            session.offset = descriptor.size
        else:
            raise error_for(request, reply)

    def _close(self, session: _Session, descriptor: Descriptor) -> Steps[bool]:
        """The empty closing PUT. True when the registry has the blob, False when there is more to send."""
        request = Request(
            doing=f"closing the upload of {self._plan.label}",
            method="PUT",
            url=with_query(session.location, f"digest={descriptor.digest}"),
            scopes=self._scopes,
            headers={"Content-Type": _OCTETS, "Content-Length": "0"},
            patience=Patience.CLOSING,
        )
        reply = yield from self._ask(request)
        if isinstance(reply, Answer) and reply.status in STORED - {202}:
            self._check_named_digest(request, reply, descriptor)
            return True
        if isinstance(reply, Answer) and reply.status == 416:
            # It counts differently than we do.
            yield from self._recover(session, request, reply, session.offset)
            return False
        unclear = is_retryable(reply) or (isinstance(reply, Answer) and reply.status in (202, 404, 409))
        if not unclear and not (isinstance(reply, Answer) and _about_session(reply)):
            raise error_for(request, reply)
        # Nothing is known now: the blob may be stored, or be on its way into the store.
        if (yield from self._confirmed(descriptor)):
            return True
        cause = _registry_error(request, reply)
        if isinstance(reply, Answer) and reply.status == 404:
            raise _RestartBlob("the registry has forgotten the session", delete=False, cause=cause)
        if isinstance(reply, Answer) and is_poisoned(reply):
            yield from self._note_quirk(Quirk.POISONED_SESSION)
            raise _RestartBlob(reason(reply), delete=True, cause=cause)
        if isinstance(reply, Answer) and not is_retryable(reply) and reply.status != 202:
            self._count_wrong_digest(request, reply)
            raise _RestartBlob(f"the registry did not close the upload: {reason(reply)}", delete=True, cause=cause)
        session.stalls += 1
        if session.stalls > _STALLS_BEFORE_RESTART:
            raise _RestartBlob(f"the session cannot be closed: {reason(reply)}", delete=True, cause=cause)
        yield from self._pause_for(request, reply)
        return (yield from self._confirmed(descriptor))

    def _pause_for(self, request: Request, reply: Answer | Failure) -> Steps[None]:
        if isinstance(reply, Failure) and reply.final:
            raise error_for(request, reply)
        yield from self._spend(reason(reply), error_for(request, reply), reply)

    def _confirmed(self, descriptor: Descriptor) -> Steps[bool]:
        there = yield from self._exists(descriptor)
        if there:
            yield from self._note_quirk(Quirk.CLOSE_UNKNOWN)
        return there

    def _count_wrong_digest(self, request: Request, reply: Answer | Failure) -> None:
        """A registry that hashes something else is given one more chance (a resumed session, a lost write), no more."""
        if isinstance(reply, Answer) and codes(reply) & {"DIGEST_INVALID", "SIZE_INVALID"}:
            self._wrong_digests += 1
            if self._wrong_digests > 1:
                raise ProtocolError(
                    f"{describe(request, reply)}: the registry does not store what it is sent",
                    hint="a proxy on the way may alter bodies; compare with a push that does not pass it",
                    status=reply.status,
                )

    def _check_named_digest(self, request: Request, answer: Answer, descriptor: Descriptor) -> None:
        named = answer.headers.get("docker-content-digest")
        if named and named.startswith(f"{descriptor.digest.algorithm}:") and named != str(descriptor.digest):
            raise ProtocolError(
                f"{request.doing}: the registry says it stored {named[:100]}, sent was {descriptor.digest}",
                status=answer.status,
            )

    def _start_again(self, restart: _RestartBlob) -> Steps[None]:
        lost = self._session.offset if self._session is not None else 0
        if restart.delete:
            yield from self._delete_session()
        self._session = self._resume = None
        self._resumed_at = 0
        yield Note(point=None)
        if not restart.free:
            error = restart.cause or ProtocolError(f"{self._plan.label}: {restart.why}, again and again")
            yield from self._spend(restart.why, error)
        self._restarts.append(restart.why)
        yield Tell(event=Restarted(blob=self._plan.label, reason=restart.why, lost=lost))

    def _delete_session(self) -> Steps[None]:
        """Tidy up on the registry; its answer changes nothing (distribution-spec: DELETE on the session, 204)."""
        if self._session is not None:
            yield from self._ask(
                Request(doing="cancelling the upload", method="DELETE", url=self._session.location, scopes=self._scopes)
            )

    def _give_up(self, error: BuildkitError) -> Steps[None]:
        """Leave nothing behind that no later run can use; keep the session where the next run may go on."""
        resumable = isinstance(error, RegistryError) and not isinstance(error, SizeRefusedError | ProtocolError)
        if not resumable and self._session is not None:
            with contextlib.suppress(BuildkitError):
                yield from self._delete_session()
            yield Note(point=None)

    def _skipped(self, descriptor: Descriptor, outcome: Outcome) -> Steps[UploadReport]:
        yield Note(point=None)
        yield Tell(event=UploadSkipped(blob=self._plan.label, why=str(outcome), size=descriptor.size))
        return self._report(descriptor, outcome)

    def _finished(self, descriptor: Descriptor) -> Steps[UploadReport]:
        yield Note(point=None)
        if self._refused is None and self._largest_accepted >= self._chunk:
            yield LimitLearned(accepted=self._largest_accepted, refused=None)
        return self._report(descriptor, Outcome.RESUMED if self._resumed_at else Outcome.UPLOADED)

    def _report(self, descriptor: Descriptor, outcome: Outcome) -> UploadReport:
        needed = (
            descriptor.size - self._resumed_at if outcome in (Outcome.UPLOADED, Outcome.RESUMED) else self._bytes_sent
        )
        return UploadReport(
            label=self._plan.label,
            digest=descriptor.digest,
            size=descriptor.size,
            outcome=outcome,
            requests=self._requests,
            chunks=self._chunks,
            chunk_size=self._chunk,
            bytes_sent=self._bytes_sent,
            bytes_resent=max(0, self._bytes_sent - needed),
            resumed_at=self._resumed_at,
            retries=tuple(self._retries),
            restarts=tuple(self._restarts),
            resumes=self._resumes,
            limit_learned=self._chunk if self._refused is not None else None,
            quirks=tuple(self._quirks),
            seconds=self._seconds,
        )


def _about_session(answer: Answer) -> bool:
    """A refusal that speaks of this session's state, not of us or of the blob."""
    if answer.status in (409, 416):
        return True
    return answer.status in (400, 404) and bool(
        codes(answer) & (_SESSION_CODES | {"DIGEST_INVALID", "SIZE_INVALID"})
        or b"Stream uploads after first write" in answer.body
    )


def _registry_error(request: Request, reply: Answer | Failure) -> RegistryError:
    return _as_remote(error_for(request, reply))


def _as_remote(error: BuildkitError) -> RegistryError:
    return error if isinstance(error, RegistryError) else RegistryError(error.message, hint=error.hint, status=404)
