"""A clock that does not sleep and an observer that remembers."""

from __future__ import annotations

import threading
from typing import TypeVar

from buildkit.registry import CancelToken, Event

E = TypeVar("E", bound=Event)


class FakeClock:
    """Time passes only by ``sleep`` and ``advance``."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self._start = now
        self._elapsed = 0.0
        self._lock = threading.Lock()
        self.slept: list[float] = []

    def monotonic(self) -> float:
        with self._lock:
            return self._elapsed

    def now(self) -> float:
        return self._start + self.monotonic()

    def sleep(self, seconds: float, cancel: CancelToken) -> None:
        del cancel
        self.advance(seconds)
        with self._lock:
            self.slept.append(seconds)

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        with self._lock:
            self._elapsed += seconds


class Recorder:
    """All events, in the order in which they came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.events: list[Event] = []

    def notify(self, event: Event, /) -> None:
        with self._lock:
            self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        with self._lock:
            return [event for event in self.events if isinstance(event, kind)]
