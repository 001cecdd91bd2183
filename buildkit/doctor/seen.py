"""What was observed, as values without a verdict: what the edge of this package gathers and ``judge`` reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from buildkit.doctor.search import Interval
from buildkit.errors import BuildkitError
from buildkit.registry.quirks import Quirk
from buildkit.registry.steps import Answer, Failure, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSeen:
    """Bytes free at a place, and how many are asked for (None: nobody says)."""

    place: str
    free: int | None
    needed: int | None = None
    for_what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSeen:
    """The engine's words about itself; ``error`` where none answered. ``needed``: what is asked for cannot do without.

    ``gpu`` says how containers get GPUs there (a runtime's or devices' names); empty where nothing shows.
    """

    needed: bool
    wants_gpu: bool = False
    error: BuildkitError | None = None
    host: str = ""
    version: str = ""
    storage: str = ""
    gpu: tuple[str, ...] = ()
    disk: DiskSeen | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """One address of the host; ``error`` is empty where a connection came about."""

    address: str
    family: Literal["IPv4", "IPv6"]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSeen:
    """The handshake. ``verify`` is OpenSSL's number for a certificate that is not trusted (0: trusted), ``error`` any
    other failure. Times are Unix time; ``names`` are the host names that the certificate is for.

    ``verified`` is off for hosts that the user has put under ``--insecure``.
    """

    version: str = ""
    protocol: str = ""
    verify: int = 0
    words: str = ""
    error: str = ""
    names: tuple[str, ...] = ()
    not_before: float | None = None
    not_after: float | None = None
    verified: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WaySeen:
    """How far the way to ``origin`` goes. ``proxy``: connections are its business then, and are not looked at here.

    ``dns_error`` is empty where the name has addresses (or is one). ``now`` is this machine's Unix time.
    """

    origin: str
    host: str
    now: float
    proxy: str | None = None
    dns_error: str = ""
    connects: tuple[Connect, ...] = ()
    tls: TlsSeen | None = None

    @property
    def passable(self) -> bool:
        if self.proxy is not None:
            return True
        return not self.dns_error and any(not connect.error for connect in self.connects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request and what came of it."""

    request: Request
    reply: Answer | Failure

    @property
    def answer(self) -> Answer | None:
        return self.reply if isinstance(self.reply, Answer) else None

    @property
    def status(self) -> int:
        """0 where there was no answer."""
        return self.reply.status if isinstance(self.reply, Answer) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialSeen:
    """``source`` in words, None for anonymous. ``automatic``: it is the token that an Actions job is given.

    ``login`` is the greeting with the credential; ``error`` is what stopped it or the lookup. ``open``: the registry
    asks nobody.
    """

    source: str | None = None
    username: str = ""
    automatic: bool = False
    error: BuildkitError | None = None
    open: bool = False
    scheme: str = ""
    login: Exchange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSeen:
    """Opening an upload; ``readable`` is what a read with the same credential gave where that was refused."""

    scope: str
    opened: Exchange | None = None
    error: BuildkitError | None = None
    readable: bool | None = None

    @property
    def granted(self) -> bool:
        return self.error is None and self.opened is not None and self.opened.status in (201, 202, 204)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocationSeen:
    """Where the registry sends the upload on to, compared with the registry's own address."""

    form: Literal["relative", "absolute", "missing", "unusable"]
    error: BuildkitError | None = None
    host: str = ""
    other_host: bool = False
    other_scheme: str = ""
    other_port: int | None = None
    state: bool = False


Offset = Literal["right", "one high", "not told", "unsupported", "lost", "wrong", "failed", "not asked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksSeen:
    """How a session takes chunks.

    ``stored``: the first one was taken; else ``refusal`` is the exchange that says no. ``acknowledged`` and ``offset``
    say how well PATCH and GET tell what is stored. ``content_range``: what became of a chunk that claimed the wrong
    place. ``after_break``: what became of the session when a chunk broke off half-way; not tried where its address is
    ``signed`` for its size.
    """

    location: LocationSeen
    smallest: int | None = None
    largest: int | None = None
    stored: bool = False
    refusal: Exchange | None = None
    acknowledged: Offset = "not asked"
    offset: Offset = "not asked"
    content_range: Literal["honoured", "ignored", "unclear", "not asked"] = "not asked"
    after_break: Literal["goes on", "starts again", "poisoned", "signed", "unclear", "not asked"] = "not asked"
    quirks: tuple[Quirk, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One body that was sent, or begun: what became of it, how much of it went out, and in how many seconds."""

    size: int
    outcome: Literal["accepted", "refused", "broke"]
    sent: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSeen:
    """The measurement. ``stopped`` says why it went no further; ``by`` is the refusal nearest to the limit, or the
    failure that took its place (``broke``)."""

    known: Interval
    tries: tuple[Try, ...]
    stopped: Literal["settled", "budget", "time", "registry's maximum", "error"]
    by: Exchange | None = None
    broke: bool = False
    error: BuildkitError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeen:
    """Bytes of one layer as it would be sent (None: not known before it is compressed), and uncompressed."""

    label: str
    size: int | None
    tar_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSeen:
    name: str
    layers: tuple[LayerSeen, ...] = ()
    error: BuildkitError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsSeen:
    """Uploads that were opened and cancelled; ``left`` are those whose end the registry did not confirm."""

    opened: int = 0
    cancelled: int = 0
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsSeen:
    """Programs. ``builder`` is what would build ``recipe``, ``builder_error`` why nothing can."""

    recipe: str = ""
    git: bool = False
    revision: str | None = None
    dirty: bool = False
    clients: tuple[str, ...] = ()
    builder: str = ""
    builder_error: BuildkitError | None = None
    secret_error: BuildkitError | None = None
    missing: tuple[str, ...] = ()
