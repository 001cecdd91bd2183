"""``docker-daemon:`` straight from the engine's data root, where this process may read it.

Much faster than ``docker save``, which writes the whole image to disk before its first byte: only the layers that are
needed are read, several at once, and read once. Two kinds of store are known:

- **overlay2** with tar-split (moby's graph-driver store). The config is
  ``image/overlay2/imagedb/content/sha256/<image id>``; a layer has ``diff``, ``cache-id`` and ``tar-split.json.gz`` in
  ``image/overlay2/layerdb/sha256/<chain id>/`` and its files in ``overlay2/<cache-id>/diff``.
- **containerd's content store**: manifests and blobs by digest, mostly compressed already.

This is the engine's private ground, whose form nobody promises. So everything is proven: the config hashes to the
image id, each layer's tar to its diff_id. Whatever is missing, unreadable or different is a ``NotDirectError`` with the
reason, and the caller goes on with ``docker save``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from buildkit.engine import Engine, EngineImage
from buildkit.errors import EngineError, ImageError
from buildkit.image.compress import decompressed
from buildkit.image.files import FileRange
from buildkit.image.layout import LayoutSource
from buildkit.image.save import chain_ids
from buildkit.image.source import SourceLayer
from buildkit.image.streams import VerifiedStream, distinct
from buildkit.image.tarsplit import TarSplitReader
from buildkit.model import Digest, ImageConfig, Manifest, Platform

MAX_CONFIG = 64 * 2**20

_CACHE_ID = re.compile(r"[0-9a-z]{8,128}", re.ASCII)
_CONTENT = "io.containerd.content.v1.content"


class NotDirectError(EngineError):
    """The image cannot be read from the engine's data root; the message says why, and ``docker save`` still may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredLayer:
    """Where overlay2 keeps a layer."""

    tar_split: Path
    folder: Path


def open_direct(engine: Engine, image: EngineImage, *, name: str, platform: Platform) -> DirectSource | LayoutSource:
    """The image's files where the engine keeps them. Raises NotDirectError with the reason where that cannot be."""
    if not engine.local:
        raise NotDirectError(f"the engine at {engine.host} is not on this machine")
    try:
        if engine.info.containerd_store:
            return _open_content_store(engine, image, name, platform)
        if engine.info.storage_driver != "overlay2":
            raise NotDirectError(f"the engine's storage driver is {engine.info.storage_driver}, not overlay2")
        return DirectSource(engine.info.data_root, image.id, name=name)
    except OSError as error:
        raise NotDirectError(f"{error.filename or engine.info.data_root} cannot be read: {error.strerror}") from error
    except ImageError as error:
        raise NotDirectError(error.message) from error


