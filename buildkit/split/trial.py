"""A layer compressed as a push would compress it, to see whether its blob stays below the limit."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from buildkit.image.compress import Codec, Joiner, Readable, Segment, compress_segment
from buildkit.model import Descriptor, Digest
from buildkit.split.measure import MAX_QUEUED
from buildkit.split.spool import Range, Spool, Stored, unpack

_SAMPLE = 8
"""Segments from which a layer's size is foretold."""


class Trial:
    """Compresses a tar as a push would, until it ends or its blob exceeds the limit; then all can be read again."""

    def __init__(
        self, tar: Readable, *, codec: Codec, limit: int, pool: ThreadPoolExecutor, threads: int, spool: Spool
    ) -> None:
        self._tar = tar
        self._codec = codec
        self._limit = limit
        self._pool = pool
        self._depth = min(threads + 2, MAX_QUEUED)
        self._spool = spool
        self._bin = spool.bin()
        self._pending: deque[tuple[Future[Segment], bytes]] = deque()
        self._numbers: list[int] = []
        self.tar_size = 0

    def run(self, media_type: str, *, expected: int | None = None) -> Stored | None:
        """The blob, or None where it exceeds the limit.

        With the tar's ``expected`` size in bytes it gives up, with None, where the first segments foretell as much.
        """
        joiner = Joiner(self._codec)
        head = joiner.header()
        start = self._bin.write((head,))
        digest = hashlib.sha256(head)
        size = self._codec.overhead
        ended = False
        while size <= self._limit and not (ended and not self._pending):
            while not ended and len(self._pending) < self._depth:
                raw = self._next()
                ended = len(raw) < self._codec.segment
                if raw:
                    self._pending.append((self._pool.submit(compress_segment, self._codec, raw), raw))
            if self._pending:
                future, raw = self._pending.popleft()
                segment = future.result()
                self._numbers.append(self._spool.append(segment, self._bin))
                self.tar_size += len(raw)
                size += segment.size
                for part in joiner.add(segment):
                    digest.update(part)
                if expected and len(self._numbers) == _SAMPLE and size * expected > self._limit * self.tar_size:
                    return None
        if size > self._limit:
            return None
        tail = joiner.trailer()
        digest.update(tail)
        end = self._bin.write((tail,))
        whole = Range(self._bin, start.offset, end.offset + end.size - start.offset)
        descriptor = Descriptor(
            media_type=media_type,
            digest=Digest("sha256", digest.hexdigest()),
            size=whole.size,
        )
        alone = self._bin if self._bin is not self._spool.common else None
        return Stored(descriptor=descriptor, pieces=(whole,), whole=alone)

    def again(self) -> Readable:
        """The whole tar from its first byte, after ``run`` gave None. Once."""
        return _Chained(self._pieces(), self._tar)

    def _pieces(self) -> Iterator[bytes]:
        for number in self._numbers:
            yield unpack(self._codec, self._spool.segment(number))
        while self._pending:
            future, raw = self._pending.popleft()
            future.cancel()
            yield raw

    def _next(self) -> bytes:
        parts, have = [], 0
        while have < self._codec.segment and (data := self._tar.read(self._codec.segment - have)):
            parts.append(data)
            have += len(data)
        return b"".join(parts)


class _Chained:
    """Pieces, then a reader."""

    def __init__(self, pieces: Iterator[bytes], rest: Readable) -> None:
        self._pieces = pieces
        self._rest = rest
        self._piece = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return self._rest.read(size)
            self._piece = memoryview(piece)
        data = bytes(self._piece[:size])
        self._piece = self._piece[size:]
        return data
