"""What the smoke test needs of an engine: a file out of an image, and a server started from one. No bind mounts: files
come and go as tars through the engine, wherever it runs."""

from __future__ import annotations

import contextlib
import io
import posixpath
import secrets
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from buildkit.engine import Engine
from buildkit.engine import _translated as translated
from buildkit.errors import EngineError, NotFoundError, StorageError, UsageError, one_line
from buildkit.recipe import SmokeServer

OUTPUT_LINES = 60
"""Lines of a server's output that are kept."""
_LINKS = 8
"""Links that are followed to a file."""
_LABEL = {"buildkit.smoke": "1"}

NO_GPU = (
    "could not select device driver",
    "CUDA_ERROR_NO_DEVICE",
    "no CUDA-capable device",
    "libcuda.so.1: cannot open",
)
"""What engine, driver and loader say where there is no GPU (CUDA Driver API, CUDA_ERROR_NO_DEVICE)."""
CANNOT_RUN = ("no kernel image is available", "CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
"""What the driver says where it has a GPU and no code for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A running server. ``url`` reaches it from here."""

    url: str
    container: Any

    def ended(self) -> str:
        """Empty while it runs; else how it ended, with its last line."""
        with translated("watching the server"):
            self.container.reload()
            state: Mapping[str, Any] = self.container.attrs["State"]
        if state.get("Running"):
            return ""
        why = "was killed for its memory" if state.get("OOMKilled") else f"ended with {state.get('ExitCode')}"
        last = self.output().strip().splitlines()[-1:]
        return f"the server {why}" + (f": {one_line(last[0], 300)}" if last else "")

    def output(self) -> str:
        """The last lines of its output."""
        with translated("reading the server's output"):
            raw: bytes = self.container.logs(stdout=True, stderr=True, tail=OUTPUT_LINES)
        text = raw[-(1 << 16) :].decode("utf-8", "replace")
        return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def copy_out(engine: Engine, image: str, path: str, target: Path) -> None:
    """Write the file ``path`` of ``image`` to ``target``; links are followed inside the image.

    Raises NotFoundError where the image has no such file, EngineError where the engine refuses.
    """
    with translated(f"creating a container of {image}"):
        container: Any = engine.client.containers.create(image, command=["-"], network_mode="none", labels=_LABEL)
    try:
        where = path
        for _ in range(_LINKS):
            link = _copy(container, image, where, target)
            if link is None:
                return
            where = posixpath.normpath(posixpath.join(posixpath.dirname(where), link))
        raise NotFoundError(f"{path} in {image} is a link that leads nowhere")
    finally:
        _remove(container, image)


def _copy(container: Any, image: str, path: str, target: Path) -> str | None:
    """None when the file was written; where the link leads that was found instead."""
    try:
        with translated(f"reading {path}"):
            chunks, _ = container.get_archive(path)
    except NotFoundError as error:
        raise NotFoundError(f"the image {image} has no {path}") from error
    with contextlib.closing(chunks), translated(f"reading {path}"):
        stream = cast(IO[bytes], io.BufferedReader(_Chunks(chunks)))
        try:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    if member.issym():
                        return member.linkname
                    if not member.isreg():
                        raise NotFoundError(f"{path} in {image} is not a file")
                    source = archive.extractfile(member)
                    assert source is not None
                    _write(source, target)
                    return None
        except tarfile.TarError as error:
            raise EngineError(f"reading {path}: the engine sends no tar: {error}") from error
    raise EngineError(f"reading {path}: the engine sends an empty tar")


def _write(source: IO[bytes], target: Path) -> None:
    try:
        with target.open("wb") as out:
            while chunk := source.read(1 << 20):
                out.write(chunk)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror}") from error


class _Chunks(io.RawIOBase):
    """A reader over an iterator of bytes."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not self._rest:
            self._rest = next(self._chunks, b"")
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


@contextlib.contextmanager
def serving(
    engine: Engine, image: str, server: SmokeServer, files: Mapping[str, bytes], *, gpu: bool
) -> Iterator[Started]:
    """Start ``image`` by ``server``, with ``files`` in its model folder; gone, with its volumes, when the context ends.

    Its port is published on this machine's loopback, from a network of its own. Raises EngineError where the engine
    refuses (``cause_of`` its message tells whether for want of a GPU), UsageError where the engine is on another
    machine.
    """
    if not engine.local:
        raise UsageError(
            f"the engine at {engine.host} is on another machine, where the server's port cannot be reached",
            hint="start the server there with the probe checkpoint, and name it with --url",
        )
    options: dict[str, Any] = {"environment": dict(server.environment), "labels": _LABEL, "detach": True}
    if gpu:
        options["device_requests"] = [{"Count": -1, "Capabilities": [["gpu"]]}]
    if server.command:
        # An entrypoint of one's own also clears the image's command (Docker Engine API, ContainerCreate).
        values = {"{model}": server.model, "{port}": str(server.port)}
        options["entrypoint"] = [_filled(word, values) for word in server.command]
    with contextlib.ExitStack() as undo:
        network = undo.enter_context(_network(engine))
        if network is None:
            options["network_mode"] = "host"
        else:
            options |= {"network": network, "ports": {f"{server.port}/tcp": ("127.0.0.1", None)}}
        with translated(f"creating a container of {image}"):
            container: Any = engine.client.containers.create(image, **options)
        undo.callback(_remove, container, image)
        with translated(f"copying the probe checkpoint to {server.model}"):
            container.put_archive("/", _tar(server.model, files))
        with translated(f"starting {image}"):
            container.start()
            container.reload()
        ports = container.attrs["NetworkSettings"].get("Ports") or {}
        # No binding: it has ended already, which is found out by who waits for it.
        port = next((binding["HostPort"] for binding in ports.get(f"{server.port}/tcp") or ()), server.port)
        yield Started(url=f"http://127.0.0.1:{port}", container=container)


def _remove(container: Any, image: str) -> None:
    with translated(f"removing the container of {image}"):
        container.remove(force=True, v=True)


@contextlib.contextmanager
def _network(engine: Engine) -> Iterator[str | None]:
    """A bridge network for one container; None where the engine can make none, and the host's must do."""
    try:
        with translated("making a network"):
            network: Any = engine.client.networks.create(
                f"buildkit-smoke-{secrets.token_hex(4)}", driver="bridge", labels=_LABEL
            )
    except EngineError:
        yield None
        return
    try:
        yield network.name
    finally:
        with translated("removing the network"):
            network.remove()


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _tar(folder: str, files: Mapping[str, bytes]) -> bytes:
    """``files`` under the absolute path ``folder``, readable for everyone, with the folders on the way."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        parts = folder.strip("/").split("/")
        for depth in range(1, len(parts) + 1):
            entry = tarfile.TarInfo("/".join(parts[:depth]))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo("/".join([*parts, name]))
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def cause_of(text: str) -> str:
    """``no gpu``, ``cannot run`` or nothing: what the words of an engine or a driver stand for."""
    if any(word in text for word in NO_GPU):
        return "no gpu"
    return "cannot run" if any(word in text for word in CANNOT_RUN) else ""
