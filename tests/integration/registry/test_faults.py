"""Pushes against registries that fail in every way at every request, over real HTTP.

The matrix takes every fault at the first request of every kind; the property draws whole schedules at random. Both are
larger on request: ``BUILDKIT_FAULTS=full`` plays each fault at the second and third request of a kind, too, and
``BUILDKIT_SCHEDULES=20000`` sets the number of schedules. ``python tests/faults/table.py`` prints the counts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from faults.model import PROFILES, Profile
from faults.pushing import CHUNK, OPTIONS, check, push, request_bound
from faults.server import FAULTS, Fault, FaultServer, Key
from faults.table import KINDS, cell, must_succeed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FULL = os.environ.get("BUILDKIT_FAULTS") == "full"
SCHEDULES = int(os.environ.get("BUILDKIT_SCHEDULES", "1000"))


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    """A folder in memory where there is one: the journal's fsync is not what is tested here."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="bk-faults-", dir=base))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=PROFILES, ids=lambda profile: profile.name)
def server(request: pytest.FixtureRequest) -> Iterator[FaultServer]:
    with FaultServer(request.param) as running:
        yield running


@pytest.mark.parametrize("growing", [False, True], ids=["complete", "growing"])
def test_without_faults_every_registry_takes_every_size(server: FaultServer, state: Path, growing: bool) -> None:
    sizes = [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 5 * CHUNK + 7]
    if server.profile.empty_blob_fails:
        sizes = sizes[1:]
    server.reset()
    pushed = push(server, state, sizes=sizes, growing=growing)
    check(server, pushed)
    assert pushed.error is None
    if not (server.profile.equal_parts and growing):
        # There a blob whose size shows only at its end may leave a last part of one byte, which is no part.
        assert not any(report.retries or report.restarts for report in pushed.reports)
    assert server.model.open_sessions == 0
    server.seen.clear()
    again = push(server, state, sizes=sizes)
    assert again.error is None
    assert {report.outcome for report in again.reports} == {"exists"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_each_fault_at_each_request_ends_right_or_with_an_error(profile: Profile, kind: str, state: Path) -> None:
    wrong = []
    with FaultServer(profile) as server:
        for name in FAULTS:
            for nth in (0, 1, 2) if FULL else (0,):
                result = cell(server, state, kind, nth, name)
                if result.problem:
                    wrong.append(f"{name} at {kind} {nth}: {result.problem}")
                elif result.played and must_succeed(profile, kind, name) and result.error is not None:
                    wrong.append(f"{name} at {kind} {nth} should have been overcome: {result.error}")
    assert not wrong, "\n".join(wrong)


_fault = st.sampled_from(sorted(FAULTS)).map(FAULTS.__getitem__)
_schedule = st.dictionaries(st.integers(0, 40), _fault, max_size=12)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, FaultServer]]:
    running = {profile.name: FaultServer(profile) for profile in PROFILES}
    yield running
    for server in running.values():
        server.close()


@settings(max_examples=SCHEDULES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    name=st.sampled_from([profile.name for profile in PROFILES]),
    schedule=_schedule,
    sizes=st.lists(st.integers(1, 4 * CHUNK), min_size=1, max_size=2),
    growing=st.booleans(),
    limit=st.sampled_from([None, None, None, CHUNK - 1, 700]),
    retries=st.sampled_from([0, 2, 8]),
    seed=st.integers(0, 2**16),
)
def test_any_schedule_of_faults_ends_right_or_with_an_error(
    servers: dict[str, FaultServer], state: Path, name: str, schedule: dict[Key, Fault], sizes: list[int],
    growing: bool, limit: int | None, retries: int, seed: int,
) -> None:  # fmt: skip
    server = servers[name]
    server.reset(schedule)
    server.limit = limit
    options = replace(OPTIONS, retries=retries)
    folder = Path(tempfile.mkdtemp(dir=state))
    try:
        pushed = push(server, folder, sizes=sizes, growing=growing, options=options, seed=seed)
        check(server, pushed)
        assert server.requests <= request_bound(sizes, options)
        written = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())
        assert b"s3cret" not in written
        assert b"Bearer" not in written
        # Whatever happened, the next run over the same state succeeds once the faults are over.
        server.script.clear()
        second = push(server, folder, sizes=sizes, growing=growing, seed=seed)
        check(server, second)
        assert second.error is None or (limit and server.profile.minimum), second.error
    finally:
        server.limit = None
        shutil.rmtree(folder)
