"""OCI image layouts, in a folder (``oci:``) or in a tar (``oci-archive:``): an image's own manifest and blobs.

Blobs are handed on byte for byte and proven by their digests. Source: OCI image-spec 1.1, image-layout.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Self

from buildkit.errors import FormatError, NotFoundError, UsageError
from buildkit.image.blobfile import FileBlob
from buildkit.image.files import FileRange, Files, require
from buildkit.image.source import LayerStream, SourceLayer
from buildkit.image.streams import VerifiedStream
from buildkit.model import INDEX_TYPES, MAX_MANIFEST, Descriptor, Digest, ImageConfig, Index, Manifest, Platform

REF_NAME = "org.opencontainers.image.ref.name"
CONTAINERD_NAME = "io.containerd.image.name"
MAX_NESTING = 4
"""Indexes within indexes that are followed."""
MAX_JSON = 4 * MAX_MANIFEST


class LayoutSource:
    """One image of a layout. ``ImageSource``."""

    method = "layout"
    reason = ""
    random_access = True

    def __init__(self, files: Files, *, name: str, manifest: Manifest, config: ImageConfig) -> None:
        if len(manifest.layers) != len(config.diff_ids):
            raise FormatError(
                f"manifest has {len(manifest.layers)} layers, config has {len(config.diff_ids)} diff_ids", where=name
            )
        self._files = files
        self._manifest = manifest
        self._config = config
        self.name = name
        self.layers = tuple(
            SourceLayer(diff_id=diff_id, blob=blob)
            for diff_id, blob in zip(config.diff_ids, manifest.layers, strict=True)
        )

    @classmethod
    def load(cls, files: Files, *, name: str, tag: str | None, platform: Platform) -> LayoutSource:
        """The image ``tag`` (an ``org.opencontainers.image.ref.name``, or a digest), else the only one there is."""
        manifest = _resolve(files, _chosen(files, tag, platform), platform)
        config = ImageConfig.parse(read_blob(files, manifest.config, "the config", MAX_JSON), where=f"{name}: config")
        return cls(files, name=name, manifest=manifest, config=config)

    @property
    def image_id(self) -> Digest:
        return self._config.digest

    @property
    def manifest(self) -> Manifest | None:
        return self._manifest

    def config(self) -> ImageConfig:
        return self._config

    def stream(self, wanted: Collection[int]) -> Iterator[LayerStream]:
        for index in range(len(self.layers)):
            if index in wanted:
                yield self.open(index)

    def open(self, index: int) -> LayerStream:
        window = self._range(index).open()
        return VerifiedStream(
            window,
            index=index,
            layer=self.layers[index],
            kind="blob",
            what=f"{self.name}: layer {index + 1}",
            release=window.close,
        )

    def local_blob(self, index: int) -> FileBlob | None:
        """The layer's blob where it lies, to upload from without a copy; None for foreign layers that are not there."""
        descriptor = self._manifest.layers[index]
        if descriptor.foreign and self._files.find(blob_name(descriptor.digest)) is None:
            return None
        return self._range(index).blob(descriptor, label=f"layer {index + 1}/{len(self.layers)}")

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _range(self, index: int) -> FileRange:
        descriptor = self._manifest.layers[index]
        if descriptor.foreign and self._files.find(blob_name(descriptor.digest)) is None:
            raise NotFoundError(
                f"{self.name}: layer {index + 1} is foreign and not in the layout", hint="clients fetch it by its URLs"
            )
        return blob_range(self._files, descriptor, f"layer {index + 1}")


def blob_name(digest: Digest) -> str:
    return f"blobs/{digest.algorithm}/{digest.hex}"


def blob_range(files: Files, descriptor: Descriptor, what: str) -> FileRange:
    """Where a blob lies. NotFoundError where it is missing, FormatError where its size is another one."""
    found = require(files, blob_name(descriptor.digest), what)
    if found.size != descriptor.size:
        raise FormatError(f"{what} is {found.size} bytes, its descriptor says {descriptor.size}", where=found.what)
    return found


def read_blob(files: Files, descriptor: Descriptor, what: str, limit: int) -> bytes:
    """A small blob, proven by size and digest."""
    data = blob_range(files, descriptor, what).bytes(limit)
    descriptor.digest.check(data, f"{files.where}: {what}")
    return data


def read_index(files: Files) -> Index:
    found = files.find("index.json")
    if found is None:
        raise UsageError(f"{files.where} is not an OCI layout", hint="it has no index.json")
    return Index.parse(found.bytes(MAX_JSON), where=found.what)


def _chosen(files: Files, tag: str | None, platform: Platform) -> Descriptor:
    top = read_index(files)
    entries = top.images
    names = sorted({name for entry in entries for name in _names(entry)})
    if tag is not None:
        fits = tuple(entry for entry in entries if tag in _names(entry) or tag == str(entry.digest))
        if not fits:
            have = ", ".join(names) or "no names"
            raise NotFoundError(f"{files.where} has no image {tag!r}", hint=f"it has {have}")
        entries = fits
    elif len(names) > 1:
        raise UsageError(f"{files.where} has several images", hint=f"add one of {', '.join(names)} after a colon")
    if not entries:
        raise NotFoundError(f"{files.where} has no images")
    if len(entries) == 1:
        return entries[0]
    several = Index(raw=top.raw, media_type=top.media_type, manifests=entries)
    if all(entry.platform is None for entry in entries):
        digests = ", ".join(str(entry.digest) for entry in entries)
        raise UsageError(f"{files.where} has several images", hint=f"add one of {digests} after a colon")
    return several.select(platform, where=files.where)


def _names(entry: Descriptor) -> tuple[str, ...]:
    return tuple(entry.annotations[key] for key in (REF_NAME, CONTAINERD_NAME) if key in entry.annotations)


def _resolve(files: Files, descriptor: Descriptor, platform: Platform) -> Manifest:
    for _ in range(MAX_NESTING):
        what = f"{files.where}: {descriptor.digest}"
        raw = read_blob(files, descriptor, "a manifest", MAX_JSON)
        if descriptor.media_type not in INDEX_TYPES:
            return Manifest.parse(raw, where=what, media_type=descriptor.media_type)
        descriptor = Index.parse(raw, where=what, media_type=descriptor.media_type).select(platform, where=files.where)
    raise FormatError(f"more than {MAX_NESTING} indexes lie within each other", where=files.where)
