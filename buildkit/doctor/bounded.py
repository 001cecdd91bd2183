"""Calls that have no time-out of their own, in bounded time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Late(Exception):
    """It did not end in time. Its thread is left to itself, and does not hold up the end of the process."""


class Running(Generic[T]):
    """``function`` in a thread of its own, once ``start`` was called."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._value: list[T] = []
        self._error: BaseException | None = None
        # Not the thread's own end: Python 3.11 takes a thread for ended once Ctrl-C has interrupted a wait for it.
        self._done = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="doctor").start()

    def _run(self) -> None:
        try:
            self._value.append(self._function())
        except BaseException as error:  # it is raised where the result is asked for
            self._error = error
        finally:
            self._done.set()

    def result(self, seconds: float) -> T:
        """What the function returned or raised; ``Late`` if it is not done within ``seconds``."""
        if not self._done.wait(seconds):
            raise Late
        if self._error is not None:
            raise self._error
        return self._value[0]


def within(seconds: float, function: Callable[[], T]) -> T:
    """``function()``, or ``Late`` after ``seconds``."""
    work = Running(function)
    work.start()
    return work.result(seconds)
