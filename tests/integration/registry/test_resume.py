"""Going on after a kill, after Ctrl-C, beside another process, and after tokens ran out.

``BUILDKIT_KILLS=100`` sets the number of SIGKILLs (each needs two processes; the default keeps the suite quick).
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from faults.blobs import GrowingBlob, MemoryBlob
from faults.doubles import FakeClock, Recorder
from faults.model import (
    BUFFERING_EDGE,
    DISTRIBUTION_2_8,
    DISTRIBUTION_3,
    GITEA_1_22,
    GITEA_1_26,
    PROFILES,
    QUAY,
    SHORT_TOKENS,
    WORKERS,
    Profile,
)
from faults.pushing import CHUNK, OPTIONS, REPOSITORY, client_for, data_of
from faults.server import FAULTS, Fault, FaultServer

from buildkit.errors import CancelledError, SizeRefusedError, StorageError, UnreachableError
from buildkit.model import Digest
from buildkit.registry import (
    BytesAcknowledged,
    CancelToken,
    JournalFailed,
    LimitFound,
    Quirk,
    WaitingForPeer,
)

KILLS = int(os.environ.get("BUILDKIT_KILLS", "20"))
VICTIM = Path(__file__).resolve().parents[2] / "faults" / "victim.py"
SIZE = 10 * CHUNK + 123


def victim(server: FaultServer, state: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(VICTIM), server.registry, str(state), str(SIZE), str(CHUNK)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_push_goes_on_from_what_the_registry_holds(number: int, tmp_path: Path) -> None:
    """SIGKILL while a random request is under way; then a second run."""
    profile, at = PROFILES[number % len(PROFILES)], Random(number).randrange(1, 16)
    blob = MemoryBlob(data_of(SIZE))
    killed = threading.Event()
    with FaultServer(profile) as server:
        process: subprocess.Popen[str] | None = None

        def strike(kind: str, nth: int) -> None:
            if server.requests >= at and process is not None and not killed.is_set():
                killed.set()
                process.kill()
                process.wait(10)

        server.before = strike
        process = victim(server, tmp_path)
        _, errors = process.communicate(timeout=60)
        server.before = None
        assert killed.is_set() or process.returncode == 0, errors
        with client_for(server, tmp_path) as client:
            held = _acknowledged(tmp_path)
            report = client.upload(REPOSITORY, blob)
        assert server.model.blobs[REPOSITORY, str(blob.descriptor.digest)] == blob.data
        assert not server.model.problems
        if report.outcome != "exists" and profile.broken == "nothing" and profile.status != "unsupported":
            # The body that was under way when the kill came may have arrived in full (or arrive only now). Where the
            # Location changes with every chunk, the killed process then never learned the one that counts.
            lost = {0} if profile.state != "none" else set()
            assert report.resumed_at in {held, min(held + CHUNK, SIZE)} | lost
            assert report.bytes_sent <= SIZE - report.resumed_at + 2 * CHUNK


def _acknowledged(state: Path) -> int:
    notes = [json.loads(path.read_text()) for path in state.rglob("uploads/*.json")]
    return int(notes[0]["offset"]) if notes else 0


RESUMABLE = (DISTRIBUTION_3, GITEA_1_22, GITEA_1_26, WORKERS, QUAY, SHORT_TOKENS, BUFFERING_EDGE, DISTRIBUTION_2_8)


def _stop_after(token: CancelToken, acknowledged: int) -> Recorder:
    class Stopping(Recorder):
        def notify(self, event: object, /) -> None:
            super().notify(event)  # type: ignore[arg-type]
            if len(self.of(BytesAcknowledged)) >= acknowledged:
                token.cancel()

    return Stopping()


@pytest.mark.parametrize("growing", [False, True], ids=["complete", "growing"])
@pytest.mark.parametrize("profile", RESUMABLE, ids=lambda profile: profile.name)
def test_a_stopped_push_sends_nothing_twice(profile: Profile, growing: bool, tmp_path: Path) -> None:
    data = data_of(SIZE)

    def blob() -> MemoryBlob | GrowingBlob:
        return GrowingBlob(data, [CHUNK] * 20) if growing else MemoryBlob(data)

    with FaultServer(profile) as server:
        token = CancelToken()
        with (
            client_for(server, tmp_path, recorder=_stop_after(token, 4), cancel=token) as client,
            pytest.raises(CancelledError, match="again"),
        ):
            client.upload(REPOSITORY, blob(), key="diff_id+gzip")
        with client_for(server, tmp_path) as client:
            report = client.upload(REPOSITORY, blob(), key="diff_id+gzip")
        assert report.resumed_at == 4 * CHUNK
        assert report.outcome == "resumed"
        assert report.bytes_sent == SIZE - 4 * CHUNK
        assert report.bytes_resent == 0
        assert server.model.blobs[REPOSITORY, str(report.digest)] == data
        assert not server.model.problems
        assert not list(tmp_path.rglob("uploads/*.json"))


def test_a_resumed_session_with_other_bytes_is_found_out_and_started_again(tmp_path: Path) -> None:
    with FaultServer(GITEA_1_26) as server:
        token = CancelToken()
        with (
            client_for(server, tmp_path, recorder=_stop_after(token, 3), cancel=token) as client,
            pytest.raises(CancelledError),
        ):
            client.upload(REPOSITORY, MemoryBlob(data_of(SIZE, seed=1)), key="same key")
        other = MemoryBlob(data_of(SIZE, seed=2))
        with client_for(server, tmp_path) as client:
            report = client.upload(REPOSITORY, other, key="same key")
        assert len(report.restarts) == 1
        assert (report.outcome, report.resumed_at) == ("uploaded", 0)
        assert server.model.blobs[REPOSITORY, str(other.descriptor.digest)] == other.data


def test_a_forgotten_session_and_a_broken_journal_mean_a_fresh_start(tmp_path: Path) -> None:
    for damage in ("forget", "garbage", "dead host", "closed host", "traversal"):
        with FaultServer(replace(DISTRIBUTION_3, auth="basic")) as server:
            state = tmp_path / damage
            token = CancelToken()
            blob = MemoryBlob(data_of(SIZE))
            with (
                client_for(server, state, recorder=_stop_after(token, 3), cancel=token) as client,
                pytest.raises(CancelledError),
            ):
                client.upload(REPOSITORY, blob)
            (note,) = state.rglob("uploads/*.json")
            if damage == "forget":
                server.model.forget_sessions()
            elif damage == "garbage":
                note.write_bytes(os.urandom(300))
            else:
                # "localhost" is another host than 127.0.0.1: asked without the credential, it says 401.
                closed = f"http://localhost:{server.registry.rpartition(':')[2]}/v2/{REPOSITORY}/blobs/uploads/00"
                where = {"dead host": "http://127.0.0.2:1/x", "closed host": closed}.get(damage, "../../../etc")
                text = note.read_text()
                start = text.index('"location": "') + len('"location": "')
                note.write_text(text[:start] + where + text[text.index('"', start) :])
            with client_for(server, state) as client:
                report = client.upload(REPOSITORY, blob)
            assert report.resumed_at == 0
            assert server.model.blobs[REPOSITORY, str(blob.descriptor.digest)] == blob.data


def test_two_processes_with_one_blob_do_no_harm(tmp_path: Path) -> None:
    with FaultServer(GITEA_1_26) as server:
        pair = [victim(server, tmp_path), victim(server, tmp_path)]
        ends = [process.communicate(timeout=60) for process in pair]
        assert [process.returncode for process in pair] == [0, 0], ends
        assert sorted("exists" in out for out, _ in ends) == [False, True]
        assert server.seen["patch"] == 11
        assert not server.model.problems


def test_a_second_upload_of_a_blob_waits_for_the_first(tmp_path: Path) -> None:
    blob = MemoryBlob(data_of(3 * CHUNK))
    with FaultServer(GITEA_1_26) as server:
        recorder = Recorder()
        gate = threading.Event()

        def hold(kind: str, nth: int) -> None:
            if (kind, nth) == ("patch", 0):
                assert gate.wait(10)

        server.before = hold
        with client_for(server, tmp_path) as first, client_for(server, tmp_path, recorder=recorder) as second:

            class Opening(FakeClock):
                def sleep(self, seconds: float, cancel: CancelToken) -> None:
                    gate.set()
                    super().sleep(seconds, cancel)
                    threading.Event().wait(0.001)

            second._clock = Opening()
            thread = threading.Thread(target=first.upload, args=(REPOSITORY, blob))
            thread.start()
            while not server.seen["patch"]:
                threading.Event().wait(0.001)
            assert second.upload(REPOSITORY, blob).outcome == "exists"
            thread.join(10)
        assert recorder.of(WaitingForPeer)
        assert server.seen["patch"] == 3


@pytest.mark.parametrize("place", ["patch", "close", "start"])
def test_a_stop_ends_a_request_that_hangs(place: str, tmp_path: Path) -> None:
    """The server never answers; ``cancel`` from another thread ends the upload all the same, at once."""
    with FaultServer(DISTRIBUTION_3) as server:
        token = CancelToken()
        release = threading.Event()

        def hang(kind: str, nth: int) -> None:
            if kind == place:
                token.cancel()
                release.wait(30)

        server.before = hang
        options = replace(OPTIONS, answer_timeout=30, closing_timeout=30)
        try:
            with client_for(server, tmp_path, cancel=token, options=options) as client, pytest.raises(CancelledError):
                client.upload(REPOSITORY, MemoryBlob(data_of(3 * CHUNK)))
            assert not release.is_set()
        finally:
            release.set()


@pytest.mark.parametrize("chunk", [CHUNK, 3 * CHUNK])
def test_the_limit_is_learned_remembered_and_probed_again(chunk: int, tmp_path: Path) -> None:
    options = replace(OPTIONS, chunk_size=chunk)
    clock = FakeClock()
    with FaultServer(GITEA_1_26, limit=700) as server:
        recorder = Recorder()
        with client_for(server, tmp_path, options=options, recorder=recorder, clock=clock) as client:
            report = client.upload(REPOSITORY, MemoryBlob(data_of(5000, seed=1)))
        halvings = 1 if chunk == CHUNK else 3
        assert len(recorder.of(LimitFound)) == halvings
        assert report.limit_learned == chunk // 2**halvings
        recorder = Recorder()
        with client_for(server, tmp_path, options=options, recorder=recorder, clock=clock) as client:
            client.upload(REPOSITORY, MemoryBlob(data_of(5000, seed=2)))
        assert not recorder.of(LimitFound)
        clock.advance(options.probe_after + 1)
        server.limit = None
        for _ in range(4):
            with client_for(server, tmp_path, options=options, clock=clock) as client:
                client.upload(REPOSITORY, MemoryBlob(data_of(5000, seed=_ + 3)))
            clock.advance(options.probe_after + 1)
        server.seen.clear()
        with client_for(server, tmp_path, options=options, clock=clock) as client:
            client.upload(REPOSITORY, MemoryBlob(data_of(6 * CHUNK, seed=9)))
        assert server.seen["patch"] == 6 * CHUNK // chunk


def test_a_refusal_that_no_chunk_size_cures_stops_at_once(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server:
        server.always["patch"] = FAULTS["413-json"]
        with client_for(server, tmp_path) as client, pytest.raises(SizeRefusedError, match="too little"):
            client.upload(REPOSITORY, MemoryBlob(data_of(SIZE)))
        assert server.seen["patch"] <= 5
        server.reset({("patch", 3): FAULTS["413-json"]})
        with client_for(server, tmp_path) as client, pytest.raises(SizeRefusedError, match="no chunk size"):
            client.upload(REPOSITORY, MemoryBlob(data_of(SIZE)))
        assert server.seen["patch"] == 4
        server.reset()
        server.limit = CHUNK - 1
        with (
            client_for(server, tmp_path / "x", options=replace(OPTIONS, learn=False)) as client,
            pytest.raises(SizeRefusedError, match="--chunk-size"),
        ):
            client.upload(REPOSITORY, MemoryBlob(data_of(SIZE)))
        assert server.seen["patch"] == 1


def test_monolithic_uploads_fall_back_to_chunks(tmp_path: Path) -> None:
    options = replace(OPTIONS, chunked=False, limit=50_000, chunk_size=50_000)
    data = data_of(5000)
    with FaultServer(GITEA_1_26) as server:
        with client_for(server, tmp_path, options=options) as client:
            client.upload(REPOSITORY, MemoryBlob(data))
        assert (server.seen["patch"], server.seen["close"]) == (0, 1)
        server.reset()
        server.limit = 4000
        with client_for(server, tmp_path / "2", options=options) as client:
            report = client.upload(REPOSITORY, MemoryBlob(data))
        assert report.limit_learned is not None
        assert server.seen["patch"] > 1
        assert server.model.blobs[REPOSITORY, str(report.digest)] == data


def test_gitea_poisoned_session_is_deleted_and_named(tmp_path: Path) -> None:
    with FaultServer(GITEA_1_26) as server:
        server.reset({("patch", 2): FAULTS["drop-within"]})
        with client_for(server, tmp_path) as client:
            report = client.upload(REPOSITORY, MemoryBlob(data_of(SIZE)))
        assert Quirk.POISONED_SESSION in report.quirks
        assert server.seen["cancel"] == 1
        assert server.model.open_sessions == 0


def test_a_repository_that_may_not_be_read_is_no_obstacle_when_mounting(tmp_path: Path) -> None:
    refused = Fault(name="denied", status=403, headers={"Content-Type": "application/json"}, body=b"{}")
    with FaultServer(GITEA_1_26) as server, client_for(server, tmp_path) as client:
        client.head_blob(REPOSITORY, Digest.of(b""))
        server.reset({("token", 1): refused})  # the first is for pushing, the second for the other repository
        report = client.upload(REPOSITORY, MemoryBlob(data_of(SIZE)), mount_from=["someone/else"])
        assert report.outcome == "uploaded"
        assert not server.script


def test_expired_tokens_are_renewed_within_the_session(tmp_path: Path) -> None:
    with FaultServer(SHORT_TOKENS) as server, client_for(server, tmp_path) as client:
        report = client.upload(REPOSITORY, MemoryBlob(data_of(SIZE)))
        assert not report.retries
        assert not report.restarts
        assert server.seen["token"] >= 4


def test_tokens_are_renewed_ahead_of_their_end(tmp_path: Path) -> None:
    clock = FakeClock()
    with (
        FaultServer(replace(SHORT_TOKENS, token_uses=None)) as server,
        client_for(server, tmp_path, clock=clock) as client,
    ):
        digest = Digest.parse("sha256:" + "0" * 64)
        client.head_blob(REPOSITORY, digest)
        client.head_blob(REPOSITORY, digest)
        assert server.seen["token"] == 1
        clock.advance(55)
        client.head_blob(REPOSITORY, digest)
        assert server.seen["token"] == 2
        assert server.seen["head"] == 4


def test_credentials_never_go_to_another_host(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server, FaultServer(replace(DISTRIBUTION_2_8, auth="basic")) as registry:

        def elsewhere(headers: dict[str, str], call: object) -> None:
            headers["Location"] = f"http://localhost:{server.registry.rpartition(':')[2]}/v2/x/blobs/uploads/00"

        registry.reset({("start", 0): Fault(name="elsewhere", rewrite=elsewhere)})
        with client_for(registry, tmp_path) as client:
            report = client.upload(REPOSITORY, MemoryBlob(data_of(SIZE)))
        assert report.restarts  # nothing there knows the session; the second one is the registry's own
        assert server.seen["patch"] == 1
        assert set(server.authorizations) == {""}


def test_a_full_disk_costs_the_journal_and_not_the_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("buildkit.registry.journal.write_atomic", full)
    recorder = Recorder()
    with FaultServer(GITEA_1_26) as server, client_for(server, tmp_path, recorder=recorder) as client:
        client.upload(REPOSITORY, MemoryBlob(data_of(SIZE)))
        assert not server.model.check_integrity()
    assert recorder.of(JournalFailed)


def test_a_disk_that_fails_while_read_is_a_storage_error_and_leaves_no_session(tmp_path: Path) -> None:
    with FaultServer(DISTRIBUTION_3) as server, client_for(server, tmp_path) as client:
        with pytest.raises(StorageError, match="reading the blob"):
            client.upload(REPOSITORY, MemoryBlob(data_of(SIZE), fail_at=4500))
        assert not server.model.blobs
        assert server.model.open_sessions == 0


def test_a_blob_whose_making_fails_leaves_no_session(tmp_path: Path) -> None:
    with FaultServer(GITEA_1_26) as server, client_for(server, tmp_path) as client:
        failing = GrowingBlob(data_of(SIZE), [CHUNK] * 4, error=StorageError("disk full"))
        with pytest.raises(StorageError, match="disk full"):
            client.upload(REPOSITORY, failing, key="k")
        assert server.seen["patch"] >= 1
        assert server.model.open_sessions == 0


def test_a_blob_that_turns_out_to_be_there_is_not_sent_to_its_end(tmp_path: Path) -> None:
    data = data_of(SIZE)
    with FaultServer(GITEA_1_26) as server, client_for(server, tmp_path) as client:
        client.upload(REPOSITORY, MemoryBlob(data))
        server.seen.clear()
        # The whole of it is compressed while the first chunks are on their way.
        report = client.upload(REPOSITORY, GrowingBlob(data, [3 * CHUNK]), key="k")
        assert report.outcome == "exists"
        assert server.seen["patch"] <= 3
        assert server.model.open_sessions == 0


def test_retry_after_is_obeyed_and_too_long_a_wait_is_an_error(tmp_path: Path) -> None:
    clock = FakeClock()
    with FaultServer(DISTRIBUTION_2_8) as server:
        server.reset({("patch", 0): FAULTS["429-retry-after"]})
        with client_for(server, tmp_path, clock=clock) as client:
            client.upload(REPOSITORY, MemoryBlob(data_of(CHUNK)))
        assert max(clock.slept) >= 7
        server.reset({("patch", 0): Fault(name="x", status=503, headers={"Retry-After": "86400"})})
        with client_for(server, tmp_path) as client, pytest.raises(UnreachableError, match="come back in 86400 s"):
            client.upload(REPOSITORY, MemoryBlob(data_of(2 * CHUNK)))


def test_a_slow_link_gets_chunks_that_its_rate_allows(tmp_path: Path) -> None:
    """10 kB/s by the clock that the client was given; a chunk may take 60 s."""
    size, clock = 6_000_000, FakeClock()
    with FaultServer(DISTRIBUTION_3) as server:
        server.before = lambda kind, nth: clock.advance(300) if kind == "patch" else None
        options = replace(OPTIONS, chunk_size=3_000_000, chunk_seconds=60)
        with client_for(server, tmp_path, clock=clock, options=options) as client:
            client.upload(REPOSITORY, MemoryBlob(data_of(size)))
        sizes = [length for kind, _, _, length in server.calls if kind == "patch"]
        assert sizes[0] == 3_000_000
        assert set(sizes[1:]) == {1_000_000}  # not below a megabyte, however slow
