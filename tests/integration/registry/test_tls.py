"""TLS: a certificate of one's own, trusted by name or by bundle, and errors that say what to do."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from faults.blobs import MemoryBlob
from faults.doubles import FakeClock
from faults.model import DISTRIBUTION_3, GITEA_1_26
from faults.pushing import OPTIONS, REPOSITORY, client_for, data_of
from faults.server import FaultServer
from support.published import publish

from buildkit.errors import UnreachableError, UsageError
from buildkit.evidence import Artifact, ArtifactFile, attach, fetch
from buildkit.registry import Anonymous, RegistryClient


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and self-signed certificate for 127.0.0.1 in one PEM file."""
    folder = tmp_path_factory.mktemp("tls")
    key, pem = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(pem)],
        check=True, capture_output=True,
    )  # fmt: skip
    both = folder / "both.pem"
    both.write_bytes(key.read_bytes() + pem.read_bytes())
    return both


def test_trust_comes_from_a_bundle_or_by_name_and_from_nothing_else(certificate: Path, tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3, tls=certificate) as server:
        plain = replace(OPTIONS, plain_http=False)
        with (
            client_for(server, tmp_path, options=plain) as client,
            pytest.raises(UnreachableError, match="--ca-bundle"),
        ):
            client.ping()
        assert not server.requests
        other = replace(plain, insecure_hosts=frozenset({"other.example"}))
        with client_for(server, tmp_path, options=other) as client, pytest.raises(UnreachableError):
            client.ping()
        for number, options in enumerate((
            replace(plain, ca_bundle=str(certificate)),
            replace(plain, insecure_hosts=frozenset({server.registry})),
        )):  # fmt: skip
            with client_for(server, tmp_path, options=options) as client:
                report = client.upload(REPOSITORY, MemoryBlob(data_of(5000, seed=number)))
            assert server.model.blobs[REPOSITORY, str(report.digest)] == data_of(5000, seed=number)
        absent = replace(plain, ca_bundle="/nonexistent")
        with client_for(server, tmp_path, options=absent) as client, pytest.raises(UsageError, match="/nonexistent"):
            client.ping()


def test_what_is_attached_goes_the_same_way(certificate: Path, tmp_path: Path) -> None:
    """oras-py puts the artifact together; trust, credentials and time-outs are the connection's."""
    with FaultServer(GITEA_1_26, tls=certificate) as server:
        plain = replace(OPTIONS, plain_http=False)
        artifact = Artifact(kind="application/x", files=(ArtifactFile("a.txt", "text/plain", b"a"),))
        for options in (
            replace(plain, ca_bundle=str(certificate)),
            replace(plain, insecure_hosts=frozenset({server.registry})),
        ):
            with client_for(server, tmp_path, options=options) as client:
                image = publish(client, REPOSITORY, salt=str(options.ca_bundle))
                attach(client, image, artifact)
                found = fetch(client, image, "application/x")
                assert found is not None
                assert found.files[0].data == b"a"
        with (
            client_for(server, tmp_path, options=plain) as client,
            pytest.raises(UnreachableError, match="--ca-bundle"),
        ):
            attach(client, image, artifact)
        assert not server.model.problems


def test_an_early_refusal_is_read_through_tls(certificate: Path, tmp_path: Path) -> None:
    """Behind TLS a waiting answer cannot be seen before the sending fails; it has to be found all the same."""
    options = replace(OPTIONS, plain_http=False, ca_bundle=str(certificate), chunk_size=20_000_000, limit=None)
    with FaultServer(DISTRIBUTION_3, tls=certificate, limit=15_000_000) as server:
        with client_for(server, tmp_path, options=options) as client:
            report = client.upload(REPOSITORY, MemoryBlob(data_of(20_000_000)))
        assert report.limit_learned == 10_000_000


def test_plain_http_where_tls_is_expected_is_said(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server:
        options = replace(OPTIONS, plain_http=False, retries=1)
        with (
            client_for(server, tmp_path, options=options) as client,
            pytest.raises(UnreachableError, match="TLS failed"),
        ):
            client.ping()


def test_nothing_listens_or_no_such_name(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for where, words in ((f"127.0.0.1:{unused.getsockname()[1]}", "refused"), ("nowhere.invalid", "nowhere")):
            client = RegistryClient(where, credentials=Anonymous(), state=tmp_path, clock=FakeClock())
            with client, pytest.raises(UnreachableError, match=words):
                client.ping()
