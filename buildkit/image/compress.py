"""Layer compression that gives the same bytes for any number of threads, and the way back.

The input is cut into segments of a fixed size. Each is compressed on its own in a thread pool (the compressors release
the interpreter lock), and the results are joined in order:

- **gzip** (RFC 1952): raw deflate ended by a full flush, so a segment ends on a byte boundary and refers to nothing
  before it. All segments lie in *one* member, because some readers stop after the first; its CRC is combined from the
  segments' CRCs. Header: no time, no name, OS 255. Levels 0 to 3 are ISA-L's, 4 to 9 are zlib's.
- **zstd** (RFC 8878): one frame per segment. Readers must go on to the next frame ("Zstandard Frames", section 3.1).

Sizes add up: a blob's size is ``Codec.overhead`` plus that of its segments, which makes planning by compressed size
exact. Which bytes come out depends on codec, level, segment size and library version: that is ``Codec.id``.
"""

from __future__ import annotations

import hashlib
import os
import queue
import re
import struct
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, runtime_checkable

import zstandard
from isal import ISAL_VERSION, igzip_lib, isal_zlib

from buildkit.errors import FormatError, UsageError
from buildkit.model import DOCKER_LAYER_GZIP, OCI_LAYER_GZIP, OCI_LAYER_ZSTD, Digest

SEGMENT = 4 * 2**20
"""Bytes of input per segment."""
WORKING_MEMORY = 64 * 2**20
"""Bytes of input segments that one Compressor holds at once, over all its runs. The results may take as much again."""
MAX_TAR = 2**40
"""Bytes. No layer that unpacks to more is read: a guard against decompression bombs that would fill a disk."""
MAX_WINDOW = 2**27
"""Bytes of window that a zstd frame may ask for; the reference decoder's own bound (27 bits)."""

_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_GZIP_LAST_BLOCK = b"\x03\x00"
_READ = 1 << 18
_ISAL_ERROR: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]  # the stub declares an instance


class Readable(Protocol):
    """Anything that gives bytes from front to back; ``b""`` is the end."""

    def read(self, size: int, /) -> bytes: ...


@runtime_checkable
class ReadableInto(Protocol):
    """The same without a copy."""

    def readinto(self, buffer: Any, /) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How layers are compressed. ``segment`` is in bytes of input."""

    algorithm: Literal["gzip", "zstd"] = "gzip"
    level: int = 1
    segment: int = SEGMENT

    @classmethod
    def parse(cls, text: str) -> Codec:
        """``gzip``, ``gzip:LEVEL`` (0-9), ``zstd`` or ``zstd:LEVEL`` (1-19). Raises UsageError for anything else."""
        match = re.fullmatch(r"(gzip|zstd)(?::(\d{1,2}))?", text.strip(), re.ASCII)
        if match and match[1] == "gzip" and int(match[2] or 1) <= 9:
            return cls(algorithm="gzip", level=int(match[2] or 1))
        if match and match[1] == "zstd" and 1 <= int(match[2] or 3) <= 19:
            return cls(algorithm="zstd", level=int(match[2] or 3))
        raise UsageError(
            f"compression {text!r} is not known", hint="gzip, gzip:0 to gzip:9, zstd, or zstd:1 to zstd:19"
        )

    @property
    def id(self) -> str:
        """Names everything that the compressed bytes depend on, for keys of a cache."""
        return f"{self.algorithm}-{self.level}-{self.segment}-{self._library}"

    @property
    def _library(self) -> str:
        if self.algorithm == "zstd":
            return "zstd" + ".".join(str(part) for part in zstandard.ZSTD_VERSION)
        return f"isal{ISAL_VERSION}" if self.level <= 3 else f"zlib{zlib.ZLIB_RUNTIME_VERSION}"

    @property
    def overhead(self) -> int:
        """Bytes of a blob beside its segments. (A zstd blob without input has one empty frame.)"""
        return len(_GZIP_HEADER) + len(_GZIP_LAST_BLOCK) + 8 if self.algorithm == "gzip" else 0

    def media_type(self, *, docker: bool) -> str:
        """Of a layer; ``docker`` asks for Docker's family, which has no zstd: UsageError."""
        if self.algorithm == "gzip":
            return DOCKER_LAYER_GZIP if docker else OCI_LAYER_GZIP
        if docker:
            raise UsageError("zstd layers need OCI media types", hint="use gzip, or convert the image to OCI")
        return OCI_LAYER_ZSTD

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.level}"


