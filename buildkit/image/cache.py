"""Compressed layers kept on disk, so that what was compressed once is not compressed again.

Two indexes: (diff_id, codec) → the blob's descriptor, and (image id, codec) → the manifest's exact bytes. Beside them
lie the blobs themselves, by digest, as many as the size bound allows; an entry whose blob is gone still tells digest
and size, which is all that is needed where the registry has the blob.

Promises:

- A file appears under its final name complete or not at all (written under ``tmp``, then renamed), an index entry only
  after its blob. Data is not forced to the disk: after a power failure a blob may be damaged, which its digest tells.
- Whoever uses a blob holds a shared lock (flock) on its file, whoever writes one an exclusive lock; eviction only takes
  files that nobody holds, in any process. What a dead process left under ``tmp`` is not locked any more and is removed.
- Entries carry a checksum: a damaged one is no entry. Blobs are proven by whoever reads them (``FileBlob.verify``, or
  the registry); ``evict`` forgets one that turned out to be wrong.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from buildkit.errors import BuildkitError, FormatError, UsageError
from buildkit.image.blobfile import FileBlob, GrowingBlob, storage_error
from buildkit.model import Descriptor, Digest, ImageConfig, Manifest, load_json_object
from buildkit.units import parse_size

DEFAULT_LIMIT = 20 * 10**9
"""Bytes of blobs that are kept."""
MAX_ENTRIES = 20_000
"""Index entries that are kept, each below a few kilobytes (manifests: below 4 MiB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLayer:
    """A layer that was compressed before. ``blob`` is there while its bytes are kept; whoever got it closes it."""

    descriptor: Descriptor
    blob: FileBlob | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedImage:
    """A manifest that was made before, with its config; both with their exact bytes."""

    manifest: Manifest
    config: ImageConfig


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """``images`` in ``BUILDKIT_CACHE_DIR``, else in the user's cache folder."""
    named = environ.get("BUILDKIT_CACHE_DIR")
    return (Path(named).expanduser() if named else platformdirs.user_cache_path("buildkit")) / "images"


def cache_limit(environ: Mapping[str, str] = os.environ) -> int:
    """``BUILDKIT_CACHE_LIMIT`` (``20GB``; ``0`` keeps nothing), else the default. Bytes."""
    text = environ.get("BUILDKIT_CACHE_LIMIT", "").strip()
    if not text:
        return DEFAULT_LIMIT
    return 0 if text == "0" else parse_size(text, what="BUILDKIT_CACHE_LIMIT")


class BlobCache:
    """A cache in ``root``; any number of processes and threads may share it.

    ``limit`` bounds the bytes of kept blobs (least recently used go first; what is in use may exceed it). With
    ``keep=False`` or a limit of 0 a new blob's file has no name from the start: it is gone when its last reader closes
    it, whatever happens to the process.
    """

    def __init__(self, root: Path, *, limit: int = DEFAULT_LIMIT, keep: bool = True) -> None:
        self.root = root
        self.limit = limit
        self.keep = keep and limit > 0
        self._blobs = root / "blobs"
        self._layers = root / "layers"
        self._images = root / "images"
        self._tmp = root / "tmp"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self._blobs, self._layers, self._images, self._tmp):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            if isinstance(error, FileExistsError | NotADirectoryError):
                raise UsageError(f"{root} is not a folder", hint="set BUILDKIT_CACHE_DIR to one") from error
            raise storage_error(root, error) from error
        self._remove_stale()
        self._shrink(limit)

    # Layers

    def find(self, diff_id: Digest, codec_id: str, *, label: str) -> CachedLayer | None:
        """What is known about the layer; its blob is locked against eviction until it is closed."""
        entry = self._read(self._layer_entry(diff_id, codec_id), {"diff_id": str(diff_id), "codec": codec_id})
        if entry is None:
            return None
        try:
            descriptor = Descriptor.parse(entry.get("blob"), where="cache entry")
        except FormatError:
            return None
        return CachedLayer(descriptor=descriptor, blob=self._open(descriptor, label))

    def create(self, *, label: str) -> GrowingBlob:
        """A new, empty blob. Give it to ``commit`` once it is finished, or close it: then nothing remains."""
        while True:
            try:
                handle, name = tempfile.mkstemp(dir=self._tmp)
            except OSError as error:
                raise storage_error(self._tmp, error) from error
            path = Path(name)
            if not self.keep:
                path.unlink()
                return GrowingBlob(handle, self._tmp, label=label, on_full=self._make_room)
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Another process may have taken it for a dead one's between the two calls.
            if os.fstat(handle).st_nlink:
                return _Temporary(handle, path, label=label, on_full=self._make_room)
            os.close(handle)

    def commit(self, blob: GrowingBlob, *, diff_id: Digest, codec_id: str) -> None:
        """Keep a finished blob (where this cache keeps any) and what it is the compressed form of.

        The blob stays open, readable and locked against eviction until it is closed.
        """
        descriptor = blob.state().descriptor
        assert descriptor is not None, "only finished blobs are committed"
        if isinstance(blob, _Temporary):
            blob.move(self._blob_path(descriptor.digest))
        self._write(
            self._layer_entry(diff_id, codec_id),
            {"diff_id": str(diff_id), "codec": codec_id, "blob": descriptor.to_json()},
        )
        self._shrink(self.limit)

    def evict(self, digest: Digest) -> None:
        """Forget the blob with this digest, and every entry that leads to it; readers that have it open keep it."""
        with contextlib.suppress(FileNotFoundError):
            self._blob_path(digest).unlink()
        for path in _files(self._layers):
            entry = self._read(path, {})
            blob = entry.get("blob") if entry else None
            if entry is None or (isinstance(blob, dict) and blob.get("digest") == str(digest)):
                path.unlink(missing_ok=True)

    # Images

    def find_image(self, image_id: Digest, codec_id: str) -> CachedImage | None:
        """The manifest that was stored for this image, proven against ``image_id``."""
        path = self._image_entry(image_id, codec_id)
        entry = self._read(path, {"image": str(image_id), "codec": codec_id})
        if entry is None:
            return None
        try:
            config = base64.b64decode(str(entry.get("config")), validate=True)
            manifest = Manifest.parse(
                base64.b64decode(str(entry.get("manifest")), validate=True),
                where=str(path),
                media_type=str(entry.get("media_type")),
            )
            image_id.check(config, "cached config")
            if manifest.config.digest != image_id:
                return None
            return CachedImage(manifest=manifest, config=ImageConfig.parse(config, where=str(path)))
        except (ValueError, BuildkitError):
            return None

    def store_image(self, image_id: Digest, codec_id: str, *, manifest: Manifest, config: bytes) -> None:
        self._write(
            self._image_entry(image_id, codec_id),
            {
                "image": str(image_id),
                "codec": codec_id,
                "media_type": manifest.media_type,
                "manifest": base64.b64encode(manifest.raw).decode(),
                "config": base64.b64encode(config).decode(),
            },
        )

    def size(self) -> int:
        """Bytes of blobs that are kept now."""
        return sum(stat.st_size for _, stat in self._kept())

    # Inside

    def _blob_path(self, digest: Digest) -> Path:
        return self._blobs / f"{digest.algorithm}-{digest.hex}"

    def _layer_entry(self, diff_id: Digest, codec_id: str) -> Path:
        return self._layers / f"{hashlib.sha256(f'{diff_id} {codec_id}'.encode()).hexdigest()}.json"

    def _image_entry(self, image_id: Digest, codec_id: str) -> Path:
        return self._images / f"{hashlib.sha256(f'{image_id} {codec_id}'.encode()).hexdigest()}.json"

    def _open(self, descriptor: Descriptor, label: str) -> FileBlob | None:
        path = self._blob_path(descriptor.digest)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            stat = os.fstat(handle)
            if stat.st_nlink and stat.st_size == descriptor.size:
                os.utime(handle)  # "used now", for the order of eviction
                blob = FileBlob(handle, descriptor, label=label, path=path)
                handle = -1
                return blob
            if stat.st_nlink:
                path.unlink(missing_ok=True)
            return None
        finally:
            if handle >= 0:
                os.close(handle)

    def _read(self, path: Path, expected: Mapping[str, str]) -> dict[str, Any] | None:
        """A checked entry, or None; a damaged one is removed."""
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        try:
            document = load_json_object(raw, where=str(path), limit=2**28)
            if document.pop("check", None) == _checksum(document) and expected.items() <= document.items():
                return document
        except (FormatError, ValueError, TypeError, RecursionError):
            pass  # damaged: removed below, and a miss for the caller
        path.unlink(missing_ok=True)
        return None

    def _write(self, path: Path, document: dict[str, Any]) -> None:
        raw = json.dumps({**document, "check": _checksum(document)}).encode()
        try:
            handle, name = tempfile.mkstemp(dir=self._tmp)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                with open(handle, "wb") as file:
                    file.write(raw)
                    file.flush()
                    os.replace(name, path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError:
            return  # disk full, or taken for a dead process's: an entry only saves work later, a push goes on without

    def _kept(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in _files(self._blobs):
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat()

    def _shrink(self, limit: int) -> int:
        """Remove least recently used blobs that nobody holds until ``limit`` is met; bytes freed."""
        kept = sorted(self._kept(), key=lambda item: item[1].st_mtime_ns)
        total = sum(stat.st_size for _, stat in kept)
        freed = 0
        for path, stat in kept:
            if total - freed <= limit:
                break
            if _remove_unless_held(path):
                freed += stat.st_size
        for folder in (self._layers, self._images):
            entries = _files(folder)
            if len(entries) > MAX_ENTRIES:
                entries.sort(key=lambda path: path.stat().st_mtime_ns if path.exists() else 0)
                for path in entries[: len(entries) - MAX_ENTRIES]:
                    path.unlink(missing_ok=True)
        return freed

    def _make_room(self) -> bool:
        """The disk is full: give up everything that nobody holds."""
        return self._shrink(0) > 0

    def _remove_stale(self) -> None:
        for path in _files(self._tmp):
            _remove_unless_held(path)


class _Temporary(GrowingBlob):
    """A growing blob whose file has a name under ``tmp`` until it is moved; closing it before removes the file."""

    _moved = False

    def move(self, path: Path) -> None:
        try:
            os.replace(self.path, path)
        except OSError as error:
            raise storage_error(path, error) from error
        self._moved = True
        self.path = path
        fcntl.flock(self.handle, fcntl.LOCK_SH)

    def close(self) -> None:
        if not self._moved and self.handle >= 0:
            self.path.unlink(missing_ok=True)
        super().close()


def _checksum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return [path for path in folder.iterdir() if path.is_file()]
    return []


def _remove_unless_held(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
