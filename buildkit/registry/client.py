"""A registry as the rest of the package sees it; and the one loop that carries the protocol machines' steps out.

``RegistryClient`` holds what a push shares: connections, tokens, learned limits, the journal. It is safe for use from
several threads; an upload runs in the thread that calls ``upload``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from filelock import Timeout

from buildkit.blob import Blob
from buildkit.errors import (
    BuildkitError,
    CancelledError,
    DigestMismatchError,
    ProtocolError,
    UnreachableError,
    one_line,
)
from buildkit.model import Descriptor, Digest, Reference, load_json_object
from buildkit.registry import manifests, referrers
from buildkit.registry.answers import describe, error_for
from buildkit.registry.auth import Authenticator, TokenUnavailable, parse_challenges
from buildkit.registry.clock import CancelToken, Clock, SystemClock
from buildkit.registry.contact import GREETING_TIMEOUT, Contacts
from buildkit.registry.credentials import Credentials, DefaultCredentials
from buildkit.registry.events import (
    JournalFailed,
    Observer,
    Silent,
    UploadFailed,
    UploadFinished,
    UploadReport,
    WaitingForPeer,
)
from buildkit.registry.journal import Journal, JournalEntry
from buildkit.registry.limits import LearnedLimit, LimitStore
from buildkit.registry.location import Origin, resolve
from buildkit.registry.manifests import FetchedManifest, Patient
from buildkit.registry.options import RegistryOptions
from buildkit.registry.secrets import KnownSecrets
from buildkit.registry.state import state_dir
from buildkit.registry.steps import (
    Answer,
    AwaitBlob,
    Failure,
    LimitLearned,
    Note,
    Patience,
    Pause,
    Reply,
    Request,
    Step,
    Steps,
    Tell,
    Window,
    is_retryable,
    retry_after,
)
from buildkit.registry.transport import BLOCK, FileBody, Transport, TransportError
from buildkit.registry.upload import (
    Presence,
    Unknown,
    Upload,
    UploadPlan,
    blob_url,
    head_blob,
    presence,
    pull_scope,
    push_scope,
)

T = TypeVar("T")

USER_AGENT = "buildkit"
_MAX_REDIRECTS = 5
_POLL = 0.2
"""Seconds between two looks at a blob that grows or a lock that is held; bounds how long a stop goes unseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryInfo:
    """What ``ping`` found out: the registry's name as far as it shows, and how it wants to be authenticated.

    ``authenticated``: it asked for a credential, and took ours. An open registry asks for none.
    """

    origin: str
    kind: str
    version: str | None
    realm: str | None
    authenticated: bool


