"""The container engine: the only module that imports ``docker``.

An :class:`Engine` is a connection that has answered once. What it returns are frozen values; what it raises comes from
``buildkit.errors``, mapped in one place. Where the engine is: the ``host`` argument, else ``DOCKER_HOST``, else the
current context of the Docker command (``DOCKER_CONTEXT`` or ``~/.docker/config.json``), else the usual socket.

Source: Docker Engine API reference, v1.41 (Engine 20.10) to v1.50.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import docker
import requests
import urllib3
from docker.context import ContextAPI
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.utils import kwargs_from_env

from buildkit.errors import BuildkitError, EngineError, FormatError, MissingComponentError, NotFoundError, UsageError
from buildkit.model import Digest, Platform, Reference
from buildkit.units import format_duration

DEFAULT_HOST = "unix:///var/run/docker.sock"
CALL_SECONDS = 60
"""Time-out of ordinary calls."""
TRANSFER_SECONDS = 2 * 60 * 60
"""Time-out of a silent save or load. Engine 20.10 writes a whole image to disk before its first byte."""

_CHUNK = 1 << 20
_NO_ENGINE = "start it, or name another with --engine or DOCKER_HOST; `buildkit stack.up` starts one of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine says about itself. ``data_root`` is a path on the *engine's* machine.

    ``runtimes`` are the names of the OCI runtimes that it knows, ``devices`` the CDI devices that it has found.
    """

    version: str
    api_version: str
    platform: Platform
    storage_driver: str
    containerd_store: bool
    """Images are in containerd's content store: an image's id is then the digest of its manifest or index."""
    data_root: Path
    engine_id: str
    runtimes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version; ``(0, 0)`` where the version is not a number."""
        match = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(match[1]), int(match[2])) if match else (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineImage:
    """An image as the engine lists it.

    ``id`` is the digest of the config, or of the manifest or index where the engine uses containerd's store.
    ``size`` is the engine's own sum in bytes, an estimate of the layers' uncompressed size.
    """

    id: Digest
    tags: tuple[str, ...]
    diff_ids: tuple[Digest, ...]
    platform: Platform
    size: int
    labels: Mapping[str, str]


class SaveStream(io.RawIOBase):
    """The tar that ``docker save`` sends, read once. Reading raises EngineError where the engine breaks off."""

    def __init__(self, chunks: Iterator[bytes], what: str) -> None:
        self._chunks = chunks
        self._what = what
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fills ``buffer`` unless the stream ends: the engine sends small pieces, and every call above costs."""
        target = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(target):
            if not self._rest:
                with _translated(f"saving {self._what}"):
                    chunk = next(self._chunks, None)
                if chunk is None:
                    break
                self._rest = memoryview(chunk)
            count = min(len(target) - filled, len(self._rest))
            target[filled : filled + count] = self._rest[:count]
            self._rest = self._rest[count:]
            filled += count
        return filled

    def close(self) -> None:
        if not self.closed and isinstance(self._chunks, Iterator):
            close = getattr(self._chunks, "close", None)
            if close:
                close()
        super().close()


