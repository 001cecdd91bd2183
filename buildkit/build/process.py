"""Run one long program: its lines as they come, a time-out of our own, and nothing left running afterwards."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from buildkit.errors import EngineError, MissingComponentError
from buildkit.units import format_duration

HEARTBEAT_SECONDS = 60.0
"""A step that is silent for so long gets a line of ours: CI systems end jobs that print nothing."""
_GRACE_SECONDS = 15.0
_LONGEST_LINE = 2000
_READ = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How it ended: exit code (negative: by that signal), and the last lines that were not empty."""

    code: int
    tail: tuple[str, ...]


def run(
    arguments: Sequence[str],
    *,
    say: Callable[[str], None],
    timeout: float,
    environment: Mapping[str, str],
    what: str,
) -> Ended:
    """Run the program to its end; ``say`` gets each line of its output, errors included.

    After ``timeout`` seconds, and when interrupted, it is ended with all its children: EngineError, or the exception.
    """
    try:
        process = subprocess.Popen(
            list(arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        raise MissingComponentError(f"{arguments[0]} cannot be started: {error.strerror}") from error
    assert process.stdout is not None
    lines = _Lines(say)
    started = time.monotonic()
    deadline = started + timeout
    with process.stdout, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise EngineError(
                        f"{what} took longer than {format_duration(timeout)} and was ended",
                        hint="build.timeout of the recipe, or --timeout, allows more",
                    )
                if selector.select(min(left, HEARTBEAT_SECONDS)):
                    data = os.read(process.stdout.fileno(), _READ)
                    if not data:
                        break
                    lines.feed(data)
                else:
                    say(f"{what}: still running after {format_duration(time.monotonic() - started)}")
            lines.end()
            # The output is closed; a child that goes on without it has the rest of the time.
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise EngineError(f"{what} took longer than {format_duration(timeout)} and was ended") from error
        except BaseException:
            _end(process, selector)
            raise
    return Ended(code=code, tail=lines.tail)


class _Lines:
    """Cuts bytes into printable lines; a carriage return ends one too, as progress bars use it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._rest = b""
        self.tail: tuple[str, ...] = ()

    def feed(self, data: bytes) -> None:
        parts = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = parts.pop()
        if len(self._rest) > _READ:  # no line: do not collect it
            parts.append(self._rest)
            self._rest = b""
        for part in parts:
            self._line(part)

    def end(self) -> None:
        self._line(self._rest)
        self._rest = b""

    def _line(self, raw: bytes) -> None:
        text = "".join(c if c.isprintable() else " " for c in raw.decode("utf-8", "replace")).rstrip()[:_LONGEST_LINE]
        if text:
            self.tail = (*self.tail[-9:], text)
            self._say(text)


def _end(process: subprocess.Popen[bytes], selector: selectors.BaseSelector) -> None:
    """End the program and all of its group: ask, wait until nobody holds its output any more, then force.

    It is only waited for after the last signal: until then the kernel keeps the group's number for us.
    """
    assert process.stdout is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := deadline - time.monotonic()) > 0 and selector.select(left):
        if not os.read(process.stdout.fileno(), _READ):
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
