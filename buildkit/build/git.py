"""What git knows about the files that are built: commit, time, origin, and whether they differ from the commit."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

_SECONDS = 30
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?", re.ASCII)
_SCP_LIKE = re.compile(r"(?:[^@/\s]+@)?(?P<host>[A-Za-z0-9.-]+):(?P<path>[^/\s:][^\s]*)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GitFacts:
    """``revision`` is the full commit, ``time`` that of the committer in seconds after 1970, ``url`` without
    credentials. All are None outside a repository; ``dirty`` is about the given paths only."""

    revision: str | None = None
    time: int | None = None
    dirty: bool = False
    url: str | None = None

    @property
    def created(self) -> str | None:
        """``time`` as RFC 3339 in UTC."""
        return datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if self.time is not None else None

    @property
    def date(self) -> str | None:
        """``time`` as a date in UTC, like 20260131."""
        return datetime.fromtimestamp(self.time, UTC).strftime("%Y%m%d") if self.time is not None else None


def facts(paths: Sequence[Path], *, environ: Mapping[str, str] = os.environ) -> GitFacts:
    """About ``paths``, which lie in one work tree. Never fails: what cannot be found out is None.

    In CI without a work tree the commit and the origin come from ``GITHUB_SHA`` and its neighbours, which Gitea's
    runner sets too.
    """
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    shown = _git(folder, "log", "-1", "--format=%H %ct")
    words = shown.split() if shown else []
    if len(words) != 2 or not _COMMIT.fullmatch(words[0]) or not words[1].isdigit():
        revision = environ.get("GITHUB_SHA", "")
        return GitFacts(revision=revision if _COMMIT.fullmatch(revision) else None, url=_ci_url(environ))
    status = _git(folder, "status", "--porcelain", "--untracked-files=normal", "--", *(str(path) for path in paths))
    origin = _git(folder, "remote", "get-url", "origin")
    return GitFacts(
        revision=words[0],
        time=int(words[1]),
        dirty=status is None or bool(status.strip()),
        url=public_url(origin.strip()) if origin else _ci_url(environ),
    )


def public_url(origin: str) -> str | None:
    """A remote's address as it may stand in a label: without credentials; None for a path on this machine."""
    if "://" not in origin:
        scp = _SCP_LIKE.fullmatch(origin)
        return f"ssh://{scp['host']}/{scp['path']}" if scp else None
    try:
        url = urlsplit(origin)
        port = url.port
    except ValueError:
        return None
    if url.scheme not in ("https", "http", "ssh", "git") or not url.hostname:
        return None
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return urlunsplit((url.scheme, f"{host}:{port}" if port else host, url.path, "", ""))


def _ci_url(environ: Mapping[str, str]) -> str | None:
    server, repository = environ.get("GITHUB_SERVER_URL"), environ.get("GITHUB_REPOSITORY")
    return public_url(f"{server.rstrip('/')}/{repository}") if server and repository else None


def is_ancestor(older: str, newer: str, folder: Path) -> bool | None:
    """Whether commit ``older`` is an ancestor of ``newer`` (or the same); None where the repository around ``folder``
    does not know both. A shallow clone may say False of an ancestor, as it lacks commits between: only True is sure.
    """
    if not _COMMIT.fullmatch(older) or not _COMMIT.fullmatch(newer):
        return None
    done = _run(folder, "merge-base", "--is-ancestor", older, newer)
    return {0: True, 1: False}.get(done.returncode) if done is not None else None


def _git(folder: Path, *arguments: str) -> str | None:
    done = _run(folder, *arguments)
    return done.stdout.decode("utf-8", "replace") if done is not None and done.returncode == 0 else None


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes] | None:
    # safe.directory: CI often checks out as another user. fsmonitor: a configured program would be run.
    settings = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false")
    try:
        return subprocess.run(
            ["git", *settings, "-C", str(folder), *arguments],
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS,
            env=os.environ | {"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
