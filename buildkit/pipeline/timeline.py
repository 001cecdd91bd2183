"""What happened to each blob and when, for the report: a display that also takes notes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from buildkit.progress import Display, remark
from buildkit.registry.events import (
    BytesAcknowledged,
    Event,
    LimitFound,
    Restarted,
    Resumed,
    Retrying,
    UploadFailed,
    UploadFinished,
    UploadSkipped,
    UploadStarted,
)
from buildkit.registry.secrets import forms, masked
from buildkit.report import TimelineEvent

MAX_EVENTS = 5000
"""Kept of one push. An image of 100 GB in chunks of 95 MB makes about a thousand acknowledgements."""


class Recorder:
    """Passes everything on to ``shown``; ``events`` are the notes of one push, in seconds after it began.

    What else is uploaded (the evidence, small and many) is not noted, and shown only where it has trouble.

    ``secrets`` are kept out of all that is said, and by ``masked`` out of the report: a build, or an image that is
    started, may print whatever it has got hold of.
    """

    def __init__(
        self, shown: Display, clock: Callable[[], float] = time.monotonic, *, secrets: Iterable[str] = ()
    ) -> None:
        self._shown = shown
        self._secrets = forms(secrets)
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._events: list[TimelineEvent] = []
        self._noting = False
        self.dropped = 0

    @contextlib.contextmanager
    def push(self) -> Iterator[None]:
        """While a push runs: its events are noted, and their clock starts now."""
        self._began = self._clock()
        self._noting = True
        try:
            yield
        finally:
            self._noting = False
            if self.dropped:
                self.say(f"note: {self.dropped} events of this push are not in the report's timeline")

    @property
    def events(self) -> tuple[TimelineEvent, ...]:
        with self._lock:
            return tuple(self._events)

    def notify(self, event: Event, /) -> None:
        if not self._noting:
            if isinstance(event, Retrying | Restarted | LimitFound | UploadFailed):
                self._show(lambda: self._shown.notify(event))
            return
        note = self._note(event)
        if note is not None:
            with self._lock:
                if len(self._events) < MAX_EVENTS:
                    self._events.append(note)
                else:
                    self.dropped += 1
        self._show(lambda: self._shown.notify(event))

    def say(self, text: str) -> None:
        self._show(lambda: self._shown.say(masked(text, self._secrets)))

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        self._shown.__exit__(*what)

    def masked(self, value: Any) -> Any:
        """A JSON value without the secrets."""
        if not self._secrets:
            return value
        match value:
            case str():
                return masked(value, self._secrets)
            case Mapping():
                return {self.masked(name): self.masked(item) for name, item in value.items()}
            case list() | tuple():
                return [self.masked(item) for item in value]
        return value

    @staticmethod
    def _show(call: Callable[[], object]) -> None:
        """A log that is full, or that nobody reads any more, ends no push: the report tells all the same."""
        with contextlib.suppress(OSError):
            call()

    def _note(self, event: Event) -> TimelineEvent | None:
        at = round(self._clock() - self._began, 3)
        text = remark(event) or ""
        match event:
            case UploadStarted(blob=blob, size=size):
                return TimelineEvent(at=at, blob=blob, event="started", size=size, text=text)
            case BytesAcknowledged(blob=blob, offset=offset, size=size, sent=sent, seconds=seconds):
                return TimelineEvent(
                    at=at,
                    blob=blob,
                    event="acknowledged",
                    offset=offset,
                    size=size,
                    sent=sent,
                    seconds=round(seconds, 3),
                    text=text,
                )
            case Retrying(blob=blob, wait=wait):
                return TimelineEvent(at=at, blob=blob, event="retrying", seconds=round(wait, 3), text=text)
            case Resumed(blob=blob, offset=offset):
                return TimelineEvent(at=at, blob=blob, event="resumed", offset=offset, text=text)
            case Restarted(blob=blob):
                return TimelineEvent(at=at, blob=blob, event="restarted", offset=0, text=text)
            case LimitFound(blob=blob, refused=refused):
                return TimelineEvent(at=at, blob=blob, event="limit", size=refused, text=text)
            case UploadFinished(blob=blob, size=size, seconds=seconds):
                return TimelineEvent(
                    at=at, blob=blob, event="finished", offset=size, size=size, seconds=round(seconds, 3), text=text
                )
            case UploadFailed(blob=blob):
                return TimelineEvent(at=at, blob=blob, event="failed", text=text)
            case UploadSkipped(blob=blob, size=size):
                return TimelineEvent(at=at, blob=blob, event="skipped", size=size, text=text)
        return None
