"""Body limits learned from refusals, per host, with their date: what one push found out, the next one knows."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock

from buildkit.disk import write_atomic
from buildkit.registry.state import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedLimit:
    """``accepted`` bytes went through; ``refused`` bytes did not; ``at`` is Unix time."""

    accepted: int
    refused: int
    at: float

    def to_json(self) -> dict[str, object]:
        return {
            "accepted": self.accepted,
            "refused": self.refused,
            "at": datetime.fromtimestamp(self.at, UTC).isoformat(timespec="seconds"),
        }


class LimitStore:
    """Thread-safe; processes share the file ``limits.json`` in ``folder``. Without a folder it lives in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / "limits.json" if folder else None
        self._lock = threading.Lock()
        self._known: dict[str, LearnedLimit] = _load(self._path) if self._path else {}

    def get(self, host: str) -> LearnedLimit | None:
        with self._lock:
            return self._known.get(host)

    def chunk(self, host: str, wanted: int, *, now: float, probe_after: float) -> int:
        """The chunk size to begin with: at most ``wanted``, at most what is known to pass.

        A limit older than ``probe_after`` seconds is probed: edges change, and twice the accepted size (if wanted)
        costs one refusal at most.
        """
        known = self.get(host)
        if known is None:
            return wanted
        if now - known.at >= probe_after:
            return min(wanted, max(known.accepted * 2, known.accepted))
        return min(wanted, known.accepted)

    def learn(self, host: str, *, accepted: int, refused: int, now: float) -> LearnedLimit:
        """Remember; of what several uploads learn at once the smaller stays. Raises OSError if it cannot be written."""
        with self._lock:
            limit = LearnedLimit(accepted=accepted, refused=refused, at=now)
            self._known[host] = limit
            self._save(host, limit)
            return limit

    def forget(self, host: str) -> None:
        """A chunk above the remembered limit went through: the limit is gone."""
        with self._lock:
            if self._known.pop(host, None) is not None:
                self._save(host, None)

    def _save(self, host: str, limit: LearnedLimit | None) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self._path}.lock", timeout=10):
            merged = _load(self._path)
            merged.pop(host, None)
            if limit is not None:
                merged[host] = limit
            document = {name: value.to_json() for name, value in sorted(merged.items())}
            write_atomic(self._path, json.dumps({"version": 1, "limits": document}, indent=1).encode(), parents=True)


def _load(path: Path) -> dict[str, LearnedLimit]:
    entries = read_json(path).get("limits")
    known: dict[str, LearnedLimit] = {}
    for host, entry in entries.items() if isinstance(entries, dict) else ():
        try:
            accepted, refused = int(entry["accepted"]), int(entry["refused"])
            at = datetime.fromisoformat(entry["at"]).timestamp()
        except (TypeError, KeyError, ValueError, OverflowError):
            continue
        if accepted >= 2 and refused > 0:
            known[host] = LearnedLimit(accepted=accepted, refused=refused, at=at)
    return known
