"""Servers that want what is not theirs: secrets in error pages, logins on other hosts, patience without end."""

from __future__ import annotations

import base64
import html
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from faults.blobs import MemoryBlob
from faults.doubles import FakeClock, Recorder
from faults.model import DISTRIBUTION_3
from faults.pushing import REPOSITORY, client_for, data_of
from faults.server import FaultServer

from buildkit.errors import (
    AuthError,
    BuildkitError,
    CancelledError,
    ProtocolError,
    RegistryError,
    UnreachableError,
    UsageError,
)
from buildkit.model import Descriptor, Digest, Reference
from buildkit.registry import CancelToken, FixedCredentials, RegistryClient
from buildkit.registry.contact import GREETING_TIMEOUT, Contacts
from buildkit.registry.credentials import Credential, clean_secret, read_secret
from buildkit.registry.journal import STALE, Journal, ResumePoint
from buildkit.registry.location import Origin
from buildkit.registry.login import login, logout
from buildkit.registry.options import RegistryOptions
from buildkit.registry.secrets import forms, masked, sent_secrets
from buildkit.registry.steps import Failure

SECRET = "correct-horse-battery"


@contextmanager
def serve(status: int, headers: dict[str, str], *, echo: bool = False) -> Iterator[tuple[str, list[str]]]:
    """A server that answers everything alike; what it was sent as Authorization is in the list."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
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
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
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
    text = f"{basic} Ym9iOmNvcnJlY3QtaG9yc2U= bob:correct-horse correct-horse identity-1 rest"
    shown = masked(text, forms(secrets))
    assert "correct-horse" not in shown
    assert "Ym9iOm" not in shown
    assert "identity-1" not in shown
    assert shown.endswith("rest")


def test_a_registry_error_is_still_a_registry_error(tmp_path: Path) -> None:
    with (
        serve(403, {}, echo=True) as (registry, _),
        _client(registry, tmp_path) as client,
        pytest.raises(RegistryError, match="DENIED"),
    ):
        client.ping()


# Texts ---------------------------------------------------------------------------------------------------------------

AWKWARD = 'pä"ss+w/ö&rd<1>='
BASIC = base64.b64encode(f"bob:{AWKWARD}".encode()).decode()


@contextmanager
def play(answer: Callable[[str, str, str | None], tuple[int, dict[str, str], bytes]]) -> Iterator[str]:
    """A server that answers ``(method, path, Authorization)`` as told; gives ``host:port``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            status, headers, body = answer(self.command, self.path, self.headers.get("Authorization"))
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("status", [302, 400, 403, 404, 429, 500])
@pytest.mark.parametrize("where", ["body", "server", "location", "realm"])
@pytest.mark.parametrize(
    "written",
    [
        lambda s: s,
        lambda s: json.dumps({"errors": [{"code": s, "message": "m", "detail": s}]}),
        lambda s: json.dumps({"errors": [{"message": s}]}).replace("/", "\\/").replace("+", "\\u002b"),
        lambda s: f"<html><title>{html.escape(s)}</title></html>",
        lambda s: f"{'x' * 120} {s}",
        lambda s: "".join(f"%{byte:02X}" for byte in s.encode()) if len(s) < 20 else s,
    ],
)
def test_no_form_of_a_secret_comes_into_a_text(
    written: Callable[[str], str], where: str, status: int, tmp_path: Path
) -> None:
    def answer(method: str, path: str, given: str | None) -> tuple[int, dict[str, str], bytes]:
        del method, path
        if given is None:
            return 401, {"WWW-Authenticate": "Basic"}, b""
        said = f"{written(AWKWARD)} {written(BASIC)}"
        line = "".join(c for c in said if 32 <= ord(c) < 127)
        headers = {"Server": line} if where == "server" else {"Location": f"/{line}"} if where == "location" else {}
        if where == "realm":
            return 401, {"WWW-Authenticate": f'Bearer realm="{line.replace(chr(34), "")}"'}, b""
        body = written(AWKWARD) + ("" if "{" in written(AWKWARD) else written(BASIC))
        return status, headers, body.encode() if where == "body" else b""

    recorder = Recorder()
    options = RegistryOptions(retries=1)
    with play(answer) as registry:
        credential = Credential(source="test", username="bob", password=AWKWARD)
        with RegistryClient(
            registry,
            credentials=FixedCredentials(registry, credential),
            state=tmp_path,
            clock=FakeClock(),
            observer=recorder,
            options=options,
        ) as client:
            texts = []
            for attempt in (
                lambda: client.ping(),
                lambda: client.upload("a/b", MemoryBlob(b"x")),
                lambda: client.head_blob("a/b", Digest.of(b"x")),
            ):
                try:
                    texts.append(str(attempt()))
                except BuildkitError as error:
                    texts.append(f"{error} {error!r} {error.message} {error.hint}")
    shown = " ".join([*texts, *map(repr, recorder.events)])
    for secret in (AWKWARD, BASIC, BASIC[:40].rstrip("="), html.escape(AWKWARD), AWKWARD.replace('"', '\\"')):
        assert secret not in shown


