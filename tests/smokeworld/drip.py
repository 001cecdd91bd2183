"""A server whose answers come drop by drop and never end: no operation of the socket is ever slow."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
DRIPS = {
    "status line": (b"HTTP/1.1 200 ", b"O"),
    "headers": (HEAD, b"X: y\r\n"),
    "body with a length": (HEAD + b"Content-Length: 1000000\r\n\r\n", b" "),
    "body to the end": (HEAD + b"\r\n", b" "),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "length of a chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
    "compressed": (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 1000000\r\n\r\n\x1f\x8b\x08\x00", b"\0"),
}
"""What comes at once, and then again and again."""


@contextmanager
def dripping(kind: str) -> Iterator[str]:
    """Its URL; gone, with its threads, when the context ends."""
    at_once, again = DRIPS[kind]
    leaving = threading.Event()
    threads: list[threading.Thread] = []

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(10)
            connection.recv(1 << 16)
            connection.sendall(at_once)
            for _ in itertools.takewhile(lambda _: not leaving.wait(0.02), itertools.count()):
                connection.sendall(again)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=answer, args=(listener.accept()[0],)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            leaving.set()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join()
