"""``login`` and ``logout``: credentials into Docker's configuration, where Docker and this package look for them.

A credential helper that is configured for the registry gets the secret, through its standard input; without one it goes
into ``auths`` of ``config.json``, base64 as Docker writes it, readable by its owner alone. The file is replaced as a
whole: no crash leaves half a configuration, and keys that this package does not know stay as they are.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from buildkit.disk import write_atomic
from buildkit.errors import StorageError, UsageError
from buildkit.model import is_registry_host
from buildkit.registry.client import RegistryClient
from buildkit.registry.clock import Clock
from buildkit.registry.credentials import (
    Credential,
    FixedCredentials,
    call_helper,
    clean_secret,
    config_keys,
    docker_config_path,
    helper_for,
    load_docker_config,
)
from buildkit.registry.options import RegistryOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginResult:
    """``stored_in`` is the file or the helper; ``plain`` warns that the secret is readable in that file.

    ``verified``: the registry asked for the credential and took it. Not so where it was not to be tried, and where the
    registry lets everyone in: sending it anyway would prove nothing, as such a registry takes any.
    """

    registry: str
    username: str
    stored_in: str
    plain: bool
    verified: bool


def login(
    registry: str,
    *,
    username: str,
    password: str,
    options: RegistryOptions | None = None,
    verify: bool = True,
    environ: Mapping[str, str] | None = None,
    clock: Clock | None = None,
) -> LoginResult:
    """Try the credential at the registry (unless ``verify`` is off), then store it.

    Raises UsageError for an empty or unusable secret, AuthError where the registry refuses it (nothing is stored then),
    UnreachableError, StorageError, MissingComponentError (helper not installed).
    """
    environ = os.environ if environ is None else environ
    _check_host(registry)
    username, password = clean_secret(username), clean_secret(password)
    if not username or not password or ":" in username:
        raise UsageError(
            "a login needs a user name (without a colon) and a password or token",
            hint="give the token by --password-stdin",
        )
    credential = Credential(source="login", username=username, password=password)
    verified = False
    if verify:
        fixed = FixedCredentials(registry, credential)
        with RegistryClient(registry, credentials=fixed, options=options, clock=clock) as client:
            verified = client.ping().authenticated
    key = config_keys(registry)[0]
    path = docker_config_path(environ)
    helper = helper_for(load_docker_config(path), registry)
    if helper is not None:
        secret = json.dumps({"ServerURL": key, "Username": username, "Secret": password})
        if call_helper(helper, "store", secret, environ=environ) is None:
            raise StorageError(f"the credential helper docker-credential-{helper} did not store the login")
        _edit(path, lambda config: config.setdefault("auths", {}).__setitem__(key, {}))
        return LoginResult(
            registry=registry,
            username=username,
            stored_in=f"credential helper {helper}",
            plain=False,
            verified=verified,
        )
    encoded = base64.b64encode(f"{username}:{password}".encode()).decode()
    _edit(path, lambda config: config.setdefault("auths", {}).__setitem__(key, {"auth": encoded}))
    return LoginResult(registry=registry, username=username, stored_in=str(path), plain=True, verified=verified)


def logout(registry: str, *, environ: Mapping[str, str] | None = None) -> bool:
    """Remove the registry's login from Docker's configuration and helper; False where there was none."""
    environ = os.environ if environ is None else environ
    _check_host(registry)
    path = docker_config_path(environ)
    config = load_docker_config(path)
    helper = helper_for(config, registry)
    keys = config_keys(registry)
    erased = helper is not None and call_helper(helper, "erase", keys[0], environ=environ) is not None
    auths = config.get("auths")
    known = [key for key in keys if isinstance(auths, dict) and key in auths]
    if known:
        _edit(path, lambda config: [config["auths"].pop(key, None) for key in known])
    return bool(known) or erased


def _check_host(registry: str) -> None:
    if not is_registry_host(registry):
        # What stands before an @ may be a password: not shown.
        shown = "what is given" if "@" in registry else repr(registry[:100])
        raise UsageError(f"{shown} is not a registry", hint="name it like git.example.org or localhost:5000")


def _edit(path: Path, change: Any) -> None:
    """Read, change, replace, under a lock: two logins at once lose nothing."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A link (a configuration kept elsewhere) stays a link; its target is replaced.
        target = path.resolve()
        with FileLock(f"{target}.buildkit.lock", timeout=10):
            config = load_docker_config(target)
            if not isinstance(config.setdefault("auths", {}), dict):
                raise UsageError(f"{path}: auths is not an object")
            change(config)
            write_atomic(target, json.dumps(config, indent="\t").encode() + b"\n", parents=True)
    except (OSError, Timeout) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is locked or not writable"
        raise StorageError(f"{path}: {reason}") from error
