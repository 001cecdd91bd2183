"""Credentials: where they come from, and where they must never go."""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
from pathlib import Path

import pytest
from faults.model import DISTRIBUTION_2_8, SECRET, USER
from faults.server import FaultServer

from buildkit.errors import AuthError, BuildkitError, MissingComponentError, StorageError, UsageError
from buildkit.registry.credentials import DefaultCredentials, from_docker_config
from buildkit.registry.login import login, logout

AUTH = base64.b64encode(f"{USER}:{SECRET}".encode()).decode()

_HELPER = """#!{python}
import json, os, sys
path = os.path.join(os.path.dirname(__file__), "held.json")
held = json.load(open(path)) if os.path.exists(path) else {{}}
action, text = sys.argv[1], sys.stdin.read()
if action == "get":
    if text not in held:
        print("credentials not found in native keychain")
        sys.exit(1)
    print(json.dumps(held[text]))
elif action == "store":
    entry = json.loads(text)
    held[entry["ServerURL"]] = {{"Username": entry["Username"], "Secret": entry["Secret"]}}
elif action == "erase":
    if held.pop(text, None) is None:
        sys.exit(1)
json.dump(held, open(path, "w"))
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A home of its own with a working credential helper ``docker-credential-test`` on PATH."""
    tools = tmp_path / "bin"
    tools.mkdir()
    helper = tools / "docker-credential-test"
    helper.write_text(_HELPER.format(python=sys.executable))
    helper.chmod(0o755)
    return {"HOME": str(tmp_path), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


def configure(environ: dict[str, str], document: object) -> Path:
    path = Path(environ["HOME"]) / ".docker" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@pytest.mark.parametrize("key", ["git.example.org", "https://git.example.org", "https://git.example.org/v2/"])
def test_docker_auths_are_found_under_the_keys_that_clients_write(environ: dict[str, str], key: str) -> None:
    configure(environ, {"auths": {key: {"auth": AUTH}}})
    found = from_docker_config("git.example.org", environ)
    assert found is not None
    assert (found.username, found.password) == (USER, SECRET)
    assert from_docker_config("git.example.org:8443", environ) is None


def test_identity_and_registry_tokens_are_told_apart(environ: dict[str, str]) -> None:
    configure(
        environ, {"auths": {"a.example": {"auth": AUTH, "identitytoken": "idt"}, "b.example": {"registrytoken": "r"}}}
    )
    first, second = from_docker_config("a.example", environ), from_docker_config("b.example", environ)
    assert first is not None
    assert second is not None
    assert (first.identity_token, first.password) == ("idt", None)
    assert second.registry_token == "r"


def test_the_environment_wins_and_stays_with_its_registry(environ: dict[str, str]) -> None:
    configure(environ, {"auths": {"git.example.org": {"auth": AUTH}}})
    environ |= {"REGISTRY_USERNAME": "env", "REGISTRY_TOKEN": "token\n"}
    credentials = DefaultCredentials(environ=environ, env_registry="git.example.org")
    found = credentials.lookup("git.example.org")
    assert found is not None
    assert (found.username, found.password) == ("env", "token")
    assert credentials.lookup("docker.io") is None
    del environ["REGISTRY_USERNAME"]
    with pytest.raises(UsageError, match="REGISTRY_USERNAME"):
        credentials.lookup("git.example.org")


@pytest.mark.parametrize(
    "document", ["{", "[]", '{"auths": {"git.example.org": {"auth": "bm9jb2xvbg=="}}}', {"credsStore": "../../bin/sh"}]
)
def test_a_broken_configuration_is_a_usage_error_without_its_content(environ: dict[str, str], document: object) -> None:
    configure(environ, document)
    with pytest.raises(UsageError) as caught:
        from_docker_config("git.example.org", environ)
    assert "nocolon" not in str(caught.value)


def test_a_missing_helper_is_named_with_the_way_out(environ: dict[str, str]) -> None:
    configure(environ, {"credHelpers": {"git.example.org": "absent"}})
    with pytest.raises(MissingComponentError, match="docker-credential-absent"):
        from_docker_config("git.example.org", environ)


@pytest.mark.parametrize("through", ["file", "helper"])
def test_login_then_logout_leaves_the_configuration_as_it_was(environ: dict[str, str], through: str) -> None:
    before: dict[str, object] = {"HttpHeaders": {"X": "y"}, "auths": {"other.example": {"auth": AUTH}}}
    if through == "helper":
        before["credsStore"] = "test"
    path = configure(environ, before)
    with FaultServer(DISTRIBUTION_2_8) as server:
        result = login(server.registry, username=USER, password=SECRET + "\n", environ=environ)
        assert result.plain is (through == "file")
        assert not server.model.problems
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    if through == "helper":
        assert SECRET not in path.read_text()
        assert base64.b64encode(SECRET.encode()).decode()[:12] not in path.read_text().replace(AUTH, "")
    found = from_docker_config(server.registry, environ)
    assert found is not None
    assert (found.username, found.password) == (USER, SECRET)
    assert logout(server.registry, environ=environ)
    assert from_docker_config(server.registry, environ) is None
    assert json.loads(path.read_text()) == before
    assert not logout(server.registry, environ=environ)


def test_a_refused_login_stores_nothing(environ: dict[str, str]) -> None:
    with FaultServer(DISTRIBUTION_2_8) as server, pytest.raises(AuthError) as caught:
        login(server.registry, username=USER, password="wrong-secret", environ=environ)
    assert "wrong-secret" not in str(caught.value)
    assert not (Path(environ["HOME"]) / ".docker" / "config.json").exists()


@pytest.mark.parametrize("password", ["", "a\r\nX-Header: b", "\x00"])
def test_secrets_that_would_split_a_header_are_refused(environ: dict[str, str], password: str) -> None:
    with pytest.raises(UsageError):
        login("git.example.org", username=USER, password=password, environ=environ, verify=False)


def test_an_unwritable_home_is_a_storage_error(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".docker").write_text("not a folder")
    with pytest.raises(BuildkitError) as caught:
        login("git.example.org", username=USER, password=SECRET, environ=environ, verify=False)
    assert isinstance(caught.value, StorageError | UsageError)
    assert SECRET not in str(caught.value)
