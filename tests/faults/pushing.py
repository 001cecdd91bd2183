"""A small push as a client does it, and what must hold afterwards, whatever happened on the way."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from random import Random

from buildkit.blob import Blob
from buildkit.errors import BuildkitError, RegistryError
from buildkit.model import OCI_CONFIG, OCI_LAYER_GZIP, OCI_MANIFEST, Descriptor, Digest, Manifest, Reference
from buildkit.registry import (
    BytesAcknowledged,
    CancelToken,
    Credential,
    FixedCredentials,
    Present,
    RegistryClient,
    RegistryOptions,
    Restarted,
    Resumed,
    UploadReport,
)
from faults.blobs import GrowingBlob, MemoryBlob
from faults.doubles import FakeClock, Recorder
from faults.model import SECRET, USER
from faults.server import FaultServer

REPOSITORY = "team/app"
CHUNK = 1000


OPTIONS = RegistryOptions(
    chunk_size=CHUNK, smallest_chunk=100, connect_timeout=5, silence_timeout=5, answer_timeout=5, closing_timeout=5
)


def data_of(size: int, seed: int = 1) -> bytes:
    return Random(seed).randbytes(size)


@dataclass(slots=True, kw_only=True)
class Pushed:
    """How one push ended."""

    error: BuildkitError | None
    reports: list[UploadReport]
    recorder: Recorder
    clock: FakeClock
    manifest: Manifest


def client_for(
    server: FaultServer, state: str | os.PathLike[str], *, recorder: Recorder | None = None,
    clock: FakeClock | None = None, options: RegistryOptions | None = None, seed: int = 0,
    cancel: CancelToken | None = None,
) -> RegistryClient:  # fmt: skip
    credential = Credential(source="test", username=USER, password=SECRET)
    return RegistryClient(
        server.registry,
        credentials=FixedCredentials(server.registry, credential),
        options=options or OPTIONS,
        clock=clock or FakeClock(),
        observer=recorder or Recorder(),
        state=state,
        rng=Random(seed),
        cancel=cancel,
    )


def layers_for(sizes: list[int], *, growing: bool) -> list[MemoryBlob | GrowingBlob]:
    blobs: list[MemoryBlob | GrowingBlob] = []
    for number, size in enumerate(sizes):
        data, label = data_of(size, seed=number + 1), f"layer {number + 1}/{len(sizes)}"
        if growing:
            blobs.append(GrowingBlob(data, [700] * (size // 700 + 1), label=label))
        else:
            blobs.append(MemoryBlob(data, label=label))
    return blobs


def push(
    server: FaultServer, state: str | os.PathLike[str], *, sizes: list[int], growing: bool = False,
    options: RegistryOptions | None = None, seed: int = 0, tag: str = "sm70",
) -> Pushed:  # fmt: skip
    """Layers, config, a HEAD of each, the manifest, and the manifest again by digest."""
    recorder, clock = Recorder(), FakeClock()
    layers = layers_for(sizes, growing=growing)
    config = MemoryBlob(json.dumps({"seed": 7, "sizes": sizes}).encode(), label="config")
    blobs: list[Blob] = [*layers, config]
    descriptors = [blob.descriptor for blob in layers]
    manifest = Manifest.build(
        config=Descriptor(media_type=OCI_CONFIG, digest=config.descriptor.digest, size=len(config.data)),
        layers=[Descriptor(media_type=OCI_LAYER_GZIP, digest=d.digest, size=d.size) for d in descriptors],
    )
    reports: list[UploadReport] = []
    error: BuildkitError | None = None
    reference = Reference(registry=server.registry, repository=REPOSITORY, tag=tag)
    try:
        with client_for(server, state, recorder=recorder, clock=clock, options=options, seed=seed) as client:
            for number, blob in enumerate(blobs):
                reports.append(client.upload(REPOSITORY, blob, key=f"key-{number}" if growing else None))
            for descriptor in [*descriptors, config.descriptor]:
                found = client.head_blob(REPOSITORY, descriptor.digest)
                if not (isinstance(found, Present) and found.size in (None, descriptor.size)):
                    raise RegistryError(f"blob {descriptor.digest} is {found} before the manifest")
            client.put_manifest(reference, manifest.raw, OCI_MANIFEST)
            fetched = client.get_manifest(reference.with_digest(manifest.digest))
            assert fetched.raw == manifest.raw
    except BuildkitError as caught:
        error = caught
    return Pushed(error=error, reports=reports, recorder=recorder, clock=clock, manifest=manifest)


def request_bound(sizes: list[int], options: RegistryOptions) -> int:
    """No push may take more requests: each blob may fail as often as its budget, refilled once per new chunk, allows,
    and each failure may cost a status, a cancel, a start and all chunks again."""
    smallest = 250  # what a halved chunk may shrink to in these tests
    total = 0
    for size in [*sizes, 100]:
        chunks = size // smallest + 2
        failures = (options.retries + 1) * (chunks + 1)
        total += failures * (chunks + 8)
    return total + 20 * (options.retries + 2)


def check(server: FaultServer, pushed: Pushed, *, tag: str = "sm70") -> None:
    """The sentence to prove: exactly the right bytes and tag on the server, or an error; never anything else."""
    model = server.model
    assert not model.problems, model.problems
    assert not model.check_integrity()
    held = model.manifests.get((REPOSITORY, tag))
    if pushed.error is None:
        assert held is not None
        assert held[0] == pushed.manifest.raw
        for descriptor in [pushed.manifest.config, *pushed.manifest.layers]:
            assert len(model.blobs[REPOSITORY, str(descriptor.digest)]) == descriptor.size
    elif held is not None:
        assert held[0] == pushed.manifest.raw
    said = " ".join([str(pushed.error), repr(pushed.error), *(repr(e) for e in pushed.recorder.events)])
    said += json.dumps([report.to_json() for report in pushed.reports])
    assert SECRET not in said
    assert "tok-" not in said
    assert "Traceback" not in said
    _check_progress(pushed)


def _check_progress(pushed: Pushed) -> None:
    """Acknowledged offsets go back only where the story says why."""
    offsets: dict[str, int] = {}
    for event in pushed.recorder.events:
        if isinstance(event, Restarted):
            offsets[event.blob] = 0
        elif isinstance(event, Resumed):
            offsets[event.blob] = event.offset
        elif isinstance(event, BytesAcknowledged):
            assert event.offset > offsets.get(event.blob, 0) - CHUNK
            offsets[event.blob] = event.offset


__all__ = [
    "CHUNK",
    "OPTIONS",
    "REPOSITORY",
    "Digest",
    "Pushed",
    "check",
    "client_for",
    "data_of",
    "push",
    "request_bound",
]
