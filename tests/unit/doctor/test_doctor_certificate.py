"""Certificates as servers show them: read, or refused with one kind of error."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildkit.doctor.certificate import read_certificate
from buildkit.errors import FormatError


@pytest.fixture(scope="module")
def der(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("certificate")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=old name/O=Müller",
         "-addext", "subjectAltName=DNS:a.example,DNS:*.b.example,IP:192.0.2.7,IP:2001:db8::1,email:x@y.example",
         "-keyout", str(folder / "key"), "-out", str(folder / "cert")],
        check=True, capture_output=True,
    )  # fmt: skip
    return ssl.PEM_cert_to_DER_cert((folder / "cert").read_text())


def test_times_and_names(der: bytes) -> None:
    facts = read_certificate(der)
    assert facts.names == ("a.example", "*.b.example", "192.0.2.7", "2001:db8::1")
    assert facts.not_after - facts.not_before == 30 * 86400
    assert abs(facts.not_before - datetime.now(UTC).timestamp()) < 3600


def test_authorities_of_this_host_are_read() -> None:
    """Versions, algorithms and dates of three decades, against Python's own reading."""
    context = ssl.create_default_context()
    known = {bytes(der): known for der, known in zip(context.get_ca_certs(True), context.get_ca_certs(), strict=True)}
    assert known, "this host has no CA certificates"
    for der, decoded in known.items():
        facts = read_certificate(der)
        assert facts.not_after == ssl.cert_time_to_seconds(str(decoded["notAfter"]))
        assert facts.not_before == ssl.cert_time_to_seconds(str(decoded["notBefore"]))


def test_every_truncation_is_one_error(der: bytes) -> None:
    for length in range(len(der)):
        with pytest.raises(FormatError):
            read_certificate(der[:length])


@settings(deadline=None)
@given(data=st.data())
def test_no_damage_is_more_than_an_error(data: st.DataObject, der: bytes) -> None:
    changed = bytearray(der)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(der) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        read_certificate(bytes(changed))
