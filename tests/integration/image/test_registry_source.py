"""``docker://`` as a source, against a real registry."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import uuid
from pathlib import Path

import pytest

from buildkit.errors import BuildkitError, FormatError, RegistryError, UsageError
from buildkit.image.blobfile import FileBlob
from buildkit.image.compress import Codec, compress_bytes
from buildkit.image.streams import tar_of
from buildkit.image.transports import open_source
from buildkit.model import (
    OCI_CONFIG,
    OCI_INDEX,
    OCI_LAYER_GZIP,
    OCI_LAYER_ZSTD,
    Descriptor,
    Digest,
    Manifest,
    Platform,
    Reference,
)
from buildkit.registry.client import RegistryClient
from buildkit.registry.options import RegistryOptions
from buildkit.stack import StackState


def tar(name: str, size: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        member = tarfile.TarInfo(name)
        member.size = size
        file.addfile(member, io.BytesIO(hashlib.sha256(name.encode()).digest() * (size // 32 + 1)))
    return out.getvalue()


class Shelf:
    """A repository of its own in the registry, filled blob by blob."""

    def __init__(self, registry: str, folder: Path) -> None:
        self.reference = Reference.parse(f"{registry}/shelf-{uuid.uuid4().hex[:8]}:one")
        self.client = RegistryClient(registry)
        self.folder = folder

    def put(self, data: bytes, media_type: str) -> Descriptor:
        path = self.folder / hashlib.sha256(data).hexdigest()
        path.write_bytes(data)
        descriptor = Descriptor(media_type=media_type, digest=Digest.of(data), size=len(data))
        with FileBlob.open(path, descriptor, label="blob") as blob:
            self.client.upload(self.reference.repository, blob)
        return descriptor

    def image(self, architecture: str, layers: list[bytes], *, lie: int = 0) -> Manifest:
        config = json.dumps(
            {
                "os": "linux",
                "architecture": architecture,
                "rootfs": {"type": "layers", "diff_ids": [str(Digest.of(layer)) for layer in layers]},
            }
        ).encode()
        blobs = [
            self.put(compress_bytes(layers[0]), OCI_LAYER_GZIP),
            self.put(compress_bytes(layers[1], Codec.parse("zstd")), OCI_LAYER_ZSTD),
        ]
        return Manifest.build(config=self.put(config, OCI_CONFIG), layers=blobs[: len(blobs) - lie])


@pytest.fixture
def shelf(registry: StackState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Shelf(registry.registry, tmp_path)


def test_an_image_of_a_registry_is_read_as_it_is(shelf: Shelf) -> None:
    layers = [tar("a", 3_000_000), tar("b", 10_000)]
    manifest = shelf.image("amd64", layers)
    shelf.client.put_manifest(shelf.reference, manifest.raw, manifest.media_type)
    for text in (f"docker://{shelf.reference}", f"docker://{shelf.reference.with_digest(manifest.digest)}"):
        with open_source(text) as source:
            assert source.manifest is not None
            assert source.manifest.raw == manifest.raw
            assert (source.method, source.image_id) == ("registry", manifest.config.digest)
            for stream in source.stream(range(2)):
                with tar_of(stream) as unpacked:
                    data = bytearray()
                    while piece := unpacked.read(100_000):
                        data += piece
                    assert bytes(data) == layers[stream.index]
    shelf.client.close()


def test_a_platform_of_an_index_is_chosen(shelf: Shelf) -> None:
    manifests = {}
    for architecture in ("amd64", "arm64"):
        manifest = shelf.image(architecture, [tar(architecture, 1000), tar("b", 10)])
        reference = shelf.reference.with_digest(manifest.digest)
        shelf.client.put_manifest(reference, manifest.raw, manifest.media_type)
        manifests[architecture] = manifest
    entries = [m.descriptor.to_json() | {"platform": {"os": "linux", "architecture": a}} for a, m in manifests.items()]
    raw = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}).encode()
    shelf.client.put_manifest(shelf.reference, raw, OCI_INDEX)
    for architecture, manifest in manifests.items():
        with open_source(f"docker://{shelf.reference}", platform=Platform(architecture=architecture)) as source:
            assert source.image_id == manifest.config.digest
    with pytest.raises(UsageError, match="no image for linux/s390x"):
        open_source(f"docker://{shelf.reference}", platform=Platform(architecture="s390x"))
    shelf.client.close()


def test_what_is_not_there_or_does_not_fit_is_an_error(shelf: Shelf) -> None:
    with pytest.raises(BuildkitError, match="shelf-"):
        open_source(f"docker://{shelf.reference}")
    manifest = shelf.image("amd64", [tar("a", 1000), tar("b", 10)], lie=1)
    shelf.client.put_manifest(shelf.reference, manifest.raw, manifest.media_type)
    with pytest.raises(FormatError, match="1 layers, config has 2"):
        open_source(f"docker://{shelf.reference}")
    impatient = RegistryOptions(retries=0)
    with pytest.raises(RegistryError):
        open_source(
            "docker://127.0.0.1:1/app:x", registry_client_factory=lambda host: RegistryClient(host, options=impatient)
        )
    shelf.client.close()
