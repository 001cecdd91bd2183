"""Writing an image to a layout, an archive or the engine. Pushing to a registry is ``buildkit.push``.

Whatever is written is written whole: blobs are proven while they are copied, an archive appears under its name when it
is complete, and a layout's ``index.json`` is replaced last.

Sources: OCI image-spec 1.1, image-layout.md; moby, ``image/tarexport/load.go``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from buildkit.engine import Engine
from buildkit.errors import BuildkitError, EngineError, StorageError, UsageError
from buildkit.image.archive import familiar
from buildkit.image.blobfile import storage_error
from buildkit.image.files import FolderFiles
from buildkit.image.layout import CONTAINERD_NAME, REF_NAME, blob_name, read_index
from buildkit.image.streams import HashingReader
from buildkit.image.transports import LISTING, STDIN, Location
from buildkit.model import OCI_INDEX, Descriptor, ImageConfig, Manifest

_BLOCK = 1 << 20
_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputImage:
    """An image to write. ``open_blob`` gives a fresh reader of a layer's blob and may be called again."""

    manifest: Manifest
    config: ImageConfig
    open_blob: Callable[[Descriptor], BinaryIO]


def write_image(destination: str, image: OutputImage, *, engine_host: str | None = None) -> str:
    """Write ``image`` to ``oci:``, ``oci-archive:``, ``docker-archive:`` or the engine; the place as it was understood.

    Raises UsageError for a place that cannot be written to, StorageError for a full disk, EngineError where the engine
    refuses the image.
    """
    place = check_destination(destination)
    match place.kind:
        case "docker-daemon":
            _load(place, image, engine_host)
        case "oci":
            assert place.path is not None
            _write_layout(place.path, place.name, image)
        case "oci-archive" | "docker-archive":
            assert place.path is not None
            tags = (familiar(place.name),) if place.name and place.kind == "docker-archive" else ()
            _atomically(place.path, lambda file: _archive(file, image, place.name, tags, place.kind != "oci-archive"))
    return str(place)


def check_destination(destination: str) -> Location:
    """The place, if an image can be written there: before hours of work, not after. Raises UsageError."""
    place = Location.parse(destination)
    path = place.path
    match place.kind:
        case "docker":
            raise UsageError(f"{destination!r} is a registry", hint="push there: buildkit push SOURCE --to REFERENCE")
        case "oci":
            assert path is not None
            if path.exists() and not path.is_dir():
                raise UsageError(f"{path} is no folder", hint="an archive is oci-archive:FILE")
            if path.is_dir() and any(path.iterdir()) and not (path / "oci-layout").exists():
                raise UsageError(f"{path} is not empty and no OCI layout", hint="name a new folder")
        case "oci-archive" | "docker-archive":
            assert path is not None
            if path == STDIN:
                raise UsageError(f"{destination!r} names no file", hint=f"there are {LISTING}")
            if path.is_dir():
                raise UsageError(f"{path} is a folder, not an archive", hint="a layout's folder is oci:DIR")
            if not path.parent.is_dir():
                raise UsageError(f"there is no folder {path.parent}")
            if path.exists() and not path.is_file():
                # Renaming over it would replace a device or a pipe by a file.
                raise UsageError(f"{path} is no regular file", hint="name a new file")
    return place


def _write_layout(folder: Path, tag: str | None, image: OutputImage) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}") from error
    kept = []
    if (folder / "index.json").exists():
        known = read_index(FolderFiles(folder, str(folder))).manifests
        kept = [entry for entry in known if entry.annotations.get(REF_NAME) != tag]
        if tag is None:
            kept = [entry for entry in kept if entry.digest != image.manifest.digest]
    for descriptor, opener in _blobs(image):
        target = folder / blob_name(descriptor.digest)
        if target.is_file() and target.stat().st_size == descriptor.size:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with opener() as source:
            _atomically(target, lambda file, s=source, d=descriptor: _copy(s, file, d))  # type: ignore[misc]
    _atomically(folder / "oci-layout", lambda file: file.write(_LAYOUT))
    index = _index([entry.to_json() for entry in kept] + [_entry(image.manifest, tag, None)])
    _atomically(folder / "index.json", lambda file: file.write(index))


