"""One HTTP exchange at a time over pooled connections: the only module here that touches sockets.

urllib3 does TLS, pools, proxies and parsing. What it lacks is done by a connection class of our own: a body is read
from its window in large blocks without ever being held in memory, and an answer that comes before the body is out
(a 413 from an edge, a 401) ends the sending at once instead of after the last byte or with a reset.

Everything that can go wrong on the network becomes a ``Failure`` here, once.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import os
import select
import socket
import ssl
import threading
import urllib.request
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    LocationParseError,
    MaxRetryError,
    NameResolutionError,
    NewConnectionError,
    ProxyError,
    ReadTimeoutError,
    SSLError,
)

from buildkit.errors import BuildkitError, StorageError, UsageError, one_line
from buildkit.registry.clock import Clock
from buildkit.registry.location import Origin
from buildkit.registry.options import RegistryOptions
from buildkit.registry.steps import Answer, Failure, Headers

BLOCK = 2**20
"""Bytes read and sent at a time: large enough that Python's share vanishes, small enough for memory and stopping."""

ERROR_BODY = 64 * 2**10
"""Bytes of an error's body that are read; the rest is of no use to anyone."""

MAX_HEADERS = 256 * 2**10


@dataclass(frozen=True, slots=True)
class FileBody:
    """A request body of exactly ``size`` bytes; ``open`` gives a fresh reader at its first byte each time."""

    open: Callable[[], BinaryIO]
    size: int


class _Outgoing:
    """What the connection's ``send`` gets instead of bytes; counts what went out."""

    def __init__(self, reader: BinaryIO, size: int, silence: float) -> None:
        self.reader, self.size, self.silence = reader, size, silence
        self.sent = 0


class _WholeLines(io.BufferedReader):
    """Lines end with a line break, or the connection ended early.

    http.client takes the end of the connection for the end of a status line or of the headers, and so reads
    ``HTTP/1.1 202 Acc`` as an answer without Location.
    """

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        whole = line.endswith(b"\n") or (size is not None and 0 <= size <= len(line))
        if not whole:
            raise http.client.RemoteDisconnected("the connection ended within a line")
        return line


