"""How long an address is given that has never answered. No I/O.

A registry that fell silent in the midst of a push comes back: a restart, a network that broke for a minute. An address
that never answered is most likely wrong, and whoever mistyped it wants to know in seconds.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from buildkit.registry.location import Origin
from buildkit.registry.steps import Failure

GREETING_TIMEOUT = 30.0
"""Seconds until the answer to a first request."""

_PATIENCE = 3.0
_COSTS = {"timeout": 1.5}
"""Three quick failures, or two time-outs, which take about a minute, end the first contact."""


class Contacts:
    """Which hosts have answered; thread-safe. Each thread's attempts count for themselves: four uploads that start
    together and fail together have tried once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._met: set[Origin] = set()
        self._spent: dict[tuple[Origin, int], float] = {}

    def is_met(self, origin: Origin) -> bool:
        with self._lock:
            return origin in self._met

    def answered(self, origin: Origin) -> None:
        with self._lock:
            self._met.add(origin)

    def judged(self, origin: Origin, failure: Failure) -> Failure:
        """The failure, final where it ends a first contact; no longer final where the host is known to be right."""
        with self._lock:
            if origin in self._met:
                # A certificate that was good a minute ago: another network's portal has caught the connection.
                return replace(failure, final=False) if failure.final and failure.kind == "tls" else failure
            key = (origin, threading.get_ident())
            spent = self._spent.pop(key, 0.0) + _COSTS.get(failure.kind, 1.0)
            if spent < _PATIENCE and not failure.final:
                self._spent[key] = spent
                return failure
            return replace(failure, final=True)
