"""A door before a server on loopback, to be shut: what a registry that vanishes looks like from outside."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Door:
    """Forwards HTTP requests to ``target`` (HOST:PORT). ``shut`` closes it for good; ``read_only`` answers 403 to
    whatever would write, as a registry does to a token without that scope. ``skew`` are seconds by which the server's
    clock is ahead of this machine's."""

    def __init__(self, target: str, *, read_only: bool = False, skew: float = 0.0) -> None:
        self.target = target
        self.skew = skew
        self.read_only = read_only
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.door = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self._open = True

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def shut(self) -> None:
        if self._open:
            self._open = False
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()


class _Server(ThreadingHTTPServer):
    door: Door
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request, client_address  # clients that go away are no news here


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 20

    def log_message(self, format: str, *args: Any) -> None:
        del format, args

    def _serve(self) -> None:
        door = self.server.door
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if door.read_only and self.command not in ("GET", "HEAD"):
            answer = b'{"errors":[{"code":"DENIED","message":"the token may not write"}]}'
            self._answer(403, [("Content-Type", "application/json"), ("Content-Length", str(len(answer)))], answer)
            return
        connection = http.client.HTTPConnection(door.target, timeout=20)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            connection.request(self.command, self.path, body, {**headers, "Host": self.headers.get("Host", "")})
            response = connection.getresponse()
            data = response.read()
            kept = [
                (name, value)
                for name, value in response.getheaders()
                if name.lower() not in ("connection", "transfer-encoding", "content-length")
            ]
            length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            self._answer(response.status, [*kept, *([("Content-Length", length)] if length else [])], data)
        finally:
            connection.close()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        if self.server.door.skew:
            headers = [(name, value) for name, value in headers if name.lower() != "date"]
            headers.append(("Date", formatdate(time.time() + self.server.door.skew, usegmt=True)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError, socket.timeout):
            if self.command != "HEAD":
                self.wfile.write(body)
