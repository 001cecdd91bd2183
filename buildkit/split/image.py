"""The divided image as a source for transports and pushes."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

from buildkit.errors import NotFoundError, StorageError
from buildkit.image.blobfile import FileBlob, HoldsBlobs
from buildkit.image.source import ImageSource, LayerStream, SourceLayer
from buildkit.image.write import OutputImage
from buildkit.model import Descriptor, ImageConfig, Manifest
from buildkit.split.spool import Spool, Stored, StoredStream

_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLayer:
    """A layer of the new image: ``stored`` in the spool, or ``passed`` on from the source's layer of that index."""

    layer: SourceLayer
    descriptor: Descriptor
    stored: Stored | None = None
    passed: int | None = None


class SplitImage:
    """The divided image as an ``ImageSource``. It reads layers that pass through from the source, which stays open."""

    method = "split"
    random_access = True

    def __init__(
        self, source: ImageSource, spool: Spool, layers: tuple[NewLayer, ...], config: ImageConfig, manifest: Manifest
    ) -> None:
        self.name = source.name
        self.reason = ""
        self.image_id = config.digest
        self.manifest: Manifest | None = manifest
        self.layers = tuple(new.layer for new in layers)
        self._source = source
        self._spool = spool
        self._new = layers
        self._config = config

    def config(self) -> ImageConfig:
        return self._config

    def stream(self, wanted: Collection[int]) -> Iterator[LayerStream]:
        for index in sorted(set(wanted)):
            with self.open(index) as stream:
                yield stream

    def open(self, index: int) -> LayerStream:
        new = self._new[index]
        if new.stored is not None:
            return StoredStream(new.stored, index=index, layer=new.layer)
        assert new.passed is not None
        return _Renumbered(self._source.open(new.passed), index)

    def local_blob(self, index: int) -> FileBlob | None:
        """The layer's blob where it lies whole in one file, else None; the caller closes it."""
        new = self._new[index]
        if new.stored is not None and new.stored.whole is not None:
            handle = os.dup(new.stored.whole.handle)
            return FileBlob(handle, new.descriptor, label=f"layer {index + 1}", path=self._spool.directory)
        if new.passed is not None and isinstance(self._source, HoldsBlobs):
            return self._source.local_blob(new.passed)
        return None

    def output(self) -> OutputImage:
        """For ``buildkit.image.write``."""
        assert self.manifest is not None
        return OutputImage(manifest=self.manifest, config=self._config, open_blob=self.open_blob)

    def open_blob(self, descriptor: Descriptor) -> BinaryIO:
        """A fresh reader of a layer's blob."""
        for index, new in enumerate(self._new):
            if new.descriptor.digest == descriptor.digest:
                return cast(BinaryIO, io.BufferedReader(_Raw(self.open(index)), 2**20))
        raise NotFoundError(f"{self.name} has no layer {descriptor.digest}")

    def link_blobs(self, folder: Path) -> int:
        """Give the blobs that lie whole in the spool their names in an OCI layout; how many that worked for.

        Saves the writer of the layout, which takes what it finds there for written, a copy of each. Needs a spool on
        the same file system.
        """
        count = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not any(folder.iterdir()):
                (folder / "oci-layout").write_bytes(_LAYOUT)
            if not (folder / "oci-layout").is_file():
                return 0
            for new in self._new:
                target = folder / "blobs" / new.descriptor.digest.algorithm / new.descriptor.digest.hex
                target.parent.mkdir(parents=True, exist_ok=True)
                if new.stored is not None and new.stored.whole is not None:
                    count += new.stored.whole.link(target)
        except OSError as error:
            raise StorageError(f"{folder}: {error.strerror}") from error
        return count

    def close(self) -> None:
        self._spool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()


class _Renumbered:
    """A stream of the source under the number that the layer has in the new image."""

    def __init__(self, stream: LayerStream, index: int) -> None:
        self._stream = stream
        self.index = index
        self.layer = stream.layer
        self.kind = stream.kind

    def read(self, size: int, /) -> bytes:
        return self._stream.read(size)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()


class _Raw(io.RawIOBase):
    """A layer stream as a file that is read from front to back."""

    def __init__(self, stream: LayerStream) -> None:
        super().__init__()
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()
