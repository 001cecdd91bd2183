"""Blobs of every kind: complete, growing, failing."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import BinaryIO

from buildkit.blob import BlobState
from buildkit.errors import BuildkitError
from buildkit.model import OCI_LAYER_GZIP, Descriptor, Digest


class MemoryBlob:
    """A complete blob from bytes. ``fail_at`` makes reading that offset raise OSError, as a bad disk would."""

    def __init__(self, data: bytes, *, label: str = "layer 1/1", fail_at: int | None = None) -> None:
        self.data = data
        self.label = label
        self._fail_at = fail_at
        self.descriptor = Descriptor(media_type=OCI_LAYER_GZIP, digest=Digest.of(data), size=len(data))

    def state(self) -> BlobState:
        return BlobState(available=len(self.data), descriptor=self.descriptor)

    def wait(self, available: int, timeout: float) -> BlobState:
        del available, timeout
        return self.state()

    def window(self, start: int, end: int) -> BinaryIO:
        assert 0 <= start <= end <= len(self.data)
        if self._fail_at is not None and start <= self._fail_at < end:
            return _BadDisk(self.data[start : self._fail_at])
        return io.BytesIO(self.data[start:end])


class _BadDisk(io.BytesIO):
    """The bytes that can be read, then an error instead of the end."""

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = super().readinto(buffer)
        if not count:
            raise OSError(5, "Input/output error")
        return count


class GrowingBlob:
    """Each ``wait`` lets it grow by the next of ``steps`` bytes; it ends after the last, whole or with ``error``."""

    def __init__(
        self, data: bytes, steps: list[int], *, label: str = "layer 1/1", error: BuildkitError | None = None
    ) -> None:
        self.data = data
        self.label = label
        self._steps = steps
        self._error = error
        self._available = 0
        self._ended = False
        self._lock = threading.Lock()
        self.descriptor = Descriptor(media_type=OCI_LAYER_GZIP, digest=Digest.of(data), size=len(data))

    def state(self) -> BlobState:
        with self._lock:
            if not self._ended:
                return BlobState(available=self._available)
            if self._error is not None:
                return BlobState(available=self._available, error=self._error)
            return BlobState(available=len(self.data), descriptor=self.descriptor)

    def wait(self, available: int, timeout: float) -> BlobState:
        del available, timeout
        with self._lock:
            if self._steps:
                self._available = min(len(self.data), self._available + self._steps.pop(0))
            else:
                self._ended = True
        return self.state()

    def window(self, start: int, end: int) -> BinaryIO:
        with self._lock:
            assert 0 <= start <= end <= (len(self.data) if self._ended and not self._error else self._available)
        return io.BytesIO(self.data[start:end])


class FileBlob:
    """A complete blob in a file."""

    def __init__(self, path: Path, digest: Digest, *, label: str = "layer 1/1") -> None:
        self._path = path
        self.label = label
        self.descriptor = Descriptor(media_type=OCI_LAYER_GZIP, digest=digest, size=path.stat().st_size)

    def state(self) -> BlobState:
        return BlobState(available=self.descriptor.size, descriptor=self.descriptor)

    def wait(self, available: int, timeout: float) -> BlobState:
        del available, timeout
        return self.state()

    def window(self, start: int, end: int) -> BinaryIO:
        assert 0 <= start <= end <= self.descriptor.size
        file = self._path.open("rb", buffering=0)
        file.seek(start)
        return file
