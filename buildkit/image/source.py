"""What every place that holds an image offers: its config, its layers, and their bytes.

Two ways to the bytes. ``stream`` serves every source: layers come in the source's own order, each read once, front
to back, as ``docker save`` sends them. ``open`` serves the sources that can be read at random (files, layouts, the
engine's data root, registries); it can be called again and again, and from several threads.

A stream proves itself: before it reports its end it has compared what went through it with the digest or diff_id that
names it, and raises DigestMismatchError instead of ``b""`` where they differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

from buildkit.model import Descriptor, Digest, ImageConfig, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLayer:
    """One layer, lowest first.

    ``diff_id`` is the digest of the uncompressed tar. ``blob`` is there where the source holds the layer as a blob
    that is passed on byte for byte (a layout, a registry, containerd's store); None where it holds a plain tar.
    ``tar_size`` is the uncompressed size in bytes, where the source knows it without reading.
    """

    diff_id: Digest
    blob: Descriptor | None = None
    tar_size: int | None = None


class LayerStream(Protocol):
    """The bytes of one layer, read once from front to back; a context manager that closes what it reads from.

    ``kind`` says what the bytes are: the uncompressed ``tar`` (its sha256 is ``layer.diff_id``), or the ``blob`` that
    ``layer.blob`` describes.
    """

    @property
    def index(self) -> int: ...

    @property
    def layer(self) -> SourceLayer: ...

    @property
    def kind(self) -> Literal["tar", "blob"]: ...

    def read(self, size: int, /) -> bytes:
        """Up to ``size`` bytes; ``b""`` only at the verified end. Raises ImageError for corrupt content."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class ImageSource(Protocol):
    """An image that can be read; a context manager that frees what it holds."""

    @property
    def name(self) -> str:
        """The image as the user would write it again, transport included."""
        ...

    @property
    def method(self) -> str:
        """How the bytes are read, for the report: ``direct``, ``save``, ``archive``, ``layout`` or ``registry``."""
        ...

    @property
    def reason(self) -> str:
        """Why this method was taken (and what spoke against a faster one), one line; may be empty."""
        ...

    @property
    def image_id(self) -> Digest:
        """Digest of the config; the same image has the same id in every transport."""
        ...

    @property
    def layers(self) -> tuple[SourceLayer, ...]:
        """All layers, lowest first; known before any layer is read."""
        ...

    @property
    def manifest(self) -> Manifest | None:
        """The source's own manifest with its exact bytes; None where it has none (engine, docker-archive)."""
        ...

    @property
    def random_access(self) -> bool:
        """Whether ``open`` works."""
        ...

    def config(self) -> ImageConfig:
        """The config's exact bytes. A stream source has them only after ``stream`` was read to its end."""
        ...

    def stream(self, wanted: Collection[int]) -> Iterator[LayerStream]:
        """The layers with an index in ``wanted``, each exactly once, in the source's order. Layers with the same
        content come once, by the lowest of their indexes in ``wanted``.

        Each must be read to its end or closed before the next is asked for. Layers that are not wanted are skipped
        as cheaply as the source can. Once per source for streams; otherwise again and again.
        """
        ...

    def open(self, index: int) -> LayerStream:
        """A fresh stream of one layer. Only where ``random_access``; may run in several threads at once."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
