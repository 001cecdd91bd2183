"""Reads one step ahead in a thread of its own: whoever produces the bytes (hashing, decompressing) and whoever looks at
them work at the same time. Both release the interpreter for the long part."""

from __future__ import annotations

import contextlib
import queue
import threading
from types import TracebackType
from typing import Protocol, Self

STEP = 1 << 20
_DEPTH = 4


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class ReadAhead:
    """A reader over ``source``, which is read by one other thread in pieces of 1 MiB, at most four of them ahead.

    An error of the source is raised here, in its place. Leaving the context stops and joins the thread; the source is
    the caller's to close, afterwards.
    """

    def __init__(self, source: Readable) -> None:
        self._source = source
        self._pieces: queue.Queue[bytes | BaseException] = queue.Queue(_DEPTH)
        self._rest = memoryview(b"")
        self._ended = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="check-read-ahead", daemon=True)
        self._thread.start()

    def read(self, size: int, /) -> bytes:
        if not self._rest:
            if self._ended:
                return b""
            piece = self._pieces.get()
            if isinstance(piece, BaseException):
                self._ended = True
                raise piece
            if len(piece) <= size:
                self._ended = not piece
                return piece
            self._rest = memoryview(piece)
        data = bytes(self._rest[:size])
        self._rest = self._rest[size:]
        return data

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._pieces.get(timeout=0.05)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                piece = self._source.read(STEP)
                self._pieces.put(piece)
                if not piece:
                    return
        except BaseException as error:
            self._pieces.put(error)