DEFAULT_CODEC = Codec()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One compressed segment: its bytes in ``parts``, the number and CRC-32 of its ``input`` bytes (gzip)."""

    parts: tuple[bytes, ...]
    input: int
    crc: int

    @property
    def size(self) -> int:
        """Compressed bytes."""
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """What one pass found: digest and size of the blob; size of the tar, and its digest where it was asked for."""

    digest: Digest
    size: int
    tar_size: int
    diff_id: Digest | None


def compress_segment(codec: Codec, data: bytes | bytearray | memoryview) -> Segment:
    """Compress one segment of at most ``codec.segment`` bytes. Depends on nothing but its arguments."""
    if codec.algorithm == "zstd":
        frame = zstandard.ZstdCompressor(level=codec.level, write_checksum=True).compress(data)
        return Segment(parts=(frame,), input=len(data), crc=0)
    if codec.level <= 3:
        deflate = isal_zlib.compressobj(codec.level, isal_zlib.DEFLATED, -15, 8)
        parts = (deflate.compress(data), deflate.flush(isal_zlib.Z_FULL_FLUSH))
    else:
        stock = zlib.compressobj(codec.level, zlib.DEFLATED, -15, 8)
        parts = (stock.compress(data), stock.flush(zlib.Z_FULL_FLUSH))
    return Segment(parts=parts, input=len(data), crc=isal_zlib.crc32(data))


class Joiner:
    """Puts segments together to one blob, in order: ``header``, ``add`` for each, ``trailer``."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._crc = 0
        self.input = 0
        """Bytes of input so far."""

    def header(self) -> bytes:
        return _GZIP_HEADER if self._codec.algorithm == "gzip" else b""

    def add(self, segment: Segment) -> tuple[bytes, ...]:
        """The bytes to append for ``segment``."""
        self._crc = isal_zlib.crc32_combine(self._crc, segment.crc, segment.input)
        self.input += segment.input
        return segment.parts

    def trailer(self) -> bytes:
        if self._codec.algorithm == "gzip":
            return _GZIP_LAST_BLOCK + struct.pack("<II", self._crc, self.input & 0xFFFFFFFF)
        return b"" if self.input else b"".join(compress_segment(self._codec, b"").parts)


def compress_bytes(data: bytes, codec: Codec = DEFAULT_CODEC) -> bytes:
    """The blob for a tar that lies in memory; the same bytes as a Compressor writes."""
    joiner = Joiner(codec)
    out = [joiner.header()]
    for start in range(0, len(data), codec.segment):
        out.extend(joiner.add(compress_segment(codec, memoryview(data)[start : start + codec.segment])))
    out.append(joiner.trailer())
    return b"".join(out)


class Compressor:
    """A thread pool that compresses; a context manager. Several ``run`` may go on at once and share threads and memory.

    ``threads`` defaults to the CPUs that this process may use. Memory stays within ``WORKING_MEMORY`` of input and as
    much of output, whatever the number of threads and runs.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or _cpus()
        # Two segments beyond those in work keep every thread busy while one is read and one is written.
        count = max(2, min(self.threads + 2, WORKING_MEMORY // SEGMENT))
        self._buffers: queue.LifoQueue[bytearray] = queue.LifoQueue()
        for _ in range(count):
            self._buffers.put(bytearray())
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="compress")

    def run(
        self,
        source: Readable,
        write: Callable[[bytes], object],
        codec: Codec = DEFAULT_CODEC,
        *,
        hash_input: bool = True,
    ) -> Compressed:
        """Read ``source`` to its end in this thread, compress it, and hand the blob to ``write`` from another one.

        ``write`` is called with one piece at a time, in order. ``hash_input=False`` saves a hash where the source
        proves itself. Whatever ``source`` or ``write`` raises is raised here, after all work for this run has stopped.
        """
        drain = _Drain(codec, write, self._buffers)
        tar_hash = hashlib.sha256() if hash_input else None
        try:
            ended = False
            while not ended and not drain.failed:
                buffer = self._buffers.get()
                try:
                    if len(buffer) != codec.segment:
                        buffer = bytearray(codec.segment)
                    view = memoryview(buffer)
                    count = fill(source, view)
                    if tar_hash:
                        tar_hash.update(view[:count])
                    ended = count < codec.segment
                    future = self._pool.submit(compress_segment, codec, view[:count]) if count else None
                except BaseException:
                    self._buffers.put(buffer)
                    raise
                if future is None:
                    self._buffers.put(buffer)
                else:
                    drain.put(future, buffer)
        except BaseException:
            drain.abandon()
            raise
        digest, size, tar_size = drain.finish()
        return Compressed(
            digest=digest,
            size=size,
            tar_size=tar_size,
            diff_id=Digest("sha256", tar_hash.hexdigest()) if tar_hash else None,
        )

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cpus() -> int:
    """CPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class _Drain:
    """The writing end of one run: a thread that takes finished segments in order, hashes and writes them."""

    def __init__(self, codec: Codec, write: Callable[[bytes], object], buffers: queue.LifoQueue[bytearray]) -> None:
        self._joiner = Joiner(codec)
        self._write = write
        self._buffers = buffers
        self._pending: queue.SimpleQueue[tuple[Future[Segment], bytearray] | None] = queue.SimpleQueue()
        self._hash = hashlib.sha256()
        self._size = 0
        self._error: BaseException | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="compress-drain", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def put(self, future: Future[Segment], buffer: bytearray) -> None:
        self._pending.put((future, buffer))

    def finish(self) -> tuple[Digest, int, int]:
        self._pending.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return Digest("sha256", self._hash.hexdigest()), self._size, self._joiner.input

    def abandon(self) -> None:
        self._abandoned = True
        self._pending.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._out(self._joiner.header())
        while (item := self._pending.get()) is not None:
            future, buffer = item
            try:
                # Waited for even after a failure: the worker may still be reading from the buffer.
                segment = future.result()
            except BaseException as error:
                self._error = self._error or error
                continue
            finally:
                self._buffers.put(buffer)
            self._out(*self._joiner.add(segment))
        if self._error is None:
            self._out(self._joiner.trailer())

    def _out(self, *parts: bytes) -> None:
        if self._error is not None or self._abandoned:
            return
        try:
            for data in parts:
                self._hash.update(data)
                self._size += len(data)
                if data:
                    self._write(data)
        except BaseException as error:
            self._error = error


