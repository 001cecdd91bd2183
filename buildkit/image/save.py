"""``docker-daemon:`` through the engine's API: the stream of ``docker save``, read once, without a copy on disk.

The stream tells too late what it holds: ``manifest.json`` comes last. What comes before is enough:

- Engine 25 and later name layers by digest (``blobs/sha256/<hex>``): with the graph drivers' store that is the diff_id;
  with containerd's store it is the blob's digest, and a first look at the stream finds manifest and config.
- Earlier engines put ``<id>/json`` before ``<id>/layer.tar``. Its id is a hash over that very document and the layer's
  chain id (moby, ``image/v1.CreateID``), so trying the chain ids of the config shows which layer it is.
- A layer that neither tells about is set aside in a temporary file until its own hash has named it.

Either way a layer counts only once its bytes have hashed to its diff_id.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self

from buildkit.engine import Engine, EngineImage
from buildkit.errors import BuildkitError, EngineError, NotFoundError
from buildkit.image.blobfile import storage_error
from buildkit.image.compress import Readable, decompressed
from buildkit.image.layout import is_compressed
from buildkit.image.source import LayerStream, SourceLayer
from buildkit.image.streams import VerifiedStream, distinct
from buildkit.image.tarindex import Member, TarReader
from buildkit.model import MAX_MANIFEST, Digest, ImageConfig, Manifest

MAX_DOCUMENTS = 64 * 2**20
"""Bytes of small JSON members that are kept while the stream passes."""

_LEGACY_JSON = re.compile(r"([0-9a-f]{64})/json", re.ASCII)
_LEGACY_LAYER = re.compile(r"([0-9a-f]{64})/layer\.tar", re.ASCII)
_BLOB = re.compile(r"blobs/sha256/([0-9a-f]{64})", re.ASCII)
_CONFIG = re.compile(r"([0-9a-f]{64})\.json", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A layer in the stream: where it belongs, and as what its bytes are proven."""

    index: int
    kind: Literal["tar", "blob"]


