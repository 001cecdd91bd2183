"""Bytes that can be read at any offset: what the parsers of this package take instead of a path.

A parser asks for small pieces of large files, so the handle has one verb, ``read(offset, size)``, and no position that
two readers could fight over. A short answer means the end of the data, never "try again".
"""

from __future__ import annotations

import errno
import io
import os
from typing import BinaryIO, Protocol

from buildkit.errors import FormatError


class ReadAt(Protocol):
    """Bytes ``[0, size)``."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int, /) -> bytes:
        """``size`` bytes from ``offset`` on; fewer only where the data ends."""
        ...

    def data_from(self, offset: int, /) -> int:
        """The first offset at or after ``offset`` that is not known to be in a hole of zeros; ``size`` if none is."""
        ...


class MemoryReader:
    """Bytes that are in memory already; not copied."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, size: int, /) -> bytes:
        return bytes(self._data[offset : offset + size]) if offset >= 0 and size > 0 else b""

    def data_from(self, offset: int, /) -> int:
        return offset


class FileReader:
    """A seekable binary file, which the caller opens and closes; ``pread`` where it is a real one.

    ``pread`` and not ``mmap``: touched pages of a mapping count as this process's memory, and the kernel maps their
    neighbours too, so that a walk over 985 MB would look like (and under a memory limit be) 200 MB.
    """

    __slots__ = ("_fd", "_handle", "_size")

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self._size = handle.seek(0, io.SEEK_END)
        try:
            self._fd: int | None = handle.fileno()
        except (OSError, AttributeError):
            self._fd = None

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, size: int, /) -> bytes:
        if offset < 0 or size <= 0 or offset >= self._size:
            return b""
        size = min(size, self._size - offset)
        if self._fd is None:
            self._handle.seek(offset)
            return self._handle.read(size)
        data = os.pread(self._fd, size, offset)
        while len(data) < size:
            more = os.pread(self._fd, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def data_from(self, offset: int, /) -> int:
        if self._fd is None or offset >= self._size:
            return offset
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            # ENXIO: nothing but a hole up to the end. Else: the file system does not tell.
            return self._size if error.errno == errno.ENXIO else offset


class Window:
    """``size`` bytes of another handle, from ``offset`` on: a member of an archive, an entry of a fatbin."""

    __slots__ = ("_base", "_offset", "_size")

    def __init__(self, base: ReadAt, offset: int, size: int) -> None:
        self._base = base
        self._offset = offset
        self._size = max(0, min(size, base.size - offset))

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, size: int, /) -> bytes:
        if offset < 0 or size <= 0 or offset >= self._size:
            return b""
        return self._base.read(self._offset + offset, min(size, self._size - offset))

    def data_from(self, offset: int, /) -> int:
        return min(self._base.data_from(self._offset + offset) - self._offset, max(offset, self._size))


def read_exactly(handle: ReadAt, offset: int, size: int, what: str) -> bytes:
    """``size`` bytes at ``offset``. Raises FormatError, naming ``what``, where the data ends before."""
    data = handle.read(offset, size)
    if len(data) != size:
        raise FormatError(f"{what} is cut short: {len(data)} of {size} bytes", offset=offset)
    return data