class RegistryClient:
    """One registry, ``host[:port]``; a context manager that closes its connections."""

    def __init__(
        self,
        registry: str,
        *,
        credentials: Credentials | None = None,
        options: RegistryOptions | None = None,
        clock: Clock | None = None,
        observer: Observer | None = None,
        cancel: CancelToken | None = None,
        state: str | os.PathLike[str] | None = None,
        rng: Random | None = None,
    ) -> None:
        """``state`` is the folder for journal and learned limits; None means the user's. ``rng`` is for jitter."""
        self.registry = registry
        self.options = options or RegistryOptions()
        self.origin = Origin.of_registry(registry, plain_http=self.options.plain_http)
        self._credentials = credentials or DefaultCredentials()
        self._clock = clock or SystemClock()
        self._observer = observer or Silent()
        self._cancel = cancel or CancelToken()
        self._rng = rng or Random()
        folder = Path(state_dir(state))
        self._journal = Journal(folder)
        self._limits = LimitStore(folder)
        self._journaled = False
        self._secrets = KnownSecrets()
        self._contacts = Contacts()
        self._transport = Transport(self.options, self._clock)
        self._auth = Authenticator(
            registry=registry,
            origin=self.origin,
            credential=lambda: self._credentials.lookup(registry),
            monotonic=self._clock.monotonic,
        )
        self._cancel.on_cancel(self._transport.abort)

    def close(self) -> None:
        """Idempotent. Old entries of the journal are removed here rather than at the start: what this run wanted to
        resume, however old, it has resumed."""
        self._transport.close()
        if self._journaled:
            self._journaled = False
            # Housekeeping: what cannot be removed today is in nobody's way.
            with contextlib.suppress(OSError, Timeout):
                self._journal.prune(self._clock.now())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()

    # Operations ------------------------------------------------------------------------------------------------------

    def ping(self, *, repository: str | None = None, retries: int = 2) -> RegistryInfo:
        """Is there a registry, and does it know us? Raises UnreachableError, AuthError or ProtocolError.

        With ``repository`` the credential is tried for pushing there (as far as a token shows it).
        """
        request = Request(
            doing=f"greeting the registry {self.registry}",
            method="GET",
            url=f"{self.origin}/v2/",
            scopes=(push_scope(repository),) if repository else (),
        )
        answer = self._run(self._patient(retries).ask(request))
        if answer.status != 200:
            raise error_for(request, answer)
        if "html" in answer.headers.get("content-type", "").lower():
            raise ProtocolError(f"{describe(request, answer)}: not a registry", hint="check the address")
        kind, version = self.identify(answer)
        realm = self._auth.realm
        return RegistryInfo(
            origin=str(self.origin),
            kind=kind,
            version=version,
            realm=self._secrets.masked(realm) if realm is not None else None,
            authenticated=self._auth.tried,
        )

    def identify(self, answer: Answer) -> tuple[str, str | None]:
        """The registry's kind and version, as far as the answer to its greeting (and a Gitea itself) tells them."""
        realm = self._auth.realm or ""
        if not realm:
            challenges = parse_challenges(answer.headers.get("www-authenticate", ""))
            realm = next((c.parameters.get("realm", "") for c in challenges if c.scheme == "bearer"), "")
        if urlsplit(realm).path == "/v2/token":
            # Gitea and Forgejo: an open endpoint tells the version, on which the Range variants depend.
            for path, kind in (("/api/forgejo/v1/version", "Forgejo"), ("/api/v1/version", "Gitea")):
                request = Request(
                    doing="asking for the version",
                    method="GET",
                    url=f"{self.origin}{path}",
                    scopes=(),
                    authenticate=False,
                )
                reply = self._send(request, None)
                if isinstance(reply, Answer) and reply.status == 200:
                    with contextlib.suppress(BuildkitError):
                        version = load_json_object(reply.body, where="version", limit=2**16).get("version")
                        if isinstance(version, str):
                            return kind, one_line(self._secrets.masked(version), 60)
            return "Gitea or Forgejo", None
        if "registry/2.0" in answer.headers.get("docker-distribution-api-version", ""):
            return "distribution or compatible", None
        return "unknown", None

    def head_blob(self, repository: str, digest: Digest, *, retries: int | None = None) -> Presence:
        """Present, Missing or Unknown. Raises AuthError, and CancelledError; never anything for a passing failure."""
        request = head_blob(self.origin, repository, digest, pull_scope(repository))
        try:
            answer = self._run(self._patient(retries).ask(request))
        except UnreachableError as error:
            return Unknown(error.message)
        if answer.status in (401, 403):
            raise error_for(request, answer)
        return presence(answer, digest)

    def upload(
        self, repository: str, blob: Blob, *, mount_from: Sequence[str] = (), key: str | None = None
    ) -> UploadReport:
        """Make the registry hold ``blob``; returns when it does, raises BuildkitError when it cannot be done.

        The blob may still be growing. ``key`` names its content while its digest is unknown (diff_id and codec, say):
        a later run with the same key goes on in the same session. Without it only complete blobs are resumable.
        Another upload of the same blob, in this process or another, is waited for.
        """
        state = blob.state()
        name = key or (str(state.descriptor.digest) if state.descriptor is not None else None)
        started = self._clock.monotonic()
        try:
            with self._owned(repository, name, blob.label) as entry:
                report = self._upload(repository, blob, mount_from, entry)
        except BuildkitError as error:
            self._observer.notify(UploadFailed(blob=blob.label, reason=error.message))
            raise
        seconds = self._clock.monotonic() - started
        self._observer.notify(UploadFinished(blob=blob.label, digest=report.digest, size=report.size, seconds=seconds))
        return report

    def _upload(
        self, repository: str, blob: Blob, mount_from: Sequence[str], entry: JournalEntry | None
    ) -> UploadReport:
        options, now = self.options, self._clock.now()
        probe = options.probe_after
        plan = UploadPlan(
            label=blob.label,
            origin=self.origin,
            repository=repository,
            options=options,
            chunk=self._limits.chunk(self.registry, options.effective_chunk, now=now, probe_after=probe),
            largest_body=self._limits.chunk(self.registry, options.body_limit, now=now, probe_after=probe),
            rng=Random(self._rng.random()),
            mount_from=tuple(source for source in mount_from if source != repository),
            resume=entry.load() if entry is not None else None,
        )
        return self._run(Upload(plan).run(), blob, entry)

    @contextlib.contextmanager
    def _owned(self, repository: str, key: str | None, label: str) -> Iterator[JournalEntry | None]:
        """The journal's entry, locked; None where nothing can be noted (no key, or the disk refuses)."""
        entry = None
        if key is not None:
            entry = self._journal.entry(registry=self.registry, repository=repository, key=key)
            told = False
            try:
                self._journaled = True
                while not entry.try_lock():
                    if not told:
                        told = True
                        self._observer.notify(WaitingForPeer(blob=label))
                    self._cancel.check()
                    self._clock.sleep(_POLL, self._cancel)
            except OSError as error:
                self._observer.notify(JournalFailed(blob=label, reason=error.strerror or "unwritable"))
                entry = None
        try:
            yield entry
        finally:
            if entry is not None:
                entry.unlock()

    def head_manifest(self, reference: Reference) -> Digest | None:
        """The digest that the registry names for the reference; None where there is no such manifest."""
        return self._run(manifests.head(self.origin, reference, self._patient()))

    def get_manifest(self, reference: Reference) -> FetchedManifest:
        """Raises NotFoundError, DigestMismatchError, AuthError, UnreachableError or ProtocolError."""
        return self._run(manifests.get(self.origin, reference, self._patient()))

    def put_manifest(self, reference: Reference, raw: bytes, media_type: str, *, retries: int | None = None) -> Digest:
        """Returns the digest once the registry holds exactly ``raw`` under ``reference``."""
        return self._run(self._putting(reference, raw, media_type, retries).run())

    def put_referrer(self, reference: Reference, raw: bytes, media_type: str) -> bool:
        """Put a manifest with a ``subject``. True where the registry says that it lists it as a referrer."""
        machine = self._putting(reference, raw, media_type)
        self._run(machine.run())
        return machine.subject_listed

    def _putting(
        self, reference: Reference, raw: bytes, media_type: str, retries: int | None = None
    ) -> manifests.PutManifest:
        return manifests.PutManifest(
            origin=self.origin, reference=reference, raw=raw, media_type=media_type, patient=self._patient(retries)
        )

    def referrers(self, reference: Reference) -> tuple[Descriptor, ...]:
        """The manifests that refer to ``reference`` (by digest): the registry's own list, or the index that clients
        keep where it has none. Raises ProtocolError for anything that is no list."""
        return self._run(referrers.referrers(self.origin, reference, self._patient()))

    def own_referrers(self, reference: Reference) -> tuple[Descriptor, ...] | None:
        """The registry's own list; None where it keeps none."""
        return self._run(referrers.from_registry(self.origin, reference, self._patient()))

    def list_referrers(
        self,
        subject: Reference,
        added: Sequence[Descriptor],
        *,
        spare: Callable[[Mapping[str, Any]], bool] = lambda _: False,
    ) -> bool:
        """Keep the index of referrers of a registry that keeps none itself; see ``referrers.AddToIndex``. False where
        all of ``added`` was there already."""
        machine = referrers.AddToIndex(
            origin=self.origin,
            subject=subject,
            added=tuple(added),
            patient=self._patient(),
            rng=Random(self._rng.random()),
            spare=spare,
        )
        return self._run(machine.run())

    def pause(self, seconds: float) -> None:
        """Let time pass, on this client's clock. Raises CancelledError where the user stops meanwhile."""
        self._clock.sleep(seconds, self._cancel)
        self._cancel.check()

    def delete_manifest(self, reference: Reference) -> bool:
        """False where it was not there."""
        return self._run(manifests.delete(self.origin, reference, self._patient()))

    def probe_upload(self, repository: str) -> None:
        """Can this credential write here? Opens an upload session and deletes it. Raises AuthError and the like."""
        patient = self._patient(2)
        scopes = (push_scope(repository),)
        request = Request(
            doing=f"trying to open an upload in {repository}",
            method="POST",
            url=f"{self.origin}/v2/{repository}/blobs/uploads/",
            scopes=scopes,
            headers={"Content-Length": "0"},
        )
        answer = self._run(patient.ask(request))
        if answer.status not in (201, 202, 204):
            raise error_for(request, answer)
        location = answer.headers.get("location")
        if location:
            with self._discreet():
                url, _ = resolve(location, request_url=request.url, origin=self.origin)
            self._send(Request(doing="cancelling the upload", method="DELETE", url=url, scopes=scopes), None)

    def ask(self, request: Request, blob: Blob | None = None) -> Answer | Failure:
        """One exchange as it comes: authenticated where the request wants it, neither repeated nor followed, and
        whatever the answer is, it is no error here. ``blob`` is what a ``Window`` in the request is of.

        Raises AuthError and ProtocolError where the token service refuses, BuildkitError out of ``blob``.
        """
        with self._discreet():
            return self._send(request, blob)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[Callable[[], bool]]:
        """What is asked in this block ends after ``seconds``, even if a server drips its answer byte by byte: its
        connections are cut then, and their requests fail. Gives a function that tells whether it came to that.

        For a client that one thread uses at a time: other threads' requests would be cut, too.
        """
        done, late = threading.Event(), threading.Event()

        def watch() -> None:
            wait = seconds
            while not done.wait(wait):
                late.set()
                self._transport.cut()  # again and again: a request may be repeated over a new connection
                wait = _POLL

        thread = threading.Thread(target=watch, name="deadline", daemon=True)
        thread.start()
        try:
            yield late.is_set
        finally:
            done.set()
            thread.join()

    def learn_limit(self, *, accepted: int, refused: int | None) -> None:
        """Remember what a measurement of the way found, as a push would: ``accepted`` bytes went through, ``refused``
        did not. None means that nothing was refused, which lifts a smaller limit that was remembered."""
        self._learn(LimitLearned(accepted=accepted, refused=refused), None)

    @property
    def learned_limit(self) -> LearnedLimit | None:
        """What earlier pushes or measurements found out about this host."""
        return self._limits.get(self.registry)

    def read_blob(self, repository: str, descriptor: Descriptor, *, start: int = 0) -> Iterator[bytes]:
        """The blob's bytes from ``start``, in pieces; a dropped connection goes on where it broke.

        Read from 0 to the end, it is proven: size and digest are compared before the last piece is given out, and
        DigestMismatchError is raised instead where they differ. From another ``start`` the size alone is checked.
        """
        return self._read_blob(repository, descriptor, start)

    def _read_blob(self, repository: str, descriptor: Descriptor, start: int) -> Iterator[bytes]:
        what = f"blob {descriptor.digest} of {self.registry}/{repository}"
        hasher = hashlib.new(descriptor.digest.algorithm) if start == 0 else None
        position = start
        held = b""
        patient = self._patient()
        while position < descriptor.size:
            request = Request(
                doing=f"reading {what}",
                method="GET",
                url=blob_url(self.origin, repository, descriptor.digest),
                scopes=(pull_scope(repository),),
                headers={"Range": f"bytes={position}-"} if position else {},
            )
            before = position
            try:
                for piece in self._get(request, position, descriptor.size):
                    position += len(piece)
                    if position > descriptor.size:
                        raise DigestMismatchError(f"{what} has more than the {descriptor.size} bytes it should have")
                    if hasher is not None:
                        hasher.update(piece)
                    if held:
                        yield held
                    held = piece
                if position < descriptor.size:
                    raise TransportError(Failure(kind="dropped", detail="the connection ended before the last byte"))
            except TransportError as error:
                self._cancel.check()
                if position > before:
                    patient.budget.refill()
                self._run(patient.pause(request, error.failure))
        if hasher is not None and hasher.hexdigest() != descriptor.digest.hex:
            raise DigestMismatchError(f"{what} has digest {descriptor.digest.algorithm}:{hasher.hexdigest()}")
        if held:
            yield held

    def _get(self, request: Request, position: int, size: int) -> Iterator[bytes]:
        """The body of a GET from ``position``, redirects and a refused token handled; TransportError for the rest."""
        url = request.url
        used: str | None = None
        renewed = False
        for _ in range(_MAX_REDIRECTS + 2):
            own = Origin.of(url) == self.origin
            if own and not renewed:
                used = self._for_stream(self._auth.header(request.scopes))
            headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **request.headers}
            if own and used is not None:
                headers["Authorization"] = used
            with self._stream(url, headers) as (answer, read):
                self._cancel.check()
                if answer.status in (301, 302, 303, 307, 308):
                    url = self._redirected(request, answer, url)
                    continue
                if answer.status == 401 and own and not renewed:
                    renewed = True
                    used = self._for_stream(self._auth.refused(request, answer, used))
                    if used is not None:
                        continue
                if is_retryable(answer):
                    raise TransportError(
                        Failure(
                            kind="dropped",
                            detail=describe(request, answer),
                            seconds=answer.seconds,
                            asked=retry_after(answer),
                        )
                    )
                if answer.status not in (200, 206):
                    raise error_for(request, answer)
                skip = position if answer.status == 200 else 0
                if answer.status == 206 and not answer.headers.get("content-range", "").startswith(
                    f"bytes {position}-"
                ):
                    raise ProtocolError(f"{describe(request, answer)}: another range than asked for")
                left = size - position + 1
                while left > 0 and (piece := read(min(BLOCK, left + skip))):
                    self._cancel.check()
                    if skip:
                        cut = min(skip, len(piece))
                        skip, piece = skip - cut, piece[cut:]
                    left -= len(piece)
                    if piece:
                        yield piece
                return
        raise ProtocolError(f"{request.doing}: redirected more than {_MAX_REDIRECTS} times")

    def _for_stream(self, steps: Steps[T]) -> T:
        try:
            return self._run(steps)
        except TokenUnavailable as error:
            raise TransportError(error.failure) from error

    def _redirected(self, request: Request, answer: Answer, url: str) -> str:
        location = answer.headers.get("location")
        if not location:
            raise error_for(request, answer)
        with self._discreet():
            allow = self.options.plain_http is True
            return resolve(location, request_url=url, origin=self.origin, allow_plain=allow)[0]

    @contextlib.contextmanager
    def _stream(self, url: str, headers: dict[str, str]) -> Iterator[tuple[Answer, Callable[[int], bytes]]]:
        """As Transport's; what never answered is given less patience, here as in ``_exchange``."""
        origin = Origin.of(url)
        patience = self.options.answer_timeout
        self._secrets.learn(headers)
        opened = False
        try:
            if not self._contacts.is_met(origin):
                patience = min(patience, GREETING_TIMEOUT)
            with self._transport.stream(url, headers, answer_timeout=patience) as (answer, read):
                opened = True
                self._contacts.answered(origin)
                yield replace(answer, secrets=self._secrets.forms), read
        except TransportError as error:
            if opened:
                raise
            raise TransportError(self._contacts.judged(origin, error.failure)) from error

    @contextlib.contextmanager
    def _discreet(self) -> Iterator[None]:
        """Errors that quote a server leave without the secrets that it may have repeated."""
        try:
            yield
        except BuildkitError as error:
            error.message = self._secrets.masked(error.message)
            error.hint = self._secrets.masked(error.hint) if error.hint else None
            error.args = (error.message,)
            raise

    # The loop --------------------------------------------------------------------------------------------------------

    def _patient(self, retries: int | None = None) -> Patient:
        return Patient.of(
            self.registry,
            retries=self.options.retries if retries is None else retries,
            rng=Random(self._rng.random()),
            max_wait=self.options.max_wait,
        )

    def _run(self, steps: Steps[T], blob: Blob | None = None, entry: JournalEntry | None = None) -> T:
        """Carry a machine's steps out until it returns. The only place that sends, sleeps, waits and writes."""
        with self._discreet():
            return self._loop(steps, blob, entry)

    def _loop(self, steps: Steps[T], blob: Blob | None, entry: JournalEntry | None) -> T:
        try:
            step = next(steps)
            while True:
                self._cancel.check()
                try:
                    reply = self._carry_out(step, blob, entry)
                except CancelledError:
                    raise
                except BuildkitError as error:
                    # The machine may have something to tidy up: a session that no later run can use.
                    step = steps.throw(error)
                    continue
                self._cancel.check()
                step = steps.send(reply)
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            steps.close()

    def _carry_out(self, step: Step, blob: Blob | None, entry: JournalEntry | None) -> Reply:
        match step:
            case Request():
                return self._send(step, blob)
            case Pause():
                self._clock.sleep(step.seconds, self._cancel)
            case AwaitBlob():
                assert blob is not None
                state = blob.state()
                while state.available < step.available and not state.ended:
                    self._cancel.check()
                    state = blob.wait(step.available, _POLL)
                return state
            case Tell():
                self._observer.notify(step.event)
            case Note():
                self._note(step, blob, entry)
            case LimitLearned():
                self._learn(step, blob)
        return None

    def _send(self, request: Request, blob: Blob | None) -> Answer | Failure:
        """One request, with what authentication adds: a token before, and one replay after a 401."""
        # Never to another host: an upload's Location may point anywhere.
        if not request.authenticate or Origin.of(request.url) != self.origin:
            return self._exchange(request, blob, None)
        try:
            used = self._run(self._auth.header(request.scopes))
            reply = self._exchange(request, blob, used)
            if isinstance(reply, Answer) and reply.status == 401:
                better = self._run(self._auth.refused(request, reply, used))
                if better is not None:
                    reply = self._exchange(request, blob, better)
        except TokenUnavailable as error:
            return error.failure
        return reply

    def _exchange(self, request: Request, blob: Blob | None, authorization: str | None) -> Answer | Failure:
        headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "gzip", **request.headers}
        if authorization is not None:
            headers["Authorization"] = authorization
        body: FileBody | bytes | None = None
        if isinstance(request.body, Window):
            window = request.body
            assert blob is not None
            source = blob
            body = FileBody(lambda: source.window(window.start, window.end), window.size)
        elif request.body is not None:
            body = request.body
        patience = {
            Patience.NORMAL: self.options.answer_timeout,
            Patience.CLOSING: self.options.closing_timeout,
        }[request.patience]
        origin = Origin.of(request.url)
        # Large bodies and closing requests take their time, also at a host that an upload was sent on to.
        greeting = (
            not self._contacts.is_met(origin)
            and not isinstance(request.body, Window)
            and request.patience is Patience.NORMAL
        )
        self._secrets.learn(headers, body if isinstance(body, bytes) and not request.authenticate else None)
        reply = self._transport.exchange(
            request.method,
            request.url,
            headers,
            body,
            answer_timeout=min(patience, GREETING_TIMEOUT) if greeting else patience,
            **({"limit": manifests.MAX_FETCHED} if request.method == "GET" and _is_document(request.url) else {}),
        )
        # A connection that broke because the user stopped is no failure to retry.
        self._cancel.check()
        if isinstance(reply, Answer):
            self._contacts.answered(origin)
            return replace(reply, secrets=self._secrets.forms)
        return self._contacts.judged(origin, reply) if greeting or self._contacts.is_met(origin) else reply

    def _note(self, step: Note, blob: Blob | None, entry: JournalEntry | None) -> None:
        if entry is None or blob is None:
            return
        try:
            if step.point is None:
                entry.clear()
            else:
                descriptor = blob.state().descriptor
                entry.save(step.point, digest=str(descriptor.digest) if descriptor else None, now=self._clock.now())
        except OSError as error:
            # The journal saves time; losing it must not lose the push.
            self._observer.notify(JournalFailed(blob=blob.label, reason=error.strerror or "unwritable"))

    def _learn(self, step: LimitLearned, blob: Blob | None) -> None:
        known = self._limits.get(self.registry)
        try:
            if step.refused is not None:
                self._limits.learn(self.registry, accepted=step.accepted, refused=step.refused, now=self._clock.now())
            elif known is not None and step.accepted > known.accepted:
                if step.accepted >= known.refused:
                    self._limits.forget(self.registry)
                else:
                    self._limits.learn(
                        self.registry, accepted=step.accepted, refused=known.refused, now=self._clock.now()
                    )
        except (OSError, Timeout) as error:
            label = blob.label if blob is not None else self.registry
            self._observer.notify(JournalFailed(blob=label, reason=one_line(str(error), 100)))


def _is_document(url: str) -> bool:
    """Whether the answer is one that is read whole: a manifest, or a list of referrers."""
    return "/manifests/" in url or "/referrers/" in url