def test_a_long_token_is_masked_before_it_is_cut(tmp_path: Path) -> None:
    token = base64.urlsafe_b64encode(b"x" * 1500).decode()

    def answer(method: str, path: str, given: str | None) -> tuple[int, dict[str, str], bytes]:
        del method, path
        if given is None:
            return 401, {"WWW-Authenticate": 'Bearer realm="x"'}, b""
        return 403, {}, f"no {given}".encode()

    with play(answer) as registry:
        credential = Credential(source="test", registry_token=token)
        with (
            RegistryClient(registry, credentials=FixedCredentials(registry, credential), state=tmp_path) as client,
            pytest.raises(BuildkitError) as raised,
        ):
            client.ping()
    assert token[:20] not in str(raised.value)


def test_a_token_in_an_odd_answer_is_not_shown(tmp_path: Path) -> None:
    def answer(method: str, path: str, given: str | None) -> tuple[int, dict[str, str], bytes]:
        del method, given
        if path.startswith("/token"):
            return 203, {}, b'{"token": "fresh-and-secret"}'
        return 401, {"WWW-Authenticate": f'Bearer realm="http://{registry}/token"'}, b""

    with play(answer) as registry, _client(registry, tmp_path) as client, pytest.raises(BuildkitError) as raised:
        client.ping()
    assert "fresh-and-secret" not in str(raised.value)


# Logins elsewhere ----------------------------------------------------------------------------------------------------


def test_another_loopback_address_is_another_host(tmp_path: Path) -> None:
    got: list[str | None] = []

    def token(method: str, path: str, given: str | None) -> tuple[int, dict[str, str], bytes]:
        del method, path
        got.append(given)
        return 200, {}, b'{"token": "abc"}'

    def registry_answer(method: str, path: str, given: str | None) -> tuple[int, dict[str, str], bytes]:
        del method, path
        if given is not None:
            return 200, {}, b"{}"
        return 401, {"WWW-Authenticate": f'Bearer realm="http://{host}:{port}/t",service="s"'}, b""

    with play(token) as service, play(registry_answer) as registry:
        port = service.rpartition(":")[2]
        host = "127.0.0.2"
        with _client(registry, tmp_path) as client, pytest.raises(ProtocolError, match="without TLS"):
            client.ping()
        assert got == []
        host = "localhost"
        with _client(registry, tmp_path) as client:
            assert client.ping().authenticated
        assert len(got) == 1


@pytest.mark.parametrize("realm", ["/token", "ftp://127.0.0.1/t", "http://", "urn:x", "http://[::1/t", ""])
def test_every_unusable_realm_is_named_with_its_registry(realm: str, tmp_path: Path) -> None:
    with (
        serve(401, {"WWW-Authenticate": f'Bearer realm="{realm}"'}) as (registry, _),
        _client(registry, tmp_path) as client,
        pytest.raises(ProtocolError) as raised,
    ):
        client.ping()
    assert registry in raised.value.message
    assert realm in raised.value.message


def test_a_login_says_whether_it_was_tried(tmp_path: Path) -> None:
    environ = {"DOCKER_CONFIG": str(tmp_path)}

    def strict(method: str, path: str, given: str | None) -> tuple[int, dict[str, str], bytes]:
        del method, path
        return (401, {"WWW-Authenticate": "Basic"}, b"") if given is None else (200, {}, b"{}")

    with play(lambda *_: (200, {}, b"{}")) as registry:
        assert not login(registry, username="a", password="bcde", environ=environ).verified
    with play(strict) as registry:
        assert login(registry, username="a", password="bcde", environ=environ).verified
        assert not login(registry, username="a", password="bcde", environ=environ, verify=False).verified


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_no_text(errors: str) -> None:
    with io.TextIOWrapper(io.BytesIO(b"tok\xff\xfe"), encoding="utf-8", errors=errors) as stream:
        with pytest.raises(UsageError, match="not UTF-8") as raised:
            read_secret(stream)
        assert raised.value.__cause__ is None


