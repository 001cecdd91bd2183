"""``docker://``: an image in a registry as a source. Its manifest and blobs are handed on byte for byte.

Source: OCI distribution-spec 1.1, "Pull".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Protocol, Self

from buildkit.errors import FormatError
from buildkit.image.layout import MAX_JSON, MAX_NESTING
from buildkit.image.source import LayerStream, SourceLayer
from buildkit.image.streams import VerifiedStream, distinct
from buildkit.model import INDEX_TYPES, Descriptor, Digest, ImageConfig, Index, Manifest, Platform, Reference


class RawManifest(Protocol):
    """A manifest or index as the registry sent it, proven by ``digest``."""

    @property
    def raw(self) -> bytes: ...

    @property
    def media_type(self) -> str: ...


class Registry(Protocol):
    """What is needed of a registry's client. ``read_blob`` proves what it gives."""

    def get_manifest(self, reference: Reference, /) -> RawManifest: ...

    def read_blob(self, repository: str, descriptor: Descriptor, /) -> Iterator[bytes]: ...


class RemoteSource:
    """One image of a registry. ``ImageSource``; ``release`` is called on close."""

    method = "registry"
    reason = ""
    random_access = True

    def __init__(
        self,
        registry: Registry,
        reference: Reference,
        *,
        platform: Platform,
        release: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = f"docker://{reference}"
        self._registry = registry
        self._repository = reference.repository
        self.release = release
        self.manifest: Manifest | None = _fetch(registry, reference, platform)
        described = self.manifest
        raw = b"".join(registry.read_blob(self._repository, _bounded(described.config, self.name)))
        described.config.digest.check(raw, f"{self.name}: config")
        self._config = ImageConfig.parse(raw, where=f"{self.name}: config")
        if len(described.layers) != len(self._config.diff_ids):
            raise FormatError(
                f"manifest has {len(described.layers)} layers, config has {len(self._config.diff_ids)} diff_ids",
                where=self.name,
            )
        self._blobs = described.layers
        self.layers = tuple(
            SourceLayer(diff_id=diff_id, blob=blob)
            for diff_id, blob in zip(self._config.diff_ids, described.layers, strict=True)
        )

    @property
    def image_id(self) -> Digest:
        return self._config.digest

    def config(self) -> ImageConfig:
        return self._config

    def stream(self, wanted: Collection[int]) -> Iterator[LayerStream]:
        for index in distinct(self.layers, wanted):
            yield self.open(index)

    def open(self, index: int) -> LayerStream:
        pieces = self._registry.read_blob(self._repository, self._blobs[index])
        close = getattr(pieces, "close", None)
        return VerifiedStream(
            _Pieces(pieces),
            index=index,
            layer=self.layers[index],
            kind="blob",
            what=f"{self.name}: layer {index + 1}",
            release=close if callable(close) else lambda: None,
        )

    def close(self) -> None:
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Pieces:
    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._rest = memoryview(piece)
        data = bytes(self._rest[:size])
        self._rest = self._rest[size:]
        return data


def _bounded(config: Descriptor, where: str) -> Descriptor:
    if config.size > MAX_JSON:
        raise FormatError(f"config of {config.size} bytes", where=where)
    return config


def _fetch(registry: Registry, reference: Reference, platform: Platform) -> Manifest:
    at = reference
    for _ in range(MAX_NESTING):
        found = registry.get_manifest(at)
        if found.media_type not in INDEX_TYPES:
            return Manifest.parse(found.raw, where=str(reference), media_type=found.media_type)
        index = Index.parse(found.raw, where=str(at), media_type=found.media_type)
        at = reference.with_digest(index.select(platform, where=str(reference)).digest)
    raise FormatError(f"more than {MAX_NESTING} indexes lie within each other", where=str(reference))
