"""Throw-away uploads: opened, tried out, and cancelled, whatever happens in between.

No digest is ever committed, so nothing becomes a blob. What is sent comes out of one budget, which is drawn from as the
connection takes the bytes: it cannot be exceeded, whoever repeats a request.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from types import TracebackType
from typing import Any, BinaryIO, Self, cast
from urllib.parse import urlsplit, urlunsplit

from buildkit.blob import BlobState
from buildkit.doctor.bounded import Late, Running
from buildkit.doctor.seen import Exchange, LocationSeen, SessionsSeen
from buildkit.errors import BuildkitError, ProtocolError
from buildkit.registry import RegistryClient
from buildkit.registry.answers import codes, is_html, reason
from buildkit.registry.location import Origin, redact, resolve
from buildkit.registry.steps import Answer, Failure, Request, Window
from buildkit.registry.upload import push_scope

REQUEST_SECONDS = 20.0
"""For a request without a large body, from its first byte to its answer's last."""
CANCEL_SECONDS = 10.0
_NOT_REACHED = frozenset({429, 502, 503, 504})
"""An edge's answers for a registry that was not to be had at this moment."""
_STALE = frozenset({"BLOB_UPLOAD_INVALID"})
"""Distribution 2.8 answers this to a state token that does not fit the session's size, with 400 or 404. It means to
cancel the session then, and leaves it lying (seen with 2.8.2: its file is closed before it is to be removed)."""


class BudgetSpent(BuildkitError):
    """Another byte would be more than was allowed."""


class BrokenOff(BuildkitError):
    """The body ends here, as if the client had died."""


@dataclass(slots=True)
class Budget:
    """``total`` bytes may be sent as request bodies; ``spent`` were."""

    total: int
    spent: int = 0

    @property
    def left(self) -> int:
        return self.total - self.spent

    def draw(self, wanted: int) -> int:
        """As much of ``wanted`` as there is, taken. Raises BudgetSpent where there is nothing."""
        count = min(wanted, self.left)
        if wanted and not count:
            raise BudgetSpent("the budget for bytes to send is used up")
        self.spent += count
        return count


class ThrowAway:
    """A blob of bytes without meaning, which do not compress. ``stop`` ends each of its streams early, by BrokenOff."""

    label = "throw-away bytes"

    def __init__(self, size: int, budget: Budget, *, stop: int | None = None) -> None:
        self.size, self.budget, self.stop = size, budget, stop
        self.readers: list[_Reader] = []

    def state(self) -> BlobState:
        return BlobState(available=self.size)

    def wait(self, available: int, timeout: float) -> BlobState:  # noqa: ARG002  # complete: never waits
        return self.state()

    def window(self, start: int, end: int) -> BinaryIO:
        self.readers.append(_Reader(end - start, self))
        return cast(BinaryIO, self.readers[-1])


@cache
def _noise() -> bytes:
    """A megabyte that nothing on the way compresses; made once, where it is needed."""
    return os.urandom(2**20)


class _Reader(io.RawIOBase):
    def __init__(self, size: int, blob: ThrowAway) -> None:
        super().__init__()
        self._left, self._blob = size, blob
        self.given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        wanted = min(len(target), self._left, len(_noise()))
        if self._blob.stop is not None:
            wanted = min(wanted, self._blob.stop - self.given)
            if not wanted:
                raise BrokenOff("broken off on purpose")
        count = self._blob.budget.draw(wanted)
        target[:count] = memoryview(_noise())[:count]
        self._left -= count
        self.given += count
        return count


@dataclass(slots=True, kw_only=True)
class Session:
    """``url`` is the newest Location; ``ways`` are addresses by which it may be cancelled, best first."""

    url: str
    opened: Exchange
    location: LocationSeen
    ways: list[str]
    alive: bool = True
    told: list[LocationSeen] = field(default_factory=list)


