"""Real little images for tests, written the way the engines and tools write them, and an engine that serves them.

Nothing here uses the code under test to write what that code reads.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import random
import socket
import socketserver
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

OCI = "application/vnd.oci.image."


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def make_tar(files: Mapping[str, bytes], *, form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An image: its config's bytes and its layers' tars, lowest first."""

    layers: tuple[bytes, ...]
    config: bytes
    tags: tuple[str, ...] = ("sample:one",)

    @property
    def image_id(self) -> str:
        return sha(self.config)


def sample(
    *, layers: Sequence[bytes] | None = None, tags: Sequence[str] = ("sample:one",), seed: int = 0, size: int = 150_000
) -> Sample:
    """Four layers of which the first and the third are the same."""
    if layers is None:
        first = make_tar({"a": b"a\n"})
        layers = (
            first,
            make_tar({"dir/": b"", "dir/big": noise(size, seed), "dir/small": b"x" * 513}),
            first,
            make_tar({"c": noise(70_000, seed + 1) + b"text" * 1000}),
        )
    config = {
        "architecture": "amd64",
        "config": {"Env": ["X=<1> & 2"]},
        "created": "2026-01-02T03:04:05Z",
        "history": [{"created_by": f"layer {n}"} for n in range(len(layers))],
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha(layer)}" for layer in layers]},
        "seed": seed,
    }
    return Sample(layers=tuple(layers), config=compact(config), tags=tuple(tags))


