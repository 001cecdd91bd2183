"""The doctor against every kind of registry, with any fault: it ends, tells, stays within its budget, tidies up."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from faults.doubles import FakeClock
from faults.model import (
    DISTRIBUTION_2_8,
    DISTRIBUTION_3,
    GITEA_1_22,
    IN_MEMORY,
    PROFILES,
    QUAY,
    SECRET,
    SHORT_TOKENS,
    USER,
    WORKERS,
    Call,
    Profile,
    RegistryModel,
    Result,
)
from faults.server import FAULTS, Fault, FaultServer
from hypothesis import given, settings
from hypothesis import strategies as st

from buildkit.doctor import Area, DoctorOptions, DoctorReport, Level, diagnose
from buildkit.model import Reference
from buildkit.registry import Anonymous, Credential, Credentials, FixedCredentials, RegistryClient, RegistryOptions

REPOSITORY = "team/app"
OPTIONS = RegistryOptions(smallest_chunk=1000, connect_timeout=5, silence_timeout=5, answer_timeout=5)


def examine(
    registry: str,
    state: Path,
    *,
    password: str | None = SECRET,
    options: RegistryOptions = OPTIONS,
    quick: bool = False,
    budget: int = 3_000_000,
    say: Callable[[str], None] = lambda _: None,
    environ: dict[str, str] | None = None,
    repository: str = REPOSITORY,
) -> DoctorReport:
    """The registry's part of a diagnosis."""
    who: Credentials = Anonymous()
    if password is not None:
        who = FixedCredentials(registry, Credential(source="a test", username=USER, password=password))
    wanted = DoctorOptions(registry=options, credentials=who, machine=False, quick=quick, budget=budget)
    where = Reference(registry=registry, repository=repository, tag="x")
    return diagnose(where, wanted, say, state=state, clock=FakeClock(), environ=environ or {"PATH": os.environ["PATH"]})


def said(report: DoctorReport, area: Area) -> str:
    return "\n".join(f"{line.level} {line.seen} {line.means}" for line in report.lines if line.area is area)


def tidy(server: FaultServer) -> None:
    assert server.model.open_sessions == 0, "an upload was left behind"
    assert not server.model.blobs, "a blob was made"


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_kind_of_registry_is_understood_and_left_as_it_was(profile: Profile, tmp_path: Path) -> None:
    with FaultServer(profile, limit=300_000) as server:
        report = examine(server.registry, tmp_path)
        tidy(server)
        assert not server.model.problems
        assert report.ok, report.render()
        assert report.limit is not None
        if profile.maximum is None:
            assert report.limit.accepted <= 300_000 < (report.limit.refused or 0)
            assert "HTML page" in report.limit_by or "edge" in report.limit_by
        else:
            assert report.limit.accepted == profile.maximum
        assert sum(length for kind, _, _, length in server.calls if kind == "patch") >= report.sent
        assert report.sent <= 3_000_000
        assert report.uploads == report.cancelled
        chunks = said(report, Area.CHUNKS)
        assert ("Content-Range is ignored" in chunks) == (profile.content_range == "ignored")
        assert ("cannot be asked" in chunks) == (profile.status == "unsupported")
        assert ("one byte too many" in chunks) == (profile.status == "one-high")
        assert ("poisons" in chunks) == (profile.broken == "poisoned")


QUIRKS = {
    DISTRIBUTION_3: "",
    GITEA_1_22: "status-one-high,poisoned-session",
    QUAY: "status-one-high",
    WORKERS: "equal-parts",
    IN_MEMORY: "no-status",
}


@pytest.mark.parametrize("profile", QUIRKS, ids=lambda profile: profile.name)
def test_quirks_are_named_as_pushes_take_them(profile: Profile, tmp_path: Path) -> None:
    with FaultServer(profile) as server:
        report = examine(server.registry, tmp_path, quick=True)
    told = [line.remedy.split()[1] for line in report.lines if line.seen.startswith("quirks:")]
    assert told == ([QUIRKS[profile]] if QUIRKS[profile] else [])


@settings(max_examples=25, deadline=None)
@given(limit=st.integers(1_000, 2_000_000), budget=st.integers(1, 4_000_000))
def test_no_more_is_sent_than_may_be_and_the_limit_lies_where_it_is_said(limit: int, budget: int) -> None:
    with FaultServer(DISTRIBUTION_3, limit=limit) as server:
        arrived = _counting(server)
        report = examine(server.registry, Path(os.devnull), options=replace(OPTIONS, learn=False), budget=budget)
        tidy(server)
        assert sum(arrived) <= report.sent <= budget
        if report.limit is not None:
            assert report.limit.accepted <= limit
            assert report.limit.refused is None or limit < report.limit.refused


