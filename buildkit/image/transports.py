"""Where images come from and go to, by the names that the field uses (containers-transports(5)).

::

    docker-daemon:NAME[:TAG]         an image of the container engine; an unqualified NAME means the same
    docker-archive:FILE.tar[:NAME]   what ``docker save`` writes; ``-`` is standard input
    oci:DIR[:TAG]                    an OCI image layout
    oci-archive:FILE.tar[:TAG]       the same in a tar
    docker://HOST/REPOSITORY:TAG     a registry
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from buildkit.engine import Engine, EngineImage
from buildkit.errors import NotFoundError, UsageError
from buildkit.image.archive import DockerArchiveSource
from buildkit.image.blobfile import storage_error
from buildkit.image.direct import DirectSource, NotDirectError, open_direct
from buildkit.image.fallback import FallbackSource
from buildkit.image.files import FolderFiles, TarFiles
from buildkit.image.layout import LayoutSource
from buildkit.image.remote import Registry, RemoteSource
from buildkit.image.save import SaveSource
from buildkit.image.source import ImageSource
from buildkit.model import Platform, Reference, split_name

Kind = Literal["docker-daemon", "docker-archive", "oci", "oci-archive", "docker"]
RegistryFactory = Callable[[str], AbstractContextManager[Registry]]
"""Makes a client for ``host[:port]``; it is closed with the source."""

LISTING = "docker-daemon:NAME, docker-archive:FILE.tar, oci:DIR, oci-archive:FILE.tar, docker://REGISTRY/NAME"
STDIN = Path("-")

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.ASCII)
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?", re.ASCII)
_IMAGE_ID = re.compile(r"(?:sha256:)?[0-9a-f]{6,64}", re.ASCII)
_FOREIGN = ("containers-storage", "dir", "docker-tarball", "ostree", "sif", "tarball", "http", "https", "podman")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A place of an image. ``path`` for files and folders; ``name`` is the image in the engine, archive or layout."""

    kind: Kind
    path: Path | None = None
    name: str | None = None
    reference: Reference | None = None

    @classmethod
    def parse(cls, text: str) -> Location:
        """Raises UsageError, naming the transports, for one that is not known."""
        if text.startswith("docker://"):
            return cls(kind="docker", reference=Reference.parse(text))
        scheme = _SCHEME.match(text)
        rest = text[scheme.end() :] if scheme else ""
        match scheme[1] if scheme else "":
            case "docker-daemon":
                return cls(kind="docker-daemon", name=_engine_name(rest, text))
            case "docker-archive" | "oci" | "oci-archive" as kind:
                path, name = _split_path(rest, text)
                return cls(kind=kind, path=path, name=name)
            case other if other in _FOREIGN or other == "docker":
                raise UsageError(f"transport {other!r} in {text!r} is not known", hint=f"there are {LISTING}")
        return cls(kind="docker-daemon", name=_engine_name(text, text))

    def __str__(self) -> str:
        if self.reference is not None:
            return f"docker://{self.reference}"
        place = str(self.path) if self.path is not None else ""
        return ":".join(part for part in (self.kind, place, self.name) if part)


def open_source(
    text: str,
    *,
    engine_host: str | None = None,
    method: str = "auto",
    platform: Platform | None = None,
    registry_client_factory: RegistryFactory | None = None,
) -> ImageSource:
    """The image at ``text``. Raises UsageError for a place that does not exist or does not say which image.

    ``method`` is about the engine's images: ``direct`` from its data root, ``save`` through its API, or ``auto``:
    direct where that works, and on with ``save`` where it stops working. ``platform`` chooses from an index (default
    linux/amd64).
    """
    if method not in ("auto", "direct", "save"):
        raise UsageError(f"source method {method!r} is not known", hint="auto, direct or save")
    place = Location.parse(text)
    wanted = platform or Platform()
    match place.kind:
        case "docker-daemon":
            return _open_engine(place, engine_host, method, platform)
        case _ if method != "auto":
            raise UsageError(f"source method {method!r} is for the engine's images, {text!r} is none")
        case "docker":
            return _open_registry(place, wanted, registry_client_factory)
    assert place.path is not None
    if place.kind == "docker-archive" and place.path == STDIN:
        return _open_stdin(sys.stdin.buffer, place)
    if place.kind == "docker-archive":
        return DockerArchiveSource.load(TarFiles(place.path, str(place.path)), name=str(place), ref=place.name)
    if place.kind == "oci-archive":
        archive = TarFiles(place.path, str(place.path))
        return LayoutSource.load(archive, name=str(place), tag=place.name, platform=wanted)
    if not place.path.is_dir():
        what = "is not a folder" if place.path.exists() else "does not exist"
        raise UsageError(f"the layout {place.path} {what}", hint="oci:DIR names a folder with an index.json")
    folder = FolderFiles(place.path, str(place.path))
    return LayoutSource.load(folder, name=str(place), tag=place.name, platform=wanted)


