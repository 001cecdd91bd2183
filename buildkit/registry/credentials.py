"""Who the user is at a registry: from the environment, Docker's configuration or a credential helper.

Sources, in this order: ``REGISTRY_USERNAME`` and ``REGISTRY_TOKEN``; then ``~/.docker/config.json`` (or
``$DOCKER_CONFIG/config.json``) as Docker reads it: ``credHelpers`` for this registry, ``credsStore``, ``auths``. The
protocol of the helpers is that of docker/docker-credential-helpers: the server on standard input, JSON on standard
output.

oras-py can read the same file; it is not used for it, because its reader takes the last ``credsStore`` of several
files, knows no identity tokens, and hands a helper's error text to the log.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from buildkit.errors import MissingComponentError, UsageError

HELPER_TIMEOUT = 30.0
"""Seconds. A helper may ask a key ring; one that hangs must not hang a push."""

_DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_HUB_KEY = "https://index.docker.io/v1/"
_HELPER_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """Exactly one of three: a password (or personal token) for ``username``; an OAuth2 ``identity_token``; or a
    ``registry_token`` that is sent as it is. ``source`` says in words where it came from. ``repr`` shows no secret.
    """

    source: str
    username: str = ""
    password: str | None = field(default=None, repr=False)
    identity_token: str | None = field(default=None, repr=False)
    registry_token: str | None = field(default=None, repr=False)

    def basic(self) -> str | None:
        """The value of an ``Authorization: Basic`` header; None without a password."""
        if self.password is None:
            return None
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


class Credentials(Protocol):
    """Safe for use from several threads."""

    def lookup(self, registry: str) -> Credential | None:
        """For ``host[:port]``; None means anonymous. Raises BuildkitError where a source is broken."""
        ...


@dataclass(frozen=True, slots=True)
class FixedCredentials:
    """One credential for one registry: what came by ``--password-stdin`` or a test gives. Others are anonymous."""

    registry: str
    credential: Credential | None

    def lookup(self, registry: str) -> Credential | None:
        return self.credential if registry == self.registry else None


@dataclass(frozen=True, slots=True)
class Anonymous:
    def lookup(self, registry: str) -> Credential | None:
        del registry
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultCredentials:
    """The environment, then Docker's configuration. ``env_registry`` restricts the former to one ``host[:port]``: a
    token for the push target has no business at the registry of a base image."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    env_registry: str | None = None

    def lookup(self, registry: str) -> Credential | None:
        if self.env_registry in (None, registry):
            found = from_environment(self.environ)
            if found is not None:
                return found
        return from_docker_config(registry, self.environ)


def from_environment(environ: Mapping[str, str]) -> Credential | None:
    """``REGISTRY_USERNAME`` and ``REGISTRY_TOKEN``; one without the other is a mistake worth an error."""
    username, token = environ.get("REGISTRY_USERNAME", ""), environ.get("REGISTRY_TOKEN", "")
    if not username and not token:
        return None
    if not username or not token:
        missing = "REGISTRY_TOKEN" if username else "REGISTRY_USERNAME"
        raise UsageError(f"{missing} is not set, its counterpart is", hint="set both, or neither")
    return Credential(
        source="REGISTRY_USERNAME and REGISTRY_TOKEN", username=clean_secret(username), password=clean_secret(token)
    )


def clean_secret(text: str) -> str:
    """Without the line break that files and pipes add. UsageError for control characters within: they would split a
    header."""
    stripped = text.strip("\r\n")
    try:
        stripped.encode()
    except UnicodeEncodeError:
        # Without the cause: it holds the text.
        raise UsageError("a user name or token is not UTF-8 text", hint="is it the right file?") from None
    if any(ord(c) < 32 or ord(c) == 127 for c in stripped):
        raise UsageError("a user name or token contains control characters", hint="was it pasted with a line break?")
    return stripped


def read_secret(stream: TextIO) -> str:
    """A user's token from standard input, at most 64 KiB. UsageError for what is no text.

    Whether a byte that is not UTF-8 raises here or becomes a surrogate depends on the locale.
    """
    try:
        return clean_secret(stream.read(65536))
    except UnicodeDecodeError:
        # Without the cause: it holds the bytes.
        raise UsageError("a user name or token is not UTF-8 text", hint="is it the right file?") from None


def docker_config_path(environ: Mapping[str, str]) -> Path:
    folder = environ.get("DOCKER_CONFIG")
    return (Path(folder) if folder else Path(environ.get("HOME") or Path.home()) / ".docker") / "config.json"