def _counting(server: FaultServer) -> list[int]:
    """Bytes of bodies that the registry got to see."""
    arrived: list[int] = []
    handle, broken = server.model.handle, server.model.broken

    def counted(call: Call) -> Result:
        arrived.append(len(call.body))
        return handle(call)

    def counted_broken(call: Call) -> None:
        arrived.append(len(call.body))
        broken(call)

    server.model.handle, server.model.broken = counted, counted_broken  # type: ignore[method-assign]
    return arrived


def test_a_quick_look_sends_little_and_measures_nothing(tmp_path: Path) -> None:
    with FaultServer(GITEA_1_22) as server:
        report = examine(server.registry, tmp_path, quick=True, budget=400_000_000)
        assert report.sent <= report.budget == 1_000_000
        assert report.limit is None
        assert "not-run" in said(report, Area.LIMIT)
        assert max(length for *_, length in server.calls) < 1_000_000
        tidy(server)


# Credentials


@pytest.mark.parametrize("profile", [DISTRIBUTION_2_8, GITEA_1_22, SHORT_TOKENS], ids=lambda profile: profile.name)
def test_a_wrong_password_is_a_problem_and_nothing_is_opened(profile: Profile, tmp_path: Path) -> None:
    with FaultServer(profile) as server:
        report = examine(server.registry, tmp_path, password="wr0ng-but-secret")
        assert not report.ok
        assert "password or token is wrong" in said(report, Area.CREDENTIALS)
        assert "wr0ng-but-secret" not in report.render() + report.to_markdown() + str(report.to_json())
        assert server.seen["start"] == 0
        assert "not-run" in said(report, Area.CHUNKS)