def _open_engine(place: Location, host: str | None, method: str, platform: Platform | None) -> ImageSource:
    assert place.name is not None
    name = str(place)
    with contextlib.ExitStack() as undo:
        engine = undo.enter_context(Engine.connect(host))
        try:
            image = engine.inspect(place.name)
        except NotFoundError as error:
            raise UsageError(error.message, hint=f"`docker images` lists them; other places are {LISTING}") from error
        if platform is not None and (platform.os, platform.architecture) != (
            image.platform.os,
            image.platform.architecture,
        ):
            raise UsageError(f"the engine's {place.name} is for {image.platform}, not for {platform}")
        reason = "asked for"
        if method != "save":
            try:
                direct = open_direct(engine, image, name=name, platform=platform or image.platform)
                if method == "direct" or not isinstance(direct, DirectSource):
                    return direct
                return FallbackSource(direct, lambda: _save(place, image, host))
            except NotDirectError as error:
                if method == "direct":
                    raise
                reason = error.message
        source = SaveSource(engine, image, name=name, reason=reason, release=engine.close)
        undo.pop_all()
        return source


def _save(place: Location, image: EngineImage, host: str | None) -> SaveSource:
    engine = Engine.connect(host)
    return SaveSource(engine, image, name=str(place), release=engine.close)


def _open_registry(place: Location, platform: Platform, factory: RegistryFactory | None) -> ImageSource:
    assert place.reference is not None
    if factory is None:
        from buildkit.registry.client import RegistryClient  # deferred: most sources need no HTTP client

        factory = RegistryClient
    with contextlib.ExitStack() as undo:
        client = undo.enter_context(factory(place.reference.registry))
        source = RemoteSource(client, place.reference, platform=platform, release=undo.close)
        source.release = undo.pop_all().close
        return source


def _open_stdin(stream: IO[bytes], place: Location) -> ImageSource:
    """Standard input is copied to a temporary file: an archive's ``manifest.json`` comes last."""
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="buildkit-")))
        copy = folder / "stdin.tar"
        try:
            with open(copy, "wb") as file:
                shutil.copyfileobj(stream, file, 1 << 20)
        except OSError as error:
            raise storage_error(copy, error) from error
        source = DockerArchiveSource.load(TarFiles(copy, "standard input"), name=str(place), ref=place.name)
        source.release = undo.pop_all().close
        return source


def _split_path(rest: str, text: str) -> tuple[Path, str | None]:
    """``PATH[:NAME]``. A colon belongs to the path where a file of the whole name exists."""
    if not rest:
        raise UsageError(f"{text!r} names no file", hint=f"there are {LISTING}")
    if "\0" in rest:
        raise UsageError(f"{text!r} is not a path")
    path, colon, name = rest.partition(":")
    if not colon or Path(rest).exists():
        return Path(rest), None
    if not path or not name:
        raise UsageError(f"{text!r} names no image after the colon", hint=f"there are {LISTING}")
    return Path(path), name


def _engine_name(name: str, text: str) -> str:
    """A name (or id) as the engine takes it. Raises UsageError for what cannot be one."""
    if _IMAGE_ID.fullmatch(name):
        return name
    host, slash, path = name.partition("/")
    named_host = slash and _HOST.fullmatch(host) and ("." in host or ":" in host or host == "localhost")
    try:
        split_name(path if named_host else name, text)
    except UsageError as error:
        scheme = _SCHEME.match(text)
        if scheme and not named_host:
            hint = f"there are {LISTING}"
            raise UsageError(f"{text!r} is neither an image's name nor has it a known transport", hint=hint) from error
        raise
    return name
