"""Readers that prove what goes through them.

Every stream of layer bytes in this package ends in one of these: it hashes and counts on the way and compares before it
reports the end, so that whoever reads to ``b""`` holds verified content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, Self

from buildkit.errors import DigestMismatchError, FormatError
from buildkit.image.compress import Readable, ReadableInto, decompressed
from buildkit.image.source import LayerStream, SourceLayer
from buildkit.model import Digest


class HashingReader:
    """Passes ``source`` on and compares it with ``digest`` (and ``size``, where known) before the end is reported."""

    def __init__(self, source: Readable, *, digest: Digest, what: str, size: int | None = None) -> None:
        self._source = source
        self._into = source if isinstance(source, ReadableInto) else None
        self._digest = digest
        self._hash = hashlib.new(digest.algorithm)
        self._what = what
        self._size = size
        self.count = 0
        """Bytes so far."""
        self.verified = False

    @property
    def hexdigest(self) -> str:
        """Of what went through so far."""
        return self._hash.hexdigest()

    def read(self, size: int, /) -> bytes:
        data = self._source.read(size) if size else b""
        if size:
            self._seen(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        if not target:
            return 0
        if self._into is not None:
            count = self._into.readinto(target) or 0
        else:
            data = self._source.read(len(target))
            count = len(data)
            target[:count] = data
        self._seen(target[:count])
        return count

    def _seen(self, data: bytes | memoryview) -> None:
        if not data:
            self._end()
            return
        self._hash.update(data)
        self.count += len(data)
        if self._size is not None and self.count > self._size:
            raise DigestMismatchError(f"{self._what} is larger than the {self._size} bytes that its descriptor says")

    def _end(self) -> None:
        if self.verified:
            return
        if self._size is not None and self.count != self._size:
            raise FormatError(f"ends after {self.count} of {self._size} bytes", where=self._what)
        if self._hash.hexdigest() != self._digest.hex:
            raise DigestMismatchError(
                f"{self._what} has digest {self._digest.algorithm}:{self._hash.hexdigest()}, expected {self._digest}"
            )
        self.verified = True


class VerifiedStream:
    """A ``LayerStream`` over any reader. ``release`` is called once, on close."""

    def __init__(
        self,
        source: Readable,
        *,
        index: int,
        layer: SourceLayer,
        kind: Literal["tar", "blob"],
        what: str,
        size: int | None = None,
        release: Callable[[], object] = lambda: None,
    ) -> None:
        assert kind == "tar" or layer.blob is not None
        if kind == "blob" and layer.blob is not None:
            size = layer.blob.size
        digest = layer.blob.digest if kind == "blob" and layer.blob is not None else layer.diff_id
        self._reader = HashingReader(source, digest=digest, size=size, what=what)
        self._release: Callable[[], object] | None = release
        self._what = what
        self._index = index
        self._layer = layer
        self._kind = kind

    @property
    def index(self) -> int:
        return self._index

    @property
    def layer(self) -> SourceLayer:
        return self._layer

    @property
    def kind(self) -> Literal["tar", "blob"]:
        return self._kind

    @property
    def count(self) -> int:
        """Bytes so far."""
        return self._reader.count

    @property
    def hexdigest(self) -> str:
        """Of the bytes so far."""
        return self._reader.hexdigest

    def read(self, size: int, /) -> bytes:
        return self._reader.read(size)

    def readinto(self, buffer: Any, /) -> int:
        return self._reader.readinto(buffer)

    def close(self) -> None:
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def distinct(layers: Sequence[SourceLayer], wanted: Collection[int]) -> Iterator[int]:
    """The indexes in ``wanted``, in order; layers with the same content only once, by the lowest."""
    seen = set()
    for index in sorted(wanted):
        layer = layers[index]
        content = layer.blob.digest if layer.blob is not None else layer.diff_id
        if content not in seen:
            seen.add(content)
            yield index


def tar_of(stream: LayerStream) -> LayerStream:
    """The uncompressed tar of a layer, proven by its diff_id; ``stream`` itself where it is the tar already."""
    if stream.kind == "tar":
        return stream
    what = f"layer {stream.index + 1}"
    return VerifiedStream(
        _UpToProof(decompressed(stream, where=what), stream),
        index=stream.index,
        layer=stream.layer,
        kind="tar",
        what=what,
        release=stream.close,
    )


class _UpToProof:
    """Reads what a decompressor left unread (padding), so that the compressed side is proven as well."""

    def __init__(self, unpacked: Readable, packed: LayerStream) -> None:
        self._unpacked = unpacked
        self._packed = packed

    def read(self, size: int, /) -> bytes:
        data = self._unpacked.read(size)
        if size and not data:
            while self._packed.read(1 << 18):
                pass
        return data
