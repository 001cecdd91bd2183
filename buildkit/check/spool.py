"""A file that comes as a stream, made readable at any offset, without keeping what nobody will ask for.

ELF keeps its section headers at the end, and layers and wheels can be read from front to back only. So what may be
needed is copied to one temporary file that all files of a check use in turn, and two things, nearly everything there
is in a CUDA library, are left out:

- the payloads of fatbin entries, recognised by their headers on the way (not where names of kernels or digests of
  fatbins are wanted);
- machine code, where the program headers at the front say that a segment holds nothing else: the scan never reads it.

Both are assumptions, and both are held against what the scan found: see ``Spool.unaccounted``.
"""

from __future__ import annotations

import os
import struct
import tempfile
from bisect import bisect_right
from collections.abc import Iterable
from types import TracebackType
from typing import IO, Self

from buildkit.cuda import elf, fatbin
from buildkit.cuda.readat import MemoryReader
from buildkit.cuda.scan import Unit
from buildkit.errors import FormatError, StorageError

KEPT_PAYLOAD = 8 * 1024
"""Payloads up to this many bytes are kept: the scan looks into small ones for being empty."""
_PF_X, _PF_W = 1, 2
_HEAD = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ")
_NEED = 16 + 16
_HEADERS = 4096
_CACHE = 8192
_FLUSH = 1 << 20
_CARRY = len(fatbin.NEEDLE) - 1


