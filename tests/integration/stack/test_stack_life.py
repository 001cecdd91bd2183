"""The local stack against the real programs: it comes up, stays, is repaired, and ends."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from buildkit import stack
from buildkit.engine import Engine
from buildkit.errors import BuildkitError, MissingComponentError, StorageError, UsageError
from buildkit.stack import Credentials, StackOptions, StackState, local, packages, probe, process
from buildkit.stack.state import ComponentName

PLAIN = StackOptions(engine="none")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A data folder; whatever a test leaves running in it is ended."""
    made = tmp_path / "stack"
    yield made
    stack.down(made)


def ask(
    address: str, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request(method, path, body=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def pids(state: StackState) -> dict[str, int | None]:
    return {name: c.process.pid if c.process else None for name, c in state.components.items()}


def kill(state: StackState, name: ComponentName) -> None:
    named = state.components[name].process
    assert named is not None
    process.send(named, signal.SIGKILL)
    assert process.wait(named, 10)


def listening(address: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == 0


def test_up_serves_a_registry_and_an_edge_and_down_ends_them(folder: Path) -> None:
    state = stack.up(folder, PLAIN)
    assert state.running
    assert stack.status(folder).running
    for address in (state.registry, state.edge):
        status, headers, _ = ask(address, "GET", "/v2/")
        assert status == 200
        assert headers["Docker-Distribution-Api-Version"] == "registry/2.0"
    stack.down(folder)
    assert not listening(state.registry)
    assert not listening(state.edge)
    assert [c.condition for c in stack.status(folder).components.values()] == ["stopped", "stopped"]


def test_up_again_changes_nothing_and_down_again_is_fine(folder: Path) -> None:
    first = stack.up(folder, PLAIN)
    second = stack.up(folder, PLAIN)
    assert pids(first) == pids(second)
    assert first.edge == second.edge
    stack.down(folder)
    stack.down(folder)
    assert stack.up(folder, PLAIN).edge == first.edge  # the ports are kept


def test_the_edge_refuses_large_bodies_with_html_and_lets_others_through(folder: Path) -> None:
    state = stack.up(folder, replace(PLAIN, edge_limit=5000))
    status, headers, _ = ask(state.edge, "POST", "/v2/probe/blobs/uploads/", b"")
    assert status == 202
    location = headers["Location"]
    # What the registry answers names the edge as the client knows it, not what stands behind.
    assert location.startswith(f"http://{state.edge}/v2/probe/blobs/uploads/")
    path = location.removeprefix(f"http://{state.edge}")
    status, headers, _ = ask(state.edge, "PATCH", path, b"x" * 5000, Content_Type="application/octet-stream")
    assert status == 202
    assert headers["Range"] == "0-4999"
    path = headers["Location"].removeprefix(f"http://{state.edge}")
    status, headers, body = ask(state.edge, "PATCH", path, b"x" * 5001)
    assert status == 413
    assert headers["Content-Type"].startswith("text/html")
    assert b"Request Entity Too Large" in body
    assert ask(state.registry, "GET", "/v2/")[0] == 200


def test_other_settings_restart_only_what_they_concern(folder: Path) -> None:
    first = stack.up(folder, PLAIN)
    second = stack.up(folder, replace(PLAIN, edge_limit=5000))
    assert pids(first)["registry"] == pids(second)["registry"]
    assert pids(first)["edge"] != pids(second)["edge"]
    assert first.edge == second.edge
    assert second.edge_limit == 5000


def test_blobs_outlive_a_restart(folder: Path) -> None:
    state = stack.up(folder, PLAIN)
    digest = "sha256:2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of "x"
    _, headers, _ = ask(state.edge, "POST", "/v2/probe/blobs/uploads/", b"")
    path = headers["Location"].removeprefix(f"http://{state.edge}")
    status, _, _ = ask(state.edge, "PUT", f"{path}&digest={digest}", b"x")
    assert status == 201
    stack.down(folder)
    state = stack.up(folder, PLAIN)
    assert ask(state.edge, "GET", f"/v2/probe/blobs/{digest}")[2] == b"x"
    assert ask(state.registry, "DELETE", f"/v2/probe/blobs/{digest}")[0] == 202


@pytest.mark.parametrize("name", ["registry", "edge"])
def test_a_killed_component_is_seen_and_started_again_at_its_port(folder: Path, name: ComponentName) -> None:
    first = stack.up(folder, PLAIN)
    kill(first, name)
    seen = stack.status(folder)
    assert seen.components[name].condition == "crashed"
    assert not seen.running
    second = stack.up(folder, PLAIN)
    assert second.running
    assert second.components[name].address == first.components[name].address
    other: ComponentName = "edge" if name == "registry" else "registry"
    assert pids(first)[other] == pids(second)[other]


def test_a_component_that_hangs_is_seen_and_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_SECONDS", 0.3)
    monkeypatch.setitem(local._GRACE_SECONDS, "registry", 0.3)
    first = stack.up(folder, PLAIN)
    named = first.components["registry"].process
    assert named is not None
    process.send(named, signal.SIGSTOP)
    assert stack.status(folder).components["registry"].condition == "silent"
    second = stack.up(folder, PLAIN)
    assert second.running
    assert not process.alive(named)


def test_down_after_a_crash_leaves_no_worker_behind(folder: Path) -> None:
    state = stack.up(folder, PLAIN)
    leader = state.components["edge"].process
    assert leader is not None
    kill(state, "edge")
    assert process.session_members(leader)  # nginx's workers still serve
    stack.down(folder)
    assert process.session_members(leader) == ()
    assert not listening(state.edge)


def test_a_port_that_was_asked_for_and_is_taken_is_named(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1, asked for the edge, is taken"):
            stack.up(folder, replace(PLAIN, edge_port=port))
    # What that call had started is gone again.
    assert [c.condition for c in stack.status(folder).components.values()] == ["stopped"]


def test_a_remembered_port_that_is_taken_gives_way(folder: Path) -> None:
    first = stack.up(folder, PLAIN)
    stack.down(folder)
    with socket.create_server(("127.0.0.1", int(first.registry.rpartition(":")[2]))):
        second = stack.up(folder, PLAIN)
        assert second.running
        assert second.registry != first.registry


@pytest.mark.parametrize("name", ["registry", "edge"])
def test_a_port_lost_in_a_race_is_replaced(folder: Path, name: ComponentName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else listens on the port between our choice and the start of our program, and even answers there."""
    real = probe.free_port
    other = stack.up(folder.with_name("other"), PLAIN)
    try:
        taken = int(other.registry.rpartition(":")[2])
        ports = [taken] if name == "registry" else [real(), taken]
        real_free = probe.port_free
        seen: list[int] = []

        def free(port: int) -> bool:
            seen.append(port)
            return real_free(port)

        monkeypatch.setattr(probe, "free_port", lambda: ports.pop(0) if ports else real())
        monkeypatch.setattr(probe, "port_free", free)
        state = stack.up(folder, PLAIN)
        assert state.running
        assert state.components[name].address != f"127.0.0.1:{taken}"
        assert taken in seen
        assert stack.status(folder.with_name("other")).running
    finally:
        stack.down(folder.with_name("other"))


def test_authentication_is_asked_for_when_wanted(folder: Path) -> None:
    options = replace(PLAIN, auth=Credentials(user="user", password="correct horse"))
    state = stack.up(folder, options)
    right = "Basic " + base64.b64encode(b"user:correct horse").decode()
    wrong = "Basic " + base64.b64encode(b"user:battery").decode()
    assert ask(state.edge, "GET", "/v2/")[0] == 401
    assert ask(state.edge, "GET", "/v2/", Authorization=wrong)[0] == 401
    assert ask(state.edge, "GET", "/v2/", Authorization=right)[0] == 200
    assert pids(stack.up(folder, options)) == pids(state)  # the same password is no new setting
    assert stack.up(folder, PLAIN).running
    assert ask(state.edge, "GET", "/v2/")[0] == 200
    secret_files = [path for path in folder.rglob("*") if path.is_file() and b"correct horse" in path.read_bytes()]
    assert secret_files == []


def test_settings_in_the_environment_do_not_leak_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_HTTP_ADDR", "127.0.0.1:1")
    monkeypatch.setenv("NGINX", "99;")
    assert stack.up(folder, PLAIN).running


def test_two_ups_at_once_start_one_stack(folder: Path) -> None:
    states: list[StackState] = []
    threads = [threading.Thread(target=lambda: states.append(stack.up(folder, PLAIN))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(states) == 3
    assert pids(states[0]) == pids(states[1]) == pids(states[2])


def test_stacks_in_two_folders_do_not_disturb_each_other(folder: Path, tmp_path: Path) -> None:
    first = stack.up(folder, PLAIN)
    second = stack.up(tmp_path / "other", PLAIN)
    assert len({first.edge, first.registry, second.edge, second.registry}) == 4
    stack.down(tmp_path / "other")
    assert stack.status(folder).running


def test_an_interrupted_up_leaves_nothing_running_that_it_started(folder: Path) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("edge: starting"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stack.up(folder, PLAIN, say=interrupt)
    assert [c.condition for c in stack.status(folder).components.values()] == ["stopped"]
    first = stack.up(folder, PLAIN)
    with pytest.raises(KeyboardInterrupt):
        stack.up(folder, replace(PLAIN, edge_limit=9999), say=interrupt)
    seen = stack.status(folder)
    assert seen.components["registry"].condition == "running"  # it was there before
    assert pids(seen)["registry"] == pids(first)["registry"]


def test_a_program_that_fails_shows_its_last_words(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "docker-registry"
    broken.write_text("#!/bin/sh\necho first line\necho 'panic: no storage' >&2\nexit 2\n")
    broken.chmod(0o755)
    real = process.find_program
    monkeypatch.setattr(local, "find_program", lambda name: str(broken) if name == "docker-registry" else real(name))
    said: list[str] = []
    with pytest.raises(BuildkitError, match="the registry ended at once: panic: no storage") as caught:
        stack.up(folder, PLAIN, say=said.append)
    assert caught.value.hint
    assert "registry.log" in caught.value.hint
    assert "registry: | first line" in said
    assert not stack.status(folder).running


def test_a_program_that_never_answers_is_ended(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mute = tmp_path / "docker-registry"
    mute.write_text("#!/bin/sh\necho waiting\nexec sleep 1000\n")
    mute.chmod(0o755)
    real = process.find_program
    monkeypatch.setattr(local, "find_program", lambda name: str(mute) if name == "docker-registry" else real(name))
    monkeypatch.setitem(local._READY_SECONDS, "registry", 0.2)
    with pytest.raises(BuildkitError, match="the registry did not answer within 0 s: waiting"):
        stack.up(folder, PLAIN)
    assert not process.using(folder)


def test_missing_programs_are_an_error_with_the_way_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = process.find_program
    monkeypatch.setattr(packages, "find_program", lambda name: None if name == "nginx" else real(name))
    with pytest.raises(MissingComponentError, match=r"nginx is not installed .*--install") as caught:
        stack.up(folder, PLAIN)
    assert caught.value.exit_code == 3


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        stack.up(tmp_path / "file", PLAIN)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(StorageError, match="is not a state file"):
        stack.up(tmp_path, PLAIN)
    with pytest.raises(StorageError, match="is not a state file"):
        stack.down(tmp_path, purge=True)
    assert (tmp_path / "file").exists()


def test_purge_removes_what_a_stack_has_made_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    stack.up(folder, PLAIN)
    stack.down(folder, purge=True)
    assert not folder.exists()
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    stack.up(folder, PLAIN)
    stack.down(folder, purge=True)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    (tmp_path / "mine").mkdir()
    stack.down(tmp_path / "mine", purge=True)
    assert (tmp_path / "mine").exists()
    assert not stack.down(tmp_path / "nothing").components


# The engine ----------------------------------------------------------------------------------------------------------

OWN = StackOptions(engine="own")


def engine_version(host: str | None) -> str:
    with Engine.connect(host) as engine:
        return engine.info.version


def test_an_engine_that_answers_is_used_and_left_alone(
    folder: Path, engine_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine_host)
    state = stack.up(folder, StackOptions())
    assert state.engine == engine_host
    assert not state.components["engine"].owned
    assert stack.status(folder).running
    stack.down(folder)
    assert engine_version(engine_host)


def test_an_own_engine_comes_up_is_kept_is_repaired_and_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stack.up(folder, OWN)
    assert engine_version(first.engine)
    assert pids(stack.up(folder, OWN)) == pids(first)
    # What runs as ours is taken before any other, and without being asked for.
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    assert pids(stack.up(folder, StackOptions())) == pids(first)
    kill(first, "engine")
    assert stack.status(folder).components["engine"].condition == "crashed"
    second = stack.up(folder, StackOptions())
    assert second.engine == first.engine
    assert engine_version(second.engine)
    with Engine.connect(second.engine) as engine:
        engine.import_tar([bytes(10240)], "probe:1")
        assert engine.inspect("probe:1").tags == ("probe:1",)
    without = stack.up(folder, PLAIN)
    assert "engine" not in without.components
    with pytest.raises(MissingComponentError):
        engine_version(second.engine)
    stack.down(folder, purge=True)
    assert not folder.exists()
    assert not process.using(folder)


def test_an_engine_lives_in_a_folder_whose_path_is_too_long_for_a_socket(folder: Path) -> None:
    deep = folder / ("d" * 60) / ("e" * 60)
    try:
        state = stack.up(deep, OWN)
        assert engine_version(state.engine)
        assert state.runtime is not None
        assert not state.runtime.is_relative_to(deep)
        stack.down(deep)
        assert not state.runtime.exists()
        assert local._mounts_under(deep) == ()
        assert engine_version(stack.up(deep, OWN).engine)
    finally:
        stack.down(deep, purge=True)


def test_an_engine_that_does_not_start_says_why(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "dockerd"
    broken.write_text('#!/bin/sh\necho "failed to start daemon: Devices cgroup isn\'t mounted: $*" >&2\nexit 1\n')
    broken.chmod(0o755)
    real = process.find_program
    monkeypatch.setattr(local, "find_program", lambda name: str(broken) if name == "dockerd" else real(name))
    monkeypatch.setattr(local, "running", lambda name: False)
    said: list[str] = []
    with pytest.raises(BuildkitError, match=r"dockerd does not start: .*Devices cgroup isn't mounted") as caught:
        stack.up(folder, OWN, say=said.append)
    assert "DOCKER_HOST" in str(caught.value)
    attempts = [line for line in said if line.startswith("engine: starting dockerd")]
    assert len(attempts) == 3  # plain, without packet filter, without a bridge
    assert "engine" not in stack.status(folder).components
    assert not process.using(folder)


def test_only_root_can_start_an_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(local, "_private", lambda path: False)
    with pytest.raises(MissingComponentError, match=r"only root can start one .*DOCKER_HOST"):
        stack.up(folder, OWN)


def test_the_state_is_plain_json(folder: Path) -> None:
    state = stack.up(folder, PLAIN)
    document = json.loads(json.dumps(stack.status(folder).to_json()))
    assert document["running"] is True
    assert document["components"]["edge"]["address"] == state.edge
