"""The way to a host, step by step: its name, its addresses, TLS. Looks, and sends nothing but a handshake."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from buildkit.doctor.bounded import Late, within
from buildkit.doctor.certificate import CertificateFacts, read_certificate
from buildkit.doctor.seen import Connect, TlsSeen, WaySeen
from buildkit.errors import FormatError, one_line
from buildkit.registry.clock import Clock
from buildkit.registry.location import Origin
from buildkit.registry.options import RegistryOptions
from buildkit.registry.transport import proxy_for, tls_context

DNS_SECONDS = 10.0
CONNECT_SECONDS = 4.0
TLS_SECONDS = 8.0
_PER_FAMILY = 2
"""Addresses of each family that are tried; more would tell nothing new about the way."""

_Address = tuple[int, Any]


def look(origin: Origin, options: RegistryOptions, clock: Clock) -> WaySeen:
    """Never raises for what the network does; UsageError for a CA bundle that cannot be read."""
    proxy = proxy_for(origin)
    if proxy is not None:
        # Without user name and password, which may stand in it.
        parts = urlsplit(proxy)
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        return WaySeen(origin=str(origin), host=origin.host, now=clock.now(), proxy=shown)
    try:
        addresses = within(DNS_SECONDS, lambda: _addresses(origin))
    except Late:
        return _nameless(origin, clock, f"no answer to the question for its address within {DNS_SECONDS:.0f} s")
    except (OSError, UnicodeError) as error:
        return _nameless(origin, clock, _words(error))
    connects = tuple(_connect(family, address) for family, address in addresses)
    reached = next((pair for pair, tried in zip(addresses, connects, strict=True) if not tried.error), None)
    tls = _handshake(origin, reached, options) if origin.scheme == "https" and reached is not None else None
    return WaySeen(origin=str(origin), host=origin.host, now=clock.now(), connects=connects, tls=tls)


def _nameless(origin: Origin, clock: Clock, error: str) -> WaySeen:
    return WaySeen(origin=str(origin), host=origin.host, now=clock.now(), dns_error=error)


def _addresses(origin: Origin) -> list[_Address]:
    found = socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    chosen: list[_Address] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        distinct = dict.fromkeys(address for own, _, _, _, address in found if own == family)
        chosen += [(family, address) for address in list(distinct)[:_PER_FAMILY]]
    return chosen


def _connect(family: int, address: Any) -> Connect:
    error = ""
    try:
        _open(family, address).close()
    except OSError as failure:
        error = _words(failure)
    return Connect(address=str(address[0]), family="IPv4" if family == socket.AF_INET else "IPv6", error=error)


def _open(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_SECONDS)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _handshake(origin: Origin, reached: _Address, options: RegistryOptions) -> TlsSeen:
    insecure = bool({origin.netloc, origin.host} & options.insecure_hosts)
    context = tls_context(options.ca_bundle, insecure)
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with _shaken(origin, reached, context) as sock:
            facts = _facts(sock)
            return TlsSeen(
                version=sock.version() or "",
                protocol=sock.selected_alpn_protocol() or "",
                names=facts.names if facts else (),
                not_before=facts.not_before if facts else None,
                not_after=facts.not_after if facts else None,
                verified=not insecure,
            )
    except ssl.SSLCertVerificationError as error:
        facts = _unverified(origin, reached)
        return TlsSeen(
            verify=error.verify_code,
            words=one_line(error.verify_message or "", 120),
            names=facts.names if facts else (),
            not_before=facts.not_before if facts else None,
            not_after=facts.not_after if facts else None,
        )
    except ssl.SSLError as error:
        return TlsSeen(error=one_line((error.reason or "the handshake failed").lower().replace("_", " "), 120))
    except Late:
        return TlsSeen(error=f"no end of the handshake within {TLS_SECONDS:.0f} s")
    except OSError as error:
        return TlsSeen(error=_words(error))


@contextlib.contextmanager
def _shaken(origin: Origin, reached: _Address, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with _open(*reached) as plain:
        try:
            sock = within(TLS_SECONDS, lambda: context.wrap_socket(plain, server_hostname=origin.host))
        except Late:
            with contextlib.suppress(OSError):
                plain.shutdown(socket.SHUT_RDWR)
            raise
        with sock:
            yield sock


def _unverified(origin: Origin, reached: _Address) -> CertificateFacts | None:
    """What the certificate that was refused says; nothing is sent to whoever shows it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with _shaken(origin, reached, context) as sock:
            return _facts(sock)
    except (OSError, Late):
        return None


def _facts(sock: ssl.SSLSocket) -> CertificateFacts | None:
    der = sock.getpeercert(binary_form=True)
    if der is None:
        return None
    try:
        return read_certificate(der)
    except FormatError:
        return None


def _words(error: Exception) -> str:
    """The system's own words, without the number."""
    if isinstance(error, TimeoutError) and not error.strerror:
        return f"no answer within {CONNECT_SECONDS:.0f} s"
    if isinstance(error, OSError) and error.strerror:
        # getaddrinfo has numbers of its own.
        text = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        return one_line(text, 120).lower()
    return one_line(str(error) or type(error).__name__, 120)