class Uploads:
    """A context manager: on its way out, also by Ctrl-C, every session that is still open is cancelled."""

    def __init__(self, client: RegistryClient, repository: str, budget: Budget, say: Callable[[str], None]) -> None:
        self._client = client
        self._say = say
        self._scopes = (push_scope(repository),)
        self._url = f"{client.origin}/v2/{repository}/blobs/uploads/"
        self._sessions: list[Session] = []
        self._cancelled = 0
        self._left: list[str] = []
        self.budget = budget

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        for session in self._sessions:
            if session.alive:
                self.cancel(session)
        if self._left and error is not None:
            self._say(f"{len(self._left)} uploads could not be cancelled; the registry removes them after some days")

    def seen(self) -> SessionsSeen:
        return SessionsSeen(opened=len(self._sessions), cancelled=self._cancelled, left=tuple(self._left))

    # Requests --------------------------------------------------------------------------------------------------------

    def open(self) -> Session | Exchange:
        """A new session; the exchange where there is none. Raises AuthError and the like out of a token service."""
        work = Running(self._open)
        try:
            work.start()
            # More than its own time-outs, each of which may be followed by another request (a token).
            return work.result(REQUEST_SECONDS + 30)
        except Late:
            failure = Failure(kind="timeout", detail="no answer in time", final=True)
            return Exchange(request=self._request("POST", self._url, {"Content-Length": "0"}), reply=failure)
        except KeyboardInterrupt:
            # The registry may have opened it already: its answer names what has to be cancelled.
            with contextlib.suppress(Late, BuildkitError):
                work.result(CANCEL_SECONDS)
            raise

    def _open(self) -> Session | Exchange:
        request = self._request("POST", self._url, {"Content-Length": "0"})
        reply = self.ask(request, REQUEST_SECONDS)
        if isinstance(reply, Answer) and reply.status in _NOT_REACHED:
            reply = self.ask(request, REQUEST_SECONDS)
        exchange = Exchange(request=request, reply=reply)
        if not isinstance(reply, Answer) or reply.status not in (201, 202, 204):
            return exchange
        url, location, ways = self._located(reply, request.url)
        session = Session(url=url, opened=exchange, location=location, ways=ways, told=[location])
        self._sessions.append(session)
        return session

    def _request(self, method: str, url: str, headers: dict[str, str], doing: str = "opening an upload") -> Request:
        return Request(doing=doing, method=method, url=url, scopes=self._scopes, headers=headers)

    def ask(self, request: Request, seconds: float, blob: ThrowAway | None = None) -> Answer | Failure:
        """One exchange in at most about ``seconds``."""
        with self._client.within(seconds) as late:
            reply = self._client.ask(request, blob)
        if late() and isinstance(reply, Failure):
            return replace(reply, kind="timeout", detail=f"no whole answer within {seconds:.0f} s")
        return reply

    def patch(
        self,
        session: Session,
        size: int,
        *,
        start: int,
        seconds: float = REQUEST_SECONDS,
        stop: int | None = None,
    ) -> Exchange | None:
        """Send ``size`` bytes that claim to begin at ``start``. None where the body was broken off (``stop``), and
        where the budget does not hold all of it: some sessions cannot be cancelled after half a body."""
        if size > self.budget.left:
            return None
        blob = ThrowAway(size, self.budget, stop=stop)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(size),
            "Content-Range": f"{start}-{start + size - 1}",
        }
        request = replace(
            self._request("PATCH", session.url, headers, f"sending {size} bytes of no meaning"),
            body=Window(start=0, end=size),
        )
        try:
            reply = self.ask(request, seconds, blob)
        except (BrokenOff, BudgetSpent):
            return None
        if len(blob.readers) == 1:
            # Read from the blob, but not taken by the connection before it was refused.
            self.budget.spent -= max(0, blob.readers[0].given - reply.sent)
        self._follow(session, request, reply)
        return Exchange(request=request, reply=reply)

    def status(self, session: Session) -> Exchange:
        request = self._request("GET", session.url, {}, "asking how much is stored")
        reply = self.ask(request, REQUEST_SECONDS)
        if isinstance(reply, Answer) and reply.status in (200, 202, 204):
            self._follow(session, request, reply)
        return Exchange(request=request, reply=reply)

    def cancel(self, session: Session) -> None:
        """DELETE on the session, by the best address that is known for it. Never raises for what a server does."""
        session.alive = False
        told = "the registry told no address for it"
        # Each twice: a request that got lost, or an edge's page, says nothing about the session.
        silent: set[str] = set()
        for url in (url for url in dict.fromkeys((session.url, *session.ways)) if url for _ in range(2)):
            if urlsplit(url).netloc in silent:
                continue
            try:
                reply = self.ask(self._request("DELETE", url, {}, "cancelling the upload"), CANCEL_SECONDS)
            except BuildkitError as error:
                told = error.message
                continue
            if isinstance(reply, Answer) and _is_gone(reply):
                self._cancelled += 1
                return
            told = reason(reply)
            if isinstance(reply, Failure) and reply.kind in ("timeout", "connect"):
                silent.add(urlsplit(url).netloc)  # who does not answer does so by any path; another host may
        self._left.append(told)

    # Locations -------------------------------------------------------------------------------------------------------

    def _follow(self, session: Session, request: Request, reply: Answer | Failure) -> None:
        if not isinstance(reply, Answer) or not 200 <= reply.status < 300 or not reply.headers.get("location"):
            return
        url, location, ways = self._located(reply, request.url)
        session.told.append(location)
        session.url = url or session.url
        session.ways = [*ways, *session.ways]

    def _located(self, answer: Answer, request_url: str) -> tuple[str, LocationSeen, list[str]]:
        """Where it goes on (empty: nowhere that can be used), what is to be said of it, and how to get rid of it."""
        origin = self._client.origin
        raw = answer.headers.get("location", "")
        ways: list[str] = []
        failed: BuildkitError | None = None
        identifier = answer.headers.get("docker-upload-uuid", "")
        by_id = self._url + identifier if identifier.isascii() and identifier.replace("-", "").isalnum() else ""
        if not raw:
            return by_id, LocationSeen(form="missing"), []
        try:
            allow = self._client.options.plain_http is True
            url, _ = resolve(raw, request_url=request_url, origin=origin, allow_plain=allow)
        except BuildkitError as error:
            url, failed = "", error
        parts = _split(raw)
        if parts is not None:
            # A registry that names itself wrongly still knows the path.
            ways.append(urlunsplit((origin.scheme, origin.netloc, parts.path, parts.query, "")))
        ways.append(by_id)
        return url, _compared(raw, request_url, origin, failed), [way for way in ways if way]