def _load(place: Location, image: OutputImage, host: str | None) -> None:
    """Stream an archive to the engine, without a copy on disk, and see that what it then has is this image."""
    assert place.name is not None
    name = familiar(place.name)
    with Engine.connect(host) as engine:
        engine.load(_piped(lambda file: _archive(file, image, name, (name,), True)))
        loaded = engine.inspect(name)
        # Under containerd's store the id is another digest; there the layers have to tell.
        if loaded.diff_ids != image.config.diff_ids or (
            not engine.info.containerd_store and loaded.id != image.config.digest
        ):
            raise EngineError(f"the engine loaded {loaded.id} as {name}, not {image.config.digest}")


def _piped(write: Callable[[IO[bytes]], object]) -> Iterator[bytes]:
    """What ``write`` writes, as an iterator; its error is raised at the end, so that no reader takes it as complete."""
    reading, writing = os.pipe()
    errors: list[BaseException] = []

    def run() -> None:
        with open(writing, "wb", buffering=_BLOCK) as file:
            try:
                write(file)
            except BrokenPipeError:
                pass  # the reader has gone and has its own error to tell
            except BaseException as error:
                errors.append(error)
        # Closing flushes; after a failure the half archive is followed by the error below.

    worker = threading.Thread(target=run, name="archive-writer", daemon=True)
    worker.start()
    with open(reading, "rb", buffering=0) as file:
        while data := file.read(_BLOCK):
            yield data
    worker.join()
    if errors:
        raise errors[0]


def _archive(file: IO[bytes], image: OutputImage, name: str | None, tags: tuple[str, ...], docker: bool) -> None:
    """A layout in a tar; with ``docker`` also the ``manifest.json`` by which engines load it."""
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_BLOCK) as tar:
        tar.copybufsize = _BLOCK  # type: ignore[attr-defined]  # not in the stubs; 16 KiB otherwise
        _add(tar, "oci-layout", _LAYOUT)
        done = set()
        for descriptor, opener in _blobs(image):
            if descriptor.digest in done:
                continue
            done.add(descriptor.digest)
            member = _member(blob_name(descriptor.digest), descriptor.size)
            with opener() as source:
                proven = HashingReader(
                    cast(Any, source), digest=descriptor.digest, size=descriptor.size, what=member.name
                )
                tar.addfile(member, cast(IO[bytes], proven))
                proven.read(1)  # the end, and with it the proof
        tag = name.rpartition(":")[2] if docker and name else name
        _add(tar, "index.json", _index([_entry(image.manifest, tag, name if docker else None)]))
        if docker:
            listing = {
                "Config": blob_name(image.manifest.config.digest),
                "RepoTags": list(tags) or None,
                "Layers": [blob_name(layer.digest) for layer in image.manifest.layers],
            }
            _add(tar, "manifest.json", json.dumps([listing], separators=(",", ":")).encode())


def _blobs(image: OutputImage) -> Iterator[tuple[Descriptor, Callable[[], BinaryIO]]]:
    manifest, config = image.manifest, image.config
    for layer in manifest.layers:
        if not layer.foreign:
            yield layer, lambda layer=layer: image.open_blob(layer)  # type: ignore[misc]
    yield manifest.config, lambda: io.BytesIO(config.raw)
    yield manifest.descriptor, lambda: io.BytesIO(manifest.raw)


def _entry(manifest: Manifest, tag: str | None, name: str | None) -> dict[str, Any]:
    entry = manifest.descriptor.to_json()
    annotations = {}
    if name:
        annotations[CONTAINERD_NAME] = name if "." in name.partition("/")[0] else f"docker.io/library/{name}"
    if tag:
        annotations[REF_NAME] = tag
    if annotations:
        entry["annotations"] = annotations
    return entry


def _index(entries: list[dict[str, Any]]) -> bytes:
    document = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    tar.addfile(_member(name, len(data)), io.BytesIO(data))


def _copy(source: BinaryIO, file: IO[bytes], descriptor: Descriptor) -> None:
    proven = HashingReader(
        cast(Any, source), digest=descriptor.digest, size=descriptor.size, what=f"blob {descriptor.digest}"
    )
    shutil.copyfileobj(cast(IO[bytes], proven), file, _BLOCK)


def _atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file beside ``path`` and give it that name once it is complete."""
    name = ""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(handle, "wb") as file:
            write(file)
            os.fchmod(file.fileno(), 0o644)
        os.replace(name, path)
        name = ""
    except BuildkitError:
        raise
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        if name:
            with contextlib.suppress(OSError):
                os.unlink(name)
