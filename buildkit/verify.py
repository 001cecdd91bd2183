"""Is what a registry holds complete and right? Manifest by digest, blobs by size, and by digest where asked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from buildkit.errors import BuildkitError, DigestMismatchError, FormatError, ImageError, NotFoundError, UsageError
from buildkit.model import (
    INDEX_TYPES,
    Descriptor,
    Digest,
    ImageConfig,
    Index,
    Manifest,
    Platform,
    Reference,
    load_json_object,
)
from buildkit.registry import Missing, Present, RegistryClient, Unknown
from buildkit.units import format_size

SCHEMA = 1
_MAX_CONFIG = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobCheck:
    """One blob of one image. ``found`` is the registry's size in bytes, None where it does not tell or has none."""

    label: str
    descriptor: Descriptor
    ok: bool
    found: int | None
    detail: str

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "digest": str(self.descriptor.digest),
            "size": self.descriptor.size,
            "found": self.found,
            "ok": self.ok,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """``deep``: every byte was read and hashed. A failed check is a value here; see ``ok``."""

    reference: Reference
    digest: Digest
    media_type: str
    platforms: tuple[str, ...]
    blobs: tuple[BlobCheck, ...]
    deep: bool
    seconds: float

    @property
    def ok(self) -> bool:
        return all(blob.ok for blob in self.blobs)

    @property
    def size(self) -> int:
        """Bytes of all distinct blobs."""
        return sum({blob.descriptor.digest: blob.descriptor.size for blob in self.blobs}.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "schema": SCHEMA,
            "reference": str(self.reference),
            "digest": str(self.digest),
            "media_type": self.media_type,
            "platforms": list(self.platforms),
            "deep": self.deep,
            "size": self.size,
            "seconds": round(self.seconds, 3),
            "blobs": [blob.to_json() for blob in self.blobs],
        }

    def lines(self) -> list[str]:
        """For people: the failures first."""
        out = [f"{blob.label}: {blob.detail}" for blob in self.blobs if not blob.ok]
        how = "by size and digest" if self.deep else "by size"
        out.append(
            f"{self.reference}: {self.digest}, {', '.join(self.platforms) or 'no platform named'}, "
            f"{len(self.blobs)} blobs, {format_size(self.size)}, checked {how}: {'ok' if self.ok else 'FAILED'}"
        )
        return out


def pull_check(
    reference: Reference,
    *,
    client: RegistryClient,
    deep: bool = False,
    platform: Platform | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> PullReport:
    """Fetch the manifest (all of an index's, unless ``platform`` chooses one) and check every blob.

    Raises NotFoundError, AuthError, UnreachableError or FormatError where there is nothing to check; a blob that is
    missing or wrong is a value in the report.
    """
    began = time.monotonic()
    with contextlib.suppress(NotFoundError):
        client.ping()
    fetched = client.get_manifest(reference)
    where = str(reference)
    manifests = list(_manifests(fetched.raw, fetched.media_type, reference, client, platform))
    wanted: dict[Digest, tuple[str, Descriptor]] = {}
    platforms: list[str] = []
    for number, manifest in enumerate(manifests, 1):
        prefix = f"image {number}/{len(manifests)} " if len(manifests) > 1 else ""
        config = _config(manifest, client, reference, where)
        if config is not None:
            platforms.append(str(config.platform))
            has = config.platform
            if platform is not None and (has.os, has.architecture) != (platform.os, platform.architecture):
                raise UsageError(f"{reference} is for {has}, not for {platform}")
            if len(config.diff_ids) != len(manifest.layers):
                raise FormatError(
                    f"has {len(manifest.layers)} layers, its config {len(config.diff_ids)} diff_ids", where=where
                )
        wanted.setdefault(manifest.config.digest, (f"{prefix}config", manifest.config))
        for index, layer in enumerate(manifest.layers, 1):
            if not layer.foreign:
                wanted.setdefault(layer.digest, (f"{prefix}layer {index}/{len(manifest.layers)}", layer))

    def check(item: tuple[str, Descriptor]) -> BlobCheck:
        return _check_blob(item[0], item[1], client, reference.repository, deep=deep, say=say)

    with ThreadPoolExecutor(client.options.parallel, thread_name_prefix="verify") as pool:
        blobs = tuple(pool.map(check, wanted.values()))
    return PullReport(
        reference=reference,
        digest=fetched.digest,
        media_type=fetched.media_type,
        platforms=tuple(dict.fromkeys(platforms)),
        blobs=blobs,
        deep=deep,
        seconds=time.monotonic() - began,
    )


def _manifests(
    raw: bytes, media_type: str, reference: Reference, client: RegistryClient, platform: Platform | None, depth: int = 0
) -> Iterator[Manifest]:
    """The manifest itself, or the index's; an index may hold another one, a few levels deep."""
    where = str(reference)
    document = load_json_object(raw, where=where, limit=len(raw))
    if media_type not in INDEX_TYPES and "manifests" not in document:
        yield Manifest.parse(raw, where=where, media_type=media_type)
        return
    if depth > 3:
        raise FormatError("is an index within an index, too deep to follow", where=where)
    index = Index.parse(raw, where=where, media_type=media_type)
    entries = index.manifests if platform is None else (index.select(platform, where=where),)
    for entry in entries:
        fetched = client.get_manifest(reference.with_digest(entry.digest))
        if len(fetched.raw) != entry.size:
            raise FormatError(f"{entry.digest} is {len(fetched.raw)} bytes, the index says {entry.size}", where=where)
        yield from _manifests(fetched.raw, fetched.media_type, reference, client, platform, depth + 1)


def _config(manifest: Manifest, client: RegistryClient, reference: Reference, where: str) -> ImageConfig | None:
    """The config, if it is an image's (artifacts have configs of their own kinds) and can be read."""
    if "image" not in manifest.config.media_type or manifest.config.size > _MAX_CONFIG:
        return None
    try:
        raw = b"".join(client.read_blob(reference.repository, manifest.config))
    except ImageError:
        return None  # missing or wrong: the check of the blob itself says so
    return ImageConfig.parse(raw, where=f"{where}: config")


def _check_blob(
    label: str,
    descriptor: Descriptor,
    client: RegistryClient,
    repository: str,
    *,
    deep: bool,
    say: Callable[[str], None],
) -> BlobCheck:
    found = client.head_blob(repository, descriptor.digest)
    size = found.size if isinstance(found, Present) else None
    detail = ""
    match found:
        case Missing():
            detail = f"{descriptor.digest} is missing"
        case Unknown(reason=reason):
            detail = f"{descriptor.digest}: no clear answer: {reason}"
        case Present(size=int(actual)) if actual != descriptor.size:
            detail = f"{descriptor.digest} is {actual} bytes, the manifest says {descriptor.size}"
    if not detail and deep:
        say(f"{label}: reading {format_size(descriptor.size)}")
        try:
            for _ in client.read_blob(repository, descriptor):
                pass
        except DigestMismatchError as error:
            detail = error.message
        except BuildkitError as error:
            detail = f"{descriptor.digest} cannot be read: {error.message}"
    return BlobCheck(label=label, descriptor=descriptor, ok=not detail, found=size, detail=detail or "ok")
