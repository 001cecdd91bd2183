"""Small images as files: OCI layouts and docker-archives, in the forms that engines and tools write."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def layer_tar(files: Mapping[str, bytes]) -> bytes:
    """A layer with these files, plain tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def noise(size: int, seed: int = 1) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size)


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def config(layers: Sequence[bytes], **more: Any) -> bytes:
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["/bin/true"], "Labels": {"org.example.test": "yes"}},
        "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]},
        "history": [{"created_by": f"layer {number}"} for number, _ in enumerate(layers)],
        **more,
    }
    return json.dumps(document).encode()


def write_archive(path: Path, layers: Sequence[bytes], *, names: Sequence[str] = ("test:latest",)) -> Path:
    """A docker-archive in the form of Engine 20.10."""
    raw = config(layers)
    image = hashlib.sha256(raw).hexdigest()
    with tarfile.open(path, "w") as tar:
        members = []
        for layer in layers:
            name = f"{hashlib.sha256(b'legacy' + layer).hexdigest()}/layer.tar"
            if name not in members:
                _add(tar, name, layer)
            members.append(name)
        _add(tar, f"{image}.json", raw)
        manifest = [{"Config": f"{image}.json", "RepoTags": list(names), "Layers": members}]
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    return path


def write_layout(folder: Path, layers: Sequence[bytes], *, tag: str = "latest") -> dict[str, Any]:
    """An OCI layout with gzip layers; returns its manifest, with ``digest`` added."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(data: bytes, media_type: str) -> dict[str, Any]:
        (blobs / digest(data).removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": media_type, "digest": digest(data), "size": len(data)}

    document = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(config(layers), "application/vnd.oci.image.config.v1+json"),
        "layers": [
            put(gzip.compress(layer, 1, mtime=0), "application/vnd.oci.image.layer.v1.tar+gzip") for layer in layers
        ],
    }
    entry = put(json.dumps(document, indent=1).encode(), "application/vnd.oci.image.manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    return {**document, "digest": entry["digest"]}


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))
