"""URLs that a server hands out, and the ``Range`` that it answers with. Pure.

Sources: distribution-spec 1.1 "Pushing a blob in chunks"; RFC 3986 section 5 for relative references.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, quote, urljoin, urlsplit, urlunsplit

from buildkit.errors import ProtocolError, UsageError

MAX_LOCATION = 16 * 2**10
_RANGE = re.compile(r"(?:bytes[ =])?\s*(\d{1,19})-(-?\d{1,19})(?:/\S*)?", re.ASCII)
_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Scheme, host (lower case, IPv6 without brackets) and port."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """Raises ProtocolError unless ``url`` is an absolute http or https URL with a host."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ProtocolError(f"{url[:200]!r} is not a URL") from error
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise ProtocolError(f"{url[:200]!r} is not an http or https URL")
        return cls(
            scheme=parts.scheme,
            host=parts.hostname.lower(),
            port=_DEFAULT_PORTS[parts.scheme] if port is None else port,
        )

    @classmethod
    def of_registry(cls, registry: str, *, plain_http: bool | None) -> Origin:
        """``host[:port]`` as in a reference. Plain http for loopback only, unless ``plain_http`` decides it."""
        try:
            host = urlsplit(f"//{registry}").hostname or ""
            origin = cls.of(f"http://{registry}")
        except (ProtocolError, ValueError) as error:
            raise UsageError(f"{registry!r} is not a registry host") from error
        if plain_http or (plain_http is None and is_loopback(host)):
            return origin
        return cls.of(f"https://{registry}")

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}"


def is_loopback(host: str) -> bool:
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def same_host(one: str, other: str) -> bool:
    """Whether two host names mean the same machine for sure: equal, or names of this machine's one loopback address.

    127.0.0.2 is loopback, too, but anyone's service may listen there that could not listen on 127.0.0.1.
    """
    one, other = (name.lower().rstrip(".") for name in (one, other))
    return one == other or (one in _THIS_MACHINE and other in _THIS_MACHINE)


def resolve(location: str, *, request_url: str, origin: Origin, allow_plain: bool = False) -> tuple[str, bool]:
    """The absolute URL that ``location`` means, and whether its scheme or port was replaced by the user's.

    On the registry's own host the user's scheme and port are kept: behind a proxy that ends TLS, registries name
    ``http`` or their inner port. Another host is taken as it is, but never over plain http when the registry is reached
    by https (a blob may be private). Raises ProtocolError for what is no URL.
    """
    if len(location) > MAX_LOCATION or not location or not location.isprintable() or " " in location:
        raise ProtocolError(f"{origin} sent an unusable Location of {len(location)} characters")
    try:
        absolute = urlsplit(urljoin(request_url, location))
    except ValueError as error:
        raise ProtocolError(f"{origin} sent a Location that is not a URL: {location[:100]!r}") from error
    # RFC 3986: no user information for http(s); it would be a way to smuggle another host past a reader.
    target = Origin.of(urlunsplit(absolute))
    path = quote(absolute.path or "/", safe="/:@!$&'()*+,;=-._~%")
    if target.host == origin.host:
        rewritten = (target.scheme, target.port) != (origin.scheme, origin.port)
        return _url(origin, path, absolute), rewritten
    if origin.scheme == "https" and target.scheme == "http" and not allow_plain:
        raise ProtocolError(
            f"{origin} sends the upload on to {target}, without TLS",
            hint="--plain-http allows it, if that host is to be trusted",
        )
    return _url(target, path, absolute), False


def _url(origin: Origin, path: str, parts: SplitResult) -> str:
    return urlunsplit((origin.scheme, origin.netloc, path, quote(parts.query, safe="/?:@!$&'()*+,;=-._~%"), ""))


def with_query(url: str, addition: str) -> str:
    """``url`` with ``addition`` after its own query, which stays as it is, byte for byte."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(query=f"{parts.query}&{addition}" if parts.query else addition))


def redact(url: str) -> str:
    """For messages: without query (state tokens, signatures) and user information."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.split("?")[0][:200]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "…" if parts.query else "", ""))


def stored_bytes(value: str | None) -> int | None:
    """How many bytes ``Range: 0-<last>`` says are stored; None where it says nothing that can be used.

    ``0-0`` is what several registries answer for an empty session. It could also mean one byte; as no upload of ours
    leaves a session with one byte, it counts as none. ``0--1`` (Gitea 1.24.0) is none, too.
    """
    match = _RANGE.fullmatch(value.strip()) if value is not None and len(value) <= 100 else None
    if match is None or int(match[1]) != 0:
        return None
    last = int(match[2])
    if last < -1:
        return None
    return 0 if last <= 0 else last + 1
