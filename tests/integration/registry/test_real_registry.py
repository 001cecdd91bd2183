"""The real docker-registry behind the real nginx, with a body limit and with passwords."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.blobs import FileBlob, GrowingBlob, MemoryBlob
from faults.doubles import FakeClock, Recorder
from faults.pushing import data_of

from buildkit.errors import AuthError, CancelledError, SizeRefusedError
from buildkit.model import OCI_CONFIG, OCI_MANIFEST, Descriptor, Digest, Manifest, Reference
from buildkit.registry import (
    Anonymous,
    BytesAcknowledged,
    CancelToken,
    Credential,
    FixedCredentials,
    LimitFound,
    Missing,
    Present,
    RegistryClient,
    RegistryOptions,
)
from buildkit.stack import Credentials, StackOptions, StackState

StackFactory = Callable[[StackOptions], StackState]

LIMIT = 1_000_000


@pytest.fixture(scope="module")
def small(stack_factory: StackFactory) -> StackState:
    """An edge that refuses bodies above a megabyte, before a registry that asks for a password."""
    return stack_factory(StackOptions(engine="none", edge_limit=LIMIT, auth=Credentials.parse("robot:pass-word")))


def client_of(registry: str, state: Path, *, options: RegistryOptions | None = None, recorder: Recorder | None = None,
              cancel: CancelToken | None = None) -> RegistryClient:  # fmt: skip
    credential = Credential(source="test", username="robot", password="pass-word")
    return RegistryClient(
        registry, credentials=FixedCredentials(registry, credential), options=options or RegistryOptions(),
        state=state, clock=FakeClock(), observer=recorder, cancel=cancel,
    )  # fmt: skip


def test_an_image_goes_through_the_edge_and_is_the_same_behind_it(small: StackState, tmp_path: Path) -> None:
    blobs: list[MemoryBlob | GrowingBlob] = [
        MemoryBlob(data_of(3_500_001, seed=1), label="layer 1/3"),
        GrowingBlob(data_of(2_000_001, seed=2), [300_000] * 7, label="layer 2/3"),
        MemoryBlob(b"", label="layer 3/3"),
        MemoryBlob(b'{"rootfs":{"diff_ids":[]}}', label="config"),
    ]
    descriptors = [blob.descriptor for blob in blobs]
    manifest = Manifest.build(
        config=Descriptor(media_type=OCI_CONFIG, digest=descriptors[3].digest, size=descriptors[3].size),
        layers=descriptors[:3],
    )
    recorder = Recorder()
    with client_of(small.edge, tmp_path, recorder=recorder) as client:
        assert client.ping(repository="real/app").kind == "distribution or compatible"
        client.probe_upload("real/app")
        reports = [client.upload("real/app", blob, key=blob.label) for blob in blobs]
        assert reports[0].limit_learned is not None
        assert reports[0].limit_learned <= LIMIT
        assert not reports[1].restarts  # the second blob knows the limit
        assert {event.who.partition(",")[0].partition("/")[0] for event in recorder.of(LimitFound)} == {"nginx"}
        reference = Reference(registry=small.edge, repository="real/app", tag="sm70")
        assert client.head_manifest(reference) is None
        assert client.put_manifest(reference, manifest.raw, OCI_MANIFEST) == manifest.digest
        assert client.head_manifest(reference) == manifest.digest
    with client_of(small.registry, tmp_path) as behind:
        assert behind.get_manifest(reference).raw == manifest.raw
        for blob in blobs:
            assert b"".join(behind.read_blob("real/app", blob.descriptor)) == blob.data
            assert behind.upload("real/other", blob, mount_from=["real/app"]).outcome == "mounted"
        assert isinstance(behind.head_blob("real/app", Digest.of(b"absent")), Missing)
        assert behind.delete_manifest(reference.with_digest(manifest.digest))
        assert behind.head_manifest(reference) is None


def test_a_single_body_above_the_limit_is_refused_by_name(small: StackState, tmp_path: Path) -> None:
    options = RegistryOptions(learn=False)
    with client_of(small.edge, tmp_path, options=options) as client, pytest.raises(SizeRefusedError) as caught:
        client.upload("real/refused", MemoryBlob(data_of(3_000_000, seed=5), label="layer 7/9"))
    assert "413" in str(caught.value)
    assert "nginx" in str(caught.value)
    assert "layer 7/9" in str(caught.value)
    assert "3.0 MB" in str(caught.value)


def test_a_wrong_or_missing_password_is_final(small: StackState, tmp_path: Path) -> None:
    blob = MemoryBlob(data_of(1000))
    wrong = FixedCredentials(small.edge, Credential(source="test", username="robot", password="wrong-pass"))
    for credentials in (Anonymous(), wrong):
        with (
            RegistryClient(small.edge, credentials=credentials, state=tmp_path, clock=FakeClock()) as client,
            pytest.raises(AuthError) as caught,
        ):
            client.upload("real/app", blob)
        assert "wrong-pass" not in str(caught.value)


def test_a_stopped_push_goes_on_in_the_same_session(small: StackState, tmp_path: Path) -> None:
    options = RegistryOptions(chunk_size=500_000)
    data = data_of(4_200_000, seed=11)
    token = CancelToken()

    class Stopping(Recorder):
        def notify(self, event: object, /) -> None:
            super().notify(event)  # type: ignore[arg-type]
            if len(self.of(BytesAcknowledged)) == 5:
                token.cancel()

    stopped = client_of(small.edge, tmp_path, options=options, recorder=Stopping(), cancel=token)
    with stopped as client, pytest.raises(CancelledError):
        client.upload("real/resumed", MemoryBlob(data))
    with client_of(small.edge, tmp_path, options=options) as client:
        report = client.upload("real/resumed", MemoryBlob(data))
        assert (report.resumed_at, report.bytes_sent) == (2_500_000, 1_700_000)
        assert client.head_blob("real/resumed", report.digest) == Present(4_200_000)


def test_parallel_uploads_share_one_client(small: StackState, tmp_path: Path) -> None:
    blobs = [MemoryBlob(data_of(700_000 + n, seed=20 + n), label=f"layer {n}") for n in range(6)]
    blobs.append(blobs[0])
    outcomes: list[str] = []
    with client_of(small.edge, tmp_path, options=RegistryOptions(chunk_size=250_000)) as client:
        threads = [
            threading.Thread(target=lambda blob=blob: outcomes.append(client.upload("real/parallel", blob).outcome))
            for blob in blobs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(outcomes) == ["exists"] + ["uploaded"] * 6
        for blob in blobs:
            assert client.head_blob("real/parallel", blob.descriptor.digest) == Present(blob.descriptor.size)


def test_memory_does_not_grow_with_the_chunk(registry: StackState, tmp_path: Path) -> None:
    """A 60 MB body passes through a buffer of one block."""
    path = tmp_path / "blob"
    data = data_of(60_000_000, seed=3)
    path.write_bytes(data)
    digest = Digest.of(data)
    del data
    with RegistryClient(registry.edge, credentials=Anonymous(), state=tmp_path, clock=FakeClock()) as client:
        client.ping()
        tracemalloc.start()
        try:
            client.upload("real/large", FileBlob(path, digest))
            assert tracemalloc.get_traced_memory()[1] < 4_000_000
        finally:
            tracemalloc.stop()
        assert client.head_blob("real/large", digest) == Present(60_000_000)
