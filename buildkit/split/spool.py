"""Compressed segments on disk, each written once, in nameless files that vanish with the process.

There is a file for each part that is foreseen (a *bin*), so that its blob lies there whole, to be uploaded or linked
into a layout without a copy; and one file for everything else. A part that turns out otherwise than foreseen is put
together from wherever its segments lie.
"""

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
from buildkit.image.blobfile import storage_error
from buildkit.image.compress import Codec, Joiner, Segment
from buildkit.image.source import SourceLayer
from buildkit.model import Descriptor

MAX_BINS = 256
"""Files open at once; beyond it, what would have a bin goes to the common file."""
_READ = 2**20


@dataclass(frozen=True, slots=True)
class Range:
    """``size`` bytes at ``offset`` of a bin."""

    bin: Bin
    offset: int
    size: int


class Bin:
    """A nameless file that only grows. Reading is safe from several threads, writing from one at a time."""

    def __init__(self, directory: Path, number: int) -> None:
        self._directory = directory
        self.number = number
        try:
            # Without O_EXCL, so that it can be given a name (open(2), "O_TMPFILE").
            self.handle = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError:
            self.handle = self._unlinked(directory)
        self.end = 0
        """Bytes written."""

    @staticmethod
    def _unlinked(directory: Path) -> int:
        """For file systems without nameless files: a file whose name is removed at once."""
        try:
            handle, name = tempfile.mkstemp(dir=directory, prefix="split-")
            os.unlink(name)
        except OSError as error:
            raise storage_error(directory, error) from error
        return handle

    def write(self, parts: Iterable[bytes]) -> Range:
        """Append. Raises StorageError where the disk refuses."""
        begin = self.end
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    written = os.pwrite(self.handle, view, self.end)
                    self.end += written
                    view = view[written:]
        except OSError as error:
            raise storage_error(self._directory, error) from error
        return Range(self, begin, self.end - begin)

    def read(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes."""
        parts = []
        while size:
            data = os.pread(self.handle, size, offset)
            if not data:
                raise StorageError(f"a temporary file in {self._directory} lost its end")
            parts.append(data)
            offset, size = offset + len(data), size - len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def link(self, target: Path) -> bool:
        """Give the file a name; False where that cannot be done (another file system, or there is such a file)."""
        try:
            # By a folder's handle: only then does Python follow the link (linkat(2), AT_SYMLINK_FOLLOW).
            folder = os.open("/proc/self/fd", os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            os.link(str(self.handle), target, src_dir_fd=folder, follow_symlinks=True)
        except OSError:
            return False
        finally:
            os.close(folder)
        return True

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class Spool:
    """All bins in ``directory`` (the system's temporary one by default), and the segments in them.

    Segments are numbered from 0. ``size`` is what a segment takes, ``input`` what it unpacks to, both in bytes.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory or Path(tempfile.gettempdir())
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(self.directory, error) from error
        self._lock = threading.Lock()
        self.common = Bin(self.directory, 0)
        self._bins = [self.common]
        self._bin = array("H")
        self._offset = array("Q")
        self.size = array("I")
        self.input = array("I")
        self.crc = array("I")

    def bin(self) -> Bin:
        """A new bin, or the common one where too many are open."""
        with self._lock:
            if len(self._bins) >= MAX_BINS:
                return self.common
            self._bins.append(Bin(self.directory, len(self._bins)))
            return self._bins[-1]

    def append(self, segment: Segment, into: Bin | None = None) -> int:
        """Write a segment; its number. Raises StorageError where the disk refuses."""
        with self._lock:
            into = into or self.common
            place = into.write(segment.parts)
            self._bin.append(into.number)
            self._offset.append(place.offset)
            self.size.append(place.size)
            self.input.append(segment.input)
            self.crc.append(segment.crc)
            return len(self._offset) - 1

    def move(self, number: int, into: Bin) -> None:
        """Copy a segment to the end of another bin, where it lies from now on."""
        data = self.segment(number)
        with self._lock:
            self._offset[number] = into.write(data.parts).offset
            self._bin[number] = into.number

    def range(self, number: int) -> Range:
        return Range(self._bins[self._bin[number]], self._offset[number], self.size[number])

    def segment(self, number: int) -> Segment:
        place = self.range(number)
        data = place.bin.read(place.offset, place.size)
        return Segment(parts=(data,), input=self.input[number], crc=self.crc[number])

    def close(self) -> None:
        for each in self._bins:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    """A blob in the spool, piece by piece. ``whole``: the bin that holds it and nothing else, where there is one."""

    descriptor: Descriptor
    pieces: tuple[bytes | Range, ...]
    whole: Bin | None = None


def assembled(codec: Codec, spool: Spool, numbers: Sequence[int]) -> tuple[bytes | Range, ...]:
    """The pieces of the blob made of these segments, neighbours in a file joined."""
    joiner = Joiner(codec)
    out: list[bytes | Range] = [joiner.header()]
    for number in numbers:
        joiner.add(Segment(parts=(), input=spool.input[number], crc=spool.crc[number]))
        place, last = spool.range(number), out[-1]
        if isinstance(last, Range) and last.bin is place.bin and last.offset + last.size == place.offset:
            out[-1] = Range(last.bin, last.offset, last.size + place.size)
        else:
            out.append(place)
    out.append(joiner.trailer())
    return tuple(out)


class StoredStream:
    """``LayerStream`` over a stored blob; the digest is checked before the end is reported."""

    kind: Literal["tar", "blob"] = "blob"

    def __init__(self, stored: Stored, *, index: int, layer: SourceLayer) -> None:
        self.index = index
        self.layer = layer
        self._descriptor = stored.descriptor
        self._hash = hashlib.sha256()
        self._left = list(reversed(stored.pieces))
        self._checked = False

    def read(self, size: int, /) -> bytes:
        while self._left and size > 0:
            piece = self._left.pop()
            if isinstance(piece, bytes):
                data, rest = piece[:size], piece[size:]
                if rest:
                    self._left.append(rest)
            else:
                count = min(piece.size, size)
                data = piece.bin.read(piece.offset, count)
                if count < piece.size:
                    self._left.append(Range(piece.bin, piece.offset + count, piece.size - count))
            if data:
                self._hash.update(data)
                return data
        if size > 0 and not self._checked:
            if self._hash.hexdigest() != self._descriptor.digest.hex:
                raise DigestMismatchError(
                    f"layer {self.index + 1} in the temporary file is not {self._descriptor.digest}",
                    hint="the disk changed it; try again",
                )
            self._checked = True
        return b""

    def close(self) -> None:
        self._left.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()
