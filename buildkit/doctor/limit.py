"""Measures how large a request body may be: throw-away uploads, each with one chunk, each cancelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from buildkit.doctor.search import Interval, next_size
from buildkit.doctor.seen import Exchange, LimitSeen, Try
from buildkit.doctor.uploads import REQUEST_SECONDS, Session, Uploads
from buildkit.errors import AuthError, BuildkitError
from buildkit.registry.answers import error_for, is_html, is_size_refusal, reason
from buildkit.registry.clock import Clock
from buildkit.registry.steps import Answer, is_retryable
from buildkit.registry.upload import STORED
from buildkit.units import format_duration, format_size

SECONDS = 300.0
"""The whole measurement. A body that would not be through in the rest of it, by the rate so far, is not begun."""
_LEAST_SECONDS = 30.0
"""What a body is given at least."""
_MOST_TRIES = 40

Say = Callable[[str], None]
_Outcome = Literal["accepted", "refused", "broke"]


def measure(uploads: Uploads, *, accepted: int, wanted: int, largest: int | None, clock: Clock, say: Say) -> LimitSeen:
    """``accepted`` bytes are known to go through; ``wanted`` is the body that pushes use; ``largest`` what the registry
    itself says that it takes."""
    return _Measurement(uploads, wanted, largest, clock, say).run(accepted)


class _Measurement:
    def __init__(self, uploads: Uploads, wanted: int, largest: int | None, clock: Clock, say: Say) -> None:
        self._uploads, self._wanted, self._largest, self._clock, self._say = uploads, wanted, largest, clock, say
        self._ends = clock.monotonic() + SECONDS
        self._tries: list[Try] = []
        self._by: Exchange | None = None
        self._broke = False
        self._rate = 0.0

    def run(self, accepted: int) -> LimitSeen:
        known = Interval(accepted=accepted)
        stopped: Literal["settled", "budget", "time", "registry's maximum", "error"] = "budget"
        error: BuildkitError | None = None
        while len(self._tries) < _MOST_TRIES:
            size = next_size(known, left=self._uploads.budget.left, wanted=self._wanted, largest=self._largest)
            if size is None:
                break
            left = self._ends - self._clock.monotonic()
            if left < _LEAST_SECONDS or (self._rate and size / self._rate > left):
                stopped = "time"
                break
            try:
                outcome, exchange = self._try(size, left)
                if outcome == "broke" and self._uploads.budget.left >= size:
                    # Once is an accident.
                    outcome, exchange = self._try(size, max(self._ends - self._clock.monotonic(), _LEAST_SECONDS))
            except BuildkitError as failure:
                stopped, error = "error", failure
                break
            if outcome == "accepted":
                known = known.with_accepted(size)
                if known.refused is None:
                    self._by, self._broke = None, False
                continue
            if size <= known.accepted or (outcome == "broke" and size < 100_000):
                # What went through before does not now: this is not about sizes.
                stopped, self._by, self._broke = "error", exchange, True
                break
            known = known.with_refused(size)
            self._by, self._broke = exchange, outcome == "broke"
        if known.settled and error is None and stopped != "error":
            stopped = "settled"
        elif stopped == "budget" and self._largest is not None and known.accepted >= self._largest:
            stopped = "registry's maximum"
        return LimitSeen(
            known=known, tries=tuple(self._tries), stopped=stopped, by=self._by, broke=self._broke, error=error
        )

    def _try(self, size: int, seconds: float) -> tuple[_Outcome, Exchange | None]:
        """One body in a session of its own. Raises where no session can be had any more."""
        opened = self._uploads.open()
        if not isinstance(opened, Session):
            raise error_for(opened.request, opened.reply)
        before = self._uploads.budget.spent
        started = self._clock.monotonic()
        exchange = self._uploads.patch(opened, size, start=0, seconds=max(seconds, REQUEST_SECONDS))
        took = self._clock.monotonic() - started
        self._uploads.cancel(opened)
        sent = self._uploads.budget.spent - before
        outcome = _outcome(exchange, size)
        self._tries.append(Try(size=size, outcome=outcome, sent=sent, seconds=took))
        if took > 0 and sent > 1_000_000:
            self._rate = sent / took
        told = "" if exchange is None or outcome == "accepted" else f": {reason(exchange.reply)}"
        self._say(f"a body of {format_size(size)} ({size}): {outcome} in {format_duration(took)}{told}")
        return outcome, exchange


def _outcome(exchange: Exchange | None, size: int) -> _Outcome:
    if exchange is None:
        return "broke"
    reply = exchange.reply
    if isinstance(reply, Answer):
        if reply.status in STORED and reply.sent >= size:
            return "accepted"
        if is_size_refusal(exchange.request, reply):
            return "refused"
        if is_html(reply):
            return "broke"  # whatever stands before the registry did not let it through, and smaller ones it did
        if reply.status in (401, 403):
            raise AuthError(error_for(exchange.request, reply).message, status=reply.status)
        if not is_retryable(reply) and reply.status not in STORED:
            raise error_for(exchange.request, reply)
    return "broke"
