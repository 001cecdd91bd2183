"""Compressed segments on disk, each written once, and layers put together from them without another copy."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import zstandard
from isal import igzip_lib

from buildkit.errors import DigestMismatchError, StorageError
from buildkit.image.compress import Codec, Joiner, Segment
from buildkit.image.source import SourceLayer
from buildkit.model import Descriptor


class Spool:
    """A nameless file in ``directory``, which vanishes with the process. Reading is safe from several threads.

    Segments are numbered from 0. ``size`` is what a segment takes, ``input`` what it unpacks to, both in bytes.
    """

    def __init__(self, directory: Path | None) -> None:
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, prefix="split-", buffering=0)  # noqa: SIM115 - closed by close
        except OSError as error:
            raise StorageError(
                f"no temporary file in {directory or tempfile.gettempdir()}: {error.strerror}"
            ) from error
        self._where = str(directory or tempfile.gettempdir())
        self._lock = threading.Lock()
        self._offset = array("Q")
        self.size = array("I")
        self.input = array("I")
        self.crc = array("I")
        self.end = 0
        """Bytes written."""

    def append(self, segment: Segment) -> int:
        """Write a segment; its number. Raises StorageError where the disk refuses."""
        with self._lock:
            offset, size = self._write(segment.parts)
            self._offset.append(offset)
            self.size.append(size)
            self.input.append(segment.input)
            self.crc.append(segment.crc)
            return len(self._offset) - 1

    def write(self, data: bytes) -> tuple[int, int]:
        """Write bytes that are no segment; offset and size."""
        with self._lock:
            return self._write((data,))

    def read(self, offset: int, size: int) -> bytes:
        parts = []
        while size:
            data = os.pread(self._file.fileno(), size, offset)
            if not data:
                raise StorageError(f"temporary file in {self._where} lost its end")
            parts.append(data)
            offset, size = offset + len(data), size - len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def segment(self, number: int) -> Segment:
        data = self.read(self._offset[number], self.size[number])
        return Segment(parts=(data,), input=self.input[number], crc=self.crc[number])

    def ranges(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """(offset, size) of these segments in order, neighbours in the file joined."""
        out: list[tuple[int, int]] = []
        for number in numbers:
            offset, size = self._offset[number], self.size[number]
            if out and out[-1][0] + out[-1][1] == offset:
                out[-1] = (out[-1][0], out[-1][1] + size)
            else:
                out.append((offset, size))
        return out

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, parts: Sequence[bytes]) -> tuple[int, int]:
        begin = self.end
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    written = os.pwrite(self._file.fileno(), view, self.end)
                    self.end += written
                    view = view[written:]
        except OSError as error:
            raise StorageError(
                f"cannot write to {self._where}: {error.strerror}",
                hint="splitting needs room for the compressed image; choose another folder for temporary files",
            ) from error
        return begin, self.end - begin


def unpack(codec: Codec, segment: Segment) -> bytes:
    """The input of a segment that ``compress_segment`` made with this codec."""
    data = b"".join(segment.parts)
    if codec.algorithm == "zstd":
        return zstandard.ZstdDecompressor().decompress(data)
    out: bytes = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_DEFLATE).decompress(data, segment.input)
    if len(out) != segment.input:
        raise StorageError("a segment in the temporary file does not unpack to what went in")
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A blob in the spool: ``head``, then ranges of the file, then ``tail``."""

    descriptor: Descriptor
    head: bytes
    ranges: tuple[tuple[int, int], ...]
    tail: bytes


def assemble(codec: Codec, spool: Spool, numbers: Sequence[int]) -> tuple[bytes, tuple[tuple[int, int], ...], bytes]:
    """Head, ranges and tail of the blob made of these segments."""
    joiner = Joiner(codec)
    head = joiner.header()
    for number in numbers:
        joiner.add(Segment(parts=(), input=spool.input[number], crc=spool.crc[number]))
    return head, tuple(spool.ranges(numbers)), joiner.trailer()


class StoredStream:
    """``LayerStream`` over a stored blob; the digest is checked before the end is reported."""

    kind: Literal["tar", "blob"] = "blob"

    def __init__(self, spool: Spool, stored: Stored, *, index: int, layer: SourceLayer) -> None:
        self.index = index
        self.layer = layer
        self._spool = spool
        self._stored = stored
        self._hash = hashlib.sha256()
        self._plan: list[bytes | tuple[int, int]] = [stored.head, *stored.ranges, stored.tail]
        self._plan.reverse()
        self._checked = False

    def read(self, size: int, /) -> bytes:
        while self._plan and size > 0:
            step = self._plan.pop()
            if isinstance(step, bytes):
                data, rest = step[:size], step[size:]
                if rest:
                    self._plan.append(rest)
            else:
                offset, left = step
                data = self._spool.read(offset, min(left, size))
                if len(data) < left:
                    self._plan.append((offset + len(data), left - len(data)))
            if data:
                self._hash.update(data)
                return data
        if size > 0 and not self._checked:
            if self._hash.hexdigest() != self._stored.descriptor.digest.hex:
                raise DigestMismatchError(
                    f"layer {self.index + 1} in the temporary file is not {self._stored.descriptor.digest}",
                    hint="the disk changed it; try again",
                )
            self._checked = True
        return b""

    def close(self) -> None:
        self._plan.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()
