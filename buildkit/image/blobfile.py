"""Blobs in local files: a range of a file that is complete, and a file that grows while a compressor writes it.

Both implement ``buildkit.blob.Blob`` and are read by position (pread), so any number of windows can be open at
once, in several threads.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, cast, runtime_checkable

from buildkit.blob import BlobState
from buildkit.errors import BuildkitError, DigestMismatchError, FormatError, StorageError
from buildkit.image.streams import HashingReader
from buildkit.model import Descriptor
from buildkit.units import format_size

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Window(io.RawIOBase):
    """Bytes ``[start, end)`` of a file as a seekable reader. It owns ``handle`` and closes it."""

    def __init__(self, handle: int, start: int, end: int) -> None:
        super().__init__()
        self._handle = handle
        self._start = start
        self._length = end - start
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        count = os.preadv(self._handle, [target], self._start + self._at) if target else 0
        if target and not count:
            raise FormatError("the file was cut short while it was read", offset=self._start + self._at)
        self._at += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("negative position")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def __len__(self) -> int:
        return self._length

    def close(self) -> None:
        if not self.closed:
            os.close(self._handle)
        super().close()


class FileBlob:
    """A complete blob: ``descriptor.size`` bytes from ``offset`` in a file. It owns ``handle``; ``close`` frees it.

    The bytes are not proven by opening: ``verify`` or whoever reads them does that.
    """

    def __init__(self, handle: int, descriptor: Descriptor, *, label: str, offset: int = 0, path: Path) -> None:
        self._handle = handle
        self._offset = offset
        self._label = label
        self.descriptor = descriptor
        self.path = path

    @classmethod
    def open(cls, path: Path, descriptor: Descriptor, *, label: str, offset: int = 0) -> FileBlob:
        """Raises StorageError where the file cannot be opened, FormatError where it is too short."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error
        if os.fstat(handle).st_size < offset + descriptor.size:
            os.close(handle)
            raise FormatError(f"is too short for blob {descriptor.digest}", where=str(path), offset=offset)
        return cls(handle, descriptor, label=label, offset=offset, path=path)

    @property
    def label(self) -> str:
        return self._label

    def state(self) -> BlobState:
        return BlobState(available=self.descriptor.size, descriptor=self.descriptor)

    def wait(self, available: int, timeout: float) -> BlobState:  # noqa: ARG002  # complete: never waits
        return self.state()

    def window(self, start: int, end: int) -> BinaryIO:
        _check_window(start, end, self.descriptor.size)
        return cast(BinaryIO, Window(os.dup(self._handle), self._offset + start, self._offset + end))

    def verify(self) -> None:
        """Read it all; DigestMismatchError where it is not what its digest says."""
        with self.window(0, self.descriptor.size) as window:
            reader = HashingReader(
                cast(Any, window), digest=self.descriptor.digest, size=self.descriptor.size, what=str(self.path)
            )
            while reader.read(1 << 20):
                pass

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@runtime_checkable
class HoldsBlobs(Protocol):
    """A source whose blobs lie in local files, so that they are passed on from where they lie."""

    def local_blob(self, index: int) -> FileBlob | None:
        """The layer's blob where it lies whole in one file, else None; the caller closes it."""
        ...


class GrowingBlob:
    """A blob that is being written: one writer (``write``, then ``finish`` or ``fail``), any number of readers.

    It owns ``handle``. ``on_full`` is asked once per failed write to free space on a full disk; True means "try again".
    ``path`` is for messages only: the file may have no name any more.
    """

    def __init__(self, handle: int, path: Path, *, label: str, on_full: Callable[[], bool] = lambda: False) -> None:
        self._handle = handle
        self._label = label
        self._on_full = on_full
        self._state = BlobState(available=0)
        self._changed = threading.Condition()
        self.path = path

    @property
    def label(self) -> str:
        return self._label

    @property
    def handle(self) -> int:
        """The open file, for whoever gives it its final name."""
        return self._handle

    def write(self, data: bytes) -> None:
        """Append. Raises StorageError where the disk is full or refuses."""
        rest = memoryview(data)
        while rest:
            try:
                count = os.write(self._handle, rest)
            except OSError as error:
                if error.errno in _FULL and self._on_full():
                    continue
                raise storage_error(self.path, error) from error
            rest = rest[count:]
        with self._changed:
            self._state = BlobState(available=self._state.available + len(data))
            self._changed.notify_all()

    def finish(self, descriptor: Descriptor) -> None:
        """Complete: nothing more will be written. ``descriptor`` must describe exactly what was."""
        with self._changed:
            if descriptor.size != self._state.available:
                raise DigestMismatchError(
                    f"{self._label}: {self._state.available} bytes were written, not {descriptor.size}"
                )
            self._state = BlobState(available=descriptor.size, descriptor=descriptor)
            self._changed.notify_all()

    def fail(self, error: BuildkitError) -> None:
        """Tell the readers that it will never be complete; without effect once it ended."""
        with self._changed:
            if not self._state.ended:
                self._state = BlobState(available=self._state.available, error=error)
                self._changed.notify_all()

    def state(self) -> BlobState:
        return self._state

    def wait(self, available: int, timeout: float) -> BlobState:
        with self._changed:
            self._changed.wait_for(lambda: self._state.ended or self._state.available >= available, timeout)
            return self._state

    def window(self, start: int, end: int) -> BinaryIO:
        _check_window(start, end, self._state.available)
        return cast(BinaryIO, Window(os.dup(self._handle), start, end))

    def close(self) -> None:
        """Free the file; a blob that has not ended has failed. Windows that are open stay usable."""
        self.fail(StorageError(f"{self._label}: writing was given up"))
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def storage_error(path: Path, error: OSError) -> StorageError:
    """``error`` of the file system as ours, with the free space where that is what was missing."""
    if error.errno not in _FULL:
        return StorageError(f"{path}: {error.strerror or error}")
    try:
        free = os.statvfs(path if path.exists() else path.parent)
        left = f"; {format_size(free.f_bavail * free.f_frsize)} are free there"
    except OSError:
        left = ""
    return StorageError(
        f"{path}: {error.strerror}{left}", hint="free space, or set BUILDKIT_CACHE_DIR to a folder on a larger disk"
    )


def _check_window(start: int, end: int, available: int) -> None:
    if not 0 <= start <= end <= available:
        raise ValueError(f"window [{start}, {end}) of {available} available bytes")
