"""Whatever a server sends: no traceback, no unbounded memory, no endless loop."""

from __future__ import annotations

import contextlib
import gzip
import socket
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from faults.blobs import MemoryBlob
from faults.doubles import FakeClock
from faults.model import DISTRIBUTION_3, Profile
from faults.pushing import OPTIONS, REPOSITORY, client_for, data_of
from faults.server import Fault, FaultServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buildkit.errors import BuildkitError, DigestMismatchError
from buildkit.model import OCI_LAYER_GZIP, OCI_MANIFEST, Descriptor, Digest, Manifest, Reference
from buildkit.registry import Anonymous, RegistryClient

KINDS = ("ping", "head", "start", "patch", "status", "close", "read", "manifest-put", "manifest-head", "manifest-get")


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(DISTRIBUTION_3) as running:
        yield running


def everything(server: FaultServer, state: Path) -> None:
    """Every operation once; each ends well or with an error of ours."""
    options = replace(OPTIONS, retries=1, answer_timeout=0.5, closing_timeout=0.5)
    blob = MemoryBlob(data_of(2500))
    reference = Reference(registry=server.registry, repository=REPOSITORY, tag="t")
    with client_for(server, state, options=options) as client:
        for operation in (
            lambda: client.ping(),
            lambda: client.upload(REPOSITORY, blob),
            lambda: client.head_blob(REPOSITORY, blob.descriptor.digest),
            lambda: list(client.read_blob(REPOSITORY, blob.descriptor)),
            lambda: client.put_manifest(reference, b'{"config":{"digest":"x"},"layers":[]}', "x/y"),
            lambda: client.head_manifest(reference),
            lambda: client.get_manifest(reference),
        ):
            said = ""
            try:
                operation()
            except BuildkitError as error:
                said = str(error)
            assert "\n" not in said
            assert len(said) < 1200


_names = st.sampled_from(
    [
        "Location", "Range", "Retry-After", "WWW-Authenticate", "Content-Type", "Content-Encoding",
        "Docker-Content-Digest",
        "OCI-Chunk-Min-Length", "OCI-Chunk-Max-Length", "Content-Length", "Server", "CF-RAY", "Docker-Upload-UUID",
        "Content-Range", "Transfer-Encoding", "Connection", "X",
    ]
)  # fmt: skip
_values = st.one_of(
    st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=80),
    st.integers(-(10**25), 10**25).map(str),
    st.sampled_from(
        [
            "gzip", "deflate", "chunked", "close", "0-0", "0--1", "bytes 0-5/6", "/v2/x/blobs/uploads/zz", "https://",
            "//",
            "Bearer realm=", 'Bearer realm="http://127.0.0.1:1/token"', "Basic", "sha256:" + "0" * 64, "http://[",
            "*" * 60_000,
        ]
    ),
)  # fmt: skip
_bodies = st.one_of(
    st.binary(max_size=300),
    st.sampled_from(
        [b"[" * 50_000, b'{"errors":[{"code":7}]}', b'{"errors":{}}', b'{"token":1}', gzip.compress(b"\0" * 10**6)]
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KINDS),
    status=st.one_of(st.integers(200, 599), st.sampled_from([200, 201, 202, 204, 206, 301, 307, 401, 413, 416])),
    headers=st.dictionaries(_names, _values, max_size=5),
    body=_bodies,
    when=st.sampled_from(["before", "after"]),
)
def test_any_answer_is_survived(
    server: FaultServer, kind: str, status: int, headers: dict[str, str], body: bytes, when: str
) -> None:
    fault = Fault(
        name="fuzz", status=status, headers=headers, body=body, when="before" if when == "before" else "after"
    )
    server.reset({(kind, 0): fault, (kind, 1): fault})
    with tempfile.TemporaryDirectory() as state:
        everything(server, Path(state))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(kind=st.sampled_from(KINDS), raw=st.one_of(
    st.binary(max_size=400),
    st.binary(max_size=200).map(lambda tail: b"HTTP/1.1 200 OK\r\n" + tail),
    st.binary(max_size=200).map(lambda tail: b"HTTP/1.1 202 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + tail),
))  # fmt: skip
def test_any_bytes_instead_of_http_are_survived(server: FaultServer, kind: str, raw: bytes) -> None:
    server.reset({(kind, 0): Fault(name="raw", raw=raw)})
    with tempfile.TemporaryDirectory() as state:
        everything(server, Path(state))


@pytest.mark.parametrize("kind", ["head", "start", "patch", "close", "manifest-get", "ping"])
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 X\r\nContent-Length: 500000000\r\n\r\n",
        b"HTTP/1.1 400 X\r\nContent-Encoding: gzip\r\nContent-Length: 500000000\r\n\r\n",
        b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\n\r\n",
        b"HTTP/1.1 200 X\r\nA: ",
    ],
)
def test_an_endless_answer_costs_bounded_memory(kind: str, answer: bytes, tmp_path: Path) -> None:
    with _endless(DISTRIBUTION_3, kind, answer) as registry:
        tracemalloc.start()
        try:
            with RegistryClient(
                registry,
                credentials=Anonymous(),
                options=replace(OPTIONS, retries=0),
                clock=FakeClock(),
                state=tmp_path,
            ) as client:
                with contextlib.suppress(BuildkitError):
                    client.ping(retries=0)
                with contextlib.suppress(BuildkitError):
                    client.upload(REPOSITORY, MemoryBlob(data_of(2500)))
                reference = Reference(registry=registry, repository=REPOSITORY, tag="t")
                with contextlib.suppress(BuildkitError):
                    client.get_manifest(reference)
            assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
        finally:
            tracemalloc.stop()


