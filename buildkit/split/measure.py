"""Reads a layer tar once: takes stock of it, compresses it atom by atom into the spool, and foresees its parts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from buildkit.image.compress import Codec, Readable, Segment, compress_segment
from buildkit.image.tarspan import TarReader
from buildkit.split.feed import Buffers, Place, Raw, feed
from buildkit.split.forecast import Forecast, Foreseen
from buildkit.split.inventory import Inventory
from buildkit.split.planner import Budget
from buildkit.split.spool import Spool
from buildkit.split.store import Recipe, Store

MAX_QUEUED = 12
"""Segments in work at once at most, each of up to the codec's segment size, twice (input and output)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A layer that was read to its end: its store, and the parts that were foreseen, by recipe."""

    store: Store
    foreseen: dict[Recipe, Foreseen]
    tar_size: int


def measure(
    tar: Readable,
    *,
    where: str,
    codec: Codec,
    budget: Budget,
    pool: Executor,
    threads: int,
    spool: Spool,
    progress: Callable[[int], object] = lambda _: None,
) -> Measured:
    """Read ``tar`` to its end. ``progress`` is told the bytes of each piece that was read.

    Raises FormatError with the offset for a tar that does not parse, StorageError where the spool cannot grow.
    """
    reader = TarReader(tar, where=where)
    inventory = Inventory(where=where)
    store = Store(spool, codec, inventory, reader.globals)
    consumer = _Consumer(store, budget, min(threads + 2, MAX_QUEUED))

    def emit(raw: Raw, place: Place) -> None:
        size = len(raw)  # the consumer may have given the buffer back by the time that put returns
        consumer.put(_Item(future=pool.submit(compress_segment, codec, raw), raw=raw, place=place))
        progress(size)

    try:
        feed(reader, inventory, codec, budget, emit, consumer.buffers)
    except BaseException:
        consumer.abandon()
        raise
    foreseen = consumer.finish()
    extra = reader.finish()
    progress(extra)
    return Measured(store=store, foreseen=foreseen, tar_size=reader.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    future: Future[Segment]
    raw: Raw
    place: Place


class _Consumer:
    """Takes the segments in order, in a thread of its own: into the spool, into the atom table, into the forecast."""

    def __init__(self, store: Store, budget: Budget, depth: int) -> None:
        self._store = store
        self._forecast = Forecast(store, budget)
        self._queue: queue.Queue[_Item | None] = queue.Queue(depth)
        self.buffers = Buffers(depth + 2)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="split-consumer", daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        self._queue.put(item)
        if self._error is not None:
            raise self._error

    def finish(self) -> dict[Recipe, Foreseen]:
        self._stop()
        if self._error is not None:
            raise self._error
        return self._forecast.finish()

    def abandon(self) -> None:
        self._error = self._error or RuntimeError("abandoned")
        self._stop()

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                # Waited for even after a failure: the worker may still be reading from the buffer.
                segment = item.future.result()
                if self._error is None:
                    self._take(item, segment)
            except BaseException as error:
                self._error = self._error or error
            finally:
                if isinstance(item.raw, memoryview):
                    self.buffers.give(item.raw)

    def _take(self, item: _Item, segment: Segment) -> None:
        table, place, forecast = self._store.table, item.place, self._forecast
        if place.opens:
            atom = table.open(place.first, place.first + 1 if place.stop is None else place.stop)
            if place.stop is not None:
                forecast.whole(atom, segment, item.raw, place.follows)
                return
            forecast.begin(atom, place.atom_input)
        forecast.more(segment, item.raw)
        if place.stop is not None:
            forecast.end()
