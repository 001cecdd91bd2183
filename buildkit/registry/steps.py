"""The vocabulary of the protocol machines: what they ask for, what they get, and when something is tried again.

A machine is a generator without I/O: it yields a step and is sent the reply. Exactly one loop
(``buildkit.registry.client``) carries steps out, so every machine can be run against a script of replies, and time,
sockets, files and credentials stay outside.
"""

from __future__ import annotations

import email.utils
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from types import MappingProxyType
from typing import Literal, TypeVar

from buildkit.blob import BlobState
from buildkit.registry.events import Event
from buildkit.registry.journal import ResumePoint

T = TypeVar("T")


class Headers(Mapping[str, str]):
    """Header fields by case-insensitive name; of a repeated field the last counts."""

    def __init__(self, fields: Mapping[str, str] = MappingProxyType({})) -> None:
        self._fields = {name.lower(): value for name, value in fields.items()}

    def __getitem__(self, name: str) -> str:
        return self._fields[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def number(self, name: str) -> int | None:
        """A field that is a plain, non-negative decimal number below 2**63; None for anything else."""
        text = self.get(name, "").strip()
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            return None
        return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Bytes ``[start, end)`` of the blob that is being uploaded, as a request body."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class Patience(Enum):
    """Which time-out holds for the answer."""

    NORMAL = "normal"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request. ``doing`` says in words what it is for; it goes into error messages.

    ``scopes`` are the token scopes that it needs (``repository:name:pull,push``). ``body`` may be sent again after a
    token was refreshed. ``authenticate`` is off for what must not carry the registry's credential: token requests.
    """

    doing: str
    method: str
    url: str
    scopes: tuple[str, ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Window | bytes | None = None
    patience: Patience = Patience.NORMAL
    authenticate: bool = True

    @property
    def size(self) -> int:
        """Of the body, in bytes."""
        return self.body.size if isinstance(self.body, Window) else len(self.body or b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server answered. ``body`` is decoded and cut to what an error message needs, or whole for manifests.

    ``sent`` is how much of the request's body went out, ``seconds`` how long the exchange took, ``at`` its Unix time.
    ``secrets`` are what no text about the answer may show: ours, which a server may repeat. ``version`` is HTTP's, as
    10 or 11; 0 where nobody has noted it.
    """

    status: int
    headers: Headers
    body: bytes
    sent: int
    seconds: float
    at: float
    secrets: tuple[str, ...] = field(default=(), repr=False)
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """No answer. ``final`` where trying again cannot help (a certificate that is not trusted, a name that is none).
    ``asked`` are seconds to wait, where somebody said so. ``verify`` is OpenSSL's number for why a certificate is not
    trusted (X509_V_ERR_*, x509_vfy.h)."""

    kind: Literal["connect", "tls", "dropped", "timeout", "garbage"]
    detail: str
    sent: int = 0
    seconds: float = 0.0
    final: bool = False
    asked: float | None = None
    verify: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Let ``seconds`` pass."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitBlob:
    """Wait until ``available`` bytes can be read or the blob ended; the reply is its BlobState. 0 just asks."""

    available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Pass an event to the observer."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Write the journal: where to resume, or None when there is nothing (any more)."""

    point: ResumePoint | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitLearned:
    """Remember for this host: ``accepted`` bytes went through after ``refused`` bytes did not (None: no limit left)."""

    accepted: int
    refused: int | None


Step = Request | Pause | AwaitBlob | Tell | Note | LimitLearned
Reply = Answer | Failure | BlobState | None
Steps = Generator[Step, Reply, T]


# Small generators, so that machines read as prose and the type checker knows what comes back.


def ask(request: Request) -> Steps[Answer | Failure]:
    reply = yield request
    assert isinstance(reply, Answer | Failure)
    return reply


def await_blob(available: int) -> Steps[BlobState]:
    reply = yield AwaitBlob(available=available)
    assert isinstance(reply, BlobState)
    return reply


# When to try again ---------------------------------------------------------------------------------------------------

RETRYABLE = frozenset({408, 425, 429, 499, 500, 502, 503, 504, 520, 521, 522, 523, 524})
"""Statuses after which the same request may succeed later. 501 is no such status, and 401 is the authenticator's."""

BASE_WAIT, LONGEST_BACKOFF = 0.5, 30.0


def is_retryable(reply: Answer | Failure) -> bool:
    return not reply.final if isinstance(reply, Failure) else reply.status in RETRYABLE


@dataclass(slots=True, kw_only=True)
class Budget:
    """``limit`` failures without progress are forgiven. Only bytes that were never acknowledged before refill it.

    That bounds every run: a server that takes a chunk, loses the session and takes the same chunk again earns nothing.
    """

    limit: int
    rng: Random
    max_wait: float
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.limit

    def refill(self) -> None:
        self.left = self.limit

    def spend(self) -> bool:
        """Take one; False when none is left."""
        if self.left <= 0:
            return False
        self.left -= 1
        return True

    def wait(self, reply: Answer | Failure | None) -> float:
        """Seconds until the next attempt: exponential with full jitter (AWS, "Exponential Backoff And Jitter"), at
        least what Retry-After asks for."""
        ceiling = min(LONGEST_BACKOFF, self.max_wait, BASE_WAIT * 2.0 ** min(self.limit - self.left, 16))
        backoff = self.rng.uniform(ceiling / 2, ceiling)
        asked = retry_after(reply) if isinstance(reply, Answer) else reply.asked if reply is not None else None
        return max(backoff, asked) if asked is not None else backoff


def come_back_later(wait: float) -> str:
    """The hint where somebody asks for a longer pause than ``max_wait``. Holding a terminal or a CI job for longer than
    that helps nobody; the journal keeps the place."""
    return f"it asks to come back in {wait:.0f} s, longer than this waits; run the same command then"


def retry_after(answer: Answer) -> float | None:
    """Seconds, from either form of Retry-After (RFC 9110, 10.2.3); None where there is none that makes sense."""
    text = answer.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        when = email.utils.parsedate_to_datetime(text)
        return max(0.0, when.timestamp() - answer.at)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