class Spool:
    """One file at a time: ``begin``, ``feed`` …, then read it as a ReadAt until the next ``begin``.

    Owns an anonymous temporary file; a context manager that removes it. Its pages are used again and again, so the disk
    holds no more than the largest file's share. Raises StorageError where there is no room.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="buildkit-check-")  # noqa: SIM115 - closed by __exit__
        self._fd = self._file.fileno()
        self.begin()

    def begin(self, *, keep_payloads: bool = False) -> None:
        """Forget the last file; the next one starts at offset 0."""
        self._keep = keep_payloads
        self._size = 0  # of the file, so far
        self._stored = 0
        self._starts: list[int] = []
        self._extents: list[tuple[int, int, int]] = []  # offset in the file, offset in the store, length
        self._payload_holes: list[tuple[int, int]] = []
        self._code: list[tuple[int, int]] = []
        self._touched: int | None = None
        self._buffer = bytearray()  # the end of the store, not written yet
        self._cached = (0, b"")  # offset and bytes that were read last
        self._carry = b""
        self._skip = 0  # bytes of a payload still to come
        self._ends = 0  # of the fatbin that is passing by

    @property
    def size(self) -> int:
        return self._size

    def feed(self, data: bytes) -> None:
        """The next bytes of the file."""
        if self._size == 0:
            self._code = _pure_code(data)
        self._size += len(data)
        if self._keep:
            self._store(self._size - len(data), data)
            return
        start = self._size - len(data) - len(self._carry)
        self._pass(start, self._carry + data if self._carry else data)

    def finish(self) -> None:
        """The file is complete."""
        if self._carry:
            self._store(self._size - len(self._carry), self._carry)
            self._carry = b""
        self._flush()

    def read(self, offset: int, size: int, /) -> bytes:
        if offset < 0 or size <= 0 or offset >= self._size:
            return b""
        size = min(size, self._size - offset)
        at, cached = self._cached
        if at <= offset and offset + size <= at + len(cached):
            return cached[offset - at : offset - at + size]
        if size >= _CACHE:
            return self._read(offset, size)
        # Headers are read in small pieces, one close to the other.
        cached = self._read(offset, min(_CACHE, self._size - offset, self._code_from(offset, size) - offset))
        self._cached = (offset, cached)
        return cached[:size]

    def _code_from(self, offset: int, size: int) -> int:
        """Where the next segment of machine code begins: reading ahead must not touch it."""
        return min((start for start, _ in self._code if start >= offset + size), default=self._size)

    def _read(self, offset: int, size: int) -> bytes:
        for start, end in self._code:
            if offset < end and offset + size > start and self._touched is None:
                self._touched = max(offset, start)
        index = max(0, bisect_right(self._starts, offset) - 1)
        if index < len(self._extents):
            at, stored, length = self._extents[index]
            if at <= offset and offset + size <= at + length:
                return os.pread(self._fd, size, stored + offset - at)
        out = bytearray(size)
        while index < len(self._extents):
            at, stored, length = self._extents[index]
            if at >= offset + size:
                break
            low, high = max(at, offset), min(at + length, offset + size)
            if low < high:
                out[low - offset : high - offset] = os.pread(self._fd, high - low, stored + low - at)
            index += 1
        return bytes(out)

    def data_from(self, offset: int, /) -> int:
        index = bisect_right(self._starts, offset) - 1
        if index >= 0 and offset < self._extents[index][0] + self._extents[index][2]:
            return offset
        return self._starts[index + 1] if index + 1 < len(self._starts) else max(offset, self._size)

    def unaccounted(self, units: Iterable[Unit]) -> int | None:
        """Offset of a byte that was left out though the scan needed it or knows nothing of it; None if there is none.

        What was left out as a payload must be the payload of an entry that was found, so that no forged header can
        hide what comes after it.
        """
        if self._touched is not None:
            return self._touched
        if not self._payload_holes:
            return None
        found = sorted((e.offset + e.header_size, e.stored) for u in units for e in u.entries)
        starts = [start for start, _ in found]
        for start, end in self._payload_holes:
            index = bisect_right(starts, start) - 1
            # The hole may reach over the padding, which ``stored`` does not count.
            if index < 0 or starts[index] != start or end > start + found[index][1] + 8:
                return start
        return None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pass(self, start: int, data: bytes) -> None:
        """``data`` lies at ``start`` of the file: store it, but for payloads; keep back what may be half a header."""
        at = 0
        self._carry = b""
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            position = start + at
            if position < self._ends:
                # At an entry of a fatbin: its header says how long the payload is.
                if len(data) - at < 16:
                    self._carry = data[at:]
                    return
                _, _, header, payload = _ENTRY.unpack_from(data, at)
                room = self._ends - position
                if not fatbin.MIN_ENTRY <= header <= min(room, 1 << 16) or payload > room - header:
                    self._ends = 0  # no entry after all: keep everything
                    continue
                # Small payloads are kept, and of all others what lies at the front of the file: it tells what it is.
                kept = payload if payload <= KEPT_PAYLOAD else min(payload, max(0, _HEADERS - position - header))
                if len(data) - at < header + kept:
                    self._carry = data[at:]
                    return
                self._store(position, data[at : at + header + kept])
                at += header + kept
                self._skip = payload - kept
                if self._skip:
                    self._payload_holes.append((start + at - kept, start + at + self._skip))
                continue
            match = fatbin.NEEDLE_PATTERN.search(data, at)
            hit = match.start() if match else -1
            if hit < 0:
                keep = max(at, len(data) - _CARRY)
                self._store(position, data[at:keep])
                self._carry = data[keep:]
                return
            if len(data) - hit < fatbin.HEADER_SIZE:
                self._store(position, data[at:hit])
                self._carry = data[hit:]
                return
            self._store(position, data[at : hit + fatbin.HEADER_SIZE])
            size = _HEAD.unpack_from(data, hit)[3]
            at = hit + fatbin.HEADER_SIZE
            self._ends = start + at + size

    def _store(self, offset: int, data: bytes) -> None:
        """Keep ``data``, less what lies in segments of pure machine code."""
        for start, end in self._code:
            if offset < end and offset + len(data) > start:
                if offset < start:
                    self._write(offset, data[: start - offset])
                if offset + len(data) > end:
                    self._store(end, data[end - offset :])
                return
        self._write(offset, data)

    def _write(self, offset: int, data: bytes) -> None:
        if not data:
            return
        self._buffer += data
        if self._extents and self._extents[-1][0] + self._extents[-1][2] == offset:
            at, stored, length = self._extents[-1]
            self._extents[-1] = (at, stored, length + len(data))
        else:
            self._starts.append(offset)
            self._extents.append((offset, self._stored, len(data)))
        self._stored += len(data)
        if len(self._buffer) >= _FLUSH:
            self._flush()

    def _flush(self) -> None:
        view = memoryview(self._buffer)
        at = self._stored - len(view)
        try:
            while view:
                done = os.pwrite(self._fd, view, at)
                view, at = view[done:], at + done
        except OSError as error:
            raise StorageError(
                f"no room for the file being checked: {error.strerror}", hint="set TMPDIR to a folder with room"
            ) from error
        finally:
            view.release()
        self._buffer = bytearray()


def _pure_code(head: bytes) -> list[tuple[int, int]]:
    """File ranges of the segments that hold machine code and nothing else, by the program headers in ``head``.

    Linkers either put code into a segment of its own beside segments of constants, or both into one. Where any segment
    is neither executable nor writable, constants have one, and the executable ones are code alone. One with the file's
    own headers in it is not of that kind.
    """
    if not head.startswith(elf.MAGIC):
        return []
    reader = MemoryReader(head)
    try:
        header = elf.read_header(reader)
        if header.machine == elf.EM_CUDA or header.sections_at == 0:
            return []
        loads = [s for s in elf.read_segments(reader, header) if s.type == elf.PT_LOAD]
    except FormatError:
        return []
    if not any(not s.flags & (_PF_X | _PF_W) for s in loads):
        return []
    code = sorted((s.offset, s.offset + s.file_size) for s in loads if s.flags & _PF_X and s.file_size)
    return [] if code and code[0][0] < _HEADERS else code
