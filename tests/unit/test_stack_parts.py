"""The stack's parts that need no server: options, configuration files, state, and naming processes safely."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildkit.errors import MissingComponentError, StorageError, UsageError
from buildkit.stack import Component, Credentials, StackOptions, StackState, htpasswd, packages, plan, process, state
from buildkit.stack.process import Process

# Options and configuration -------------------------------------------------------------------------------------------


def test_credentials_are_parsed_and_never_shown() -> None:
    credentials = Credentials.parse("user:pass:word")
    assert (credentials.user, credentials.password) == ("user", "pass:word")
    assert "pass" not in repr(credentials)
    assert "pass" not in repr(StackOptions(auth=credentials))


@pytest.mark.parametrize("text", ["", "user", ":x", "user:", "us er:secret", "user:sec\nret", "u:" + "x" * 73])
def test_wrong_credentials_are_refused_without_being_shown(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Credentials.parse(text)
    assert "sec" not in str(caught.value)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="too small"):
        StackOptions(edge_limit=10)
    with pytest.raises(UsageError, match="is not a port number"):
        StackOptions(registry_port=65536)
    with pytest.raises(UsageError, match="is not one of auto, own, none"):
        StackOptions(engine="maybe")  # type: ignore[arg-type]


def test_the_registry_listens_on_loopback_only_and_allows_deletion() -> None:
    text = plan.registry_config(port=5000, storage=Path("/d"), secret="s", htpasswd=Path("/p"))
    config = json.loads(text)
    assert config["http"]["addr"] == "127.0.0.1:5000"
    assert config["storage"]["delete"] == {"enabled": True}
    assert config["auth"]["htpasswd"]["path"] == "/p"
    assert "auth" not in json.loads(plan.registry_config(port=1, storage=Path("/d"), secret="s", htpasswd=None))


def edge_config(folder: Path) -> str:
    return plan.nginx_config(port=1, upstream=2, limit=3000, folder=folder, user=("a", "b"), pid_file=folder / "pid")


def test_the_edge_listens_on_loopback_only_and_limits_bodies() -> None:
    text = edge_config(Path("/d"))
    assert "listen 127.0.0.1:1;" in text
    assert "server 127.0.0.1:2;" in text
    assert "client_max_body_size 3000;" in text


def test_a_data_folder_that_nginx_would_expand_is_refused_and_any_other_is_quoted() -> None:
    with pytest.raises(UsageError, match="without \\$"):
        edge_config(Path("/d/$host"))
    assert '"/d e/\\"x\\"/proxy"' in edge_config(Path('/d e/"x"'))


def test_beside_another_engine_no_bridge_and_no_packet_filter_is_touched() -> None:
    (only,) = plan.engine_variants(other_engine=True)
    assert "--bridge=none" in only.arguments
    assert "--iptables=false" in only.arguments
    first, *others = plan.engine_variants(other_engine=False)
    assert first.arguments == ()
    assert all(variant.reason for variant in others)


# Passwords -----------------------------------------------------------------------------------------------------------


def test_a_password_line_matches_its_own_password_only() -> None:
    line = htpasswd.line("user", "pässword")
    assert line.startswith("user:$2")
    assert htpasswd.matches(line, "user", "pässword")
    assert not htpasswd.matches(line, "user", "password")
    assert not htpasswd.matches(line, "other", "pässword")
    assert not htpasswd.matches(line + line, "user", "pässword")
    assert not htpasswd.matches("", "user", "pässword")
    assert not htpasswd.matches("user:plain\n", "user", "plain")
    assert line != htpasswd.line("user", "pässword")


# State ---------------------------------------------------------------------------------------------------------------


def test_the_state_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    named = Process(pid=1, started=2, boot="b")
    component = Component(name="registry", address="127.0.0.1:1", process=named, fingerprint="f", note="n")
    saved = StackState(folder=tmp_path, edge_limit=5, runtime=tmp_path / "run").with_component(component)
    saved = saved.with_component(Component(name="engine", address="unix:///x", owned=False))
    state.save(saved)
    loaded = state.load(tmp_path)
    assert loaded == saved
    assert list(loaded.components) == ["engine", "registry"]
    assert not list(tmp_path.glob(".state-*"))


def test_without_a_state_file_there_is_no_stack(tmp_path: Path) -> None:
    assert state.load(tmp_path) == StackState(folder=tmp_path)
    assert not StackState(folder=tmp_path).running


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["version", "components", "engine", "process", "pid", "runtime", "edge_limit"]), inner
            )
        ),
    )
)
def test_a_state_file_that_is_not_ours_is_an_error_and_never_a_process(document: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "state.json").write_text(json.dumps(document))
        with contextlib.suppress(StorageError):
            assert state.load(Path(folder)).components == {}


# Processes -----------------------------------------------------------------------------------------------------------


def sleeper(tmp_path: Path, script: str = "print('up', flush=True); import time; time.sleep(1000)") -> Process:
    return process.spawn([sys.executable, "-c", script], log=tmp_path / "log")


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in path.read_text():
        assert time.monotonic() < deadline, f"{text!r} is not in {path}"


def test_a_started_program_is_alive_until_it_is_stopped(tmp_path: Path) -> None:
    started = sleeper(tmp_path)
    try:
        assert process.alive(started)
        assert not process.wait(started, 0)
    finally:
        assert process.stop(started, grace=10)
    assert not process.alive(started)
    assert process.wait(started, 0)
    assert process.stop(started, grace=10)  # safe to call again


def test_a_process_that_took_over_the_number_is_never_touched(tmp_path: Path) -> None:
    other = sleeper(tmp_path)
    try:
        for named in (replace(other, started=other.started - 1), replace(other, boot="another boot")):
            assert not process.alive(named)
            assert not process.send(named, signal.SIGKILL)
            assert process.wait(named, 0)
            assert process.stop(named, grace=1)
            assert process.session_members(named) == ()
            assert process.alive(other)
    finally:
        process.stop(other, grace=10)


def test_a_program_that_does_not_listen_is_killed_after_the_grace(tmp_path: Path) -> None:
    stubborn = sleeper(
        tmp_path,
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('deaf', flush=True); time.sleep(1000)",
    )
    wait_for(tmp_path / "log", "deaf")
    assert not process.stop(stubborn, grace=0.05)
    assert not process.alive(stubborn)


def test_a_program_whose_first_thread_has_ended_is_alive_while_others_hold_its_files(tmp_path: Path) -> None:
    leaderless = sleeper(
        tmp_path,
        "import ctypes, platform, threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "print('up', flush=True)\n"
        "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[platform.machine()], 0)  # exit(2), this thread only",
    )
    try:
        deadline = time.monotonic() + 30
        while ") Z " not in Path(f"/proc/{leaderless.pid}/stat").read_text():
            assert time.monotonic() < deadline
        assert process.alive(leaderless)
        assert not process.wait(leaderless, 0)
    finally:
        process.stop(leaderless, grace=10)
    assert not process.alive(leaderless)


def test_what_a_killed_program_leaves_behind_is_found_and_ended(tmp_path: Path) -> None:
    leader = sleeper(
        tmp_path,
        "import subprocess, time; c = subprocess.Popen(['sleep', '1000']);"
        "print('child', c.pid, flush=True); time.sleep(1000)",
    )
    wait_for(tmp_path / "log", "\n")
    child = int((tmp_path / "log").read_text().split()[1])
    process.send(leader, signal.SIGKILL)
    assert process.wait(leader, 10)
    (left,) = process.session_members(leader)
    assert left.pid == child
    process.stop(leader, grace=1)
    assert not process.alive(left)


def test_processes_are_found_by_the_folder_they_name(tmp_path: Path) -> None:
    user = process.spawn(
        [sys.executable, "-c", "import time; time.sleep(1000)", f"{tmp_path}/run/x"], log=tmp_path / "l"
    )
    try:
        assert [found.pid for found in process.using(tmp_path / "run")] == [user.pid]
        assert process.using(tmp_path / "ru") == ()
    finally:
        process.stop(user, grace=10)


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingComponentError, match="/nowhere/nginx cannot be started"):
        process.spawn(["/nowhere/nginx"], log=tmp_path / "log")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        process.spawn(["/bin/true"], log=tmp_path / "file" / "log")


# Packages ------------------------------------------------------------------------------------------------------------


def test_missing_programs_are_named_with_their_packages_and_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str | None:
        return None if name in ("nginx", "docker-registry") else f"/usr/bin/{name}"

    monkeypatch.setattr(packages, "find_program", find)
    with pytest.raises(MissingComponentError) as caught:
        packages.require(["docker-registry", "nginx", "dockerd"], install=False, say=print)
    assert caught.value.exit_code == 3
    assert str(caught.value) == (
        "docker-registry, nginx are not installed (run again with --install, or: apt-get install docker-registry nginx)"
    )


def test_without_apt_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_program", lambda name: None)
    with pytest.raises(MissingComponentError, match="nginx is not installed, and there is no apt-get here"):
        packages.require(["nginx"], install=True, say=print)


def test_installing_asks_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_program", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingComponentError, match="installing needs root"):
        packages.require(["nginx"], install=True, say=print)


def apt(folder: Path, *, code: int = 0) -> None:
    """Programs that answer like apt, and bring what they are asked for."""
    (folder / "apt-get").write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\nprintenv DEBIAN_FRONTEND >> {folder}/calls\n'
        f"[ {code} = 0 ] || {{ echo 'E: Unable to locate package' ; exit {code}; }}\n"
        f'case "$*" in *install*) touch {folder}/nginx; chmod +x {folder}/nginx;; esac\n'
    )
    (folder / "apt-cache").write_text(
        "#!/bin/sh\ncase $2 in nginx) echo '  Candidate: 1.22';; *) echo '  Candidate: (none)';; esac\n"
    )
    for name in ("apt-get", "apt-cache"):
        (folder / name).chmod(0o755)


@pytest.fixture
def own_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(process, "_SYSTEM_PATH", str(tmp_path))
    monkeypatch.setattr(packages, "_POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    # Not the machine's own programs: the test must not depend on what is installed.
    monkeypatch.setattr(
        packages, "find_program", lambda name: str(tmp_path / name) if (tmp_path / name).exists() else None
    )
    return tmp_path


def test_packages_are_installed_when_asked_and_services_stay_off(own_apt: Path) -> None:
    apt(own_apt)
    said: list[str] = []
    packages.require(["nginx"], install=True, say=said.append)
    calls = (own_apt / "calls").read_text()
    assert "update" in calls
    assert "install -q -y --no-install-recommends nginx" in calls
    assert "noninteractive" in calls
    assert not (own_apt / "policy-rc.d").exists()
    assert said == ["updating the package lists", "installing nginx"]


def test_a_policy_that_is_there_stays(own_apt: Path) -> None:
    apt(own_apt)
    (own_apt / "policy-rc.d").write_text("mine")
    packages.require(["nginx"], install=True, say=print)
    assert (own_apt / "policy-rc.d").read_text() == "mine"


def test_what_apt_says_is_in_the_error(own_apt: Path) -> None:
    apt(own_apt, code=100)
    with pytest.raises(MissingComponentError, match="apt-get update failed: E: Unable to locate package"):
        packages.require(["nginx"], install=True, say=print)


def test_a_program_without_a_package_is_an_error(own_apt: Path) -> None:
    apt(own_apt)
    with pytest.raises(MissingComponentError, match="no package for docker-registry"):
        packages.require(["docker-registry"], install=True, say=print)
