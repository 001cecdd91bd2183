"""How far each unfinished upload has come, on disk, so that a killed push goes on where the registry stands.

One small JSON file per (registry, repository, key), replaced atomically after each acknowledged chunk and removed at
the end. The key names the blob's *content*: its digest, or what determines its bytes (diff_id and codec) while a
compressor still writes it. If that promise is broken, the closing digest check finds it, and the blob starts again.

An upload holds the entry's file lock. The lock dies with its process, so a killed push blocks nobody. Lock files
go with their entries; the one that stays is ``gate.lock``, which is held for a moment to take a lock and to remove its
file: otherwise one process could lock a file that another has just removed, and a third its successor. Entries that
nobody came back for are removed after ``STALE`` seconds, when no registry knows their sessions any more. A Location may
carry a registry's state token for this one session; it is no credential, and the files are readable by their owner
alone all the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from buildkit.disk import flush, write_atomic
from buildkit.registry.state import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """``offset`` bytes were acknowledged for the session at ``location``, sent in chunks of ``chunk`` bytes."""

    location: str
    offset: int
    chunk: int


STALE = 30 * 86400.0
"""Seconds. Registries forget unfinished sessions after a day (Gitea) or a week (distribution)."""

_GATE_TIMEOUT = 10.0
"""Seconds. It is held for a few system calls; whoever holds it longer is stopped, or the file system hangs."""


def _lock_of(path: Path) -> str:
    return f"{path}.lock"


def _gate_of(folder: Path) -> FileLock:
    return FileLock(str(folder / "gate.lock"), timeout=_GATE_TIMEOUT)


def _is_free(path: Path) -> bool:
    """Whether no process owns the entry. To be called with the gate held, and good for as long."""
    lock = FileLock(_lock_of(path))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    lock.release()
    return True


def _is_stale(noted: object, now: float) -> bool:
    """By the entry's own time; what carries none was not written here."""
    try:
        return now - datetime.fromisoformat(str(noted)).timestamp() > STALE
    except (ValueError, OverflowError):
        return True


class _Flusher:
    """Flushes entries to the disk from a thread of its own, each at most once for all that was written meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: set[Path] = set()
        self._running = False

    def ask(self, path: Path) -> None:
        with self._lock:
            self._pending.add(path)
            if not self._running:
                self._running = True
                # A daemon: a program that ends does not wait for a slow disk.
                threading.Thread(target=self._run, name="journal", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._running = False
                    return
                path = self._pending.pop()
            # Gone, because the upload ended; or a disk that refuses, which costs the resume after a power failure.
            with contextlib.suppress(OSError):
                flush(path)


_flusher = _Flusher()


class JournalEntry:
    """One upload's file and lock; not shared between threads."""

    def __init__(self, path: Path, about: dict[str, str]) -> None:
        self._path = path
        self._about = about
        self._lock = FileLock(_lock_of(path))
        self._gate = _gate_of(path.parent)

    def try_lock(self) -> bool:
        """Whether this process (and thread) now owns the upload; False while another does. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._gate:
                self._lock.acquire(timeout=0)
        except Timeout:
            return False
        return True

    def unlock(self) -> None:
        """Idempotent. The lock's file goes, too, where nothing is left to resume."""
        try:
            with self._gate:
                self._lock.release()
                if not self._path.exists():
                    # Whoever wants it now waits at the gate, and makes it anew.
                    Path(_lock_of(self._path)).unlink(missing_ok=True)
        except (Timeout, OSError):
            # A file too many harms nobody; the upload has ended either way.
            self._lock.release()

    def load(self) -> ResumePoint | None:
        """What the last run left; None where there is nothing usable."""
        entry = read_json(self._path)
        location, offset, chunk = entry.get("location"), entry.get("offset"), entry.get("chunk")
        if any(entry.get(name) != value for name, value in self._about.items()):
            return None
        if not isinstance(location, str) or not isinstance(offset, int) or not isinstance(chunk, int):
            return None
        return ResumePoint(location=location, offset=offset, chunk=chunk) if offset > 0 and chunk > 1 else None

    def save(self, point: ResumePoint, *, digest: str | None, now: float) -> None:
        """Survives this process when it returns, and a power failure soon after. Raises OSError.

        Not at once: beside gigabytes on their way to the same disk an fsync takes longer than a chunk.
        """
        entry = {
            **self._about,
            "digest": digest,
            "location": point.location,
            "offset": point.offset,
            "chunk": point.chunk,
            "time": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
        }
        write_atomic(self._path, json.dumps(entry, indent=1).encode(), durable=False, parents=True)
        _flusher.ask(self._path)

    def clear(self) -> None:
        """Nothing is left to resume. Raises OSError."""
        self._path.unlink(missing_ok=True)


class Journal:
    """The entries below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "uploads"

    def prune(self, now: float) -> None:
        """Remove what nobody came back for, and locks without an entry. ``now`` is Unix time. Raises OSError."""
        if not self._folder.is_dir():
            return
        with _gate_of(self._folder):
            for path in self._folder.glob("*.json"):
                if _is_stale(read_json(path).get("time"), now) and _is_free(path):
                    path.unlink(missing_ok=True)
            for lock in self._folder.glob("*.json.lock"):
                path = lock.with_suffix("")
                if not path.exists() and _is_free(path):
                    lock.unlink(missing_ok=True)

    def entry(self, *, registry: str, repository: str, key: str) -> JournalEntry:
        about = {"registry": registry, "repository": repository, "key": key}
        name = hashlib.sha256("\n".join(about.values()).encode()).hexdigest()[:40]
        return JournalEntry(self._folder / f"{name}.json", about)
