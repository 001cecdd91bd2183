"""Does it answer, and is it what it should be? Short HTTP questions on loopback and unix sockets."""

from __future__ import annotations

import contextlib
import http.client
import socket
from pathlib import Path

_SECONDS = 5.0


def engine_answers(socket_path: Path) -> bool:
    """Whether a Docker engine answers ``/_ping`` on the unix socket ``socket_path``."""
    answer = _get(_UnixConnection(str(socket_path)), "/_ping")
    return answer is not None and answer.status == 200 and answer.getheader("Api-Version") is not None


def registry_answers(port: int) -> bool:
    """Whether a registry answers ``/v2/`` on this port of loopback, be it with the demand to log in."""
    answer = _get(http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS), "/v2/")
    return (
        answer is not None
        and answer.status in (200, 401)
        and answer.getheader("Docker-Distribution-Api-Version") is not None
    )


def port_free(port: int) -> bool:
    """Whether a server could listen on this port of loopback now."""
    with socket.socket() as probe:
        # As servers do it: connections of the last server that wait for their end do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port of loopback that nobody listens on now; somebody else may be quicker."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_SECONDS)
        self.sock.connect(self._path)


def _get(connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse | None:
    with contextlib.closing(connection):
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read(4096)
        except (OSError, http.client.HTTPException):
            return None
    return answer