class _WholeResponse(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self.fp.close()
        self.fp = _WholeLines(sock.makefile("rb", buffering=0))


class _StreamingMixin:
    """Sends an ``_Outgoing`` from its reader, watching for an early answer; knows whether it may be used again."""

    sock: Any
    spoiled = False
    response_class: Any = _WholeResponse

    def connect(self) -> None:
        self.spoiled = False
        super().connect()  # type: ignore[misc]

    @property
    def is_connected(self) -> bool:
        return not self.spoiled and bool(super().is_connected)  # type: ignore[misc]

    def send(self, data: Any) -> None:
        if not isinstance(data, _Outgoing):
            super().send(data)  # type: ignore[misc]
            return
        # Until all is out this connection has half a request on it and must not be used for another.
        self.spoiled = True
        # A ready TLS socket need not mean an answer: session tickets arrive at any time. There a reset tells.
        watch = None
        if not isinstance(self.sock, ssl.SSLSocket):
            watch = select.poll()
            watch.register(self.sock, select.POLLIN)
        self.sock.settimeout(data.silence)
        buffer = memoryview(bytearray(min(BLOCK, max(1, data.size))))
        while data.sent < data.size:
            if watch is not None and watch.poll(0):
                return
            count = _read_into(data.reader, buffer[: min(len(buffer), data.size - data.sent)])
            self._send_block(buffer[:count], data)
        self.spoiled = False

    def _send_block(self, block: memoryview, data: _Outgoing) -> None:
        # Not sendall: its time-out holds for the whole block, ours for silence.
        while block:
            count = self.sock.send(block)
            data.sent += count
            block = block[count:]


def _read_into(reader: BinaryIO, buffer: memoryview) -> int:
    """At least one byte from the blob; its errors must not be mistaken for the network's."""
    try:
        readinto = getattr(reader, "readinto", None)
        if readinto is not None:
            count = int(readinto(buffer) or 0)
        else:
            piece = reader.read(len(buffer))
            count = len(piece)
            buffer[:count] = piece
    except OSError as error:
        raise StorageError(f"reading the blob to upload failed: {error.strerror or error}") from error
    except ValueError as error:
        raise StorageError("the blob's file was closed while it was uploaded") from error
    if not count:
        raise StorageError("the blob to upload became shorter while it was read")
    return count


class Transport:
    """Thread-safe. ``close`` ends idle connections; ``abort`` ends also those in use, from any thread."""

    def __init__(self, options: RegistryOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        # Not the connections: one that is to close after its answer forgets its socket, which the answer still reads.
        self._live: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._aborted = False
        self._managers: dict[tuple[str, str | None, bool], urllib3.PoolManager] = {}

    def exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: FileBody | bytes | None = None,
        *,
        answer_timeout: float,
        limit: int = ERROR_BODY,
    ) -> Answer | Failure:
        """Send one request and read its answer's body up to ``limit`` bytes (decoded). Redirects are not followed.

        Raises BuildkitError where the body cannot be read; everything else comes back as a value.
        """
        started = self._clock.monotonic()
        try:
            with self._open(method, url, headers, body, answer_timeout) as (response, sent):
                data = _read_capped(response, limit)
                fields = _header_fields(response)
                status, version = response.status, response.version
        except _Failed as failed:
            return replace(failed.failure, sent=failed.sent, seconds=self._clock.monotonic() - started)
        return Answer(
            status=status,
            headers=fields,
            body=data,
            sent=sent(),
            seconds=self._clock.monotonic() - started,
            at=self._clock.now(),
            version=version,
        )

    @contextlib.contextmanager
    def stream(
        self, url: str, headers: Mapping[str, str], *, answer_timeout: float
    ) -> Iterator[tuple[Answer, Callable[[int], bytes]]]:
        """GET with a body that is read piece by piece: an Answer without body, and ``read(size)``.

        Raises ``TransportError`` for failures, also while reading.
        """
        started = self._clock.monotonic()
        try:
            with self._open("GET", url, headers, None, answer_timeout) as (response, _):
                answer = Answer(
                    status=response.status,
                    headers=_header_fields(response),
                    body=b"" if response.status < 300 else _read_capped(response, ERROR_BODY),
                    sent=0,
                    seconds=self._clock.monotonic() - started,
                    at=self._clock.now(),
                )

                def read(size: int) -> bytes:
                    try:
                        return bytes(response.read(size, decode_content=False))
                    except (HTTPError, OSError, http.client.HTTPException, ValueError) as error:
                        raise TransportError(_failure_of(error)) from error

                yield answer, read
        except _Failed as failed:
            raise TransportError(failed.failure) from failed

    @contextlib.contextmanager
    def _open(
        self, method: str, url: str, headers: Mapping[str, str], body: FileBody | bytes | None, answer_timeout: float
    ) -> Iterator[tuple[urllib3.BaseHTTPResponse, Callable[[], int]]]:
        outgoing: _Outgoing | None = None
        plain_sent = len(body) if isinstance(body, bytes) else 0

        def sent() -> int:
            return outgoing.sent if outgoing is not None else plain_sent

        with contextlib.ExitStack() as stack:
            payload: Any = body
            if isinstance(body, FileBody):
                try:
                    reader = body.open()
                except OSError as error:
                    raise StorageError(f"opening the blob to upload failed: {error.strerror or error}") from error
                stack.callback(reader.close)
                outgoing = _Outgoing(reader, body.size, self._options.silence_timeout)
                payload = [outgoing]
            try:
                response = self._manager_for(url).urlopen(
                    method,
                    url,
                    body=payload,
                    headers=dict(headers),
                    retries=False,
                    redirect=False,
                    assert_same_host=False,
                    preload_content=False,
                    decode_content=False,
                    timeout=urllib3.Timeout(connect=self._options.connect_timeout, read=answer_timeout),
                )
            except BuildkitError:
                raise
            except (HTTPError, OSError, http.client.HTTPException, ValueError, UnicodeError) as error:
                raise _Failed(self._failure(error), sent()) from error
            try:
                yield response, sent
            except (HTTPError, OSError, http.client.HTTPException, ValueError, zlib.error) as error:
                response.close()
                raise _Failed(self._failure(error), sent()) from error
            except BaseException:
                response.close()
                raise
            else:
                if _drained(response):
                    response.release_conn()
                else:
                    response.close()

    def _failure(self, error: BaseException) -> Failure:
        if self._aborted:
            return Failure(kind="dropped", detail="stopped")
        return _failure_of(error)

    def abort(self) -> None:
        """End every connection at once; requests in flight fail. For a user who wants to stop."""
        self._aborted = True
        self.cut()

    def cut(self) -> None:
        """End the connections that are there now; requests in flight fail, later ones connect anew."""
        with self._lock:
            live = list(self._live)
        for sock in live:
            with contextlib.suppress(OSError):
                # The plain socket's shutdown: TLS's own would try to say good-bye and could block.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            managers = list(self._managers.values())
            self._managers.clear()
        for manager in managers:
            manager.clear()

    def _manager_for(self, url: str) -> urllib3.PoolManager:
        origin = Origin.of(url)
        proxy = proxy_for(origin)
        insecure = origin.netloc in self._options.insecure_hosts or origin.host in self._options.insecure_hosts
        key = (origin.scheme, proxy, insecure)
        with self._lock:
            manager = self._managers.get(key)
            if manager is None:
                manager = self._managers[key] = self._new_manager(origin.scheme, proxy, insecure)
            return manager

    def _new_manager(self, scheme: str, proxy: str | None, insecure: bool) -> urllib3.PoolManager:
        live, lock = self._live, self._lock

        class Tracked(_StreamingMixin):
            def _new_conn(self) -> socket.socket:
                sock: socket.socket = super()._new_conn()  # type: ignore[misc]
                with lock:
                    live.add(sock)
                return sock

            def connect(self) -> None:
                super().connect()
                with lock:
                    live.add(self.sock)  # TLS has wrapped it in another

        class Plain(Tracked, HTTPConnection):
            pass

        class Secure(Tracked, HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                if insecure:
                    # The user named this host; urllib3's warning at every request would tell nothing new.
                    self.is_verified = True

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        settings: dict[str, Any] = {
            "num_pools": 8,
            "maxsize": self._options.parallel + 2,
            "block": False,
        }
        if scheme == "https" or (proxy or "").startswith("https:"):
            # Loading the system's certificates takes 40 ms; plain http has no use for them.
            settings["ssl_context"] = tls_context(self._options.ca_bundle, insecure)
            if insecure:
                settings["assert_hostname"] = False
        manager = urllib3.ProxyManager(proxy, **settings) if proxy else urllib3.PoolManager(**settings)
        manager.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}
        return manager


class TransportError(Exception):
    """Carries a Failure out of a streamed read."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class _Failed(Exception):
    def __init__(self, failure: Failure, sent: int) -> None:
        super().__init__(failure.detail)
        self.failure, self.sent = failure, sent


def tls_context(ca_bundle: str | None, insecure: bool) -> ssl.SSLContext:
    bundle = ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE") or None
    try:
        context = ssl.create_default_context()
        if bundle:
            # In addition to the system's: the same push may meet a public token service.
            if os.path.isdir(bundle):
                context.load_verify_locations(capath=bundle)
            else:
                context.load_verify_locations(cafile=bundle)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"CA bundle {bundle} cannot be used: {one_line(str(error), 100)}") from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def proxy_for(origin: Origin) -> str | None:
    """As curl and Docker do: HTTPS_PROXY, HTTP_PROXY and NO_PROXY; never for loopback."""
    if origin.host in ("localhost", "127.0.0.1", "::1") or urllib.request.proxy_bypass(origin.host):
        return None
    proxy = urllib.request.getproxies().get(origin.scheme)
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def _header_fields(response: urllib3.BaseHTTPResponse) -> Headers:
    fields: dict[str, str] = {}
    total = 0
    for name, value in response.headers.items():
        total += len(name) + len(value)
        if total > MAX_HEADERS:
            break
        fields[name] = value
    return Headers(fields)


def _read_capped(response: urllib3.BaseHTTPResponse, limit: int) -> bytes:
    """At most ``limit`` bytes of the body, decoded; bounded also against a small body that unpacks to a large one."""
    pieces, size = [], 0
    encoding = response.headers.get("content-encoding", "").strip().lower()
    unpack = zlib.decompressobj(wbits=47) if encoding in ("gzip", "x-gzip", "deflate") else None
    while size < limit:
        piece = response.read(min(64 * 2**10, limit - size), decode_content=False)
        if not piece:
            break
        if unpack is not None:
            try:
                piece = unpack.decompress(piece, limit - size)
            except zlib.error:
                break  # an error page that is not what it says; its status still counts
        pieces.append(piece)
        size += len(piece)
        if unpack is not None and (unpack.unconsumed_tail or unpack.eof):
            break
    return b"".join(pieces)[:limit]


def _drained(response: urllib3.BaseHTTPResponse) -> bool:
    """Whether the body was read to its end, so that the connection can carry the next request."""
    original = getattr(response, "_original_response", None)
    return original is None or bool(original.isclosed())


def _failure_of(error: BaseException) -> Failure:
    """What a network error means. Its own text is kept short: some contain addresses of memory, none a secret."""
    if isinstance(error, MaxRetryError) and error.reason is not None:
        error = error.reason
    if isinstance(error, LocationParseError):
        return Failure(kind="connect", detail="the address is not a URL", final=True)
    if isinstance(error, ProxyError):
        return Failure(kind="connect", detail="the proxy refused or failed")
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, ssl.SSLCertVerificationError):
            words = one_line(link.verify_message or "certificate verify failed", 120)
            detail = f"the certificate is not trusted: {words}"
            return Failure(kind="tls", detail=detail, final=True, verify=link.verify_code)
    if any(isinstance(link, NameResolutionError | socket.gaierror) for link in chain):
        return Failure(kind="connect", detail="the name cannot be resolved")
    for link in chain:
        if isinstance(link, ssl.SSLError) and not isinstance(link, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            name = one_line(link.reason or "TLS failed", 80)
            return Failure(kind="tls", detail=f"TLS failed: {name}", final=link.reason in _NOT_TLS)
    if any(isinstance(link, NewConnectionError) for link in chain):
        number = next((link.errno for link in chain if isinstance(link, OSError) and link.errno), None)
        return Failure(kind="connect", detail=f"no connection: {os.strerror(number).lower() if number else 'refused'}")
    if any(isinstance(link, ConnectTimeoutError) for link in chain):
        return Failure(kind="connect", detail="no connection within the time-out")
    if any(isinstance(link, ReadTimeoutError | TimeoutError) for link in chain):
        return Failure(kind="timeout", detail="no answer within the time-out")
    if any(isinstance(link, http.client.RemoteDisconnected | http.client.IncompleteRead) for link in chain):
        return Failure(kind="dropped", detail="the connection ended before the answer")
    for link in chain:
        if isinstance(link, OSError) and link.errno in (errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED):
            return Failure(kind="dropped", detail="the connection was reset")
        if isinstance(link, OSError) and link.errno:
            return Failure(kind="dropped", detail=f"the connection failed: {os.strerror(link.errno).lower()}")
    if any(isinstance(link, http.client.HTTPException | ValueError) for link in chain):
        return Failure(kind="garbage", detail="the answer is not HTTP")
    if any(isinstance(link, SSLError | ssl.SSLError) for link in chain):
        return Failure(kind="tls", detail="the TLS connection ended early")
    return Failure(kind="dropped", detail="the connection failed")


_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL"})


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, and errors that it carries as arguments (urllib3 wraps that way)."""
    seen: set[int] = set()
    queue: list[BaseException] = [error]
    while queue:
        link = queue.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        queue += [a for a in (*link.args, getattr(link, "reason", None), link.__cause__, link.__context__)
                  if isinstance(a, BaseException)]  # fmt: skip
