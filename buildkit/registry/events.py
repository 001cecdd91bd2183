"""What happens to uploads, as values, for whoever shows it: a terminal, a CI log, a report.

``blob`` is the upload's label. Offsets and sizes are bytes, and count what the registry acknowledged, not what went
into a socket: a proxy may hold a whole body before it passes it on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from buildkit.model import Digest
from buildkit.registry.quirks import Quirk


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    blob: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadStarted(Event):
    """A session is open (or one request will do). ``size`` is None while the blob still grows."""

    size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesAcknowledged(Event):
    """The registry holds bytes ``[0, offset)``. ``sent`` bytes took ``seconds``; ``size`` is None while unknown."""

    offset: int
    size: int | None
    sent: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrying(Event):
    """``reason`` is one line; the next attempt follows after ``wait`` seconds; ``left`` retries remain."""

    reason: str
    wait: float
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """Going on at ``offset`` within a session; ``earlier_run`` if another process had begun it."""

    offset: int
    earlier_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted(Event):
    """The blob starts again from its first byte; ``lost`` acknowledged bytes have to be sent again."""

    reason: str
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFound(Event):
    """A body of ``refused`` bytes was refused by ``who``; ``chunk`` bytes are tried next."""

    refused: int
    chunk: int
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuirkMet(Event):
    quirk: Quirk


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingForPeer(Event):
    """Another push (here or in another process) is uploading this very blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFailed(Event):
    """The local disk did not take the note; the push goes on and would not be resumable from here."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadSkipped(Event):
    """Nothing (more) has to be sent; ``why`` is ``exists`` or ``mounted``."""

    why: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFinished(Event):
    """The blob is in the registry."""

    digest: Digest
    size: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFailed(Event):
    reason: str


class Observer(Protocol):
    """Called from the uploading threads, several at once: thread-safe by contract, and quick."""

    def notify(self, event: Event, /) -> None: ...


class Silent:
    """An observer that shows nothing."""

    def notify(self, event: Event, /) -> None:
        del event


class Outcome(StrEnum):
    UPLOADED = "uploaded"
    RESUMED = "resumed"
    EXISTS = "exists"
    MOUNTED = "mounted"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadReport:
    """The story of one blob. Sizes in bytes, ``seconds`` by the clock that the client was given.

    ``bytes_sent`` counts body bytes that went into the socket, answered or not; ``bytes_resent`` those of them that
    were sent before, in this run. ``resumed_at`` is the offset that an earlier run had reached (0: none).
    """

    label: str
    digest: Digest
    size: int
    outcome: Outcome
    requests: int = 0
    chunks: int = 0
    chunk_size: int = 0
    bytes_sent: int = 0
    bytes_resent: int = 0
    resumed_at: int = 0
    retries: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    resumes: int = 0
    limit_learned: int | None = None
    quirks: tuple[Quirk, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        return {
            "label": self.label,
            "digest": str(self.digest),
            "size": self.size,
            "outcome": str(self.outcome),
            "requests": self.requests,
            "chunks": self.chunks,
            "chunk_size": self.chunk_size,
            "bytes_sent": self.bytes_sent,
            "bytes_resent": self.bytes_resent,
            "resumed_at": self.resumed_at,
            "retries": list(self.retries),
            "restarts": list(self.restarts),
            "resumes": self.resumes,
            "limit_learned": self.limit_learned,
            "quirks": [str(quirk) for quirk in self.quirks],
            "seconds": round(self.seconds, 3),
        }
