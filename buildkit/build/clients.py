"""Which builders this machine has: clients of Docker, and what each of them can do.

The first ``docker`` on PATH need not be the one that can build: a newer client without the buildx plugin has no
BuildKit at all, while a distribution's older one has it built in (before 23.0, says that version's release note).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from buildkit.build.plan import Backend
from buildkit.errors import MissingComponentError, UsageError

_SECONDS = 30
_USUAL = ("/usr/bin", "/usr/local/bin", "/usr/libexec/docker", "/snap/bin")
GET_BUILDX = (
    "install the buildx plugin: package docker-buildx on Debian 13 and Ubuntu, docker-buildx-plugin in Docker's own "
    "repository, or the binary from github.com/docker/buildx/releases as ~/.docker/cli-plugins/docker-buildx"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A Docker client. ``buildx`` is the plugin's version, where it has one; ``version`` its own, like (20, 10)."""

    path: str
    version: tuple[int, int] | None
    buildx: str | None

    @property
    def has_buildkit(self) -> bool:
        """Whether it talks to the engine's BuildKit without a plugin."""
        return self.version is not None and (18, 9) <= self.version < (23, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The way to build: by ``client``, or by the engine's classic builder where that is None."""

    backend: Backend
    client: Client | None
    description: str
    reason: str = ""


def find_clients(environ: Mapping[str, str] = os.environ) -> tuple[Client, ...]:
    """Every ``docker`` on PATH and in the usual folders, in that order, each once."""
    return tuple(_probe(path, environ) for path in _candidates(environ))


def choose(clients: tuple[Client, ...], *, backend: Backend, builder: str | None, needs: str | None) -> Chosen:
    """buildx, else a client with BuildKit in it, else the classic builder. Pure.

    ``needs`` says what of the recipe only BuildKit can do. Raises MissingComponentError where nothing here fits, and
    UsageError for options that exclude each other.
    """
    buildx = next((client for client in clients if client.buildx), None)
    built_in = next((client for client in clients if client.has_buildkit), None)
    if builder is not None:
        if backend not in ("auto", "buildx"):
            raise UsageError(f"--builder {builder} is a buildx builder, and --backend {backend} is not buildx")
        if buildx is None:
            raise MissingComponentError(f"builder {builder!r} needs docker buildx, which is not here", hint=GET_BUILDX)
        return _buildx(buildx)
    if backend == "buildx" or (backend == "auto" and buildx is not None):
        if buildx is None:
            raise MissingComponentError("docker buildx is not here", hint=GET_BUILDX)
        return _buildx(buildx)
    if backend == "docker" or (backend == "auto" and built_in is not None):
        if built_in is None:
            raise MissingComponentError("no Docker client with BuildKit built in is here", hint=GET_BUILDX)
        version = ".".join(str(part) for part in built_in.version or ())
        return Chosen(
            backend="docker",
            client=built_in,
            description=f"BuildKit by docker {version} ({built_in.path})",
            reason="no buildx plugin here",
        )
    if needs is not None and backend == "classic":
        raise UsageError(f"this recipe needs BuildKit ({needs}), and the classic builder was asked for")
    if needs is not None:
        raise MissingComponentError(
            f"this recipe needs BuildKit ({needs}), and no Docker client here has it", hint=GET_BUILDX
        )
    return Chosen(
        backend="classic",
        client=None,
        description="the engine's classic builder",
        reason="asked for" if backend == "classic" else "no Docker client with BuildKit here",
    )


def _buildx(client: Client) -> Chosen:
    return Chosen(backend="buildx", client=client, description=f"buildx {client.buildx} ({client.path})")


def _candidates(environ: Mapping[str, str]) -> Iterator[str]:
    seen: set[str] = set()
    for folder in (*environ.get("PATH", "").split(os.pathsep), *_USUAL):
        path = Path(folder or ".") / "docker"
        if not path.is_file() or not os.access(path, os.X_OK):
            continue
        real = os.path.realpath(path)
        if real not in seen:
            seen.add(real)
            yield str(path.absolute())


def _probe(path: str, environ: Mapping[str, str]) -> Client:
    version = re.match(r"(\d+)\.(\d+)", _ask(environ, path, "version", "--format", "{{.Client.Version}}"))
    buildx = re.search(r"\bv?(\d+\.\d+\S*)", _ask(environ, path, "buildx", "version"))
    return Client(
        path=path,
        version=(int(version[1]), int(version[2])) if version else None,
        buildx=buildx[1] if buildx else None,
    )


def _ask(environ: Mapping[str, str], *arguments: str) -> str:
    """What a question prints. ``docker version`` prints the client's version even where no engine answers."""
    try:
        answer = subprocess.run(
            arguments, check=False, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS, env=dict(environ)
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    text = answer.stdout.decode("utf-8", "replace")
    return text if answer.returncode == 0 or "version" in arguments[1:2] else ""