def tar_members(members: Sequence[tuple[str, bytes | str]], *, form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar; content that is a ``str`` is the target of a symlink."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            if isinstance(data, str):
                member.type, member.linkname = tarfile.SYMTYPE, data
                tar.addfile(member)
            else:
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


# docker save, up to Engine 24 ----------------------------------------------------------------------------------------


def go_json(fields: dict[str, Any]) -> bytes:
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").encode()


def legacy_members(image: Sample, *, ids: str = "docker") -> list[tuple[str, bytes | str]]:
    """``<id>/json``, ``<id>/layer.tar`` …; ids as Docker makes them, or ``ids="random"``: as somebody else might."""
    groups: dict[str, list[tuple[str, bytes | str]]] = {}
    names, parent, chain = [], "", ""
    seen: dict[str, str] = {}
    for number, layer in enumerate(image.layers):
        diff_id = f"sha256:{sha(layer)}"
        chain = diff_id if not chain else f"sha256:{sha(f'{chain} {diff_id}'.encode())}"
        top = number == len(image.layers) - 1
        fields: dict[str, Any] = {"created": "1970-01-01T00:00:00Z", "container_config": {"Cmd": None}}
        if top:
            fields |= {"created": "2026-01-02T03:04:05Z", "config": {"Env": ["X=<1> & 2"]}, "os": "linux"}
        hashed = fields | {"layer_id": chain} | ({"parent": f"sha256:{parent}"} if parent else {})
        layer_id = sha(go_json(dict(sorted(hashed.items())))) if ids == "docker" else sha(b"%d" % number)
        document = {"id": layer_id} | ({"parent": parent} if parent else {}) | fields | {"os": "linux"}
        path = f"{layer_id}/layer.tar"
        content: bytes | str = f"../{seen[diff_id]}/layer.tar" if diff_id in seen else layer
        seen.setdefault(diff_id, layer_id)
        groups[layer_id] = [(f"{layer_id}/VERSION", b"1.0"), (f"{layer_id}/json", go_json(document)), (path, content)]
        names.append(path)
        parent = layer_id
    groups[f"{image.image_id}.json"] = [(f"{image.image_id}.json", image.config)]
    listing = [{"Config": f"{image.image_id}.json", "RepoTags": list(image.tags), "Layers": names}]
    ordered = [member for _, group in sorted(groups.items()) for member in group]
    return [*ordered, ("manifest.json", compact(listing)), ("repositories", b"{}")]


# docker save, from Engine 25, and OCI layouts ------------------------------------------------------------------------


def layout_members(
    image: Sample,
    *,
    compressed: bool,
    plain: Sequence[int] = (),
    docker: bool = True,
    tag: str | None = "one",
    nested: bool = False,
    platform: Mapping[str, str] | None = None,
) -> list[tuple[str, bytes | str]]:
    """A layout as members; ``compressed`` is containerd's store, plain layers are the graph drivers'.

    Layers with an index in ``plain`` are plain in either.
    """
    blobs: dict[str, bytes] = {}

    def put(data: bytes, media_type: str) -> dict[str, Any]:
        blobs[f"blobs/sha256/{sha(data)}"] = data
        return {"mediaType": OCI + media_type, "digest": f"sha256:{sha(data)}", "size": len(data)}

    packs = [compressed and index not in plain for index in range(len(image.layers))]
    packed = [
        gzip.compress(layer, 1, mtime=0) if pack else layer for pack, layer in zip(packs, image.layers, strict=True)
    ]
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI + "manifest.v1+json",
        "config": put(image.config, "config.v1+json"),
        "layers": [put(data, "layer.v1.tar" + "+gzip" * pack) for pack, data in zip(packs, packed, strict=True)],
    }
    entry = put(compact(manifest), "manifest.v1+json")
    if platform:
        entry["platform"] = dict(platform)
    if nested:
        inner = {"schemaVersion": 2, "mediaType": OCI + "index.v1+json", "manifests": [entry]}
        entry = put(compact(inner), "index.v1+json")
    if tag:
        entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
    index = {"schemaVersion": 2, "mediaType": OCI + "index.v1+json", "manifests": [entry]}
    members: list[tuple[str, bytes | str]] = [*sorted(blobs.items()), ("index.json", compact(index))]
    if docker:
        listing = {
            "Config": f"blobs/sha256/{image.image_id}",
            "RepoTags": list(image.tags),
            "Layers": [f"blobs/sha256/{sha(data)}" for data in packed],
        }
        members.append(("manifest.json", compact([listing])))
    return [*members, ("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')]


def write_layout(folder: Path, members: Sequence[tuple[str, bytes | str]]) -> Path:
    for name, data in members:
        assert isinstance(data, bytes)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


# An overlay2 data root -----------------------------------------------------------------------------------------------


def write_data_root(root: Path, image: Sample) -> Path:
    """What the engine keeps of ``image``: config, tar-split files and unpacked files."""
    store = root / "image" / "overlay2"
    config = store / "imagedb" / "content" / "sha256" / image.image_id
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_bytes(image.config)
    chain = ""
    for layer in image.layers:
        diff_id = f"sha256:{sha(layer)}"
        chain = diff_id if not chain else f"sha256:{sha(f'{chain} {diff_id}'.encode())}"
        entry = store / "layerdb" / "sha256" / chain.removeprefix("sha256:")
        cache_id = sha(chain.encode())[:25]
        folder = root / "overlay2" / cache_id / "diff"
        folder.mkdir(parents=True)
        entry.mkdir(parents=True)
        (entry / "diff").write_text(diff_id)
        (entry / "cache-id").write_text(cache_id)
        (entry / "tar-split.json.gz").write_bytes(gzip.compress(b"".join(_split(layer, folder))))
    return root


def _split(layer: bytes, folder: Path) -> Iterator[bytes]:
    at = position = 0

    def raw(end: int) -> bytes:
        nonlocal position
        position += 1
        payload = base64.b64encode(layer[at:end]).decode()
        return compact({"type": 2, "payload": payload, "position": position - 1}) + b"\n"

    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        for member in tar:
            yield raw(member.offset_data)
            at = member.offset_data
            path = folder / member.name
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
            entry: dict[str, Any] = {"type": 1, "name": member.name, "payload": "AAAAAAAAAAA=", "position": position}
            if member.isfile():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(layer[at : at + member.size])
                entry["size"] = member.size
                at += member.size
            yield compact(entry) + b"\n"
            position += 1
    yield raw(len(layer))


# An engine that serves prepared archives -----------------------------------------------------------------------------


@dataclass
class FakeEngine:
    """Speaks as much of the Engine API as reading images takes, over real HTTP."""

    images: dict[str, Sample] = field(default_factory=dict)
    archives: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    containerd: bool = False
    driver: str = "overlay2"
    data_root: str = "/nonexistent/docker"
    cut: int | None = None
    """Break the connection after so many bytes of an archive."""
    identities: dict[str, str] = field(default_factory=dict)
    """Ids that are not the config's digest (containerd's store)."""
    host: str = ""

    def add(self, name: str, image: Sample, archive: bytes, *, identity: str | None = None) -> None:
        self.images[name] = image
        self.identities[name] = identity or image.image_id
        self.archives[name] = lambda: archive

    def resolve(self, name: str) -> str | None:
        if name in self.images:
            return name
        return next((key for key, value in self.identities.items() if name == f"sha256:{value}"), None)

    def answer(self, path: str) -> tuple[int, bytes, str]:
        path = path.split("?")[0]
        if path.startswith("/v1."):
            path = path[path.index("/", 1) :]
        as_json = "application/json"
        if path in ("/_ping", "/version"):
            return 200, compact({"Version": "28.0.1", "ApiVersion": "1.41", "Os": "linux", "Arch": "amd64"}), as_json
        if path == "/info":
            status = [["driver-type", "io.containerd.snapshotter.v1"]] if self.containerd else [["x", "y"]]
            info = {"Driver": self.driver, "DriverStatus": status, "DockerRootDir": self.data_root, "ID": "fake"}
            return 200, compact(info), as_json
        name, _, action = path.removeprefix("/images/").rpartition("/")
        found = self.resolve(name.replace("%3A", ":"))
        if found is None:
            return 404, compact({"message": f"No such image: {name}"}), as_json
        if action == "get":
            return 200, self.archives[found](), "application/x-tar"
        image = self.images[found]
        config = json.loads(image.config)
        document = {
            "Id": f"sha256:{self.identities[found]}",
            "RepoTags": list(image.tags),
            "Os": "linux",
            "Architecture": "amd64",
            "RootFS": {"Layers": config["rootfs"]["diff_ids"]},
            "Config": {"Labels": None},
        }
        return 200, compact(document), as_json


class _UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)


@contextmanager
def serving(engine: FakeEngine, *, unix: Path | None = None) -> Iterator[FakeEngine]:
    """Serve on loopback, or on a unix socket: then the engine counts as one of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, body, kind = engine.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if kind != "application/x-tar":
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for start in range(0, len(body), 32768):
                    piece = body[start : start + 32768]
                    if engine.cut is not None and start + len(piece) > engine.cut:
                        self.close_connection = True
                        return
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionResetError:
                self.close_connection = True  # clients that have seen enough hang up

        def log_message(self, *_: object) -> None:
            pass

    server: ThreadingHTTPServer
    if unix is None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        engine.host = f"tcp://127.0.0.1:{server.server_address[1]}"
    else:
        server = _UnixServer(str(unix), Handler)  # type: ignore[arg-type]
        engine.host = f"unix://{unix}"
    with server:
        worker = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        worker.start()
        try:
            yield engine
        finally:
            server.shutdown()
            worker.join()
