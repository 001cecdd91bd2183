"""Docker archives (``docker-archive:``): what ``docker save`` writes, as a file that can be read at random.

Two forms are met, and mixtures of them. Up to Engine 24: ``manifest.json``, ``<id>/layer.tar``, ``<config>.json``;
duplicate layers are symlinks. From Engine 25: an OCI layout that has ``manifest.json`` as well. Layers may be plain or
compressed in either, so their first bytes decide. The config's diff_ids are what layers are proven against.

Source: moby, ``image/tarexport``; docker image specification v1.2, "Combined Image JSON + Filesystem Changeset Format".
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from buildkit.errors import DigestMismatchError, FormatError, NotFoundError, UsageError
from buildkit.image.blobfile import FileBlob
from buildkit.image.compress import decompressed, sniff
from buildkit.image.files import FileRange, Files, require
from buildkit.image.layout import MAX_JSON, MAX_NESTING, blob_range, read_blob, read_index
from buildkit.image.source import LayerStream, SourceLayer
from buildkit.image.streams import VerifiedStream, distinct
from buildkit.model import INDEX_TYPES, Descriptor, Digest, ImageConfig, Index, Manifest

MAX_CONFIG = 64 * 2**20
_HEX = re.compile(r"(?:^|/)([0-9a-f]{64})(?:\.json)?$", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveEntry:
    """One image of ``manifest.json``: names of members, lowest layer first."""

    config: str
    tags: tuple[str, ...]
    layers: tuple[str, ...]


class DockerArchiveSource:
    """One image of a docker-archive. ``ImageSource``.

    A compressed layer that the archive's own OCI manifest describes is handed on as that blob; any other layer is
    handed on as its tar. ``release`` is called on close.
    """

    method = "archive"
    random_access = True

    def __init__(self, files: Files, entry: ArchiveEntry, *, name: str, reason: str = "") -> None:
        self._files = files
        self.name = name
        self.reason = reason
        self.release: Callable[[], object] = lambda: None
        raw = require(files, entry.config, "the config").bytes(MAX_CONFIG)
        check_named_digest(entry.config, Digest.of(raw), files.where)
        self._config = ImageConfig.parse(raw, where=f"{files.where}: {entry.config}")
        check_layer_count(entry, self._config, files.where)
        self._ranges = tuple(
            require(files, layer, f"layer {number}") for number, layer in enumerate(entry.layers, start=1)
        )
        manifest = _own_manifest(files, self._config)
        described = manifest.layers if manifest is not None else ()
        self.layers = tuple(
            _described(diff_id, described[i] if described else None, self._ranges[i], files)
            for i, diff_id in enumerate(self._config.diff_ids)
        )
        # With a layer that has to be compressed first, the manifest is not the one that will be pushed.
        self.manifest = manifest if all(layer.blob is not None for layer in self.layers) else None

    @classmethod
    def load(cls, files: Files, *, name: str, ref: str | None, reason: str = "") -> DockerArchiveSource:
        """The image called ``ref`` (a name of its ``RepoTags``, or ``@NUMBER`` from 0), else the only one there is."""
        found = files.find("manifest.json")
        if found is None:
            hint = "it is an OCI layout: write oci-archive:" if files.find("index.json") else "it has no manifest.json"
            raise UsageError(f"{files.where} is not a docker-archive", hint=hint)
        entries = parse_manifest_json(found.bytes(MAX_JSON), where=found.what)
        return cls(files, choose(entries, ref, files.where), name=name, reason=reason)

    @property
    def image_id(self) -> Digest:
        return self._config.digest

    def config(self) -> ImageConfig:
        return self._config

    def stream(self, wanted: Collection[int]) -> Iterator[LayerStream]:
        for index in distinct(self.layers, wanted):
            yield self.open(index)

    def open(self, index: int) -> LayerStream:
        layer, what = self.layers[index], f"{self.name}: layer {index + 1}"
        window = self._ranges[index].open()
        if layer.blob is not None:
            return VerifiedStream(window, index=index, layer=layer, kind="blob", what=what, release=window.close)
        try:
            tar = decompressed(window, where=what)
        except BaseException:
            window.close()
            raise
        return VerifiedStream(tar, index=index, layer=layer, kind="tar", what=what, release=window.close)

    def local_blob(self, index: int) -> FileBlob | None:
        """A layer that is handed on as a blob, to upload from where it lies; None for one that must be compressed."""
        descriptor = self.layers[index].blob
        label = f"layer {index + 1}/{len(self.layers)}"
        return self._ranges[index].blob(descriptor, label=label) if descriptor is not None else None

    def close(self) -> None:
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parse_manifest_json(raw: bytes, *, where: str) -> tuple[ArchiveEntry, ...]:
    """``manifest.json`` of a docker-archive. Raises FormatError."""
    if len(raw) > MAX_JSON:
        raise FormatError(f"is {len(raw)} bytes", where=where)
    try:
        document: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError("is not JSON", where=where) from error
    if not isinstance(document, list) or not document:
        raise FormatError("is not a list of images", where=where)
    entries = []
    for item in document:
        layers = item.get("Layers") if isinstance(item, dict) else None
        config = item.get("Config") if isinstance(item, dict) else None
        tags = (item.get("RepoTags") if isinstance(item, dict) else None) or []
        if not isinstance(config, str) or not _texts(layers if layers is not None else []) or not _texts(tags):
            raise FormatError("has an image without Config or Layers", where=where)
        entries.append(ArchiveEntry(config=config, tags=tuple(tags), layers=tuple(layers or ())))
    return tuple(entries)


def choose(entries: Sequence[ArchiveEntry], ref: str | None, where: str) -> ArchiveEntry:
    """The image that ``ref`` names. UsageError where it does not say which of several."""
    names = [", ".join(entry.tags) or f"@{number}" for number, entry in enumerate(entries)]
    listing = "; ".join(names)
    if ref is None:
        if len(entries) == 1:
            return entries[0]
        raise UsageError(f"{where} has several images", hint=f"add one of these after a colon: {listing}")
    if ref.startswith("@"):
        if ref[1:].isdecimal() and len(ref) < 8 and int(ref[1:]) < len(entries):
            return entries[int(ref[1:])]
    else:
        fits = [entry for entry in entries if familiar(ref) in {familiar(tag) for tag in entry.tags}]
        if fits:
            return fits[-1]
    raise UsageError(f"{where} has no image {ref!r}", hint=f"it has {listing}")


def familiar(name: str) -> str:
    """``name`` without the default registry and with a tag: ``docker.io/library/app`` and ``app:latest`` are one."""
    short = name.removeprefix("docker.io/").removeprefix("library/")
    return short if ":" in short.rpartition("/")[2] or "@" in short else f"{short}:latest"


def check_named_digest(name: str, actual: Digest, where: str) -> None:
    """Members that are named by a digest must have it."""
    match = _HEX.search(name)
    if match and match[1] != actual.hex:
        raise DigestMismatchError(f"{where}: {name} has digest {actual}")


def check_layer_count(entry: ArchiveEntry, config: ImageConfig, where: str) -> None:
    if len(entry.layers) != len(config.diff_ids):
        raise FormatError(
            f"manifest.json lists {len(entry.layers)} layers, the config {len(config.diff_ids)} diff_ids", where=where
        )


def _own_manifest(files: Files, config: ImageConfig) -> Manifest | None:
    """The OCI manifest of the same image, where the archive is a sound layout too."""
    if files.find("index.json") is None:
        return None
    todo = list(read_index(files).manifests)
    for _ in range(MAX_NESTING * 16):
        if not todo:
            return None
        descriptor = todo.pop(0)
        try:
            raw = read_blob(files, descriptor, "a manifest", MAX_JSON)
            if descriptor.media_type in INDEX_TYPES:
                todo.extend(Index.parse(raw, where=files.where).manifests)
                continue
            manifest = Manifest.parse(raw, where=files.where, media_type=descriptor.media_type)
        except NotFoundError:
            continue  # another platform's: an engine saves only what it has
        if manifest.config.digest == config.digest and len(manifest.layers) == len(config.diff_ids):
            return manifest
    return None


def _described(diff_id: Digest, descriptor: Descriptor | None, found: FileRange, files: Files) -> SourceLayer:
    with found.open() as window:
        encoding = sniff(window.read(6), where=found.what) if found.size else "tar"
    if encoding == "tar":
        return SourceLayer(diff_id=diff_id, tar_size=found.size)
    if descriptor is None or posixpath.basename(found.what) != descriptor.digest.hex:
        return SourceLayer(diff_id=diff_id)
    blob_range(files, descriptor, "a layer")
    return SourceLayer(diff_id=diff_id, blob=descriptor)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
