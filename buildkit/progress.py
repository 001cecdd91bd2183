"""What a person sees while something long runs: a live table on a terminal, heartbeat lines elsewhere, or nothing.

All of it goes to standard error; standard output belongs to results. A display is an ``Observer`` of uploads, and takes
one-line remarks from everything else. The figures count what a registry acknowledged.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from buildkit.errors import one_line
from buildkit.registry.events import (
    BytesAcknowledged,
    Event,
    JournalFailed,
    LimitFound,
    QuirkMet,
    Restarted,
    Resumed,
    Retrying,
    UploadFailed,
    UploadFinished,
    UploadSkipped,
    UploadStarted,
    WaitingForPeer,
)
from buildkit.units import format_duration, format_rate, format_size

HEARTBEAT = 15.0
"""Seconds between two lines about one blob: often enough that no CI runner takes the job for hung."""


class Display(Protocol):
    """Safe for use from several threads; a context manager that owns the terminal while it is open."""

    def notify(self, event: Event, /) -> None: ...

    def say(self, text: str) -> None:
        """One line about what happens now."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def display(*, quiet: bool, stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> Display:
    """The display that fits: nothing for ``quiet``, a live table on a terminal, lines in CI and in files."""
    out = sys.stderr if stream is None else stream
    if quiet:
        return Quiet()
    if out.isatty() and not environ.get("CI") and environ.get("TERM") != "dumb":
        return Live(out)
    return Lines(out)


def remark(event: Event) -> str | None:
    """What an event says to people, if it is worth a line of its own."""
    match event:
        case Retrying(reason=reason, wait=wait, left=left):
            return f"{reason}; trying again in {format_duration(wait)} ({left} left)"
        case Resumed(offset=offset, earlier_run=True):
            return f"goes on at {format_size(offset)}, where an earlier push had come to"
        case Resumed(offset=offset):
            return f"goes on at {format_size(offset)}"
        case Restarted(reason=reason, lost=lost):
            return f"starts again: {reason}" + (f" ({format_size(lost)} to send again)" if lost else "")
        case LimitFound(refused=refused, chunk=chunk, who=who):
            return f"{who} refused {format_size(refused)}; going on with chunks of {format_size(chunk)}"
        case QuirkMet(quirk=quirk):
            return f"registry quirk: {quirk}"
        case WaitingForPeer():
            return "another push is uploading this blob; waiting for it"
        case JournalFailed(reason=reason):
            return f"this push could not be resumed after a crash: {reason}"
        case UploadSkipped(why="exists", size=size):
            return f"already there ({format_size(size)})"
        case UploadSkipped(why=why, size=size):
            return f"{why} ({format_size(size)})"
        case UploadFinished(size=size, seconds=seconds):
            return f"done: {format_size(size)} in {format_duration(seconds)}, {format_rate(size, seconds)}"
        case UploadFailed(reason=reason):
            return f"failed: {reason}"
    return None


def inert(line: str) -> str:
    """``line`` as no runner takes it for a command to itself.

    Runners read commands from what steps print: ``::name ...::`` at a line's beginning, ``##[name]`` anywhere in it
    (GitHub, "Workflow commands"). Gitea's heed ``set-env`` and ``add-path``, with which whoever prints a line, such as
    a program that a build has fetched, would decide what later steps run.
    """
    line = line.replace("##[", "## [")
    return f"| {line}" if line.lstrip().startswith("::") else line


class Quiet:
    """Shows nothing."""

    def notify(self, event: Event, /) -> None:
        del event

    def say(self, text: str) -> None:
        del text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@dataclass(slots=True)
class _Row:
    offset: int = 0
    size: int | None = None
    started: float = 0.0
    first: int = 0  # the offset at the start: what an earlier run had sent is not counted in the rate


class Lines:
    """A line for each thing worth one, and every ``HEARTBEAT`` seconds one for each blob under way."""

    def __init__(self, stream: TextIO, heartbeat: float = HEARTBEAT) -> None:
        self._stream = stream
        self._heartbeat = heartbeat
        self._rows: dict[str, _Row] = {}
        self._last = ""
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = time.monotonic()

    def notify(self, event: Event, /) -> None:
        with self._lock:
            match event:
                case UploadStarted(blob=blob, size=size):
                    self._rows[blob] = _Row(size=size, started=time.monotonic())
                case BytesAcknowledged(blob=blob, offset=offset, size=size):
                    row = self._rows.setdefault(blob, _Row(started=time.monotonic()))
                    row.offset, row.size = offset, size if size is not None else row.size
                case Resumed(blob=blob, offset=offset):
                    row = self._rows.setdefault(blob, _Row(started=time.monotonic()))
                    row.offset = row.first = offset
                case UploadFinished(blob=blob) | UploadSkipped(blob=blob) | UploadFailed(blob=blob):
                    self._rows.pop(blob, None)
            text = remark(event)
            if text:
                self._print(f"{event.blob}: {text}")

    def say(self, text: str) -> None:
        with self._lock:
            self._last = text
            self._print(text)

    def beat(self) -> None:
        """The heartbeat's lines, now."""
        with self._lock:
            now = time.monotonic()
            for blob, row in self._rows.items():
                self._print(f"{blob}: {_standing(row, now)}")
            if not self._rows:
                self._print(f"… {self._last} ({format_duration(now - self._began)})")

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._heartbeat):
            self.beat()

    def _print(self, text: str) -> None:
        print(inert(one_line(text)), file=self._stream, flush=True)


def _standing(row: _Row, now: float) -> str:
    seconds = now - row.started
    moved = row.offset - row.first
    text = format_size(row.offset)
    if row.size is not None:
        text += f" of {format_size(row.size)}"
    if moved and seconds > 0:
        text += f", {format_rate(moved, seconds)}"
        if row.size is not None:
            text += f", {format_duration((row.size - row.offset) * seconds / moved)} left"
    return f"{text} acknowledged"


class Live:
    """One row per blob: bar, acknowledged bytes, rate and time left; remarks scroll above."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, stderr=stream is sys.stderr)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[standing]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._rows: dict[str, _Row] = {}
        self._lock = threading.Lock()

    def notify(self, event: Event, /) -> None:
        with self._lock:
            row = self._rows.setdefault(event.blob, _Row(started=time.monotonic()))
            match event:
                case UploadStarted(size=size):
                    row.size, row.started = size, time.monotonic()
                case BytesAcknowledged(offset=offset, size=size):
                    row.offset, row.size = offset, size if size is not None else row.size
                case Resumed(offset=offset):
                    row.offset = row.first = offset
                case Restarted():
                    row.offset = row.first = 0
                case UploadFinished(size=size):
                    row.offset = row.size = size
                case UploadSkipped(size=size):
                    row.offset = row.size = row.first = size
            if event.blob not in self._tasks:
                self._tasks[event.blob] = self._progress.add_task(event.blob, total=row.size, standing="")
            self._progress.update(
                self._tasks[event.blob],
                completed=row.offset,
                total=row.size,
                standing=_standing(row, time.monotonic()),
            )
            text = remark(event)
            if text and not isinstance(event, UploadFinished):
                self._progress.console.print(f"{event.blob}: {one_line(text)}", markup=False, highlight=False)

    def say(self, text: str) -> None:
        self._progress.console.print(one_line(text), markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
