"""Small images in a registry: what is attached to, and what tags move between."""

from __future__ import annotations

import json
from collections.abc import Mapping

from faults.blobs import MemoryBlob

from buildkit.model import OCI_CONFIG, OCI_LAYER_GZIP, OCI_MANIFEST, Descriptor, Digest, Manifest, Reference
from buildkit.registry import RegistryClient


def config_bytes(labels: Mapping[str, str] | None = None, *, salt: str = "") -> bytes:
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": dict(labels)} if labels is not None else {},
        "rootfs": {"type": "layers", "diff_ids": [str(Digest.of(b"layer"))]},
        "comment": salt,
    }
    return json.dumps(document).encode()


def publish(
    client: RegistryClient, repository: str, labels: Mapping[str, str] | None = None, *, salt: str = ""
) -> Reference:
    """An image of one layer; by digest."""
    blobs = []
    for data, media_type in ((config_bytes(labels, salt=salt), OCI_CONFIG), (b"layer", OCI_LAYER_GZIP)):
        client.upload(repository, MemoryBlob(data, label="blob"))
        blobs.append(Descriptor(media_type=media_type, digest=Digest.of(data), size=len(data)))
    manifest = Manifest.build(config=blobs[0], layers=blobs[1:])
    reference = Reference(registry=client.registry, repository=repository, digest=manifest.digest)
    client.put_manifest(reference, manifest.raw, OCI_MANIFEST)
    return reference
