"""``login`` and ``logout``: a registry's credential, where Docker keeps it."""

from __future__ import annotations

import sys
from typing import Any

from buildkit.cli import command, emit_json
from buildkit.errors import UsageError
from buildkit.registry.credentials import read_secret
from buildkit.registry.login import login as store
from buildkit.registry.login import logout as forget
from buildkit.tasks import flags


@command(
    positional=["registry"],
    help={
        "registry": "HOST[:PORT]",
        "username": "user at the registry",
        "password-stdin": "read the password or token from standard input (it is never an argument)",
        "no-verify": "store it without trying it at the registry",
        "plain-http": flags.REGISTRY["plain-http"],
        "insecure": flags.REGISTRY["insecure"],
        "ca-bundle": flags.REGISTRY["ca-bundle"],
    },
)
def login(
    context: Any,
    registry: str = "",
    username: str = "",
    password_stdin: bool = False,
    no_verify: bool = False,
    plain_http: bool = False,
    insecure: str = "",
    ca_bundle: str = "",
    json: bool = False,
) -> None:
    """Try a credential at a registry and store it in Docker's configuration, or in its credential helper."""
    if not registry or not username:
        raise UsageError("login needs a registry and --username", hint="invoke login HOST --username NAME < token-file")
    if sys.stdin.isatty() and not password_stdin:
        import getpass

        password = getpass.getpass(f"Password or token of {username} at {registry}: ")
    elif password_stdin:
        password = read_secret(sys.stdin)
    else:
        raise UsageError("the password or token comes by --password-stdin", hint="… --password-stdin < token-file")
    options = flags.registry_options(None, plain_http=plain_http, insecure=insecure, ca_bundle=ca_bundle)
    result = store(registry, username=username, password=password, options=options, verify=not no_verify)
    if json:
        emit_json(
            {
                "ok": True,
                "registry": result.registry,
                "username": result.username,
                "stored_in": result.stored_in,
                "verified": result.verified,
            }
        )
        return
    if result.verified:
        what = "logged in"
    elif no_verify:
        what = "stored without trying it"
    else:
        what = "stored, but not tried: the registry asked for no credential"
    print(f"{what}: {result.username} at {result.registry}, in {result.stored_in}")
    if result.plain:
        print("note: it is readable there for whoever can read the file; a credential helper keeps it elsewhere")


@command(positional=["registry"], help={"registry": "HOST[:PORT]"})
def logout(context: Any, registry: str = "", json: bool = False) -> None:
    """Remove a registry's credential from Docker's configuration and its credential helper."""
    if not registry:
        raise UsageError("logout needs a registry", hint="invoke logout HOST")
    removed = forget(registry)
    if json:
        emit_json({"ok": True, "registry": registry, "removed": removed})
    else:
        print(f"logged out of {registry}" if removed else f"there was no login for {registry}")
