"""Names, connections and certificates that are wrong, each with a sentence of its own and in little time."""

from __future__ import annotations

import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from faults.model import DISTRIBUTION_3
from faults.server import FaultServer
from smokeworld.drip import DRIPS, dripping

from buildkit.doctor import Area, DoctorOptions, DoctorReport, diagnose
from buildkit.model import Reference
from buildkit.registry import Anonymous, RegistryOptions

TLS = RegistryOptions(plain_http=False, connect_timeout=5, silence_timeout=5, answer_timeout=5)

_AUTHORITY = """\
[ca]
default_ca = it
[it]
database = {folder}/index.txt
new_certs_dir = {folder}
serial = {folder}/serial
default_md = sha256
policy = any
unique_subject = no
copy_extensions = copy
[any]
commonName = supplied
"""


class Authority:
    """Makes certificates; ``root`` is its own. By openssl's command, as administrators do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "index.txt").touch()
        (folder / "serial").write_text("01")
        (folder / "ca.cnf").write_text(_AUTHORITY.format(folder=folder))
        self.root = folder / "root.pem"
        self._run("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=own CA",
                  "-keyout", "root.key", "-out", "root.pem")  # fmt: skip

    def _run(self, *words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=self.folder)

    def issue(self, name: str, *, names: str = "IP:127.0.0.1", start: str = "", end: str = "20491231235959Z") -> Path:
        """Key and certificate in one PEM file."""
        self._run("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-addext", f"subjectAltName={names}",
                  "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        began = ["-startdate", start] if start else []
        self._run("ca", "-batch", "-config", "ca.cnf", "-cert", "root.pem", "-keyfile", "root.key",
                  "-in", f"{name}.csr", "-out", f"{name}.crt", "-notext", *began, "-enddate", end)  # fmt: skip
        both = self.folder / f"{name}.pem"
        both.write_bytes((self.folder / f"{name}.key").read_bytes() + (self.folder / f"{name}.crt").read_bytes())
        return both


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def examine(registry: str, state: Path, options: RegistryOptions = TLS) -> DoctorReport:
    wanted = DoctorOptions(registry=options, credentials=Anonymous(), machine=False, quick=True)
    where = Reference(registry=registry, repository="team/app", tag="x")
    return diagnose(where, wanted, lambda _: None, state=state)


def problem(report: DoctorReport) -> str:
    """The one thing that is wrong, which must be told once and on the way."""
    assert [line.area for line in report.problems] == [Area.WAY], report.render()
    line = report.problems[0]
    assert line.remedy
    assert line.means
    return f"{line.seen} | {line.means} | {line.remedy}"


def test_a_certificate_that_is_good(authority: Authority, tmp_path: Path) -> None:
    trusted = replace(TLS, ca_bundle=str(authority.root))
    with FaultServer(DISTRIBUTION_3, tls=authority.issue("good")) as server:
        report = examine(server.registry, tmp_path, trusted)
    assert report.ok
    assert "TLSv1.3, certificate trusted, good until 2049-12-31" in report.render()


def test_a_certificate_that_ends_soon(authority: Authority, tmp_path: Path) -> None:
    soon = time.strftime("%Y%m%d%H%M%SZ", time.gmtime(time.time() + 5 * 86400))
    trusted = replace(TLS, ca_bundle=str(authority.root))
    with FaultServer(DISTRIBUTION_3, tls=authority.issue("soon", end=soon)) as server:
        report = examine(server.registry, tmp_path, trusted)
    assert report.ok
    assert "ends within two weeks" in report.render()


def test_an_expired_one_is_told_with_its_day(authority: Authority, tmp_path: Path) -> None:
    pem = authority.issue("old", start="20200101000000Z", end="20200201000000Z")
    with FaultServer(DISTRIBUTION_3, tls=pem) as server:
        said = problem(examine(server.registry, tmp_path, replace(TLS, ca_bundle=str(authority.root))))
        assert not server.requests, "nothing is sent to a server that nobody vouches for"
    assert "has expired on 2020-02-01 00:00 UTC" in said


def test_one_that_is_not_valid_yet_points_at_the_clock(authority: Authority, tmp_path: Path) -> None:
    pem = authority.issue("new", start="20480101000000Z")
    with FaultServer(DISTRIBUTION_3, tls=pem) as server:
        said = problem(examine(server.registry, tmp_path, replace(TLS, ca_bundle=str(authority.root))))
    assert "not valid before 2048-01-01" in said
    assert "clock" in said


def test_one_for_another_host_names_the_hosts_that_it_is_for(authority: Authority, tmp_path: Path) -> None:
    pem = authority.issue("other", names="DNS:git.example.org,DNS:*.git.example.org")
    with FaultServer(DISTRIBUTION_3, tls=pem) as server:
        said = problem(examine(server.registry, tmp_path, replace(TLS, ca_bundle=str(authority.root))))
    assert "not for 127.0.0.1 but for git.example.org, *.git.example.org" in said


def test_a_self_signed_one_and_one_of_an_unknown_authority(authority: Authority, tmp_path: Path) -> None:
    root = authority.folder / "root-both.pem"
    root.write_bytes((authority.folder / "root.key").read_bytes() + authority.root.read_bytes())
    with FaultServer(DISTRIBUTION_3, tls=root) as server:
        said = problem(examine(server.registry, tmp_path))
    assert "is self-signed" in said
    assert "--ca-bundle" in said
    with FaultServer(DISTRIBUTION_3, tls=authority.issue("unknown")) as server:
        said = problem(examine(server.registry, tmp_path))
        trusting = replace(TLS, insecure_hosts=frozenset({server.registry}))
        report = examine(server.registry, tmp_path, trusting)
    assert "from a CA that is not trusted here" in said
    assert "--ca-bundle" in said
    assert report.ok
    assert "is not verified, as --insecure asks" in report.render()


def test_no_tls_where_it_is_expected(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server:
        said = problem(examine(server.registry, tmp_path))
    assert "--plain-http" in said


def test_nothing_listens(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        report = examine(f"127.0.0.1:{unused.getsockname()[1]}", tmp_path, RegistryOptions())
    assert "connection refused" in problem(report)
    assert report.uploads == 0


def test_a_name_that_is_none(tmp_path: Path) -> None:
    assert "cannot be resolved" in problem(examine("nowhere.invalid", tmp_path))


def test_a_proxy_is_named_without_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:pr0xy-secret@{proxy}")
        report = examine("git.example.org", tmp_path)
    assert "pr0xy-secret" not in report.render() + str(report.to_json()) + report.to_markdown()
    assert f"through the proxy http://{proxy}" in report.render()
    assert "the proxy refused" in problem(report)


@pytest.mark.parametrize("kind", DRIPS)
def test_a_server_that_drips_is_left_in_time(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildkit.doctor.run.REQUEST_SECONDS", 0.3)
    monkeypatch.setattr("buildkit.doctor.uploads.REQUEST_SECONDS", 0.3)
    with dripping(kind) as url:
        report = examine(urlsplit(url).netloc, tmp_path, RegistryOptions())
    assert report.uploads == 0
    assert not report.ok
