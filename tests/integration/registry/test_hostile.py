"""Servers that want what is not theirs: secrets in error pages, logins on other hosts, patience without end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from buildkit.errors import BuildkitError, ProtocolError, RegistryError, UnreachableError, UsageError
from buildkit.model import Descriptor, Digest, Reference
from buildkit.registry import FixedCredentials, RegistryClient
from buildkit.registry.credentials import Credential, clean_secret
from buildkit.registry.login import login, logout
from buildkit.registry.secrets import masked, sent_secrets

SECRET = "correct-horse-battery"


@contextmanager
def serve(status: int, headers: dict[str, str], *, echo: bool = False) -> Iterator[tuple[str, list[str]]]:
    """A server that answers everything alike; what it was sent as Authorization is in the list."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            given = self.headers.get("Authorization")
            if given:
                seen.append(given)
            code = 401 if status == 403 and not given else status
            body = f'{{"errors": [{{"code": "DENIED", "message": "no {given} {SECRET}"}}]}}'.encode()
            self.send_response(code)
            for name, value in (({"WWW-Authenticate": "Basic"} if code == 401 else {}) | headers).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body) if echo else 0))
            self.end_headers()
            if echo and self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _client(registry: str, folder: Path) -> RegistryClient:
    credential = Credential(source="test", username="bob", password=SECRET)
    return RegistryClient(registry, credentials=FixedCredentials(registry, credential), state=folder)


def test_a_server_that_repeats_our_secrets_finds_no_printer(tmp_path: Path) -> None:
    with serve(403, {}, echo=True) as (registry, seen), _client(registry, tmp_path) as client:
        reference = Reference.parse(f"{registry}/a/b:c")
        blob = Descriptor(media_type="application/octet-stream", digest=Digest.of(b"x"), size=1)
        for attempt in (
            lambda: client.ping(),
            lambda: client.get_manifest(reference),
            lambda: client.put_manifest(reference, b"{}", "application/vnd.oci.image.manifest.v1+json"),
            lambda: client.probe_upload("a/b"),
            lambda: list(client.read_blob("a/b", blob)),
        ):
            with pytest.raises(BuildkitError) as raised:
                attempt()
            shown = f"{raised.value} {raised.value!r}"
            assert SECRET not in shown
            assert not any(value.partition(" ")[2] in shown for value in seen)
        assert seen, "the credential was asked for and sent"


def test_a_login_does_not_go_to_another_host_without_tls(tmp_path: Path) -> None:
    realm = {"WWW-Authenticate": 'Bearer realm="http://evil.example:1/token",service="x"'}
    with (
        serve(401, realm) as (registry, _),
        _client(registry, tmp_path) as client,
        pytest.raises(ProtocolError, match="without TLS"),
    ):
        client.ping()


def test_a_realm_that_is_no_url_is_named_with_its_registry(tmp_path: Path) -> None:
    realm = {"WWW-Authenticate": 'Bearer realm="file:///etc/passwd"'}
    with serve(401, realm) as (registry, _), _client(registry, tmp_path) as client:
        wanted = pytest.raises(ProtocolError, match=f"{registry} names a token realm")
        with wanted:
            client.ping()


def test_an_address_where_nobody_listens_is_told_after_a_few_attempts(tmp_path: Path) -> None:
    with _client("127.0.0.1:9", tmp_path) as client, pytest.raises(UnreachableError):
        client.ping(retries=0)


@pytest.mark.parametrize("name", ["bad host", f"user:{SECRET}@host", "host/team/app", "", "https://host"])
def test_login_and_logout_take_registries_only(name: str, tmp_path: Path) -> None:
    environ = {"DOCKER_CONFIG": str(tmp_path)}
    with pytest.raises(UsageError) as raised:
        login(name, username="a", password="b", verify=False, environ=environ)
    assert SECRET not in str(raised.value)
    with pytest.raises(UsageError):
        logout(name, environ=environ)
    assert not (tmp_path / "config.json").exists()


def test_a_token_that_is_no_text() -> None:
    with pytest.raises(UsageError, match="UTF-8"):
        clean_secret(b"\xff\xfe".decode("utf-8", "surrogateescape"))


def test_every_form_of_a_secret_is_masked() -> None:
    basic = "Basic Ym9iOmNvcnJlY3QtaG9yc2U="
    secrets = sent_secrets({"authorization": basic}, b"grant_type=refresh_token&refresh_token=identity-1")
    text = f"{basic} Ym9iOmNvcnJlY3QtaG9yc2U= bob:correct-horse correct-horse identity-1 rest".encode()
    shown = masked(text, secrets)
    assert b"correct-horse" not in shown
    assert b"Ym9iOm" not in shown
    assert b"identity-1" not in shown
    assert shown.endswith(b"rest")


def test_a_registry_error_is_still_a_registry_error(tmp_path: Path) -> None:
    with (
        serve(403, {}, echo=True) as (registry, _),
        _client(registry, tmp_path) as client,
        pytest.raises(RegistryError, match="DENIED"),
    ):
        client.ping()