@contextlib.contextmanager
def _endless(profile: Profile, kind: str, start: bytes) -> Iterator[str]:
    """A server that answers every request with ``start`` and then without end, until the client has had enough."""
    del profile, kind
    listener = socket.create_server(("127.0.0.1", 0))
    filler = gzip.compress(b"\0" * 10**7) if b"gzip" in start else b"a" * 65536

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            connection.recv(65536)
            connection.sendall(start)
            while True:
                connection.sendall(filler)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def test_a_blob_is_read_on_after_drops_and_proven(server: FaultServer, tmp_path: Path) -> None:
    blob = MemoryBlob(data_of(300_000))
    server.reset()
    with client_for(server, tmp_path, options=replace(OPTIONS, chunk_size=10**6)) as client:
        client.upload(REPOSITORY, blob)
        data = blob.data
        cut = b"HTTP/1.1 200 X\r\nContent-Length: 300000\r\n\r\n" + data[:1000]
        server.script = {("read", 0): Fault(name="cut", raw=cut), ("read", 2): Fault(name="503", status=503)}
        assert b"".join(client.read_blob(REPOSITORY, blob.descriptor)) == data
        assert b"".join(client.read_blob(REPOSITORY, blob.descriptor, start=299_000)) == data[299_000:]
        server.script = {}
        server.model.blobs[REPOSITORY, str(blob.descriptor.digest)] = data[:-1] + b"!"
        with pytest.raises(DigestMismatchError):
            list(client.read_blob(REPOSITORY, blob.descriptor))
        server.model.blobs[REPOSITORY, str(blob.descriptor.digest)] = data + b"!"
        with pytest.raises(DigestMismatchError, match="more than"):
            list(client.read_blob(REPOSITORY, blob.descriptor))
        absent = Descriptor(media_type=OCI_LAYER_GZIP, digest=Digest.parse("sha256:" + "0" * 64), size=3)
        with pytest.raises(BuildkitError, match="404"):
            list(client.read_blob(REPOSITORY, absent))


def test_a_redirected_blob_is_read_without_the_credential(server: FaultServer, tmp_path: Path) -> None:
    blob = MemoryBlob(data_of(5000))
    with FaultServer(DISTRIBUTION_3) as store:
        store.model.blobs[REPOSITORY, str(blob.descriptor.digest)] = blob.data
        port = store.registry.rpartition(":")[2]
        where = f"http://localhost:{port}/v2/{REPOSITORY}/blobs/{blob.descriptor.digest}?signature=x"
        with FaultServer(replace(DISTRIBUTION_3, auth="basic")) as registry:
            registry.reset({("read", 1): Fault(name="to the store", status=307, headers={"Location": where})})
            with client_for(registry, tmp_path) as client:
                assert b"".join(client.read_blob(REPOSITORY, blob.descriptor)) == blob.data
        assert set(store.authorizations) == {""}
        assert store.seen["read"] == 1


@pytest.mark.parametrize("kind", ["start", "patch", "close", "head", "manifest-get", "manifest-put"])
def test_an_answer_cut_off_anywhere_in_its_head_is_no_answer(server: FaultServer, kind: str, tmp_path: Path) -> None:
    """Every prefix of a true head, and a whole one without any field, which is an answer."""
    head = b"HTTP/1.1 202 Accepted\r\nLocation: /v2/team/app/blobs/uploads/00\r\nContent-Length: 0\r\n\r\n"
    reference = Reference(registry=server.registry, repository=REPOSITORY, tag="t")
    config = MemoryBlob(b"{}", label="config")
    raw = Manifest.build(config=config.descriptor, layers=[]).raw
    for cut in range(0, len(head), 3):
        server.reset({(kind, 0): Fault(name="cut", raw=head[:cut])})
        with client_for(server, tmp_path / f"{cut}") as client:
            report = client.upload(REPOSITORY, config)
            assert server.model.blobs[REPOSITORY, str(report.digest)] == config.data
            client.put_manifest(reference, raw, OCI_MANIFEST)
            assert client.get_manifest(reference).raw == raw
        assert not server.script
