"""The models as real HTTP servers on loopback, with faults that are played at chosen requests."""

from __future__ import annotations

import contextlib
import gzip
import re
import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from faults.model import Call, Profile, RegistryModel, Result, kind_of

HTML_413 = (
    b"<html>\r\n<head><title>413 Request Entity Too Large</title></head>\r\n"
    b"<body>\r\n<center><h1>413 Request Entity Too Large</h1></center>\r\n<hr></body>\r\n</html>\r\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one request.

    ``when``: ``before`` the body is read, ``within`` it (half arrives), or ``after`` it was carried out. ``status``
    None drops the connection there; otherwise it is the answer. ``rewrite`` changes the true answer's headers instead.
    ``first`` runs on the model before the request is looked at. ``slow`` reads and writes byte by byte.
    """

    name: str
    when: Literal["before", "within", "after"] = "before"
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    rewrite: Callable[[dict[str, str], Call], None] | None = None
    first: Callable[[RegistryModel], None] | None = None
    slow: bool = False
    partial: bool = False
    raw: bytes | None = None

    def __repr__(self) -> str:
        return self.name


Key = tuple[str, int] | int
"""(kind, n): the n-th request of that kind, from 0. A bare number: the n-th request of all."""


class FaultServer:
    """A registry of one profile behind one port. ``script`` says which requests meet which fault, each once.

    ``limit`` is the edge's: a larger body is refused with an HTML 413 before it reaches the registry, and the
    connection is closed without reading it, as nginx does. ``tls`` is a PEM file with key and certificate.
    """

    def __init__(self, profile: Profile, *, limit: int | None = None, tls: Path | None = None) -> None:
        self.profile = profile
        self.limit = limit
        self.reset()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls)
            # The handshake belongs to the connection's thread: one that fails must not stop the others.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def reset(self, script: Mapping[Key, Fault] | None = None) -> None:
        """An empty registry and a new script."""
        self.model = RegistryModel(self.profile)
        self.script: dict[Key, Fault] = dict(script or {})
        self.always: dict[str, Fault] = {}
        self.played: list[tuple[str, Fault]] = []
        self.seen: Counter[str] = Counter()
        self.calls: list[tuple[str, str, str, int]] = []
        self.authorizations: list[str] = []
        self.lock = threading.Lock()
        self.before: Callable[[str, int], None] | None = None

    @property
    def registry(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def requests(self) -> int:
        return sum(self.seen.values())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def __enter__(self) -> FaultServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def next_fault(self, kind: str) -> Fault | None:
        with self.lock:
            number, total = self.seen[kind], self.requests
            self.seen[kind] += 1
            fault = self.script.pop((kind, number), None) or self.script.pop(total, None) or self.always.get(kind)
            if fault is not None:
                self.played.append((kind, fault))
        if self.before is not None:
            self.before(kind, number)
        return fault


class _Server(ThreadingHTTPServer):
    owner: FaultServer
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request, client_address  # a client that goes away is what these tests are about

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(OSError):
            super().shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 20

    def log_message(self, format: str, *args: Any) -> None:
        del format, args

    def version_string(self) -> str:
        return "fault-server"

    def _serve(self) -> None:
        owner = self.server.owner
        parts = urlsplit(self.path)
        kind = kind_of(self.command, parts.path)
        length = int(self.headers.get("Content-Length") or 0)
        model = owner.model
        fault = owner.next_fault(kind)
        headers = {name.lower(): value for name, value in self.headers.items()}
        with owner.lock:
            owner.calls.append((kind, self.command, self.path, length))
            owner.authorizations.append(headers.get("authorization", ""))
        call = Call(method=self.command, path=parts.path, query=parts.query, headers=headers, body=b"")
        if owner.limit is not None and length > owner.limit:
            self._answer(Result(status=413, headers={"Content-Type": "text/html"}, body=HTML_413), close=True)
            return
        if fault is not None and fault.first is not None:
            fault.first(model)
        plain = fault is None or fault.rewrite is not None or fault.first is not None or fault.slow or fault.partial
        if fault is not None and not plain and fault.when == "before":
            self._play(fault, read=length)
            return
        if fault is not None and not plain and fault.when == "within":
            call.body = self._read(length // 2)
            model.broken(call)
            self._play(fault, read=length - len(call.body))
            return
        call.body = self._read(length, slow=fault is not None and fault.slow)
        if len(call.body) < length:
            model.broken(call)
            self._reset()
            return
        if fault is not None and fault.partial and kind == "patch" and length > 3:
            half = length // 2
            match = re.fullmatch(r"(\d+)-(\d+)", headers.get("content-range", ""))
            if match:
                headers["content-range"] = f"{match[1]}-{int(match[1]) + half - 1}"
                call.body = call.body[:half]
        result = model.handle(call)
        if fault is not None and not plain:
            self._play(fault, read=0)
            return
        if fault is not None and fault.rewrite is not None:
            fault.rewrite(result.headers, call)
        self._answer(result, slow=fault is not None and fault.slow)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _read(self, length: int, *, slow: bool = False) -> bytes:
        pieces = []
        while length > 0:
            piece = self.rfile.read(min(length, 37 if slow else 65536))
            if not piece:
                break
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)

    def _play(self, fault: Fault, *, read: int) -> None:
        if fault.raw is not None:
            self._read(read)
            with contextlib.suppress(OSError):
                self.wfile.write(fault.raw)
            self.close_connection = True
        elif fault.status is None:
            self._reset()
        else:
            # The rest of the body stays unread, as with an edge that has seen enough.
            lies = {"content-length", "transfer-encoding", "connection"} & {name.lower() for name in fault.headers}
            answer = Result(status=fault.status, headers=dict(fault.headers), body=fault.body)
            self._answer(answer, close=read > 0 or bool(lies))

    def _reset(self) -> None:
        """End the connection with RST, as a crashing proxy does."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()

    def _answer(self, result: Result, *, close: bool = False, slow: bool = False) -> None:
        lines = [f"HTTP/1.1 {result.status} X"]
        fields = dict(result.headers)
        if result.status not in (204, 304):
            fields.setdefault("Content-Length", str(len(result.body)))
        if close:
            fields["Connection"] = "close"
            self.close_connection = True
        lines += [f"{name}: {value}" for name, value in fields.items()]
        data = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"
        if self.command != "HEAD" and result.status not in (204, 304):
            data += result.body
        with contextlib.suppress(OSError):
            if slow:
                for i in range(0, len(data), 7):
                    self.wfile.write(data[i : i + 7])
            else:
                self.wfile.write(data)
            if close:
                self._linger()

    def _linger(self) -> None:
        """Let the client read the answer: close our half, and swallow what it still sends (nginx, lingering_close)."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(2)
        while self.connection.recv(65536):
            pass


# The faults ----------------------------------------------------------------------------------------------------------


def _set(**changes: str | None) -> Callable[[dict[str, str], Call], None]:
    def rewrite(headers: dict[str, str], call: Call) -> None:
        del call
        for name, value in changes.items():
            headers.pop(name.replace("_", "-"), None)
            if value is not None:
                headers[name.replace("_", "-")] = value

    return rewrite


def _shift_range(by: int) -> Callable[[dict[str, str], Call], None]:
    def rewrite(headers: dict[str, str], call: Call) -> None:
        del call
        match = re.fullmatch(r"0-(\d+)", headers.get("Range", ""))
        if match:
            headers["Range"] = f"0-{max(0, int(match[1]) + by)}"

    return rewrite


def _location(change: Callable[[str, str], str]) -> Callable[[dict[str, str], Call], None]:
    def rewrite(headers: dict[str, str], call: Call) -> None:
        if "Location" in headers:
            headers["Location"] = change(headers["Location"], call.headers.get("host", ""))

    return rewrite


def _path(location: str) -> str:
    parts = urlsplit(location)
    return parts.path + (f"?{parts.query}" if parts.query else "")


def _without_port(location: str, host: str) -> str:
    return f"http://{host.partition(':')[0]}{_path(location)}"


def _elsewhere(location: str, host: str) -> str:
    return f"http://localhost:{host.rpartition(':')[2]}{_path(location)}"


def _stale(headers: dict[str, str], call: Call) -> None:
    if "Location" in headers and call.path.rstrip("/").rpartition("/")[2] != "uploads":
        headers["Location"] = call.path + (f"?{call.query}" if call.query else "")


HTML = {"Content-Type": "text/html", "Server": "cloudflare", "CF-RAY": "8f2a-FRA"}
JSON = {"Content-Type": "application/json"}
GZIP = {"Content-Encoding": "gzip"}


def _page(status: int) -> bytes:
    return f"<!DOCTYPE html><html><head><title>{status} from the edge</title></head><body>no</body></html>".encode()


STATUSES = (400, 401, 403, 404, 408, 409, 416, 425, 429, 499, 500, 502, 503, 504, 520, 522, 524)
LATE_STATUSES = (499, 500, 502, 504, 524)

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(name="drop-before", when="before"),
        Fault(name="drop-within", when="within"),
        Fault(name="drop-after", when="after"),
        *(Fault(name=f"{s}-before", when="before", status=s, headers=HTML, body=_page(s)) for s in STATUSES),
        *(Fault(name=f"{s}-after", when="after", status=s, headers=HTML, body=_page(s)) for s in LATE_STATUSES),
        Fault(name="413-html", status=413, headers=HTML, body=HTML_413),
        Fault(name="413-html-gzip", status=413, headers=HTML | GZIP, body=gzip.compress(HTML_413)),
        Fault(name="413-json", status=413, headers=JSON, body=b'{"errors":[{"code":"SIZE_INVALID"}]}'),
        Fault(name="413-empty", status=413),
        Fault(name="400-json", status=400, headers=JSON, body=b'{"errors":[{"code":"BLOB_UPLOAD_INVALID"}]}'),
        Fault(name="429-retry-after", status=429, headers={"Retry-After": "7"}),
        Fault(name="503-retry-date", status=503, headers={"Retry-After": "Fri, 15 Jan 2027 08:00:20 GMT"}),
        Fault(name="lost-session", first=RegistryModel.forget_sessions),
        Fault(name="token-expired", first=RegistryModel.expire_tokens),
        Fault(name="stale-location", rewrite=_stale),
        Fault(name="range-missing", rewrite=_set(Range=None)),
        Fault(name="range-0-0", rewrite=_set(Range="0-0")),
        Fault(name="range-0--1", rewrite=_set(Range="0--1")),
        Fault(name="range-one-high", rewrite=_shift_range(1)),
        Fault(name="range-behind", rewrite=_shift_range(-300)),
        Fault(name="range-ahead", rewrite=_shift_range(5000)),
        Fault(name="range-garbage", rewrite=_set(Range="bytes=a-b;" + "9" * 50)),
        Fault(name="location-relative", rewrite=_location(lambda value, host: _path(value))),
        Fault(name="location-https", rewrite=_location(lambda value, host: f"https://{host}{_path(value)}")),
        Fault(name="location-no-port", rewrite=_location(_without_port)),
        Fault(name="location-other-host", rewrite=_location(_elsewhere)),
        Fault(name="location-missing", rewrite=_set(Location=None)),
        Fault(name="location-garbage", rewrite=_set(Location="http://[::1:bad/\x7f")),
        Fault(name="slow", slow=True),
        Fault(name="partly-acknowledged", partial=True),
        Fault(name="not-http", raw=b"\x16\x03\x01 hello there\r\n\r\n"),
        Fault(name="half-answer", raw=b"HTTP/1.1 202 Accep"),
        Fault(name="cut-body", raw=b"HTTP/1.1 500 X\r\nContent-Length: 5000\r\n\r\n{"),
    )
}  # fmt: skip


@contextlib.contextmanager
def serving(profile: Profile, **options: Any) -> Iterator[FaultServer]:
    server = FaultServer(profile, **options)
    try:
        yield server
    finally:
        server.close()
