"""What the stack's programs are told: options, configuration files and arguments, as pure functions.

Sources: distribution's ``docs/configuration.md`` (2.8), nginx's ``ngx_http_core_module`` and ``ngx_http_proxy_module``
references, ``dockerd --help``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from buildkit.errors import UsageError

LOOPBACK = "127.0.0.1"
EDGE_LIMIT = 100 * 2**20
"""Bytes: nginx's ``client_max_body_size 100m``, the body limit of an edge of the 100 MB class."""

EngineChoice = Literal["auto", "own", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """A user of the registry, for basic authentication. The password never shows in a representation."""

    user: str
    password: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Credentials:
        """From ``user:password``. Raises UsageError, without showing the text."""
        user, colon, password = text.partition(":")
        if not (colon and user and password) or any(c.isspace() for c in user) or "\n" in text or "\0" in text:
            raise UsageError("the registry's credentials are not user:password")
        if len(password.encode()) > 72:
            raise UsageError("the registry's password is longer than the 72 bytes that bcrypt reads")
        return cls(user=user, password=password)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """How the local stack is to look.

    ``edge_limit`` is the largest request body in bytes that the edge lets through. ``engine``: ``auto`` uses the one
    that answers and starts one where none does, ``own`` always starts one, ``none`` leaves it out. A port of 0 means
    the port of the last time if it is free, else any free port. ``auth`` asks every client of the registry for these
    credentials. ``builder`` includes the programs that ``buildkit build`` needs for recipes with a debootstrap base.
    """

    edge_limit: int = EDGE_LIMIT
    engine: EngineChoice = "auto"
    registry_port: int = 0
    edge_port: int = 0
    auth: Credentials | None = None
    builder: bool = False

    def __post_init__(self) -> None:
        if self.edge_limit < 1024:
            raise UsageError(
                f"an edge limit of {self.edge_limit} bytes is too small for any registry", hint="at least 1KiB"
            )
        if self.engine not in ("auto", "own", "none"):
            raise UsageError(f"engine {self.engine!r} is not one of auto, own, none")
        for port in (self.registry_port, self.edge_port):
            if not 0 <= port < 65536:
                raise UsageError(f"{port} is not a port number", hint="1 to 65535, or 0 for any free one")


def registry_config(*, port: int, storage: Path, secret: str, htpasswd: Path | None) -> str:
    """The registry's configuration. JSON is YAML, and needs no rules for quoting.

    ``secret`` signs the state in upload URLs; it is kept, so that uploads go on after a restart.
    """
    config: dict[str, Any] = {
        "version": "0.1",
        "log": {"level": "info", "formatter": "text", "accesslog": {"disabled": False}},
        "storage": {
            "filesystem": {"rootdirectory": str(storage)},
            "delete": {"enabled": True},
            "cache": {"blobdescriptor": "inmemory"},
        },
        "http": {"addr": f"{LOOPBACK}:{port}", "secret": secret, "headers": {"X-Content-Type-Options": ["nosniff"]}},
    }
    if htpasswd is not None:
        config["auth"] = {"htpasswd": {"realm": "buildkit stack", "path": str(htpasswd)}}
    return json.dumps(config, indent=2) + "\n"


def nginx_config(
    *, port: int, upstream: int, limit: int, folder: Path, user: tuple[str, str] | None, pid_file: Path
) -> str:
    """An edge in front of the registry on port ``upstream``, refusing bodies of more than ``limit`` bytes with a 413.

    Like the edges that it stands for, it takes a whole request body before it passes it on. ``user`` is the user and
    group of the workers where nginx is started by root: the same as ours, so that they may write to ``folder``.
    """
    temporary = "\n".join(
        f"    {name}_temp_path {_quoted(folder / name)};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""\
daemon off;
{f"user {user[0]} {user[1]};" if user else "# not started by root: the workers run as the same user"}
worker_processes 2;
pid {_quoted(pid_file)};
error_log stderr warn;
events {{ worker_connections 512; }}
http {{
{temporary}
    access_log off;
    server_tokens off;
    client_max_body_size {limit};
    client_body_timeout 300s;
    keepalive_timeout 75s;
    upstream registry {{ server {LOOPBACK}:{upstream}; keepalive 16; }}
    server {{
        listen {LOOPBACK}:{port};
        location / {{
            proxy_pass http://registry;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
            proxy_set_header X-Real-IP $remote_addr;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Host $http_host;
            proxy_set_header X-Forwarded-Proto $scheme;
            proxy_request_buffering on;
            proxy_buffering off;
            proxy_read_timeout 900s;
            proxy_send_timeout 900s;
        }}
    }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVariant:
    """One way to start the engine; ``reason`` says why one other than the plain way is tried."""

    arguments: tuple[str, ...] = ()
    reason: str = ""


def engine_variants(*, other_engine: bool) -> tuple[EngineVariant, ...]:
    """The ways to start the engine, best first; the next one is for when the one before ends at once.

    Two engines on one machine would share the bridge ``docker0``, and the second would flush the first one's packet
    filter rules: beside another engine only the last way is safe.
    """
    bare = ("--bridge=none", "--iptables=false")
    if other_engine:
        return (EngineVariant(arguments=bare, reason="another engine runs here and owns the bridge network"),)
    return (
        EngineVariant(),
        EngineVariant(arguments=("--iptables=false",), reason="packet filter rules cannot be set here"),
        EngineVariant(arguments=bare, reason="no bridge network can be made here; use --network host"),
    )


def engine_arguments(
    program: str, *, socket: Path, data: Path, runtime: Path, variant: EngineVariant
) -> tuple[str, ...]:
    """The command line of dockerd."""
    return (
        program,
        f"--host=unix://{socket}",
        f"--data-root={data}",
        f"--exec-root={runtime / 'exec'}",
        f"--pidfile={runtime / 'dockerd.pid'}",
        *variant.arguments,
    )


def fingerprint(arguments: Sequence[str], *files: str) -> str:
    """Tells whether a running program was started with these arguments and configuration files."""
    return hashlib.sha256(json.dumps([list(arguments), list(files)]).encode()).hexdigest()


def _quoted(path: Path) -> str:
    text = str(path)
    if any(c in text for c in "\n\r\0$"):  # nginx expands $variables even between quotes
        raise UsageError(f"{text!r} cannot be a data folder for the edge", hint="choose a path without $")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