class SaveSource:
    """An image of the engine, streamed. ``ImageSource`` without random access; ``stream`` works once.

    ``release`` is called on close.
    """

    method = "save"
    random_access = False

    def __init__(
        self,
        engine: Engine,
        image: EngineImage,
        *,
        name: str,
        reason: str = "",
        release: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine = engine
        self._release = release
        self._image = image
        self.name = name
        self.reason = reason
        self._documents = _Documents()
        self.manifest: Manifest | None = None
        self.image_id = image.id
        self.layers = tuple(SourceLayer(diff_id=diff_id) for diff_id in image.diff_ids)
        self._config: ImageConfig | None = None
        self._used = False
        # By the digest under which a layout's blobs are stored: of a plain tar that is its diff_id.
        self._stored = {diff_id: index for index, diff_id in enumerate(image.diff_ids)}
        if engine.info.containerd_store:
            self._scout()

    def config(self) -> ImageConfig:
        if self._config is None:
            raise EngineError(f"{self.name}: the config comes in the stream, which was not read to its end")
        return self._config

    def stream(self, wanted: Collection[int]) -> Iterator[VerifiedStream]:
        assert not self._used, "a save stream is read once"
        self._used = True
        # Layers with the same content come once, whatever number of times the image has them.
        left = {_content(self.layers[index]): index for index in distinct(self.layers, wanted)}
        legacy: dict[str, int] = {}
        with self._engine.save(self._image.id) as raw:
            reader = TarReader(raw, where=self.name)
            while left or self._config is None:
                member = reader.next_member()
                if member is None:
                    break
                if member.kind != "file":
                    continue
                found = self._identify(member, legacy)
                if found is not None:
                    content = _content(self.layers[found.index])
                    if content in left:
                        yield self._layer(reader, left.pop(content), found.kind)
                elif _LEGACY_LAYER.fullmatch(member.name) or not self._documents.keep(member, reader):
                    if left and member.size:
                        yield from self._set_aside(reader, left)
                elif match := _LEGACY_JSON.fullmatch(member.name):
                    position = layer_position(self._documents.raw(member.name), self._image.diff_ids)
                    if position is not None:
                        legacy[match[1]] = position
                elif member.name.endswith(self._image.id.hex) or _CONFIG.fullmatch(member.name):
                    self._config = self._config or self._matching_config()
            if self._config is None:
                self._config = self._matching_config()
        if left:
            missing = ", ".join(str(index + 1) for index in sorted(left.values()))
            raise NotFoundError(
                f"{self.name}: the engine's archive lacks layer {missing}",
                hint="the engine's store may be damaged: pull or build the image again",
            )
        if self._config is None:
            raise NotFoundError(f"{self.name}: the engine's archive lacks the config {self._image.id}")

    def open(self, index: int) -> LayerStream:
        raise EngineError(f"{self.name}: layer {index + 1} of a save stream cannot be opened on its own")

    def close(self) -> None:
        self._documents.clear()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _identify(self, member: Member, legacy: dict[str, int]) -> _Found | None:
        if match := _BLOB.fullmatch(member.name):
            index = self._stored.get(Digest("sha256", match[1]))
            if index is not None:
                return _Found(index=index, kind="tar" if self.layers[index].blob is None else "blob")
        elif match := _LEGACY_LAYER.fullmatch(member.name):
            if match[1] in legacy:
                return _Found(index=legacy[match[1]], kind="tar")
            if len(set(self._image.diff_ids)) == 1:
                return _Found(index=0, kind="tar")
        return None

    def _layer(self, reader: Readable, index: int, kind: Literal["tar", "blob"]) -> VerifiedStream:
        what = f"{self.name}: layer {index + 1}"
        tar = reader if kind == "blob" else decompressed(reader, where=what)
        return VerifiedStream(tar, index=index, layer=self.layers[index], kind=kind, what=what)

    def _set_aside(self, reader: TarReader, left: dict[Digest, int]) -> Iterator[VerifiedStream]:
        """A member that may be a layer, copied to a file to learn its diff_id."""
        with tempfile.TemporaryFile() as file:
            _copy(reader, file)
            file.seek(0)
            tar = decompressed(file, where=self.name)
            actual = hashlib.sha256()
            while data := tar.read(1 << 20):
                actual.update(data)
            diff_id = Digest("sha256", actual.hexdigest())
            if diff_id in left:
                file.seek(0)
                yield self._layer(file, left.pop(diff_id), "tar")

    def _matching_config(self) -> ImageConfig | None:
        """The config among the documents so far: by its digest, which the engine named, or by its diff_ids."""
        for raw in self._documents:
            if not self._engine.info.containerd_store and Digest.of(raw) != self._image.id:
                continue
            try:
                config = ImageConfig.parse(raw, where=self.name)
            except BuildkitError:
                continue
            if config.diff_ids == self._image.diff_ids:
                return config
        return None

    def _scout(self) -> None:
        """Containerd's store: find manifest and config in a first look at the stream, which ends once they are seen."""
        with self._engine.save(self._image.id) as raw:
            reader = TarReader(raw, where=self.name)
            while (member := reader.next_member()) is not None:
                if member.kind == "file" and _BLOB.fullmatch(member.name) and self._documents.keep(member, reader):
                    self._config = self._matching_config()
                    manifest = self._matching_manifest(self._config) if self._config is not None else None
                    if manifest is not None:
                        break
            else:
                raise NotFoundError(f"{self.name}: the engine's archive lacks the image's manifest or config")
        assert self._config is not None
        self.image_id = self._config.digest
        self._stored = {blob.digest: index for index, blob in enumerate(manifest.layers)}
        self.layers = tuple(
            SourceLayer(diff_id=diff_id, blob=blob if is_compressed(blob) else None)
            for diff_id, blob in zip(self._config.diff_ids, manifest.layers, strict=True)
        )
        # With a layer that has to be compressed first, the manifest is not the one that will be pushed.
        self.manifest = manifest if all(layer.blob is not None for layer in self.layers) else None

    def _matching_manifest(self, config: ImageConfig) -> Manifest | None:
        for raw in self._documents:
            try:
                manifest = Manifest.parse(raw, where=self.name)
            except BuildkitError:
                continue
            if manifest.config.digest == config.digest and len(manifest.layers) == len(config.diff_ids):
                return manifest
        return None


def _content(layer: SourceLayer) -> Digest:
    return layer.blob.digest if layer.blob is not None else layer.diff_id


class _Documents:
    """Small members that may be JSON, kept by name while the stream passes."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}
        self._size = 0

    def keep(self, member: Member, reader: TarReader) -> bool:
        """Read and keep the member if it can be a document; False leaves it unread but for what tells."""
        if member.size > 4 * MAX_MANIFEST or self._size + member.size > MAX_DOCUMENTS:
            return False
        data = bytearray()
        while piece := reader.read(1 << 20):
            data += piece
        self._size += len(data)
        self._kept[member.name] = bytes(data)
        return True

    def raw(self, name: str) -> bytes:
        return self._kept[name]

    def __iter__(self) -> Iterator[bytes]:
        return iter([raw for raw in self._kept.values() if raw.lstrip()[:1] == b"{"])

    def clear(self) -> None:
        self._kept.clear()


def layer_position(document: bytes, diff_ids: Sequence[Digest]) -> int | None:
    """Which layer a legacy ``<id>/json`` belongs to; None where its id is not made the way Docker makes it.

    The id is the sha256 of the document without ``id``, with ``layer_id`` (the chain id) and ``parent`` as digests,
    keys sorted. The top layer's has every field; the others' id was made before ``os`` was set.
    """
    try:
        fields: Any = json.loads(document)
        if not isinstance(fields, dict) or not isinstance(fields.get("id"), str):
            return None
        given = fields.pop("id")
        parent = fields.pop("parent", None)
        for position, chain in enumerate(chain_ids(diff_ids)):
            for without in ((), ("os",)):
                hashed = {key: value for key, value in fields.items() if key not in without}
                hashed["layer_id"] = str(chain)
                if parent is not None:
                    hashed["parent"] = f"sha256:{parent}"
                if hashlib.sha256(_go_json(hashed)).hexdigest() == given:
                    return position
    except (ValueError, RecursionError):
        pass  # not JSON, or not UTF-8: then the layer's own hash has to tell
    return None


def chain_ids(diff_ids: Sequence[Digest]) -> Iterator[Digest]:
    """Of every layer (image-spec, config.md, "Layer ChainID")."""
    chain: Digest | None = None
    for diff_id in diff_ids:
        chain = diff_id if chain is None else Digest.of(f"{chain} {diff_id}".encode())
        yield chain


def _go_json(fields: dict[str, Any]) -> bytes:
    """As Go's encoding/json writes a map of raw values: outer keys sorted, inner ones as they are, HTML escaped."""
    text = json.dumps(dict(sorted(fields.items())), separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode()


def _copy(source: Readable, file: IO[bytes]) -> None:
    try:
        while data := source.read(1 << 20):
            file.write(data)
    except OSError as error:
        raise storage_error(Path(tempfile.gettempdir()), error) from error