class Engine:
    """One engine that answers; a context manager. Safe to share between threads."""

    def __init__(self, client: docker.DockerClient, transfer: docker.DockerClient, host: str, info: EngineInfo) -> None:
        self.client = client
        """For calls that end within ``CALL_SECONDS``."""
        self.transfer = transfer
        """The same engine with a time-out for long calls: save, load, build."""
        self.host = host
        self.info = info

    @classmethod
    def connect(cls, host: str | None = None, *, environ: Mapping[str, str] = os.environ) -> Engine:
        """Find the engine and ask for its version. Raises MissingComponentError where none answers."""
        options = _connection(host, environ)
        shown = str(options.get("base_url") or DEFAULT_HOST)
        options["use_ssh_client"] = shown.startswith("ssh://")
        with contextlib.ExitStack() as undo:
            try:
                _probe(shown)
                client = docker.DockerClient(version="auto", timeout=CALL_SECONDS, **options)
                undo.callback(client.close)
                version: Mapping[str, Any] = client.version()
                info: Mapping[str, Any] = client.info()
                transfer = docker.DockerClient(version=str(client.api.api_version), timeout=TRANSFER_SECONDS, **options)
                undo.callback(transfer.close)
            except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                raise MissingComponentError(
                    f"no container engine answers at {shown}: {_cause(error)}", hint=_NO_ENGINE
                ) from error
            engine = cls(client, transfer, shown, _info(version, info, shown))
            undo.pop_all()
        return engine

    @property
    def local(self) -> bool:
        """On this machine, as far as the address tells: a unix socket."""
        return self.host.startswith(("unix:", "/"))

    def inspect(self, name: str) -> EngineImage:
        """The image called ``name`` (a name, or an id or its beginning). Raises NotFoundError."""
        try:
            document: Mapping[str, Any] = self.client.api.inspect_image(name)  # type: ignore[no-untyped-call]
        except (ImageNotFound, NotFound) as error:
            raise NotFoundError(
                f"the engine at {self.host} has no image {name!r}",
                hint="`docker images` lists them",
            ) from error
        except (DockerException, requests.RequestException, ValueError) as error:
            raise EngineError(f"inspecting {name!r}: {_cause(error)}") from error
        return _image(document, name)

    def layer_sizes(self, image: Digest | str) -> tuple[int, ...]:
        """Bytes that each instruction of the image added, uncompressed, oldest first; 0 for those without a layer."""
        with _translated(f"asking for the history of {image}"):
            entries = self.client.api.history(str(image))  # type: ignore[no-untyped-call]
        return tuple(int(entry.get("Size") or 0) for entry in reversed(entries))

    def save(self, image: Digest | str) -> SaveStream:
        """The image as ``docker save`` streams it. By id: no name can be moved to another image meanwhile."""
        with _translated(f"saving {image}"):
            return SaveStream(iter(self.transfer.api.get_image(str(image), chunk_size=_CHUNK)), str(image))

    def pull(self, image: Reference, *, username: str = "", password: str = "") -> None:
        """Fetch ``image`` from its registry, by the engine's own ways and trust. Raises EngineError, NotFoundError."""
        login = {"username": username, "password": password} if password else None
        with _translated(f"pulling {image}"):
            lines = self.transfer.api.pull(str(image), stream=True, decode=True, auth_config=login)
            with contextlib.closing(lines):
                for line in lines:
                    if isinstance(line, dict) and line.get("error"):
                        raise EngineError(f"the engine cannot pull {image}: {line['error']}")

    def load(self, archive: IO[bytes] | Iterable[bytes]) -> None:
        """Load a docker-archive; its ``RepoTags`` become names. Raises EngineError if the engine refuses it."""
        data = archive if hasattr(archive, "read") else iter(archive)
        with _translated("loading an image"):
            for line in self.transfer.api.load_image(data) or ():  # type: ignore[no-untyped-call]
                if isinstance(line, dict) and line.get("error"):
                    raise EngineError(f"the engine refused the image: {line['error']}")

    def tag(self, image: Digest | str, name: str) -> None:
        """Give ``image`` the name ``name`` (``REPOSITORY[:TAG]``). Moves the name where it exists."""
        repository, colon, tag = name.rpartition(":")
        if not colon or "/" in tag:
            repository, tag = name, "latest"
        with _translated(f"tagging {image} as {name}"):
            self.client.api.tag(str(image), repository, tag=tag, force=True)

    def import_tar(self, chunks: Iterable[bytes], name: str, *, changes: Sequence[str] = ()) -> None:
        """Make an image of one layer from the tar of a root file system, and name it ``name``.

        An exception out of ``chunks`` breaks the import off, and no image is made.
        ``changes`` are Dockerfile instructions such as ``CMD ["/bin/sh"]``. Moves the name where it exists.
        """
        repository, _, tag = name.rpartition(":")
        with _translated(f"importing {name}"):
            answer: str = self.transfer.api.import_image_from_stream(
                iter(chunks), repository=repository, tag=tag, changes=list(changes)
            )
        for line in answer.splitlines():
            if (message := _error_line(line)) is not None:
                raise EngineError(f"the engine refused to import {name}: {message}")

    def build_classic(
        self,
        *,
        context: Path,
        dockerfile: Path,
        names: Sequence[str],
        arguments: Mapping[str, str],
        labels: Mapping[str, str],
        platform: Platform,
        target: str | None,
        network: str | None,
        no_cache: bool,
        timeout: float,
        say: Callable[[str], None],
    ) -> Digest:
        """Build with the engine's own builder, which has no secrets and no mounts; give the image all ``names``.

        Honours ``.dockerignore``. ``say`` gets the output's lines. Closing the connection, as an exception does, ends
        the build. Raises EngineError where it fails or takes longer than ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        image: Digest | None = None
        try:
            with _translated("building"):
                lines = self.transfer.api.build(
                    path=str(context),
                    dockerfile=str(dockerfile),
                    buildargs=dict(arguments),
                    labels=dict(labels),
                    # Engines before 23 take a platform only with experimental features; their own needs no saying.
                    platform=None if platform == self.info.platform else str(platform),
                    target=target or "",
                    network_mode=network,
                    nocache=no_cache,
                    rm=True,
                    forcerm=True,
                    timeout=math.ceil(timeout),
                    decode=True,
                )
                with contextlib.closing(lines):
                    for line in lines:
                        if not isinstance(line, dict):
                            continue
                        if "error" in line:
                            raise EngineError(f"the build failed: {line['error']}", hint="its output above says where")
                        for text in str(line.get("stream") or line.get("status") or "").splitlines():
                            if text.strip():
                                say("".join(c if c.isprintable() else " " for c in text).rstrip())
                        aux = line.get("aux")
                        if isinstance(aux, dict) and "ID" in aux:
                            image = Digest.parse(aux["ID"])
                        if time.monotonic() > deadline:
                            raise EngineError("too long")
        except EngineError as error:
            # A silent build ends in a time-out of the connection, not earlier than the deadline.
            if time.monotonic() >= deadline:
                raise EngineError(f"the build took longer than {format_duration(timeout)} and was ended") from error
            raise
        if image is None:
            raise EngineError("the engine's builder ended well but named no image")
        for name in names:
            self.tag(image, name)
        return image

    def remove(self, name: str) -> None:
        """Remove the name, and the image if that was its last one. NotFoundError if there is none."""
        try:
            self.client.api.remove_image(name)
        except (ImageNotFound, NotFound) as error:
            raise NotFoundError(f"the engine at {self.host} has no image {name!r}") from error
        except (DockerException, requests.RequestException) as error:
            raise EngineError(f"removing {name!r}: {_cause(error)}") from error

    def close(self) -> None:
        self.client.close()
        self.transfer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _connection(host: str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """Arguments for the client, by the order of precedence that the Docker command has."""
    try:
        if host:
            return {**kwargs_from_env(environment={**environ, "DOCKER_HOST": host})}
        if environ.get("DOCKER_HOST"):
            return {**kwargs_from_env(environment=dict(environ))}
        context = ContextAPI.get_context(environ.get("DOCKER_CONTEXT") or None)
    except (DockerException, OSError, ValueError) as error:
        raise UsageError(f"the engine's address or certificates: {_cause(error)}") from error
    if context is None or not context.Host:
        if name := environ.get("DOCKER_CONTEXT"):
            raise UsageError(f"DOCKER_CONTEXT names {name!r}, which is not a context", hint="see `docker context ls`")
        return {"base_url": DEFAULT_HOST}
    options: dict[str, Any] = {"base_url": str(context.Host).replace("http+unix://", "unix://")}
    if context.TLSConfig is not None:
        options["tls"] = context.TLSConfig
    return options


def _probe(host: str) -> None:
    """Connect and hang up, where the address is a socket: the client library leaks its own socket when that fails."""
    path = host.removeprefix("unix://") if host.startswith("unix://") else host
    if path.startswith("/"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CALL_SECONDS)
            probe.connect(path)


def _info(version: Mapping[str, Any], info: Mapping[str, Any], host: str) -> EngineInfo:
    status = info.get("DriverStatus") or ()
    snapshotter = any(
        isinstance(pair, list) and len(pair) == 2 and str(pair[1]).startswith("io.containerd.snapshotter")
        for pair in status
    )
    root = info.get("DockerRootDir")
    if not isinstance(root, str) or not root.startswith("/"):
        raise EngineError(f"the engine at {host} names no data root (DockerRootDir is {root!r})")
    return EngineInfo(
        version=str(version.get("Version", "")),
        api_version=str(version.get("ApiVersion", "")),
        platform=Platform(os=str(version.get("Os") or "linux"), architecture=str(version.get("Arch") or "amd64")),
        storage_driver=str(info.get("Driver", "")),
        containerd_store=snapshotter,
        data_root=Path(root),
        engine_id=str(info.get("ID", "")),
        runtimes=tuple(sorted(str(name) for name in info.get("Runtimes") or {})),
        devices=tuple(
            str(device.get("ID")) for device in info.get("DiscoveredDevices") or () if isinstance(device, dict)
        ),
    )


def _image(document: Mapping[str, Any], name: str) -> EngineImage:
    rootfs = document.get("RootFS") or {}
    labels = (document.get("Config") or {}).get("Labels") or {}
    variant = document.get("Variant")
    try:
        return EngineImage(
            id=Digest.parse(document.get("Id")),
            tags=tuple(str(tag) for tag in document.get("RepoTags") or ()),
            diff_ids=tuple(Digest.parse(layer) for layer in rootfs.get("Layers") or ()),
            platform=Platform(
                os=str(document.get("Os") or "linux"),
                architecture=str(document.get("Architecture") or "amd64"),
                variant=str(variant) if variant else None,
            ),
            size=int(document.get("Size") or 0),
            labels={str(k): str(v) for k, v in labels.items()},
        )
    except FormatError as error:
        raise EngineError(f"the engine's description of {name!r} makes no sense: {error.message}") from error


def _error_line(line: str) -> str | None:
    """The error in one line of an answer that streams JSON objects."""
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return str(document["error"]) if isinstance(document, dict) and "error" in document else None


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except BuildkitError:
        raise
    except (ImageNotFound, NotFound) as error:
        raise NotFoundError(f"{what}: {_cause(error)}") from error
    except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        raise EngineError(f"{what}: {_cause(error)}", hint="the engine's own log says more") from error


def _cause(error: BaseException) -> str:
    """The engine's explanation where there is one, else the innermost reason, without the wrapping."""
    if isinstance(error, APIError) and error.explanation:
        return str(error.explanation)
    seen: BaseException = error
    while True:
        inner = seen.__cause__ or seen.__context__
        if inner is None or inner is seen:
            break
        seen = inner
    if isinstance(seen, OSError) and seen.strerror:
        return seen.strerror
    return str(seen) or type(seen).__name__