def fill(source: Readable, view: memoryview) -> int:
    """Read until ``view`` is full or ``source`` ended; the number of bytes."""
    filled = 0
    if isinstance(source, ReadableInto):
        while filled < len(view):
            count = source.readinto(view[filled:])
            if not count:
                break
            filled += count
        return filled
    while filled < len(view):
        data = source.read(len(view) - filled)
        if not data:
            break
        view[filled : filled + len(data)] = data
        filled += len(data)
    return filled


# The way back --------------------------------------------------------------------------------------------------------

Encoding = Literal["tar", "gzip", "zstd"]

_FOREIGN = {b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x04\x22\x4d\x18": "lz4"}


def sniff(head: bytes, *, where: str) -> Encoding:
    """What layer bytes are, by their first 6 bytes. Raises FormatError for a compression that no client may use."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    # A frame's magic number, or a skippable frame's (RFC 8878, sections 3.1.1 and 3.1.2).
    if head.startswith(b"\x28\xb5\x2f\xfd") or (len(head) >= 4 and head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):
        return "zstd"
    for magic, name in _FOREIGN.items():
        if head.startswith(magic):
            raise FormatError(f"a layer compressed with {name}", where=where, hint="layers are plain, gzip or zstd")
    return "tar"


class Prefixed:
    """Bytes that were read ahead, then the rest of the stream that they came from."""

    def __init__(self, head: bytes, rest: Readable) -> None:
        self._head = memoryview(head)
        self._rest = rest

    def read(self, size: int, /) -> bytes:
        if self._head:
            piece = bytes(self._head[:size])
            self._head = self._head[size:]
            return piece
        return self._rest.read(size)

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        if self._head:
            count = min(len(self._head), len(target))
            target[:count] = self._head[:count]
            self._head = self._head[count:]
            return count
        if isinstance(self._rest, ReadableInto):
            return self._rest.readinto(target) or 0
        data = self._rest.read(len(target))
        target[: len(data)] = data
        return len(data)


def decompressed(source: Readable, *, where: str, limit: int = MAX_TAR) -> Readable:
    """The tar in ``source``, which is gzip (any number of members), zstd (any number of frames) or the tar itself.

    Reading raises FormatError for corrupt or truncated data, and beyond ``limit`` bytes. Memory is bounded whatever
    the data claims.
    """
    head = b""
    while len(head) < 6 and (data := source.read(6 - len(head))):
        head += data
    whole = Prefixed(head, source)
    encoding = sniff(head, where=where)
    if encoding == "gzip":
        return _Limited(_Gunzip(whole, where), where, limit)
    if encoding == "zstd":
        return _Limited(_Unzstd(whole, where), where, limit)
    return whole


class _Limited:
    def __init__(self, inner: Readable, where: str, limit: int) -> None:
        self._inner = inner
        self._where = where
        self._left = limit
        self._limit = limit

    def read(self, size: int, /) -> bytes:
        data = self._inner.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise FormatError(f"unpacks to more than {self._limit} bytes", where=self._where)
        return data


class _Gunzip:
    """RFC 1952 members one after the other, then nothing or zeros (as tape blocking and some tools leave)."""

    def __init__(self, source: Readable, where: str) -> None:
        self._source = source
        self._where = where
        self._member: igzip_lib.IgzipDecompressor | None = None
        self._rest = b""
        self._offset = 0

    def read(self, size: int, /) -> bytes:
        while size > 0:
            if self._member is None and not self._next_member():
                return b""
            assert self._member is not None
            data = b""
            if self._member.needs_input and not self._rest:
                data = self._pull()
                if not data:
                    raise FormatError("gzip data ends early", where=self._where, offset=self._offset)
            elif self._rest:
                data, self._rest = self._rest, b""
            try:
                out: bytes = self._member.decompress(data, size)
            except (_ISAL_ERROR, EOFError) as error:
                raise FormatError(f"corrupt gzip data ({error})", where=self._where, offset=self._offset) from error
            if self._member.eof:
                self._rest = self._member.unused_data
                self._member = None
            if out:
                return out
        return b""

    def _next_member(self) -> bool:
        first = self._offset == 0
        while not first and not self._rest.strip(b"\0"):
            self._rest = self._pull()
            if not self._rest:
                return False
        if not first and not self._rest.startswith(b"\x1f"):
            raise FormatError("garbage after the gzip data", where=self._where, offset=self._offset)
        self._member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        return True

    def _pull(self) -> bytes:
        data = self._source.read(_READ)
        self._offset += len(data)
        return data


class _Unzstd:
    """RFC 8878 frames one after the other."""

    def __init__(self, source: Readable, where: str) -> None:
        self._where = where
        self._counted = _Frames(source, where)
        self._reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(
            self._counted,  # type: ignore[arg-type]
            read_size=_READ,
            read_across_frames=True,
            closefd=False,
        )

    def read(self, size: int, /) -> bytes:
        try:
            data = self._reader.read(size) if size > 0 else b""
        except zstandard.ZstdError as error:
            raise FormatError(f"corrupt zstd data ({error})", where=self._where, offset=self._counted.offset) from error
        if not data and size > 0 and not self._counted.complete:
            raise FormatError("zstd data ends early", where=self._where, offset=self._counted.offset)
        return data


class _Frames:
    """Follows the frames in what is read through it, because the library takes a cut-off frame for the end.

    Only headers are looked at: magic number, frame header, block headers, checksum (RFC 8878, section 3.1).
    """

    def __init__(self, source: Readable, where: str) -> None:
        self._source = source
        self._where = where
        self.offset = 0
        self._head = b""
        self._skip = 0
        self._state: Literal["magic", "block"] = "magic"
        self._checksum = 0

    @property
    def complete(self) -> bool:
        return self._state == "magic" and not self._head and not self._skip

    def read(self, size: int, /) -> bytes:
        data = self._source.read(size)
        self.offset += len(data)
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            need = (3 if self._state == "block" else 8 if len(self._head) >= 5 else 5) - len(self._head)
            self._head += data[at : at + need]
            at += min(need, len(data) - at)
            self._parse()
        return data

    def _parse(self) -> None:
        head = self._head
        if self._state == "magic" and len(head) >= 5:
            if head[:4] == b"\x28\xb5\x2f\xfd":
                flags = head[4]
                single = flags >> 5 & 1
                content = (1 if single else 0, 2, 4, 8)[flags >> 6]
                self._skip = (1 - single) + (0, 1, 2, 4)[flags & 3] + content
                self._checksum = 4 * (flags >> 2 & 1)
                self._state, self._head = "block", b""
            elif head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:
                if len(head) == 8:
                    self._skip, self._head = int.from_bytes(head[4:], "little"), b""
            else:
                raise FormatError("garbage between the zstd frames", where=self._where, offset=self.offset)
        elif self._state == "block" and len(head) == 3:
            value = int.from_bytes(head, "little")
            last, kind, size = value & 1, value >> 1 & 3, value >> 3
            self._skip = 1 if kind == 1 else size  # an RLE block holds one byte, repeated
            self._head = b""
            if last:
                self._skip += self._checksum
                self._state = "magic"