# First contact -------------------------------------------------------------------------------------------------------


@contextmanager
def raw(answer: bytes | None) -> Iterator[tuple[str, list[int]]]:
    """A listener that sends ``answer`` to whoever connects and closes, or (None) never says a word."""
    connections: list[int] = []
    open_ones: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(1)
            open_ones.append(connection)
            if answer is not None:
                connection.recv(4096)
                connection.sendall(answer)
                connection.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", connections
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in open_ones:
            connection.close()


def _first_contacts(client: RegistryClient) -> tuple[Callable[[], object], ...]:
    reference = Reference.parse(f"{client.registry}/a/b:c")
    blob = Descriptor(media_type="application/octet-stream", digest=Digest.of(b"x"), size=1)
    return (
        lambda: client.ping(),
        lambda: client.upload("a/b", MemoryBlob(b"x")),
        lambda: client.get_manifest(reference),
        lambda: client.put_manifest(reference, b"{}", "application/vnd.oci.image.manifest.v1+json"),
        lambda: list(client.read_blob("a/b", blob)),
    )


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", b"", b"HTTP/1.1 20"])
def test_an_address_that_is_no_registry_is_told_in_seconds(answer: bytes, number: int, tmp_path: Path) -> None:
    clock = FakeClock()
    with raw(answer) as (registry, connections):
        with (
            RegistryClient(registry, state=tmp_path, clock=clock) as client,
            pytest.raises(UnreachableError),
        ):
            _first_contacts(client)[number]()
        assert 1 <= len(connections) <= 3
    assert sum(clock.slept) < 5


@pytest.mark.parametrize("registry", ["127.0.0.1:9", "no-such-host.invalid", "no-such-host.invalid:5000"])
@pytest.mark.parametrize("number", range(5))
def test_an_address_where_nobody_is_is_told_in_seconds(registry: str, number: int, tmp_path: Path) -> None:
    clock = FakeClock()
    with RegistryClient(registry, state=tmp_path, clock=clock) as client, pytest.raises(UnreachableError):
        _first_contacts(client)[number]()
    assert sum(clock.slept) < 5
    assert len([s for s in clock.slept if s]) <= 2


@pytest.mark.parametrize("number", range(5))
def test_a_server_that_never_answers_gets_two_chances(number: int, tmp_path: Path) -> None:
    clock = FakeClock()
    options = RegistryOptions(answer_timeout=0.2)
    with raw(None) as (registry, connections):
        with (
            RegistryClient(registry, state=tmp_path, clock=clock, options=options) as client,
            pytest.raises(UnreachableError),
        ):
            _first_contacts(client)[number]()
        assert len(connections) == 2


def test_who_has_answered_once_gets_all_the_patience() -> None:
    contacts, origin = Contacts(), Origin.of("https://a.example")
    refused = Failure(kind="connect", detail="refused")
    untrusted = Failure(kind="tls", detail="not trusted", final=True)
    assert [contacts.judged(origin, refused).final for _ in range(3)] == [False, False, True]
    assert contacts.judged(origin, untrusted).final
    contacts.answered(origin)
    assert not any(contacts.judged(origin, failure).final for failure in [refused, untrusted] * 9)
    assert contacts.judged(Origin.of("https://b.example"), untrusted).final


def test_a_first_answer_has_a_shorter_time_out_than_later_ones() -> None:
    assert GREETING_TIMEOUT * 2 <= 60 < RegistryOptions().answer_timeout


@pytest.mark.parametrize("text", ["nan", "inf", "-5", "1e9", "", "soon", "²", "9" * 400, "Fri, 99 Foo 99999 x", "0x10"])
def test_a_senseless_retry_after_never_means_an_endless_wait(text: str, tmp_path: Path) -> None:
    clock = FakeClock()
    headers = {"Retry-After": text.encode("utf-8").decode("latin-1")} if text else {}
    with (
        serve(503, headers) as (registry, _),
        RegistryClient(registry, state=tmp_path, clock=clock) as client,
        pytest.raises(UnreachableError),
    ):
        client.ping()
    assert sum(clock.slept) < 10


