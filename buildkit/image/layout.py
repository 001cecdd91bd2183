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
from buildkit.image.streams import VerifiedStream, distinct
from buildkit.model import (
    INDEX_TYPES,
    MAX_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    Digest,
    ImageConfig,
    Index,
    Manifest,
    Platform,
    load_json_object,
)

REF_NAME = "org.opencontainers.image.ref.name"
CONTAINERD_NAME = "io.containerd.image.name"
MAX_NESTING = 4
"""Indexes within indexes that are followed."""
MAX_JSON = 4 * MAX_MANIFEST


class LayoutSource:
    """One image of a layout. ``ImageSource``.

    With ``keep_plain=False`` a layer that is stored as a plain tar is handed on as such, to be compressed, and the
    manifest that describes it so is not.
    """

    method = "layout"
    reason = ""
    random_access = True

    def __init__(
        self, files: Files, *, name: str, manifest: Manifest, config: ImageConfig, keep_plain: bool = True
    ) -> None:
        if len(manifest.layers) != len(config.diff_ids):
            raise FormatError(
                f"manifest has {len(manifest.layers)} layers, config has {len(config.diff_ids)} diff_ids", where=name
            )
        self._files = files
        self._manifest = manifest
        self._config = config
        self.name = name
        self.layers = tuple(
            SourceLayer(
                diff_id=diff_id,
                blob=blob if keep_plain or is_compressed(blob) else None,
                tar_size=None if is_compressed(blob) else blob.size,
            )
            for diff_id, blob in zip(config.diff_ids, manifest.layers, strict=True)
        )
        self.manifest = manifest if all(layer.blob is not None for layer in self.layers) else None

    @classmethod
    def load(cls, files: Files, *, name: str, tag: str | None, platform: Platform) -> LayoutSource:
        """The image ``tag`` (an ``org.opencontainers.image.ref.name``, or a digest), else the only one there is."""
        manifest = _resolve(files, _chosen(files, tag, platform), platform)
        config = ImageConfig.parse(read_blob(files, manifest.config, "the config", MAX_JSON), where=f"{name}: config")
        return cls(files, name=name, manifest=manifest, config=config)

    @classmethod
    def of_digest(cls, files: Files, digest: Digest, *, name: str, platform: Platform) -> LayoutSource:
        """The image whose manifest or index has this digest, in a store that has no ``index.json``."""
        raw = require(files, blob_name(digest), "the image's manifest").bytes(MAX_JSON)
        digest.check(raw, f"{name}: manifest")
        document = load_json_object(raw, where=name, limit=MAX_JSON)
        kind = OCI_INDEX if "manifests" in document else OCI_MANIFEST
        top = Descriptor(media_type=kind, digest=digest, size=len(raw))
        manifest = _resolve(files, top, platform)
        config = ImageConfig.parse(read_blob(files, manifest.config, "the config", MAX_JSON), where=f"{name}: config")
        return cls(files, name=name, manifest=manifest, config=config, keep_plain=False)

    @property
    def image_id(self) -> Digest:
        return self._config.digest

    def config(self) -> ImageConfig:
        return self._config

    def stream(self, wanted: Collection[int]) -> Iterator[LayerStream]:
        for index in distinct(self.layers, wanted):
            yield self.open(index)

    def open(self, index: int) -> LayerStream:
        window = self._range(index).open()
        layer = self.layers[index]
        return VerifiedStream(
            window,
            index=index,
            layer=layer,
            kind="blob" if layer.blob is not None else "tar",
            what=f"{self.name}: layer {index + 1}",
            release=window.close,
        )

    def local_blob(self, index: int) -> FileBlob | None:
        """The layer's blob where it lies, to upload from without a copy; None for foreign layers that are not there."""
        descriptor = self.layers[index].blob
        if descriptor is None or (descriptor.foreign and self._files.find(blob_name(descriptor.digest)) is None):
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


def is_compressed(layer: Descriptor) -> bool:
    """By its media type; foreign layers count as such, since nothing is done to them."""
    return layer.foreign or not layer.media_type.endswith(".tar")


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
            raise UsageError(f"{files.where} has no image {tag!r}", hint=f"it has {have}")
        entries = fits
    elif len(names) > 1:
        raise UsageError(f"{files.where} has several images", hint=f"add one of {', '.join(names)} after a colon")
    if not entries:
        raise UsageError(f"{files.where} has no images")
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