@pytest.mark.parametrize("profile", [DISTRIBUTION_2_8, GITEA_1_22], ids=lambda profile: profile.name)
def test_no_credential_where_one_is_asked_for(profile: Profile, tmp_path: Path) -> None:
    with FaultServer(profile) as server:
        report = examine(server.registry, tmp_path, password=None)
        assert "invoke login" in next(line.remedy for line in report.problems)
        assert server.seen["start"] == 0


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (403, b'{"errors":[{"code":"DENIED","message":"access is denied"}]}', "403: the registry knows"),
        (401, b'{"errors":[{"code":"UNAUTHORIZED","message":"reqPackageAccess"}]}', "write:package"),
        (401, b'{"errors":[{"code":"UNAUTHORIZED"}]}', "401: the registry does not take"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("profile", [DISTRIBUTION_2_8, GITEA_1_22], ids=lambda profile: profile.name)
def test_a_token_that_may_only_read_is_told_from_a_wrong_one(
    profile: Profile, status: int, body: bytes, words: str, tmp_path: Path
) -> None:
    with FaultServer(profile) as server:
        server.always["start"] = Fault(
            name="denied", status=status, headers={"Content-Type": "application/json"}, body=body
        )
        report = examine(server.registry, tmp_path)
    credentials = said(report, Area.CREDENTIALS)
    assert words in credentials
    assert "it may read" in credentials, "the model answers 404 to the list of an empty repository's tags"
    assert ("reqPackageAccess wants a personal token" in credentials) == (profile is GITEA_1_22 or b"reqPack" in body)
    assert len(report.problems) == 1


def test_the_automatic_token_of_a_job_is_recognised(tmp_path: Path) -> None:
    with FaultServer(GITEA_1_22) as server:
        report = examine(server.registry, tmp_path, quick=True, environ={"GITHUB_TOKEN": SECRET})
    assert "automatic token" in said(report, Area.CREDENTIALS)
    assert "REGISTRY_TOKEN" in report.render()


def test_a_login_that_gets_no_clear_answer_is_neither_taken_nor_wrong(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_2_8) as server:
        server.reset({("ping", number): FAULTS["500-before"] for number in (1, 2)})
        report = examine(server.registry, tmp_path)
    credentials = said(report, Area.CREDENTIALS)
    assert "could not be tried" in credentials
    assert "is wrong" not in credentials
    assert "is taken" not in credentials


@pytest.mark.parametrize("kind", ["ping", "start"])
def test_one_accident_is_no_diagnosis(kind: str, tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server:
        server.reset({(kind, 0): FAULTS["502-before"]})
        assert examine(server.registry, tmp_path, quick=True).ok


# Faults

KINDS = ("ping", "token", "start", "patch", "status", "cancel")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("profile", [DISTRIBUTION_2_8, GITEA_1_22], ids=lambda profile: profile.name)
def test_nothing_that_a_server_does_is_too_much(profile: Profile, kind: str, tmp_path: Path) -> None:
    """Each fault at each request, once and for good."""
    with FaultServer(profile, limit=200_000) as server:
        for name, fault in FAULTS.items():
            for always in (False, True):
                server.reset({} if always else {(kind, 0): fault})
                if always:
                    server.always[kind] = fault
                report = examine(server.registry, tmp_path, budget=400_000)
                text = report.render() + report.to_markdown() + str(report.to_json())
                assert SECRET not in text, name
                assert base64.b64encode(f"{USER}:{SECRET}".encode()).decode() not in text, name
                assert report.sent <= 400_000
                assert not server.model.blobs
                if kind != "cancel" and not _out_of_reach(profile, kind, fault):
                    assert server.model.open_sessions == 0, (name, always)
                elif kind == "cancel" and server.model.open_sessions:
                    assert report.uploads > report.cancelled, (name, always)
                    assert "could not be cancelled" in said(report, Area.TIDINESS)


def _out_of_reach(profile: Profile, kind: str, fault: Fault) -> bool:
    """Faults after which nobody knows the session any more: its only address was in the answer that got lost, or its
    address is signed for a size that it no longer has."""
    lost = fault.when == "after" or fault.raw is not None or fault.name in ("slow", "token-expired")
    lost = lost or fault.name.startswith(("location", "stale"))
    return (kind == "start" and lost) or (kind in ("patch", "status") and profile.state != "none")


# Clocks, places


@pytest.mark.parametrize(
    ("seconds", "level"),
    [(0, Level.OK), (-20, Level.OK), (300, Level.WARNING), (3600, Level.PROBLEM), (-3600, Level.PROBLEM)],
)
def test_clocks_that_differ(seconds: int, level: Level, tmp_path: Path) -> None:
    date = formatdate(FakeClock().now() + seconds, usegmt=True)

    def rewrite(headers: dict[str, str], call: Call) -> None:
        headers["Date"] = date

    with FaultServer(DISTRIBUTION_3) as server:
        server.always["ping"] = Fault(name="dated", rewrite=rewrite)
        report = examine(server.registry, tmp_path, quick=True)
    assert [line.level for line in report.lines if "clock" in line.seen] == [level]
    if seconds == 3600:
        assert "1 h 00 min behind" in report.render()


@pytest.mark.parametrize(
    ("fault", "words"),
    [("location-other-host", "another host"), ("location-https", "scheme https"), ("location-no-port", "port 80"),
     ("location-missing", "without Location"), ("location-garbage", "unusable Location")],
)  # fmt: skip
def test_locations_that_are_odd_are_told_and_the_upload_is_cancelled(fault: str, words: str, tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server:
        server.always["start"] = FAULTS[fault]
        report = examine(server.registry, tmp_path, quick=True)
        assert words in said(report, Area.CHUNKS)
        tidy(server)


@pytest.mark.parametrize("elsewhere", ["http://registry.invalid:5000", "http://127.0.0.2:1"])
def test_an_upload_that_is_sent_to_a_dead_host_is_cancelled_where_it_was_opened(elsewhere: str, tmp_path: Path) -> None:
    """A registry behind a proxy that names an address of the inside: nobody answers there, but here somebody does."""

    def rewrite(headers: dict[str, str], call: Call) -> None:
        headers["Location"] = elsewhere + urlsplit(headers["Location"]).path

    with FaultServer(DISTRIBUTION_3) as server:
        server.always["start"] = Fault(name="inside", rewrite=rewrite)
        report = examine(server.registry, tmp_path, quick=True)
        assert server.model.open_sessions == 0
    assert not report.ok
    assert report.uploads == report.cancelled == 1


def test_an_upload_without_any_address_is_told_as_left(tmp_path: Path) -> None:
    def rewrite(headers: dict[str, str], call: Call) -> None:
        headers.pop("Location")
        headers.pop("Docker-Upload-UUID", None)

    with FaultServer(DISTRIBUTION_3) as server:
        server.always["start"] = Fault(name="nowhere", rewrite=rewrite)
        report = examine(server.registry, tmp_path, quick=True)
    assert "could not be cancelled: the registry told no address for it" in said(report, Area.TIDINESS)


def test_pages_everywhere_are_no_registry(tmp_path: Path) -> None:
    page = Fault(name="page", status=200, headers={"Content-Type": "text/html"}, body=b"<html><title>Welcome</title>")
    with FaultServer(DISTRIBUTION_3) as server:
        server.always["ping"] = page
        report = examine(server.registry, tmp_path)
    assert "Welcome" in said(report, Area.REGISTRY)
    assert not report.ok


def test_a_redirect_is_told_and_not_followed(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server:
        server.always["ping"] = Fault(name="moved", status=301, headers={"Location": f"http://{server.registry}/v2/"})
        report = examine(server.registry, tmp_path)
        assert server.requests == 1
    assert "redirected to" in said(report, Area.REGISTRY)


def test_an_edge_that_breaks_large_bodies_without_a_word_is_no_size_limit(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server:
        real = server.next_fault

        def breaks(kind: str) -> Fault | None:
            fault = real(kind)
            return FAULTS["drop-within"] if kind == "patch" and server.seen["patch"] > 4 else fault

        server.next_fault = breaks  # type: ignore[method-assign]
        report = examine(server.registry, tmp_path)
        tidy(server)
    assert "nobody says that it is their size" in said(report, Area.LIMIT)
    with RegistryClient(server.registry, state=tmp_path) as client:
        assert client.learned_limit is None, "a broken line is not a limit to remember"


@pytest.mark.parametrize("status", [400, 403, 404, 406, 500])
def test_an_edge_that_refuses_large_bodies_without_saying_why_is_measured(status: int, tmp_path: Path) -> None:
    """A firewall's page has any status; smaller bodies go through, so it is neither the address nor the password."""
    page = Fault(
        name="page", status=status, headers={"Content-Type": "text/html"}, body=b"<html><title>Blocked</title>"
    )
    with FaultServer(DISTRIBUTION_3) as server:
        real = server.next_fault

        def blocks(kind: str) -> Fault | None:
            fault = real(kind)
            return page if kind == "patch" and server.seen["patch"] in (5, 6) else fault

        server.next_fault = blocks  # type: ignore[method-assign]
        report = examine(server.registry, tmp_path)
        tidy(server)
    told = said(report, Area.LIMIT)
    assert "nobody says that it is their size" in told
    assert f"HTTP {status}" in told
    assert "is this address a registry" not in report.render()


def test_a_rate_limit_is_told_as_one(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server:
        server.always["ping"] = Fault(name="busy", status=429, headers={"Retry-After": "86400"})
        report = examine(server.registry, tmp_path)
    assert "Retry-After: 86400" in said(report, Area.REGISTRY)
    assert "asks to wait" in said(report, Area.REGISTRY)
    assert not report.ok


def test_a_measured_limit_serves_the_next_push(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3, limit=300_000) as server:
        # Enough for a near interval, even where each refused body goes out whole before the refusal is heard.
        examine(server.registry, tmp_path, budget=30_000_000)
        with RegistryClient(server.registry, state=tmp_path) as client:
            assert client.learned_limit is not None
            assert client.learned_limit.accepted <= 300_000 < client.learned_limit.refused
        server.limit = None
        lines = examine(server.registry, tmp_path, quick=True)
        assert "remembered since" in said(lines, Area.LIMIT)


def test_it_says_how_much_it_is_going_to_send_before_it_does(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    with FaultServer(DISTRIBUTION_3) as server:
        lock = threading.Lock()

        def say(text: str) -> None:
            with lock:
                told.append((server.seen["patch"], text))

        examine(server.registry, tmp_path, budget=2_000_000, say=say)
    before = [count for count, text in told if "at most 2.0 MB" in text]
    assert before, told
    assert before[0] <= 4, "after a few kilobytes of chunks"


def test_a_server_that_repeats_what_it_was_sent_shows_no_secret(tmp_path: Path) -> None:
    class Echo(RegistryModel):
        def handle(self, call: Call) -> Result:
            answer = super().handle(call)
            if call.headers.get("authorization"):
                given = call.headers["authorization"]
                body = f'{{"errors":[{{"code":"DENIED","message":"you sent {given} {SECRET}"}}]}}'.encode()
                headers = {
                    "Content-Type": "application/json",
                    "Server": given,
                    "Via": given,
                    "Location": f"/v2/{given}",
                }
                return Result(status=403, headers=headers, body=body)
            return answer

    with FaultServer(DISTRIBUTION_2_8) as server:
        server.model = Echo(DISTRIBUTION_2_8)
        report = examine(server.registry, tmp_path)
        text = report.render() + report.to_markdown() + str(report.to_json())
        assert SECRET not in text
        assert not any(value.partition(" ")[2] in text for value in server.authorizations if value)
    assert not report.ok
