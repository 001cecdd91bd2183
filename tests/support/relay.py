"""A way into a container without a network: connections to a port here go on inside, through the engine's exec."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from socketserver import BaseRequestHandler, ThreadingTCPServer

_INSIDE = """
import os, socket, sys, threading
there = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def sends():
    while data := os.read(0, 65536):
        there.sendall(data)
    there.shutdown(socket.SHUT_WR)
threading.Thread(target=sends, daemon=True).start()
while data := there.recv(65536):
    os.write(1, data)
"""


class _Relay(ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, inside: Sequence[str]) -> None:
        self.inside = inside
        super().__init__(("127.0.0.1", 0), _Connection)


class _Connection(BaseRequestHandler):
    server: _Relay

    def handle(self) -> None:
        """Until the server inside closes; the client's bytes go on meanwhile."""
        with subprocess.Popen(self.server.inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            forwarding = threading.Thread(target=self._forward, args=(process.stdin.fileno(),), daemon=True)
            forwarding.start()
            try:
                while data := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
                    self.request.sendall(data)
            except OSError:
                process.kill()  # the client has left

    def _forward(self, pipe: int) -> None:
        import os

        try:
            while data := self.request.recv(1 << 16):
                os.write(pipe, data)
        except OSError:
            return  # either side has ended


@contextmanager
def relay(docker: Sequence[str], container: str, port: int) -> Iterator[str]:
    """The URL on this machine's loopback that stands for ``port`` on the container's own, which has a Python."""
    inside = [*docker, "exec", "--interactive", container, "python", "-c", _INSIDE, str(port)]
    with _Relay(inside) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