def load_docker_config(path: Path) -> dict[str, Any]:
    """Empty where there is none. UsageError for a file that Docker could not read either."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        # Without the parser's message: it may quote the file, which holds secrets.
        raise UsageError(f"{path} is not valid JSON", hint="repair it, or log in again after moving it away") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not a JSON object")
    return document


def config_keys(registry: str) -> tuple[str, ...]:
    """The keys under which Docker and its kin may have stored this registry's login, best first."""
    if registry in _DOCKER_HUB:
        return (_HUB_KEY, "docker.io", "index.docker.io", "https://index.docker.io/v1")
    bases = (registry, f"https://{registry}", f"http://{registry}")
    return tuple(f"{base}{end}" for base in bases for end in ("", "/", "/v2/", "/v1/", "/v2", "/v1"))


def helper_for(config: Mapping[str, Any], registry: str) -> str | None:
    """The name of the credential helper that is responsible for ``registry``, if one is."""
    helpers = config.get("credHelpers")
    if isinstance(helpers, dict):
        for key in config_keys(registry):
            if isinstance(helpers.get(key), str):
                return str(helpers[key])
    store = config.get("credsStore")
    return store if isinstance(store, str) and store else None


def from_docker_config(registry: str, environ: Mapping[str, str]) -> Credential | None:
    path = docker_config_path(environ)
    config = load_docker_config(path)
    helper = helper_for(config, registry)
    if helper is not None:
        for key in (_HUB_KEY,) if registry in _DOCKER_HUB else (registry, f"https://{registry}"):
            answer = call_helper(helper, "get", key, environ=environ)
            if answer is not None:
                return _from_helper(answer, helper)
    auths = config.get("auths")
    for key in config_keys(registry) if isinstance(auths, dict) else ():
        entry = auths.get(key) if isinstance(auths, dict) else None
        if isinstance(entry, dict):
            found = _from_entry(entry, str(path), registry)
            if found is not None:
                return found
    return None


def call_helper(name: str, action: str, text: str, *, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Run ``docker-credential-NAME ACTION`` with ``text`` on standard input.

    None where the helper has nothing for that server. The secret passes through pipes only. The helper's own output
    stays out of every error: it may hold anything.
    """
    if not _HELPER_NAME.fullmatch(name):
        raise UsageError(f"credential helper {name[:100]!r} in Docker's configuration is not a program's name")
    program = f"docker-credential-{name}"
    try:
        done = subprocess.run(
            [program, action],
            input=text.encode(),
            capture_output=True,
            timeout=HELPER_TIMEOUT,
            check=False,
            env=dict(environ),
        )
    except FileNotFoundError as error:
        raise MissingComponentError(
            f"Docker's configuration names the credential helper {program}, which is not on PATH",
            hint="install it, or set REGISTRY_USERNAME and REGISTRY_TOKEN",
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"the credential helper {program} does not answer", hint="try it by hand") from error
    if done.returncode != 0:
        if action != "get" or b"credentials not found" in done.stdout + done.stderr:
            return None
        raise UsageError(
            f"the credential helper {program} failed with exit code {done.returncode}",
            hint="try it by hand, or set REGISTRY_USERNAME and REGISTRY_TOKEN",
        )
    if action != "get":
        return {}
    try:
        document = json.loads(done.stdout)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise UsageError(f"the credential helper {program} did not answer with a JSON object")
    return document


def _from_helper(answer: Mapping[str, Any], helper: str) -> Credential | None:
    username, secret = answer.get("Username"), answer.get("Secret")
    if not isinstance(username, str) or not isinstance(secret, str) or not secret:
        return None
    source = f"credential helper {helper}"
    if username == "<token>":
        # The helpers' convention for an OAuth2 refresh token.
        return Credential(source=source, identity_token=clean_secret(secret))
    return Credential(source=source, username=clean_secret(username), password=clean_secret(secret))


def _from_entry(entry: Mapping[str, Any], path: str, registry: str) -> Credential | None:
    identity, direct = entry.get("identitytoken"), entry.get("registrytoken")
    username, password = entry.get("username"), entry.get("password")
    auth = entry.get("auth")
    if isinstance(auth, str) and auth:
        try:
            decoded = base64.b64decode(auth, validate=False).decode().rstrip("\0")
        except (binascii.Error, ValueError):
            decoded = ""
        name, colon, rest = decoded.partition(":")
        if not colon:
            raise UsageError(f"{path}: auths of {registry} is not base64 of user:password", hint="invoke login again")
        username, password = name, rest
    if isinstance(identity, str) and identity:
        return Credential(
            source=path,
            username=username if isinstance(username, str) else "",
            identity_token=clean_secret(identity),
        )
    if isinstance(direct, str) and direct:
        return Credential(source=path, registry_token=clean_secret(direct))
    if isinstance(username, str) and isinstance(password, str) and password:
        return Credential(source=path, username=clean_secret(username), password=clean_secret(password))
    return None
