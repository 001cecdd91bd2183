"""One request to a server under test, bounded in time as a whole and in size.

The time-outs of ``requests`` are for one operation of the socket: a server that sends a byte now and then, in the head
or in the body, is never too slow for them. Here a watchdog shuts the connection down when the time is over, wherever
the exchange is then.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from buildkit.errors import UsageError, one_line

CONNECT_SECONDS = 10.0
MAX_SECONDS = 86400.0
"""The longest time that may be allowed for one answer: a day."""
_PIECE = 1 << 14


class NoAnswerError(Exception):
    """Why there is no whole answer, in words that go on after what was asked for: ``broke off: …``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """Status, media type and decoded body."""

    status: int
    kind: str
    body: bytes


def fetch(method: str, url: str, *, body: Any = None, timeout: float, limit: int) -> HttpAnswer:
    """Ask once. ``timeout`` in seconds bounds all of it but the resolution of names; ``body`` is sent as JSON.

    ``limit`` in bytes; with 0 the answer's body is not read at all. Raises NoAnswerError for everything that a server
    or the way there can do.
    """
    watchdog = _Watchdog(timeout)
    late = f"has not answered within {timeout:g} s"
    try:
        with requests.Session() as session, watchdog:
            adapter = _Adapter(watchdog)
            session.mount("http://", adapter)
            session.mount("https://", adapter)
            with session.request(
                method, url, json=body, timeout=(min(CONNECT_SECONDS, timeout), timeout), stream=True
            ) as response:
                raw = bytearray()
                if limit:
                    for piece in response.iter_content(_PIECE):
                        raw += piece
                        if len(raw) > limit:
                            raise NoAnswerError(f"answers more than {limit} bytes")
                answer = HttpAnswer(
                    status=response.status_code, kind=response.headers.get("Content-Type", ""), body=bytes(raw)
                )
    except requests.ConnectTimeout as error:
        raise NoAnswerError(f"has not taken a connection within {min(CONNECT_SECONDS, timeout):g} s") from error
    except requests.Timeout as error:
        raise NoAnswerError(late) from error
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        # ValueError: requests lets some through for what a server sends, such as a redirection to "http://[".
        raise NoAnswerError(late if watchdog.expired else f"broke off: {_cause(error)}") from error
    if watchdog.expired:
        # A body that ends with its connection looks whole when the watchdog ended it.
        raise NoAnswerError(late)
    return answer


class _Watchdog:
    """Shuts the connections of one request down when its time is over."""

    def __init__(self, seconds: float) -> None:
        self.expired = False
        self._lock = threading.Lock()
        self._connections: list[Any] = []
        # A connection lets go of its socket where the answer ends with it, and the answer alone goes on reading.
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()

    def watch(self, connection: Any) -> None:
        """Called before it connects and again once it has: a redirection after the end is not begun."""
        with self._lock:
            if connection not in self._connections:
                self._connections.append(connection)
            if isinstance(connection.sock, socket.socket):
                self._sockets.append(connection.sock)
            if self.expired:
                self._shut()

    def _expire(self) -> None:
        with self._lock:
            self.expired = True
            self._shut()

    def _shut(self) -> None:
        for sock in (*self._sockets, *(connection.sock for connection in self._connections)):
            if isinstance(sock, socket.socket):
                # Not close(): that would not wake who waits in recv. Not SSLSocket's own shutdown, which drops the TLS
                # state that the waiting thread uses.
                with suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Adapter(HTTPAdapter):
    """Connections that the watchdog knows, also those through a proxy."""

    def __init__(self, watchdog: _Watchdog) -> None:
        class Plain(urllib3.connection.HTTPConnection):
            def connect(self) -> None:
                watchdog.watch(self)
                super().connect()
                watchdog.watch(self)

        class Secure(urllib3.connection.HTTPSConnection):
            def connect(self) -> None:
                watchdog.watch(self)
                super().connect()
                watchdog.watch(self)

        class PlainPool(urllib3.HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(urllib3.HTTPSConnectionPool):
            ConnectionCls = Secure

        self._pools = {"http": PlainPool, "https": SecurePool}
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pools

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = self._pools
        return manager


def server_url(text: str, what: str) -> str:
    """``text`` without the slash at its end. Raises UsageError for what is no http URL to which a path can be added."""
    try:
        parts = urlsplit(text)
        good = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and "@" not in parts.netloc
            and not parts.query
            and not parts.fragment
            and (parts.port is None or parts.port > 0)
            and text.isprintable()
            and " " not in text
        )
        if good:
            requests.Request("GET", text).prepare()
    except ValueError:  # of urlsplit, of its port, and all that requests raises for a URL
        good = False
    if not good:
        shown = one_line(text, 100) if "@" not in text else one_line(text.rpartition("@")[2], 100)
        raise UsageError(f"{shown!r} is not the URL of a {what}", hint="like http://127.0.0.1:8000")
    return text.rstrip("/")


def check_timeout(seconds: float) -> float:
    """``seconds`` where they can be waited for. Raises UsageError for nothing and for more than a day."""
    if not 0 < seconds <= MAX_SECONDS:
        raise UsageError(f"a time-out of {seconds:g} s is not between 0 and {MAX_SECONDS:g} s", hint="like 30s or 10m")
    return seconds


def _cause(error: BaseException) -> str:
    """The innermost reason, without the wrapping and without the URL."""
    seen = error
    while (inner := seen.__cause__ or seen.__context__) is not None and inner is not seen:
        seen = inner
    if isinstance(seen, OSError) and seen.strerror:
        return one_line(seen.strerror, 200)
    return one_line(str(seen), 200) or type(seen).__name__