class DirectSource:
    """An image in an overlay2 data root. ``ImageSource`` with random access."""

    method = "direct"
    random_access = True
    manifest: Manifest | None = None

    def __init__(self, data_root: Path, image_id: Digest, *, name: str) -> None:
        self.name = name
        self.reason = f"the engine's data root {data_root} is readable"
        self.image_id = image_id
        store = data_root / "image" / "overlay2"
        raw = _small(store / "imagedb" / "content" / image_id.algorithm / image_id.hex, MAX_CONFIG)
        image_id.check(raw, f"{name}: config in the engine's data root")
        self._config = ImageConfig.parse(raw, where=f"{name}: config")
        self.layers = tuple(SourceLayer(diff_id=diff_id) for diff_id in self._config.diff_ids)
        self._stored = tuple(
            _stored_layer(data_root, store / "layerdb" / chain.algorithm / chain.hex, diff_id)
            for chain, diff_id in zip(chain_ids(self._config.diff_ids), self._config.diff_ids, strict=True)
        )

    def config(self) -> ImageConfig:
        return self._config

    def stream(self, wanted: Collection[int]) -> Iterator[VerifiedStream]:
        for index in distinct(self.layers, wanted):
            yield self.open(index)

    def open(self, index: int) -> VerifiedStream:
        stored, what = self._stored[index], f"{self.name}: layer {index + 1}"
        with contextlib.ExitStack() as undo, _doubted(what):
            packed = undo.enter_context(open(stored.tar_split, "rb"))
            folder = os.open(stored.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            tar = TarSplitReader(decompressed(packed, where=str(stored.tar_split)), folder, where=what)
            undo.callback(tar.close)
            return _DirectStream(
                tar,
                index=index,
                layer=self.layers[index],
                kind="tar",
                what=what,
                release=undo.pop_all().close,
            )
        raise AssertionError("unreachable")

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _DirectStream(VerifiedStream):
    """Turns whatever is wrong with another program's files, a wrong digest as well, into NotDirectError."""

    def read(self, size: int, /) -> bytes:
        with _doubted(self._what):
            return super().read(size)

    def readinto(self, buffer: Any, /) -> int:
        with _doubted(self._what):
            return super().readinto(buffer)


@contextlib.contextmanager
def _doubted(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        detail = f" ({os.fsdecode(error.filename)})" if error.filename else ""
        raise NotDirectError(f"{what} cannot be read from the engine's data root: {error.strerror}{detail}") from error
    except ImageError as error:
        raise NotDirectError(f"{what} cannot be read from the engine's data root: {error.message}") from error


def _stored_layer(data_root: Path, entry: Path, diff_id: Digest) -> _StoredLayer:
    recorded = _small(entry / "diff", 200).decode(errors="replace").strip()
    if recorded != str(diff_id):
        raise NotDirectError(f"{entry} belongs to {recorded!r}, not to {diff_id}")
    cache_id = _small(entry / "cache-id", 200).decode(errors="replace").strip()
    if not _CACHE_ID.fullmatch(cache_id):
        raise NotDirectError(f"{entry} has a cache-id {cache_id!r} of an unknown form")
    stored = _StoredLayer(tar_split=entry / "tar-split.json.gz", folder=data_root / "overlay2" / cache_id / "diff")
    for path, flags in ((stored.tar_split, os.O_RDONLY), (stored.folder, os.O_RDONLY | os.O_DIRECTORY)):
        os.close(os.open(path, flags | os.O_CLOEXEC))
    return stored


def _small(path: Path, limit: int) -> bytes:
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise NotDirectError(f"{path} is larger than {limit} bytes")
    return data


# containerd's content store ------------------------------------------------------------------------------------------


class _ContentFiles:
    """Blobs of containerd's content store under the names that they have in a layout."""

    def __init__(self, root: Path, where: str) -> None:
        self._root = root
        self.where = where

    def find(self, name: str) -> FileRange | None:
        match = re.fullmatch(r"blobs/(sha256|sha512)/([0-9a-f]{64,128})", name, re.ASCII)
        path = self._root / name
        if match is None or not path.is_file():
            return None
        return FileRange(path=path, offset=0, size=path.stat().st_size, what=str(path))


def _open_content_store(engine: Engine, image: EngineImage, name: str, platform: Platform) -> LayoutSource:
    roots = [
        engine.info.data_root / "containerd" / "daemon" / _CONTENT,
        Path("/var/lib/docker/containerd/daemon") / _CONTENT,
        Path("/var/lib/containerd") / _CONTENT,
    ]
    has: Callable[[Path], bool] = lambda root: (root / "blobs" / image.id.algorithm / image.id.hex).is_file()  # noqa: E731
    root = next((root for root in roots if has(root)), None)
    if root is None:
        raise NotDirectError("containerd's content store is not readable, or not where it usually is")
    source = LayoutSource.of_digest(_ContentFiles(root, name), image.id, name=name, platform=platform)
    source.method, source.reason = "direct", f"containerd's content store {root} is readable"
    for index, layer in enumerate(source.layers):
        if layer.blob is None or not layer.blob.foreign:
            source.open(index).close()  # a blob that was given up after unpacking is known now, not in mid-push
    return source