def _is_gone(answer: Answer) -> bool:
    """Whether the answer to a DELETE says that the session is not there any more."""
    if answer.status == 404:
        return not is_html(answer) and not codes(answer) & _STALE
    return answer.status in (200, 202, 204)


def _split(raw: str) -> Any:
    try:
        parts = urlsplit(raw)
    except ValueError:
        return None
    return parts if parts.path.startswith("/") and raw.isprintable() and " " not in raw else None


def _compared(raw: str, request_url: str, origin: Origin, error: BuildkitError | None) -> LocationSeen:
    """A Location beside the registry's own address, as a client that follows it to the letter would see it."""
    try:
        parts = urlsplit(raw)
        if not parts.netloc:
            if error is not None:
                return LocationSeen(form="unusable", error=error)
            return LocationSeen(form="relative", state=bool(parts.query))
        target = Origin.of(f"{parts.scheme or urlsplit(request_url).scheme}://{parts.netloc}")
    except (ValueError, ProtocolError) as failure:
        words = error or (failure if isinstance(failure, BuildkitError) else ProtocolError("a Location that is no URL"))
        return LocationSeen(form="unusable", error=words)
    return LocationSeen(
        form="absolute",
        error=error,
        host=redact(str(target)),
        other_host=target.host != origin.host,
        other_scheme=target.scheme if target.scheme != origin.scheme else "",
        other_port=target.port if target.port != origin.port else None,
        state=bool(parts.query),
    )