# Words ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
def test_an_answer_that_asks_for_a_long_pause_reads_the_same_everywhere(status: int, tmp_path: Path) -> None:
    hints = set()
    with (
        serve(status, {"Retry-After": "4000"}) as (registry, _),
        RegistryClient(registry, state=tmp_path, clock=FakeClock()) as client,
    ):
        for attempt in _first_contacts(client):
            with pytest.raises(UnreachableError) as raised:
                attempt()
            hints.add(raised.value.hint)
    assert hints == {"it asks to come back in 4000 s, longer than this waits; run the same command then"}


def test_a_refusal_names_the_right_that_is_missing(tmp_path: Path) -> None:
    for status in (401, 403):
        with serve(status, {}) as (registry, _), RegistryClient(registry, state=tmp_path) as client:
            attempts = _first_contacts(client)
            for number, right in ((1, "push"), (2, "pull"), (3, "push"), (4, "pull")):
                with pytest.raises(AuthError) as raised:
                    attempts[number]()
                assert right in str(raised.value.hint)
                assert ({"push", "pull"} - {right}).pop() not in str(raised.value.hint)


def test_a_redirect_names_its_target_without_the_query(tmp_path: Path) -> None:
    target = "https://elsewhere.example/v2/a?X-Signature=hidden"
    with serve(307, {"Location": target}) as (registry, _), RegistryClient(registry, state=tmp_path) as client:
        for attempt in _first_contacts(client)[:4]:
            with pytest.raises(BuildkitError) as raised:
                attempt()
            assert "https://elsewhere.example/v2/a" in raised.value.message
            assert "hidden" not in str(raised.value)


# Journal -------------------------------------------------------------------------------------------------------------


def test_finished_uploads_leave_one_file(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        for seed in range(3):
            client.upload(REPOSITORY, MemoryBlob(data_of(2500, seed=seed)))
    assert [path.name for path in (tmp_path / "uploads").iterdir()] == ["gate.lock"]


def test_an_upload_has_one_owner_while_locks_come_and_go(tmp_path: Path) -> None:
    """Many threads take, hold and drop one entry, whose lock file vanishes at each end."""
    owners, most, rounds = 0, 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal owners, most, rounds
        journal = Journal(tmp_path)
        for _ in range(60):
            entry = journal.entry(registry="r", repository="a", key="k")
            if not entry.try_lock():
                continue
            with guard:
                owners += 1
                most, rounds = max(most, owners), rounds + 1
            threading.Event().wait(0)
            with guard:
                owners -= 1
            entry.unlock()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert rounds > 6


def test_even_the_oldest_entry_is_resumed_before_it_is_removed(tmp_path: Path) -> None:
    clock, blobs = FakeClock(), [MemoryBlob(data_of(2500, seed=seed)) for seed in range(2)]
    with FaultServer(DISTRIBUTION_3) as server:
        for blob in blobs:
            cancel = CancelToken()
            server.seen.clear()
            server.before = lambda kind, nth, stop=cancel: stop.cancel() if (kind, nth) == ("patch", 1) else None
            with (
                client_for(server, tmp_path, clock=clock, cancel=cancel) as client,
                pytest.raises(CancelledError),
            ):
                client.upload(REPOSITORY, blob)
        server.before = None
        clock.advance(STALE * 2)
        with client_for(server, tmp_path, clock=clock) as client:
            assert (client.upload(REPOSITORY, blobs[0]).resumed_at or 0) > 0
    assert [path.name for path in (tmp_path / "uploads").iterdir()] == ["gate.lock"]


def test_entries_nobody_came_back_for_are_removed(tmp_path: Path) -> None:
    journal, now = Journal(tmp_path), 1_800_000_000.0
    point = ResumePoint(location="http://r/x", offset=5, chunk=10)
    for key, time in (("old", now - STALE - 1), ("new", now - 1), ("held", now - STALE - 1)):
        entry = journal.entry(registry="r", repository="a", key=key)
        assert entry.try_lock()
        entry.save(point, digest=None, now=time)
        if key != "held":
            entry.unlock()
    journal.prune(now)
    left = {key: journal.entry(registry="r", repository="a", key=key).load() is not None for key in ("old", "new")}
    assert left == {"old": False, "new": True}
    assert journal.entry(registry="r", repository="a", key="held").load() is not None
    assert len(list((tmp_path / "uploads").glob("*.lock"))) == 3  # new, held, and the gate
    entry.unlock()
