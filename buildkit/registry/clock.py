"""Time and the wish to stop, as values that are passed in: nothing else in this package sleeps or asks for the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from buildkit.errors import CancelledError


class CancelToken:
    """Set once, from any thread or a signal handler; everything that waits with it wakes up.

    ``on_cancel`` callbacks run in the thread that calls ``cancel``, and must not block.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Ask to stop. Idempotent."""
        self._event.set()
        for callback in tuple(self._callbacks):
            callback()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raises CancelledError once ``cancel`` was called."""
        if self._event.is_set():
            raise CancelledError("stopped", hint="run the same command again: it goes on from what the registry holds")

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds``; True as soon as (and if) ``cancel`` was called."""
        return self._event.wait(seconds)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` at ``cancel``; at once where that has happened already."""
        self._callbacks.append(callback)
        if self._event.is_set():
            callback()


class Clock(Protocol):
    """Safe for use from several threads."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; never goes back."""
        ...

    def now(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        ...

    def sleep(self, seconds: float, cancel: CancelToken) -> None:
        """Return after ``seconds``, or earlier when ``cancel`` is set."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> float:
        return time.time()

    def sleep(self, seconds: float, cancel: CancelToken) -> None:
        cancel.wait(seconds)
