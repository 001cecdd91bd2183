"""One request at a time on the device, a bounded queue before it, and no more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_ASK_EVERY = 0.25
"""Seconds between two looks at whether the client is still there."""


class BusyError(Exception):
    """As many requests wait as may."""


class Turns:
    """Runs work in one thread, in the order it came; ``waiting`` more may queue behind the one that runs."""

    def __init__(self, waiting: int) -> None:
        self._limit = waiting + 1
        self._taken = 0
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    @property
    def taken(self) -> int:
        """Requests that run or wait."""
        return self._taken

    @property
    def limit(self) -> int:
        return self._limit

    async def run(self, work: Callable[[threading.Event], T], gone: Callable[[], Awaitable[bool]]) -> T:
        """The result of ``work``, which gets an event that is set once nobody waits (``gone``, or cancellation).

        Raises BusyError at once where the queue is full. A place is given back when the work has ended, not when its
        client has left: the device is busy until then.
        """
        if self._taken >= self._limit:
            raise BusyError
        cancelled = threading.Event()
        loop = asyncio.get_running_loop()
        self._taken += 1
        try:
            future = loop.run_in_executor(self._executor, work, cancelled)
        except RuntimeError:
            self._taken -= 1
            raise BusyError from None  # shutting down
        future.add_done_callback(self._give_back)
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=_ASK_EVERY)
                if not future.done() and await gone():
                    cancelled.set()
            return future.result()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def close(self) -> None:
        """Drop what waits and return when what runs has ended."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _give_back(self, future: asyncio.Future[T]) -> None:
        self._taken -= 1
        if not future.cancelled():
            future.exception()  # taken note of, also where nobody awaits it any more
